"""What crosses ranks beside batches: sampling state of a request, sampled tokens, the error that ended a call."""

from __future__ import annotations

import dataclasses
import struct
from array import array
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from medha import errors
from medha.batch import Row
from medha.params import SamplingParams
from medha.worker.sampling import Sampled, SlotSampling
from medha.worker.step import StepResult

_ROW_INTS = 2  # token, finite
_LOGPROB_INTS = 3  # token, bits of the float32 logprob, rank
_TAIL_INTS = 2  # bits of the float64 busy time
_NO_IDS = np.empty(0, np.int32)
_ERROR_FIELDS = ("param", "index", "predicted_s", "objective_s")


def encode_sampling(slot: int, sampling: SlotSampling) -> tuple[dict[str, Any], npt.NDArray[np.int32]]:
    """A request's sampling state as JSON and token ids: those of prompt and output go along only where a penalty counts
    them."""
    prompt = _NO_IDS if sampling.prompt_ids is None else sampling.prompt_ids.numpy()
    fields = {
        "slot": slot,
        "params": {f.name: getattr(sampling.params, f.name) for f in dataclasses.fields(SamplingParams)},
        "seed": sampling.seed,
        "end_ids": sampling.end_ids,
        "num_prompt_tokens": sampling.num_prompt_tokens,
        "num_prompt_ids": None if sampling.prompt_ids is None else len(prompt),
        "num_output_ids": len(sampling.output_ids),
    }
    return fields, np.concatenate((prompt, np.array(sampling.output_ids, np.int32)))


def decode_sampling(
    fields: Mapping[str, Any], ids: npt.NDArray[np.int32]
) -> tuple[int, SlotSampling, npt.NDArray[np.int32]]:
    """The inverse of :func:`encode_sampling`, and the ids behind those of this request."""
    num_prompt_ids = fields["num_prompt_ids"]
    prompt, output, rest = np.split(ids, np.cumsum((num_prompt_ids or 0, fields["num_output_ids"])))
    state = SlotSampling(
        SamplingParams(**fields["params"]),
        fields["seed"],
        tuple(fields["end_ids"]),
        fields["num_prompt_tokens"],
        None if num_prompt_ids is None else torch.from_numpy(prompt.copy()),
        output.tolist(),
    )
    return fields["slot"], state, rest


def report_size(rows: Sequence[Row], slots: Sequence[SlotSampling]) -> int:
    """Integers of the report of a batch, known to both ends from the rows alone."""
    logprobs = sum(1 + slot.params.logprobs for slot in slots if slot.params.logprobs is not None)
    return _ROW_INTS * len(rows) + _LOGPROB_INTS * logprobs + _TAIL_INTS


def encode_report(result: StepResult, slots: Sequence[SlotSampling]) -> torch.Tensor:
    """The sampled tokens of a batch, int32 [report_size]."""
    out = array("i")
    for sampled, slot in zip(result.sampled, slots, strict=True):
        out.extend((sampled.token_id, int(sampled.finite)))
        if slot.params.logprobs is not None:
            entries = sampled.logprobs or ()
            for token, logprob, rank in entries:
                out.extend((token, *struct.unpack("i", struct.pack("f", logprob)), rank))
            out.extend([0, 0, 0] * (1 + slot.params.logprobs - len(entries)))
    out.extend(struct.unpack("ii", struct.pack("d", result.busy_s)))
    return torch.tensor(out, dtype=torch.int32)


def decode_report(report: torch.Tensor, rows: tuple[Row, ...], slots: Sequence[SlotSampling]) -> StepResult:
    """The inverse of :func:`encode_report`."""
    ints = report.tolist()
    sampled, at = [], 0
    for slot in slots:
        token, finite = ints[at : at + _ROW_INTS]
        at += _ROW_INTS
        entries = None
        if slot.params.logprobs is not None:
            count = 1 + slot.params.logprobs
            triples = [ints[i : i + 3] for i in range(at, at + 3 * count, 3)]
            at += 3 * count
            # a vocabulary smaller than the number asked for leaves triples of zeros, whose rank no token has
            entries = tuple((t, struct.unpack("f", struct.pack("i", b))[0], r) for t, b, r in triples if r) or None
        sampled.append(Sampled(token, bool(finite), entries))
    (busy_s,) = struct.unpack("d", struct.pack("ii", *ints[at : at + _TAIL_INTS]))
    return StepResult(rows, sampled, busy_s)


def error_to_json(error: Exception) -> dict[str, Any]:
    """Class name and message of an error, and which parameter of which request a refusal is about, and why."""
    where = {name: getattr(error, name) for name in _ERROR_FIELDS if getattr(error, name, None) is not None}
    return {"class": type(error).__name__, "message": str(error), **where}


def error_from_json(item: Mapping[str, Any]) -> Exception:
    """An error of the same class with the same message; a RequestError for a class that is not medha's."""
    kind = getattr(errors, item["class"], None)
    if not (isinstance(kind, type) and issubclass(kind, errors.MedhaError)):
        return errors.RequestError(f"{item['class']}: {item['message']}")
    error = kind(item["message"])
    for name in _ERROR_FIELDS:
        if name in item:
            setattr(error, name, item[name])
    return error
