"""All checks in their order, the simplest first: what fails in one is often why the next does; and their report."""

from __future__ import annotations

import platform
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from medha.attention.interface import LayerShape
from medha.cli.command import FAILED_REQUESTS, first_interrupt, ignore_signals
from medha.cli.report import deliver, stamp
from medha.errors import is_interrupt
from medha.models.needle import write_needle
from medha.models.reference import random_weights, write_checkpoint
from medha.parallel.health import failures_named
from medha.parallel.launch import Launch, is_first_rank
from medha.parallel.mesh import Job, check_same_everywhere, meet
from medha.parallel.own_ranks import job_folder
from medha.verify.kernels import attention_rows, merge_rows
from medha.verify.rows import FAIL, NOT_RUN, PASS, Row, Setting, attempted, failed, gathered, timed, worst
from medha.verify.serving import Show, needle_rows, parity_rows, random_llama
from medha.worker.shard import TORCH_DTYPES, choose_backend, own_device, pick_device

Add = Callable[[Sequence[Row]], None]


def run_and_report(setting: Setting, launch: Launch | None, output_json: Path | None) -> int:
    """Run the checks; rank 0 prints the table. Every rank calls it.

    Returns:
        The exit code; the other ranks leave the verdict to rank 0, since a launcher ends all when one has failed.

    Raises:
        MedhaError: a rank failed, or the setting cannot be run; the table so far is printed.
    """
    if setting.dtype == "auto":
        is_gpu = setting.device.startswith("cuda") or (setting.device == "auto" and torch.cuda.is_available())
        setting = replace(setting, dtype="bfloat16" if is_gpu else "float32")
    if not is_first_rank():
        ignore_signals()  # rank 0 hears of them, and shows the table so far
        run_checks(setting, launch, lambda rows: None)
        return 0
    rows: list[Row] = []
    start = time.perf_counter()
    try:
        with first_interrupt() as interrupted, ExitStack() as stack:
            stack.callback(lambda: _deliver(setting, rows, time.perf_counter() - start, output_json))
            status = stack.enter_context(Console(stderr=True).status("checking"))

            def add(new: Sequence[Row]) -> None:
                rows.extend(new)
                show(rows[-1].verdict)

            def show(text: str) -> None:
                status.update(f"checking; {rows[-1].check if rows else 'ranks'}: {text}")
                if interrupted:
                    raise KeyboardInterrupt

            try:
                run_checks(setting, launch, add, show)
            except BaseException as error:
                if rows and not is_interrupt(error):
                    rows.append(failed(f"after {rows[-1].check}", error))
                raise
    except BaseException:
        ignore_signals()  # the launcher ends the ranks that are left, and this one has to say why
        raise
    return FAILED_REQUESTS if any(row.verdict == FAIL for row in rows) else 0


def _deliver(setting: Setting, rows: Sequence[Row], seconds: float, output_json: Path | None) -> None:
    """Print the rows and what they come to, and write the report, if there is anything."""
    if not rows:
        return
    parallel, counts = setting.parallel, Counter(row.verdict for row in rows)
    layout = f"kvp={parallel.kvp} x spp={parallel.spp} x tp={parallel.tp}"
    ranks = f"{parallel.world_size} rank" + "s" * (parallel.world_size > 1)
    told = f"{counts[PASS]} passed, {counts[FAIL]} failed, {counts[NOT_RUN]} not run; {seconds:.0f} s."
    report = {
        "title": f"medha verify: {layout}, {ranks}, {setting.dtype}",
        "options": asdict(setting),
        "checks": [row.shown() for row in rows],
        "needles": [row.details for row in rows if row.details is not None],
        "notes": [*["Of several ranks the worst is shown."] * (parallel.world_size > 1), told],
        "environment": stamp(),
        "seconds": seconds,
    }
    deliver(report, output_json)


def run_checks(setting: Setting, launch: Launch | None, add: Add, show: Show = lambda text: None) -> None:
    """Run every check; every rank calls it.

    Args:
        setting: what to check, with its dtype.
        launch: this process's place, None for a single process.
        add: called with rows as they come; those on rank 0 are the result.
        show: told what is going on, often.

    Raises:
        ConfigError: the setting cannot be run on this machine.
        RankFailedError: a rank failed; the rows so far have been added.
    """
    with job_folder("verify") as folder:  # each rank writes it, and none reads it before all have met
        shape = random_llama(setting.parallel, setting.dtype)
        write_checkpoint(folder / "random", shape, random_weights(shape, seed=0))
        write_needle(folder / "needle")
        _check_basics(setting, launch, add)
        add(timed(parity_rows(setting, folder / "random")))
        for row in needle_rows(setting, folder / "needle", partial(_of_every_rank, setting, launch), show):
            add([row])


def _check_basics(setting: Setting, launch: Launch | None, add: Add) -> None:
    """All that needs no engine."""
    with _met(setting, launch) as job:
        if job is not None:
            versions = {"python": platform.python_version(), "torch": torch.__version__, "CUDA": torch.version.cuda}
            check_same_everywhere(job, {"options": setting, **versions})
        device = own_device(pick_device(setting.device), launch)
        dtype = TORCH_DTYPES[setting.dtype]
        shapes = {each: LayerShape(8, 2, 64, each) for each in (torch.float32, dtype)}
        backends = {each: choose_backend(setting.attention_backend, shapes[each], device)[0] for each in shapes}
        found = (row for each, one in backends.items() for row in attention_rows(one, device, each))
        add(worst(job, "attention", attempted("attention", found)))
        num_parts = sorted({max(2, setting.parallel.kvp), 3})
        add(worst(job, "merge", attempted("merge", merge_rows(backends[dtype], device, dtype, num_parts=num_parts))))


def _of_every_rank(setting: Setting, launch: Launch | None, value: Any) -> list[Any]:
    """A value of each rank, after the engine has left its groups."""
    with _met(setting, launch) as job:
        return gathered(job, "values", value)


@contextmanager
def _met(setting: Setting, launch: Launch | None) -> Iterator[Job | None]:
    """Within, the ranks have met without an engine; what is yielded is None where there is one process."""
    if launch is None:
        yield None
        return
    job = meet(setting.parallel, launch)
    with failures_named(job.monitor, activity="verify"):
        yield job
        job.monitor.leave()
