"""From what a user gives to a request that may be queued: tokenised, checked, and sure to fit.

Nothing here changes state: a request that is refused leaves no trace.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from medha.errors import ChatTemplateError, ContextLengthError, KVCapacityError, TokenizerError, ValidationError
from medha.request import SLO, SamplingParams, check_priority
from medha.sched.scheduler import Scheduler
from medha.text import Tokenizer

logger = logging.getLogger("medha")

Prompt = str | Sequence[int] | Mapping[str, Any]
"""Text, token ids (an array or tensor of them too), or a mapping with exactly one of ``prompt`` (text),
``prompt_token_ids`` and ``messages``. A prompt of millions of tokens is best an integer array: 10M are checked
and copied in 8 ms, while a list of them takes half a second, in which nobody else gets a token."""

_FORMS = ("prompt", "prompt_token_ids", "messages")
_IDS = "accepted: a list of token ids, or text as prompt"


@dataclass(frozen=True, slots=True)
class ModelLimits:
    """What a request is checked against.

    Attributes:
        vocab_size: token ids are below it.
        max_model_len: prompt plus output in tokens.
        eos_token_ids: ids that end a sequence.
        sampling_defaults: from ``generation_config.json``, by field of :class:`SamplingParams`.
        seed: base of the seeds of requests that bring none.
    """

    vocab_size: int
    max_model_len: int
    eos_token_ids: tuple[int, ...] = ()
    sampling_defaults: Mapping[str, float | int | None] = field(default_factory=dict)
    seed: int = 0


@dataclass(slots=True)
class PreparedRequest:
    """A request that has been tokenised and checked, not yet queued.

    Token ids are int32 from here on: 10M of them are 40 MB, checked in milliseconds; as Python integers they would
    stall whoever decodes meanwhile.

    Attributes:
        prompt: its text, or None where ids or messages were given.
        prompt_ids: its tokens, a copy of our own.
        params: every field has a value, and ``max_tokens`` fits the room after the prompt.
        id_list: the same tokens as a list; None until it is asked for where they came as an array.
    """

    request_id: str
    prompt: str | None
    prompt_ids: npt.NDArray[np.int32]
    params: SamplingParams
    slo: SLO | None
    id_list: list[int] | None = None
    priority: str = "normal"

    @property
    def prompt_token_ids(self) -> list[int]:
        """The tokens as a list of our own, made once."""
        if self.id_list is None:
            self.id_list = self.prompt_ids.tolist()
        return self.id_list


def prepare_request(
    request_id: str,
    prompt: Prompt,
    params: SamplingParams | None,
    *,
    slo: SLO | None,
    priority: str = "normal",
    limits: ModelLimits,
    tokenizer: Tokenizer | None,
    scheduler: Scheduler,
) -> PreparedRequest:
    """Tokenise and check a request.

    Args:
        request_id: any string but the empty one.
        prompt: in any of its forms.
        params: None for the model's defaults.
        slo: objectives, if any.
        priority: class.
        limits: of the model.
        tokenizer: None takes token ids alone.
        scheduler: whose KV pool the request must be able to fit, however long it waits.

    Raises:
        ValidationError, ContextLengthError, KVCapacityError: the request is wrong; ``param`` says where.
    """
    check_type("request_id", request_id, str)
    if not request_id:
        raise ValidationError("request_id is empty; accepted: a string", param="request_id", value=request_id)
    params = SamplingParams() if params is None else params
    check_type("sampling_params", params, SamplingParams)
    if slo is not None:
        check_type("slo", slo, SLO)
    check_priority(priority)
    text, ids, id_list = _tokenise(prompt, tokenizer, limits.vocab_size)
    params = params.resolve(limits.sampling_defaults)
    if params.stop_strings and tokenizer is None:
        raise _no_tokenizer("stop", params.stop, "use stop_token_ids")
    _checked_ids(params.stop_token_ids or (), "stop_token_ids", limits.vocab_size)
    end_ids = {*(params.stop_token_ids or ()), *(() if params.ignore_eos else limits.eos_token_ids)}
    if params.min_tokens and len(end_ids) >= limits.vocab_size:
        raise ValidationError(
            f"min_tokens={params.min_tokens} leaves nothing to draw: each of the {limits.vocab_size} ids ends the "
            "sequence; accepted: 0, or fewer stop_token_ids",
            param="min_tokens",
            value=params.min_tokens,
        )
    params = _capped(params, len(ids), limits.max_model_len)
    _check_pool(params, len(ids), scheduler)
    return PreparedRequest(request_id, text, ids, params, slo, id_list, priority)


def _tokenise(
    prompt: Prompt, tokenizer: Tokenizer | None, vocab_size: int
) -> tuple[str | None, npt.NDArray[np.int32], list[int] | None]:
    """(text, ids, the same as a list) of a prompt in any of its forms; None for what it did not come with."""
    id_list: list[int] | None = None
    form, value = _form(prompt)
    if value is None or isinstance(value, Mapping):
        raise _wrong_prompt(form, value)
    if form == "prompt":
        if not isinstance(value, str):
            raise _wrong_prompt(form, value)
        if tokenizer is None:
            raise _no_tokenizer(form, value, "give prompt_token_ids")
        id_list = tokenizer.encode(value)
    elif form == "messages":
        if tokenizer is None:
            raise _no_tokenizer(form, value, "give prompt_token_ids")
        try:
            id_list = tokenizer.encode_chat(value)
        except (ChatTemplateError, TokenizerError) as error:
            raise ValidationError(str(error), param="messages", value=value) from error
    elif isinstance(value, list):
        id_list = list(value)
    ids = _checked_ids(value, form, vocab_size) if form == "prompt_token_ids" else np.array(id_list, np.int32)
    if len(ids) == 0:
        raise ValidationError(f"{form}={value!r:.80} has no token; accepted: at least one", param=form, value=value)
    return value if form == "prompt" else None, ids, id_list


def _form(prompt: Prompt) -> tuple[str, Any]:
    """Which form a prompt has, and the text, ids or messages in it."""
    if not isinstance(prompt, Mapping):
        return ("prompt" if isinstance(prompt, str) else "prompt_token_ids"), prompt
    given = {name: value for name, value in prompt.items() if value is not None}
    unknown = sorted(str(name) for name in given if name not in _FORMS)
    if unknown or len(given) != 1:
        raise ValidationError(
            f"a prompt mapping with {', '.join(map(str, given)) or 'nothing'}; accepted: one of {', '.join(_FORMS)}",
            param="prompt",
            value=prompt,
        )
    return next(iter(given.items()))


def _checked_ids(value: Any, name: str, vocab_size: int) -> npt.NDArray[np.int32]:
    """A copy of token ids in the vocabulary; names the first that is not one. 10M of an array take 10 ms."""
    try:
        array = _integer_array(value)
    except (RuntimeError, TypeError) as error:  # a tensor on the meta device, a sparse one
        raise ValidationError(
            f"{name}: its values cannot be read ({error}); {_IDS}", param=name, value=value
        ) from error
    if array is None:
        ids = value.tolist() if hasattr(value, "tolist") else value
        if isinstance(ids, (str, bytes, bytearray)) or not isinstance(ids, Sequence):
            raise _wrong_prompt(name, value)
        array = _list_as_array(ids)
        if array is None:
            index = next(i for i, token in enumerate(ids) if type(token) is not int or not 0 <= token < vocab_size)
            raise _wrong_id(name, index, ids[index], vocab_size)
    if len(array) and (array.min() < 0 or array.max() >= vocab_size):
        index = int(np.argmax((array < 0) | (array >= vocab_size)))
        raise _wrong_id(name, index, array[index].item(), vocab_size)
    return np.array(array, np.int32)


def _list_as_array(ids: Sequence[Any]) -> npt.NDArray[np.int64] | None:
    """Integers as an array, without a Python loop; None if one is no integer, or too large for any vocabulary."""
    if not set(map(type, ids)) <= {int}:  # numpy would take True for 1
        return None
    try:
        return np.array(ids, np.int64)
    except OverflowError:
        return None


def _integer_array(value: Any) -> npt.NDArray[np.integer[Any]] | None:
    """A numpy array or torch tensor of integers along one axis as a numpy array; None for anything else."""
    if hasattr(value, "is_floating_point"):  # torch, some of whose other types numpy does not have
        value = None if value.is_floating_point() or value.is_complex() else value.cpu().numpy()
    is_integers = isinstance(value, np.ndarray) and value.ndim == 1 and value.dtype.kind in "iu"
    return value if is_integers else None


def _capped(params: SamplingParams, num_prompt_tokens: int, max_model_len: int) -> SamplingParams:
    """``params`` with ``max_tokens`` capped to the room that the prompt leaves."""
    room = max_model_len - num_prompt_tokens
    if room < 1:
        raise ContextLengthError(
            f"the prompt has {num_prompt_tokens} tokens and max_model_len is {max_model_len}; "
            f"accepted: at most {max_model_len - 1}",
            param="prompt",
            value=num_prompt_tokens,
        )
    if params.max_tokens <= room:
        return params
    logger.info("max_tokens=%d is capped to %d, the room after the prompt", params.max_tokens, room)
    return params.capped(room)


def _check_pool(params: SamplingParams, num_prompt_tokens: int, scheduler: Scheduler) -> None:
    memory = scheduler.memory
    needed = num_prompt_tokens + params.max_tokens - 1  # the last sampled token is never written
    if needed <= memory.max_request_tokens:
        return
    groups = f" on each of {memory.num_groups} groups" if memory.num_groups > 1 else ""
    prompt_fits = num_prompt_tokens <= memory.max_request_tokens
    raise KVCapacityError(
        f"{num_prompt_tokens} prompt tokens and max_tokens={params.max_tokens} need {needed} tokens of KV cache; "
        f"accepted: at most {memory.max_request_tokens} ({memory.max_kv_per_group}{groups}, the pool has "
        f"{memory.num_blocks} blocks of {memory.block_size})",
        param="max_tokens" if prompt_fits else "prompt",
        value=params.max_tokens if prompt_fits else num_prompt_tokens,
    )


def check_type(name: str, value: Any, kind: type) -> None:
    """Raise ValidationError unless ``value`` is of a type."""
    if not isinstance(value, kind):
        raise ValidationError(f"{name}={value!r:.80}; accepted: {kind.__name__}", param=name, value=value)


def _wrong_id(name: str, index: int, token: object, vocab_size: int) -> ValidationError:
    return ValidationError(
        f"{name}[{index}]={token!r:.80}; accepted: integers from 0 to {vocab_size - 1}", param=name, value=token
    )


def _wrong_prompt(name: str, value: Any) -> ValidationError:
    accepted = {"prompt": "accepted: text", "messages": "accepted: a list of messages"}.get(name, _IDS)
    return ValidationError(f"{name} of type {type(value).__name__}; {accepted}", param=name, value=value)


def _no_tokenizer(name: str, value: Any, instead: str) -> ValidationError:
    return ValidationError(
        f"{name} needs a tokenizer, and the model folder has no tokenizer.json; {instead}", param=name, value=value
    )
