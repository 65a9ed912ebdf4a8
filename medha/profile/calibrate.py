"""Measures what one stage's steps cost, and fits the coefficients that the scheduler predicts with.

Steps of many shapes run in turn, each several times: chunks of all sizes behind nothing and behind 1K to 128K cached
tokens, and batches of decodes over the same range. Every rank measures its own stage (:mod:`medha.profile.meter`); the
coefficients are of the slowest stage of group 0: attention of chunks (affine in the cached tokens) and of decodes (with
what a row more costs on the host), linear layers with their all-reduces over the tokens of the step, the head over the
rows that sample, the host's share of a step, merges of KV-parallel groups, and what a chunk that is dealt to them takes
longer than its share alone: what shows of the keys that go around, and each step of the ring.

The send to the next stage has no part: it runs beside the next batch, and a stage's busy time ends before it. Attention
of a mixed batch is a sum, as the torch backend runs one request after another. A step that takes longer than a limit is
not measured; the predictor extrapolates, linearly in KV and in tokens.
"""

from __future__ import annotations

import random
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from medha.batch import PIECES, Row
from medha.config import EngineConfig, ModelConfig, ParallelConfig
from medha.cost.coefficients import Coefficients, Floats, Link, ProfileKey, RingCost
from medha.cost.predictor import Predictor, Work, dealt_work
from medha.engine.build import RankHandle, build_role
from medha.errors import ConfigError
from medha.outputs import RequestOutput
from medha.profile.fit import attention_of, fit_chunks, fit_curve, fit_decodes
from medha.profile.meter import StageMeter, StageTime, gathered
from medha.profile.steps import Step, StepRunner, chunk, decodes, fill_pools
from medha.worker.shard import pick_device

MAX_KV = 131072  # measured unless told otherwise
_LEAST_KV = 1024  # of a chunk, which then costs more than behind nothing by more than noise
_TILE = 16  # queries, less than any kernel's on the CPU; what lies between the sizes is interpolated
_DEALT_EACH = 3  # of the sizes of chunks, one is measured dealt as well
_SMALLEST = 1e-7  # seconds; a part that was not noticed at all


@dataclass(frozen=True, slots=True)
class Effort:
    """How much is measured."""

    chunks: tuple[int, ...] = (16, 32, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048)
    batches: tuple[int, ...] = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128)  # kernels jump at few rows
    lengths: tuple[int, ...] = (256, 1024, 4096, 16384, 65536, 131072, 262144, 524288, 1048576)  # cached before them
    limit_s: float = 1.0  # steps that take longer are left out
    total_s: float = 120.0  # that the repeats of all steps may take together
    min_repeats: int = 5  # of each step, after one for warming up
    max_repeats: int = 15


QUICK = Effort(
    chunks=(16, 32, 64, 128, 256, 512, 1024),
    batches=(1, 2, 3, 4, 6, 8, 12, 16, 32, 64),
    lengths=(1024, 8192, 65536, 524288),
    limit_s=0.4,
    total_s=30.0,
    min_repeats=3,
    max_repeats=7,
)


class Measured(NamedTuple):
    """One run of a step on one stage, and where its busy seconds went."""

    step: Step
    time: StageTime


def families(effort: Effort, *, max_kv: int, num_groups: int, block_size: int) -> list[list[Step]]:
    """The steps that are wanted, in lists along which they take longer and longer."""
    lengths = [*(kv for kv in effort.lengths if kv < max_kv), max_kv]
    behind = [kv for kv in lengths if kv >= min(_LEAST_KV, max_kv)]
    found = [[chunk(size, 0) for size in effort.chunks]]
    found += [[chunk(size, kv) for kv in behind] for size in effort.chunks]
    found += [[decodes(batch, kv) for kv in lengths] for batch in effort.batches]
    for groups in range(2, num_groups + 1):
        kv = 2 * groups * block_size
        if kv <= max_kv:
            found.append([chunk(size, kv, num_groups=groups) for size in effort.chunks])
        if groups in (2, num_groups):
            sizes = [size for size in effort.chunks[::_DEALT_EACH] if size >= PIECES * groups]
            found += [
                [chunk(size, kv, num_groups=groups, is_dealt=True) for size in sizes]
                for kv in sorted({min(kv, max_kv), max_kv // 4, max_kv})
                if sizes
            ]
    return found


def run_in_turn(
    runner: StepRunner, effort: Effort, wanted: Sequence[list[Step]], on_progress: Callable[[float], None]
) -> dict[int, Step]:
    """Warm each step up, leave out what takes too long, and run the others in turn, in another order each time.

    ``on_progress`` is called with the share of all that was done since; the result is the runs that count, by batch id.
    """
    costs: dict[Step, float] = {}
    for steps in wanted:
        part = steps[0][0]
        # a chunk that took too long with nothing cached does so behind something
        if not costs or part.is_decode or not part.position or chunk(part.q_len, 0) in costs:
            costs |= _within_limit(runner, effort, steps)
        on_progress(0.3 / len(wanted))
    rounds = min(max(int(effort.total_s / sum(costs.values())), effort.min_repeats), effort.max_repeats)
    found, shuffled = {}, random.Random(0)
    for _ in range(rounds):
        for step in shuffled.sample(list(costs), len(costs)):
            found[runner.run(step)[0]] = step
        on_progress(0.7 / rounds)
    return found


def _within_limit(runner: StepRunner, effort: Effort, steps: Sequence[Step]) -> dict[Step, float]:
    """Seconds of the first steps of a list, up to the first that takes too long; at least two of them."""
    costs: dict[Step, float] = {}
    for before, step in zip((steps[0], *steps), steps, strict=False):
        last, part = before[0], step[0]
        growth = max(part.q_len / last.q_len, (1 + part.position) / (1 + last.position))
        if len(costs) >= 2 and costs[before] * growth > 2 * effort.limit_s:
            break
        costs[step] = runner.run(step)[1]
    return costs


def slowest_stage(stages: Sequence[Mapping[int, StageTime]], steps: Mapping[int, Step]) -> tuple[int, list[Measured]]:
    """The stage of group 0 that took longest in all, and the runs on it; both are by batch id."""
    totals = [sum(stage[batch_id].busy_s for batch_id in steps) for stage in stages]
    slowest = totals.index(max(totals))
    return slowest, [Measured(step, stages[slowest][batch_id]) for batch_id, step in steps.items()]


def fit(
    rows: Sequence[Measured],
    key: ProfileKey,
    model: ModelConfig,
    parallel: ParallelConfig,
    *,
    stage: int,
    dtype_bytes: int,
    merges: Sequence[tuple[Row, float]] = (),
    dealt: Sequence[tuple[Row, float]] = (),
) -> Coefficients:
    """Coefficients of the stage that was measured.

    ``rows`` are steps on one group; ``dtype_bytes`` is of a weight; ``merges`` are chunks on several groups and the
    seconds of their merges, ``dealt`` those that were dealt and their seconds.
    """
    facts = [(sum(part.q_len for part in step), len(step), step[0].position, step[0].is_decode) for step, _ in rows]
    tokens, batch, kv, is_decode = np.array(facts, dtype=np.float64).T
    attention_s, _, linear_s, head_s, host_s = np.array([time for _, time in rows], dtype=np.float64).T
    decoding, reading = is_decode > 0, is_decode == 0
    if not attention_s.any():  # steps that were measured whole
        for kind in (reading, decoding):
            seen = kv[kind] + (tokens[kind] / batch[kind] + 1) / 2
            attention = attention_of(tokens[kind], kv[kind], seen, linear_s[kind])
            attention_s[kind] = np.maximum(attention, _SMALLEST)
        linear_s = linear_s - attention_s
    least_host_s = float(np.median(host_s[batch == 1]))
    beside_s = attention_s + np.maximum(host_s - least_host_s, 0.0)
    num_layers = len(parallel.layers_of(stage, model.num_layers))
    kvp = None
    if merges:  # what a rank receives grows with the groups beyond its own
        sent = [(row.q_len * (row.num_groups - 1), seconds, seconds) for row, seconds in merges]
        kvp = _link(sent, num_layers, model.num_heads / parallel.tp * (model.head_dim * dtype_bytes + 4))
    found = Coefficients(
        key=key,
        linear=fit_curve(tokens, np.maximum(linear_s, _SMALLEST)),
        chunks=fit_chunks(*_medians(tokens[reading], kv[reading], attention_s[reading]), tile=_TILE),
        decodes=fit_decodes(*_medians(batch[decoding], kv[decoding], beside_s[decoding])),
        head=fit_curve(batch[decoding], np.maximum(head_s[decoding], _SMALLEST)) if stage == parallel.spp - 1 else None,
        host_s=least_host_s,
        kvp=kvp,
    )
    if not dealt:
        return found
    block_bytes = 2.0 * max(1, model.num_kv_heads // parallel.tp) * model.head_dim * dtype_bytes
    return replace(found, ring=RingCost(_link(_beyond(found, dealt), num_layers, block_bytes)))


def _beyond(alone: Coefficients, dealt: Sequence[tuple[Row, float]]) -> list[tuple[float, float, float]]:
    """Of each chunk that was dealt: the tokens of a group's block, what a step of the ring took beside the computation,
    and the whole."""
    whole_s = {row: statistics.median(seconds for other, seconds in dealt if other == row) for row in dict(dealt)}
    predict = Predictor(alone).predict
    beyond_s = {row: seconds - predict([dealt_work(row)]) for row, seconds in whole_s.items()}
    return [(row.kv_len / row.num_groups, beyond_s[row] / (row.num_groups - 1), whole_s[row]) for row in whole_s]


def _medians(size: Floats, kv: Floats, seconds: Floats) -> tuple[Floats, Floats, Floats]:
    """One row a step, so that steps weigh alike and a slow spell does not count."""
    steps, which = np.unique(np.stack([size, kv]), axis=1, return_inverse=True)
    medians = [np.median(seconds[which.reshape(-1) == index]) for index in range(steps.shape[1])]
    return steps[0], steps[1], np.maximum(medians, _SMALLEST)


def _link(points: Sequence[tuple[float, float, float]], num_layers: int, token_bytes: float) -> Link:
    """Transfers, one a layer: latency and bandwidth by least squares, neither below 0.

    ``points`` are tokens, seconds of all layers, and those to which the error is relative.
    """
    tokens, seconds, scale = np.array(points, dtype=np.float64).T
    seconds, scale = (np.maximum(column / num_layers, _SMALLEST) for column in (seconds, scale))
    several = np.unique(tokens).size > 1
    token_s, alpha_s = np.polyfit(tokens, seconds, 1, w=1 / scale).tolist() if several else (0.0, 0.0)
    if token_s <= 0:
        token_s, alpha_s = _SMALLEST / tokens.max(), float(np.median(seconds))
    if alpha_s < 0:
        token_s, alpha_s = float(np.median(seconds / tokens)), 0.0
    return Link(num_layers, alpha_s, token_bytes / token_s, token_bytes)


def measure(
    config: EngineConfig,
    effort: Effort,
    *,
    max_kv: int | None = None,
    on_progress: Callable[[float], None] = lambda share: None,
) -> tuple[Coefficients, int] | None:
    """Build this rank's part and measure; every rank calls it, and rank 0 gets the coefficients and the longest KV
    cache.

    ``max_kv`` is the longest KV cache in tokens, by default 131,072 or what model and memory allow; ``on_progress`` is
    called with the share of all that was done since.

    Raises:
        ConfigError: ``max_kv`` is too long, the device cannot be measured, or something is wrong with the engine.
        RankFailedError: another rank failed.
    """
    scheduler = replace(config.scheduler, async_scheduling=False)  # step by step
    if pick_device(config.device).type == "cuda":  # graphs for all batches of decodes
        scheduler = replace(scheduler, max_num_seqs=max(effort.batches))
    role = build_role(replace(config, scheduler=scheduler))
    effort, longest = _bounded(role, effort, max_kv)
    num_blocks = -(-(longest + effort.chunks[-1]) // role.runner.cache.block_size)
    fill_pools(role.runner.cache, num_blocks * role.runner.cache.block_size, seed=role.runner.group)
    meter = StageMeter(role.runner)
    steps: dict[int, Step] = {}

    def run() -> list[RequestOutput]:
        assert role.engine is not None, "it runs on rank 0"
        block_size, vocab_size = role.runner.cache.block_size, role.limits.vocab_size
        runner = StepRunner(role.engine.runner, block_size=block_size, num_blocks=num_blocks, vocab_size=vocab_size)
        wanted = families(effort, max_kv=longest, num_groups=config.parallel.kvp, block_size=block_size)
        steps.update(run_in_turn(runner, effort, wanted, on_progress))
        return []

    role.call("profile", run)
    by_rank = [meter.take()] if role.part is None else gathered(role.part.ranks, meter.take())
    found = None if role.engine is None else _fitted(role, config, steps, by_rank)
    role.close()
    return None if found is None else (found, longest)


def _bounded(role: RankHandle, effort: Effort, max_kv: int | None) -> tuple[Effort, int]:
    """Chunks and the longest KV cache that model and pool allow."""
    runner = role.runner
    positions = role.limits.max_model_len
    effort = replace(effort, chunks=tuple(size for size in effort.chunks if size <= positions) or (1,))
    most = min(positions, runner.cache.num_blocks * runner.cache.block_size - effort.chunks[-1])
    if most < 1 or (max_kv is not None and not 1 <= max_kv <= most):
        why = f"what the model's {positions} positions and the KV pool allow"
        raise ConfigError(f"max_kv={max_kv}; accepted: 1 to {most}, {why}")
    return effort, min(most, MAX_KV) if max_kv is None else max_kv


def _fitted(
    role: RankHandle, config: EngineConfig, steps: Mapping[int, Step], by_rank: Sequence[Mapping[int, StageTime]]
) -> Coefficients:
    """Coefficients of the slowest stage of group 0, keyed as this engine's own are."""
    assert role.engine is not None, "rank 0 has the engine"
    parallel, model = config.parallel, role.runner.model.config
    own = {batch_id: step for batch_id, step in steps.items() if step[0].num_groups == 1}
    stages = [by_rank[parallel.rank_of(stage=stage, tp_rank=0)] for stage in range(parallel.spp)]
    stage, rows = slowest_stage(stages, own)
    groups = [by_rank[parallel.rank_of(stage=stage, tp_rank=0, kvp_rank=group)] for group in range(parallel.kvp)]
    merges, dealt = list[tuple[Row, float]](), list[tuple[Row, float]]()
    for batch_id, (row, *_) in steps.items():
        times = [one[batch_id] for one in groups if batch_id in one]
        if row.is_dealt:
            dealt.append((row, max(time.busy_s for time in times)))
        elif row.is_shared:  # the group that comes last waits for nobody
            merges.append((row, min(time.merge_s for time in times)))
    key, dtype_bytes = role.engine.scheduler.predictor.coefficients.key, role.runner.cache.k[0].dtype.itemsize
    return fit(rows, key, model, parallel, stage=stage, dtype_bytes=dtype_bytes, merges=merges, dealt=dealt)


def predicted(found: Coefficients, longest: int) -> list[dict[str, str | float]]:
    """What some steps are predicted to take, behind no more than the longest KV cache that was measured."""
    predict = Predictor(found).predict
    short, long = min(1024, longest), min(65536, longest)
    steps = {
        f"a decode behind {short:,}": [Work(1, short, True)],
        f"16 decodes behind {short:,}": [Work(1, short, True)] * 16,
        "a first chunk of 256": [Work(256, 0, False)],
        f"one behind {long:,}": [Work(256, long, False)],
    }
    return [{"step": name, "predicted_s": predict(rows)} for name, rows in steps.items()]
