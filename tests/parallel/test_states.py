"""Requests in every state that decode instances bring, when a rank is killed or stopped, the job is told to end, or one
of them is aborted: an error by name or a clean end in time, and nothing is left behind."""

import json
import time
from functools import cache
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from medha import LLM
from medha.worker.transfer import TransferLine
from tests.engines import left_behind
from tests.parallel.faults import STATES, Fault, Job, Start, command, states_of
from tests.parallel.test_decode import SIZES, wishes
from tests.parallel.test_faults import END_S, check_ends, check_named, right_tokens, unfinished_lines
from tests.parallel.workers import WorkerPool, generate

LAYOUTS: dict[str, dict[str, Any]] = {
    "medha": {"decode_replicas": 1, "decode_tp": 2},
    "cdsp": {"scheduler": "cdsp", "chunk_size": None, "kvp": 2, "decode_replicas": 1, "decode_tp": 1},
}


def take_a_while(transfers: TransferLine, *rest: Any) -> None:
    """A hand-over for which others have to wait."""
    time.sleep(0.05)
    hand_over(transfers, *rest)


hand_over = TransferLine._run


# -- an abort --------------------------------------------------------------------------------------------------


@patch.object(TransferLine, "_run", take_a_while)
def abort_in_each_state(folder: Path, options: dict[str, Any], prompts: Any, params: Any) -> Any:
    """On each rank: serve the requests once for each state, and abort the first that is in it. By state: who that was,
    why and with which tokens each request ended, after how many seconds the aborted one was gone, and what is left."""
    with LLM(folder, **SIZES | options) as llm:
        if not llm.is_driver:
            return {}
        engine, by_state = llm.engine, {}
        for state in STATES:
            ends: dict[str, Any] = {}
            for name, (prompt, its) in enumerate(zip(prompts, params, strict=True)):
                engine.add_request(str(name), prompt, its)
            aborted = name_of = gone_s = None
            while engine.has_unfinished:
                ends |= {output.request_id: output.outputs[0] for output in engine.step(wait_s=0.001)}
                found = states_of(engine)
                in_it = next((one for one in engine.by_slot.values() if found.get(one.name) == state), None)
                if in_it is not None and aborted is None:
                    aborted, name_of, start_s = in_it, in_it.name, engine.now()
                    engine.abort(name_of)
                    engine.add_request("late", prompts[0], params[0])  # which may get the slot
                if aborted is not None and gone_s is None and aborted not in engine.by_slot.values():
                    gone_s = engine.now() - start_s
            while engine.advance():
                pass
            told = {name: (one.finish_reason, one.token_ids) for name, one in ends.items()}
            by_state[state] = name_of, told, gone_s, left_behind(engine)
        return by_state


@pytest.mark.parametrize("scheduler", LAYOUTS)
def test_an_abort_in_any_state_leaves_nothing_behind(own_workers: WorkerPool, folder: Path, scheduler: str) -> None:
    prompts, params = wishes((100, 90, 40, 70, 30), (25,))
    with LLM(folder, **SIZES) as llm:
        expected = generate(llm, prompts, params)
    options = LAYOUTS[scheduler] | {"num_kv_blocks": 16, "transfer_buffers": 1}
    by_state = own_workers.run(abort_in_each_state, 3, folder, options, prompts, params)[0]
    for state, (aborted, ends, gone_s, left) in by_state.items():
        assert aborted is not None, f"nobody was {state}"
        reason, tokens = ends.pop(aborted)
        assert reason == "abort" and tokens == expected[int(aborted)][: len(tokens)]
        assert (len(tokens) > 0) == (state not in ("queued", "in a chunk")), state
        wanted = {str(at): tokens for at, tokens in enumerate(expected) if str(at) != aborted} | {"late": expected[0]}
        assert {name: tokens for name, (_, tokens) in ends.items()} == wanted
        assert left == {} and gone_s < END_S


# -- a rank that fails, and a signal ---------------------------------------------------------------------------

REQUESTS = [
    {"id": "short", "prompt": "a", "max_tokens": 1, "temperature": 0.0},
    *(
        {"id": letter, "prompt": letter * 150, "max_tokens": 40, "temperature": 0.0, "ignore_eos": True}
        for letter in "abcdefghijklmnopqrstuvwx"
    ),
]
SIZES_OF_ALL = "--block-size 16 --num-kv-blocks 80 --transfer-buffers 1 --max-model-len 512 --decode-replicas 1 "
COMMANDS = {
    "medha": SIZES_OF_ALL + "--chunk-size 64 --max-batch-tokens 64",
    "cdsp": SIZES_OF_ALL + "--scheduler cdsp --kvp 2 --sp-sizes 1,2 --improvement-rate 0.1 --max-chunks 2",
}
PLACES = {
    "medha": ("rank 0 (stage 0)", "rank 1 (decode instance 0)"),
    "cdsp": ("rank 0 (group 0, stage 0)", "rank 1 (group 1, stage 0)", "rank 2 (decode instance 0)"),
}


@cache
def alone(model: Path) -> dict[str, list[int]]:
    """The tokens of one rank."""
    return right_tokens(model, REQUESTS)


def slowly(rank: int, arguments: list[str]) -> None:
    """As ``command``, with hand-overs for which others have to wait."""
    TransferLine._run = take_a_while  # type: ignore[method-assign]
    command(rank, arguments)


def check_lines(model: Path, job: Job, *, may_lack: bool) -> dict[str, Any]:
    """Each request has its line, with the tokens of one rank so far; returns the lines of those that had not ended."""
    lines, states = job.lines, json.loads((job.folder / "states").read_text())
    assert set(states.values()) == set(STATES)
    assert may_lack or set(lines) == set(alone(model))
    assert lines["short"]["finish_reason"] == "length"
    return unfinished_lines(job, alone(model))


# each rank of each scheduler, and each action on a rank of each kind
PAIRS = [("medha", 0, "kill"), ("medha", 1, "stop"), ("cdsp", 0, "stop"), ("cdsp", 1, "kill"), ("cdsp", 2, "kill")]
FAULTS = [(name, rank, action) for name in PLACES for rank in range(len(PLACES[name])) for action in ("kill", "stop")]


@pytest.mark.parametrize(
    ("scheduler", "rank", "action"),
    [pytest.param(*fault, marks=() if fault in PAIRS else pytest.mark.slow) for fault in FAULTS],
)
def test_a_rank_that_fails_ends_all_by_name(model: Path, serve: Start, scheduler: str, rank: int, action: str) -> None:
    """While a request is in each state. A lost decode instance costs the job, as any lost rank does; where other lanes
    go on until it is noticed, requests may still end there."""
    fault, place = Fault(rank, "states", action), PLACES[scheduler][rank]
    job = serve(len(PLACES[scheduler]), REQUESTS, COMMANDS[scheduler], fault=fault, target=slowly)
    assert place in check_ends(job, fault)
    unfinished = check_lines(model, job, may_lack=rank == 0)
    check_named(unfinished, place)
    assert unfinished or rank == 0


@pytest.mark.parametrize("rank", [0, 1])
def test_a_hand_over_that_fails_ends_all(serve: Start, rank: int) -> None:
    """Whether keys and values are sent or received."""
    fault = Fault(rank, "transfer", "throw", after=1)
    said = check_ends(serve(2, REQUESTS, COMMANDS["medha"], fault=fault), fault)
    assert PLACES["medha"][rank] in said and "ValueError: boom" in said


def test_a_transfer_that_takes_long_is_waited_for(model: Path, tmp_path: Path, serve: Start) -> None:
    """And the ranks of an instance have their place in the timeline."""
    timeline, fault = tmp_path / "trace.json", Fault(1, "transfer", "sleep", sleep_s=2.0)
    job = serve(2, REQUESTS, f"{COMMANDS['medha']} --timeline {timeline}", fault=fault)
    job.end_well()
    assert {name: line["token_ids"] for name, line in job.lines.items()} == alone(model)
    assert any(line.get("decode_wait_s", 0.0) > 1.0 for line in job.lines.values())
    events = json.loads(timeline.read_text())["traceEvents"]
    lanes = {one["args"]["name"]: (one["pid"], one["tid"]) for one in events if one["name"] == "thread_name"}
    assert set(lanes) == {"group 0, stage 0", "group 1, stage 0", *alone(model)}
    names = [one["name"] for one in events if one["ph"] == "X" and (one["pid"], one["tid"]) == lanes["x"]]
    chunks = [name for name in names if name != "decode"]
    assert chunks[0].startswith("chunk [0:") and chunks[-1].endswith(":150]")


@pytest.mark.parametrize("scheduler", PLACES)
def test_a_signal_ends_all_requests_and_all_ranks(model: Path, serve: Start, scheduler: str) -> None:
    """While one is in each state: what is in flight runs to its end, and every rank ends well."""
    fault = Fault(0, "states", "terminate")
    job = serve(len(PLACES[scheduler]), REQUESTS, COMMANDS[scheduler], fault=fault, target=slowly)
    codes = job.wait(END_S, since_s=job.fault_s())
    assert codes == [143, *[0] * (len(codes) - 1)], job.stderr(0)
    unfinished = check_lines(model, job, may_lack=False)
    assert {line["finish_reason"] for line in unfinished.values()} == {"abort"}
    assert set(unfinished) >= set(json.loads((job.folder / "states").read_text()))
