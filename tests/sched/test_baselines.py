"""The classical schedulers: small scenarios whose batches are compared whole, the literature's example, any load."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from medha.batch import Batch
from medha.config import SCHEDULERS, SchedulerConfig
from medha.cost.predictor import Work
from medha.params import SLO
from medha.sched.baselines import TokenBudgetPacker
from medha.sched.decision import SchedulerRequest
from medha.sched.scheduler import Scheduler
from tests.sched.test_scheduler import Play
from tests.sched.virtual import Drive, jobs, make_predictor

PREDICTOR = make_predictor()
CLASSICAL = tuple(name for name in SCHEDULERS if name != "medha")


class Classical(Play):
    """A play under a given scheduler."""

    def __init__(
        self,
        scheduler: str,
        *,
        rows: int = 8,
        tokens: int = 16,
        chunk: int = 8,
        num_blocks: int = 16,
        num_groups: int = 1,
        share: int | None = None,
    ) -> None:
        super().__init__()
        config = SchedulerConfig(
            scheduler, max_num_seqs=rows, max_batch_tokens=tokens, chunk_size=chunk, depth=1, max_kv_per_group=share
        )
        self.sched = Scheduler(config, num_blocks=num_blocks, block_size=4, num_groups=num_groups)

    def steps(self) -> str:
        """Play to the end; the rows alone."""
        lines = [line for line in self.run().splitlines() if "blocks" not in line and "freed" not in line]
        return "\n".join(lines) + "\n"


@pytest.mark.parametrize("name", CLASSICAL)
def test_what_is_in_flight_is_predicted(name: str) -> None:
    """For whoever waits for it; the schedulers do not look at it."""
    sched = Scheduler(SchedulerConfig(name, chunk_size=8), num_blocks=16, block_size=4, predictor=PREDICTOR)
    assert sched.longest_s() == 0.0
    sched.add(SchedulerRequest(0, 40, 2, 0.0))
    batch = sched.schedule(0.0).batch
    assert batch is not None and batch.num_tokens in (8, 40)
    assert sched.longest_s() == PREDICTOR.predict([Work(batch.num_tokens, 0, False, None, batch.num_tokens == 40)])


# -- static -----------------------------------------------------------------------------------------------


def test_static_starts_together_with_whole_prompts_and_lets_nobody_join() -> None:
    play = Classical("static", rows=2)
    play.add((0, 20, 3), (1, 2, 1), (2, 5, 2), (3, 1, 1))
    # 22 tokens in the first batch, though a batch has 16 elsewhere. Slot 1 ends at once, and its place stays empty.
    assert (
        play.steps()
        == """\
batch 0: 2 rows, 22 tokens
  slot 0 prefill [0:20] last
  slot 1 prefill [0:2] last
batch 0 complete, slot 1 closed
batch 1: 1 rows, 1 tokens
  slot 0 decode [20]
batch 1 complete
batch 2: 1 rows, 1 tokens
  slot 0 decode [21]
batch 2 complete, slot 0 closed
batch 3: 2 rows, 6 tokens
  slot 2 prefill [0:5] last
  slot 3 prefill [0:1] last
batch 3 complete, slot 3 closed
batch 4: 1 rows, 1 tokens
  slot 2 decode [5]
batch 4 complete, slot 2 closed
"""
    )


# -- orca -------------------------------------------------------------------------------------------------


def test_orca_lets_requests_join_and_never_cuts_a_prompt() -> None:
    play = Classical("orca")
    play.add((0, 4, 4))
    play.fill()
    play.complete()
    play.add((1, 40, 2), (2, 9, 1), (3, 6, 1), (4, 1, 1))
    # Slot 1 is longer than any batch: it is the only prompt of one, and slot 0's decode takes as long. Slots 2 and 3
    # fill the 16 tokens of the next beside one decode less than would be needed for both.
    assert (
        play.steps()
        == """\
batch 1: 2 rows, 41 tokens
  slot 0 decode [4]
  slot 1 prefill [0:40] last
batch 1 complete
batch 2: 3 rows, 11 tokens
  slot 0 decode [5]
  slot 1 decode [40]
  slot 2 prefill [0:9] last
batch 2 complete, slot 1 closed, slot 2 closed
batch 3: 3 rows, 8 tokens
  slot 0 decode [6]
  slot 3 prefill [0:6] last
  slot 4 prefill [0:1] last
batch 3 complete, slot 0 closed, slot 3 closed, slot 4 closed
"""
    )


@pytest.mark.parametrize("name", ["static", "orca"])
def test_a_whole_prompt_is_cut_at_the_end_of_a_shard_only(name: str) -> None:
    play = Classical(name, num_groups=2, share=24)
    play.add((0, 40, 2))
    assert (
        play.steps()
        == """\
batch 0: 1 rows, 24 tokens
  slot 0 prefill [0:24]
batch 0 complete
batch 1: 1 rows, 16 tokens
  slot 0 prefill [24:40] last on groups 0-1
batch 1 complete
batch 2: 1 rows, 1 tokens
  slot 0 decode [40] on groups 0-1
batch 2 complete, slot 0 closed
"""
    )


# -- vllm -------------------------------------------------------------------------------------------------


def test_vllm_serves_who_started_first_first() -> None:
    play = Classical("vllm", tokens=10, chunk=9)
    play.add((0, 30, 1), (1, 1, 4), (2, 5, 1))
    # The prompt that started first takes nine of ten tokens; the decode that started after it has the tenth, and what
    # waits has none until it is through. (Sarathi counts the decode first: the same here.)
    assert (
        play.steps()
        == """\
batch 0: 2 rows, 10 tokens
  slot 0 prefill [0:9]
  slot 1 prefill [0:1] last
batch 0 complete
batch 1: 2 rows, 10 tokens
  slot 1 decode [1]
  slot 0 prefill [9:18]
batch 1 complete
batch 2: 2 rows, 10 tokens
  slot 1 decode [2]
  slot 0 prefill [18:27]
batch 2 complete
batch 3: 3 rows, 9 tokens
  slot 1 decode [3]
  slot 0 prefill [27:30] last
  slot 2 prefill [0:5] last
batch 3 complete, slot 1 closed, slot 0 closed, slot 2 closed
"""
    )


# -- token-budget -----------------------------------------------------------------------------------------


def test_token_budget_aligns_chunks_to_64_and_finishes_the_tail() -> None:
    """A published reference rounds the last 52 tokens of slot 1 down to 0 and never finishes it."""
    play = Classical("token-budget", tokens=2048, chunk=256, num_blocks=400)
    play.add((0, 600, 2), (1, 180, 1))
    assert (
        play.steps()
        == """\
batch 0: 1 rows, 256 tokens
  slot 0 prefill [0:256]
batch 0 complete
batch 1: 1 rows, 256 tokens
  slot 0 prefill [256:512]
batch 1 complete
batch 2: 2 rows, 216 tokens
  slot 0 prefill [512:600] last
  slot 1 prefill [0:128]
batch 2 complete
batch 3: 2 rows, 53 tokens
  slot 0 decode [600]
  slot 1 prefill [128:180] last
batch 3 complete, slot 0 closed, slot 1 closed
"""
    )


def run_steps(packer: TokenBudgetPacker, busy_s: float, *, num_tokens: int, count: int) -> None:
    play = Classical("orca", num_blocks=1000)
    play.add((0, num_tokens, 1))
    batch = play.sched.schedule(0.0).batch
    assert isinstance(batch, Batch)
    for _ in range(count):
        packer.completed(batch, busy_s)


def test_token_budget_follows_a_moving_average_of_step_time() -> None:
    packer = TokenBudgetPacker(SchedulerConfig("token-budget", t_target_s=0.1, max_batch_tokens=1024))
    assert packer.budget(5) == 256  # nothing seen yet
    run_steps(packer, 0.1, num_tokens=500, count=1)
    assert packer.token_s == pytest.approx(2e-4)
    assert packer.budget(0) == 448  # 500 tokens take the target
    assert packer.budget(30) == 448
    assert packer.budget(60) == 384
    run_steps(packer, 0.2, num_tokens=500, count=1)
    assert packer.token_s == pytest.approx(0.9 * 2e-4 + 0.1 * 4e-4)
    run_steps(packer, 0.05, num_tokens=500, count=100)
    assert packer.budget(0) == 960  # 1000 tokens would
    run_steps(packer, 1e-6, num_tokens=500, count=100)
    assert packer.budget(24) == 960  # max_batch_tokens less the decodes
    run_steps(packer, 10.0, num_tokens=1, count=100)
    assert packer.budget(200) == 64  # never nothing


@pytest.mark.parametrize("busy_s", [math.nan, math.inf, 0.0, -1.0])
def test_token_budget_learns_nothing_from_times_that_are_none(busy_s: float) -> None:
    packer = TokenBudgetPacker(SchedulerConfig("token-budget"))
    run_steps(packer, busy_s, num_tokens=500, count=3)
    assert packer.token_s is None


def test_token_budget_goes_by_class_then_deadline() -> None:
    config = SchedulerConfig("token-budget", depth=1)
    sched = Scheduler(config, num_blocks=100, block_size=16)
    given = [(0, 2, 9.0), (1, 2, 1.0), (2, 0, 30.0), (3, 2, None), (4, 3, 0.1)]
    for slot, priority, ttft_s in given:
        sched.add(SchedulerRequest(slot, 30, 1, 0.0, SLO(ttft_s) if ttft_s else None, priority))
    batch = sched.schedule(0.0).batch
    assert batch is not None
    assert [row.slot for row in batch.rows] == [2, 1, 0, 3, 4]


# -- any load ---------------------------------------------------------------------------------------------


class Bounded(Drive):
    """Checks that a scheduler which cuts prompts keeps the bounds on tokens, in every group."""

    def on_schedule(self, batch: Batch | None) -> None:
        config = self.scheduler.config
        if batch is None or config.scheduler in ("static", "orca"):
            return
        for group in range(self.scheduler.memory.num_groups):
            assert sum(row.q_len for row in batch.rows if row.concerns(group)) <= config.max_batch_tokens
        assert all(row.q_len <= (config.chunk_size or 0) for row in batch.rows)


@pytest.mark.parametrize("name", CLASSICAL)
@settings(max_examples=50, deadline=None, derandomize=True)
@given(data=st.data())
def test_every_baseline_finishes_any_load_and_leaves_nothing(name: str, data: st.DataObject) -> None:
    load = data.draw(st.lists(jobs(max_prompt=300, max_new=8, within_s=2.0), min_size=1, max_size=8))
    num_groups, block_size = data.draw(st.integers(1, 3)), data.draw(st.sampled_from([1, 16]))
    longest = -(-max(job.num_kv_tokens for job in load) // block_size)
    share = -(-longest // num_groups)
    config = SchedulerConfig(
        name,
        max_num_seqs=data.draw(st.integers(1, 5)),
        max_batch_tokens=data.draw(st.integers(4, 20) | st.integers(64, 512)),
        chunk_size=data.draw(st.integers(4, 20) | st.integers(64, 512)),
        depth=data.draw(st.integers(1, 3)),
        max_kv_per_group=share * block_size,
    )
    num_blocks = share * data.draw(st.sampled_from([1, 2, 8]))
    predictor = PREDICTOR if data.draw(st.booleans()) else None

    def play() -> list[str]:
        sched = Scheduler(
            config, num_blocks=num_blocks, block_size=block_size, num_groups=num_groups, predictor=predictor
        )
        return Bounded(sched, load, lambda batch: 1e-3 + 1e-3 * batch.num_tokens).run()

    assert play() == play()
