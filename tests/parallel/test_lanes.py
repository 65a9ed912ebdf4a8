"""``scheduler='cdsp'`` live: batches that share no group complete independently, with the tokens of one rank."""

import io
import signal
import time
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from medha import LLM, SamplingParams
from medha.cost.chunk_times import ChunkTimes
from medha.engine import build
from medha.engine.replay import replay
from medha.errors import ValidationError
from medha.worker.runner import Runner
from medha.worker.step_input import StepInput
from tests.checkpoints import random_prompt
from tests.commands import wait_until
from tests.parallel.faults import Fault, Start
from tests.parallel.workers import WorkerPool, check_free

SIZES = {"block_size": 16, "num_kv_blocks": 100}
ONE = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True)
TOKEN_S = 0.1  # of a group, as predicted where a chunk is held up


def serve_over_time(
    folder: Path, options: dict[str, Any], prompts: list[list[int]], arrivals_s: list[float], abort: int, holds: bool
) -> Any:
    """On rank 0: tokens by request, requests in the order in which they end, and how many batches completed before an
    older one; a replay of the journal says the same. With ``holds`` the forward of a long prompt ends when two batches
    have completed."""
    completed, run = list[int](), Runner.run

    def held(self: Runner, step: StepInput) -> Any:
        if step.batch.num_tokens > 1000:
            wait_until(lambda: len(completed) >= 2)
        return run(self, step)

    with pytest.MonkeyPatch.context() as patch:
        if holds:
            patch.setattr(Runner, "run", held)
            times = ChunkTimes((1,), ((0.0, TOKEN_S, 0.0, 0.0, 0.0),))
            patch.setattr(build, "fitted_times", lambda *_, **__: times)
        with LLM(folder, **options) as llm:
            if not llm.is_driver:
                return None
            engine, journal = llm.engine, io.StringIO()
            engine.record(journal)
            engine.on_step = lambda batch, *_: completed.append(batch.batch_id)
            start_s, waiting, ended = engine.now(), list(enumerate(zip(prompts, arrivals_s, strict=True))), {}
            while waiting or engine.has_unfinished:
                while waiting and waiting[0][1][1] <= engine.now() - start_s:
                    index, (prompt, _) = waiting.pop(0)
                    engine.add_request(str(index), prompt, ONE)
                    if index == abort:
                        engine.advance(wait_s=0.0)  # its chunk may be in flight
                        engine.abort(str(index))
                left_s = waiting[0][1][1] - (engine.now() - start_s) if waiting else None
                for output in engine.step(wait_s=left_s):
                    ended[output.request_id] = output.outputs[0].token_ids
                    explained = output.metrics.explanation
                    assert sum(explained.parts_s.values()) == pytest.approx(explained.total_s, abs=1e-6)
            while engine.advance():
                pass
            with pytest.raises(ValidationError, match="max_tokens=2 with scheduler='cdsp'"):
                engine.add_request("two", [1], SamplingParams(max_tokens=2))
            overtaken = sum(any(later < one for later in completed[at:]) for at, one in enumerate(completed))
            again = replay(journal.getvalue().splitlines())
            assert (again.mismatch, again.num_batches) == (None, len(completed))
            check_free(llm)
            return ended, overtaken


def serve_until_a_rank_is_gone(rank: int, folder: Path) -> None:
    """A chunk that does not end on group 0, another one on group 1, whose rank is killed when it begins that."""
    if rank == 0:
        Runner.run = lambda self, step: time.sleep(600)  # type: ignore[method-assign, assign]
    build.fitted_times = lambda *_, **__: ChunkTimes((1,), ((0.0, TOKEN_S, 0.0, 0.0, 0.0),))  # type: ignore[attr-defined]
    with LLM(folder, kvp=3, scheduler="cdsp", sp_sizes=(1,), block_size=16, num_kv_blocks=1300) as llm:
        llm.generate([random_prompt(length, seed=1) for length in (20_000, 300)], ONE)


def test_a_rank_that_dies_in_another_lane_ends_the_job_by_name(checkpoint: Callable[..., Path], start: Start) -> None:
    """While rank 0's own group computes, and the third has nothing."""
    folder = checkpoint(num_hidden_layers=1, max_position_embeddings=32_768)
    codes = (job := start(3, serve_until_a_rank_is_gone, folder, fault=Fault(1, "prefill", "kill"))).wait()
    assert None not in codes and codes[1] == -signal.SIGKILL and codes[0] != 0
    assert "medha.errors.RankFailedError: rank 1 (group 1, stage 0) has died" in job.stderr(0)


PROMPTS = [random_prompt(length, seed=length) for length in (900, 70, 33, 400, 1, 610, 5, 300)]


@cache
def alone(folder: Path) -> Any:
    """Tokens by request, on one rank."""
    return serve_over_time(folder, SIZES | {"scheduler": "cdsp"}, PROMPTS, [0.0] * 8, -1, False)[0]


@pytest.mark.parametrize(("kvp", "tp"), [(3, 1), (2, 2)])
def test_tokens(workers: WorkerPool, checkpoint: Callable[..., Path], kvp: int, tp: int) -> None:
    folder = checkpoint(num_hidden_layers=2)
    options = {"kvp": kvp, "tp": tp, "scheduler": "cdsp", "improvement_rate": 0.05, **SIZES}
    arrivals_s = [0.0, 0.0, 0.0, 0.01, 0.02, 0.03, 0.03, 0.05]
    ended, _ = workers.run(serve_over_time, kvp * tp, folder, options, PROMPTS, arrivals_s, 3, False)[0]
    assert ended == alone(folder) | {"3": []}


def test_a_short_prompt_beside_a_long_chunk(workers: WorkerPool, checkpoint: Callable[..., Path]) -> None:
    """It arrives while a long chunk runs on rank 0's own group, and ends first, on the other."""
    folder = checkpoint(num_hidden_layers=1)
    prompts = [random_prompt(length, seed=length) for length in (1500, 30, 40)]
    options = {"kvp": 2, "scheduler": "cdsp", "sp_sizes": (1,), **SIZES}
    ended, overtaken = workers.run(serve_over_time, 2, folder, options, prompts, [0.0, 0.3, 0.6], -1, True)[0]
    assert list(ended) == ["1", "2", "0"]
    assert overtaken == 2
