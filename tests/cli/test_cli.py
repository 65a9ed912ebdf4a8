"""The ``medha`` command: its verbs, versions, and that it starts fast."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import medha
from medha.cli import command as commands
from medha.cli.command import complain, make_app, run_app
from medha.cli.report import environment
from medha.errors import ConfigError, EngineDeadError, RequestError, ValidationError
from tests.commands import ENVIRONMENT, LIMIT_S, Command, without_torch


@pytest.mark.parametrize("arguments", [[], ["-v"], ["generate", "-h"], ["env", "--help"]])
def test_help_and_version_load_no_torch(arguments: list[str]) -> None:
    done = without_torch(*arguments)
    assert done.stderr == ""
    assert done.stdout == f"medha {medha.__version__}\n" if arguments == ["-v"] else "Usage: medha" in done.stdout


def test_help_breaks_its_lines_at_the_width_alone(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    text = command("bench", "serve", "--help").out.split("╭")[0]
    assert "ITL: gap between successive tokens. E2EL: arrival to last token." in " ".join(text.split())
    paragraph = text.split("TTFT: arrival")[1].split("\n \n")[0].rstrip().splitlines()
    assert all(len(line.rstrip()) > 60 for line in paragraph[1:-1])


def test_verbs_are_listed(command: Command) -> None:
    done = command()
    assert done.code == 0 and all(verb in done.out for verb in ("generate", "env", "bench", "--version"))
    assert command("--version").out == f"medha {medha.__version__}\n"


def test_env(command: Command) -> None:
    facts = json.loads(command("env", "--json").out)
    assert (facts, facts["medha"]) == (environment(), medha.__version__)
    assert (facts["packages"]["torch"], facts["threads"]) == (torch.__version__, torch.get_num_threads())
    assert facts["devices"][0] == "cpu"
    printed = command("env").out
    assert {line.split(":")[0] for line in printed.splitlines()} >= {name for name, fact in facts.items() if fact}
    assert f"torch {torch.__version__}" in printed


@pytest.mark.parametrize("arguments", [["nothing"], ["--nothing"], ["env", "--nothing"], ["env", "more"]])
def test_bad_usage_is_one_line(arguments: list[str], command: Command) -> None:
    done = command(*arguments)
    assert (done.code, done.out, done.err.count("\n")) == (2, "", 1)
    assert done.err.startswith("error: ") and done.err.endswith("(see medha --help)\n")


@pytest.mark.parametrize(("given", "seen", "spins"), [(None, "passive", "10000"), ("active", "active", None)])
def test_threads_soon_sleep(
    given: str | None, seen: str, spins: str | None, monkeypatch: pytest.MonkeyPatch, command: Command
) -> None:
    for name in ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    if given is not None:
        monkeypatch.setenv("OMP_WAIT_POLICY", given)
    assert command("--version").code == 0
    assert (os.environ["OMP_WAIT_POLICY"], os.environ.get("GOMP_SPINCOUNT")) == (seen, spins)


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


@pytest.mark.parametrize(("rank", "printed"), [("0", "error: it is wrong\n"), ("1", "")])
def test_every_rank_tells_the_launcher_and_one_the_user(
    rank: str, printed: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As the launcher reports the rank that ended first, which may be any."""
    monkeypatch.setenv("RANK", rank)
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "error.json"))
    monkeypatch.setattr(commands, "_SPEAK_S", 0.0)
    assert complain("it is\nwrong", 2) == 2
    assert json.loads((tmp_path / "error.json").read_text())["message"]["message"] == "it is wrong"
    assert capsys.readouterr().err == printed


@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_stdout_that_cannot_be_written_is_one_line(unbuffered: str) -> None:
    """And none where its reader has had enough."""
    full = "error: stdout cannot be written: No space left on device\n"
    reader, writer = os.pipe()
    os.close(reader)
    for stdout, code, error in ((os.open("/dev/full", os.O_WRONLY), 2, full), (writer, 1, "")):
        command, env = [sys.executable, "-m", "medha", "--version"], ENVIRONMENT | {"PYTHONUNBUFFERED": unbuffered}
        done = subprocess.run(command, stdout=stdout, stderr=subprocess.PIPE, text=True, env=env, timeout=LIMIT_S)
        os.close(stdout)
        assert (done.returncode, done.stderr) == (code, error)
