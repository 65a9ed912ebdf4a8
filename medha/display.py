"""What a person sees while requests run: progress of long prefills, answers as they stream, a table at the end."""

from __future__ import annotations

import sys
import time
from collections import deque
from collections.abc import Iterable, Mapping
from typing import TextIO

from rich.console import Console, Group
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from rich.table import Table
from rich.text import Text

from medha.engine import Engine
from medha.jsonl import write_line
from medha.request import RequestOutput

_RATE_WINDOW_S = 10.0
_REFRESH_S = 0.125
_MAX_LINES = 8
_MAX_CHARS = 200


class Display:
    """Several requests at once: progress bars and streaming lines on a terminal, a line a request elsewhere.

    Args:
        engine: asked for the progress of prefills.
        console: where to draw.
        long_prompt: prompts of at least so many tokens get a progress bar.
        live: redraw in place if the console is a terminal.
    """

    def __init__(self, engine: Engine, console: Console, *, long_prompt: int = 4096, live: bool = True) -> None:
        self._engine = engine
        self._console = console
        self._long_prompt = long_prompt
        self._texts: dict[str, str] = {}
        self._prefills: dict[str, _Prefill] = {}
        self._last_refresh = 0.0
        self._live: Live | None = None
        if live and console.is_terminal:
            self._live = Live(console=console, auto_refresh=False, transient=True)

    def __enter__(self) -> Display:
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(self, *exc: object) -> None:
        if self._live is not None:
            self._live.update(Group(), refresh=True)
            self._live.stop()

    def update(self, output: RequestOutput) -> None:
        """Take a changed output whose ``output_kind`` is ``delta``."""
        request_id = output.request_id
        text = self._texts.get(request_id, "") + (output.outputs[0].text or "")
        self._texts[request_id] = text
        if output.finished:
            self._console.print(_line(request_id, text, _note(output)), soft_wrap=not self._console.is_terminal)
            del self._texts[request_id]

    def refresh(self) -> None:
        """Redraw, at most eight times a second; call after each step."""
        now = time.perf_counter()
        if self._live is None or now - self._last_refresh < _REFRESH_S:
            return
        self._last_refresh = now
        lines = [_line(i, text[-_MAX_CHARS:], "") for i, text in list(self._texts.items())[-_MAX_LINES:]]
        prefills = self._engine.prefills(min_tokens=self._long_prompt)
        self._prefills = {i: self._prefills.get(i) or _Prefill() for i, _, _ in prefills}
        bars = Progress(
            TextColumn("{task.description:>12}"),
            BarColumn(bar_width=30),
            MofNCompleteColumn(),
            TextColumn("tokens  {task.fields[rate]}"),
            console=self._console,
        )
        for request_id, done, total in prefills:
            rate = self._prefills[request_id].rate(done, total)
            bars.add_task(request_id, total=total, completed=done, rate=rate)
        self._live.update(Group(*lines, bars), refresh=True)


class StreamedText:
    """One request: its text on stdout as it comes, with a bar while a long prompt is read."""

    def __init__(self, bars: Display, out: TextIO) -> None:
        self._bars = bars
        self._out = out
        self._begun = False

    def __enter__(self) -> StreamedText:
        self._bars.__enter__()
        return self

    def __exit__(self, *exc: object) -> None:
        if not self._begun:
            self._bars.__exit__()

    def update(self, output: RequestOutput) -> None:
        """Write the new text; the bar goes away with the first piece."""
        if not self._begun:
            self._bars.__exit__()
            self._begun = True
        if output.error is not None:
            print(f"{type(output.error).__name__}: {output.error}", file=sys.stderr)
            return
        text = output.outputs[0].text
        self._out.write(" ".join(map(str, output.outputs[0].token_ids)) + " " if text is None else text)
        self._out.write("\n" if output.finished else "")
        self._out.flush()

    def refresh(self) -> None:
        """Redraw the bar while there is one."""
        if not self._begun:
            self._bars.refresh()


class JsonLines:
    """Every finished request as one JSON line on a stream."""

    def __init__(self, out: TextIO) -> None:
        self._out = out

    def __enter__(self) -> JsonLines:
        return self

    def __exit__(self, *exc: object) -> None:
        self._out.flush()

    def update(self, output: RequestOutput) -> None:
        """Write a finished output; others are passed over."""
        if output.finished:
            write_line(self._out, output)

    def refresh(self) -> None:
        """Nothing to redraw."""


class _Prefill:
    """Rate and time left of one prefill, from its progress over the last seconds."""

    def __init__(self) -> None:
        self._seen: deque[tuple[float, int]] = deque()

    def rate(self, done: int, total: int) -> str:
        """For example ``1,180/s, 0:21 left``; empty before there is anything to tell."""
        now = time.perf_counter()
        self._seen.append((now, done))
        while now - self._seen[0][0] > _RATE_WINDOW_S:
            self._seen.popleft()
        since, before = self._seen[0]
        if done <= before or now <= since:
            return ""
        rate = (done - before) / (now - since)
        left = int((total - done) / rate)
        return f"{rate:,.0f}/s, {left // 60}:{left % 60:02d} left"


def results_table(outputs: Iterable[RequestOutput], *, texts: Mapping[str, str], expected: Mapping[str, str]) -> Table:
    """A table of finished requests: prompt tokens, TTFT, TPOT, answer, right or wrong.

    Args:
        outputs: finished, in the order of the rows.
        texts: whole answer of each request.
        expected: right answer of each request.
    """
    table = Table()
    table.add_column("request")
    for name in ("arrival", "prompt tokens", "TTFT", "TPOT"):
        table.add_column(name, justify="right")
    table.add_column("answer", overflow="fold", max_width=48)
    table.add_column("")
    for output in outputs:
        metrics, request_id = output.metrics, output.request_id
        text = texts[request_id]
        table.add_row(
            request_id,
            f"{metrics.arrival:.1f} s",
            f"{len(output.prompt_token_ids):,}",
            _seconds(metrics.ttft),
            _seconds(metrics.tpot),
            Text(str(output.error), "red") if output.error else Text(_one_line(text)),
            Text("right", "green") if text == expected[request_id] else Text("wrong", "red"),
        )
    return table


def _seconds(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:.2f} s" if value >= 1 else f"{value * 1000:.0f} ms"


def _note(output: RequestOutput) -> str:
    if output.error is not None:
        return f"{type(output.error).__name__}: {output.error}"
    return f"{output.outputs[0].finish_reason}, TTFT {_seconds(output.metrics.ttft)}"


def _line(request_id: str, text: str, note: str) -> Text:
    line = Text.assemble((f"{request_id:>12} ", "cyan"), _one_line(text))
    return line.append(f"  [{note}]", "dim") if note else line


def _one_line(text: str) -> str:
    return text.replace("\n", "⏎")
