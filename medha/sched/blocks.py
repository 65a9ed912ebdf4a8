"""The KV block pool: who holds which blocks of the paged cache, as runs of adjacent blocks.

A request's block table is a short list of extents rather than a list of blocks, so that attention reads a long context
in a few long slices. To keep it short, the first block of a request is placed in the smallest free run that holds its
whole reservation, and the rest of that run is *promised* to it. A promise is not an allocation: when nothing else is
free, half of the longest promise is given away, so no request is refused because of one. How many blocks a request
may take in all is :mod:`medha.sched.memory`'s affair.

The host has pools too. There blocks are kept of requests that are swapped out and of prefixes (:class:`HostBlocks`).
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby, islice, takewhile

from medha.batch import Extent, Swap, append_extent

_NOBODY = -1  # a slot


@dataclass(slots=True)
class _Holding:
    """Blocks of one slot: the extents it holds and the promise [next, end) that follows the last of them."""

    extents: list[tuple[int, int]] = field(default_factory=list)
    next: int = 0
    end: int = 0


def cut(runs: Sequence[tuple[int, int]], start: int, end: int) -> Iterator[tuple[int, int]]:
    """Of blocks in runs (first, count), those from the ``start``-th on, before the ``end``-th."""
    for first, count in runs:
        if (at := max(start, 0)) < (to := min(count, end)):
            yield first + at, to - at
        start, end = start - count, end - count


def blocks_of(runs: Iterable[tuple[int, int]]) -> Iterator[int]:
    """The blocks of runs (first, count)."""
    return (block for first, count in runs for block in range(first, first + count))


def facing(group: int, blocks: Iterable[int], host_blocks: Iterable[int]) -> list[Swap]:
    """Blocks, and the host block of each, as swaps."""
    pairs = enumerate(zip(blocks, host_blocks, strict=True))
    adjacent = groupby(pairs, key=lambda one: (one[1][0] - one[0], one[1][1] - one[0]))
    runs = ([pair for _, pair in run] for _, run in adjacent)
    return [Swap(group, *run[0], len(run)) for run in runs]


class BlockPool:
    """Places blocks 0 to ``num_blocks`` - 1 of a KV-parallel group for slots."""

    def __init__(self, num_blocks: int, group: int = 0) -> None:
        self.num_blocks = num_blocks
        self.group = group
        self.num_used = 0
        self._free: list[tuple[int, int]] = [(0, num_blocks)]  # sorted [first, end), neither held nor promised
        self._holdings: dict[int, _Holding] = {}

    @property
    def num_free(self) -> int:
        """Blocks not in use; promised ones count as free."""
        return self.num_blocks - self.num_used

    def num_open(self, slot: int) -> int:
        """Free blocks that are promised to nobody else."""
        return self.num_free - sum(held.end - held.next for other, held in self._holdings.items() if other != slot)

    def allocate(self, slot: int, count: int, *, reserved: int) -> list[Extent]:
        """Give ``slot`` ``count`` more blocks, adjacent to its last ones where possible; in position order.

        ``reserved`` is how many blocks, these included, it may still ask for: the promise is made for so many.
        """
        if count > self.num_free:
            raise RuntimeError(f"slot {slot} asks for {count} KV blocks, {self.num_free} are free")
        holding = self._holdings.setdefault(slot, _Holding())
        new: list[Extent] = []
        while count > 0:
            if holding.next == holding.end:
                self._find_run(holding, max(reserved, count))
            take = min(count, holding.end - holding.next)
            new.append(Extent(slot, holding.next, take, self.group))
            append_extent(holding.extents, holding.next, take)
            holding.next += take
            self.num_used += take
            count -= take
            reserved -= take
        return new

    def take(self, count: int) -> list[int]:
        """``count`` blocks for nobody, adjacent where possible, which :meth:`free` takes back."""
        extents = self.allocate(_NOBODY, count, reserved=count)
        self.release(_NOBODY, kept=count)
        return list(blocks_of((extent.first, extent.count) for extent in extents))

    def runs(self, slot: int, start: int, end: int) -> Iterator[tuple[int, int]]:
        """The blocks of ``slot`` from the ``start``-th on, before the ``end``-th, as (first, count)."""
        return cut(self._holdings[slot].extents, start, end)

    def release(self, slot: int, *, kept: int = 0) -> None:
        """Take back every block of ``slot`` but its first ``kept``, which :meth:`free` takes."""
        if slot in self._holdings:
            for run in self.cut_off(slot, kept):
                self.free(*run)
            del self._holdings[slot]

    def cut_off(self, slot: int, kept: int) -> list[tuple[int, int]]:
        """Take from ``slot`` all blocks but its first ``kept``, in runs that :meth:`free` takes, and its promise."""
        holding = self._holdings[slot]
        gone = list(cut(holding.extents, kept, self.num_blocks))
        holding.extents = list(cut(holding.extents, 0, kept))
        self._put_back(holding.next, holding.end)
        holding.next = holding.end = sum(holding.extents[-1]) if holding.extents else 0
        return gone

    def free(self, first: int, count: int) -> None:
        """Take back adjacent blocks."""
        self.num_used -= count
        self._put_back(first, first + count)

    def _find_run(self, holding: _Holding, want: int) -> None:
        """Set the promise of ``holding`` to a new run of up to ``want`` blocks."""
        if not self._free:
            self._break_promise(holding)
            return

        def order(run: tuple[int, int]) -> tuple[bool, bool, int]:
            """The adjacent one, else the smallest that is long enough, else the longest."""
            length = run[1] - run[0]
            return not (holding.extents and run[0] == holding.next), length < want, abs(length - want)

        first, end = min(self._free, key=order)
        self._free.remove((first, end))
        holding.next, holding.end = first, min(end, first + want)
        if holding.end < end:
            insort(self._free, (holding.end, end))

    def _break_promise(self, holding: _Holding) -> None:
        """Hand the second half of the longest promise to ``holding``."""
        victim = max(self._holdings.values(), key=lambda h: h.end - h.next)
        assert victim.next < victim.end, "a free block is in no run and no promise"
        cut = victim.next + (victim.end - victim.next) // 2
        holding.next, holding.end, victim.end = cut, victim.end, cut

    def _put_back(self, first: int, end: int) -> None:
        """Return [first, end) to the free runs, merging it with its neighbours."""
        if first == end:
            return
        i = bisect_left(self._free, (first, end))
        if i < len(self._free) and self._free[i][0] == end:
            end = self._free.pop(i)[1]
        if i > 0 and self._free[i - 1][1] == first:
            i -= 1
            first = self._free.pop(i)[0]
        self._free.insert(i, (first, end))


class HostBlocks:
    """What a host pool keeps: blocks of requests that are swapped out, and where these leave room those of prefixes, by
    id. Of prefixes those that came first go, the end of one first, and what waiting requests count on last, and for
    swapped requests alone.

    Attributes:
        swapped: the blocks of requests, by slot.
    """

    def __init__(self, pool: BlockPool) -> None:
        self.pool = pool
        self.swapped: dict[int, list[int]] = {}
        self._blocks: dict[bytes, int] = {}  # in the order in which they go
        self.counted_on: dict[bytes, dict[int, None]] = {}  # slots of waiting requests, by id
        self.stale: dict[int, None] = {}  # of these, whose blocks have gone

    @property
    def num_free(self) -> int:
        """Blocks of the pool that are free, or can be."""
        return self.pool.num_free + len(self._blocks)

    def make_free(self, count: int) -> None:
        """Let blocks of prefixes go until so many are free; there are as many."""
        going = (one for last in (False, True) for one in self._blocks if (one in self.counted_on) == last)
        self.free(self.take(list(islice(going, max(count - self.pool.num_free, 0)))))

    def free(self, blocks: Iterable[int]) -> None:
        """Take back blocks that are kept no more."""
        for block in blocks:
            self.pool.free(block, 1)

    def run(self, ids: Iterable[bytes]) -> tuple[bytes, ...]:
        """The ids up to the first whose block is not here."""
        return tuple(takewhile(self._blocks.__contains__, ids)) if self._blocks else ()

    def swap(self, slot: int, blocks: list[int]) -> list[Swap]:
        """Keep the blocks of a request, whatever has to go for them."""
        self.make_free(len(blocks))
        self.swapped[slot] = self.pool.take(len(blocks))
        return facing(self.pool.group, blocks, self.swapped[slot])

    def put(self, blocks: dict[bytes, int]) -> list[Swap]:
        """Keep a group's blocks by their ids, in position order, the first ones where there is not room for all."""
        self.free(self.take([one for one in blocks if one in self._blocks]))
        num_kept = len(self.counted_on.keys() & self._blocks.keys())
        new = list(islice(blocks, self.num_free - num_kept))
        self.make_free(len(new))
        hosts = self.pool.take(len(new))
        self._blocks |= reversed(list(zip(new, hosts, strict=True)))
        return facing(self.pool.group, (blocks[one] for one in new), hosts)

    def take(self, ids: Iterable[bytes]) -> list[int]:
        """The blocks of ids, which are the caller's to free."""
        for one in (ids := list(ids)):
            self.stale.update(self.counted_on.get(one, {}))
        return [self._blocks.pop(one) for one in ids]
