"""From logits to tokens, all rows of a step together: temperature, top-k, top-p, min-p, penalties, log-probabilities.

Each draw is a function of (seed of the request, index of the token, its logits) alone. Its uniform number comes from a
counter-based generator (Philox), never from a shared stream, and the weights of the tokens are integers: their sums do
not depend on the order of addition, hence not on other rows, threads or the device.

A filter keeps the tokens whose weight reaches a threshold, so tokens of equal weight stay or go together. Top-k keeps
the k largest weights; top-p the largest that hold that share of what top-k kept; min-p those that reach that share of
the largest. The token drawn is the inverse of the distribution function, tokens in the order of the vocabulary.

Legend: S rows to sample, D of them that need more than the largest logit, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import repeat
from typing import Any, NamedTuple, Self

import numpy as np
import numpy.typing as npt
import torch

from medha.attention.staging import to_device
from medha.params import SamplingParams

Greedy = tuple[torch.Tensor, torch.Tensor]

_LOGITS_AT_A_TIME = 1 << 19  # on a CPU: what is worked on stays in its cache
_IN_PROMPT = 1 << 30  # in a history, beside the count of a token in the output


@dataclass(slots=True)
class SlotSampling:
    """What the sampler keeps of one request."""

    params: SamplingParams  # resolved: no field that SamplingParams.resolve fills is None
    seed: int
    end_ids: tuple[int, ...]  # that may not be drawn before min_tokens tokens are out
    num_prompt_tokens: int  # positions below it belong to the prompt
    prompt_ids: torch.Tensor | None = None  # its distinct tokens, kept only when a repetition penalty needs them
    output_ids: list[int] = field(default_factory=list)  # drawn before the first draw here, when a penalty needs them
    # int32 [V] where the logits are, made by the first draw that has penalties: how often each token is in the output,
    # and whether it is in the prompt
    history: torch.Tensor | None = field(default=None, compare=False)
    has_penalties: bool = field(init=False, compare=False)
    held_until: int = field(init=False, compare=False)  # draws of a lower index may not end the request
    always_draws: bool = field(init=False, compare=False)  # whether each draw is more than taking the largest logit

    def __post_init__(self) -> None:
        p = self.params
        self.has_penalties = bool(p.presence_penalty or p.frequency_penalty or p.repetition_penalty != 1.0)
        self.held_until = p.min_tokens if self.end_ids else 0
        self.always_draws = bool(p.logit_bias or p.allowed_token_ids or self.has_penalties or not p.is_greedy)

    @classmethod
    def of(cls, params: SamplingParams, seed: int, end_ids: tuple[int, ...], prompt_ids: npt.NDArray[np.int32]) -> Self:
        """The state of a new request, whose parameters are resolved."""
        has_penalty = params.repetition_penalty not in (None, 1.0)
        distinct = torch.from_numpy(np.flatnonzero(np.bincount(prompt_ids)).astype(np.int32)) if has_penalty else None
        return cls(params, seed, end_ids, len(prompt_ids), distinct)


class Sampled(NamedTuple):
    """The token drawn for one row."""

    token_id: int  # meaningless when not finite
    finite: bool  # whether all logits of the row were
    # (token id, natural-log probability, rank) of the drawn token, then of the likeliest, if asked for
    logprobs: tuple[tuple[int, float, int], ...] | None = None


class Drawing(NamedTuple):
    """Tokens drawn where the logits lie, on their way to the host."""

    tokens: torch.Tensor  # int64 [S], on the device of the logits
    ids_and_finite: torch.Tensor  # [2, S] on the host, of a GPU in pinned memory, once the device is done
    logprobs: _Logprobs | None

    def read(self) -> list[Sampled]:
        """The tokens; to be called when the device has done what it had to do by the time of :func:`draw`."""
        tokens, finite = self.ids_and_finite.tolist()
        new = tuple.__new__  # a third of the time of Sampled(...)
        drawn = [new(Sampled, one) for one in zip(tokens, map(bool, finite), repeat(None))]
        for row, logprobs in () if self.logprobs is None else self.logprobs.read().items():
            drawn[row] = drawn[row]._replace(logprobs=logprobs if drawn[row].finite else None)
        return drawn


def likeliest(logits_SV: torch.Tensor) -> Greedy:
    """Of each row the token of the largest logit, int64 [S], and whether all logits are finite, bool [S]."""
    tokens_S = _argmax(logits_SV)
    largest_S = logits_SV.gather(1, tokens_S[:, None]).squeeze(-1)
    # The least of a row with NaN is NaN, of which neither holds.
    return tokens_S, (largest_S < torch.inf) & (logits_SV.amin(dim=-1) > -torch.inf)


def _argmax(logits_SV: torch.Tensor) -> torch.Tensor:
    # On a CPU torch takes 7 to 50 times as long as numpy.
    return torch.from_numpy(logits_SV.numpy().argmax(axis=-1)) if logits_SV.is_cpu else logits_SV.argmax(dim=-1)


def draw(
    logits_SV: torch.Tensor, slots: Sequence[SlotSampling], indices: Sequence[int], greedy: Greedy | None = None
) -> Drawing:
    """Draw one token a row; the host does not wait for the device.

    Args:
        logits_SV: float32, left as it is.
        slots: the request of each row.
        indices: index of the token to draw among the request's generated tokens, from 0.
        greedy: :func:`likeliest` of the logits, where it is there already; the tokens are changed.
    """
    tokens_S, finite_S = greedy or likeliest(logits_SV)
    draws = enumerate(zip(slots, indices, strict=True))
    rows = [row for row, (slot, index) in draws if slot.always_draws or index < slot.held_until]
    step = max(1, len(rows) if logits_SV.is_cuda else _LOGITS_AT_A_TIME // logits_SV.shape[-1])
    for part in (rows[first : first + step] for first in range(0, len(rows), step)):
        (at,) = to_device([np.array(part)], logits_SV.device)
        its_slots, its_indices = [slots[row] for row in part], [indices[row] for row in part]
        tokens_S[at] = _draw(logits_SV.index_select(0, at), its_slots, its_indices)
    _note_(tokens_S, finite_S, slots)
    logprobs = _Logprobs.of(logits_SV, tokens_S, [slot.params.logprobs for slot in slots])
    return Drawing(tokens_S, torch.stack([tokens_S, finite_S]).to("cpu", non_blocking=True), logprobs)


def uniforms(seeds: Sequence[int], indices: Sequence[int]) -> npt.NDArray[np.float64]:
    """The numbers in [0, 1) that decide draws: Philox4x64 of ten rounds (Salmon et al., "Parallel Random Numbers: As
    Easy as 1, 2, 3", 2011) keyed by the seed, its counter index + 1.

    They are those of ``np.random.Generator(np.random.Philox(key=seed, counter=index)).random()``, from a generator
    that is set anew for each, as making one takes longer; seeds are taken modulo 2**64.
    """
    philox, found = np.random.Philox(0), list[float]()
    state: Any = philox.state  # with nothing left of a draw before
    for seed, index in zip(seeds, indices, strict=True):
        state["state"] = {"counter": (index, 0, 0, 0), "key": (seed % 2**64, 0)}
        philox.state = state
        found.append((philox.random_raw() >> 11) * 2.0**-53)
    return np.array(found)


def _draw(logits_DV: torch.Tensor, slots: Sequence[SlotSampling], indices: Sequence[int]) -> torch.Tensor:
    """Draw the tokens of rows, int64 [D]; changes the logits."""
    device, num_tokens = logits_DV.device, logits_DV.shape[-1]
    _penalise_(logits_DV, slots)
    _constrain_(logits_DV, slots, indices)
    wanted = [slot.params for slot in slots]
    likeliest_D = _argmax(logits_DV) if any(p.is_greedy for p in wanted) else None
    if likeliest_D is not None and all(p.is_greedy for p in wanted):
        return likeliest_D

    tops = [p.top_k if p.top_k and 0 < p.top_k < num_tokens else num_tokens for p in wanted]
    rows = zip(wanted, tops, uniforms([slot.seed for slot in slots], indices), strict=True)
    table = [(p.is_greedy, 1.0 if p.is_greedy else p.temperature, top, p.top_p, p.min_p, u) for p, top, u in rows]
    (columns,) = to_device([np.array(table, np.float64).T[:, :, None]], device)
    greedy_D1, temperature_D1, top_k_D1, top_p_D1, min_p_D1, uniform_D1 = columns

    shares_DV = logits_DV.sub_(logits_DV.amax(dim=-1, keepdim=True)).div_(temperature_D1.float()).exp_()
    # The sum of all is below 2**62; the largest weight is 2**44 where V is less than 2**18.
    scale = 2.0 ** (62 - num_tokens.bit_length())
    weights_DV = (shares_DV * scale).long()
    has_top_k, has_top_p = min(tops) < num_tokens, any(p.top_p < 1.0 for p in wanted if p.top_p is not None)
    ids_DC, weights_DC = None, weights_DV
    if has_top_k or has_top_p:
        # A token of less weight lies outside the nucleus: all such tokens together do not reach 1 - top_p.
        total_D1 = weights_DV.sum(dim=-1, keepdim=True)
        least_D1 = ((1.0 - top_p_D1) * (1 - 1e-9) / num_tokens * total_D1).long()
        if has_top_k:
            most = max(top for top in tops if top < num_tokens)
            largest = torch.topk(shares_DV, most).values.gather(1, top_k_D1.long().clamp(max=most) - 1)
            least_D1 = torch.where(top_k_D1 < num_tokens, (largest * scale).long(), least_D1)
        ids_DC, weights_DC = _candidates(weights_DV, least_D1.clamp_(min=1))
    if has_top_p:
        if has_top_k:
            total_D1 = torch.where(top_k_D1 < num_tokens, weights_DC.sum(dim=-1, keepdim=True), total_D1)
        mass_D1 = torch.minimum((top_p_D1 * total_D1).ceil().long().clamp_(min=1), total_D1)
        weights_DC = torch.where(weights_DC >= _threshold(weights_DC, mass_D1), weights_DC, 0)
    if any(p.min_p for p in wanted):
        smallest_D1 = (min_p_D1 * weights_DV.amax(dim=-1, keepdim=True)).long()
        weights_DC = torch.where(weights_DC >= smallest_D1, weights_DC, 0)
    sums_DC = weights_DC.cumsum(dim=-1)
    target_D1 = torch.minimum((uniform_D1 * sums_DC[:, -1:]).long(), sums_DC[:, -1:] - 1)
    drawn_D1 = torch.searchsorted(sums_DC, target_D1, right=True).clamp_(max=sums_DC.shape[-1] - 1)
    drawn_D = (drawn_D1 if ids_DC is None else ids_DC.gather(1, drawn_D1)).squeeze(-1)
    return drawn_D if likeliest_D is None else torch.where(greedy_D1.squeeze(-1) > 0, likeliest_D, drawn_D)


def _candidates(weights_DV: torch.Tensor, least_D1: torch.Tensor) -> tuple[torch.Tensor | None, torch.Tensor]:
    """The tokens of at least that weight: ids and weights in the order of the vocabulary, filled up with weight 0.

    Where they are many, or the device would have to be waited for: None, and the weights of all tokens, 0 for others.
    """
    is_one_DV = weights_DV >= least_D1
    counts = None if weights_DV.is_cuda else np.count_nonzero(is_one_DV.numpy(), axis=-1)
    if counts is None or counts.max() > weights_DV.shape[-1] // 8:
        return None, torch.where(is_one_DV, weights_DV, 0)
    rows, ids = torch.nonzero(is_one_DV, as_tuple=True)
    places = torch.arange(len(rows), device="cpu") - torch.from_numpy(counts.cumsum() - counts)[rows]
    ids_DC = ids.new_zeros(len(weights_DV), max(int(counts.max()), 1)).index_put_((rows, places), ids)
    weights_DC = torch.zeros_like(ids_DC).index_put_((rows, places), weights_DV[rows, ids])
    return ids_DC, weights_DC


def _threshold(weights_DC: torch.Tensor, mass_D1: torch.Tensor) -> torch.Tensor:
    """The largest weight such that the tokens of at least that weight together reach ``mass_D1``; both int64, the mass
    from 1 to the sum of the weights."""
    if weights_DC.is_cuda:
        ordered_DC = weights_DC.sort(dim=-1, descending=True).values
    else:  # by numpy, as torch takes 3 to 8 times as long
        ordered_DC = torch.from_numpy(np.sort(weights_DC.numpy(), axis=-1)).flip(-1)
    return ordered_DC.gather(1, torch.searchsorted(ordered_DC.cumsum(dim=-1), mass_D1))


def _penalise_(logits_DV: torch.Tensor, slots: Sequence[SlotSampling]) -> None:
    """Apply repetition (prompt and output), then frequency and presence (output) penalties in place."""
    rows = [row for row, slot in enumerate(slots) if slot.has_penalties]
    if not rows:
        return
    wanted = [slots[row].params for row in rows]
    table = [(p.repetition_penalty, p.frequency_penalty, p.presence_penalty) for p in wanted]
    columns, at = to_device([np.array(table, np.float32).T[:, :, None], np.array(rows)], logits_DV.device)
    repetition_P1, frequency_P1, presence_P1 = columns
    values_PV, largest = logits_DV[at], torch.finfo(logits_DV.dtype).max
    seen_PV = torch.stack([_history(slots[row], values_PV) for row in rows])
    counts_PV = seen_PV & (_IN_PROMPT - 1)
    scaled_PV = torch.where(values_PV > 0, values_PV / repetition_P1, values_PV * repetition_P1)
    values_PV = torch.where(seen_PV > 0, scaled_PV.clamp_(-largest, largest), values_PV)
    logits_DV[at] = values_PV - torch.where(counts_PV > 0, frequency_P1 * counts_PV + presence_P1, 0.0)


def _constrain_(logits_DV: torch.Tensor, slots: Sequence[SlotSampling], indices: Sequence[int]) -> None:
    """Add ``logit_bias``, and take out ends before ``min_tokens``; then take out what is not allowed."""
    device = logits_DV.device
    biases = [(r, *pair) for r, slot in enumerate(slots) for pair in (slot.params.logit_bias or {}).items()]
    early = [(r, slot) for r, (slot, index) in enumerate(zip(slots, indices, strict=True)) if index < slot.held_until]
    biases += [(r, token, -np.inf) for r, slot in early for token in slot.end_ids]
    if biases:
        *at, values = zip(*biases, strict=True)
        rows, ids, added = to_device([*map(np.array, at), np.array(values, np.float32)], device)
        logits_DV.index_put_((rows, ids), added, accumulate=True)
    allowed = [(r, token) for r, slot in enumerate(slots) for token in slot.params.allowed_token_ids or ()]
    if allowed:
        limited = [r for r, slot in enumerate(slots) if slot.params.allowed_token_ids]
        rows, ids, some = to_device([*np.array(allowed).T, np.array(limited)], device)
        is_out_DV = torch.zeros_like(logits_DV, dtype=torch.bool)
        is_out_DV[some] = True
        is_out_DV[rows, ids] = False
        logits_DV.masked_fill_(is_out_DV, -torch.inf)


def _history(slot: SlotSampling, logits: torch.Tensor) -> torch.Tensor:
    """The slot's tokens so far, counted."""
    if slot.history is None:
        counts = torch.bincount(torch.from_numpy(np.array(slot.output_ids, np.int64)), minlength=logits.shape[-1])
        if slot.prompt_ids is not None:
            counts[slot.prompt_ids.long()] += _IN_PROMPT
        (slot.history,) = to_device([counts.int().numpy()], logits.device)
    return slot.history


def _note_(tokens_S: torch.Tensor, finite_S: torch.Tensor, slots: Sequence[SlotSampling]) -> None:
    """Count the tokens drawn in the histories of requests that have one."""
    histories = {row: slot.history for row, slot in enumerate(slots) if slot.history is not None}
    if histories:
        (at,) = to_device([np.array(list(histories))], tokens_S.device)
        noted = torch.stack(list(histories.values())).scatter_add_(1, tokens_S[at, None], finite_S[at, None].int())
        torch._foreach_copy_(list(histories.values()), list(noted))


class _Logprobs(NamedTuple):
    """Log-probabilities on their way to the host, of the rows that want them."""

    rows: list[tuple[int, int]]  # their index, and how many of the likeliest each wants
    values: torch.Tensor  # float32, of the drawn token and of the likeliest
    ids: torch.Tensor  # int64, of the same tokens, and the rank of the drawn one at the end

    @classmethod
    def of(cls, logits_SV: torch.Tensor, tokens_S: torch.Tensor, wanted: Sequence[int | None]) -> _Logprobs | None:
        """Compute them from the logits as they are; of equal ones that of the lower id comes first."""
        rows = [(row, min(num_top, logits_SV.shape[-1])) for row, num_top in enumerate(wanted) if num_top is not None]
        if not rows:
            return None
        (at,) = to_device([np.array([row for row, _ in rows])], logits_SV.device)
        logits_LV, tokens_L1 = logits_SV[at], tokens_S[at, None]
        logprobs_LV = torch.log_softmax(logits_LV, dim=-1)
        ranks_L1 = (logits_LV > logits_LV.gather(1, tokens_L1)).sum(dim=-1, keepdim=True) + 1
        bits_LV = logits_LV.view(torch.int32)
        order_LV = (bits_LV ^ ((bits_LV >> 31) & 0x7FFFFFFF)).long()  # integers in the order of the floats
        last = logits_SV.shape[-1] - 1
        keys_LV = (order_LV << 31) + torch.arange(last, -1, -1, device=logits_SV.device)
        ids_LN = last - (torch.topk(keys_LV, max(num_top for _, num_top in rows)).values & 0x7FFFFFFF)
        ids = torch.cat([tokens_L1, ids_LN], dim=-1)
        found = logprobs_LV.gather(1, ids), torch.cat([ids, ranks_L1], dim=-1)
        return cls(rows, *(part.to("cpu", non_blocking=True) for part in found))

    def read(self) -> dict[int, tuple[tuple[int, float, int], ...]]:
        """By row: (id, log-probability, rank) of the drawn token, then of the likeliest."""
        found = {}
        told = zip(self.rows, self.values.tolist(), self.ids.tolist(), strict=True)
        for (row, num_top), values, (*ids, rank) in told:
            found[row] = tuple(zip(ids, values, [rank, *range(1, num_top + 1)], strict=False))
        return found
