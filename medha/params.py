"""What a user asks for: sampling parameters and SLO.

Plain data, standard library only. Names and defaults follow vLLM where it has them. What medha does not implement is
refused with :class:`~medha.errors.UnsupportedFeatureError`, never ignored.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial, wraps
from numbers import Number
from typing import Any, Literal, TypeVar, get_args

from medha.config.fields import BOOLEAN, POSITIVE, SAMPLING, Check, check_options, choice, finite, integer, option
from medha.errors import UnsupportedFeatureError, ValidationError, hint, not_accepted, short_repr

T = TypeVar("T")
OutputKind = Literal["cumulative", "delta", "final_only"]

PRIORITIES = ("realtime", "high", "normal", "low")
"""Priority classes, most urgent first; they count where the policy is ``priority``."""

LOGPROBS = integer(0, 20)
"""What a request may ask for."""
MAX_STOP_STRINGS = 16
MAX_STOP_CHARS = 256

# Fields of other engines' requests that change the output and that medha does not have: refused by name.
_UNSUPPORTED = """
    audio bad_words beam_search best_of chat_template continue_final_message documents echo extra_args flat_logprobs
    functions guided_choice guided_decoding guided_grammar guided_json guided_regex length_penalty logits_processors
    logprob_token_ids modalities prompt_embeds prompt_logprob_start prompt_logprob_token_ids prompt_logprobs
    reasoning_effort repetition_detection response_format return_token_ids return_token_strs return_tokens_as_token_ids
    skip_reading_prefix_cache spaces_between_special_tokens stream_interval structured_outputs suffix
    thinking_token_budget tool_choice truncate_prompt_tokens use_beam_search watermarking
"""
UNSUPPORTED_FIELDS = tuple(_UNSUPPORTED.split())
# Values by which clients say, in full, that they ask for none of it.
_NEUTRAL: Mapping[str, Sequence[Any]] = {
    "best_of": (1,),
    "length_penalty": (1,),
    "modalities": (["text"],),
    "reasoning_effort": ("none",),
    "response_format": ({"type": "text"},),
    "spaces_between_special_tokens": (True,),
    "tool_choice": ("none", "auto"),
}

MOST_COMPLETIONS = 16384  # of a request

_listed = partial(option, SAMPLING)  # among the options of a command line


def _unlisted(default: Any, check: Check, name: str = "") -> Any:
    return option("", default, "", check, name=name)


PROMPT_FORMS = {
    "prompt": "text",
    "prompt_token_ids": "a list of token ids, or text as prompt",
    "messages": "a list of messages",
}
"""The forms of a prompt, and what each takes."""

CHAT_OPTIONS = ("add_generation_prompt", "tools", "chat_template_kwargs")
"""What a prompt of ``messages`` may have beside them: arguments of the chat template."""

PROMPT_OPTIONS = ("cache_salt", "add_special_tokens")
"""What any prompt may have beside it; special tokens are added to text, those of messages are their template's."""

# Names by which users of other interfaces know a field.
FIELD_ALIASES = {"max_completion_tokens": "max_tokens", "max_new_tokens": "max_tokens"}


def names_checked(cls: type[T]) -> type[T]:
    """A dataclass that says what is wrong with a keyword that it does not have."""
    init, names = cls.__init__, [field.name for field in dataclasses.fields(cls)]  # type: ignore[arg-type]

    @wraps(init)
    def checked(self: T, *args: Any, **fields: Any) -> None:
        for name in fields.keys() - set(names):
            value = fields.pop(name)
            asks = value is not None and value is not False and value not in ([], {}, "", *_NEUTRAL.get(name, ()))
            if name in UNSUPPORTED_FIELDS and asks:
                raise UnsupportedFeatureError(f"{name} is not implemented; leave it out", param=name, value=value)
            if name not in UNSUPPORTED_FIELDS:
                meant = f"; did you mean {FIELD_ALIASES[name]}?" if name in FIELD_ALIASES else hint(name, names)
                more = meant or f"; accepted: one of {', '.join(sorted(names))}"
                raise ValidationError(f"{name}={short_repr(value)}{more}", param=name, value=value)
        init(self, *args, **fields)

    cls.__init__ = checked  # type: ignore[assignment]
    return cls


_IS_ID, _IS_BIAS = integer(0, 2**31 - 1), finite(-100, 100)


def _is_stop(value: Any) -> bool:
    stops = [value] if isinstance(value, str) else value
    is_list = isinstance(stops, (list, tuple)) and len(stops) <= MAX_STOP_STRINGS
    return is_list and all(isinstance(text, str) and 0 < len(text) <= MAX_STOP_CHARS for text in stops)


def _are_ids(value: Any) -> bool:
    return isinstance(value, (list, tuple)) and all(map(_IS_ID.holds, value))


def _bias_id(key: Any) -> Any:
    """A token id; JSON has it as text."""
    return int(key) if isinstance(key, str) and key.isdecimal() and len(key) < 12 else key


def _are_biases(value: Any) -> bool:
    are_ids = isinstance(value, Mapping) and all(_IS_ID.holds(_bias_id(key)) for key in value)
    return are_ids and all(map(_IS_BIAS.holds, value.values()))


_STOPS = Check(f"a string or at most {MAX_STOP_STRINGS}, of 1 to {MAX_STOP_CHARS} characters", _is_stop)
_IDS = Check(f"a list of token ids, each {_IS_ID.accepted}", _are_ids)
_SOME_IDS = Check(f"at least one token id, each {_IS_ID.accepted}", lambda ids: _are_ids(ids) and len(ids) > 0)
_BIASES = Check(f"an object of token ids and biases, each {_IS_BIAS.accepted}", _are_biases)


@names_checked
@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How the tokens of one request are chosen and when it ends. Checked when built.

    The fields whose default is None take their value from the model's ``generation_config.json`` and, where that is
    silent, the value in brackets; :meth:`resolve` does it at admission.

    Args:
        n: number of completions, each drawn with a seed of its own: ``seed``, ``seed + 1``, … They are as many
            requests under one id; with a prefix cache one of them reads the prompt for all.
        temperature: [1.0] finite, 0 to 2; below 1e-5 is greedy.
        top_p: [1.0] in (0, 1].
        top_k: [0] 0 or -1 is off.
        min_p: [0.0] in [0, 1].
        presence_penalty, frequency_penalty: -2 to 2, over the generated tokens.
        repetition_penalty: [1.0] 1e-6 to 1e6, over prompt and generated tokens.
        seed: makes the draw of this request repeatable; it depends on (seed, token index) alone, never on the
            company in the batch or the chunking. -1 is none.
        stop: string or strings that end the text; not part of it unless ``include_stop_str_in_output``.
        stop_token_ids: further ids that end the sequence.
        logit_bias: by token id, what is added to its logit, -100 to 100.
        allowed_token_ids: the only ids that may be drawn.
        ignore_eos: go on after the model's end-of-sequence ids.
        min_tokens: before that many tokens are out, no end-of-sequence or stop id can be drawn, and no stop string
            that begins there is looked for.
        max_tokens: at most so many tokens; None is the model's, or all that context and KV pool have room for.
        logprobs: None, or 0 to 20: log-probabilities of the drawn token and of so many of the likeliest.
        detokenize: whether to produce text.
        skip_special_tokens: leave special tokens out of the text.
        output_kind: what :meth:`medha.engine.engine.Engine.step` returns before the end: ``cumulative``, ``delta`` or
            ``final_only`` (nothing).
    """

    n: int = _unlisted(1, integer(1, MOST_COMPLETIONS))
    temperature: float | None = _listed(None, "0 is greedy.", finite(0, 2))
    top_p: float | None = _listed(None, "Share of probability to keep.", finite(0, 1, is_open=True))
    top_k: int | None = _listed(None, "Likeliest tokens to keep.", integer(-1, 2**31 - 1))
    min_p: float | None = _listed(None, "Least probability, as a share of the largest.", finite(0, 1))
    presence_penalty: float = _listed(0.0, "Above 0 discourages tokens that were generated.", finite(-2, 2))
    frequency_penalty: float = _listed(0.0, "The same, by how often they were.", finite(-2, 2))
    repetition_penalty: float | None = _listed(
        None, "Above 1 discourages tokens of prompt and answer.", finite(1e-6, 1e6)
    )
    seed: int | None = _unlisted(None, integer(-(2**63), 2**63 - 1))
    stop: str | Sequence[str] | None = _listed(None, "End at this text; may be repeated.", _STOPS, kind=list[str])
    stop_token_ids: Sequence[int] | None = _unlisted(None, _IDS)
    logit_bias: Mapping[int, float] | None = _unlisted(None, _BIASES)
    allowed_token_ids: Sequence[int] | None = _unlisted(None, _SOME_IDS)
    ignore_eos: bool = _listed(False, "Go on after end-of-sequence.", BOOLEAN)
    min_tokens: int = _listed(0, "Least tokens to generate.", integer(0, 2**31 - 1))
    max_tokens: int | None = _listed(16, "Most tokens to generate.", integer(1, 2**31 - 1))
    logprobs: int | None = _listed(None, "Log-probabilities per token in output lines.", LOGPROBS)
    detokenize: bool = _unlisted(True, BOOLEAN)
    skip_special_tokens: bool = _unlisted(True, BOOLEAN)
    include_stop_str_in_output: bool = _unlisted(False, BOOLEAN)
    output_kind: OutputKind = _unlisted("cumulative", choice(*get_args(OutputKind)))

    def __post_init__(self) -> None:
        check_options(self, not_accepted)
        if self.seed == -1:  # as front ends say that there is none
            object.__setattr__(self, "seed", None)
        if self.n > 1 and self.is_greedy:
            raise not_accepted("n", self.n, "1 with temperature=0: the completions would all be the same")
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            message = f"min_tokens={self.min_tokens} exceeds max_tokens={self.max_tokens}"
            raise ValidationError(message, param="min_tokens", value=self.min_tokens)
        object.__setattr__(self, "stop", (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ()))
        object.__setattr__(self, "stop_token_ids", tuple(self.stop_token_ids or ()))
        biases = {_bias_id(key): float(bias) for key, bias in (self.logit_bias or {}).items()}
        object.__setattr__(self, "logit_bias", biases or None)
        if self.allowed_token_ids is not None:
            object.__setattr__(self, "allowed_token_ids", tuple(self.allowed_token_ids))
        if self.stop and not self.detokenize:
            raise not_accepted("stop", self.stop, "no stop strings when detokenize is false")

    @property
    def is_greedy(self) -> bool:
        """Whether the likeliest token is always taken (temperature below 1e-5)."""
        return self.temperature is not None and self.temperature < 1e-5

    def resolve(self, defaults: Mapping[str, float | int | None]) -> SamplingParams:
        """A copy in which every field has a value: given here > ``defaults``, by field name, > class default."""
        known = MODEL_DEFAULTS | {name: value for name, value in defaults.items() if value is not None}
        silent: dict[str, Any] = {name: known[name] for name in MODEL_DEFAULTS if getattr(self, name) is None}
        return dataclasses.replace(self, **silent)

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
        """Build from a JSON object: fields may have the names of :data:`FIELD_ALIASES`, which go before the others, and
        4.0 is an integer."""
        whole = {name: int(its) for name, its in fields.items() if isinstance(its, float) and its.is_integer()}
        newer_last = sorted({**fields, **whole}.items(), key=lambda item: item[0] in FIELD_ALIASES)
        return cls(**{FIELD_ALIASES.get(name, name): value for name, value in newer_last})


MODEL_DEFAULTS: dict[str, float | None] = {
    "temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0, "max_tokens": None,
}  # fmt: skip
"""Of the fields that ``generation_config.json`` may set; ``max_tokens`` is its ``max_new_tokens``."""

FILTERS = ("top_p", "top_k", "min_p")
"""Fields that leave tokens out; at temperature 0 they change nothing."""


@dataclass(frozen=True, slots=True)
class SLO:
    """Objectives of one request, in seconds, each a finite number above 0 or None: ``ttft_s`` from arrival to first
    token, ``tpot_s`` between tokens after the first, on average.
    """

    ttft_s: float | None = _unlisted(None, POSITIVE, name="slo.ttft_s")
    tpot_s: float | None = _unlisted(None, POSITIVE, name="slo.tpot_s")

    def __post_init__(self) -> None:
        check_options(self, not_accepted)

    @classmethod
    def from_dict(cls, fields: Any) -> SLO:
        """Build from a JSON object; raises ValidationError."""
        if not isinstance(fields, dict) or fields.keys() - {"ttft_s", "tpot_s"}:
            raise not_accepted("slo", fields, "an object with ttft_s and tpot_s")
        return cls(**fields)


def check_seconds(name: str, value: Any) -> float:
    """A time; raises ValidationError where it is not a finite number."""
    if not finite(-sys.float_info.max).holds(value):
        raise not_accepted(name, value, "seconds, a finite number")
    return float(value)


def check_priority(value: Any) -> str:
    """A priority class; raises ValidationError where it is none."""
    if value not in PRIORITIES:
        raise not_accepted("priority", value, f"one of {', '.join(PRIORITIES)}")
    return str(value)


def prompt_form(prompt: Any) -> tuple[str, Any, dict[str, Any]]:
    """Which of :data:`PROMPT_FORMS` a prompt has, the text, ids or messages, and the chat options beside messages."""
    if not isinstance(prompt, Mapping):
        return ("prompt" if isinstance(prompt, str) else "prompt_token_ids"), prompt, {}
    given = {name: value for name, value in prompt.items() if value is not None and name not in PROMPT_OPTIONS}
    options = {name: given.pop(name) for name in CHAT_OPTIONS if name in given}
    form, value = next(iter(given.items()), ("", None))
    if len(given) != 1 or form not in PROMPT_FORMS:
        found = " and ".join(map(str, given)) or "no prompt"
        raise ValidationError(f"{found}; accepted: one of {', '.join(PROMPT_FORMS)}", param="prompt", value=prompt)
    if form != "messages" and any(options.values()):
        name = next(name for name, option in options.items() if option)
        raise ValidationError(f"{name} beside {form}; accepted: beside messages", param=name, value=options[name])
    if form == "prompt" and isinstance(value, list):  # as OpenAI has it
        form = "prompt_token_ids"
    if not isinstance(value, str) if form == "prompt" else isinstance(value, (str, Mapping, Number)):
        raise wrong_prompt(form, value)
    return form, value, options


def wrong_prompt(form: str, value: Any) -> ValidationError:
    """What is wrong with a prompt whose type does not fit its form."""
    message = f"{form} of type {type(value).__name__}; accepted: {PROMPT_FORMS.get(form, 'a list of token ids')}"
    return ValidationError(message, param=form, value=value)
