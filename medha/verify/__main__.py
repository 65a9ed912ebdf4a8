"""``python -m medha.verify``, also ``medha verify`` and under torchrun: is all well on this machine, in this layout?

One table: attention and merge against a dense softmax, the layout's collectives, the engine against a plain forward,
and a fact found in a long document. What each row means is in :mod:`medha.verify`; exit codes are in
:mod:`medha.cli.command`: 0 when nothing failed, 3 when a check did.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer
from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table
from rich.text import Text

from medha.cli.command import (
    FAILED_REQUESTS,
    end_process,
    first_interrupt,
    ignore_signals,
    make_app,
    run_app,
    start_logging,
)
from medha.cli.report import check_writable, stamp, write_report
from medha.cli.table import report_console
from medha.config import ATTENTION_BACKENDS, EngineConfig, ParallelConfig
from medha.errors import ConfigError, ParallelConfigError
from medha.parallel.launch import Launch, is_first_rank, read_launch

if TYPE_CHECKING:
    from medha.verify.rows import Row, Setting

DTYPES = ("auto", "float32", "bfloat16")
MIN_NEEDLE_TOKENS = 256

app = make_app()


@app.command()
def verify(
    tp: Annotated[int | None, typer.Option(help="Tensor-parallel ranks.", show_default=False)] = None,
    spp: Annotated[int | None, typer.Option(help="Stream-pipeline stages.", show_default=False)] = None,
    kvp: Annotated[int | None, typer.Option(help="KV-parallel groups.", show_default=False)] = None,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N.")] = "auto",
    dtype: Annotated[str, typer.Option(help="float32, bfloat16, or auto: float32 on a CPU, else bfloat16.")] = "auto",
    attention_backend: Annotated[str, typer.Option(help=f"One of {', '.join(ATTENTION_BACKENDS)}.")] = "auto",
    needle_tokens: Annotated[int, typer.Option(help="Length of the document that is read.")] = 8192,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the rows here too.")] = None,
    log_level: Annotated[
        str, typer.Option(help="debug, info, warning or error.", envvar="MEDHA_LOG_LEVEL")
    ] = "warning",
) -> int:
    """Check attention, merge, collectives, the engine and memory in a layout, and print one table.

    Without --tp, --spp and --kvp the layout is chosen for the number of ranks.
    """
    start_logging(log_level)
    launch = read_launch()
    parallel = layout_of(tp, spp, kvp, world_size=1 if launch is None else launch.world_size)
    EngineConfig("-", device=device, attention_backend=attention_backend)  # it says what is accepted
    if dtype not in DTYPES:
        raise ConfigError(f"dtype={dtype!r}; accepted: {', '.join(DTYPES)}")
    if needle_tokens < MIN_NEEDLE_TOKENS:
        raise ConfigError(f"needle_tokens={needle_tokens}; accepted: {MIN_NEEDLE_TOKENS} or more")
    check_writable(json_file)
    from medha.verify.rows import Setting

    return run_and_print(Setting(parallel, device, dtype, attention_backend, needle_tokens), launch, json_file)


def layout_of(tp: int | None, spp: int | None, kvp: int | None, *, world_size: int) -> ParallelConfig:
    """The layout asked for, what is left out being 1; chosen for the number of ranks where nothing is asked for.

    Raises:
        ParallelConfigError: the degrees do not multiply to the number of ranks.
    """
    if tp is None and spp is None and kvp is None:
        return chosen_layout(world_size)
    layout = ParallelConfig(tp=tp or 1, spp=spp or 1, kvp=kvp or 1)
    if layout.world_size != world_size:
        raise ParallelConfigError(
            f"tp={layout.tp} x spp={layout.spp} x kvp={layout.kvp} is {layout.world_size} ranks, and {world_size} were "
            f"started (with torchrun --nproc-per-node); accepted: degrees whose product is {world_size}"
        )
    return layout


def chosen_layout(world_size: int) -> ParallelConfig:
    """Groups first, then two stages (as many as the needle model has layers), then up to 8 tensor-parallel ranks."""
    spp = 2 if world_size > 2 and world_size % 2 == 0 else 1
    rest = world_size // spp
    tp = max(tp for tp in (1, 2, 4, 8) if tp == 1 or rest % (2 * tp) == 0)
    return ParallelConfig(tp=tp, spp=spp, kvp=rest // tp)


def run_and_print(setting: Setting, launch: Launch | None, json_file: Path | None) -> int:
    """Run the checks and print the table, which rank 0 does; every rank calls it.

    Returns:
        The exit code; the other ranks leave the verdict to rank 0, since a launcher ends all when one has failed.

    Raises:
        MedhaError: a rank failed, or the setting cannot be run; the table so far is printed.
    """
    from medha.verify.rows import FAIL, failed
    from medha.verify.run import resolved, run_checks

    setting = resolved(setting)
    if not is_first_rank():
        ignore_signals()  # rank 0 hears of them, and shows the table so far
        run_checks(setting, launch, lambda rows: None)
        return 0
    rows: list[Row] = []
    start = time.perf_counter()
    try:
        with first_interrupt() as interrupted, ExitStack() as stack:
            stack.callback(lambda: _report(setting, rows, time.perf_counter() - start, json_file))
            status = stack.enter_context(Console(stderr=True).status("checking"))

            def add(new: Sequence[Row]) -> None:
                rows.extend(new)
                status.update(f"checking; {rows[-1].check}: {rows[-1].verdict}")
                if interrupted:
                    raise KeyboardInterrupt

            try:
                run_checks(setting, launch, add)
            except BaseException as error:
                if rows:
                    rows.append(failed(f"after {rows[-1].check}", error))
                raise
    except BaseException:
        ignore_signals()  # the launcher ends the ranks that are left, and this one has to say why
        raise
    return FAILED_REQUESTS if any(row.verdict == FAIL for row in rows) else 0


def verdict_table(setting: Setting, rows: Sequence[Row]) -> Table:
    """The rows as a table."""
    parallel = setting.parallel
    layout = f"kvp={parallel.kvp} x spp={parallel.spp} x tp={parallel.tp}"
    plural = "" if parallel.world_size == 1 else "s"
    title = f"medha verify: {layout}, {parallel.world_size} rank{plural}, {setting.dtype}"
    table = Table(title=title, box=SIMPLE, title_justify="left", pad_edge=False)
    for name in ("check", "what", "error or figure", "limit", "verdict"):
        table.add_column(name, no_wrap=name in ("check", "verdict"))
    table.add_column("s", justify="right", no_wrap=True)
    style = {"FAIL": "bold red", "not run": "yellow", "pass": "green"}
    previous = ""
    for row in rows:
        name = "" if row.check == previous else row.check
        verdict = Text(row.verdict, style=style[row.verdict])
        table.add_row(name, Text(row.what), Text(row.figure), Text(row.limit), verdict, f"{row.seconds:.1f}")
        previous = row.check
    return table


def _report(setting: Setting, rows: Sequence[Row], seconds: float, json_file: Path | None) -> None:
    """Print the table and what it comes to, and write the report, if there is anything."""
    if not rows:
        return
    counts = {verdict: sum(row.verdict == verdict for row in rows) for verdict in ("pass", "FAIL", "not run")}
    console = report_console()
    console.print(verdict_table(setting, rows))
    ranks = "" if setting.parallel.world_size == 1 else "Of several ranks the worst is shown. "
    console.print(
        f"{ranks}{counts['pass']} passed, {counts['FAIL']} failed, {counts['not run']} not run; {seconds:.0f} s.",
        highlight=False,
    )
    report = {
        "verify": asdict(setting),
        "environment": stamp(),
        "rows": [{name: value for name, value in asdict(row).items() if name != "strain"} for row in rows],
        "seconds": seconds,
    }
    write_report(json_file, report)


def main() -> NoReturn:
    """Entry point of ``python -m medha.verify``. Ends in SystemExit."""
    end_process(run_app(app, "python -m medha.verify"))


if __name__ == "__main__":
    main()
