"""Requests that are dealt over their groups: what a packer prefers, their memory, and that all come to their end."""

from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
from hypothesis import HealthCheck, given, settings

from medha.config import ParallelConfig, SchedulerConfig
from medha.cost.predictor import Predictor
from medha.cost.prefill_time import PrefillTimes, budgeted_chunk
from medha.errors import ConfigError
from medha.sched.scheduler import complete_config
from tests.sched.virtual import BLOCK, Drive, Job, make_predictor, make_scheduler, new_scheduler, worlds


def dealt(world: dict[str, Any]) -> dict[str, Any]:
    config = replace(world["config"], overcommit=False, ring=True)
    return world | {"config": config, "num_blocks": 3 * world["num_blocks"] // 2 + 8}


def test_all_come_to_their_end() -> None:
    """Under any load, with history that moves; the drive holds each group to what it is dealt."""
    drives: list[Drive] = []

    @settings(max_examples=200, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
    @given(worlds())
    def ends(world: dict[str, Any]) -> None:
        drives.append(Drive(make_scheduler(dealt(world)), world["load"], lambda batch: 0.1).run())

    ends()
    # What is drawn depends on the modules that are loaded, as Hypothesis takes constants from them.
    assert sum(drive.num_dealt > 0 for drive in drives) > 20 and any(drive.num_shifts for drive in drives)


def test_small_chunks_are_gathered_and_large_ones_dealt() -> None:
    """The choice is that of the less predicted seconds, and history is moved where the last group gets ahead."""
    options = {"ring": True, "max_kv_per_group": 4096, "chunk_size": 64, "max_batch_tokens": 2048}
    scheduler = new_scheduler(num_groups=2, num_blocks=1000, max_prompt_tokens=3000, **options)
    with mock.patch.object(scheduler.packer, "_prefers_ring", wraps=scheduler.packer._prefers_ring) as asked:
        drive = Drive(scheduler, [Job(0.0, 8000, 20)], lambda batch: 0.1).run()
    seen = [row for batch in drive.batches for row in batch.chunks if row.is_shared]
    tick = make_predictor(max_tokens=2048, kvp=2).tick()
    for row in seen:
        own = -(-row.q_len // 2)
        ring_s = tick.with_chunk(own, row.position + (row.q_len - own) // 2, ring=2)
        assert row.is_dealt == (ring_s < tick.with_chunk(row.q_len, row.position // 2, run=(0, 1))), row
    assert seen and len({call.args for call in asked.call_args_list}) > 100


@pytest.mark.parametrize("step_s", [1e-4, 10.0])
def test_a_request_is_dealt_where_that_pays(step_s: float) -> None:
    """And then counts with the seconds that it takes so; elsewhere all is as without rings."""
    seen: dict[bool, Drive] = {}
    left_s: dict[bool, list[float]] = {}
    found = make_predictor(kvp=2).coefficients
    found = replace(found, ring=replace(found.ring, step_s=step_s))
    for ring in (False, True):
        predictor = Predictor(found, max_tokens=2048)  # anew, as it learns
        alone_on_one_s = PrefillTimes(predictor, budgeted_chunk(SchedulerConfig(), predictor)).total_s(4000)
        scheduler = new_scheduler(predictor=predictor, num_blocks=1000, num_groups=2, ring=ring, max_kv_per_group=4096)
        left_s[ring] = [scheduler.prefill_left_s(done, 8000) for done in (0, 4000)]
        assert scheduler.prefill_left_s(0, 4000) == pytest.approx(alone_on_one_s)
        seen[ring] = Drive(scheduler, [Job(0.0, 8000, 20), Job(0.0, 100, 5)], lambda batch: 0.1).run()
    if step_s > 1:
        assert (seen[True].batches, left_s[True]) == (seen[False].batches, left_s[False])
        return
    assert seen[True].num_dealt
    for dealt_s, alone_s in zip(left_s[True], left_s[False], strict=True):
        assert 0.45 * alone_s < dealt_s < 0.75 * alone_s


@pytest.mark.parametrize(("name", "value"), [("prefix_caching", True), ("overcommit", True), ("num_swap_blocks", 3)])
def test_what_dealt_requests_do_not_have(name: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=f"{name}={value!r} with ring; accepted: without it"):
        SchedulerConfig(ring=True, **{name: value})


def test_a_ring_is_for_one_scheduler_and_its_chunks_have_two_tokens_a_group() -> None:
    with pytest.raises(ConfigError, match="ring with scheduler='sarathi'; accepted: medha"):
        SchedulerConfig("sarathi", ring=True)
    config = SchedulerConfig(ring=True, chunk_size=7)
    sizes = {"longest": 1000, "num_blocks": 100, "block_size": BLOCK}
    with pytest.raises(ConfigError, match="chunk_size=7 with ring on 4 groups; accepted: 8 at least"):
        complete_config(config, make_predictor(kvp=4), ParallelConfig(kvp=4), **sizes)
