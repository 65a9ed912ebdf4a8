"""``medha bench …``: which verbs there are. A verb's module is imported when it runs, not to list it."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from typing import Any

import typer.core

from medha.cli.command import make_app

_Verbs = Mapping[str, tuple[str, str]]

VERBS: _Verbs = {
    "latency": ("latency", "One request at a time, over prompt lengths: TTFT, between tokens, end to end."),
    "throughput": ("throughput", "Requests that are all there from the start: requests and tokens a second."),
    "serve": ("serve", "Requests arrive at a live engine: TTFT, TPOT, ITL, E2EL, goodput."),
    "compare": ("compare", "The same weights and prompts through medha and through another engine."),
    "scaling": ("scaling", "Several ranks against one."),
    "accuracy": ("accuracy", "Predicted against real step times of the engine."),
}
MICRO: _Verbs = {
    "attention": ("micro", "Attention of one layer, chunks over KV lengths."),
    "decode": ("micro", "A step of decodes, batch sizes over contexts."),
    "sampling": ("micro", "From logits to tokens, over batch sizes and ways of drawing."),
    "scheduler": ("decisions", "One scheduling decision, as the queue grows."),
}
"""Of each verb its module in this folder, and what the list of them says."""


class _Group(typer.core.TyperGroup):
    """A group of verbs."""

    verbs: _Verbs = VERBS

    def list_commands(self, ctx: Any) -> list[str]:
        return [*self.commands, *self.verbs]

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """Enough of a verb to list it."""
        if cmd_name in self.verbs:
            return typer.core.TyperCommand(cmd_name, help=self.verbs[cmd_name][1])
        return super().get_command(ctx, cmd_name)

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        name, command, rest = super().resolve_command(ctx, args)
        if name is not None and name in self.verbs:
            import_module(f"medha.bench.{self.verbs[name][0]}")
            from medha.bench.verb import COMMANDS

            command = typer.main.get_command(COMMANDS[name])
        return name, command, rest


class _Micro(_Group):
    verbs = MICRO


app = make_app(help="Measure on this machine. TTFT, TPOT and the other terms: medha bench serve --help.")
app.info.cls = _Group
_micro = make_app(help="Measure one part alone: attention, a decode step, a scheduling decision, sampling.")
app.add_typer(_micro, name="micro", cls=_Micro)
