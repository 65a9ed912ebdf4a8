"""The measuring loop, and what this machine does at best: matrix products, and reading memory.

A share of such a rate says how much of the machine a piece of work uses: MFU of the products, MBU of the memory. Both
are measured in the same run as the work, with its dtype, device and threads, and in turn with it (:func:`in_turn`); a
rate on a data sheet would say nothing about a shared machine. The products are plain ``torch.mm``. A model's own may be
a little faster: on the CPU its weights are kept in the matrix library's layout. So a share may exceed 1.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch

_CPU_PRODUCTS = ((512, 512, 512), (1024, 1024, 1024), (2048, 1024, 4096))
_CUDA_PRODUCTS = ((2048, 2048, 2048), (4096, 4096, 4096), (8192, 8192, 8192))
"""(m, k, n) of products that are tried."""

_CPU_BUFFER_BYTES = 256 << 20
_CUDA_BUFFER_BYTES = 2 << 30
"""What is read; more than any cache holds."""

_ROW = 4096
_TRIALS = 3


@dataclass(frozen=True, slots=True)
class Timing:
    """Seconds of repeated runs of one thing: their median, least and most; ``runs`` is how many counted."""

    median_s: float
    min_s: float
    max_s: float
    runs: int

    @classmethod
    def of(cls, seconds: Sequence[float]) -> Timing:
        """Summarise the runs."""
        return cls(statistics.median(seconds), min(seconds), max(seconds), len(seconds))


@dataclass(frozen=True, slots=True)
class Yardstick:
    """A piece of work whose size is known: so many floating-point operations, or bytes read, of one run."""

    name: str
    amount: float
    run: Callable[[], object]

    def seconds(self) -> float:
        """Run once; returns how long it took."""
        return timed(self.run)

    def rate(self, seconds: Sequence[float]) -> Rate:
        """From the seconds of its runs."""
        timing = Timing.of(seconds)
        return Rate(self.name, self.amount / timing.median_s, timing)


@dataclass(frozen=True, slots=True)
class Rate:
    """What a yardstick measured: FLOP/s or bytes/s at the median, and the seconds of a run."""

    name: str
    per_s: float
    timing: Timing


def matrix_product(dtype: torch.dtype, device: torch.device) -> Yardstick:
    """The fastest of several matrix products, by the median of some trials."""
    generator = torch.Generator(device).manual_seed(0)
    products = []
    for m, k, n in _CUDA_PRODUCTS if device.type == "cuda" else _CPU_PRODUCTS:
        left, right = (torch.randn(shape, generator=generator, device=device).to(dtype) for shape in ((m, k), (k, n)))
        work = partial(torch.mm, left, right, out=torch.empty(m, n, dtype=dtype, device=device))
        products.append(Yardstick(f"product {m} x {k} x {n}", 2.0 * m * k * n, waited(work, device)))
    return _fastest(products)


def memory_read(device: torch.device) -> Yardstick:
    """The fastest of several ways to read a large buffer once, by the median of some trials."""
    size = _CUDA_BUFFER_BYTES if device.type == "cuda" else _CPU_BUFFER_BYTES
    buffer = torch.ones(size // 4 // _ROW, _ROW, device=device)
    ways: dict[str, Callable[[], object]] = {
        "sum": buffer.sum,
        "maximum": buffer.amax,
        "product with a vector": partial(torch.mv, buffer, torch.ones(_ROW, device=device)),
    }
    return _fastest(
        [Yardstick(f"read by {name}", float(buffer.nbytes), waited(way, device)) for name, way in ways.items()]
    )


def waited(work: Callable[[], object], device: torch.device) -> Callable[[], None]:
    """The same work, over when the device has done it."""

    def run() -> None:
        work()
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    return run


def _fastest(yardsticks: Sequence[Yardstick]) -> Yardstick:
    seconds = in_turn({one.name: one.seconds for one in yardsticks}, warmup=1, runs=_TRIALS)
    return max(yardsticks, key=lambda one: one.rate(seconds[one.name]).per_s)


def timed(run: Callable[[], object]) -> float:
    """Seconds that a call takes."""
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def in_turn(
    contestants: Mapping[str, Callable[[], float]],
    *,
    warmup: int,
    runs: int,
    on_run: Callable[[], None] = lambda: None,
) -> dict[str, list[float]]:
    """Let several callables that tell their seconds take turns (a b c a b c ...), so that a slow spell hits all alike.

    Args:
        contestants: by name; each call is one run.
        warmup: turns that do not count.
        runs: turns that count.
        on_run: called after each run, warm-up included.

    Returns:
        Seconds of the runs that count, in order, by name.
    """
    seconds: dict[str, list[float]] = {name: [] for name in contestants}
    for i in range(warmup + runs):
        for name, run in contestants.items():
            elapsed_s = run()
            on_run()
            if i >= warmup:
                seconds[name].append(elapsed_s)
    return seconds
