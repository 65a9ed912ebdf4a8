"""Any scheduler under any load: it ends, leaves nothing, keeps its bounds, and its journal replays."""

import io
import math
from dataclasses import replace
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from medha.batch import Batch
from medha.engine.journal import Journal
from medha.engine.replay import replay
from tests.sched.test_preempt import Watched
from tests.sched.virtual import make_scheduler, worlds


class Bounded(Watched):
    """Checks who gives way, the bounds on tokens, and that without a stream a prompt has one chunk in flight."""

    def on_schedule(self, batch: Batch | None) -> None:
        super().on_schedule(batch)
        config, sent = self.scheduler.config, [row for sent in self.scheduler.in_flight for row in sent.rows]
        if not config.stream:
            chunks = [row.slot for row in sent if not row.is_decode]
            assert len(chunks) == len(set(chunks))
        if batch is None or config.scheduler in ("static", "orca"):
            return
        for group in range(self.scheduler.memory.num_groups):
            assert sum(row.q_len for row in batch.rows if row.concerns(group)) <= config.max_batch_tokens
        assert all(row.q_len <= (config.chunk_size or config.max_batch_tokens) for row in batch.rows)


@settings(max_examples=150, deadline=None, derandomize=True)
@given(worlds(any_scheduler=True), st.sampled_from([0.1, 1.0, 10.0, math.nan, math.inf]))
def test_any_load_ends_leaves_nothing_and_replays(world: dict[str, Any], factor: float) -> None:
    """Swaps included; with predictions that are off by a factor, or hear nonsense."""
    scheduler, file = make_scheduler(world), io.StringIO()
    told = {"busy": lambda real_s: real_s * factor, "observers": [Journal(scheduler, file)]}
    drive = Bounded(scheduler, world["load"], lambda batch: 1e-3 + 1e-4 * batch.num_tokens, **told).run()
    replayed = replay(file.getvalue().splitlines())
    assert (replayed.mismatch, replayed.num_batches) == (None, len(drive.batches))


@settings(max_examples=60, deadline=None, derandomize=True)
@given(worlds(any_scheduler=True))
def test_any_load_ends_where_requests_are_spread_as_that_pays(world: dict[str, Any]) -> None:
    """Their share of a group is that of the pool, or less if the others have less to read."""
    scheduler = make_scheduler({**world, "config": replace(world["config"], max_kv_per_group=None)})
    scheduler.memory.spread_kv = world["config"].max_kv_per_group
    Bounded(scheduler, world["load"], lambda batch: 1e-3 + 1e-4 * batch.num_tokens).run()
