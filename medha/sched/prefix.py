"""The prefix cache: blocks of KV that outlive their request, found by what their tokens are.

The scheduler knows no token. A request brings a :class:`Chain`: one id for each further ``unit`` of its tokens, which
names everything up to there (:mod:`medha.engine.prefix` makes them, a trace brings its own). Two requests with the same
id have the same tokens up to it, so what one has computed is good for the other.

What one request computes on one group is a :class:`Path` of blocks, which begins behind what it shares, its path on the
group before, or at the first token. Who shares it holds it up to some block. What nobody holds of it stays until its
memory is wanted, and counts as free until then. A hit is the run of whole blocks from the first token on, which are
shared where they lie, and of the block behind them the units that are the same, which are copied. A block is only ever
dropped with all that was computed behind it, so what is known of a chain is its beginning, and a lookup halves its way
to the end. With several groups it may be there more than once, known by the group on which it begins. Where two compute
the same on one at once the ids name the blocks of the first; when those go the beginning of the other's is known no
more, and a lookup may find less than there is. All but the ids is done by paths, not by blocks: a hit of 10M tokens in
the pools is held as quickly as a short one.

What goes first is the end of the path that was used least recently. Blocks that a waiting request counts on go last.

Where the host has memory, whole blocks that go are moved there if that is predicted to pay. A request finds them
behind what is in the pools, and its first batch moves them into blocks of its own, as if it had computed them.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Set
from dataclasses import KW_ONLY, dataclass, field
from functools import partial
from heapq import heapify, heappop, heappush
from typing import Any

from medha.batch import Swap, append_extent
from medha.config import SchedulerConfig
from medha.sched.blocks import BlockPool, HostBlocks, blocks_of, cut

ID_BYTES = 16
_UNIT = 16
_SLACK = 64


class Chain:
    """The ids of a request: ``chain[n]`` names its first n units."""

    def __init__(self, ids: bytes) -> None:
        self._ids = ids

    def __len__(self) -> int:
        return len(self._ids) // ID_BYTES

    def __getitem__(self, num_units: int) -> bytes:
        return self._ids[(num_units - 1) * ID_BYTES : num_units * ID_BYTES]

    def extend(self, ids: bytes) -> None:
        """Units that its output has filled."""
        self._ids += ids

    def num_common(self, other: Chain) -> int:
        """Units from the first on that are the same in another."""
        return bisect_left(range(1, min(len(self), len(other)) + 1), True, key=lambda n: self[n] != other[n])


_Marks = dict[Any, dict[Any, None]]  # slots or paths, by block or id


def _mark(marks: _Marks, at: object, what: object) -> None:
    marks.setdefault(at, {})[what] = None


def _unmark(marks: _Marks, at: object, what: object) -> None:
    marks.get(at, {}).pop(what, None)
    if not marks.get(at):
        marks.pop(at, None)


@dataclass(slots=True, eq=False)
class Path:
    """Adjacent blocks of a chain that one request computes on one group. Blocks are counted from the chain's first."""

    group: int
    start: int  # blocks before its first
    parent: Path | None  # that which has those; None where there are none
    owner: int | None  # the slot that computes it, while that holds all of it
    root: int = field(init=False)  # the group of the chain's first block
    end: int = field(init=False)  # blocks up to its end
    held: int = field(init=False)  # up to which block somebody holds it
    shared: int = field(init=False)  # up to which block somebody else than its owner does
    runs: list[tuple[int, int]] = field(default_factory=list)  # its blocks in the pool
    ids: list[bytes] = field(default_factory=list)  # of its units; those that were known name blocks of other paths
    holders: _Marks = field(default_factory=dict)  # slots that share it up to a block
    children: _Marks = field(default_factory=dict)  # paths that begin at a block
    counted_on: _Marks = field(default_factory=dict)  # slots of waiting requests whose hit ends at a block
    steps: list[tuple[float, int, int]] = field(default_factory=lambda: [(math.inf, 0, 0)])
    """(up to which block, when it was let go of last by the entries so far, how often it was used)"""
    entry: int = -1  # its latest among those that may go

    def __post_init__(self) -> None:
        self.end = self.held = self.shared = self.start
        self.root = self.group if self.parent is None else self.parent.root
        if self.parent is not None:
            _mark(self.parent.children, self.start, self)

    @property
    def kept(self) -> int:
        """Up to which block it stays: somebody holds it, or something on its group lies behind."""
        behind = (at for at, paths in self.children.items() if any(path.group == self.group for path in paths))
        return max(self.held, max(behind, default=self.start))

    def up_to(self, end: int) -> tuple[tuple[Path, int], ...]:
        """What it lies behind, and its own blocks, up to some block: paths in position order, and where each ends."""
        parts = list[tuple[Path, int]]()
        path: Path | None = self
        while path is not None:
            if path.start < end:
                parts.append((path, end))
            end, path = path.start, path.parent
        return tuple(reversed(parts))

    def held_without(self, gone: Set[int]) -> int:
        """Up to which block somebody holds it who is none of some slots."""
        if self.owner is not None and self.owner not in gone:
            return self.end
        return max((end for end, slots in self.holders.items() if not slots.keys() <= gone), default=self.start)

    def blocks(self, start: int, end: int) -> Iterator[tuple[int, int]]:
        """Some of its blocks as runs (first, count)."""
        return cut(self.runs, start - self.start, end - self.start)


_Entry = tuple[bool, int, int, Path]


@dataclass(frozen=True, slots=True)
class Hit:
    """What is there of a request's tokens."""

    parts: tuple[tuple[Path, int], ...] = ()  # whole blocks in position order: a path, and up to which block
    tail: Path | None = None  # whose next block has some units that are the same
    tail_tokens: int = 0
    host_group: int = 0
    host_ids: tuple[bytes, ...] = ()  # of whole blocks that are on the host of one group, behind the parts

    @property
    def num_blocks(self) -> int:
        """Whole blocks in the pools."""
        return self.parts[-1][1] if self.parts else 0

    def num_tokens(self, block_size: int) -> int:
        """Tokens that need not be computed."""
        return (self.num_blocks + len(self.host_ids)) * block_size + self.tail_tokens

    @property
    def shards(self) -> list[tuple[int, int]]:
        """Its groups in position order, each with the blocks before it."""
        starts = [(path.group, path.start) for path, _ in self.parts]
        if self.tail is not None:
            starts.append((self.tail.group, self.num_blocks))
        elif self.host_ids:
            starts.append((self.host_group, self.num_blocks))
        return [one for i, one in enumerate(starts) if not i or one[0] != starts[i - 1][0]]


@dataclass(eq=False, repr=False)
class PrefixCache:
    """Paths by the ids of the prefixes that end in them, and the group on which these begin.

    Args:
        pools: by group; blocks that go are given back to them.
        hosts: by group, what is on the host; none where it has no memory.
        cost_s: predicted seconds to compute a block with so many blocks before it.

    Attributes:
        unit: tokens of one id: 16, or those of a block that is no multiple of that.
        num_idle: by group, blocks that nobody holds; they count as free.
        num_pinned: by group, blocks that are held and do not come back with one request's end.
        stale: slots of waiting requests of which more is there by now, or less.
        swaps_out: what the next batch copies there.
    """

    config: SchedulerConfig
    pools: list[BlockPool]
    hosts: list[HostBlocks]
    _: KW_ONLY
    block_size: int
    cost_s: Callable[[int], float]

    def __post_init__(self) -> None:
        self.unit = _UNIT if self.block_size % _UNIT == 0 else self.block_size
        self.units_per_block = self.block_size // self.unit
        self.num_idle = [0] * len(self.pools)
        self.num_pinned = [0] * len(self.pools)
        self.stale: dict[int, None] = {}
        self.swaps_out: list[Swap] = []
        for host in self.hosts:
            host.stale = self.stale
        self._known: list[dict[bytes, Path]] = [{} for _ in self.pools]
        self._heaps: list[list[_Entry]] = [[] for _ in self.pools]  # paths whose end may go; those counted on come last
        self._num_entries = 0
        self._waits_for: _Marks = {}  # slots whose hit grows with an id
        self._watched: dict[int, list[Callable[[], None]]] = {}  # what ends the watch for a slot

    # -- what is there -----------------------------------------------------------------------------------------------

    def lookup(self, chain: Chain, most_tokens: int, root: int) -> Hit:
        """What is there of the first ``most_tokens`` of a chain from one group on: in the pools, and whole blocks
        behind that on the first host that has some where a table may go on."""
        known, size, most = self._known[root], self.units_per_block, min(len(chain), most_tokens // self.unit)
        whole = bisect_left(range(1, most // size + 1), True, key=lambda n: chain[n * size] not in known)
        parts = known[chain[whole * size]].up_to(whole) if whole else ()
        ends = range((whole + 1) * size, most + 1, size)
        for host in self.hosts[parts[-1][0].group :][:2] if parts else self.hosts[root : root + 1]:
            if ids := host.run(chain[end] for end in ends):
                return Hit(parts, host_group=host.pool.group, host_ids=ids)
        for num_units in range(min(most - whole * size, size - 1), 0, -1):
            if (tail := known.get(chain[whole * size + num_units])) is not None:
                # where two have computed the same, all of one of them
                return Hit(tail.up_to(whole), tail, num_units * self.unit)
        return Hit(parts)

    def longest(self, chain: Chain, most_tokens: int) -> Hit:
        """What is there from the group on that has most of it."""
        hits = (self.lookup(chain, most_tokens, root) for root in range(len(self.pools)))
        return max(hits, key=lambda hit: hit.num_tokens(self.block_size))

    def watch(self, slot: int, chain: Chain, most_tokens: int) -> int:
        """Tokens that are there for a waiting request, which is ``stale`` as soon as that changes."""
        self.forget(slot)
        hit, ends = self.longest(chain, most_tokens), list[Callable[[], None]]()
        parts = [*hit.parts, *([(hit.tail, hit.num_blocks + 1)] if hit.tail else [])]
        last = {path.group: (path, end) for path, end in parts}  # on each group; and what names the whole blocks
        known = self._known[parts[0][0].root] if parts else {}
        named = [(known[chain[end * self.units_per_block]], end) for end in [hit.num_blocks] if end]
        for path, end in dict.fromkeys([*last.values(), *named]):
            _mark(path.counted_on, end, slot)
            self._end_counts(path, end)
            ends += [partial(_unmark, path.counted_on, end, slot), partial(self._end_counts, path, end)]
        further = self.units_per_block if hit.host_ids else hit.tail_tokens // self.unit + 1
        if (wanted := hit.num_blocks * self.units_per_block + further) <= min(most_tokens // self.unit, len(chain)):
            _mark(self._waits_for, one := chain[wanted], slot)
            ends.append(partial(_unmark, self._waits_for, one, slot))
        for one in hit.host_ids:
            _mark(marks := self.hosts[hit.host_group].counted_on, one, slot)
            ends.append(partial(_unmark, marks, one, slot))
        self._watched[slot] = ends
        return hit.num_tokens(self.block_size)

    def _end_counts(self, path: Path, end: int) -> None:
        """Somebody counts on a path up to a block, or no more: only for its last one that changes when it goes."""
        if end >= path.end:
            self._settle(path)

    def forget(self, slot: int) -> None:
        """Watch for a request no more."""
        self.stale.pop(slot, None)
        for end in self._watched.pop(slot, ()):
            end()

    # -- what a request computes -------------------------------------------------------------------------------------

    def grow(self, path: Path, ids: list[bytes], runs: Iterable[tuple[int, int]]) -> None:
        """The owner of a path computes the units that follow, which have these ids, in further blocks."""
        known = self._known[path.root]
        for one in ids:
            if one not in known:
                known[one] = path
                self.stale.update(self._waits_for.get(one, {}))
        path.ids += ids
        for first, count in runs:
            append_extent(path.runs, first, count)
            path.end += count
        path.held = path.end

    # -- who holds it ------------------------------------------------------------------------------------------------

    def hold(self, path: Path, end: int, slot: int) -> None:
        """One more request holds a path up to some block."""
        _mark(path.holders, end, slot)
        self._is_held(path, max(path.held, end), max(path.shared, end))

    def let_go(self, path: Path, end: int, slot: int, *, is_used: bool = True) -> None:
        """A request holds a path no more, which it held up to some block, or owned."""
        if path.owner == slot:
            path.owner, to = None, math.inf
        else:
            _unmark(path.holders, end, slot)
            to = end
        steps = path.steps
        at = bisect_left(steps, to, key=lambda step: step[0])
        steps[: at + (steps[at][0] == to)] = [(to, self._num_entries, steps[at][2] + is_used)]
        shared = max(path.holders, default=path.start)
        self._is_held(path, shared if path.owner is None else path.end, shared)
        self._settle(path)

    def _is_held(self, path: Path, held: int, shared: int) -> None:
        self.num_idle[path.group] -= held - path.held
        self.num_pinned[path.group] += shared - path.shared
        path.held, path.shared = held, shared

    def read_back(self, hit: Hit) -> list[int]:
        """The host blocks of a hit, for one request: others find them in the pools when it has been sent."""
        return self.hosts[hit.host_group].take(hit.host_ids) if hit.host_ids else []

    # -- what goes ---------------------------------------------------------------------------------------------------

    def make_free(self, group: int, num_blocks: int, ahead: int = 0) -> None:
        """Let blocks that nobody holds go until so many are free, and ``ahead`` more, as far as waiting requests do not
        count on these; there are as many."""
        pool, heap = self.pools[group], self._heaps[group]
        while pool.num_free < num_blocks + ahead:
            is_counted_on, _, _, path = entry = heappop(heap)
            if not self._is_valid(entry):
                continue
            if is_counted_on:
                ahead = 0
            if pool.num_free >= num_blocks + ahead:
                heappush(heap, entry)
                return
            steps = [int(bound) for bound, _, _ in path.steps if bound < path.end]
            floor = max([path.kept, *steps, *(() if is_counted_on else path.counted_on)])
            end = max(floor, path.end - num_blocks - ahead + pool.num_free)
            if self.hosts:
                self._to_host(path, end)
            self._drop(path, end)

    def clear(self) -> None:
        """Forget everything; what requests hold stays theirs, of whom none goes on with a path that it has."""
        for path in dict.fromkeys(path for known in self._known for path in known.values()):
            self._drop(path, path.start)
        for host in self.hosts:
            host.make_free(host.num_free)

    def _drop(self, path: Path, end: int) -> None:
        """What lies in a path from some block on, and all behind that, is known no more."""
        going = [(path, end)]
        for path, end in going:
            going += [(child, start) for start in path.children if start > end for child in path.children[start]]
        for path, end in reversed(going):
            for one in path.ids[(keep := (end - path.start) * self.units_per_block) :]:
                if self._known[path.root].get(one) is path:
                    del self._known[path.root][one]
            del path.ids[keep:]
            for bound in [bound for bound in path.counted_on if bound > end]:
                self.stale.update(path.counted_on.pop(bound))
            self._settle(path)

    def _settle(self, path: Path) -> None:
        """Free what nothing names and nobody holds at the end of a path; if what is left ends in what nobody holds, it
        is among those whose end may go."""
        while path.ids and self._known[path.root].get(path.ids[-1]) is not path:
            path.ids.pop()
        end = max([path.held, *path.children, min(path.start + -(-len(path.ids) // self.units_per_block), path.end)])
        self.num_idle[path.group] -= path.end - end
        for run in path.blocks(end, path.end):
            self.pools[path.group].free(*run)
        path.runs, path.end = [*path.blocks(path.start, end)], end
        if path.start == path.end:
            if (parent := path.parent) is not None:
                path.parent = None
                _unmark(parent.children, path.start, path)
                self._settle(parent)
            return
        if path.kept == path.end:
            return
        self._num_entries += 1
        path.entry = self._num_entries
        let_go = next(step[1] for step in path.steps if step[0] >= path.end)
        heap = self._heaps[path.group]
        if len(heap) > 2 * self.num_idle[path.group] + _SLACK:  # most entries are of paths that were used again
            heap[:] = filter(self._is_valid, heap)
            heapify(heap)
        heappush(heap, (max(path.counted_on, default=0) >= path.end, let_go, path.entry, path))

    def _is_valid(self, entry: _Entry) -> bool:
        """Whether what lies in a heap is of now."""
        *_, number, path = entry
        return number == path.entry and path.kept < path.end

    def _to_host(self, path: Path, end: int) -> None:
        """Copy what goes of a path, from some block on, to the host, where that is predicted to pay: after n uses the
        chance p of another is taken to be n in n + 1, and p times the seconds to compute a block, more the deeper it
        lies, are to be more than those to copy it, and by p back."""
        num_uses = max(next(step[2] for step in path.steps if step[0] >= path.end), 1)
        least_s, size = self.config.swap_block_s * (2 + 1 / num_uses), self.units_per_block
        end += bisect_left(range(end, path.end), True, key=lambda depth: self.cost_s(depth) > least_s)
        ids = path.ids[(end - path.start + 1) * size - 1 :: size]
        blocks = zip(ids, blocks_of(path.blocks(end, path.end)), strict=False)  # the last may not be whole
        gone = {one: block for one, block in blocks if self._known[path.root].get(one) is path}
        self.swaps_out += self.hosts[path.group].put(gone)
