"""A server as users start it, in a process of its own."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.client import HTTPConnection, HTTPResponse
from pathlib import Path
from typing import Any

ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1"}
LIMIT_S = 90.0


class Process:
    """Runs a command that serves, its log in a file."""

    def __init__(self, log: Path, command: list[str]) -> None:
        self.log = log
        with log.open("w") as file:
            self.process = subprocess.Popen(command, stderr=file, stdout=file, env=ENVIRONMENT)
        self.port = 0
        end_s = time.monotonic() + LIMIT_S
        while not self.port and self.process.poll() is None:
            assert time.monotonic() < end_s, log.read_text()
            found = re.search(r"serving .* at http://127.0.0.1:(\d+)", log.read_text())
            self.port = 0 if found is None else int(found[1])
            time.sleep(0.02)

    def ask(self, method: str, path: str, body: Any = None) -> HTTPResponse:
        connection = HTTPConnection("127.0.0.1", self.port, timeout=LIMIT_S)
        given = {} if body is None else {"content-type": "application/json"}
        connection.request(method, path, None if body is None else json.dumps(body), given)
        return connection.getresponse()

    def complete(self, prompt: str, max_tokens: int, **more: Any) -> HTTPResponse:
        body = {"prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True, **more}
        return self.ask("POST", "/v1/completions", body)

    def wait(self) -> int:
        try:
            return self.process.wait(LIMIT_S)
        except subprocess.TimeoutExpired:
            raise AssertionError(self.log.read_text()) from None


@contextmanager
def serving(log: Path, *arguments: object, launcher: tuple[str, ...] = ()) -> Iterator[Process]:
    """A server on a port of its own choice, killed at the end."""
    command = [sys.executable, *launcher, "-m", "medha.serve", *map(str, arguments), "--port", "0"]
    process = Process(log, command)
    try:
        yield process
    finally:
        process.process.kill()
        process.process.wait()
