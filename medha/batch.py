"""The plan of one step: which tokens of which requests run, and how the block tables change.

A :class:`Batch` is a delta: rows, newly allocated block extents and freed slots. Its size grows with the number of
rows, never with the context, so it can be sent to every rank each step as flat int32 (:meth:`Batch.to_ints`). A sent
Batch is immutable and every rank runs it as sent. It names no token: the next token of a decoding request is read from
what the runner drew; a prompt's tokens are on rank 0, and those of a chunk travel beside the batch.

Where KV can be swapped to host memory, a batch says which host blocks take the keys and values of a preempted
request, and which ones fill the blocks of one that comes back (:mod:`medha.worker.swap`).

A request may begin behind tokens whose keys and values others have computed: its table begins with their blocks.

With KV parallelism a batch spans groups: a row names the run of neighbouring groups on which its tokens are present,
and each group takes the part that concerns it (:meth:`Batch.part_of`).

Printing a Batch gives one line a row, which is what scheduler tests compare.
"""

from __future__ import annotations

import zlib
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain, islice
from typing import Any, NamedTuple

_HEADER = 4
_ROW = 6
_EXTENT = 4
_KINDS = 4  # of what not every batch has: swaps out and in, shared, copies; each of four integers, as an extent
_DECODE = 1
_SAMPLES = 2


class Row(NamedTuple):
    """One request's share of a step; a tuple, as a decision makes hundreds."""

    slot: int  # the request's integer handle
    position: int  # of the first query token, equal to the number of tokens already in the KV cache
    q_len: int  # query tokens, at least 1
    is_decode: bool  # the single input token is the request's last sampled token, not part of the prompt
    samples: bool  # the last query token is the last known one, so a new token is sampled after it
    group: int = 0  # first group of the run that holds the request's KV cache; it samples
    num_groups: int = 1  # of that run so far. The last of them takes the new keys and values

    @property
    def kv_len(self) -> int:
        """Tokens in the KV cache once this row has run."""
        return self.position + self.q_len

    @property
    def span(self) -> tuple[int, int]:
        """The KVP span: first and last group."""
        return self.group, self.group + self.num_groups - 1

    @property
    def groups(self) -> range:
        """All groups of the span."""
        return range(self.group, self.group + self.num_groups)

    @property
    def writer(self) -> int:
        """The group that keeps the new keys and values."""
        return self.group + self.num_groups - 1

    @property
    def is_shared(self) -> bool:
        """Whether several groups attend together."""
        return self.num_groups > 1

    def concerns(self, group: int) -> bool:
        """Whether the row's tokens are present on a group."""
        return self.group <= group <= self.writer

    def __str__(self) -> str:
        where = "" if self.span == (0, 0) else f" on group {self.group}"
        if self.is_shared:
            where = f" on groups {self.group}-{self.writer}"
        if self.is_decode:
            return f"slot {self.slot} decode [{self.position}]{where}"
        last = " last" if self.samples else ""
        return f"slot {self.slot} prefill [{self.position}:{self.kv_len}]{last}{where}"


class Extent(NamedTuple):
    """A run of adjacent KV blocks of a request: ``first``, ..., ``first + count - 1``.

    They are appended to its block table; those of a swap are of the host's pool.
    """

    slot: int
    first: int
    count: int  # type: ignore[assignment]  # not that of a tuple
    group: int = 0  # whose pool they are of

    def __str__(self) -> str:
        return f"slot {self.slot} + blocks {self.blocks}"

    @property
    def blocks(self) -> str:
        """The run as text."""
        where = f" of group {self.group}" if self.group else ""
        return f"[{self.first}:{self.first + self.count}]{where}"


class Shared(NamedTuple):
    """What a group holds already of a request that begins: blocks that others have computed, its first ones here."""

    slot: int
    group: int
    start: int  # position of the first token that lies there
    num_tokens: int

    def __str__(self) -> str:
        where = f" on group {self.group}" if self.group else ""
        return f"slot {self.slot} shares [{self.start}:{self.start + self.num_tokens}]{where}"


class Copy(NamedTuple):
    """The first tokens of a block that go into another one of the same pool."""

    group: int
    source: int
    target: int
    num_tokens: int

    def __str__(self) -> str:
        where = f" of group {self.group}" if self.group else ""
        return f"{self.num_tokens} tokens of block {self.source} to block {self.target}{where}"


@dataclass(frozen=True, slots=True)
class Batch:
    """The plan of one step, decodes before prefills.

    A replica applies ``swaps_out`` of the slots' present tables, then ``frees``, then ``extents`` and ``shared``, then
    ``swaps_in`` into the first blocks of the slot's new table, then ``copies``, then runs ``rows``: a slot or block
    freed by this batch may be handed out again by the same batch, and a slot that it swaps out may come back with it.
    Extents are in position order for each slot; a slot that comes back, or shares, has a row that begins at the first
    position behind what it has.
    """

    batch_id: int  # from 0, without gaps
    rows: tuple[Row, ...]
    extents: tuple[Extent, ...] = ()  # newly allocated blocks
    frees: tuple[int, ...] = ()  # slots whose block tables are dropped
    swaps_out: tuple[Extent, ...] = ()  # host blocks that take the first blocks of a slot's present table
    swaps_in: tuple[Extent, ...] = ()  # host blocks that fill the first blocks of a slot's new table
    shared: tuple[Shared, ...] = ()  # of slots that begin behind what is there of their tokens
    copies: tuple[Copy, ...] = ()  # in this order
    chunks: tuple[Row, ...] = field(init=False, repr=False, compare=False)  # the rows that are no decodes

    def __post_init__(self) -> None:
        object.__setattr__(self, "chunks", tuple([row for row in self.rows if not row[3]]))  # hundreds, so by its place

    @property
    def moves(self) -> bool:
        """Whether blocks are swapped out or in."""
        return bool(self.swaps_out or self.swaps_in)

    def num_moved_blocks(self, group: int) -> int:
        """Blocks of a group that are swapped out or in."""
        return sum(extent.count for extent in (*self.swaps_out, *self.swaps_in) if extent.group == group)

    @property
    def num_tokens(self) -> int:
        """Query tokens over all rows."""
        return self.num_decodes + sum(row.q_len for row in self.chunks)

    @property
    def num_decodes(self) -> int:
        """Rows that decode, a token each; they come first."""
        return len(self.rows) - len(self.chunks)

    @property
    def groups(self) -> set[int]:
        """Groups on which it has rows."""
        return {group for row in self.rows for group in row.groups}

    def part_of(self, group: int) -> Batch:
        """What concerns one group: its blocks, every freed slot, and its rows: those of it alone in their order, then
        those that it shares, by span, so that each of the span's groups has them adjacent and in one order."""
        rows = tuple(row for row in self.rows if row.concerns(group))
        if any(row.is_shared for row in rows):
            rows = tuple(sorted(rows, key=lambda row: (row.is_shared, row.span if row.is_shared else ())))
        kinds: tuple[tuple[Any, ...], ...] = (self.extents, self.swaps_out, self.swaps_in, self.shared, self.copies)
        extents, *others = (tuple(one for one in kind if one.group == group) for kind in kinds)
        return Batch(self.batch_id, rows, extents, self.frees, *others)

    def __str__(self) -> str:
        lines = [f"batch {self.batch_id}: {len(self.rows)} rows, {self.num_tokens} tokens"]
        lines += [f"  {row}" for row in self.rows]
        lines += [f"  {extent}" for extent in self.extents]
        lines += [f"  slot {slot} freed" for slot in self.frees]
        lines += [f"  slot {extent.slot} out to host blocks {extent.blocks}" for extent in self.swaps_out]
        lines += [f"  slot {extent.slot} in from host blocks {extent.blocks}" for extent in self.swaps_in]
        lines += [f"  {one}" for one in (*self.shared, *self.copies)]
        return "\n".join(lines)

    def to_ints(self) -> array[int]:
        """The batch as flat int32: header (id, rows, extents, frees), then each in turn.

        Behind them, only where there are some: the numbers of ``swaps_out``, ``swaps_in``, ``shared`` and ``copies``,
        then each in turn.

        Raises:
            OverflowError: a number does not fit 32 bits.
        """
        out = array("i", (self.batch_id, len(self.rows), len(self.extents), len(self.frees)))
        for row in self.rows:
            flags = _DECODE * row.is_decode + _SAMPLES * row.samples
            out.extend((row.slot, row.position, row.q_len, flags, row.group, row.num_groups))
        out.extend(chain.from_iterable(self.extents))
        out.extend(self.frees)
        kinds = self.swaps_out, self.swaps_in, self.shared, self.copies
        if any(kinds):
            out.extend(map(len, kinds))
            out.extend(chain.from_iterable(chain.from_iterable(kinds)))
        return out

    @classmethod
    def from_ints(cls, ints: Sequence[int]) -> Batch:
        """The inverse of :meth:`to_ints`.

        Raises:
            ValueError: the length does not fit the numbers of what it has.
        """
        if len(ints) < _HEADER:
            raise ValueError(f"a batch has at least {_HEADER} integers, got {len(ints)}")
        batch_id, num_rows, num_extents, num_frees = ints[:_HEADER]
        extents_at = _HEADER + _ROW * num_rows
        frees_at = extents_at + _EXTENT * num_extents
        end = length = frees_at + num_frees
        more = [0] * _KINDS
        if len(ints) >= end + _KINDS and min(num_rows, num_extents, num_frees) >= 0:
            more = list(ints[end : end + _KINDS])
            length += _KINDS + _EXTENT * sum(more) if any(more) else 0
        if min(num_rows, num_extents, num_frees, *more) < 0 or len(ints) != length:
            raise ValueError(f"a batch with header {tuple(ints[:_HEADER])} cannot have {len(ints)} integers")
        rows = tuple(
            Row(slot, position, q_len, bool(flags & _DECODE), bool(flags & _SAMPLES), group, num_groups)
            for slot, position, q_len, flags, group, num_groups in _parts(ints[_HEADER:extents_at], _ROW)
        )
        extents = tuple(Extent(*part) for part in _parts(ints[extents_at:frees_at], _EXTENT))
        parts = _parts(ints[end + _KINDS :], _EXTENT)
        kinds = zip((Extent, Extent, Shared, Copy), more, strict=True)
        others: list[Any] = [tuple(kind(*part) for part in islice(parts, count)) for kind, count in kinds]
        return cls(batch_id, rows, extents, tuple(ints[frees_at:end]), *others)

    def digest(self) -> int:
        """CRC-32 of its integers."""
        return zlib.crc32(self.to_ints().tobytes())


def _parts(ints: Sequence[int], size: int) -> Iterator[Sequence[int]]:
    return (ints[i : i + size] for i in range(0, len(ints), size))


def append_extent(extents: list[tuple[int, int]], first: int, count: int) -> None:
    """Append the run (first, count) to a block table in place, merged with the last run where they touch."""
    if extents and sum(extents[-1]) == first:
        extents[-1] = (extents[-1][0], extents[-1][1] + count)
    else:
        extents.append((first, count))
