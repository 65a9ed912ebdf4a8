"""The replay of a journal (:mod:`medha.engine.journal`): its calls put to a new scheduler, every decision compared."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

from medha.batch import Batch
from medha.config import SchedulerConfig
from medha.cost.chunk_times import ChunkTimes
from medha.cost.coefficients import Coefficients
from medha.cost.improvement import RateTable
from medha.cost.predictor import Predictor
from medha.engine.journal import FORMAT, VERSION
from medha.errors import ConfigError
from medha.params import SLO
from medha.sched.cdsp import Planner
from medha.sched.decision import SchedulerRequest
from medha.sched.scheduler import Scheduler

logger = logging.getLogger("medha")

_Decision = Batch | float | tuple[int, ...] | str | None


@dataclass(frozen=True, slots=True)
class Replay:
    """What became of a replay, which ends at the first difference."""

    num_calls: int  # that came to the same decisions
    num_batches: int  # among these
    # The line, the call, its batch (that decided or completed, or the next to be scheduled) and both decisions.
    mismatch: str | None = None


def replay(journal: Path | Iterable[str]) -> Replay:
    """Put the calls of a journal, a file or its lines, to a new scheduler of its configuration.

    A policy that the journal names as ``package.module:name`` is imported. The last line of a file is left out
    where it lacks its end, as a killed process leaves it.

    Raises:
        ConfigError: it cannot be read, it is no journal, or a line is no call.
    """
    if isinstance(journal, Path):
        try:
            with journal.open(encoding="utf-8", errors="replace") as file:
                head = file.readline()
                if not re.match(rf'{{\s*"format"\s*:\s*"{FORMAT}".*\n', head):
                    what = f"{journal} is not a medha journal, or is truncated in its first line"
                    raise ConfigError(f"{what}; accepted: what medha generate --journal wrote")
                return replay(_whole_lines(chain([head], file), journal))
        except OSError as error:
            raise ConfigError(f"journal {journal}: {error.strerror}") from error
    entries = ((number, _parsed(number, line, json.loads)) for number, line in enumerate(journal, start=1))
    replayer = _Replayer(_parsed(1, next(entries, (1, {}))[1], _scheduler))
    num_calls = num_batches = 0
    for number, entry in entries:
        call, recorded = _parsed(number, entry, replayer.call)
        batch_id = entry.get("batch_id", replayer.next_batch_id)
        try:
            replayed = call()
        except Exception as error:  # the recorded call did not raise, so whatever this one does is a difference
            replayed = f"{type(error).__name__}: {error}"
        if replayed != recorded:
            where = f"line {number}, {entry['call']} (batch {batch_id})"
            shown = ["nothing" if decision is None else str(decision) for decision in (recorded, replayed)]
            return Replay(num_calls, num_batches, f"{where}:\nrecorded {shown[0]}\nreplayed {shown[1]}")
        num_calls += 1
        num_batches += isinstance(replayed, Batch)
    return Replay(num_calls, num_batches)


def _whole_lines(lines: Iterable[str], journal: Path) -> Iterator[str]:
    for line in lines:
        if line.endswith("\n"):
            yield line
        else:
            logger.warning("%s is truncated: its last line, which lacks its end, is left out", journal)


def _scheduler(head: dict[str, Any]) -> Scheduler:
    """The scheduler of the first line."""
    if (head["format"], head["version"]) != (FORMAT, VERSION):
        raise ValueError(f"accepted: {FORMAT}, version {VERSION}")
    coefficients = Coefficients.from_json(json.dumps(head["predictor"]["coefficients"]), source="journal")
    predictor = Predictor(coefficients, max_tokens=head["predictor"]["max_tokens"])
    sizes = {name: head[name] for name in ("num_blocks", "block_size", "num_groups", "max_prompt_tokens")}
    config, planner = SchedulerConfig(**head["config"]), None
    if (dealt := head.get("dealing")) is not None:
        rows, rates = tuple(map(tuple, dealt["times"]["coefficients"])), dealt["rates"]
        times = ChunkTimes(tuple(dealt["times"]["sizes"]), rows, dealt["times"]["groups_per_node"])
        rates = rates if isinstance(rates, float) else RateTable.from_json(rates, source="journal")
        planner = Planner(times, sizes["num_groups"], max_chunks=config.max_chunks, rates=rates)
    return Scheduler(config, planner, predictor=predictor, **sizes)


class _Replayer:
    """Puts recorded calls to a scheduler."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._in_flight: dict[int, Batch] = {}
        self.next_batch_id = 0

    def call(self, entry: dict[str, Any]) -> tuple[Callable[[], _Decision], _Decision]:
        """A recorded call, to be made, and what it came to."""
        name, now_s = entry["call"], entry.get("now_s")
        if name == "fresh":
            return partial(self._start_afresh, entry["learned"]), None
        if name == "add":
            slo = entry["head"]["slo"]
            slo, prefix = None if slo is None else SLO(**slo), bytes.fromhex(entry["head"]["prefix"])
            request = SchedulerRequest(**entry["head"] | {"slo": slo, "prefix": prefix})
            return lambda: self._scheduler.add(request, now_s).deadline_s, entry["deadline_s"]
        if name == "extend":
            return partial(self._scheduler.extend, entry["slot"], bytes.fromhex(entry["ids"])), None
        if name == "forget":
            return self._scheduler.reset_prefix_cache, None
        if name == "cancel":
            return partial(self._scheduler.cancel, entry["slot"]), tuple(entry["closed"])
        if name == "schedule":
            recorded = None if entry["batch"] is None else Batch.from_ints(entry["batch"])
            return partial(self._schedule, entry["now_s"]), recorded
        if name == "complete":
            batch_id, busy_s = entry["batch_id"], entry["busy_s"]
            results = [(slot, count, finished) for slot, count, finished in entry["results"]]
            args = entry["now_s"], results, busy_s
            return lambda: self._scheduler.complete(self._in_flight.pop(batch_id), *args), tuple(entry["closed"])
        raise ValueError(f"call {name!r}; accepted: add, extend, forget, cancel, schedule, complete, fresh")

    def _start_afresh(self, learned: dict[str, tuple[float, int]]) -> None:
        self._scheduler.predictor.learned = learned
        self._scheduler = self._scheduler.fresh()
        self._in_flight.clear()
        self.next_batch_id = 0

    def _schedule(self, now_s: float) -> Batch | None:
        batch = self._scheduler.schedule(now_s).batch
        if batch is not None:
            self._in_flight[batch.batch_id] = batch
            self.next_batch_id = batch.batch_id + 1
        return batch


def _parsed(number: int, value: Any, parse: Callable[[Any], Any]) -> Any:
    """``parse(value)``, whose errors name the line of the journal."""
    try:
        return parse(value)
    except (ValueError, TypeError, LookupError, AttributeError, ArithmeticError, MemoryError, RecursionError) as error:
        raise ConfigError(f"journal line {number} cannot be read: {type(error).__name__}: {error}") from error
