"""Who may take KV blocks of which group: reservations, the KVP span of a request, and the banker's test.

A request's keys and values lie on its KVP span, neighbouring groups, shard after shard: the first ``max_kv_per_group``
tokens on its first group, the next on the second (the paper's KV parallelism and progressive growth, arXiv 2409.17264
v5 section 3.3). Its reservation says how many blocks of each group it may come to need. Blocks are allocated as they
fill, and a prefill gets more only if the state stays *safe*: there is an order in which every request can still come to
its end (Dijkstra's banker's algorithm). So memory is used before it is promised to anybody, and nobody waits for ever.

A request that decodes never waits for memory: with the last chunk of its prompt the rest of its reservation is set
aside. With ``overcommit`` reservations are not looked at: whatever is free may be taken. Then a decode can find
nothing free, and somebody is preempted (:mod:`medha.sched.preempt`).

Blocks whose tokens are known by ids are kept after their request ends (:mod:`medha.sched.prefix`), and a request may
begin with some that others have computed. Those that nobody holds count as free. Of those that it shares a request is
not counted on to give any back, so the test errs on the safe side.

A request that is *dealt* lies on all groups of its span from its first chunk on. Of what is dealt of its prompt each
keeps an even share, of the rest the last one keeps all; where they come to differ by more than a block, history moves
before a dealt row runs. Its blocks are not kept for others.

The host may have a pool for each group as well: a preempted request that lies on one group can be *swapped out* to it,
and comes back to the same group. The file is long because all of this reads and writes the same accounts.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import KW_ONLY, InitVar, dataclass, replace
from functools import partial
from itertools import islice, pairwise
from typing import Any

from medha.batch import PIECES, Batch, Copy, Deal, Extent, Row, Shared, Swap
from medha.config import SchedulerConfig
from medha.cost.predictor import Decodes, Work, dealt_work, split
from medha.sched.account import Account, can_all_end
from medha.sched.blocks import BlockPool, HostBlocks, blocks_of, facing
from medha.sched.prefix import Chain, Hit, PrefixCache

Works = tuple[Sequence[Work] | Decodes, Sequence[Work]]
"""Decodes and chunks."""

_MOST_AHEAD = 1 << 18  # tokens of a prompt for which room is made at once: it takes some milliseconds
_OUTPUT_AHEAD = 512  # and of an output


@dataclass(eq=False, repr=False)
class KVMemory:
    """The KV block pools of all groups.

    Args:
        config: ``max_kv_per_group`` is a multiple of the block size, None the whole pool.
        num_blocks: in the pool of each group, of ``block_size`` tokens each.
        num_groups: KV-parallel groups.
        prefix_cost_s: as of :class:`medha.sched.prefix.PrefixCache`.

    Attributes:
        deal_pays: whether a prompt that needs several groups, so many, is dealt, where the pools have room for it; None
            where nobody is.
        hosts: by group, what is in its pool of the host; empty without host memory.
        extents, frees, swaps_in, shared, copies, deals: of the next batch, and so are the prefix cache's swaps.
    """

    config: InitVar[SchedulerConfig]
    _: KW_ONLY
    num_blocks: int
    block_size: int
    num_groups: int = 1
    prefix_cost_s: InitVar[Callable[[int], float]] = lambda depth: 1.0

    def __post_init__(self, config: SchedulerConfig, prefix_cost_s: Callable[[int], float]) -> None:
        num_blocks, block_size, num_groups = self.num_blocks, self.block_size, self.num_groups
        whole, num_on_host = num_blocks * block_size, config.num_swap_blocks
        max_kv_per_group = whole if config.max_kv_per_group is None else config.max_kv_per_group
        if max_kv_per_group % block_size or max_kv_per_group > whole:
            accepted = f"a multiple of the block size {block_size}, at most the pool's {whole} tokens"
            raise ValueError(f"max_kv_per_group={max_kv_per_group}; accepted: {accepted}")
        self.max_kv_per_group = max_kv_per_group
        self.spread_kv = max_kv_per_group  # tokens on one group of a request that is rather spread over several
        self.max_span: int | None = None  # groups of one request at most, where all are dealt
        self.overcommit = config.overcommit
        self.swap_block_s = config.swap_block_s
        self.deal_pays: Callable[[int, int], bool] | None = None
        self.pools = [BlockPool(num_blocks, group) for group in range(num_groups)]  # by group
        self.hosts = [HostBlocks(BlockPool(num_on_host, group)) for group in range(num_groups * bool(num_on_host))]
        self.prefix = PrefixCache(config, self.pools, self.hosts, block_size=block_size, cost_s=prefix_cost_s)
        self.extents: list[Extent] = []
        self.frees: list[int] = []
        self.swaps_in: list[Swap] = []
        self.shared: list[Shared] = []
        self.copies: list[Copy] = []
        self.deals: list[Deal] = []
        self._then: list[Callable[[], None]] = []  # gives back what the next batch reads, or moves history out of
        self._accounts: dict[int, Account] = {}
        self._open = [0] * num_groups  # blocks reserved and not yet held, over all requests
        self._set_aside = [0] * num_groups  # the same over those that decode

    @property
    def num_used(self) -> int:
        """Blocks that requests hold, over all groups."""
        return sum(self.used(group) for group in range(self.num_groups))

    def num_free(self, group: int) -> int:
        """Blocks of a group that may be taken."""
        return self.pools[group].num_free + self.prefix.num_idle[group]

    def used(self, group: int) -> int:
        """Blocks of a group that requests hold."""
        return self.pools[group].num_used - self.prefix.num_idle[group]

    @property
    def max_request_tokens(self) -> int:
        """Tokens of the longest request that fits."""
        return (self.max_span or self.num_groups) * self.max_share

    @property
    def max_share(self) -> int:
        """Tokens of a request on one group at most: where all are dealt shares are even to a block and a piece."""
        spare = 0 if self.max_span is None else self.block_size + PIECES
        return max(min(self.max_kv_per_group, self.num_blocks * self.block_size - spare), 0)

    def reservation(self, num_tokens: int, most: int | None = None) -> list[int]:
        """Blocks that ``num_tokens``, at most so many on one, take on each group of a span."""
        most = most or self.max_kv_per_group
        full, rest = divmod(num_tokens, most)
        return [most // self.block_size] * full + [-(-rest // self.block_size)] * (rest > 0)

    def first_groups(self, num_tokens: int, most: int | None = None) -> range:
        """The groups at which the span of such a :meth:`reservation` may begin; empty if it can never fit."""
        return range(self.num_groups - len(self.reservation(num_tokens, most)) + 1)

    def dealt_reservation(self, num_tokens: int, num_prompt: int) -> list[int] | None:
        """Blocks on each group of a request of ``num_tokens`` in all that is dealt; None where it is not.

        A group may be a block ahead of the others and a piece longer than half of its share. The last one takes the new
        tokens too, and chunks that are gathered, as long as it is two blocks ahead at most.
        """
        if self.deal_pays is None:
            return None
        count, size = len(self.reservation(num_tokens)), self.block_size
        if count == 1 or not self.deal_pays(num_prompt, count):
            return None
        share, spare = -(-num_tokens // count), size + PIECES
        last = -(-num_prompt // count) + num_tokens - num_prompt + 2 * spare + PIECES * count
        reserved = [-(-tokens // size) for tokens in [share + spare] * (count - 1) + [last]]
        return reserved if max(reserved) <= self.num_blocks else None

    def hits_of(self, chain: Chain, most_tokens: int, num_tokens: int) -> dict[int, Hit]:
        """By the group on which it begins, what is there of the first ``most_tokens`` of a request of ``num_tokens`` in
        all, as far as it leaves room for the rest on the groups behind, and for the block of which a part is copied
        beside the others."""
        hits = {root: self._hit_of(chain, most_tokens, num_tokens, root) for root in range(self.num_groups)}
        return {root: hit for root, hit in hits.items() if hit.shards}

    def _hit_of(self, chain: Chain, most_tokens: int, num_tokens: int, root: int) -> Hit:
        hit = self.prefix.lookup(chain, most_tokens, root)
        if hit.host_ids:  # what is read is a part of what the first row fills, so that has to be of the same group
            room = self.max_kv_per_group // self.block_size - (hit.num_blocks - hit.shards[-1][1]) - 1
            hit = replace(hit, host_ids=hit.host_ids[: max(room, 0)])
        while shards := hit.shards:
            group, start = shards[-1]
            rest = self.reservation(num_tokens - start * self.block_size)
            has_room = (hit.num_blocks - start) * self.block_size < self.max_kv_per_group and rest[0] < self.num_blocks
            if hit.tail is not None and not has_room:
                hit = Hit(hit.parts)
            elif group + len(rest) <= self.num_groups:
                break
            else:
                hit = Hit(tuple(part for part in hit.parts if part[0].group != group))
        return hit

    # -- one request -------------------------------------------------------------------------------------------------

    def start(
        self,
        slot: int,
        first: int,
        num_tokens: int,
        chain: Chain | None = None,
        hit: Hit | None = None,
        num_prompt: int | None = None,
        most: int | None = None,
    ) -> None:
        """Bind a request of ``num_tokens`` in all to the span that begins at ``first``; it holds what is there of its
        tokens, else nothing yet. ``num_prompt``: of one that may be dealt; ``most``: tokens on one group."""
        hit, most, size = hit or Hit(), most or self.max_kv_per_group, self.block_size
        starts = [start for _, start in hit.shards] or [0]
        closed = [end - start for start, end in pairwise(starts)]
        rest = self.reservation(num_tokens - starts[-1] * size, most)
        held = [*closed, hit.num_blocks - starts[-1], *[0] * (len(rest) - 1)]
        account = Account(first, [*closed, *rest], held, most, [start * size for start in starts], chain, hit)
        if num_prompt is not None and (dealt := self.dealt_reservation(num_tokens, num_prompt)) is not None:
            account = Account.dealt(first, dealt, num_tokens - num_prompt)
        account.num_units = (hit.num_blocks * size + hit.tail_tokens) // self.prefix.unit
        for part in hit.parts:
            self.prefix.hold(*part, slot)
        if hit.tail is not None:  # it must not be written to before it is copied
            copied = hit.tail, hit.num_blocks + 1, ~slot
            self.prefix.hold(*copied)
            self._then.append(partial(self.prefix.let_go, *copied))
        self._bind(slot, account)

    def undo_start(self, slot: int) -> None:
        """As if a request had not started, which has taken nothing beyond its hit."""
        account = self._accounts.pop(slot)
        self._count(account, -1)
        if (tail := account.hit.tail) is not None:
            self._then.pop()
            self.prefix.let_go(tail, account.hit.num_blocks + 1, ~slot, is_used=False)
        for part in account.hit.parts:
            self.prefix.let_go(*part, slot, is_used=False)

    def set_aside(self, slot: int, groups: range, num_blocks: int) -> bool:
        """Bind a request whose chunks are dealt, and set so many blocks aside on each group; False: they are not there.

        All requests are dealt then.
        """
        if any(self._set_aside[group] + num_blocks > self.num_free(group) for group in groups):
            return False
        account = Account.dealt(groups.start, [num_blocks] * len(groups), 0)
        account.is_set_aside = True
        self._bind(slot, account)
        return True

    def gather_room(self, slot: int) -> int:
        """Tokens of a dealt request's prompt that its last group may take, and has room for, beyond what is dealt to
        it."""
        account, size = self._accounts[slot], self.block_size
        assert account.tokens is not None, "a dealt request"
        there = account.held[-1] + self.num_free(account.first + len(account.reserved) - 1)
        return min(account.reserved[-1] * size - account.num_outputs, there * size) - account.tokens[-1]

    def is_to_note(self, slot: int, num_tokens: int) -> bool:
        """Whether of the first ``num_tokens`` of a bound request some are not known to others, and will be."""
        account = self._accounts[slot]
        return account.chain is not None and account.num_units * self.prefix.unit < num_tokens

    def lacks(self, slot: int) -> bool:
        """Whether a bound request may still take more of its first group than is free and promised to nobody else."""
        group, blocks = self._accounts[slot].rest()[0]
        return blocks > self.num_free(group) - self._set_aside[group]

    def held_by_others(self, slot: int) -> int:
        """Tokens of a bound request that stay where they are if it goes, as others hold them."""
        return self._accounts[slot].held_by_others(slot) * self.block_size

    def is_bound(self, slot: int) -> bool:
        """Whether a request has a span."""
        return slot in self._accounts

    def forget_prefixes(self) -> None:
        """Nobody shares what has been computed by now."""
        self.prefix.clear()
        for account in self._accounts.values():
            account.chain = None

    def note(self, slot: int, num_tokens: int) -> None:
        """The first ``num_tokens`` of a request have been sent: others may share them from the next batch on."""
        self._accounts[slot].note(slot, num_tokens, self.prefix, self.pools)

    def held_by_group(self, slot: int, num_tokens: int) -> list[tuple[int, int]]:
        """(group, tokens) of a bound request of which so many tokens have been computed, where there are some."""
        account = self._accounts[slot]
        tokens = account.tokens
        if tokens is None:
            tokens = [end - start for start, end in pairwise([*account.starts, num_tokens])]
        return [(group, count) for group, count in enumerate(tokens, account.first) if count]

    def place(self, slot: int, position: int) -> tuple[int, int]:
        """(first group, number of groups) of a row that begins at ``position``; one more where a shard is full."""
        account = self._accounts[slot]
        if account.tokens is not None:
            return account.first, len(account.reserved)
        num_begun = len(account.starts)
        is_next = position == account.end and num_begun < len(account.reserved)  # else nothing to write
        return account.first, num_begun + is_next

    def span(self, slot: int) -> tuple[int, int]:
        """(first group, number of groups) of the whole span of a bound request."""
        account = self._accounts[slot]
        return account.first, len(account.reserved)

    def kv_before(self, slot: int, position: int, group: int) -> int:
        """Tokens before ``position`` that a group holds of a request; of one that is on none yet, all."""
        return self._accounts[slot].kv_before(position, group) if slot in self._accounts else position

    def room(self, slot: int, position: int) -> int:
        """Tokens from ``position`` to the end of the shard that takes it: no row may cross that end."""
        account = self._accounts[slot]
        if account.tokens is not None:
            return self.max_request_tokens
        return account.most if position == account.end else account.end - position

    def grow(self, slot: int, position: int, num_tokens: int, *, widens: bool = False) -> bool:
        """Let a prefill go on on its next group from the end of the present block on (growth for latency); whether it
        will: not where the rest of its ``num_tokens`` would not fit or might never come to its end. With ``widens`` its
        span becomes all groups from its first on."""
        account = self._accounts[slot]
        index, count = len(account.starts) - 1, len(account.reserved)
        end = -(-position // self.block_size) * self.block_size
        more = [0] * (self.num_groups - account.first - count if widens else 0)
        later = count + len(more) - index - 1
        is_begun = account.tokens is None and end > account.starts[-1]
        if not is_begun or not end < num_tokens <= end + later * account.most:
            return False
        moved = self.reservation(num_tokens - end, account.most)
        filled = -(-(end - account.starts[-1]) // self.block_size)
        reserved = [*account.reserved[:index], filled, *moved, *[0] * (later - len(moved))]
        grown = replace(account, reserved=reserved, held=account.held + more)
        grown.end = end
        self._bind(slot, grown)
        if self._is_safe(grown, {}, set_aside=False):
            return True
        self._bind(slot, account)
        return False

    def can_take(self, row: Row, *, gone: Collection[int] = (), least_kv: int = 0) -> bool:
        """Whether a row finds its blocks, a first one those of ``least_kv`` tokens in all, and leaves a safe state
        without the slots ``gone``."""
        account, size = self._accounts[row.slot], self.block_size
        if account.is_set_aside and not self.overcommit:
            return True
        needs = account.needs(row, size)
        if least_kv:
            needs[row.writer] = max(needs[row.writer], -(-least_kv // size) - account.hit.num_blocks)
        if max(needs.values()) <= 0 and (self.overcommit or not row.samples):
            return True
        if account.tokens is not None and any(needs.get(g, 0) > max(rest, 0) for g, rest in account.rest()):
            return False
        return self._is_safe(account, needs, set_aside=row.samples, gone=gone)

    def begin(self, row: Row) -> None:
        """As :meth:`take` with the first row of a request, which begins behind what is there of it: it shares that, or
        has it read back into its own first blocks."""
        account, slot, size = self._accounts[row.slot], row.slot, self.block_size
        hit, own = account.hit, list[Extent]()
        if hit.num_tokens(size):
            extents, shared = account.hit_extents(slot, size)
            self.extents += extents
            self.shared += shared
        host_blocks = self.prefix.read_back(hit)
        if (group := self.swapped_on(slot)) is not None:
            host_blocks = self.hosts[group].swapped.pop(slot)
            own = self.take(Row(slot, 0, len(host_blocks) * size, False, False, group))
        own = own + self.take(row)
        if host_blocks:
            blocks = blocks_of((extent.first, extent.count) for extent in own)
            self.swaps_in += facing(row.writer, islice(blocks, len(host_blocks)), host_blocks)
            self._then.append(partial(self.hosts[row.writer].free, host_blocks))
        if hit.tail is not None:
            ((source, _),) = hit.tail.blocks(hit.num_blocks, hit.num_blocks + 1)
            self.copies.append(Copy(hit.tail.group, source, own[0].first, hit.tail_tokens))

    def take(self, row: Row) -> list[Extent]:
        """Allocate the blocks that a row fills; of a dealt request history leaves some too."""
        account, new = self._accounts[row.slot], list[Extent]()
        needs = account.needs(row, self.block_size)
        if account.is_set_aside and account.tokens is None and needs[row.writer] <= 0:
            return new  # a decode within its last block, as most are
        if account.tokens is not None:
            self.deals += account.deals(row, self.block_size) if row.is_dealt else ()
            for group, tokens in account.after(row, self.block_size):
                account.tokens[group - account.first] = tokens
        elif row.num_groups > len(account.starts):
            account.starts.append(row.position)
            account.end = row.position + account.most
        for group, change in needs.items():
            index, pool = group - account.first, self.pools[group]
            if change > 0:
                new += self._allocate(account, row, group, change)
            elif change < 0:
                self._then += [partial(pool.free, *run) for run in pool.cut_off(row.slot, account.held[index] + change)]
            account.held[index] += change
            self._open[group] -= change
            self._set_aside[group] -= change * account.is_set_aside
        if row.samples and not account.is_set_aside:  # nobody else may take the rest of its reservation
            account.is_set_aside = True
            for group, blocks in account.rest():
                self._set_aside[group] += blocks
        self.extents += new
        return new

    def _allocate(self, account: Account, row: Row, group: int, needed: int) -> list[Extent]:
        """``needed`` blocks for a row, of the rest of what is reserved on a group."""
        pool, idle, rest = self.pools[group], self.prefix.num_idle[group], dict(account.rest())[group]
        open_ = pool.num_open(row.slot) if idle else rest
        if open_ < rest:  # room for what it will fill next too, so that this lies together
            ahead = 0 if account.chain is None else max(len(account.chain) * self.prefix.unit - row.position, 0)
            ahead += _OUTPUT_AHEAD
            wanted = max(needed, min(rest, -(-min(ahead, _MOST_AHEAD) // self.block_size)))
            self.prefix.make_free(group, needed, min(wanted - open_, idle) + pool.num_free - needed)
        return pool.allocate(row.slot, needed, reserved=rest)

    def release(self, slot: int) -> None:
        """Take everything back from a bound request; what is known of it by ids stays until its memory is wanted."""
        account = self._accounts.pop(slot)
        self._count(account, -1)
        for group, _ in account.rest():
            kept = sum(path.end - path.start for path in account.own if path.group == group)
            self.pools[group].release(slot, kept=kept)
        for path, end in reversed(account.paths()):  # what lies behind goes before
            self.prefix.let_go(path, end, slot)
        if any(account.held):
            self.frees.append(slot)

    # -- swapping ----------------------------------------------------------------------------------------------------

    def swappable(self, slot: int) -> int:
        """Blocks of a started request that lies on one group, goes on there, and finds room on the host; else 0."""
        if not self.hosts:
            return 0
        account = self._accounts[slot]
        blocks, room = account.held[0], self.hosts[account.first].num_free
        is_full = len(account.reserved) > 1 and blocks * self.block_size >= account.most
        return 0 if len(account.starts) > 1 or is_full or blocks > room else blocks

    def swap_out(self, slot: int) -> None:
        """Copy what a request that is :meth:`swappable` holds to the host; its own blocks are released next."""
        hit, group = (account := self._accounts[slot]).hit, account.first
        shared = (run for path, end in hit.parts for run in path.blocks(path.start, end))
        own = self.pools[group].runs(slot, 0, account.held[0] - hit.num_blocks)
        self.prefix.swaps_out += self.hosts[group].swap(slot, list(blocks_of([*shared, *own])))

    def swapped_on(self, slot: int) -> int | None:
        """The group whose host pool holds a request; None for one that is not swapped out."""
        return next((group for group, host in enumerate(self.hosts) if slot in host.swapped), None)

    def forget_swapped(self, slot: int) -> None:
        """Take the host blocks back from a request, if it is swapped out."""
        for host in self.hosts:
            host.free(host.swapped.pop(slot, []))

    def work_of(self, row: Row, group: int) -> Work:
        """A row of a batch as one of several groups sees it, when the batch is made."""
        if row.is_dealt:
            return dealt_work(row, group)
        kv = self.kv_before(row.slot, row.position, group) if row.is_shared else row.position
        run = row.span if row.is_shared else None
        return Work(row.q_len, kv, row.is_decode, run, row.samples and group == row.group)

    def moved_s(self) -> float:
        """Predicted seconds in which the next batch's blocks are swapped, of the group that moves most."""
        blocks = [0] * self.num_groups
        for swap in (*self.prefix.swaps_out, *self.swaps_in):
            blocks[swap.group] += swap.count
        return max(blocks) * self.swap_block_s

    def batch(self, batch_id: int, rows: Iterable[Row] = ()) -> Batch:
        """The next batch, with all that it says. What it reads, or moves history out of, comes free only now: no batch
        reads host blocks that it gives to another request."""
        said: tuple[list[Any], ...] = self.extents, self.frees, self.prefix.swaps_out, self.swaps_in
        said = *said, self.shared, self.copies, self.deals
        told: list[Any] = [tuple(parts) for parts in said]
        batch = Batch(batch_id, tuple(rows), *told)
        for follows in self._then:
            follows()
        for parts in (*said, self._then):
            parts.clear()
        return batch

    def _bind(self, slot: int, account: Account) -> None:
        """Keep an account for a request, in place of the one that there is."""
        if slot in self._accounts:
            self._count(self._accounts[slot], -1)
        self._accounts[slot] = account
        self._count(account, +1)

    def _count(self, account: Account, sign: int) -> None:
        for group, rest in account.rest():
            self._open[group] += sign * rest
            self._set_aside[group] += sign * rest * account.is_set_aside

    # -- the banker's test -------------------------------------------------------------------------------------------

    def _is_safe(self, taker: Account, needs: dict[int, int], *, set_aside: bool, gone: Collection[int] = ()) -> bool:
        """Whether everybody can come to an end after ``taker`` gets so many blocks of some groups.

        What decodes may still take must be free, all at once. Their blocks then come back, and the prefills, one after
        the other in some order, must each find free what they may still take. With overcommit: whether they are free.
        """
        free = [self.num_free(g) for g in range(self.num_groups)]
        wanted, promised = list(self._open), list(self._set_aside)
        accounts = [self._accounts[slot] for slot in gone]
        for account in accounts:
            for g, blocks in account.holds():
                free[g] += blocks
            for g, blocks in account.rest():
                wanted[g] -= blocks
                promised[g] -= blocks * account.is_set_aside
        for path in {path for account in accounts for path, _ in account.paths()}:
            free[path.group] += max(path.shared - path.held_without(set(gone)), 0)  # what only these share
        if any(blocks > free[g] for g, blocks in needs.items()):
            return False
        if self.overcommit:
            return True
        if all(w <= f for w, f in zip(wanted, free, strict=True)):
            return True  # enough for everybody at once
        more = dict(taker.rest()) if set_aside else needs
        if any(promised[g] + more.get(g, 0) > free[g] for g in range(self.num_groups)):  # where its hit lies, too
            return False
        others = [account for slot, account in self._accounts.items() if account is not taker and slot not in gone]
        prefills = [(account.rest(), account.holds()) for account in others if not account.is_set_aside]
        if not set_aside:
            left = [(g, blocks - needs.get(g, 0)) for g, blocks in taker.rest()]
            prefills.append((left, [(g, blocks + needs.get(g, 0)) for g, blocks in taker.holds()]))
        available = [self.num_blocks - pinned for pinned in self.prefix.num_pinned]
        for _, held in prefills:
            for g, blocks in held:
                available[g] -= blocks
        return can_all_end(prefills, available)


def parts_of(rows: Sequence[Row], num_decodes: int, memory: KVMemory, group: int) -> Works:
    """Decodes and chunks of a batch on a group, of rows of which the first ones decode; where there is one group these
    are summed up."""
    if memory.num_groups > 1:
        return split([memory.work_of(row, group) for row in rows if row.concerns(group)])
    chunks = [Work(row.q_len, row.position, False, None, row.samples) for row in rows[num_decodes:]]
    if not num_decodes:
        return (), chunks
    positions = [row.position for row in rows[:num_decodes]]
    return Decodes(num_decodes, sum(positions), max(positions)), chunks
