"""Any scheduler under any load: it ends, leaves nothing, keeps its bounds, and its journal replays."""

import io
import math
from dataclasses import replace
from typing import Any

from hypothesis import given, settings, strategies as st

from medha.engine.journal import Journal
from medha.engine.replay import replay
from tests.sched.virtual import Drive, make_scheduler, worlds


@settings(max_examples=100, deadline=None, derandomize=True)
@given(worlds(any_scheduler=True), st.sampled_from([0.1, 1.0, 10.0, math.nan, math.inf]))
def test_any_load_ends_leaves_nothing_and_replays(world: dict[str, Any], factor: float) -> None:
    """Swaps included; with predictions that are off by a factor, or hear nonsense."""
    scheduler, file = make_scheduler(world), io.StringIO()
    told = {"busy": lambda real_s: real_s * factor, "observers": [Journal(scheduler, file)]}
    drive = Drive(scheduler, world["load"], lambda batch: 1e-3 + 1e-4 * batch.num_tokens, **told).run()
    replayed = replay(file.getvalue().splitlines())
    assert (replayed.mismatch, replayed.num_batches) == (None, len(drive.batches))


@settings(max_examples=40, deadline=None, derandomize=True)
@given(worlds(any_scheduler=True))
def test_any_load_ends_where_requests_are_spread_as_that_pays(world: dict[str, Any]) -> None:
    """Their share of a group is that of the pool, or less if the others have less to read."""
    scheduler = make_scheduler({**world, "config": replace(world["config"], max_kv_per_group=None)})
    scheduler.memory.spread_kv = world["config"].max_kv_per_group
    Drive(scheduler, world["load"], lambda batch: 1e-3 + 1e-4 * batch.num_tokens).run()
