"""With async scheduling a token is scheduled before the one before it is known: the tokens stay the same."""

from typing import Any

import pytest
from hypothesis import given, settings, strategies as st

from medha.batch import Batch
from medha.engine.engine import Engine
from medha.params import SamplingParams
from medha.sched.decision import SchedulerRequest
from medha.sched.scheduler import Scheduler
from tests.engines import drained, make_engine, run_to_end
from tests.sched.virtual import by_tokens, new_scheduler
from tests.serving import NUM_TOKENS, Case

Rows = list[tuple[int, int]]


def lagging(case: Case, *, async_scheduling: bool = True, **scheduler: int) -> Engine:
    options = {"chunk_size": 50, "max_batch_tokens": 96, "num_blocks": 100, "block_size": 16} | scheduler
    return make_engine(case.decoder, async_scheduling=async_scheduling, **options)


# -- the scheduler ---------------------------------------------------------------------------------------------


def make_scheduler(**options: int) -> Scheduler:
    sizes = {"num_blocks": 20, "block_size": 4}
    return new_scheduler("sarathi", predictor=by_tokens(), async_scheduling=True, **sizes, **options)


def rows(batch: Batch | None) -> Rows:
    return [] if batch is None else [(row.slot, row.position) for row in batch.rows]


def test_a_decode_is_scheduled_while_the_one_before_is_in_flight_and_never_beyond_the_last() -> None:
    scheduler = make_scheduler()
    assert scheduler.depth == 2
    scheduler.add(SchedulerRequest(0, 5, 3, 0.0))
    first, second = scheduler.schedule(0.0).batch, scheduler.schedule(0.0).batch
    assert (rows(first), rows(second), scheduler.schedule(0.0).batch) == ([(0, 0)], [(0, 5)], None)
    assert scheduler.complete(first, 1.0, [(0, 1, False)], 1.0) == ()
    third = scheduler.schedule(1.0).batch
    assert rows(third) == [(0, 6)]  # the third token; its own row would be the fourth
    scheduler.complete(second, 2.0, [(0, 1, False)], 1.0)
    assert scheduler.schedule(2.0).batch is None
    assert scheduler.complete(third, 3.0, [(0, 1, True)], 1.0) == (0,)
    assert scheduler.memory.num_used == 0


@pytest.mark.parametrize("stages", [1, 2, 3])
def test_a_decode_comes_round_after_a_batch_for_each_stage(stages: int) -> None:
    """Where prefills fill the batches between; alone it is in every batch."""
    scheduler = make_scheduler(depth=stages + 1, chunk_size=4, max_batch_tokens=8)
    scheduler.add(SchedulerRequest(0, 2, 20, 0.0))
    scheduler.add(SchedulerRequest(1, 40, 1, 0.0))
    found = []
    for batch_id in range(8):
        found.append([row.slot for row in scheduler.schedule(0.0).batch.rows])
        if batch_id >= stages:
            oldest = scheduler.in_flight[0]
            sampled = [(row.slot, 1, False) for row in oldest.rows if row.samples]
            scheduler.complete(oldest, 0.0, sampled, 1.0)
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


CHOICES = {
    "temperature": st.sampled_from([0.0, 0.7, 1.3]),
    "top_p": st.sampled_from([1.0, 0.8]),
    "top_k": st.sampled_from([0, 5]),
    "min_p": st.sampled_from([0.0, 0.05]),
    "repetition_penalty": st.sampled_from([1.0, 1.3]),
    "min_tokens": st.sampled_from([0, 1, 2, 3, 4]),
    "logprobs": st.sampled_from([None, 0, 3]),
}


@settings(max_examples=12, deadline=None, derandomize=True)
@given(chosen=st.fixed_dictionaries(CHOICES), stop_at=st.integers(0, 7))
def test_any_sampling_gives_the_same_outputs(case: Case, chosen: dict[str, Any], stop_at: int) -> None:
    def outputs(is_async: bool, stop: list[int]) -> list[object]:
        engine = lagging(case, async_scheduling=is_async)
        params = SamplingParams(**chosen, stop_token_ids=stop, max_tokens=8, seed=11, output_kind="final_only")
        for i, prompt in enumerate(case.prompts[:4]):
            engine.add_request(str(i), prompt, params)
        done = {output.request_id: output.outputs[0] for output in drained(engine)}
        return [done[str(i)] for i in range(4)]

    free = outputs(False, [])
    stop = [free[0].token_ids[stop_at]]  # type: ignore[attr-defined]
    assert outputs(True, []) == free
    assert outputs(True, stop) == outputs(False, stop)


def test_slots_beyond_the_first_tokens_kept(case: Case) -> None:
    """More requests than the device's list of last tokens begins with; it grows."""
    engine = lagging(case, max_num_seqs=16)
    begun = len(engine.runner.last_tokens)  # type: ignore[attr-defined]
    prompts = [case.prompts[i % 3] for i in range(begun + 6)]
    assert run_to_end(engine, prompts, NUM_TOKENS) == [case.expected[i % 3] for i in range(begun + 6)]


def test_an_interrupted_engine_serves_again(case: Case) -> None:
    engine = lagging(case)
    params = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS)
    engine.add_request("a", case.prompts[4], params)
    engine.step()
    engine.abandon()
    engine.step()
    assert run_to_end(engine, case.prompts[:3], NUM_TOKENS) == case.expected[:3]
