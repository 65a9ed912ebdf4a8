"""The plan of one step: which tokens of which requests run, and how the block tables change.

A :class:`Batch` is a delta: rows, newly allocated block extents and freed slots. Its size grows with the number of
rows, never with the context, so it can be sent to every rank each step as flat int32 (:meth:`Batch.to_ints`). A sent
Batch is immutable and every rank runs it as sent. It names no token: the next token of a decoding request is read from
what the runner drew, a prompt's tokens from the copy that travelled ahead.

With KV parallelism a batch spans groups: a row names the run of neighbouring groups on which its tokens are present,
and each group takes the part that concerns it (:meth:`Batch.part_of`).

Printing a Batch gives one line a row, which is what scheduler tests compare.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

_HEADER = 4
_ROW = 6
_EXTENT = 4
_DECODE = 1
_SAMPLES = 2


class Row(NamedTuple):
    """One request's share of a step; a tuple, as a decision makes hundreds.

    Attributes:
        slot: the request's integer handle.
        position: position of the first query token, equal to the number of tokens already in the KV cache.
        q_len: query tokens, at least 1.
        is_decode: the single input token is the request's last sampled token, not part of the prompt.
        samples: the last query token is the last known one, so a new token is sampled after it.
        group: first group of the run that holds the request's KV cache; it samples.
        num_groups: groups of that run so far. The last of them takes the new keys and values.
    """

    slot: int
    position: int
    q_len: int
    is_decode: bool
    samples: bool
    group: int = 0
    num_groups: int = 1

    @property
    def kv_len(self) -> int:
        """Tokens in the KV cache once this row has run."""
        return self.position + self.q_len

    @property
    def run(self) -> tuple[int, int]:
        """First and last group."""
        return self.group, self.group + self.num_groups - 1

    @property
    def holder(self) -> int:
        """The group that keeps the new keys and values."""
        return self.group + self.num_groups - 1

    @property
    def is_shared(self) -> bool:
        """Whether several groups attend together."""
        return self.num_groups > 1

    def concerns(self, group: int) -> bool:
        """Whether the row's tokens are present on a group."""
        return self.group <= group <= self.holder

    def __str__(self) -> str:
        where = "" if self.run == (0, 0) else f" on group {self.group}"
        if self.is_shared:
            where = f" on groups {self.group}-{self.holder}"
        if self.is_decode:
            return f"slot {self.slot} decode [{self.position}]{where}"
        last = " last" if self.samples else ""
        return f"slot {self.slot} prefill [{self.position}:{self.kv_len}]{last}{where}"


@dataclass(frozen=True, slots=True)
class Extent:
    """A run of adjacent KV blocks appended to a request's block table: ``first``, ..., ``first + count - 1``.

    Attributes:
        group: whose pool they are of.
    """

    slot: int
    first: int
    count: int
    group: int = 0

    def __str__(self) -> str:
        where = f" of group {self.group}" if self.group else ""
        return f"slot {self.slot} + blocks [{self.first}:{self.first + self.count}]{where}"


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

    def part_of(self, group: int) -> Batch:
        """What concerns one group: its rows and blocks, and every freed slot."""
        rows = tuple(row for row in self.rows if row.concerns(group))
        extents = tuple(extent for extent in self.extents if extent.group == group)
        return Batch(self.batch_id, rows, extents, self.frees)

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
            out.extend((row.slot, row.position, row.q_len, flags, row.group, row.num_groups))
        for extent in self.extents:
            out.extend((extent.slot, extent.first, extent.count, extent.group))
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
        rows = tuple(_row(ints[i : i + _ROW]) for i in range(_HEADER, rows_end, _ROW))
        extents = tuple(Extent(*ints[i : i + _EXTENT]) for i in range(rows_end, extents_end, _EXTENT))
        return cls(batch_id, rows, extents, tuple(ints[extents_end:]))


def _row(ints: Sequence[int]) -> Row:
    slot, position, q_len, flags, group, num_groups = ints
    return Row(slot, position, q_len, bool(flags & _DECODE), bool(flags & _SAMPLES), group, num_groups)
