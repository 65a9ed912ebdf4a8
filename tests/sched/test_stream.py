"""Stream pipeline parallelism against pipelined micro-batches (``stream=False``): closed forms, and any load."""

from collections import defaultdict
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest

from medha.config import SCHEDULERS, ParallelConfig, SchedulerConfig
from medha.cost.hardware import load_spec
from medha.cost.predictor import Work
from medha.sim.outcome import Outcome
from medha.sim.pipeline import Segment
from medha.sim.replica import Replica, find_model
from medha.sim.simulator import Simulation
from medha.workload.trace import Trace
from tests.sched.virtual import Drive, Job, new_scheduler

CHUNK, NUM_CHUNKS = 512, 6
CHUNKED = ("medha", "sarathi", "vllm")


def two_stages(scheduler: str, *, stream: bool) -> Replica:
    """Llama-3 8B on two A100s; batches are bounded by tokens alone."""
    options = {"chunk_size": CHUNK, "max_batch_tokens": CHUNK, "t_target_s": 60.0, "late_share": 0.0, "stream": stream}
    spec, config = replace(load_spec("a100-80g"), control_s=0.0), SchedulerConfig(scheduler, **options)
    return Replica(spec, find_model("llama-3-8b"), ParallelConfig(spp=2), config, max_model_len=1 << 15)


def play(replica: Replica, num_prompts: int) -> tuple[Outcome, list[Segment]]:
    """Prompts of some chunks that all arrive at 0 and ask for one token."""
    segments: list[Segment] = []
    scheduler, pipeline = replica.build(on_segment=segments.append)
    assert scheduler.depth == 3
    lengths = np.full(num_prompts, NUM_CHUNKS * CHUNK)
    trace = Trace(np.zeros(num_prompts), lengths, np.ones(num_prompts, np.int64))
    return Simulation(scheduler, pipeline, trace).run(), segments


def stage_seconds(replica: Replica) -> np.ndarray[tuple[int, int], np.dtype[np.float64]]:
    """Of each chunk of a prompt on each stage, as predicted: [stages, chunks]."""
    chunks = [Work(CHUNK, i * CHUNK, False, None, i == NUM_CHUNKS - 1) for i in range(NUM_CHUNKS)]
    return np.array([[stage.predict([chunk]) for chunk in chunks] for stage in replica.stages()])


@pytest.mark.parametrize("scheduler", CHUNKED)
def test_a_prompt_alone_gains_from_the_stream_and_not_from_micro_batches(scheduler: str) -> None:
    replica = two_stages(scheduler, stream=False)
    seconds = stage_seconds(replica)
    ready_s = done_s = 0.0
    for first_s, second_s in seconds.T:
        ready_s += first_s
        done_s = max(ready_s, done_s) + second_s
    waiting, _ = play(replica, 1)
    streaming, _ = play(two_stages(scheduler, stream=True), 1)
    assert waiting.requests.first_token_s[0] == pytest.approx(seconds.sum(), rel=1e-12)
    assert streaming.requests.first_token_s[0] == pytest.approx(done_s, rel=1e-12)
    assert seconds.sum() > 1.5 * done_s


@pytest.mark.parametrize("scheduler", CHUNKED)
def test_two_prompts_take_turns_and_fill_both_stages(scheduler: str) -> None:
    replica = two_stages(scheduler, stream=False)
    outcome, segments = play(replica, 2)
    for stage, stage_s in enumerate(stage_seconds(replica).sum(axis=1)):
        mine = [segment for segment in segments if segment.stage == stage]
        assert len(mine) == 2 * NUM_CHUNKS
        assert outcome.stage_busy_s[0][stage] == pytest.approx(2 * stage_s, rel=1e-9)
        gaps_s = [after.start_s - before.end_s for before, after in pairwise(mine)]
        assert sum(gaps_s) < 0.1 * outcome.duration_s  # the stages differ by the head alone
    streaming, _ = play(two_stages(scheduler, stream=True), 2)
    assert outcome.duration_s == pytest.approx(streaming.duration_s, rel=0.05)


def test_with_one_batch_in_flight_nothing_changes() -> None:
    load = [Job(0.1 * i, 300 + 170 * i, 4) for i in range(8)]
    logs = defaultdict(list)
    for scheduler in SCHEDULERS:
        for stream in (True, False):
            config = SchedulerConfig(scheduler, max_batch_tokens=256, chunk_size=128, depth=1, stream=stream)
            plays = Drive(new_scheduler(config, num_blocks=64, block_size=64), load, lambda batch: 0.1)
            logs[scheduler].append(plays.run().log)
    assert all(one == other for one, other in logs.values())
