"""Chunk budgets by need: the quantum follows from the machine; chunks are efficient where no objective forbids it."""

from typing import Any

import pytest

from medha.config import SchedulerConfig
from medha.cost.predictor import Predictor, Work
from medha.cost.prefill_time import chunk_rules, least_chunk
from medha.params import SLO
from medha.sched.scheduler import Scheduler
from tests.sched.costs import efficient_kv
from tests.sched.virtual import MODEL, Steps, add, finish, gpu_predictor, make_predictor, new_scheduler

PREDICTOR = make_predictor(max_tokens=2048, attention=2 / 3)  # slower than products: chunks take long behind a past
QUANTUM_S, _ = chunk_rules(SchedulerConfig(), PREDICTOR)


def rates_behind(kv_before: int) -> dict[int, float]:
    """Tokens a second of chunks behind so many cached tokens, by size."""
    return {size: size / PREDICTOR.tick().with_chunk(size, kv_before) for size in (64, 128, 256, 512, 1024, 2048)}


GPU = gpu_predictor("h100-80g", MODEL, max_tokens=8192)
"""On which a larger chunk is read faster, as the weights are read once for all of it."""


def on_one_group(predictor: Predictor = PREDICTOR, **options: Any) -> Scheduler:
    return new_scheduler(num_blocks=1 << 16, predictor=predictor, max_prompt_tokens=400_000, **options)


def on_two_groups(num_blocks: int = 1 << 16, **options: Any) -> Scheduler:
    return new_scheduler(num_blocks=num_blocks, num_groups=2, **options)


def chunks_of_one(slo: SLO | None = None) -> list[tuple[int, int]]:
    """(position, tokens) of the chunks of a long prompt beside a decode with these objectives."""
    steps = Steps(on_one_group(interactive_share=0.0), is_still=True)
    steps.add(0, 16, 1 << 16, slo)
    steps.add(1, 100_000, 2)
    return [(row.position, row.q_len) for batch, _ in steps.until(1) for row in batch.rows if row.slot == 1]


def test_the_quantum_is_what_the_least_efficient_chunk_takes() -> None:
    rates = {size: rate for size, rate in rates_behind(0).items() if size >= 256}
    size = next(size for size, rate in rates.items() if rate >= 0.85 * max(rates.values()))
    assert PREDICTOR.tick().with_chunk(size, 0) == QUANTUM_S
    for option in ("quantum_s", "t_target_s"):
        given_s, least = chunk_rules(SchedulerConfig(**{option: 0.125}), PREDICTOR)  # type: ignore[arg-type]
        assert (given_s, least(0), least(10**6)) == (0.125, 64, 64)


def test_no_chunk_is_read_slowly_for_the_sake_of_the_quantum() -> None:
    """Not even behind 100,000 tokens, beside a decode: without an objective the batch takes longer."""
    for position, tokens in chunks_of_one()[:-1]:
        rates = rates_behind(position)
        rate = tokens / PREDICTOR.tick().with_chunk(tokens, position)
        assert rate >= 0.84 * max(rates.values()), position


@pytest.mark.parametrize("slo", [SLO(tpot_s=0.05), SLO(tpot_s=0.1)])
def test_an_objective_makes_chunks_as_small_as_it_needs(slo: SLO) -> None:
    assert slo.tpot_s is not None
    for position, tokens in chunks_of_one(slo)[1:]:  # the first is beside its prompt
        assert PREDICTOR.tick().with_chunk(tokens, position) <= slo.tpot_s or tokens <= 64, position


def test_decodes_take_their_share_beside_and_without_the_long_prompt_and_no_more() -> None:
    """Of those that never end; tokens come more quickly."""
    means_s = []
    for share in (0.0, 0.05, 0.2):
        steps = Steps(on_one_group(interactive_share=share), *[(64, 1 << 16)] * 4)
        steps.add(9, 100_000)
        decodes_s = prefills_s = 0.0
        for batch, taken_s in steps.until(9):
            decodes = [Work(1, row.position, True) for row in batch.rows if row.is_decode]
            decodes_s += (beside_s := PREDICTOR.predict(decodes))
            prefills_s += taken_s - beside_s
        if share:
            assert 0.99 * share * prefills_s <= decodes_s <= share * prefills_s + 4 * QUANTUM_S + 1.0
        means_s.append(steps.now_s / len(steps.times_s[0]))
    assert means_s[1] < 0.6 * means_s[0] and means_s[2] < 0.4 * means_s[1]


@pytest.mark.parametrize(("num_decodes", "least", "most"), [(8, 1.0, 1.0), (32, 1.3, 1.5), (100, 1.9, 1.9)])
def test_a_batch_takes_up_to_nearly_two_quanta_for_its_decodes_to_have_their_share(
    num_decodes: int, least: float, most: float
) -> None:
    for share in (0.0, 0.125):
        steps = Steps(on_one_group(interactive_share=share), *[(64, 1 << 11)] * num_decodes)
        while steps.step()[0].num_decodes < num_decodes:
            pass
        steps.add(999, 300_000)
        while steps.step()[0].num_tokens == num_decodes:
            pass
        prediction = steps.decision.prediction
        assert prediction is not None
        quanta = round(prediction.budget_s / QUANTUM_S, 9)
        assert least <= quanta <= most if share else prediction.budget_s == QUANTUM_S


def batches_of_shorts(scheduler: Scheduler) -> tuple[int, float, float]:
    """A short prompt of one token's answer comes with every second batch beside a long one. How many of eighty have
    batches without the long one, and the seconds of batches without and with it."""
    steps, num_own, seconds = Steps(scheduler), 0, [0.0, 0.0]
    steps.add(9, 300_000)
    for _ in range(80):
        taken = [steps.step()]
        steps.add(1, 20)
        for batch, taken_s in (*taken, *steps.until(1)):
            slots = {row.slot for row in batch.rows}
            seconds[9 in slots] += taken_s
            num_own += slots == {1}
    return num_own, seconds[0], seconds[1]


def test_a_prompt_that_comes_first_in_any_case_pays_nothing_for_a_batch_of_its_own() -> None:
    """Nor is it held back by what others have spent; unless somebody is guarded, for whose bound the share counts."""
    num_own, without_s, with_s = batches_of_shorts(on_one_group(interactive_share=0.02, rho_max=0.0))
    assert num_own == 80 and without_s > 0.02 * with_s + 4 * QUANTUM_S
    num_own, without_s, with_s = batches_of_shorts(on_one_group(interactive_share=0.02, rho_max=0.0, patience_s=1e-6))
    assert num_own < 80 and without_s <= 0.02 * with_s + 4 * QUANTUM_S


def test_decodes_spend_nothing_before_a_long_prompt_comes() -> None:
    """Chats alone take nothing from what is spared: their tokens come as if alone when it has come."""
    steps = Steps(on_one_group(interactive_share=0.05), *[(64, 1 << 11)] * 8)
    for slot in range(100, 300):
        steps.add(slot, 20)
        steps.step()
    steps.add(999, 300_000)
    assert all(row.slot != 999 for _ in range(20) for row in steps.step()[0].rows)


@pytest.mark.parametrize("num_tokens", [20, 600, 920])
def test_prompts_that_come_after_a_long_one_have_their_share(num_tokens: int) -> None:
    """They pay for what their batches take, and for no more, also where one needs nearly four quanta."""
    options = {"policy": "fcfs", "interactive_share": 0.125, "rho_max": 0.0, "late_share": 0.0}
    scheduler, seconds = on_one_group(**options), [0.0, 0.0]  # without the long one, and with it
    steps = Steps(scheduler)
    steps.add(0, 60_000)
    while not steps.times_s[0]:
        for slot in range(1, 6):
            if not scheduler.knows(slot):
                steps.add(slot, num_tokens)
        batch, taken_s = steps.step()
        seconds[any(row.slot == 0 for row in batch.rows)] += taken_s
    assert scheduler.prefill_left_s(0, num_tokens) < 4 * QUANTUM_S
    assert 0.95 * 0.125 * seconds[1] < seconds[0] < 0.125 * seconds[1] + 5 * QUANTUM_S


@pytest.mark.parametrize("option", ["t_target_s", "quantum_s"])
def test_decodes_of_several_groups_share_batches_of_half_the_time_that_is_set(option: str) -> None:
    """No batch leaves out the prompt of a group, which would be idle; after the decode batches take all the time."""
    scheduler = on_two_groups(rho_max=0.0, interactive_share=0.2, **{option: 0.4})
    steps = Steps(scheduler, (300_000, 1), (300_000, 1), (16, 30), is_still=True)
    found: dict[bool, list[float]] = {True: [], False: []}
    for _ in range(60):
        batch, seconds = steps.step()
        if found[True]:
            assert {row.group for row in batch.rows if row.slot < 2} == {0, 1}
        found[bool(batch.num_decodes)].append(seconds)
    assert len(found[True]) == 29 and all(0.15 < seconds <= 0.2 for seconds in found[True])
    assert all(0.35 < seconds <= 0.4 for seconds in found[False])


def batches_of_a_document(scheduler: Scheduler, at_s: list[float], num_tokens: int) -> list[tuple[float, float, int]]:
    """Start, predicted seconds and tokens of the batches that read so many tokens from 0 on; short prompts come at
    ``at_s``, each answered at once."""
    steps, found = Steps(scheduler), []
    steps.add(9, num_tokens)
    while not steps.times_s[9]:
        start_s = steps.now_s
        if at_s and start_s >= at_s[0]:
            steps.add(1, 100, arrival_s=at_s.pop(0))
        batch, seconds = steps.step()
        found.append((start_s, seconds, sum(row.q_len for row in batch.rows)))
    return found


def test_a_prompt_that_is_alone_takes_batches_in_which_a_newcomer_is_unlikely() -> None:
    """Up to four quanta, a twentieth of the time since the last arrival, and no longer than it takes to be read at full
    speed; after an arrival they are short again."""
    options = {"predictor": GPU, "max_batch_tokens": GPU.max_tokens}
    config = SchedulerConfig(max_batch_tokens=GPU.max_tokens)
    (quantum_s, least), full = chunk_rules(config, GPU), least_chunk(config, GPU, nearly=0.97)
    position, longest_s, alone = 0, 0.0, batches_of_a_document(on_one_group(**options), [], 300_000)
    for start_s, seconds, tokens in alone:
        full_s = GPU.tick().with_chunk(full(position), position)
        assert seconds <= max(quantum_s, min(4 * quantum_s, start_s / 20, full_s)) or tokens == least(position)
        longest_s = max(longest_s, seconds * (tokens > least(position)))
        position += tokens
    assert longest_s > 3.9 * quantum_s
    arrivals = [step * 5 * quantum_s for step in range(1, 10_000)]  # so many that none is unlikely
    busy = batches_of_a_document(on_one_group(**options, interactive_share=0.0), arrivals, 300_000)
    assert all(seconds <= quantum_s or tokens <= least(0) for _, seconds, tokens in busy)
    assert len(busy) > 1.5 * len(alone)


@pytest.mark.parametrize(("given", "most_s"), [({}, QUANTUM_S), ({"quantum_s": 0.1}, 0.1), ({"t_target_s": 0.1}, 0.1)])
def test_no_batch_takes_longer_where_that_gains_nothing_or_a_time_is_given(given: Any, most_s: float) -> None:
    alone = batches_of_a_document(on_one_group(**given), [], 30_000)
    assert max(seconds for _, seconds, tokens in alone if tokens > 64) <= most_s


def test_prompts_one_after_the_other_take_such_batches_too() -> None:
    """Nobody's first token waits for them: a batch goes on behind the first that ends for a quantum at most."""
    quantum_s, _ = chunk_rules(SchedulerConfig(max_batch_tokens=GPU.max_tokens), GPU)
    steps = Steps(on_one_group(GPU, max_batch_tokens=GPU.max_tokens), *[(60_000, 1)] * 4)
    longest_s, ends_s = 0.0, list[float]()
    while len(ends_s) < 4:
        batch, seconds = steps.step()
        num_ended = sum(row.samples for row in batch.rows)
        assert num_ended <= 1
        assert seconds <= quantum_s or len(batch.rows) == 1 or not num_ended
        longest_s = max(longest_s, seconds * (len(ends_s) < 3))  # while others wait
        ends_s += [steps.now_s] * num_ended
    assert 3.5 * quantum_s < longest_s <= 4 * quantum_s
    alone_s = steps.scheduler.prefill_left_s(0, 60_000)
    assert all(end_s < (place + 1.1) * alone_s for place, end_s in enumerate(ends_s))


def test_work_left_is_that_at_the_budget_in_force() -> None:
    """What a slack counts beside decodes whose objective leaves little is what the rest takes, not what it would alone;
    once they are gone it is that again."""
    scheduler, num_decodes, num_tokens = on_one_group(), 24, 20_000
    steps, said_s, alone_s = Steps(scheduler), [], []
    for slot in range(num_decodes):
        steps.add(slot, 64, 1 << 12, SLO(tpot_s=0.2))
    deadline_s = steps.add(99, num_tokens).deadline_s
    for batch, seconds in steps.until(99):
        for row, slack_s in zip(batch.chunks, steps.decision.slack_s, strict=True):
            if row.slot == 99:
                said_s.append((steps.now_s, deadline_s - (steps.now_s - seconds) - slack_s))
                alone_s.append(scheduler._queue.left_s(row.kv_len, num_tokens))
    third = len(said_s) // 3
    then_s, left_s = said_s[third]
    assert left_s == pytest.approx(steps.now_s - then_s, rel=0.1)
    assert left_s > 1.2 * alone_s[third]
    for slot in range(num_decodes):
        scheduler.cancel(slot)
    assert scheduler.prefill_left_s(0, num_tokens) == scheduler._queue.times(num_tokens).total_s(num_tokens)


def test_what_a_prompt_yields_on_a_group_goes_back_to_it_where_the_rest_is_too_little_for_a_chunk() -> None:
    depth = efficient_kv(PREDICTOR, 0.3, 64)
    steps = Steps(on_two_groups(t_target_s=0.4), *[(depth + 5000, 1)] * 2, is_still=True)
    num_done = num_shared = 0
    while num_done < depth + 1000:
        if num_done > depth:
            steps.add(2, 16)
        batch, _ = steps.step()
        longs = {row.group: row for row in batch.rows if row.slot < 2}
        assert longs.keys() == {0, 1}
        num_done, num_shared = longs[0].kv_len, num_shared + len(batch.rows) - 2
    assert num_shared > 5


def test_a_group_computes_for_as_long_as_the_slowest() -> None:
    """A chunk behind a long context takes several quanta; a prompt that begins on another group reads meanwhile."""
    depth = efficient_kv(PREDICTOR, 0.9, 64)
    two = [(depth + 5000, 1)] * 2  # one that is alone would be spread
    steps = Steps(on_two_groups(interactive_share=0.0), *two, is_still=True)
    position = 0
    while position < depth:
        position = steps.step()[0].rows[0].kv_len
    steps.scheduler.cancel(1)
    steps.add(2, depth)
    batch, seconds = steps.step()
    prediction = steps.decision.prediction
    assert prediction is not None and seconds > 2 * prediction.budget_s
    first_s = PREDICTOR.tick().with_chunk(next(row.q_len for row in batch.rows if row.slot == 2), 0)
    assert 0.8 * seconds < first_s <= 1.01 * seconds


@pytest.mark.parametrize(("lengths", "num_blocks", "widths"), [
    ([30_000], 1 << 14, [2]),  # nobody else reads
    ([30_000, 100, 100], 1 << 14, [2, 1, 1]),  # these have less to read than what would be read on another group
    ([30_000] * 4, 1 << 14, [1, 1, 1, 1]),
    ([30_000] * 4, 30_000 // 16, [2, 2, 2, 2]),  # no group has room for all of one
])  # fmt: skip
def test_a_prompt_is_spread_where_it_holds_nobody_up(lengths: list[int], num_blocks: int, widths: list[int]) -> None:
    """By the quantum alone each of 30,000 tokens would be: of four both groups would read one after the other, and each
    from the first group on."""
    requests = ((length, 2) for length in lengths)
    steps = Steps(on_two_groups(num_blocks, max_prompt_tokens=32_000), *requests, is_still=True)
    assert 15_000 < steps.scheduler.memory.spread_kv < 20_000
    found: dict[int, int] = {}
    num_on = [0, 0]
    while len(found) < len(lengths):
        for row in steps.step()[0].rows:
            num_on[row.group] += row.position == 0
            found |= {row.slot: row.num_groups} if row.samples else {}
    assert [found[slot] for slot in range(len(lengths))] == widths
    assert num_on == ([2, 2] if widths == [1] * 4 else num_on)


def test_a_machine_that_is_slower_than_predicted_reads_as_much_in_a_batch() -> None:
    """Else each of many short prompts would have a batch of its own, where what a batch takes at least is longer."""

    def num_tokens(slower: float) -> int:
        scheduler = on_one_group(late_share=0.0, interactive_share=0.0)
        for slot in range(4000):
            add(scheduler, slot, 64)
        for _ in range(100):
            decision = scheduler.schedule(0.0)
            assert decision.batch is not None and decision.prediction is not None
            busy_s = slower * decision.prediction.seconds / decision.prediction.factor
            finish(scheduler, decision.batch, busy_s=busy_s, ended=range(4000))
        return decision.batch.num_tokens

    assert num_tokens(3.0) == num_tokens(1.0)
