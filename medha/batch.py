"""The plan of one step: which tokens of which requests run, and how the block tables change.

A :class:`Batch` is a delta: rows, newly allocated block extents and freed slots. Its size grows with the number of
rows, never with the context, so it can be sent to every rank each step as flat int32 (:meth:`Batch.to_ints`). A sent
Batch is immutable and every rank runs it as sent. It names no token: the next token of a decoding request is read from
the runner's ``last_token`` buffer, a prompt's tokens from the copy that travelled ahead.

Printing a Batch gives one line a row, which is what scheduler tests compare.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass

_HEADER = 4
_ROW = 4
_EXTENT = 3
_DECODE = 1
_SAMPLES = 2


@dataclass(frozen=True, slots=True)
class Row:
    """One request's share of a step.

    Attributes:
        slot: the request's integer handle.
        position: position of the first query token, equal to the number of tokens already in the KV cache.
        q_len: query tokens, at least 1.
        is_decode: the single input token is the request's last sampled token, not part of the prompt.
        samples: the last query token is the last known one, so a new token is sampled after it.
    """

    slot: int
    position: int
    q_len: int
    is_decode: bool
    samples: bool

    @property
    def kv_len(self) -> int:
        """Tokens in the KV cache once this row has run."""
        return self.position + self.q_len

    def __str__(self) -> str:
        if self.is_decode:
            return f"slot {self.slot} decode [{self.position}]"
        last = " last" if self.samples else ""
        return f"slot {self.slot} prefill [{self.position}:{self.kv_len}]{last}"


@dataclass(frozen=True, slots=True)
class Extent:
    """A run of adjacent KV blocks appended to a request's block table: ``first``, ..., ``first + count - 1``."""

    slot: int
    first: int
    count: int

    def __str__(self) -> str:
        return f"slot {self.slot} + blocks [{self.first}:{self.first + self.count}]"


@dataclass(frozen=True, slots=True)
class Batch:
    """The plan of one step, decodes before prefills.

    A replica applies ``frees`` first, then ``extents``, then runs ``rows``: a slot or block freed by this batch may be
    handed out again by the same batch.

    Attributes:
        batch_id: number of the batch, from 0, without gaps.
        rows: what runs.
        extents: newly allocated blocks, in position order for each slot.
        frees: slots whose block tables are dropped.
    """

    batch_id: int
    rows: tuple[Row, ...]
    extents: tuple[Extent, ...] = ()
    frees: tuple[int, ...] = ()

    @property
    def num_tokens(self) -> int:
        """Query tokens over all rows."""
        return sum(row.q_len for row in self.rows)

    @property
    def num_decodes(self) -> int:
        """Rows that decode; they come first."""
        return sum(row.is_decode for row in self.rows)

    def __str__(self) -> str:
        lines = [f"batch {self.batch_id}: {len(self.rows)} rows, {self.num_tokens} tokens"]
        lines += [f"  {row}" for row in self.rows]
        lines += [f"  {extent}" for extent in self.extents]
        lines += [f"  slot {slot} freed" for slot in self.frees]
        return "\n".join(lines)

    def to_ints(self) -> array[int]:
        """The batch as flat int32: header (id, rows, extents, frees), then each in turn.

        Raises:
            OverflowError: a number does not fit 32 bits.
        """
        out = array("i", (self.batch_id, len(self.rows), len(self.extents), len(self.frees)))
        for row in self.rows:
            flags = _DECODE * row.is_decode + _SAMPLES * row.samples
            out.extend((row.slot, row.position, row.q_len, flags))
        for extent in self.extents:
            out.extend((extent.slot, extent.first, extent.count))
        out.extend(self.frees)
        return out

    @classmethod
    def from_ints(cls, ints: Sequence[int]) -> Batch:
        """The inverse of :meth:`to_ints`.

        Raises:
            ValueError: the length does not fit the header.
        """
        if len(ints) < _HEADER:
            raise ValueError(f"a batch has at least {_HEADER} integers, got {len(ints)}")
        batch_id, num_rows, num_extents, num_frees = ints[:_HEADER]
        rows_end = _HEADER + _ROW * num_rows
        extents_end = rows_end + _EXTENT * num_extents
        if min(num_rows, num_extents, num_frees) < 0 or len(ints) != extents_end + num_frees:
            raise ValueError(f"a batch with header {tuple(ints[:_HEADER])} cannot have {len(ints)} integers")
        rows = tuple(
            Row(ints[i], ints[i + 1], ints[i + 2], bool(ints[i + 3] & _DECODE), bool(ints[i + 3] & _SAMPLES))
            for i in range(_HEADER, rows_end, _ROW)
        )
        extents = tuple(Extent(ints[i], ints[i + 1], ints[i + 2]) for i in range(rows_end, extents_end, _EXTENT))
        return cls(batch_id, rows, extents, tuple(ints[extents_end:]))
