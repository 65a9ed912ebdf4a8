"""Runs a Batch on one rank: the place where model, attention, KV cache, sampling and the pipeline's ends meet.

The runner keeps a replica of the block tables, the prompts' tokens and each slot's last sampled token. Given a Batch it
gathers the input tokens, runs every linear layer once over all rows together (decodes and chunks of several prefills),
writes the new keys and values, attends, and samples the rows that end at the last known token.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from medha.attention.interface import AttentionBackend, Segment
from medha.batch import Batch, Row
from medha.kv_cache import BlockTables, KVCache, WritePlan
from medha.models.decoder import Decoder
from medha.models.rope import cos_sin, inverse_frequencies
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
    ) -> None:
        self.model = model
        self.cache = cache
        self.backend = backend
        self.device = device
        self.pipe = pipe
        self.samples = samples
        self.recorder = Recorder()
        self.tables = BlockTables(cache.block_size)
        rope = model.config.rope
        self._attention_factor = rope.attention_factor
        self._inv_freq = inverse_frequencies(rope, model.config.head_dim).to(device)
        self._prompts: dict[int, torch.Tensor] = {}
        self._sampling: dict[int, SlotSampling] = {}
        self._last_token = torch.zeros(256, dtype=torch.int64, device=device)

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
        """Take the sampling parameters alone, on a rank that gets the tokens of each chunk with its batch."""
        self._sampling[slot] = sampling
        if slot >= len(self._last_token):
            grown = torch.zeros(2 * slot, dtype=torch.int64, device=self.device)
            grown[: len(self._last_token)] = self._last_token
            self._last_token = grown

    def close(self, slot: int) -> None:
        """Forget a request's tokens; its blocks go with the batch that frees them."""
        self._prompts.pop(slot, None)
        self._sampling.pop(slot, None)

    def reset(self) -> None:
        """Forget every request and block table, after a step that did not finish."""
        self._prompts.clear()
        self._sampling.clear()
        self.tables.clear()

    def sampling(self, slot: int) -> SlotSampling:
        """The sampling state of a request."""
        return self._sampling[slot]

    def submit(self, batch: Batch) -> Pending:
        """Run a batch as sent; on one rank its result is there when this returns."""
        result = self.run(batch)
        assert result is not None, "a rank with the whole model samples"
        return Pending(result)

    @torch.inference_mode()
    def run(self, batch: Batch, chunk_ids: torch.Tensor | None = None) -> StepResult | None:
        """Run this rank's part of a batch as sent.

        Args:
            batch: the plan.
            chunk_ids: int32 tokens of the batch's chunks in order, where the prompts are not kept here.

        Returns:
            The sampled tokens on a rank that samples, None elsewhere; block tables, KV pool and, on one rank, the last
            tokens are updated.
        """
        entered = self.recorder.begin()
        self.tables.apply(batch)
        rows = sampling_rows(batch)
        x_TD = self._forward(batch, chunk_ids)
        if not self.model.has_head:
            assert self.pipe is not None, "a stage without the head passes its hidden states on"
            self.recorder.end(batch)
            with self.recorder.waiting("send"):
                self.pipe.reserve()
            self.pipe.send(batch, x_TD)
            return None
        logits_SV = self.model.logits(x_TD[last_tokens(batch)])
        if not self.samples:
            self.recorder.end(batch)
            return None
        slots = [self._sampling[row.slot] for row in rows]
        indices = [row.kv_len - slot.num_prompt_tokens for row, slot in zip(rows, slots, strict=True)]
        sampled = sample(logits_SV, slots, indices) if rows else []
        self.take_tokens(rows, [s.token_id for s in sampled])
        record = self.recorder.end(batch)
        return StepResult(rows, sampled, record.end_s - entered - record.hidden_wait_s)

    def take_tokens(self, rows: Sequence[Row], token_ids: Sequence[int]) -> None:
        """Note the tokens drawn for the rows, as input of their next decodes."""
        if rows:
            ids = torch.tensor(token_ids, dtype=torch.int64, device=self.device)
            self._last_token[[row.slot for row in rows]] = ids

    def _forward(self, batch: Batch, chunk_ids: torch.Tensor | None) -> torch.Tensor:
        """Hidden states [T, D] after the layers held here."""
        starts = np.cumsum([0, *(row.q_len for row in batch.rows)]).tolist()
        located = list(zip(batch.rows, starts[:-1], strict=True))
        writes = self._write_plan(located)
        plan = self.backend.plan(
            [
                Segment(start, row.q_len, self.tables.ranges(row.slot, 0, row.kv_len), causal=True)
                for row, start in located
            ]
        )

        def attend(layer: int, q_TNH: torch.Tensor, k_TKH: torch.Tensor, v_TKH: torch.Tensor) -> torch.Tensor:
            self.cache.write(layer, k_TKH, v_TKH, writes)
            return self.backend.run(q_TNH, self.cache.k[layer], self.cache.v[layer], plan)[0]

        cos, sin = cos_sin(self._positions(batch), self._inv_freq, self._attention_factor)
        if self.model.has_embedding:
            x_TD = self.model.embed(self._input_ids(batch, chunk_ids))
        else:
            assert self.pipe is not None, "a stage without the embedding receives hidden states"
            with self.recorder.waiting("hidden"):
                x_TD = self.pipe.receive(batch).to(self.device)
            self.recorder.begin()
        return self.model(x_TD, cos, sin, attend)  # type: ignore[no-any-return]

    def _input_ids(self, batch: Batch, chunk_ids: torch.Tensor | None) -> torch.Tensor:
        """Token ids of the batch, int64 [T]: decodes from the last tokens, chunks from the prompts."""
        decodes = [row.slot for row in batch.rows if row.is_decode]
        if chunk_ids is None:
            chunk_ids = self.chunk_ids(batch)
        ids = chunk_ids.to(self.device, torch.int64)
        return torch.cat([self._last_token[decodes], ids]) if decodes else ids

    def chunk_ids(self, batch: Batch) -> torch.Tensor:
        """The prompt tokens of a batch's chunks in order, int32 on the CPU."""
        parts = [self._prompts[row.slot][row.position : row.kv_len] for row in batch.rows if not row.is_decode]
        return torch.cat(parts) if parts else torch.empty(0, dtype=torch.int32)

    def _positions(self, batch: Batch) -> torch.Tensor:
        """Position of each token of the batch, int64 [T]."""
        ranges = [np.arange(row.position, row.kv_len) for row in batch.rows]
        return torch.from_numpy(np.concatenate(ranges)).to(self.device)

    def _write_plan(self, located: list[tuple[Row, int]]) -> WritePlan:
        """Where the new keys go, from each row and the index of its first token in the batch."""
        singles: list[int] = []
        spans: list[tuple[int, int, int]] = []
        for row, start in located:
            for first, count in self.tables.ranges(row.slot, row.position, row.kv_len):
                if row.is_decode:
                    singles.append(first)
                else:
                    spans.append((start, first, count))
                start += count
        return WritePlan(torch.tensor(singles, dtype=torch.int64, device=self.device), tuple(spans))


def sampling_rows(batch: Batch) -> tuple[Row, ...]:
    """The rows of a batch after which a token is drawn, in order."""
    return tuple(row for row in batch.rows if row.samples)


def last_tokens(batch: Batch) -> list[int]:
    """Index in the batch of the last token of each row that samples."""
    ends = np.cumsum([row.q_len for row in batch.rows]).tolist()
    return [end - 1 for end, row in zip(ends, batch.rows, strict=True) if row.samples]
