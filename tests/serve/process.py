"""A server as users start it, in a process of its own."""

from __future__ import annotations

import json
import re
import socket
import subprocess
import sys
from contextlib import suppress
from http.client import HTTPConnection, HTTPResponse
from pathlib import Path
from typing import Any, Self

from tests.commands import ENVIRONMENT, LIMIT_S, wait_until


class Process:
    """Runs a command that serves, its log in a file, from which its port is read where it is not known; killed at the
    end of the context."""

    def __init__(self, log: Path, command: list[str], *, port: int = 0) -> None:
        self.log = log
        with log.open("w") as file:
            self.process = subprocess.Popen(command, stderr=file, stdout=file, env=ENVIRONMENT)
        self.port = port
        try:
            wait_until(lambda: self._is_up() or self.process.poll() is not None, told=self.log.read_text)
        except AssertionError:
            self.__exit__()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.process.kill()
        self.process.wait()

    def _is_up(self) -> bool:
        if self.port:
            with suppress(OSError), socket.create_connection(("127.0.0.1", self.port)):
                return True
            return False
        found = re.search(r"serving .* at http://127.0.0.1:(\d+)", self.log.read_text())
        self.port = 0 if found is None else int(found[1])
        return self.port > 0

    def ask(self, method: str, path: str, body: Any = None) -> HTTPResponse:
        assert self.port, self.log.read_text()  # it ended before it served
        connection = HTTPConnection("127.0.0.1", self.port, timeout=LIMIT_S)
        given = {} if body is None else {"content-type": "application/json"}
        connection.request(method, path, None if body is None else json.dumps(body), given)
        return connection.getresponse()

    def complete(self, prompt: str, max_tokens: int, **more: Any) -> HTTPResponse:
        body = {"prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True, **more}
        return self.ask("POST", "/v1/completions", body)

    def wait(self) -> int:
        wait_until(lambda: self.process.poll() is not None, told=self.log.read_text)
        return self.process.returncode


def serving(log: Path, *arguments: object, launcher: tuple[str, ...] = (), port: int = 0) -> Process:
    """A server on a port of its own choice, or on this one, where its log cannot be read."""
    command = [sys.executable, *launcher, "-m", "medha.serve", *map(str, arguments), "--port", str(port)]
    return Process(log, command, port=port)


def streams_under_load(server: Process, max_tokens: int) -> list[HTTPResponse]:
    """Streams of which some are answered, one is being read, and one waits, where 4 are served at once."""
    for attempt in range(10):  # where the machine stops here, there is no such time that is seen
        prompts = [f"{attempt}" + "hello" * 2000, *["hello"] * 4]
        answers = [server.complete(prompt, max_tokens, stream=True) for prompt in prompts]
        states = {"waiting"}
        while "waiting" in states and ("reading" in states or "answering" not in states):
            line = server.ask("GET", "/events").readline()
            states = {row["state"] for row in json.loads(line.removeprefix(b"data: "))["requests"]}
            if {"waiting", "reading", "answering"} <= states:
                return answers
        for answer in answers:
            answer.close()
    raise AssertionError(f"the last had {states}")


def last_events(answer: HTTPResponse) -> tuple[dict[str, Any], bytes]:
    """The last event of a stream, and what ends it."""
    *_, event, done = [line for line in answer.read().splitlines() if line]
    return json.loads(event.removeprefix(b"data: ")), done
