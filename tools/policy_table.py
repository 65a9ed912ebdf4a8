"""The default policy beside the published ones, Sarathi-Serve and LoongServe, simulated.

python -m tools.policy_table --seeds 3,4,5 --rates 0.25,0.75,1.25,1.75

Llama-3 8B on 16 A100s (tp 8, spp 2) or 70B on 32 (spp 4), medha-mix for 1,200 s and stopped there, TPOT objectives of
60 ms. Policies of the papers are as published. Prints a table in Markdown; a percentile that falls on a request which
had no first token at the end is "-".
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from examples.reproduce.load import MIX, Load
from examples.reproduce.served import Served
from examples.reproduce.systems import LOONGSERVE, SARATHI_512, Engine
from medha.config import ParallelConfig, SchedulerConfig
from medha.workload.metrics import percentile

WINDOW_S, TPOT_S = 1200.0, 0.06
SHORT, LONG, LARGEST = 16_384, 65_536, 700_000
HEAD = (
    "requests/s | | short TTFT P50 / P99 | long P50 / P90 | largest P90 | long finished | prompt tokens/s | "
    "TPOT P50 / P99"
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


def cells(served: Served) -> list[str]:
    """The columns of one play."""
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
        f"{prompt[begun].sum() / WINDOW_S:,.0f}",
        " / ".join(f"{1e3 * np.percentile(tpot_s, percent):.0f}" for percent in (50, 99)) + " ms",
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", default="3")
    parser.add_argument("--rates", default="0.75")
    parser.add_argument("--model", choices=("8B", "70B"), default="8B")
    given = parser.parse_args()
    print(f"| seed | {HEAD} |\n|{' --- |' * (HEAD.count('|') + 2)}")
    for seed in map(int, given.seeds.split(",")):
        for rate in map(float, given.rates.split(",")):
            trace = Load(MIX, rate, WINDOW_S, seed=seed).trace()
            trace = replace(trace, tpot_slo_s=np.full(len(trace), TPOT_S))
            for system in systems(given.model, 2 if given.model == "8B" else 4):
                row = cells(system.play(trace, stop_s=WINDOW_S))
                print(f"| {seed} | {rate:g} | {system.label} | {' | '.join(row)} |", flush=True)


if __name__ == "__main__":
    main()
