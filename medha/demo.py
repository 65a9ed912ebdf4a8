"""The demo: one long document is read while short questions arrive and are answered.

It needs no download. The model is the needle model (:mod:`medha.models.needle`), whose right answers are known, so the
table at the end can say right or wrong.
"""

from __future__ import annotations

import tempfile
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from medha.build import build_engine
from medha.config import EngineConfig
from medha.display import Display, results_table
from medha.driver import Arrival, drive
from medha.models.needle import make_haystack, write_needle
from medha.request import RequestOutput, SamplingParams

LONG_PROMPT_TOKENS = 32_768

_CODES = {"Ada": "31-plum", "Bruno": "58-fern", "Chen": "07-jade", "Divya": "92-rust", "Emre": "64-opal"}
_FACTS = "".join(f"The code of {name} is {code}.\n" for name, code in _CODES.items())


@dataclass(frozen=True, slots=True)
class DemoRequest:
    """A request of the demo and its right answer."""

    request_id: str
    prompt: str
    answer: str
    arrival_s: float


def demo_requests(long_prompt_tokens: int = LONG_PROMPT_TOKENS) -> list[DemoRequest]:
    """One long document at time 0 and a short question every few seconds after."""
    haystack = make_haystack(long_prompt_tokens, depth=0.4)
    long = DemoRequest("document", haystack.prompt, haystack.answer.rstrip("\n"), 0.0)
    shorts = [
        DemoRequest(f"chat-{i}", f"{_FACTS}Which code? The code of {name} is", f" {code}.", 2.0 + 4.0 * i)
        for i, (name, code) in enumerate(_CODES.items())
    ]
    return [long, *shorts]


def run_demo(*, long_prompt_tokens: int = LONG_PROMPT_TOKENS, console: Console | None = None) -> int:
    """Run the demo; returns 0 when every answer is right, 3 otherwise."""
    console = console or Console()
    requests = demo_requests(long_prompt_tokens)
    params = SamplingParams(temperature=0.0, max_tokens=48, output_kind="delta")
    with tempfile.TemporaryDirectory(prefix="medha-needle-") as folder:
        model = write_needle(Path(folder) / "needle")
        config = EngineConfig.from_flat(
            str(model), max_model_len=long_prompt_tokens + 256, max_num_seqs=8, chunk_size=256, max_batch_tokens=512
        )
        engine = build_engine(config)
    console.print(
        f"Reading a document of {long_prompt_tokens:,} tokens with a fact hidden in it, while "
        f"{len(requests) - 1} short questions arrive."
    )
    arrivals = [Arrival(r.request_id, r.prompt, params, arrival_s=r.arrival_s) for r in requests]
    texts: dict[str, str] = {}
    finished: list[RequestOutput] = []
    with Display(engine, console) as display:
        for output in drive(engine, arrivals, on_step=display.refresh):
            display.update(output)
            texts[output.request_id] = texts.get(output.request_id, "") + (output.outputs[0].text or "")
            if output.finished:
                finished.append(output)
    expected = {r.request_id: r.answer for r in requests}
    finished.sort(key=lambda output: output.metrics.arrival)
    console.print(results_table(finished, texts=texts, expected=expected))
    num_right = sum(texts[request_id] == answer for request_id, answer in expected.items())
    console.print(f"{num_right} of {len(expected)} answers right.")
    return 0 if num_right == len(expected) else 3
