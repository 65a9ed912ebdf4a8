"""What one rank's kernels need to know of a step, made from the Batch by vectorised numpy.

:class:`Slots` is a rank's replica of the scheduler's block tables: by slot, which blocks lie here and how many tokens
they hold. :meth:`Slots.prepare` applies a batch to it and gathers a :class:`StepInput`; it touches host arrays alone,
so the next batch is prepared while this one computes. Nothing on a device refers to the arrays of the slots.

Legend: R rows of this rank's part of a batch, T their tokens, S rows after which a token is drawn here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from medha.attention.interface import AttentionRows, Ints, Pages
from medha.attention.staging import to_device
from medha.batch import Batch, Deal, Extent, Row, Swap, shifts
from medha.parallel.kvp import SharedDraw, shared_draws
from medha.worker.dealt import DealtRows, Move, dealt_rows, runs_of
from medha.worker.kv_cache import Run

_NO_INTS = np.empty(0, np.int64)
_NONE = np.empty(0, np.int32)
_FIRST_SLOTS = 64
_NEXT_DECODE = np.array([name == "position" for name in Row._fields], np.int64)  # what a row's next decode adds


@dataclass(slots=True)
class StepInput:
    """A batch on one rank, ready to run. Integers are int64 where nothing else is said."""

    batch: Batch  # the part that concerns this rank's group; its own rows, those of several groups, those dealt
    positions: Ints = field(default_factory=_NO_INTS.copy)  # of each token in its request [T]
    targets: Ints = field(default_factory=_NO_INTS.copy)  # pool token of each new key that is kept here
    kept: Ints | None = None  # index of those tokens among the T; None if they are all of them
    own: AttentionRows | None = None  # what the rows of this group alone attend to, if there are any
    shared: AttentionRows | None = None  # and those of several groups
    dealt: Sequence[DealtRows] = ()
    sends: list[Move] = field(default_factory=list)  # history that goes to other groups before dealt rows run,
    receives: list[Move] = field(default_factory=list)  # and comes from others
    decode_tokens: Ints = field(default_factory=_NO_INTS.copy)  # index of each decode's token among the T
    decode_slots: Ints = field(default_factory=_NO_INTS.copy)
    decode_ids: npt.NDArray[np.int32] = field(default_factory=_NONE.copy)  # their tokens, where the batch tells them
    drawn_rows: tuple[Row, ...] = ()  # after which a token is drawn on this group
    drawn_tokens: Ints = field(default_factory=_NO_INTS.copy)  # index of the last token of each of those [S]
    drawn_slots: Ints = field(default_factory=_NO_INTS.copy)
    shared_draws: Sequence[SharedDraw] = ()  # rows of several groups, this one's too
    swaps_out: Sequence[Run] = ()  # tokens that move to host memory, and back
    swaps_in: Sequence[Run] = ()
    copies: Sequence[Run] = ()  # tokens that move within the pool, in this order
    token_ids: npt.NDArray[np.int32] = field(default_factory=_NONE.copy)  # [T], on a rank that embeds some of a prompt


class Slots:
    """By slot, what a rank holds: the blocks, in order of arrival, and how many tokens are in them.

    With KV parallelism that is a shard of the request: adjacent positions whose keys and values this group took.
    """

    def __init__(self, block_size: int, group: int = 0) -> None:
        self.block_size = block_size  # in tokens
        self.group = group  # this rank's
        self.clear()

    def clear(self) -> None:
        """Forget every slot."""
        # tokens of each slot that lie here once the batches prepared so far have run
        self.held = np.zeros(_FIRST_SLOTS, np.int64)
        self._first = np.zeros(_FIRST_SLOTS, np.int64)  # position of the first of them
        self._num_blocks = np.zeros(_FIRST_SLOTS, np.int64)
        self._blocks: list[Pages] = [_NONE] * _FIRST_SLOTS  # with spare room behind
        # of the last step, if it had decodes alone: the columns that its rows have in the next one, and the step
        self._last: tuple[Ints, StepInput] | None = None

    def blocks(self, slot: int) -> Pages:
        """The blocks of a request that lie here, int32."""
        return self._blocks[slot][: self._num_blocks[slot]] if slot < len(self._blocks) else _NONE

    def prepare(self, batch: Batch) -> StepInput:
        """Apply the delta of this group's part of the next batch, and gather what its rows need.

        IndexError where a slot has not the blocks that a row needs.
        """
        step = StepInput(batch, swaps_out=self._runs(batch.swaps_out))
        for slot in batch.frees:
            self._last = None  # whoever gets the slot may have its first row here where the former one's next was due
            if slot < len(self.held):
                self._blocks[slot] = _NONE
                self._num_blocks[slot] = self.held[slot] = 0
        for shared in batch.shared:
            self._make_room(shared.slot + 1)
            self.held[shared.slot], self._first[shared.slot] = shared.num_tokens, shared.start
        for extent in batch.extents:
            self._append(extent)
        for row in batch.rows if batch.deals else ():
            if row.is_dealt:
                self._move(step, row, [deal for deal in batch.deals if deal.slot == row.slot])
        size = self.block_size
        step.copies = [(c.source * size, c.target * size, c.num_tokens) for c in batch.copies]
        step.swaps_in = self._runs(batch.swaps_in)
        if batch.rows:
            self._gather(step)
        return step

    def _make_room(self, num_slots: int) -> None:
        """Let there be so many slots."""
        if num_slots > len(self.held):
            more = max(num_slots - len(self.held), len(self.held))
            columns = self.held, self._first, self._num_blocks
            self.held, self._first, self._num_blocks = (np.pad(column, (0, more)) for column in columns)
            self._blocks += [_NONE] * more

    def _append(self, extent: Extent) -> None:
        self._make_room(extent.slot + 1)
        start, blocks = int(self._num_blocks[extent.slot]), self._blocks[extent.slot]
        end = self._num_blocks[extent.slot] = start + extent.count
        if end > len(blocks):
            blocks = self._blocks[extent.slot] = np.resize(blocks, max(end, 2 * start))
        blocks[start:end] = np.arange(extent.first, extent.first + extent.count)

    def _move(self, step: StepInput, row: Row, deals: Sequence[Deal]) -> None:
        """Take off a request's table here what goes to other groups before its dealt row runs, and give what comes its
        place behind what is here."""
        slot, own = row.slot, deals[self.group - row.group]
        self._make_room(slot + 1)
        if self.held[slot] != own.held:
            raise ValueError(f"slot {slot} has {self.held[slot]} tokens on group {self.group}, not {own.held}")
        end = own.held
        for source, target, count in shifts(deals):
            if self.group == source:
                end -= count
                step.sends.append(Move(target, self.tokens(slot, end, end + count), count))
            elif self.group == target:
                step.receives.append(Move(source, self.tokens(slot, end, end + count), count))
                end += count
        kept = -(-(own.share + row.tokens_on(self.group)) // self.block_size)
        self._num_blocks[slot] = min(self._num_blocks[slot], kept)
        self.held[slot] = own.share
        self._first[slot] = row.position - own.share  # as if what is here were adjacent positions before the row

    def tokens(self, slot: int, start: int, end: int) -> list[Run]:
        """Pool tokens of some of a slot's tokens here, and where they lie in a buffer of these."""
        at = np.arange(start, end)
        blocks = self.blocks(slot)
        if end > len(blocks) * self.block_size:
            raise IndexError(f"slot {slot} has {len(blocks)} blocks, {end} tokens are to lie there")
        return runs_of(blocks[at // self.block_size] * np.int64(self.block_size) + at % self.block_size)

    def _gather(self, step: StepInput) -> None:
        batch, last, self._last = step.batch, self._last, None
        flat = np.fromiter(chain.from_iterable(batch.rows), np.int64, len(Row._fields) * len(batch.rows))
        columns = flat.reshape(len(batch.rows), -1)
        is_next = last is not None and np.array_equal(columns, last[0]) and not batch.swaps_in
        if last is None or not is_next or not self._go_on(step, last[1]):
            self._gather_anew(step, columns)
        if len(step.decode_slots) == len(batch.rows):
            self._last = columns + _NEXT_DECODE, step

    def _gather_anew(self, step: StepInput, columns: Ints) -> None:
        rows, size = step.batch.rows, self.block_size
        slot, position, q_len, is_decode, samples, group, num_groups, is_dealt = columns.T
        self._make_room(1 + int(slot.max()))
        is_writer = (group + num_groups - 1 == self.group) | (is_dealt > 0)
        dealt = np.flatnonzero(is_dealt).tolist()  # the last rows
        if dealt:
            q_len = q_len.copy()
            q_len[dealt] = [rows[row].tokens_on(self.group) for row in dealt]
        begins = is_writer & (self.held[slot] == 0)  # also behind what is swapped in, which lies on one group
        self._first[slot[begins]] = (position * (num_groups > 1))[begins]
        before = np.where(is_writer, position - self._first[slot], self.held[slot])
        kv_len = before + q_len * is_writer
        self.held[slot] = kv_len
        room = self._num_blocks[slot] * size
        if (lacks := room < kv_len).any():
            row = int(lacks.argmax())
            raise IndexError(f"slot {slot[row]} has blocks for {room[row]} tokens, {kv_len[row]} are to lie there")
        tables = [self._blocks[one] for one in slot.tolist()]

        num_own = int((num_groups == 1).sum())
        parts = [
            AttentionRows.of(q_len[at], kv_len[at], is_writer[at], tables[at], size) if len(slot[at]) else None
            for at in (slice(num_own), slice(num_own, len(rows) - len(dealt)))
        ]
        step.own, step.shared = parts

        ends = np.cumsum(q_len)
        token, first = np.arange(ends[-1]), ends - q_len
        step.positions = np.repeat(position - first, q_len) + token
        pages = [part.pages for part in parts if part is not None]
        for row in dealt:
            spans = [np.arange(span.start, span.stop) for span in rows[row].spans(self.group)]
            step.positions[first[row] : ends[row]] = np.concatenate(spans)
            pages.append(tables[row][: -(-kv_len[row] // size)])
            self._first[slot[row]] = rows[row].kv_len - kv_len[row]
        if dealt:
            step.dealt = dealt_rows(step.batch, {rows[row].slot: tables[row] for row in dealt}, size)
        page_start = np.cumsum(counts := -(-kv_len // size)) - counts
        is_kept = slice(None) if is_writer.all() else np.repeat(is_writer, q_len)
        local = (np.repeat(before - first, q_len) + token)[is_kept]
        at = np.repeat(page_start, q_len)[is_kept] + local // size
        step.targets = np.concatenate(pages)[at] * np.int64(size) + local % size
        step.kept = None if isinstance(is_kept, slice) else np.flatnonzero(is_kept)
        step.decode_tokens, step.decode_slots = first[is_decode > 0], slot[is_decode > 0]
        drawn = np.flatnonzero((samples > 0) & (group == self.group))
        step.drawn_rows = _rows_at(rows, drawn)
        step.drawn_tokens, step.drawn_slots = ends[drawn] - 1, slot[drawn]
        step.shared_draws = shared_draws(step.batch) if step.shared is not None else ()

    def _go_on(self, step: StepInput, before: StepInput) -> bool:
        """Gather a step whose rows are the next decodes of those of the step before: what did not change is the same
        arrays, which nobody changes. False where a block is missing."""
        slots, targets = before.decode_slots, before.targets + 1
        grows = np.concatenate([part.causal for part in (before.own, before.shared) if part is not None])
        if (grows & (self.held[slots] >= self._num_blocks[slots] * self.block_size)).any():
            return False
        self.held[slots] += grows
        num_own = 0 if before.own is None else len(before.own)  # rows, all of which grow here
        step.own, step.shared = (
            None if part is None else self._grown(part, slots[at], targets[at])
            for part, at in ((before.own, slice(num_own)), (before.shared, slice(num_own, None)))
        )
        step.positions, step.targets, step.kept = before.positions + 1, targets, before.kept
        step.decode_tokens, step.decode_slots = before.decode_tokens, before.decode_slots
        step.drawn_rows = _rows_at(step.batch.rows, before.drawn_tokens)
        step.drawn_tokens, step.drawn_slots = before.drawn_tokens, before.drawn_slots
        step.shared_draws = before.shared_draws
        return True

    def _grown(self, part: AttentionRows, slots: Ints, targets: Ints) -> AttentionRows:
        """Decodes with a key more where they grow here; where that begins a block it is put into ``targets``."""
        size, pages, page_indptr = self.block_size, part.pages, part.page_indptr
        begins = np.flatnonzero(part.causal & (part.kv_len % size == 0))  # rows whose last block is full
        if len(begins):
            places = zip(slots[begins].tolist(), (part.kv_len[begins] // size).tolist(), strict=True)
            new = np.array([self._blocks[slot][i] for slot, i in places], np.int32)
            pages = np.insert(pages, page_indptr[begins + 1], new)
            page_indptr = page_indptr + np.searchsorted(begins, np.arange(len(page_indptr)))
            targets[np.cumsum(part.causal)[begins] - 1] = new * np.int64(size)
        return AttentionRows(part.q_indptr, part.kv_len + part.causal, part.causal, size, pages, page_indptr)

    def _runs(self, swaps: Sequence[Swap]) -> list[Run]:
        """The tokens that move with a batch's swaps."""
        size = self.block_size
        return [(s.first * size, s.host_first * size, s.count * size) for s in swaps]


def _rows_at(rows: tuple[Row, ...], at: Ints) -> tuple[Row, ...]:
    return rows if len(at) == len(rows) else tuple([rows[row] for row in at.tolist()])


@dataclass(frozen=True, slots=True)
class DeviceStep:
    """The arrays of a :class:`StepInput` on the device, and where its new keys and values go."""

    targets: torch.Tensor  # pool token of each new key that is kept here
    positions: torch.Tensor
    token_ids: torch.Tensor
    decode_tokens: torch.Tensor
    decode_slots: torch.Tensor
    drawn_tokens: torch.Tensor
    drawn_slots: torch.Tensor
    kept: torch.Tensor | None = None  # batch token of each new key that is kept here; None if they are all

    @classmethod
    def of(cls, step: StepInput, device: torch.device) -> DeviceStep:
        """Send a step in one copy, with the page tables of its rows."""
        rows = (step.decode_tokens, step.decode_slots, step.drawn_tokens, step.drawn_slots)
        arrays: list[npt.NDArray[Any]] = [step.targets, step.positions, step.token_ids, *rows]
        arrays += [] if step.kept is None else [step.kept]
        dealt = [seen for rows in step.dealt for seen in rows.seen]
        parts = [part for part in (step.own, step.shared, *dealt) if part is not None]
        sent = iter(to_device([*(part.pages for part in parts), *arrays], device))
        for part in parts:
            part.device_pages = next(sent)
        return cls(*sent)
