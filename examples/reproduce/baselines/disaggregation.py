"""Static prefill-decode disaggregation: some instances read prompts, others generate, and keys and values move over.

Source: DistServe (Zhong et al., arXiv:2401.09670) and SplitWise (Patel et al., arXiv:2311.18677), which v5 section 6.1
leaves out of its comparison as they run out of memory (section 2.2). The rules, of DistServe's section 4.3:

- A request goes to the prefill instance with the fewest prompt tokens unread, which serves in order of arrival. Prompts
  are read whole: several in a batch up to ``max_prefill_tokens``, a longer one by itself. With pipeline stages a batch
  passes them one after the other, and the next batch follows.
- Its first token comes with the prompt. Its keys and values stay where they are until the decode instance with the
  fewest tokens fetches them, which it does when it has room for the whole request.
- A decode instance generates for all it has, in as many micro-batches as it has stages.

Memory is enforced on both sides. A prefill instance holds weights, the activations of its largest batch under way, and
keys and values of all prompts that are being read or were not fetched; what can never fit is refused. What activations
take is :func:`~medha.sim.replica.activation_bytes` of the whole prompt. It counts what engines of the time held
at the widest point of a layer, the MLP: residual, normed input and output in the model dimension, which tensor
parallelism does not split, and gate, up and product, which it does; queries, keys and values take less. Logits are
those of last tokens only, and no attention matrix is written.

Simplified, each in favour of these systems: no fragmentation; workspace neither of kernels nor of collectives; memory
for activations that are not there at the moment is given to keys and values; links of the sender never contend, each
accelerator sends over one of its own, and none of it slows a batch; where all accelerators fit a node, the links in it
are taken. Layouts are given, not searched, and do not follow the load.

Its own figure: DistServe's figure 1, a 13B model at 512 prompt and 64 output tokens on A100s, where 90 % of requests
are to have TTFT within 0.4 s and TPOT within 0.04 s: 1.6 requests a second where prefill and decode share an
accelerator (whole prompts, prefills first, as vLLM did then), and 3.3 for each of two accelerators of prefill and one
of decode, 2.1 times. Here it is 4.2 and 6.9, 1.7 times: the order is the paper's, the gain is less, and all rates are
at least twice those published, as our spec has the kernels of today. On chats of ShareGPT the paper has 2.0 to 4.6
times vLLM; the 7.4 times of its abstract is against another system.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from types import MappingProxyType

import numpy as np

from examples.reproduce.served import Floats, Served
from examples.reproduce.timing import a100, stage_predictors
from medha.config import ModelConfig, ParallelConfig
from medha.cost.hardware import HardwareSpec
from medha.cost.predictor import Predictor, Work
from medha.errors import ConfigError
from medha.sim.known_models import KNOWN_MODELS
from medha.sim.pipeline import Pipeline
from medha.sim.replica import activation_bytes, kv_bytes_per_token, kv_pool_tokens, weights_bytes
from medha.sim.simulator import Gaps
from medha.workload.synth import synthesize
from medha.workload.trace import Trace

MAX_DECODES = 256
"""Requests that a decode instance has at most, vLLM's default."""
_PIECE = 16384
_DTYPE_BYTES = 2


@dataclass(frozen=True, slots=True)
class Disaggregated:
    """Instances that read prompts and instances that generate.

    Attributes:
        spec: the accelerators.
        model: what runs on them.
        num_prefill, num_decode: instances.
        prefill, decode: layout of an instance: ``tp`` and ``spp``, pipeline stages here; ``kvp`` is 1.
        max_prefill_tokens: of a batch of several prompts.
        utilization: share of an accelerator's memory that may be used.
    """

    spec: HardwareSpec
    model: ModelConfig
    num_prefill: int
    num_decode: int
    prefill: ParallelConfig
    decode: ParallelConfig
    max_prefill_tokens: int = 8192
    utilization: float = 0.9

    def __post_init__(self) -> None:
        for name in ("num_prefill", "num_decode", "max_prefill_tokens"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ConfigError(f"{name}={value!r}; accepted: a whole number of at least 1")
        for layout in (self.prefill, self.decode):
            if layout.kvp != 1:
                raise ConfigError(f"kvp={layout.kvp}; accepted: 1, as these systems keep a request on one instance")
            kv_pool_tokens(self.spec, self.model, layout, utilization=self.utilization, max_batch_tokens=1)

    @property
    def num_gpus(self) -> int:
        """Accelerators in all."""
        return self.num_prefill * self.prefill.world_size + self.num_decode * self.decode.world_size


# ---------------------------------------------------------------------------------------------------------------------
# Memory


@dataclass(frozen=True, slots=True)
class StageMemory:
    """Memory of each accelerator of a stage, in bytes.

    Attributes:
        usable: all that may be used.
        fixed: weights, and logits on the last stage.
        activation_token: activations of each token of a batch.
        kv_token: keys and values of each token.
    """

    usable: int
    fixed: int
    activation_token: int
    kv_token: int

    def fits(self, batch_tokens: int, kv_tokens: int) -> bool:
        """Whether a batch of so many tokens can run while keys and values of so many are there, its own included."""
        return self.fixed + self.activation_token * batch_tokens + self.kv_token * kv_tokens <= self.usable


def stage_memories(
    spec: HardwareSpec, model: ModelConfig, parallel: ParallelConfig, *, utilization: float = 0.9
) -> list[StageMemory]:
    """Memory of each stage of an instance, first stage first.

    Raises:
        ConfigError: the layout does not split the model.
    """
    found = []
    for stage in range(parallel.spp):
        logits = activation_bytes(model, parallel, stage, 0)
        found.append(
            StageMemory(
                usable=int(spec.memory_bytes * utilization),
                fixed=weights_bytes(model, parallel, stage) + logits,
                activation_token=activation_bytes(model, parallel, stage, 1) - logits,
                kv_token=kv_bytes_per_token(model, parallel, stage),
            )
        )
    return found


def largest_prefill(memories: Sequence[StageMemory]) -> int:
    """Tokens of the longest prompt that an instance with nothing else on it can read whole; 0 if none."""
    return max(0, min((m.usable - m.fixed) // (m.activation_token + m.kv_token) for m in memories))


def largest_decode(memories: Sequence[StageMemory]) -> int:
    """Tokens whose keys and values fit on a decode instance, prompt and output; 0 if none."""
    return max(0, min((m.usable - m.fixed - m.activation_token * MAX_DECODES) // m.kv_token for m in memories))


def is_refused(system: Disaggregated, prompt_tokens: int, output_tokens: int) -> str | None:
    """Why a request can never be served, with the numbers; None if it can.

    Args:
        system: whose instances it would have to itself.
        prompt_tokens, output_tokens: at least 1 each.
    """
    kv_tokens = prompt_tokens + output_tokens - 1
    for name, layout, batch_tokens, held in (
        ("prefill", system.prefill, prompt_tokens, prompt_tokens),
        ("decode", system.decode, MAX_DECODES, kv_tokens),
    ):
        if name == "decode" and output_tokens == 1:
            continue  # its only token comes with the prompt
        memories = stage_memories(system.spec, system.model, layout, utilization=system.utilization)
        for stage, memory in enumerate(memories):
            if not memory.fits(batch_tokens, held):
                return (
                    f"out of memory: {name} at tp={layout.tp} spp={layout.spp} of {prompt_tokens:,} prompt and "
                    f"{output_tokens:,} output tokens needs on each accelerator of stage {stage} "
                    f"{memory.fixed / 1e9:.1f} GB for weights and logits, "
                    f"{memory.activation_token * batch_tokens / 1e9:.1f} GB for activations of {batch_tokens:,} tokens "
                    f"and {memory.kv_token * held / 1e9:.1f} GB for keys and values; {memory.usable / 1e9:.1f} GB are "
                    f"there ({system.utilization:g} of {system.spec.memory_bytes / 1e9:.1f} GB)"
                )
    return None


# ---------------------------------------------------------------------------------------------------------------------
# Instances


@dataclass(slots=True)
class _Costs:
    """Seconds of whole prompts on each stage.

    A prompt above the predictors' largest chunk costs what pieces of it cost one after the other.
    """

    predictors: Sequence[Predictor]
    _known: dict[tuple[int, ...], list[float]] = field(default_factory=dict)

    @classmethod
    def of(cls, spec: HardwareSpec, model: ModelConfig, parallel: ParallelConfig, max_prefill_tokens: int) -> _Costs:
        return cls(stage_predictors(spec, model, parallel, max_tokens=max(_PIECE, max_prefill_tokens)))

    def seconds(self, prompts: Sequence[int]) -> list[float]:
        """Of a batch of prompts; one alone where they exceed the predictors' largest chunk."""
        key = tuple(sorted(prompts))
        if key not in self._known:
            self._known[key] = [self._on_stage(predictor, key) for predictor in self.predictors]
        return self._known[key]

    def _on_stage(self, predictor: Predictor, prompts: Sequence[int]) -> float:
        if sum(prompts) <= predictor.max_tokens:
            return predictor.predict([Work(tokens, 0, False, None, True) for tokens in prompts])
        (tokens,) = prompts
        starts = range(0, tokens, _PIECE)
        pieces = [Work(min(_PIECE, tokens - start), start, False, None, start + _PIECE >= tokens) for start in starts]
        return sum(predictor.predict([piece]) for piece in pieces)


@dataclass(slots=True)
class _PrefillInstance:
    """An instance that reads prompts.

    Attributes:
        memories: by stage.
        free_s: by stage, when it is done with what was sent.
        waiting: rows of the trace, in order of arrival.
        unread_tokens: of prompts that wait or are under way.
        held_tokens: whose keys and values are here or about to be.
        under_way: tokens of each batch under way.
    """

    memories: Sequence[StageMemory]
    free_s: list[float]
    waiting: deque[int] = field(default_factory=deque)
    unread_tokens: int = 0
    held_tokens: int = 0
    under_way: list[int] = field(default_factory=list)

    def next_batch(self, prompts: Sequence[int], max_tokens: int) -> list[int]:
        """Rows of the next batch, taken out of those that wait; none if memory allows none now."""
        rows: list[int] = []
        total = 0
        while self.waiting:
            tokens = total + prompts[self.waiting[0]]
            activations = max([*self.under_way, tokens])
            fits = all(memory.fits(activations, self.held_tokens + tokens) for memory in self.memories)
            if not fits or (rows and tokens > max_tokens):
                break
            rows.append(self.waiting.popleft())
            total = tokens
        if rows:
            self.held_tokens += total
            self.under_way.append(total)
        return rows


@dataclass(slots=True)
class _Lane:
    """A micro-batch of decodes that goes round.

    Attributes:
        ends: heap of (iteration after which it has its last token, row).
        offsets: by row, its cached tokens less the iterations so far.
        joining: rows that enter with the next iteration.
        num_old: of the rows in flight, those that had an iteration before.
    """

    ends: list[tuple[int, int]] = field(default_factory=list)
    offsets: dict[int, int] = field(default_factory=dict)
    joining: list[int] = field(default_factory=list)
    new: list[int] = field(default_factory=list)
    iteration: int = 0
    total_kv: int = 0
    max_offset: int = 0
    last_s: float = 0.0
    is_busy: bool = False

    @property
    def size(self) -> int:
        """Rows in it or about to be."""
        return len(self.ends) + len(self.joining)

    def enter(self, trace: Trace) -> None:
        """Those that join do so."""
        self.new, self.joining = self.joining, []
        for row in self.new:
            prompt = int(trace.prompt_tokens[row])
            heapq.heappush(self.ends, (self.iteration + int(trace.output_tokens[row]) - 1, row))
            self.offsets[row] = prompt - self.iteration
            self.total_kv += prompt
        if self.new:
            self.max_offset = max(self.offsets.values())

    def advance(self, now_s: float, first_token_s: Floats, gaps: Gaps) -> list[int]:
        """Every row has got a token; the rows for which it was the last one leave and are returned."""
        if len(self.ends) > len(self.new):
            gaps.add(now_s - self.last_s, len(self.ends) - len(self.new))
        for row in self.new:
            gaps.add(now_s - float(first_token_s[row]))
        self.iteration += 1
        self.total_kv += len(self.ends)
        self.last_s = now_s
        done = []
        while self.ends and self.ends[0][0] == self.iteration:
            row = heapq.heappop(self.ends)[1]
            self.total_kv -= self.offsets.pop(row) + self.iteration
            done.append(row)
        if done:
            self.max_offset = max(self.offsets.values(), default=0)
        return done


@dataclass(slots=True)
class _DecodeInstance:
    """An instance that generates.

    Attributes:
        pipeline: its stages.
        room_tokens: whose keys and values fit.
        lanes: its micro-batches, as many as stages.
        claimed_tokens, num_claims: of requests that are here or on the way.
        promised_tokens: of these and of those that it is to fetch.
        link_free_s: when what it fetches has arrived.
        incoming: rows to fetch, and from where.
    """

    pipeline: Pipeline
    room_tokens: int
    lanes: list[_Lane]
    claimed_tokens: int = 0
    promised_tokens: int = 0
    num_claims: int = 0
    link_free_s: float = 0.0
    incoming: deque[tuple[int, _PrefillInstance]] = field(default_factory=deque)


# ---------------------------------------------------------------------------------------------------------------------
# Play


def play(system: Disaggregated, trace: Trace, *, stop_s: float | None = None) -> Served:
    """Serve a trace; requests that never fit get no token.

    Args:
        system: idle.
        trace: in order of arrival.
        stop_s: virtual time at which to stop; None is the end.
    """
    return _Play(system, trace, math.inf if stop_s is None else stop_s).run()


class _Play:
    """One run: events in order of time, each an action."""

    def __init__(self, system: Disaggregated, trace: Trace, stop_s: float) -> None:
        self.system, self.trace, self.stop_s = system, trace, stop_s
        self.now_s = 0.0
        self.first_token_s = np.full(len(trace), np.nan)
        self.finish_s = np.full(len(trace), np.nan)
        self.gaps = Gaps()
        spec, model, share = system.spec, system.model, system.utilization
        self._prompts: list[int] = trace.prompt_tokens.tolist()
        self._costs = _Costs.of(spec, model, system.prefill, system.max_prefill_tokens)
        memories = stage_memories(spec, model, system.prefill, utilization=share)
        self._most_prompt = largest_prefill(memories)
        self._prefills = [_PrefillInstance(memories, [0.0] * system.prefill.spp) for _ in range(system.num_prefill)]
        room = largest_decode(stage_memories(spec, model, system.decode, utilization=share))
        predictors = stage_predictors(spec, model, system.decode)
        self._decodes = [
            _DecodeInstance(Pipeline(predictors), room, [_Lane() for _ in predictors]) for _ in range(system.num_decode)
        ]
        link = spec.send if system.num_gpus <= spec.gpus_per_node else spec.node_send
        num_links = min(system.prefill.world_size, system.decode.world_size)
        self._link_alpha_s = link.alpha_s
        self._link_token_s = model.kv_bytes_per_token(_DTYPE_BYTES) / (num_links * link.bytes_per_s)
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()

    def run(self) -> Served:
        """To the last event, or to where it is stopped."""
        self._await_arrival(0)
        while self._events and self._events[0][0] <= self.stop_s:
            self.now_s, _, action = heapq.heappop(self._events)
            action()
        end_s = self.stop_s if self._events else self.now_s
        return Served(self.trace, self.first_token_s, self.finish_s, end_s, self.gaps)

    def _at(self, time_s: float, action: Callable[[], None]) -> None:
        heapq.heappush(self._events, (time_s, next(self._order), action))

    # -- prefill -----------------------------------------------------------------------------------------------------

    def _await_arrival(self, row: int) -> None:
        if row < len(self.trace):
            self._at(float(self.trace.arrival_s[row]), partial(self._arrive, row))

    def _arrive(self, row: int) -> None:
        self._await_arrival(row + 1)
        tokens, outputs = self._prompts[row], int(self.trace.output_tokens[row])
        if tokens > self._most_prompt or (outputs > 1 and tokens + outputs - 1 > self._decodes[0].room_tokens):
            return
        instance = min(self._prefills, key=lambda one: one.unread_tokens)
        instance.waiting.append(row)
        instance.unread_tokens += tokens
        self._start_prefill(instance)

    def _start_prefill(self, instance: _PrefillInstance) -> None:
        if self.now_s < instance.free_s[0]:
            return  # comes back when the first stage is free
        rows = instance.next_batch(self._prompts, self.system.max_prefill_tokens)
        if not rows:
            return
        ready_s = self.now_s
        for stage, seconds in enumerate(self._costs.seconds([self._prompts[row] for row in rows])):
            ready_s = max(ready_s, instance.free_s[stage]) + seconds
            instance.free_s[stage] = ready_s
        self._at(ready_s, partial(self._end_prefill, instance, rows))
        if len(instance.free_s) > 1:
            self._at(instance.free_s[0], partial(self._start_prefill, instance))

    def _end_prefill(self, instance: _PrefillInstance, rows: list[int]) -> None:
        tokens = sum(self._prompts[row] for row in rows)
        instance.under_way.remove(tokens)
        instance.unread_tokens -= tokens
        for row in rows:
            self.first_token_s[row] = self.now_s
            if self.trace.output_tokens[row] == 1:
                self.finish_s[row] = self.now_s
                instance.held_tokens -= self._prompts[row]
                continue
            decode = min(self._decodes, key=lambda one: one.promised_tokens)
            decode.promised_tokens += self._claim(row)
            decode.incoming.append((row, instance))
            self._fetch(decode)
        self._start_prefill(instance)

    # -- decode ------------------------------------------------------------------------------------------------------

    def _claim(self, row: int) -> int:
        """Tokens whose keys and values a request comes to have."""
        return self._prompts[row] + int(self.trace.output_tokens[row]) - 1

    def _fetch(self, decode: _DecodeInstance) -> None:
        """Fetch in order what there is room for."""
        while decode.incoming and decode.num_claims < MAX_DECODES:
            row, source = decode.incoming[0]
            if decode.claimed_tokens + self._claim(row) > decode.room_tokens:
                return
            decode.incoming.popleft()
            decode.claimed_tokens += self._claim(row)
            decode.num_claims += 1
            seconds = self._link_alpha_s + self._link_token_s * self._prompts[row]
            decode.link_free_s = max(self.now_s, decode.link_free_s) + seconds
            self._at(decode.link_free_s, partial(self._fetched, decode, row, source))

    def _fetched(self, decode: _DecodeInstance, row: int, source: _PrefillInstance) -> None:
        source.held_tokens -= self._prompts[row]
        self._start_prefill(source)
        lane = min(decode.lanes, key=lambda one: one.size)
        lane.joining.append(row)
        self._start_decodes(decode, lane)

    def _start_decodes(self, decode: _DecodeInstance, lane: _Lane) -> None:
        if lane.is_busy or not lane.size:
            return
        lane.enter(self.trace)
        lane.is_busy = True
        count = len(lane.ends)
        max_kv = lane.max_offset + lane.iteration
        passage = decode.pipeline.send_decodes(count, lane.total_kv / count, max_kv, self.now_s)
        self._at(passage.end_s, partial(self._end_decodes, decode, lane))

    def _end_decodes(self, decode: _DecodeInstance, lane: _Lane) -> None:
        lane.is_busy = False
        for row in lane.advance(self.now_s, self.first_token_s, self.gaps):
            self.finish_s[row] = self.now_s
            decode.claimed_tokens -= self._claim(row)
            decode.promised_tokens -= self._claim(row)
            decode.num_claims -= 1
        self._fetch(decode)
        self._start_decodes(decode, lane)


# ---------------------------------------------------------------------------------------------------------------------
# Its own figure


def play_colocated(
    spec: HardwareSpec, model: ModelConfig, trace: Trace, *, tp: int = 1, max_prefill_tokens: int = 8192
) -> Served:
    """Serve a trace on one instance that does both: prefills first, whole, in batches of their own; decodes wait.

    This is vLLM of early 2024. A request enters when memory holds it to its end; all of them fit.

    Raises:
        ConfigError: a prompt exceeds ``max_prefill_tokens``, or a request the memory.
    """
    parallel = ParallelConfig(tp=tp)
    room = kv_pool_tokens(spec, model, parallel, max_batch_tokens=max_prefill_tokens)
    claims = trace.prompt_tokens + trace.output_tokens - 1
    if len(trace) and (trace.prompt_tokens.max() > max_prefill_tokens or claims.max() > room):
        raise ConfigError(
            f"a request has {trace.prompt_tokens.max():,} prompt tokens, or {claims.max():,} in all; accepted: at most "
            f"{max_prefill_tokens:,} and {room:,}"
        )
    costs = _Costs.of(spec, model, parallel, max_prefill_tokens)
    pipeline, lane, gaps = Pipeline(costs.predictors), _Lane(), Gaps()
    first_token_s, finish_s = np.full((2, len(trace)), np.nan)
    now_s, row, claimed = 0.0, 0, 0
    while row < len(trace) or lane.size:
        rows: list[int] = []
        total = 0
        while (
            row < len(trace)
            and trace.arrival_s[row] <= now_s
            and total + trace.prompt_tokens[row] <= max_prefill_tokens
            and claimed + claims[row] <= room
            and lane.size + len(rows) < MAX_DECODES
        ):
            rows.append(row)
            total += int(trace.prompt_tokens[row])
            claimed += int(claims[row])
            row += 1
        if rows:
            now_s += costs.seconds(trace.prompt_tokens[rows].tolist())[0]
            first_token_s[rows] = now_s
            lane.joining += [one for one in rows if trace.output_tokens[one] > 1]
            done = [one for one in rows if trace.output_tokens[one] == 1]
        elif lane.size:
            lane.enter(trace)
            count = len(lane.ends)
            max_kv = lane.max_offset + lane.iteration
            now_s = pipeline.send_decodes(count, lane.total_kv / count, max_kv, now_s).end_s
            done = lane.advance(now_s, first_token_s, gaps)
        else:
            now_s = float(trace.arrival_s[row])
            continue
        finish_s[done] = now_s
        claimed -= int(claims[done].sum())
    return Served(trace, first_token_s, finish_s, now_s, gaps)


MODEL_13B = replace(
    KNOWN_MODELS["llama-3-8b"],
    vocab_size=32000,
    hidden_size=5120,
    intermediate_size=13824,
    num_layers=40,
    num_heads=40,
    num_kv_heads=40,
)
"""The shape of Llama 2 13B: as many parameters and as large keys and values as OPT-13B, which DistServe ran."""
PUBLISHED = MappingProxyType({"colocated": 1.6, "prefill only": 5.6, "decode only": 10.0, "2 + 1": 3.3, "ratio": 2.1})
"""DistServe's section 1 and figure 1: requests a second for each accelerator, and times."""
TTFT_S, TPOT_S, ATTAINED = 0.4, 0.04, 0.9
_LENGTHS, _NUM_REQUESTS = "fixed:512,64", 400


def own_figures() -> dict[str, float]:
    """Requests a second for each accelerator at which 90 % are in time, by system, and the ratio; see PUBLISHED."""
    spec, alone = a100(), ParallelConfig()

    def of(num_prefill: int, num_decode: int) -> Callable[[Trace], Served]:
        system = Disaggregated(spec, MODEL_13B, num_prefill, num_decode, alone, alone, max_prefill_tokens=2048)
        return partial(play, system)

    found = {
        "colocated": goodput(partial(play_colocated, spec, MODEL_13B, max_prefill_tokens=2048)),
        "prefill only": goodput(of(1, 6), tpot_s=math.inf),
        "decode only": goodput(of(6, 1), ttft_s=math.inf),
        "2 + 1": goodput(of(2, 1)) / 3,
    }
    return found | {"ratio": found["2 + 1"] / found["colocated"]}


def goodput(serve: Callable[[Trace], Served], *, ttft_s: float = TTFT_S, tpot_s: float = TPOT_S) -> float:
    """The highest rate of Poisson arrivals, in requests a second, at which 90 % meet both limits; within 2 %."""
    low, high = 0.05, 100.0
    while high > 1.02 * low:
        rate = math.sqrt(low * high)
        served = serve(synthesize(_LENGTHS, qps=rate, num_requests=_NUM_REQUESTS))
        in_time = (served.ttft_s <= ttft_s) & (served.tpot_s <= tpot_s)
        low, high = (rate, high) if in_time.mean() >= ATTAINED else (low, rate)
    return low
