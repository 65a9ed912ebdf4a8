"""Shared prefixes: whoever attends finds in every block what its own tokens would have left there."""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any
from unittest import mock

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from medha.batch import Batch, Row, Shared, Swap
from medha.config import SchedulerConfig
from medha.engine.prefix import PrefixIds
from medha.params import SLO
from medha.sched.blocks import BlockPool, HostBlocks
from medha.sched.memory import KVMemory
from medha.sched.prefix import Chain, Hit, PrefixCache
from medha.sched.scheduler import Scheduler
from tests.sched.virtual import BLOCK, Drive, Job, Live, add, by_tokens, make_scheduler, new_scheduler, step, worlds

IDS = PrefixIds(16, key=b"of tests")


def chain_of(*tokens: Any) -> Chain:
    """Ids of the units of tokens, given in parts one behind the other."""
    return Chain(IDS.of(np.concatenate(tokens).astype(np.int32)))


def read_first(
    memory: KVMemory, slot: int, chain: Chain, num_read: int, num_tokens: int, *, group: int = 0, samples: bool = False
) -> None:
    """A request of ``num_tokens`` in all begins with a row of so many, which others may share from then on."""
    memory.start(slot, group, num_tokens, chain)
    memory.begin(Row(slot, 0, num_read, False, samples, group))
    memory.note(slot, num_read)


@dataclass(frozen=True)
class Asking(Job):
    """A job whose first tokens are those of a document."""

    document: int = 0
    num_shared: int = 0
    salt: str = ""
    own: int | None = None  # whose tokens come behind those; None: nobody else's


def drawn(tokens: list[int]) -> int:
    """The token that comes behind others."""
    return hash(tuple(tokens)) % 1000


class Sharing(Drive):
    """Plays jobs that share prefixes: a cell names its token by a hash of all up to there."""

    def __init__(self, scheduler: Scheduler, jobs: Sequence[Asking], *args: Any, **options: Any) -> None:
        super().__init__(scheduler, jobs, *args, **options)
        self.tokens: dict[int, list[int]] = {}  # by slot
        self.names: dict[int, list[int]] = {}  # by slot: of no tokens, of the first one, of the first two, ...
        self.told: dict[int, bytes] = {}  # by slot: the ids that the scheduler knows
        self.reset_every = 0  # so many batches; 0 is never
        self.ids = PrefixIds(scheduler.memory.prefix.unit, key=b"of tests")

    def _prefix(self, slot: int, index: int) -> bytes:
        job = self.jobs[index]
        document, own = random.Random(job.document), random.Random(1000 + index if job.own is None else job.own)
        shared = [document.randrange(1000) for _ in range(min(job.num_shared, job.num_prompt))]
        self.tokens[slot] = shared + [own.randrange(1000) for _ in range(job.num_prompt - len(shared))]
        self.names[slot] = [hash(job.salt)]
        self.told[slot] = self.ids.of(np.array(self.tokens[slot], np.int32), job.salt)
        return self.told[slot]

    def _sampled(self, live: Live) -> bool:
        ends = super()._sampled(live)
        slot = live.request.slot
        self.tokens[slot].append(drawn(self.tokens[slot]))
        if ends or live.num_tokens % 3 == 0:
            self._extend(slot)
        return ends

    def _extend(self, slot: int) -> None:
        job = self.jobs[self.live[slot].job]
        ids = self.ids.of(np.array(self.tokens[slot], np.int32), job.salt)[len(self.told[slot]) :]
        if ids:
            self.told[slot] += ids
            self.scheduler.extend(slot, ids)

    def on_schedule(self, batch: Batch | None) -> None:
        if batch is not None and self.reset_every and not batch.batch_id % self.reset_every:
            self.scheduler.reset_prefix_cache()

    def _names(self, slot: int, start: int, end: int) -> Sequence[int]:
        names, tokens = self.names[slot], self.tokens[slot]
        while (at := len(names) - 1) < end:
            while len(tokens) <= at:  # it is on its way
                tokens = [*tokens, drawn(tokens)]
            names.append(hash((names[-1], tokens[at])))
        return names[start + 1 : end + 1]

    def _cancel(self, index: int) -> None:
        for slot, live in list(self.live.items()):
            if live.job == index and not live.ended:
                self._extend(slot)
        super()._cancel(index)

    def _check_end(self) -> None:
        super()._check_end()
        prefix = self.scheduler.memory.prefix
        assert not any(prefix.num_pinned)
        used = [pool.num_used for pool in self.scheduler.memory.pools]
        assert used == prefix.num_idle
        self.scheduler.reset_prefix_cache()
        assert [pool.num_used for pool in self.scheduler.memory.pools] == [0] * len(used) == prefix.num_idle


@st.composite
def sharing(draw: st.DrawFn) -> dict[str, Any]:
    """One of the worlds whose jobs share documents."""
    world = draw(worlds(any_scheduler=True))
    shared = [
        Asking(
            **{name: getattr(job, name) for name in Job.__dataclass_fields__},
            document=draw(st.integers(0, 1)),
            num_shared=draw(st.sampled_from([0, 40, 300, 1000, 5000])),
            salt=draw(st.sampled_from(["", "", "other"])),
            own=draw(st.sampled_from([None, 10, 11])),
        )
        for job in world["load"]
    ]
    firsts = shared[:4] * draw(st.integers(1, 3))
    again = [replace(job, arrival_s=job.arrival_s + draw(st.floats(0, 60))) for job in firsts]
    longest = replace(max(shared, key=lambda job: job.num_kv_tokens), document=2, slo=None, cancel_s=None)
    takes = [replace(longest, arrival_s=at) for at in draw(st.lists(st.floats(0, 60), max_size=3))]  # what is kept
    config = replace(world["config"], num_swap_blocks=draw(st.sampled_from([0, 3, 40, 400])))
    sizes = {"block_size": draw(st.sampled_from([BLOCK, 64, 8])), "reset_every": draw(st.sampled_from([0, 0, 3, 20]))}
    return {**world, **sizes, "config": config, "load": [*shared, *again, *takes]}


def play(world: dict[str, Any]) -> Sharing:
    size, config = world["block_size"], world["config"]
    most = -(-config.max_kv_per_group // size) * size
    num_blocks = most // size * (world["num_blocks"] * BLOCK // config.max_kv_per_group or 1)
    scheduler = make_scheduler(world | {"config": replace(config, max_kv_per_group=most), "num_blocks": num_blocks})
    drive = Sharing(scheduler, world["load"], lambda batch: 0.01 + 0.001 * batch.num_tokens)
    drive.reset_every = world.get("reset_every", 0)
    return drive.run()


@settings(max_examples=80, deadline=None)  # others in each run
@given(sharing())
def test_every_row_reads_what_its_own_tokens_left(world: dict[str, Any]) -> None:
    play(world)


def shares(*, num_groups: int = 1, block_size: int = 64) -> dict[str, Any]:
    """A world in which later jobs share much with the first ones, one while another reads the same."""
    jobs = [
        Asking(0.0, 700, 4, document=0, num_shared=650),
        Asking(0.1, 700, 4, document=0, num_shared=610),
        Asking(0.1, 500, 4, document=1, num_shared=400),
        Asking(30.0, 700, 4, document=0, num_shared=700),
        Asking(30.0, 1000, 4, document=0, num_shared=1000),
        Asking(60.0, 1200, 4, document=0, num_shared=990),
        Asking(90.0, 700, 4, document=0, num_shared=650, salt="other"),
    ]
    config = SchedulerConfig(max_kv_per_group=-(-1280 // num_groups), max_batch_tokens=128, quantum_s=0.25)
    world = {"config": config, "num_groups": num_groups, "num_blocks": 2 * -(-80 // num_groups), "load": jobs}
    return {**world, "block_size": block_size}


@pytest.mark.parametrize("num_groups", [1, 2])
@pytest.mark.parametrize("block_size", [64, 16, 8])
def test_what_is_there_is_not_computed_again(num_groups: int, block_size: int) -> None:
    drive = play(shares(num_groups=num_groups, block_size=block_size))
    # of the first 610, 650, 700 and 990 tokens of a document the whole units, also of one that is being read
    assert drive.num_shared >= 608 + 640 + 688 + 976
    assert (
        sum(batch.num_tokens for batch in drive.batches)
        <= sum(job.num_prompt + job.max_new for job in drive.jobs) - drive.num_shared
    )


def returns(*, num_groups: int = 1, block_size: int = 16, **options: Any) -> dict[str, Any]:
    """A document comes back when others have taken its memory, twice, the second time for two at once."""
    document = Asking(0.0, 700, 4, document=0, num_shared=690)
    others = [Asking(at, 1200, 4, document=1 + at, num_shared=1200) for at in (10, 20, 50, 60)]
    again = [replace(document, arrival_s=at) for at in (40.0, 80.0, 80.0)]
    options = {"num_swap_blocks": 400, "swap_block_s": 1e-3, "max_batch_tokens": 128, "quantum_s": 0.25} | options
    config = SchedulerConfig(max_kv_per_group=-(-1280 // num_groups), **options)
    world = {"config": config, "num_groups": num_groups, "num_blocks": -(-80 // num_groups)}
    return {**world, "load": [document, *others, *again], "block_size": block_size}


@pytest.mark.parametrize("num_groups", [1, 2])
@pytest.mark.parametrize("block_size", [64, 16, 8])
def test_what_went_to_the_host_is_read_back(num_groups: int, block_size: int) -> None:
    drive = play(returns(num_groups=num_groups, block_size=block_size))
    least = 640 if num_groups == 1 else 512  # whole blocks, of one group, and a row behind them
    assert drive.num_shared >= 3 * least and drive.num_read_back >= 2 * (least // block_size)
    if num_groups == 1:  # of two at once one reads
        assert drive.num_read_back < 3 * (least // block_size)


def test_a_block_goes_to_the_host_if_the_chance_that_it_is_wanted_outweighs_the_copies() -> None:
    """After one use the chance is one half, after two two thirds: computing is to take 3, or 2.5 times a copy."""
    for num_uses, least in ((1, 3.0), (2, 2.5), (4, 2.25)):
        for cost_s, moves in ((least - 0.01, False), (least + 0.01, True)):
            config = SchedulerConfig(num_swap_blocks=8, swap_block_s=1.0)
            block_s: Callable[[int], float] = lambda depth, cost_s=cost_s: cost_s * (depth >= 1)  # noqa: E731
            memory = KVMemory(config, num_blocks=5, block_size=16, prefix_cost_s=block_s)
            chain = chain_of(np.arange(64))
            for turn in range(num_uses):
                memory.start(turn, 0, 65, chain, hit_of(memory, chain, 64, 65))
                if not turn:
                    memory.take(Row(0, 0, 64, False, False))
                memory.note(turn, 64)
                memory.release(turn)
            memory.prefix.make_free(0, 5)
            assert memory.prefix.swaps_out == ([Swap(0, 1, 0, 3)] if moves else [])
            assert memory.hosts[0].num_free == 8


def test_a_host_keeps_the_beginning_and_what_was_used_last() -> None:
    host = HostBlocks(BlockPool(3))
    assert host.put({b"a": 5, b"b": 6, b"c": 9, b"d": 10}) == [Swap(0, 5, 0, 2), Swap(0, 9, 2, 1)]
    assert host.run([b"a", b"b", b"c", b"d"]) == (b"a", b"b", b"c")
    assert host.put({b"a": 1, b"e": 2}) == [Swap(0, 1, 0, 1), Swap(0, 2, 2, 1)]  # the end of the chain made room
    assert host.run([b"a", b"b", b"c"]) == (b"a", b"b") and host.run([b"e"]) == (b"e",)
    assert host.take([b"b"]) == [1] and host.run([b"a", b"b"]) == (b"a",)  # it is the reader's until it has been read
    assert host.num_free == 2 and host.pool.num_free == 0
    host.make_free(2)
    assert host.pool.num_free == 2 and not host.run([b"a"])


check, read, of = Drive._check_batch, PrefixCache.read_back, PrefixIds.of

MUTATIONS: dict[str, tuple[type, str, Callable[..., Any]]] = {
    "takes what is held": (PrefixCache, "hold", lambda self, path, end, slot: None),
    "no salt": (PrefixIds, "of", lambda self, tokens, *salts: of(self, tokens)),
    "no copy": (Drive, "_check_batch", lambda self, batch: check(self, replace(batch, copies=()))),
    "not copied out": (Drive, "_check_batch", lambda self, batch: check(self, replace(batch, swaps_out=()))),
    "another host block": (PrefixCache, "read_back", lambda self, hit: [block ^ 1 for block in read(self, hit)]),
}


@pytest.mark.parametrize("mutation", MUTATIONS)
def test_mutations_are_found(mutation: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(*MUTATIONS[mutation])
    with pytest.raises((AssertionError, KeyError, IndexError, RuntimeError, ValueError)):
        play(returns() if "host" in mutation or "out" in mutation else shares())


def test_blocks_lie_together_though_the_pool_is_full_of_what_is_kept() -> None:
    memory = KVMemory(SchedulerConfig(), num_blocks=80, block_size=16)
    for turn in range(10):
        slots, num_runs = range(8 * turn, 8 * turn + 8), 0
        for slot in slots:
            chain = chain_of(np.random.default_rng(slot).integers(0, 1000, 80))
            read_first(memory, slot, chain, 80, 160, samples=True)
        for position in range(80, 160):
            for slot in slots:
                memory.take(Row(slot, position, 1, True, True))
        for slot in slots:
            num_runs += len(list(memory.pools[0].runs(slot, 0, 10)))
            memory.release(slot)
    assert num_runs <= 2 * len(slots)


def test_nobody_waits_for_a_leader_that_has_read_what_is_shared() -> None:
    scheduler = new_scheduler(block_size=64, max_prompt_tokens=200_000, max_batch_tokens=2048)
    add(scheduler, 0, 200_000, slo=SLO(ttft_s=1.0), prefix=ids_of(200_000))
    for _ in range(65):
        leads = step(scheduler, 9.0, 0.01)
    assert leads.rows[0].kv_len > 100_000
    add(scheduler, 1, 100_000, prefix=ids_of(100_000))
    assert step(scheduler, 9.0).shared == (Shared(1, 0, 0, 99_984),)


def test_a_block_that_is_forgotten_while_it_fills_is_not_found_again() -> None:
    memory = KVMemory(SchedulerConfig(), num_blocks=8, block_size=64)
    chain = chain_of(np.arange(256))
    read_first(memory, 0, chain, 48, 257)
    memory.forget_prefixes()
    memory.take(Row(0, 48, 208, False, False))
    memory.note(0, 256)
    memory.release(0)
    assert memory.prefix.longest(chain, 256) == Hit() and memory.pools[0].num_free == 8


def test_what_two_compute_at_once_lies_twice_where_something_goes_on_behind_it() -> None:
    """Two read the same 64 tokens on one group at once, then different ones on the next; whoever goes on with one's
    finds all of its blocks, and the other's are there as well."""
    memory = KVMemory(SchedulerConfig(max_kv_per_group=64), num_blocks=8, block_size=16, num_groups=2)
    chains = [chain_of(np.arange(64), np.arange(at, at + 48)) for at in (100, 200)]
    for slot in (0, 1):
        memory.start(slot, 0, 113, chains[slot])
        memory.take(Row(slot, 0, 64, False, False))
    for slot in (0, 1):
        memory.note(slot, 64)
    for slot in (0, 1):
        memory.take(Row(slot, 64, 48, False, True, 0, 2))
        memory.note(slot, 112)
    for slot in (0, 1):
        memory.release(slot)
    for chain in chains:
        hit = hit_of(memory, chain, 112, 113)
        blocks = [block for path, end in hit.parts for block in path.blocks(path.start, end)]
        assert hit.num_tokens(16) == 112 and sum(count for _, count in blocks) == 7
    assert memory.prefix.num_idle == [8, 6] and memory.num_used == 0
    memory.prefix.make_free(0, 8)  # what lies behind on the other group goes as well
    assert memory.prefix.num_idle == [0, 0] and hit_of(memory, chains[1], 112, 113) == Hit()


def hit_of(memory: KVMemory, chain: Chain, most_tokens: int, num_tokens: int) -> Hit:
    """The longest, wherever it begins."""
    hits = memory.hits_of(chain, most_tokens, num_tokens).values()
    return max(hits, key=lambda hit: hit.num_tokens(memory.block_size), default=Hit())


def two_at_once(memory: KVMemory, groups: Sequence[int]) -> list[Any]:
    """Two requests read the same 64 tokens at once, each on its group, and then 26 of its own; the tokens of each."""
    tokens = [np.concatenate([np.arange(64), np.arange(at, at + 40)]) for at in (100, 200)]
    for slot, group in enumerate(groups):
        memory.start(slot, group, 90, chain_of(tokens[slot]))
        memory.begin(Row(slot, 0, 90, False, True, group))
    for slot in (0, 1):
        memory.note(slot, 90)
    return tokens


@pytest.mark.parametrize("num_groups", [1, 2, 3])
def test_a_hit_is_of_one_of_two_that_have_computed_the_same(num_groups: int) -> None:
    """What two compute at once is known as the first one's; who goes on behind the second in a block that is not full
    shares all of that one's blocks, wherever the first one's lie."""
    memory = KVMemory(SchedulerConfig(), num_blocks=10, block_size=32, num_groups=num_groups)
    tokens = two_at_once(memory, (num_groups - 1, 0))
    for slot in (0, 1):
        memory.release(slot)
    chain = chain_of(tokens[1], np.arange(300, 500))
    hit = hit_of(memory, chain, 280, 281)
    assert hit.num_tokens(32) == 80 and {path for path, _ in hit.parts} == {hit.tail}
    memory.start(2, hit.shards[0][0], 281, chain, hit)
    row = Row(2, 80, 200, False, False, 0)
    assert memory.can_take(row)  # beside one copy of what it shares, not both
    memory.begin(row)
    batch = memory.batch(0, [row])
    assert [(copy.group, copy.num_tokens) for copy in batch.copies] == [(0, 16)]


def test_the_names_of_what_a_waiting_request_counts_on_are_kept_too() -> None:
    """Who waits goes on with the second, whose first blocks are known as the first's; what a third has left goes before
    these, though it was used later."""
    memory = KVMemory(SchedulerConfig(), num_blocks=13, block_size=32)
    chain = chain_of(two_at_once(memory, (0, 0))[1])
    read_first(memory, 3, chain_of(np.arange(500, 590)), 90, 90, samples=True)
    assert memory.prefix.watch(2, chain, 90) == 80
    for slot in (0, 1, 3):
        memory.release(slot)
    memory.prefix.make_free(0, 6)  # four are; the last block of the first is not counted on
    assert memory.prefix.longest(chain, 90).num_tokens(32) == 80


def test_a_hit_holds_no_blocks_that_are_set_aside_for_decodes() -> None:
    """Nobody holds them, and they lie on a group on which the row behind the hit needs nothing."""
    memory = KVMemory(SchedulerConfig(max_kv_per_group=32), num_blocks=2, block_size=16, num_groups=3)
    chain = chain_of(np.arange(48))
    read_first(memory, 0, chain, 32, 64, group=1)
    memory.release(0)
    hit, row = hit_of(memory, chain, 47, 64), Row(2, 32, 8, False, False, 1, 2)
    memory.start(2, 1, 64, chain, hit)
    assert hit.num_tokens(16) == 32 and memory.can_take(row)
    memory.undo_start(2)
    memory.start(1, 0, 64)
    last = Row(1, 0, 32, False, True, 0)  # its output is to go to the second group
    assert memory.can_take(last)
    memory.begin(last)
    memory.start(2, 1, 64, chain, hit_of(memory, chain, 47, 64))
    assert not memory.can_take(row)
    memory.undo_start(2)
    assert len(memory.take(Row(1, 32, 1, True, True, 0, 2))) == 1


def test_one_that_is_preempted_gives_back_what_nobody_else_shares() -> None:
    config = SchedulerConfig(
        scheduler="static", max_num_seqs=3, max_batch_tokens=16, max_kv_per_group=128, overcommit=True, min_chunk=8
    )
    long, short = Asking(1.0, 241, 17, 17), Asking(0.0, 1, 1, 1)
    load = [long, Asking(1.0, 22, 12, 12, num_shared=40), short, Asking(0.0, 60, 1), Asking(0.0, 333, 7, 7)]
    load += [long, Asking(0.5, 16, 1, num_shared=40), short]
    play({"config": config, "num_groups": 3, "num_blocks": 8, "load": load, "block_size": 16})


@pytest.mark.parametrize("is_waited_for", [True, False])
def test_what_a_waiting_request_counts_on_survives_pressure(is_waited_for: bool) -> None:
    config = SchedulerConfig(scheduler="sarathi", max_num_seqs=1, max_batch_tokens=64, max_kv_per_group=640)
    document, other, first = Asking(0.0, 160, 4, num_shared=160), Asking(20.0, 160, 4), Asking(40.0, 16, 4, 4)
    # of 40 blocks 10 are the document's, used longest ago, and 10 the other's; the large one takes all but 10
    large, again = Asking(40.001, 460, 4), replace(document, arrival_s=40.002 if is_waited_for else 80.0)
    load = [document, other, first, large, again]
    drive = play({"config": config, "num_groups": 1, "num_blocks": 10, "load": load, "block_size": 16})
    assert drive.num_shared == 144 * is_waited_for


def test_room_for_what_is_read_later_takes_nothing_that_a_waiting_request_counts_on() -> None:
    memory, chain = KVMemory(SchedulerConfig(), num_blocks=10, block_size=16), chain_of(np.arange(128))
    read_first(memory, 0, chain, 128, 128, samples=True)
    memory.release(0)
    memory.prefix.watch(2, chain, 128)
    read_first(memory, 1, chain_of(np.arange(500, 628)), 16, 128)
    assert memory.prefix.longest(chain, 128).num_tokens(16) == 128
    memory.take(Row(1, 16, 32, False, False))  # two blocks, of which one is free
    assert memory.prefix.longest(chain, 128).num_tokens(16) == 112


def test_of_documents_that_give_way_one_after_the_other_comes_back_to_what_it_had() -> None:
    """A chat needs a few blocks: what else a document had is there until another one of its class has the memory."""
    random = np.random.default_rng(1)
    chats = [Asking(at_s, int(random.integers(60, 250)), 40) for at_s in np.arange(0.5, 40.0, 0.5).tolist()]
    load = [Asking(1.0 + 5.0 * index, 2400, 4, priority=3) for index in range(4)] + chats
    config = SchedulerConfig(max_batch_tokens=128, quantum_s=0.25, long_threshold=1000)
    drive = Sharing(new_scheduler(config, num_blocks=200), load, lambda batch: 0.01 + 0.001 * batch.num_tokens).run()
    assert len(drive.gave_way) > 10 and max(drive.finish_s[job] for job in range(4)) < 30.0
    assert drive.num_computed < 1.1 * sum(job.num_prompt + job.max_new for job in load)


def test_who_is_guarded_waits_for_none_that_comes_back() -> None:
    """The first one was preempted, and may not start while prefills of a class above are left, as they always are."""
    load = [Asking(0.0, 2000, priority=3), Asking(1.2, 2400, priority=3), Asking(1.0, 5600, 2, priority=0)]
    load += [Asking(at_s, 100, priority=2) for at_s in np.arange(1.0, 60.0, 0.1).tolist()]
    options: dict[str, Any] = {"max_batch_tokens": 128, "quantum_s": 0.1, "long_threshold": 1000, "patience_s": 2.0}
    drive = Sharing(new_scheduler(num_blocks=400, **options), load, lambda batch: 0.01 + 0.001 * batch.num_tokens).run()
    assert drive.gave_way == [0] and drive.finish_s[1] < 45.0 < drive.finish_s[0]


def test_nobody_gives_way_to_one_that_leaves_its_place_to_another() -> None:
    """A long prompt that does not start before the first one, which was preempted, asks for no place either."""
    load = [Asking(0.0, 2000, priority=2), Asking(0.3, 20_000, priority=1), Asking(1.0, 100, priority=0)]
    load += [Asking(4.0, 2400, priority=2), *(Asking(3.0 + 0.5 * i, 50, 60, priority=3) for i in range(30))]
    scheduler = new_scheduler(max_num_seqs=2, max_batch_tokens=128, quantum_s=0.1, long_threshold=1000)
    drive = Sharing(scheduler, load, lambda batch: 0.01 + 0.001 * batch.num_tokens).run()
    assert drive.gave_way[0] == 0 and len(drive.gave_way) <= 3


def test_a_guarded_prompt_may_end_in_the_turn_of_one_that_shares_it() -> None:
    load = [Asking(5.64, 1500, priority=0, num_shared=1500), Asking(0.89, 2500, 300)]
    load += [Asking(4.17, 1500, priority=1, num_shared=1461), Asking(3.14, 2000, num_shared=2000)]
    load += [Asking(1.69, 1100), Asking(0.86, 200, num_shared=185), Asking(7.46, 100, num_shared=91)]
    load += [Asking(2.08, 100, num_shared=100), Asking(5.07, 200, 40, num_shared=173)]
    options: dict[str, Any] = {"late_share": 0.5, "long_threshold": 300, "patience_s": 0.5, "quantum_s": 0.25}
    scheduler = new_scheduler(num_blocks=26, block_size=128, **options)
    drive = Sharing(scheduler, load, lambda batch: 0.01 + 0.001 * batch.num_tokens).run()
    assert len(drive.finish_s) == len(load)


@pytest.mark.parametrize("is_waited_for", [True, False])
def test_what_a_waiting_request_counts_on_stays_on_the_host(is_waited_for: bool) -> None:
    """Another prefix takes what room is left there; a request that is swapped out takes all."""
    memory = KVMemory(SchedulerConfig(num_swap_blocks=4), num_blocks=8, block_size=16)
    chains = [chain_of(np.arange(at, at + 48)) for at in (0, 100)]
    for slot, chain in enumerate(chains):
        read_first(memory, slot, chain, 48, 48)
        memory.release(slot)
        memory.prefix.make_free(0, 8)
        memory.batch(0)
        if is_waited_for and not slot:
            assert memory.prefix.watch(9, chain, 48) == 48
    there = [memory.prefix.longest(chain, 48).num_tokens(16) for chain in chains]
    assert there == ([48, 16] if is_waited_for else [16, 48])
    memory.prefix.forget(9)
    assert not memory.hosts[0].counted_on
    memory.prefix.watch(9, chains[0], 48)
    memory.hosts[0].make_free(4)
    assert memory.prefix.longest(chains[0], 48) == Hit()


def test_what_is_used_again_and_again_leaves_nothing_behind() -> None:
    memory = KVMemory(SchedulerConfig(), num_blocks=8, block_size=16)
    chain = chain_of(np.arange(64))
    for turn in range(1000):
        memory.start(turn, 0, 65, chain, hit_of(memory, chain, 64, 65))
        if not turn:
            memory.take(Row(turn, 0, 64, False, False))
            memory.note(turn, 64)
        assert memory.num_used == 4
        memory.release(turn)
        assert memory.prefix.num_idle == [4] and memory.num_used == 0
    assert len(memory.prefix._heaps[0]) < 100
    assert [memory.prefix.watch(slot, chain, 63) for slot in range(5)] == [48] * 5
    for slot in range(5):
        memory.prefix.forget(slot)
    assert not memory.prefix._watched and not memory.prefix._waits_for


def test_nobody_waits_for_a_leader_that_does_not_get_on() -> None:
    def waits_s(num_shared: int) -> float:
        second = Asking(0.05, 2900, 1, 1, document=1, num_shared=2900)
        load = [Asking(0.0, 2900, 1, 1, num_shared=2900), second, Asking(0.3, 430, 1, 1, num_shared=num_shared)]
        config = SchedulerConfig(max_kv_per_group=3200, max_batch_tokens=128, long_threshold=500, policy="lars")
        world = {"config": config, "num_groups": 1, "num_blocks": 1000, "load": load, "block_size": 16}
        return play(world).first_token_s[2]

    assert waits_s(400) <= waits_s(0)


def test_what_finds_no_room_for_one_is_not_tried_for_all() -> None:
    options = {"max_num_seqs": 64, "max_batch_tokens": 256, "max_kv_per_group": 640}
    scheduler = new_scheduler("sarathi", num_blocks=20, block_size=32, **options)
    ids = ids_of(320)
    for slot in range(32):  # 10 blocks shared, 9 of their own: one of them runs at a time
        add(scheduler, slot, 320, 280, 0.0, prefix=ids)
    with mock.patch.object(PrefixCache, "hold", autospec=True, side_effect=PrefixCache.hold) as held:
        for turn in range(20):
            step(scheduler, float(turn), 0.5)
    assert len(scheduler._queue.waiting) == 31
    assert 20 <= held.call_count <= 20 * 4


@pytest.mark.parametrize("is_out", [True, False])
def test_a_reset_is_of_what_is_on_the_host_as_well(is_out: bool) -> None:
    """Also of what goes there behind it."""
    options = {"max_kv_per_group": 2560, "num_swap_blocks": 80, "swap_block_s": 1e-6}
    scheduler = new_scheduler(num_blocks=40, block_size=64, policy="priority", max_batch_tokens=256, **options)
    ids = ids_of(1600)
    add(scheduler, 0, 1600, 50, 0.0, priority=3, prefix=ids)

    def run_until(slot: int, is_over: bool = False) -> list[Batch]:
        batches = []
        while (slot in scheduler._queue) if is_over else (slot not in scheduler._queue.decoding):
            batches.append(step(scheduler, 0.0, 0.01, ended=(1, 2)))
        return batches

    run_until(0)
    if not is_out:
        scheduler.reset_prefix_cache()
    add(scheduler, 1, 2300, 1, 0.0, priority=0)
    run_until(1, is_over=True)
    if is_out:
        scheduler.reset_prefix_cache()
    assert any(batch.swaps_in for batch in run_until(0)) or scheduler.memory.swapped_on(0) is None
    add(scheduler, 2, 1600, 1, 0.0, priority=2, prefix=ids)
    assert not any(batch.shared for batch in run_until(2, is_over=True))


def ids_of(shared: int, own: int = 0, count: int = 0) -> bytes:
    """Of a prompt that begins with so many tokens of everybody's."""
    return IDS.of(np.array([*range(shared), *range(own, own + count)], np.int32))


def serve(scheduler: Scheduler, num_prompt: int, prefix: bytes) -> None:
    """A request comes and goes."""
    add(scheduler, 0, num_prompt, prefix=prefix)
    while scheduler.knows(0):
        step(scheduler, ended=[0])


def test_a_refused_request_is_not_taken_for_one_that_fits() -> None:
    scheduler = new_scheduler(num_blocks=20, chunk_size=64, policy="fcfs")
    serve(scheduler, 80, ids_of(64, 1000, 16))
    add(scheduler, 1, 80, 81, 0.0)
    step(scheduler)
    step(scheduler)
    add(scheduler, 2, 80, 97, 0.2, prefix=ids_of(64, 2000, 16))  # all of it would have to be set aside
    add(scheduler, 3, 192, 1, 0.3, prefix=ids_of(64, 3000, 128))
    assert [row.slot for row in step(scheduler, 0.4).rows] == [1, 3]


def test_a_reset_tells_who_counts_on_the_host() -> None:
    scheduler = new_scheduler(num_blocks=200, num_swap_blocks=200, max_num_seqs=1)
    ids = ids_of(1600)
    serve(scheduler, 1601, ids)
    scheduler.memory.prefix.make_free(0, 200)
    add(scheduler, 1, 50, 2, 0.0)
    step(scheduler)
    add(scheduler, 2, 1620, 1, 0.0, prefix=ids)
    assert scheduler.num_there(2) == 1600
    scheduler.reset_prefix_cache()
    step(scheduler)
    assert scheduler.num_there(2) == 0


@pytest.mark.parametrize("num_own", [16, 40])
def test_those_of_one_prefix_are_not_tried_in_vain(num_own: int) -> None:
    """Where no end of theirs fits what is left of the batch's time: each would be bound, and let go again."""
    scheduler = new_scheduler(num_blocks=100_000, max_num_seqs=1000, max_batch_tokens=16_384)
    serve(scheduler, 1024, ids_of(1024))
    for slot in range(1, 500):
        add(scheduler, slot, 1024 + num_own, 1, 0.0, prefix=ids_of(1024, 2000 * slot, num_own))
    with mock.patch.object(KVMemory, "start", autospec=True, side_effect=KVMemory.start) as bound:
        for _ in range(10):
            bound.reset_mock()
            assert len(step(scheduler, ended=range(500)).rows) == bound.call_count < 20


def test_what_is_there_of_a_refused_request_stays_known() -> None:
    scheduler = new_scheduler(num_blocks=100, num_groups=2, policy="srpt")
    serve(scheduler, 961, ids_of(960))
    scheduler.memory.spread_kv = 1600
    for slot, new in ((1, 1550), (2, 1580)):  # a group each, all of whose memory they are promised
        add(scheduler, slot, 16, new, 0.0)
    for _ in range(3):
        step(scheduler, 0.1)
    add(scheduler, 4, 1000, 1, 0.2, prefix=ids_of(960))
    assert scheduler.num_there(4) == 960
    assert scheduler.schedule(0.3).refused == (4,) and scheduler.num_there(4) == 960


@pytest.mark.parametrize("num_shared", [512, 8192])
def test_of_what_many_wait_for_each_group_gets_one_copy(num_shared: int) -> None:
    """Where to wait for the group that has it takes longer than to read it anew, and nobody reads it there."""
    options: dict[str, Any] = {"num_groups": 4, "predictor": by_tokens(), "quantum_s": 1.0, "late_share": 0.0}
    scheduler = new_scheduler(max_batch_tokens=1024, max_num_seqs=1000, **options)
    for slot in range(400):
        add(scheduler, slot, num_shared + 64, prefix=ids_of(num_shared, 10_000 * (slot + 1), 64))
    read, busy = [0] * 4, list[int]()
    while scheduler.num_running or scheduler.num_waiting:
        batch = step(scheduler, ended=range(400))
        busy.append(len({row.group for row in batch.rows}))
        for row in batch.rows:
            read[row.group] += row.q_len
    assert sum(read) <= 400 * 64 + 4 * num_shared + 1024 and min(read) > num_shared
    assert np.mean(busy) > 2


def test_where_another_group_would_be_sooner_but_has_no_memory_it_shares_at_once() -> None:
    """Nor does it speak for one without a prefix, which may begin on both."""
    options: dict[str, Any] = {"t_target_s": 0.6, "late_share": 0.0, "policy": "fcfs", "chunk_size": 200}
    scheduler = new_scheduler(num_blocks=256, num_groups=2, predictor=by_tokens(), **options)
    own = np.arange(1000, 1300)
    serve(scheduler, 96, chain_of(np.arange(32), own[:64])._ids)
    read_first(scheduler.memory, 60, chain_of(own), 4096, 4096, group=1, samples=True)  # it has all blocks there
    scheduler.memory.batch(900)
    add(scheduler, 1, 3000, 1)
    add(scheduler, 2, 332, 1, 0.1, prefix=chain_of(np.arange(32), own)._ids)
    add(scheduler, 3, 332, 1, 0.2)
    assert {row.slot for row in step(scheduler, 1.0).rows} == {1, 2, 3}
