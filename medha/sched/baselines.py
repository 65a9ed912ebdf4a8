"""Classical schedulers, as the literature describes them, as functions: each says whose rows come next.

Memory, groups and depth are the same for all; none looks at predicted time. With reservations of KV memory none has to
preempt: where the original would recompute or swap, a request waits here, unless ``overcommit`` is set.

==============  ==========================================================================
static          a batch starts together, and nobody joins until all of it has ended
orca            iteration level, whole prompts (Orca, OSDI 2022)
sarathi         iteration level, prompts in chunks (Sarathi-Serve, arXiv:2403.02310)
vllm            as sarathi, but who started first goes first, be it decode or chunk (vLLM V1)
==============  ==========================================================================
"""

from __future__ import annotations

from medha.sched.batch_builder import BatchBuilder, Fill, SizeFn
from medha.sched.queue import Queue


def _all(first: int, count: int, most: int) -> int:
    """As many tokens as may be."""
    return most


def _start_waiting(queue: Queue, builder: BatchBuilder, size: SizeFn = _all, *, is_whole: bool = False) -> None:
    """First chunks in order of arrival, until one is refused."""
    while queue.waiting and builder.add_chunk(next(iter(queue.waiting.values())), size, is_whole=is_whole):
        pass


def _continue_started(queue: Queue, builder: BatchBuilder, size: SizeFn = _all, *, is_whole: bool = False) -> None:
    """Next chunks of prefills that have begun; one that gets no memory waits, those behind it do not."""
    for state in list(queue.prefills()):
        if state.has_started:  # it may have been preempted for one before it
            builder.add_chunk(state, size, is_whole=is_whole)


def _static(queue: Queue, builder: BatchBuilder) -> None:
    """Up to ``max_num_seqs`` requests start in one batch with their whole prompts, whatever ``max_batch_tokens``, and
    the next ones once all of these have ended."""
    if not queue.running:
        _start_waiting(queue, builder, is_whole=True)
        return
    builder.add_decodes()
    _continue_started(queue, builder, is_whole=True)  # cut at the end of a shard, or refused memory


def _orca(queue: Queue, builder: BatchBuilder) -> None:
    """Decodes, and whole prompts beside them, first come first served (Orca, OSDI 2022). The batch's tokens bound how
    many prompts it takes, but cut none: the first goes whole whatever its length."""

    def if_it_fits(first: int, count: int, most: int) -> int:
        groups = range(first, first + count)
        is_first = not any(builder.has_chunk[group] for group in groups)
        return most if is_first or all(builder.tokens_left[group] >= most for group in groups) else 0

    _sarathi(queue, builder, if_it_fits, is_whole=True)  # some have begun: cut at the end of a shard, or refused memory


def _sarathi(queue: Queue, builder: BatchBuilder, size: SizeFn = _all, *, is_whole: bool = False) -> None:
    """Decodes, then chunks of prefills that have begun, then new ones (Sarathi-Serve, arXiv:2403.02310), bounded by
    ``max_batch_tokens`` and ``chunk_size``."""
    builder.add_decodes()
    _continue_started(queue, builder, size, is_whole=is_whole)
    _start_waiting(queue, builder, size, is_whole=is_whole)


def _vllm(queue: Queue, builder: BatchBuilder) -> None:
    """What has started, in the order in which it started, decodes and chunks from one budget of ``max_batch_tokens``;
    then what waits, in order of arrival (vLLM V1). ``chunk_size`` is ``long_prefill_token_threshold`` there."""
    due = {state.slot for state in builder.due_decodes()}
    for state in list(queue.running.values()):
        if state.slot in due:
            builder.add_decode(state)
        elif state.has_started and state.prefilling and not state.ended:
            builder.add_chunk(state, _all)
    _start_waiting(queue, builder)
    builder.put_decodes_first()


CLASSICAL: dict[str, Fill] = {"static": _static, "orca": _orca, "sarathi": _sarathi, "vllm": _vllm}
"""How each classical scheduler fills a batch."""
