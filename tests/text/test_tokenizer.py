"""Loading, encoding and decoding, and the encoding of chat messages that hold special-token text."""

import json
import re
import resource
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import tokenizers
from tokenizers import AddedToken, normalizers

from medha.engine.admission import tokenise
from medha.errors import TokenizerError, ValidationError
from medha.text import Tokenizer, load_tokenizer
from tests.commands import wait_until
from tests.text.samples import LLAMA3, PANIC, byte_level, chat_tokenizer, panicking, sentencepiece, word_level

CHAT = [{"role": "user", "content": "hi"}]


def save(path: Path, backend: tokenizers.Tokenizer, config: Any = None, special_map: Any = None) -> Path:
    backend.save(str(path / "tokenizer.json"))
    for name, content in (("tokenizer_config.json", config), ("special_tokens_map.json", special_map)):
        if content is not None:
            (path / name).write_text(json.dumps(content))
    return path


def chat_ids(tokenizer: Tokenizer, messages: list[dict[str, Any]]) -> list[int]:
    return tokenizer.encode_chat(messages)[1].tolist()


# Loading


def test_load_reads_names_and_templates(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert load_tokenizer(tmp_path) is None
    bare = load_tokenizer(save(tmp_path, byte_level(), {"eos_token": "not in the vocabulary"}))
    assert (bare.eos_token_id, bare.bos_token_id, bare.chat_template) == (None, None, None)
    named = {"tool": "T", "default": "D", "tool_use": "T{{ tools|length }}"}
    templates = [{"name": name, "template": template} for name, template in named.items()]
    config = {"bos_token": {"content": "<|bos|>"}, "chat_template": templates}
    special_map = {"bos_token": "<|im_end|>", "eos_token": "<|eot_id|>"}
    tokenizer = load_tokenizer(save(tmp_path, byte_level(), config, special_map))
    ids = tokenizer.backend.token_to_id
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id) == (ids("<|bos|>"), ids("<|eot_id|>"))
    assert (tokenizer.encode_chat(CHAT, tools=[{}])[0], tokenizer.encode_chat(CHAT)[0]) == ("T1", "D")
    assert not caplog.records
    (tmp_path / "chat_template.jinja").write_text("F")
    assert load_tokenizer(tmp_path).encode_chat(CHAT)[0] == "F"
    (additional := tmp_path / "additional_chat_templates").mkdir()
    (additional / "tool_use.jinja").write_text("A{{ tools|length }}")
    tokenizer = load_tokenizer(tmp_path)
    assert (tokenizer.encode_chat(CHAT, tools=[{}])[0], tokenizer.encode_chat(CHAT)[0]) == ("A1", "F")


END = "<|im_end|>"
NAMES = [
    {"eos_token": END},
    {"image_token": {"content": END, "rstrip": True}},
    {"additional_special_tokens": [None, {"content": 1}, END, END]},
    {"extra_special_tokens": [{"content": END}]},
    {"extra_special_tokens": {"end_token": END}},
    {"added_tokens_decoder": {"7": {"content": END, "special": True}, "8": {"content": "hello", "special": False}}},
]


@pytest.mark.parametrize("is_added", [True, False])
@pytest.mark.parametrize("where", ["tokenizer_config.json", "special_tokens_map.json"])
@pytest.mark.parametrize("names", NAMES)
def test_what_other_files_call_special_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, names: Any, where: str, is_added: bool
) -> None:
    """Of the vocabulary, in which it keeps its id, and of more than one character; also in the child. What is added
    already keeps its flags, and is made special by no list of tokens to add."""
    data = json.loads(byte_level().to_str())
    for token in data["added_tokens"]:
        token |= {"special": False, "rstrip": True}
        data["model"]["vocab"] |= {} if is_added else {token["content"]: token["id"]}
    data["added_tokens"] *= is_added
    (tmp_path / "tokenizer.json").write_text(json.dumps(data))
    (tmp_path / where).write_text(json.dumps(names | {"unk_token": "<unk>", "pad_token": "!"}))
    (tmp_path / "chat_template.jinja").write_text("its text is made here")
    made = lambda child, source, variables, name: variables["messages"][0]["content"] + END  # noqa: E731
    monkeypatch.setattr("medha.text.tokenizer.render", made)
    tokenizer, end = load_tokenizer(tmp_path), byte_level().token_to_id(END)
    strips = is_added or "image_token" in names
    assert (tokenizer.encode(END + "  a") == tokenizer.encode(END + "a")) == strips
    if is_added and any(isinstance(listed, list) for listed in names.values()):
        assert not tokenizer.special_texts and tokenizer.decode([end]) == END
        return
    assert tokenizer.special_texts == {end: END}
    assert tokenizer.decode(tokenizer.encode("hello" + END)) == "hello"
    assert tokenizer.encode("a" * 200_000 + END)[-1] == end
    for content in ("hi!", END):
        assert chat_ids(tokenizer, [{"role": "user", "content": content}]).count(end) == 1


@pytest.mark.parametrize("is_old", [False, True])
def test_what_other_files_give_the_next_ids_is_added(tmp_path: Path, is_old: bool) -> None:
    """Special where they call it so; templates have what they call special, no more; also in the child."""
    size, names = byte_level().get_vocab_size(), {"eos_token": "<X>", "extra_special_tokens": {"eot_token": END}}
    ids = {"<X>": size, "<Y>": size + 1, "<Z>": size + 3, END: byte_level().token_to_id(END)}
    listed = {str(ids[text]): {"content": text, "special": text == "<X>"} for text in reversed(ids)}
    save(tmp_path, byte_level(), None, names)
    file = "added_tokens.json" if is_old else "tokenizer_config.json"
    (tmp_path / file).write_text(json.dumps(ids if is_old else {"added_tokens_decoder": listed}))
    (tmp_path / "chat_template.jinja").write_text("{{ eot_token }}{{ bos_token is defined }}")
    tokenizer = load_tokenizer(tmp_path)
    assert tokenizer.eos_token_id == size and "<Z>" not in tokenizer.backend.get_vocab()
    for text in ("a<X><Y>", "a" * 200_000 + "<X><Y>"):
        assert tokenizer.encode(text)[-2:] == [size, size + 1]
    assert (tokenizer.decode([size, size + 1]), tokenizer.encode_chat(CHAT)[0]) == ("<Y>", f"{END}False")


@pytest.mark.parametrize("name", ["tokenizer.model", "vocab.json"])
def test_a_file_that_is_not_read_is_named(tmp_path: Path, caplog: pytest.LogCaptureFixture, name: str) -> None:
    """And what makes tokenizer.json of it."""
    (tmp_path / name).write_text("")
    assert load_tokenizer(tmp_path) is None
    made = f"AutoTokenizer.from_pretrained('{tmp_path}').save_pretrained('{tmp_path}')"
    said = f"{tmp_path / name} is not read; transformers makes tokenizer.json of it: {made}"
    assert [record.getMessage() for record in caplog.records] == [said]


PANICS = byte_level().to_str().replace('"continuing_subword_prefix":null', '"continuing_subword_prefix":"\U0010ffff"')
CORRUPT = {
    "tokenizer.json is not a usable tokenizer": ["", "{}", "[" * 100_000, PANICS],
    "tokenizer_config.json: ": ["[1]", "{", '{"chat_template": 3}', '{"chat_template": ["a"]}'],
}


@pytest.mark.parametrize(("said", "text"), [(said, text) for said, texts in CORRUPT.items() for text in texts])
def test_corrupt_files(tmp_path: Path, said: str, text: str) -> None:
    """And one on which the library panics."""
    (save(tmp_path, byte_level()) / said.split()[0].rstrip(":")).write_text(text)
    with pytest.raises(TokenizerError, match=re.escape(said)):
        load_tokenizer(tmp_path)


def test_unreadable_and_too_large_files(tmp_path: Path) -> None:
    file = tmp_path / "tokenizer.json"
    file.write_bytes(b"\xff\xfe\xff")
    with pytest.raises(TokenizerError, match=r"tokenizer\.json cannot be read"):
        load_tokenizer(tmp_path)
    with file.open("wb") as stream:
        stream.truncate(100_000_001)
    with pytest.raises(TokenizerError, match=r"tokenizer\.json has 100000001 bytes"):
        load_tokenizer(tmp_path)


def test_ids_beyond_the_embedding() -> None:
    """Of the tokenizer as it is loaded, and of an added token that a prompt holds."""
    tokenizer = Tokenizer(byte_level())
    size, plain = tokenizer.backend.get_vocab_size(), tokenizer.backend.get_vocab_size(with_added_tokens=False)
    tokenizer.check_vocab(size + 64)
    tokenizer.check_vocab(plain)
    with pytest.raises(TokenizerError, match=rf"up to {plain - 1}, but the embedding has {plain - 1} rows"):
        tokenizer.check_vocab(plain - 1)
    bos = Tokenizer(byte_level(adds_bos=True)).backend.token_to_id("<|bos|>")
    with pytest.raises(TokenizerError, match=rf"up to {bos}, but the embedding has {bos} rows"):
        Tokenizer(byte_level(adds_bos=True)).check_vocab(bos)
    last = size - 1
    assert tokenise("hello", tokenizer, last)[1].max() < last == tokenise("né→", tokenizer, last + 1)[1].max()
    said = rf"^prompt holds 'né→', token {last} of the tokenizer; accepted: .*{last}"
    with pytest.raises(ValidationError, match=said):
        tokenise("a né→", tokenizer, last)


# Encoding and decoding


@pytest.mark.parametrize("text", ["", "hello", "a\0b", "‮שלום‬", " \n\t ", "x" * 200_000, "🙂é你"])
def test_encode_round_trip(text: str) -> None:
    tokenizer = Tokenizer(byte_level())
    assert tokenizer.decode(tokenizer.encode(text)) == text


LONG = "hello <|eot_id|> né→ <think> " * 5000


@pytest.mark.parametrize("add_special_tokens", [True, False])
@pytest.mark.parametrize("loaded", [True, False])
def test_a_long_text_has_the_same_ids_from_the_child(tmp_path: Path, add_special_tokens: bool, loaded: bool) -> None:
    backend = byte_level(adds_bos=True)
    tokenizer = load_tokenizer(save(tmp_path, backend)) if loaded else Tokenizer(backend)
    for text in (LONG, LONG[:1000]):
        ids = tokenizer.encode(text, add_special_tokens=add_special_tokens)
        assert ids == backend.encode(text, add_special_tokens=add_special_tokens).ids
    assert tokenizer._encoder.child._process is not None


@pytest.mark.parametrize("prefix", ["", "hello " * 20_000])
def test_what_the_encoder_raises_is_named(prefix: str) -> None:
    """Also a panic, which is no Exception, and what happens in the child."""
    panic, unknown = Tokenizer(panicking()), word_level()
    unknown.model.unk_token = "not there"
    for tokenizer, text, reason in (
        (panic, PANIC, "PanicException: .*retry-limit-in-match"),
        (Tokenizer(unknown), " 9", "Exception: WordLevel error: Missing"),
    ):
        with pytest.raises(TokenizerError, match=f"^tokenizer cannot encode this: {reason}"):
            tokenizer.encode(prefix + text)
        assert len(tokenizer.encode(prefix + "x")) > 0


def test_a_long_text_takes_memory_within_bounds_and_for_a_while() -> None:
    """Of the child; a normalizer may make much of a text."""
    backend = byte_level()
    backend.normalizer = normalizers.Replace("x", "y" * 20)
    tokenizer = Tokenizer(backend)
    assert len(tokenizer.encode_array("y" * 1_000_000)) == 1_000_000
    child = tokenizer._encoder.child._process
    assert child is not None
    memory = Path(f"/proc/{child.pid}/statm")
    wait_until(lambda: int(memory.read_text().split()[1]) * resource.getpagesize() < 100e6)
    message = r"^tokenizer cannot encode this: the process ended with SIG\w+; accepted: a shorter text, or token ids$"
    with pytest.raises(TokenizerError, match=message):
        tokenizer.encode("x" * 200_000)
    assert len(tokenizer.encode("y" * 200_000)) == 200_000


def test_what_the_decoder_raises_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    error = type("PanicException", (BaseException,), {})  # as Rust code raises it
    tokenizer = Tokenizer(byte_level())
    monkeypatch.setattr(tokenizer, "backend", SimpleNamespace(decode=Mock(side_effect=error("index out of bounds"))))
    with pytest.raises(TokenizerError, match=r"^tokenizer cannot decode this: PanicException: index out of bounds$"):
        tokenizer.decode([1])


def test_bos_and_truncation() -> None:
    backend = byte_level(adds_bos=True)
    backend.enable_truncation(2)
    tokenizer = Tokenizer(backend, special_tokens={"bos_token": "<|bos|>"})
    assert tokenizer.adds_bos
    assert tokenizer.encode("abcd")[0] == tokenizer.bos_token_id
    assert len(tokenizer.encode("abcd", add_special_tokens=False)) == 4
    assert tokenizer.decode(tokenizer.encode("hi")) == "hi"
    assert tokenizer.decode(tokenizer.encode("hi"), skip_special_tokens=False) == "<|bos|>hi"
    assert not (chat_tokenizer(None).adds_bos or Tokenizer(backend).adds_bos)


# Encoding chat messages


@pytest.mark.parametrize("adds_bos", [True, False])
@pytest.mark.parametrize("written", [0, 1, 2])
def test_exactly_one_bos(adds_bos: bool, written: int) -> None:
    tokenizer = chat_tokenizer("{{ bos_token }}" * written + "{{ messages[0].content }}", adds_bos=adds_bos)
    expected = tokenizer.encode("hi", add_special_tokens=False)
    assert chat_ids(tokenizer, CHAT) == [tokenizer.bos_token_id] * bool(adds_bos or written) + expected


@pytest.mark.parametrize("content", ["a <|eot_id|>b", "<|bos|><|bos|>", "<|im_<|eot_id|>end|>"])
def test_special_text_in_content_is_text(content: str) -> None:
    tokenizer = chat_tokenizer(LLAMA3)
    ids = chat_ids(tokenizer, [{"role": "user", "content": content}, {"role": "user", "content": "plain"}])
    clean = chat_ids(tokenizer, [{"role": "user", "content": "A"}, {"role": "user", "content": "plain"}])
    controls = [token_id for token_id in ids if token_id in tokenizer.special_texts]
    assert controls == [token_id for token_id in clean if token_id in tokenizer.special_texts]
    rendered = tokenizer.encode_chat([{"role": "user", "content": content}, {"role": "user", "content": "plain"}])[0]
    assert tokenizer.decode(ids, skip_special_tokens=False) == rendered


@pytest.mark.parametrize(("normalizes", "ab"), [(False, ["ab"]), (True, ["▁a", "b"])])
def test_special_text_in_sentencepiece_adds_no_space(normalizes: bool, ab: list[str]) -> None:
    template = "{{ bos_token }}{{ messages[0].content }}{{ eos_token }}"
    names = {"bos_token": "<s>", "eos_token": "</s>"}
    tokenizer = Tokenizer(sentencepiece(strip_decoder=normalizes), special_tokens=names, chat_template=template)
    ids = chat_ids(tokenizer, [{"role": "user", "content": "ab</s>ab"}])
    tokens = [tokenizer.backend.id_to_token(token_id) for token_id in ids]
    assert tokens == ["<s>", *ab, "<", "/", "s", ">", "ab", "</s>"]


def test_special_text_of_one_character_is_refused() -> None:
    """It cannot be cut, and is no text to the encoder."""
    backend = byte_level()
    backend.add_special_tokens([AddedToken("\u25c0", special=True)])
    tokenizer = Tokenizer(backend, chat_template="{{ messages[0].content }}\u25c0")
    assert chat_ids(tokenizer, [{"role": "user", "content": "ab"}])[-1] in tokenizer.special_texts
    with pytest.raises(ValidationError, match=r"^messages hold '\u25c0', a special token of tokenizer"):
        tokenizer.encode_chat([{"role": "user", "content": "a\u25c0b"}])
