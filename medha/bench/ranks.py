"""What each rank of a benchmark's job runs: rank 0 does the work it is asked for line by line, the others follow.

Each piece of work is one line of JSON on rank 0's standard input and one in answer. When the input ends the ranks end,
each with a last line (:class:`medha.bench.job.LastWords`).
"""

from __future__ import annotations

import json
import resource
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

import torch
from rich.console import Console

from medha.batch import Batch
from medha.bench.job import Ask, LastWords, Served
from medha.cli.display import Display
from medha.config import EngineConfig
from medha.cost.correction import KINDS, Kind
from medha.engine.arrivals import Arrival, drive
from medha.engine.build import RankHandle, build_role
from medha.engine.distributed import DrivingRunner
from medha.engine.engine import Engine
from medha.outputs import RequestOutput
from medha.params import SLO, SamplingParams
from medha.profile.held import Held, Meter, hold, run_steps
from medha.sched.decision import Prediction
from medha.timeline import RankRecords, encode_records
from medha.worker.runner import Runner


def run_rank(engine: Mapping[str, Any], held: Mapping[str, Any] | None) -> None:
    """What a process of a job does.

    Args:
        engine: flat names of :class:`EngineConfig`.
        held: what the KV cache holds from the start; None for nothing.
    """
    config = EngineConfig.from_flat(**engine)
    role = build_role(config)
    runner = role.runner
    meter = Meter()
    if held is not None:
        hold(runner, config.parallel, Held(**held))
        meter.watch(runner)
    if role.engine is not None:
        _answer({"ready": True})
        for line in sys.stdin:
            request = json.loads(line)
            _answer(_WORK[request.pop("work")](role, **request))
    role.close()
    kv_bytes = runner.tables.num_blocks * runner.cache.block_bytes
    _answer(asdict(LastWords(tuple(meter.spans), kv_bytes, peak_memory_bytes())))


def peak_memory_bytes() -> int:
    """Most memory that this process has held resident."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def _engine(role: RankHandle) -> Engine:
    assert role.engine is not None, "rank 0 has the engine"
    return role.engine


def _prefill(role: RankHandle, *, prompt_len: int, seed: int) -> dict[str, Any]:
    """Read a random prompt to its first token."""
    engine = _engine(role)
    generator = torch.Generator().manual_seed(seed)
    prompt = torch.randint(0, role.limits.vocab_size, (prompt_len,), generator=generator).tolist()
    params = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True)
    start = time.perf_counter()
    engine.add_request("prefill", prompt, params)
    while engine.has_unfinished:
        engine.step()
    return {"ttft_s": time.perf_counter() - start, "ranks": _records(engine)}


def _steps(role: RankHandle, *, held: Mapping[str, Any], steps: int) -> dict[str, Any]:
    """Run a number of equal steps over what the KV cache holds."""
    engine = _engine(role)
    groups = engine.scheduler.memory.num_groups
    seconds = run_steps(engine.runner, Held(**held), num_groups=groups, vocab_size=role.limits.vocab_size, steps=steps)
    return {"seconds": seconds, "ranks": _records(engine)}


def _ask(role: RankHandle, *, prompt: str, max_tokens: int, show_progress: bool) -> dict[str, Any]:
    """Answer one prompt given as text."""
    engine = _engine(role)
    engine.add_request("document", prompt, SamplingParams(temperature=0.0, max_tokens=max_tokens))
    output = None
    live = Console(stderr=True) if show_progress else None
    with Display(engine.prefills, lines=None, live=live, num_requests=1) as display:
        while engine.has_unfinished:
            output = next((o for o in engine.step() if o.finished), output)
            display.refresh()
    assert output is not None, "the request ends"
    return {"text": output.outputs[0].text or "", "ttft_s": output.metrics.ttft or 0.0}


def _serve(role: RankHandle, *, requests: Sequence[Mapping[str, Any]], seed: int, limit_s: float) -> dict[str, Any]:
    """Serve random prompts as they arrive; what is unfinished after ``limit_s`` seconds is aborted."""
    engine = _engine(role)
    generator = torch.Generator().manual_seed(seed)
    arrivals = [_arrival(Ask(**request), generator, role.limits.vocab_size) for request in requests]
    start_s = engine.now()
    overheads = _Overheads(engine)
    outputs = drive(
        engine, arrivals, should_stop=lambda: engine.now() - start_s > limit_s, on_step=overheads.step_ended
    )
    served = [asdict(_served(output, start_s)) for output in outputs if output.finished]
    engine.on_step = None
    predictor = engine.scheduler.predictor
    errors = {} if predictor is None else asdict(predictor.correction.errors.figures())
    overhead_s = overheads.median_s if isinstance(engine.runner, Runner) else None
    return {
        "served": served,
        "prediction": errors,
        "overhead_s": overhead_s,
        "busy_ratio": overheads.busy_ratio,
        "factors": overheads.factors,
    }


class _Overheads:
    """Seconds of an engine's steps beyond what they computed, where one follows another; for one rank alone.

    Beside them, how the computed seconds compare with what coefficients said of them, without their correction.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._since_s: float | None = None
        self._busy_s = 0.0
        self._steps: dict[Kind, list[tuple[float, float]]] = {kind: [] for kind in KINDS}  # seconds predicted, taken
        self._seconds: list[float] = []
        engine.on_step = self._computed

    def _computed(self, batch: Batch, prediction: Prediction | None, busy_s: float) -> None:
        self._busy_s = busy_s
        if prediction is not None:
            self._steps[prediction.kind].append((prediction.seconds / prediction.factor, busy_s))

    def step_ended(self) -> None:
        """Told after each step."""
        now_s = self._engine.now()
        if self._since_s is not None:
            self._seconds.append(now_s - self._since_s - self._busy_s)
        self._since_s = now_s if self._engine.has_unfinished else None  # otherwise it may wait for an arrival

    @property
    def median_s(self) -> float:
        """Of all steps so far; 0 without any."""
        return statistics.median(self._seconds or [0.0])

    @property
    def busy_ratio(self) -> float | None:
        """Seconds of all predicted steps relative to their uncorrected predictions; None without any."""
        steps = [step for kind in KINDS for step in self._steps[kind]]
        return _ratio(steps) if steps else None

    @property
    def factors(self) -> dict[str, tuple[float, int]]:
        """The same by kind of step, and how many there were; of those that were."""
        return {kind: (_ratio(steps), len(steps)) for kind, steps in self._steps.items() if steps}


def _ratio(steps: Sequence[tuple[float, float]]) -> float:
    """Seconds taken relative to those predicted, over all steps."""
    return sum(taken_s for _, taken_s in steps) / sum(predicted_s for predicted_s, _ in steps)


def _arrival(request: Ask, generator: torch.Generator, vocab_size: int) -> Arrival:
    prompt = torch.randint(0, vocab_size, (request.num_prompt_tokens,), generator=generator).tolist()
    params = SamplingParams(
        temperature=0.0, max_tokens=request.num_output_tokens, ignore_eos=True, output_kind="final_only"
    )
    return Arrival(request.request_id, prompt, params, SLO(ttft_s=request.ttft_s), request.arrival_s)


def _served(output: RequestOutput, start_s: float) -> Served:
    if output.error is not None:
        raise output.error  # a benchmark's requests are right, and its pool holds them all
    metrics = output.metrics
    first_s, finished_s = (None if at is None else at - start_s for at in (metrics.first_token, metrics.finished))
    return Served(
        request_id=output.request_id,
        arrival_s=metrics.arrival - start_s,
        first_token_s=first_s,
        finished_s=finished_s,
        has_finished=output.outputs[0].finish_reason == "length",
        tpot_s=metrics.tpot,
        deadline_s=metrics.deadline_s,
        deadline_is_derived=metrics.deadline_is_derived,
        num_chunks=metrics.num_chunks,
    )


_WORK: dict[str, Callable[..., dict[str, Any]]] = {
    "prefill": _prefill,
    "steps": _steps,
    "ask": _ask,
    "serve": _serve,
}


def _records(engine: Engine) -> list[str]:
    """What each rank ran since the last call."""
    runner = engine.runner
    if isinstance(runner, DrivingRunner):
        records = runner.gather_records()
    else:
        assert isinstance(runner, Runner), "one rank runs by itself"
        records = [RankRecords(0, 0, 0, runner.recorder.take())]
    return [encode_records(one).decode() for one in records]


def _answer(value: Mapping[str, Any]) -> None:
    print(json.dumps(value), flush=True)


if __name__ == "__main__":
    run_rank(**json.loads(sys.argv[1]))
