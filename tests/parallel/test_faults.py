"""A rank that dies, throws or is stopped ends every rank in time, and the user reads why; nothing hangs."""

import dataclasses
import os
import resource
import signal
import socket
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import count, product
from math import prod
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from medha import LLM, SamplingParams
from medha.engine.distributed import Follower
from medha.errors import EngineDeadError
from tests.commands import LIMIT_S, wait_until
from tests.parallel.faults import Fault, Job, Start, command
from tests.parallel.workers import generate

END_S = 60.0
"""Within so many seconds of a fault every other rank has ended: it takes 3 to 6 where nothing holds it up, and what
would end all at last is the timeout of transfers, of 120."""

REQUESTS = [
    {"id": "short", "prompt": "a", "max_tokens": 1},
    {"id": "long", "prompt": "b" * 2000, "max_tokens": 40, "ignore_eos": True},
]
SIZES = (
    "--chunk-size 64 --max-batch-tokens 64 --block-size 64 --num-kv-blocks 64 --num-threads 1 --max-model-len 4096 "
    "--scheduler sarathi "  # the same batches whatever they take
)
TWO_STAGES = SIZES + "--spp 2"
SMALL: dict[str, Any] = {"num_kv_blocks": 8, "max_model_len": 1024}  # of the LLM of a program


def check_ends(job: Job, fault: Fault) -> str:
    """Every rank but the one that failed ends in time with an error; returns what the first of them tells the user."""
    survivors = [rank for rank in range(len(job.processes)) if rank != fault.rank]
    codes = job.wait(END_S, since_s=job.fault_s(), but=fault.rank if fault.action == "stop" else None)
    said = job.stderr(0 if 0 in survivors or fault.action == "throw" else survivors[0])
    assert all(codes[rank] not in (None, 0) for rank in survivors), (codes, said)
    return said


LAYOUTS = ("--spp 2", "--tp 2", "--spp 3", "--tp 2 --spp 2")
FIRST = {"1 start kill", "1 decode kill", "1 shutdown kill", "1 start throw", "1 prefill throw", "0 decode kill"}


def faults() -> Iterator[Any]:
    """Everything that may befall rank 0 or 1, where; in ``make test`` some of it on two stages. One that is stopped
    (D5) sends no word, and the store that rank 0 holds is silent too."""
    yield pytest.param(Fault(0, "decode", "stop", after=8), "--spp 2", id="0-decode-stop--spp 2")
    everything = product((0, 1), ("start", "prefill", "decode", "shutdown"), ("kill", "throw"), LAYOUTS)
    for rank, point, action, layout in everything:
        is_first = f"{rank} {point} {action}" in FIRST and layout == "--spp 2"
        fault = Fault(rank, point, action, after=8 if point in ("prefill", "decode") else 0)
        name = f"{rank}-{point}-{action}{layout}"
        yield pytest.param(fault, layout, marks=() if is_first else pytest.mark.slow, id=name)


@pytest.mark.parametrize(("fault", "layout"), faults())
def test_failed_rank_ends_all(serve: Start, fault: Fault, layout: str) -> None:
    """D4, D6: killed or throwing, at any point of the work."""
    job = serve(prod(map(int, layout.split()[1::2])), REQUESTS, SIZES + layout, fault=fault)
    said = check_ends(job, fault)
    assert f"rank {fault.rank} (stage " in said
    if fault.action == "stop":
        assert "rank 0 (stage 0) is stopped" in said
    if fault.action == "throw":
        assert "ValueError: boom" in said
        assert sum("Traceback" in job.stderr(rank) for rank in range(len(job.processes))) <= 1 + (fault.rank == 0)
        if fault.point != "shutdown":
            assert "Traceback" in job.stderr(fault.rank)
    if fault.point in ("prefill", "decode"):
        assert "batch " in said
        assert job.lines["short"]["finish_reason"] == "length"  # what had finished was written before
        if fault.rank != 0:
            assert job.lines["long"]["finish_reason"] == "error"
    elif fault.point == "shutdown":
        assert job.lines["long"]["finish_reason"] == "length"


# -- ranks that disagree ---------------------------------------------------------------------------------------------


def tampered(rank: int, arguments: list[str]) -> None:
    """As ``command``; rank 1 takes the fifth batch for another one."""
    take = Follower._take

    def take_other(self: Follower, message: Any) -> Any:
        if message.batch is not None and message.batch.batch_id == 5:
            row = message.batch.rows[0]._replace(position=message.batch.rows[0].position - 1)
            message = dataclasses.replace(message, batch=dataclasses.replace(message.batch, rows=(row,)))
        return take(self, message)

    if rank == 1:
        Follower._take = take_other  # type: ignore[method-assign]
    command(rank, arguments)


def test_ranks_that_disagree_on_a_batch(serve: Start) -> None:
    """D7: the digests that go beside the hidden states differ."""
    job = serve(2, REQUESTS, TWO_STAGES, target=tampered)
    assert job.wait() == [4, 4], job.stderr(0)
    assert "PlanDivergenceError" in job.stderr(0)
    assert "rank 1 (stage 1), batch" in job.stderr(0)
    assert job.stderr(0).count("digest") == 1
    assert job.lines["long"]["finish_reason"] == "error"


def calls(rank: int, model: Path, names: list[list[str]]) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=4)
    with LLM(model, spp=2, **SMALL) as llm:
        for name in names[rank]:
            if name == "generate":
                llm.generate("a", params)
            elif name == "raise":
                raise KeyError("mine")
    print("closed")


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        ([["generate"], []], "called close where rank 0 called generate"),
        ([["generate", "raise"], ["generate"]], "rank 0 (stage 0): KeyError: 'mine'"),
        ([["generate"], ["generate", "raise"]], "rank 1 (stage 1): KeyError: 'mine'"),
    ],
)
def test_ranks_that_call_different_things(model: Path, start: Start, names: list[list[str]], expected: str) -> None:
    job = start(2, calls, model, names)
    codes = job.wait()
    assert all(codes), job.stderr(0)
    for code, called in zip(codes, names, strict=True):
        assert code == 1 or "raise" not in called  # a program's own error is no failed engine
    assert expected in job.stderr(0) + job.stderr(1)
    assert all("mine" in job.stderr(rank) or expected in job.stderr(rank) for rank in (0, 1)), job.stderr(0)


def too_late(*_: object) -> None:
    raise TimeoutError


def interrupted(rank: int, model: Path, handler: Callable[..., object]) -> None:
    """Ctrl-C on rank 0, in its third batch; the handler of a program may raise anything."""
    signal.signal(signal.SIGINT, handler)
    llm = LLM(model, spp=2, **SMALL)
    if rank == 0:
        submit, calls = llm.engine.runner.submit, count()

        def failing(batch: Any) -> Any:
            if next(calls) == 2:
                signal.raise_signal(signal.SIGINT)
            return submit(batch)

        llm.engine.runner.submit = failing  # type: ignore[method-assign]
    with llm:
        try:
            llm.generate(["a", "b"], SamplingParams(temperature=0.0, max_tokens=9, ignore_eos=True))
        except (KeyboardInterrupt, TimeoutError) as interrupt:
            print([output.outputs[0].finish_reason for output in interrupt.outputs])  # type: ignore[union-attr]
            with pytest.raises(EngineDeadError, match="a step was interrupted"):
                llm.engine.step()
            raise


@pytest.mark.parametrize(
    ("handler", "name"), [(signal.default_int_handler, "KeyboardInterrupt"), (too_late, "TimeoutError")]
)
def test_an_interrupt_is_raised_as_such_and_ends_every_rank(
    model: Path, start: Start, handler: Callable[..., object], name: str
) -> None:
    job = start(2, interrupted, model, handler)
    assert all(job.wait()), job.stderr(0)
    assert job.stdout(0) == "['abort', 'abort']\n", job.stderr(0)
    assert f"rank 0 (stage 0): {name}" in job.stderr(1)


# -- a request on several groups -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fault", "spp"),
    [
        (Fault(1, "shared", "kill"), 1),  # the first batch that the new group has a part in
        (Fault(1, "shared", "kill", after=40), 1),  # while the shared request decodes
        pytest.param(Fault(2, "shared", "kill"), 2, marks=pytest.mark.slow),
        pytest.param(Fault(3, "shared", "kill"), 2, marks=pytest.mark.slow),
        pytest.param(Fault(1, "shared", "throw"), 1, marks=pytest.mark.slow),
        pytest.param(Fault(1, "shared", "stop"), 1, marks=pytest.mark.slow),
    ],
    ids=lambda value: f"{value.rank}-{value.action}-{value.after}" if isinstance(value, Fault) else f"spp{value}",
)
def test_group_that_a_request_has_grown_onto_dies(model: Path, serve: Start, fault: Fault, spp: int) -> None:
    """D11: no wrong token is written, what had finished is kept, and the rest ends with the rank's name."""
    requests = [{"temperature": 0.0, **request} for request in (*REQUESTS, *BESIDE_LONG)]
    job = serve(2 * spp, requests, f"{SIZES} --kvp 2 --spp {spp} --max-kv-per-group 1024", fault=fault)
    said = check_ends(job, fault)
    place = f"rank {fault.rank} (group 1, stage {fault.rank % spp})"
    assert place in said
    assert job.processes[0].exitcode == 4, said
    assert [name for name, line in job.lines.items() if line["finish_reason"] == "length"] == ["short", "brief"]
    unfinished = unfinished_lines(job, right_tokens(model, requests))
    check_named(unfinished, place)
    assert set(unfinished) == {"long", "beside"}
    assert unfinished["long"]["token_ids"] or fault.after < 40  # of its tokens, those that had come are there


BESIDE_LONG = [
    {"id": "brief", "prompt": "c" * 10, "max_tokens": 5, "ignore_eos": True},
    {"id": "beside", "prompt": "d" * 100, "max_tokens": 500, "ignore_eos": True},
]


def unfinished_lines(job: Job, expected: dict[str, list[int]]) -> dict[str, Any]:
    """The lines of requests that had not ended; all lines have the right tokens, as far as they had come."""
    for name, line in job.lines.items():
        assert line["token_ids"] == expected[name][: len(line["token_ids"])]
        assert line["finish_reason"] != "length" or line["token_ids"] == expected[name]
    return {name: line for name, line in job.lines.items() if line["finish_reason"] != "length"}


def check_named(unfinished: dict[str, Any], place: str) -> None:
    """Lines end with the error of a rank that failed."""
    for name, line in unfinished.items():
        assert (line["finish_reason"], line["error"]["type"]) == ("error", "RankFailedError"), name
        assert place in line["error"]["message"]


def right_tokens(model: Path, requests: list[dict[str, Any]]) -> dict[str, list[int]]:
    fields = ("temperature", "max_tokens", "ignore_eos")
    params = [SamplingParams(**{name: row[name] for name in fields if name in row}) for row in requests]
    with LLM(model, num_kv_blocks=16, max_model_len=4096) as llm:
        tokens = generate(llm, [row["prompt"] for row in requests], params)
    return dict(zip((row["id"] for row in requests), tokens, strict=True))


# -- signals ---------------------------------------------------------------------------------------------------------


def under_an_agent(rank: int, arguments: list[str]) -> None:
    """As ``command``, where torchrun passes on the signals that the terminal has sent already."""
    with mock.patch("medha.cli.command.has_agent", return_value=True):
        command(rank, arguments)


def test_signals(serve: Start) -> None:
    """Ranks other than 0 ignore both signals; rank 0 finishes what is in flight, writes everything and ends."""
    job = serve(2, REQUESTS, TWO_STAGES, target=under_an_agent, fault=Fault(0, "decode", "hold", after=8))
    job.fault_s()
    for number in (signal.SIGINT, signal.SIGTERM):
        os.kill(job.processes[1].pid, number)
    os.kill(job.processes[0].pid, signal.SIGTERM)
    time.sleep(0.1)
    os.kill(job.processes[0].pid, signal.SIGTERM)  # the echo
    job.let_go()
    codes = job.wait()
    assert codes[0] in (130, 143), job.stderr(0)
    assert codes[1] == 0, job.stderr(1)
    assert job.lines["long"]["finish_reason"] == "abort"
    assert len(job.lines["long"]["token_ids"]) >= 5
    assert job.stderr(1) == ""


def limited(rank: int, arguments: list[str]) -> None:
    """As ``command``, with 64 file descriptors and a home that cannot be written."""
    resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
    os.environ["HOME"] = "/proc"
    command(rank, arguments)


def test_each_rank_says_what_it_works_on_and_garbage_few_descriptors_and_no_home_change_nothing(serve: Start) -> None:
    """On SIGUSR1, also while its main thread is in a transfer. D21: the store's port gets bytes that mean nothing."""
    fault = Fault(1, "decode", "hold", after=8)  # rank 0 waits for the report meanwhile
    job = serve(2, REQUESTS, TWO_STAGES, target=limited, fault=fault)
    job.fault_s()
    for process in job.processes:
        os.kill(process.pid, signal.SIGUSR1)
    wait_until(lambda: all("most recent call first" in job.stderr(rank) for rank in (0, 1)))
    line = next(line for line in job.stderr(0).splitlines() if "ranks meet at" in line)
    host, _, port = line.partition("meet at ")[2].split()[0].rpartition(":")
    garbage = (b"GET / HTTP/1.1\r\n\r\n", bytes(64), b"\xff" * 64, os.urandom(4096))

    def throw(data: bytes) -> None:
        with socket.create_connection((host, int(port)), timeout=LIMIT_S) as connection:
            connection.sendall(data)
            time.sleep(0.5)

    with ThreadPoolExecutor(len(garbage)) as pool:
        list(pool.map(throw, garbage))
    job.let_go()
    job.end_well()
    assert "open on every interface" in line and "gloo listens on lo" in line
    assert "1 unfinished requests, " in job.stderr(0) and "'long' in slot " in job.stderr(0)
    assert "slot 0 decode [" in job.stderr(0) or "slot 1 decode [" in job.stderr(0)
    assert "rank 1 (stage 1): " in job.stderr(1) and "last message: batch" in job.stderr(1)
    assert job.lines["long"]["finish_reason"] == "length"
