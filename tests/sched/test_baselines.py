"""The classical schedulers: small scenarios whose batches are compared whole, the literature's example, any load."""

from itertools import pairwise
from typing import Any

import pytest

from medha.batch import Row
from tests.sched.virtual import Drive, Job, add, by_tokens, finish, new_scheduler, next_batch


def batches(scheduler: str, *jobs: Job, **options: Any) -> list[str]:
    """The rows of each batch, of which every one takes a second."""
    options = {"max_num_seqs": 8, "max_batch_tokens": 16, "chunk_size": 8, "depth": 1} | options
    sched = new_scheduler(scheduler, num_blocks=16, block_size=4, predictor=by_tokens(), **options)
    return [" ".join(map(shown, batch.rows)) for batch in Drive(sched, jobs, lambda batch: 1.0).run().batches]


def shown(row: Row) -> str:
    """``slot@position`` of a decode, ``slot[from:to]`` of a chunk, with a point if it ends its prompt; the groups."""
    span = f"/{row.group}-{row.writer}" if row.is_shared else ""
    if row.is_decode:
        return f"{row.slot}@{row.position}{span}"
    return f"{row.slot}[{row.position}:{row.kv_len}]{'.' * row.samples}{span}"


def test_static_starts_together_with_whole_prompts_and_lets_nobody_join() -> None:
    jobs = [Job(0.0, 20, 3), Job(0.0, 2), Job(0.0, 5, 2), Job(0.0, 1)]
    # 22 tokens in the first batch, though a batch has 16 elsewhere. Slot 1 ends at once, and its place stays empty.
    expected = ["0[0:20]. 1[0:2].", "0@20", "0@21", "2[0:5]. 3[0:1].", "2@5"]
    assert batches("static", *jobs, max_num_seqs=2) == expected


def test_decodes_of_which_a_batch_holds_a_part_take_turns() -> None:
    scheduler = new_scheduler("static", num_blocks=1000, max_batch_tokens=4, max_num_seqs=8)
    drive = Drive(scheduler, [Job(0.0, 20, 30)] * 8, lambda batch: 1.0).run()
    assert max(later - sooner for times in drive.token_s.values() for sooner, later in pairwise(times)) == 2.0


def test_sarathi_decodes_first_and_prefills_share_what_is_left() -> None:
    jobs = [Job(0.0, 12, 3), Job(0.5, 12), Job(0.5, 3)]
    expected = ["0[0:8]", "0[8:12]. 1[0:6]", "0@12 1[6:12]. 2[0:3].", "0@13"]
    assert batches("sarathi", *jobs, max_batch_tokens=10) == expected


def test_orca_lets_requests_join_and_never_cuts_a_prompt() -> None:
    jobs = [Job(0.0, 4, 4), Job(0.5, 40, 2), Job(0.5, 9), Job(0.5, 6), Job(0.5, 1)]
    # Slot 1 is longer than any batch: it is the only prompt of one, and slot 0's decode takes as long. Slots 2 and 3
    # fill the 16 tokens of the next beside one decode less than would be needed for both.
    assert batches("orca", *jobs) == ["0[0:4].", "0@4 1[0:40].", "0@5 1@40 2[0:9].", "0@6 3[0:6]. 4[0:1]."]


@pytest.mark.parametrize("name", ["static", "orca"])
def test_a_whole_prompt_is_cut_at_the_end_of_a_shard_only(name: str) -> None:
    rows = batches(name, Job(0.0, 40, 2), num_groups=2, max_kv_per_group=24)
    assert rows == ["0[0:24]", "0[24:40]./0-1", "0@40/0-1"]


def test_vllm_serves_who_started_first_first() -> None:
    jobs = [Job(0.0, 30), Job(0.0, 1, 4), Job(0.0, 5)]
    # The prompt that started first takes nine of ten tokens; the decode that started after it has the tenth, and what
    # waits has none until it is through. (Sarathi counts the decode first: the same here.)
    expected = ["0[0:9] 1[0:1].", "1@1 0[9:18]", "1@2 0[18:27]", "1@3 0[27:30]. 2[0:5]."]
    assert batches("vllm", *jobs, max_batch_tokens=10, chunk_size=9) == expected


def test_a_batch_of_a_packer_that_predicts_nothing_may_take_what_its_rows_take() -> None:
    """A rank that computes a whole prompt is not behind: whoever asks how long it may take hears of minutes."""
    sched = new_scheduler("orca", num_blocks=8192, max_num_seqs=8, max_batch_tokens=2048)
    assert sched.longest_s() == 0.0
    add(sched, 0, 100_000, 2, arrival_s=0.0)
    batch = next_batch(sched)
    assert batch.num_tokens == 100_000
    alone_s = sched.prefill_left_s(0, 100_000)
    assert alone_s > 60.0 and sched.longest_s() == pytest.approx(alone_s)
    finish(sched, batch, alone_s, alone_s)
    assert sched.longest_s() == 0.0
    assert next_batch(sched, alone_s).num_decodes and 0.0 < sched.longest_s() < 1.0
