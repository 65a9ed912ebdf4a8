"""The ``medha`` command: its verbs, versions, and that it starts fast."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import medha
from medha.__main__ import app
from medha.cli.command import make_app, run_app
from medha.cli.report import environment
from medha.errors import ConfigError, EngineDeadError, RequestError, ValidationError

ROOT = Path(medha.__file__).parents[1]


def run_python(code: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "COLUMNS": "80"}
    return subprocess.run(
        [sys.executable, "-c", code, *arguments], env=environment, capture_output=True, text=True, timeout=60
    )


@pytest.mark.parametrize("arguments", [[], ["-v"], ["generate", "-h"], ["env", "--help"]])
def test_help_and_version_load_no_torch(arguments: list[str]) -> None:
    code = "import runpy, sys; sys.argv[0] = 'medha'\ntry: runpy.run_module('medha', run_name='__main__')\n"
    code += "finally: assert not {'torch', 'tokenizers'} & set(sys.modules)"
    done = run_python(code, *arguments)
    assert (done.returncode, done.stderr) == (0, "")
    if arguments == ["-v"]:
        assert done.stdout == f"medha {medha.__version__}\n"
    else:
        assert "Usage: medha" in done.stdout


def test_help_breaks_its_lines_at_the_width_alone(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_app(app, "medha", ["bench", "serve", "--help"]) == 0
    text = " ".join(capsys.readouterr().out.split("╭")[0].split())
    assert "ITL: gap between successive tokens. E2EL: arrival to last token." in text
    done = run_python("from medha.__main__ import main; main()", "bench", "serve", "--help")
    paragraph = done.stdout.split("TTFT: arrival")[1].split("\n \n")[0].split("╭")[0].rstrip().splitlines()
    assert all(len(line.rstrip()) > 60 for line in paragraph[1:-1])


def test_verbs_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_app(app, "medha", []) == 0
    out = capsys.readouterr().out
    assert all(verb in out for verb in ("generate", "env", "bench", "--version"))
    assert run_app(app, "medha", ["--version"]) == 0
    assert capsys.readouterr().out == f"medha {medha.__version__}\n"


def test_env(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_app(app, "medha", ["env", "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts == environment()
    assert facts["medha"] == medha.__version__
    assert facts["packages"]["torch"] == torch.__version__
    assert facts["threads"] == torch.get_num_threads()
    assert facts["devices"][0] == "cpu"
    assert run_app(app, "medha", ["env"]) == 0
    printed = capsys.readouterr().out
    assert {line.split(":")[0] for line in printed.splitlines()} >= {name for name, fact in facts.items() if fact}
    assert f"torch {torch.__version__}" in printed


@pytest.mark.parametrize("arguments", [["nothing"], ["--nothing"], ["env", "--nothing"], ["env", "more"]])
def test_bad_usage_is_one_line(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert run_app(app, "medha", arguments) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("error: ")
    assert captured.err.endswith("(see medha --help)\n")
    assert captured.err.count("\n") == 1


@pytest.mark.parametrize(("given", "seen", "spins"), [(None, "passive", "2000"), ("active", "active", None)])
def test_threads_soon_sleep(given: str | None, seen: str, spins: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    if given is not None:
        monkeypatch.setenv("OMP_WAIT_POLICY", given)
    assert run_app(app, "medha", ["--version"]) == 0
    assert (os.environ["OMP_WAIT_POLICY"], os.environ.get("GOMP_SPINCOUNT")) == (seen, spins)


@pytest.mark.parametrize(
    ("arguments", "instead"),
    [
        (["run-batch", "-i", "in.jsonl", "-o", "out.jsonl", "--model", "m"], "medha generate MODEL --requests FILE"),
        (["chat"], "medha generate MODEL --chat --prompt TEXT"),
        (["complete", "--model", "m"], "medha generate MODEL --prompt TEXT"),
        (["collect-env"], "medha env"),
    ],
)
def test_verbs_of_other_engines(arguments: list[str], instead: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_app(app, "medha", arguments) == 2
    captured = capsys.readouterr()
    assert captured.err.startswith(f"error: ConfigError: medha has no verb '{arguments[0]}'; accepted: ")
    assert instead in captured.err
    assert run_app(app, "medha", []) == 0
    assert f"│ {arguments[0]} " not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (ConfigError("a\nb"), 2),
        (ValidationError("x"), 2),
        (RequestError("x"), 3),
        (EngineDeadError("x"), 4),
        (KeyboardInterrupt(), 130),
        (ZeroDivisionError(), None),  # not hidden
    ],
)
def test_errors_become_exit_codes(error: BaseException, code: int | None, capsys: pytest.CaptureFixture[str]) -> None:
    failing = make_app()

    @failing.command()
    def fail() -> int:
        raise error

    if code is None:
        with pytest.raises(ZeroDivisionError):
            run_app(failing, "failing", [])
        return
    assert run_app(failing, "failing", []) == code
    err = capsys.readouterr().err
    assert "\n" not in err[:-1]
    if code == 2:
        assert err == f"error: {type(error).__name__}: {' '.join(str(error).split())}\n"
