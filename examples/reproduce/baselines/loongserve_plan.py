"""Who is prefilled next, in which batches and on how many instances: the decisions of LoongServe's manager.

Source: LoongServe (Wu et al., arXiv:2404.09526), its dispatching and its batching, as its published code does them.
Both look at times of the manager's fit, :meth:`EspCosts.estimate_s`, and change nothing.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from examples.reproduce.baselines.loongserve_cost import EspCosts

MAX_PREFILL_S = 5.0
"""Prefills of several requests are not made longer: ``max_prefill_time`` in the authors' runs."""


class Pending(NamedTuple):
    """A request that waits.

    Attributes:
        row: of the trace.
        prompt_tokens: to prefill.
        claim_tokens: cached by the time it ends.
    """

    row: int
    prompt_tokens: int
    claim_tokens: int


class Total(NamedTuple):
    """Requests added up: prompt tokens, their squares, claims, and one over each prompt's tokens."""

    tokens: int = 0
    squares: int = 0
    claims: int = 0
    rate: float = 0.0

    def plus(self, *requests: Pending) -> Total:
        """With more of them."""
        tokens, squares, claims, rate = self
        for _, prompt, claim in requests:
            tokens, squares, claims, rate = tokens + prompt, squares + prompt**2, claims + claim, rate + 1 / prompt
        return Total(tokens, squares, claims, rate)


@dataclass(frozen=True, slots=True)
class Situation:
    """What dispatching looks at.

    Attributes:
        num_instances: that run no prefill.
        most_idle: of them, how many could be idle if all cached tokens moved together.
        idle_prompt_tokens, prompt_tokens: the largest prefill on those, and on all.
        claim_tokens: for which nobody has a claim yet.
        decode_left_s: until the decodes are expected to have ended.
        decode_rate: of all decodes, the sum of one over tokens produced.
    """

    num_instances: int
    most_idle: int
    idle_prompt_tokens: float
    prompt_tokens: float
    claim_tokens: int
    decode_left_s: float
    decode_rate: float


class Planned(NamedTuple):
    """A batch of neighbours among the sorted requests, on neighbours among the sorted instances."""

    requests: slice
    instances: slice


def select(costs: EspCosts, queue: Sequence[Pending], now: Situation, *, may_pass: bool) -> list[int]:
    """Dispatching: first come, first served, while memory lasts and a larger prefill still helps.

    A request goes at once where those instances suffice that decodes can leave, that is where it would lose no more by
    not having all of them than by waiting for the decodes to end. Others go where stopping all decodes for the
    prefill costs less per token than waiting costs.

    Args:
        costs: of the system.
        queue: in order of arrival.
        now: the situation.
        may_pass: requests may go before one that cannot.

    Returns:
        Places in the queue, ascending.
    """
    going, unsure, num_sure = list[int](), list[int](), 0
    total, unsure_total = Total(), Total()
    for place, one in enumerate(queue):
        more = total.plus(one)
        fits = more.claims <= now.claim_tokens and more.tokens <= min(now.prompt_tokens, now.idle_prompt_tokens)
        if fits and (may_pass or not unsure):
            idle_s = costs.estimate_s(now.most_idle, more.tokens, more.squares)
            lost_s = idle_s - costs.estimate_s(now.num_instances, more.tokens, more.squares)
            if lost_s <= now.decode_left_s and (not going or idle_s <= MAX_PREFILL_S):
                going.append(place)
                total = more
                if idle_s > MAX_PREFILL_S:
                    break
                continue
        later = unsure_total.plus(one)
        tokens, claims = total.tokens + later.tokens, total.claims + later.claims
        if tokens <= now.prompt_tokens and claims <= now.claim_tokens:
            unsure.append(place)
            unsure_total = later
            all_s = costs.estimate_s(now.num_instances, tokens, total.squares + later.squares)
            is_short = len(going) + len(unsure) == 1 or all_s <= MAX_PREFILL_S
            if is_short and all_s * now.decode_rate <= now.decode_left_s * later.rate:
                num_sure = len(unsure)
        elif not may_pass:
            break
    return sorted(going + unsure[:num_sure])


def fill(
    costs: EspCosts, queue: Sequence[Pending], used: Sequence[int], *, left_s: float, claim_tokens: int
) -> list[int]:
    """Places of requests that idle instances can prefill before other prefills end.

    Args:
        costs: of the system.
        queue: in order of arrival.
        used: cached tokens of the idle instances, at least one.
        left_s: seconds until then.
        claim_tokens: for which nobody has a claim yet.
    """
    going, total, most = list[int](), Total(), costs.most_tokens(used)
    for place, one in enumerate(queue):
        more = total.plus(one)
        fits = more.tokens <= most and more.claims <= claim_tokens
        if fits and costs.estimate_s(len(used), more.tokens, more.squares) <= left_s:
            going.append(place)
            total = more
    return going


def plan_batches(costs: EspCosts, prompt_tokens: Sequence[int], used: Sequence[int]) -> list[Planned] | None:
    """Batching: the batches that make the sum of seconds per prompt token least, by dynamic programming.

    Batches are runs of the requests, and get runs of the instances, in the order given; the last instances may be left.

    Args:
        costs: of the system.
        prompt_tokens: longest first.
        used: cached tokens of the instances, emptiest first.

    Returns:
        Batches, or None where the instances have no room.
    """
    num_requests, num_instances = len(prompt_tokens), len(used)
    lengths = np.asarray(prompt_tokens, dtype=np.float64)
    sums = np.zeros((3, num_requests + 1))
    sums[:, 1:] = np.cumsum([lengths, lengths**2, 1 / lengths], axis=1)
    tokens, squares, rates = (total[None, :] - total[:, None] for total in sums)
    before = np.tril(np.full(tokens.shape, math.inf))  # a batch ends after it begins
    alpha, beta, gamma = costs.fit.T[:, :, None, None]
    seconds = (alpha + beta * tokens + gamma * squares) * rates + before  # [degree, first request, last one]
    best = np.full((num_instances + 1, num_requests + 1), math.inf)
    best[0, 0] = 0.0
    came_from: dict[tuple[int, int], tuple[int, int]] = {}
    for end in range(1, num_instances + 1):
        for degree in range(1, end + 1):
            most = costs.most_tokens(used[end - degree : end])
            ways = np.where(tokens <= most, best[end - degree][:, None] + seconds[degree], math.inf)
            first = ways.argmin(axis=0)
            value = ways[first, np.arange(num_requests + 1)]
            for request in np.flatnonzero(value < best[end]).tolist():
                came_from[end, request] = (end - degree, int(first[request]))
            best[end] = np.minimum(best[end], value)
    end, request = int(best[:, num_requests].argmin()), num_requests
    if not math.isfinite(best[end, request]):
        return None
    plan = []
    while request:
        previous, first_request = came_from[end, request]
        plan.append(Planned(slice(first_request, request), slice(previous, end)))
        end, request = previous, first_request
    return plan[::-1]
