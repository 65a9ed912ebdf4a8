"""The journal: what was asked of a scheduler and what it decided, as JSON lines, and the replay of one.

A scheduler decides the same whenever it is called the same. So its configuration, the coefficients of its predictor and
the calls at its seam are all that is needed to come to the decisions of a live run again. :class:`Journal` stands in a
scheduler's place and writes them down; :func:`replay` puts the calls to a new scheduler and compares every decision.

The first line says what scheduler it is, each other line is one call with its result, batches as the flat integers of
:meth:`medha.batch.Batch.to_ints`. JSON is as Python writes it: numbers come back bit by bit, and ``Infinity`` and
``NaN`` are numbers. Calls that raised are not recorded, nor are calls of ``schedule`` while the pipeline is full: they
decide nothing.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Any, TextIO

from medha.batch import Batch
from medha.config import SchedulerConfig
from medha.cost.coefficients import Coefficients
from medha.cost.predictor import Predictor
from medha.errors import ConfigError, EngineDeadError
from medha.params import SLO
from medha.sched.queue import RequestHead
from medha.sched.scheduler import Scheduler

_FORMAT = "medha-journal"
_VERSION = 1


class Journal:
    """A scheduler that writes down what happens to it. Has everything that a :class:`Scheduler` has.

    Args:
        scheduler: whose configuration and predictor to take; the requests that it knows are not taken over.
        file: text; a line is written at each call. Left open.

    Raises:
        ConfigError: the policy is a function, which cannot be written down, or the predictor has learned already.
        EngineDeadError: the file cannot be written; also from every call. What was written before replays.
    """

    def __init__(self, scheduler: Scheduler, file: TextIO) -> None:
        self._scheduler = scheduler.fresh()
        self._file = file
        self._write(_head(scheduler))

    def __getattr__(self, name: str) -> Any:
        """Whatever else there is to see of the scheduler."""
        return getattr(self._scheduler, name)

    def fresh(self) -> Journal:
        """See :meth:`Scheduler.fresh`; the same journal goes on.

        What the predictor has learned is written down: an interrupt may have struck between a call and its line.
        """
        self._scheduler = self._scheduler.fresh()
        predictor = self._scheduler.predictor
        self._write({"call": "fresh", "learned": None if predictor is None else predictor.correction.learned})
        return self

    def admission_s(self, head: RequestHead, now_s: float) -> float | None:
        """See :meth:`Scheduler.admission_s`."""
        predicted_s = self._scheduler.admission_s(head, now_s)
        self._write({"call": "admission_s", "head": asdict(head), "now_s": now_s, "predicted_s": predicted_s})
        return predicted_s

    def add(self, head: RequestHead) -> float:
        """See :meth:`Scheduler.add`."""
        deadline_s = self._scheduler.add(head)
        self._write({"call": "add", "head": asdict(head), "deadline_s": deadline_s})
        return deadline_s

    def cancel(self, slot: int) -> tuple[int, ...]:
        """See :meth:`Scheduler.cancel`."""
        closed = self._scheduler.cancel(slot)
        self._write({"call": "cancel", "slot": slot, "closed": closed})
        return closed

    def schedule(self, now_s: float) -> Batch | None:
        """See :meth:`Scheduler.schedule`."""
        is_full = len(self._scheduler.in_flight) >= self._scheduler.depth
        batch = self._scheduler.schedule(now_s)
        if not is_full:
            self._write({"call": "schedule", "now_s": now_s, "batch": _ints(batch)})
        return batch

    def complete(
        self, batch_id: int, now_s: float, results: Iterable[tuple[int, int, bool]], busy_s: float
    ) -> tuple[int, ...]:
        """See :meth:`Scheduler.complete`."""
        results = list(results)
        closed = self._scheduler.complete(batch_id, now_s, results, busy_s)
        self._write(
            {
                "call": "complete",
                "batch_id": batch_id,
                "now_s": now_s,
                "results": results,
                "busy_s": busy_s,
                "closed": closed,
            }
        )
        return closed

    def _write(self, line: dict[str, Any]) -> None:
        try:
            self._file.write(json.dumps(line, separators=(",", ":")) + "\n")
        except OSError as error:  # the scheduler is a call ahead of its journal: it must not go on
            name = getattr(self._file, "name", "")
            raise EngineDeadError(f"journal {name}: {error.strerror}; what was written before is kept") from None


def check_recordable(config: SchedulerConfig) -> None:
    """Raise ConfigError if a scheduler of this configuration cannot be written down: its policy is a function."""
    if not isinstance(config.policy, str):
        raise ConfigError(f"policy={config.policy!r} cannot be recorded; accepted: a name, or 'package.module:name'")


@dataclass(frozen=True, slots=True)
class Mismatch:
    """The first decision of a replay that is not the recorded one.

    Attributes:
        line: of the journal, from 1.
        call: what was asked.
        batch_id: of the batch decided or completed; for another call, of the next batch to be scheduled.
        recorded, replayed: the decisions, as text.
    """

    line: int
    call: str
    batch_id: int
    recorded: str
    replayed: str

    def __str__(self) -> str:
        return (
            f"line {self.line}, {self.call} (batch {self.batch_id}):\n"
            f"recorded {self.recorded}\nreplayed {self.replayed}"
        )


@dataclass(frozen=True, slots=True)
class Replay:
    """What became of a replay.

    Attributes:
        num_calls: calls whose decisions were the same.
        num_batches: batches among those decisions.
        mismatch: the first decision that differs, at which the replay ends; None if all are the same.
        is_truncated: the file lacks the end of its last line, which was left out.
    """

    num_calls: int
    num_batches: int
    mismatch: Mismatch | None = None
    is_truncated: bool = False


def replay(journal: Path | Iterable[str]) -> Replay:
    """Put the calls of a journal to a new scheduler of its configuration.

    A policy that the journal names as ``package.module:name`` is imported. The last line of a file is left out
    where it lacks its end, as a killed process leaves it.

    Args:
        journal: the file, or its lines.

    Raises:
        ConfigError: it cannot be read, it is no journal, or a line is no call.
    """
    if isinstance(journal, Path):
        try:
            with journal.open(encoding="utf-8", errors="replace") as file:
                head = _head_of(file, journal)
                cut: list[str] = []
                found = replay(chain([head], _whole_lines(file, cut)))
                return replace(found, is_truncated=bool(cut))
        except OSError as error:
            raise ConfigError(f"journal {journal}: {error.strerror}") from error
    entries = _entries(journal)
    first = next(entries, (1, {}))[1]
    scheduler = _parsed(1, first, _scheduler)
    num_calls = num_batches = next_batch_id = 0
    for number, entry in entries:
        call, recorded = _parsed(number, entry, _call)
        try:
            scheduler, replayed = call(scheduler)
        except Exception as error:  # the recorded call did not raise, so whatever this one does is a difference
            replayed = f"{type(error).__name__}: {error}"
        if replayed != recorded:
            batch_id = entry.get("batch_id", next_batch_id)
            mismatch = Mismatch(number, entry["call"], batch_id, _shown(recorded), _shown(replayed))
            return Replay(num_calls, num_batches, mismatch)
        num_calls += 1
        num_batches += isinstance(replayed, Batch)
        next_batch_id = 0 if entry["call"] == "fresh" else next_batch_id + isinstance(replayed, Batch)
    return Replay(num_calls, num_batches)


def _head_of(file: TextIO, path: Path) -> str:
    """The first line of a journal.

    Raises:
        ConfigError: it is none, or lacks its end.
    """
    head = file.readline()
    if not re.match(rf'{{\s*"format"\s*:\s*"{_FORMAT}"', head):
        raise ConfigError(f"{path} is not a medha journal; accepted: what medha generate --journal wrote")
    if not head.endswith("\n"):
        raise ConfigError(f"journal {path} is truncated in its first line; accepted: one with at least that")
    return head


def _whole_lines(file: TextIO, cut: list[str]) -> Iterator[str]:
    """The lines that have their end; one that lacks it goes into ``cut``."""
    for line in file:
        if line.endswith("\n"):
            yield line
        else:
            cut.append(line)


_Decision = Batch | float | tuple[int, ...] | str | None
_Call = Callable[[Scheduler], tuple[Scheduler, _Decision]]


def _head(scheduler: Scheduler) -> dict[str, Any]:
    """What a scheduler is, as a line of a journal."""
    config, memory, predictor = scheduler.config, scheduler.memory, scheduler.predictor
    check_recordable(config)
    if predictor is not None and predictor.correction.errors.figures().count:
        raise ConfigError("a journal begins with a predictor that has learned nothing; this one has seen batches")
    return {
        "format": _FORMAT,
        "version": _VERSION,
        "config": asdict(config),
        "num_blocks": memory.num_blocks,
        "block_size": memory.block_size,
        "num_groups": memory.num_groups,
        "max_prompt_tokens": scheduler.max_prompt_tokens,
        "predictor": None
        if predictor is None
        else {"max_tokens": predictor.max_tokens, "coefficients": json.loads(predictor.coefficients.to_json())},
    }


def _scheduler(head: dict[str, Any]) -> Scheduler:
    """The inverse of :func:`_head`."""
    if (head["format"], head["version"]) != (_FORMAT, _VERSION):
        raise ValueError(f"accepted: {_FORMAT}, version {_VERSION}")
    predictor = None
    if head["predictor"] is not None:
        coefficients = Coefficients.from_json(json.dumps(head["predictor"]["coefficients"]), source="journal")
        predictor = Predictor(coefficients, max_tokens=_size(head["predictor"], "max_tokens", 2**24))
    bounds = {"num_blocks": 2**31, "block_size": 2**16, "num_groups": 2**16, "max_prompt_tokens": 2**31}
    sizes = {name: _size(head, name, most) for name, most in bounds.items()}
    return Scheduler(SchedulerConfig(**head["config"]), predictor=predictor, **sizes)


def _size(fields: dict[str, Any], name: str, most: int) -> int:
    """A number of something that memory is taken for, or that is counted to."""
    value = fields[name]
    if not isinstance(value, int) or not 1 <= value <= most:
        raise ValueError(f"{name}={value!r:.80}; accepted: an integer from 1 to {most}")
    return value


def _call(entry: dict[str, Any]) -> tuple[_Call, _Decision]:
    """A recorded call and what it came to."""
    name = entry["call"]
    if name == "fresh":
        return lambda scheduler: (_fresh(scheduler, entry["learned"]), None), None
    if name == "add":
        head = _request(entry["head"])
        return lambda scheduler: (scheduler, scheduler.add(head)), entry["deadline_s"]
    if name == "cancel":
        slot = entry["slot"]
        return lambda scheduler: (scheduler, scheduler.cancel(slot)), tuple(entry["closed"])
    now_s = entry["now_s"]
    if name == "admission_s":
        head = _request(entry["head"])
        return lambda scheduler: (scheduler, scheduler.admission_s(head, now_s)), entry["predicted_s"]
    if name == "schedule":
        batch = None if entry["batch"] is None else Batch.from_ints(entry["batch"])
        return lambda scheduler: (scheduler, scheduler.schedule(now_s)), batch
    if name == "complete":
        results = [(slot, count, finished) for slot, count, finished in entry["results"]]
        batch_id, busy_s = entry["batch_id"], entry["busy_s"]
        return (
            lambda scheduler: (scheduler, scheduler.complete(batch_id, now_s, results, busy_s)),
            tuple(entry["closed"]),
        )
    raise ValueError(f"call {name!r}; accepted: admission_s, add, cancel, schedule, complete, fresh")


def _request(fields: dict[str, Any]) -> RequestHead:
    slo = fields["slo"]
    return RequestHead(**{**fields, "slo": None if slo is None else SLO(**slo)})


def _fresh(scheduler: Scheduler, learned: dict[str, tuple[float, int]] | None) -> Scheduler:
    if scheduler.predictor is not None and learned is not None:
        scheduler.predictor.correction.restore(learned)
    return scheduler.fresh()


def _entries(lines: Iterable[str]) -> Iterator[tuple[int, dict[str, Any]]]:
    for number, line in enumerate(lines, start=1):
        yield number, _parsed(number, line, json.loads)


def _parsed(number: int, value: Any, parse: Callable[[Any], Any]) -> Any:
    """``parse(value)``, whose errors name the line of the journal."""
    try:
        return parse(value)
    except (ValueError, TypeError, LookupError, AttributeError, ArithmeticError, MemoryError, RecursionError) as error:
        raise ConfigError(f"journal line {number} cannot be read: {type(error).__name__}: {error}") from error


def _ints(batch: Batch | None) -> list[int] | None:
    return None if batch is None else batch.to_ints().tolist()


def _shown(decision: _Decision) -> str:
    return "nothing" if decision is None else str(decision)
