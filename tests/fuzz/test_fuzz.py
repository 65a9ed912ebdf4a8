"""The fuzzer in a test run: recorded seeds, some seconds of fresh ones, defects it must find, and its own parts."""

import random
import time
from dataclasses import replace

import numpy as np
import pytest

from tests.fuzz.__main__ import SEEDS, shrink
from tests.fuzz.cases import Ask, Case, Model, draw  # noqa: F401 - the names of a printed case
from tests.fuzz.drive import failure_of
from tests.fuzz.mutations import MUTATIONS
from tests.parallel.workers import WorkerPool

FRESH_S = {range(1, 2): 6.0, range(2, 5): 6.0}


@pytest.mark.parametrize(("seed", "ranks"), np.loadtxt(SEEDS, int, ndmin=2).tolist())
def test_recorded_seed(seed: int, ranks: int, workers: WorkerPool) -> None:
    failure = failure_of(draw(seed, ranks), workers if ranks > 1 else None)
    assert failure is None, failure


@pytest.mark.parametrize("ranks", FRESH_S, ids=str)
def test_fresh_seeds(ranks: range, workers: WorkerPool, capsys: pytest.CaptureFixture[str]) -> None:
    first = seed = random.SystemRandom().randrange(2**32)
    end_s = time.monotonic() + FRESH_S[ranks]
    while time.monotonic() < end_s:
        world = ranks[seed % len(ranks)]
        failure = failure_of(draw(seed, world), workers if world > 1 else None)
        again = f"python -m tests.fuzz --runs 1 --first {seed} --ranks {world}"
        assert failure is None, f"{failure}\nto repeat and shrink it: {again}"
        seed += 1
    with capsys.disabled():
        print(f"\nfuzz: seeds {first} to {seed - 1} on {ranks} ranks")


@pytest.mark.parametrize("name", MUTATIONS)
def test_defect_is_found(name: str, workers: WorkerPool) -> None:
    """By the seed of which that is known, or by one behind it."""
    first, ranks = MUTATIONS[name].shown_by, MUTATIONS[name].ranks
    cases = (draw(seed, ranks) for seed in range(first, first + 100))
    failures = (failure_of(case, workers if ranks > 1 else None, mutation=name) for case in cases)
    failure = next(filter(None, failures), None)
    assert failure is not None
    assert failure.kind not in ("AttributeError", "TypeError", "NameError"), f"it does not fit the code: {failure}"


def test_a_seed_draws_the_same_again() -> None:
    assert draw(7, 4) == draw(7, 4) != draw(8, 4)


def test_instances_are_drawn_beside_what_was_drawn_before() -> None:
    """The seeds by which defects show are without them."""
    assert not any(draw(one.shown_by, one.ranks).decode[0] for one in MUTATIONS.values())
    cases = [draw(seed, 4) for seed in range(200)]
    instances = [case for case in cases if case.decode[0]]
    assert 20 < len(instances) < 80 and all(case.world == 4 for case in cases)
    assert {case.options["scheduler"] for case in instances} == {"medha", "cdsp"}
    assert {case.decode for case in instances} >= {(1, 1), (1, 2), (2, 1), (3, 1)}


def test_shrinking_leaves_what_fails() -> None:
    case = replace(
        draw(3, 4), asks=(Ask(9), Ask(30, params={"temperature": 0.0, "logprobs": 1, "max_tokens": 7}), Ask(2))
    )
    small = shrink(case, lambda case: any(ask.params.get("logprobs") for ask in case.asks), limit_s=60.0)
    assert small.world == 1 and not small.options
    assert small.asks == (Ask(1, params={"temperature": 0.0, "logprobs": 1, "max_tokens": 1}),)
    assert eval(repr(small)) == small  # as which it is printed
