"""The banker's rule by brute force: what :class:`medha.sched.memory.KVMemory` is compared with."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import permutations


@dataclass
class Claimant:
    """Blocks of one request by group: how many it may come to hold and how many it holds.

    Attributes:
        is_set_aside: its prompt is scheduled whole, and it may take the rest of its claim at any time.
    """

    claim: list[int]
    held: list[int]
    is_set_aside: bool = False

    @property
    def rest(self) -> list[int]:
        return [claim - held for claim, held in zip(self.claim, self.held, strict=True)]


def is_safe(num_blocks: int, claimants: Sequence[Claimant]) -> bool:
    """Whether all can come to their ends: the set-aside ones at any time, the others one by one in some order.

    Args:
        num_blocks: in the pool of each group.
        claimants: everybody that holds or may take blocks.
    """
    if not claimants:
        return True
    groups = range(len(claimants[0].claim))
    free = [num_blocks - sum(c.held[g] for c in claimants) for g in groups]
    set_aside = [c for c in claimants if c.is_set_aside]
    if any(sum(c.rest[g] for c in set_aside) > free[g] for g in groups) or min(free) < 0:
        return False
    prefills = [c for c in claimants if not c.is_set_aside]
    back = [free[g] + sum(c.held[g] for c in set_aside) for g in groups]
    return any(_ends_in_order(order, list(back)) for order in permutations(prefills))


def _ends_in_order(order: Sequence[Claimant], free: list[int]) -> bool:
    for claimant in order:
        if any(rest > have for rest, have in zip(claimant.rest, free, strict=True)):
            return False
        free = [have + held for have, held in zip(free, claimant.held, strict=True)]
    return True


def blocks_by_group(
    num_tokens: int, *, first: int, num_groups: int, max_kv_per_group: int, block_size: int
) -> list[int]:
    """Blocks of each group that the first ``num_tokens`` tokens of a request take, whose run begins at ``first``."""
    blocks = [0] * num_groups
    for index, start in enumerate(range(0, num_tokens, max_kv_per_group)):
        blocks[first + index] = -(-min(max_kv_per_group, num_tokens - start) // block_size)
    return blocks
