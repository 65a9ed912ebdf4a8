"""Stop strings, against a search of the whole text."""

from hypothesis import given, settings
from hypothesis import strategies as st

from medha.text import StopChecker


def reference(text: str, stops: list[str], include: bool) -> tuple[str, str | None]:
    matches = [(text.find(stop), i) for i, stop in enumerate(stops) if stop in text]
    if not matches:
        return text, None
    start, i = min(matches)
    return text[:start] + (stops[i] if include else ""), stops[i]


@given(
    pieces=st.lists(st.text("abé", max_size=4), max_size=20),
    stops=st.lists(st.text("abé", min_size=1, max_size=5), max_size=4),
    include=st.booleans(),
)
@settings(max_examples=400, deadline=None)
def test_stop_checker_equals_search_of_whole_text(pieces: list[str], stops: list[str], include: bool) -> None:
    checker = StopChecker(stops, include_stop_str_in_output=include)
    expected, stop = reference("".join(pieces), stops, include)
    emitted = ""
    for piece in pieces:
        emitted += checker.push(piece)
        assert expected.startswith(emitted), "text of a stop string leaked"
        if checker.matched:
            break
    else:
        emitted += checker.finish()
    assert (emitted, checker.matched) == (expected, stop)


def test_stop_checker_holds_little() -> None:
    checker = StopChecker(["a" * 50 + "b"])
    for _ in range(2000):
        checker.push("a")
        assert len(checker._held) <= 50
