"""Classical schedulers, as the literature describes them, as packers: each says whose rows come next.

Memory, groups and depth are the same for all; none looks at predicted time. With reservations of KV memory none has to
preempt: where the original would recompute or swap, a request waits here, unless ``overcommit`` is set.

==============  ==========================================================================
static          a batch starts together, and nobody joins until all of it has ended
orca            iteration level, whole prompts (Orca, OSDI 2022)
sarathi         iteration level, prompts in chunks (Sarathi-Serve, arXiv:2403.02310)
vllm            as sarathi, but who started first goes first, be it decode or chunk (vLLM V1)
token-budget    as sarathi, with a budget of tokens that follows a moving average of time
==============  ==========================================================================
"""

from __future__ import annotations

import math

from medha.batch import Batch
from medha.config import SchedulerConfig
from medha.sched.batch_builder import BatchBuilder, Packer, SizeFn
from medha.sched.policy import SHORTEST_S, sort_rows
from medha.sched.queue import Queue, State


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


class StaticPacker(Packer):
    """Up to ``max_num_seqs`` requests start in one batch with their whole prompts, whatever ``max_batch_tokens``, and
    the next ones once all of these have ended."""

    def fill(self, queue: Queue, builder: BatchBuilder) -> None:
        if not queue.running:
            _start_waiting(queue, builder, is_whole=True)
            return
        builder.add_decodes()
        _continue_started(queue, builder, is_whole=True)  # cut at the end of a shard, or refused memory


class OrcaPacker(Packer):
    """Decodes, and whole prompts beside them, first come first served (Orca, OSDI 2022). The batch's tokens bound how
    many prompts it takes, but cut none: the first goes whole whatever its length."""

    def fill(self, queue: Queue, builder: BatchBuilder) -> None:

        def if_it_fits(first: int, count: int, most: int) -> int:
            groups = range(first, first + count)
            is_first = not any(builder.has_chunk[group] for group in groups)
            return most if is_first or all(builder.tokens_left[group] >= most for group in groups) else 0

        builder.add_decodes()
        _continue_started(queue, builder, if_it_fits, is_whole=True)  # cut at the end of a shard, or refused memory
        _start_waiting(queue, builder, if_it_fits, is_whole=True)


class SarathiPacker(Packer):
    """Decodes, then chunks of prefills that have begun, then new ones (Sarathi-Serve, arXiv:2403.02310), bounded by
    ``max_batch_tokens`` and ``chunk_size``."""

    def fill(self, queue: Queue, builder: BatchBuilder) -> None:
        builder.add_decodes()
        _continue_started(queue, builder)
        _start_waiting(queue, builder)


class VllmPacker(Packer):
    """What has started, in the order in which it started, decodes and chunks from one budget of ``max_batch_tokens``;
    then what waits, in order of arrival (vLLM V1). ``chunk_size`` is ``long_prefill_token_threshold`` there."""

    def fill(self, queue: Queue, builder: BatchBuilder) -> None:
        due = {state.slot for state in builder.due_decodes()}
        for state in list(queue.running.values()):
            if state.slot in due:
                builder.add_decode(state)
            elif state.has_started and state.prefilling and not state.ended:
                builder.add_chunk(state, _all)
        _start_waiting(queue, builder)
        builder.put_decodes_first()


_ALIGNMENT = 64
_FIRST_BUDGET = 256
_GAIN = 0.1
_TARGET_S = 0.25  # where nothing predicts what a batch takes


class TokenBudgetPacker(Packer):
    """A budget of prefill tokens that adapts to a target for the step's time; prefills by class, then deadline.

    ``target / (moving average of seconds a token)``, less the decodes, down to a multiple of 64: the scheme of the
    posts on iteration-level scheduling, with their constants (gain 0.1, 256 tokens before the first step). The target
    is ``t_target_s``, ``quantum_s`` or 0.25 s. Departures, as the published code stops there: a chunk that ends its
    prompt, or is all that a bound leaves, need be no multiple of 64; the budget is 64 at least; the average begins at
    the first step seen, and not at 0.
    """

    learns = True

    def __init__(self, config: SchedulerConfig) -> None:
        self.token_s: float | None = None  # seconds a token, averaged; None before the first step
        self._target_s = config.t_target_s or config.quantum_s or _TARGET_S
        self._max_tokens = config.max_batch_tokens

    def fill(self, queue: Queue, builder: BatchBuilder) -> None:
        builder.add_decodes()
        budgets, admits = [self.budget(self._max_tokens - left) for left in builder.tokens_left], True
        columns = queue.columns(1.0)
        by = (columns.priority, columns.arrival_s + columns.deadline_s, columns.arrival_s, queue.column("slot"))
        for state in queue.states_of_rows(sort_rows(by)):
            if max(budgets) <= 0:
                return
            if (admits or state.has_started) and not _give_aligned(state, builder, budgets):
                admits &= state.has_started  # nobody overtakes one that could not start

    def budget(self, num_decodes: int) -> int:
        """Prefill tokens of a batch with so many decodes."""
        if self.token_s is None:
            return _FIRST_BUDGET
        total = int(min(self._target_s / self.token_s, self._max_tokens))
        return max((total - num_decodes) // _ALIGNMENT, 1) * _ALIGNMENT

    def completed(self, batch: Batch, busy_s: float) -> None:
        """Average; times that are no positive number teach nothing."""
        if not 0 < busy_s < math.inf:
            return
        busiest = max(sum(row.q_len for row in batch.rows if row.concerns(group)) for group in batch.groups)
        token_s = max(busy_s / busiest, SHORTEST_S)
        self.token_s = token_s if self.token_s is None else (1 - _GAIN) * self.token_s + _GAIN * token_s


def _give_aligned(state: State, builder: BatchBuilder, budgets: list[int]) -> int:
    """A chunk within the budgets of its groups, which are lessened; its tokens, 0 if it was refused."""

    def aligned(first: int, count: int, most: int) -> int:
        tokens = min(most, *budgets[first : first + count])
        if tokens == state.num_left:
            return tokens
        return tokens // _ALIGNMENT * _ALIGNMENT or (tokens if tokens == most else 0)

    q_len = builder.add_chunk(state, aligned)
    if q_len:
        row = builder.rows[builder.chunked[state.slot]]
        for group in row.groups:
            budgets[group] -= q_len
    return q_len


_PACKERS = {"static": StaticPacker, "orca": OrcaPacker, "sarathi": SarathiPacker, "vllm": VllmPacker}


def classical_packer(config: SchedulerConfig) -> Packer:
    """The packer of ``config.scheduler``, which is a classical one."""
    return TokenBudgetPacker(config) if config.scheduler == "token-budget" else _PACKERS[config.scheduler]()
