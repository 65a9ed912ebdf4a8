"""What a user asks for: sampling parameters and SLO.

Plain data, standard library only. Names and defaults follow vLLM where it has them. What medha does not implement is
refused with :class:`~medha.errors.UnsupportedFeatureError`, never ignored.
"""

from __future__ import annotations

import dataclasses
import difflib
import math
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import wraps
from typing import Any, Literal, TypeVar

from medha.config.fields import SAMPLING, option
from medha.errors import UnsupportedFeatureError, ValidationError

T = TypeVar("T")
OutputKind = Literal["cumulative", "delta", "final_only"]

PRIORITIES = ("realtime", "high", "normal", "low")
"""Priority classes, most urgent first; they count where the policy is ``priority``."""

MAX_LOGPROBS = 20
MAX_STOP_STRINGS = 16
MAX_STOP_CHARS = 256

# Fields of other engines' requests that change the output and that medha does not have: refused by name.
UNSUPPORTED_FIELDS = (
    "allowed_token_ids",
    "audio",
    "bad_words",
    "beam_search",
    "best_of",
    "chat_template",
    "echo",
    "extra_args",
    "flat_logprobs",
    "functions",
    "guided_decoding",
    "guided_json",
    "guided_regex",
    "length_penalty",
    "logit_bias",
    "logits_processors",
    "logprob_token_ids",
    "prompt_logprob_start",
    "prompt_logprob_token_ids",
    "prompt_logprobs",
    "repetition_detection",
    "response_format",
    "skip_reading_prefix_cache",
    "spaces_between_special_tokens",
    "stream_interval",
    "structured_outputs",
    "suffix",
    "thinking_token_budget",
    "tool_choice",
    "truncate_prompt_tokens",
    "use_beam_search",
)


MOST_COMPLETIONS = 16384
"""Most completions of a request."""

CHAT_OPTIONS = ("add_generation_prompt", "tools", "chat_template_kwargs")
"""What a prompt of ``messages`` may have beside them: arguments of the chat template."""

# Names by which users of other interfaces know a field.
FIELD_ALIASES = {"max_completion_tokens": "max_tokens", "max_new_tokens": "max_tokens"}


def _names_checked(cls: type[T]) -> type[T]:
    """A dataclass that says what is wrong with a keyword that it does not have."""
    init, names = cls.__init__, [field.name for field in dataclasses.fields(cls)]  # type: ignore[arg-type]

    @wraps(init)
    def checked(self: T, *args: Any, **fields: Any) -> None:
        for name in fields.keys() - set(names):
            refuse_unsupported(name, fields[name])
            if name not in UNSUPPORTED_FIELDS:
                raise _unknown(name, fields[name], names)
            del fields[name]  # asks for nothing
        init(self, *args, **fields)

    cls.__init__ = checked  # type: ignore[assignment]
    return cls


@_names_checked
@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How the tokens of one request are chosen and when it ends. Checked when built.

    The fields whose default is None take their value from the model's ``generation_config.json`` and, where that is
    silent, the value in brackets; :meth:`resolve` does it at admission.

    Args:
        n: number of completions, each drawn with a seed of its own: ``seed``, ``seed + 1``, … They are as many
            requests under one id; each reads the prompt by itself.
        temperature: [1.0] finite, 0 to 2; below 1e-5 is greedy.
        top_p: [1.0] in (0, 1].
        top_k: [0] 0 or -1 is off.
        min_p: [0.0] in [0, 1].
        presence_penalty, frequency_penalty: -2 to 2, over the generated tokens.
        repetition_penalty: [1.0] 1e-6 to 1e6, over prompt and generated tokens.
        seed: makes the draw of this request repeatable; it depends on (seed, token index) alone, never on the
            company in the batch or the chunking.
        stop: string or strings that end the text; not part of it unless ``include_stop_str_in_output``.
        stop_token_ids: further ids that end the sequence.
        ignore_eos: go on after the model's end-of-sequence ids.
        min_tokens: before that many tokens are out, no end-of-sequence or stop id can be drawn, and no stop string
            that begins there is looked for.
        max_tokens: at most so many tokens; None is as many as the context and the KV pool have room for.
        logprobs: None, or 0 to 20: log-probabilities of the drawn token and of so many of the likeliest.
        detokenize: whether to produce text.
        skip_special_tokens: leave special tokens out of the text.
        output_kind: what :meth:`medha.engine.Engine.step` returns before the end: ``cumulative``, ``delta`` or
            ``final_only`` (nothing).

    Raises:
        ValidationError: a value is outside its range, or a field is not known (``param`` names it).
        UnsupportedFeatureError: a field that other engines have and medha has not.
    """

    n: int = 1
    temperature: float | None = option(SAMPLING, None, "0 is greedy.")
    top_p: float | None = option(SAMPLING, None, "Share of probability to keep.")
    top_k: int | None = option(SAMPLING, None, "Likeliest tokens to keep.")
    min_p: float | None = option(SAMPLING, None, "Least probability, as a share of the largest.")
    presence_penalty: float = option(SAMPLING, 0.0, "Above 0 discourages tokens that were generated.")
    frequency_penalty: float = option(SAMPLING, 0.0, "The same, by how often they were.")
    repetition_penalty: float | None = option(SAMPLING, None, "Above 1 discourages tokens of prompt and answer.")
    seed: int | None = None
    stop: str | Sequence[str] | None = option(SAMPLING, None, "End at this text; may be repeated.", kind=list[str])
    stop_token_ids: Sequence[int] | None = None
    ignore_eos: bool = option(SAMPLING, False, "Go on after end-of-sequence.", flags=("--ignore-eos",))
    min_tokens: int = option(SAMPLING, 0, "Least tokens to generate.")
    max_tokens: int | None = option(SAMPLING, 16, "Most tokens to generate.")
    logprobs: int | None = option(SAMPLING, None, "Log-probabilities per token in output lines.")
    detokenize: bool = True
    skip_special_tokens: bool = True
    include_stop_str_in_output: bool = False
    output_kind: OutputKind = "cumulative"

    def __post_init__(self) -> None:
        _check_int("n", self.n, 1, MOST_COMPLETIONS)
        _check_float("temperature", self.temperature, 0.0, 2.0, optional=True)
        _check_float("top_p", self.top_p, 0.0, 1.0, optional=True, open_low=True)
        _check_int("top_k", self.top_k, -1, 2**31 - 1, optional=True)
        _check_float("min_p", self.min_p, 0.0, 1.0, optional=True)
        _check_float("presence_penalty", self.presence_penalty, -2.0, 2.0)
        _check_float("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        _check_float("repetition_penalty", self.repetition_penalty, 1e-6, 1e6, optional=True)
        _check_int("seed", self.seed, -(2**63), 2**63 - 1, optional=True)
        if self.n > 1 and self.is_greedy:
            raise _bad("n", self.n, "1 with temperature=0: the completions would all be the same")
        _check_int("max_tokens", self.max_tokens, 1, 2**31 - 1, optional=True)
        _check_int("min_tokens", self.min_tokens, 0, 2**31 - 1)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise ValidationError(
                f"min_tokens={self.min_tokens} exceeds max_tokens={self.max_tokens}",
                param="min_tokens",
                value=self.min_tokens,
            )
        if self.logprobs == -1:
            raise _bad("logprobs", -1, f"0 to {MAX_LOGPROBS}; the whole vocabulary at each token is not implemented")
        _check_int("logprobs", self.logprobs, 0, MAX_LOGPROBS, optional=True)
        for name in ("ignore_eos", "detokenize", "skip_special_tokens", "include_stop_str_in_output"):
            if not isinstance(getattr(self, name), bool):
                raise _bad(name, getattr(self, name), "true or false")
        if self.output_kind not in ("cumulative", "delta", "final_only"):
            raise _bad("output_kind", self.output_kind, "'cumulative', 'delta' or 'final_only'")
        object.__setattr__(self, "stop", _stop_strings(self.stop))
        object.__setattr__(self, "stop_token_ids", _stop_ids(self.stop_token_ids))
        if self.stop and not self.detokenize:
            raise _bad("stop", self.stop, "no stop strings when detokenize is false")

    @property
    def stop_strings(self) -> tuple[str, ...]:
        """The stop strings as a tuple, empty when there are none."""
        return tuple(self.stop or ())

    @property
    def is_greedy(self) -> bool:
        """Whether the likeliest token is always taken (temperature below 1e-5)."""
        return self.temperature is not None and self.temperature < 1e-5

    def resolve(self, defaults: Mapping[str, float | int | None]) -> SamplingParams:
        """A copy in which every field has a value: given here > ``defaults`` > class default.

        Args:
            defaults: what ``generation_config.json`` says, by field name; None and missing mean silent.
        """
        values: dict[str, Any] = {}
        for name, last in _RESOLVED_DEFAULTS.items():
            if getattr(self, name) is None:
                given = defaults.get(name)
                values[name] = last if given is None else given
        return dataclasses.replace(self, **values)

    def capped(self, max_tokens: int) -> SamplingParams:
        """A copy that asks for at most ``max_tokens`` tokens."""
        if self.max_tokens is not None:
            max_tokens = min(self.max_tokens, max_tokens)
        return dataclasses.replace(self, max_tokens=max_tokens, min_tokens=min(self.min_tokens, max_tokens))

    def reported(self, output_kind: OutputKind) -> SamplingParams:
        """A copy with another ``output_kind``."""
        return dataclasses.replace(self, output_kind=output_kind)

    @classmethod
    def from_dict(cls, fields: Mapping[str, Any]) -> SamplingParams:
        """Build from a JSON object; unknown names are an error.

        Raises:
            ValidationError: a value or a name is wrong.
            UnsupportedFeatureError: a known field that medha does not implement has a value.
        """
        return cls(**{FIELD_ALIASES.get(name, name): value for name, value in fields.items()})


_RESOLVED_DEFAULTS: dict[str, float | int] = {
    "temperature": 1.0,
    "top_p": 1.0,
    "top_k": 0,
    "min_p": 0.0,
    "repetition_penalty": 1.0,
}


def refuse_unsupported(name: str, value: Any) -> None:
    """Raise UnsupportedFeatureError when ``name`` is a known field that medha lacks and ``value`` asks for it."""
    asks = value is not None and value is not False and value not in ([], {}, "")
    if name in UNSUPPORTED_FIELDS and asks:
        raise UnsupportedFeatureError(f"{name} is not implemented; leave it out", param=name, value=value)


@dataclass(frozen=True, slots=True)
class SLO:
    """Service-level objective of one request, in seconds; None is no objective of that kind.

    Args:
        ttft_s: arrival to first token.
        tpot_s: between tokens after the first, on average.

    Raises:
        ValidationError: not a finite number above 0.
    """

    ttft_s: float | None = None
    tpot_s: float | None = None

    def __post_init__(self) -> None:
        for name in ("ttft_s", "tpot_s"):
            _check_float(f"slo.{name}", getattr(self, name), 0.0, math.inf, optional=True, open_low=True)


def _unknown(name: str, value: Any, known: Iterable[str]) -> ValidationError:
    """The error about a field that nobody knows."""
    near = [FIELD_ALIASES[name]] if name in FIELD_ALIASES else difflib.get_close_matches(name, known, n=1)
    hint = f"did you mean {near[0]}?" if near else f"accepted: one of {', '.join(sorted(known))}"
    return ValidationError(f"{name}={_shown(value)}; {hint}", param=name, value=value)


def check_seconds(name: str, value: Any) -> float:
    """A time.

    Raises:
        ValidationError: not a finite number.
    """
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not abs(value) <= sys.float_info.max:
        raise _bad(name, value, "seconds, a finite number")
    return float(value)


def _bad(name: str, value: Any, accepted: str) -> ValidationError:
    return ValidationError(f"{name}={_shown(value)}; accepted: {accepted}", param=name, value=value)


def _shown(value: Any) -> str:
    try:
        shown = repr(value)
    except ValueError:  # an integer of thousands of digits has no repr
        return f"<{type(value).__name__}>"
    return shown if len(shown) <= 80 else shown[:77] + "..."


def _check_int(name: str, value: Any, low: int, high: int, *, optional: bool = False) -> None:
    if optional and value is None:
        return
    if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
        raise _bad(name, value, f"an integer from {low} to {high}")


def _check_float(
    name: str, value: Any, low: float, high: float, *, optional: bool = False, open_low: bool = False
) -> None:
    if optional and value is None:
        return
    bounds = f"{'above' if open_low else 'from'} {low:g}" + (f" to {high:g}" if math.isfinite(high) else "")
    if not isinstance(value, (int, float)) or isinstance(value, bool):
        raise _bad(name, value, f"a finite number {bounds}")
    inside = (low < value if open_low else low <= value) and value <= min(high, sys.float_info.max)
    if not inside:
        raise _bad(name, value, f"a finite number {bounds}")


def _stop_strings(stop: Any) -> tuple[str, ...]:
    if stop is None:
        return ()
    stops = (stop,) if isinstance(stop, str) else stop
    if not isinstance(stops, (list, tuple)) or len(stops) > MAX_STOP_STRINGS:
        raise _bad("stop", stop, f"a string or at most {MAX_STOP_STRINGS} strings")
    for text in stops:
        if not isinstance(text, str) or not 0 < len(text) <= MAX_STOP_CHARS:
            raise _bad("stop", text, f"strings of 1 to {MAX_STOP_CHARS} characters")
    return tuple(stops)


def _stop_ids(ids: Any) -> tuple[int, ...]:
    if ids is None:
        return ()
    if not isinstance(ids, (list, tuple)):
        raise _bad("stop_token_ids", ids, "a list of token ids")
    for token_id in ids:
        _check_int("stop_token_ids", token_id, 0, 2**31 - 1)
    return tuple(ids)


def check_priority(value: Any) -> str:
    """A priority class.

    Raises:
        ValidationError: not one of :data:`PRIORITIES`.
    """
    if value not in PRIORITIES:
        raise _bad("priority", value, f"one of {', '.join(PRIORITIES)}")
    return str(value)
