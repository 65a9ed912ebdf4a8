"""The papers' workload: lengths as published and as drawn; v5 section 6.1, v4 section 5.1."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from examples.reproduce.plotting import COLORS, finish
from examples.reproduce.result import Answer, FigureResult, FigureSpec, Options
from medha.workload.synth import generators, parse_lengths

_FITTED = "Drawn from a distribution that was made to have the published percentiles; the trace is not public."


def run(options: Options) -> FigureResult:
    """Draws of the named distributions; ``quick`` draws fewer."""
    count = 20_000 if options.quick else 200_000
    drawn = {
        name: parse_lengths(name).sample(generators(options.seed)[1], count)
        for name in ("sharegpt4-8k", "medha-swe", "medha-mix")
    }
    levels = (10, 50, 90, 99)
    numbers: dict[str, Any] = {
        name: {
            "levels": levels,
            "prompt": np.percentile(prompts, levels).tolist(),
            "output": np.percentile(outputs, levels).tolist(),
            "prompt_curve": np.percentile(prompts, range(1, 100)).tolist(),
            "output_curve": np.percentile(outputs, range(1, 100)).tolist(),
        }
        for name, (prompts, outputs) in drawn.items()
    }
    swe, chat = numbers["medha-swe"], numbers["sharegpt4-8k"]
    prompts, outputs = drawn["sharegpt4-8k"]
    mixed = drawn["medha-mix"][0]
    answers = {
        "swe-prompt-p50": Answer(swe["prompt"][1] / 1e3, _FITTED),
        "swe-prompt-p90": Answer(swe["prompt"][2] / 1e3, _FITTED),
        "swe-output-p50": Answer(swe["output"][1], _FITTED),
        "swe-output-p90": Answer(swe["output"][2], _FITTED),
        "sharegpt-output": Answer(chat["output"][1], "Quantiles of a public ShareGPT sample, 30,731 conversations."),
        "sharegpt-8k": Answer(float((prompts + outputs).max()), "The longest conversation drawn, prompt and output."),
        "long-share": Answer(float(100 * np.mean(mixed > 100_000)), "Share of requests of 100K tokens and more."),
    }
    return FigureResult(numbers, answers)


def draw(numbers: Mapping[str, Any], figure: Any) -> None:
    """Distribution of prompts and outputs."""
    for index, (axes, part) in enumerate(zip(figure.subplots(1, 2, sharey=True), ("prompt", "output"), strict=True)):
        for row, (name, columns) in enumerate(numbers.items()):
            axes.plot(
                columns[f"{part}_curve"], range(1, 100), color=COLORS[row], label=name, linestyle=("-", "-", "--")[row]
            )
        axes.set(xscale="log", xlabel=f"{part}, tokens")
        finish(axes, title=f"{part} lengths", ylabel="" if index else "percentile")


FIGURES = (FigureSpec("lengths", "Lengths of the papers' workload", run, draw),)
