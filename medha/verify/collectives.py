"""What the ranks of a layout send each other: the library's own transfers, with values that are known and latencies.

Every rank calls each function here, in the same order. A latency is the median of some repetitions; of several
ranks the longest is shown.

Legend: T tokens, N query heads, H head dimension, D model dimension.
"""

from __future__ import annotations

import itertools
import time
import zlib
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from statistics import median

import torch

from medha.attention.interface import AttentionBackend
from medha.batch import Batch
from medha.batch import Row as BatchRow
from medha.parallel.kvp import Merge, Partial, Shared
from medha.parallel.mesh import Ranks
from medha.parallel.spp import Digests, StagePipe
from medha.parallel.tp import all_gather_over, all_reduce_over
from medha.verify.kernels import (
    cut,
    dense_attention,
    largest_error,
    name_of,
    out_limit,
    random_qkv,
    shard_attention,
)
from medha.verify.rows import Crew, Row, exact, held, not_run
from medha.worker.shard import make_pipe

_TIMES = 30
_WARM = 3
_DIM = 4096


def collective_rows(
    ranks: Ranks | None, crew: Crew, backend: AttentionBackend, device: torch.device, dtype: torch.dtype
) -> Iterator[Row]:
    """Every transfer that this layout has; those that it has not are rows too."""
    if ranks is None:
        yield not_run("collectives", "all of them", "one process sends nothing")
        return
    axes: dict[str, tuple[str, Callable[[], Iterable[Row]]]] = {
        "tp": ("all-reduce, all-gather", lambda: crew.worst("tp", list(_tp_rows(ranks, device, dtype)))),
        "kvp": ("merge over groups", lambda: _kvp_rows(ranks, crew, backend, device, dtype)),
        "spp": ("stage to stage", lambda: crew.worst("spp", list(_spp_rows(ranks, device, dtype)))),
    }
    for axis, (what, rows) in axes.items():
        yield from rows() if getattr(ranks.config, axis) > 1 else [not_run(axis, what, f"{axis}=1")]


def _tp_rows(ranks: Ranks, device: torch.device, dtype: torch.dtype) -> Iterator[Row]:
    """Sum and concatenation over a stage's ranks; small whole numbers, so nothing is rounded."""
    size = ranks.config.tp
    all_reduce, all_gather = all_reduce_over(ranks.tp_group), all_gather_over(ranks.tp_group)
    ramp_TD = (torch.arange(4 * _DIM, device=device) % 3).to(dtype).view(4, _DIM)
    total_TD = all_reduce(ramp_TD * (ranks.tp_rank + 1))
    wrong = int((total_TD != ramp_TD * (size * (size + 1) // 2)).sum())
    latency_s = _median_s(lambda: all_reduce(ramp_TD[:1].clone()), device)
    yield exact("tp", f"all-reduce over {size}, {name_of(dtype)}", wrong, latency_s=latency_s)
    side_TD = all_gather(ramp_TD + ranks.tp_rank)
    wrong = int((side_TD != torch.cat([ramp_TD + rank for rank in range(size)], dim=-1)).sum())
    latency_s = _median_s(lambda: all_gather(ramp_TD[:1]), device)
    yield exact("tp", f"all-gather over {size}, {name_of(dtype)}", wrong, latency_s=latency_s)


def _kvp_rows(
    ranks: Ranks, crew: Crew, backend: AttentionBackend, device: torch.device, dtype: torch.dtype
) -> Iterator[Row]:
    """The merge of every run of groups, in the one order of all collectives: its value, and equal bits everywhere."""
    rows, bits, latency_s = [], {}, 0.0
    num_runs = ranks.config.kvp * (ranks.config.kvp - 1) // 2
    assert ranks.merge_group is not None, "there are several groups"
    merge = Merge(ranks.merge_group, Digests(ranks.report_group), ranks=ranks.merge_ranks, own=ranks.group)
    for run in itertools.combinations(range(ranks.config.kvp), 2):
        if not run[0] <= ranks.group <= run[1]:
            continue
        num_groups = 1 + run[1] - run[0]
        qkv = random_qkv(2 * num_groups * 256 - 156, q_len=4, device=device, dtype=dtype)
        part = shard_attention(backend, qkv, *cut(len(qkv[1]), num_groups)[ranks.group - run[0]])
        (out_TNH,) = merge.start([(Shared(0, run, slice(4), digest=1), part)], compare=True).result()
        want_TNH, _ = dense_attention(*qkv, causal=True)
        what = f"merge of every run of groups ({num_runs}), {name_of(dtype)}"
        rows.append(held("kvp", what, largest_error(out_TNH, want_TNH), out_limit(want_TNH, dtype)))
        bits[f"{run} {ranks.stage} {ranks.tp_rank}"] = _crc(out_TNH)
        one = Shared(0, run, slice(1), digest=1), (part[0][:1], part[1][:1])
        latency_s = max(latency_s, _median_s(partial(_merged, merge, *one), device))
    worst = max(rows, key=lambda row: row.strain)  # every group is in a run
    yield from crew.worst("kvp", [worst])
    by_rank = crew.gather("kvp/bits", bits)
    latency_s = max(crew.gather("kvp/latency", latency_s))
    merges = {name for named in by_rank for name in named}
    num_wrong = sum(len({named[name] for named in by_rank if name in named}) > 1 for name in merges)
    yield exact("kvp", f"same bits in all groups, {len(merges)} merges", num_wrong, latency_s=latency_s)


def _merged(merge: Merge, shared: Shared, part: Partial) -> torch.Tensor:
    return merge.start([(shared, part)], compare=False).result()[0]


def _spp_rows(ranks: Ranks, device: torch.device, dtype: torch.dtype) -> Iterator[Row]:
    """Hidden states from the first stage to the last and back, through the library's pipes; the time of one hop."""
    before, after = ranks.neighbour(-1), ranks.neighbour(1)
    digests = Digests(ranks.report_group)
    there, back = (make_pipe(ranks, digests, dim=_DIM, dtype=dtype, device=device, step=step) for step in (1, -1))
    num_hops = 2 * (ranks.config.spp - 1)
    for num_tokens in (1, 256):
        x_TD = torch.randn(num_tokens, _DIM, generator=torch.Generator().manual_seed(0)).to(device, dtype)
        batch = Batch(0, (BatchRow(0, 0, num_tokens, is_decode=False, samples=False),))
        wrong = 0

        def there_and_back(batch: Batch = batch, x_TD: torch.Tensor = x_TD) -> None:
            nonlocal wrong
            wrong += _pass_on(there, batch, x_TD, receives=before is not None, sends=after is not None)
            wrong += _pass_on(back, batch, x_TD, receives=after is not None, sends=before is not None)

        latency_s = _median_s(there_and_back, torch.device("cpu")) / num_hops
        there.drain()
        back.drain()
        size = num_tokens * _DIM * dtype.itemsize / 1024
        yield exact("spp", f"stage to stage, {size:,.0f} KiB", wrong, latency_s=latency_s)


def _pass_on(pipe: StagePipe, batch: Batch, x_TD: torch.Tensor, *, receives: bool, sends: bool) -> int:
    """Take what comes and send it on; returns how many numbers of it are wrong."""
    wrong, got_TD = 0, x_TD
    if receives:
        pipe.post(batch)
        got_TD = pipe.receive(batch)
        wrong = int((got_TD != x_TD).sum())
    if sends:
        pipe.reserve()
        pipe.send(batch, got_TD)
    return wrong


def _median_s(call: Callable[[], object], device: torch.device) -> float:
    """The median of the seconds of some calls, the first ones left out."""
    seconds = []
    for _ in range(_WARM + _TIMES):
        start = time.perf_counter()
        call()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        seconds.append(time.perf_counter() - start)
    return median(seconds[_WARM:])


def _crc(x: torch.Tensor) -> int:
    return zlib.crc32(x.contiguous().cpu().view(torch.uint8).numpy().tobytes())
