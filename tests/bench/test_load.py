"""A load on a live engine: what becomes of its requests."""

from array import array
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from medha.bench.harness import Local, Subject, on_ranks
from medha.bench.load import arrivals_of, fixed_output, serve_load
from medha.engine.arrivals import Arrival
from medha.engine.request import Request
from medha.workload.trace import Trace
from tests.bench.shapes import TINY


@pytest.fixture(scope="module")
def local() -> Local:
    report = on_ranks(Subject(hf_overrides=TINY, engine={"num_threads": 1}), lambda one: {"local": one}, longest=64)
    assert report is not None
    return report["local"]


def arrival(name: str, arrival_s: float = 0.0, *, tokens: int = 3, prompt: int = 8) -> Arrival:
    return Arrival(name, [1] * prompt, fixed_output(tokens), arrival_s=arrival_s)


def test_who_is_held_back_arrives_when_there_is_room(local: Local) -> None:
    served = serve_load(local.engine, [arrival("a"), arrival("b", tokens=1), arrival("c", 0.01)], max_concurrency=1)
    a, b, c = served.outcomes
    assert a.end_s <= b.start_s and b.end_s <= c.start_s and c.end_s == served.duration_s
    assert (b.itl_s, b.tpot_s) == ((), None) and all(gap > 0 for gap in (*a.itl_s, *c.itl_s))
    assert not local.engine.has_unfinished


def test_a_refused_request_has_an_error_and_the_others_go_on(local: Local) -> None:
    long, a = serve_load(local.engine, [arrival("long", prompt=100), arrival("a")], max_concurrency=1).outcomes
    assert not long.is_completed and long.error.startswith("ContextLengthError: ") and long.ttft_s is None
    assert (long.input_len, long.output_len) == (100, 0)
    assert a.is_completed


def test_requests_keep_their_tenants(local: Local, monkeypatch: pytest.MonkeyPatch) -> None:
    tenants, add = list[str](), local.engine.add_prepared

    def noted(request: Request, **named: Any) -> None:
        tenants.append(request.tenant)
        add(request, **named)

    monkeypatch.setattr(local.engine, "add_prepared", noted)
    serve_load(local.engine, [replace(arrival("a"), tenant="chat"), arrival("b")])
    assert tenants == ["chat", ""]


def test_each_load_finds_an_empty_prefix_cache() -> None:
    def work(local: Local) -> dict[str, Any]:
        loads = [serve_load(local.engine, [arrival("a", prompt=48)]) for _ in range(2)]
        return {"num_chunks": [one.outcomes[0].num_chunks for one in loads]}

    engine = {"num_threads": 1, "prefix_caching": True, "block_size": 16, "chunk_size": 16}
    assert on_ranks(Subject(hf_overrides=TINY, engine=engine), work, longest=64) == {"num_chunks": [3, 3]}


def test_prompts_share_the_blocks_that_a_trace_names() -> None:
    hashes = np.array([array("q", ids) for ids in ([7, 8], [7, 9, 1], [7, 8])], object)
    trace = Trace(np.zeros(3), np.array([1024, 1100, 1030]), np.ones(3, int), prefix_hashes=hashes)
    prompts = [list(one.prompt) for one in arrivals_of(trace, 256, seed=0)]
    assert [len(one) for one in prompts] == [1024, 1100, 1030]
    assert prompts[0][:512] == prompts[1][:512] and prompts[0] == prompts[2][:1024]
    assert prompts[0][512:] != prompts[1][512:1024] and prompts[0][:512] != prompts[0][512:]
