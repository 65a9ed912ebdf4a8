"""What HTTP adds to a time to first token: the server over an engine that answers by a timetable, without a model.

python -m tools.serve_overhead --streams 64 --requests 2000

Clients are in another process and send prompts of ids. A batch takes ``--step-ms`` and nothing else; the engine tells
in ``explanation`` how long its first token took, and what the client saw beyond that is HTTP's. Beside it, in the same
run and from the same loop, a handler that does nothing.

With ``--body-ids 10_000_000`` it tells in place of that how one stream's tokens come while a body of so many ids is
sent, parsed and refused: their longest gap over their median one, and the same without the body.
"""

from __future__ import annotations

import asyncio
import json
import multiprocessing
import threading
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from http.client import HTTPConnection
from itertools import pairwise
from typing import Any

import numpy as np

from medha.batch import Batch
from medha.config import CacheConfig, ParallelConfig, SchedulerConfig
from medha.cost.hardware import load_spec
from medha.cost.predictor import Predictor
from medha.cost.roofline import stage_coefficients
from medha.engine.engine import Engine
from medha.engine.request import ModelLimits
from medha.sched.scheduler import Scheduler
from medha.serve.app import Front, Limits
from medha.serve.metrics import Metrics
from medha.serve.service import Service
from medha.serve.web import bound, listening
from medha.sim.replica import KNOWN_MODELS
from medha.worker.sampling import Sampled
from medha.worker.step import PendingStep, StepResult
from tools.command import main
from tools.live import post


class Timetable:
    """A runner whose batches take a time that is given."""

    def __init__(self, step_s: float) -> None:
        self._step_s = step_s

    def open(self, *args: Any, **options: Any) -> None:
        """Nothing."""

    def close(self, slot: int) -> None:
        """Nothing."""

    def reset(self) -> None:
        """Nothing."""

    def submit(self, batch: Batch) -> PendingStep:
        """Draw the same token for each row, after the time."""
        rows = tuple(row for row in batch.rows if row.samples)

        def result() -> StepResult:
            time.sleep(self._step_s)
            return StepResult(rows, [Sampled(7, True)] * len(rows), self._step_s)

        return PendingStep(result)


def make_engine(step_s: float) -> Engine:
    """An engine of such a runner, for many requests at once."""
    config = SchedulerConfig(max_num_seqs=512)
    predictor = Predictor(
        stage_coefficients(load_spec("h100-80g"), KNOWN_MODELS["llama-3-8b"], ParallelConfig(), 0), max_tokens=2048
    )
    size = CacheConfig().block_size
    scheduler = Scheduler(config, num_blocks=(1 << 20) // size, block_size=size, predictor=predictor)
    return Engine(Timetable(step_s), scheduler, ModelLimits(32_000, 8192))


async def load(port: int, num_requests: int, num_streams: int, gap_s: float) -> dict[str, list[float]]:
    """``num_streams`` at once, each after the other and a pause; what HTTP added, and the handler that does nothing."""
    body = json.dumps({"prompt": [5] * 200, "max_tokens": 8, "stream": True, "explain": True}).encode()
    found: dict[str, list[float]] = {"http": [], "empty": []}
    left = iter(range(num_requests))

    async def stream(at: int) -> None:
        await asyncio.sleep(gap_s * at / num_streams)
        for _ in left:
            first_s, _, got = await post(port, "/v1/completions", body)
            events = [json.loads(line[6:]) for line in got.split(b"\n") if line.startswith(b"data: {")]
            own_s = next(event["explanation"]["ttft_s"] for event in events if "explanation" in event)
            found["http"].append(first_s - own_s)
            found["empty"].append((await post(port, "/empty", body, mark=b""))[0])
            await asyncio.sleep(gap_s)

    await asyncio.gather(*(stream(at) for at in range(num_streams)))
    return found


def gaps_beside(port: int, num_ids: int) -> dict[str, list[float]]:
    """Seconds between a stream's tokens while a body of so many ids is answered, and in as long a time after it."""
    body = b'{"max_tokens":1,"prompt":[' + b",".join([b"123456"] * num_ids) + b"]}"
    given = {"content-type": "application/json"}
    stream = HTTPConnection("127.0.0.1", port)
    stream.request("POST", "/v1/completions", json.dumps({"prompt": [5], "max_tokens": 8000, "stream": True}), given)
    lines, times = iter(stream.getresponse()), list[float]()

    def read_until(holds: Callable[[], bool]) -> list[float]:
        times.clear()
        while not holds():
            if next(lines).startswith(b"data: {"):
                times.append(time.perf_counter())
        return [after - before for before, after in pairwise(times)]

    read_until(lambda: len(times) == 50)
    statuses: list[int] = []

    def send() -> None:
        other = HTTPConnection("127.0.0.1", port)
        other.request("POST", "/v1/completions", body, given)
        statuses.append(other.getresponse().status)

    thread = threading.Thread(target=send)
    thread.start()
    beside = read_until(lambda: bool(statuses))
    assert statuses == [400], "so many tokens fit no context"
    return {"beside the body": beside, "without it": read_until(lambda: len(times) > len(beside))}


def client(port: int, body_ids: int, requests: int, streams: int, gap_s: float) -> dict[str, list[float]]:
    """What the other process does."""
    return gaps_beside(port, body_ids) if body_ids else asyncio.run(load(port, requests, streams, gap_s))


def serve_overhead(
    streams: int = 64, requests: int = 2000, step_ms: float = 5.0, gap_s: float = 1.0, body_ids: int = 0
) -> None:
    """Time what HTTP adds; with --body-ids a stream's tokens while a body of so many ids is answered."""
    engine = make_engine(step_ms / 1e3)
    service, stopping = Service(engine), threading.Event()
    front = Front(service, ["timetable"], [], Limits(), Metrics(engine, "timetable"))
    front.app.add_route("/empty", _empty, methods=["POST"])
    with (
        bound("127.0.0.1", 0) as listener,
        listening(front.app, listener, max_connections=4096),
        ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as clients,
    ):
        answer = clients.submit(client, listener.getsockname()[1], body_ids, requests, streams, gap_s)
        answer.add_done_callback(lambda _: stopping.set())
        service.run(stopping.is_set)
    service.close()
    for name, seconds in answer.result().items():
        p50, p99, most = (1e3 * np.percentile(seconds, percent) for percent in (50, 99, 100))
        what = f"{len(seconds)} {'gaps' if body_ids else 'requests'}"
        print(f"{name}: {what}, P50 {p50:.2f} ms, P99 {p99:.2f} ms, longest {most:.2f} ms ({most / p50:.1f} times)")


async def _empty(request: Any) -> Any:
    from starlette.responses import Response

    await request.body()
    return Response(b"")


if __name__ == "__main__":
    main(serve_overhead)
