"""Tiny tokenizers built in memory, one of each family of decoders, and a chat template."""

import tokenizers
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, processors

from medha.child.process import Child
from medha.text import Tokenizer

LLAMA3 = (
    "{{- bos_token }}{% for message in messages %}\n"
    "{{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\n\n' }}\n"
    "    {%- generation %}{{- message['content'] | trim + '<|eot_id|>' }}{% endgeneration %}\n"
    "{% endfor %}\n"
    "{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}\n"
)
CONTROL = ["<|bos|>", "<|eot_id|>", "<|start_header_id|>", "<|end_header_id|>", "<|im_start|>", "<|im_end|>"]


def byte_level(adds_bos: bool = False) -> tokenizers.Tokenizer:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = [("h", "e"), ("l", "l"), ("he", "ll"), ("hell", "o"), ("Ġ", "hello"), ("o", "n"), ("ð", "Ł"), ("ðŁ", "ĺ")]
    vocab = {token: i for i, token in enumerate([*alphabet, *map("".join, merges)])}
    backend = tokenizers.Tokenizer(models.BPE(vocab, merges))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(text, special=True) for text in CONTROL])
    backend.add_tokens([AddedToken("<think>", special=False), AddedToken("né→", special=False)])
    if adds_bos:
        bos = backend.token_to_id("<|bos|>")
        backend.post_processor = processors.TemplateProcessing("<|bos|> $A", special_tokens=[("<|bos|>", bos)])
    return backend


def panicking() -> tokenizers.Tokenizer:
    """Bytes, and a pattern that takes exponentially long for :data:`PANIC`: the library panics."""
    backend = byte_level()
    split = pre_tokenizers.Split(tokenizers.Regex("(a+)+$"), "isolated")
    backend.pre_tokenizer = pre_tokenizers.Sequence([split, backend.pre_tokenizer])
    return backend


PANIC = "a" * 40 + "b"


def sentencepiece(scheme: str = "first", strip_decoder: bool = False) -> tokenizers.Tokenizer:
    pieces = ["▁", "▁▁", "▁a", "a", "b", "ab", "▁ab", "é", "<", ">", "/", "s", "�", "▁a▁"]
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *pieces]
    vocab = {token: i for i, token in enumerate(tokens)}
    merges = [("▁", "a"), ("a", "b"), ("▁", "ab"), ("▁", "▁")]
    backend = tokenizers.Tokenizer(models.BPE(vocab, merges, unk_token="<unk>", byte_fallback=True))
    if strip_decoder:
        backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
        parts = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    else:
        backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme, split=False)
        parts = [decoders.ByteFallback(), decoders.Metaspace(prepend_scheme=scheme, split=False)]
    backend.decoder = decoders.Sequence(parts)
    backend.add_special_tokens([AddedToken(text, special=True) for text in ("<s>", "</s>")])
    return backend


def word_level() -> tokenizers.Tokenizer:
    vocab = {"[UNK]": 0, "[BOS]": 1, "[EOS]": 2, "x": 3, "hello": 4, "world": 5}
    backend = tokenizers.Tokenizer(models.WordLevel(vocab, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    return backend


_RENDERER = Child("medha.child.text")


def chat_tokenizer(template: str | None, *, adds_bos: bool = False) -> Tokenizer:
    """One that renders in the child of all of them, which gets the template with each message."""
    names = {"bos_token": "<|bos|>", "eos_token": "<|eot_id|>"}
    tokenizer = Tokenizer(byte_level(adds_bos), special_tokens=names, chat_template=template)
    tokenizer._renderer = _RENDERER
    return tokenizer
