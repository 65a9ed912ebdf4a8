"""With async scheduling a token is scheduled before the one before it is known: the tokens stay the same."""

import pytest

from medha.batch import Batch
from medha.engine.engine import Engine
from medha.outputs import CompletionOutput
from tests.cuda.serving import SAMPLING, params
from tests.engines import drained, make_engine, run_to_end
from tests.sched.virtual import add, by_tokens, finish, new_scheduler, next_batch
from tests.serving import NUM_TOKENS, Case


def lagging(case: Case, *, async_scheduling: bool = True, **scheduler: int) -> Engine:
    options = {"chunk_size": 50, "max_batch_tokens": 96, "num_blocks": 100, "block_size": 16} | scheduler
    return make_engine(case.decoder, async_scheduling=async_scheduling, **options)


# -- the scheduler ---------------------------------------------------------------------------------------------

SMALL = {"async_scheduling": True, "num_blocks": 20, "block_size": 4}


def test_a_decode_is_scheduled_while_the_one_before_is_in_flight_and_never_beyond_the_last() -> None:
    def rows(batch: Batch) -> list[tuple[int, int]]:
        return [(row.slot, row.position) for row in batch.rows]

    scheduler = new_scheduler("sarathi", predictor=by_tokens(), **SMALL)
    assert scheduler.depth == 2
    add(scheduler, 0, 5, 3)
    first, second = scheduler.schedule(0.0).batch, scheduler.schedule(0.0).batch
    assert (rows(first), rows(second), scheduler.schedule(0.0).batch) == ([(0, 0)], [(0, 5)], None)
    assert finish(scheduler, first) == ()
    third = next_batch(scheduler)
    assert rows(third) == [(0, 6)]  # the third token; its own row would be the fourth
    finish(scheduler, second)
    assert scheduler.schedule(2.0).batch is None
    assert finish(scheduler, third, ended=[0]) == (0,)
    assert scheduler.memory.num_used == 0


@pytest.mark.parametrize("stages", [1, 2, 3])
def test_a_decode_comes_round_after_a_batch_for_each_stage(stages: int) -> None:
    """Where prefills fill the batches between; alone it is in every batch."""
    options = {"depth": stages + 1, "chunk_size": 4, "max_batch_tokens": 8}
    scheduler = new_scheduler("sarathi", predictor=by_tokens(), **options, **SMALL)
    add(scheduler, 0, 2, 20)
    add(scheduler, 1, 40)
    found = []
    for batch_id in range(8):
        found.append([row.slot for row in next_batch(scheduler).rows])
        if batch_id >= stages:
            finish(scheduler, scheduler.in_flight[0])
    assert [0 in slots for slots in found] == [batch_id % stages == 0 for batch_id in range(8)]
    assert all(1 in slots for slots in found)


# -- the engine ------------------------------------------------------------------------------------------------


def test_tokens_are_those_of_waiting_for_each_and_batches_overlap(case: Case) -> None:
    engine = lagging(case)
    scheduled: list[tuple[Batch, ...]] = []  # what is in flight whenever a batch is handed in, itself last
    submit = engine.runner.submit
    engine.runner.submit = lambda batch: (scheduled.append(engine.scheduler.in_flight), submit(batch))[1]
    assert run_to_end(engine, case.prompts, NUM_TOKENS) == case.expected
    followed = sum(
        bool({(row.slot, row.kv_len) for row in a.rows if row.samples} & {(r.slot, r.position) for r in b.rows})
        for a, b in (pair for pair in scheduled if len(pair) == 2)
    )
    assert followed >= NUM_TOKENS - 1  # a batch has the token after one that a batch still in flight draws


def test_any_sampling_gives_the_same_outputs(case: Case) -> None:
    """Wherever requests end."""

    def outputs(is_async: bool, stops: list[list[int]]) -> list[CompletionOutput]:
        engine = lagging(case, async_scheduling=is_async)
        for i, (sampling, stop) in enumerate(zip(SAMPLING, stops, strict=True)):
            wanted = params(**sampling, stop_token_ids=stop, output_kind="final_only")
            engine.add_request(str(i), case.prompts[i], wanted)
        done = {output.request_id: output.outputs[0] for output in drained(engine)}
        return [done[str(i)] for i in range(len(SAMPLING))]

    free = outputs(False, [[] for _ in SAMPLING])
    assert outputs(True, [[] for _ in SAMPLING]) == free
    for at in range(8):
        stops = [[completion.token_ids[at]] for completion in free]
        assert outputs(True, stops) == outputs(False, stops)


def test_slots_beyond_the_first_tokens_kept(case: Case) -> None:
    """More requests than the device's list of last tokens begins with; it grows."""
    engine = lagging(case, max_num_seqs=16)
    begun = len(engine.runner.last_tokens)  # type: ignore[attr-defined]
    prompts = [case.prompts[i % 3] for i in range(begun + 6)]
    assert run_to_end(engine, prompts, NUM_TOKENS) == [case.expected[i % 3] for i in range(begun + 6)]
