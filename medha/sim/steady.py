"""Steady decoding, stepped over in one go: what so many calls of ``complete`` and ``schedule`` in turn would do.

This is the one place that reaches into the scheduler's state; the scheduler itself knows nothing of it.
"""

from __future__ import annotations

from collections.abc import Sequence

from medha.batch import Batch, Row
from medha.sched.decision import Prediction
from medha.sched.scheduler import Scheduler


def may_go_round(scheduler: Scheduler) -> bool:
    """Whether :func:`go_round` can ever come to the same as the calls that it stands for.

    Not with several groups, overcommitted memory, async scheduling, and packers that learn from each batch.
    """
    config = scheduler.config
    is_plain = scheduler.memory.num_groups == 1 and not config.overcommit and not config.async_scheduling
    return is_plain and not scheduler.packer.learns


def is_steady(scheduler: Scheduler) -> bool:
    """Whether the batches in flight go round until a request ends or another arrives: each, when it is complete, is
    scheduled again with the next token of the same requests. Asked only where :func:`may_go_round`."""
    queue, in_flight = scheduler._queue, scheduler._in_flight
    if queue.num_prefills or queue.tenants.are_several or scheduler.memory.frees or not in_flight:
        return False
    num_running = len(queue.running)
    if len(queue.decoding) != num_running or sum(len(batch.rows) for batch, _ in in_flight) != num_running:
        return False
    most = min(-(-num_running // scheduler.depth), scheduler.config.max_batch_tokens)
    return all(len(batch.rows) == batch.num_decodes <= most for batch, _ in in_flight)


def go_round(scheduler: Scheduler, num_batches: int, predictions: Sequence[Prediction | None]) -> None:
    """Let so many batches go round, the oldest first; ``predictions`` are of those in flight after it.

    None of their requests has ended. The predictor is not told of them, and where blocks lie may differ.
    """
    batches = scheduler.in_flight
    size, moved = len(batches), []
    for index, batch in enumerate(batches):
        rounds = (num_batches - index + size - 1) // size if num_batches > index else 0
        if rounds:
            last = num_batches - 1 - (num_batches - 1 - index) % size  # of the batches that these rows were
            rows = tuple(_after(scheduler, row, rounds) for row in batch.rows)
            batch = Batch(scheduler._next_batch_id + last, rows)
        moved.append(batch)
    first = num_batches % size
    scheduler._in_flight.clear()
    scheduler._in_flight.extend(zip([*moved[first:], *moved[:first]], predictions, strict=True))
    scheduler._next_batch_id += num_batches


def _after(scheduler: Scheduler, row: Row, rounds: int) -> Row:
    """The row of a decode so many tokens later; its state follows."""
    state = scheduler._queue.running[row.slot]
    position, block_size = state.num_scheduled_tokens, scheduler.memory.block_size
    if (position - 1) // block_size != (position - 1 + rounds) // block_size:
        scheduler.memory.take(Row(row.slot, position, rounds, True, True))
    state.num_scheduled_tokens += rounds
    state.num_computed_tokens += rounds
    state.num_known_tokens += rounds
    return Row(row.slot, row.position + rounds, 1, True, True)
