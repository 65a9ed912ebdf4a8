"""Classical schedulers under the same roof, as the literature describes them.

Each is a packer: it says whose rows come next, first come first served; memory, groups and depth are the same for all.
None looks at the clock, at deadlines or at predicted time. With claims on KV memory none has to preempt: where the
original would recompute or swap, a request waits here.
"""

from __future__ import annotations

from collections.abc import Iterable

from medha.sched.draft import Draft
from medha.sched.queue import Queue, State


def _all(first: int, count: int, most: int) -> int:
    """As many tokens as may be."""
    return most


def _start_waiting(queue: Queue, draft: Draft) -> None:
    """First chunks in order of arrival, until one is refused."""
    while queue.waiting and max(draft.tokens_left) > 0:
        if not draft.add_chunk(next(iter(queue.waiting.values())), _all):
            return


def _continue_started(prefills: Iterable[State], draft: Draft) -> None:
    """Next chunks of prefills that have begun; one that gets no memory waits, those behind it do not."""
    for state in prefills:
        draft.add_chunk(state, _all)


class SarathiPacker:
    """Chunked prefill, "stall free": decodes, then chunks of prefills that have begun, then new ones (Sarathi-Serve,
    arXiv:2403.02310). The batch's tokens are bounded by ``max_batch_tokens``, a chunk's by ``chunk_size``."""

    def fill(self, queue: Queue, draft: Draft, now_s: float) -> None:
        """See :meth:`medha.sched.draft.Packer.fill`."""
        draft.add_decodes()
        _continue_started(list(queue.prefills()), draft)
        _start_waiting(queue, draft)
