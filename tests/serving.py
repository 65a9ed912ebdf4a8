"""Small models that serve text, engines around them, and what they must answer.

The needle model answers known text. The byte model is a random Llama over the 256 bytes with the needle's tokenizer:
what it says is noise, but transformers says the same noise.
"""

import itertools
import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from medha.engine.engine import Engine
from medha.engine.request import ModelLimits
from medha.models.decoder import Decoder
from medha.models.needle import make_haystack, write_needle
from medha.outputs import RequestOutput
from medha.params import SamplingParams
from medha.text import Tokenizer, load_tokenizer
from tests.checkpoints import make_checkpoint, reference_greedy
from tests.engines import drained, load_decoder, make_engine

GREEDY = SamplingParams(temperature=0.0, max_tokens=16)
ANSWER = " 7429-amber."
"""What the needle model says after :func:`question`; a newline, its end of sequence, follows."""


def question(num_tokens: int = 200, *, depth: float = 0.5, seed: int = 0) -> str:
    """A text with the needle in it that ends in the question."""
    return make_haystack(num_tokens, depth=depth, seed=seed).prompt


@dataclass(frozen=True)
class Model:
    """A loaded model to build engines on, and transformers' version of it where there is one."""

    folder: Path
    decoder: Decoder
    tokenizer: Tokenizer
    reference: Any

    def engine(
        self,
        *,
        with_tokenizer: bool = True,
        eos: tuple[int, ...] = (),
        seed: int = 0,
        max_model_len: int = 8192,
        clock: Callable[[], float] | None = None,
        **options: int,
    ) -> Engine:
        """A fresh engine; ``options`` as :func:`tests.engines.make_engine`."""
        made = make_engine(self.decoder, **options)
        limits = ModelLimits(self.decoder.config.vocab_size, max_model_len, eos, seed=seed)
        tokenizer = self.tokenizer if with_tokenizer else None
        if clock is None:
            return Engine(made.runner, made.scheduler, limits, tokenizer=tokenizer)
        return Engine(made.runner, made.scheduler, limits, tokenizer=tokenizer, clock=clock)


def make_byte_model(folder: Path) -> Model:
    """A random Llama whose tokens are bytes, with a tokenizer and a chat template, written and loaded."""
    reference = make_checkpoint(folder, "llama", seed=1, vocab_size=256)
    shutil.copy(write_needle(folder / "needle") / "tokenizer.json", folder)
    shutil.rmtree(folder / "needle")
    template = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}assistant:"
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": template}))
    (folder / "generation_config.json").unlink()
    return load_model(folder, reference)


def make_needle_model(folder: Path) -> Model:
    """The needle model, written and loaded."""
    return load_model(write_needle(folder))


def load_model(folder: Path, reference: Any = None) -> Model:
    """What is in a folder."""
    tokenizer = load_tokenizer(folder)
    assert tokenizer is not None
    return Model(folder, load_decoder(folder), tokenizer, reference)


def finish(engine: Engine) -> dict[str, RequestOutput]:
    """Step to the end; the finished outputs by request id. Nothing may be left behind."""
    ended = [output for output in drained(engine) if output.finished]
    finished = {output.request_id: output for output in ended}
    assert len(finished) == len(ended)
    assert_empty(engine)
    return finished


def assert_empty(engine: Engine) -> None:
    """No request holds a block, a slot or a place in the scheduler."""
    scheduler = engine.scheduler
    assert (scheduler.memory.num_used, scheduler.num_running, scheduler.num_waiting) == (0, 0, 0)
    assert scheduler.in_flight == ()
    assert not engine._by_slot and not engine._live
    assert not engine.runner._prompts and not engine.runner._sampling


def serve_one(engine: Engine, prompt: Any, params: SamplingParams = GREEDY) -> RequestOutput:
    """One request from start to end."""
    engine.add_request("one", prompt, params)
    return finish(engine)["one"]


def random_ids(length: int, *, seed: int) -> list[int]:
    """Seeded random bytes."""
    generator = torch.Generator().manual_seed(1_000_003 * seed + length)
    return torch.randint(0, 256, (length,), generator=generator).tolist()


def greedy_of(reference: Any, prompts: list[list[int]], num_tokens: int) -> list[list[int]]:
    """Greedy tokens of transformers, clear of rounding."""
    found = [reference_greedy(reference, prompt, num_tokens) for prompt in prompts]
    assert min(gap for _, _, gap in found) > 1e-3
    return [tokens for tokens, _, _ in found]


def fail_in_run(engine: Engine, patch: pytest.MonkeyPatch, *, at: int, error: BaseException) -> None:
    """Let the ``at``-th batch raise."""
    run, calls = engine.runner.run, itertools.count()

    def failing(step: Any) -> Any:
        if next(calls) == at:
            raise error
        return run(step)

    patch.setattr(engine.runner, "run", failing)
