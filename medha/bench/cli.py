"""``medha bench …``: which verbs there are, and how a verb becomes a command. A verb's module is imported when it runs.

A verb is a line of a module's docstring in this folder, its name and what the list of verbs says. The module has a
frozen dataclass of options, whose fields are the options of the command, a function that measures, and :func:`verb`,
which says what is printed of the report. The function gets the options and returns the report on rank 0, None on the
others; its docstring is the help.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, is_dataclass
from functools import cache, partial
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any, get_type_hints

import typer
import typer.core

from medha.cli.command import FAILED_REQUESTS, check_apart, make_app, start_logging
from medha.cli.options import MODEL, Group, OutputJson, but, engine_options, options_of, parse_lengths, takes
from medha.config.fields import check_options, integer, option, option_of, read_option
from medha.parallel.launch import is_first_rank

Report = dict[str, Any]
"""What a benchmark measured, as JSON has it."""

Shows = Mapping[str, Sequence[str]]
"""What is printed of a report: entries of it, of rows these columns; without any the entry as it is."""

_VERB = re.compile(r'^(?:""")?``medha bench (micro |)(\w+)``: (.+)$', re.MULTILINE)

_COMMANDS: dict[str, typer.Typer] = {}  # the verbs of the modules that have been imported

asked, of_load = partial(option, "Options"), partial(option, "Load")
"""Fields that are options; those under the second heading say what the engine is to serve."""
COUNT, ANY_COUNT = integer(1, 2**31 - 1), integer(0, 2**31 - 1)

_FOLDER = typer.Option("--model", "-m", help="Folder, hub id; else random.", rich_help_panel="Model")
SUBJECT: Group = {"model": (Annotated[str | None, _FOLDER], None), **but(MODEL, "model", "max_model_len")}
"""What is measured; its longest request follows from the benchmark."""
ALONE: Group = {name: SUBJECT[name] for name in ("model", "hf_overrides", "device", "num_threads")}


def lengths(name: str, default: str, help: str) -> Any:
    """A field of lengths, which users give comma separated."""
    return asked(parse_lengths(name, default), help, name=name, kind=str, shown=default, read=parse_lengths)


def warmups(default: int, what: str = "Runs") -> Any:
    """The field ``warmup``."""
    return asked(default, f"{what} that do not count.", ANY_COUNT, name="num_iters_warmup")


def counted(default: int, what: str = "Runs") -> Any:
    """The field ``runs``."""
    return asked(default, f"{what} that count; the median is reported.", COUNT, name="num_iters")


def verb(
    name: str, cls: type, measure: Callable[..., Report | None], shows: Shows, notes: Sequence[str], *groups: Group
) -> None:
    """Make a command of a dataclass of options, what measures, what is printed of its report and below it, and
    ``groups`` of more options.

    A field without help is the ``subject``, a dataclass of options itself, or takes what a group has under its name.
    """
    parts = [cls, *(hint for hint in get_type_hints(cls).values() if is_dataclass(hint))]
    own = {key: one for group in options_of(*parts).values() for key, one in group.items()}  # type: ignore[arg-type]

    @takes(own, *groups, {"output_json": (OutputJson, None)})
    def command(**given: Any) -> int:
        start_logging("warning")
        check_apart([given["output_json"]], [given.get("dataset_path")])
        engine = engine_options({key: value for key, value in given.items() if key not in own})
        return _run(given["output_json"], _made(cls, given, engine), measure, shows, notes)

    command.__doc__ = measure.__doc__
    _COMMANDS[name] = make_app()
    _COMMANDS[name].command(name)(command)


def _made(cls: type, given: Mapping[str, Any], engine: Mapping[str, Any]) -> Any:
    """The options that users have given; what is None has its default. Raises ConfigError."""
    from medha.bench.harness import Subject  # here because torch takes a second, and `medha --help` comes by

    hints: dict[str, Any] = get_type_hints(cls)
    values: dict[str, Any] = {}
    for field in fields(cls):
        said, hint = option_of(field), hints[field.name]
        value = given.get(field.name if said is None else said.name or field.name)
        if hint is Subject:
            flat = dict(engine)
            values[field.name] = Subject(flat.pop("model", None), flat.pop("hf_overrides", None), flat)
        elif is_dataclass(hint):
            values[field.name] = _made(hints[field.name], given, engine)
        elif value is not None:
            values[field.name] = read_option(field, value)
    options = cls(**values)
    check_options(options)
    return options


def _run(path: Any, options: Any, measure: Callable[..., Report | None], shows: Shows, notes: Sequence[str]) -> int:
    """Measure on this rank; rank 0 writes the report and prints a part of it. Returns 0, or 3 where requests have
    failed, or tokens are wrong."""
    from medha.cli.report import check_writable, deliver, progress

    check_writable(path)
    if not is_first_rank():
        measure(options)
        return 0
    load = os.getloadavg()[0]
    with progress("measuring", None):
        report = measure(options)
    assert report is not None, "rank 0 has the report"
    report["load_before_after"] = [load, os.getloadavg()[0]]
    entries = {
        name: [{key: row[key] for key in columns if key in row} for row in report[name]] if columns else report[name]
        for name, columns in shows.items()
        if name in report
    }
    runs = [f"median of {options.runs} after {options.warmup} warm-up"] if hasattr(options, "runs") else []
    load_text = f"load average {load:.1f} before, {report['load_before_after'][1]:.1f} after"
    lines = [*report.get("notes", ()), *runs, *notes, load_text]
    where = [str(report[name]) for name in ("dtype", "device") if name in report]
    if report.get("num_ranks", 1) > 1:
        where.append(f"{report['num_ranks']} ranks")
    title = "; ".join([str(report.get("title", report["benchmark"])), *where])
    deliver(report, path, shown={"title": title, **entries, "notes": lines, "environment": report["environment"]})
    return FAILED_REQUESTS if report.get("failed") or report.get("num_wrong") else 0


@cache
def _verbs(are_micro: bool) -> dict[str, tuple[str, str]]:
    """Of each verb, of ``bench`` or of ``bench micro``, its module and what the list of verbs says."""
    texts = {path.stem: path.read_text("utf-8") for path in sorted(Path(__file__).parent.glob("[a-z]*.py"))}
    lines = ((module, *line) for module, text in texts.items() for line in _VERB.findall(text))
    return {name: (module, said) for module, its, name, said in lines if bool(its) == are_micro}


class _Group(typer.core.TyperGroup):
    """A group of verbs."""

    def list_commands(self, ctx: Any) -> list[str]:
        return [*self.commands, *_verbs(self.name == "micro")]

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """Enough of a verb to list it."""
        if cmd_name in (verbs := _verbs(self.name == "micro")):
            return typer.core.TyperCommand(cmd_name, help=verbs[cmd_name][1])
        return super().get_command(ctx, cmd_name)

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        name, command, rest = super().resolve_command(ctx, args)
        if name is not None and name in (verbs := _verbs(self.name == "micro")):
            import_module(f"medha.bench.{verbs[name][0]}")
            command = typer.main.get_command(_COMMANDS[name])
        return name, command, rest


app = make_app(help="Measure on this machine. TTFT, TPOT and the other terms: medha bench serve --help.")
app.info.cls = _Group
_micro = make_app(help="Measure one part alone: attention, a scheduling decision, sampling.")
app.add_typer(_micro, name="micro", cls=_Group)
