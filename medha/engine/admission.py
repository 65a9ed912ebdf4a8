"""From what a user gives to a request that may be queued: tokenised, checked, and sure to fit.

Nothing here changes state: a request that is refused leaves no trace.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from numbers import Number
from typing import Any

import numpy as np
import numpy.typing as npt

from medha.engine.prefix import PrefixIds
from medha.engine.request import ModelLimits, Request
from medha.engine.threads import PIECE_TOKENS, pieces
from medha.errors import ContextLengthError, KVCapacityError, ModelLoadError, ValidationError, not_accepted
from medha.params import SLO, SamplingParams, check_priority, prompt_form, wrong_prompt
from medha.sched.memory import KVMemory
from medha.text import Tokenizer

logger = logging.getLogger("medha")

Prompt = str | Sequence[int] | Mapping[str, Any]
"""Text, token ids (an array or tensor of them too), or a mapping with exactly one of ``prompt`` (text),
``prompt_token_ids`` and ``messages``, each with ``cache_salt`` where what is computed of it is to be shared with
requests of the same salt alone, text with ``add_special_tokens=False`` where it has them already, messages with
:data:`medha.params.CHAT_OPTIONS` where they are wanted."""


def prepare_request(
    request_id: str,
    prompt: Prompt,
    params: SamplingParams | None,
    slo: SLO | None = None,
    priority: str = "normal",
    tenant: str = "",
    *,
    limits: ModelLimits,
    tokenizer: Tokenizer | None,
    kv: KVMemory,
    prefix: PrefixIds | None = None,
    decode_kv: KVMemory | None = None,
) -> Request:
    """Tokenise and check a request, which must be able to fit ``kv``, however long it waits; ``prefix`` makes the ids
    by which it shares what is computed of the same tokens, tenant and ``cache_salt``. Where requests decode on
    instances of their own, ``kv`` is to take its prompt alone, and ``decode_kv`` all of it.

    Raises:
        ValidationError, ContextLengthError, KVCapacityError: the request is wrong; ``param`` says where.
    """
    check_type("request_id", request_id, str)
    if not request_id:
        raise ValidationError("request_id is empty; accepted: a string", param="request_id", value=request_id)
    params = limits.default_params if params is None else params
    check_type("sampling_params", params, SamplingParams)
    check_type("slo", slo, SLO, or_none=True)
    check_priority(priority)
    check_type("tenant", tenant, str)
    if len(tenant) > 200:
        raise not_accepted("tenant", tenant, "at most 200 characters")
    text, ids = tokenise(prompt, tokenizer, limits.vocab_size)
    if len(ids) == 0:
        form, value, _ = prompt_form(prompt)
        raise ValidationError(f"{form}={value!r:.80} has no token; accepted: at least one", param=form, value=value)
    params = params.resolve(limits.sampling_defaults)
    if params.stop and tokenizer is None:
        raise _no_tokenizer("stop", params.stop, "stop_token_ids")
    for name in ("stop_token_ids", "allowed_token_ids", "logit_bias"):
        checked_ids(list(getattr(params, name) or ()), name, limits.vocab_size)
    eos_ids, least = frozenset(() if params.ignore_eos else limits.eos_token_ids), params.min_tokens
    allowed_ids = params.allowed_token_ids or range(limits.vocab_size)
    if least and eos_ids.union(params.stop_token_ids or ()).issuperset(allowed_ids):
        message = f"min_tokens={least} leaves nothing to draw; accepted: 0, or fewer stop_token_ids"
        raise ValidationError(message, param="min_tokens", value=least)
    if limits.most_new_tokens is not None and params.max_tokens != limits.most_new_tokens:
        what = f"max_tokens={params.max_tokens} with scheduler='cdsp', whose groups do not decode"
        message = f"{what}; accepted: {limits.most_new_tokens}"
        raise ValidationError(message, param="max_tokens", value=params.max_tokens)
    params = _capped(params, len(ids), limits.max_model_len, decode_kv or kv)
    request = Request(request_id, text, ids, params, eos_ids, slo=slo, priority=priority, tenant=tenant)
    _check_pool(len(ids), request.max_tokens if decode_kv is None else 1, kv)
    if decode_kv is not None and request.max_tokens > 1:
        _check_pool(len(ids), request.max_tokens, decode_kv, " on a decode instance")
    if prefix is not None:
        salt = prompt.get("cache_salt") if isinstance(prompt, Mapping) else None
        check_type("cache_salt", salt, str, or_none=True)
        request.prefix = prefix.of(ids, tenant, salt or "")
    if len(ids) > PIECE_TOKENS:
        len(request.prompt_token_ids)  # it is made now, not when the first output is
    return request


def tokenise(prompt: Prompt, tokenizer: Tokenizer | None, vocab_size: int) -> tuple[str | None, npt.NDArray[np.int32]]:
    """(text, ids) of a prompt in any of its forms; no text where ids were given.

    Raises:
        ValidationError: it is no prompt.
    """
    form, value, options = prompt_form(prompt)
    text, special = None, prompt.get("add_special_tokens") if isinstance(prompt, Mapping) else None
    if not (special is None or isinstance(special, bool)):
        raise not_accepted("add_special_tokens", special, "true or false")
    if form == "prompt_token_ids":
        ids = checked_ids(value, form, vocab_size)
    elif tokenizer is None:
        raise _no_tokenizer(form, value, "prompt_token_ids")
    else:
        try:
            if form == "messages":
                text, ids = tokenizer.encode_chat(value, **options)
            else:
                text, ids = value, tokenizer.encode_array(value, add_special_tokens=special is not False)
        except ModelLoadError as error:  # the tokenizer's, or its chat template's
            raise ValidationError(str(error), param=form, value=value) from error
        if (most := int(ids.max(initial=0))) >= vocab_size:
            what = f"{form} holds {tokenizer.backend.id_to_token(most)!r}, token {most} of the tokenizer"
            raise ValidationError(f"{what}; accepted: tokens of the model's {vocab_size}", param=form)
    return text, ids


_INTEGERS = {int, *(np.dtype(code).type for code in np.typecodes["AllInteger"])}


def checked_ids(value: Any, name: str, vocab_size: int) -> npt.NDArray[np.int32]:
    """A copy of token ids in the vocabulary; an error names the first that is not one."""
    is_array = hasattr(value, "tolist") and getattr(value, "ndim", 1) > 0 and not _is_texts(value)
    if not is_array and (isinstance(value, (str, bytes, bytearray)) or not isinstance(value, Sequence)):
        raise wrong_prompt(name, value)
    ids = np.empty(len(value), np.int32)
    for part in pieces(len(value)):
        try:
            some = value[part].tolist() if is_array else list(value[part])
        except (RuntimeError, TypeError) as error:  # a tensor on the meta device, a sparse one
            message = f"{name}: its values cannot be read ({error}); accepted: a list of token ids"
            raise ValidationError(message, param=name, value=value) from error
        if not set(map(type, some)) <= _INTEGERS or not (min(some) >= 0 and max(some) < vocab_size):
            index = next(i for i, its in enumerate(some) if type(its) not in _INTEGERS or not 0 <= its < vocab_size)
            message = f"{name}[{part.start + index}]={some[index]!r:.80}; accepted: integers from 0 to {vocab_size - 1}"
            raise ValidationError(message, param=name, value=some[index])
        ids[part] = some
    return ids


def _capped(params: SamplingParams, num_prompt_tokens: int, max_model_len: int, kv: KVMemory) -> SamplingParams:
    """``params`` with ``max_tokens`` capped to the room that the prompt leaves; where it is None, all of it."""
    room = max_model_len - num_prompt_tokens
    if room < 1:
        message = f"the prompt has {num_prompt_tokens} tokens; accepted: fewer than max_model_len={max_model_len}"
        raise ContextLengthError(message, param="prompt", value=num_prompt_tokens)
    if params.max_tokens is None:
        return params.capped(max(1, min(room, kv.max_request_tokens + 1 - num_prompt_tokens)))
    if params.max_tokens <= room:
        return params
    logger.debug("max_tokens=%d is capped to %d, the room after the prompt", params.max_tokens, room)
    return params.capped(room)


def _check_pool(num_prompt_tokens: int, max_tokens: int, kv: KVMemory, where: str = "") -> None:
    needed = num_prompt_tokens + max_tokens - 1  # the last sampled token is never written
    if needed <= kv.max_request_tokens:
        return
    remedy = "kv_memory" if kv.max_kv_per_group == kv.num_blocks * kv.block_size else "max_kv_per_group"
    span = kv.max_span or kv.num_groups
    groups = f", {kv.max_share} on each of {span} groups" if span > 1 else ""
    prompt_fits = num_prompt_tokens <= kv.max_request_tokens
    param, value = ("max_tokens", max_tokens) if prompt_fits else ("prompt", num_prompt_tokens)
    asked = f" and max_tokens={max_tokens}" if max_tokens > 1 else ""  # a prefill group's part of a request is 1
    what = f"{num_prompt_tokens} prompt tokens{asked} need {needed} tokens of KV cache{where}"
    accepted = f"at most {kv.max_request_tokens}{groups}, or more with a larger {remedy}"
    raise KVCapacityError(f"{what}; accepted: {accepted}", param=param, value=value)


def check_type(name: str, value: Any, kind: type, *, or_none: bool = False) -> None:
    """Raise ValidationError unless ``value`` is of a type, or None where that may be."""
    if not (isinstance(value, kind) or (or_none and value is None)):
        raise not_accepted(name, value, kind.__name__)


def _no_tokenizer(name: str, value: Any, instead: str) -> ValidationError:
    told = f"{name} needs a tokenizer, and the model has none; accepted: {instead}"
    return ValidationError(told, param=name, value=value)


def is_prompt(value: Any) -> bool:
    """Whether it is one prompt: text, a mapping, or token ids as a list or an array of numpy or torch."""
    if isinstance(value, (str, Mapping)) or getattr(value, "ndim", 0) == 1:
        return not _is_texts(value)
    is_list = isinstance(value, Sequence) and not isinstance(value, (bytes, bytearray))
    return is_list and len(value) > 0 and isinstance(value[0], Number)


def _is_texts(value: Any) -> bool:
    """Whether it is an array of numpy that holds text."""
    return isinstance(value, np.ndarray) and any(isinstance(one, str) for one in value[:1])


def listed(prompts: Any, name: str = "prompts") -> list[Any]:
    """One prompt or several as a list."""
    if is_prompt(prompts):
        return [prompts]
    is_list = isinstance(prompts, Sequence) and not isinstance(prompts, (bytes, bytearray))
    if not is_list and getattr(prompts, "ndim", 0) < 2:
        message = f"{name} of type {type(prompts).__name__}; accepted: a prompt or a list of prompts"
        raise ValidationError(message, param=name, value=prompts)
    return list(prompts)


def spread(name: str, value: Any, count: int) -> list[Any]:
    """One value for all, or a list with one for each."""
    if not isinstance(value, (list, tuple)):
        return [value] * count
    if len(value) != count:
        message = f"{len(value)} {name} for {count} prompts; accepted: one, or {count}"
        raise ValidationError(message, param=name, value=value)
    return list(value)
