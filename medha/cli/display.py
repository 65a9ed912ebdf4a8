"""What a person sees while requests run: bars of long prefills, and answers.

Answers go to stdout. The part that is redrawn (bars, and a count) is drawn on stderr, and only if that is a terminal.
"""

from __future__ import annotations

import logging
import re
import sys
import time
from collections.abc import Callable, Sequence
from typing import Self, TextIO

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeRemainingColumn
from rich.table import Column
from rich.text import Text

from medha.config import CDSP, SchedulerConfig
from medha.outputs import CompletionOutput, RequestOutput

logger = logging.getLogger("medha")

_REFRESH_S = 0.125
_MAX_ROWS = 8
_LONG_PROMPT = 4096  # tokens of those that get a bar
_ID_WIDTH = 16


Prefills = Callable[[int], Sequence[tuple[str, int, int]]]
"""Of prompts of so many tokens: id, tokens read, in all."""


class Display:
    """Many requests at once: a line for each that ends and, on a terminal, how far those are that run.

    Args:
        lines: where a line for each finished request is printed.
        live: where bars are drawn, if it is a terminal.
        num_requests: how many there will be; more than one are counted.
    """

    def __init__(self, prefills: Prefills, *, lines: Console | None, live: Console | None, num_requests: int) -> None:
        self._prefills, self._lines = prefills, lines
        self._tasks: dict[str, TaskID] = {}
        self._last_refresh = 0.0
        self._bars = _bars(live)
        self._count = self._bars.add_task("requests done", total=num_requests, rate="", visible=num_requests > 1)
        if not self._bars.disable and lines is not None and lines.is_terminal:
            self._lines = live  # all that reaches the terminal must pass the console that redraws a part of it

    def __enter__(self) -> Self:
        self._bars.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._bars.stop()

    def update(self, piece: RequestOutput) -> None:
        """Take new tokens of a request (``output_kind`` is ``delta``), of which nothing is shown before its end."""

    def finish(self, whole: RequestOutput) -> None:
        """Take a request that has ended, with all of its tokens."""
        self._bars.advance(self._count)
        if self._lines is not None:
            for one in whole.outputs:
                name = whole.request_id + f"[{one.index}]" * (len(whole.outputs) > 1)
                name, text, note = map(one_line, (name, shown_text(one), _note(whole, one)))
                line = Text.assemble((name, "cyan"), "  ", text, (f"  [{note}]", "red" if whole.error else "dim"))
                self._lines.print(line, soft_wrap=True)

    def refresh(self) -> None:
        """Redraw, at most eight times a second; call after each step."""
        now, bars = time.perf_counter(), self._bars
        if bars.disable or now - self._last_refresh < _REFRESH_S:
            return
        self._last_refresh = now
        shown = {name: (done, total) for name, done, total in self._prefills(_LONG_PROMPT)[:_MAX_ROWS]}
        for name in self._tasks.keys() - shown.keys():
            bars.remove_task(self._tasks.pop(name))
        for name, (done, total) in shown.items():
            if name not in self._tasks:
                self._tasks[name] = bars.add_task(_short_id(name), total=total, rate="")
            task = self._tasks[name]
            bars.update(task, completed=done)
            speed = next(one.speed for one in bars.tasks if one.id == task)
            bars.update(task, rate=f"{speed:,.0f} tok/s" if speed else "")
        bars.refresh()


def _bars(console: Console | None) -> Progress:
    """What is drawn on a terminal, and nowhere else."""
    is_drawn = console is not None and console.is_terminal
    return Progress(
        TextColumn("{task.description}", "cyan", markup=False, table_column=Column(width=_ID_WIDTH)),
        BarColumn(bar_width=None),
        TextColumn("{task.completed:,}/{task.total:,}"),
        TextColumn("{task.fields[rate]}", table_column=Column(no_wrap=True)),
        TimeRemainingColumn(compact=True),
        console=console if is_drawn else Console(quiet=True),
        disable=not is_drawn,
        expand=True,
        auto_refresh=False,
        transient=True,
        redirect_stdout=sys.stdout.isatty(),
        redirect_stderr=sys.stderr.isatty(),
        speed_estimate_period=10.0,
    )


class StreamedText(Display):
    """One request: its text goes to ``out`` as it comes, after a bar; how it ended goes to the log."""

    def __init__(self, prefills: Prefills, out: TextIO, *, live: Console | None) -> None:
        super().__init__(prefills, lines=None, live=live, num_requests=1)
        self._out = out

    def update(self, piece: RequestOutput) -> None:
        """Write the new text; the bar goes away with the first piece."""
        self._bars.stop()
        self._bars.disable = True
        self._out.write(shown_text(piece.outputs[0]))
        self._out.flush()

    def finish(self, whole: RequestOutput) -> None:
        """End the line."""
        if whole.outputs[0].token_ids:
            self._out.write("\n")
            self._out.flush()
        logger.log(logging.ERROR if whole.error else logging.INFO, "%s", one_line(_note(whole, whole.outputs[0])))


def print_explanation(output: RequestOutput) -> None:
    """Say on stderr where the TTFT of a finished request went, if it was served."""
    if output.metrics.explanation is not None:
        print(output.metrics.explanation.text(one_line), file=sys.stderr)


def shown_text(completion: CompletionOutput) -> str:
    """Its text or, without a tokenizer, its token ids, each followed by a blank."""
    if completion.text is not None:
        return completion.text
    return "".join(f"{token} " for token in completion.token_ids)


def _note(output: RequestOutput, completion: CompletionOutput) -> str:
    """How a completion of a request ended, in a few words."""
    if output.error is not None:
        return f"{type(output.error).__name__}: {output.error}"
    metrics = output.metrics
    words = [f"{completion.finish_reason} after {len(completion.token_ids)} tokens"]
    for name, seconds in (("TTFT", metrics.ttft), ("TPOT", metrics.tpot)):
        if seconds is not None:
            words.append(f"{name} {seconds:.2f} s" if seconds >= 1 else f"{name} {seconds * 1000:.0f} ms")
    return ", ".join(words)


def _short_id(request_id: str) -> str:
    """Cut in the middle: names of one kind differ at their ends."""
    half = _ID_WIDTH // 2
    return one_line(request_id if len(request_id) <= _ID_WIDTH else request_id[: half - 1] + "…" + request_id[-half:])


def one_line(text: str) -> str:
    """Text without line breaks, and without control characters, which a terminal would obey."""
    return re.sub(r"[\x00-\x1f\x7f-\x9f]", "·", text.replace("\n", "⏎"))


def budget_text(config: SchedulerConfig, *, has_tpot: bool) -> str:
    """What a batch may hold, and why, in words; ``has_tpot``: some request has a TPOT objective."""
    if config.scheduler == CDSP:
        sizes = "any SP size" if config.sp_sizes is None else f"SP {', '.join(map(str, config.sp_sizes))}"
        return f"scheduler cdsp: chunks as planned, {sizes}; every prefill has its groups to itself"
    if config.scheduler != "medha":
        whole = config.scheduler in ("static", "orca")
        chunks = "whole prompts" if whole else f"chunks of at most {config.chunk_size:,}"
        return f"scheduler {config.scheduler}: batches of at most {config.max_batch_tokens:,} tokens, {chunks}"
    if config.t_target_s is not None:
        return f"a batch may take {config.t_target_s:g} s (t_target_s)"
    chunks = "what one or two efficient chunks take" if config.spare_share else "what an efficient chunk takes"
    quantum = chunks if config.quantum_s is None else f"{config.quantum_s:g} s"
    if has_tpot:
        return f"a batch may take what its decodes' TPOT objectives leave, else {quantum} (quantum_s)"
    why = "quantum_s, as there is no TPOT objective"
    return f"a batch may take {quantum} ({why}), and so may a token beside prefills"
