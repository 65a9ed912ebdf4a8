"""Which layout of a model on so many accelerators meets its objectives, found by simulating every one.

N accelerators are ``replicas x tp x spp x kvp``, with ``tp`` inside a node. A layout is dropped with a reason where it
does not split the model, where weights and activations or the context do not fit, or where a simulation of one request
of the context's length says that an objective is missed: its TTFT alone, and the time between its tokens, alone and
while another prompt is read. Which rate of requests the best one sustains ``medha simulate`` tells.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import product
from typing import Any, NamedTuple

import numpy as np

from medha.config import ParallelConfig
from medha.config.fields import check_number
from medha.errors import ConfigError
from medha.sim.outcome import Outcome
from medha.sim.replica import Replica, spec_fields
from medha.sim.simulator import Simulation
from medha.workload.trace import Trace

NUM_OUTPUT_TOKENS = 33  # that a request decodes for its TPOT
_CHUNKS_BESIDE = 64  # full chunks of the prompt that is read beside a decode
_GIVE_UP = 2.0  # a request alone is not simulated beyond so many times its objectives
_MOST_GPUS = 4096
_NAMED = 4  # layouts of a group that are named

Found = dict[str, Any]
"""What the simulations said of a layout, as the report has it; a figure that was not simulated is None.

``num_kv_tokens`` are those of a replica, ``headroom`` the share of them beside one request of the context's length;
``ttft_s`` and ``tpot_s`` are of that request alone, ``tpot_beside_s`` while another prompt is read. ``reasons`` say why
it is out: the ``kind`` that a group of layouts has in common, a ``text`` with numbers, and the ``excess``: how far off
it is, as a factor; None where it cannot run.
"""
_FIGURES = ("num_kv_tokens", "headroom", "ttft_s", "tpot_s", "tpot_beside_s")


@dataclass(frozen=True, slots=True)
class Goal:
    """What is planned for."""

    num_gpus: int  # in all; every layout uses all of them
    context: int  # prompt tokens of the request that is simulated alone
    ttft_s: float  # objectives of each request
    tpot_s: float

    def __post_init__(self) -> None:
        if not 1 <= self.num_gpus <= _MOST_GPUS:
            raise ConfigError(f"gpus={self.num_gpus}; accepted: 1 to {_MOST_GPUS}")
        if self.context < 1:
            raise ConfigError(f"context={self.context}; accepted: at least 1 token")
        for name in ("ttft_s", "tpot_s"):
            check_number(name, getattr(self, name))


class Layout(NamedTuple):
    """How the accelerators are used: so many replicas, each of these degrees."""

    replicas: int
    tp: int
    spp: int
    kvp: int

    def __str__(self) -> str:
        return f"{self.replicas} x tp{self.tp} spp{self.spp} kvp{self.kvp}"


@dataclass(frozen=True, slots=True)
class Planner:
    """Simulates layouts of a model on accelerators of a spec: ``replica`` is one in a layout of any kind."""

    replica: Replica
    goal: Goal

    def layouts(self) -> list[Layout]:
        """Every product that uses all accelerators, with ``tp`` inside a node; most replicas first."""
        number = self.goal.num_gpus
        divisors = [n for n in range(1, number + 1) if number % n == 0]
        return [
            Layout(number // size, tp, spp, size // (tp * spp))
            for size, tp, spp in product(divisors, repeat=3)
            if size % (tp * spp) == 0 and tp <= self.replica.spec.gpus_per_node
        ]

    def plan(self, on_layout: Callable[[], None] = lambda: None) -> list[Found]:
        """All layouts, the best first; ``on_layout`` is called after each."""
        found = []
        for layout in self.layouts():
            found.append(self.candidate(layout))
            on_layout()
        return sorted(found, key=rank)

    def candidate(self, layout: Layout) -> Found:
        """What becomes of a layout, step by step; what cannot be met any more is not simulated."""
        parallel = ParallelConfig(tp=layout.tp, spp=layout.spp, kvp=layout.kvp)
        replica = replace(self.replica, parallel=parallel, max_model_len=self.goal.context + NUM_OUTPUT_TOKENS)
        found: Found = {**dict.fromkeys(_FIGURES), "reasons": []}
        for step in (_fit, _alone, _beside):
            if not found["reasons"]:
                step(self, layout, replica, found)
        return {"name": str(layout), "meets": not found["reasons"], "layout": layout._asdict(), **found}

    def simulate(self, replica: Replica, trace: Trace, stop_s: float | None = None) -> Outcome:
        """Requests with the goal's objectives on one replica."""
        count, goal = len(trace), self.goal
        trace = replace(trace, ttft_slo_s=np.full(count, goal.ttft_s), tpot_slo_s=np.full(count, goal.tpot_s))
        return Simulation(*replica.build(), trace, stop_s=stop_s).run()


def rank(one: Found) -> tuple[bool, float, int, float]:
    """What layouts are sorted by: those that meet everything first, the others by how far off they are."""
    excess = math.prod(math.inf if reason["excess"] is None else reason["excess"] for reason in one["reasons"])
    _, *degrees = one["layout"].values()
    return bool(one["reasons"]), excess, math.prod(degrees), one["ttft_s"] or math.inf


# ---------------------------------------------------------------------------------------------------------------------
# The steps, which enter figures and reasons


def _out(found: Found, kind: str, text: str, excess: float | None = None) -> None:
    found["reasons"].append({"kind": kind, "text": text, "excess": excess})


def _fit(planner: Planner, layout: Layout, replica: Replica, found: Found) -> None:
    """Whether the replica can be at all."""
    kind = "does not split the model"
    try:
        replica.stages()
        kind = "does not fit the memory"
        tokens = replica.kv_blocks() * replica.block_size * layout.kvp
    except ConfigError as error:
        return _out(found, kind, str(error))
    found.update(num_kv_tokens=tokens, headroom=1 - (planner.goal.context + NUM_OUTPUT_TOKENS) / tokens)


def _alone(planner: Planner, layout: Layout, replica: Replica, found: Found) -> None:
    """With one request of the context's length, and nothing else; given up where it is far too late."""
    goal = planner.goal
    stop_s = _GIVE_UP * (goal.ttft_s + goal.tpot_s * NUM_OUTPUT_TOKENS)
    outcome = planner.simulate(replica, _trace([0.0], [goal.context]), stop_s)
    if outcome.requests.is_refused[0]:
        needed, held = goal.context + NUM_OUTPUT_TOKENS, found["num_kv_tokens"]
        text = f"context and output are {needed:,} tokens, and the KV pool of a replica holds {held:,}"
        return _out(found, "context does not fit", text)
    ttft_s, tpot_s = _first_request(outcome)
    if outcome.is_stopped:
        name, objective_s = ("TPOT", goal.tpot_s) if ttft_s <= goal.ttft_s else ("TTFT", goal.ttft_s)
        text = f"{name} not met, objective {_seconds(objective_s)}; given up after {_seconds(stop_s)}"
        return _out(found, f"{name} above {_seconds(objective_s)}", text, _GIVE_UP)
    found.update(ttft_s=ttft_s, tpot_s=tpot_s)
    _check(found, "TTFT", ttft_s, goal.ttft_s)
    _check(found, "TPOT", tpot_s, goal.tpot_s)


def _beside(planner: Planner, layout: Layout, replica: Replica, found: Found) -> None:
    """With others that arrive at the first token, and in all take longer to read than the decode takes."""
    longer = layout.spp * _CHUNKS_BESIDE * replica.scheduler.max_batch_tokens  # a decode is in one batch of so many
    other = min(longer, replica.max_model_len - NUM_OUTPUT_TOKENS)
    count = -(-longer // other)
    trace = _trace([0.0, *[found["ttft_s"]] * count], [planner.goal.context, *[other] * count])
    _, found["tpot_beside_s"] = _first_request(planner.simulate(replica, trace))
    _check(found, "TPOT beside a chunk", found["tpot_beside_s"], planner.goal.tpot_s)


def _check(found: Found, name: str, value_s: float, objective_s: float) -> None:
    if value_s > objective_s:
        text = f"{name} {_seconds(value_s)}, objective {_seconds(objective_s)}"
        _out(found, f"{name} above {_seconds(objective_s)}", text, value_s / objective_s)


def _trace(arrival_s: list[float], prompts: list[int]) -> Trace:
    """Requests of which the first decodes."""
    return Trace(np.array(arrival_s), np.array(prompts), np.array([NUM_OUTPUT_TOKENS, *[1] * (len(prompts) - 1)]))


def _first_request(outcome: Outcome) -> tuple[float, float]:
    """TTFT and TPOT of the first request."""
    times = outcome.times
    return float(times.ttft_s[0]), float(times.tpot_s[0])


def _seconds(seconds: float) -> str:
    """With its unit."""
    return f"{seconds * 1e3:.3g} ms" if seconds < 1 else f"{seconds:,.3g} s" if seconds < 1000 else f"{seconds:,.0f} s"


# ---------------------------------------------------------------------------------------------------------------------
# Reports


def report_of(planner: Planner, options: Mapping[str, Any], layouts: Sequence[Found]) -> dict[str, Any]:
    """Every layout, as plain values."""
    return {
        "format": "medha-plan",
        "version": 1,
        "options": {**options, **asdict(planner.goal), "gpu_memory_utilization": planner.replica.utilization},
        "max_batch_tokens": planner.replica.scheduler.max_batch_tokens,
        "hardware_spec": spec_fields(planner.replica.spec),
        "layouts": layouts,
    }


def shown(planner: Planner, options: Mapping[str, Any], layouts: Sequence[Found], *, top: int) -> dict[str, Any]:
    """What is printed of it: the best or the nearest layouts, and why groups of others are out."""
    goal, spec = planner.goal, planner.replica.spec
    good = [one for one in layouts if one["meets"]]
    near = [one for one in layouts if one["ttft_s"] is not None]
    notes = [] if good else ["no layout meets everything"]
    groups: dict[str, list[Found]] = {}  # by the kind of the first reason, the nearest first
    for one in layouts:
        if one["reasons"]:
            groups.setdefault(one["reasons"][0]["kind"], []).append(one)
    for kind, group in groups.items():
        names = ", ".join(one["name"] for one in group[:_NAMED])
        more = f" and {len(group) - _NAMED} more" if len(group) > _NAMED else ""
        notes.append(f"{kind}: {names}{more}; the first of them: {group[0]['reasons'][0]['text']}")
    table = f"{len(good)} meet everything, the best first" if good else "the nearest"
    return {
        "title": f"{options['model']} on {goal.num_gpus} x {spec.name} ({spec.provenance}), {len(layouts)} layouts: "
        f"a prompt of {goal.context:,} tokens, TTFT {goal.ttft_s:g} s, TPOT {goal.tpot_s * 1e3:g} ms",
        table: [{"layout": one["name"], **{name: one[name] for name in _FIGURES}} for one in (good or near)[:top]],
        "notes": notes,
    }
