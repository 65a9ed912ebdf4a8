"""Options that several commands of ``medha bench`` share: model, scheduling, serving, workload.

A command names the groups that it takes (:func:`takes`) and gets their values by name; they come after its own in the
help. Heavy imports stay inside the functions.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from medha.cli import options
from medha.cli.options import MEMORY, PARALLEL, SCHEDULING, SERVING, Group, OutputJson, but, engine_options, takes
from medha.config import EngineConfig

if TYPE_CHECKING:
    from medha.bench.harness import Subject
    from medha.bench.workloads import Workload

__all__ = ["MEMORY", "MODEL", "PARALLEL", "SCHEDULING", "SERVING", "WORKLOAD", "OutputJson", "takes"]

model_option = partial(typer.Option, rich_help_panel="Model")
load_option = partial(typer.Option, rich_help_panel="Load")

Model = Annotated[str | None, model_option("--model", "-m", help="Hugging Face folder or hub id; else a random Llama.")]
HfOverrides = Annotated[
    str | None, model_option(help="JSON object merged over config.json, as '{\"hidden_size\": 64}'.")
]
Device = Annotated[str, model_option(help="auto, cpu, cuda or cuda:N.")]
NumThreads = Annotated[int | None, model_option(min=1, help="CPU threads; else torch's choice.")]
Seed = Annotated[int, typer.Option(min=0, help="Of prompts, lengths, arrivals and dummy weights.")]
Warmup = Annotated[int, typer.Option(min=0, help="Runs that do not count.")]
Runs = Annotated[int, typer.Option(min=1, help="Runs that count; the median is reported.")]

MODEL: Group = but(options.MODEL, "seed", model=(None, "a random Llama"), load_format=(None, "auto"))
"""What is measured."""

WORKLOAD: Group = {
    "num_prompts": (
        Annotated[
            int | None,
            load_option(min=1, help="Requests; of a trace the first ones.", show_default="100, or all of a trace"),
        ],
        None,
    ),
    "input_len": (Annotated[int, load_option(min=1, help="Prompt tokens of each.")], 1024),
    "output_len": (Annotated[int, load_option(min=1, help="Output tokens of each.")], 128),
    "lengths": (
        Annotated[
            str | None, load_option(help="Draw both from a distribution, as medha trace synth.", show_default=False)
        ],
        None,
    ),
    "dataset_path": (
        Annotated[
            Path | None, load_option("--dataset-path", "--trace", help="Trace file of requests.", show_default=False)
        ],
        None,
    ),
}
"""Which requests there are."""


def subject_of(given: Mapping[str, Any], *, seed: int = 0, has_tpot: bool = False) -> Subject:
    """The model and engine that the options of a command ask for; what it does not take has its default.

    Says on stderr what a batch may hold. Requests may have a TPOT objective where ``has_tpot``, or where a trace has.
    """
    from medha.bench.harness import Subject

    engine = engine_options(given) | {"seed": seed}
    model, hf_overrides = engine.pop("model", None), engine.pop("hf_overrides", None)
    if "t_target_s" in given:
        scheduler = EngineConfig.from_flat("-", **engine).scheduler
        has_tpot = has_tpot or given.get("dataset_path") is not None
        print("medha:", scheduler.budget_text(has_tpot=has_tpot), file=sys.stderr)
    return Subject(model, hf_overrides, engine)


def workload_of(given: Mapping[str, Any], *, seed: int, **more: Any) -> Workload:
    """The requests that the options of a command ask for.

    Args:
        given: its options.
        seed: of arrivals, lengths and prompts.
        more: further fields of :class:`medha.bench.workloads.Workload`.
    """
    from medha.bench.workloads import Workload

    return Workload(**{name: given[name] for name in WORKLOAD}, seed=seed, **more)
