"""The driver: arrivals in time, refusals, stops, a dying engine, and putting deltas together."""

import io
import itertools
import json
import threading
from collections.abc import Iterator
from functools import reduce
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch

import medha.engine.arrivals
from medha.batch import Batch
from medha.engine.arrivals import Arrival, Joiner, drive
from medha.engine.engine import Engine
from medha.engine.jsonl import OutputLines
from medha.engine.threads import LONG_PROMPT, prompt_size
from medha.errors import ContextLengthError, RankFailedError, ValidationError
from medha.outputs import CompletionOutput, RequestMetrics, RequestOutput
from medha.params import SamplingParams
from medha.worker.step import PendingStep
from tests.serving import Model

DELTA = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True, output_kind="delta")


@pytest.fixture
def engine(needle: Model, monkeypatch: pytest.MonkeyPatch) -> Iterator[Engine]:
    """An engine on a clock that advances by a millisecond whenever it is read, and by sleeping; which must be empty
    again at the end."""
    milliseconds = itertools.count(100_000)

    def sleep(seconds: float) -> None:
        assert 0 <= seconds <= 0.1
        for _ in range(round(1000 * seconds)):
            next(milliseconds)

    monkeypatch.setattr(medha.engine.arrivals.time, "sleep", sleep)
    sizes = {"max_model_len": 256, "num_blocks": 8, "block_size": 256, "chunk_size": 32}
    engine = needle.engine(clock=lambda: next(milliseconds) / 1000, **sizes)
    yield engine
    assert not engine.has_unfinished
    assert engine.scheduler.memory.num_used == 0


def final(outputs: list[RequestOutput]) -> dict[str, RequestOutput]:
    finished = [output for output in outputs if output.finished]
    assert len({output.request_id for output in finished}) == len(finished), "a request ended twice"
    return {output.request_id: output for output in finished}


def test_a_request_starts_when_it_arrives(engine: Engine) -> None:
    steps = []
    arrivals = [
        Arrival("now", "hello", DELTA),
        Arrival("soon", "hello", DELTA, arrival_s=0.05),
        Arrival("later", "hello", DELTA, arrival_s=60.0),
    ]
    outputs = final(list(drive(engine, arrivals, on_step=lambda: steps.append(engine.now()))))
    assert set(outputs) == {"now", "soon", "later"}
    for arrival in arrivals:
        metrics = outputs[arrival.request_id].metrics
        assert metrics.arrival == pytest.approx(arrival.arrival_s, abs=0.01)
        assert 0 <= metrics.queue_time < 0.05
    assert steps == sorted(steps)
    assert steps[-1] > 60


def test_a_refused_request_does_not_stop_the_others(engine: Engine) -> None:
    arrivals = [
        Arrival("unread", "", error=ValidationError("line 1 is not JSON")),
        Arrival("too long", [1] * 256, DELTA),
        Arrival("good", [1, 2, 3], DELTA),
        Arrival("good", [1, 2, 3], DELTA),
    ]
    outputs = list(drive(engine, arrivals))
    refused = [output for output in outputs if output.error is not None]
    assert [output.request_id for output in refused] == ["unread", "too long", "good"]
    assert [type(output.error) for output in refused] == [ValidationError, ContextLengthError, ValidationError]
    for output in refused:
        assert (output.finished, output.outputs[0].finish_reason) == (True, "error")
        assert output.metrics.e2e is not None
    served = final([output for output in outputs if output.error is None])
    assert served["good"].outputs[0].finish_reason == "length"


class Gated:
    """Holds the encoding of some texts up until it is told to go on, and notes the threads that encode."""

    def __init__(self, engine: Engine, patch: pytest.MonkeyPatch, *held: str) -> None:
        self.gates = {text: threading.Event() for text in held}
        self.threads: set[int] = set()
        self._encode = engine.tokenizer.encode_array
        patch.setattr(engine.tokenizer, "encode_array", self)

    def __call__(self, text: str, **options: Any) -> Any:
        self.threads.add(threading.get_ident())
        if text in self.gates:
            assert self.gates[text].wait(60.0), "the engine has not gone on"
        return self._encode(text, **options)


ENDLESS = SamplingParams(temperature=0.0, max_tokens=10**6, ignore_eos=True, output_kind="delta")


def test_the_engine_goes_on_while_a_prompt_is_tokenised(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a thread of its own; its TTFT counts from its arrival all the same."""
    gated = Gated(engine, monkeypatch, "slow")
    arrivals = [Arrival("running", "hello", ENDLESS), Arrival("slow", "slow", DELTA, arrival_s=0.01)]
    num_tokens = 0
    begun_s = engine.now()
    for output in drive(engine, arrivals):
        num_tokens += output.request_id == "running"
        if num_tokens == 100:
            gated.gates["slow"].set()
            ready_s = engine.now()
        if output.request_id == "slow" and output.finished:
            assert output.metrics.arrival == pytest.approx(begun_s + 0.01, abs=0.005)
            assert output.metrics.ttft is not None and output.metrics.ttft > ready_s - begun_s - 0.02
            engine.abort_all()
    assert num_tokens > 100
    assert gated.threads and threading.get_ident() not in gated.threads


def test_who_has_come_by_a_step_is_in_it(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """A step, which may be long, waits a moment for the thread that prepares them."""
    monkeypatch.setattr(medha.engine.arrivals, "SOON_S", 60.0)
    gated, batches = Gated(engine, monkeypatch, "second"), list[Batch]()
    engine.on_step = lambda batch, prediction, busy_s: batches.append(batch)
    threading.Timer(0.05, gated.gates["second"].set).start()
    assert len(final(list(drive(engine, [Arrival("first", "first", DELTA), Arrival("second", "second", DELTA)])))) == 2
    assert len(batches[0].rows) == 2


def test_a_long_prompt_is_overtaken_and_others_keep_order(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    long = "x" * (LONG_PROMPT + 1)
    gated = Gated(engine, monkeypatch, long, "first", "second")
    arrivals = [Arrival(text[:9], text, DELTA) for text in (long, "first", "second", "third")]
    monkeypatch.setattr(engine, "add_prepared", added := Mock(wraps=engine.add_prepared))
    for text in ("second", "first"):  # the thread takes them in order, whichever may go on
        gated.gates[text].set()
    for output in drive(engine, arrivals):
        if output.request_id == "third" and output.finished:
            gated.gates[long].set()
        if output.request_id == "x" * 9:
            assert "max_model_len" in str(output.error)
    assert [call.args[0].request_id for call in added.call_args_list] == ["first", "second", "third"]


def nested(depth: int) -> Any:
    return reduce(lambda inner, _: {"a": inner}, range(depth), "x" * (LONG_PROMPT + 1))


@pytest.mark.parametrize(
    ("prompt", "is_long"),
    [
        ("x" * LONG_PROMPT, False),
        ("x" * (LONG_PROMPT + 1), True),
        ({"prompt": "x" * (LONG_PROMPT + 1)}, True),
        ({"prompt_token_ids": [1] * (LONG_PROMPT + 1)}, True),
        (np.zeros(LONG_PROMPT + 1, np.int32), True),
        ({"messages": [{"role": "user", "content": "x"}, {"content": "x" * (LONG_PROMPT + 1)}]}, True),
        ({"messages": [{"role": "user", "content": "x"}, 5]}, False),
        ({"messages": [nested(5000)]}, False),  # it is refused where it is read
        ({"messages": 5}, False),
        (torch.tensor(5), False),
        (None, False),
    ],
    ids=range(11),
)
def test_which_prompts_short_ones_do_not_wait_for(prompt: Any, is_long: bool) -> None:
    assert (prompt_size(prompt) > LONG_PROMPT) == is_long


def test_a_stop_returns_every_request(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also what is being tokenised, and what waits for that."""
    gated, outputs = Gated(engine, monkeypatch, "held"), list[RequestOutput]()
    arrivals = [
        Arrival("long", "hello", ENDLESS.capped(200)),
        Arrival("short", "hello", DELTA),
        Arrival("held", "held", DELTA),
        Arrival("behind", "hello", DELTA),
        Arrival("future", "hello", DELTA, arrival_s=1000.0),
        Arrival("wrong", "", arrival_s=1000.0, error=ValidationError("wrong")),
    ]
    for output in drive(engine, arrivals, should_stop=lambda: any(o.finished for o in outputs)):
        outputs.append(output)
    gated.gates["held"].set()
    ends, stopped = final(outputs), dict.fromkeys(("long", "held", "behind", "future"), "abort")
    found = {name: end.outputs[0].finish_reason for name, end in ends.items()}
    assert found == {"short": "length", "wrong": "error"} | stopped
    assert sum(len(o.outputs[0].token_ids) for o in outputs if o.request_id == "long") >= 5
    assert ends["future"].metrics.e2e is None


def test_another_thread_ends_what_a_stuck_step_left(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """The lines are written once, whichever thread comes first, and the stuck one is held if it moves after all."""
    submit, stuck, unstuck = engine.runner.submit, threading.Event(), threading.Event()

    def get_stuck(batch: Batch) -> PendingStep:
        if batch.batch_id >= 4:
            stuck.set()
            assert unstuck.wait(20.0)
            raise RankFailedError("rank 1 is gone")
        return submit(batch)

    monkeypatch.setattr(engine.runner, "submit", get_stuck)
    wrong = ValidationError("the line is wrong")
    arrivals = [
        Arrival("running", "hello", DELTA),
        Arrival("wrong", "", error=wrong, custom_id="w"),
        Arrival("future", "hello", DELTA, arrival_s=1000.0, custom_id="f"),
    ]
    lines = OutputLines(engine, arrivals, [file := io.StringIO()])
    thread = threading.Thread(target=lambda: list(map(lines.add, drive(engine, arrivals))), daemon=True)
    thread.start()
    assert stuck.wait(20.0)
    lines.fail("rank 1 is stopped")
    written = file.getvalue()
    unstuck.set()
    thread.join(0.5)
    assert thread.is_alive(), "it may not go on, to the end of the process or to a second line"
    assert file.getvalue() == written
    rows = [json.loads(line) for line in written.splitlines()]
    assert [row["error"] for row in rows] == [
        {"type": "ValidationError", "message": "the line is wrong"},
        *[{"type": "RankFailedError", "message": "rank 1 is stopped"}] * 2,
    ]
    assert [row.get("custom_id") for row in rows] == ["w", None, "f"]
    assert [(row["id"], row["num_output_tokens"] > 0) for row in rows[1:]] == [("running", True), ("future", False)]
    assert engine.fail(ValueError("later")).outputs == engine.fail(ValueError("later")).outputs
    assert str(engine.fail(ValueError("later"))) == "rank 1 is stopped"
    engine.scheduler.memory.release(0)  # a dead engine keeps its blocks


def test_a_long_answer_is_few_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    joiner, metrics = Joiner(), RequestMetrics(0.0)
    for token in range(5000):
        part = CompletionOutput(0, "a", [token], "length" if token == 4999 else None)
        whole = joiner.add(RequestOutput("r", "", [1], [part], token == 4999, metrics))
        assert len(joiner.get("r", ())) <= 257
    assert whole is not None and whole.outputs[0].token_ids == list(range(5000)) and whole.outputs[0].text == "a" * 5000
