"""Many clients at once, and many one after the other: all are held, and nothing is kept of those that have gone."""

from __future__ import annotations

import asyncio
import gc
import json
import resource
import socket
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from types import SimpleNamespace
from typing import Any

import pytest

from medha.engine import explain
from medha.params import SamplingParams
from medha.serve import service, web
from tests.commands import LIMIT_S, wait_until
from tests.engines import submitted
from tests.serve.conftest import HEALTH, Server, Start, asked, received, sent
from tests.serving import Model, assert_empty, finish, random_ids
from tools.serve_overhead import Timetable, make_engine

NUM_IDLE, NUM_STREAMS = 1000, 256


@pytest.fixture
def many_files() -> Iterator[None]:
    """Both ends of each connection are files of this process."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = 8192 if hard == resource.RLIM_INFINITY else min(hard, 8192)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, most), hard))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.usefixtures("many_files")
def test_1000_idle_connections_and_256_streams_at_once_are_held(
    start: Start, bytes_model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each stream, greedy or seeded, gets what the engine says alone, and each idle connection an answer afterwards."""
    monkeypatch.setattr(web, "KEEP_ALIVE_S", LIMIT_S)
    kinds: Any = [{"temperature": 0.0} if at % 2 else {"seed": at, "top_p": 0.9} for at in range(NUM_STREAMS)]
    given = [kind | {"prompt": random_ids(5 + at % 40, seed=at)} for at, kind in enumerate(kinds)]
    server = start(bytes_model.engine(num_blocks=512))
    batches = submitted(server.engine)

    def is_answered(client: socket.socket) -> bool:
        client.sendall(HEALTH)
        return received(client, lambda answer: answer.endswith(b'{"status":"ok"}')).startswith(b"HTTP/1.1 200")

    def text(client: socket.socket) -> str:
        lines = received(client, lambda answer: b"data: [DONE]" in answer).splitlines()
        events = [json.loads(line[6:]) for line in lines if line.startswith(b"data: {")]
        return "".join(event["choices"][0]["text"] for event in events)

    with ExitStack() as stack:
        idle, streams = ([stack.enter_context(server.dial()) for _ in range(n)] for n in (NUM_IDLE, NUM_STREAMS))
        assert all(map(is_answered, idle))
        with server.engine.turns:  # they begin together
            for client, body in zip(streams, given, strict=True):
                client.sendall(sent(body | {"max_tokens": 12, "stream": True}))
            wait_until(lambda: server.front.num_open.total() == NUM_STREAMS)
        texts = list(map(text, streams))
        assert all(map(is_answered, idle))
    assert max(len(batch.rows) for batch in batches) == NUM_STREAMS
    wait_until(server.is_idle)
    assert_empty(server.engine)
    alone = bytes_model.engine(num_blocks=512)
    for at in reversed(range(NUM_STREAMS)):  # so that each is another row of its batches
        alone.add_request(str(at), given[at]["prompt"], SamplingParams(max_tokens=12, **kinds[at]))
    expected = finish(alone)
    assert texts == [expected[str(at)].outputs[0].text for at in range(NUM_STREAMS)]


def num_blocks_after(server: Server, num_requests: int) -> int:
    """Blocks of memory that Python has when so many more requests have been served: whole ones, streams, ones that are
    refused, and ones whose client leaves."""
    bodies = [asked(20, 3, prompt=[at] * 20, stream=stream) for at in range(8) for stream in (False, True)]
    bodies += [asked(20, 3, temperature=9), asked(20, 8000, stream=True)]
    raw = [sent(body, connection="close") for body in bodies]

    async def client(first: int) -> None:
        for at in range(first, num_requests, 8):
            reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
            is_endless = at % len(raw) == len(raw) - 1
            writer.write(raw[at % len(raw)])
            await reader.readuntil(b'"choices":[{' if is_endless else b"}")
            if not is_endless:
                await reader.read()
            writer.close()

    async def run() -> None:
        await asyncio.gather(*map(client, range(8)))

    asyncio.run(run())
    wait_until(server.is_idle)
    wait_until(lambda: service.Answer not in map(type, gc.get_objects()))  # nor kept until garbage is collected
    gc.collect()
    return sys.getallocatedblocks()


def test_nothing_is_kept_of_700_requests(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    """One object of each would be 700; the chunks that explanations are made of are kept, up to a limit."""
    monkeypatch.setattr(explain, "_CHUNKS_KEPT", 64)
    gc.disable()  # collecting garbage would hold up all streams
    server = start(make_engine(0.001))
    before = num_blocks_after(server, 300)
    assert num_blocks_after(server, 700) - before < 630


def test_what_follows_a_delivery_comes_with_the_next_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """But first and last tokens at once."""
    served, got = service.Service(make_engine(0.0, runner=Timetable(0.0))), list[int]()
    put = lambda index, output: got.append(output.metrics.num_output_tokens)  # noqa: E731
    answer: Any = SimpleNamespace(requests=[SimpleNamespace(params=SamplingParams(n=1))], put=put)

    async def handed_out(token: int, within_s: float, *, finished: bool = False) -> list[int]:
        monkeypatch.setattr(service, "_TOGETHER_S", within_s)
        metrics = SimpleNamespace(num_output_tokens=token)
        output: Any = SimpleNamespace(finished=finished, metrics=metrics, outputs=[])
        served._hand_out(answer, 0, output)
        served.flush()
        for _ in range(3):
            await asyncio.sleep(0)
        return got.copy()

    async def told() -> None:
        served.loop = asyncio.get_running_loop()
        assert await handed_out(2, LIMIT_S) == [2]
        assert await handed_out(3, LIMIT_S) == await handed_out(4, LIMIT_S) == [2]
        assert await handed_out(1, LIMIT_S) == [2, 3, 4, 1]
        assert await handed_out(5, LIMIT_S) == [2, 3, 4, 1]
        assert await handed_out(6, 1e-3, finished=True) == [2, 3, 4, 1, 5, 6]
        await handed_out(7, LIMIT_S)
        while len(got) < 7:  # the loop delivers of itself
            await asyncio.sleep(1e-3)

    asyncio.run(told())
    served.preparing.close()
