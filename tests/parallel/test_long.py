"""Ten million positions on two KV-parallel groups: the past filled by hand, a chunk and decodes held to float64."""

import resource
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from medha.attention.interface import LayerShape
from medha.batch import Batch, Extent, Row, Shared
from medha.config import RopeConfig
from medha.models.layers import cos_sin, inverse_frequencies, rotate
from medha.verify.kernels import largest_error
from medha.worker.kv_cache import KVCache
from medha.worker.runner import Runner
from medha.worker.shard import choose_backend
from medha.worker.step_input import DeviceStep
from tests.parallel.workers import WorkerPool, gloo, merge_of_all

BLOCK = 256
CHUNK = 32
NUM_DECODES = 20
SHAPE = LayerShape(2, 1, 16, torch.float32)
ROPE = RopeConfig(theta=5e5)
AT_A_TIME = 1 << 18  # keys of the reference
CPU = torch.device("cpu")


@gloo()
def attend_on_two_ranks(share: int, backend: str) -> tuple[list[float], list[int], float]:
    """On each rank, with ``share`` tokens of the past on each of two groups: of every batch how far its attention is
    from float64, and its last position; and the most memory of this process, in GiB."""
    rank = dist.get_rank()
    cache = KVCache(SHAPE, num_layers=1, num_blocks=share // BLOCK + 1, block_size=BLOCK, device=CPU)
    past = torch.Generator().manual_seed(rank)
    cache.k[0][:share].normal_(generator=past)
    cache.v[0][:share].normal_(1.0 + rank, generator=past)  # so that a shard left out, or read twice, shows
    model: Any = SimpleNamespace(config=SimpleNamespace(rope=ROPE, head_dim=SHAPE.head_dim))
    attention, _ = choose_backend(backend, SHAPE, CPU, block_size=BLOCK)
    runner = Runner(model, cache, attention, CPU, merge=merge_of_all(), group=rank)
    inv_freq, new = inverse_frequencies(ROPE, SHAPE.head_dim), torch.Generator().manual_seed(7)
    errors, positions, position = [], [], 2 * share
    for batch_id, q_len in enumerate([CHUNK] + [1] * NUM_DECODES):
        filled: dict[str, Any] = {}
        if batch_id == 0:
            filled["extents"] = tuple(Extent(0, 0, share // BLOCK + g, g) for g in range(2))
            filled["shared"] = tuple(Shared(0, g, g * share, share) for g in range(2))
        row = Row(0, position, q_len, is_decode=q_len == 1, samples=True, num_groups=2)
        step = runner.slots.prepare(Batch(batch_id, (row,), **filled).part_of(rank))
        sent = DeviceStep.of(step, CPU, with_pages=False)
        q_TNH = torch.randn(q_len, 2, 16, generator=new)
        k_TKH = 3.5 * q_TNH[:, :1] + 0.1 * torch.randn(q_len, 1, 16, generator=new)  # with some weight among so many
        v_TKH = torch.randn(q_len, 1, 16, generator=new)
        q_TNH, k_TKH = (rotate(x, cos_sin(sent.positions, inv_freq)) for x in (q_TNH, k_TKH))
        out_TNH = runner._attention(step, sent, [])(0, q_TNH, k_TKH, v_TKH)
        assert step.shared is not None
        want_TNH = in_float64(q_TNH, cache, int(step.shared.kv_len[0]), is_last=rank == 1)
        errors.append(largest_error(out_TNH, want_TNH))
        positions.append(int(step.positions[-1]))
        position += q_len
    return errors, positions, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20


def in_float64(q_TNH: torch.Tensor, cache: KVCache, num_keys: int, *, is_last: bool) -> torch.Tensor:
    """Attention over the first tokens of both ranks' pools; the newest of them, on the last rank, are the queries'."""
    T, N, H = q_TNH.shape
    q_RH = q_TNH.double().flatten(0, 1) * H**-0.5
    sums_R1, outs_RH = torch.zeros(T * N, 1, dtype=torch.float64), torch.zeros(T * N, H, dtype=torch.float64)
    own = torch.arange(T).repeat_interleave(N)[:, None] + num_keys - T  # the last key that a row sees
    for first in range(0, num_keys, AT_A_TIME):
        at = slice(first, min(first + AT_A_TIME, num_keys))
        weights_RS = torch.exp(q_RH @ cache.k[0][at, 0].double().T)  # scores are small enough for float64
        if is_last:
            weights_RS.masked_fill_(torch.arange(at.start, at.stop) > own, 0.0)
        sums_R1 += weights_RS.sum(-1, keepdim=True)
        outs_RH += weights_RS @ cache.v[0][at, 0].double()
    whole = torch.cat([outs_RH, sums_R1], -1)
    dist.all_reduce(whole)
    return (whole[:, :H] / whole[:, H:]).view(T, N, H)


@pytest.mark.parametrize("backend", ["auto", "torch"])
@pytest.mark.parametrize("share", [64 * BLOCK, pytest.param(19_532 * BLOCK, marks=pytest.mark.slow)])
def test_a_chunk_and_decodes_over_two_groups(workers: WorkerPool, share: int, backend: str) -> None:
    for errors, positions, memory_gib in workers.run(attend_on_two_ranks, 2, share, backend, limit_s=900.0):
        assert len(errors) == 1 + NUM_DECODES
        assert positions[-1] == 2 * share + CHUNK + NUM_DECODES - 1
        assert max(errors) < 2e-5, errors
        assert memory_gib < 4.0
