"""Runs a Batch on one rank: the place where model, attention, KV cache, sampling and the pipeline's ends meet.

A batch is first prepared, on the host alone (:mod:`.step_input`); then it runs: every linear layer once over all rows
together (decodes and chunks of several prefills), new keys and values are written, the rows attend, and those that end
at the last known token are sampled. With KV parallelism the rows that lie on several groups are attended to over this
group's shard and merged with the others', while the other rows are computed; those that are dealt attend to blocks of
keys that go around a ring.

A decode reads its token where it was noted when it was drawn (``last_tokens``), so its batch may be prepared, and on a
device that runs behind the host launched, before anybody knows the token.

The phases of a step are named for PyTorch's profiler: ``medha.schedule`` (by the engine), ``medha.prepare``,
``medha.receive``, ``medha.forward``, ``medha.sample`` and ``medha.send``.

Batches of decodes alone run from a captured graph where there is one, other small ones from graphs but for their
attention (:mod:`.graphs`); blocks are swapped meanwhile (:mod:`.swap`).

Legend: T tokens of a batch, D model dimension, V vocabulary, S rows to sample, N query heads, K KV heads, H head
dimension.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY, dataclass
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F

from medha.attention.flashinfer_backend import FlashInferBackend
from medha.attention.interface import AttentionBackend
from medha.attention.merge import Partial
from medha.attention.staging import record_event, to_device
from medha.batch import Batch
from medha.cpu.decoder import PackedLinear
from medha.models.decoder import Decoder, LayerAttendFn
from medha.models.layers import cos_sin, inverse_frequencies
from medha.parallel.kvp import Merge, shared_rows
from medha.parallel.ring import Ring, buffer_of
from medha.parallel.spp import StagePipe
from medha.records import Recorder
from medha.worker.dealt import DealtRows, Move
from medha.worker.graphs import CudaGraphs, DecodeGraphs, PieceGraphs, Ran
from medha.worker.kv_cache import KVCache, copy_tokens
from medha.worker.sampling import SlotSampling, draw
from medha.worker.step import PendingStep, StepResult, phase
from medha.worker.step_input import DeviceStep, Slots, StepInput
from medha.worker.swap import HostCache, Wait


@dataclass(eq=False, repr=False)
class Runner:
    """Runs batches on one rank: all layers of the model, or one stage of a pipeline."""

    model: Decoder  # the layers held here, loaded
    cache: KVCache  # pools for them
    backend: AttentionBackend
    device: torch.device
    _: KW_ONLY
    pipe: StagePipe | None = None  # where hidden states come from and go to; None when the whole model is here
    samples: bool = True  # whether this rank draws tokens; it must hold the head
    share: Callable[[torch.Tensor], Any] | None = None  # fills it with the tokens drawn, on each rank that embeds them
    group: int = 0  # the KV-parallel one
    merge: Merge | None = None  # over KV-parallel groups, if there are several
    host: HostCache | None = None  # where blocks are swapped to; None if they never are

    def __post_init__(self) -> None:
        self.recorder = Recorder()  # what ran when; where the device runs behind the host, when it was launched
        self.slots = Slots(self.cache.block_size, self.group)
        waiting = partial(self.recorder.waiting, "merge")
        self.ring = None if self.merge is None else Ring(self.merge, self.cache.k[0], waiting)
        # of each slot, int64 on the device, where tokens are embedded
        self.last_tokens = torch.zeros(64, dtype=torch.int64, device=self.device)
        self._inv_freq = inverse_frequencies(self.model.config.rope, self.model.config.head_dim).to(self.device)
        # by slot, where prompts are kept: the prompt, and what has been drawn; whoever reads the results adds to that
        self._tokens: dict[int, tuple[npt.NDArray[np.int32], list[int]]] = {}
        # by slot; on a rank that gets the tokens of each batch with it this alone is known of a request
        self.sampling: dict[int, SlotSampling] = {}
        self.graphs: DecodeGraphs | None = None
        self._layers: Decoder | PieceGraphs = self.model  # what runs them for a batch that no graph holds whole
        self._began: torch.cuda.Event | None = None  # when the device could begin with the present batch

    def capture(self, maker: CudaGraphs, sizes: Sequence[int], pieces: Sequence[int] = ()) -> None:
        """Capture graphs of so many decodes, and of so many tokens without their attention; see :mod:`.graphs`."""
        assert isinstance(self.backend, FlashInferBackend), f"a graph cannot hold the attention of {self.backend.name}"
        self.graphs = DecodeGraphs(maker, sizes, self.model, cache=self.cache, backend=self.backend)
        if pieces:
            self._layers = PieceGraphs(maker, pieces, self.model, cache=self.cache)

    def drop_graphs(self) -> None:
        """Run eagerly from now on."""
        self.graphs, self._layers = None, self.model

    def open(self, slot: int, prompt_ids: npt.NDArray[np.int32], sampling: SlotSampling, drawn: list[int]) -> None:
        """Take the tokens (kept, not copied) and sampling parameters of a request, ahead of its first batch.

        A former occupant of the slot is forgotten. Whoever reads results adds its tokens to ``drawn``, which is read
        should they have to be computed again.
        """
        self._tokens[slot], self.sampling[slot] = (prompt_ids, drawn), sampling

    def close(self, slot: int) -> None:
        """Forget a request's tokens; its blocks go with the batch that frees them."""
        self._tokens.pop(slot, None)
        self.sampling.pop(slot, None)

    def reset(self) -> None:
        """Forget every request and block table after a step that did not finish, once the copies that it began end."""
        if self.host is not None:
            self.host.finish()
        self._tokens.clear()
        self.sampling.clear()
        self.slots.clear()

    def sampling_so_far(self, slot: int) -> SlotSampling:
        """The sampling state of a request, with every token drawn by now on whichever rank; where prompts are kept."""
        sampling = self.sampling[slot]
        if sampling.has_penalties:
            sampling.output_ids, sampling.history = list(self._tokens[slot][1]), None
        return sampling

    def submit(self, batch: Batch) -> PendingStep:
        """Prepare a batch on the one rank that there is; it runs now where the device runs behind the host, else when
        its result is asked for, after those before it."""
        step = self.prepare(batch, self.chunk_ids(batch))

        def begin() -> PendingStep:
            pending = self.run(step)
            assert pending is not None, "a rank with the whole model samples"
            return pending

        if self.device.type == "cpu":
            return PendingStep(lambda: begin().result())
        with torch.cuda.device(self.device):  # some kernels leave it the current one of the thread that calls
            return begin()

    def prepare(self, batch: Batch, ids: npt.NDArray[np.int32] | None) -> StepInput:
        """Make a batch ready to run: on the host alone, in the order of the batches.

        Args:
            batch: the part of the plan that concerns this rank's group; without rows tables change and blocks move.
            ids: as of :meth:`chunk_ids`, where tokens are embedded.
        """
        with phase("medha.prepare"):
            step = self.slots.prepare(batch)
            if self.model.has_embedding and ids is not None:
                num_chunk_ids = len(step.positions) - len(step.decode_tokens)
                step.decode_ids = ids[num_chunk_ids:]
                if num_chunk_ids:
                    step.token_ids = np.zeros(len(step.positions), np.int32)
                    step.token_ids[np.delete(np.arange(len(step.positions)), step.decode_tokens)] = ids[:num_chunk_ids]
        return step

    @torch.inference_mode()
    def run(self, step: StepInput) -> PendingStep | None:
        """Run a batch, or on a device that runs behind the host launch it; returns on a rank that samples what waits
        for its tokens, None elsewhere and where there was nothing to run."""
        entered, batch = self.recorder.begin(), step.batch
        self._began = record_event(self.device, timing=True)
        copies: list[Wait] = []
        if batch.moves:
            assert self.host is not None, "a batch swaps blocks only where there is host memory for them"
            copies = self.host.move(step.swaps_out, step.swaps_in)
        if not batch.rows:
            if copies:
                copies[-1]()
            return None
        self._make_room(len(self.slots.held))
        if len(step.decode_ids):
            self.note_tokens(step.decode_slots.tolist(), torch.from_numpy(step.decode_ids.astype(np.int64)))
        graphs = self.graphs if self.graphs is not None and self.graphs.holds(step) else None
        out, slots, greedy = self._eager(step, copies) if graphs is None else self._replay(graphs, step, copies)
        if not self.model.has_head:
            assert self.pipe is not None, "a stage without the head passes its hidden states on"
            self.recorder.end(batch)
            with phase("medha.send"):
                with self.recorder.waiting("send"):
                    self.pipe.reserve()
                self.pipe.send(batch, out)
            return None
        drawing = None
        if step.drawn_rows and (self.samples or self.share is not None):
            with phase("medha.sample"):
                if self.samples:
                    drawing = draw(out, *self._draws(step), greedy)
                tokens = torch.empty_like(slots, dtype=torch.int64) if drawing is None else drawing.tokens
                if self.share is not None:
                    self.share(tokens)
                self.last_tokens[slots] = tokens
        record = self.recorder.end(batch)
        if not self.samples:
            return None
        began, ended = self._began, record_event(self.device, timing=True)
        host_s = record.end_s - entered - record.hidden_wait_s

        def result() -> StepResult:
            busy_s = host_s  # all of the compute, unless the device runs behind the host
            if began is not None and ended is not None:
                ended.synchronize()
                busy_s = began.elapsed_time(ended) / 1e3  # milliseconds
            return StepResult(step.drawn_rows, [] if drawing is None else drawing.read(), busy_s)

        return PendingStep(result)

    def _make_room(self, num_slots: int) -> None:
        """Let ``last_tokens`` have so many."""
        missing = num_slots - len(self.last_tokens)
        if missing > 0:
            self.last_tokens = F.pad(self.last_tokens, (0, max(missing, len(self.last_tokens))))

    def _draws(self, step: StepInput) -> tuple[list[SlotSampling], list[int]]:
        """Of each row that samples: its request's parameters, and the index of the token to draw."""
        slots, ends = [self.sampling[slot] for slot in step.drawn_slots.tolist()], step.positions[step.drawn_tokens]
        return slots, [end + 1 - slot.num_prompt_tokens for end, slot in zip(ends.tolist(), slots, strict=True)]

    @torch.inference_mode()
    def note_tokens(self, slots: Sequence[int], tokens: torch.Tensor) -> None:
        """Note tokens that another rank drew, int64 on the host, for the next decodes of these slots."""
        self._make_room(1 + max(slots))
        (at,) = to_device([np.array(slots)], self.device)
        self.last_tokens[at] = tokens.to(self.device, non_blocking=True)

    def chunk_ids(self, batch: Batch, *, decodes: bool = False) -> npt.NDArray[np.int32]:
        """The tokens of a batch's rows that are no decodes, in order, where prompts are kept; if ``decodes``, behind
        them those of the decodes, the newest of each that are ``drawn``; 0 where nobody adds to these."""
        parts = [np.empty(0, np.int32)]
        for row in batch.chunks:
            prompt, drawn = self._tokens[row.slot]
            for span in row.spans(self.group if batch.group is None else batch.group):
                parts.append(prompt[span.start : span.stop])
                if span.stop > len(prompt):  # computed again after it was preempted
                    first = max(span.start - len(prompt), 0)
                    parts.append(np.array(drawn[first : span.stop - len(prompt)], np.int32))
        if decodes:
            drawn_of = (self._tokens[row.slot][1] for row in batch.rows if row.is_decode)
            parts.append(np.array([drawn[-1] if drawn else 0 for drawn in drawn_of], np.int32))
        return np.concatenate(parts)

    def _replay(self, graphs: DecodeGraphs, step: StepInput, copies: list[Wait]) -> Ran:
        """As :meth:`_eager`, from a graph, which waits for all copies."""
        if copies:
            copies[-1]()
        hidden = None if self.model.has_embedding else self._received(step.batch)
        with phase("medha.forward"):
            return graphs.run(step, hidden_TD=hidden, last_tokens=self.last_tokens)

    def _eager(self, step: StepInput, copies: list[Wait]) -> Ran:
        """Run the layers held here, one kernel after the other, each behind its own copies, if there are any."""
        sent = DeviceStep.of(step, self.device)
        attend = self._attention(step, sent, copies)
        cos_sin_TH = cos_sin(sent.positions, self._inv_freq, self.model.config.rope.attention_factor)
        if self.model.has_embedding:
            ids_T = self.last_tokens[sent.decode_slots]
            if len(step.token_ids):
                decode_ids, ids_T = ids_T, sent.token_ids.to(torch.int64)
                ids_T[sent.decode_tokens] = decode_ids
            x_TD = self.model.embed(ids_T)
        else:
            x_TD = self._received(step.batch)
        with phase("medha.forward"):
            x_TD = self._layers(x_TD, cos_sin_TH, attend)
            if self.model.has_head:
                x_TD = self._logits(x_TD, step, sent)
        return x_TD, sent.drawn_slots, None

    def _logits(self, x_TD: torch.Tensor, step: StepInput, sent: DeviceStep) -> torch.Tensor:
        """Logits [S, V] of the rows that are drawn from here, if there are any; of what several groups draw from each
        computes a part."""
        merge, head, tokens, others = self.merge, self.model.head, sent.drawn_tokens, list[int]()
        if merge is not None and isinstance(head, PackedLinear):
            draws = merge.draws(step.shared_draws, head, x_TD.itemsize)
            others = [token for one in draws if one.groups[0] != self.group for token in one.tokens]
            head = partial(merge.logits, draws=draws, head=head) if draws else head
        if not step.drawn_rows and not others:
            return x_TD
        x_SD = x_TD if len(tokens) == len(x_TD) else x_TD[tokens]
        return self.model.logits(torch.cat([x_SD, x_TD[others]]) if others else x_SD, head=head)

    def _received(self, batch: Batch) -> torch.Tensor:
        """Hidden states of the stage before, [T, D] on the device; the compute begins when they are here."""
        assert self.pipe is not None, "a stage without the embedding receives hidden states"
        with phase("medha.receive"), self.recorder.waiting("hidden"):
            x_TD = self.pipe.receive(batch)
        self.recorder.begin()
        self._began = record_event(self.device, timing=True)
        return x_TD

    def _attention(self, step: StepInput, sent: DeviceStep, copies: list[Wait]) -> LayerAttendFn:
        """What writes a layer's new keys and values and attends over all of them."""
        num_own = 0 if step.own is None else step.own.num_tokens
        num_undealt = num_own + (0 if step.shared is None else step.shared.num_tokens)
        own_plan, shared_plan = (None if rows is None else self.backend.plan(rows) for rows in (step.own, step.shared))
        spans = [] if step.shared is None else shared_rows(step.batch)
        dealt = [(rows, [self.backend.plan(seen) for seen in rows.seen]) for rows in step.dealt]
        moving, places = self._move(step, 0), self.cache.places(sent.targets, sent.kept)

        def attend(layer: int, q_TNH: torch.Tensor, k_TKH: torch.Tensor, v_TKH: torch.Tensor) -> torch.Tensor:
            if copies:
                copies[layer]()
            pools = self.cache.k[layer], self.cache.v[layer]
            for pool in pools:
                copy_tokens(pool, pool, step.copies)
            nonlocal moving
            if moving is not None:
                moving()
            self.cache.write(layer, k_TKH, v_TKH, places)
            pending = None
            if shared_plan is not None:
                assert self.merge is not None, "rows are shared where there are several groups"
                out_TNH, lse_TN = self.backend.run(q_TNH[num_own:num_undealt], *pools, shared_plan)
                parts = [(span, (out_TNH[span.tokens], lse_TN[span.tokens])) for span in spans]
                pending = self.merge.start(parts, compare=layer == 0)
            outs = []
            if own_plan is not None:  # while the parts travel
                outs.append(self.backend.attend(q_TNH[:num_own], *pools, own_plan))
            if pending is not None:
                with self.recorder.waiting("merge"):
                    outs += pending()
            outs += [self._ring(layer, q_TNH[num_undealt:], rows, plans) for rows, plans in dealt]
            if moving is not None:
                moving = self._move(step, layer + 1)
            return outs[0] if len(outs) == 1 else torch.cat(outs)

        return attend

    def _ring(self, layer: int, q_TNH: torch.Tensor, rows: DealtRows, plans: list[Any]) -> torch.Tensor:
        """Attention of this rank's tokens of the dealt rows of a run."""
        assert self.ring is not None, "rows are dealt where there are several groups"
        q_TNH, pools = q_TNH[rows.shared.tokens], (self.cache.k[layer], self.cache.v[layer])
        sizes = [self.cache.block_size_of(tokens) for tokens in rows.block_tokens]
        self.cache.pack(layer, rows.packed, buffer_of(self.ring.buffers, 0, sizes[rows.own]))

        def over(owner: int, block: torch.Tensor) -> Partial:
            return self.backend.run(q_TNH, *(pools if owner == rows.own else self.cache.block(block)), plans[owner])

        return self.ring.attend(rows.shared, sizes, over, compare=layer == 0)

    def _move(self, step: StepInput, layer: int) -> Wait | None:
        """Begin to move a layer's history between groups, if some is to move before the dealt rows run; what is
        returned waits for it, and puts what has come into its pool."""
        if not (step.sends or step.receives) or layer == len(self.cache.k):
            return None
        assert self.merge is not None, "history moves where there are several groups"

        def memory(move: Move) -> torch.Tensor:
            return self.cache.k[layer].new_empty(self.cache.block_size_of(move.num_tokens))

        sends = [(move.group, self.cache.pack(layer, move.runs, memory(move))) for move in step.sends]
        receives = [(move.group, memory(move)) for move in step.receives]
        wait = self.merge.exchange(sends, receives)  # in the order of the shifts

        def land() -> None:
            with self.recorder.waiting("shift"):
                wait()
            for move, (_, block) in zip(step.receives, receives, strict=True):
                self.cache.pack(layer, move.runs, block, is_back=True)

        return land
