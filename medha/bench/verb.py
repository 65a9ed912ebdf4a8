"""What makes a command of a benchmark: the fields of its options are the options of the command.

A verb's module has a frozen dataclass of options, a function that measures, one that says what to print of its report,
and at its end :func:`verb`. The function that measures gets the options and ``on_run``, which it calls after each of
``options.num_runs`` parts; it returns the report on rank 0, None on the others, and its docstring is the help.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import fields, is_dataclass
from functools import partial
from typing import Annotated, Any, get_type_hints

import typer

from medha.bench.harness import Report, Shown, Subject
from medha.cli.command import FAILED_REQUESTS, make_app
from medha.cli.options import MODEL, Group, OutputJson, but, engine_options, options_of, parse_lengths, takes
from medha.cli.report import STDOUT, check_writable, progress, write_report
from medha.cli.table import print_report
from medha.config import EngineConfig, option_of
from medha.config.fields import check_options, integer, option
from medha.parallel.launch import is_first_rank

COMMANDS: dict[str, typer.Typer] = {}
"""The verbs of the modules that have been imported."""

asked, of_load = partial(option, "Options"), partial(option, "Load")
"""Fields that are options; those under the second heading say what the engine is to serve."""
COUNT, ANY_COUNT = integer(1, 2**31 - 1), integer(0, 2**31 - 1)

_FOLDER = typer.Option("--model", "-m", help="Folder, hub id; else random.", rich_help_panel="Model")
SUBJECT: Group = {"model": (Annotated[str | None, _FOLDER], None), **but(MODEL, "model", "max_model_len")}
"""What is measured; its longest request follows from the benchmark."""
ALONE: Group = {name: SUBJECT[name] for name in ("model", "hf_overrides", "device", "num_threads")}


def lengths(name: str, default: str, help: str, *flags: str, shown: str = "") -> Any:
    """A field of lengths, which users give comma separated."""
    read = partial(parse_lengths, name)
    return asked(read(default), help, name=name, flags=flags, kind=str, shown=shown or default, read=read)


def words(default: str, help: str, **more: Any) -> Any:
    """A field of words, which users give comma separated."""

    def read(text: str) -> tuple[str, ...]:
        return tuple(word.strip() for word in text.split(",") if word)

    return asked(read(default), help, kind=str, read=read, **{"shown": default, **more})


def warmups(default: int, what: str = "Runs") -> Any:
    """The field ``warmup``."""
    return asked(default, f"{what} that do not count.", ANY_COUNT, name="num_iters_warmup")


def counted(default: int, what: str = "Runs") -> Any:
    """The field ``runs``."""
    return asked(default, f"{what} that count; the median is reported.", COUNT, name="num_iters")


def verb(
    name: str, cls: type, measure: Callable[..., Report | None], shown: Callable[[Report], Shown], *groups: Group
) -> None:
    """Make a command.

    Args:
        name: of it.
        cls: dataclass of its options. A field without help is a :class:`Subject`, a dataclass of options itself, or
            takes what ``groups`` have under its name.
        measure: does the work.
        shown: what is printed of the report.
        groups: options beside its own.
    """
    own = {key: one for part in _parts(cls) for group in options_of(part).values() for key, one in group.items()}

    @takes(own, *groups, {"output_json": (OutputJson, None)})
    def command(**given: Any) -> int:
        engine = engine_options({key: value for key, value in given.items() if key not in own})
        options = _made(cls, given, engine)
        if "t_target_s" in given and "t_target_s" not in own and is_first_rank():
            scheduler = EngineConfig.from_flat("-", **options.subject.engine).scheduler
            words = scheduler.budget_text(has_tpot=getattr(options, "has_tpot", False))
            print("medha:", words, file=sys.stderr)
        return _run(given["output_json"], options, measure, shown)

    command.__doc__ = measure.__doc__
    COMMANDS[name] = make_app()
    COMMANDS[name].command(name)(command)


def _parts(cls: type) -> list[type]:
    """A dataclass of options and those in it."""
    hints: list[Any] = [hint for hint in get_type_hints(cls).values() if is_dataclass(hint) and hint is not Subject]
    return [cls, *hints]


def _made(cls: type, given: Mapping[str, Any], engine: Mapping[str, Any]) -> Any:
    """The options that users have given; what is None has its default.

    Raises:
        ConfigError: a value is not accepted.
    """
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
            values[field.name] = said.read(value) if said is not None and said.read is not None else value
    options = cls(**values)
    check_options(options)
    return options


def _run(path: Any, options: Any, measure: Callable[..., Report | None], shown: Callable[[Report], Shown]) -> int:
    """Measure on this rank; rank 0 has a progress bar on stderr, writes the report and prints a part of it.

    Returns:
        0, or 3 where requests have failed, or tokens are wrong.
    """
    check_writable(path)
    if not is_first_rank():
        measure(options, on_run=lambda: None)
        return 0
    with progress("measuring", getattr(options, "num_runs", None)) as advance:
        report = measure(options, on_run=advance)
    assert report is not None, "rank 0 has the report"
    write_report(path, report)
    if path != STDOUT:
        entries, notes = shown(report)
        where = [str(report[name]) for name in ("dtype", "device") if name in report]
        if report.get("num_ranks", 1) > 1:
            where.append(f"{report['num_ranks']} ranks")
        before, after = report["load_before_after"]
        lines = [*notes, f"load average {before:.1f} before, {after:.1f} after"]
        title = "; ".join([str(report.get("title", report["benchmark"])), *where])
        print_report({**entries, "notes": lines, "environment": report["environment"]}, title=title)
    return FAILED_REQUESTS if report.get("failed") or report.get("num_wrong") else 0
