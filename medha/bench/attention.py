"""``medha bench attention``: chunks of a prompt over a KV cache, against the matrix products of this machine.

One layer's attention, called as the engine calls it: the engine's backend, planned once, over the paged pool of one
layer, the chunk's own keys at its end. Chunking is free where a small chunk costs no more for each product than a large
one (arXiv:2409.17264 v4 section 3.2), so ``overhead`` compares seconds for each useful operation with those of the
largest chunk over the same KV cache. A chunk of ``c`` tokens that ends a context of ``S`` has
``c * (S - c) + c * (c + 1) / 2`` useful scores a head, of ``4 * H`` operations.

The chunks over one KV cache and the matrix product take turns, in each dtype.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich.table import Table

from medha.attention.interface import AttentionBackend, LayerShape, Segment
from medha.bench.harness import Subject, footer, report_head, shape_of, title_of
from medha.bench.timing import Rate, Timing, Yardstick, in_turn, matrix_product, synchronize, timed
from medha.cli.report import check_writable, progress, write_report
from medha.cli.table import figures_table, report_console
from medha.config import ModelConfig
from medha.errors import ConfigError
from medha.profile.steps import fill_pools
from medha.worker.kv_cache import KVCache
from medha.worker.shard import TORCH_DTYPES, pick_backend, pick_device

_BLOCK_SIZE = 256
_PRODUCT = "matrix product"


@dataclass(frozen=True, slots=True)
class AttentionOptions:
    """What is measured.

    Attributes:
        subject: whose heads; no weights are loaded. Of its engine's options only ``device``, ``num_threads`` and
            ``attention_backend`` count.
        chunks: query tokens.
        kv_lens: keys that the last query sees, the chunk's own included; chunks that are longer are left out.
        dtypes: names.
        warmup, runs: of each cell.
    """

    subject: Subject = field(default_factory=Subject)
    chunks: tuple[int, ...] = (32, 64, 128, 256, 512, 1024)
    kv_lens: tuple[int, ...] = (4096, 16384, 65536)
    dtypes: tuple[str, ...] = ("float32", "bfloat16")
    warmup: int = 1
    runs: int = 3

    def __post_init__(self) -> None:
        wrong = [name for name in self.dtypes if name not in TORCH_DTYPES]
        if wrong:
            raise ConfigError(f"dtype={wrong[0]!r}; accepted: {', '.join(TORCH_DTYPES)}, comma separated")
        if min(self.kv_lens) < min(self.chunks):
            raise ConfigError(f"kv_lens={self.kv_lens} with chunks={self.chunks}; accepted: none below every chunk")

    @property
    def cells(self) -> list[tuple[int, list[int]]]:
        """Each KV length with the chunks that it has room for, from small to large."""
        return [(kv, [c for c in sorted(set(self.chunks)) if c <= kv]) for kv in sorted(set(self.kv_lens))]


@dataclass(frozen=True, slots=True)
class Cell:
    """One chunk over one KV cache, one layer.

    Attributes:
        timing: seconds of the call.
        flops: useful floating-point operations.
        flops_per_s: at the median.
        share: of the matrix product's rate.
        overhead: seconds for each useful operation against the largest chunk over the same KV cache, less 1.
    """

    dtype: str
    chunk: int
    kv_len: int
    timing: Timing
    flops: float
    flops_per_s: float
    share: float
    overhead: float


def useful_flops(model: ModelConfig, chunk: int, kv_len: int) -> float:
    """Operations of one layer's attention: scores under the causal mask, and their products with the values."""
    scores = chunk * (kv_len - chunk) + chunk * (chunk + 1) / 2
    return 4.0 * model.num_heads * model.head_dim * scores


def attention(
    options: AttentionOptions, *, output_json: Path | None = None, on_run: Callable[[], None] = lambda: None
) -> tuple[ModelConfig, list[Cell], dict[tuple[str, int], Rate]]:
    """Run the measurement.

    Args:
        options: what to run.
        output_json: where to write the report.
        on_run: called after each run, warm-up included.

    Returns:
        The model's shape; the cells; by dtype and KV length, the rate of the matrix product.

    Raises:
        ConfigError: the options are wrong.
    """
    load = os.getloadavg()[0]
    given = options.subject.options
    if given.get("num_threads") is not None:
        torch.set_num_threads(given["num_threads"])
    device = pick_device(given.get("device", "auto"))
    model = shape_of(options.subject, longest=max(options.kv_lens))
    cells: list[Cell] = []
    rates = {}
    for dtype in options.dtypes:
        product = matrix_product(TORCH_DTYPES[dtype], device)
        for kv_len, chunks in options.cells:
            found, rate = _row(options, model, product, dtype, kv_len, chunks, device=device, on_run=on_run)
            cells += found
            rates[dtype, kv_len] = rate
    report = report_head(options.subject, model, "attention", asdict(options), load) | {
        "device": str(device),
        "backend": {dtype: _backend(options, model, dtype, device).name for dtype in options.dtypes},
        "num_heads": model.num_heads,
        "num_kv_heads": model.num_kv_heads,
        "head_dim": model.head_dim,
        "results": [asdict(cell) for cell in cells],
        "matrix_rates": [{"dtype": dtype, "kv_len": kv_len, **asdict(rate)} for (dtype, kv_len), rate in rates.items()],
    }
    write_report(output_json, report)
    return model, cells, rates


def _row(
    options: AttentionOptions,
    model: ModelConfig,
    product: Yardstick,
    dtype: str,
    kv_len: int,
    chunks: Sequence[int],
    *,
    device: torch.device,
    on_run: Callable[[], None],
) -> tuple[list[Cell], Rate]:
    """All chunks over one KV cache, and the matrix product, in turn."""
    call = _Attend(model, TORCH_DTYPES[dtype], kv_len, device, _backend(options, model, dtype, device))
    contestants: dict[str, Callable[[], float]] = {_PRODUCT: product.seconds}
    contestants |= {str(chunk): partial(timed, call.of(chunk)) for chunk in chunks}
    seconds = in_turn(contestants, warmup=options.warmup, runs=options.runs, on_run=on_run)
    rate = Rate.of(product, seconds[_PRODUCT])
    timings = {chunk: Timing.of(seconds[str(chunk)]) for chunk in chunks}
    rates = {chunk: useful_flops(model, chunk, kv_len) / timings[chunk].median_s for chunk in chunks}
    cells = []
    for chunk in chunks:
        flops, overhead = useful_flops(model, chunk, kv_len), rates[chunks[-1]] / rates[chunk] - 1.0
        share = rates[chunk] / rate.per_s
        cells.append(Cell(dtype, chunk, kv_len, timings[chunk], flops, rates[chunk], share, overhead))
    return cells, rate


def _backend(options: AttentionOptions, model: ModelConfig, dtype: str, device: torch.device) -> AttentionBackend:
    """What an engine would attend with."""
    shape = LayerShape(model.num_heads, model.num_kv_heads, model.head_dim, TORCH_DTYPES[dtype])
    name = options.subject.options.get("attention_backend", "auto")
    return pick_backend(name, shape, device, block_size=_BLOCK_SIZE)


class _Attend:
    """Attention of chunks over one layer's pool of random numbers.

    The context is one run of adjacent blocks, which is what the allocator aims at.
    """

    def __init__(
        self, model: ModelConfig, dtype: torch.dtype, kv_len: int, device: torch.device, backend: AttentionBackend
    ) -> None:
        self._model, self._kv_len, self._device = model, kv_len, device
        self._cache = KVCache(
            num_layers=1,
            num_blocks=-(-kv_len // _BLOCK_SIZE),
            block_size=_BLOCK_SIZE,
            num_kv_heads=model.num_kv_heads,
            head_dim=model.head_dim,
            dtype=dtype,
            device=device,
        )
        fill_pools(self._cache, kv_len, seed=0)
        self._backend = backend
        self._dtype = dtype

    def of(self, chunk: int) -> Callable[[], None]:
        """What attends with a chunk and waits for the device."""
        shape = (chunk, self._model.num_heads, self._model.head_dim)
        generator = torch.Generator(self._device).manual_seed(chunk)
        q_TNH = torch.randn(shape, generator=generator, device=self._device).to(self._dtype)
        plan = self._backend.plan([Segment(0, chunk, ((0, self._kv_len),), causal=True)])

        @torch.inference_mode()
        def run() -> None:
            self._backend.run(q_TNH, self._cache.k[0], self._cache.v[0], plan)
            synchronize(self._device)

        return run


def run_and_print(options: AttentionOptions, output_json: Path | None) -> int:
    """Run with a progress bar on stderr, print the tables on stdout; returns 0."""
    check_writable(output_json)
    total = sum(1 + len(chunks) for _, chunks in options.cells) * (options.warmup + options.runs) * len(options.dtypes)
    with progress("attending", total) as advance:
        model, cells, rates = attention(options, output_json=output_json, on_run=advance)
    console = report_console()
    for dtype in options.dtypes:
        console.print(_table(options, model, dtype, [cell for cell in cells if cell.dtype == dtype]))
    best = ", ".join(
        f"{dtype} at KV {kv_len:,}: {rate.per_s / 1e9:,.0f} GFLOP/s ({rate.name})"
        for (dtype, kv_len), rate in rates.items()
    )
    console.print(f"share: of the matrix product measured in turn; {best}", highlight=False)
    console.print(
        "GFLOP/s: useful operations, those under the causal mask; overhead: seconds for each of them against the "
        "largest chunk over the same KV cache",
        highlight=False,
    )
    device = pick_device(options.subject.options.get("device", "auto"))
    runs = f"one layer; median of {options.runs} after {options.warmup} warm-up, in turn"
    console.print(footer(" and ".join(options.dtypes), device, runs), highlight=False)
    return 0


def _table(options: AttentionOptions, model: ModelConfig, dtype: str, cells: Sequence[Cell]) -> Table:
    heads = f"{model.num_heads} heads of {model.head_dim}, {model.num_kv_heads} KV heads"
    title = f"attention of a chunk in {dtype}: {heads}; {title_of(options.subject, model)}"
    table = figures_table(title, ("KV", "chunk", "ms", "min-max", "GFLOP/s", "share", "overhead"))
    for i, cell in enumerate(cells):
        row: list[Any] = [
            f"{cell.kv_len:,}",
            f"{cell.chunk:,}",
            *cell.timing.cells_ms(),
            f"{cell.flops_per_s / 1e9:,.1f}",
            f"{cell.share:.0%}",
            f"{cell.overhead:+.0%}",
        ]
        table.add_row(*row, end_section=i + 1 < len(cells) and cells[i + 1].kv_len != cell.kv_len)
    return table
