"""Freedom from deadlock: the real scheduler, engine and protocol over a transport without buffers.

The model computes nothing real: a hidden state is a number that mixes all earlier tokens with their positions, so a
token that was lost, late, doubled or out of order anywhere changes every later one.
"""

import itertools
import random
from collections import defaultdict
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings, strategies as st

import medha.engine.wire
import medha.parallel.control
from medha.attention.interface import AttentionBackend, AttentionRows, LayerShape
from medha.config import ParallelConfig, RopeConfig, SchedulerConfig
from medha.engine.distributed import DrivingRunner, Follower
from medha.engine.engine import Engine
from medha.engine.request import ModelLimits
from medha.engine.wire import ReportLine
from medha.outputs import RequestOutput
from medha.parallel.control import ControlSender, Message
from medha.parallel.kvp import Merge
from medha.parallel.mesh import Ranks
from medha.parallel.spp import Digests, StagePipe
from medha.parallel.tp import all_reduce_over
from medha.params import SamplingParams
from medha.sched.scheduler import Scheduler
from medha.worker.kv_cache import KVCache
from medha.worker.runner import Runner
from tests.parallel.rendezvous import DeadlockError, Group, Transport
from tests.sched.virtual import by_tokens

NUM_LAYERS = 4
BLOCK_SIZE = 4
NUM_BLOCKS = 16  # of one rank; workloads choose their own for several
MAX_KV_TOKENS = 24  # of one request
TOY_VOCAB = 16
DIM = 2
MODULUS = 65521  # sums of products stay exact in float32 and int64
Outputs = dict[str, RequestOutput]


def ranks(kvp: int, spp: int, tp: int) -> ParallelConfig:
    return ParallelConfig(tp=tp, spp=spp, kvp=kvp)


GROUPS = (ranks(2, 1, 1), ranks(3, 1, 1), ranks(2, 2, 1), ranks(2, 1, 2))
LAYOUTS = (ranks(1, 2, 1), ranks(1, 3, 1), ranks(1, 2, 2), ranks(1, 1, 2), *GROUPS)


class Arrival(NamedTuple):
    """A request of a workload: when it comes and goes in steps of the engine, and its lengths."""

    step: int
    num_prompt_tokens: int
    max_tokens: int
    abort_after: int | None = None

    def prompt(self, index: int) -> list[int]:
        draw = random.Random(f"{index} {self.num_prompt_tokens}")
        return [draw.randrange(TOY_VOCAB) for _ in range(self.num_prompt_tokens)]


class Workload(NamedTuple):
    arrivals: tuple[Arrival, ...]
    chunk_size: int
    max_batch_tokens: int
    max_num_seqs: int
    depth: int | None
    spare_blocks: int = NUM_BLOCKS  # of each group's pool, beyond what the longest request takes of it


class Buffers(NamedTuple):
    """How much may be in flight: few, so that every wait for a free buffer is met."""

    stage: int  # hidden states
    reports: int
    messages: int
    posted: int  # receives of messages
    frame_ints: int
    tokens: int  # sets of drawn ones that no decode needs


FEW = st.sampled_from((1, 2, 64))
BUFFERS = st.builds(Buffers, st.integers(1, 5), FEW, FEW, st.integers(1, 4), st.sampled_from((8, 64, 1 << 17)), FEW)
ARRIVALS = st.builds(Arrival, st.integers(0, 12), st.integers(1, 20), st.integers(1, 5), st.none() | st.integers(0, 12))
WORKLOADS = st.builds(
    Workload,
    st.lists(ARRIVALS, min_size=1, max_size=6).map(tuple),
    st.integers(1, 8),
    st.integers(6, 12),
    st.integers(1, 5),
    st.none() | st.integers(1, 5),
    st.sampled_from((0, 2, NUM_BLOCKS)),
)
"""Prompts of up to 20 tokens in chunks of up to 8."""


def drive(engine: Engine, workload: Workload, ask: Callable[[], object] = lambda: None) -> Outputs:
    """Run a workload to its end; arrivals and aborts happen between steps, and now and then a question is asked."""
    waiting = sorted(enumerate(workload.arrivals), key=lambda pair: pair[1].step)
    aborts = defaultdict[int, list[str]](list)
    outputs: Outputs = {}
    step = 0
    while waiting or engine.has_unfinished:
        while waiting and (waiting[0][1].step <= step or not engine.has_unfinished):
            index, arrival = waiting.pop(0)
            params = SamplingParams(temperature=0.0, max_tokens=arrival.max_tokens, output_kind="final_only")
            engine.add_request(str(index), arrival.prompt(index), params)
            if arrival.abort_after is not None:
                aborts[step + arrival.abort_after].append(str(index))
        for request_id in aborts[step]:
            engine.abort(request_id)
        outputs |= {output.request_id: output for output in engine.step() if output.finished}
        if step % 5 == 2:
            ask()
        step += 1
    assert engine.scheduler.memory.num_used == 0
    assert not engine.by_slot
    return outputs


def check(outputs: Outputs, expected: Outputs, workload: Workload) -> None:
    assert sorted(outputs) == sorted(expected) == sorted(map(str, range(len(workload.arrivals))))
    for name, output in outputs.items():
        tokens, truth = output.outputs[0].token_ids, expected[name].outputs[0].token_ids
        if output.outputs[0].finish_reason == "abort":
            assert workload.arrivals[int(name)].abort_after is not None
            assert tokens == truth[: len(tokens)]
        else:
            assert tokens == truth


# -- a model of a model ------------------------------------------------------------------------------------


class ToyModel:
    """Some layers of a decoder that mixes integers; rows are split over a tensor-parallel group and summed."""

    def __init__(self, layout: ParallelConfig, rank: int, all_reduce: Callable[[torch.Tensor], torch.Tensor]) -> None:
        _, stage, self._tp_rank = layout.coordinates(rank)
        self.layers = layout.layers_of(stage, NUM_LAYERS)
        self.config = SimpleNamespace(rope=RopeConfig(), head_dim=DIM)
        self.has_embedding = self.layers.start == 0
        self.has_head = self.layers.stop == NUM_LAYERS
        self.head = None
        self._tp, self._all_reduce = layout.tp, all_reduce

    def embed(self, ids_T: torch.Tensor) -> torch.Tensor:
        mine = torch.where(ids_T % self._tp == self._tp_rank, ids_T + 1, 0)
        return self._all_reduce(mine).float()[:, None].expand(-1, DIM).contiguous()

    def __call__(self, x_TD: torch.Tensor, positions: torch.Tensor, attend: Any) -> torch.Tensor:
        own = torch.arange(len(x_TD)) % self._tp == self._tp_rank
        k_TKH = (positions + 1.0)[:, None, None].expand(-1, 1, DIM)  # see _toy_arithmetic
        for i, layer in enumerate(self.layers):
            x_TKH = x_TD[:, None, :]
            mixed_TD = (attend(i, x_TKH, k_TKH, x_TKH)[:, 0] + 3 * x_TD + layer) % MODULUS
            x_TD = self._all_reduce(mixed_TD * own[:, None])
        return x_TD

    def logits(self, x_SD: torch.Tensor, *, head: None) -> torch.Tensor:
        one_hot = torch.nn.functional.one_hot(x_SD[:, 0].long() % TOY_VOCAB, TOY_VOCAB).float()
        return self._all_reduce(one_hot if self._tp_rank == 0 else torch.zeros_like(one_hot))


class ToyAttention(AttentionBackend):
    """For each query the sum of all values up to it, each times its position (from 1), which is its key."""

    name = "toy"

    def plan(self, rows: AttentionRows) -> AttentionRows:
        return rows

    def run(self, q_TNH: torch.Tensor, k_PKH: torch.Tensor, v_PKH: torch.Tensor, plan: Any) -> Any:
        out_TNH = torch.empty_like(q_TNH)
        tables = np.split(plan.pages, plan.page_indptr[1:-1])
        for row, (pages, queries) in enumerate(zip(tables, itertools.pairwise(plan.q_indptr.tolist()), strict=True)):
            at = (pages[:, None] * plan.page_size + np.arange(plan.page_size)).ravel()[: plan.kv_len[row]]
            products = k_PKH[at][:, 0, :].double() * v_PKH[at][:, 0, :].double()
            sums = products.cumsum(0)[-plan.q_len[row] :] if plan.causal[row] else products.sum(0)[None]
            out_TNH[slice(*queries)] = (sums % MODULUS)[:, None, :].float()
        return out_TNH, torch.zeros(out_TNH.shape[:2])


def toy_merge(partials: list[tuple[torch.Tensor, torch.Tensor]], **_: bool) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.stack([out for out, _ in partials]).sum(0) % MODULUS, partials[0][1]


@pytest.fixture(autouse=True)
def _toy_arithmetic(monkeypatch: pytest.MonkeyPatch) -> None:
    """Parts of attention add up, and layers get positions where a rotation would be."""
    monkeypatch.setattr("medha.parallel.kvp.merge_partials", toy_merge)
    monkeypatch.setattr("medha.worker.runner.cos_sin", lambda positions, *_: positions)


def pool_of(workload: Workload, layout: ParallelConfig) -> dict[str, int]:
    """Each group's pool: its share of the longest request, and what the workload spares."""
    share = -(-MAX_KV_TOKENS // (layout.kvp * BLOCK_SIZE))
    return {"num_blocks": share + workload.spare_blocks, "block_size": BLOCK_SIZE}


def toy_runner(workload: Workload, layout: ParallelConfig, rank: int, all_reduce: Any, **place: Any) -> Runner:
    """What a rank runs; ``place`` is what :class:`Runner` takes by name."""
    model: Any = ToyModel(layout, rank, all_reduce)
    shape, cpu = LayerShape(1, 1, DIM, torch.float32), torch.device("cpu")
    cache = KVCache(shape, num_layers=len(model.layers), **pool_of(workload, layout), device=cpu)
    return Runner(model, cache, ToyAttention(), cpu, **place)


def toy_engine(runner: Any, workload: Workload, layout: ParallelConfig) -> Engine:
    pool = pool_of(workload, layout)
    config = SchedulerConfig(
        "sarathi",
        max_num_seqs=workload.max_num_seqs,
        max_batch_tokens=workload.max_batch_tokens,
        chunk_size=min(workload.chunk_size, workload.max_batch_tokens),
        depth=workload.depth or (layout.spp + 1 if layout.spp > 1 else 1),
        max_kv_per_group=(pool["num_blocks"] - workload.spare_blocks) * BLOCK_SIZE,
    )
    scheduler = Scheduler(config, **pool, num_groups=layout.kvp, predictor=by_tokens())
    limits = ModelLimits(TOY_VOCAB, 1000, eos_token_ids=(0,))
    return Engine(runner, scheduler, limits, clock=itertools.count(0.0).__next__)


def on_one_rank(workload: Workload) -> Outputs:
    """What each request gives if nobody aborts it."""
    patient = workload._replace(arrivals=tuple(a._replace(abort_after=None) for a in workload.arrivals))
    runner = toy_runner(patient, ParallelConfig(), 0, lambda x: x)
    return drive(toy_engine(runner, patient, ParallelConfig()), patient)


def toy_ranks(config: ParallelConfig, rank: int) -> Ranks:
    group, stage, tp_rank = config.coordinates(rank)
    everyone = tuple(range(config.world_size))
    peers = tuple(config.rank_of(stage=stage, tp_rank=t, kvp_rank=group) for t in range(config.tp))
    among = tuple(config.rank_of(stage=stage, tp_rank=tp_rank, kvp_rank=g) for g in range(config.kvp))
    pipe, report, control = (Group(name, rank, everyone) for name in ("pipe", "report", "control"))
    tp_group = Group(f"tp of stage {stage} of group {group}", rank, peers)
    merges = Group(f"merges of stage {stage}, tp {tp_rank}", rank, among)
    mesh = transfers = None  # which nothing here asks for
    job: Any = SimpleNamespace(monitor=mock.Mock(has_failure=False, place="this rank"))
    return Ranks(config, rank, group, stage, tp_rank, mesh, tp_group, pipe, report, control, merges, transfers, job)


def on_ranks(workload: Workload, config: ParallelConfig, limits: Buffers, transport: Transport) -> Outputs:
    """Run a workload on a layout, every rank in a thread of the model, in the interleaving of the transport."""
    collected: list[Outputs] = []

    def rank_main(rank: int) -> None:
        ranks = toy_ranks(config, rank)
        digests = Digests(ranks.report_group)
        pipe = StagePipe(ranks, digests, torch.empty(0), dim=DIM, num_buffers=limits.stage)
        merge = Merge(ranks.merge_group, digests, ranks=ranks.merge_group.members, own=ranks.group)
        place = {"pipe": pipe, "merge": merge, "samples": ranks.is_sampler, "group": ranks.group}
        all_reduce = all_reduce_over(ranks.tp_group) if config.tp > 1 else (lambda x: x)
        runner = toy_runner(workload, config, rank, all_reduce, **place)
        if rank != 0:
            follower = Follower(runner, ranks)
            follower.call("generate", list)
            follower.stop()
            return
        driving = DrivingRunner(runner, ranks, ControlSender(ranks.control_group, range(1, config.world_size)))
        engine = toy_engine(driving, workload, config)

        def generate() -> list[RequestOutput]:
            collected.append(drive(engine, workload, driving.gather_records))
            return []

        driving.call("generate", generate)
        driving.stop()

    with transport.installed(config.world_size), pytest.MonkeyPatch.context() as patch:
        patch.setattr(medha.engine.wire, "_REPORTS_IN_FLIGHT", limits.reports)
        patch.setattr(medha.engine.wire, "_TOKENS_IN_FLIGHT", limits.tokens)
        patch.setattr(medha.parallel.control, "_RING", limits.messages)
        patch.setattr(medha.parallel.control, "_POSTED", limits.posted)
        patch.setattr(medha.parallel.control, "FRAME_INTS", limits.frame_ints)
        for rank in range(config.world_size):
            transport.spawn(f"rank {rank}", lambda rank=rank: rank_main(rank))
        transport.run()
    return collected[0]


@pytest.mark.parametrize("max_examples", [8, pytest.param(300, marks=pytest.mark.slow)])
@pytest.mark.parametrize("layout", [*LAYOUTS, ranks(1, 3, 2)], ids=str)
def test_no_deadlock_without_buffers(layout: ParallelConfig, max_examples: int) -> None:
    @settings(max_examples=max_examples, deadline=None, database=None, suppress_health_check=list(HealthCheck))
    @given(WORKLOADS, st.integers(0, 2**32), BUFFERS)
    def every_run_ends(workload: Workload, seed: int, limits: Buffers) -> None:
        check(on_ranks(workload, layout, limits, Transport(seed)), on_one_rank(workload), workload)

    every_run_ends()


# -- the model can find a deadlock ------------------------------------------------------------------------------------

Mutation = Callable[[pytest.MonkeyPatch], None]


def synchronous(kind: Any) -> Mutation:
    """Every send of a ReportLine or StagePipe waits until it is done."""
    send = kind.send

    def send_and_wait(self: Any, *args: Any, **kwargs: Any) -> None:
        send(self, *args, **kwargs)
        for sends in (self._sends, getattr(self, "digests", self._sends)):
            sends.drain()

    return lambda patch: patch.setattr(kind, "send", send_and_wait)


def merge_synchronously(patch: pytest.MonkeyPatch) -> None:
    """merges are waited for one after the other, before anything else is computed."""
    start = Merge.start

    def start_and_wait(self: Merge, parts: Any, *, compare: bool) -> Any:
        merged = [out for part in parts for out in start(self, [part], compare=compare)()]
        return lambda: merged

    patch.setattr(Merge, "start", start_and_wait)


def send_messages_late(patch: pytest.MonkeyPatch) -> None:
    """rank 0 computes its part of a batch before it tells the others of the batch."""
    run, send, held = Runner.run, ControlSender.send, list[Callable[[], None]]()

    def hold(self: ControlSender, message: Message, **more: Any) -> None:
        if message.batch is None:
            send(self, message, **more)
        else:
            held.append(partial(send, self, message, **more))

    def run_then_send(self: Runner, *args: Any, **kwargs: Any) -> Any:
        result = run(self, *args, **kwargs)
        while held:
            held.pop(0)()
        return result

    patch.setattr(ControlSender, "send", hold)
    patch.setattr(Runner, "run", run_then_send)


SYNCHRONOUS = (synchronous(ReportLine), synchronous(StagePipe), merge_synchronously)
BUSY = Workload((Arrival(0, 8, 4), Arrival(0, 8, 4), Arrival(1, 16, 3)), 8, 8, 4, None)
AMPLE = Buffers(stage=64, reports=64, messages=64, posted=4, frame_ints=1 << 17, tokens=64)


# On three groups of 8 tokens the requests lie on the runs 0-2, 1-2 and 0-1, and two of them at a time share a batch.
CROSSED = Workload((Arrival(0, 20, 5), Arrival(0, 10, 5), Arrival(0, 10, 5)), 8, 8, 4, None)


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_waiting_at_once_alone_is_no_deadlock(layout: ParallelConfig) -> None:
    """Receives are posted ahead and collectives have one order."""
    with pytest.MonkeyPatch.context() as patch:
        for mutate in SYNCHRONOUS:
            mutate(patch)
        check(on_ranks(CROSSED, layout, AMPLE, Transport(1)), on_one_rank(CROSSED), CROSSED)


def test_tokens_of_batches_that_are_yet_to_run_are_not_waited_for() -> None:
    """With more in flight than are kept."""
    deep = BUSY._replace(max_batch_tokens=6, chunk_size=1, depth=5)
    check(on_ranks(deep, ranks(1, 2, 1), AMPLE._replace(tokens=1), Transport(0)), on_one_rank(deep), deep)


@pytest.mark.parametrize(
    ("layout", "place"),
    [
        (ranks(1, 2, 2), r"rank 0, medha-own: in collective \d+ of tp of stage 0 of group 0"),
        (ranks(3, 1, 1), "rank 0, medha-own: receives from rank 1 in report"),  # its digest
    ],
)
def test_messages_sent_late_are_a_deadlock(layout: ParallelConfig, place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    send_messages_late(monkeypatch)
    with pytest.raises(DeadlockError, match=place) as caught:
        on_ranks(BUSY._replace(depth=layout.spp + 1), layout, AMPLE, Transport(0))
    places = [place for line in str(caught.value).splitlines()[1:] if "," not in (place := line.partition(":")[0])]
    assert sorted(places) == [f"  rank {rank}" for rank in range(layout.world_size)]


@pytest.mark.parametrize("layout", [ranks(1, 3, 1), ranks(3, 1, 1), ranks(3, 2, 1), ranks(2, 2, 2)], ids=str)
def test_no_batch_is_encoded_twice_and_no_message_twice_for_a_group(layout: ParallelConfig) -> None:
    """However many ranks of a group are told the same; and the batch itself once, whatever goes with it to each."""
    control = medha.parallel.control
    with (
        mock.patch.object(control, "encode", wraps=control.encode) as encode,
        mock.patch.object(control, "encode_batch", wraps=control.encode_batch) as encode_batch,
    ):
        on_ranks(CROSSED, layout, AMPLE, Transport(0))
    sent = [call for call in encode.call_args_list if call.args[0].batch is not None]
    plans = [call.args[0] for call in encode_batch.call_args_list if call.args[0] is not None]
    assert len(plans) <= len(sent) <= layout.num_groups * len(plans)
    assert [batch.batch_id for batch in plans] == list(range(len(plans)))


@pytest.mark.parametrize("layout", [ranks(1, 2, 1), ranks(2, 1, 1)], ids=str)
def test_no_message_grows_with_a_prompt(layout: ParallelConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    """One of 100 or 600 tokens is read in chunks of 8 beside a decode, and given up."""
    monkeypatch.setattr("tests.parallel.test_deadlock.MAX_KV_TOKENS", 1400)
    control, sizes = medha.parallel.control, []
    for length in (100, 600):
        workload = Workload((Arrival(0, 3, 40), Arrival(4, length, 1, abort_after=10)), 8, 12, 4, None)
        with mock.patch.object(control, "encode", wraps=control.encode) as encode:
            on_ranks(workload, layout, AMPLE, Transport(0))
        sizes.append([len(control.encode(call.args[0])) for call in encode.call_args_list])
    assert sizes[0] == sizes[1] and len(sizes[0]) > 20


@pytest.mark.parametrize("layout", GROUPS, ids=str)
def test_a_group_that_a_batch_does_not_concern_does_nothing(layout: ParallelConfig) -> None:
    """A request that fits one group: the ranks of the others read messages, are told its tokens as it may grow, and are
    asked for their records."""
    assert busy_ranks(BUSY._replace(arrivals=(Arrival(0, 5, 3),)), layout) <= set(range(layout.spp * layout.tp))
    assert busy_ranks(BUSY, layout) == set(range(layout.world_size))


def busy_ranks(workload: Workload, layout: ParallelConfig) -> set[int]:
    """The ranks that pass on hidden states or tokens, or take part in a collective."""
    on_ranks(workload, layout, AMPLE, transport := Transport(0))
    tags = medha.engine.wire._RECORDS_TAG, medha.engine.wire._TOKENS_TAG
    quiet = {("control", 0), ("barrier", 0), *(("report", tag) for tag in tags)}
    return {rank for rank, *what in transport.operations if tuple(what) not in quiet}
