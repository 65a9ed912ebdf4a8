"""Any scheduler under any load: it ends, leaves nothing, keeps its bounds and decides the same again."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings

from medha.batch import Batch
from medha.config import SCHEDULERS
from tests.sched.test_preempt import Watched
from tests.sched.virtual import make_scheduler, worlds


class Bounded(Watched):
    """Checks who gives way, the bounds on tokens, and that without a stream a prompt has one chunk in flight."""

    def on_schedule(self, batch: Batch | None) -> None:
        super().on_schedule(batch)
        config, sent = self.config, [row for sent in self.scheduler.in_flight for row in sent.rows]
        if not config.stream:
            chunks = [row.slot for row in sent if not row.is_decode]
            assert len(chunks) == len(set(chunks))
        if batch is None or config.scheduler in ("static", "orca"):
            return
        for group in range(self.scheduler.memory.num_groups):
            assert sum(row.q_len for row in batch.rows if row.concerns(group)) <= config.max_batch_tokens
        assert all(row.q_len <= (config.chunk_size or config.max_batch_tokens) for row in batch.rows)


def play(world: dict[str, Any]) -> list[str]:
    return Bounded(make_scheduler(world), world["load"], lambda batch: 1e-3 + 1e-4 * batch.num_tokens).run()


@settings(max_examples=250, deadline=None, derandomize=True)
@given(worlds(any_scheduler=True))
def test_any_load_ends_and_leaves_nothing(world: dict[str, Any]) -> None:
    play(world)


@pytest.mark.parametrize("name", SCHEDULERS)
@settings(max_examples=8, deadline=None, derandomize=True)
@given(world=worlds(any_scheduler=True))
def test_the_same_load_is_decided_the_same(name: str, world: dict[str, Any]) -> None:
    world["config"] = replace(world["config"], scheduler=name)
    assert play(world) == play(world)
