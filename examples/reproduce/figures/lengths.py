"""The papers' workload: lengths as published and as drawn; v5 section 6.1, v4 section 5.1."""

from __future__ import annotations

import numpy as np

from examples.reproduce.plotting import Panel, shares_below
from examples.reproduce.result import Answer, FigureResult, Options, figure
from medha.workload.synth import generators, parse_lengths


@figure("lengths", "Lengths of the papers' workload")
def run(options: Options) -> FigureResult:
    """Draws of the named distributions; ``quick`` draws fewer."""
    count = 20_000 if options.quick else 200_000
    drawn = {
        name: parse_lengths(name).sample(generators(options.seed)[1], count)
        for name in ("sharegpt4-8k", "medha-swe", "medha-mix")
    }
    swe, chat = (np.percentile(drawn[name], (10, 50, 90, 99), axis=1).T for name in ("medha-swe", "sharegpt4-8k"))
    prompts, outputs = drawn["sharegpt4-8k"]
    panels = [
        Panel(
            f"{part} lengths",
            f"{part}, tokens",
            "percentile",
            shares_below({name: np.percentile(pair[at], range(101)).tolist() for name, pair in drawn.items()}),
            log="x",
        )
        for at, part in enumerate(("prompt", "output"))
    ]
    ours = [swe[0][1] / 1e3, swe[0][2] / 1e3, swe[1][1], swe[1][2], chat[1][1], float((prompts + outputs).max())]
    names = ("swe-prompt-p50", "swe-prompt-p90", "swe-output-p50", "swe-output-p90", "sharegpt-output", "sharegpt-8k")
    answers = {name: Answer(value) for name, value in zip(names, ours, strict=True)}
    long_share = float(100 * np.mean(drawn["medha-mix"][0] > 100_000))
    return FigureResult(panels, answers | {"long-share": Answer(long_share)})
