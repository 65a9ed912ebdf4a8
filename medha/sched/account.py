"""The account of one request: what is reserved for it and what it holds of each group, and who can come to an end."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import compress

from medha.batch import Deal, Extent, Row, Shared, append_extent, even_shares
from medha.sched.blocks import BlockPool
from medha.sched.prefix import Chain, Hit, Path, PrefixCache

Blocks = list[tuple[int, int]]  # (group, blocks)


@dataclass(slots=True)
class Account:
    """What is reserved for a request and what it holds on each group of its span, in blocks."""

    first: int  # group of the span
    reserved: list[int]  # by group of the span
    held: list[int]  # likewise
    most: int = 0  # tokens on one group of one that is not dealt
    starts: list[int] = field(default_factory=lambda: [0])  # position at which each shard begun so far begins
    chain: Chain | None = None
    hit: Hit = field(default_factory=Hit)  # what it shares
    end: int = field(init=False)  # position at which the last shard begun ends
    is_set_aside: bool = False  # nobody else may take the rest of its reservation
    tokens: list[int] | None = None  # of one that is dealt: how many lie on each group
    num_outputs: int = 0  # likewise: tokens of its reservation behind its prompt
    # what follows is of requests with ids alone
    own: list[Path] = field(default_factory=list)  # what others may share of what it computes
    num_units: int = 0  # whose ids are known

    def __post_init__(self) -> None:
        self.end = self.starts[-1] + self.most

    @classmethod
    def dealt(cls, first: int, reserved: list[int], num_outputs: int) -> Account:
        """Of a request that is dealt, which holds nothing yet."""
        return cls(first, reserved, [0] * len(reserved), tokens=[0] * len(reserved), num_outputs=num_outputs)

    def rest(self) -> Blocks:
        """Reserved and not yet held."""
        return [(self.first + i, blocks - self.held[i]) for i, blocks in enumerate(self.reserved)]

    def paths(self) -> list[tuple[Path, int]]:
        """What it shares and what others may share of its own: paths, and up to which block it holds them."""
        return [*self.hit.parts, *((path, path.end) for path in self.own)]

    def holds(self) -> Blocks:
        """What comes back when it ends: of what it holds that which nobody shares."""
        own = list(self.held)
        for path, end in (*self.hit.parts, *((path, path.shared) for path in self.own)):
            own[path.group - self.first] -= end - path.start
        return list(enumerate(own, self.first))

    def held_by_others(self, slot: int) -> int:
        """Blocks of its first tokens that stay where they are if it goes, as others hold them."""
        held = ((path.start, min(path.held_without({slot}), end)) for path, end in self.paths())
        return max((end for start, end in held if end > start), default=0)

    def note(self, slot: int, num_tokens: int, prefix: PrefixCache, pools: Sequence[BlockPool]) -> None:
        """Its first ``num_tokens`` have been sent: others may share them from the next batch on."""
        if (chain := self.chain) is None:
            return
        size, num_units = prefix.units_per_block, min(len(chain), num_tokens // prefix.unit)
        while self.num_units < num_units:
            shard = bisect_right(self.starts, self.num_units * prefix.unit) - 1
            if (group := self.first + shard) not in [path.group for path in self.own[-1:]]:
                before, start = self.paths()[-1] if self.paths() else (None, 0)
                self.own.append(Path(group, start, before, owner=slot))
            path = self.own[-1]
            ends = [end // prefix.unit for end in self.starts[shard + 1 :]]
            done, self.num_units = path.start * size + len(path.ids), min([num_units, *ends])
            runs = pools[group].runs(slot, path.end - path.start, -(-self.num_units // size) - path.start)
            prefix.grow(path, [chain[n] for n in range(done + 1, self.num_units + 1)], runs)

    def kv_before(self, position: int, group: int) -> int:
        """Tokens before ``position`` that a group holds."""
        if self.tokens is not None:
            return position // len(self.tokens)  # to a block
        index = group - self.first
        if index >= len(self.starts):
            return 0
        return next(iter(self.starts[index + 1 :]), position) - self.starts[index]

    def needs(self, row: Row, block_size: int) -> dict[int, int]:
        """Blocks by group that a row needs beyond those that it has; fewer than none where history leaves."""
        if self.tokens is None:
            index = row.num_groups - 1
            start = self.starts[index] if index < len(self.starts) else row.position
            after = [(row.writer, row.kv_len - start)]
        else:
            after = self.after(row, block_size)
        return {group: -(-tokens // block_size) - self.held[group - self.first] for group, tokens in after}

    def deals(self, row: Row, block_size: int) -> list[Deal]:
        """What each group holds before a dealt row, and what it is to hold: the same, while that is even to a block."""
        assert self.tokens is not None, "a dealt request"
        held = self.tokens[row.group - self.first :][: row.num_groups]
        shares = even_shares(row.position, row.num_groups)
        if all(abs(here - share) <= block_size for here, share in zip(held, shares, strict=True)):
            shares = held
        return [Deal(row.slot, *one) for one in zip(row.groups, held, shares, strict=True)]

    def after(self, row: Row, block_size: int) -> list[tuple[int, int]]:
        """(group, tokens that it holds once a row of a dealt request has run) where the row changes that."""
        assert self.tokens is not None, "a dealt request"
        if not row.is_dealt:
            return [(row.writer, self.tokens[row.writer - self.first] + row.q_len)]
        return [(deal.group, deal.share + row.tokens_on(deal.group)) for deal in self.deals(row, block_size)]

    def hit_extents(self, slot: int, block_size: int) -> tuple[list[Extent], list[Shared]]:
        """The blocks of its hit as extents of its own table, and what lies on each group of its span."""
        runs = dict[int, list[tuple[int, int]]]()
        for path, end in self.hit.parts:
            for run in path.blocks(path.start, end):
                append_extent(runs.setdefault(path.group, []), *run)
        extents = [Extent(slot, *run, group) for group, of_group in runs.items() for run in of_group]
        spans = zip(self.starts, [*self.starts[1:], self.hit.num_tokens(block_size)], strict=True)
        return extents, [Shared(slot, self.first + i, start, end - start) for i, (start, end) in enumerate(spans)]


def can_all_end(prefills: Sequence[tuple[Blocks, Blocks]], available: list[int]) -> bool:
    """Whether prefills come to their ends in some order: each by what it may still take, then gives back what it holds.

    Args:
        prefills: what each may still take, and what it holds.
        available: by group, what nobody holds; it is changed.
    """
    while prefills:
        ending = [all(blocks <= available[g] for g, blocks in rest) for rest, _ in prefills]
        if not any(ending):
            return False
        for _, held in compress(prefills, ending):
            for g, blocks in held:
                available[g] += blocks
        prefills = [prefill for prefill, ends in zip(prefills, ending, strict=True) if not ends]
    return True
