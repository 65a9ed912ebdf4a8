"""What is drawn while requests run, at the widths of terminals."""

import io
import logging
import re
import time

import pytest
from rich.console import Console

import medha.cli.display
from medha.cli.display import Display, Prefills, StreamedText
from medha.errors import ValidationError
from medha.outputs import CompletionOutput, RequestMetrics, RequestOutput

CONTROL = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


def prefills_of(running: list[tuple[str, int, int]]) -> Prefills:
    """What a display asks an engine for."""
    return lambda min_tokens: [row for row in running if row[2] >= min_tokens]


class Screen:
    """A terminal of some width, and what was written to it."""

    def __init__(self, width: int = 80) -> None:
        self.file = io.StringIO()
        self.console = Console(file=self.file, force_terminal=True, width=width, height=30, color_system=None)

    def lines(self) -> list[str]:
        """What was written since the last call, without the movements of the cursor."""
        text = CONTROL.sub("", self.file.getvalue()).replace("\r", "\n")
        self.file.seek(0)
        self.file.truncate()
        return [line for line in text.split("\n") if line.strip()]


@pytest.fixture(autouse=True)
def _no_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(medha.cli.display, "_REFRESH_S", 0.0)


def output(
    request_id: str = "a", text: str | None = "", *, finished: bool = False, error: Exception | None = None
) -> RequestOutput:
    metrics = RequestMetrics(0.0, 0.1, 0.25, 3.25, num_prompt_tokens=3, num_output_tokens=4)
    reason = None if not finished else "stop" if error is None else "error"
    completion = CompletionOutput(0, text, [7, 8, 9, 10], reason)
    return RequestOutput(request_id, "abc", [1, 2, 3], [completion], finished, metrics, error)


def make_display(prefills: Prefills, live: Console | None, lines: Console | None = None) -> Display:
    return Display(prefills, lines=lines, live=live, num_requests=3)


@pytest.mark.parametrize("width", [80, 120])
def test_bars_with_rate_and_time_left_fit_the_terminal(width: int) -> None:
    running = [("document", 1_234_567, 10_000_000), ("short", 10, 20)]
    screen = Screen(width)
    with make_display(prefills_of(running), screen.console) as display:
        display.refresh()
        time.sleep(0.02)
        running[0] = ("document", 1_234_667, 10_000_000)
        screen.lines()
        display.refresh()
        drawn = screen.lines()
    assert len(drawn) == 2
    assert all(len(line) <= width for line in drawn)
    assert re.fullmatch(r"requests done +0/3 +--:-- *", drawn[0])  # hours are wider
    assert re.fullmatch(r"document +━+[╸╺]? +1,234,667/10,000,000 [\d,]+ tok/s [\d:]+", drawn[1])
    assert len(drawn[1]) == width


def test_a_line_for_each_request_that_ends_and_nothing_is_drawn_off_a_terminal() -> None:
    out, drawn = io.StringIO(), io.StringIO()
    lines, live = Console(file=out, width=40), Console(file=drawn)
    with make_display(prefills_of([("document", 1, 5000)]), live, lines) as display:
        display.update(output("a", "half "))
        display.refresh()
        display.finish(output("a", "half and half\n" * 5, finished=True))
        display.finish(output("b", None, finished=True))
        display.finish(output("c", None, finished=True, error=ValidationError("bad\nprompt")))
        several = output("d", "one", finished=True)
        several.outputs.append(CompletionOutput(1, "other", [7], "length"))
        display.finish(several)
    assert drawn.getvalue() == ""
    assert out.getvalue().splitlines() == [
        "a  " + "half and half⏎" * 5 + "  [stop after 4 tokens, TTFT 250 ms, TPOT 1.00 s]",
        "b  7 8 9 10   [stop after 4 tokens, TTFT 250 ms, TPOT 1.00 s]",
        "c  7 8 9 10   [ValidationError: bad·prompt]".replace("·", "⏎"),
        "d[0]  one  [stop after 4 tokens, TTFT 250 ms, TPOT 1.00 s]",
        "d[1]  other  [length after 1 tokens, TTFT 250 ms, TPOT 1.00 s]",
    ]


def test_lines_on_a_terminal_stand_above_the_part_that_is_redrawn() -> None:
    screen, elsewhere = Screen(), Screen()
    with make_display(prefills_of([("document", 1, 5000)]), screen.console, elsewhere.console) as display:
        display.refresh()
        screen.lines()
        display.finish(output("a", "answer", finished=True))
        drawn = screen.lines()
        display.refresh()
        assert re.match(r"requests done +[━╸╺ ]+ 1/3 ", screen.lines()[0])
    assert drawn[0] == "a  answer  [stop after 4 tokens, TTFT 250 ms, TPOT 1.00 s]"
    assert drawn[1].startswith("requests done ") and drawn[2].startswith("document ")
    assert elsewhere.lines() == []


def test_streamed_text_alone_is_on_the_stream(caplog: pytest.LogCaptureFixture) -> None:
    screen, out = Screen(), io.StringIO()
    prefills = prefills_of([("prompt-0", 100, 5000)])
    with caplog.at_level(logging.INFO, "medha"), StreamedText(prefills, out, live=screen.console) as streamed:
        streamed.refresh()
        assert screen.lines()[-1].startswith("prompt-0 ")
        assert out.getvalue() == ""
        streamed.update(output(text="one "))
        screen.lines()
        streamed.refresh()
        assert screen.lines() == []
        streamed.update(output(text="two", finished=True))
        streamed.finish(output(text="one two", finished=True))
    assert out.getvalue() == "one two\n"
    assert [r.getMessage() for r in caplog.records] == ["stop after 4 tokens, TTFT 250 ms, TPOT 1.00 s"]
