"""What a person sees while requests run: progress of long prefills, answers as they stream.

Answers go to stdout. The part that is redrawn (bars, streaming text, a count) is drawn on stderr, and only if that is a
terminal.
"""

from __future__ import annotations

import logging
import re
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from typing import TextIO

from rich.cells import cell_len
from rich.console import Console, RenderableType
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeRemainingColumn
from rich.table import Column
from rich.text import Text

from medha.outputs import CompletionOutput, RequestOutput

logger = logging.getLogger("medha")

_REFRESH_S = 0.125
_MAX_ROWS = 8
_MAX_CHARS = 400
_ID_WIDTH = 16


class Display:
    """Many requests at once: a line for each that ends and, on a terminal, the state of those that run.

    Args:
        prefills: (request id, tokens read, tokens in all) of each prompt under way of at least so many tokens.
        lines: where a line for each finished request is printed; None prints none.
        live: where the running requests are drawn, if it is a terminal; None draws nothing.
        num_requests: how many there will be.
        long_prompt: prompts of at least so many tokens get a progress bar.
    """

    def __init__(
        self,
        prefills: Callable[[int], Sequence[tuple[str, int, int]]],
        *,
        lines: Console | None,
        live: Console | None,
        num_requests: int,
        long_prompt: int = 4096,
    ) -> None:
        self._prefills = prefills
        self._lines = lines
        self._long_prompt = long_prompt
        self._num_requests = num_requests
        self._num_done = 0
        self._tails: dict[str, str] = {}
        self._tasks: dict[str, TaskID] = {}
        self._last_refresh = 0.0
        self._region: _Region | None = None
        if live is not None and live.is_terminal:
            self._region = _Region(live)
            if lines is not None and lines.is_terminal:
                self._lines = live  # all that reaches the terminal must pass the console that redraws a part of it

    def __enter__(self) -> Display:
        if self._region is not None:
            self._region.start()
        return self

    def __exit__(self, *exc: object) -> None:
        if self._region is not None:
            self._region.stop()

    def update(self, piece: RequestOutput) -> None:
        """Take new tokens of a request (``output_kind`` is ``delta``)."""
        for one in piece.outputs:
            if one.index == 0:  # of several completions the first is shown
                tail = self._tails.get(piece.request_id, "") + shown_text(one)
                self._tails[piece.request_id] = tail[-_MAX_CHARS:]

    def finish(self, whole: RequestOutput) -> None:
        """Take a request that has ended, with all of its tokens."""
        self._tails.pop(whole.request_id, None)
        self._num_done += 1
        if self._lines is not None:
            name, text, note = map(one_line, (whole.request_id, shown_text(whole.outputs[0]), _note(whole)))
            line = Text.assemble((name, "cyan"), "  ", text, (f"  [{note}]", "red" if whole.error else "dim"))
            self._lines.print(line, soft_wrap=True)

    def refresh(self) -> None:
        """Redraw, at most eight times a second; call after each step."""
        now = time.perf_counter()
        if self._region is not None and now - self._last_refresh >= _REFRESH_S:
            self._last_refresh = now
            self._fill(self._region)
            self._region.refresh()

    def _fill(self, region: _Region) -> None:
        streaming = [(i, tail) for i, tail in self._tails.items() if tail]
        region.above = [_tail_line(i, tail, region.console.width) for i, tail in streaming[:_MAX_ROWS]]
        prefills = self._prefills(self._long_prompt)
        shown = {request_id: (done, total) for request_id, done, total in prefills[:_MAX_ROWS]}
        for request_id in self._tasks.keys() - shown.keys():
            region.remove_task(self._tasks.pop(request_id))
        for request_id, (done, total) in shown.items():
            if request_id not in self._tasks:
                self._tasks[request_id] = region.add_task(_short_id(request_id), total=total, rate="")
            task = self._tasks[request_id]
            region.update(task, completed=done)
            speed = next(one.speed for one in region.tasks if one.id == task)
            region.update(task, rate=f"{speed:,.0f} tok/s" if speed else "")
        if self._num_requests > 1:
            more = max(0, len(streaming) - _MAX_ROWS) + max(0, len(prefills) - _MAX_ROWS)
            count = f"{self._num_done} of {self._num_requests} requests done"
            region.below = [Text(count + (f", {more} running that are not shown" if more else ""), "dim")]


class _Region(Progress):
    """What is redrawn: streaming answers, then bars, then the count."""

    above: Sequence[Text] = ()
    below: Sequence[Text] = ()

    def __init__(self, console: Console) -> None:
        super().__init__(
            TextColumn("{task.description}", "cyan", markup=False, table_column=Column(width=_ID_WIDTH)),
            BarColumn(bar_width=None),
            TextColumn("{task.completed:,}/{task.total:,}"),
            TextColumn("{task.fields[rate]}", table_column=Column(no_wrap=True)),
            TimeRemainingColumn(compact=True),
            console=console,
            expand=True,
            auto_refresh=False,
            transient=True,
            redirect_stdout=sys.stdout.isatty(),
            redirect_stderr=sys.stderr.isatty(),
            speed_estimate_period=10.0,
        )

    def get_renderables(self) -> Iterable[RenderableType]:
        """Called by rich at each refresh."""
        yield from self.above
        if self.tasks:
            yield self.make_tasks_table(self.tasks)
        yield from self.below


class StreamedText:
    """One request: its text goes to ``out`` as it comes, after a bar of a display that prints no lines."""

    def __init__(self, bars: Display, out: TextIO) -> None:
        self._bars = bars
        self._out = out
        self._begun = False

    def __enter__(self) -> StreamedText:
        self._bars.__enter__()
        return self

    def __exit__(self, *exc: object) -> None:
        self._bars.__exit__()

    def update(self, piece: RequestOutput) -> None:
        """Write the new text; the bar goes away with the first piece."""
        if not self._begun:
            self._bars.__exit__()
            self._begun = True
        self._out.write(shown_text(piece.outputs[0]))
        self._out.flush()

    def finish(self, whole: RequestOutput) -> None:
        """End the line; how it ended goes to the log."""
        if whole.outputs[0].token_ids:
            self._out.write("\n")
            self._out.flush()
        logger.log(logging.ERROR if whole.error else logging.INFO, "%s", one_line(_note(whole)))

    def refresh(self) -> None:
        """Redraw the bar while there is one."""
        if not self._begun:
            self._bars.refresh()


def print_explanation(output: RequestOutput) -> None:
    """Say on stderr where the TTFT of a finished request went, if it was served."""
    if output.metrics.explanation is not None:
        print(output.metrics.explanation.text(one_line), file=sys.stderr)


def shown_text(completion: CompletionOutput) -> str:
    """Its text or, without a tokenizer, its token ids, each followed by a blank."""
    if completion.text is not None:
        return completion.text
    return "".join(f"{token} " for token in completion.token_ids)


def _seconds_text(value: float | None) -> str:
    """Seconds or milliseconds, with the unit."""
    if value is None:
        return "-"
    return f"{value:.2f} s" if value >= 1 else f"{value * 1000:.0f} ms"


def _note(output: RequestOutput) -> str:
    """How a request ended, in a few words."""
    if output.error is not None:
        return f"{type(output.error).__name__}: {output.error}"
    completion, metrics = output.outputs[0], output.metrics
    words = [f"{completion.finish_reason} after {len(completion.token_ids)} tokens"]
    words += [f"TTFT {_seconds_text(metrics.ttft)}"] if metrics.ttft is not None else []
    words += [f"TPOT {_seconds_text(metrics.tpot)}"] if metrics.tpot is not None else []
    return ", ".join(words)


def _tail_line(request_id: str, tail: str, width: int) -> Text:
    """The end of a request's text, on one line of a terminal."""
    room = width - _ID_WIDTH - 1
    tail = one_line(tail)[-room:]
    while cell_len(tail) > room:  # characters of two columns
        tail = tail[1:]
    return Text.assemble((f"{_short_id(request_id):<{_ID_WIDTH}} ", "cyan"), tail, no_wrap=True)


def _short_id(request_id: str) -> str:
    """Cut in the middle: names of one kind differ at their ends."""
    half = _ID_WIDTH // 2
    return one_line(request_id if len(request_id) <= _ID_WIDTH else request_id[: half - 1] + "…" + request_id[-half:])


def one_line(text: str) -> str:
    """Text without line breaks, and without control characters, which a terminal would obey."""
    return re.sub(r"[\x00-\x1f\x7f-\x9f]", "·", text.replace("\n", "⏎"))
