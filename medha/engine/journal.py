"""The journal: what was asked of a scheduler and what it decided, as JSON lines.

A scheduler decides the same whenever it is called the same. So its configuration, the coefficients of its predictor and
the calls at its seam are all that :func:`medha.engine.replay.replay` needs to come to its decisions again.

The first line says what scheduler it is, each other line is one call with its result, batches as the flat integers of
:meth:`medha.batch.Batch.to_ints`. JSON is as Python writes it: numbers come back bit by bit, and ``Infinity`` and
``NaN`` are numbers. Calls that raised are not recorded.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any, TextIO

from medha.batch import Batch
from medha.config import SchedulerConfig
from medha.errors import ConfigError, EngineDeadError, is_interrupt
from medha.sched.decision import Admitted, Decision, Observer, Results, SchedulerRequest
from medha.sched.scheduler import Scheduler

FORMAT, VERSION = "medha-journal", 3


class Journal(Observer):
    """Writes down what a scheduler, which has served no request, is asked and decides, a line a call.

    It is a :class:`medha.sched.decision.Observer`. The file, which is text, is left open.

    Raises:
        ConfigError: the policy is a function, which cannot be written down, or the predictor has learned already.
        EngineDeadError: the file cannot be written; also from every call. What was written before replays.
    """

    def __init__(self, scheduler: Scheduler, file: TextIO) -> None:
        self._file = file
        config, predictor = scheduler.config, scheduler.predictor
        check_recordable(config)
        if any(num_seen for _, num_seen in predictor.learned.values()):
            raise ConfigError("a journal begins with a predictor that has learned nothing; this one has seen batches")
        predicts = {"max_tokens": predictor.max_tokens, "coefficients": json.loads(predictor.coefficients.to_json())}
        dealing = None
        if scheduler.planner is not None:
            times, rates = scheduler.planner.times, scheduler.planner.rates
            dealing = {"times": asdict(times), "rates": rates if isinstance(rates, float) else rates.to_json()}
        head = {"format": FORMAT, "version": VERSION, "config": asdict(config), **scheduler.sizes}
        self._write({**head, "predictor": predicts, "dealing": dealing})

    def added(self, request: SchedulerRequest, now_s: float | None, admitted: Admitted, name: str) -> None:
        """A request was queued."""
        head = asdict(request) | {"prefix": request.prefix.hex()}
        self._write({"call": "add", "head": head, "now_s": now_s, "deadline_s": admitted.deadline_s})

    def extended(self, slot: int, ids: bytes) -> None:
        """The output of a request has filled further units."""
        self._write({"call": "extend", "slot": slot, "ids": ids.hex()})

    def forgot(self) -> None:
        """What is kept of ended requests was forgotten."""
        self._write({"call": "forget"})

    def cancelled(self, slot: int, closed: Sequence[int]) -> None:
        """A request was cancelled."""
        self._write({"call": "cancel", "slot": slot, "closed": closed})

    def scheduled(self, now_s: float, decision: Decision) -> None:
        """A batch was decided, or that there is none."""
        ints = None if decision.batch is None else decision.batch.to_ints().tolist()
        self._write({"call": "schedule", "now_s": now_s, "batch": ints})

    def completed(self, batch: Batch, now_s: float, results: Results, busy_s: float, closed: Sequence[int]) -> None:
        """A batch is done in every stage."""
        line = {"call": "complete", "batch_id": batch.batch_id, "now_s": now_s, "results": results}
        self._write({**line, "busy_s": busy_s, "closed": closed})

    def restarted(self, learned: dict[str, tuple[float, int]]) -> None:
        """A new scheduler took the place of the former one; an interrupt may have struck between a call and its line,
        so what its predictor has learned is written down."""
        self._write({"call": "fresh", "learned": learned})

    def _write(self, line: dict[str, Any]) -> None:
        try:
            self._file.write(json.dumps(line, separators=(",", ":")) + "\n")
        except (OSError, ValueError, TypeError) as error:  # the latter: a file that is closed, or not one of text
            if is_interrupt(error):
                raise
            # The scheduler is a call ahead of its journal: it must not go on.
            name, why = getattr(self._file, "name", ""), getattr(error, "strerror", None) or error
            raise EngineDeadError(f"journal {name}: {why}; what was written before is kept") from None


def check_recordable(config: SchedulerConfig, num_others: int = 0) -> None:
    """Raise ConfigError if a scheduler of this configuration cannot be written down: its policy is a function, or there
    are schedulers of decode instances beside it."""
    if num_others:
        raise ConfigError("a journal holds the decisions of one scheduler; accepted: without decode_replicas")
    if not isinstance(config.policy, str):
        raise ConfigError(f"policy={config.policy!r} cannot be recorded; accepted: a name, or 'package.module:name'")
