"""The harness of the figures under load: what is played, what is told of it, what a variant of a system is."""

import math
from dataclasses import dataclass, replace

import numpy as np
import pytest

from examples.reproduce import load as harness
from examples.reproduce.figures.capacity import Capacity, capacity, stretches_s, sustains
from examples.reproduce.figures.fragmentation import active, demands, swing
from examples.reproduce.load import LONG_TOKENS, MIX, MIX_1, SHORT, Bounded, Load, Served, System, serve
from examples.reproduce.result import Options
from examples.reproduce.systems import EDF, FCFS, LARS, LOONGSERVE, LRS, MEDHA, SARATHI_2048, WHOLE
from examples.reproduce.timing import MODELS, kv_bytes, prefill_flops
from medha.workload.trace import Trace
from tests.reproduce import made_up

NEVER = math.nan


def served(
    arrival_s: list[float], ttft_s: list[float], *, prompt_tokens: list[int] | None = None, decode_s: float = 1.0
) -> Served:
    """A play in which each request decodes for so long, and NaN is a request without a first token."""
    count = len(arrival_s)
    trace = Trace(np.array(arrival_s), np.array(prompt_tokens or [1000] * count), np.full(count, 11))
    return made_up(trace, ttft_s, end_s=100.0, decode_s=decode_s)


@dataclass(frozen=True, slots=True)
class Fake:
    """A system whose requests all wait a time that grows with the load."""

    label: str
    wait_s_per_qps: float

    def play(self, trace: Trace, *, stop_s: float) -> Served:
        return made_up(trace, self.wait_s_per_qps * len(trace) / stop_s, end_s=stop_s)


def test_load_draws_the_same_requests_at_any_share() -> None:
    five, one = Load(MIX, 2.0, 600.0).trace(), Load(MIX_1, 2.0, 600.0).trace()
    assert np.array_equal(five.arrival_s, one.arrival_s) and five.arrival_s[-1] < 600
    long, fewer = (trace.prompt_tokens > LONG_TOKENS for trace in (five, one))
    assert 0 < fewer.sum() < long.sum() and not (fewer & ~long).any()
    assert np.array_equal(five.prompt_tokens[~long], one.prompt_tokens[~long])
    assert Load(SHORT, 2.0, 600.0).trace().prompt_tokens.max() <= LONG_TOKENS
    assert not np.array_equal(five.arrival_s, Load(MIX, 2.0, 600.0, seed=1).trace().arrival_s)


def test_a_load_is_played_once(capsys: pytest.CaptureFixture[str]) -> None:
    load = Load(SHORT, 1.0, 60.0)
    assert serve(Fake("once", 1.0), load) is serve(Fake("once", 1.0), load)
    assert serve(Fake("once", 1.0), load) is not serve(Fake("once", 1.0), replace(load, seed=1))
    assert capsys.readouterr().err.splitlines() == ["  playing once: sharegpt4-8k, 1 QPS for 1 min"] * 2


def test_quantiles_that_are_censored() -> None:
    play = served([0, 10, 20, 90], [1, NEVER, 3, NEVER])
    assert play.ttft_quantile(0.25) == Bounded(2.5)
    assert play.ttft_quantile(0.5) == Bounded(6.5, is_least=True)  # of 1, 3, and two that are at least 10 and 90
    assert str(play.ttft_quantile(0.5)) == "at least 6.5 s" and str(Bounded(1234.5)) == "1,234 s"
    assert play.ttft_quantile(0.5, np.array([True, False, True, False])) == Bounded(2)
    assert harness.curve(play.ttft_s)[0] == 1.0 and harness.curve(play.ttft_s)[-1] is None
    known, least = Bounded(1), Bounded(1, is_least=True)
    says = [a.ratio_says(b) for a in (known, least) for b in (known, least)]
    assert says == ["", "at most ", "at least ", "of two lower bounds "]


def test_stretches() -> None:
    arrival_s = np.array([0.0, 1.0, 3.0, 7.0, 8.0, 20.0])
    slow = np.array([True, True, False, True, True, True])
    assert stretches_s(arrival_s, slow) == [1.0, 13.0]
    assert stretches_s(arrival_s, ~slow) == [0.0]
    assert stretches_s(arrival_s[:0], slow[:0]) == []


def test_demands_are_spread_over_waits_and_answers() -> None:
    """One prompt of 100K tokens that waits 40 s, and decodes for 40: FLOPs and KV of both in bins of 10 s."""
    model = MODELS["Llama-3 8B"]
    found = demands(served([0.0, 5.0], [40.0, NEVER], prompt_tokens=[100_000, 1000], decode_s=40.0), 100.0)
    flops, held = prefill_flops(model, 100_000), kv_bytes(model, 100_000)
    assert found["prefill FLOPs/s"] == pytest.approx([flops / 40] * 4 + [0] * 6)
    assert found["prefill bytes"] == pytest.approx([held / 2] * 4 + [0] * 6)
    assert found["decode bytes"] == pytest.approx([0] * 4 + [held] * 4 + [0] * 2)
    token = prefill_flops(model, 100_001) - prefill_flops(model, 100_000)
    assert found["decode FLOPs/s"][4] == pytest.approx(11 * token / 40, rel=1e-3)


def test_active_requests_and_their_swing() -> None:
    play = served([0.0, 20.0, 30.0], [10.0, 10.0, NEVER], decode_s=5.0)
    assert active(play, 100.0).tolist() == [1, 0, 1, 1, *[1] * 6]
    assert swing(np.arange(50.0)) == pytest.approx(0.0, abs=1e-9)
    assert swing(np.arange(50.0) + 10 * (np.arange(50) % 2)) == pytest.approx(10.0, rel=0.1)


def test_effective_capacity() -> None:
    fine = served([0.0, 10.0, 60.0], [9.0, 10.0, 1.0])
    assert sustains(fine, 100.0)
    assert not sustains(served([0.0, 10.0, 60.0], [9.0, 10.1, 1.0]), 100.0)  # two of three in time
    assert sustains(served([0.0, 95.0], [1.0, NEVER]), 100.0)  # the second had no time
    assert sustains(served([0.0, 1.0], [1.0, 50.0], prompt_tokens=[1000, 100_000]), 100.0)  # long ones may wait
    assert not sustains(served([0.0, 1.0], [1.0, NEVER], prompt_tokens=[1000, 100_000]), 100.0)  # but have to end
    many = served([0.0] * 20, [*[1.0] * 19, NEVER], prompt_tokens=[*[1000] * 19, 100_000])
    assert not sustains(many, 100.0)  # 95 % of all, and none of the long ones
    assert fine.finished_share(50.0) == 1.0
    found = capacity(Fake("grows", 15.0), (0.25, 0.5, 1.0, 2.0), Options(quick=True))
    assert found == Capacity(0.5, 1.0) and found.says == "0.5 QPS and fails at 1"
    assert capacity(Fake("slow", 1000.0), (0.25, 0.5), Options(quick=True)) == Capacity(0.0, 0.25)
    assert capacity(Fake("fast", 0.1), (0.25, 0.5), Options(quick=True)) == Capacity(0.5, None)


def test_variants_differ_from_medha_in_policy_and_number_of_prefills() -> None:
    for system in (FCFS, EDF, LRS, LARS):
        assert replace(system.scheduler, policy="lars", long_threshold=8192) == MEDHA.scheduler
        assert system.scheduler.policy == system.label.removeprefix("Medha-").lower()
        assert system.scheduler.long_threshold == 1  # every prompt is long, and a batch takes one long prefill


@pytest.mark.parametrize("system", [MEDHA, SARATHI_2048, WHOLE, LOONGSERVE], ids=lambda system: system.label)
def test_a_short_play(system: System) -> None:
    load = Load(MIX, 0.5, 30.0, seed=1)
    play, again = (system.play(load.trace(), stop_s=load.window_s) for _ in range(2))
    assert np.array_equal(play.finish_s, again.finish_s, equal_nan=True) and play.gaps == again.gaps
    assert 0 < play.is_finished.sum() <= len(play.trace) and play.end_s <= load.window_s + 1
    assert (play.ttft_s > 0).all()
