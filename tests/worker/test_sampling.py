"""Sampling: exact distributions, draws that depend on the request alone, penalties, log-probabilities."""

import math
import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st

from medha.params import SamplingParams
from medha.worker import sampling
from medha.worker.sampling import Sampled, SlotSampling, draw, uniforms
from tests.engines import on_threads

VOCAB = 16
PEAKED = 5000  # a vocabulary of which few tokens are in a nucleus, and of which more than are sorted can be
FILTERS: list[dict[str, Any]] = [
    {},
    {"temperature": 0.5},
    {"temperature": 2.0},
    {"top_k": 1},
    {"top_k": 5},
    {"top_k": 100},
    {"top_p": 0.6},
    {"top_p": 1e-9},
    {"min_p": 0.15},
    {"top_k": 9, "top_p": 0.85},
    {"temperature": 0.7, "top_k": 10, "top_p": 0.95, "min_p": 0.05},
    {"temperature": 1.5, "top_p": 0.9, "min_p": 0.1},
]
MIXED: list[dict[str, Any]] = [
    *({"seed": seed, **params} for seed, params in enumerate(FILTERS)),
    {"seed": 3, "temperature": 0.0, "logprobs": 3},
    {"seed": 4, "min_tokens": 5, "end_ids": (1, 2), "logprobs": 0},
    {"seed": 5, "repetition_penalty": 1.3, "prompt": [1, 5, 9], "logprobs": 2},
    {"seed": 6, "frequency_penalty": 0.5, "presence_penalty": -0.5},
    {"seed": 7, "logit_bias": {3: 2.0, 9: -100.0}, "allowed_token_ids": [1, 3, 9, 14]},
]


def sample(*args: Any) -> list[Sampled]:
    return draw(*args).read()


def slot(seed: int = 0, *, end_ids: tuple[int, ...] = (), prompt: Sequence[int] = (), **params: Any) -> SlotSampling:
    resolved = SamplingParams(**params).resolve({})
    prompt_ids = torch.tensor(prompt, dtype=torch.int32) if prompt else None
    return SlotSampling(resolved, seed, end_ids, len(prompt), prompt_ids)


def mixed_slots() -> list[SlotSampling]:
    return [slot(**params) for params in MIXED]


def logits_of(seed: int, rows: int = 1, vocab: int = VOCAB) -> torch.Tensor:
    return 1.5 * torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed))


def uniform(seed: int, index: int) -> float:
    return float(uniforms([seed], [index])[0])


def tokens(results: list[Sampled]) -> list[int]:
    return [result.token_id for result in results]


def filtered(logits_V: torch.Tensor, params: SamplingParams) -> np.ndarray:
    """The distribution that the parameters ask for, by the textbook: temperature, top-k, top-p, min-p."""
    scaled = logits_V.double().numpy() / params.temperature
    weights = np.exp(scaled - scaled.max())
    ranked = np.argsort(-weights)[: params.top_k if params.top_k > 0 else None]
    shares = weights[ranked] / weights[ranked].sum()
    if params.top_p < 1.0:  # the smallest set of the likeliest tokens that holds top_p of the mass
        ranked = ranked[shares.cumsum() - shares < params.top_p]
    ranked = ranked[weights[ranked] >= params.min_p * weights[ranked[0]]]
    kept = np.zeros_like(weights)
    kept[ranked] = weights[ranked]
    return kept / kept.sum()


# -- greedy and the distribution -------------------------------------------------------------------------------


@pytest.mark.parametrize("temperature", [0.0, 9e-6])
def test_greedy_takes_the_likeliest(temperature: float) -> None:
    logits = logits_of(1, 50)
    slots = [slot(i, temperature=temperature, top_k=3, top_p=0.5) for i in range(50)]
    assert tokens(sample(logits, slots, [7] * 50)) == logits.argmax(-1).tolist()
    assert sample(logits[:0], [], []) == []


def check_exact(logits: torch.Tensor, slots: list[SlotSampling], allowed: torch.Tensor | None = None) -> None:
    """Each row's token is the inverse of its distribution, in float64 and with a sort, of these logits or of what is
    allowed of them; within 1e-6 of a border either side is right."""
    drawn = tokens(sample(logits, slots, [0] * len(slots)))
    for row, one, token in zip(logits if allowed is None else allowed, slots, drawn, strict=True):
        wanted, number, right = one.params, uniform(one.seed, 0), set()
        nearby = {wanted.top_p, max(wanted.top_p - 1e-6, 1e-12), wanted.top_p + 1e-6} if wanted.top_p < 1.0 else {1.0}
        for top_p in nearby:
            edges = filtered(row, replace(wanted, top_p=top_p)).cumsum()
            right |= {int(np.searchsorted(edges, number + off, side="right")) for off in (-1e-6, 0.0, 1e-6)}
        assert token in right


@settings(max_examples=60, derandomize=True, deadline=None)
@given(
    seed=st.integers(0, 2**31),
    temperature=st.floats(0.1, 2.0),
    top_k=st.integers(-1, 20),
    top_p=st.floats(0.01, 1.0),
    min_p=st.floats(0.0, 1.0),
)
def test_exact_probabilities(seed: int, **params: Any) -> None:
    check_exact(logits_of(seed, 40), [slot(seed + row, **params) for row in range(40)])


@pytest.mark.parametrize("scale", [1.0, 4.0])
@pytest.mark.parametrize(
    "params", [*FILTERS, {"top_p": 0.9, "temperature": 0.6}, {"top_k": 3000, "top_p": 0.5}], ids=str
)
def test_exact_probabilities_of_flat_and_peaked_logits(params: dict[str, Any], scale: float) -> None:
    check_exact(scale * logits_of(5, 60, PEAKED), [slot(seed, **params) for seed in range(60)])


@pytest.mark.parametrize("params", [{}, {"top_k": 4}, {"top_p": 0.8}, {"min_p": 0.1}], ids=str)
@pytest.mark.parametrize("number", [0.0, 1 - 2**-53])
def test_the_ends_of_the_unit_interval(number: float, params: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sampling, "uniforms", lambda seeds, _: np.full(len(seeds), number))
    logits = logits_of(3, 20)
    for row, result in zip(logits, sample(logits, [slot(**params)] * 20, [0] * 20), strict=True):
        assert filtered(row, slot(**params).params)[result.token_id] > 0


@pytest.mark.parametrize("params", [{"top_k": 2}, {"top_p": 0.55}, {"min_p": 0.9}], ids=str)
def test_equal_tokens_stay_together(params: dict[str, Any]) -> None:
    logits = torch.zeros(1, VOCAB)
    logits[0, [2, 5, 11]] = 9.0
    drawn = tokens(sample(logits.expand(300, VOCAB), [slot(seed, **params) for seed in range(300)], [0] * 300))
    assert set(drawn) == {2, 5, 11}


# -- what a draw depends on ------------------------------------------------------------------------------------


@pytest.mark.parametrize("vocab", [300, 70_000])
def test_neither_company_nor_order_nor_threads_change_a_bit(vocab: int) -> None:
    """The larger is a size at which torch splits sums over threads."""
    num_rows, found = len(MIXED), []
    logits = 3.0 * logits_of(7, num_rows, vocab)
    before = logits.clone()
    for _ in on_threads(1, 2):
        for size in (1, 2, num_rows):
            slots, order = mixed_slots(), random.Random(size).sample(range(num_rows), num_rows)
            found.append(drawn := {})
            for turn, indices in enumerate((range(num_rows), [3] * num_rows)):  # the second behind first tokens
                for part in (order[first : first + size] for first in range(0, num_rows, size)):
                    results = sample(logits[part], [slots[row] for row in part], [indices[row] for row in part])
                    drawn |= {(turn, row): result for row, result in zip(part, results, strict=True)}
    assert all(drawn == found[0] for drawn in found)
    assert torch.equal(logits, before)


def test_uniform_is_fixed_for_all_time_and_takes_every_seed_and_index() -> None:
    # A request repeated with its seed draws the same tokens on every machine and in every release.
    assert uniform(0, 0) == 0.011546754286331562
    assert uniform(1234, 56789) == 0.354059630315015
    for seed in (-(2**63), -1, 0, 2**63 - 1):
        for index in (0, 10_000_000, 2**31):
            plain = np.random.Generator(np.random.Philox(key=seed % 2**64, counter=index))
            assert uniform(seed, index) == plain.random()
    assert uniform(-1, 0) != uniform(1, 0)


# -- min_tokens and penalties ----------------------------------------------------------------------------------


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_min_tokens_holds_end_ids_back(temperature: float) -> None:
    logits = torch.zeros(VOCAB)
    logits[3], logits[7], logits[9] = 20.0, 19.0, 12.0
    drawing = slot(temperature=temperature, min_tokens=4, end_ids=(3, 7), logprobs=0)
    drawn = sample(logits.expand(8, VOCAB), [drawing] * 8, range(8))
    assert tokens(drawn)[:4] == [9] * 4
    assert set(tokens(drawn)[4:]) <= {3, 7}
    assert drawn[0].logprobs[0][2] == 3  # of the model's own distribution


def test_bias_and_allowed_ids() -> None:
    """A bias is added behind the penalties; what is not allowed has no part in the filters; log-probabilities are of
    the model itself."""
    logits = logits_of(4)
    biased = logits.clone()
    biased[0, 3] += 2.5
    biased[0, [0, 2, *range(4, VOCAB)]] = -math.inf
    slots = [slot(seed, logit_bias={3: 2.5}, allowed_token_ids=[1, 3], top_p=0.9, logprobs=1) for seed in range(100)]
    check_exact(logits.expand(100, VOCAB), slots, biased.expand(100, VOCAB))
    best, (result,) = int(logits.argmax()), sample(logits, slots[:1], [0])
    assert result.logprobs[1][0] == best
    greedy = slot(temperature=0.0, logit_bias={best: -100.0})
    assert tokens(sample(logits, [greedy], [0])) == [int(logits.argsort(descending=True)[0, 1])]


def penalised(logits: np.ndarray, prompt: list[int], output: list[int], params: SamplingParams) -> np.ndarray:
    """Penalties by the textbook: repetition over prompt and output, the others over the output."""
    x, seen, counts = logits.copy(), [*{*prompt, *output}], np.bincount(np.array(output, int), minlength=VOCAB)
    x[seen] = np.where(x[seen] > 0, x[seen] / params.repetition_penalty, x[seen] * params.repetition_penalty)
    return x - params.frequency_penalty * counts - params.presence_penalty * (counts > 0)


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize(
    "params",
    [
        {"repetition_penalty": 1.4},
        {"repetition_penalty": 0.7},
        {"presence_penalty": 0.9},
        {"frequency_penalty": 0.4},
        {"frequency_penalty": -0.3, "presence_penalty": 1.2},
        {"repetition_penalty": 1.2, "frequency_penalty": 0.3, "presence_penalty": 0.2},
    ],
    ids=str,
)
def test_penalties_against_a_plain_reference(params: dict[str, Any], temperature: float) -> None:
    prompt = [2, 2, 5, 11]
    drawing = slot(9, prompt=prompt, temperature=temperature, **params)
    output: list[int] = []
    for index in range(40):
        logits = logits_of(index % 3)
        want = penalised(logits[0].double().numpy(), prompt, output, drawing.params)
        if temperature:  # the first token whose edge lies behind the number
            want = filtered(torch.from_numpy(want), drawing.params).cumsum() > uniform(9, index)
        output += tokens(sample(logits, [drawing], [index]))
        assert output[-1] == want.argmax()
    assert len(set(output)) > 1


# -- log-probabilities -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_top", [0, 1, 5, 20])
@pytest.mark.parametrize("params", [{"temperature": 0.0}, {"temperature": 0.3, "top_k": 4}, {"temperature": 2.0}])
def test_logprobs_are_of_the_model_itself(params: dict[str, Any], num_top: int) -> None:
    logits = logits_of(10, 25)
    reference = torch.log_softmax(logits.double(), dim=-1)
    results = sample(logits, [slot(i, logprobs=num_top, **params) for i in range(25)], range(25))
    for row, result in zip(reference, results, strict=True):
        ranked = sorted(enumerate(row.tolist()), key=lambda item: -item[1])
        entries = [(token, pytest.approx(logprob, abs=2e-6), rank) for rank, (token, logprob) in enumerate(ranked, 1)]
        drawn, *top = result.logprobs
        assert drawn[0] == result.token_id and drawn in entries
        assert top == entries[:num_top]


# -- logits that are not finite --------------------------------------------------------------------------------


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("everywhere", [True, False])
def test_a_row_that_is_not_finite_is_flagged_and_harms_nobody(everywhere: bool, bad: float) -> None:
    logits = logits_of(12, len(MIXED))
    indices = list(range(len(MIXED)))
    clean = sample(logits, mixed_slots(), indices)
    assert all(result.finite for result in clean)
    for victims in ([0], [3, 12, 13, 14, 15], indices):
        broken = logits.clone()
        for row in victims:
            broken[row, :: 1 if everywhere else VOCAB] = bad
        slots = mixed_slots()
        results = sample(broken, slots, indices)
        for row, result in enumerate(results):
            if row in victims:
                assert (result.finite, result.logprobs) == (False, None)
                history = slots[row].history
                assert history is None or not (history & (sampling._IN_PROMPT - 1)).any()
                assert 0 <= result.token_id < VOCAB
            else:
                assert result == clean[row]


@pytest.mark.parametrize("sign", [1, -1])
def test_finite_logits_whose_sum_is_not(sign: int) -> None:
    logits = torch.full((2, VOCAB), sign * 3e38)
    logits[:, 6] = 3.2e38
    slots = [slot(temperature=1.0, top_p=0.9), slot(temperature=0.0)]
    assert sample(logits, slots, [0, 0]) == [Sampled(6, finite=True, logprobs=None)] * 2  # none unless asked


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_the_smallest_repetition_penalty_of_large_logits(temperature: float) -> None:
    """Penalised logits past the largest float32 are that, and not infinite: their softmax is no NaN."""
    logits = torch.full((1, VOCAB), -1e36)
    logits[0, 3] = 1e36
    drawing = slot(temperature=temperature, repetition_penalty=1e-6, prompt=[3, 5])
    assert tokens(sample(logits, [drawing], [0])) == [3]


def test_allowed_ids_fill_each_row_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not once an id: with thousands of them a step would take as many times as long."""
    filled, put = list[int](), torch.Tensor.__setitem__

    def noted(x: torch.Tensor, at: Any, value: Any) -> None:
        filled.extend([len(x[at])] if value is True else ())
        put(x, at, value)

    monkeypatch.setattr(torch.Tensor, "__setitem__", noted)
    draw(torch.randn(3, 64), [slot(allowed_token_ids=list(range(50))), slot(), slot(allowed_token_ids=[3])], [0, 0, 0])
    assert filled == [2]
