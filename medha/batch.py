"""The plan of one step: which tokens of which requests run, and how the block tables change.

A :class:`Batch` is a delta: rows, newly allocated block extents and freed slots. Its size grows with the number of
rows, never with the context, so it can be sent to every rank each step as flat int32 (:meth:`Batch.to_ints`). A sent
Batch is immutable and every rank runs it as sent. It names no token: the next token of a decoding request is read from
what the runner drew; a prompt's tokens are on rank 0, and those of a chunk travel beside the batch.

Where KV can be swapped to host memory, a batch says which blocks go to which of the host's, be they of a preempted
request or of a prefix that is kept, and which come back (:mod:`medha.worker.swap`).

A request may begin behind tokens whose keys and values others have computed: its table begins with their blocks.

With KV parallelism a batch spans groups: a row names the run of neighbouring groups on which its tokens are present,
and each group takes the part that concerns it (:meth:`Batch.part_of`). Of a *dealt* row each group of the run computes
a share of the tokens and keeps their keys and values; a batch says what each of them holds before (:class:`Deal`).

Printing a Batch gives one line a row, which is what scheduler tests compare.
"""

from __future__ import annotations

import zlib
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain, islice
from typing import Any, NamedTuple

_HEADER = 9
_ROW = 6
_PART = 4  # of whatever else a batch has many of, slots apart
_DECODE, _SAMPLES, _DEALT = 1, 2, 4  # a row's flags
PIECES = 2  # of a dealt row on each group, so that all see as many keys: the r-th from the front and from the end


def _where(word: str, group: int) -> str:
    return f" {word} group {group}" if group else ""


class Row(NamedTuple):
    """One request's share of a step; a tuple, as a decision makes hundreds."""

    slot: int  # the request's integer handle
    position: int  # of the first query token, equal to the number of tokens already in the KV cache
    q_len: int  # query tokens, at least 1
    is_decode: bool  # the single input token is the request's last sampled token, not part of the prompt
    samples: bool  # the last query token is the last known one, so a new token is sampled after it
    group: int = 0  # first group of the run that holds the request's KV cache; it samples
    num_groups: int = 1  # of that run so far. The last of them takes the new keys and values
    is_dealt: bool = False  # over a run of several, at least two tokens each; then each keeps its own tokens' keys

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

    def spans(self, group: int) -> tuple[range, ...]:
        """The positions that a group computes, ascending: of a dealt row two of its pieces, which lie in a zigzag, so
        that the first group has the last token."""
        if not self.is_dealt:
            return (range(self.position, self.kv_len),)
        index, count = group - self.group, PIECES * self.num_groups
        bounds = [self.position + self.q_len * piece // count for piece in range(count + 1)]
        return tuple(range(bounds[piece], bounds[piece + 1]) for piece in (index, count - 1 - index))

    def tokens_on(self, group: int) -> int:
        """Query tokens that a group computes."""
        return sum(map(len, self.spans(group))) if self.is_dealt else self.q_len

    def __str__(self) -> str:
        where = "" if self.span == (0, 0) else f" on group {self.group}"
        if self.is_shared:
            where = f" {'dealt to' if self.is_dealt else 'on'} groups {self.group}-{self.writer}"
        if self.is_decode:
            return f"slot {self.slot} decode [{self.position}]{where}"
        last = " last" if self.samples else ""
        return f"slot {self.slot} prefill [{self.position}:{self.kv_len}]{last}{where}"


class Extent(NamedTuple):
    """A run of adjacent KV blocks of a request: ``first``, ..., ``first + count - 1``.

    They are appended to its block table.
    """

    slot: int
    first: int
    count: int  # type: ignore[assignment]  # not that of a tuple
    group: int = 0  # whose pool they are of

    def __str__(self) -> str:
        return f"slot {self.slot} + blocks [{self.first}:{self.first + self.count}]{_where('of', self.group)}"


class Swap(NamedTuple):
    """Adjacent blocks of a group's pool and as many of its host's, which the one's keys and values become."""

    group: int
    first: int
    host_first: int
    count: int  # type: ignore[assignment]  # not that of a tuple

    def __str__(self) -> str:
        own, host = f"{self.first}:{self.first + self.count}", f"{self.host_first}:{self.host_first + self.count}"
        return f"blocks [{own}], host blocks [{host}]{_where('of', self.group)}"


class Shared(NamedTuple):
    """What a group holds already of a request that begins: blocks that others have computed, its first ones here."""

    slot: int
    group: int
    start: int  # position of the first token that lies there
    num_tokens: int

    def __str__(self) -> str:
        return f"slot {self.slot} shares [{self.start}:{self.start + self.num_tokens}]{_where('on', self.group)}"


class Copy(NamedTuple):
    """The first tokens of a block that go into another one of the same pool."""

    group: int
    source: int
    target: int
    num_tokens: int

    def __str__(self) -> str:
        return f"{self.num_tokens} tokens of block {self.source} to block {self.target}{_where('of', self.group)}"


class Deal(NamedTuple):
    """What a group of a dealt row's run holds of the tokens before it, in tokens.

    Where ``share`` is another number than ``held``, history moves first: see :func:`shifts`.
    """

    slot: int
    group: int
    held: int  # when the batch comes
    share: int  # when the row runs

    def __str__(self) -> str:
        return f"slot {self.slot} holds {self.held} on group {self.group}, then {self.share}"


def even_shares(num_tokens: int, count: int) -> list[int]:
    """Tokens spread over so many groups; the first ones have what is left over."""
    whole, rest = divmod(num_tokens, count)
    return [whole + (index < rest) for index in range(count)]


def shifts(deals: Sequence[Deal]) -> list[tuple[int, int, int]]:
    """How history moves before a dealt row runs, of which ``deals`` are: from the groups that hold more than their
    share to those that hold less, both in ascending order. Of each move the source, the target and the number of
    tokens, the last ones that the source holds, which become the last ones that the target holds."""
    over = [(deal.group, deal.held - deal.share) for deal in deals if deal.held > deal.share]
    found: list[tuple[int, int, int]] = []
    for deal in deals:
        missing = deal.share - deal.held
        while missing > 0:
            source, spare = over.pop(0)
            found.append((source, deal.group, min(spare, missing)))
            if spare > missing:
                over.insert(0, (source, spare - missing))
            missing -= spare
    return found


@dataclass(frozen=True, slots=True)
class Batch:
    """The plan of one step, decodes before prefills.

    A replica applies ``frees``, then ``extents`` and ``shared``, then cuts off what ``deals`` move away. It moves
    ``swaps_out``, then ``swaps_in``, then ``copies``, then runs ``rows``. A slot or block freed by this batch may
    be handed out again by the same batch, and what it swaps out may come back with it. Blocks that are cut off are
    handed out by a later batch. Extents are in position order for each slot; a slot that comes back, or shares, has a
    row that begins at the first position behind what it has.
    """

    batch_id: int  # from 0, without gaps
    rows: tuple[Row, ...]
    extents: tuple[Extent, ...] = ()  # newly allocated blocks
    frees: tuple[int, ...] = ()  # slots whose block tables are dropped
    swaps_out: tuple[Swap, ...] = ()  # in this order
    swaps_in: tuple[Swap, ...] = ()
    shared: tuple[Shared, ...] = ()  # of slots that begin behind what is there of their tokens
    copies: tuple[Copy, ...] = ()  # in this order
    deals: tuple[Deal, ...] = ()  # of each dealt row, all groups of its run in ascending order
    group: int | None = field(default=None, repr=False, compare=False)  # whose part it is; None of a whole batch
    chunks: tuple[Row, ...] = field(init=False, repr=False, compare=False)  # the rows that are no decodes

    def __post_init__(self) -> None:
        object.__setattr__(self, "chunks", tuple([row for row in self.rows if not row[3]]))  # hundreds, so by its place

    @property
    def moves(self) -> bool:
        """Whether blocks are swapped out or in."""
        return bool(self.swaps_out or self.swaps_in)

    def num_moved_blocks(self, group: int) -> int:
        """Blocks of a group that are swapped out or in."""
        return sum(swap.count for swap in (*self.swaps_out, *self.swaps_in) if swap.group == group)

    @property
    def num_tokens(self) -> int:
        """Query tokens over all rows; those that its group computes of a part."""
        group = self.group
        return self.num_decodes + sum(row.q_len if group is None else row.tokens_on(group) for row in self.chunks)

    @property
    def num_decodes(self) -> int:
        """Rows that decode, a token each; they come first."""
        return len(self.rows) - len(self.chunks)

    @property
    def groups(self) -> set[int]:
        """Groups on which it has rows."""
        return {group for row in self.rows for group in row.groups}

    def on_group(self, group: int) -> Batch:
        """It on another group: what the scheduler of a decode instance, which knows one group, calls group 0."""
        rows = tuple([row._replace(group=group) for row in self.rows])
        extents = tuple([extent._replace(group=group) for extent in self.extents])
        shared = tuple([one._replace(group=group) for one in self.shared])
        return replace(self, rows=rows, extents=extents, shared=shared)

    def part_of(self, group: int) -> Batch:
        """What concerns one group: its blocks, every freed slot, and its rows: those of it alone in their order, then
        those that it shares, by span, so that each of the span's groups has them adjacent and in one order; last those
        that are dealt."""
        own = (row for row in self.rows if row.concerns(group))
        rows = tuple(sorted(own, key=lambda row: (row.is_shared, row.is_dealt, row.span if row.is_shared else ())))
        dealt = {row.slot for row in rows if row.is_dealt} if self.deals else ()
        kinds: tuple[tuple[Any, ...], ...] = (self.extents, self.swaps_out, self.swaps_in, self.shared, self.copies)
        extents, out, back, shared, copies = (tuple(one for one in kind if one.group == group) for kind in kinds)
        deals = tuple(deal for deal in self.deals if deal.slot in dealt)
        return Batch(self.batch_id, rows, extents, self.frees, out, back, shared, copies, deals, group)

    def __str__(self) -> str:
        lines = [f"batch {self.batch_id}: {len(self.rows)} rows, {self.num_tokens} tokens"]
        lines += [f"  {one}" for one in (*self.rows, *self.extents)]
        lines += [f"  slot {slot} freed" for slot in self.frees]
        lines += [f"  {name}: {swap}" for name in ("out", "in") for swap in getattr(self, f"swaps_{name}")]
        lines += [f"  {one}" for one in (*self.shared, *self.copies, *self.deals)]
        return "\n".join(lines)

    def to_ints(self) -> array[int]:
        """The batch as flat int32: its id, the numbers of rows, frees, extents, ``swaps_out``, ``swaps_in``,
        ``shared``, ``copies`` and ``deals``, then each of these in turn.

        Raises:
            OverflowError: a number does not fit 32 bits.
        """
        parts: tuple[tuple[Any, ...], ...] = self.extents, self.swaps_out, self.swaps_in
        parts = *parts, self.shared, self.copies, self.deals
        out = array("i", (self.batch_id, len(self.rows), len(self.frees), *map(len, parts)))
        for row in self.rows:
            flags = _DECODE * row.is_decode + _SAMPLES * row.samples + _DEALT * row.is_dealt
            out.extend((row.slot, row.position, row.q_len, flags, row.group, row.num_groups))
        out.extend(self.frees)
        out.extend(chain.from_iterable(chain.from_iterable(parts)))
        return out

    @classmethod
    def from_ints(cls, ints: Sequence[int]) -> Batch:
        """The inverse of :meth:`to_ints`.

        Raises:
            ValueError: the length does not fit the numbers of what it has.
        """
        if len(ints) < _HEADER:
            raise ValueError(f"a batch has at least {_HEADER} integers, got {len(ints)}")
        batch_id, num_rows, num_frees, *counts = ints[:_HEADER]
        frees_at = _HEADER + _ROW * num_rows
        parts_at = frees_at + num_frees
        if min(num_rows, num_frees, *counts) < 0 or len(ints) != parts_at + _PART * sum(counts):
            raise ValueError(f"a batch with header {tuple(ints[:_HEADER])} cannot have {len(ints)} integers")
        rows = tuple(
            Row(slot, at, q_len, bool(flags & _DECODE), bool(flags & _SAMPLES), group, count, bool(flags & _DEALT))
            for slot, at, q_len, flags, group, count in _parts(ints[_HEADER:frees_at], _ROW)
        )
        parts, kinds = _parts(ints[parts_at:], _PART), (Extent, Swap, Swap, Shared, Copy, Deal)
        pairs = zip(kinds, counts, strict=True)
        found: list[Any] = [tuple(kind(*part) for part in islice(parts, count)) for kind, count in pairs]
        return cls(batch_id, rows, found[0], tuple(ints[frees_at:parts_at]), *found[1:])

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
