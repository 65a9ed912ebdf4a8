"""The classical schedulers: small scenarios whose batches are compared whole, the literature's example, any load."""

import math

import pytest

from medha.batch import Batch
from medha.config import SchedulerConfig
from medha.params import SLO
from medha.sched.baselines import TokenBudgetPacker
from medha.sched.decision import SchedulerRequest
from medha.sched.scheduler import Scheduler
from tests.sched.test_scheduler import Play

# -- static -----------------------------------------------------------------------------------------------


def test_static_starts_together_with_whole_prompts_and_lets_nobody_join() -> None:
    play = Play("static", rows=2)
    play.add((0, 20, 3), (1, 2, 1), (2, 5, 2), (3, 1, 1))
    # 22 tokens in the first batch, though a batch has 16 elsewhere. Slot 1 ends at once, and its place stays empty.
    assert play.steps() == ["0[0:20]. 1[0:2].", "0@20", "0@21", "2[0:5]. 3[0:1].", "2@5"]


# -- sarathi ----------------------------------------------------------------------------------------------


def test_sarathi_decodes_first_and_prefills_share_what_is_left() -> None:
    play = Play("sarathi", tokens=10)
    play.add((0, 12, 3))
    assert play.fill() == ["0[0:8]"]
    play.complete()
    play.add((1, 12, 1), (2, 3, 1))
    assert play.steps() == ["0[8:12]. 1[0:6]", "0@12 1[6:12]. 2[0:3].", "0@13"]


# -- orca -------------------------------------------------------------------------------------------------


def test_orca_lets_requests_join_and_never_cuts_a_prompt() -> None:
    play = Play("orca")
    play.add((0, 4, 4))
    play.fill()
    play.complete()
    play.add((1, 40, 2), (2, 9, 1), (3, 6, 1), (4, 1, 1))
    # Slot 1 is longer than any batch: it is the only prompt of one, and slot 0's decode takes as long. Slots 2 and 3
    # fill the 16 tokens of the next beside one decode less than would be needed for both.
    assert play.steps() == ["0@4 1[0:40].", "0@5 1@40 2[0:9].", "0@6 3[0:6]. 4[0:1]."]


@pytest.mark.parametrize("name", ["static", "orca"])
def test_a_whole_prompt_is_cut_at_the_end_of_a_shard_only(name: str) -> None:
    play = Play(name, num_groups=2, share=24)
    play.add((0, 40, 2))
    assert play.steps() == ["0[0:24]", "0[24:40]./0-1", "0@40/0-1"]


# -- vllm -------------------------------------------------------------------------------------------------


def test_vllm_serves_who_started_first_first() -> None:
    play = Play("vllm", tokens=10, chunk=9)
    play.add((0, 30, 1), (1, 1, 4), (2, 5, 1))
    # The prompt that started first takes nine of ten tokens; the decode that started after it has the tenth, and what
    # waits has none until it is through. (Sarathi counts the decode first: the same here.)
    assert play.steps() == ["0[0:9] 1[0:1].", "1@1 0[9:18]", "1@2 0[18:27]", "1@3 0[27:30]. 2[0:5]."]


# -- token-budget -----------------------------------------------------------------------------------------


def test_token_budget_aligns_chunks_to_64_and_finishes_the_tail() -> None:
    """A published reference rounds the last 52 tokens of slot 1 down to 0 and never finishes it."""
    play = Play("token-budget", tokens=2048, chunk=256, num_blocks=400)
    play.add((0, 600, 2), (1, 180, 1))
    assert play.steps() == ["0[0:256]", "0[256:512]", "0[512:600]. 1[0:128]", "0@600 1[128:180]."]


def run_steps(packer: TokenBudgetPacker, busy_s: float, *, num_tokens: int, count: int) -> None:
    play = Play("orca", num_blocks=1000)
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
