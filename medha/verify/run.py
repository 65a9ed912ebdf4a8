"""All checks in their order, the simplest first: what fails in one is often why the next does."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import replace
from itertools import chain
from pathlib import Path

import torch

from medha.attention.interface import LayerShape
from medha.engine.build import TORCH_DTYPES, own_device, pick_backend, pick_device
from medha.errors import RankFailedError
from medha.models.needle import write_needle
from medha.models.reference import random_weights, write_checkpoint
from medha.parallel.health import failures_named
from medha.parallel.launch import Launch
from medha.parallel.mesh import check_same_everywhere, init_ranks, leave, meet
from medha.verify.collectives import collective_rows
from medha.verify.kernels import attention_rows, merge_rows
from medha.verify.machine import machine_rows
from medha.verify.rows import Crew, Row, Setting, attempted, timed
from medha.verify.serving import find_needle, memory_row, parity_rows, random_llama

Add = Callable[[Sequence[Row]], None]


def resolved(setting: Setting) -> Setting:
    """The setting with a dtype in place of ``auto``."""
    if setting.dtype != "auto":
        return setting
    is_gpu = setting.device.startswith("cuda") or (setting.device == "auto" and torch.cuda.is_available())
    return replace(setting, dtype="bfloat16" if is_gpu else "float32")


def run_checks(setting: Setting, launch: Launch | None, add: Add) -> None:
    """Run every check; every rank calls it.

    Args:
        setting: what to check, :func:`resolved`.
        launch: this process's place, None for a single process.
        add: called with rows as they come; those on rank 0 are the result.

    Raises:
        ConfigError: the setting cannot be run on this machine.
        RankFailedError: a rank failed; the rows so far have been added.
    """
    with ExitStack() as stack:
        mine = None
        if launch is None or launch.local_rank == 0:
            mine = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="medha-verify-")))
        folder = _check_basics(setting, launch, mine, add)
        add(timed(parity_rows(setting, folder / "random")))
        start = time.perf_counter()
        needle = find_needle(setting, folder / "needle")
        add([replace(row, seconds=time.perf_counter() - start) for row in needle.rows])
        add([memory_row(setting, _of_every_rank(setting, launch, needle.kv_bytes))])


def _check_basics(setting: Setting, launch: Launch | None, mine: Path | None, add: Add) -> Path:
    """All that needs no engine, and the models written; returns the folder that they are in."""
    job = None if launch is None else meet(setting.parallel, launch)
    crew = Crew(job)
    with nullcontext() if job is None else failures_named(job.monitor, activity="verify"):
        if job is not None:
            check_same_everywhere(job, {"options": setting})
        device = own_device(pick_device(setting.device), launch)
        dtype = TORCH_DTYPES[setting.dtype]
        backends = {
            each: pick_backend(setting.attention_backend, LayerShape(8, 2, 64, each), device)
            for each in (torch.float32, dtype)
        }
        backend = backends[dtype]
        ranks = None if job is None else init_ranks(job, device)
        add(timed(machine_rows(crew, device)))
        folder = _write_models(setting, launch, mine, crew)
        found = chain.from_iterable(attention_rows(one, device, [each]) for each, one in backends.items())
        add(crew.worst("attention", attempted("attention", found)))
        num_parts = sorted({max(2, setting.parallel.kvp), 3})
        add(crew.worst("merge", attempted("merge", merge_rows(backend, device, dtype, num_parts=num_parts))))
        add(timed(collective_rows(ranks, crew, backend, device, dtype)))
        if ranks is not None:
            leave(ranks)
    return folder


def _write_models(setting: Setting, launch: Launch | None, mine: Path | None, crew: Crew) -> Path:
    """The folder of the models on this node, which its first rank writes; the others wait for it."""
    if mine is not None:
        shape = random_llama(setting.parallel, setting.dtype)
        write_checkpoint(mine / "random", shape, random_weights(shape, seed=0))
        write_needle(mine / "needle")
    folders = crew.gather("folders", None if mine is None else str(mine))
    return Path(folders[0 if launch is None else launch.rank - launch.local_rank])


def _of_every_rank(setting: Setting, launch: Launch | None, number: int | None) -> list[int | None]:
    """A number of each rank, after the engine has left its groups."""
    if launch is None:
        return [number]
    job = meet(setting.parallel, launch)
    with failures_named(job.monitor, activity="verify"):
        numbers = Crew(job).gather("numbers", number)
        if not job.monitor.leave():
            raise RankFailedError(job.monitor.first_error() or f"{job.place}: not every rank has left in time")
    return numbers
