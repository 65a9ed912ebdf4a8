"""Options of commands: made from the fields of dataclasses, and taken by group."""

from dataclasses import dataclass, fields
from typing import Annotated, Any, get_args

import pytest
import typer

from medha.cli.command import make_app, run_app
from medha.cli.options import DEALT, ENGINE, SAMPLING, SIMULATED, but, engine_options, options_of, takes
from medha.config import EngineConfig
from medha.config.engine_config import SECTIONS
from medha.config.fields import option, option_of
from medha.errors import ConfigError
from medha.params import SamplingParams


@dataclass
class Made:
    """A dataclass with options."""

    size: int = option("Sizes", 3, "How large.")
    limit: int | None = option("Sizes", None, "At most.", shown="no limit")
    half_s: float = option("Times", 0.5, "Half of it.", name="half")
    is_new: bool = option("Times", False, "Anew.", flags=("--new",))
    shape: dict[str, Any] | None = option("Times", None, "A JSON object.", kind=str)
    inner: int = 0


def command_of(*groups: Any) -> tuple[Any, dict[str, Any]]:
    seen: dict[str, Any] = {}
    app = make_app()

    @app.command()
    @takes(*groups)
    def count(mine: Annotated[int, typer.Option(help="Own.")] = 1, **given: Any) -> int:
        """Count."""
        seen.update(given, mine=mine)
        return 0

    return app, seen


def test_a_field_is_an_option_of_its_heading() -> None:
    groups = options_of(Made)
    assert {name: list(group) for name, group in groups.items()} == {
        "Sizes": ["size", "limit"],
        "Times": ["half", "is_new", "shape"],
    }
    app, seen = command_of(*groups.values())
    assert run_app(app, "count", ["--mine", "2"]) == 0
    assert seen == {"size": 3, "limit": None, "half": 0.5, "is_new": False, "shape": None, "mine": 2}
    assert run_app(app, "count", ["--size", "1K", "--limit=2", "--half", "1", "--new", "--shape", "{}"]) == 0
    assert seen == {"size": 1024, "limit": 2, "half": 1.0, "is_new": True, "shape": "{}", "mine": 1}
    assert run_app(app, "count", ["--size", "x"]) == 2


def test_help_is_the_fields(capsys: pytest.CaptureFixture[str]) -> None:
    app, _ = command_of(*options_of(Made).values())
    assert run_app(app, "count", ["--help"]) == 0
    text = " ".join(capsys.readouterr().out.replace("│", " ").split())
    for said in ("Sizes", "How large. [default: 3]", "At most. [default: (no limit)]", "Times", "--new", "Own."):
        assert said in text
    assert "--given" not in text and "inner" not in text


def test_a_command_has_defaults_of_its_own() -> None:
    sizes = options_of(Made)["Sizes"]
    app, seen = command_of(but(sizes, "size", limit=7))
    assert run_app(app, "count", []) == 0
    assert seen == {"limit": 7, "mine": 1}
    app, seen = command_of(but(sizes, size=(None, "what fits")))
    assert run_app(app, "count", []) == 0
    assert seen == {"size": None, "limit": None, "mine": 1}
    assert run_app(app, "count", ["--size", "5"]) == 0
    assert seen["size"] == 5


def test_every_field_that_users_give_is_an_option() -> None:
    """With the help, the type and the default of its field; text stands for what is read later."""
    declared = {**ENGINE, **SIMULATED, **DEALT, **SAMPLING}
    found = set()
    for cls in (*SECTIONS.values(), SamplingParams):
        for field in fields(cls):
            said = option_of(field)
            if said is None or not said.panel:
                continue
            name = said.name or field.name
            found.add(name)
            hint, shown = get_args(declared[name][0])
            assert shown.help == said.help and shown.rich_help_panel == said.panel
            kind = hint.__name__ if isinstance(hint, type) else str(hint)
            assert said.kind is not None or kind.split(" | ")[0] == str(field.type).split(" | ")[0]
            is_read_later = said.kind is str or name == "model"
            assert declared[name][1] == (None if is_read_later else field.default)
    assert found == set(declared)


def test_options_reach_the_engine() -> None:
    given = {name: default for name, (_, default) in ENGINE.items()}
    assert EngineConfig.from_flat("m", **engine_options(given)) == EngineConfig("m")
    text = given | {"model": "x", "hf_overrides": '{"a": 1}', "rope_scaling": '{"rope_type": "yarn"}', "other": 1}
    options = engine_options(text | {"swap_space": "1"})
    assert options["hf_overrides"] == {"a": 1} and options["rope_scaling"] == {"rope_type": "yarn"}
    assert "other" not in options and EngineConfig.from_flat(**options).cache.swap_bytes == 2**30
    assert engine_options({"rope_scaling": "yarn"}) == {"rope_scaling": "yarn"}
    for wrong in ("[1]", "{", '{"a": 1, "a": 2}'):
        with pytest.raises(ConfigError, match="hf_overrides"):
            engine_options({"hf_overrides": wrong})
