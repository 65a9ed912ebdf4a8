"""From logits to tokens: greedy, temperature, top-k, top-p, min-p, penalties, log-probabilities.

Each draw is a function of (seed of the request, index of the token, its logits) alone: the uniform number comes from a
counter-based generator (Philox), never from a shared stream, so batching, chunking and the order of requests cannot
change it. Filters apply in the order temperature, top-k, top-p, min-p.

Legend: S rows to sample, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from medha.params import SamplingParams


@dataclass(slots=True)
class SlotSampling:
    """What the sampler keeps of one request.

    Attributes:
        params: resolved parameters (no field that :meth:`SamplingParams.resolve` fills is None).
        seed: of this request's draws.
        end_ids: ids that may not be drawn before ``min_tokens`` tokens are out.
        num_prompt_tokens: positions below it belong to the prompt.
        prompt_ids: the distinct tokens of the prompt, kept only when a repetition penalty needs them; never the whole
            prompt, which a penalty would sort at every token and a message would carry to other ranks.
        output_ids: tokens drawn so far, kept only when a penalty needs them.
    """

    params: SamplingParams
    seed: int
    end_ids: tuple[int, ...]
    num_prompt_tokens: int
    prompt_ids: torch.Tensor | None = None
    output_ids: list[int] = field(default_factory=list)

    @classmethod
    def of(
        cls, params: SamplingParams, seed: int, end_ids: tuple[int, ...], num_prompt_tokens: int, prompt: torch.Tensor
    ) -> SlotSampling:
        """The state of a new request; ``prompt`` is integers of one axis."""
        has_penalty = params.repetition_penalty not in (None, 1.0)
        distinct = torch.bincount(prompt).nonzero().view(-1).to(torch.int32) if has_penalty else None
        return cls(params, seed, end_ids, num_prompt_tokens, distinct)

    @property
    def has_penalties(self) -> bool:
        """Whether any penalty changes the logits."""
        p = self.params
        return bool(p.presence_penalty or p.frequency_penalty or p.repetition_penalty != 1.0)


@dataclass(frozen=True, slots=True)
class Sampled:
    """The token drawn for one row.

    Attributes:
        token_id: the token; meaningless when not ``finite``.
        finite: whether all logits of the row were finite.
        logprobs: (token id, natural-log probability, rank) of the drawn token, then of the likeliest, if asked for.
    """

    token_id: int
    finite: bool
    logprobs: tuple[tuple[int, float, int], ...] | None = None


def sample(logits_SV: torch.Tensor, slots: Sequence[SlotSampling], indices: Sequence[int]) -> list[Sampled]:
    """Draw one token a row.

    Args:
        logits_SV: float32.
        slots: the request of each row.
        indices: index of the token to draw among the request's generated tokens, from 0.
    """
    finite = _are_finite(logits_SV).tolist()
    tokens = logits_SV.argmax(dim=-1).tolist()
    results: list[Sampled] = []
    for row, (slot, index) in enumerate(zip(slots, indices, strict=True)):
        token = tokens[row]
        if finite[row]:
            if _needs_draw(slot, index):
                token = int(_draw(logits_SV[row], slot, index))
            if slot.has_penalties:
                slot.output_ids.append(token)
        wanted = slot.params.logprobs
        logprobs = _logprobs(logits_SV[row], token, wanted) if wanted is not None and finite[row] else None
        results.append(Sampled(token, finite[row], logprobs))
    return results


@dataclass(frozen=True, slots=True)
class Drawing:
    """Tokens drawn where the logits lie, on their way to the host.

    Attributes:
        tokens: int64 [S], on the device of the logits.
    """

    tokens: torch.Tensor
    _ids_and_finite: torch.Tensor  # [2, S] on the host, once the device is done
    _logprobs: Sequence[tuple[torch.Tensor, torch.Tensor] | None]  # of each row: values; ids, then the rank

    def read(self) -> list[Sampled]:
        """The tokens; to be called when the device has done what it had to do by the time of :func:`draw`."""
        tokens, finite = self._ids_and_finite.tolist()
        found = zip(tokens, finite, self._logprobs, strict=True)
        return [Sampled(token, bool(ok), _read_logprobs(row) if row and ok else None) for token, ok, row in found]


def draw(logits_SV: torch.Tensor, slots: Sequence[SlotSampling], indices: Sequence[int]) -> Drawing:
    """As :func:`sample`, but the host does not wait for the device: the same tokens, read later.

    Rows with penalties are waited for, as their next draw needs the tokens so far.
    """
    tokens_S = logits_SV.argmax(dim=-1)
    logprobs: list[tuple[torch.Tensor, torch.Tensor] | None] = []
    for row, (slot, index) in enumerate(zip(slots, indices, strict=True)):
        if _needs_draw(slot, index):
            tokens_S[row] = _draw(logits_SV[row], slot, index)
        if slot.has_penalties:
            slot.output_ids.append(int(tokens_S[row]))
        wanted = slot.params.logprobs
        logprobs.append(None if wanted is None else _start_logprobs(logits_SV[row], tokens_S[row], wanted))
    finite = _are_finite(logits_SV)
    return Drawing(tokens_S, _to_host(torch.stack([tokens_S, finite.long()])), logprobs)


def _are_finite(logits_SV: torch.Tensor) -> torch.Tensor:
    """Whether all logits of each row are finite; a NaN is the largest and the smallest of its row."""
    return torch.isfinite(logits_SV.amax(dim=-1)) & torch.isfinite(logits_SV.amin(dim=-1))


def _needs_draw(slot: SlotSampling, index: int) -> bool:
    """Whether a token is more than the likeliest one."""
    masked = index < slot.params.min_tokens and bool(slot.end_ids)
    return masked or slot.has_penalties or not slot.params.is_greedy


def _to_host(tensor: torch.Tensor) -> torch.Tensor:
    """A copy on the host that is there once the device is done; of a tensor on the host the tensor itself."""
    if not tensor.is_cuda:
        return tensor
    return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True).copy_(tensor, non_blocking=True)


def uniform(seed: int, index: int) -> float:
    """The number in [0, 1) that decides draw ``index`` of a request: Philox keyed by the seed, at that counter."""
    key = seed % 2**64
    return float(np.random.Generator(np.random.Philox(key=key, counter=index)).random())


def _draw(logits_V: torch.Tensor, slot: SlotSampling, index: int) -> torch.Tensor:
    """The token of one row, int64 without axes, where the logits lie; penalties and ``min_tokens`` aside no wait."""
    params = slot.params
    logits_V = logits_V.clone()
    if slot.has_penalties:
        _penalise_(logits_V, slot)
    if index < params.min_tokens and slot.end_ids:
        logits_V[list(slot.end_ids)] = -torch.inf
    if params.is_greedy:
        return logits_V.argmax()
    assert params.temperature is not None
    probs, ids, num_kept = _filtered(torch.softmax(logits_V.double() / params.temperature, dim=-1), params)
    cumulative = probs.cumsum(0)
    target = uniform(slot.seed, index) * cumulative[-1:]
    choice = torch.minimum(torch.searchsorted(cumulative, target, right=True), num_kept - 1)
    return (choice if ids is None else ids.gather(0, choice)).squeeze(0)


def _filtered(probs_V: torch.Tensor, params: SamplingParams) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor]:
    """The probabilities with 0 for those that the filters drop, not renormalised; their ids (None: all, in order); and
    how many come before the first of a tail that is dropped, int64 of one element."""
    top_k, top_p, min_p = params.top_k or 0, params.top_p or 1.0, params.min_p or 0.0
    everything = torch.full((1,), len(probs_V), dtype=torch.int64, device=probs_V.device)
    if top_k <= 0 and top_p >= 1.0:
        if min_p > 0.0:
            probs_V = torch.where(probs_V >= min_p * probs_V.max(), probs_V, 0.0)
        return probs_V, None, everything
    k = min(top_k, len(probs_V)) if top_k > 0 else len(probs_V)
    probs, ids = torch.topk(probs_V, k) if k < len(probs_V) else torch.sort(probs_V, descending=True, stable=True)
    keep = torch.ones_like(probs, dtype=torch.bool)
    if top_p < 1.0:
        keep &= probs.cumsum(0) - probs < top_p * probs.sum()
    if min_p > 0.0:
        keep &= probs >= min_p * probs[:1]
    keep[:1] = True
    return torch.where(keep, probs, 0.0), ids, keep.sum().view(1)


def _penalise_(logits_V: torch.Tensor, slot: SlotSampling) -> None:
    """Apply repetition (prompt and output), then frequency and presence (output) penalties in place."""
    params = slot.params
    output = torch.tensor(slot.output_ids, dtype=torch.int64, device=logits_V.device)
    if params.repetition_penalty not in (None, 1.0):
        seen = output if slot.prompt_ids is None else torch.cat([slot.prompt_ids.to(output), output])
        seen = torch.unique(seen)
        values = logits_V[seen]
        penalty, largest = params.repetition_penalty, torch.finfo(logits_V.dtype).max
        logits_V[seen] = torch.where(values > 0, values / penalty, values * penalty).clamp(-largest, largest)
    if len(output):
        ids, counts = torch.unique(output, return_counts=True)
        logits_V[ids] -= params.frequency_penalty * counts + params.presence_penalty


def _logprobs(logits_V: torch.Tensor, token: int, num_top: int) -> tuple[tuple[int, float, int], ...]:
    """Of the drawn token, then of the ``num_top`` likeliest: (id, log-probability before any transform, rank)."""
    return _read_logprobs(_start_logprobs(logits_V, torch.tensor(token, device=logits_V.device), num_top))


def _start_logprobs(logits_V: torch.Tensor, token: torch.Tensor, num_top: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probabilities of the token and the likeliest, and their ids with the token's rank last, to the host."""
    logprobs = torch.log_softmax(logits_V, dim=-1)
    token = token.view(1)
    values, ids = torch.topk(logprobs, min(num_top, len(logprobs)))
    rank = (logits_V > logits_V.gather(0, token)).sum().view(1) + 1
    return _to_host(torch.cat([logprobs.gather(0, token), values])), _to_host(torch.cat([token, ids, rank]))


def _read_logprobs(started: tuple[torch.Tensor, torch.Tensor]) -> tuple[tuple[int, float, int], ...]:
    """(id, log-probability, rank) of the drawn token, then of the likeliest."""
    values, (*ids, rank) = started[0].tolist(), started[1].tolist()
    ranks = [rank, *range(1, len(values))]
    return tuple(zip(ids, values, ranks, strict=True))
