"""Measuring on every rank: each builds its part of the model and meters it, rank 0 runs the steps and fits.

The pool is the engine's own, filled with random numbers as far as it is used.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence

from medha.config import EngineConfig
from medha.cost.coefficients import Coefficients
from medha.engine.build import RankHandle, build_role
from medha.errors import ConfigError
from medha.outputs import RequestOutput
from medha.profile.calibrate import Effort, families, fit, run_in_turn, slowest_stage
from medha.profile.meter import StageMeter, StageTime, all_reduce_seconds, gathered
from medha.profile.steps import Step, StepRunner, fill_pools

MAX_KV = 131072
_REDUCED_TOKENS = (1, 64, 512, 2048)


def measure(
    config: EngineConfig,
    effort: Effort,
    *,
    max_kv: int | None = None,
    on_progress: Callable[[float], None] = lambda done: None,
) -> Coefficients | None:
    """Build this rank's part and measure; every rank calls it, and rank 0 gets the coefficients.

    ``max_kv`` is the longest KV cache in tokens, by default 131,072 or what model and memory allow; ``on_progress`` is
    called with the share done.

    Raises:
        ConfigError: ``max_kv`` is too long, the device cannot be measured, or something is wrong with the engine.
        RankFailedError: another rank failed.
    """
    scheduler = dataclasses.replace(config.scheduler, decode_lag=0)
    role = build_role(dataclasses.replace(config, scheduler=scheduler, cuda_graphs=False))  # step by step
    effort, longest = _bounded(role, effort, max_kv)
    num_blocks = -(-(longest + effort.chunks[-1]) // role.runner.cache.block_size)
    fill_pools(role.runner.cache, num_blocks * role.runner.cache.block_size, seed=role.runner.group)
    meter = StageMeter(role.runner)
    ranks = next((part.ranks for part in (role.caller, role.follower) if part is not None), None)
    reduces = []
    if ranks is not None and ranks.config.tp > 1:
        dim, dtype = role.runner.model.config.hidden_size, role.runner.cache.k[0].dtype
        reduces = all_reduce_seconds(ranks.tp_group, _REDUCED_TOKENS, dim=dim, dtype=dtype, device=role.runner.device)
    if role.follower is not None:
        role.follower.join("profile")
        gathered(role.follower.ranks, meter.take())
        role.close()
        return None
    assert role.engine is not None, "rank 0 has the engine"
    block_size = role.runner.cache.block_size
    runner = StepRunner(
        role.engine.runner, block_size=block_size, num_blocks=num_blocks, vocab_size=role.limits.vocab_size
    )
    wanted = families(effort, max_kv=longest, num_groups=config.parallel.kvp, block_size=block_size)
    steps: dict[int, Step] = {}

    def run() -> list[RequestOutput]:
        steps.update(run_in_turn(runner, effort, wanted, on_progress))
        return []

    if role.caller is None:
        run()
        by_rank = [meter.take()]
    else:
        role.caller.call("profile", run)
        by_rank = gathered(role.caller.ranks, meter.take())
    found = _fitted(role, config, steps, by_rank, reduces)
    role.close()
    return found


def _bounded(role: RankHandle, effort: Effort, max_kv: int | None) -> tuple[Effort, int]:
    """Chunks and the longest KV cache that model and pool allow."""
    runner = role.runner
    positions = role.limits.max_model_len
    effort = dataclasses.replace(effort, chunks=tuple(size for size in effort.chunks if size <= positions) or (1,))
    most = min(positions, runner.cache.num_blocks * runner.cache.block_size - effort.chunks[-1])
    if most < 1 or (max_kv is not None and not 1 <= max_kv <= most):
        raise ConfigError(
            f"max_kv={max_kv}; accepted: 1 to {most}, what the model's {positions} positions and half of the free "
            "memory allow"
        )
    return effort, min(most, MAX_KV) if max_kv is None else max_kv


def _fitted(
    role: RankHandle,
    config: EngineConfig,
    steps: Mapping[int, Step],
    by_rank: Sequence[Mapping[int, StageTime]],
    reduces: Sequence[tuple[int, float]],
) -> Coefficients:
    """Coefficients of the slowest stage of group 0, keyed as this engine's own are."""
    assert role.engine is not None and role.engine.scheduler.predictor is not None, "the medha scheduler predicts"
    parallel, model = config.parallel, role.runner.model.config
    own = {batch_id: step for batch_id, step in steps.items() if step[0].num_groups == 1}
    stages = [by_rank[parallel.rank_of(stage=stage, tp_rank=0)] for stage in range(parallel.spp)]
    stage, rows = slowest_stage(stages, own)
    groups = [by_rank[parallel.rank_of(stage=stage, tp_rank=0, kvp_rank=group)] for group in range(parallel.kvp)]
    shared = {batch_id: step for batch_id, step in steps.items() if step[0].num_groups > 1}
    return fit(
        rows,
        role.engine.scheduler.predictor.coefficients.key,
        model,
        parallel,
        num_layers=len(parallel.layers_of(stage, model.num_layers)),
        dtype_bytes=role.runner.cache.k[0].dtype.itemsize,
        has_head=stage == parallel.spp - 1,
        merges=[
            # the group that comes last waits for nobody
            (step[0].q_len, step[0].num_groups, min(times[i].merge_s for times in groups if i in times))
            for i, step in shared.items()
        ],
        reduces=reduces,
    )
