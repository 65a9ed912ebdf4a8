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

import argparse
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np

from examples.reproduce.load import MIX, Load
from examples.reproduce.served import Served
from examples.reproduce.systems import LOONGSERVE, SARATHI_512, Engine
from examples.reproduce.timing import MODELS
from medha.config import ParallelConfig, SchedulerConfig
from medha.cost.hardware import load_spec
from medha.sim.replica import Replica
from medha.workload.io import read_trace
from medha.workload.metrics import percentile
from medha.workload.synth import retimed
from medha.workload.trace import Trace

WINDOW_S, TPOT_S = 1200.0, 0.06
SHORT, LONG, LARGEST = 16_384, 65_536, 700_000
HEAD = (
    "requests/s | | short TTFT P50 / P99 | long P50 / P90 | largest P90 | long finished | prompt tokens/s | "
    "TPOT P50 / P99 | in time"
)


def systems(model: str, spp: int) -> Iterator[Engine | type(LOONGSERVE)]:  # type: ignore[valid-type]
    """The default and what it is held to."""
    where = {"model": f"Llama-3 {model}", "parallel": ParallelConfig(tp=8, spp=spp)}
    yield Engine("medha", SchedulerConfig(), **where)  # type: ignore[arg-type]
    for policy in ("lars", "edf", "srpt"):
        yield Engine(policy, SchedulerConfig(policy=policy), **where)  # type: ignore[arg-type]
    yield Engine("Sarathi, 512", replace(SARATHI_512.scheduler, depth=spp), **where)  # type: ignore[arg-type]
    if model == "8B":
        yield LOONGSERVE


def trace_of(given: argparse.Namespace, rate: float, seed: int) -> Trace:
    """The requests, which share no prefixes."""
    if given.trace is None:
        trace = Load(MIX, rate, given.window_s, seed=seed).trace()
    else:
        trace = retimed(read_trace(given.trace), "poisson", qps=rate, duration_s=given.window_s, seed=seed)
    return replace(trace, tpot_slo_s=np.full(len(trace), TPOT_S), prefix_hashes=None)


def deadlines(trace: Trace, model: str, spp: int) -> np.ndarray:
    """Seconds from arrival to when the first token of each is due, for all systems."""
    where = ParallelConfig(tp=8, spp=spp)
    scheduler, _ = Replica(load_spec("a100-80g"), MODELS[f"Llama-3 {model}"], where, SchedulerConfig()).build()
    return np.array([max(1.0, 5 * scheduler.prefill_left_s(0, tokens)) for tokens in trace.prompt_tokens.tolist()])


def in_time(served: Served, due_s: np.ndarray, end_s: float) -> str:
    """Shares by class of those whose deadline fell before the end."""
    prompt, tpot_s = served.trace.prompt_tokens, served.tpot_s
    is_due = served.trace.arrival_s + due_s <= end_s
    is_in_time = (served.ttft_s <= due_s) & (np.isnan(tpot_s) | (tpot_s <= TPOT_S))
    classes = (prompt <= SHORT, (prompt > SHORT) & (prompt <= LONG), prompt > LONG)
    shares = [is_in_time[is_due & one] for one in classes]
    return " / ".join(f"{100 * one.mean():.0f}" if len(one) else "-" for one in shares) + " %"


def cells(served: Served, window_s: float) -> list[str]:
    """The columns of one play but the last."""
    prompt, ttft_s, tpot_s = served.trace.prompt_tokens, served.ttft_s, served.tpot_s[~np.isnan(served.tpot_s)]
    is_long, begun = prompt > LONG, ~np.isnan(served.first_token_s)

    def seconds(where: np.ndarray, percent: float) -> str:
        found = percentile(ttft_s[where], percent)
        return "-" if found is None else f"{found:.2f}" if found < 10 else f"{found:.0f}"

    return [
        f"{seconds(prompt <= SHORT, 50)} / {seconds(prompt <= SHORT, 99)} s",
        f"{seconds(is_long, 50)} / {seconds(is_long, 90)} s",
        f"{seconds(prompt > LARGEST, 90)} s",
        f"{int((is_long & served.is_finished).sum())} of {int(is_long.sum())}",
        f"{prompt[begun].sum() / window_s:,.0f}",
        " / ".join(f"{1e3 * np.percentile(tpot_s, percent):.0f}" for percent in (50, 99)) + " ms",
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", default="3")
    parser.add_argument("--rates", default="0.75")
    parser.add_argument("--trace", type=Path, help="a file in place of the mix")
    parser.add_argument("--window-s", type=float, default=WINDOW_S)
    parser.add_argument("--systems", help="of the table's names, separated by semicolons; default all")
    parser.add_argument("--model", choices=("8B", "70B"), default="8B")
    given = parser.parse_args()
    spp = 2 if given.model == "8B" else 4
    print(f"| seed | {HEAD} |\n|{' --- |' * (HEAD.count('|') + 2)}")
    for seed in map(int, given.seeds.split(",")):
        for rate in map(float, given.rates.split(",")):
            trace = trace_of(given, rate, seed)
            due_s = deadlines(trace, given.model, spp)
            for system in systems(given.model, spp):
                if given.systems is None or system.label in given.systems.split(";"):
                    served = system.play(trace, stop_s=given.window_s)
                    row = [*cells(served, given.window_s), in_time(served, due_s, given.window_s)]
                    print(f"| {seed} | {rate:g} | {system.label} | {' | '.join(row)} |", flush=True)


if __name__ == "__main__":
    main()
