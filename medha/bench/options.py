"""Options that several commands of ``medha bench`` share: model, scheduling, serving, workload.

A command names the groups that it takes (:func:`takes`) and gets their values by name; they come after its own in the
help. Heavy imports stay inside the functions.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from medha.bench.arguments import parse_overrides
from medha.config import SCHEDULERS, EngineConfig

if TYPE_CHECKING:
    from medha.bench.harness import Subject
    from medha.bench.workloads import Workload

Group = Mapping[str, tuple[Any, Any]]
"""By the name of a parameter: its annotation for typer, and its default."""

_DEFAULT = EngineConfig("-").scheduler
model_option = partial(typer.Option, rich_help_panel="Model")
load_option = partial(typer.Option, rich_help_panel="Load")
scheduling_option = partial(typer.Option, rich_help_panel="Scheduling")

Model = Annotated[str | None, model_option("--model", "-m", help="Hugging Face folder or hub id; else a random Llama.")]
HfOverrides = Annotated[
    str | None, model_option(help="JSON object merged over config.json, as '{\"hidden_size\": 64}'.")
]
Device = Annotated[str, model_option(help="auto, cpu, cuda or cuda:N.")]
NumThreads = Annotated[int | None, model_option(min=1, help="CPU threads; else torch's choice.")]
Seed = Annotated[int, typer.Option(min=0, help="Of prompts, lengths, arrivals and dummy weights.")]
Warmup = Annotated[int, typer.Option(min=0, help="Runs that do not count.")]
Runs = Annotated[int, typer.Option(min=1, help="Runs that count; the median is reported.")]
OutputJson = Annotated[Path | None, typer.Option(help="Write the report here.", show_default=False)]

MODEL: Group = {
    "model": (Model, None),
    "hf_overrides": (HfOverrides, None),
    "dtype": (Annotated[str, model_option(help="auto, float32, bfloat16 or float16.")], "auto"),
    "device": (Device, "auto"),
    "num_threads": (NumThreads, None),
    "load_format": (
        Annotated[str | None, model_option(help="auto, safetensors or dummy (random weights).", show_default="auto")],
        None,
    ),
}
"""What is measured."""

SCHEDULING: Group = {
    "scheduler": (Annotated[str, scheduling_option(help=f"One of {', '.join(SCHEDULERS)}.")], _DEFAULT.scheduler),
    "policy": (Annotated[str, scheduling_option(help="As medha generate.")], str(_DEFAULT.policy)),
    "chunk_size": (Annotated[int | None, scheduling_option(help="Most tokens of a prompt in a step.")], None),
    "max_batch_tokens": (Annotated[int, scheduling_option(help="Most tokens of a step.")], _DEFAULT.max_batch_tokens),
    "t_target_s": (
        Annotated[
            float | None,
            scheduling_option("--t-target-s", help="Seconds a step may take; else from the decodes' TPOT."),
        ],
        None,
    ),
    "quantum_s": (
        Annotated[float, scheduling_option("--quantum-s", help="The same where no decode has a TPOT objective.")],
        _DEFAULT.quantum_s,
    ),
    "profile": (
        Annotated[str | None, scheduling_option(help="File that medha profile wrote.", show_default=False)],
        None,
    ),
}
"""How steps are made."""

SERVING: Group = {
    "max_num_seqs": (Annotated[int, scheduling_option(help="Most requests at once.")], _DEFAULT.max_num_seqs),
    "rho_max": (
        Annotated[float, scheduling_option(help="Most that a long prefill yields of a step.")],
        _DEFAULT.rho_max,
    ),
    "long_threshold": (
        Annotated[int, scheduling_option(help="Prompt tokens from which a prefill is long.")],
        _DEFAULT.long_threshold,
    ),
    "late_share": (
        Annotated[float, scheduling_option(help="Share of a step for prefills that are late.")],
        _DEFAULT.late_share,
    ),
    "patience_s": (
        Annotated[
            float, scheduling_option("--patience-s", help="Seconds after which a prefill counts as passed over.")
        ],
        _DEFAULT.patience_s,
    ),
    "admission": (
        Annotated[str, scheduling_option(help="Who cannot be in time: all, refuse, relegate.")],
        _DEFAULT.admission,
    ),
    "overcommit": (
        Annotated[bool, scheduling_option("--overcommit", help="Take KV memory that others may come to need.")],
        False,
    ),
    "swap_space": (
        Annotated[
            str | None,
            scheduling_option("--swap-space", help="GiB of host memory for KV of who gives way.", show_default="0"),
        ],
        None,
    ),
    "block_size": (Annotated[int, scheduling_option(help="Tokens of a KV block.")], 256),
    "num_kv_blocks": (
        Annotated[int | None, scheduling_option(help="Blocks of the KV pool.", show_default=False)],
        None,
    ),
}
"""What counts where requests share the engine."""

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


def takes(*groups: Group) -> Callable[[Callable[..., int]], Callable[..., int]]:
    """Let a command with ``**given`` take the options of some groups beside its own; typer reads the signature."""

    def extended(command: Callable[..., int]) -> Callable[..., int]:
        signature = inspect.signature(command, eval_str=True)
        own = [one for one in signature.parameters.values() if one.kind is not inspect.Parameter.VAR_KEYWORD]
        shared = [
            inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)
            for group in groups
            for name, (annotation, default) in group.items()
        ]
        command.__dict__["__signature__"] = signature.replace(parameters=[*own, *shared])
        command.__annotations__ = {one.name: one.annotation for one in (*own, *shared)}
        return command

    return extended


def subject_of(given: Mapping[str, Any], *, seed: int = 0, has_tpot: bool = False) -> Subject:
    """The model and engine that the options of a command ask for; what it does not take has its default.

    Says on stderr what a batch may hold. Requests may have a TPOT objective where ``has_tpot``, or where a trace has.
    """
    from medha.bench.harness import Subject

    names = [name for name in (*MODEL, *SCHEDULING, *SERVING) if name not in ("model", "hf_overrides")]
    engine = {name: given[name] for name in names if given.get(name) is not None} | {"seed": seed}
    if "t_target_s" in given:
        scheduler = EngineConfig.from_flat("-", **engine).scheduler
        has_tpot = has_tpot or given.get("dataset_path") is not None
        print("medha:", scheduler.budget_text(has_tpot=has_tpot), file=sys.stderr)
    return Subject(given["model"], parse_overrides(given["hf_overrides"]), engine)


def workload_of(given: Mapping[str, Any], *, seed: int, **more: Any) -> Workload:
    """The requests that the options of a command ask for.

    Args:
        given: its options.
        seed: of arrivals, lengths and prompts.
        more: further fields of :class:`medha.bench.workloads.Workload`.
    """
    from medha.bench.workloads import Workload

    return Workload(**{name: given[name] for name in WORKLOAD}, seed=seed, **more)
