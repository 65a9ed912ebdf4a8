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

from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from itertools import pairwise

from medha.batch import PIECES, Deal, Extent, Row, Shared, Swap
from medha.sched.account import Account, can_all_end
from medha.sched.blocks import BlockPool, blocks_of, facing
from medha.sched.prefix import Chain, Hit, Path, PrefixCache

_MOST_AHEAD = 1 << 18  # tokens of a prompt for which room is made at once: it takes some milliseconds
_OUTPUT_AHEAD = 512  # and of an output


class KVMemory:
    """The KV block pools of all groups.

    Args:
        num_blocks: in the pool of each group, of ``block_size`` tokens each.
        num_groups: KV-parallel groups.
        max_kv_per_group: tokens of one request on one group, a multiple of the block size; None is the whole pool.
        overcommit, num_swap_blocks, swap_block_s: as of the options; the blocks are of each group.
        prefix_eviction, prefix_cost_s: as of :class:`medha.sched.prefix.PrefixCache`.

    Attributes:
        host_pools: by group; empty without host memory.
    """

    def __init__(
        self,
        *,
        num_blocks: int,
        block_size: int,
        num_groups: int = 1,
        max_kv_per_group: int | None = None,
        overcommit: bool = False,
        num_swap_blocks: int = 0,
        swap_block_s: float = 0.0,
        prefix_eviction: str = "lru",
        prefix_cost_s: Callable[[int], float] = lambda depth: 1.0,
    ) -> None:
        whole = num_blocks * block_size
        max_kv_per_group = whole if max_kv_per_group is None else max_kv_per_group
        if max_kv_per_group % block_size or not 0 < max_kv_per_group <= whole:
            raise ValueError(
                f"max_kv_per_group={max_kv_per_group}; accepted: a multiple of the block size {block_size}, "
                f"at most the pool's {whole} tokens"
            )
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.max_kv_per_group = max_kv_per_group
        self.spread_kv = max_kv_per_group  # tokens on one group of a request that is rather spread over several
        self.max_span: int | None = None  # groups of one request at most, where all are dealt
        self.overcommit = overcommit
        self.swap_block_s = swap_block_s
        # whether a prompt is dealt that needs so many groups, if the pools have room for it; None: none is
        self.deal_pays: Callable[[int, int], bool] | None = None
        self.pools = [BlockPool(num_blocks, group) for group in range(num_groups)]  # by group
        self.host_pools = [BlockPool(num_swap_blocks, group) for group in range(num_groups)] if num_swap_blocks else []
        self.prefix = PrefixCache(
            self.pools, block_size, cost_s=prefix_cost_s, eviction=prefix_eviction, host_pools=self.host_pools,
            swap_block_s=swap_block_s,
        )  # fmt: skip
        self._cut: list[tuple[int, int, int]] = []  # (group, first, count): the next batch moves history out of them
        self._copied: list[tuple[Path, int, int]] = []  # held as the next batch copies a part of them
        self._swapped: dict[int, tuple[int, list[int]]] = {}  # group and host blocks of those swapped out
        self._swapped_in: list[tuple[int, int]] = []  # (group, host block) that the next batch reads
        self.frees: list[int] = []  # slots whose blocks the next batch frees
        self._accounts: dict[int, Account] = {}
        self._open = [0] * num_groups  # blocks reserved and not yet held, over all requests
        self._set_aside = [0] * num_groups  # the same over those that decode

    @property
    def num_groups(self) -> int:
        """KV-parallel groups."""
        return len(self.pools)

    @property
    def num_used(self) -> int:
        """Blocks that requests hold, over all groups."""
        return sum(self.used(group) for group in range(self.num_groups))

    @property
    def usage(self) -> list[float]:
        """The share of its blocks that each group holds, 0 to 1."""
        return [self.used(group) / self.num_blocks for group in range(self.num_groups)]

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
        count, size = len(self.reservation(num_tokens)), self.block_size
        if self.deal_pays is None or count == 1 or not self.deal_pays(num_prompt, count):
            return None
        share, spare = -(-num_tokens // count), size + PIECES
        last = -(-num_prompt // count) + num_tokens - num_prompt + 2 * spare + PIECES * count
        reserved = [-(-tokens // size) for tokens in [share + spare] * (count - 1) + [last]]
        return reserved if max(reserved) <= self.num_blocks else None

    def _account(self, first: int, num_tokens: int, num_prompt: int | None = None, most: int | None = None) -> Account:
        dealt = None if num_prompt is None else self.dealt_reservation(num_tokens, num_prompt)
        if dealt is None or num_prompt is None:
            most = most or self.max_kv_per_group
            return Account(first, self.reservation(num_tokens, most), most)
        return Account(first, dealt, num_outputs=num_tokens - num_prompt)

    def hit_of(self, chain: Chain, most_tokens: int, num_tokens: int) -> Hit:
        """What is there of the first ``most_tokens`` of a request of ``num_tokens`` in all, as far as it leaves room
        for the rest on the groups behind, and for the block of which a part is copied beside the others."""
        hit = self.prefix.lookup(chain, most_tokens)
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

    def can_start(
        self, first: int, num_tokens: int, kv_len: int, *, set_aside: bool, gone: Collection[int] = (),
        num_prompt: int | None = None, row: Row | None = None, most: int | None = None,
    ) -> bool:  # fmt: skip
        """Whether a request of ``num_tokens`` in all may begin on group ``first`` with its first ``kv_len`` tokens.

        ``set_aside``: these are all of its prompt; ``gone``: slots of requests that would be preempted for it;
        ``num_prompt``: of one that may be dealt, whose first row is ``row``; ``most``: tokens on one group.
        """
        account, needed = self._account(first, num_tokens, num_prompt, most), {first: -(-kv_len // self.block_size)}
        if account.tokens is not None and row is not None:
            needed = account.needs(row, self.block_size)
        return self._is_safe(account, needed, set_aside=set_aside, is_new=True, gone=gone)

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
        """Bind a request to the span that begins at ``first``; it holds nothing yet, or what is there of its tokens."""
        account = self._account(first, num_tokens, num_prompt, most)
        account.chain = chain
        if hit is not None and (shards := hit.shards):
            starts = [start for _, start in shards]
            closed = [end - start for start, end in pairwise(starts)]
            rest = self.reservation(num_tokens - starts[-1] * self.block_size)
            account.reserved = [*closed, *rest]
            account.held = [*closed, hit.num_blocks - starts[-1], *[0] * (len(rest) - 1)]
            account.starts = [start * self.block_size for start in starts]
            account.hit = hit
            account.num_units = (hit.num_blocks * self.block_size + hit.tail_tokens) // self.prefix.unit
            for part in hit.parts:
                self.prefix.hold(*part, slot)
            if hit.tail is not None:  # it must not be written to before it is copied
                self._copied.append((hit.tail, hit.num_blocks + 1, ~slot))
                self.prefix.hold(*self._copied[-1])
        self._accounts[slot] = account
        self._count(account, +1)

    def set_aside(self, slot: int, groups: range, num_blocks: int) -> bool:
        """Bind a request whose chunks are dealt, and set so many blocks aside on each group; False: they are not there.

        All requests are dealt then.
        """
        if any(self._set_aside[group] + num_blocks > self.num_free(group) for group in groups):
            return False
        account = self._accounts[slot] = Account(groups.start, [num_blocks] * len(groups), num_outputs=0)
        account.is_set_aside = True
        self._count(account, +1)
        return True

    def deals_of(self, row: Row) -> list[Deal]:
        """What each group holds before a dealt row, and what it is to hold."""
        return self._accounts[row.slot].deals(row, self.block_size)

    def gather_room(self, slot: int, num_tokens: int, num_prompt: int) -> int:
        """Tokens of a dealt request's prompt that its last group may take, beyond those that are dealt to it."""
        account = self._accounts.get(slot) or self._account(0, num_tokens, num_prompt)
        assert account.tokens is not None and account.num_outputs is not None, "a dealt request"
        return account.reserved[-1] * self.block_size - account.num_outputs - account.tokens[-1]

    def undo_start(self, slot: int, hit: Hit) -> None:
        """As if a request had not started, which has taken nothing beyond its hit."""
        if hit.tail is not None:
            self.prefix.let_go(*self._copied.pop(), is_used=False)
        account = self._accounts.pop(slot)
        self._count(account, -1)
        for part in hit.parts:
            self.prefix.let_go(*part, slot, is_used=False)

    def is_to_note(self, slot: int, num_tokens: int) -> bool:
        """Whether of the first ``num_tokens`` of a bound request some are not known to others, and will be."""
        account = self._accounts[slot]
        return account.chain is not None and account.num_units * self.prefix.unit < num_tokens

    def held_by_others(self, slot: int) -> int:
        """Tokens of a bound request that stay where they are if it goes, as others hold them."""
        return self._accounts[slot].held_by_others(slot) * self.block_size

    def is_bound(self, slot: int) -> bool:
        """Whether a request has a span."""
        return slot in self._accounts

    def hit_extents(self, slot: int) -> tuple[list[Extent], list[Shared]]:
        """The blocks of a request's hit as extents of its own table, and what lies on each group of its span."""
        return self._accounts[slot].hit_extents(slot, self.block_size)

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
        is_next = position == self._shard_end(account) and num_begun < len(account.reserved)  # else nothing to write
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
        end = self._shard_end(account)
        return account.most if position == end else end - position

    def grow(self, slot: int, position: int, num_tokens: int, *, widens: bool = False) -> bool:
        """Let a prefill go on on its next group from the end of the present block on (growth for latency); whether it
        will: not where the rest of its ``num_tokens`` would not fit or might never come to its end. With ``widens`` its
        span becomes all groups from its first on."""
        account = self._accounts[slot]
        index, count = len(account.starts) - 1, len(account.reserved)
        end = -(-position // self.block_size) * self.block_size
        more = [0] * (self.num_groups - account.first - count if widens else 0)
        later = count + len(more) - index - 1
        if index < 0 or end == account.starts[-1] or not end < num_tokens <= end + later * account.most:
            return False
        before, moved = (account.reserved, account.held), self.reservation(num_tokens - end, account.most)
        filled = -(-(end - account.starts[-1]) // self.block_size)
        self._count(account, -1)
        account.reserved = [*account.reserved[:index], filled, *moved, *[0] * (later - len(moved))]
        account.held = account.held + more
        is_safe = self._is_safe(account, {}, set_aside=False, is_new=True)
        if is_safe:
            account.end = end
        else:
            account.reserved, account.held = before
        self._count(account, +1)
        return is_safe

    def can_take(self, row: Row, *, gone: Collection[int] = ()) -> bool:
        """Whether a row finds its blocks and leaves a safe state without the slots ``gone``."""
        account = self._accounts[row.slot]
        if account.is_set_aside and not self.overcommit:
            return True
        needs = account.needs(row, self.block_size)
        if account.tokens is not None:
            if any(needs.get(g, 0) > max(rest, 0) for g, rest in account.rest()):
                return False
        elif needs[row.writer] <= 0 and (self.overcommit or not row.samples):
            return True
        return self._is_safe(account, needs, set_aside=row.samples, gone=gone)

    def take(self, row: Row) -> list[Extent]:
        """Allocate the blocks that a row fills, and take back those that history leaves."""
        account, extents = self._accounts[row.slot], list[Extent]()
        needs = account.needs(row, self.block_size)
        if account.tokens is not None:
            for group, tokens in account.after(row, self.block_size):
                account.tokens[group - account.first] = tokens
        elif row.num_groups > len(account.starts):
            account.starts.append(row.position)
            account.end = None
        for group, blocks in needs.items():
            index = group - account.first
            if blocks > 0:
                extents += self._allocate(account, row, group, blocks)
            elif blocks < 0 and account.tokens is not None:  # history leaves
                gone = self.pools[group].cut_off(row.slot, account.held[index] + blocks)
                self._cut += [(group, *run) for run in gone]
            else:
                continue
            account.held[index] += blocks
            self._open[group] -= blocks
            self._set_aside[group] -= blocks * account.is_set_aside
        if row.samples and not account.is_set_aside:  # nobody else may take the rest of its reservation
            account.is_set_aside = True
            for group, blocks in account.rest():
                self._set_aside[group] += blocks
        return extents

    def _allocate(self, account: Account, row: Row, group: int, needed: int) -> list[Extent]:
        """``needed`` blocks of a group for a row."""
        rest = account.reserved[group - account.first] - account.held[group - account.first]
        pool, idle = self.pools[group], self.prefix.num_idle
        open_ = pool.num_open(row.slot) if idle[group] else rest
        if open_ < rest:  # room for what it will fill next too, so that this lies together
            ahead = 0 if account.chain is None else max(len(account.chain) * self.prefix.unit - row.position, 0)
            ahead += _OUTPUT_AHEAD
            wanted = max(needed, min(rest, -(-min(ahead, _MOST_AHEAD) // self.block_size)))
            self.prefix.make_free(group, min(wanted - open_, idle[group]) + pool.num_free)
        return pool.allocate(row.slot, needed, reserved=rest)

    def release(self, slot: int) -> None:
        """Take everything back from a bound request; what is known of it by ids stays until its memory is wanted."""
        account = self._accounts.pop(slot)
        self._count(account, -1)
        for group in range(account.first, account.first + len(account.held)):
            kept = sum(path.end - path.start for path in account.own if path.group == group)
            self.pools[group].release(slot, kept=kept)
        for path, end in reversed(account.paths()):  # what lies behind goes before
            self.prefix.let_go(path, end, slot)
        if any(account.held):
            self.frees.append(slot)

    # -- swapping ----------------------------------------------------------------------------------------------------

    def swappable(self, slot: int) -> int:
        """Blocks of a started request that lies on one group, goes on there, and finds room on the host; else 0."""
        if not self.host_pools:
            return 0
        account = self._accounts[slot]
        blocks, room = account.held[0], self.prefix.hosts[account.first].num_free
        is_full = len(account.reserved) > 1 and blocks * self.block_size >= account.most
        return 0 if len(account.starts) != 1 or is_full or blocks > room else blocks

    def swap_out(self, slot: int) -> None:
        """Give a request that is :meth:`swappable` as many host blocks as it holds; its own are released next."""
        group, count = (account := self._accounts[slot]).first, account.held[0]
        self.prefix.hosts[group].make_free(count)
        self._swapped[slot] = group, (host := self.host_pools[group].take(count))
        shared = (run for path, end in account.hit.parts for run in path.blocks(path.start, end))
        blocks = blocks_of([*shared, *self.pools[group].runs(slot, 0, count - account.hit.num_blocks)])
        self.prefix.swaps_out += facing(group, blocks, host)

    def swapped_on(self, slot: int) -> int | None:
        """The group whose host pool holds a request; None for one that is not swapped out."""
        return self._swapped[slot][0] if slot in self._swapped else None

    def swap_in(self, slot: int, num_tokens: int, chain: Chain | None) -> tuple[list[Extent], list[Swap]]:
        """Bind a request that is swapped out to its group again; returns blocks for what it has, in position order, and
        the swaps that fill them from host blocks that stay its own until :meth:`batch_sent`."""
        group, host = self._swapped.pop(slot)
        self.start(slot, group, num_tokens, chain)
        extents = self.take(Row(slot, 0, len(host) * self.block_size, False, False, group))
        self._swapped_in += [(group, block) for block in host]
        return extents, facing(group, blocks_of((extent.first, extent.count) for extent in extents), host)

    def read_back(self, hit: Hit) -> list[int]:
        """The host blocks of a hit, which the next batch reads; they are free when that has been sent."""
        blocks = self.prefix.read_back(hit)
        self._swapped_in += [(hit.host_group, block) for block in blocks]
        return blocks

    def forget_swapped(self, slot: int) -> None:
        """Take the host blocks back from a request, if it is swapped out."""
        group, host = self._swapped.pop(slot, (0, []))
        for block in host:
            self.host_pools[group].free(block, 1)

    def batch_sent(self) -> None:
        """A batch takes ``frees`` and swaps along, and reads host blocks, which are given back only now: no batch reads
        host blocks that it gives to another request."""
        for group, block in self._swapped_in:
            self.host_pools[group].free(block, 1)
        self._swapped_in.clear()
        for group, first, count in self._cut:
            self.pools[group].free(first, count)
        self._cut.clear()
        for copied in self._copied:
            self.prefix.let_go(*copied)
        self._copied.clear()
        self.frees.clear()
        self.prefix.swaps_out.clear()

    def _shard_end(self, account: Account) -> int:
        if account.end is not None:
            return account.end
        return account.starts[-1] + account.most if account.starts else 0

    def _count(self, account: Account, sign: int) -> None:
        for group, rest in account.rest():
            self._open[group] += sign * rest
            self._set_aside[group] += sign * rest * account.is_set_aside

    # -- the banker's test -------------------------------------------------------------------------------------------

    def _is_safe(
        self, taker: Account, needs: Mapping[int, int], *, set_aside: bool, is_new: bool = False,
        gone: Collection[int] = (),
    ) -> bool:  # fmt: skip
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
        rest = taker.rest()
        for g, blocks in rest if is_new else ():
            wanted[g] += blocks
        if all(w <= f for w, f in zip(wanted, free, strict=True)):
            return True  # enough for everybody at once
        if any(promised[g] + blocks > free[g] for g, blocks in (rest if set_aside else needs.items())):
            return False
        prefills = [
            (a.rest(), a.holds())
            for slot, a in self._accounts.items()
            if not a.is_set_aside and a is not taker and slot not in gone
        ]
        if not set_aside:
            left = [(g, blocks - needs.get(g, 0)) for g, blocks in rest]
            prefills.append((left, [(g, blocks + needs.get(g, 0)) for g, blocks in taker.holds()]))
        available = [self.num_blocks - pinned for pinned in self.prefix.num_pinned]
        for _, held in prefills:
            for g, blocks in held:
                available[g] -= blocks
        return can_all_end(prefills, available)
