"""Hand-over: keys and values on their way to a decode instance, in a thread of each rank, beside the compute.

Tetris (see :mod:`medha.sched.cdsp`) prefills and decodes on instances of different tensor-parallel sizes. A rank has of
a request's KV the layers of its stage, the KV heads of its tensor-parallel share and the tokens of its group; a rank of
the decode instance takes all layers, its own heads, and the tokens of all groups. What passes between two ranks is
where these meet. Where there are fewer KV heads than ranks, ranks hold the same head: several take it, each from
another of those that have it, as far as there are as many. Decodes read history unmasked and keys carry their
positions, so a table may have its tokens in any order: here group behind group, each as it lay.

All ranks send and receive the messages in one order: request after request, layer after layer, part after part, piece
after piece. So the first that is not over has both its ends waiting for it, and none waits for ever. A rank has a few
staging buffers, each of a piece of one layer, and as many messages on their way.

On CUDA the copies run on a stream of their own and wait for no compute: what they send was written before the first
token, which rank 0 has, and what they write to belongs to nobody in flight. Nor may they wait: a decode rank that loads
a kernel waits for what it receives, and its sender perhaps for a collective with it. This has not run on a GPU.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from itertools import accumulate, groupby, pairwise, product
from typing import NamedTuple

import torch
import torch.distributed as dist

from medha.attention.staging import beside
from medha.batch import Batch
from medha.config import ModelConfig, ParallelConfig
from medha.errors import RankFailedError
from medha.parallel.health import tell_failure
from medha.parallel.mesh import Ranks
from medha.parallel.ring import buffer_of
from medha.parallel.spp import Digests, check_digest
from medha.worker.kv_cache import Run
from medha.worker.runner import Runner
from medha.worker.shard import ModelShard
from medha.worker.step import Lane
from medha.worker.step_input import Slots

_RECEIPTS_TAG = 4  # the report group's others are in medha/engine/wire.py
PIECE_TOKENS = 1 << 14  # 64 MiB of 8 heads of 128 in 16 bits


class Part(NamedTuple):
    """What one rank sends of a request's KV to one rank of a decode instance: all tokens of its group."""

    source: int  # global ranks
    target: int
    layers: range  # in the whole model
    heads: range  # KV heads of the model
    start: int  # of the first token among those of the request on the target
    num_tokens: int


def kv_heads_of(tp_rank: int, tp: int, num_kv_heads: int) -> range:
    """The KV heads that a tensor-parallel rank holds: a share of them, or one that others have too."""
    head = tp_rank * num_kv_heads // tp
    return range(head, head + max(1, num_kv_heads // tp))


def parts_of(config: ParallelConfig, model: ModelConfig, held: Sequence[tuple[int, int]], target: int) -> list[Part]:
    """What passes between ranks when a decode instance takes over a request.

    Args:
        config: of the job.
        model: the whole one.
        held: the KV-parallel groups that hold its KV, and how many tokens each.
        target: group of the decode instance.

    Returns:
        The parts in the order in which all ranks send and receive those of a layer: by layers, group, head and rank.
    """
    tp, decode_tp, num_kv_heads = config.tp, config.of_group(target).tp, model.num_kv_heads
    copies = max(1, tp // num_kv_heads)  # ranks of the source that hold the same head
    ends = accumulate(count for _, count in held)
    holders = [(group, count, end - count) for (group, count), end in zip(held, ends, strict=True)]
    parts = []
    for stage, (group, count, start), to, rank in product(range(config.spp), holders, range(decode_tp), range(tp)):
        given, wanted = kv_heads_of(rank, tp, num_kv_heads), kv_heads_of(to, decode_tp, num_kv_heads)
        heads = range(max(given.start, wanted.start), min(given.stop, wanted.stop))
        if not heads or rank % copies != to % copies:  # of ranks with the same head each gives it to others
            continue
        source = config.rank_of(stage=stage, tp_rank=rank, kvp_rank=group)
        its_target = config.rank_of(stage=0, tp_rank=to, kvp_rank=target)
        parts.append(Part(source, its_target, config.layers_of(stage, model.num_layers), heads, start, count))
    return parts


class Piece(NamedTuple):
    """One message: some tokens of one layer and some of this rank's heads."""

    is_sent: bool
    rank: int  # the other one
    layer: int  # of those held here
    heads: range  # of those held here
    num_tokens: int
    runs: Sequence[Run]  # from where in the pool to where in the buffer


def pieces_of(parts: Sequence[Part], rank: int, shard: ModelShard, slots: Slots, slot: int) -> Iterator[Piece]:
    """The messages of a hand-over that a rank with this part of the model sends or receives, in order."""
    own = [part for part in parts if rank in (part.source, part.target)]
    runs: dict[Part, list[tuple[int, list[Run]]]] = {}
    for part in own:
        start = 0 if part.source == rank else part.start
        bounds = [*range(start, start + part.num_tokens, PIECE_TOKENS), start + part.num_tokens]
        runs[part] = [(end - at, slots.tokens(slot, at, end)) for at, end in pairwise(bounds)]
    first_head = kv_heads_of(shard.tp_rank, shard.tp, shard.whole.num_kv_heads).start
    for layers, its_parts in groupby(own, key=lambda part: part.layers):
        for layer, part in product(layers, list(its_parts)):
            is_sent, heads = part.source == rank, range(part.heads.start - first_head, part.heads.stop - first_head)
            other, layer_here = part.target if is_sent else part.source, layer - shard.layers.start
            for count, its_runs in runs[part]:
                yield Piece(is_sent, other, layer_here, heads, count, its_runs)


class TransferLine:
    """A rank's end of hand-overs: what it sends and receives, one request after the other, and the receipts of the
    decode ranks on rank 0."""

    def __init__(self, ranks: Ranks, runner: Runner, shard: ModelShard) -> None:
        self._ranks, self._runner, self._shard = ranks, runner, shard
        assert ranks.transfer_group is not None, "there are decode instances"
        self._cache, self._group = runner.cache, ranks.transfer_group  # of all ranks; nothing else uses it
        self._device = self._cache.k[0].device
        self._stream = torch.cuda.Stream(self._device) if self._device.type == "cuda" else None  # type: ignore[no-untyped-call]
        # a message on its way has one
        self._buffers = [self._cache.k[0].new_empty(0) for _ in range(ranks.config.transfer_buffers)]
        self._lane = Lane("medha-transfer")
        self._receipts = Digests(ranks.report_group, _RECEIPTS_TAG)
        # on rank 0: who waits for the receipts of each instance, which come in order
        groups = range(ranks.config.kvp, ranks.config.num_groups) if ranks.rank == 0 else ()
        self._awaited = {group: Lane(f"medha-receipts-{group}") for group in groups}

    def begin(self, held: Sequence[tuple[int, int]], batch: Batch) -> None:
        """Begin to send or receive what concerns this rank of a request that is handed over, behind the batches
        prepared so far; a decode rank tells rank 0 when it has all.

        Args:
            held: the groups from which the request comes, and how many tokens each holds.
            batch: without rows, of the decode instance: which blocks take them.
        """
        ((slot, target, _, _),) = batch.shared
        if self._ranks.group == target:
            self._runner.slots.prepare(batch.part_of(target))
        parts = parts_of(self._ranks.config, self._shard.whole, held, target)
        pieces = list(pieces_of(parts, self._ranks.rank, self._shard, self._runner.slots, slot))

        def run() -> None:
            try:
                self._run(pieces)
                if self._ranks.group == target:
                    self._receipts.send(batch.batch_id, batch.digest(), 0)
            except Exception as error:
                tell_failure(self._ranks.monitor, error, "a hand-over")

        self._lane.submit(run)

    @torch.inference_mode()
    def _run(self, pieces: Sequence[Piece]) -> None:
        """Send or receive the messages of one hand-over."""
        posted = deque[tuple[Piece, torch.Tensor, dist.Work]]()
        with beside(self._stream, None):
            for number, piece in enumerate(pieces):
                if len(posted) == len(self._buffers):
                    self._end(*posted.popleft())
                size = self._cache.block_size_of(piece.num_tokens, len(piece.heads))
                buffer = buffer_of(self._buffers, number, size)
                if piece.is_sent:
                    self._cache.pack(piece.layer, piece.runs, buffer, piece.heads)
                pass_on = dist.isend if piece.is_sent else dist.irecv
                work = pass_on(buffer, piece.rank, group=self._group)
                assert work is not None, "all ranks are in the group"
                posted.append((piece, buffer, work))
            while posted:
                self._end(*posted.popleft())
            if self._stream is not None:
                self._stream.synchronize()

    def _end(self, piece: Piece, buffer: torch.Tensor, work: dist.Work) -> None:
        """Wait for a message, and put what was received into the pool."""
        work.wait()
        if not piece.is_sent:
            self._cache.pack(piece.layer, piece.runs, buffer, piece.heads, is_back=True)

    def receipt(self, batch: Batch) -> Future[None]:
        """On rank 0: what is done when every rank of the decode instance has what a hand-over brings it."""
        target = batch.shared[0].group
        posted = [(rank, self._receipts.post(rank)) for rank in self._ranks.of_groups([target])]

        def wait() -> None:
            for rank, received in posted:
                try:
                    theirs = received()
                except Exception as error:
                    raise RankFailedError(tell_failure(self._ranks.monitor, error, "a hand-over")) from None
                check_digest([batch.batch_id, batch.digest()], theirs, f"rank {rank} took over")

        return self._awaited[target].submit(wait)

    def close(self) -> None:
        """Wait for what has begun."""
        self._lane.submit(lambda: None).result()
        self._receipts.drain()
        for lane in (self._lane, *self._awaited.values()):
            lane.close()
