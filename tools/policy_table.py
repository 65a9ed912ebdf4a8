"""The default policy beside the published ones, Sarathi-Serve and LoongServe, simulated.

python -m tools.policy_table --seeds 3,4,5 --rates 0.25,0.75,1.25,1.75
python -m tools.policy_table --trace conversation_trace.jsonl --rates 2,3 --window-s 600

Llama-3 8B on 16 A100s (tp 8, spp 2) or 70B on 32 (spp 4), medha-mix for 1,200 s and stopped there, TPOT objectives of
60 ms. Of a trace in place of the mix lengths and arrivals are played, at another rate, each prompt by itself. Policies
of the papers are as published. Prints a table in Markdown; a percentile that falls on a request which had no first
token at the end is "-".

In time, by class (up to 16K tokens, up to 64K, above): of the requests whose time was up before the end, who had the
first token within the larger of 1 s and 5 times what its prefill takes alone on medha's replica, and kept the TPOT.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from pathlib import Path

import numpy as np

from examples.reproduce.baselines.loongserve import LoongServe
from examples.reproduce.load import MIX, Load, Served
from examples.reproduce.systems import LOONGSERVE, SARATHI_512, Engine
from examples.reproduce.timing import A100, MODELS
from medha.config import ParallelConfig, SchedulerConfig
from medha.sim.replica import Replica
from medha.workload.io import read_trace
from medha.workload.metrics import percentile
from medha.workload.synth import retimed
from medha.workload.trace import Trace
from tools.command import chosen, main, numbers, print_head, print_row

TPOT_S = 0.06
SHORT, LONG, LARGEST = 16_384, 65_536, 700_000
HEAD = (
    *("requests/s", "", "short TTFT P50 / P99", "long P50 / P90", "largest P90", "long finished"),
    *("prompt tokens/s", "TPOT P50 / P99", "in time"),
)


def systems_of(replica: Replica) -> list[Engine | LoongServe]:
    """The default and what it is held to."""
    sarathi = replace(SARATHI_512.scheduler, depth=replica.parallel.spp)
    named = {"medha": SchedulerConfig(), **{name: SchedulerConfig(policy=name) for name in ("lars", "edf", "srpt")}}
    engines = [Engine(name, one, replica) for name, one in (named | {"Sarathi, 512": sarathi}).items()]
    return [*engines, LOONGSERVE] if replica.model == LOONGSERVE.model else list(engines)


def trace_of(path: Path | None, rate: float, seed: int, window_s: float) -> Trace:
    """The requests, which share no prefixes."""
    if path is None:
        trace = Load(MIX, rate, window_s, seed=seed).trace()
    else:
        trace = retimed(read_trace(path), "poisson", qps=rate, duration_s=window_s, seed=seed)
    return replace(trace, tpot_slo_s=np.full(len(trace), TPOT_S), prefix_hashes=None)


def deadlines(trace: Trace, replica: Replica) -> np.ndarray:
    """Seconds from arrival to when the first token of each is due, for all systems."""
    scheduler, _ = replica.build()
    return np.array([max(1.0, 5 * scheduler.prefill_left_s(0, tokens)) for tokens in trace.prompt_tokens.tolist()])


def cells(served: Served, due_s: np.ndarray, window_s: float) -> list[str]:
    """The columns of one play."""
    prompt, ttft_s, tpot_s = served.trace.prompt_tokens, served.ttft_s, served.tpot_s
    is_short, is_long, begun = prompt <= SHORT, prompt > LONG, ~np.isnan(served.first_token_s)
    is_due = served.trace.arrival_s + due_s <= window_s
    # of who has not ended: what it is at the least
    least_s = (served.end_s - served.first_token_s) / np.maximum(served.trace.output_tokens - 1, 1)
    is_in_time = (ttft_s <= due_s) & ~(np.where(np.isnan(served.finish_s), least_s, tpot_s) > TPOT_S)
    shares = [is_in_time[is_due & one] for one in (is_short, ~is_short & ~is_long, is_long)]

    def seconds(where: np.ndarray, *percents: float) -> str:
        found = [percentile(ttft_s[where], percent) for percent in percents]
        return " / ".join("-" if one is None else f"{one:.2f}" if one < 10 else f"{one:.0f}" for one in found) + " s"

    return [
        seconds(is_short, 50, 99),
        seconds(is_long, 50, 90),
        seconds(prompt > LARGEST, 90),
        f"{int((is_long & served.is_finished).sum())} of {int(is_long.sum())}",
        f"{prompt[begun].sum() / window_s:,.0f}",
        " / ".join(f"{1e3 * one:.0f}" for one in np.nanpercentile(tpot_s, (50, 99))) + " ms",
        " / ".join(f"{100 * one.mean():.0f}" if len(one) else "-" for one in shares) + " %",
    ]


def policy_table(
    seeds: str = "3",
    rates: str = "0.75",
    trace: Path | None = None,
    window_s: float = 1200.0,
    systems: str | None = None,
    model: str = "8B",
) -> None:
    """Play the mix, or in its place a trace, on each system; --systems are of the table's names, with semicolons."""
    (model,) = chosen("model", model, ("8B", "70B"))
    where = ParallelConfig(tp=8, spp=2 if model == "8B" else 4)
    replica = Replica(A100, MODELS[f"Llama-3 {model}"], where)
    known = {one.label: one for one in systems_of(replica)}
    names = list(known) if systems is None else chosen("systems", systems, known, ";")
    print_head("seed", *HEAD)
    for seed, rate in product(map(int, numbers("seeds", seeds)), numbers("rates", rates)):
        asked = trace_of(trace, rate, seed, window_s)
        due_s = deadlines(asked, replica)
        for name in names:
            print_row(seed, f"{rate:g}", name, *cells(known[name].play(asked, stop_s=window_s), due_s, window_s))


if __name__ == "__main__":
    main(policy_table)
