"""Runs a Batch on one rank: the place where model, attention, KV cache, sampling and the pipeline's ends meet.

The runner keeps a replica of the block tables, the prompts' tokens and those drawn for each slot. Given a Batch it
gathers the input tokens, runs every linear layer once over all rows together (decodes and chunks of several prefills),
writes the new keys and values, attends, and samples the rows that end at the last known token.

With KV parallelism the runner is handed the part of a batch that concerns its group. Rows that lie on several groups
are attended to over this group's shard and merged with the others', while the other rows are computed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial

import numpy as np
import numpy.typing as npt
import torch

from medha.attention.interface import AttentionBackend, Segment
from medha.batch import Batch, Row
from medha.kv_cache import BlockTables, KVCache, WritePlan
from medha.models.decoder import Decoder, LayerAttendFn
from medha.models.rope import cos_sin, inverse_frequencies
from medha.parallel.kvp import Merge, shared_rows
from medha.parallel.spp import StagePipe
from medha.request import SamplingParams
from medha.sampling import Sampled, SlotSampling, sample
from medha.timeline import Recorder


@dataclass(frozen=True, slots=True)
class StepResult:
    """What a batch produced.

    Attributes:
        rows: the rows that sampled, in batch order.
        sampled: their tokens.
        busy_s: seconds of compute, waits excluded.
    """

    rows: tuple[Row, ...]
    sampled: list[Sampled]
    busy_s: float


@dataclass(frozen=True, slots=True)
class Pending:
    """A batch that has been handed in and whose result is already here; a pipeline's is waited for."""

    done: StepResult

    def result(self) -> StepResult:
        """The result of the batch."""
        return self.done


class Runner:
    """Runs batches on one rank: all layers of the model, or one stage of a pipeline.

    Args:
        model: the decoder's layers held here, loaded; they run in inference mode.
        cache: pools for those layers.
        backend: attention over those pools.
        device: of model and cache.
        pipe: where hidden states come from and go to; None when the whole model is here.
        samples: whether this rank draws tokens; it must hold the head.
        group: this rank's KV-parallel group.
        merges: by (first, last) group, for the runs of groups that this rank's belongs to.

    Attributes:
        recorder: what this rank ran when.
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
    ) -> None:
        self.model = model
        self.cache = cache
        self.backend = backend
        self.device = device
        self.pipe = pipe
        self.samples = samples
        self.group = group
        self.merges = merges or {}
        self.recorder = Recorder()
        self.tables = BlockTables(cache.block_size, group)
        rope = model.config.rope
        self._attention_factor = rope.attention_factor
        self._inv_freq = inverse_frequencies(rope, model.config.head_dim).to(device)
        self._prompts: dict[int, torch.Tensor] = {}
        self._sampling: dict[int, SlotSampling] = {}
        self._drawn: dict[int, list[int]] = {}

    def open(
        self,
        slot: int,
        prompt_ids: npt.NDArray[np.int32],
        params: SamplingParams,
        *,
        seed: int,
        end_ids: tuple[int, ...],
    ) -> None:
        """Take the tokens and sampling parameters of a request, ahead of its first batch.

        Args:
            slot: its handle; a former occupant is forgotten.
            prompt_ids: token ids, kept and not copied.
            params: resolved sampling parameters.
            seed: of its draws.
            end_ids: ids that end it, which ``min_tokens`` holds back.
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
        """Forget every request and block table, after a step that did not finish."""
        self._prompts.clear()
        self._sampling.clear()
        self._drawn.clear()
        self.tables.clear()

    def sampling(self, slot: int) -> SlotSampling:
        """The sampling state of a request."""
        return self._sampling[slot]

    def submit(self, batch: Batch) -> Pending:
        """Run a batch as sent; on one rank its result is there when this returns."""
        result = self.run(batch, self.input_ids(batch))
        assert result is not None, "a rank with the whole model samples"
        self.take_tokens(result)
        return Pending(result)

    @torch.inference_mode()
    def run(self, batch: Batch, input_ids: torch.Tensor | None) -> StepResult | None:
        """Run this rank's part of a batch as sent.

        Args:
            batch: the part of the plan that concerns this rank's group; without rows only the tables change.
            input_ids: int32 tokens of the rows in order, on a rank that embeds them.

        Returns:
            The tokens sampled by a rank that samples, None elsewhere and where there was nothing to run.
        """
        entered = self.recorder.begin()
        self.tables.apply(batch)
        if not batch.rows:
            return None
        x_TD = self._forward(batch, input_ids)
        if not self.model.has_head:
            assert self.pipe is not None, "a stage without the head passes its hidden states on"
            self.recorder.end(batch)
            with self.recorder.waiting("send"):
                self.pipe.reserve()
            self.pipe.send(batch, x_TD)
            return None
        sampled = self._sample(batch, x_TD)
        record = self.recorder.end(batch)
        if not self.samples:
            return None
        return StepResult(sampling_rows(batch, self.group), sampled, record.end_s - entered - record.hidden_wait_s)

    def _sample(self, batch: Batch, x_TD: torch.Tensor) -> list[Sampled]:
        """The tokens that this rank draws; every rank of the last stage of the leading group takes part."""
        rows = sampling_rows(batch, self.group)
        if not rows:
            return []
        logits_SV = self.model.logits(x_TD[last_tokens(batch, self.group)])
        if not self.samples:
            return []
        slots = [self._sampling[row.slot] for row in rows]
        indices = [row.kv_len - slot.num_prompt_tokens for row, slot in zip(rows, slots, strict=True)]
        return sample(logits_SV, slots, indices)

    def take_tokens(self, result: StepResult) -> None:
        """Note the tokens drawn, as input of the next decodes; where prompts are kept."""
        for row, sampled in zip(result.rows, result.sampled, strict=True):
            self._drawn.setdefault(row.slot, []).append(sampled.token_id)

    def input_ids(self, batch: Batch) -> torch.Tensor:
        """The tokens of a batch's rows in order, int32 on the CPU, where prompts are kept."""
        decodes = [self._drawn[row.slot][-1] for row in batch.rows if row.is_decode]
        parts = [torch.tensor(decodes, dtype=torch.int32)]
        for row in batch.rows:
            if not row.is_decode:
                prompt = self._prompts[row.slot]
                parts.append(prompt[row.position : row.kv_len])
                if row.kv_len > len(prompt):  # computed again after it gave way
                    first = max(row.position - len(prompt), 0)
                    drawn = self._drawn[row.slot][first : row.kv_len - len(prompt)]
                    parts.append(torch.tensor(drawn, dtype=torch.int32))
        return torch.cat(parts)

    def _forward(self, batch: Batch, input_ids: torch.Tensor | None) -> torch.Tensor:
        """Hidden states [T, D] after the layers held here."""
        attend = self._attention(batch)
        cos, sin = cos_sin(self._positions(batch), self._inv_freq, self._attention_factor)
        if self.model.has_embedding:
            assert input_ids is not None, "a stage with the embedding gets tokens"
            x_TD = self.model.embed(input_ids.to(self.device, torch.int64))
        else:
            assert self.pipe is not None, "a stage without the embedding receives hidden states"
            with self.recorder.waiting("hidden"):
                x_TD = self.pipe.receive(batch).to(self.device)
            self.recorder.begin()
        return self.model(x_TD, cos, sin, attend)  # type: ignore[no-any-return]

    def _attention(self, batch: Batch) -> LayerAttendFn:
        """What writes a layer's new keys and values and attends over all of them."""
        starts = np.cumsum([0, *(row.q_len for row in batch.rows)]).tolist()
        located = list(zip(batch.rows, starts[:-1], strict=True))
        writes = self._write_plan(located)
        plan = self.backend.plan([self._segment(row, start) for row, start in located if not row.is_shared])
        runs = shared_rows(batch, self.device)
        if not runs:

            def attend(layer: int, q_TNH: torch.Tensor, k_TKH: torch.Tensor, v_TKH: torch.Tensor) -> torch.Tensor:
                self.cache.write(layer, k_TKH, v_TKH, writes)
                return self.backend.run(q_TNH, self.cache.k[layer], self.cache.v[layer], plan)[0]

            return attend

        shared_plan = self.backend.plan([self._segment(row, start) for row, start in located if row.is_shared])

        def attend_together(layer: int, q_TNH: torch.Tensor, k_TKH: torch.Tensor, v_TKH: torch.Tensor) -> torch.Tensor:
            self.cache.write(layer, k_TKH, v_TKH, writes)
            pools = self.cache.k[layer], self.cache.v[layer]
            out_TNH, lse_TN = self.backend.run(q_TNH, *pools, shared_plan)
            pending = [
                self.merges[shared.run].start(shared, (out_TNH[shared.tokens], lse_TN[shared.tokens]))
                for shared in runs
            ]
            out_TNH = self.backend.run(q_TNH, *pools, plan)[0]  # while the parts travel
            with self.recorder.waiting("merge"):
                for merge in pending:
                    out_TNH[merge.shared.tokens] = merge.result(compare=layer == 0)
            return out_TNH

        return attend_together

    def _segment(self, row: Row, start: int) -> Segment:
        """What a row sees here: of a shared one this group's shard, whose last part is its own on the group that
        takes its keys."""
        if not row.is_shared:
            return Segment(start, row.q_len, self.tables.ranges(row.slot, 0, row.kv_len), causal=True)
        shard = self.tables.shard(row.slot)
        return Segment(start, row.q_len, self.tables.ranges(row.slot, *shard), causal=row.holder == self.group)

    def _positions(self, batch: Batch) -> torch.Tensor:
        """Position of each token of the batch, int64 [T]."""
        ranges = [np.arange(row.position, row.kv_len) for row in batch.rows]
        return torch.from_numpy(np.concatenate(ranges)).to(self.device)

    def _write_plan(self, located: list[tuple[Row, int]]) -> WritePlan:
        """Where the new keys go, from each row and the index of its first token in the batch."""
        singles: list[int] = []
        sources: list[int] = []
        spans: list[tuple[int, int, int]] = []
        for row, start in located:
            if row.holder != self.group:
                continue
            for first, count in self.tables.ranges(row.slot, row.position, row.kv_len):
                if row.is_decode:
                    singles.append(first)
                    sources.append(start)
                else:
                    spans.append((start, first, count))
                start += count
        index = partial(torch.tensor, dtype=torch.int64, device=self.device)
        are_first = sources == list(range(len(sources)))
        return WritePlan(index(singles), tuple(spans), None if are_first else index(sources))


def sampling_rows(batch: Batch, group: int) -> tuple[Row, ...]:
    """The rows of a batch after which a group draws a token, in order: those whose run begins there."""
    return tuple(row for row in batch.rows if row.samples and row.group == group)


def last_tokens(batch: Batch, group: int) -> list[int]:
    """Index in the batch of the last token of each row after which a group draws a token."""
    ends = np.cumsum([row.q_len for row in batch.rows]).tolist()
    return [end - 1 for end, row in zip(ends, batch.rows, strict=True) if row.samples and row.group == group]
