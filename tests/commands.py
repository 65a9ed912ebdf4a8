"""Runs a command of medha in this process, and Python in one of its own; waits for what comes of it."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

import medha

ENVIRONMENT = {**os.environ, "PYTHONPATH": str(Path(medha.__file__).parents[1]), "OMP_NUM_THREADS": "1"}
LIMIT_S = 300.0
"""How long anything may take on a machine that is loaded, slow, or stops for seconds."""


@dataclass(frozen=True)
class Done:
    """How a command ended."""

    code: int
    out: str
    err: str

    @property
    def rows(self) -> list[dict[str, Any]]:
        return parse(self.out)


Command = Callable[..., Done]


def parse(text: str) -> list[dict[str, Any]]:
    """The objects of JSON Lines, none of which may hold NaN."""
    return [json.loads(line, parse_constant=pytest.fail) for line in text.splitlines()]


def write_lines(path: Path, *rows: dict[str, Any] | str | bytes) -> Path:
    lines = (row if isinstance(row, str | bytes) else json.dumps(row) for row in rows)
    path.write_bytes(b"".join((line.encode() if isinstance(line, str) else line) + b"\n" for line in lines))
    return path


def run_python(*arguments: object, cwd: Path | None = None, **environment: str) -> subprocess.CompletedProcess[str]:
    command, env = [sys.executable, *map(str, arguments)], ENVIRONMENT | environment
    return subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True, timeout=LIMIT_S)


def wait_until(holds: Callable[[], object], limit_s: float = LIMIT_S, *, told: Callable[[], object] = str) -> None:
    """Wait until something holds; AssertionError with what is ``told`` where it does not in time."""
    end_s = time.monotonic() + limit_s
    while not holds():
        assert time.monotonic() < end_s, told()
        time.sleep(0.005)


def without_torch(*arguments: object, module: str = "medha") -> subprocess.CompletedProcess[str]:
    """A command in a process of its own, 80 columns wide, that must end well with nothing heavy loaded."""
    code = f"import runpy, sys; sys.argv[0] = 'medha'\ntry: runpy.run_module('{module}', run_name='__main__')\n"
    code += "finally: assert not {'torch', 'tokenizers', 'matplotlib', 'scipy'} & set(sys.modules)"
    done = run_python("-c", code, *arguments, COLUMNS="80")
    assert done.returncode == 0, done.stderr
    return done
