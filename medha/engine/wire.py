"""What travels between ranks beside batches: sampling states, reports and errors, each with its encoding."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from itertools import islice
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from medha import errors
from medha.batch import Row
from medha.params import SamplingParams
from medha.worker.sampling import Sampled, SlotSampling
from medha.worker.step import StepResult

_ROW_SIZE = 2  # token, finite
_LOGPROB_SIZE = 3  # token, logprob, rank
_ERROR_FIELDS = ("param", "index", "predicted_s", "objective_s")


def encode_sampling(slot: int, sampling: SlotSampling) -> tuple[dict[str, Any], npt.NDArray[np.int32]]:
    """A request's sampling state as JSON and token ids: those of prompt and output go along only where a penalty counts
    them."""
    prompt = np.empty(0, np.int32) if sampling.prompt_ids is None else sampling.prompt_ids.numpy()
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
    """Numbers of the report of a batch, known to both ends from the rows alone."""
    logprobs = sum(1 + slot.params.logprobs for slot in slots if slot.params.logprobs is not None)
    return _ROW_SIZE * len(rows) + _LOGPROB_SIZE * logprobs + 1


def encode_report(result: StepResult, slots: Sequence[SlotSampling]) -> torch.Tensor:
    """The sampled tokens of a batch, then its busy time, float64 [report_size]: it holds ids and float32 exactly."""
    out: list[float] = []
    for sampled, slot in zip(result.sampled, slots, strict=True):
        out += (sampled.token_id, sampled.finite)
        if slot.params.logprobs is not None:
            entries = [number for entry in sampled.logprobs or () for number in entry]
            out += entries + [0] * (_LOGPROB_SIZE * (1 + slot.params.logprobs) - len(entries))
    return torch.tensor([*out, result.busy_s], dtype=torch.float64)


def decode_report(report: torch.Tensor, rows: tuple[Row, ...], slots: Sequence[SlotSampling]) -> StepResult:
    """The inverse of :func:`encode_report`."""
    numbers = iter(report.tolist())
    sampled = []
    for slot in slots:
        token, finite = islice(numbers, _ROW_SIZE)
        entries = None
        if slot.params.logprobs is not None:
            triples = [tuple(islice(numbers, _LOGPROB_SIZE)) for _ in range(1 + slot.params.logprobs)]
            # a vocabulary smaller than the number asked for leaves triples of zeros, whose rank no token has
            entries = tuple((int(token), logprob, int(rank)) for token, logprob, rank in triples if rank) or None
        sampled.append(Sampled(int(token), bool(finite), entries))
    return StepResult(rows, sampled, next(numbers))


def error_to_json(error: Exception) -> dict[str, Any]:
    """Class name and message of an error, and which parameter of which request a refusal is about, and why."""
    where = {name: getattr(error, name) for name in _ERROR_FIELDS if getattr(error, name, None) is not None}
    return {"class": type(error).__name__, "message": str(error), "where": where}


def error_from_json(item: Mapping[str, Any]) -> Exception:
    """An error of the same class with the same message; a RequestError for a class that is not medha's."""
    kind = getattr(errors, item["class"], None)
    if not (isinstance(kind, type) and issubclass(kind, errors.MedhaError)):
        return errors.RequestError(f"{item['class']}: {item['message']}")
    error = kind(item["message"])
    for name, value in item["where"].items():
        setattr(error, name, value)
    return error
