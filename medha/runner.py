"""Runs a Batch: the one place where model, attention, KV cache and sampling meet.

The runner keeps a replica of the block tables, the prompts' tokens and each slot's last sampled token. Given a Batch it
gathers the input tokens, runs every linear layer once over all rows together (decodes and chunks of several prefills),
writes the new keys and values, attends, and samples the rows that end at the last known token.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from medha.attention.interface import AttentionBackend, Segment
from medha.batch import Batch, Row
from medha.kv_cache import BlockTables, KVCache, WritePlan
from medha.models.decoder import Decoder
from medha.models.rope import cos_sin, inverse_frequencies
from medha.request import SamplingParams
from medha.sampling import Sampled, SlotSampling, sample


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


class Runner:
    """Runs batches on one rank that holds the whole model.

    Args:
        model: the decoder, loaded; it is run in inference mode.
        cache: pools for the model's layers.
        backend: attention over those pools.
        device: of model and cache.
    """

    def __init__(self, model: Decoder, cache: KVCache, backend: AttentionBackend, device: torch.device) -> None:
        self.model = model
        self.cache = cache
        self.backend = backend
        self.device = device
        self.tables = BlockTables(cache.block_size)
        rope = model.config.rope
        self._attention_factor = rope.attention_factor
        self._inv_freq = inverse_frequencies(rope, model.config.head_dim).to(device)
        self._prompts: dict[int, torch.Tensor] = {}
        self._sampling: dict[int, SlotSampling] = {}
        self._last_token = torch.zeros(256, dtype=torch.int64, device=device)

    def open(
        self, slot: int, prompt_ids: Sequence[int], params: SamplingParams, *, seed: int, end_ids: tuple[int, ...]
    ) -> None:
        """Take the tokens and sampling parameters of a request, ahead of its first batch.

        Args:
            slot: its handle; a former occupant is forgotten.
            prompt_ids: token ids.
            params: resolved sampling parameters.
            seed: of its draws.
            end_ids: ids that end it, which ``min_tokens`` holds back.
        """
        prompt = torch.from_numpy(np.asarray(prompt_ids, dtype=np.int32))
        keeps_prompt = params.repetition_penalty not in (None, 1.0)
        self._prompts[slot] = prompt
        self._sampling[slot] = SlotSampling(params, seed, end_ids, len(prompt), prompt if keeps_prompt else None)
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

    @torch.inference_mode()
    def run(self, batch: Batch) -> StepResult:
        """Run a batch as sent.

        Returns:
            The sampled tokens; the block tables, KV pool and last tokens are updated.
        """
        start = time.perf_counter()
        self.tables.apply(batch)
        rows = tuple(row for row in batch.rows if row.samples)
        logits_SV = self._logits(batch, rows)
        slots = [self._sampling[row.slot] for row in rows]
        indices = [row.kv_len - slot.num_prompt_tokens for row, slot in zip(rows, slots, strict=True)]
        sampled = sample(logits_SV, slots, indices) if rows else []
        if rows:
            ids = torch.tensor([s.token_id for s in sampled], device=self.device)
            self._last_token[[row.slot for row in rows]] = ids
        return StepResult(rows, sampled, time.perf_counter() - start)

    def _logits(self, batch: Batch, rows: tuple[Row, ...]) -> torch.Tensor:
        """Forward of the whole batch; logits of the given rows' last tokens, float32 [rows, V]."""
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
        x_TD = self.model(self.model.embed(self._input_ids(batch)), cos, sin, attend)
        last = [start + row.q_len - 1 for row, start in located if row.samples]
        return self.model.logits(x_TD[last])

    def _input_ids(self, batch: Batch) -> torch.Tensor:
        """Token ids of the batch, int64 [T]: decodes from the last tokens, chunks from the prompts."""
        decodes = [row.slot for row in batch.rows if row.is_decode]
        parts = [self._prompts[row.slot][row.position : row.kv_len] for row in batch.rows if not row.is_decode]
        ids = torch.cat(parts).to(self.device, torch.int64) if parts else self._last_token.new_empty(0)
        return torch.cat([self._last_token[decodes], ids]) if decodes else ids

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
