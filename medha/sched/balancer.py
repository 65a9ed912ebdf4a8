"""Which KV-parallel group a request is bound to, decided at its first chunk and not at its arrival.

Source: the paper's "just-in-time" load balancer, arXiv 2409.17264 v4 section 4.3: the least pending prefill work among
the groups that have the memory. Nothing is counted up and down: the work of each group is summed afresh from the
requests that are bound, so it cannot drift.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

# Context at which a token's attention costs as much as its linear layers, where no predictor says better: a layer takes
# about 4 * D * L operations against 24 * D * D, so L = 6 * D; D = 4096 stands for a model of 8B parameters.
_EVEN_CONTEXT = 24_576


def prefill_work(num_computed_tokens: int, num_prompt_tokens: int) -> float:
    """Work left of a prefill in tokens of short context: the tokens, plus attention over what precedes them."""
    start, end = num_computed_tokens, num_prompt_tokens
    return (end - start) + (end * end - start * start) / (2.0 * _EVEN_CONTEXT)


def pending_work(num_groups: int, prefills: Iterable[tuple[int, int, float]]) -> list[float]:
    """Pending prefill work of each group.

    Args:
        num_groups: KV-parallel groups.
        prefills: (first group, number of groups, work left) of each bound prefill. Groups that share one attend each
            to a part of its context, so the work is split between them.
    """
    work = [0.0] * num_groups
    for first, count, left in prefills:
        for group in range(first, first + count):
            work[group] += left / count
    return work


def choose_group(
    pending: Sequence[float], width: int, firsts: Iterable[int], has_memory: Callable[[int], bool]
) -> int | None:
    """The first group of the run of ``width`` with the least pending work that has the memory; None if none has.

    Args:
        pending: work of each group, from :func:`pending_work`.
        width: number of groups of the run.
        firsts: groups at which it may begin.
        has_memory: whether a run that begins there may take the request.
    """

    def load(first: int) -> tuple[float, float]:
        run = pending[first : first + width]
        return max(run), sum(run)

    for first in sorted(firsts, key=load) if len(pending) > 1 else firsts:
        if has_memory(first):
            return first
    return None
