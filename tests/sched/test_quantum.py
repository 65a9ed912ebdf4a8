"""Chunk budgets by need: the quantum follows from the machine; chunks are efficient where no objective forbids it."""

from __future__ import annotations

import pytest

from medha.config import SchedulerConfig
from medha.params import SLO
from medha.sched.decision import SchedulerRequest
from medha.sched.packer import chunk_rules
from medha.sched.scheduler import Scheduler
from tests.sched.virtual import make_predictor

SIZES = (64, 128, 256, 512, 1024, 2048)
PREDICTOR = make_predictor(max_tokens=2048)


def rates_behind(kv_before: int) -> dict[int, float]:
    """Tokens a second of chunks behind so many cached tokens, by size."""
    return {size: size / PREDICTOR.tick().with_chunk(size, kv_before) for size in SIZES}


def new_scheduler(**options: object) -> Scheduler:
    config = SchedulerConfig(**options)  # type: ignore[arg-type]
    return Scheduler(config, num_blocks=1 << 16, block_size=16, predictor=PREDICTOR, max_prompt_tokens=400_000)


def chunks_of_one(scheduler: Scheduler, slo: SLO | None = None) -> list[tuple[int, int]]:
    """(position, tokens) of the chunks of a long prompt beside a decode with these objectives."""
    scheduler.add(SchedulerRequest(0, 16, 1 << 16, 0.0, slo))
    scheduler.add(SchedulerRequest(1, 300_000, 2, 0.0))
    chunks: list[tuple[int, int]] = []
    while not chunks or sum(chunks[-1]) < 300_000:
        batch = scheduler.schedule(0.0).batch
        assert batch is not None
        chunks += [(row.position, row.q_len) for row in batch.rows if row.slot == 1]
        scheduler.complete(batch, 0.0, [(row.slot, 1, False) for row in batch.rows if row.samples], 0.0)
    return chunks


def test_the_quantum_is_what_the_least_efficient_chunk_takes() -> None:
    quantum_s, _ = chunk_rules(SchedulerConfig(), PREDICTOR)
    rates = {size: rate for size, rate in rates_behind(0).items() if size >= 256}
    size = next(size for size, rate in rates.items() if rate >= 0.85 * max(rates.values()))
    assert quantum_s == PREDICTOR.tick().with_chunk(size, 0)
    for option in ("quantum_s", "t_target_s"):
        given_s, least = chunk_rules(SchedulerConfig(**{option: 0.125}), PREDICTOR)  # type: ignore[arg-type]
        assert (given_s, least(0), least(10**6)) == (0.125, 64, 64)


def test_no_chunk_is_read_slowly_for_the_sake_of_the_quantum() -> None:
    """Not even behind 300,000 tokens, beside a decode: without an objective the batch takes longer."""
    for position, tokens in chunks_of_one(new_scheduler())[:-1]:
        rates = rates_behind(position)
        rate = tokens / PREDICTOR.tick().with_chunk(tokens, position)
        assert rate >= 0.84 * max(rates.values()), position


@pytest.mark.parametrize("slo", [SLO(tpot_s=0.05), SLO(tpot_s=0.1)])
def test_an_objective_makes_chunks_as_small_as_it_needs(slo: SLO) -> None:
    assert slo.tpot_s is not None
    for position, tokens in chunks_of_one(new_scheduler(), slo)[1:]:  # the first is beside its prompt
        alone_s = PREDICTOR.tick().with_chunk(tokens, position)
        assert alone_s <= slo.tpot_s or tokens == 64, position


def test_a_class_goes_first_by_default() -> None:
    scheduler = new_scheduler(max_batch_tokens=64, max_num_seqs=2)
    for slot, (tokens, priority) in enumerate([(40, 2), (60, 0), (50, 1)]):
        scheduler.add(SchedulerRequest(slot, tokens, 4, 0.0, priority=priority))
    batch = scheduler.schedule(0.0).batch
    assert batch is not None and batch.rows[0].slot == 1
