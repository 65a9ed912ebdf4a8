"""The exceptions medha raises.

One small tree. Each leaf is also a ``ValueError`` (something the caller gave is wrong) or a ``RuntimeError`` (something
failed while serving), and a message names the thing, its value, and what is accepted. Command lines turn a class into
an exit code with :func:`exit_code`.
"""

from __future__ import annotations

import difflib
import inspect
import re
import traceback
from collections.abc import Iterable
from itertools import islice
from typing import Any

_MAX_CHARS = 2000  # of an error that ranks tell each other


class MedhaError(Exception):
    """Base of everything medha raises on purpose."""


class ConfigError(MedhaError, ValueError):
    """A configuration, flag or model file is wrong; raised before the weights are read."""


class ModelLoadError(ConfigError):
    """A model folder cannot be used."""


class UnsupportedModelError(ModelLoadError):
    """The model's architecture, or a field of its configuration, is not implemented."""


class WeightsError(ModelLoadError):
    """A safetensors file, its index, or the set of tensors in it is wrong."""


class TokenizerError(ModelLoadError):
    """``tokenizer.json`` is missing where text is needed, or cannot be used."""


class ChatTemplateError(ModelLoadError):
    """The chat template is missing, does not render, or takes too much time or memory."""


class ParallelConfigError(ConfigError):
    """The parallel layout cannot work; every rank raises it with the same text before any weight is read."""


class _FieldError(MedhaError, ValueError):
    """An error about the field ``param``, which was given ``value``; subclasses have further facts."""

    param: str | None = None
    value: Any = None

    def __init__(self, message: str, **facts: Any) -> None:
        super().__init__(message)
        vars(self).update(facts)


class ValidationError(_FieldError):
    """One request is wrong, the one at ``index`` of the list it came in; nothing of it was scheduled."""

    index: int | None = None


class ContextLengthError(ValidationError):
    """The prompt leaves no room for one new token within ``max_model_len``."""


class KVCapacityError(ValidationError):
    """The request can never fit the KV pool, however long it waits."""


class DeadlineError(ValidationError):
    """The request would miss its TTFT objective even if it ran next, or its TPOT objective even if it decoded alone."""

    predicted_s: float | None = None
    objective_s: float | None = None
    wait_s: float | None = None  # after which the like of it may be in time; None where no wait helps


class UnsupportedFeatureError(_FieldError):
    """A field that users of other engines know, and medha does not implement. It is never ignored."""


class PolicyError(_FieldError):
    """A user's scheduling policy raised, or returned something else than one number a request."""

    policy: str | None = None  # its name


class RequestError(MedhaError, RuntimeError):
    """One accepted request failed; the others are not affected."""


class NonFiniteLogitsError(RequestError):
    """The model returned NaN or infinite logits for this request."""


class EngineDeadError(MedhaError, RuntimeError):
    """The engine cannot serve any more; ``outputs`` is what the requests had produced. Unfinished ones carry it."""

    def __init__(self, message: str, outputs: Iterable[Any] = ()) -> None:
        super().__init__(message)
        self.outputs = list(outputs)


class PlanDivergenceError(EngineDeadError):
    """Two ranks disagree on a batch."""


class RankFailedError(EngineDeadError):
    """Another rank died, was stopped, threw, or cannot be reached."""


_EXIT_CODES = {KeyboardInterrupt: 130, ConfigError: 2, _FieldError: 2, EngineDeadError: 4}


def exit_code(error: BaseException) -> int:
    """The process exit code for an error: 2 bad input, 4 engine failure, 130 interrupted, 1 anything else."""
    return next((code for kind, code in _EXIT_CODES.items() if isinstance(error, kind)), 1)


def is_interrupt(error: BaseException) -> bool:
    """Whether an error is no fault of the code in which it came up: KeyboardInterrupt and its like, or whatever a
    signal handler raised, or a debugger. Python gives those the frame that they interrupt."""
    if not isinstance(error, Exception):
        return type(error).__name__ != "PanicException"  # a fault of Rust code
    # The first frame catches it, and would hold it for ever: looking at a frame's variables leaves it a copy of them.
    for frame, _ in islice(traceback.walk_tb(error.__traceback__), 1, None):
        names, rest, _, values = inspect.getargvalues(frame)
        more = values.get(rest or "")
        given = [*map(values.get, names), *(more if isinstance(more, tuple) else ())]
        if frame.f_back is not None and any(one is frame.f_back for one in given):
            return True
    return False


def hint(name: str, known: Iterable[str], *, cutoff: float = 0.6) -> str:
    """The end of a message on a name that is not known: which of those that are may be meant, if any."""
    near = difflib.get_close_matches(name, list(known), n=1, cutoff=cutoff)
    return f"; did you mean {near[0]}?" if near else ""


def printable(message: str) -> str:
    """An error as it can be told: of bounded length, without control characters and lone surrogates."""
    if len(message) > _MAX_CHARS:
        message = f"{message[:_MAX_CHARS]}… ({len(message)} characters)"
    message = message.encode(errors="backslashreplace").decode()
    return re.sub(r"[\x00-\x09\x0b-\x1f\x7f-\x9f]", lambda match: repr(match[0])[1:-1], message)


def short_repr(value: Any) -> str:
    """``repr`` for a message, cut where a hostile file would fill the screen."""
    try:
        text = repr(value)
    except (ValueError, RecursionError):  # integers of thousands of digits have no repr
        return f"<{type(value).__name__}>"
    return text if len(text) <= 100 else text[:97] + "..."


def not_accepted(name: str, value: Any, accepted: str) -> ValidationError:
    """The error on a field of a request whose value is none of those accepted."""
    return ValidationError(f"{name}={short_repr(value)}; accepted: {accepted}", param=name, value=value)
