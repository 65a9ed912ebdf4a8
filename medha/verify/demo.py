"""The demo: one long document is read while short questions arrive and are answered, under two schedulers.

The first act is the paper's scheduler (LARS); the second serves the same arrivals first come first served, every prompt
whole, and a table sets the two against each other. Each act builds its engine anew. It needs no download. The model is
the needle model (:mod:`medha.models.needle`), whose right answers are known, so the tables can say right or wrong.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console

from medha.cli.display import Display, one_line
from medha.cli.report import print_rows
from medha.config import EngineConfig
from medha.engine.arrivals import Arrival, drive
from medha.engine.build import build_role
from medha.engine.engine import Engine
from medha.errors import ParallelConfigError
from medha.models.needle import NUM_LAYERS, make_haystack, write_needle
from medha.outputs import RequestOutput
from medha.parallel.launch import read_launch
from medha.parallel.own_ranks import job_folder
from medha.params import SamplingParams
from medha.timeline import Timeline

LONG_PROMPT_TOKENS = 32_768

_CHUNK_SIZE = 256
_TRANSFER_LIMIT_S = 1200.0  # the second stage waits for a whole document
_PARAMS = SamplingParams(temperature=0.0, max_tokens=48, output_kind="final_only")
_CODES = {"Ada": "31-plum", "Bruno": "58-fern", "Chen": "07-jade", "Divya": "92-rust", "Emre": "64-opal"}
_FACTS = "".join(f"The code of {name} is {code}.\n" for name, code in _CODES.items())


class Question(NamedTuple):
    """A request of the demo and its right answer."""

    request_id: str
    prompt: str
    answer: str
    after: int  # how many tokens of the document have been read when it arrives


def questions(long_prompt_tokens: int = LONG_PROMPT_TOKENS) -> list[Question]:
    """One about a long document, and short ones that arrive while it is read."""
    haystack, parts = make_haystack(long_prompt_tokens, depth=0.4), len(_CODES) + 1
    asked = f"{_FACTS}Which code? The code of"
    shorts = [
        Question(f"chat-{i}", f"{asked} {name} is", f" {code}.", after=i * long_prompt_tokens // parts)
        for i, (name, code) in enumerate(_CODES.items(), start=1)
    ]
    return [Question("document", haystack.prompt, haystack.answer.rstrip("\n"), after=0), *shorts]


def run_demo(*, long_prompt_tokens: int = LONG_PROMPT_TOKENS, console: Console | None = None, live: bool = True) -> int:
    """Run the demo, on however many ranks were started; returns 0 when every answer is right, 3 otherwise.

    Args:
        long_prompt_tokens: length of the document.
        console: where answers and tables go; stdout by default.
        live: draw the running requests on stderr if it is a terminal.
    """
    console = console or Console()
    asked = questions(long_prompt_tokens)
    expected = {question.request_id: question.answer for question in asked}
    whole = long_prompt_tokens + 256

    timelines = {"lars": Timeline(), "fcfs": Timeline()}
    served = dict[str, list[RequestOutput]]()  # nothing on a rank without the engine

    def act(name: str, opening: str, **options: Any) -> None:
        """Build an engine and have it serve what is asked, at the times of the first act in the second."""
        launch = read_launch()
        options |= layout_for(1 if launch is None else launch.world_size)
        with job_folder("demo") as folder:
            options |= {"max_model_len": whole, "max_num_seqs": 8, "dist_timeout": _TRANSFER_LIMIT_S}
            config = EngineConfig.from_flat(str(write_needle(folder)), **options)
            role = build_role(config, timeline=timelines[name])  # when it returns every rank has loaded
        if role.engine is not None:
            console.print(opening)
            if launch is not None and name == "lars":
                layout = f"spp={options['spp']} pipeline stages, tp={options['tp']} tensor-parallel ranks in each"
                console.print(f"Layout: {layout}.")
            shown = Console(stderr=True) if live else None
            with Display(role.engine.prefills, lines=console, live=shown, num_requests=len(asked)) as display:
                served[name] = _serve(role.engine, asked, served.get("lars", ()), display)
        role.close()

    act(
        "lars",
        f"One document of {long_prompt_tokens:,} tokens with a fact hidden in it is read,\n"
        f"while {len(_CODES)} short questions arrive. Who is served follows from deadlines (LARS).",
        scheduler="medha",
        policy="lars",
        quantum_s=0.25,
        chunk_size=_CHUNK_SIZE,
        max_batch_tokens=2 * _CHUNK_SIZE,
    )
    if served:
        print_rows(console, "", results(served["lars"], expected))
        console.print(f"{_num_right(served['lars'], expected)} of {len(expected)} answers right.")
        console.print("TPOT is long while the document is read: each token waits for a batch with a part of it.\n")
    act(
        "fcfs",
        "The same arrivals again, first come first served and every prompt whole:\n"
        "the questions wait for the document.",
        scheduler="orca",
        chunk_size=whole,
        max_batch_tokens=whole,
    )
    if not served:
        return 0
    folder = tempfile.mkdtemp(prefix="medha-timeline-")
    for name, timeline in timelines.items():
        timeline.write(Path(folder) / f"{name}.json")
    lars, fcfs = served.values()
    print_rows(console, "whole prompts first come first served, and LARS", comparison(fcfs, lars, expected))
    console.print(f"What ran when, for ui.perfetto.dev:\n{folder}/fcfs.json\n{folder}/lars.json", soft_wrap=True)
    num_right = min(_num_right(outputs, expected) for outputs in served.values())
    console.print(f"Under both, {num_right} of {len(expected)} answers right.")
    return 0 if num_right == len(expected) else 3


def results(outputs: Sequence[RequestOutput], expected: Mapping[str, str]) -> list[dict[str, Any]]:
    """Rows of finished requests, right or wrong against the right answer of each."""
    return [
        {
            "request": output.request_id,
            "prompt_tokens": len(output.prompt_token_ids),
            "arrived_s": output.metrics.arrival,
            "ttft_s": output.metrics.ttft,
            "tpot_s": output.metrics.tpot,
            "answer": str(output.error) if output.error else one_line(output.outputs[0].text or "").strip(),
            "": _verdict(expected, output),
        }
        for output in outputs
    ]


def comparison(
    fcfs: Sequence[RequestOutput], lars: Sequence[RequestOutput], expected: Mapping[str, str]
) -> list[dict[str, Any]]:
    """Rows of the same requests, in the same order, under two schedulers, and how many times sooner with the second."""
    return [
        {
            "request": slow.request_id,
            "ttft_fcfs_s": (slow_s := slow.metrics.ttft),
            "ttft_lars_s": (fast_s := fast.metrics.ttft),
            "ratio": slow_s / fast_s if slow_s and fast_s else None,
            "answers": _verdict(expected, slow, fast),
        }
        for slow, fast in zip(fcfs, lars, strict=True)
    ]


def _verdict(expected: Mapping[str, str], *outputs: RequestOutput) -> str:
    return "right" if all(one.outputs[0].text == expected[one.request_id] for one in outputs) else "wrong"


def layout_for(world_size: int) -> dict[str, int]:
    """Degrees for the needle model on so many ranks: a stage for each of its two layers, the rest tensor-parallel.

    Raises:
        ParallelConfigError: no layout has so many ranks.
    """
    layouts = {1: {"tp": 1, "spp": 1}} | {NUM_LAYERS * tp: {"tp": tp, "spp": NUM_LAYERS} for tp in (1, 2, 4, 8)}
    if world_size not in layouts:
        accepted = ", ".join(map(str, sorted(layouts)))
        raise ParallelConfigError(f"the demo's model cannot be spread over {world_size} ranks; accepted: {accepted}")
    return layouts[world_size]


def _serve(
    engine: Engine, asked: Sequence[Question], before: Sequence[RequestOutput], display: Display
) -> list[RequestOutput]:
    """Ask the first question at once and the others as the first one's prompt is read, or what was asked ``before`` at
    the same times; shows them as they end, returns them in order of arrival."""
    first, *rest = asked
    waiting = [] if before else rest
    arrivals = [
        Arrival(one.request_id, one.prompt or "", _PARAMS, arrival_s=one.metrics.arrival - before[0].metrics.arrival)
        for one in before
    ]

    def ask_what_is_due() -> None:
        display.refresh()
        progress = {request_id: done for request_id, done, _ in engine.prefills()}
        while waiting and progress.get(first.request_id, waiting[0].after) >= waiting[0].after:
            question = waiting.pop(0)
            engine.add_request(question.request_id, question.prompt, _PARAMS)

    finished = []
    arrivals = arrivals or [Arrival(first.request_id, first.prompt, _PARAMS)]
    for output in drive(engine, arrivals, on_step=ask_what_is_due):
        display.finish(output)
        finished.append(output)
    return sorted(finished, key=lambda output: output.metrics.arrival)


def _num_right(outputs: Sequence[RequestOutput], expected: Mapping[str, str]) -> int:
    return sum(_verdict(expected, output) == "right" for output in outputs)
