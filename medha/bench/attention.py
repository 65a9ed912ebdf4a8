"""``medha bench micro attention``: chunks of a prompt over a KV cache, against the matrix products of this machine.

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

import torch

from medha.attention.interface import LayerShape, Segment
from medha.bench.harness import Report, Shown, Subject, median_text, rows_of
from medha.bench.timing import Rate, Timing, Yardstick, in_turn, matrix_product, synchronize, timed
from medha.config import ModelConfig
from medha.errors import ConfigError
from medha.profile.steps import fill_pools
from medha.worker.kv_cache import KVCache
from medha.worker.shard import TORCH_DTYPES, choose_backend, pick_device

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

    @property
    def num_runs(self) -> int:
        """Calls and products, warm-up included."""
        cells = sum(1 + len(chunks) for _, chunks in self.cells)
        return cells * (self.warmup + self.runs) * len(self.dtypes)


def useful_flops(model: ModelConfig, chunk: int, kv_len: int) -> float:
    """Operations of one layer's attention: scores under the causal mask, and their products with the values."""
    scores = chunk * (kv_len - chunk) + chunk * (chunk + 1) / 2
    return 4.0 * model.num_heads * model.head_dim * scores


def attention(options: AttentionOptions, *, on_run: Callable[[], None] = lambda: None) -> Report:
    """Run the measurement.

    Args:
        options: what to run.
        on_run: called after each run, warm-up included.

    Raises:
        ConfigError: the options are wrong.
    """
    load = os.getloadavg()[0]
    given = options.subject.options
    if given.get("num_threads") is not None:
        torch.set_num_threads(given["num_threads"])
    device = pick_device(given.get("device", "auto"))
    model = options.subject.model_config(longest=max(options.kv_lens))
    pools = {dtype: _Pool(options, model, TORCH_DTYPES[dtype], device) for dtype in options.dtypes}
    cells: list[Report] = []
    rates = []
    for dtype, pool in pools.items():
        product = matrix_product(TORCH_DTYPES[dtype], device)
        for kv_len, chunks in options.cells:
            found, rate = _row(options, pool, product, kv_len, chunks, on_run)
            cells += [{"dtype": dtype, "kv_len": kv_len, **cell} for cell in found]
            rates.append({"dtype": dtype, "kv_len": kv_len, **asdict(rate)})
    return options.subject.head("micro attention", asdict(options), load, model) | {
        "dtype": " and ".join(options.dtypes),
        "device": str(device),
        "backend": {dtype: pool.backend.name for dtype, pool in pools.items()},
        "num_heads": model.num_heads,
        "num_kv_heads": model.num_kv_heads,
        "head_dim": model.head_dim,
        "results": cells,
        "matrix_rates": rates,
    }


def _row(
    options: AttentionOptions,
    pool: _Pool,
    product: Yardstick,
    kv_len: int,
    chunks: Sequence[int],
    on_run: Callable[[], None],
) -> tuple[list[Report], Rate]:
    """All chunks over one KV cache, and the matrix product, in turn."""
    contestants: dict[str, Callable[[], float]] = {_PRODUCT: product.seconds}
    contestants |= {str(chunk): partial(timed, pool.attend(chunk, kv_len)) for chunk in chunks}
    seconds = in_turn(contestants, warmup=options.warmup, runs=options.runs, on_run=on_run)
    rate = Rate.of(product, seconds[_PRODUCT])
    timings = {chunk: Timing.of(seconds[str(chunk)]) for chunk in chunks}
    per_s = {chunk: useful_flops(pool.model, chunk, kv_len) / timings[chunk].median_s for chunk in chunks}
    return [
        {
            "chunk": chunk,
            "timing": asdict(timings[chunk]),
            "flops": useful_flops(pool.model, chunk, kv_len),
            "flops_per_s": per_s[chunk],
            "share": per_s[chunk] / rate.per_s,
            "overhead": per_s[chunks[-1]] / per_s[chunk] - 1.0,
        }
        for chunk in chunks
    ], rate


class _Pool:
    """One layer's pool of random numbers, and what attends over it as an engine would.

    A context is one run of adjacent blocks, which is what the allocator aims at.
    """

    def __init__(self, options: AttentionOptions, model: ModelConfig, dtype: torch.dtype, device: torch.device) -> None:
        self.model, self._dtype, self._device = model, dtype, device
        longest = max(options.kv_lens)
        self._cache = KVCache(
            num_layers=1,
            num_blocks=-(-longest // _BLOCK_SIZE),
            block_size=_BLOCK_SIZE,
            num_kv_heads=model.num_kv_heads,
            head_dim=model.head_dim,
            dtype=dtype,
            device=device,
        )
        fill_pools(self._cache, longest, seed=0)
        shape = LayerShape(model.num_heads, model.num_kv_heads, model.head_dim, dtype)
        name = options.subject.options.get("attention_backend", "auto")
        self.backend = choose_backend(name, shape, device, block_size=_BLOCK_SIZE)[0]

    def attend(self, chunk: int, kv_len: int) -> Callable[[], None]:
        """What attends with a chunk and waits for the device."""
        shape = (chunk, self.model.num_heads, self.model.head_dim)
        generator = torch.Generator(self._device).manual_seed(chunk)
        q_TNH = torch.randn(shape, generator=generator, device=self._device).to(self._dtype)
        plan = self.backend.plan([Segment(0, chunk, ((0, kv_len),), causal=True)])

        @torch.inference_mode()
        def run() -> None:
            self.backend.run(q_TNH, self._cache.k[0], self._cache.v[0], plan)
            synchronize(self._device)

        return run


def shown(report: Report) -> Shown:
    """What is printed of the report."""
    columns = ("dtype", "kv_len", "chunk", "timing", "flops_per_s", "share", "overhead")
    return {"results": rows_of(report["results"], columns)}, [
        f"one layer; {median_text(report)}, in turn; share: of the matrix product's rate; operations: those under the "
        "causal mask; overhead: seconds for each of them against the largest chunk over the same KV cache, less 1"
    ]
