"""The demo: one long document is read while short questions arrive and are answered.

It needs no download. The model is the needle model (:mod:`medha.models.needle`), whose right answers are known, so the
table at the end can say right or wrong.
"""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from medha.build import Role, build_role
from medha.config import EngineConfig
from medha.display import Display, results_table
from medha.driver import Arrival, Joiner, drive
from medha.engine import Engine
from medha.errors import ConfigError, ParallelConfigError
from medha.models.needle import NUM_LAYERS, make_haystack, write_needle
from medha.parallel.launch import Launch, read_launch
from medha.request import RequestOutput, SamplingParams

LONG_PROMPT_TOKENS = 32_768

_CHUNK_SIZE = 256
_WRITE_LIMIT_S = 60.0
_PARAMS = SamplingParams(temperature=0.0, max_tokens=48, output_kind="delta")
_CODES = {"Ada": "31-plum", "Bruno": "58-fern", "Chen": "07-jade", "Divya": "92-rust", "Emre": "64-opal"}
_FACTS = "".join(f"The code of {name} is {code}.\n" for name, code in _CODES.items())


@dataclass(frozen=True, slots=True)
class Question:
    """A request of the demo and its right answer.

    Attributes:
        after: how many tokens of the document have been read when it arrives.
    """

    request_id: str
    prompt: str
    answer: str
    after: int


def questions(long_prompt_tokens: int = LONG_PROMPT_TOKENS) -> list[Question]:
    """One about a long document, and short ones that arrive while it is read."""
    haystack = make_haystack(long_prompt_tokens, depth=0.4)
    shorts = [
        Question(
            f"chat-{i}",
            f"{_FACTS}Which code? The code of {name} is",
            f" {code}.",
            after=i * long_prompt_tokens // (len(_CODES) + 1),
        )
        for i, (name, code) in enumerate(_CODES.items(), start=1)
    ]
    return [Question("document", haystack.prompt, haystack.answer.rstrip("\n"), after=0), *shorts]


def run_demo(*, long_prompt_tokens: int = LONG_PROMPT_TOKENS, console: Console | None = None, live: bool = True) -> int:
    """Run the demo, on however many ranks were started; returns 0 when every answer is right, 3 otherwise.

    Args:
        long_prompt_tokens: length of the document.
        console: where answers and table go; stdout by default.
        live: draw the running requests on stderr if it is a terminal.
    """
    console = console or Console()
    role = _needle_role(long_prompt_tokens)
    engine = role.engine
    if engine is None:
        role.close()
        return 0
    asked = questions(long_prompt_tokens)
    console.print(
        f"One document of {long_prompt_tokens:,} tokens with a fact hidden in it is read,\n"
        f"while {len(asked) - 1} short questions arrive."
    )
    launch = read_launch()
    if launch is not None:
        layout = layout_for(launch.world_size)
        console.print(f"Layout: spp={layout['spp']} pipeline stages, tp={layout['tp']} tensor-parallel ranks in each.")
    stderr = Console(stderr=True) if live else None
    with Display(engine, lines=console, live=stderr, num_requests=len(asked)) as display:
        outputs = _serve(engine, asked, display)
    role.close()
    expected = {question.request_id: question.answer for question in asked}
    console.print(results_table(outputs, expected=expected))
    num_right = sum(output.outputs[0].text == expected[output.request_id] for output in outputs)
    console.print(f"{num_right} of {len(expected)} answers right.")
    return 0 if num_right == len(expected) else 3


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


def _needle_role(long_prompt_tokens: int) -> Role:
    launch = read_launch()
    with _needle_folder(launch) as folder:
        config = EngineConfig.from_flat(
            str(folder),
            max_model_len=long_prompt_tokens + 256,
            max_num_seqs=8,
            chunk_size=_CHUNK_SIZE,
            max_batch_tokens=2 * _CHUNK_SIZE,
            **layout_for(1 if launch is None else launch.world_size),
        )
        return build_role(config)


@contextmanager
def _needle_folder(launch: Launch | None) -> Iterator[Path]:
    """The model's folder, written once a node by its first rank, and removed when every rank has loaded it."""
    if launch is None or launch.local_world_size == 1:
        with tempfile.TemporaryDirectory(prefix="medha-demo-") as name:
            yield write_needle(Path(name) / "needle")
        return
    folder = Path(tempfile.gettempdir()) / f"medha-demo-{os.getuid()}-{launch.address.replace(':', '-')}"
    if launch.local_rank == 0:
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(mode=0o700)
        write_needle(folder)
    deadline = time.monotonic() + _WRITE_LIMIT_S
    while not (folder / "config.json").is_file():  # written last
        if time.monotonic() > deadline:
            raise ConfigError(f"the first rank of this node wrote no model into {folder} within {_WRITE_LIMIT_S:.0f} s")
        time.sleep(0.05)
    yield folder  # build_role returns when every rank has loaded: it ends in a collective
    if launch.local_rank == 0:
        shutil.rmtree(folder, ignore_errors=True)


def _serve(engine: Engine, asked: list[Question], display: Display) -> list[RequestOutput]:
    """Ask the first question at once and the others as the first one's prompt is read; outputs in order of arrival."""
    first, *rest = asked
    waiting = deque(rest)

    def ask_what_is_due() -> None:
        display.refresh()
        progress = {request_id: done for request_id, done, _ in engine.prefills()}
        while waiting and progress.get(first.request_id, waiting[0].after) >= waiting[0].after:
            question = waiting.popleft()
            engine.add_request(question.request_id, question.prompt, _PARAMS)

    joiner = Joiner()
    finished = []
    for piece in drive(engine, [Arrival(first.request_id, first.prompt, _PARAMS)], on_step=ask_what_is_due):
        display.update(piece)
        whole = joiner.add(piece)
        if whole is not None:
            display.finish(whole)
            finished.append(whole)
    return sorted(finished, key=lambda output: output.metrics.arrival)
