"""The prefix cache: blocks of KV that outlive their request, found by what their tokens are.

The scheduler knows no token. A request brings a :class:`Chain`: one id for each further ``unit`` of its tokens, which
names everything up to there (:mod:`medha.engine.prefix` makes them, a trace brings its own). Two requests with the same
id have the same tokens up to it, so what one has computed is good for the other.

A block is known by the ids that end in it. It counts its holders; without any it stays until its memory is wanted, and
counts as free until then. A hit is the run of whole blocks from the first token on, which are shared where they lie,
and of the block behind them the units that are the same, which are copied. A block is only ever dropped with all that
was computed behind it, so what is known of a chain is always its beginning, and a lookup halves its way to the end.

What goes first is the end of some chain: with ``value`` the one of least predicted seconds saved, which are the seconds
to compute the block, more the deeper it lies, times how often it was used, aged by what went before (GreedyDual with
frequency: Cherkasova 1998); with ``lru`` the one used least recently. Blocks that a waiting request counts on go last.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush

from medha.sched.blocks import BlockPool

ID_BYTES = 16
_UNIT = 16
_SLACK = 64


def unit_tokens(block_size: int) -> int:
    """Tokens of one id: 16, or those of a block that is no multiple of that."""
    return _UNIT if block_size % _UNIT == 0 else block_size


class Chain:
    """The ids of a request: ``chain[n]`` names its first n units."""

    def __init__(self, ids: bytes) -> None:
        self._ids = ids
        self._more = bytearray()
        self._num_given = len(ids) // ID_BYTES

    def __len__(self) -> int:
        return self._num_given + len(self._more) // ID_BYTES

    def __getitem__(self, num_units: int) -> bytes:
        if num_units <= self._num_given:
            return self._ids[(num_units - 1) * ID_BYTES : num_units * ID_BYTES]
        end = (num_units - self._num_given) * ID_BYTES
        return bytes(self._more[end - ID_BYTES : end])

    def extend(self, ids: bytes) -> None:
        """Units that its output has filled."""
        self._more += ids

    def num_common(self, other: Chain) -> int:
        """Units from the first on that are the same in another."""
        least = min(len(self), len(other))
        return bisect_left(range(1, least + 1), True, key=lambda n: self[n] != other[n])


@dataclass(slots=True, eq=False)
class Block:
    """A block of which some ids are known, or which a request still holds."""

    group: int
    number: int
    parent: Block | None  # that before it; None for the first
    depth: int  # blocks before it
    owner: int | None  # the slot that computes it, while that holds it
    num_holders: int = 1
    is_pinned: bool = False  # it does not come back when its owner ends
    is_known: bool = True
    ids: list[bytes] = field(default_factory=list)  # by which it is known
    children: set[Block] = field(default_factory=set)
    counted_on: set[int] = field(default_factory=set)  # slots of waiting requests
    num_uses: int = 1
    last_use: float = 0.0  # when it was let go of last, as the key counts time
    key: float = 0.0  # the lower, the sooner it goes
    entry: int = -1  # its latest among those that may go


_Entry = tuple[float, int, Block]


@dataclass(frozen=True, slots=True)
class Hit:
    """What is there of a request's tokens."""

    blocks: tuple[Block, ...] = ()  # whole, in position order
    tail: Block | None = None  # the one behind them has some units that are the same
    tail_tokens: int = 0

    def num_tokens(self, block_size: int) -> int:
        """Tokens that need not be computed."""
        return len(self.blocks) * block_size + self.tail_tokens


class PrefixCache:
    """Blocks by the ids of the prefixes that end in them.

    Args:
        pools: by group; blocks that go are given back to them.
        cost_s: predicted seconds to compute a block with so many blocks before it.
        eviction: ``lru`` or ``value``.

    Attributes:
        num_idle: by group, blocks that nobody holds; they count as free.
        num_pinned: by group, blocks that are held and do not come back with one request's end.
        stale: slots of waiting requests of which more is there by now, or less.
    """

    def __init__(
        self, pools: list[BlockPool], block_size: int, *, cost_s: Callable[[int], float], eviction: str = "lru"
    ) -> None:
        self.unit = unit_tokens(block_size)
        self.block_size = block_size
        self.units_per_block = block_size // self.unit
        self.num_idle = [0] * len(pools)
        self.num_pinned = [0] * len(pools)
        self.stale: dict[int, None] = {}
        self._pools = pools
        self._cost_s = cost_s
        self._is_lru = eviction == "lru"
        self._known: dict[bytes, Block] = {}
        self._heaps: list[list[_Entry]] = [[] for _ in pools]  # ends of chains that may go
        self._spared: list[list[_Entry]] = [[] for _ in pools]  # those counted on when their turn came
        self._num_entries = 0
        self._clock = 0.0  # the key of what went last
        self._waits_for: dict[bytes, set[int]] = {}  # slots whose hit grows with an id
        self._watched: dict[int, tuple[Block | None, bytes | None]] = {}

    # -- what is there -----------------------------------------------------------------------------------------------

    def lookup(self, chain: Chain, most_tokens: int) -> Hit:
        """What is there of the first ``most_tokens`` of a chain."""
        end, tail, num_units = self.end_of(chain, most_tokens)
        blocks: list[Block] = []
        while end is not None:
            blocks.append(end)
            end = end.parent
        tokens = (num_units - len(blocks) * self.units_per_block) * self.unit
        return Hit(tuple(reversed(blocks)), tail, tokens if tail is not None else 0)

    def end_of(self, chain: Chain, most_tokens: int) -> tuple[Block | None, Block | None, int]:
        """The last whole block, the block behind it of which some units are the same, and the units of both."""
        known, size = self._known, self.units_per_block
        most = min(len(chain), most_tokens // self.unit)
        if not known or not most:
            return None, None, 0
        whole = bisect_left(range(1, most // size + 1), True, key=lambda n: chain[n * size] not in known)
        end = known[chain[whole * size]] if whole else None
        for units in range(min(most, whole * size + size), whole * size, -1):
            if (tail := known.get(chain[units])) is not None:
                return end, tail, units
        return end, None, whole * size

    def watch(self, slot: int, chain: Chain, most_tokens: int) -> int:
        """Tokens that are there for a waiting request, which is ``stale`` as soon as that changes."""
        self.forget(slot)
        end, tail, num_units = self.end_of(chain, most_tokens)
        last = tail or end
        if last is not None:
            last.counted_on.add(slot)
        wanted = (
            chain[num_units + 1] if (num_units + 1) * self.unit <= min(most_tokens, len(chain) * self.unit) else None
        )
        if wanted is not None:
            self._waits_for.setdefault(wanted, set()).add(slot)
        self._watched[slot] = last, wanted
        return num_units * self.unit

    def forget(self, slot: int) -> None:
        """Watch for a request no more."""
        last, wanted = self._watched.pop(slot, (None, None))
        self.stale.pop(slot, None)
        if last is not None:
            last.counted_on.discard(slot)
            if not last.counted_on and last.is_known and not last.num_holders:
                self._may_go(last)
        if wanted is not None and (slots := self._waits_for.get(wanted)) is not None:
            slots.discard(slot)
            if not slots:
                del self._waits_for[wanted]

    # -- what a request computes -------------------------------------------------------------------------------------

    def note(self, block: Block | None, ids: Iterable[bytes], new: Callable[[], Block]) -> Block | None:
        """A block that is being filled is known by further ids, where no other is: ``new`` makes it at the first."""
        for one in ids:
            if one in self._known:
                continue
            if block is None:
                block = new()
                if block.parent is not None:
                    block.parent.children.add(block)
            self._known[one] = block
            block.ids.append(one)
            if self._waits_for and (slots := self._waits_for.get(one)) is not None:
                self.stale.update(dict.fromkeys(slots))
        return block

    def known(self, one: bytes) -> Block | None:
        """The block that an id names."""
        return self._known.get(one)

    # -- who holds it ------------------------------------------------------------------------------------------------

    def hold(self, block: Block) -> int | None:
        """One more request holds a block; returns the slot that had it for itself until now."""
        was_private = None
        if not block.is_pinned:
            self.num_pinned[block.group] += 1
            block.is_pinned = True
            was_private = block.owner
        if not block.num_holders:
            self.num_idle[block.group] -= 1
        block.num_holders += 1
        return was_private

    def used(self, blocks: Iterable[Block]) -> None:
        """Count a use of blocks."""
        for block in blocks:
            block.num_uses += 1

    def let_go(self, block: Block, slot: int) -> int | None:
        """A request holds a block no more; returns the slot that has it for itself from now on."""
        block.num_holders -= 1
        block.last_use = float(self._num_entries) if self._is_lru else self._clock
        if block.owner == slot:
            block.owner = None
        has_it = None
        if block.is_pinned and (not block.num_holders or (block.num_holders == 1 and block.owner is not None)):
            self.num_pinned[block.group] -= 1
            block.is_pinned, has_it = False, block.owner
        if not block.num_holders:
            if block.is_known:
                self.num_idle[block.group] += 1
                self._may_go(block)
            else:
                self._pools[block.group].free(block.number)
        return has_it

    # -- what goes ---------------------------------------------------------------------------------------------------

    def make_free(self, group: int, num_blocks: int) -> None:
        """Let blocks that nobody holds go until so many are free; there are as many."""
        pool, heap, spared = self._pools[group], self._heaps[group], self._spared[group]
        behind: list[Block] = []
        while pool.num_free < num_blocks:
            if heap or spared:
                is_spared = not heap
                entry = heappop(heap or spared)
                block = entry[2]
                if not self._is_valid(entry):
                    continue
                if block.counted_on and not is_spared:
                    self._push(spared, entry)
                    continue
            else:  # behind what is left lies only what others compute for themselves
                if not behind:
                    idle = {b for b in self._known.values() if b.group == group and not b.num_holders}
                    behind = sorted(idle, key=lambda b: b.depth)
                block = behind.pop()
                if not block.is_known:
                    continue
            self._clock = max(self._clock, block.key)
            self._drop(block)

    def clear(self) -> None:
        """Forget everything; what requests hold stays theirs."""
        for block in list(self._known.values()):
            if block.is_known and block.parent is None:
                self._drop(block)

    def _may_go(self, block: Block) -> None:
        """Put a block that nobody holds among those that may go, if nothing is known behind it."""
        if block.children:
            return
        self._num_entries += 1
        block.entry = self._num_entries
        block.key = block.last_use + (0.0 if self._is_lru else block.num_uses * self._cost_s(block.depth))
        self._push(self._heaps[block.group], (block.key, block.entry, block))

    def _push(self, heap: list[_Entry], entry: _Entry) -> None:
        if len(heap) > 2 * self.num_idle[entry[2].group] + _SLACK:  # most entries are of blocks that were used again
            heap[:] = [entry for entry in heap if self._is_valid(entry)]
            heapify(heap)
        heappush(heap, entry)

    def _is_valid(self, entry: _Entry) -> bool:
        """Whether what lies in a heap is of now."""
        _, number, block = entry
        return number == block.entry and block.is_known and not block.num_holders and not block.children

    def _drop(self, block: Block) -> None:
        """A block, and all behind it, is known no more; what nobody holds is free."""
        drop = [block]
        if (parent := block.parent) is not None:
            parent.children.discard(block)
        while drop:
            block = drop.pop()
            drop += block.children
            block.children.clear()
            block.is_known, block.parent = False, None
            for one in block.ids:
                del self._known[one]
            block.ids.clear()
            self.stale.update(dict.fromkeys(block.counted_on))
            if not block.num_holders:
                self.num_idle[block.group] -= 1
                self._pools[block.group].free(block.number)
        if parent is not None and parent.is_known and not parent.num_holders:
            self._may_go(parent)
