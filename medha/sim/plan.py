"""Which layout of a model on so many accelerators meets its objectives, found by simulating every one.

N accelerators are ``replicas x tp x spp x kvp``, with ``tp`` inside a node. A layout is dropped with a reason where it
does not split the model, where weights and activations or the context do not fit, or where a simulation of one request
of the context's length says that an objective is missed: its TTFT alone, and the time between its tokens, alone and
while another prompt is read. Where a workload is given, capacity is the highest rate at which 90 % of its requests meet
both objectives, found by bisection over short simulations of one replica, to which every so many-th request goes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import numpy as np

from medha.config import ModelConfig, ParallelConfig, SchedulerConfig
from medha.cost.hardware import HardwareSpec
from medha.errors import ConfigError
from medha.sim.outcome import Outcome
from medha.sim.replica import Replica
from medha.sim.simulator import Simulation
from medha.workload.trace import Trace

Rate = Callable[[float], Trace]
"""(requests a second) -> the requests of a workload at that rate."""

ATTAINMENT = 0.9
"""Share of requests that meet their objectives at the capacity."""
NO_OBJECTIVE_S = 1e9
"""In place of an objective."""
NUM_OUTPUT_TOKENS = 33
"""Tokens that a request decodes for its TPOT."""
_CHUNKS_BESIDE = 64
"""Full chunks of the prompt that is read beside a decode."""
_GIVE_UP = 2.0
"""A request alone is not simulated beyond so many times its objectives."""
_MOST_GPUS = 4096
_NAMED = 4
"""Layouts of a group that are named."""
_STEP = 1.05
"""Capacity is known to this factor."""
_FEWEST = 10
"""Requests of a replica below which a share says nothing."""
_MOST = 20_000
"""Requests of a replica in a simulation at most."""


@dataclass(frozen=True, slots=True)
class Goal:
    """What is planned for.

    Attributes:
        num_gpus: accelerators in all; every layout uses all of them.
        context: prompt tokens of the request that is simulated alone.
        ttft_s, tpot_s: objectives of each request.
        duration_s: seconds of arrivals of a simulation of the workload.
        qps: requests a second that the workload must reach; None asks for no rate.
        ttft_is_derived: nobody asked for this TTFT.
    """

    num_gpus: int
    context: int
    ttft_s: float
    tpot_s: float
    duration_s: float = 60.0
    qps: float | None = None
    ttft_is_derived: bool = False

    def __post_init__(self) -> None:
        if not 1 <= self.num_gpus <= _MOST_GPUS:
            raise ConfigError(f"gpus={self.num_gpus}; accepted: 1 to {_MOST_GPUS}")
        if self.context < 1:
            raise ConfigError(f"context={self.context}; accepted: at least 1 token")
        for name in ("ttft_s", "tpot_s", "duration_s", "qps"):
            value = getattr(self, name)
            if value is not None and not 0 < value < math.inf:
                raise ConfigError(f"{name}={value!r}; accepted: a finite number above 0")


@dataclass(frozen=True, slots=True)
class Layout:
    """How the accelerators are used: so many replicas, each of these degrees."""

    replicas: int
    tp: int
    spp: int
    kvp: int

    def __str__(self) -> str:
        return f"{self.replicas} x tp{self.tp} spp{self.spp} kvp{self.kvp}"

    @property
    def parallel(self) -> ParallelConfig:
        """Of one replica."""
        return ParallelConfig(tp=self.tp, spp=self.spp, kvp=self.kvp)


@dataclass(frozen=True, slots=True)
class Reason:
    """Why a layout is out.

    Attributes:
        kind: what it is for a group of layouts.
        text: with the numbers of this one.
        excess: how far off it is, as a factor; inf where it cannot run.
    """

    kind: str
    text: str
    excess: float = math.inf


@dataclass(frozen=True, slots=True)
class Candidate:
    """A layout, and what the simulations said of it; None was not simulated.

    Attributes:
        num_kv_tokens: KV tokens of a replica, all groups together.
        headroom: share of them beside one request of the context's length.
        ttft_s: of that request alone.
        tpot_s: of its decode alone.
        tpot_beside_s: of its decode while another prompt is read.
        capacity_qps: of all replicas; 0.0 where not even the lowest rate was met.
        reasons: why it is out; none where it meets everything.
    """

    layout: Layout
    num_kv_tokens: int | None = None
    headroom: float | None = None
    ttft_s: float | None = None
    tpot_s: float | None = None
    tpot_beside_s: float | None = None
    capacity_qps: float | None = None
    reasons: tuple[Reason, ...] = ()

    @property
    def rank(self) -> tuple[bool, float, int, float, float]:
        """What candidates are sorted by: those that meet everything first, the others by how far off they are."""
        layout = self.layout
        excess = math.prod(reason.excess for reason in self.reasons)
        gpus = layout.tp * layout.spp * layout.kvp if self.capacity_qps is None else 0
        return bool(self.reasons), excess, gpus, -(self.capacity_qps or 0.0), self.ttft_s or math.inf


@dataclass(frozen=True, slots=True)
class Planner:
    """Simulates layouts.

    Args:
        spec: the accelerators.
        model: what runs on them.
        goal: objectives.
        scheduler: of each replica.
        utilization: share of an accelerator's memory that may be used.
        workload: requests at a rate, or None where capacity is not asked for.
        longest: tokens of the workload's longest request.

    Raises:
        ConfigError: ``utilization`` is not accepted.
    """

    spec: HardwareSpec
    model: ModelConfig
    goal: Goal
    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)
    utilization: float = 0.9
    workload: Rate | None = None
    longest: int = 1

    def __post_init__(self) -> None:
        if not 0 < self.utilization <= 1:
            raise ConfigError(f"utilization={self.utilization!r}; accepted: a number above 0, at most 1")

    def with_derived_ttft(self) -> Planner:
        """The same, whose TTFT objective is derived as a scheduler derives a deadline, of the fastest layout's time.

        Raises:
            ConfigError: no layout can run the request.
        """
        open_ended = replace(self, goal=replace(self.goal, ttft_s=NO_OBJECTIVE_S, tpot_s=NO_OBJECTIVE_S))
        found = [open_ended._placed(layout, self._replica(layout)) for layout in self.layouts()]
        seconds = [one.ttft_s for one in found if one.ttft_s is not None]
        if not seconds:
            reason = next(one.reasons[0].text for one in found)
            raise ConfigError(f"no layout can run a prompt of {self.goal.context:,} tokens; the first: {reason}")
        ttft_s = max(self.scheduler.deadline_floor_s, self.scheduler.deadline_factor * min(seconds))
        return replace(self, goal=replace(self.goal, ttft_s=float(f"{ttft_s:.3g}"), ttft_is_derived=True))

    def layouts(self) -> list[Layout]:
        """Every product that uses all accelerators, with ``tp`` inside a node; most replicas first."""
        return [
            Layout(replicas, tp, spp, kvp)
            for replicas, (tp, spp, kvp) in _products(self.goal.num_gpus)
            if tp <= self.spec.gpus_per_node
        ]

    def plan(self, on_layout: Callable[[], None] = lambda: None) -> list[Candidate]:
        """All layouts, the best first.

        Args:
            on_layout: called after each.
        """
        candidates = []
        for layout in self.layouts():
            candidates.append(self.candidate(layout))
            on_layout()
        return sorted(candidates, key=lambda candidate: candidate.rank)

    def candidate(self, layout: Layout) -> Candidate:
        """What becomes of a layout; what cannot be met any more is not simulated."""
        replica = self._replica(layout)
        found = self._placed(layout, replica)
        if not found.reasons:
            found = self._beside(found, replica)
        if not found.reasons and self.workload is not None:
            found = self._with_capacity(found, replica, self.workload)
        return found

    def _placed(self, layout: Layout, replica: Replica) -> Candidate:
        """A layout with one request of the context's length, if it can run at all."""
        try:
            replica.stages()
        except ConfigError as error:
            return Candidate(layout, reasons=(Reason("does not split the model", str(error)),))
        try:
            tokens = replica.kv_blocks() * replica.block_size * layout.kvp
        except ConfigError as error:
            return Candidate(layout, reasons=(Reason("does not fit the memory", str(error)),))
        found = Candidate(layout, tokens, 1 - (self.goal.context + NUM_OUTPUT_TOKENS) / tokens)
        return self._alone(found, replica)

    def _replica(self, layout: Layout) -> Replica:
        return Replica(
            self.spec,
            self.model,
            layout.parallel,
            scheduler=self.scheduler,
            max_model_len=max(self.goal.context + NUM_OUTPUT_TOKENS, self.longest),
            utilization=self.utilization,
        )

    def _alone(self, found: Candidate, replica: Replica) -> Candidate:
        """With one request of the context's length, and nothing else; given up where it is far too late."""
        goal, trace = self.goal, self._trace([0.0], [self.goal.context])
        stop_s = _GIVE_UP * (goal.ttft_s + goal.tpot_s * NUM_OUTPUT_TOKENS)
        outcome = self._simulate(replica, trace, stop_s)
        if outcome.requests.is_refused[0]:
            needed = goal.context + NUM_OUTPUT_TOKENS
            text = (
                f"context and output are {needed:,} tokens, and the KV pool of a replica holds {found.num_kv_tokens:,}"
            )
            return replace(found, reasons=(Reason("context does not fit", text),))
        ttft_s, tpot_s = _first_request(outcome)
        if outcome.is_stopped:
            is_late = not ttft_s <= goal.ttft_s
            name, objective_s = ("TTFT", goal.ttft_s) if is_late else ("TPOT", goal.tpot_s)
            text = f"{name} not met, objective {_seconds(objective_s)}; given up after {_seconds(stop_s)}"
            return replace(found, reasons=(Reason(_above(name, objective_s), text, _GIVE_UP),))
        reasons = [*self._missed("TTFT", ttft_s, goal.ttft_s), *self._missed("TPOT", tpot_s, goal.tpot_s)]
        return replace(found, ttft_s=ttft_s, tpot_s=tpot_s, reasons=tuple(reasons))

    def _beside(self, found: Candidate, replica: Replica) -> Candidate:
        """With another prompt that arrives at the first token and is longer than the decode takes."""
        assert found.ttft_s is not None, "it was simulated alone"
        other = min(_CHUNKS_BESIDE * self.scheduler.max_batch_tokens, replica.max_model_len - NUM_OUTPUT_TOKENS)
        trace = self._trace([0.0, found.ttft_s], [self.goal.context, other])
        _, tpot_s = _first_request(self._simulate(replica, trace))
        reasons = self._missed("TPOT beside a chunk", tpot_s, self.goal.tpot_s)
        return replace(found, tpot_beside_s=tpot_s, reasons=tuple(reasons))

    def _missed(self, name: str, value_s: float, objective_s: float) -> Iterator[Reason]:
        if value_s > objective_s:
            text = f"{name} {_seconds(value_s)}, objective {_seconds(objective_s)}"
            yield Reason(_above(name, objective_s), text, value_s / objective_s)

    def _trace(self, arrival_s: list[float], prompts: list[int]) -> Trace:
        count = len(prompts)
        trace = Trace(np.array(arrival_s), np.array(prompts), np.full(count, NUM_OUTPUT_TOKENS))
        return self._with_objectives(trace)

    def _with_objectives(self, trace: Trace) -> Trace:
        count, goal = len(trace), self.goal
        return replace(trace, ttft_slo_s=np.full(count, goal.ttft_s), tpot_slo_s=np.full(count, goal.tpot_s))

    @staticmethod
    def _simulate(replica: Replica, trace: Trace, stop_s: float | None = None) -> Outcome:
        scheduler, pipeline = replica.build()
        return Simulation(scheduler, pipeline, trace, stop_s=stop_s).run()

    # -- capacity ----------------------------------------------------------------------------------------------------

    def _with_capacity(self, found: Candidate, replica: Replica, workload: Rate) -> Candidate:
        replicas, goal = found.layout.replicas, self.goal
        capacity_qps = self._capacity(replica, lambda qps: workload(qps)[::replicas], replicas)
        reasons: tuple[Reason, ...] = ()
        if goal.qps is not None and capacity_qps < goal.qps:
            text = f"capacity {capacity_qps:.3g} requests/s, wanted {goal.qps:g}"
            excess = goal.qps / capacity_qps if capacity_qps else math.inf
            reasons = (Reason(f"capacity below {goal.qps:g} requests/s", text, excess),)
        return replace(found, capacity_qps=capacity_qps, reasons=reasons)

    def _capacity(self, replica: Replica, share: Rate, replicas: int) -> float:
        """The highest rate in all whose share for one replica meets the objectives."""
        fewest, most = (number * replicas / self.goal.duration_s for number in (_FEWEST, _MOST))

        def meets(qps: float) -> bool:
            return self._meets(replica, share(qps))

        low = min(max(self.goal.qps or replicas, fewest), most)
        high = low
        while not meets(low):
            if low <= fewest:
                return 0.0
            low, high = max(low / 2, fewest), low
        while low == high < most and meets(min(high * 2, most)):
            low = high = min(high * 2, most)
        high = min(low * 2, most) if low == high else high
        while high > low * _STEP:
            middle = math.sqrt(low * high)
            low, high = (middle, high) if meets(middle) else (low, middle)
        return low

    def _meets(self, replica: Replica, trace: Trace) -> bool:
        """Whether enough of the requests of one replica meet both objectives."""
        goal, trace = self.goal, self._with_objectives(trace)
        # whoever is not done by then cannot have met both
        stop_s = goal.duration_s + goal.ttft_s + goal.tpot_s * float(trace.output_tokens.max())
        outcome = self._simulate(replica, trace, stop_s)
        found = outcome.requests
        decode_s = (found.finish_s - found.first_token_s) / np.maximum(trace.output_tokens - 1, 1)
        with np.errstate(invalid="ignore"):
            met = (found.first_token_s - trace.arrival_s <= goal.ttft_s) & (decode_s <= goal.tpot_s)
        return bool(met.mean() >= ATTAINMENT)


def _products(number: int) -> Iterator[tuple[int, tuple[int, int, int]]]:
    """(replicas, (tp, spp, kvp)) of a number, most replicas first."""
    divisors = [n for n in range(1, number + 1) if number % n == 0]
    for size in divisors:
        for tp in divisors:
            for spp in divisors:
                if size % (tp * spp) == 0:
                    yield number // size, (tp, spp, size // (tp * spp))


def _first_request(outcome: Outcome) -> tuple[float, float]:
    """TTFT and TPOT of the first request."""
    found = outcome.requests
    first_s, finish_s = float(found.first_token_s[0]), float(found.finish_s[0])
    return first_s - float(outcome.trace.arrival_s[0]), (finish_s - first_s) / (NUM_OUTPUT_TOKENS - 1)


def _above(name: str, objective_s: float) -> str:
    """The kind of a reason."""
    return f"{name} above {_seconds(objective_s)}"


def _seconds(seconds: float) -> str:
    """With its unit."""
    return f"{seconds * 1e3:.3g} ms" if seconds < 1 else f"{seconds:,.3g} s" if seconds < 1000 else f"{seconds:,.0f} s"


# ---------------------------------------------------------------------------------------------------------------------
# Reports


def report_of(planner: Planner, options: Mapping[str, Any], candidates: Sequence[Candidate]) -> dict[str, Any]:
    """Every layout, as plain values; a reason's excess is None where the layout cannot run."""
    layouts = []
    for candidate in candidates:
        tree = asdict(candidate)
        for reason in tree["reasons"]:
            reason["excess"] = reason["excess"] if math.isfinite(reason["excess"]) else None
        layouts.append({"name": str(candidate.layout), "meets": not candidate.reasons, **tree})
    spec = planner.spec
    return {
        "format": "medha-plan",
        "version": 1,
        "options": {**options, **asdict(planner.goal), "gpu_memory_utilization": planner.utilization},
        "max_batch_tokens": planner.scheduler.max_batch_tokens,
        "hardware_spec": {"name": spec.name, "machine": spec.machine, "provenance": spec.provenance},
        "layouts": layouts,
    }


def shown(planner: Planner, options: Mapping[str, Any], candidates: Sequence[Candidate], *, top: int) -> dict[str, Any]:
    """What is printed of it: the best or the nearest layouts, and why groups of others are out."""
    goal, spec = planner.goal, planner.spec
    derived = " (5 times that of the fastest layout)" if goal.ttft_is_derived else ""
    good = [candidate for candidate in candidates if not candidate.reasons]
    near = [candidate for candidate in candidates if candidate.ttft_s is not None]
    notes = [] if good else ["no layout meets everything"]
    for kind, group in grouped(candidates):
        names = ", ".join(str(candidate.layout) for candidate in group[:_NAMED])
        more = f" and {len(group) - _NAMED} more" if len(group) > _NAMED else ""
        notes.append(f"{kind}: {names}{more}; the first of them: {group[0].reasons[0].text}")
    if planner.workload is not None:
        notes.append(
            f"capacity: the highest rate at which {ATTAINMENT:.0%} of the requests of {options['workload']} meet both "
            f"objectives, in simulations of one replica over {goal.duration_s:g} s of arrivals"
        )
    table = f"{len(good)} meet everything, the best first" if good else "the nearest"
    return {
        "title": f"{options['model']} on {goal.num_gpus} x {spec.name} ({spec.provenance}), {len(candidates)} layouts: "
        f"a prompt of {goal.context:,} tokens, TTFT {goal.ttft_s:g} s{derived}, TPOT {goal.tpot_s * 1e3:g} ms",
        table: [_row(candidate) for candidate in (good or near)[:top]],
        "notes": notes,
    }


def _row(one: Candidate) -> dict[str, Any]:
    row = {
        "layout": str(one.layout),
        "TTFT_s": one.ttft_s,
        "TPOT_s": one.tpot_s,
        "beside a chunk_s": one.tpot_beside_s,
        "KV tokens": one.num_kv_tokens,
        "free beside share": one.headroom,
    }
    return row if one.capacity_qps is None else {**row, "capacity requests/s": one.capacity_qps}


def grouped(candidates: Sequence[Candidate]) -> list[tuple[str, list[Candidate]]]:
    """Layouts that are out, by the kind of their first reason, the nearest group first."""
    groups: dict[str, list[Candidate]] = {}
    for candidate in candidates:
        if candidate.reasons:
            groups.setdefault(candidate.reasons[0].kind, []).append(candidate)
    return list(groups.items())
