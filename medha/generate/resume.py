"""``--resume``: what an earlier run left in its output file, and which of its requests are left to run."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from medha.engine.arrivals import Arrival
from medha.errors import ConfigError

_LOST = ("EngineDeadError", "PlanDivergenceError", "RankFailedError")  # errors of a run, not of a request


@dataclass(frozen=True, slots=True)
class Earlier:
    """What an earlier run did.

    Attributes:
        done: ids of the requests whose lines stand.
        num_failed: how many of these lines hold an error, which is final: the request's own.
        dropped: numbers of the lines to drop: of requests that were aborted or lost with the engine, and a torn end.
    """

    done: frozenset[str] = frozenset()
    num_failed: int = 0
    dropped: frozenset[int] = frozenset()

    def left(self, arrivals: Sequence[Arrival]) -> list[Arrival]:
        """The requests that have no line yet, in time as they were, but that the first of them arrives at once."""
        left = [arrival for arrival in arrivals if arrival.request_id not in self.done]
        return [replace(arrival, arrival_s=arrival.arrival_s - left[0].arrival_s) for arrival in left]


def read_earlier(path: Path, arrivals: Sequence[Arrival]) -> Earlier:
    """What an output file of JSON lines, which need not be there yet, says of the requests that the run was of.

    Raises:
        ConfigError: the file cannot be read, or is not the output of these requests.
    """
    asked = {arrival.request_id for arrival in arrivals}
    done: set[str] = set()
    dropped = set()
    num_failed = 0
    for number, line in _lines(path):
        fields = _fields(line)
        if not line.endswith(b"\n"):  # the last one, torn
            dropped.add(number)
        elif fields is None:
            raise _not_ours(path, number, f"{line[:40]!r} is no output line")
        elif fields["id"] not in asked or fields["id"] in done:
            reason = "there twice" if fields["id"] in done else "not among the requests"
            raise _not_ours(path, number, f"id {fields['id']!r:.80} is {reason}")
        elif _was_cut_short(fields):
            dropped.add(number)
        else:
            done.add(fields["id"])
            num_failed += fields.get("error") is not None
    return Earlier(frozenset(done), num_failed, frozenset(dropped))


def drop_lines(path: Path, dropped: frozenset[int]) -> None:
    """Rewrite an output file without some of its lines; whoever is killed meanwhile has the file as it was."""
    if not dropped:
        return
    target = path.resolve()
    partial = target.with_name(target.name + ".partial")
    try:
        with partial.open("wb") as file:
            file.writelines(line for number, line in _lines(target) if number not in dropped)
            file.flush()
            os.fsync(file.fileno())
        shutil.copymode(target, partial)
        partial.replace(target)
    except OSError as error:
        raise ConfigError(f"output file {path} cannot be rewritten beside itself: {error.strerror}") from error


def _lines(path: Path) -> Iterator[tuple[int, bytes]]:
    """The lines of a file with their numbers."""
    try:
        with path.open("rb") as file:
            yield from enumerate(file, start=1)
    except FileNotFoundError:
        return
    except OSError as error:
        raise ConfigError(f"output file {path}: {error.strerror}") from error


def _fields(line: bytes) -> dict[str, Any] | None:
    """What an output line says; None where it is none."""
    try:
        fields = json.loads(line)
    except (ValueError, RecursionError):
        return None
    is_ours = isinstance(fields, dict) and isinstance(fields.get("id"), str) and "finish_reason" in fields
    return fields if is_ours else None


def _was_cut_short(fields: dict[str, Any]) -> bool:
    """Whether the run ended before the request did, with all of its completions."""
    error, outputs = fields.get("error"), fields.get("outputs", [])
    is_lost = isinstance(error, dict) and error.get("type") in _LOST
    return is_lost or any(one.get("finish_reason") == "abort" for one in (fields, *outputs))


def _not_ours(path: Path, number: int, reason: str) -> ConfigError:
    return ConfigError(
        f"output file {path} line {number}: {reason}; accepted: what a run of the same requests wrote, or --overwrite"
    )
