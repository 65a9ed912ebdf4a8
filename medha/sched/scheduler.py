"""The scheduler: what runs next, behind four calls: add, cancel, schedule, complete.

What crosses this seam is in :mod:`medha.sched.decision`. The scheduler knows slots and lengths, never token ids; time
is handed in; it decides the same whenever it is called the same. Here is what all schedulers share: the life of a
request and of a batch. A packer decides whose turn it is and how many tokens it gets: the paper's
(:mod:`medha.sched.packer`), a classical one (:mod:`medha.sched.baselines`) or that of CDSP (:mod:`medha.sched.lanes`).
The file is long because admission, completion and cancellation change one state between two batches.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from dataclasses import replace
from itertools import islice

from medha.batch import PIECES, Batch, Row, Shared
from medha.config import CDSP, ParallelConfig, SchedulerConfig
from medha.cost.predictor import Predictor, Work
from medha.cost.prefill_time import SpreadTimes, chunk_rules
from medha.errors import ConfigError, DeadlineError
from medha.sched.baselines import CLASSICAL
from medha.sched.batch_builder import BatchBuilder, Packer
from medha.sched.cdsp import Planner
from medha.sched.decision import Admitted, Decision, Prediction, Results, SchedulerRequest
from medha.sched.lanes import CdspPacker
from medha.sched.memory import KVMemory
from medha.sched.packer import MedhaPacker
from medha.sched.preempt import Preemption
from medha.sched.prefix import Chain
from medha.sched.queue import Queue

_MOST_STALE = 64  # waiting requests that are looked at in one decision, as what is there of them has changed
_MOST_MOVED = 0.02  # of a batch's seconds, in which blocks are swapped: with more it says little of compute


class Scheduler:
    """Decides what runs next, and teaches its predictor from completed batches.

    Args:
        config: which scheduler and policy, budgets and depth.
        planner: of the cdsp scheduler alone, which needs it.
        num_blocks, block_size, num_groups: as of :class:`medha.sched.memory.KVMemory`.
        predictor: of the slowest stage of a group.
        max_prompt_tokens: longest prompt whose time is predicted apart.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        planner: Planner | None = None,
        /,
        *,
        predictor: Predictor,
        num_blocks: int,
        block_size: int,
        num_groups: int = 1,
        max_prompt_tokens: int = 10_000_000,
    ) -> None:
        self.config = config
        self.depth = config.num_in_flight
        self.planner = planner
        self.predictor = predictor
        pool = {"num_blocks": num_blocks, "block_size": block_size, "num_groups": num_groups}
        self.sizes = pool | {"max_prompt_tokens": max_prompt_tokens}  # it was made with, beside config and predictor
        self.memory = KVMemory(config, **pool, prefix_cost_s=self._block_s)
        if config.scheduler == CDSP:
            assert planner is not None, "the cdsp scheduler needs a planner"
            if config.max_num_seqs < num_groups:  # each started request has a group of its own
                what = f"max_num_seqs={config.max_num_seqs} with scheduler='cdsp'"
                raise ConfigError(f"{what}; accepted: {num_groups} at least")
            self.packer: Packer = CdspPacker(config, planner, self.memory, predictor)
            self.depth = num_groups  # one batch on each lane at most
            self.memory.max_span = planner.times.sizes[-1]
        elif config.scheduler != "medha":
            self.packer = Packer(CLASSICAL[config.scheduler])
        else:
            self.packer = MedhaPacker(config, predictor, self.depth)
        if config.scheduler != CDSP and self.memory.max_kv_per_group == num_blocks * block_size:
            self.memory.spread_kv = spread_kv(config, predictor, max_prompt_tokens, **pool)
        times = SpreadTimes(config, predictor, max_tokens=max_prompt_tokens, most_kv=self.memory.max_kv_per_group)
        self.memory.deal_pays = times.pays if config.ring else None
        self._queue = Queue(config, times)
        self._in_flight: deque[tuple[Batch, Prediction | None]] = deque()
        self._preemption = Preemption(self._queue, self.memory, predictor)
        self._next_batch_id = 0

    def fresh(self) -> Scheduler:
        """A scheduler of the same configuration that knows no request; what the predictor has learned stays."""
        return Scheduler(self.config, self.planner, predictor=self.predictor, **self.sizes)

    @property
    def num_waiting(self) -> int:
        """Requests that have not started."""
        return len(self._queue.waiting)

    @property
    def num_running(self) -> int:
        """Requests started and not yet closed."""
        return len(self._queue.running)

    @property
    def in_flight(self) -> tuple[Batch, ...]:
        """Batches scheduled and not yet complete, oldest first."""
        return tuple(batch for batch, _ in self._in_flight)

    def knows(self, slot: int) -> bool:
        """Whether a slot's request is not closed."""
        return slot in self._queue

    def longest_s(self) -> float:
        """Seconds that the longest batch in flight is predicted to take, 0 where none is; any thread may ask.

        Where the packer predicts nothing it counts as long as its rows take one after the other, in chunks.
        """
        left_s, longest_s = self._queue.left_s, 0.0
        for batch, sent in list(self._in_flight):
            seconds = sum(left_s(row.position, row.kv_len) for row in batch.rows) if sent is None else sent.seconds
            longest_s = max(longest_s, seconds)
        return longest_s

    def add(self, request: SchedulerRequest, now_s: float | None = None) -> Admitted:
        """Queue a request; the option ``admission`` judges its objectives at ``now_s``, None does not.

        A TPOT objective that could not be met alone is dropped, unless ``admission`` refuses the request.

        Raises:
            DeadlineError: it cannot meet one of its objectives, and ``admission`` is ``refuse``.
            ValueError: its reservation exceeds the pools, or its slot is in use.
        """
        if request.slot in self._queue:
            raise ValueError(f"slot {request.slot} is in use")
        if request.num_kv_tokens > (most := self.memory.max_request_tokens):
            raise ValueError(f"{request}: needs {request.num_kv_tokens} KV tokens, at most {most} fit")
        if self.planner is not None and (request.max_new_tokens > 1 or request.prefix):
            raise ValueError(f"{request}; accepted with scheduler='cdsp': one new token, and no prefix ids")
        prefix = self.memory.prefix
        hit = prefix.longest(Chain(request.prefix), request.num_prompt_tokens - 1)
        num_cached = hit.num_tokens(prefix.block_size)
        predicted_s = None if now_s is None else self._late_ttft_s(request, now_s, num_cached)
        alone_tpot_s = self._late_tpot_s(request)
        if predicted_s is not None:
            if self.config.admission == "refuse":
                what = "its first token is predicted {:.3f} s after its arrival even if it runs next"
                refusal = _refusal("ttft_s", request, predicted_s, what)
                if self.prefill_left_s(num_cached, request.num_prompt_tokens) <= refusal.value:
                    refusal.wait_s = predicted_s - refusal.value
                raise refusal
            request = replace(request, is_relegated=True)
        if request.slo is not None and (alone_tpot_s is not None or request.max_new_tokens == 1):
            if alone_tpot_s is not None and now_s is not None and self.config.admission == "refuse":
                raise _refusal("tpot_s", request, alone_tpot_s, "a token is predicted to take {:.4f} s even alone")
            request = replace(request, slo=replace(request.slo, tpot_s=None))
        deadline_s = self._queue.add(request, self.predictor.factor("prefill"), num_cached).deadline_s
        self._queue.look_again(self._queue.waiting[request.slot], prefix)
        self.packer.added(request)
        slack_s = self._slack_s(request.slot, request.arrival_s)
        return Admitted(deadline_s, slack_s, request.is_relegated, alone_tpot_s)

    def _late_ttft_s(self, request: SchedulerRequest, now_s: float, num_cached: int) -> float | None:
        """Predicted TTFT of a request that ``config.admission`` turns away; None where it may be in time.

        That is if it ran next: the wait so far, the batches in flight, its prefill alone.
        """
        objective_s = None if request.slo is None else request.slo.ttft_s
        if objective_s is None or self.config.admission == "all":
            return None
        in_flight_s = sum(prediction.seconds for _, prediction in self._in_flight if prediction is not None)
        alone_s = self.prefill_left_s(num_cached, request.num_prompt_tokens)
        if self._is_probe:
            alone_s = min(alone_s, self.prefill_left_s(num_cached, request.num_prompt_tokens, corrected=False))
        predicted_s = max(now_s - request.arrival_s, 0.0) + in_flight_s + alone_s
        return predicted_s if predicted_s > objective_s else None

    @property
    def _is_probe(self) -> bool:
        """Whether a request is judged by what was predicted before anything ran, too: if what was learned, as in a slow
        minute, had all refused, nothing would run and be learned any more."""
        return self.config.admission == "refuse" and not (self.num_running or self.num_waiting)

    def prefill_left_s(self, num_computed: int, num_prompt: int, *, corrected: bool = True) -> float:
        """Predicted seconds to read the rest of a prompt beside the present decodes, if nobody else's is read;
        ``corrected`` by what running has taught, or not. Any thread may ask."""
        left_s = self._queue.left_s(num_computed, num_prompt) * self._queue.stretch
        return left_s * self._factor() if corrected else left_s

    def ahead_s(self, slot: int) -> float:
        """Predicted seconds to read the prompts of which less is left to schedule than of that of a slot, and half of
        those with as much. Any thread may ask."""
        lefts, slots = self._queue.column("work_left_s").copy(), self._queue.column("slot")
        own_s = lefts[(slots[: lefts.size] == slot).nonzero()].sum()  # rows come and go meanwhile
        others_s = lefts[lefts < own_s].sum() + max(lefts[lefts == own_s].sum() - own_s, 0.0) / 2
        return float(others_s) * self._queue.stretch * self._factor()

    def _factor(self) -> float:
        """The present correction of a prefill's predicted seconds."""
        return self.predictor.factor("mixed" if self._queue.decoding else "prefill")

    def num_there(self, slot: int) -> int:
        """Tokens of a request that it need not compute when it starts; 0 of one that does not wait. Any thread may
        ask."""
        state = self._queue.waiting.get(slot)
        return 0 if state is None else state.num_scheduled_tokens

    def _late_tpot_s(self, request: SchedulerRequest) -> float | None:
        """Predicted seconds a token of a request whose TPOT objective is shorter even if it decodes alone; else None.

        No batch is small enough for it: to keep to it would hold up every prefill, and gain nothing. What decodes
        elsewhere, or not at all, is not judged here.
        """
        objective_s = None if request.slo is None else request.slo.tpot_s
        if objective_s is None or request.max_new_tokens == 1:
            return None
        kv = min(request.num_prompt_tokens, self.memory.spread_kv)
        alone_s = self.config.period * self.predictor.predict([Work(1, kv, is_decode=True)])
        alone_s /= max(1.0, self.predictor.factor("decode")) if self._is_probe else 1.0
        return alone_s if alone_s > objective_s else None

    def _slack_s(self, slot: int, now_s: float) -> float:
        """Seconds for which a request can still wait and have its first token in time; inf without a deadline."""
        state = self._queue.waiting.get(slot) or self._queue.running[slot]
        left_s = self._queue.work_s(state, self._factor())[1] if state.prefilling and not state.ended else 0.0
        return float(state.request.arrival_s + state.deadline_s - now_s - left_s)

    def cancel(self, slot: int) -> tuple[int, ...]:
        """Stop scheduling a request at once; no-op for a slot that is not in use.

        Returns the slots closed by that: while chunks of it are in flight none, the ``complete`` of the last closes it.
        """
        state = self._queue.waiting.get(slot) or self._queue.running.get(slot)
        if state is None or state.ended:
            return ()
        self._queue.end(state)
        self.packer.cancelled(slot)
        if not state.has_started:
            self._queue.drop(slot)
            self.memory.forget_swapped(slot)
            self.memory.prefix.forget(slot)
            return (slot,)
        return self._close_ended()

    # -- hand-over to a decode instance, which has a scheduler of its own --------------------------------------------

    def keep(self, slot: int) -> None:
        """What a request has computed stays where it is until :meth:`let_go`: nothing more of it is scheduled, it gives
        way to nobody, and it is not closed."""
        self._queue.running[slot].num_in_flight += 1
        self._queue.decoding.pop(slot, None)

    def let_go(self, slot: int) -> tuple[int, ...]:
        """A kept request has been handed over, or will not be: it ends here. Returns the slots closed by that."""
        state = self._queue.running[slot]
        state.num_in_flight -= 1
        if not state.ended:
            self._queue.end(state)
        return self._close_ended()

    def has_room(self, request: SchedulerRequest, num_coming: int = 0) -> bool:
        """Whether the whole claim of a request is there, beside those that run and so many that come."""
        fits = request.num_kv_tokens <= self.memory.max_request_tokens
        if not fits or self.num_running + num_coming >= self.config.max_num_seqs:
            return False
        self.memory.start(request.slot, 0, request.num_kv_tokens)
        has_room = self.memory.can_take(Row(request.slot, 0, request.num_prompt_tokens, False, True))
        self.memory.undo_start(request.slot)
        return has_room

    def receive(self, request: SchedulerRequest) -> Batch:
        """Set the whole claim of a request aside, whose prompt others have computed. The batch has no rows: it says
        which blocks take the keys and values."""
        self.memory.start(request.slot, 0, request.num_kv_tokens)
        self.memory.take(Row(request.slot, 0, request.num_prompt_tokens, False, True))
        self.memory.shared.append(Shared(request.slot, 0, 0, request.num_prompt_tokens))
        batch = self.memory.batch(self._next_batch_id)
        self._next_batch_id += 1
        return batch

    def arrived(self, request: SchedulerRequest, *, wanted: bool) -> None:
        """The keys and values of a request are here; unless it has ended meanwhile it decodes."""
        if wanted:
            self._queue.arrived(request)
        else:
            self.memory.release(request.slot)

    def extend(self, slot: int, ids: bytes) -> None:
        """The output of a request has filled further units, which have these ids."""
        state = self._queue.running.get(slot) or self._queue.waiting.get(slot)
        if state is not None and state.chain is not None:
            state.chain.extend(ids)
            if state.has_started:
                self.memory.note(slot, state.num_scheduled_tokens)

    def reset_prefix_cache(self) -> None:
        """Forget what is kept of requests that have ended, and let nobody share what is computed by now."""
        self.memory.forget_prefixes()
        swapped = (s for s in self._queue.waiting.values() if self.memory.swapped_on(s.slot) is not None)
        for state in (*swapped, *self._queue.running.values()):  # what is swapped back in is of before
            state.chain = None

    def _block_s(self, depth: int) -> float:
        """Predicted seconds to compute a block with so many before it."""
        size = self.memory.block_size
        return self._queue.times((depth + 1) * size).span_s(depth * size, (depth + 1) * size)

    def schedule(self, now_s: float) -> Decision:
        """Decide the next batch; there is none where nothing can enter, or ``depth`` batches are in flight."""
        if len(self._in_flight) >= self.depth:
            return Decision()
        for slot in list(islice(self.memory.prefix.stale, _MOST_STALE)):
            self._queue.look_again(self._queue.waiting[slot], self.memory.prefix)
        batch_id, is_idle = self._next_batch_id, not self._in_flight
        builder = BatchBuilder(self.config, self._preemption, batch_id=batch_id, now_s=now_s, is_idle=is_idle)
        prediction = self.packer.fill(self._queue, builder)
        preempted, refused = tuple(self._preemption.preempted), tuple(builder.refused)
        self._preemption.preempted.clear()
        if not builder.rows:
            return Decision(preempted=preempted, refused=refused)
        for slot in builder.chunked:
            self.memory.note(slot, self._queue.running[slot].num_scheduled_tokens)
        batch = self.memory.batch(batch_id, builder.rows)
        self._next_batch_id += 1
        self._in_flight.append((batch, prediction))
        slack_s = tuple([self._slack_s(slot, now_s) for slot in builder.chunked])
        return Decision(batch, prediction, preempted, refused, slack_s)

    def complete(self, batch: Batch, now_s: float, results: Results, busy_s: float) -> tuple[int, ...]:
        """Record that a batch, the oldest in flight of its groups, is done in every stage.

        Args:
            batch: which.
            now_s: time.
            results: (slot, number of new tokens, finished) of the rows that sampled.
            busy_s: seconds the slowest group computed, waits excluded.

        Returns:
            Slots closed by this call: their blocks are free and the slot numbers may be used again.
        """
        prediction = self._take_in_flight(batch)
        if prediction is not None and prediction.moved_s <= _MOST_MOVED * prediction.seconds:
            self.predictor.observe(prediction.kind, prediction.seconds, busy_s, factor=prediction.factor)
        self.packer.completed(batch)
        self._queue.computed(batch.rows)
        running, foresees = self._queue.running, self._queue.foresees
        for slot, num_new_tokens, finished in results:
            if not foresees:  # else it was counted when the row was sent
                running[slot].num_known_tokens += num_new_tokens
            if finished:
                self._queue.end(running[slot])
        return self._close_ended()

    def _take_in_flight(self, batch: Batch) -> Prediction | None:
        """Take a batch out of those in flight; returns its prediction."""
        for index, (older, prediction) in enumerate(self._in_flight):
            if older.batch_id == batch.batch_id:
                del self._in_flight[index]
                return prediction
            if batch.groups & older.groups:
                raise ValueError(f"batch {batch.batch_id} completed, but the oldest of its groups is {older.batch_id}")
        raise ValueError(f"batch {batch.batch_id} completed, but it is not in flight")

    def _close_ended(self) -> tuple[int, ...]:
        """Free the ended requests that have nothing in flight."""
        closed = tuple([slot for slot in sorted(self._queue.ending) if not self._queue.running[slot].num_in_flight])
        for slot in closed:
            self._queue.drop(slot)
            self.memory.release(slot)
        return closed


def _refusal(name: str, request: SchedulerRequest, predicted_s: float, what: str) -> DeadlineError:
    """The error of a request that cannot meet an objective, the field of a name."""
    objective_s = getattr(request.slo, name)
    facts = {"predicted_s": predicted_s, "objective_s": objective_s, "param": f"slo.{name}", "value": objective_s}
    accepted = "a longer one, or admission='all' or 'relegate'"
    return DeadlineError(f"slo.{name}={objective_s}: {what.format(predicted_s)}; accepted: {accepted}", **facts)


def spread_kv(
    config: SchedulerConfig, predictor: Predictor, longest: int, *, num_blocks: int, block_size: int, num_groups: int
) -> int:
    """Tokens of a request on one group, in whole blocks, beyond which it is rather spread: as many as an efficient
    chunk fills a batch's time with, at least an even share of the longest, at most the pool.

    With more on one group no efficient chunk fits (v5 section 3.3), at factor 1 and with the merge of two groups.
    """
    pool = num_blocks * block_size
    if num_groups == 1:
        return pool
    (budget_s, _), least = chunk_rules(config, predictor), min(config.min_chunk, predictor.max_tokens)
    tick = predictor.uncorrected().tick()
    efficient = bisect_right(range(pool + 1), budget_s, key=lambda kv: tick.with_chunk(least, kv, run=(0, 1))) - 1
    return min(pool, -(-max(efficient, -(-longest // num_groups)) // block_size) * block_size)


def complete_config(
    config: SchedulerConfig,
    predictor: Predictor,
    parallel: ParallelConfig,
    *,
    longest: int,
    num_blocks: int,
    block_size: int,
) -> SchedulerConfig:
    """The configuration with what was left open: depth, and tokens of a request on one group.

    Depth: one batch more than there are stages where there are several, so that no stage waits for the control plane.
    Tokens on a group: the pool, with a ring :func:`spread_kv`.

    ``longest`` is the tokens of the longest request, ``num_blocks`` and ``block_size`` are of each group's pool.
    """
    config.check_layout(parallel)
    least = PIECES * parallel.kvp
    if config.ring and config.chunk_size is not None and config.chunk_size < least:
        what = f"chunk_size={config.chunk_size} with ring on {parallel.kvp} groups"
        raise ConfigError(f"{what}; accepted: {least} at least")
    depth = config.depth or (parallel.spp + 1 if parallel.spp > 1 else config.num_in_flight)
    most = config.max_kv_per_group
    if most is None:
        most, sizes = num_blocks * block_size, {"num_blocks": num_blocks, "block_size": block_size}
        if config.ring:  # else :class:`BatchBuilder` spreads a request where that pays
            most = spread_kv(config, predictor, longest, num_groups=parallel.kvp, **sizes)
    return replace(config, depth=None if config.scheduler == CDSP else depth, max_kv_per_group=most)
