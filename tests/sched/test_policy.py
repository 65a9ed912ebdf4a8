"""Policies against plain Python, the order against brute force, and what becomes of a policy that is wrong."""

import math
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, strategies as st

from medha.errors import ConfigError, PolicyError
from medha.sched.policy import BUILT_IN, Columns, Floats, Ints, Policy, Ranking, keys_of, load_policy, sort_rows
from tests.commands import ENVIRONMENT, run_python


@dataclass(frozen=True)
class Waiting:
    """One request, as plain Python sees it."""

    arrival_s: float = 0.0
    deadline_s: float = 1.0
    work_total_s: float = 1.0
    work_left_s: float = 1.0
    num_prompt_tokens: int = 100
    num_computed_tokens: int = 0
    priority: int = 2


def columns_of(requests: list[Waiting]) -> Columns:
    def column(name: str) -> np.ndarray:
        dtype = np.float64 if name.endswith("_s") else np.int64
        return np.array([getattr(request, name) for request in requests], dtype)

    return Columns(**{name: column(name) for name in Columns.__dataclass_fields__})


def order(ranking: Ranking, columns: Columns, now_s: float = 0.0) -> Ints:
    """As that of a queue of one tenant, of whose requests none is relegated, with ascending slots."""
    before = [columns.priority] * ranking.by_class
    return sort_rows((*before, keys_of(ranking, columns, now_s), columns.arrival_s))


# -- formulas --------------------------------------------------------------------------------------------------


def plain_slack(r: Waiting, now_s: float) -> float:
    return r.arrival_s + r.deadline_s - now_s - r.work_left_s


PLAIN: dict[str, Callable[[Waiting, float], float]] = {
    "fcfs": lambda r, now_s: r.arrival_s,
    "sjf": lambda r, now_s: r.work_total_s,
    "srpt": lambda r, now_s: r.work_left_s,
    "edf": lambda r, now_s: r.arrival_s + r.deadline_s,
    "lrs": plain_slack,
    "ilrs": lambda r, now_s: plain_slack(r, now_s) / r.deadline_s,
    "lars": lambda r, now_s: plain_slack(r, now_s) / r.work_total_s,
}


TIMES, LENGTHS = st.floats(0, 1e5), st.floats(1e-3, 1e5)
ANY = st.builds(Waiting, arrival_s=TIMES, deadline_s=LENGTHS, work_total_s=LENGTHS, work_left_s=TIMES)


@given(st.lists(ANY, max_size=8), st.floats(0, 2e5))
def test_keys_are_those_of_plain_python(requests: list[Waiting], now_s: float) -> None:
    assert list(BUILT_IN) == list(PLAIN)
    for name, plain in PLAIN.items():
        keys = BUILT_IN[name](columns_of(requests), now_s)
        np.testing.assert_allclose(keys, [plain(r, now_s) for r in requests], rtol=1e-9, atol=1e-6, err_msg=name)


@pytest.mark.parametrize("name", BUILT_IN)
def test_no_work_and_no_deadline_give_keys_without_nan(name: str) -> None:
    requests = [
        Waiting(work_total_s=0.0, work_left_s=0.0),
        Waiting(work_total_s=0.0, work_left_s=0.0, deadline_s=5.0, arrival_s=-5.0),  # its slack is 0
        Waiting(deadline_s=math.inf),
        Waiting(deadline_s=1e300, work_total_s=0.0),
        Waiting(deadline_s=5e-324, arrival_s=-1e9),
    ]
    with np.errstate(all="raise"):
        keys = BUILT_IN[name](columns_of(requests), 0.0)
    assert not np.isnan(keys).any()


# -- the order -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(40))
def test_of_many_the_first_are_those_of_sorting_all(seed: int) -> None:
    """Classes, of which the first may be rare or alone; keys that tie, infinite ones too; some rows, few, none, all."""
    random = np.random.default_rng(seed)
    count = int(random.integers(1, 6000 if seed % 4 else 40))
    classes = (random.random(count) < random.choice([0.001, 0.05, 0.9, 1.0])).astype(np.int64)
    own, few = random.random(count), random.choice([-np.inf, -0.0, 0.0, 1.0, np.inf], count)
    kinds = [own, np.ones(count), few, np.sort(random.random(count))]
    by = (classes, *(kinds[i] for i in random.integers(0, 4, 2)), random.permutation(count))
    for among in (None, random.random(count) < 0.02, random.random(count) < 0.9, np.arange(count) % 8 > 3):
        rows = np.arange(count) if among is None else np.flatnonzero(among)
        expected = rows[np.lexsort([column[rows] for column in reversed(by)])]
        for first in (None, 0, 1, 3, 64, 500, count, 2 * count):
            assert sort_rows(by, first=first, among=among).tolist() == expected[:first].tolist(), (first, count)


# -- policies that are wrong -----------------------------------------------------------------------------------


def nan_at(*rows: int) -> Policy:
    return lambda columns, now_s: np.where(np.isin(columns.arrival_s, rows), np.nan, 0.0)


def fails_on_4(columns: Columns, now_s: float) -> Floats:
    if 4.0 in columns.arrival_s:
        raise KeyError("no such tenant")
    return columns.arrival_s


def writes(columns: Columns, now_s: float) -> Floats:
    columns.work_left_s[0] = 0.0
    return columns.work_left_s


KEYS = "accepted: float64 of shape (10,)"


@pytest.mark.parametrize(
    ("policy", "fault"),
    [
        (nan_at(*range(2, 9)), "ValueError: 7 of 10 keys are NaN"),
        (fails_on_4, "KeyError: 'no such tenant'"),
        (writes, "ValueError: assignment destination is read-only"),
        (lambda columns, now_s: np.zeros(len(columns) + 1), f"TypeError: returned float64 of shape (11,); {KEYS}"),
        (lambda columns, now_s: np.float64(0.0), f"TypeError: returned float64; {KEYS}"),
        (lambda columns, now_s: columns.priority, f"TypeError: returned int64 of shape (10,); {KEYS}"),
        (lambda columns, now_s: None, f"TypeError: returned NoneType; {KEYS}"),
    ],
)
def test_what_a_policy_does_wrong_is_named(policy: Callable[[Columns, float], Any], fault: str) -> None:
    requests = [Waiting(arrival_s=float(i)) for i in range(10)]
    with pytest.raises(PolicyError) as caught:
        order(Ranking("mine", policy, by_class=True), columns_of(requests))
    assert caught.value.policy == "mine" and str(caught.value) == f"policy mine: {fault}"


# -- by name ---------------------------------------------------------------------------------------------------


@pytest.fixture
def modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "mine"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "good.py").write_text("def newest(columns, now_s):\n    return -columns.arrival_s\n")
    (package / "needy.py").write_text("import no_such_package_at_all\n")
    monkeypatch.syspath_prepend(tmp_path)


@pytest.mark.usefixtures("modules")
@pytest.mark.parametrize(("spec", "rows"), [("mine.good:newest", [2, 1, 0]), ("priority:mine.good:newest", [0, 2, 1])])
def test_a_policy_of_the_users_loads_from_its_module(spec: str, rows: list[int]) -> None:
    ranking = load_policy(spec)
    requests = [Waiting(arrival_s=0.0, priority=0), Waiting(arrival_s=1.0), Waiting(arrival_s=2.0)]
    assert ranking.name == spec
    assert order(ranking, columns_of(requests)).tolist() == rows


def test_a_function_is_taken_as_it_is() -> None:
    assert load_policy(fails_on_4) == Ranking(f"{__name__}:fails_on_4", fails_on_4)


ACCEPTED = "accepted: edf, fcfs, ilrs, lars, lrs, sjf, srpt, priority, priority:NAME or package.module:name"


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("larz", f"policy='larz'; {ACCEPTED}; did you mean lars?"),
        ("", f"policy=''; {ACCEPTED}"),
        ("priority:priority:edf", "policy='priority:priority:edf'; accepted: priority once"),
        (3, f"policy=3; {ACCEPTED}, or a function of (columns, now_s)"),
        ("mine.good:newst", "policy='mine.good:newst': mine.good has no function 'newst'; did you"),
        ("mine.good:x", "mine.good has no function 'x' (<module 'mine.good' from '"),
        ("mine.needy:x", "cannot import 'mine.needy': ModuleNotFoundError: No module named 'no_such_pack"),
        (":x", "policy=':x': cannot import '': ValueError: Empty module name"),
    ],
)
@pytest.mark.usefixtures("modules")
def test_a_name_that_does_not_load_is_a_config_error(spec: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_policy(spec)
    assert message in str(caught.value)


def test_a_column_that_there_is_not_is_named_with_those_there_are() -> None:
    """When the policy is loaded, and where it is asked for later."""

    def late(columns: Columns, now_s: float) -> Floats:
        return columns.arrival_s if len(columns) == 1 else columns.slack_s

    message = "no column 'slack_s'; accepted: arrival_s, deadline_s, work_total_s, work_left_s, num_"
    with pytest.raises(ConfigError, match=rf"^policy .*<lambda>: {message}"):
        load_policy(lambda columns, now_s: columns.slack_s)  # type: ignore[attr-defined]
    with pytest.raises(PolicyError, match=f"AttributeError: {message}"):
        order(load_policy(late), columns_of([Waiting(), Waiting()]))


def test_keys_of_another_type_are_found_when_the_policy_is_loaded() -> None:
    """A key that is not a number may be one of other requests."""
    with pytest.raises(ConfigError, match=r"<lambda>: returned list; accepted: float64 of shape \(1,\)$"):
        load_policy(lambda columns, now_s: columns.arrival_s.tolist())  # type: ignore[arg-type, return-value]
    load_policy(lambda columns, now_s: np.full(len(columns), np.nan))


START = "import sys; from medha.sched.policy import load_policy; path = list(sys.path)\n"
LOAD = "print(load_policy('own:newest').name, sys.path == path)"


PASS_ON = "import sys; from medha.child.process import popen_module; sys.exit(popen_module(['script']).wait())"


@pytest.mark.parametrize("name", ["script", "starts_it"])
@pytest.mark.parametrize(("flags", "is_found"), [(["-P"], False), ([], True)])
def test_a_policy_in_the_current_folder_is_found_as_python_m_finds_it(
    tmp_path: Path, flags: list[str], is_found: bool, name: str
) -> None:
    """An installed command has its own folder first on the path, and not the current one; so has this script. A rank
    that it starts finds what it finds itself."""
    (tmp_path / "here").mkdir()
    (tmp_path / "here" / "own.py").write_text("def newest(columns, now_s):\n    return -columns.arrival_s\n")
    (tmp_path / "script.py").write_text(START + LOAD)
    (tmp_path / "starts_it.py").write_text(PASS_ON)
    where = {"PYTHONPATH": os.pathsep.join([ENVIRONMENT["PYTHONPATH"], str(tmp_path)])}
    done = run_python(*flags, tmp_path / f"{name}.py", cwd=tmp_path / "here", **where)
    if is_found:
        assert (done.returncode, done.stdout) == (0, "own:newest True\n"), done.stderr
    else:
        assert "cannot import 'own': ModuleNotFoundError" in done.stderr
