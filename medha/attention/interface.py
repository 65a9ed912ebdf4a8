"""The interface of an attention backend: partial attention of a ragged batch over a paged KV pool.

A backend is planned once a step from the batch's :class:`Segment` list and then run in every layer with the same plan.
Each segment is one request's queries and the KV range they see; a range may be empty, and a segment may cover only a
part of a request's context (a shard of it, or its past): the log-sum-exp lets parts be merged exactly
(:func:`medha.attention.merge.merge_partials`).

Legend: T query tokens of the batch, N query heads, K KV heads, H head dimension, P tokens in the pool.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from medha.attention.staging import Staging


@dataclass(frozen=True, slots=True)
class Segment:
    """Queries [q_start, q_start + q_len) of a batch and the keys they see.

    Attributes:
        q_start: index of the first query token in the batch.
        q_len: number of query tokens, at least 1.
        ranges: the KV tokens as (first token in the pool, count), in position order; empty when there are none.
        causal: right-aligned: query j sees the keys up to ``kv_len - q_len + j``; then ``kv_len >= q_len`` must hold.
            Otherwise every query sees every key.
    """

    q_start: int
    q_len: int
    ranges: tuple[tuple[int, int], ...]
    causal: bool

    @property
    def kv_len(self) -> int:
        """KV tokens that the last query sees."""
        return sum(count for _, count in self.ranges)


@dataclass(frozen=True, slots=True)
class LayerShape:
    """What a kernel is chosen and planned by: the heads of one rank."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    dtype: torch.dtype

    @classmethod
    def of(cls, q_TNH: torch.Tensor, k_PKH: torch.Tensor) -> LayerShape:
        """The shape of a layer's queries and pool."""
        return cls(q_TNH.shape[1], k_PKH.shape[1], q_TNH.shape[2], q_TNH.dtype)


class AttentionBackend(Protocol):
    """What runs attention; stateless between steps apart from its workspace."""

    name: str

    def plan(self, segments: Sequence[Segment], staging: Staging | None = None) -> Any:
        """Prepare a step; the result is handed to :meth:`run` in each layer.

        Args:
            segments: of the step.
            staging: takes along the integers that the device needs; without it the first run copies them.
        """
        ...

    def run(
        self, q_TNH: torch.Tensor, k_PKH: torch.Tensor, v_PKH: torch.Tensor, plan: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Partial attention of every segment, scaled by ``H ** -0.5``.

        Args:
            q_TNH: queries, any float dtype.
            k_PKH, v_PKH: the layer's whole pool, same dtype and device; any strides with a contiguous last dimension.
            plan: from :meth:`plan`.

        Returns:
            out_TNH in the dtype of q, and lse_TN: natural logarithm of the sum of exponentials, float32, -inf (with
            out 0) for an empty range. Rows of q that no segment covers are undefined.
        """
        ...
