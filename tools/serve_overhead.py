"""What HTTP adds to a time to first token: the server over an engine that answers by a timetable, without a model.

python -m tools.serve_overhead --streams 64 --requests 2000

Clients are in another process and send prompts of ids. A batch takes ``--step-ms`` and nothing else; the engine tells
in ``explanation`` how long its first token took, and what the client saw beyond that is HTTP's. Beside it, in the same
run and from the same loop, a handler that does nothing.

What memory this process has at the start, in the middle and at the end of the requests is told as well; with ``--gap-s
0 --requests 100000`` that is what a leak would show in.

With ``--body-ids 10_000_000`` it tells in place of that how one stream's tokens come while a body of so many ids is
sent, parsed and refused: their longest gap over their median one, and the same without the body.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import multiprocessing
import resource
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from http.client import HTTPConnection
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from medha.batch import Batch
from medha.config import CacheConfig, SchedulerConfig
from medha.cost.hardware import load_spec
from medha.engine.arrivals import Arrival
from medha.engine.engine import Engine
from medha.engine.request import ModelLimits, Request
from medha.outputs import RequestOutput
from medha.sched.scheduler import Scheduler
from medha.serve.app import Front
from medha.serve.web import bound, listening
from medha.sim.replica import Replica, find_model
from medha.worker.sampling import Sampled
from medha.worker.step import PendingStep, StepResult
from tools.command import main
from tools.live import ask_one, post


class Timetable:
    """A runner whose batches take a time that is given."""

    def __init__(self, step_s: float) -> None:
        self.step_s = step_s

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
            time.sleep(self.step_s)
            return StepResult(rows, [Sampled(7, True)] * len(rows), self.step_s)

        return PendingStep(result)


def make_engine(
    step_s: float, *, runner: Any = None, clock: Callable[[], float] = time.monotonic, max_model_len: int = 8192
) -> Engine:
    """An engine of such a runner, or of another, for many requests at once."""
    config = SchedulerConfig(max_num_seqs=512)
    predictor = Replica(load_spec("h100-80g"), find_model("llama-3-8b"), scheduler=config).stages()[0]
    size = CacheConfig().block_size
    scheduler = Scheduler(config, num_blocks=(1 << 20) // size, block_size=size, predictor=predictor)
    return Engine(runner or Timetable(step_s), scheduler, ModelLimits(32_000, max_model_len), clock=clock)


async def load(port: int, num_requests: int, num_streams: int, gap_s: float) -> dict[str, list[float]]:
    """``num_streams`` at once, each after the other and a pause; what HTTP added, and the handler that does nothing."""
    found: dict[str, list[float]] = {"http": [], "empty": []}
    left = iter(range(num_requests))

    async def stream(at: int) -> None:
        await asyncio.sleep(gap_s * at / num_streams)
        for number in left:
            prompt = [number % 30_000, number // 30_000, *[5] * 198]
            told = await ask_one(port, Arrival(f"{number}", prompt), 0.0, explain=True)
            assert told.own_s is not None, "it explains"
            found["http"].append(told.first_s - told.own_s)
            begin_s = time.perf_counter()
            async for _ in post(port, "/empty", json.dumps(prompt).encode()):
                pass
            found["empty"].append(time.perf_counter() - begin_s)
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

    def send() -> int:
        other = HTTPConnection("127.0.0.1", port)
        other.request("POST", "/v1/completions", body, given)
        return other.getresponse().status

    with ThreadPoolExecutor(1) as sender:
        status = sender.submit(send)
        beside = read_until(status.done)
    assert status.result() == 400, "so many tokens fit no context"
    return {"beside the body": beside, "without it": read_until(lambda: len(times) > len(beside))}


def client(port: int, body_ids: int, *asked: Any) -> dict[str, list[float]]:
    """What the other process does; ``asked`` is as of :func:`load`."""
    return gaps_beside(port, body_ids) if body_ids else asyncio.run(load(port, *asked))


def serve_overhead(
    streams: int = 64, requests: int = 2000, step_ms: float = 5.0, gap_s: float = 1.0, body_ids: int = 0
) -> None:
    """Time what HTTP adds to a time to first token, or with --body-ids how a large body holds a stream up."""
    engine = make_engine(step_ms / 1e3)
    front = Front(engine, ["m"])
    service = front.service
    front.app.add_route("/empty", _empty, methods=["POST"])
    taken, count, on_end = list[str](), itertools.count(1), service.on_end

    def note(request: Request, output: RequestOutput) -> None:
        on_end(request, output)
        if (number := next(count)) in [share * requests // 10 for share in (1, 5, 10)]:
            pages = int(Path("/proc/self/statm").read_text().split()[1])
            taken.append(f"{pages * resource.getpagesize() / 2**20:.1f} MiB after {number:,}")

    service.on_end = note
    with (
        bound("127.0.0.1", 0) as listener,
        listening(front, listener, max_connections=4096),
        ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as others,
    ):
        answer = others.submit(client, listener.getsockname()[1], body_ids, requests, streams, gap_s)
        service.run(answer.done)
    service.preparing.close()
    front.bodies.close()
    for name, seconds in answer.result().items():
        p50, p99, most = (1e3 * np.percentile(seconds, percent) for percent in (50, 99, 100))
        what = f"{len(seconds)} {'gaps' if body_ids else 'requests'}"
        print(f"{name}: {what}, P50 {p50:.2f} ms, P99 {p99:.2f} ms, longest {most:.2f} ms ({most / p50:.1f} times)")

    if not body_ids:
        print(f"resident memory of the server's process: {', '.join(taken)} requests")


async def _empty(request: Any) -> Any:
    from starlette.responses import Response

    await request.body()
    return Response(b"")


if __name__ == "__main__":
    main(serve_overhead)
