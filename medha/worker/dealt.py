"""What one rank's kernels need to know of the dealt rows of a step: whose keys its tokens see in which part of a ring.

Each group of a run has two pieces of a row, ``low`` and ``high`` (:meth:`medha.batch.Row.spans`), and a share of the
history before the row. Of the block of a group in front of this one, the low piece is before all tokens here and the
high one behind them; of one behind, both lie between the two pieces here. So but for a rank's own block no mask is
needed, and each block takes as long as the others. History is seen by every token, wherever it lies.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from medha.attention.interface import AttentionRows, Ints, Pages, adjacent_runs
from medha.batch import Batch, Deal, Row
from medha.parallel.kvp import Shared, shared_rows
from medha.worker.kv_cache import Run

Tables = Mapping[int, Pages]


@dataclass(frozen=True, slots=True)
class DealtRows:
    """The dealt rows of one run of groups."""

    shared: Shared
    own: int  # this rank's place on the run
    seen: tuple[AttentionRows, ...]  # of the block of each place of the run; the own one lies in the pool
    block_tokens: tuple[int, ...]  # of each block, whole pages
    packed: Sequence[Run]  # what of the pool is the own block


@dataclass(frozen=True, slots=True)
class Move:
    """History of a request that goes to another group, or comes from one."""

    group: int  # the other one
    runs: Sequence[Run]  # of tokens: from where in the pool to where in a buffer
    num_tokens: int


def dealt_rows(batch: Batch, tables: Tables, page_size: int) -> list[DealtRows]:
    """The dealt rows of a group's part of a batch, by run in ascending order, from the blocks of their slots."""
    assert batch.group is not None, "a part of a batch"
    deals = {(deal.slot, deal.group): deal for deal in batch.deals}
    found = []
    for shared in shared_rows(batch, dealt=True):
        owners = shared.groups
        rows = [row for row in batch.rows if row.is_dealt and row.groups == owners]
        seen, sizes = zip(*(_seen(rows, deals, batch.group, owner, tables, page_size) for owner in owners), strict=True)
        kept = [-(-(deals[row.slot, batch.group].share + row.tokens_on(batch.group)) // page_size) for row in rows]
        pages = np.concatenate([tables[row.slot][:count] for row, count in zip(rows, kept, strict=True)])
        packed = runs_of(pages.astype(np.int64) * page_size, page_size)
        found.append(DealtRows(shared, batch.group - owners.start, seen, sizes, packed))
    return found


def _seen(
    rows: Sequence[Row], deals: Mapping[tuple[int, int], Deal], here: int, owner: int, tables: Tables, page_size: int
) -> tuple[AttentionRows, int]:
    """What the tokens here see of a group's block, and how many tokens the block has."""
    seen: list[tuple[int, int, bool, Pages]] = []  # queries, keys, causal, pages
    page = 0
    for row in rows:
        history = deals[row.slot, owner].share
        (low, high), (its_low, its_high) = (map(len, row.spans(group)) for group in (here, owner))
        whole = history + its_low + its_high
        end = page - (-whole // page_size)
        table = tables[row.slot] if owner == here else np.arange(page, end, dtype=np.int32)
        page = end
        if owner == here:
            seen += [(low, history + low, True, table), (high, whole, True, table)]
        elif owner < here:
            seen += [(low + high, history + its_low, False, table)]
        else:
            seen += [(low, history, False, table), (high, whole, False, table)]
    q_len, kv_len, causal, pages = zip(*seen, strict=True)
    return AttentionRows.of(np.array(q_len), np.array(kv_len), np.array(causal), pages, page_size), page * page_size


def runs_of(firsts: Ints, count: int = 1) -> list[Run]:
    """Pieces of ``count`` adjacent pool tokens each, put behind each other in a buffer, as the fewest runs."""
    bounds = adjacent_runs(firsts // count).tolist()
    return [(int(firsts[at]), at * count, (end - at) * count) for at, end in pairwise(bounds)]
