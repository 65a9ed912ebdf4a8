"""The classical schedulers: small scenarios whose batches are compared whole, the literature's example, any load."""

import pytest

from medha.sched.decision import SchedulerRequest
from tests.sched.test_scheduler import Play
from tests.sched.virtual import finish, new_scheduler, next_batch

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


# -- how long a batch may take ----------------------------------------------------------------------------


def test_a_batch_of_a_packer_that_predicts_nothing_may_take_what_its_rows_take() -> None:
    """A rank that computes a whole prompt is not behind: whoever asks how long it may take hears of minutes."""
    sched = new_scheduler("orca", num_blocks=8192, max_num_seqs=8, max_batch_tokens=2048)
    assert sched.longest_s() == 0.0
    sched.add(SchedulerRequest(0, 100_000, 2, arrival_s=0.0))
    batch = next_batch(sched)
    assert batch.num_tokens == 100_000
    alone_s = sched.prefill_left_s(0, 100_000)
    assert alone_s > 60.0 and sched.longest_s() == pytest.approx(alone_s)
    finish(sched, batch, alone_s, alone_s)
    assert sched.longest_s() == 0.0
    assert next_batch(sched, alone_s).num_decodes and 0.0 < sched.longest_s() < 1.0
