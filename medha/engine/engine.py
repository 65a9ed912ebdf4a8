"""The loop: requests in, batches through scheduler and runner, outputs back.

:class:`Engine` is for those who drive the loop themselves (``add_request``, ``abort``, ``step``);
:class:`medha.LLM` wraps it. What a request must satisfy is in :mod:`medha.engine.admission`, when it ends in
:mod:`medha.engine.request`; the scheduler decides what runs; the runner computes. A step is: fill the
pipeline to its depth, then complete the oldest batch; with lanes, any that is done and the oldest of its groups.

The file is longer than most because every call that a user or a front end may make stands here with its documentation.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import wraps
from typing import Concatenate, NamedTuple, ParamSpec, TextIO, TypeVar

from medha.batch import Batch
from medha.engine.admission import Prompt, check_type, prepare_request
from medha.engine.decode import HandOvers
from medha.engine.explain import Explainer, LaneExplainer
from medha.engine.journal import Journal
from medha.engine.prefix import PrefixIds
from medha.engine.request import Completion, ModelLimits, Request
from medha.errors import ConfigError, EngineDeadError, ValidationError
from medha.outputs import Explanation, RequestOutput
from medha.params import PRIORITIES, SLO, SamplingParams, check_seconds
from medha.sched.decision import Decision, Observer, Prediction, SchedulerRequest
from medha.sched.scheduler import Scheduler
from medha.text import Tokenizer
from medha.timeline import Timeline
from medha.worker.step import BatchRunner, PendingStep, phase

logger = logging.getLogger("medha")
_EXTEND_EVERY = 256  # tokens of an output after which others may share them too
P = ParamSpec("P")
R = TypeVar("R")


class Turns:
    """A re-entrant lock. Whoever gives it back and asks again comes after those who wait.

    ``threading.RLock`` promises no order: a thread that steps an engine in a loop would get it back before another one
    that waits to add a request has woken up.
    """

    def __init__(self, nudge: Callable[[], None] = lambda: None) -> None:
        self._nudge = nudge  # called where somebody comes who must wait
        self._door = threading.Lock()  # held by the one who is next
        self._room = threading.RLock()  # an interrupt may strike when it is held and no owner noted
        self._owner: int | None = None
        self._depth = 0

    def __enter__(self) -> None:
        me = threading.get_ident()
        if self._owner != me:
            with self._door:
                if not self._room.acquire(blocking=False):
                    self._nudge()
                    self._room.acquire()
            self._owner = me
        self._depth += 1

    def __exit__(self, *exc: object) -> None:
        self._depth -= 1
        if self._depth == 0:
            self._owner = None
            self._room.release()


def _in_turn(method: Callable[Concatenate[Engine, P], R]) -> Callable[Concatenate[Engine, P], R]:
    """A method that changes the engine, which the caller's thread has to itself meanwhile; where an interrupt strikes
    in it, the requests are lost, the engine is not."""

    @wraps(method)
    def call(self: Engine, /, *args: P.args, **options: P.kwargs) -> R:
        with self.turns:
            try:
                return method(self, *args, **options)
            except Exception:
                raise
            except BaseException:
                self.abandon()
                raise

    return call


class _InFlight(NamedTuple):
    """A batch that was submitted: when it was decided, as what, and by which scheduler."""

    start_s: float
    decision: Decision
    batch: Batch  # on the groups where it runs
    pending: PendingStep
    lanes: frozenset[int]  # its groups; it completes before younger batches on any of them
    scheduler: Scheduler


_ONE_LANE = frozenset({-1})  # of every batch where all complete in order
_LOOK_S = 0.5  # how often a wait for any batch looks whether a rank has failed


class Engine:
    """Continuous batching on one model.

    An engine has one owner at a time: a call from another thread takes its turn, and those that wait come in the order
    in which they asked. What :meth:`step` returns goes to the thread that called it. Two calls wait for nobody:
    :meth:`prepare`, which changes nothing, and :meth:`fail`.

    Args:
        runner: runs batches.
        scheduler: decides them; :meth:`abandon` puts a new one of the same configuration in its place.
        limits: what requests are checked against.
        tokenizer: None serves token ids alone, with ``text`` None.
        clock: monotonic seconds; the engine's time starts at 0.
        timeline: records what ran when, if given.
        hand_overs: to the decode instances, where there are some; ``scheduler`` has the prefills alone then.
        news: set by the runner when a batch may have come to be done; None where batches complete in order.

    Attributes:
        turns: who has the engine; held from one call to the next (``with engine.turns:``) it lets nobody between.
        on_step: called with each batch that is done, what was predicted of it before it was sent (None where the
            scheduler predicts nothing) and its busy seconds.
    """

    def __init__(
        self,
        runner: BatchRunner,
        scheduler: Scheduler,
        limits: ModelLimits,
        *,
        tokenizer: Tokenizer | None = None,
        clock: Callable[[], float] = time.perf_counter,
        timeline: Timeline | None = None,
        hand_overs: HandOvers | None = None,
        news: threading.Event | None = None,
    ) -> None:
        self.runner = runner
        self.scheduler = scheduler
        self.limits = limits
        self.tokenizer = tokenizer
        self.timeline = timeline
        self.on_step: Callable[[Batch, Prediction | None, float], None] | None = None
        self._news = news
        explainer = Explainer if news is None else LaneExplainer
        self._explainer = explainer(scheduler.memory.num_groups, scheduler.predictor)
        self.observers: list[Observer] = [self._explainer]  # are told what the scheduler is asked and what it decides
        self._clock = clock
        self._start = clock()
        self._live: dict[str, Request] = {}  # not ended
        self._by_slot: dict[int, Completion] = {}  # theirs, and of ended ones those with chunks in flight
        self._free_slots: list[int] = []
        self._num_added = 0
        self._in_flight: deque[_InFlight] = deque()
        self.hand_overs = HandOvers() if hand_overs is None else hand_overs
        self._completed_s: dict[int, float] = {}  # by lane, when the last batch was
        self._unreturned: list[RequestOutput] = []  # outputs that the next step returns
        self._dead: EngineDeadError | None = None
        self._dying = threading.Lock()
        self.turns = Turns(self.wake)
        keeps = scheduler.config.prefix_caching is not False
        self._prefix = PrefixIds(scheduler.memory.prefix.unit) if keeps else None

    # -- requests ------------------------------------------------------------------------------------------------

    @property
    def has_unfinished(self) -> bool:
        """Whether :meth:`step` has anything left to do or to return."""
        return bool(self._live or self._unreturned or self._in_flight or self.hand_overs.transfers)

    @property
    def num_unfinished(self) -> int:
        """Requests queued or running."""
        return len(self._live)

    def is_unfinished(self, request_id: str) -> bool:
        """Whether a request of this id is queued or running."""
        return request_id in self._live

    def describe(self) -> str:
        """The unfinished requests and the batches in flight, a line each; for another thread, while :meth:`step` is
        stuck."""
        lines = [f"{len(self._live)} unfinished requests, {len(self._in_flight)} batches in flight"]
        lines += [f"  {one}" for live in list(self._live.values()) for one in live.completions]
        lines += [str(sent.batch) for sent in list(self._in_flight)]
        return "\n".join(lines)

    def requests(self) -> list[Request]:
        """The unfinished requests as they are; for another thread, which changes nothing."""
        return list(self._live.values())

    def prefills(self, min_tokens: int = 1) -> list[tuple[str, int, int]]:
        """(request id, prompt tokens computed, prompt tokens) of admitted prompts of at least ``min_tokens``."""
        with self.turns:
            running = [one for live in self._live.values() for one in live.completions if one.is_prefilling]
        sizes = ((one.name, one.num_computed_tokens, one.metrics.num_prompt_tokens) for one in running)
        return [size for size in sizes if size[2] >= min_tokens]

    def record(self, journal: TextIO) -> None:
        """Write down what is asked of the scheduler from now on, and what it decides, for ``medha replay``.

        The file is text; a line is written at each call. It is left open.

        Raises:
            ConfigError: the engine has served requests already, or its policy is a function.
            EngineDeadError: the file cannot be written; also from every later step that writes to it.
        """
        with self.turns:
            if self._num_added:
                raise ConfigError("a journal begins before the first request; this engine has served some")
            if self.hand_overs:
                raise ConfigError("a journal holds the decisions of one scheduler; accepted: without decode_replicas")
            self.observers.append(Journal(self.scheduler, journal))

    def explain(self, request_id: str) -> Explanation:
        """Where the seconds of an unfinished request went until its first token, or so far; ``text()`` prints it.

        A finished one has it in its output, as ``metrics.explanation``.

        Raises:
            ValidationError: no unfinished request has this id.
        """
        with self.turns:
            if (live := self._find(request_id)) is None:
                message = f"request_id={request_id!r:.80} is not running; accepted: an unfinished request"
                raise ValidationError(message, param="request_id", value=request_id)
            self._keep_wait(live.first)
            return live.first.metrics.explanation or self._explainer.of(live.first.slot)

    def now(self) -> float:
        """Seconds since the engine was made, the clock of all metrics."""
        return self._clock() - self._start

    def add_request(
        self,
        request_id: str,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        slo: SLO | None = None,
        priority: str = "normal",
        tenant: str = "",
        arrival_s: float | None = None,
    ) -> None:
        """Check, tokenise and queue one request.

        Args:
            request_id: unique among unfinished requests.
            prompt: text, token ids, or a mapping with ``prompt``, ``prompt_token_ids`` or ``messages``.
            params: sampling parameters.
            slo: its objectives.
            priority: class: ``realtime``, ``high``, ``normal`` or ``low``.
            tenant: who shares the machine fairly with the others.
            arrival_s: when it arrived on the engine's clock (:meth:`now`); now by default.

        Raises:
            ValidationError, ContextLengthError, KVCapacityError: the request is wrong; nothing was queued.
            DeadlineError: it cannot meet one of its objectives, and the option ``admission`` is ``refuse``.
            EngineDeadError: the engine has failed before.
        """
        arrival_s = self.now() if arrival_s is None else arrival_s
        prepared = self.prepare(request_id, prompt, params, slo=slo, priority=priority, tenant=tenant)
        self.add_prepared(prepared, arrival_s=arrival_s)

    def prepare(
        self,
        request_id: str,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        slo: SLO | None = None,
        priority: str = "normal",
        tenant: str = "",
    ) -> Request:
        """Tokenise and check a request without queueing it, in any thread; as :meth:`add_request`."""
        if self._dead is not None:
            raise self._dead
        kv = self.scheduler.memory
        return prepare_request(
            request_id, prompt, params, slo, priority, tenant,
            limits=self.limits, tokenizer=self.tokenizer, kv=kv, prefix=self._prefix,
            decode_kv=self.hand_overs.largest,
        )  # fmt: skip

    @_in_turn
    def add_prepared(
        self, request: Request, *, arrival_s: float, sink: Callable[[RequestOutput], None] | None = None
    ) -> None:
        """Queue a request that :meth:`prepare` returned; raises as :meth:`add_request`.

        ``sink`` takes its outputs, whoever steps; None lets :meth:`step` return them.
        """
        if self._dead is not None:
            raise self._dead
        arrival_s = check_seconds("arrival_s", arrival_s)
        if request.request_id in self._live:
            message = f"request_id={request.request_id!r} is in flight already; accepted: an id not in use"
            raise ValidationError(message, param="request_id", value=request.request_id)
        slots, now_s = self._unused_slots(request.params.n), self.now()
        asked = _asked(request, slots[0], arrival_s)
        if self.hand_overs:
            asked = replace(asked, max_new_tokens=1)
        admitted = [self.scheduler.add(replace(asked, slot=slot), now_s) for slot in slots]
        sink = sink or self._unreturned.append
        request.begin(slots, arrival_s, limits=self.limits, tokenizer=self.tokenizer, sink=sink)
        params = request.params
        seed = params.seed if params.seed is not None else self.limits.seed * 1_000_003 + self._num_added
        self._num_added += params.n
        for one, its in zip(request.completions, admitted, strict=True):
            end_ids = tuple(sorted(one.end_ids))
            self.runner.open(one.slot, request.prompt_ids, params, seed=seed + one.index, end_ids=end_ids)
            if its.alone_tpot_s is not None:
                wanted = None if request.slo is None else request.slo.tpot_s
                logger.warning(
                    "request %s: slo.tpot_s=%s does not bound batches: a token takes %.4f s even alone, as predicted",
                    one.name,
                    wanted,
                    its.alone_tpot_s,
                )
            one.metrics.is_relegated = its.is_relegated
            one.metrics.deadline_s = its.deadline_s if math.isfinite(its.deadline_s) else None
            one.metrics.deadline_is_derived = one.metrics.deadline_s is not None and one.metrics.ttft_slo_s is None
            self._by_slot[one.slot] = one
            if self._free_slots:
                self._free_slots.pop()
            for observer in self.observers:
                observer.added(replace(asked, slot=one.slot), now_s, its, one.name)
        self._live[request.request_id] = request

    def _unused_slots(self, count: int) -> list[int]:
        """So many slots that nobody has, in the order in which they are taken: free ones from the end, then new."""
        free = self._free_slots[::-1][:count]
        first = len(self._by_slot) + len(self._free_slots)
        return [*free, *range(first, first + count - len(free))]

    @_in_turn
    def reset_prefix_cache(self) -> None:
        """Forget what is kept of requests that have ended; what runs goes on."""
        self.scheduler.reset_prefix_cache()
        for observer in self.observers:
            observer.forgot()

    @_in_turn
    def abort(self, request_id: str) -> None:
        """End a request now, keeping what it has produced; the next :meth:`step` returns it. No-op if unknown."""
        if (live := self._find(request_id)) is None:
            return
        running = [one for one in live.completions if one.finish_reason is None]
        self._abort(live)
        for one in running:
            self._extend(one)
            closed = self._cancel(one.slot)
            for observer in self.observers:
                observer.cancelled(one.slot, closed)
            self._release(closed)

    def _cancel(self, slot: int) -> tuple[int, ...]:
        """Stop scheduling a request, wherever it is; returns the slots closed by that."""
        for instance in self.hand_overs.instances:
            if instance.scheduler.knows(slot):
                return instance.scheduler.cancel(slot)
        closed = self.scheduler.cancel(slot)
        return closed if self.hand_overs.waiting.pop(slot, None) is None else self.scheduler.let_go(slot)

    def abort_all(self) -> None:
        """End every request now; batches in flight are completed by the next steps."""
        with self.turns:
            for request_id in list(self._live):
                self.abort(request_id)

    # -- the loop ------------------------------------------------------------------------------------------------

    def wake(self) -> None:
        """Let a step that waits for one of several lanes return, as there is something to do; for another thread."""
        if self._news is not None:
            self._news.set()

    def step(self, wait_s: float | None = None) -> list[RequestOutput]:
        """Fill the pipeline, complete its oldest batch, and return the outputs that changed.

        With lanes it completes a batch that is done, and waits at most ``wait_s`` for one, or until :meth:`wake`.

        A request that is not finished is returned as its ``output_kind`` says; a finished one once, whole (with
        ``delta``: what had not been returned yet). Returns an empty list when there is nothing to do.

        Raises:
            EngineDeadError: a step failed; every unfinished request has ended with that error, and the exception's
                ``outputs`` holds them.
        """
        with self.turns:
            self.advance(wait_s)
            outputs = self._unreturned.copy()
            self._unreturned.clear()
        return outputs

    @_in_turn
    def advance(self, wait_s: float | None = None) -> bool:
        """As :meth:`step`, but outputs without a sink wait for the next step; returns whether a batch was in flight."""
        if self._dead is not None:
            raise self._dead
        try:
            self._fill_pipeline()
            if self._in_flight or self.hand_overs.transfers:
                if (index := self._await_done(wait_s)) is not None:
                    self._complete(index)
                return True
            if self._live:
                raise RuntimeError(f"the scheduler runs none of the unfinished requests:\n{self.describe()}")
            return False
        except Exception as error:
            raise self.fail(error) from error

    def abandon(self) -> None:
        """Abort everything and forget what is in flight; the next :meth:`step` returns the aborted requests."""
        with self.turns:
            for live in list(self._live.values()):
                self._abort(live)
            # An interrupt may have struck anywhere in a step, so nothing is undone: scheduler and runner start afresh.
            self._by_slot.clear()
            self._free_slots.clear()
            self._in_flight.clear()
            self.scheduler = self.scheduler.fresh()
            predictor = self.scheduler.predictor
            for observer in self.observers:
                observer.restarted(None if predictor is None else predictor.correction.learned)
            self.runner.reset()

    def _fill_pipeline(self) -> None:
        """Schedule and submit batches until no more may enter."""
        self._fill_decodes()
        while (decision := self._schedule(start := self.now())).batch is not None:
            batch = decision.batch
            for metrics in [self._by_slot[row.slot].metrics for row in batch.chunks]:
                if metrics.first_scheduled is None:
                    metrics.first_scheduled = start
                metrics.num_chunks += 1
            for shared in batch.shared:
                one = self._by_slot[shared.slot]
                if one.metrics.num_chunks == 1:  # not what it finds again after it was preempted
                    one.metrics.num_cached_tokens += shared.num_tokens
            self._send(self.scheduler, decision, start, batch)

    def _send(self, scheduler: Scheduler, decision: Decision, start_s: float, batch: Batch) -> None:
        """Submit a batch, on the groups where it runs."""
        lanes = _ONE_LANE if self._news is None else frozenset(batch.groups)
        self._in_flight.append(_InFlight(start_s, decision, batch, self.runner.submit(batch), lanes, scheduler))

    def _fill_decodes(self) -> None:
        """Take the hand-overs that are done, begin those that are granted, and submit batches of decode instances."""
        for slot in [slot for slot, transfer in self.hand_overs.transfers.items() if transfer.done()]:
            self._take_over(slot)
        for request, batch in self.hand_overs.grants():
            held = self.scheduler.memory.held_by_group(request.slot, request.num_prompt_tokens)
            self.hand_overs.begin(request, self._by_slot[request.slot].token_ids[0], held, batch)
        for group, scheduler in [(one.group, one.scheduler) for one in self.hand_overs.instances]:
            while (decision := scheduler.schedule(start := self.now())).batch is not None:
                self._send(scheduler, decision, start, decision.batch.on_group(group))

    def _take_over(self, slot: int) -> None:
        """A request has been handed over: its decode instance has it from now on."""
        one = self._by_slot[slot]
        self._keep_wait(one)
        instance, request = self.hand_overs.arrived(slot)
        self.scheduler.let_go(slot)
        wanted = one.finish_reason is None
        instance.scheduler.arrived(request, wanted=wanted)
        if not wanted:
            self._release((slot,))

    def _schedule(self, now: float) -> Decision:
        """Ask for the next batch; note who was preempted for it."""
        with phase("medha.schedule"):
            decision = self.scheduler.schedule(now)
        for observer in self.observers:
            observer.scheduled(now, decision)
        for preempted in decision.preempted:
            one = self._by_slot[preempted.slot]
            one.num_computed_tokens = preempted.swapped_tokens
            one.metrics.num_preemptions += 1
            one.metrics.num_swaps += preempted.swapped_tokens > 0
            one.metrics.work_lost_s += preempted.lost_s
        return decision

    def _await_done(self, wait_s: float | None) -> int | None:
        """The index of a batch in flight to complete now; waits for one, and gives up when it is woken or late."""
        end_s = math.inf if wait_s is None else time.monotonic() + wait_s
        while (index := self._first_done()) is None:
            left_s = end_s - time.monotonic()
            if self._news is None or left_s <= 0:
                return None
            if self._news.wait(min(left_s, _LOOK_S)):
                self._news.clear()
                return self._first_done()
        return index

    def _first_done(self) -> int | None:
        """The first batch in flight that is done, and before which nothing is in flight on its lanes."""
        busy: frozenset[int] = frozenset()
        for index, sent in enumerate(tuple(self._in_flight)):
            if not busy & sent.lanes and sent.pending.is_done():
                return index
            busy |= sent.lanes
        return None

    def _complete(self, index: int) -> None:
        """Wait for a batch in flight and hand out what came of it."""
        sent = self._in_flight[index]
        batch, prediction, result = sent.batch, sent.decision.prediction, sent.pending.result()
        del self._in_flight[index]
        is_first = sent.scheduler is self.scheduler
        now, busy_s = self.now(), result.busy_s
        for row in batch.chunks:
            chunked = self._by_slot[row.slot]
            chunked.num_computed_tokens, chunked.computed_s = row.kv_len, now
        if self.timeline is not None:
            names = [self._by_slot[row.slot].name for row in batch.rows]
            start_s = max(sent.start_s, *(self._completed_s.get(lane, 0.0) for lane in sent.lanes))
            self.timeline.record(batch, start_s, now, names, sent.decision.slack_s)
            if prediction is not None:
                self.timeline.count_step(now, prediction.seconds, busy_s, budget_s=prediction.budget_s)
        self._completed_s.update(dict.fromkeys(sent.lanes, now))
        if self.on_step is not None:
            self.on_step(batch, prediction, busy_s)
        results: list[tuple[int, int, bool]] = []
        begun: list[Completion] = []
        kept: list[Completion] = []  # that wait for a decode instance
        told: list[Request] = []
        by_slot = self._by_slot
        for row, sampled in zip(result.rows, result.sampled, strict=True):
            one = by_slot[slot := row[0]]
            if one.finish_reason is None:  # else it was aborted while in flight: the result is dropped
                ends = one.take(sampled, now)
                waits = bool(self.hand_overs) and is_first and not ends
                results.append((slot, 0 if waits else 1, ends))
                if waits:
                    kept.append(one)
                if one.metrics.explanation is None:
                    begun.append(one)
                if ends or one.request.reports_progress:
                    told.append(one.request)
                if one.error is not None:  # what it computed, or shared, may be as bad as its logits
                    self.reset_prefix_cache()
                elif ends or not len(one.token_ids) % _EXTEND_EVERY:
                    self._extend(one)
        closed = sent.scheduler.complete(batch, now, results, busy_s)
        for one in kept:
            self.scheduler.keep(one.slot)
            self.hand_overs.waiting[one.slot] = _asked(one.request, one.slot, one.metrics.arrival)
        for observer in self.observers if is_first else ():
            observer.completed(batch, now, results, busy_s, closed)
        for one in begun:
            self._keep_explanation(one)
        self._hand_out(told)
        self._release(closed)

    def _extend(self, one: Completion) -> None:
        """Tell the scheduler the ids of what a completion has put out, so that others may share it."""
        if self._prefix is not None and one.request.prefix and (ids := one.further_ids(self._prefix)):
            self.scheduler.extend(one.slot, ids)
            for observer in self.observers:
                observer.extended(one.slot, ids)

    def _hand_out(self, changed: Iterable[Request]) -> None:
        """Emit what a batch has changed: first the requests that have ended, then those that report as they go."""
        requests = dict.fromkeys(changed)  # of several completions once
        for request in [request for request in requests if not request.num_running]:
            self._retire(request)
            del requests[request]
        for request in requests:
            if request.reports_progress:
                request.emit()

    def _find(self, request_id: str) -> Request | None:
        """The unfinished request of an id."""
        check_type("request_id", request_id, str)
        return self._live.get(request_id)

    # -- ends ----------------------------------------------------------------------------------------------------

    def _keep_explanation(self, one: Completion) -> None:
        """Note where the time of a completion went that has its first token, or ends without one."""
        if one.metrics.explanation is None:
            one.metrics.explanation = self._explainer.of(one.slot)

    def _keep_wait(self, one: Completion) -> None:
        """Note for how long a completion has waited for a decode instance, if it does."""
        metrics = one.metrics
        if self.hand_overs.waits(one.slot) and metrics.explanation is not None and metrics.first_token is not None:
            wait_s = self.now() - metrics.first_token
            metrics.explanation = replace(metrics.explanation, decode_wait_s=wait_s)

    def _abort(self, live: Request) -> None:
        """End what still runs of a request, and hand out its last output."""
        for one in live.completions:
            if one.finish_reason is None:
                one.finish("abort", self.now())
                self._keep_explanation(one)
        self._retire(live)

    def _retire(self, live: Request) -> None:
        """Hand out the output of a request that has ended."""
        live.emit()
        del self._live[live.request_id]

    def _release(self, closed: Sequence[int]) -> None:
        """Forget slots whose requests have nothing in flight any more."""
        for slot in closed:
            self.runner.close(slot)
            del self._by_slot[slot]
            self._free_slots.append(slot)

    def fail(self, cause: Exception) -> EngineDeadError:
        """End every request with the error that stopped the engine; only the first call has an effect.

        Another thread may call it while :meth:`step` is stuck: it waits for no turn.

        Returns:
            What every later call raises; its ``outputs`` holds the requests that had not been returned as finished.
        """
        with self._dying:
            if self._dead is not None:
                return self._dead
            if isinstance(cause, EngineDeadError):
                dead = type(cause)(str(cause))
            else:
                dead = EngineDeadError(f"a step failed: {type(cause).__name__}: {cause}")
            self._dead = dead
            dead.__cause__ = cause
            for live in list(self._live.values()):
                for one in live.completions:
                    one.finish("error", self.now(), error=dead, flush_text=False)  # the tokenizer may be what failed
                self._retire(live)
            dead.outputs = self._unreturned.copy()
            self._unreturned.clear()
            self._in_flight.clear()
            self.hand_overs.transfers.clear()
            self.wake()
            return dead


def _asked(request: Request, slot: int, arrival_s: float) -> SchedulerRequest:
    """What a scheduler is to know of a completion."""
    length, priority = len(request.prompt_ids), PRIORITIES.index(request.priority)
    return SchedulerRequest(
        slot, length, request.max_tokens, arrival_s, request.slo, priority, tenant=request.tenant, prefix=request.prefix
    )
