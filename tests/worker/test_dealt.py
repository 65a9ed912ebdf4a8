"""Dealt rows on all groups in one process: every token sees each token before it once, wherever it lies."""

from collections import Counter

import pytest
import torch

from medha.attention.interface import LayerShape
from medha.batch import Batch, Deal, Row
from medha.worker.kv_cache import KVCache
from medha.worker.step_input import DeviceStep, Slots
from tests.attention.reference import visible
from tests.parallel.dealing import BLOCK, EIGHT, FOUR, NUM_BLOCKS, THREE, TWO, Hand, Plan

CPU = torch.device("cpu")


@pytest.mark.parametrize(("plans", "groups"), [(TWO, 2), (THREE, 3), (FOUR, 4), (EIGHT, 8)])
def test_who_sees_what(plans: list[Plan], groups: int) -> None:
    slots = [Slots(BLOCK, group) for group in range(groups)]
    shape = {"num_layers": 1, "num_blocks": NUM_BLOCKS, "block_size": BLOCK, "device": CPU}
    caches = [KVCache(LayerShape(1, 1, 1, torch.float32), **shape) for _ in range(groups)]
    hand, num_rings = Hand(plans), 0
    for batch in [*hand.prefills(), hand.decode(), hand.decode()]:
        steps = [one.prepare(batch.part_of(group)) for group, one in enumerate(slots)]
        sent: dict[tuple[int, int], list[torch.Tensor]] = {}
        for group, (step, cache) in enumerate(zip(steps, caches, strict=True)):
            for move in step.sends:
                memory = torch.empty(cache.block_size_of(move.num_tokens))
                sent.setdefault((group, move.group), []).append(cache.pack(0, move.runs, memory))
        for group, (step, cache) in enumerate(zip(steps, caches, strict=True)):
            for move in step.receives:
                cache.pack(0, move.runs, sent[move.group, group].pop(0), is_back=True)
            if step.batch.rows:
                new = named(step.batch, group)
                written = DeviceStep.of(step, CPU, with_pages=False)
                cache.write(0, new, -new, written.targets, kept=written.kept)
        assert not any(sent.values())
        for group, step in enumerate(steps):
            for rows in step.dealt:
                num_rings += 1
                its = named(step.batch, group).flatten().tolist()
                its = its[len(its) - sum(one.shared.tokens.stop - one.shared.tokens.start for one in step.dealt) :]
                run, seen = rows.shared.groups, [Counter[float]() for _ in its[rows.shared.tokens]]
                for owner, part in enumerate(rows.seen):
                    cache, theirs = caches[run[owner]], steps[run[owner]]
                    (block,) = [one for one in theirs.dealt if one.shared.groups == run]
                    assert block.shared.digest == rows.shared.digest
                    keys = cache.k[0].flatten()
                    if run[owner] != group:
                        memory = torch.full((cache.block_size_of(block.block_tokens[owner]),), torch.nan)
                        keys = cache.block(cache.pack(0, block.packed, memory))[0].flatten()
                    query = 0
                    for row in range(len(part)):
                        tokens, sees = visible(part, row)
                        for one in sees:
                            seen[query].update(keys[tokens[one]].tolist())
                            query += 1
                    assert query == len(seen)
                for token, keys_seen in zip(its[rows.shared.tokens], seen, strict=True):
                    slot, position = divmod(int(token), 1000)
                    assert keys_seen == Counter(1000.0 * slot + before for before in range(position + 1))
    assert num_rings >= 6


def named(batch: Batch, group: int) -> torch.Tensor:
    """A number for each token of a group's part of a batch: 1000 times its slot, and its position."""
    spans = [(row.slot, span) for row in batch.rows for span in row.spans(group)]
    return torch.tensor([1000.0 * slot + at for slot, span in spans for at in span]).view(-1, 1, 1)


def test_what_a_group_holds_is_what_the_batch_says() -> None:
    slots = Slots(BLOCK)
    row = Row(3, 20, 8, False, False, 0, 2, is_dealt=True)
    batch = Batch(0, (row,), deals=(Deal(3, 0, 20, 10), Deal(3, 1, 0, 10)))
    with pytest.raises(ValueError, match="slot 3 has 0 tokens on group 0, not 20"):
        slots.prepare(batch.part_of(0))
    with pytest.raises(IndexError, match="slot 3 has 0 blocks, 10 tokens are to lie there"):
        Slots(BLOCK, 1).prepare(batch.part_of(1))
