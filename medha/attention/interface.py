"""The interface of an attention backend: partial attention of a ragged batch over a paged KV pool.

A backend is planned once a step for adjacent rows of it (:class:`AttentionRows`), and then run in every layer with the
same plan. A row is one request's queries and the keys they see; there may be none, and they may be only a part of the
request's context (a shard of it): the log-sum-exp lets parts be merged exactly
(:func:`medha.attention.merge.merge_partials`).

Legend: R rows, T query tokens of them, N query heads, K KV heads, H head dimension, P tokens in the pool.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch

from medha.attention.merge import Partial

Ints = npt.NDArray[np.int64]
Pages = npt.NDArray[np.int32]
Bools = npt.NDArray[np.bool_]


@dataclass(slots=True)
class AttentionRows:
    """Adjacent rows of queries, and the pages of the pool whose keys each of them sees.

    Of a causal row query j sees the keys up to ``kv_len - q_len + j``, where ``kv_len >= q_len``; of another every
    query sees every key.
    """

    q_indptr: Ints  # where each row's queries begin and, as the last entry, where they end [R + 1]
    kv_len: Ints  # keys that the last query of a row sees [R]
    causal: Bools  # [R]
    page_size: int  # in tokens
    pages: Pages  # of all rows, one behind the other, in position order
    page_indptr: Ints  # where each row's pages begin and, as the last entry, where they end [R + 1]
    device_pages: torch.Tensor | None = None  # pages on the device, once they are there

    @classmethod
    def of(cls, q_len: Ints, kv_len: Ints, causal: Bools, tables: Sequence[Pages], page_size: int) -> AttentionRows:
        """Rows of so many queries and keys; ``tables`` has the pages of each row, at least as many as it needs.

        ValueError where a causal row has more queries than keys.
        """
        if (causal & (kv_len < q_len)).any():
            row = int((causal & (kv_len < q_len)).argmax())
            raise ValueError(f"a causal row of {q_len[row]} queries needs as many keys, got {kv_len[row]}")
        num_pages = -(-kv_len // page_size)
        used = [table[:count] for table, count in zip(tables, num_pages.tolist(), strict=True)]
        pages = np.concatenate(used) if used else np.empty(0, np.int32)
        return cls(indptr(q_len), kv_len, causal, page_size, pages, indptr(num_pages))

    def __len__(self) -> int:
        return len(self.kv_len)

    @property
    def num_tokens(self) -> int:
        """Queries of all rows."""
        return int(self.q_indptr[-1])

    @property
    def q_len(self) -> Ints:
        """Queries of each row."""
        return np.diff(self.q_indptr)

    def filled_up(self, num_rows: int, page: int) -> AttentionRows:
        """With rows of one query behind them that see the first token of ``page``, so many in all."""
        more = num_rows - len(self)
        ones = np.ones(more, np.int64)
        q_indptr, page_indptr = (np.append(at, at[-1] + ones.cumsum()) for at in (self.q_indptr, self.page_indptr))
        kv_len, causal = np.append(self.kv_len, ones), np.append(self.causal, ones > 0)
        pages = np.append(self.pages, np.full(more, page, np.int32))
        return AttentionRows(q_indptr, kv_len, causal, self.page_size, pages, page_indptr)


def indptr(counts: Ints) -> Ints:
    """Where each of some adjacent parts begins and, as the last entry, where the last one ends."""
    return np.concatenate(([0], np.cumsum(counts)))


def adjacent_runs(numbers: npt.NDArray[Any], breaks: Ints | None = None) -> Ints:
    """Where runs of numbers that go up by 1 begin, and as the last entry the end; ``breaks`` begin runs as well."""
    begins = np.ones(len(numbers) + 1, bool)
    begins[1:-1] = np.diff(numbers) != 1
    if breaks is not None:
        begins[breaks] = True
    return np.flatnonzero(begins)


@dataclass(frozen=True, slots=True)
class LayerShape:
    """What a kernel is chosen and planned by: the heads of one rank."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    dtype: torch.dtype


class AttentionBackend(Protocol):
    """What runs attention; stateless between steps apart from its workspace."""

    name: str  # of the option attention_backend
    device_type: str | None = None  # the only one that it serves

    @classmethod
    def build(cls, device: torch.device, block_size: int) -> AttentionBackend:
        """One for a device, and KV blocks of so many tokens."""
        return cls()

    @classmethod
    def needs(cls, device: torch.device) -> str | None:
        """What is missing here, in words; None where nothing is."""
        return None

    @classmethod
    def lacks(cls, shape: LayerShape) -> str | None:
        """What it has no kernel for, in words; None where it has all."""
        return None

    def build_kernels(self, shape: LayerShape, device: torch.device) -> str | None:
        """Run once what serves such layers, so that nothing is compiled while requests wait; returns what is wrong with
        it, in words."""
        return None

    def describe(self, shape: LayerShape) -> str:
        """What of its kernels it uses for such layers, in words, if there is a choice."""
        return ""

    def plan(self, rows: AttentionRows) -> Any:
        """Prepare a step on the host; the result is handed to :meth:`run` in each layer."""
        ...

    def run(self, q_TNH: torch.Tensor, k_PKH: torch.Tensor, v_PKH: torch.Tensor, plan: Any) -> Partial:
        """Partial attention of the rows, scaled by ``H ** -0.5``.

        Args:
            q_TNH: queries of the rows, any float dtype.
            k_PKH, v_PKH: the layer's whole pool, same dtype and device; any strides with a contiguous last dimension.
            plan: from :meth:`plan`.

        Returns:
            out_TNH in the dtype of q, and lse_TN: natural logarithm of the sum of exponentials, float32, -inf (with
            out 0) for a row without keys.
        """
        ...

    def attend(self, q_TNH: torch.Tensor, k_PKH: torch.Tensor, v_PKH: torch.Tensor, plan: Any) -> torch.Tensor:
        """The output alone of :meth:`run`, of rows whose keys all lie here."""
        return self.run(q_TNH, k_PKH, v_PKH, plan)[0]
