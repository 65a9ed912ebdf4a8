"""Freedom from deadlock: the real scheduler, engine and protocol over a transport without buffers, and over gloo.

The model computes nothing real: a hidden state is a number that mixes all earlier tokens with their positions, so a
token that was lost, late, doubled or out of order anywhere changes every later one.
"""

from __future__ import annotations

import dataclasses
import itertools
import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

import medha.distributed
import medha.parallel.control
from medha.batch import Batch
from medha.config import ParallelConfig, RopeConfig, SchedulerConfig
from medha.distributed import Caller, DrivingRunner, Follower, ReportLine
from medha.engine import Engine, ModelLimits
from medha.errors import PlanDivergenceError
from medha.kv_cache import KVCache
from medha.parallel.control import ControlReceiver, ControlSender, Message
from medha.parallel.mesh import Ranks
from medha.parallel.spp import StagePipe
from medha.request import RequestOutput, SamplingParams
from medha.runner import Runner
from medha.sched.scheduler import Scheduler
from tests.checkpoints import VOCAB, make_checkpoint
from tests.engines import load_decoder, make_engine
from tests.parallel.rendezvous import DeadlockError, Group, Transport
from tests.parallel.workers import WorkerPool

LAYOUTS = ((1, 2), (1, 3), (1, 4), (2, 1), (2, 2), (4, 1), (2, 3))
NUM_LAYERS = 4
BLOCK_SIZE = 4
NUM_BLOCKS = 16
TOY_VOCAB = 16
DIM = 2
MODULUS = 65521  # sums of products stay exact in float32 and int64


@dataclass(frozen=True)
class Arrival:
    """A request of a workload: when it comes and goes in steps of the engine, and its lengths."""

    step: int
    num_prompt_tokens: int
    max_tokens: int
    abort_after: int | None

    def prompt(self, index: int, vocab_size: int) -> list[int]:
        draw = random.Random(f"{index} {self.num_prompt_tokens}")
        return [draw.randrange(vocab_size) for _ in range(self.num_prompt_tokens)]


@dataclass(frozen=True)
class Workload:
    """Requests and the scheduler's budgets."""

    arrivals: tuple[Arrival, ...]
    chunk_size: int
    max_batch_tokens: int
    max_num_seqs: int
    depth: int | None


@dataclass(frozen=True)
class Buffers:
    """How much may be in flight: few, so that every wait for a free buffer is met."""

    stage: int  # hidden states
    reports: int
    messages: int
    posted: int  # receives of messages
    frame_ints: int


def buffers() -> st.SearchStrategy[Buffers]:
    few = st.sampled_from((1, 2, 64))
    return st.builds(Buffers, st.integers(1, 5), few, few, st.integers(1, 4), st.sampled_from((8, 64, 1 << 17)))


def workloads(scale: int = 1) -> st.SearchStrategy[Workload]:
    """Prompts of up to 20 tokens (times ``scale``) in chunks of up to 8."""
    arrival = st.builds(
        Arrival,
        st.integers(0, 12),
        st.integers(1, 20 * scale),
        st.integers(1, 5),
        st.none() | st.integers(0, 12),
    )
    return st.builds(
        Workload,
        st.lists(arrival, min_size=1, max_size=6).map(tuple),
        st.integers(1, 8 * scale),
        st.integers(6, 12).map(lambda n: n * scale),
        st.integers(1, 5),
        st.none() | st.integers(1, 5),
    )


def drive(
    engine: Engine, workload: Workload, vocab_size: int, after_step: Callable[[int], object] = lambda step: None
) -> dict[str, RequestOutput]:
    """Run a workload to its end; arrivals and aborts happen between steps."""
    waiting = sorted(enumerate(workload.arrivals), key=lambda pair: pair[1].step)
    aborts: list[tuple[int, str]] = []
    outputs: dict[str, RequestOutput] = {}
    step = 0
    while waiting or engine.has_unfinished:
        while waiting and (waiting[0][1].step <= step or not engine.has_unfinished):
            index, arrival = waiting.pop(0)
            params = SamplingParams(temperature=0.0, max_tokens=arrival.max_tokens, output_kind="final_only")
            engine.add_request(str(index), arrival.prompt(index, vocab_size), params)
            if arrival.abort_after is not None:
                aborts.append((step + arrival.abort_after, str(index)))
        for when, request_id in aborts:
            if when == step:
                engine.abort(request_id)
        outputs |= {output.request_id: output for output in engine.step() if output.finished}
        after_step(step)
        step += 1
    assert engine.scheduler.memory.num_used == 0
    assert not engine._by_slot
    return outputs


def check(outputs: dict[str, RequestOutput], expected: dict[str, RequestOutput], workload: Workload) -> None:
    """Every request has ended, with the right tokens, or a prefix of them if it was aborted."""
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

    def __init__(
        self, layers: range, tp: int, tp_rank: int, all_reduce: Callable[[torch.Tensor], torch.Tensor]
    ) -> None:
        self.config = SimpleNamespace(rope=RopeConfig(), head_dim=DIM)
        self.has_embedding = layers.start == 0
        self.has_head = layers.stop == NUM_LAYERS
        self._layers = layers
        self._tp, self._tp_rank = tp, tp_rank
        self._all_reduce = all_reduce

    def embed(self, ids_T: torch.Tensor) -> torch.Tensor:
        mine = torch.where(ids_T % self._tp == self._tp_rank, ids_T + 1, 0)
        return self._all_reduce(mine).float()[:, None].expand(-1, DIM).contiguous()

    def __call__(self, x_TD: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, attend: Any) -> torch.Tensor:
        own = torch.arange(len(x_TD)) % self._tp == self._tp_rank
        for i, layer in enumerate(self._layers):
            x_TKH = x_TD[:, None, :]
            mixed_TD = (attend(i, x_TKH, x_TKH, x_TKH)[:, 0] + 3 * x_TD + layer) % MODULUS
            x_TD = self._all_reduce(mixed_TD * own[:, None])
        return x_TD

    def logits(self, x_SD: torch.Tensor) -> torch.Tensor:
        one_hot = torch.nn.functional.one_hot(x_SD[:, 0].long() % TOY_VOCAB, TOY_VOCAB).float()
        return self._all_reduce(one_hot if self._tp_rank == 0 else torch.zeros_like(one_hot))


class ToyAttention:
    """For each query the sum of all values up to it, each times its position."""

    name = "toy"

    def plan(self, segments: Any) -> Any:
        return segments

    def run(self, q_TNH: torch.Tensor, k_PKH: torch.Tensor, v_PKH: torch.Tensor, plan: Any) -> Any:
        out_TNH = torch.empty_like(q_TNH)
        for segment in plan:
            values = torch.cat([v_PKH[first : first + count] for first, count in segment.ranges])[:, 0, :].double()
            sums = (values * torch.arange(1, len(values) + 1)[:, None]).cumsum(0)[-segment.q_len :] % MODULUS
            out_TNH[segment.q_start : segment.q_start + segment.q_len] = sums[:, None, :].float()
        return out_TNH, None


def toy_runner(
    layers: range, pipe: StagePipe | None, *, samples: bool, tp: int, tp_rank: int, all_reduce: Any
) -> Runner:
    cache = KVCache(
        num_layers=len(layers),
        num_blocks=NUM_BLOCKS,
        block_size=BLOCK_SIZE,
        num_kv_heads=1,
        head_dim=DIM,
        dtype=torch.float32,
        device=torch.device("cpu"),
    )
    model: Any = ToyModel(layers, tp, tp_rank, all_reduce)
    return Runner(model, cache, ToyAttention(), torch.device("cpu"), pipe=pipe, samples=samples)


def toy_engine(runner: Any, workload: Workload, depth: int) -> Engine:
    scheduler = SchedulerConfig(
        "sarathi",
        max_num_seqs=workload.max_num_seqs,
        max_batch_tokens=workload.max_batch_tokens,
        chunk_size=min(workload.chunk_size, workload.max_batch_tokens),
        depth=workload.depth or depth,
    )
    limits = ModelLimits(TOY_VOCAB, 1000, eos_token_ids=(0,))
    ticks = itertools.count()
    return Engine(
        runner,
        Scheduler(scheduler, num_blocks=NUM_BLOCKS, block_size=BLOCK_SIZE),
        limits,
        clock=lambda: float(next(ticks)),
    )


def on_one_rank(workload: Workload) -> dict[str, RequestOutput]:
    """What each request gives if nobody aborts it."""
    runner = toy_runner(range(NUM_LAYERS), None, samples=True, tp=1, tp_rank=0, all_reduce=lambda x: x)
    patient = dataclasses.replace(
        workload, arrivals=tuple(dataclasses.replace(a, abort_after=None) for a in workload.arrivals)
    )
    return drive(toy_engine(runner, patient, 1), patient, TOY_VOCAB)


class QuietMonitor:
    """A failure monitor that has nothing to tell."""

    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda *_, **__: None

    def leave(self) -> bool:
        return True


def toy_ranks(transport: Transport, config: ParallelConfig, rank: int) -> Ranks:
    _, stage, tp_rank = config.coordinates(rank)
    everyone = tuple(range(config.world_size))
    peers = tuple(config.rank_of(stage=stage, tp_rank=t) for t in range(config.tp))
    values: dict[str, Any] = {
        "config": config,
        "rank": rank,
        "stage": stage,
        "tp_rank": tp_rank,
        "tp_group": Group(transport, f"tp of stage {stage}", rank, peers),
        "job": SimpleNamespace(monitor=QuietMonitor(), place=f"rank {rank}"),
    }
    for name in ("pipe", "report", "control"):
        values[f"{name}_group"] = Group(transport, name, rank, everyone)
    return Ranks(**{f.name: values.get(f.name) for f in dataclasses.fields(Ranks)})


def on_ranks(workload: Workload, layout: tuple[int, int], seed: int, limits: Buffers) -> dict[str, RequestOutput]:
    """Run a workload on a layout, every rank in a thread of the model, in the interleaving that ``seed`` chooses."""
    config = ParallelConfig(tp=layout[0], spp=layout[1])
    transport = Transport(seed)
    collected: list[dict[str, RequestOutput]] = []

    def rank_main(rank: int) -> None:
        ranks = toy_ranks(transport, config, rank)
        pipe = StagePipe(
            ranks.pipe_group,
            previous=ranks.neighbour(-1),
            following=ranks.neighbour(1),
            dim=DIM,
            dtype=torch.float32,
            num_buffers=limits.stage,
        )
        runner = toy_runner(
            config.layers_of(ranks.stage, NUM_LAYERS),
            pipe,
            samples=rank == ranks.sampler_rank,
            tp=config.tp,
            tp_rank=ranks.tp_rank,
            all_reduce=(lambda x: transport.all_reduce(x, ranks.tp_group)) if config.tp > 1 else (lambda x: x),
        )
        if rank != 0:
            follower = Follower(runner, ranks, ControlReceiver(ranks.control_group))
            follower.join("generate")
            follower.close()
            return
        sender = ControlSender(ranks.control_group, range(1, config.world_size))
        driving = DrivingRunner(runner, ranks, sender)
        engine = toy_engine(driving, workload, config.spp + 1 if config.spp > 1 else 1)
        caller = Caller(sender, ranks)

        def generate() -> list[RequestOutput]:
            asks_now_and_then = lambda step: step % 5 == 2 and driving.gather_records()  # noqa: E731
            collected.append(drive(engine, workload, TOY_VOCAB, asks_now_and_then))
            return []

        caller.call("generate", generate)
        caller.close()

    with transport.installed(config.world_size), pytest.MonkeyPatch.context() as patch:
        patch.setattr(medha.distributed, "_REPORTS_IN_FLIGHT", limits.reports)
        patch.setattr(medha.parallel.control, "_RING", limits.messages)
        patch.setattr(medha.parallel.control, "_POSTED", limits.posted)
        patch.setattr(medha.parallel.control, "FRAME_INTS", limits.frame_ints)
        for rank in range(config.world_size):
            transport.spawn(f"rank {rank}", lambda rank=rank: rank_main(rank))
        transport.run()
    return collected[0]


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_no_deadlock_without_buffers(layout: tuple[int, int]) -> None:
    run_model(layout, max_examples=20)


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_no_deadlock_without_buffers_in_many_interleavings(layout: tuple[int, int]) -> None:
    run_model(layout, max_examples=400)


def run_model(layout: tuple[int, int], *, max_examples: int) -> None:
    @settings(max_examples=max_examples, deadline=None, database=None, suppress_health_check=list(HealthCheck))
    @given(workloads(), st.integers(0, 2**32), buffers())
    def every_run_ends(workload: Workload, seed: int, limits: Buffers) -> None:
        check(on_ranks(workload, layout, seed, limits), on_one_rank(workload), workload)

    every_run_ends()


# -- the model can find a deadlock ------------------------------------------------------------------------------------


class LateReport:
    """A report whose receive is posted only when its tokens are needed."""

    def __init__(self, line: ReportLine, batch: Any, post: Callable[..., Any]) -> None:
        self.batch_id = batch.batch_id
        self._post = lambda: post(line, batch)

    def wait(self) -> Any:
        return self._post().wait()


def send_synchronously(patch: pytest.MonkeyPatch, kind: Any) -> None:
    """Mutation: every send of a ReportLine or StagePipe waits until it is done."""
    send = kind.send

    def send_and_wait(self: Any, *args: Any, **kwargs: Any) -> None:
        send(self, *args, **kwargs)
        self.drain()

    patch.setattr(kind, "send", send_and_wait)


def post_reports_late(patch: pytest.MonkeyPatch) -> None:
    """Mutation: receives of reports are posted after computing."""
    post = ReportLine.post

    def post_late(self: ReportLine, batch: Batch) -> LateReport | None:
        comes = self._ranks.rank == 0 or any(row.samples for row in batch.rows)
        return LateReport(self, batch, post) if comes else None

    patch.setattr(ReportLine, "post", post_late)


def send_messages_late(patch: pytest.MonkeyPatch) -> None:
    """Mutation: rank 0 computes its part of a batch before it tells the others of the batch."""
    run, send = Runner.run, ControlSender.send
    held: list[tuple[ControlSender, Message, Any]] = []

    def hold(self: ControlSender, message: Message, *, only: Any = None) -> None:
        if message.batch is None:
            send(self, message, only=only)
        else:
            held.append((self, message, only))

    def run_then_send(self: Runner, *args: Any, **kwargs: Any) -> Any:
        result = run(self, *args, **kwargs)
        while held:
            sender, message, only = held.pop(0)
            send(sender, message, only=only)
        return result

    patch.setattr(ControlSender, "send", hold)
    patch.setattr(Runner, "run", run_then_send)


BUSY = Workload((Arrival(0, 8, 4, None), Arrival(0, 8, 4, None), Arrival(1, 16, 3, None)), 8, 8, 4, None)
AMPLE = Buffers(stage=64, reports=64, messages=64, posted=4, frame_ints=1 << 17)


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("seed", range(3))
def test_late_receives_and_synchronous_sends_are_a_deadlock(layout: tuple[int, int], seed: int) -> None:
    """Rank 0 waits in a send to the stage that waits for rank 0 to receive its report, or the same within a stage."""
    with pytest.MonkeyPatch.context() as patch:
        post_reports_late(patch)
        send_synchronously(patch, ReportLine)
        send_synchronously(patch, StagePipe)
        with pytest.raises(DeadlockError, match=r"sends to rank \d in report") as caught:
            on_ranks(BUSY, layout, seed, AMPLE)
    lines = str(caught.value).splitlines()
    assert [f"  rank {rank}" for rank in range(layout[0] * layout[1])] == sorted(
        line.partition(":")[0] for line in lines[1:] if "control:" not in line
    )


@pytest.mark.parametrize("layout", [(2, 1), (4, 1), (2, 2)], ids=str)
def test_computing_before_the_message_is_a_deadlock(layout: tuple[int, int]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        send_messages_late(patch)
        with pytest.raises(DeadlockError, match=r"rank 0: in collective 1 of tp of stage 0"):
            on_ranks(BUSY, layout, 0, AMPLE)


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_synchronous_sends_alone_are_no_deadlock(layout: tuple[int, int]) -> None:
    """Receives are posted ahead, so not even a transport that blocks in each send can stop the ranks."""
    with pytest.MonkeyPatch.context() as patch:
        send_synchronously(patch, ReportLine)
        send_synchronously(patch, StagePipe)
        for seed in range(3):
            check(on_ranks(BUSY, layout, seed, AMPLE), on_one_rank(BUSY), BUSY)


def forget_reports(patch: pytest.MonkeyPatch) -> None:
    """Mutation: the other ranks of the first stage decode without the tokens that rank 0 had."""
    run = Follower._run

    def forgetful(self: Follower, message: Message) -> None:
        self._expected.clear()
        run(self, message)

    patch.setattr(Follower, "_run", forgetful)


def reuse_buffers_early(patch: pytest.MonkeyPatch) -> None:
    """Mutation: a send's buffer is filled again before the send is done."""

    def reserve(self: StagePipe) -> None:
        while len(self._sends) >= self._num_buffers:
            self._free_sends.append(self._sends.popleft()[1])

    patch.setattr(StagePipe, "reserve", reserve)


@pytest.mark.parametrize(
    ("mutate", "layout", "error"),
    [
        (forget_reports, (2, 1), AssertionError),
        (forget_reports, (2, 2), AssertionError),
        (reuse_buffers_early, (1, 2), PlanDivergenceError),
    ],
)
def test_wrong_tokens_and_torn_buffers_are_found(
    mutate: Callable[[pytest.MonkeyPatch], None], layout: tuple[int, int], error: type[Exception]
) -> None:
    """The model of a model notices what is lost or late, and the transport reads a buffer as late as it may."""
    expected = on_one_rank(BUSY)
    with pytest.MonkeyPatch.context() as patch:
        mutate(patch)
        with pytest.raises(error):
            check(on_ranks(BUSY, layout, 0, Buffers(1, 1, 1, 1, 64)), expected, BUSY)


# -- gloo ------------------------------------------------------------------------------------


def serve(folder: str, options: dict[str, Any], loads: list[Workload]) -> list[dict[str, RequestOutput]] | None:
    """On each rank: rank 0 drives the workloads one after the other, the rest follow."""
    from medha import LLM

    llm = LLM(folder, **options)
    if not llm.is_driver:
        llm.follow()
        return None
    outputs = [drive(llm.engine, load, VOCAB) for load in loads]
    llm.close()
    return outputs


def generated(count: int) -> list[Workload]:
    """Workloads of up to 160 tokens a prompt, the same at each run."""
    loads: list[Workload] = []

    @settings(max_examples=count, database=None, derandomize=True, phases=[Phase.generate])
    @given(workloads(8).filter(lambda load: len(load.arrivals) > 2))
    def collect(load: Workload) -> None:
        loads.append(load)

    collect()
    return loads


def run_gloo(workers: WorkerPool, folder: Path, layout: tuple[int, int], count: int) -> None:
    loads = generated(count)
    make_checkpoint(folder, "llama", num_hidden_layers=max(3, layout[1]), num_key_value_heads=2)
    first = loads[0]
    options = {
        "chunk_size": min(first.chunk_size, first.max_batch_tokens),
        "max_batch_tokens": first.max_batch_tokens,
        "max_num_seqs": first.max_num_seqs,
        "block_size": 16,
        "num_kv_blocks": 24,
    }
    model = load_decoder(folder)
    alone = [
        dataclasses.replace(load, arrivals=tuple(dataclasses.replace(a, abort_after=None) for a in load.arrivals))
        for load in loads
    ]
    expected = [drive(make_engine(model), load, VOCAB) for load in alone]
    answers = workers.run(
        serve, layout[0] * layout[1], str(folder), options | {"tp": layout[0], "spp": layout[1]}, loads
    )
    for outputs, truth, load in zip(answers[0], expected, loads, strict=True):
        check(outputs, truth, load)


@pytest.mark.parametrize("layout", [(1, 2), (2, 1), (2, 2), (1, 3)], ids=str)
def test_generated_workloads_end_on_gloo(workers: WorkerPool, tmp_path: Path, layout: tuple[int, int]) -> None:
    run_gloo(workers, tmp_path, layout, 3)


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_many_generated_workloads_end_on_gloo(workers: WorkerPool, tmp_path: Path, layout: tuple[int, int]) -> None:
    run_gloo(workers, tmp_path, layout, 40)
