"""Options of commands, made from the fields of the config dataclasses.

A group is the options under one heading, and new fields of a dataclass join theirs. A command with ``**given`` says
which groups it takes (:func:`takes`) and gets their values by name; they come after its own in the help.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from contextlib import suppress
from copy import copy
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Annotated, Any, get_args, get_type_hints

import typer

from medha.config import fields as panels
from medha.config.engine_config import SECTIONS
from medha.config.fields import option_of, parse_size
from medha.errors import ConfigError, short_repr
from medha.models.folder import parse_json_object
from medha.params import SamplingParams

Group = Mapping[str, tuple[Any, Any]]
"""By the name of a parameter: its annotation for typer, and its default."""

_KINDS = (bool, int, float, str)  # the type on a command line is the first of these that a field may have


def option(*flags: str, help: str, shows: bool | str = False, **more: Any) -> Any:
    """An option; ``shows`` is what stands for its default."""
    return typer.Option(*flags, help=help, show_default=shows, **more)


OutputJson = Annotated[Path | None, option("--output-json", help="Write the report here; - is stdout.")]
ModelArgument = Annotated[str | None, typer.Argument(metavar="MODEL", help="As --model.", show_default=False)]
LogLevel = Annotated[str, typer.Option(help="debug, info, warning or error.", envvar="MEDHA_LOG_LEVEL")]


def options_of(*classes: type) -> dict[str, Group]:
    """The options that the fields of some dataclasses describe, by their headings."""
    groups: dict[str, dict[str, tuple[Any, Any]]] = {}
    for cls in classes:
        hints = get_type_hints(cls)
        for field in fields(cls):
            said = option_of(field)
            if said is None or not said.panel:
                continue
            hint, name = hints[field.name], said.name or field.name
            kind = said.kind or next(kind for kind in _KINDS if kind in (hint, *get_args(hint)))
            default = None if field.default is MISSING or (kind is not hint and said.kind is str) else field.default
            is_pair = kind is bool and default is not False  # whose spellings typer makes
            flags = said.flags or (() if is_pair else (f"--{name.replace('_', '-')}",))
            shows = said.shown or default is not None
            declared = option(*flags, help=said.help, rich_help_panel=said.panel, shows=shows)
            groups.setdefault(said.panel, {})[name] = _parameter(kind, declared, default)
    return dict(groups)


def _parameter(kind: Any, declared: Any, default: Any) -> tuple[Any, Any]:
    return Annotated[kind if default is not None else kind | None, declared], default


_GROUPS = options_of(*SECTIONS.values(), SamplingParams)
MODEL, MEMORY, SCHEDULING = (_GROUPS[name] for name in (panels.MODEL, panels.MEMORY, panels.SCHEDULING))
SERVING, PARALLEL = _GROUPS[panels.SERVING], _GROUPS[panels.PARALLEL]
SIMULATED, DEALT, SAMPLING = (_GROUPS[name] for name in (panels.SIMULATED, panels.DEALT, panels.SAMPLING))
ENGINE: Group = {**MODEL, **MEMORY, **SCHEDULING, **SERVING, **PARALLEL, **DEALT}
"""All options of an engine."""


def pick(*names: str) -> Group:
    """Some options of an engine, or of simulated memory, by name."""
    known = {**ENGINE, **SIMULATED}
    return {name: known[name] for name in names}


def but(group: Group, *without: str, **defaults: Any) -> Group:
    """A group without some options, and with other defaults of some; a default that is a pair comes with its words."""
    changed = {name: pair for name, pair in group.items() if name not in without}
    for name, default in defaults.items():
        hint, declared = get_args(group[name][0])
        default, shown = default if isinstance(default, tuple) else (default, default is not None)
        declared = copy(declared)
        declared.show_default = shown
        kind = next(kind for kind in (hint, *get_args(hint)) if kind is not type(None))
        changed[name] = _parameter(hint if get_args(hint) and default is not None else kind, declared, default)
    return changed


def parse_lengths(name: str, text: str) -> tuple[int, ...]:
    """``2048,16K`` as integers; raises ConfigError where it is no list of positive ones."""
    parts = text.replace("_", "").split(",")
    with suppress(ConfigError):
        if all(part.strip().isdecimal() or part.strip()[-1:].isalpha() for part in parts):
            return tuple(parse_size(part) for part in parts)
    raise ConfigError(f"{name}={text!r}; accepted: positive integers such as 2048 or 16K, comma separated")


def parse_object(name: str, text: str) -> dict[str, Any]:
    """Text that is a JSON object; raises ConfigError for any other."""
    return parse_json_object(text.encode(errors="replace"), f"{name} {short_repr(text)}")


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


def engine_options(given: Mapping[str, Any]) -> dict[str, Any]:
    """What a command was given for :meth:`medha.config.EngineConfig.from_flat`, with text that is JSON read."""
    options = {name: given[name] for name in ENGINE if given.get(name) is not None}
    for name in ("hf_overrides", "rope_scaling", "tenant_weights"):
        text = options.get(name)
        if text is not None and (name != "rope_scaling" or text.lstrip().startswith("{")):
            options[name] = parse_object(name, text)
    return options
