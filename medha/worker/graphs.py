"""CUDA graphs: the forward of a batch of decodes as one launch, that of a small batch of any rows as one a layer.

A small batch computes for less time than the host needs to launch its kernels one by one; a graph launches them at
once. A graph repeats the same kernels on the same addresses, so its inputs lie in buffers that never move, its size is
fixed, and a batch is filled up to the next size. Eager execution stays the reference.

:class:`DecodeGraphs` hold batches of decodes alone, without rows that several groups share: what fills one up attends
to a scratch token behind the pool, and attention is planned anew before each replay, outside of the graph.
:class:`PieceGraphs` hold what lies between the attentions of two layers; attention and what it waits for run eagerly.
In a tensor-parallel group graphs hold its collectives, and every rank captures and replays the same sizes.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt
import torch

from medha.attention.flashinfer_backend import FixedDecodes, FlashInferBackend
from medha.attention.interface import AttentionRows
from medha.attention.staging import packed_bytes, to_device
from medha.batch import Batch
from medha.config import SchedulerConfig
from medha.errors import ConfigError
from medha.models.decoder import Decoder, LayerAttendFn
from medha.models.layers import cos_sin, inverse_frequencies
from medha.worker.kv_cache import KVCache
from medha.worker.sampling import Greedy, likeliest
from medha.worker.step_input import StepInput

logger = logging.getLogger("medha")

_DECODE_SIZES = (1, 2, 4, 8, *range(16, 257, 16))
_PIECE_SIZES = (16, 32, 64, 128, 256, 384, 512)

Replay = Callable[[], None]
Ran = tuple[torch.Tensor, torch.Tensor, Greedy | None]
"""Logits [S, V] of the rows that sample, float32, where the head is and some do, else hidden states [T, D]; the slots
of those rows, int64 [S] on the device; the likeliest tokens, where they are known."""

_Captured = TypeVar("_Captured")


class CudaGraphs:
    """Captures CUDA graphs that share one pool of memory, on one stream: cuBLAS keeps a workspace for each stream.

    ``is_alone``: no other rank takes part.
    """

    def __init__(self, device: torch.device, *, is_alone: bool = True) -> None:
        self._device, self._is_alone = device, is_alone
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def capture(self, run: Callable[[Callable[[], None]], torch.Tensor]) -> tuple[torch.Tensor, list[Replay]]:
        """Run something twice; returns its result's memory, and what fills that memory again, in order. It calls what
        it is given wherever one graph is to end and another to begin.

        Raises:
            torch.OutOfMemoryError: there is no memory for it.
        """
        current = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            run(lambda: None)  # once before, so that whatever is set up at first use is not captured
        current.wait_stream(self._stream)
        graphs: list[Any] = []
        with ExitStack() as captured:

            def cut() -> None:
                captured.close()
                graphs.append(torch.cuda.CUDAGraph())
                # Other threads may use CUDA meanwhile; their calls are none of this graph's.
                how: dict[str, Any] = {"pool": self._pool, "stream": self._stream, "capture_error_mode": "thread_local"}
                captured.enter_context(torch.cuda.graph(graphs[-1], **how))

            cut()
            out = run(cut)
        return out, [graph.replay for graph in graphs]

    @torch.inference_mode()
    def each(self, sizes: Sequence[int], what: str, capture: Callable[[int], _Captured]) -> dict[int, _Captured]:
        """What is captured of each size, the largest first, and say which; one without memory for it is left out.

        Where other ranks take part it cannot be, as these would wait for it in a collective: ConfigError.
        """
        begin_s, found = time.perf_counter(), dict[int, _Captured]()
        for size in sorted(sizes, reverse=True):
            try:
                found[size] = capture(size)
            except torch.OutOfMemoryError as error:
                if not self._is_alone:
                    accepted = "a lower gpu_memory_utilization or max_num_seqs, or enforce_eager"
                    raise ConfigError(f"no memory for the CUDA graph of {size} {what}; accepted: {accepted}") from error
                logger.warning("no memory for the CUDA graph of %d %s; larger batches run without one", size, what)
                torch.cuda.empty_cache()
        listed = ", ".join(map(str, sorted(found))) or "none"
        logger.info("CUDA graphs of %s %s, captured in %.1f s", listed, what, time.perf_counter() - begin_s)
        return found


class _Graph(NamedTuple):
    """A captured forward: the rows of the buffer of all graphs where its logits or hidden states go, what fills them,
    and the attention to plan before."""

    out: torch.Tensor
    replay: Replay
    attention: FixedDecodes


class DecodeGraphs:
    """The graphs of one rank, for batches of so many decodes, see :meth:`CudaGraphs.each`.

    The cache has a scratch block.
    """

    def __init__(
        self, maker: CudaGraphs, sizes: Sequence[int], model: Decoder, *, cache: KVCache, backend: FlashInferBackend
    ) -> None:
        self._model, self._cache, self._backend = model, cache, backend
        self._most, device = max(sizes), cache.k[0].device
        self._inv_freq = inverse_frequencies(model.config.rope, model.config.head_dim).to(device)
        # The buffers that all sizes share, behind each other as _fill sends them.
        rows, pages = np.zeros(self._most, np.int64), np.zeros(self._cache.num_blocks + self._most, np.int32)
        arrays: list[npt.NDArray[Any]] = [rows, rows, rows, rows, pages]
        self._inputs = torch.empty(packed_bytes(arrays), dtype=torch.uint8, device=device)
        sent = to_device(arrays, device, into=self._inputs)
        self._ids, self._positions, self._targets, self._slots, self._pages = sent
        dim, dtype = model.config.hidden_size, cache.shape.dtype
        self._greedy = torch.zeros_like(self._slots), torch.zeros_like(self._slots, dtype=torch.bool)
        self._hidden = torch.zeros(0 if model.has_embedding else self._most, dim, dtype=dtype, device=device)
        width, dtype = (model.config.vocab_size, torch.float32) if model.has_head else (dim, dtype)
        self._out = torch.zeros(self._most, width, dtype=dtype, device=device)
        self._graphs = maker.each(sizes, "decodes", partial(self._capture, maker))

    def holds(self, step: StepInput) -> bool:
        """Whether a captured size holds a batch, of decodes of this group alone: where blocks are shared, its pages may
        be more than the pool's, and a long context may be cut into too few parts."""
        rows, num_rows = step.own, len(step.batch.rows)
        size = self.size_for(num_rows)
        if rows is None or step.shared is not None or size is None or len(step.decode_slots) < num_rows:
            return False
        return len(rows.pages) <= self._cache.num_blocks and not self._graphs[size].attention.starves(rows)

    def size_for(self, num_rows: int) -> int | None:
        """The smallest captured size that holds so many rows."""
        return min((size for size in self._graphs if size >= num_rows), default=None)

    def _capture(self, maker: CudaGraphs, size: int) -> _Graph:
        attention = FixedDecodes(self._backend, self._cache.shape, size, self._pages)
        none = np.empty(0, np.int64)
        rows = AttentionRows.of(none, none, none > 0, [], self._cache.block_size)
        self._fill(StepInput(Batch(0, ()), own=rows), size, attention)
        out, (replay,) = maker.capture(lambda cut: self._forward(size, attention))
        return _Graph(out, replay, attention)

    def run(self, step: StepInput, *, hidden_TD: torch.Tensor | None, last_tokens: torch.Tensor) -> Ran:
        """Replay the graph that holds a batch of decodes, at most as many as the largest size.

        Args:
            hidden_TD: hidden states of the stage before, on a rank without the embedding.
            last_tokens: int64 on the device, the token of each slot.

        Returns:
            Until the next run: what came of all rows, with :func:`medha.worker.sampling.likeliest` of the logits.
        """
        num_rows = len(step.batch.rows)
        size = self.size_for(num_rows)
        assert size is not None, f"no graph holds {num_rows} decodes"
        graph = self._graphs[size]
        self._fill(step, size, graph.attention)
        if hidden_TD is not None:
            self._hidden[:num_rows].copy_(hidden_TD)
        slots = self._slots[:num_rows]
        torch.index_select(last_tokens, 0, slots, out=self._ids[:num_rows])
        graph.replay()
        tokens, finite = self._greedy
        return graph.out[:num_rows], slots, (tokens[:num_rows], finite[:num_rows])

    def _fill(self, step: StepInput, size: int, attention: FixedDecodes) -> None:
        """Put a batch into the buffers, filled up with rows that read and write the scratch block; plan its attention.

        The buffers keep the places that they have at the largest size; what lies behind a batch's rows is not read.
        """
        assert step.own is not None, "decodes of one group"
        rows = step.own.filled_up(size, self._cache.num_blocks)
        whole = np.zeros((4, self._most), np.int64)  # of the tokens' ids, which a run looks up, none is known here
        whole[2] = self._cache.num_blocks * self._cache.block_size  # of the scratch block, what fills the targets up
        for row, ints in zip(whole[1:], (step.positions, step.targets, step.decode_slots), strict=True):
            row[: len(ints)] = ints
        to_device([*whole, rows.pages], self._inputs.device, into=self._inputs)
        attention.plan(rows)

    def _forward(self, size: int, attention: FixedDecodes) -> torch.Tensor:
        """What a graph holds."""
        cos_sin_TH = cos_sin(self._positions[:size], self._inv_freq, self._model.config.rope.attention_factor)
        places = self._cache.places(self._targets[:size])

        def attend(layer: int, q_TNH: torch.Tensor, k_TKH: torch.Tensor, v_TKH: torch.Tensor) -> torch.Tensor:
            self._cache.write(layer, k_TKH, v_TKH, places)
            return attention.run(q_TNH, self._cache.k[layer], self._cache.v[layer])

        # a copy, as layers take the memory of what they are given, and a batch fills its own rows alone
        x_TD = self._model.embed(self._ids[:size]) if self._model.has_embedding else self._hidden[:size].clone()
        x_TD = self._model(x_TD, cos_sin_TH, attend)
        out = self._out[:size]
        if not self._model.has_head:
            return out.copy_(x_TD)
        self._model.logits(x_TD, into=out)
        for buffer, found in zip(self._greedy, likeliest(out), strict=True):
            buffer[:size].copy_(found)
        return out


class _Pieces(NamedTuple):
    """A captured forward but for its attention: before that of each layer a graph, with the queries, keys and values
    that it leaves, and one behind the last, with the hidden states."""

    replays: list[Replay]
    qkv: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]
    out: torch.Tensor


class PieceGraphs:
    """The layers of one rank, called as :class:`Decoder` is; batches that no captured size holds run eagerly.

    ``sizes`` are of tokens, see :meth:`CudaGraphs.each`. A result stays until the next call.
    """

    def __init__(self, maker: CudaGraphs, sizes: Sequence[int], model: Decoder, *, cache: KVCache) -> None:
        self._run: Callable[..., torch.Tensor] = model
        config, most, shape, device = model.config, max(sizes), cache.shape, cache.k[0].device
        self._x = torch.zeros(most, config.hidden_size, dtype=shape.dtype, device=device)
        self._cos_sin = torch.zeros(most, config.head_dim, dtype=torch.float32, device=device)
        self._attended = torch.zeros(most, shape.num_heads, config.head_dim, dtype=shape.dtype, device=device)
        self._pieces = maker.each(sizes, "tokens", partial(self._capture, maker))

    def _capture(self, maker: CudaGraphs, size: int) -> _Pieces:
        qkv: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = []

        def forward(cut: Callable[[], None]) -> torch.Tensor:
            qkv.clear()

            def attend(layer: int, *parts: torch.Tensor) -> torch.Tensor:
                qkv.append(parts)  # type: ignore[arg-type]
                cut()
                return self._attended[:size]

            return self._run(self._x[:size], self._cos_sin[:size], attend)

        out, replays = maker.capture(forward)
        return _Pieces(replays, qkv, out)

    @torch.inference_mode()
    def __call__(self, x_TD: torch.Tensor, cos_sin_TH: torch.Tensor, attend: LayerAttendFn) -> torch.Tensor:
        """As :meth:`Decoder.forward`; what fills a size up are the rows that lay there before, which nobody reads."""
        num_tokens = len(x_TD)
        size = min((size for size in self._pieces if size >= num_tokens > 0), default=None)
        if size is None:
            return self._run(x_TD, cos_sin_TH, attend)
        self._x[:num_tokens].copy_(x_TD)
        self._cos_sin[:num_tokens].copy_(cos_sin_TH)
        *before, behind = self._pieces[size].replays
        for layer, (replay, parts) in enumerate(zip(before, self._pieces[size].qkv, strict=True)):
            replay()
            self._attended[:num_tokens].copy_(attend(layer, *(part[:num_tokens] for part in parts)))
        behind()
        return self._pieces[size].out[:num_tokens]


def graph_sizes(config: SchedulerConfig) -> tuple[tuple[int, ...], ...]:
    """Sizes of graphs in decodes, dense where padding costs most; and of those of pieces in tokens: as long as the
    device computes for less time than the host launches."""
    limits = (config.max_num_seqs, _DECODE_SIZES), (config.max_batch_tokens, _PIECE_SIZES)
    return tuple(tuple(sorted({min(size, most) for size in sizes})) for most, sizes in limits)
