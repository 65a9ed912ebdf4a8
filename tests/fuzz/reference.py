"""What a case must answer: transformers' forward over each prompt with its output, and sampling written out plainly.

As the output is given, one forward says of every token whether it was the one to draw (teacher forcing). So a near tie
does not end the comparison: where logits within the tolerance may give more than one token any is accepted, and what
follows is held to the reference behind that very one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import tokenizers
import torch
import transformers

from medha.params import SamplingParams
from tests.checkpoints import make_checkpoint, random_prompt
from tests.fuzz.cases import Ask, Case, Model
from tests.worker.test_sampling import filtered

Logits = npt.NDArray[np.float64]

# How far logits may be off the reference's, as a part of the largest of their row; all is computed in float32.
_TOLERANCE = 1e-4
_TRIES = 60


class Failure(AssertionError):  # noqa: N818 - what a test finds, no error of a caller's
    """A case does not do what it must; ``kind`` tells failures of different causes apart."""

    def __init__(self, kind: str, text: str) -> None:
        super().__init__(f"{kind}: {text}")
        self.kind = kind


@dataclass(frozen=True)
class Answer:
    """What the engine said of a request.

    Attributes:
        refused: the name of the error with which it was not taken.
        logprobs: of each token, by id; None where they were not asked for.
    """

    refused: str | None = None
    tokens: tuple[int, ...] = ()
    text: str = ""
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    logprobs: tuple[dict[int, float], ...] | None = None


def prompt_of(ask: Ask, vocab: int) -> list[int]:
    """The tokens of a request."""
    shared = random_prompt(2000, seed=99, vocab=vocab)[: ask.num_shared]
    return shared + random_prompt(ask.length - len(shared), seed=ask.seed, vocab=vocab)


def write_checkpoint(model: Model, folder: Path) -> transformers.PreTrainedModel:
    """Write the checkpoint and its tokenizer; returns transformers' model of it in float32."""
    options = {"tied": model.tied, "seed": model.seed, "eos_token_id": list(model.eos) or None} | model.shape
    dtype = getattr(torch, model.stored)
    made = make_checkpoint(folder, model.family, dtype=dtype, shard_size=model.shard_size, **options)
    (folder / "generation_config.json").unlink(missing_ok=True)
    pieces = model.pieces
    vocabulary = {piece: token for token, piece in enumerate(pieces)}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token=pieces[0]))
    tokenizer.decoder = tokenizers.decoders.Fuse()
    tokenizer.save(str(folder / "tokenizer.json"))
    if model.stored == "float32":
        return made
    return type(made).from_pretrained(folder, dtype=torch.float32).eval()  # the one made has rounded its RoPE too


def check(case: Case, answers: Sequence[Answer], fits: Sequence[int], reference: Any) -> None:
    """Hold the answer to each request of a case to transformers' model; Failure if one is wrong.

    ``fits`` are KV tokens of the longest request where prompts are read, and on a decode instance if there is one.
    """
    for number, (ask, answer) in enumerate(zip(case.asks, answers, strict=True)):
        try:
            _check(case, ask, answer, fits, reference)
        except Failure as failure:
            text = f"request {number}, {ask}: {failure}\n{replace(answer, logprobs=None)}"
            raise Failure(failure.kind, text) from None


def _check(case: Case, ask: Ask, answer: Answer, fits: Sequence[int], reference: Any) -> None:
    room = case.options.get("max_model_len", 8192) - ask.length
    max_tokens = min(ask.max_tokens, room)
    whole = ask.length + max_tokens - 1
    needed = [whole] if len(fits) == 1 else [ask.length, whole if max_tokens > 1 else 0]
    is_large = any(claim > most for claim, most in zip(needed, fits, strict=True))
    must = "ContextLengthError" if room < 1 else "KVCapacityError" if is_large else None
    may = (must, "DeadlineError") if case.options.get("admission") == "refuse" and ask.slo is not None else (must,)
    if answer.refused not in may:
        raise Failure(f"refused by {answer.refused}", f"must be {must}: {needed} KV tokens, {fits} fit")
    if answer.refused is not None:
        return
    rules = _Rules(case, ask, max_tokens)
    if any(not 0 <= token < case.model.vocab for token in answer.tokens):
        raise Failure("tokens", f"beyond the vocabulary of {case.model.vocab}")
    if answer.tokens:
        with torch.inference_mode():
            ids = torch.tensor([[*rules.prompt, *answer.tokens[:-1]]])
            logits = reference(ids, logits_to_keep=len(answer.tokens)).logits[0].double().numpy()
        _check_tokens(rules, answer, logits)
    end = rules.end(answer.tokens)
    if answer.finish_reason == "abort" and (ask.abort is not None or case.abandon is not None):
        if end is not None:
            raise Failure("end", f"aborted after its end {end}")
    elif end != (len(answer.tokens), answer.finish_reason, answer.stop_reason, answer.text):
        raise Failure("end", f"must be (tokens, finish reason, stop reason, text) {end}")


def _check_tokens(rules: _Rules, answer: Answer, logits: Logits) -> None:
    for index, token in enumerate(answer.tokens):
        drawn, off = answer.tokens[:index], _TOLERANCE * np.abs(logits[index]).max()
        must = rules.choose(logits[index], drawn)
        if token != must and not rules.is_near_tie(must, logits[index], drawn, off):
            raise Failure("tokens", f"token {index} is {token}, must be {must}")
        if answer.logprobs is not None:
            must_be = torch.from_numpy(logits[index]).log_softmax(dim=0)
            errors = [abs(value - float(must_be[i])) for i, value in answer.logprobs[index].items()]
            if not max(errors) <= 2 * off + 1e-4:
                raise Failure("logprobs", f"those of token {index} are off by {max(errors)}")


class _Rules:
    """How the tokens of a request are drawn, and where they end."""

    def __init__(self, case: Case, ask: Ask, max_tokens: int) -> None:
        self.params = SamplingParams(**ask.params).resolve({})
        self.prompt = prompt_of(ask, case.model.vocab)
        self.max_tokens = max_tokens
        self.min_tokens = min(self.params.min_tokens, max_tokens)
        self.eos = () if self.params.ignore_eos else case.model.eos
        self.end_ids = sorted({*self.eos, *(self.params.stop_token_ids or ())})
        self.pieces = case.model.pieces

    def choose(self, logits: Logits, drawn: Sequence[int]) -> int:
        """The token behind the prompt and those drawn so far."""
        params, x = self.params, logits.copy()
        seen = sorted({*self.prompt, *drawn})
        x[seen] = np.where(x[seen] > 0, x[seen] / params.repetition_penalty, x[seen] * params.repetition_penalty)
        counts = np.bincount(np.array(drawn, np.int64), minlength=len(x))
        x -= params.frequency_penalty * counts + params.presence_penalty * (counts > 0)
        if len(drawn) < self.min_tokens:
            x[self.end_ids] = -np.inf
        if params.temperature == 0.0:
            return int(x.argmax())
        edges = filtered(torch.from_numpy(x), params).cumsum()
        number = np.random.Generator(np.random.Philox(key=params.seed % 2**64, counter=len(drawn))).random()
        return int(np.searchsorted(edges, number * edges[-1], side="right"))

    def is_near_tie(self, token: int, logits: Logits, drawn: Sequence[int], off: float) -> bool:
        """Whether logits that are off by no more than that may give another than this token."""
        noise = np.random.default_rng(token).uniform(-off, off, (_TRIES, len(logits)))
        return any(self.choose(logits + row, drawn) != token for row in noise)

    def end(self, tokens: Sequence[int]) -> tuple[int, str, str | int | None, str] | None:
        """How many of the tokens there are at the end, its reasons and the text; None if it is not reached."""
        keeps_stop = self.params.include_stop_str_in_output
        text, start = "", None  # of what stop strings may begin in
        for number, token in enumerate(tokens, start=1):
            if start is None and number >= self.min_tokens:
                start = len(text)
            is_end = token in self.end_ids
            if token < len(self.pieces) and (not is_end or keeps_stop):
                text += self.pieces[token]
            is_last = is_end or number >= self.max_tokens
            at, stop = self._first_stop(text, start, waits=not is_last)
            if stop is not None:
                text = text[: at + len(stop) * keeps_stop]
            if is_last or stop is not None:
                reason = None if token in self.eos or not is_end else token
                return number, "stop" if is_end or stop is not None else "length", stop or reason, text
        return None

    def _first_stop(self, text: str, start: int | None, *, waits: bool) -> tuple[int, str | None]:
        """Where the stop string begins that begins first, and it; of two, the one that was named first. None if there
        is none, or one before may yet be completed and is waited for."""
        for at in range(len(text) if start is None else start, len(text)):
            for stop in self.params.stop or ():
                if text.startswith(stop, at):
                    return at, stop
                if waits and stop.startswith(text[at:]):
                    return at, None
        return len(text), None
