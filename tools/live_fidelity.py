"""``python -m tools.live_fidelity``: the engine of this machine against the simulator that is told what its steps cost.

One process serves a stream of short requests and some long ones with the paper's scheduler. Before, what steps cost is
measured as ``medha profile --quick`` does; the engine predicts with that profile and so does the simulator, which gets
the same arrivals, lengths and settings. A profile measures steps by themselves, one after the other. So the same
requests are served once before, at other times, in a rehearsal. A line through its steps of each kind, from the seconds
predicted to those computed, corrects the steps of the simulator; what the engine takes beside a step of a kind, to
schedule, take in prompts and hand out tokens, is added to each; and the first step after a pause takes as much longer
than others as there (caches hold nothing of the model then, and cores that slept are slow). There are several runs, as
the speed of a machine drifts, and as a token's time depends on the few chunks that happen to come between: two runs of
the same 210 requests were up to 16 % apart in TPOT's median. Of each run the rehearsal and the other runs teach all of
that, so nothing is taken from what is compared. How fast requests arrive follows from a simulation of all of them at
once: they come within that time divided by the load.
"""

from __future__ import annotations

import math
import tempfile
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import numpy as np
import typer
from rich.console import Console

from medha.batch import Batch
from medha.bench.harness import Local, Subject, on_ranks
from medha.bench.load import NotedStep, arrivals_of, serve_load, steps_noted
from medha.bench.serve import CONVOY_MODEL
from medha.cli.options import OutputJson
from medha.cli.report import check_writable, deliver, stamp
from medha.config import EngineConfig
from medha.cost.coefficients import Coefficients
from medha.cost.predictor import Predictor
from medha.engine.engine import Engine
from medha.profile.calibrate import QUICK, measure
from medha.sched.memory import KVMemory
from medha.sched.scheduler import Scheduler, complete_config
from medha.sim.pipeline import Passage, Pipeline
from medha.sim.simulator import Simulation
from medha.workload.metrics import Flags, Goodput, TokenTimes
from medha.workload.trace import Trace
from tools.command import main
from tools.fidelity import METRICS, Figures, against_aim, compared, makespan_s

LIVE_LLAMA: dict[str, Any] = CONVOY_MODEL | {
    "hidden_size": 512,
    "intermediate_size": 1408,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
}
"""A model whose steps take much longer than the engine around them; fields of its ``config.json``."""
AIM = 0.10
"""Largest absolute error aimed at, of the median and the P90 over all requests."""
_BLOCK_SIZE = 256
_NUM_WARM = 8
_REHEARSAL = 1 << 20
_NUM_OF_LINE = 8  # steps that it needs
_LEAST = 0.2  # of the seconds predicted, where the line says less
_PAUSE_S = 0.02
"""A step that begins later than this after the one before was waited for."""


class Rehearsed(NamedTuple):
    """What steps cost beside what coefficients say, by kind."""

    factors: Mapping[str, tuple[float, int]]  # on the seconds computed, and how many steps taught it
    lines: Mapping[str, tuple[float, float]]  # the same by a line: its slope over the seconds predicted, its offset
    host_s: Mapping[str, float]  # beside what is computed
    after_pause: float  # on the seconds computed by the first step after a pause


NOTHING = Rehearsed({}, {}, {}, 1.0)
"""Steps cost what coefficients say."""


@dataclass(eq=False, repr=False)
class LivePipeline(Pipeline):
    """One stage whose steps cost what a rehearsal taught."""

    _: KW_ONLY
    rehearsed: Rehearsed

    def send(self, batch: Batch, memory: KVMemory, now_s: float) -> Passage:
        self._was_idle = now_s - self._free_s[0][0] > _PAUSE_S
        passage = super().send(batch, memory, now_s)
        return passage._replace(busy_s=passage.busy_s - self._host_s(batch))  # as the engine measures it

    def _host_s(self, batch: Batch) -> float:
        return self.rehearsed.host_s.get(_kind_of(batch), 0.0)

    def _seconds(self, batch: Batch, memory: KVMemory, groups: Sequence[int]) -> list[float]:
        (said_s,) = super()._seconds(batch, memory, groups)
        slope, offset_s = self.rehearsed.lines.get(_kind_of(batch), (1.0, 0.0))
        seconds = max(slope * said_s + offset_s, _LEAST * said_s)
        return [seconds * (self.rehearsed.after_pause if self._was_idle else 1.0) + self._host_s(batch)]


def _kind_of(batch: Batch) -> str:
    return "decode" if not batch.chunks else "mixed" if batch.num_decodes else "prefill"


@dataclass(frozen=True, slots=True)
class LiveOptions:
    """The load.

    Attributes:
        num_short, num_long: requests.
        short_lens, long_lens: fewest and most prompt tokens; drawn evenly.
        output_lens: fewest and most output tokens; drawn evenly.
        runs: how often they are served and simulated, each time with other arrivals.
        load: they arrive within the simulated time of all of them at once, divided by this.
        t_target_s: seconds of a batch.
        seed: of lengths, arrivals, prompts and weights.
        shape: fields of the model's ``config.json``, over LIVE_LLAMA's.
    """

    num_short: int = 36
    num_long: int = 6
    short_lens: tuple[int, int] = (50, 500)
    long_lens: tuple[int, int] = (2000, 4000)
    output_lens: tuple[int, int] = (16, 48)
    runs: int = 12
    load: float = 0.6
    t_target_s: float = 0.25
    seed: int = 0
    shape: Mapping[str, Any] = field(default_factory=dict)

    @property
    def max_model_len(self) -> int:
        """Tokens of the longest request."""
        return max(self.long_lens[1], self.short_lens[1]) + self.output_lens[1]

    @property
    def engine(self) -> dict[str, Any]:
        """Options of the engine; the pool holds all requests at once."""
        lengths = ((self.num_long, self.long_lens), (self.num_short, self.short_lens))
        return {
            "dtype": "float32",
            "device": "cpu",
            "num_threads": 1,
            "seed": self.seed,
            "block_size": _BLOCK_SIZE,
            "num_kv_blocks": sum(num * -(-(lens[1] + self.output_lens[1]) // _BLOCK_SIZE) for num, lens in lengths),
            "max_num_seqs": self.num_long + self.num_short,
            "long_threshold": self.long_lens[0],
            "t_target_s": self.t_target_s,
        }


def live_fidelity(options: LiveOptions) -> dict[str, Any]:
    """Profile, serve and simulate; returns the report.

    Raises:
        RankFailedError: a process of the engine ended.
    """
    subject = Subject(hf_overrides=LIVE_LLAMA | dict(options.shape), engine=options.engine)
    longest = options.max_model_len
    with tempfile.TemporaryDirectory(prefix="medha-bench-") as folder:
        profile = Path(folder) / "profile.json"
        measured = measure(subject.config(longest=longest), QUICK, max_kv=longest)
        assert measured is not None, "one process measures"
        coefficients, _ = measured
        profile.write_text(coefficients.to_json())
        report = on_ranks(
            subject, lambda local: _compared_live(local, options, coefficients), longest=longest, profile=str(profile)
        )
    assert report is not None, "one process has the engine"
    return report


def _compared_live(local: Local, options: LiveOptions, coefficients: Coefficients) -> dict[str, Any]:
    """Warm up, rehearse, serve and simulate."""
    engine, config, seed = local.engine, local.config, options.seed
    mix, is_long = make_mix(options)
    warm = np.append(np.argmax(mix.prompt_tokens), np.arange(min(_NUM_WARM, len(mix))))
    serve(engine, Trace(np.zeros(len(warm)), mix.prompt_tokens[warm], mix.output_tokens[warm]), seed=seed)
    span_s = makespan_s(simulate(config, coefficients, mix)) / options.load
    _, steps = serve(engine, spread(mix, span_s, seed=seed + _REHEARSAL), seed=seed + _REHEARSAL)
    rehearsed = taught_by(steps)
    span_s = makespan_s(simulate(config, coefficients, mix, rehearsed)) / options.load
    traces = [spread(mix, span_s, seed=number) for number in range(seed, seed + options.runs)]
    served = [serve(engine, trace, seed=seed + number) for number, trace in enumerate(traces)]
    simulated = []
    for number, trace in enumerate(traces):
        others = [step for other, (_, noted) in enumerate(served) if other != number for step in noted]
        simulated.append(simulate(config, coefficients, trace, taught_by([*steps, *others])))
    measured = joined([times for times, _ in served])
    figures = figures_of(measured, joined(simulated), np.tile(is_long, options.runs))
    aimed = [(metric, share) for metric in ("TTFT", "TPOT") for share in ("median", "P90")]
    errors = {f"{metric} {share}": figures[f"{metric}, all"][share]["error"] for metric, share in aimed}
    return {
        "benchmark": "live fidelity",
        "title": "random Llama, one process, one thread, float32: simulated against measured",
        "environment": stamp(),
        "model": asdict(local.model),
        "options": asdict(options),
        "span_s": span_s,
        "host_s": rehearsed.host_s,
        "factors": {kind: factor for kind, (factor, _) in rehearsed.factors.items()},
        "lines": rehearsed.lines,
        "after_pause": rehearsed.after_pause,
        **figures,
        "aims": against_aim(errors, AIM),
        "notes": [
            f"{options.num_short} prompts of {options.short_lens[0]} to {options.short_lens[1]} tokens and "
            f"{options.num_long} of {options.long_lens[0]:,} to {options.long_lens[1]:,} within the span (Poisson), "
            f"{options.output_lens[0]} to {options.output_lens[1]} output tokens each; "
            f"load {options.load:g}; seed {seed}",
            "steps cost what a profile measured now says, corrected by the lines of a rehearsal, and what the engine "
            f"takes beside them. {options.runs} runs, of which all requests count alike.",
        ],
    }


def taught_by(steps: Sequence[NotedStep]) -> Rehearsed:
    """By how much steps took longer than coefficients said, without their correction, and what came beside them."""
    noted: dict[str, list[tuple[float, float, float]]] = defaultdict(list)  # seconds predicted, computed, beside
    after: list[tuple[str, float, float]] = []  # of those after a pause
    for step in steps:
        if (said := step.prediction) is not None:
            said_s = said.seconds / said.factor
            if step.host_s > _PAUSE_S:
                after.append((said.kind, said_s, step.busy_s))
            else:
                noted[said.kind].append((said_s, step.busy_s, step.host_s))
    factors, lines, host_s = {}, {}, {}
    for kind, rows in noted.items():
        said_s, busy_s, beside_s = np.sum(rows, axis=0).tolist()
        factors[kind], lines[kind] = (busy_s / said_s, len(rows)), (busy_s / said_s, 0.0)
        said, busy, _ = np.transpose(rows)
        if len(rows) >= _NUM_OF_LINE and np.ptp(said) > np.mean(said) / 2:  # of steps all alike any line is as good
            lines[kind] = tuple(np.polyfit(said, busy, 1).tolist())
        host_s[kind] = max(beside_s / len(rows), 0.0)
    known = [(said_s * factors[kind][0], busy_s) for kind, said_s, busy_s in after if kind in factors]
    as_others_s, took_s = np.sum(known, axis=0).tolist() if known else (1.0, 1.0)
    return Rehearsed(factors, lines, host_s, took_s / as_others_s)


def serve(engine: Engine, trace: Trace, *, seed: int) -> tuple[TokenTimes, list[NotedStep]]:
    """Serve random prompts as they arrive; all are served, as the requests are right and the pool holds them."""
    with steps_noted(engine) as steps:
        served = serve_load(engine, arrivals_of(trace, engine.limits.vocab_size, seed=seed))
    assert all(one.is_completed for one in served.outcomes), [one.error for one in served.outcomes]
    return served.times(Goodput()), steps


def make_mix(options: LiveOptions) -> tuple[Trace, Flags]:
    """The requests, all at once, in the order in which they will arrive; and which of them are long."""
    chance = np.random.default_rng(options.seed)
    count = options.num_short + options.num_long
    is_long = chance.permutation(count) < options.num_long
    prompts, outputs = (
        np.where(is_long, *(chance.integers(*lens, count, endpoint=True) for lens in pair))
        for pair in ((options.long_lens, options.short_lens), (options.output_lens, options.output_lens))
    )
    return Trace(np.zeros(count), prompts, outputs), is_long


def spread(mix: Trace, span_s: float, *, seed: int) -> Trace:
    """The same requests as a Poisson process within so many seconds, given their number."""
    return replace(mix, arrival_s=np.sort(np.random.default_rng(seed).uniform(0.0, span_s, len(mix))))


def simulate(
    config: EngineConfig, coefficients: Coefficients, trace: Trace, rehearsed: Rehearsed = NOTHING
) -> TokenTimes:
    """The requests in the simulator, one rank on the CPU.

    Args:
        config: of the engine; it says how many KV blocks there are.
        coefficients: what its steps cost.
        trace: the requests.
        rehearsed: what they cost beside that.
    """
    longest, num_blocks = config.max_model_len, config.cache.num_blocks
    assert longest is not None and num_blocks is not None, "a live run gives both"
    predictor, real = (Predictor(coefficients, max_tokens=config.scheduler.max_batch_tokens) for _ in range(2))
    learned = {kind: (math.log(factor), count) for kind, (factor, count) in rehearsed.factors.items()}
    predictor.learned |= learned
    pool = {"num_blocks": num_blocks, "block_size": config.cache.block_size}
    completed = complete_config(config.scheduler, predictor, config.parallel, longest=longest, **pool)
    scheduler = Scheduler(completed, predictor=predictor, max_prompt_tokens=longest, **pool)
    found = Simulation(scheduler, LivePipeline([real], rehearsed=rehearsed), trace).run().requests
    return TokenTimes(trace.arrival_s, found.first_token_s, found.finish_s, trace.output_tokens)


def joined(times: Sequence[TokenTimes]) -> TokenTimes:
    """The requests of several runs."""
    names = [one.name for one in fields(TokenTimes)]
    return TokenTimes(**{name: np.concatenate([getattr(one, name) for one in times]) for name in names})


def figures_of(measured: TokenTimes, simulated: TokenTimes, is_long: Flags) -> dict[str, Figures]:
    """TTFT and TPOT on both sides, over all requests, the long and the short ones."""
    return {
        f"{metric}, {whose}": compared(*(getattr(times, METRICS[metric])[rows] for times in (measured, simulated)))
        for whose, rows in (("all", np.ones_like(is_long)), ("long", is_long), ("short", ~is_long))
        for metric in ("TTFT", "TPOT")
        if rows.any()
    }


def live_fidelity_command(
    runs: Annotated[int, typer.Option(min=1, help="Of the same requests, with other arrivals.")] = 12,
    load: Annotated[float, typer.Option(min=0.01, help="Part of the simulated capacity that the stream takes.")] = 0.6,
    seed: Annotated[int, typer.Option(min=0, help="Of arrivals, lengths, prompts and weights.")] = 0,
    output_json: OutputJson = None,
) -> None:
    """Simulated against measured request times: the engine of this machine, within five minutes."""
    check_writable(output_json)
    options = LiveOptions(runs=runs, load=load, seed=seed)
    with Console(stderr=True).status("profiling, rehearsing, serving"):
        report = live_fidelity(options)
    deliver(report, output_json)


if __name__ == "__main__":
    main(live_fidelity_command)
