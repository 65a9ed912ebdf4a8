"""Runs a Batch on one rank: the place where model, attention, KV cache, sampling and the pipeline's ends meet.

The runner keeps a replica of the block tables, the prompts' tokens and those drawn for each slot. Given a Batch it
gathers the input tokens, runs every linear layer once over all rows together (decodes and chunks of several prefills),
writes the new keys and values, attends, and samples the rows that end at the last known token. With KV parallelism it
is handed its group's part of a batch; rows that lie on several groups are attended to over this group's shard and
merged with the others', while the other rows are computed.

With ``decode_lag`` a batch is only started: its tokens are drawn where the logits lie and noted there, the next batch
can read them from there, and the host reads them when they are asked for. Until then nothing waits for the device.

The phases of a step are named for PyTorch's profiler: ``medha.schedule`` (by the engine), ``medha.prepare``,
``medha.receive``, ``medha.forward``, ``medha.sample`` and ``medha.send``.

What a step's kernels need to know is copied to the device at once (:mod:`medha.attention.staging`); batches of decodes
alone run from a captured graph where there is one (:mod:`.graphs`); blocks are swapped meanwhile (:mod:`.swap`).

Legend: T tokens of a batch, D model dimension, V vocabulary, S rows to sample, N query heads, K KV heads, H head
dimension.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch.profiler import record_function

from medha.attention.flashinfer_backend import FlashInferBackend
from medha.attention.interface import AttentionBackend
from medha.attention.staging import Staging, record_event
from medha.batch import Batch, Row
from medha.models.decoder import Decoder, LayerAttendFn
from medha.models.rope import cos_sin, inverse_frequencies
from medha.parallel.kvp import Merge, shared_rows
from medha.parallel.spp import StagePipe
from medha.params import SamplingParams
from medha.timeline import Recorder
from medha.worker.graphs import CudaGraphs, DecodeGraphs, Decodes
from medha.worker.kv_cache import BlockTables, KVCache, WritePlan
from medha.worker.sampling import SlotSampling, draw, sample
from medha.worker.step import PendingStep, StepResult, last_tokens_of, positions_of, sampling_rows
from medha.worker.swap import HostCache, SwapCopies


class Runner:
    """Runs batches on one rank: all layers of the model, or one stage of a pipeline.

    Args:
        model, cache, backend, device: the decoder's layers held here, loaded; pools for them, and attention over those.
        pipe: where hidden states come from and go to; None when the whole model is here.
        samples: whether this rank draws tokens; it must hold the head.
        group: this rank's KV-parallel group.
        merges: by (first, last) group, for the KVP spans that this rank's belongs to.
        decode_lag: 1 if a batch may be handed in before the one before it is read; the whole model is then here.
        host: where blocks are swapped to; None if they never are.

    Attributes:
        recorder: what this rank ran when; where the device runs behind the host, when it was launched.
        graphs: of decodes, once they are captured.
    """

    def __init__(
        self,
        model: Decoder,
        cache: KVCache,
        backend: AttentionBackend,
        device: torch.device,
        *,
        pipe: StagePipe | None = None,
        samples: bool = True,
        group: int = 0,
        merges: Mapping[tuple[int, int], Merge] | None = None,
        decode_lag: int = 0,
        host: HostCache | None = None,
    ) -> None:
        assert decode_lag == 0 or pipe is None, "the tokens of other ranks are not here in time"
        self.model = model
        self.cache = cache
        self.backend = backend
        self.device = device
        self.pipe = pipe
        self.samples = samples
        self.group = group
        self.merges = merges or {}
        self.host = host
        self.recorder = Recorder()
        self.tables = BlockTables(cache.block_size, group)
        rope = model.config.rope
        self._attention_factor = rope.attention_factor
        self._inv_freq = inverse_frequencies(rope, model.config.head_dim).to(device)
        self._prompts: dict[int, torch.Tensor] = {}
        self._sampling: dict[int, SlotSampling] = {}
        self._drawn: dict[int, list[int]] = {}
        self.graphs: DecodeGraphs | None = None
        # The last token of each slot, on the device: what the next decode reads before the host knows it.
        self._last_tokens = torch.zeros(64, dtype=torch.int64, device=device) if decode_lag else None

    def capture(
        self, maker: CudaGraphs, sizes: Sequence[int], on_captured: Callable[[int, int], None], *, is_alone: bool = True
    ) -> None:
        """Capture graphs of decodes; see :meth:`medha.worker.graphs.DecodeGraphs.capture`."""
        assert isinstance(self.backend, FlashInferBackend), f"a graph cannot hold the attention of {self.backend.name}"
        self.graphs = DecodeGraphs(self.model, self.cache, self.backend, self._inv_freq, most_decodes=max(sizes))
        self.graphs.capture(maker, sizes, on_captured, is_alone=is_alone)

    def open(
        self,
        slot: int,
        prompt_ids: npt.NDArray[np.int32],
        params: SamplingParams,
        *,
        seed: int,
        end_ids: tuple[int, ...],
    ) -> None:
        """Take the tokens (kept, not copied) and resolved sampling parameters of a request, ahead of its first batch.

        A former occupant of the slot is forgotten; ``end_ids`` are the ids that ``min_tokens`` holds back.
        """
        prompt = torch.from_numpy(prompt_ids)
        self._prompts[slot] = prompt
        self.open_sampling(slot, SlotSampling.of(params, seed, end_ids, len(prompt), prompt))

    def open_sampling(self, slot: int, sampling: SlotSampling) -> None:
        """Take the sampling parameters alone, on a rank that gets the tokens of each batch with it."""
        self._sampling[slot] = sampling

    def close(self, slot: int) -> None:
        """Forget a request's tokens; its blocks go with the batch that frees them."""
        self._prompts.pop(slot, None)
        self._sampling.pop(slot, None)
        self._drawn.pop(slot, None)

    def reset(self) -> None:
        """Forget every request and block table after a step that did not finish, once the copies that it began end."""
        if self.host is not None:
            self.host.finish()
        self._prompts.clear()
        self._sampling.clear()
        self._drawn.clear()
        self.tables.clear()

    def sampling(self, slot: int) -> SlotSampling:
        """The sampling state of a request."""
        return self._sampling[slot]

    def sampling_so_far(self, slot: int) -> SlotSampling:
        """The same, brought up to every token drawn by now on whichever rank; where prompts are kept."""
        sampling = self._sampling[slot]
        if sampling.has_penalties:
            sampling.begin_output(self._drawn.get(slot, ()))
        return sampling

    def submit(self, batch: Batch) -> PendingStep:
        """Run a batch on the one rank that there is, or with a decode lag start it."""
        if self._last_tokens is not None:
            return self._start(batch, self._last_tokens)
        result = self.run(batch, self.input_ids(batch))
        assert result is not None, "a rank with the whole model samples"
        self.take_tokens(result)
        return PendingStep(lambda: result)

    @torch.inference_mode()
    def run(self, batch: Batch, input_ids: torch.Tensor | None) -> StepResult | None:
        """Run this rank's part of a batch as sent.

        Args:
            batch: the part of the plan that concerns this rank's group; without rows tables change and blocks move.
            input_ids: int32 tokens of the rows in order, on a rank that embeds them.

        Returns:
            The tokens sampled by a rank that samples, None elsewhere and where there was nothing to run.
        """
        entered = self.recorder.begin()
        with record_function("medha.prepare"):
            copies = self._apply(batch)
        if not batch.rows:
            if copies is not None:
                copies.wait()
            return None
        out, _ = self._forward(batch, None if input_ids is None else input_ids.numpy(), copies)
        if not self.model.has_head:
            assert self.pipe is not None, "a stage without the head passes its hidden states on"
            self.recorder.end(batch)
            with record_function("medha.send"):
                with self.recorder.waiting("send"):
                    self.pipe.reserve()
                self.pipe.send(batch, out)
            return None
        rows = sampling_rows(batch, self.group)
        with record_function("medha.sample"):
            sampled = sample(out, *self._draws(rows)) if rows and self.samples else []
        record = self.recorder.end(batch)
        if not self.samples:
            return None
        busy_s = record.end_s - entered - record.hidden_wait_s
        return StepResult(rows, sampled, busy_s)

    @torch.inference_mode()
    def _start(self, batch: Batch, last_tokens: torch.Tensor) -> PendingStep:
        """Start a batch whose decodes read the tokens of the batch before from the device."""
        entered = self.recorder.begin()
        before = record_event(self.device, timing=True)
        copies = self._apply(batch)
        missing = 1 + max(row.slot for row in batch.rows) - len(last_tokens)
        if missing > 0:
            last_tokens = self._last_tokens = F.pad(last_tokens, (0, max(missing, len(last_tokens))))
        rows = sampling_rows(batch, self.group)
        ids = self._ids(batch, [0] * batch.num_decodes).numpy()  # the decodes' tokens lie on the device
        logits, slots = self._forward(batch, ids, copies, last_tokens=last_tokens)
        drawing = None
        if rows:
            with record_function("medha.sample"):
                drawing = draw(logits, *self._draws(rows))
                last_tokens[slots] = drawing.tokens
        host_s = self.recorder.end(batch).end_s - entered
        after = record_event(self.device, timing=True)

        def finish() -> StepResult:
            busy_s = host_s  # all of the compute, unless the device runs behind the host
            if before is not None and after is not None:
                after.synchronize()
                busy_s = before.elapsed_time(after) / 1e3  # milliseconds
            result = StepResult(rows, [] if drawing is None else drawing.read(), busy_s)
            self.take_tokens(result)
            return result

        return PendingStep(finish)

    def _apply(self, batch: Batch) -> SwapCopies | None:
        """Change the block tables, and begin to move what the batch swaps, if anything."""
        if not batch.moves:
            self.tables.apply(batch)
            return None
        assert self.host is not None, "a batch swaps blocks only where there is host memory for them"
        out = self.tables.swap_runs(batch.swaps_out)  # before the tables are dropped
        self.tables.apply(batch)
        return self.host.move(out, self.tables.swap_runs(batch.swaps_in))

    def _draws(self, rows: Sequence[Row]) -> tuple[list[SlotSampling], list[int]]:
        """Of each row that samples: its request's parameters, and the index of the token to draw."""
        slots = [self._sampling[row.slot] for row in rows]
        return slots, [row.kv_len - slot.num_prompt_tokens for row, slot in zip(rows, slots, strict=True)]

    def take_tokens(self, result: StepResult) -> None:
        """Note the tokens drawn, as input of the next decodes; where prompts are kept."""
        for row, sampled in zip(result.rows, result.sampled, strict=True):
            self._drawn.setdefault(row.slot, []).append(sampled.token_id)

    def input_ids(self, batch: Batch) -> torch.Tensor:
        """The tokens of a batch's rows in order, int32 on the CPU, where prompts are kept."""
        return self._ids(batch, [self._drawn[row.slot][-1] for row in batch.rows if row.is_decode])

    def _ids(self, batch: Batch, decodes: list[int]) -> torch.Tensor:
        """The tokens of a batch, those of its decodes being given."""
        parts = [torch.tensor(decodes, dtype=torch.int32)]
        for row in batch.rows:
            if not row.is_decode:
                prompt = self._prompts[row.slot]
                parts.append(prompt[row.position : row.kv_len])
                if row.kv_len > len(prompt):  # computed again after it was preempted
                    first = max(row.position - len(prompt), 0)
                    drawn = self._drawn[row.slot][first : row.kv_len - len(prompt)]
                    parts.append(torch.tensor(drawn, dtype=torch.int32))
        return torch.cat(parts)

    def _forward(
        self,
        batch: Batch,
        ids: npt.NDArray[np.int32] | None,
        copies: SwapCopies | None,
        *,
        last_tokens: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Run the layers held here, from a graph or one kernel after the other.

        Args:
            batch: with rows.
            ids: of the rows in order, on a rank that embeds them.
            copies: of blocks that are swapped meanwhile; a layer waits for its own, a graph for all.
            last_tokens: int64 on the device, the token of each slot, which decodes read in place of ``ids``.

        Returns:
            Logits [S, V] of the rows that sample, float32, where the head is and some do; else hidden states [T, D].
            The slots of the rows that sample, int64 [S] on the device.
        """
        is_fixed = batch.num_decodes == len(batch.rows) and not any(row.is_shared for row in batch.rows)
        if self.graphs is not None and is_fixed and self.graphs.size_for(len(batch.rows)) is not None:
            if copies is not None:
                copies.wait()
            return self._replayed(self.graphs, batch, ids, last_tokens)
        return self._eager(batch, ids, copies, last_tokens)

    def _eager(
        self,
        batch: Batch,
        ids: npt.NDArray[np.int32] | None,
        copies: SwapCopies | None,
        last_tokens: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """:meth:`_forward`, one kernel after the other."""
        staging = Staging(self.device)
        with record_function("medha.prepare"):
            positions = staging.add(positions_of(batch))
            sampled = staging.add(np.array(last_tokens_of(batch, self.group), np.int64))
            sampled_slots = staging.add(np.array([row.slot for row in sampling_rows(batch, self.group)], np.int64))
            decode_slots = staging.add(np.array([row.slot for row in batch.rows if row.is_decode], np.int64))
            tokens = None if ids is None else staging.add(ids)
            attend = self._attention(batch, staging)
        if copies is not None:
            attend = copies.before(attend)
        cos, sin = cos_sin(positions.tensor, self._inv_freq, self._attention_factor)
        if self.model.has_embedding:
            assert tokens is not None, "a stage with the embedding gets tokens"
            ids_T = tokens.tensor.to(torch.int64)
            if last_tokens is not None:
                ids_T[: batch.num_decodes] = last_tokens[decode_slots.tensor]  # decodes come first
            x_TD = self.model.embed(ids_T)
        else:
            x_TD = self._received(batch)
        with record_function("medha.forward"):
            x_TD = self.model(x_TD, cos, sin, attend)
            if self.model.has_head and len(sampled.ints):
                x_TD = self.model.logits(x_TD[sampled.tensor])
        return x_TD, sampled_slots.tensor

    def _received(self, batch: Batch) -> torch.Tensor:
        """Hidden states of the stage before, [T, D] on the device; the compute begins when they are here."""
        assert self.pipe is not None, "a stage without the embedding receives hidden states"
        with record_function("medha.receive"), self.recorder.waiting("hidden"):
            x_TD = self.pipe.receive(batch).to(self.device)
        self.recorder.begin()
        return x_TD

    def _replayed(
        self,
        graphs: DecodeGraphs,
        batch: Batch,
        ids: npt.NDArray[np.int32] | None,
        last_tokens: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """:meth:`_forward` of decodes alone, from a graph."""
        located = list(zip(batch.rows, range(len(batch.rows)), strict=True))
        with record_function("medha.prepare"):
            decodes = Decodes(
                segments=[self.tables.segment(row, start) for row, start in located],
                positions=positions_of(batch),
                targets=self.tables.targets(located, in_pieces=self.device.type == "cpu")[0],
                token_ids=None if ids is None else ids.astype(np.int64),
                slots=np.array([row.slot for row in batch.rows], np.int64),
            )
        hidden = None if self.model.has_embedding else self._received(batch)
        with record_function("medha.forward"):
            out = graphs.run(decodes, hidden_TD=hidden, last_tokens=last_tokens)
        return out, graphs.slots[: len(batch.rows)]

    def _attention(self, batch: Batch, staging: Staging) -> LayerAttendFn:
        """What writes a layer's new keys and values and attends over all of them; sends what is staged."""
        starts = np.cumsum([0, *(row.q_len for row in batch.rows)]).tolist()
        located = list(zip(batch.rows, starts[:-1], strict=True))
        single_tokens, source_tokens, spans = self.tables.targets(located, in_pieces=self.device.type == "cpu")
        singles = staging.add(single_tokens)
        sources = None if source_tokens is None else staging.add(source_tokens)
        runs = shared_rows(batch, self.device)
        alone, shared = (
            [self.tables.segment(row, start) for row, start in located if row.is_shared == is_shared]
            for is_shared in (False, True)
        )
        plan = self.backend.plan(alone, staging)
        shared_plan = self.backend.plan(shared, staging) if runs else None
        staging.send()
        writes = WritePlan(singles.tensor, spans, None if sources is None else sources.tensor)

        def attend(layer: int, q_TNH: torch.Tensor, k_TKH: torch.Tensor, v_TKH: torch.Tensor) -> torch.Tensor:
            self.cache.write(layer, k_TKH, v_TKH, writes)
            pools = self.cache.k[layer], self.cache.v[layer]
            pending = []
            if runs:
                out_TNH, lse_TN = self.backend.run(q_TNH, *pools, shared_plan)
                parts = [(shared, (out_TNH[shared.tokens], lse_TN[shared.tokens])) for shared in runs]
                pending = [self.merges[shared.run].start(shared, part) for shared, part in parts]
            out_TNH = self.backend.run(q_TNH, *pools, plan)[0]  # while the parts travel
            if pending:
                with self.recorder.waiting("merge"):
                    for merge in pending:
                        out_TNH[merge.shared.tokens] = merge.result(compare=layer == 0)
            return out_TNH

        return attend
