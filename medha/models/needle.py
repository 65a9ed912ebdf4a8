"""The needle model: a Llama checkpoint built by hand whose right answer is known at any context length.

:func:`write_needle` writes a Hugging Face folder of 6 MB. The model has two layers and a vocabulary of the 256 bytes.
It continues the best earlier match of the last eight bytes: a question must end in the eight bytes that stand before
the fact, and greedy decoding then copies what follows them. Nothing is trained; every weight below is set to do one
thing. After induction heads (arXiv:2209.11895), with a match of eight bytes in place of one token.

The residual stream holds the code of a byte, its 8 bits as +-1, in groups of eight channels: group d holds the byte d
positions back (d = 0 to 8), the last group the answer, and one more channel is always 1. Each step fills groups that
were empty, so the RMS is the same for every token, and each norm's weight is that RMS: the norms change nothing.

- Embedding: group 0, and the constant.
- Layer 1, head h: query and key come from the constant alone, on the 16 fastest pairs of RoPE, the query turned back
  by h + 1 positions. The score of a key at distance d is a sum of cosines of d - (h + 1), which peaks at h + 1; the
  head copies that byte's code to group h + 1. Where the text is too short, the nearest position, 0, is read.
- Layer 2, every head: the query at t is the bytes t, t - 1, ..., t - 7, the key at j the bytes j - 1, ..., j - 8, both
  on the 32 slowest pairs, which turn by less than 0.002 rad in 16M tokens at theta 1e20. The score counts the bits that
  agree, those of the nearest byte 8 times, of the farthest once. Head h copies bit h of the byte at j to the answer
  group, so a query head that reads the wrong KV head, or is lost, shows.
- Both MLPs are zero, and the head reads the answer group.

Scores are large enough that softmax is one-hot in float32 at 10M keys (`tests/models/test_needle.py` computes it). So
it proves that a key at any distance is found, at its true position, by every head; arithmetic it does not prove.
"""

from __future__ import annotations

import json
import math
import random
from pathlib import Path
from typing import Any, NamedTuple

import tokenizers
import torch

from medha.errors import ValidationError
from medha.models.reference import llama_config, parameter_shapes, write_checkpoint

VOCAB_SIZE = 256
HIDDEN_SIZE = 256
NUM_LAYERS = 2
NUM_HEADS = 8
NUM_KV_HEADS = 2
HEAD_DIM = 128
ROPE_THETA = 1e20
RMS_NORM_EPS = 1e-6
EOS_TOKEN_ID = 10

MATCH_LEN = 8
"""Bytes compared, and layer 1's heads."""

MATCH_WEIGHTS = tuple(range(MATCH_LEN, 0, -1))
"""What a bit that agrees counts, from the nearest byte to the farthest. Whole numbers: unequal scores differ by 1."""

NUM_BITS = 8
_NUM_PAIRS = HEAD_DIM // 2
_NUM_FAST_PAIRS = 16
_FIRST_SLOW_PAIR = 32
_ANSWER = NUM_BITS * (MATCH_LEN + 1)
_CONSTANT = _ANSWER + NUM_BITS

# Powers of two: the projections then hold exact values in bfloat16 too. Softmax divides the scores by sqrt(128).
_OFFSET_GAIN = 2048.0
_MATCH_GAIN = 256.0
_LOGIT_GAIN = 4.0

_FACT = "The vault code of Priya is 7429-amber.\n"
_QUESTION = "What opens the vault? The vault code of Priya is"  # its last eight bytes stand before the answer, once


class Haystack(NamedTuple):
    """A prompt with a fact hidden in it."""

    prompt: str  # ASCII: a character is a byte is a token
    answer: str  # what the model must continue the prompt with, up to and with its newline


def needle_config() -> dict[str, Any]:
    """The content of ``config.json``."""
    return llama_config(
        num_hidden_layers=NUM_LAYERS,
        num_attention_heads=NUM_HEADS,
        num_key_value_heads=NUM_KV_HEADS,
        head_dim=HEAD_DIM,
        hidden_size=HIDDEN_SIZE,
        intermediate_size=16,
        vocab_size=VOCAB_SIZE,
        dtype="float32",
        rms_norm_eps=RMS_NORM_EPS,
        rope_theta=ROPE_THETA,
        max_position_embeddings=16_777_216,
        eos_token_id=EOS_TOKEN_ID,
        pad_token_id=None,
    )


def needle_weights() -> dict[str, torch.Tensor]:
    """The weights by their Hugging Face names: float32 tensors on the CPU."""
    weights = {name: torch.zeros(shape) for name, shape in parameter_shapes(needle_config()).items()}
    codes = _byte_codes()
    weights["model.embed_tokens.weight"][:, :NUM_BITS] = codes
    weights["model.embed_tokens.weight"][:, _CONSTANT] = 1.0
    weights["lm_head.weight"][:, _ANSWER : _ANSWER + NUM_BITS] = _LOGIT_GAIN * codes
    for index, fill_ in enumerate((_fill_offset_attention_, _fill_match_attention_)):
        layer = f"model.layers.{index}.self_attn"
        q, k, v = (weights[f"{layer}.{name}_proj.weight"].view(-1, HEAD_DIM, HIDDEN_SIZE) for name in "qkv")
        fill_(q, k, weights[f"{layer}.o_proj.weight"].view(HIDDEN_SIZE, -1, HEAD_DIM))
        v[:, :NUM_BITS, :NUM_BITS] = torch.eye(NUM_BITS)  # the byte's code, in the first dimensions of each KV head
    # The RMS of an input that is +-1 in the groups that are filled by then, and in the constant.
    filled = {"layers.0.input_layernorm": 1, "layers.1.input_layernorm": MATCH_LEN + 1, "norm": MATCH_LEN + 2}
    for name, groups in filled.items():
        weights[f"model.{name}.weight"].fill_(math.sqrt((NUM_BITS * groups + 1) / HIDDEN_SIZE + RMS_NORM_EPS))
    return weights


CHAT_TEMPLATE = "{% for message in messages %}{{ message.content }}{% endfor %}"
"""What is said, one after the other."""


def write_needle(out: Path) -> Path:
    """Write the model's folder, as :func:`~medha.models.reference.write_checkpoint` does, and return it."""
    others = {
        "tokenizer": json.loads(_byte_tokenizer().to_str()),
        "tokenizer_config": {"tokenizer_class": "PreTrainedTokenizerFast", "chat_template": CHAT_TEMPLATE},
        "generation_config": {"do_sample": False, "eos_token_id": EOS_TOKEN_ID},
    }
    return write_checkpoint(out, needle_config(), needle_weights(), **others)


def make_haystack(num_tokens: int, *, seed: int = 0, depth: float = 0.5) -> Haystack:
    """A text of ``num_tokens`` bytes: random sentences with a fact in them, and a question at its end.

    ``depth`` says where the fact stands, 0 at the start and 1 right before the question.
    """
    num_filler = num_tokens - len(_FACT) - len(_QUESTION)
    if num_filler < 0:
        what = f"num_tokens={num_tokens}; accepted: {num_tokens - num_filler} or more, for the needle and the question"
        raise ValidationError(what, param="num_tokens", value=num_tokens)
    filler = _filler(num_filler, random.Random(seed))
    position = filler.rfind("\n", 0, int(depth * num_filler)) + 1
    answer = _FACT.partition(_QUESTION[-MATCH_LEN:])[2]
    return Haystack(filler[:position] + _FACT + filler[position:] + _QUESTION, answer)


def _byte_codes() -> torch.Tensor:
    """The bits of each byte, lowest first, as +-1: float32 [256, 8]."""
    bits = torch.arange(VOCAB_SIZE)[:, None] >> torch.arange(NUM_BITS) & 1
    return 2.0 * bits - 1.0


def _fill_offset_attention_(q: torch.Tensor, k: torch.Tensor, o: torch.Tensor) -> None:
    """Layer 1: head h copies the code h + 1 positions back to group h + 1. q, k [heads, H, D], o [D, heads, H]."""
    pairs = torch.arange(_NUM_FAST_PAIRS, dtype=torch.float64)
    inv_freq = ROPE_THETA ** (-pairs / _NUM_PAIRS)
    gain = torch.full((_NUM_FAST_PAIRS,), _OFFSET_GAIN, dtype=torch.float64)
    # At half weight cos(d) does not lift distance 6 over 4, so the score falls with every step up to 8, and a head that
    # looks before the start of the text reads position 0.
    gain[0] /= 2
    # RoPE turns pair (i, i + 64) by its position times inv_freq[i]; the query starts h + 1 positions behind.
    for head in range(NUM_HEADS):
        angles = -(head + 1) * inv_freq
        q[head, :_NUM_FAST_PAIRS, _CONSTANT] = (gain.sqrt() * angles.cos()).float()
        q[head, _NUM_PAIRS : _NUM_PAIRS + _NUM_FAST_PAIRS, _CONSTANT] = (gain.sqrt() * angles.sin()).float()
        group = NUM_BITS * (head + 1)
        o[group : group + NUM_BITS, head, :NUM_BITS] = torch.eye(NUM_BITS)
    k[:, :_NUM_FAST_PAIRS, _CONSTANT] = gain.sqrt().float()


def _fill_match_attention_(q: torch.Tensor, k: torch.Tensor, o: torch.Tensor) -> None:
    """Layer 2: every head finds the position after the best match, and head h copies bit h of the byte there."""
    # Slowest first: the nearest byte weighs most, so its dimensions must turn least.
    slow_dims = [dim for pair in range(_NUM_PAIRS - 1, _FIRST_SLOW_PAIR - 1, -1) for dim in (pair, pair + _NUM_PAIRS)]
    root = math.sqrt(_MATCH_GAIN)
    for back, weight in enumerate(MATCH_WEIGHTS):
        for bit in range(NUM_BITS):
            dim = slow_dims[NUM_BITS * back + bit]
            q[:, dim, NUM_BITS * back + bit] = root * weight
            k[:, dim, NUM_BITS * (back + 1) + bit] = root
    for head in range(NUM_HEADS):
        o[_ANSWER + head, head, head] = 1.0


def _byte_tokenizer() -> tokenizers.Tokenizer:
    """Byte-level BPE without merges: the id of a token is its byte."""
    # The byte-level alphabet stands for printable bytes by their own characters, and for the rest by those from 256 on.
    printable = {*range(33, 127), *range(161, 173), *range(174, 256)}
    others = [byte for byte in range(VOCAB_SIZE) if byte not in printable]
    vocab = {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    return tokenizer


_WORDS = (
    "above amber answer apple autumn barrel basket better bottle branch bread bridge butter candle castle cellar chair "
    "cloud copper corner cotton desert distant dozen engine evening father field forest garden glass golden gravel "
    "harbor honest house island journey kettle lantern letter little market meadow moment morning mountain narrow "
    "orchard paper pebble pocket quiet railway river saddle season silver station street summer table timber travel "
    "valley village wagon water weather window winter worker yellow young"
)


def _filler(num_bytes: int, rng: random.Random) -> str:
    """Lines of random sentences, exactly ``num_bytes`` of ASCII; the last ends in a newline, cut where it must."""
    words = _WORDS.split()
    pieces: list[str] = []
    size = 0
    while size < num_bytes:
        sentence = " ".join(rng.choices(words, k=rng.randint(4, 12))).capitalize()
        pieces.append(sentence + (".\n" if rng.random() < 0.5 else ". "))
        size += len(pieces[-1])
    return "".join(pieces)[: num_bytes - 1] + "\n" if num_bytes else ""
