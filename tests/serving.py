"""Small models that serve text, engines around them, and what they must answer.

The needle model answers known text. The byte model is a random Llama over the 256 bytes with the needle's tokenizer:
what it says is noise, but transformers says the same noise.
"""

import json
import shutil
from dataclasses import dataclass
from functools import partial
from itertools import chain, repeat
from pathlib import Path
from typing import Any
from unittest.mock import DEFAULT, Mock

import pytest

from medha.engine.engine import Engine
from medha.models.decoder import Decoder
from medha.models.needle import make_haystack
from medha.outputs import RequestOutput
from medha.params import SamplingParams
from medha.text import Tokenizer, load_tokenizer
from tests.checkpoints import make_checkpoint, random_prompt, reference_greedy
from tests.engines import drained, left_behind, load_decoder, make_engine

Tokens = list[list[int]]
GREEDY = SamplingParams(temperature=0.0, max_tokens=16)
random_ids = partial(random_prompt, vocab=256)
NUM_TOKENS = 6
MIN_GAP = 1e-3  # between the first two logits, so that no rounding decides a token
ANSWER = " 7429-amber."
"""What the needle model says after :func:`question`; a newline, its end of sequence, follows."""


def question(num_tokens: int = 200) -> str:
    """A text with the needle in it that ends in the question."""
    return make_haystack(num_tokens).prompt


@dataclass(frozen=True)
class Model:
    """A loaded model to build engines on, and transformers' version of it where there is one."""

    folder: Path
    decoder: Decoder
    tokenizer: Tokenizer
    reference: Any

    def engine(self, *, with_tokenizer: bool = True, **options: Any) -> Engine:
        """A fresh engine; ``options`` as :func:`tests.engines.make_engine`."""
        return make_engine(self.decoder, tokenizer=self.tokenizer if with_tokenizer else None, **options)


def make_byte_model(folder: Path, tokenizer: Path) -> Model:
    """A random Llama whose tokens are bytes, with a tokenizer and a chat template, written and loaded."""
    reference = make_checkpoint(folder, "llama", seed=1, vocab_size=256)
    shutil.copy(tokenizer, folder)
    template = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}assistant:"
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": template}))
    (folder / "generation_config.json").unlink()
    return load_model(folder, reference)


def load_model(folder: Path, reference: Any = None) -> Model:
    """What is in a folder."""
    return Model(folder, load_decoder(folder), load_tokenizer(folder), reference)


def finish(engine: Engine) -> dict[str, RequestOutput]:
    """Step to the end; the finished outputs by request id. Nothing may be left behind."""
    ended = [output for output in drained(engine) if output.finished]
    finished = {output.request_id: output for output in ended}
    assert len(finished) == len(ended)
    assert_empty(engine)
    return finished


def assert_empty(engine: Engine) -> None:
    """No request is unfinished or holds anything."""
    assert not engine.has_unfinished and left_behind(engine) == {}


def serve_one(engine: Engine, prompt: Any, params: SamplingParams = GREEDY) -> RequestOutput:
    """One request from start to end."""
    engine.add_request("one", prompt, params)
    return finish(engine)["one"]


def greedy_of(reference: Any, prompts: Tokens, num_tokens: int) -> Tokens:
    """Greedy tokens of transformers, clear of rounding."""
    found = [reference_greedy(reference, prompt, num_tokens) for prompt in prompts]
    assert min(gap for _, gap in found) > MIN_GAP
    return [tokens for tokens, _ in found]


@dataclass(frozen=True)
class Case:
    """A model, prompts of 1 to 700 tokens and NUM_TOKENS that transformers says after each."""

    decoder: Decoder
    prompts: Tokens
    expected: Tokens


def make_case(folder: Path) -> Case:
    """A case with stretched RoPE, written and loaded."""
    reference = make_checkpoint(folder, "llama-llama3", seed=1)
    prompts = [random_prompt(length, seed=3) for length in (1, 5, 64, 130, 300, 700)]
    return Case(load_decoder(folder), prompts, greedy_of(reference, prompts, NUM_TOKENS))


def fail_in_run(engine: Engine, patch: pytest.MonkeyPatch, *, at: int, error: BaseException) -> None:
    """Let the ``at``-th batch raise."""
    effects = chain(repeat(DEFAULT, at), [error], repeat(DEFAULT))
    patch.setattr(engine.runner, "run", Mock(wraps=engine.runner.run, side_effect=effects))
