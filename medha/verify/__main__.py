"""``python -m medha.verify``, also ``medha verify`` and under torchrun: is all well on this machine, in this layout?

One table: attention and merge against a dense softmax, the engine in the layout against a plain forward, and a fact
found in a long document. What each row means is in :mod:`medha.verify`; exit codes are in
:mod:`medha.cli.command`: 0 when nothing failed, 3 when a check did.
"""

from __future__ import annotations

from typing import Annotated, Any

from medha.cli.command import end_process, make_app, run_app, start_logging
from medha.cli.options import LogLevel, OutputJson, but, option, parse_lengths, pick, takes
from medha.cli.report import check_writable
from medha.config import EngineConfig, ParallelConfig
from medha.errors import ConfigError, ParallelConfigError
from medha.parallel.launch import read_launch

DTYPES = ("auto", "float32", "bfloat16")
MIN_NEEDLE_TOKENS = 256

app = make_app()


@app.command()
@takes(
    but(pick("tp", "spp", "kvp"), tp=(None, "chosen"), spp=(None, "chosen"), kvp=(None, "chosen")),
    but(pick("device", "dtype", "attention_backend"), dtype=("auto", "float32 on a CPU, else bfloat16")),
)
def verify(
    needle_tokens: Annotated[
        str, option(help="Lengths of the documents in which a fact is looked for, comma separated.", shows=True)
    ] = "8192",
    needle_depth: Annotated[
        list[float] | None,
        option(min=0.0, max=1.0, help="Where the fact lies, as a share; may be repeated.", shows="0.1"),
    ] = None,
    output_json: OutputJson = None,
    log_level: LogLevel = "warning",
    **given: Any,
) -> int:
    """Check attention, merge, the engine and memory in a layout, and print one table.

    Without --tp, --spp and --kvp the layout is chosen for the number of ranks.
    """
    start_logging(log_level)
    launch = read_launch()
    degrees = (given[name] for name in ("tp", "spp", "kvp"))
    parallel = layout_of(*degrees, world_size=1 if launch is None else launch.world_size)
    device, dtype, backend = given["device"], given["dtype"], given["attention_backend"]
    EngineConfig("-", device=device, attention_backend=backend)  # it says what is accepted
    if dtype not in DTYPES:
        raise ConfigError(f"dtype={dtype!r}; accepted: {', '.join(DTYPES)}")
    lengths = parse_lengths("needle_tokens", needle_tokens)
    if min(lengths) < MIN_NEEDLE_TOKENS:
        raise ConfigError(f"needle_tokens={needle_tokens}; accepted: {MIN_NEEDLE_TOKENS} or more")
    check_writable(output_json)
    from medha.verify.rows import Setting
    from medha.verify.run import run_and_report

    setting = Setting(parallel, device, dtype, backend, lengths, tuple(needle_depth or (0.1,)))
    return run_and_report(setting, launch, output_json)


def layout_of(tp: int | None, spp: int | None, kvp: int | None, *, world_size: int) -> ParallelConfig:
    """The layout asked for, what is left out being 1; chosen for the number of ranks where nothing is asked for.

    Raises:
        ParallelConfigError: the degrees do not multiply to the number of ranks.
    """
    if tp is spp is kvp is None:
        return chosen_layout(world_size)
    layout = ParallelConfig(tp=tp or 1, spp=spp or 1, kvp=kvp or 1)
    if layout.world_size != world_size:
        what = f"{layout} is {layout.world_size} ranks, and {world_size} were started (with torchrun --nproc-per-node)"
        raise ParallelConfigError(f"{what}; accepted: degrees whose product is {world_size}")
    return layout


def chosen_layout(world_size: int) -> ParallelConfig:
    """Groups first, then two stages (as many as the needle model has layers), then up to 8 tensor-parallel ranks."""
    spp = 2 if world_size > 2 and world_size % 2 == 0 else 1
    rest = world_size // spp
    tp = max(tp for tp in (1, 2, 4, 8) if tp == 1 or rest % (2 * tp) == 0)
    return ParallelConfig(tp=tp, spp=spp, kvp=rest // tp)


if __name__ == "__main__":
    end_process(run_app(app, "python -m medha.verify"))
