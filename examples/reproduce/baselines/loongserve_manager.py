"""A manager of LoongServe and its instances, played event by event; see :mod:`examples.reproduce.baselines.loongserve`.

Tokens are not played one by one: a group does a run of up to 32 steps of one length, that of its middle, and room for
the tokens of a run is taken when it begins. What a run has not done is given back when the manager interrupts it, at
the end of a step. A request that ends with such a step leaves when the manager looks, up to a step before its time.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Sequence
from functools import partial

from examples.reproduce.baselines.loongserve_cost import EspCosts
from examples.reproduce.baselines.loongserve_plan import Pending, Situation, Total, fill, plan_batches, select
from examples.reproduce.baselines.loongserve_pool import MASTER_REQUESTS, Group, KvPool, Prefill, Request, Run
from examples.reproduce.load import Served

_STEPS_BETWEEN = 10
"""Decode steps between prefills: ``max_wait_tokens``."""
_MAX_PASSES = 4
_MAX_SCANNED = 512
_MAX_STEPS = 32
_TYPICAL = (32, 2048)
"""Requests and tokens of each, for the time of a typical step."""
_FIRST_OUTPUT = 512
"""Tokens that an output is expected to have, before any has ended."""
_LEAST_STEPS = 10
"""Decodes are never expected to end sooner."""


class Manager:
    """Instances under one manager.

    Args:
        costs: of its instances.
        served: what is asked; its times and gaps are filled in.
        instances: their numbers.
    """

    def __init__(self, costs: EspCosts, served: Served, instances: range) -> None:
        self._costs, self._served = costs, served
        self._pool = KvPool(instances, costs.pool_tokens)
        self._prefills: list[Prefill] = []
        self._queue: list[Pending] = []
        self._claims = self._order = self._num_passes = 0
        self._events: list[tuple[float, int, Callable[[], bool | None]]] = []
        self._next_dispatch_s = 0.0
        self._must_decode = False
        self._ended_tokens, self._num_ended = _FIRST_OUTPUT, 1
        count, kv = _TYPICAL
        self._typical_s = costs.step_s(count, count * kv, kv, num_instances=1, rows=count)

    # -----------------------------------------------------------------------------------------------------------------
    # The clock

    def play(self, rows: Sequence[int], stop_s: float) -> bool:
        """Play these rows of the trace; whether that was stopped before its end."""
        trace = self._served.trace
        for row in rows:
            prompt, output = int(trace.prompt_tokens[row]), int(trace.output_tokens[row])
            self._push(float(trace.arrival_s[row]), partial(self._arrive, Pending(row, prompt, prompt + output - 1)))
        while self._events and self._events[0][0] <= stop_s:
            now_s, is_changed = self._events[0][0], False
            while self._events and self._events[0][0] == now_s:
                is_changed |= heapq.heappop(self._events)[-1]() is not False
            if is_changed and self._queue:
                chosen = set((self._fill if self._prefills else self._select)(self._queue[:_MAX_SCANNED], now_s))
                self._queue = [pending for pending in self._queue if pending not in chosen]
            self._start_runs(now_s)
        for group in list(self._pool.groups):
            if (run := group.run) is not None and run.start_s < stop_s:
                self._account(group, int((stop_s - run.start_s) / run.step_s))
        return bool(self._events)

    def _push(self, time_s: float, action: Callable[[], bool | None]) -> None:
        """Do something then; it returns False where there is nothing new for the manager."""
        self._order += 1
        heapq.heappush(self._events, (time_s, self._order, action))

    def _arrive(self, pending: Pending) -> bool:
        """Queue a request; False where it is refused."""
        if fits := self._costs.fits(pending.prompt_tokens, pending.claim_tokens, len(self._pool.used)):
            self._queue.append(pending)
        return fits

    # -----------------------------------------------------------------------------------------------------------------
    # Dispatching and allocation

    def _select(self, queue: Sequence[Pending], now_s: float) -> Sequence[Pending]:
        """Start prefills, for which groups may stop, unless they have to decode first; returns whose."""
        if self._pool.groups and (self._must_decode or now_s < self._next_dispatch_s):
            return []
        places = select(self._costs, queue, self._situation(), may_pass=self._num_passes < _MAX_PASSES)
        if not places:
            return []
        for group in list(self._pool.groups):
            self._interrupt(group, now_s)
        if chosen := self._start_prefills([queue[place] for place in places], now_s):
            self._num_passes = 0 if queue[: len(chosen)] == chosen else self._num_passes + 1
        return chosen

    def _fill(self, queue: Sequence[Pending], now_s: float) -> Sequence[Pending]:
        """Prefill on idle instances what ends before the prefills that run; returns whose."""
        idle = self._pool.idle()
        ends_s = [prefill.end_s for prefill in self._prefills if not prefill.is_filling]
        if not idle or not ends_s:
            return []
        left_s, unclaimed = max(ends_s) - now_s, self._unclaimed()
        places = fill(self._costs, queue, [0] * len(idle), left_s=left_s, claim_tokens=unclaimed)
        chosen = [queue[place] for place in places]
        return chosen if chosen and self._start_batches(chosen, idle, now_s) else []

    def _situation(self) -> Situation:
        used = list(self._pool.used.values())
        busy = -(-sum(used) // self._pool.tokens)
        requests = [request for group in self._pool.running() for request in group.requests]
        expected = self._ended_tokens / self._num_ended
        left = max((max(expected - one.done, 0.1 * one.done) for one in requests), default=0.0)
        idle = [0] * (len(used) - busy)
        return Situation(
            num_instances=len(used),
            most_idle=len(idle),
            idle_prompt_tokens=self._costs.most_tokens(idle),
            prompt_tokens=self._costs.most_tokens(used),
            claim_tokens=self._unclaimed(),
            decode_left_s=max(left, _LEAST_STEPS) * self._typical_s,
            decode_rate=sum(1 / request.done for request in requests),
        )

    def _unclaimed(self) -> int:
        return self._pool.tokens * len(self._pool.used) - self._claims

    def _start_prefills(self, chosen: list[Pending], now_s: float) -> list[Pending]:
        """Give the prefills instances and start them, without the last ones where there is no room; those started."""
        self._move_together(Total().plus(*chosen))
        while chosen and not self._start_batches(chosen, self._allocate(Total().plus(*chosen)), now_s):
            chosen = chosen[:-1]
        return chosen

    def _move_together(self, prefill: Total) -> None:
        """Empty instances of running groups while a further one saves the prefill more than the move takes."""
        tokens, squares, *_ = prefill
        used, owner = self._pool.used, self._pool.owner
        most_idle = len(used) - -(-sum(used.values()) // self._pool.tokens)
        if tokens > self._costs.most_tokens([0] * most_idle):
            return
        busy = sorted((instance for instance in used if owner[instance]), key=lambda at: (used[at], at))
        num_idle = len(used) - len(busy)
        while num_idle < most_idle and len(busy) > 1:
            source, *others = busy
            if tokens <= self._costs.most_tokens([0] * num_idle):
                less_s = self._costs.estimate_s(num_idle + 1, tokens, squares)
                saved_s = self._costs.estimate_s(num_idle, tokens, squares) - less_s
                if saved_s < self._costs.migration_s(used[source]):
                    return
            if sum(self._pool.tokens - used[other] for other in others) < used[source]:
                return
            self._pool.move(source, others[::-1], self._costs.migration_s(used[source]))
            busy = others
            num_idle += 1

    def _allocate(self, prefill: Total) -> list[int]:
        """Instances for the prefills, those of groups that stop for them included."""
        tokens, squares, _, rate = prefill
        instances = self._pool.idle()
        groups = sorted(self._pool.running(), key=self._pool.room)
        while groups and tokens > self._costs.most_tokens([self._pool.used[instance] for instance in instances]):
            instances = instances + groups.pop().instances
        kept = []
        for group in groups:
            degree = len(instances) + len(group.instances)
            prefill_s = self._costs.estimate_s(degree, tokens, squares)
            saved_s = self._costs.estimate_s(len(instances), tokens, squares) - prefill_s
            produced = sum(request.done for request in group.requests)
            if saved_s * rate < prefill_s * len(group.requests) ** 2 / produced:
                kept.append(group)
            else:
                instances = instances + group.instances
        self._leave_room(kept, instances, tokens)
        return instances

    def _leave_room(self, groups: Sequence[Group], instances: list[int], tokens: int) -> None:
        """Give groups that go on but have no room for a step an idle instance that the prefill can do without."""
        for group in groups:
            idle = [instance for instance in instances if self._pool.owner[instance] is None]
            if self._pool.masters(group) is None and idle:
                others = [self._pool.used[instance] for instance in instances if instance != idle[-1]]
                if tokens <= self._costs.most_tokens(others):
                    self._pool.join(group, idle[-1])
                    instances.remove(idle[-1])

    # -----------------------------------------------------------------------------------------------------------------
    # Prefills

    def _start_batches(self, chosen: Sequence[Pending], instances: Sequence[int], now_s: float) -> bool:
        """Start prefills of these requests on these instances; False, and nothing done, where there is no room."""
        by_length = sorted(chosen, key=lambda pending: -pending.prompt_tokens)
        instances = sorted(instances, key=lambda instance: (self._pool.used[instance], instance))
        lengths, used = [one.prompt_tokens for one in by_length], [self._pool.used[instance] for instance in instances]
        plan, is_filling = plan_batches(self._costs, lengths, used), bool(self._prefills)
        for batch in plan or ():
            self._start_prefill(by_length[batch.requests], instances[batch.instances], now_s, is_filling=is_filling)
        return plan is not None

    def _start_prefill(self, some: Sequence[Pending], instances: list[int], now_s: float, *, is_filling: bool) -> None:
        lengths = [pending.prompt_tokens for pending in some]
        start_s = max(now_s, *(self._pool.ready_s[instance] for instance in instances))
        end_s = start_s + self._costs.prefill_s(lengths, len(instances))
        requests = [Request(pending, pending.claim_tokens - pending.prompt_tokens) for pending in some]
        prefill = Prefill(instances, requests, start_s, end_s, sum(lengths) / len(instances), is_filling)
        room = {at: self._costs.room_tokens(self._pool.used[at], prefill.activations) for at in instances}
        self._pool.keep(requests, room)
        self._pool.owner.update(dict.fromkeys(instances, prefill))
        self._prefills.append(prefill)
        self._claims += sum(pending.claim_tokens for pending in some)
        self._push(end_s, partial(self._end_prefill, prefill))

    def _end_prefill(self, prefill: Prefill) -> None:
        """All its requests have a token, and decode on the instances that keep something, with who waited there."""
        end_s = prefill.end_s
        self._prefills.remove(prefill)
        for instance in prefill.instances:
            self._pool.owner[instance], self._pool.ready_s[instance] = None, end_s
        for request in prefill.requests:
            self._served.first_token_s[request.pending.row] = request.last_s = end_s
            if not request.left:
                self._finish(request, end_s)
        group = Group([], [request for request in prefill.requests if request.left])
        group.instances = sorted({instance for request in group.requests for instance in request.kv})
        for waiting in list(self._pool.groups):
            if not set(waiting.instances).isdisjoint(prefill.instances):
                group.requests = waiting.requests + group.requests
                group.instances = sorted({*waiting.instances, *group.instances})
                self._pool.groups.remove(waiting)
        if group.requests:
            self._pool.groups.append(group)
            self._pool.settle(group)
        if not self._prefills:
            self._must_decode = True

    # -----------------------------------------------------------------------------------------------------------------
    # Decodes

    def _start_runs(self, now_s: float) -> None:
        """Let groups that wait for nothing go on; after prefills, note when they have decoded long enough."""
        for group in list(self._pool.groups):
            if group in self._pool.groups and group.run is None and not self._pool.is_stopped(group):
                self._start_run(group, now_s)
        if self._must_decode:
            self._must_decode = False
            runs = [group.run for group in self._pool.groups if group.run is not None]
            self._next_dispatch_s = max((run.end_s(_STEPS_BETWEEN) for run in runs), default=now_s)
            if runs:
                self._push(self._next_dispatch_s, lambda: None)

    def _start_run(self, group: Group, now_s: float) -> None:
        """Start the next steps of a group, with another instance or another group where memory is short."""
        while (masters := self._pool.masters(group)) is None:
            others = [
                one for one in self._pool.running() if one is not group and self._pool.room(one) > len(one.requests)
            ]
            if idle := self._pool.idle():
                self._pool.join(group, idle[0])
            elif others:
                other = max(others, key=self._pool.room)
                self._interrupt(other, now_s)
                if other in self._pool.groups:
                    self._pool.merge(group, other)
            else:
                return
        count = len(group.requests)
        if count // len(group.instances) > MASTER_REQUESTS and (idle := self._pool.idle()):
            self._pool.join(group, idle[0])
            masters = self._pool.masters(group) or masters
        most_steps = min((self._pool.tokens - self._pool.used[instance]) // rows for instance, rows in masters)
        num_steps = min(_MAX_STEPS, most_steps, *(request.left for request in group.requests))
        for instance, rows in masters:
            self._pool.used[instance] += rows * num_steps
        step_s = self._costs.step_s(
            count,
            max(self._pool.used[instance] for instance in group.instances) - num_steps / 2 * masters[0][1],
            max(request.length for request in group.requests),
            num_instances=len(group.instances),
            rows=max(rows for _, rows in masters),
        )
        start_s = max(now_s, *(self._pool.ready_s[instance] for instance in group.instances))
        group.run = Run(start_s, step_s, num_steps, masters)
        self._push(group.run.end_s(num_steps), partial(self._end_run, group, group.run))

    def _end_run(self, group: Group, run: Run) -> bool:
        """Enter that a group has done its run, if nobody interrupted it."""
        if group.run is not run:
            return False
        self._account(group, run.num_steps)
        return True

    def _interrupt(self, group: Group, now_s: float) -> None:
        """End a group's run with the step that is under way."""
        if (run := group.run) is not None:
            steps = math.ceil((now_s - run.start_s) / run.step_s - 1e-9)
            self._account(group, min(max(steps, 0), run.num_steps))

    def _account(self, group: Group, num_steps: int) -> None:
        """Enter that a group has done so many steps of its run, and nothing more."""
        run, group.run = group.run, None
        assert run is not None, "only a run that began can end"
        for instance, rows in run.masters:
            self._pool.used[instance] -= rows * (run.num_steps - num_steps)
        if not num_steps:
            return
        end_s, first_s = run.end_s(num_steps), run.end_s(1)
        self._pool.ready_s.update(dict.fromkeys(group.instances, end_s))
        num_even = num_steps * len(group.requests)
        masters = [instance for instance, rows in run.masters for _ in range(rows)]
        for request, master in zip(group.requests, masters, strict=True):
            if request.last_s != run.start_s:
                self._served.gaps.add(first_s - request.last_s)
                num_even -= 1
            request.last_s = end_s
            request.done += num_steps
            request.left -= num_steps
            request.kv[master] += num_steps
        if num_even:
            self._served.gaps.add(run.step_s, num_even)
        self._release(group, end_s)

    def _release(self, group: Group, end_s: float) -> None:
        """Let go of requests that have ended, and of instances that hold nothing more."""
        ended = [request for request in group.requests if not request.left]
        if not ended:
            return
        for request in ended:
            self._finish(request, end_s)
        group.requests = [request for request in group.requests if request.left]
        self._pool.settle(group)
        if not group.requests:
            self._pool.groups.remove(group)

    def _finish(self, request: Request, end_s: float) -> None:
        self._served.finish_s[request.pending.row] = end_s
        self._pool.free(request)
        self._claims -= request.pending.claim_tokens
        self._ended_tokens += request.done
        self._num_ended += 1
