"""Incremental decoding against decoding all tokens at once, and stop strings against a search of the whole text."""

import pytest
from hypothesis import given, settings, strategies as st

from medha.text import Detokenizer, StopChecker, Tokenizer
from tests.text.samples import byte_level, sentencepiece, word_level

DECODED = {
    "byte level": Tokenizer(byte_level()),
    "metaspace first": Tokenizer(sentencepiece()),
    "metaspace never": Tokenizer(sentencepiece("never")),
    "strip": Tokenizer(sentencepiece(strip_decoder=True)),
    "words": Tokenizer(word_level()),
}


@pytest.mark.parametrize("name", DECODED)
@given(data=st.data())
@settings(max_examples=60, deadline=None)
def test_detokenizer_equals_decode(name: str, data: st.DataObject) -> None:
    tokenizer = DECODED[name]
    size = tokenizer.backend.get_vocab_size()
    ids = st.lists(st.one_of(st.integers(0, size + 1), st.integers(max(0, size - 16), size - 1)), max_size=40)
    token_ids = data.draw(st.one_of(ids, st.text(max_size=20).map(tokenizer.encode)))
    skip = data.draw(st.booleans())
    after = data.draw(st.one_of(st.none(), st.integers(0, size + 1)))
    detokenizer = Detokenizer(tokenizer, after=after, skip_special_tokens=skip)
    pieces = [detokenizer.push(token_id) for token_id in token_ids]
    goes_on = after is not None and tokenizer.kind(after) in ("text", "byte")
    expected = tokenizer.decode(token_ids, goes_on=goes_on, skip_special_tokens=skip)
    assert "".join(pieces) + detokenizer.finish(token_ids) == expected


@pytest.mark.parametrize("name", DECODED)
def test_a_text_goes_on_with_the_prompts(name: str) -> None:
    """Its first space is not dropped, as SentencePiece does at the beginning of a text; a newline is a byte."""
    tokenizer = DECODED[name]
    for text in ("ab a ab", "<s> ab", "ab  a", "ab\n  ab"):
        ids = tokenizer.encode(text, add_special_tokens=False)
        for cut in range(1, len(ids)):
            detokenizer = Detokenizer(tokenizer, after=ids[cut - 1])
            found = "".join(map(detokenizer.push, ids[cut:])) + detokenizer.finish(ids[cut:])
            if tokenizer.kind(ids[cut - 1]) in ("text", "byte"):
                assert tokenizer.decode(ids[:cut]) + found == tokenizer.decode(ids)


@pytest.mark.parametrize("name", ["byte level", "metaspace first", "strip"])
def test_a_character_comes_as_soon_as_it_is_whole(name: str) -> None:
    """Not before: all pieces would not be the text."""
    detokenizer = Detokenizer(DECODED[name])
    pieces = [detokenizer.push(token_id) for token_id in DECODED[name].encode("a 🙂 你 é b")]
    assert len([piece for piece in pieces if piece]) > 4


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


def test_half_characters_are_not_held_for_ever() -> None:
    tokenizer = DECODED["byte level"]
    lone = tokenizer.encode("é", add_special_tokens=False)[1]
    detokenizer = Detokenizer(tokenizer)
    pieces = [detokenizer.push(lone) for _ in range(1000)]
    assert len("".join(pieces)) >= 990
    assert "".join(pieces) + detokenizer.finish([lone] * 1000) == tokenizer.decode([lone] * 1000)
