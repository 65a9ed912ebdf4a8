"""``python -m tools.live_fidelity``: the engine of this machine against the simulator that is told what its steps cost.

One process serves a stream of short requests and some long ones with the paper's scheduler. Before, what steps cost is
measured as ``medha profile --quick`` does; the engine predicts with that profile and so does the simulator, which gets
the same arrivals, lengths and settings. A profile measures steps by themselves, one after the other. So the same
requests are served once before, at other times, in a rehearsal: by how much its steps differ from their predictions, by
kind, corrects those of the simulator, and what the engine takes beside a step, to schedule and to hand out tokens, is
measured there and added to each simulated step. Nothing is taken from the run that is compared. How fast requests
arrive follows from a simulation of all of them at once: they come within that time divided by the load.
"""

from __future__ import annotations

import math
import os
import random
import statistics
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, NoReturn

import numpy as np
import typer
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from medha.batch import Batch
from medha.bench.harness import RANDOM_LLAMA, Local, Subject, on_ranks, random_prompt
from medha.bench.serve import CONVOY_MODEL
from medha.cli.command import end_process, make_app, run_app
from medha.cli.report import check_writable, machine_line, stamp, write_report
from medha.cli.table import report_console
from medha.config import EngineConfig
from medha.cost.coefficients import Coefficients
from medha.cost.correction import KINDS, Kind
from medha.cost.predictor import Predictor
from medha.cost.prefill_time import complete_config
from medha.engine.arrivals import Arrival, drive
from medha.engine.engine import Engine
from medha.errors import ConfigError
from medha.models.hf_config import parse_hf_overrides
from medha.outputs import RequestOutput
from medha.params import SamplingParams
from medha.profile.calibrate import QUICK
from medha.profile.measure import measure
from medha.sched.decision import Prediction
from medha.sched.scheduler import Scheduler
from medha.sim.outcome import Outcome
from medha.sim.pipeline import Pipeline
from medha.sim.simulator import Simulation
from medha.workload.trace import Trace
from tools.tables import Floats

LIVE_LLAMA: dict[str, Any] = CONVOY_MODEL | {
    "hidden_size": 512,
    "intermediate_size": 1408,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
}
"""A model whose steps take much longer than the engine around them; fields of its ``config.json``."""
AIM = 0.10
"""Largest absolute error aimed at of a percentile over all requests."""
_BLOCK_SIZE = 256
_STAGES = 4
_NUM_WARM = 8
_REHEARSAL = 1 << 20
_NOTHING = dict.fromkeys(KINDS, (0.0, 0))
_PERCENTILES = (50, 90)


@dataclass(frozen=True, slots=True)
class LiveOptions:
    """The load.

    Attributes:
        num_short, num_long: requests.
        short_lens, long_lens: fewest and most prompt tokens; drawn evenly.
        output_lens: fewest and most output tokens; drawn evenly.
        load: they arrive within the simulated time of all of them at once, divided by this.
        t_target_s: seconds of a batch.
        seed: of lengths, arrivals, prompts and weights.
        shape: fields of the model's ``config.json``.
    """

    num_short: int = 36
    num_long: int = 6
    short_lens: tuple[int, int] = (50, 500)
    long_lens: tuple[int, int] = (2000, 4000)
    output_lens: tuple[int, int] = (16, 48)
    load: float = 0.6
    t_target_s: float = 0.25
    seed: int = 0
    shape: Mapping[str, Any] | None = None

    def __post_init__(self) -> None:
        if not 0 < self.load < math.inf:
            raise ConfigError(f"load={self.load!r}; accepted: a finite number above 0")

    @property
    def config(self) -> dict[str, Any]:
        """Fields of the model's ``config.json``."""
        return LIVE_LLAMA | dict(self.shape or {})

    @property
    def max_model_len(self) -> int:
        """Tokens of the longest request."""
        return max(self.long_lens[1], self.short_lens[1]) + self.output_lens[1]


@dataclass(frozen=True, slots=True)
class Ask:
    """A request; its prompt is random, and no end of sequence ends it. ``arrival_s`` is after the start."""

    request_id: str
    num_prompt_tokens: int
    num_output_tokens: int
    arrival_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Served:
    """What became of a request; times in seconds after the start of the stream.

    Attributes:
        first_token_s, finished_s: None where it never came that far.
        has_finished: it has all of its tokens.
        tpot_s: mean time between tokens after the first; None with fewer than two.
    """

    request_id: str
    arrival_s: float
    first_token_s: float | None
    finished_s: float | None
    has_finished: bool
    tpot_s: float | None

    @property
    def ttft_s(self) -> float | None:
        """Arrival to first token, seconds."""
        return None if self.first_token_s is None else self.first_token_s - self.arrival_s


@dataclass(frozen=True, slots=True)
class Stream:
    """Requests served as they arrived.

    Attributes:
        served: in the order of the requests.
        prediction: count, mean absolute and mean signed error of predicted batch seconds, as shares, since the start.
        overhead_s: seconds of a step beyond what it computed, the median.
        busy_ratio: computed seconds relative to uncorrected predictions; None where nothing is predicted.
        factors: the same by kind of step, and how many steps there were.
    """

    served: tuple[Served, ...]
    prediction: Mapping[str, float]
    overhead_s: float = 0.0
    busy_ratio: float | None = None
    factors: Mapping[str, tuple[float, int]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class LiveFigure:
    """A percentile on both sides, seconds.

    Attributes:
        name: of the figure and of whom it is over.
        num_requests: over which it is.
    """

    name: str
    num_requests: int
    measured: float
    simulated: float

    @property
    def error(self) -> float:
        """Signed, a share of what was measured."""
        return self.simulated / self.measured - 1.0


@dataclass(frozen=True, slots=True)
class LiveFidelity:
    """What a comparison came to.

    Attributes:
        requests: of the stream, in order of arrival.
        stream: what became of them on the engine.
        outcome: in the simulator.
        figures: over all requests, then over the long ones.
        overhead_s: of the engine at each step, measured in the rehearsal.
        factors: of each kind of step, from the rehearsal.
        load_average: of the machine before and after.
    """

    requests: tuple[Ask, ...]
    stream: Stream
    outcome: Outcome
    figures: tuple[LiveFigure, ...]
    overhead_s: float
    factors: Mapping[str, float]
    load_average: tuple[float, float]


def live_fidelity(options: LiveOptions, *, on_stage: Callable[[str], None] = lambda name: None) -> LiveFidelity:
    """Profile, serve and simulate.

    Args:
        options: the load.
        on_stage: told what begins: ``profiling``, ``warming up``, ``rehearsing`` and ``serving``.

    Raises:
        RankFailedError: a process of the engine ended.
    """
    load = os.getloadavg()[0]
    subject = Subject(hf_overrides=options.config, engine=_engine(options))
    longest = options.max_model_len
    with tempfile.TemporaryDirectory(prefix="medha-bench-") as folder:
        profile = Path(folder) / "profile.json"
        on_stage("profiling")
        with subject.folder(longest) as model:
            coefficients = measure(subject.config(model, longest=longest), QUICK, max_kv=longest)
        assert coefficients is not None, "one process measures"
        profile.write_text(coefficients.to_json())
        on_stage("warming up")

        def work(local: Local) -> dict[str, Any]:
            return {"found": _served_live(local, options, coefficients, load, on_stage)}

        answer = on_ranks(subject, work, longest=longest, profile=str(profile))
    assert answer is not None, "one process has the engine"
    found: LiveFidelity = answer["found"]
    return found


def _served_live(
    local: Local, options: LiveOptions, coefficients: Coefficients, load: float, on_stage: Callable[[str], None]
) -> LiveFidelity:
    """Warm up, rehearse, serve and simulate."""
    mix, config = make_mix(options), local.config
    serve(local.engine, warm_up(mix), seed=options.seed)
    on_stage("rehearsing")
    span_s = simulate(config, coefficients, mix).duration_s / options.load
    rehearsal = serve(local.engine, spread(mix, span_s, seed=options.seed + _REHEARSAL), seed=options.seed + _REHEARSAL)
    coefficients = replace(coefficients, host_s=coefficients.host_s + max(rehearsal.overhead_s, 0.0))
    span_s = simulate(config, coefficients, mix, rehearsal.factors).duration_s / options.load
    requests = spread(mix, span_s, seed=options.seed)
    on_stage("serving")
    stream = serve(local.engine, requests, seed=options.seed)
    outcome = simulate(config, coefficients, requests, rehearsal.factors)
    figures = compare(requests, stream, outcome)
    factors = {kind: factor for kind, (factor, _) in rehearsal.factors.items()}
    return LiveFidelity(requests, stream, outcome, figures, rehearsal.overhead_s, factors, (load, os.getloadavg()[0]))


def serve(engine: Engine, requests: Sequence[Ask], *, seed: int) -> Stream:
    """Serve random prompts as they arrive."""
    chance = np.random.default_rng(seed)
    arrivals = [
        Arrival(
            one.request_id,
            random_prompt(one.num_prompt_tokens, engine.limits.vocab_size, chance),
            SamplingParams(
                temperature=0.0, max_tokens=one.num_output_tokens, ignore_eos=True, output_kind="final_only"
            ),
            arrival_s=one.arrival_s,
        )
        for one in requests
    ]
    start_s, overheads = engine.now(), _Overheads(engine)
    outputs = drive(engine, arrivals, on_step=overheads.step_ended)
    served = {output.request_id: _served(output, start_s) for output in outputs if output.finished}
    engine.on_step = None
    predictor = engine.scheduler.predictor
    errors = {} if predictor is None else asdict(predictor.correction.errors.figures())
    by_request = tuple(served[one.request_id] for one in requests)
    return Stream(by_request, errors, overheads.median_s, overheads.busy_ratio, overheads.factors)


def _served(output: RequestOutput, start_s: float) -> Served:
    if output.error is not None:
        raise output.error  # the requests are right, and the pool holds them all
    metrics = output.metrics
    first_s, finished_s = (None if at is None else at - start_s for at in (metrics.first_token, metrics.finished))
    has_finished = output.outputs[0].finish_reason == "length"
    return Served(output.request_id, metrics.arrival - start_s, first_s, finished_s, has_finished, metrics.tpot)


class _Overheads:
    """Seconds of an engine's steps beyond what they computed, where one follows another; for one rank alone.

    Beside them, how the computed seconds compare with what coefficients said of them, without their correction.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._since_s: float | None = None
        self._busy_s = 0.0
        self._steps: dict[Kind, list[tuple[float, float]]] = {kind: [] for kind in KINDS}  # seconds predicted, taken
        self._seconds: list[float] = []
        engine.on_step = self._computed

    def _computed(self, batch: Batch, prediction: Prediction | None, busy_s: float) -> None:
        self._busy_s = busy_s
        if prediction is not None:
            self._steps[prediction.kind].append((prediction.seconds / prediction.factor, busy_s))

    def step_ended(self) -> None:
        """Told after each step."""
        now_s = self._engine.now()
        if self._since_s is not None:
            self._seconds.append(now_s - self._since_s - self._busy_s)
        self._since_s = now_s if self._engine.has_unfinished else None  # otherwise it may wait for an arrival

    @property
    def median_s(self) -> float:
        """Of all steps so far; 0 without any."""
        return statistics.median(self._seconds or [0.0])

    @property
    def busy_ratio(self) -> float | None:
        """Seconds of all predicted steps relative to their uncorrected predictions; None without any."""
        steps = [step for kind in KINDS for step in self._steps[kind]]
        return _ratio(steps) if steps else None

    @property
    def factors(self) -> dict[str, tuple[float, int]]:
        """The same by kind of step, and how many there were; of those that were."""
        return {kind: (_ratio(steps), len(steps)) for kind, steps in self._steps.items() if steps}


def _ratio(steps: Sequence[tuple[float, float]]) -> float:
    """Seconds taken relative to those predicted, over all steps."""
    return sum(taken_s for _, taken_s in steps) / sum(predicted_s for predicted_s, _ in steps)


def make_mix(options: LiveOptions) -> tuple[Ask, ...]:
    """The requests, all at once, in the order in which they will arrive."""
    chance = random.Random(options.seed)
    kinds = [("long", options.long_lens)] * options.num_long + [("short", options.short_lens)] * options.num_short
    chance.shuffle(kinds)
    return tuple(
        Ask(f"{kind}-{i}", chance.randint(*lens), chance.randint(*options.output_lens))
        for i, (kind, lens) in enumerate(kinds)
    )


def spread(mix: Sequence[Ask], span_s: float, *, seed: int) -> tuple[Ask, ...]:
    """The same requests as a Poisson process within so many seconds, given their number."""
    chance = random.Random(seed + 1)
    arrivals = sorted(chance.uniform(0.0, span_s) for _ in mix)
    return tuple(replace(request, arrival_s=at_s) for request, at_s in zip(mix, arrivals, strict=True))


def simulate(
    config: EngineConfig,
    coefficients: Coefficients,
    requests: Sequence[Ask],
    factors: Mapping[str, tuple[float, int]] | None = None,
) -> Outcome:
    """The requests in the simulator, one rank on the CPU.

    Args:
        config: of the engine; it says how many KV blocks there are.
        coefficients: what its steps cost.
        requests: in order of arrival.
        factors: on the seconds of each kind of step, and how many steps taught it; None is 1.
    """
    longest, num_blocks = config.max_model_len, config.cache.num_blocks
    assert longest is not None and num_blocks is not None, "a live run gives both"
    block_size = config.cache.block_size
    predictor, real = (Predictor(coefficients, max_tokens=config.scheduler.max_batch_tokens) for _ in range(2))
    if factors:
        known = {kind: (math.log(factor), count) for kind, (factor, count) in factors.items()}
        predictor.correction.restore(_NOTHING | known)
        real.correction.restore(_NOTHING | known)
    pool = {"num_blocks": num_blocks, "block_size": block_size}
    scheduler = Scheduler(
        complete_config(config.scheduler, predictor, config.parallel, longest=longest, **pool),
        predictor=predictor,
        max_prompt_tokens=longest,
        **pool,
    )
    trace = Trace(
        np.array([request.arrival_s for request in requests]),
        np.array([request.num_prompt_tokens for request in requests]),
        np.array([request.num_output_tokens for request in requests]),
        np.array([request.request_id for request in requests]),
    )
    return Simulation(scheduler, Pipeline([real]), trace, driver_waits=True).run()


def compare(requests: Sequence[Ask], stream: Stream, outcome: Outcome) -> tuple[LiveFigure, ...]:
    """TTFT and TPOT at P50 and P90 on both sides, over all requests and over the long ones."""
    measured = np.array([(one.ttft_s, one.tpot_s) for one in stream.served], dtype=np.float64)
    found, trace = outcome.requests, outcome.trace
    tpot_s = (found.finish_s - found.first_token_s) / np.maximum(trace.output_tokens - 1, 1)
    simulated = np.stack([found.first_token_s - trace.arrival_s, tpot_s], axis=1)
    is_long = np.array([request.request_id.startswith("long") for request in requests])
    figures = []
    for whose, rows in (("all", np.ones_like(is_long)), ("long", is_long), ("short", ~is_long)):
        for column, name in enumerate(("TTFT", "TPOT")):
            sides: list[Floats] = [side[rows, column] for side in (measured, simulated)]
            for share in _PERCENTILES if rows.any() else ():
                values = (float(np.percentile(side, share)) for side in sides)
                figures.append(LiveFigure(f"{name} P{share}, {whose}", int(rows.sum()), *values))
    return tuple(figures)


def _engine(options: LiveOptions) -> dict[str, Any]:
    """Options of the engine; the pool holds all requests at once."""
    lengths = [(options.num_long, options.long_lens), (options.num_short, options.short_lens)]
    blocks = [num * -(-(lens[1] + options.output_lens[1]) // _BLOCK_SIZE) for num, lens in lengths]
    return {
        "load_format": "dummy",
        "dtype": "float32",
        "device": "cpu",
        "num_threads": 1,
        "seed": options.seed,
        "max_model_len": options.max_model_len,
        "block_size": _BLOCK_SIZE,
        "num_kv_blocks": sum(blocks),
        "max_num_seqs": options.num_long + options.num_short,
        "long_threshold": options.long_lens[0],
        "t_target_s": options.t_target_s,
    }


def warm_up(mix: Sequence[Ask]) -> list[Ask]:
    """The longest prompt and a few of the others, all at once."""
    longest = max(mix, key=lambda request: request.num_prompt_tokens)
    return [replace(request, request_id=f"warm-{i}") for i, request in enumerate([longest, *mix[:_NUM_WARM]])]


def run_and_print(options: LiveOptions, output_json: Path | None) -> int:
    """Compare with a progress bar on stderr, print the table on stdout and write the report; returns 0."""
    check_writable(output_json)
    with Progress(console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("", total=_STAGES, completed=-1)

        def on_stage(name: str) -> None:
            bar.update(task, advance=1, description=name)

        found = live_fidelity(options, on_stage=on_stage)
    console = report_console()
    for line in _load(options, found):
        console.print(line, highlight=False)
    console.print(_table(found))
    worst = max(abs(figure.error) for figure in found.figures if figure.name.endswith("all"))
    verdict = "met" if worst <= AIM else "missed"
    console.print(f"largest error over all requests: {worst:.1%}, aim {AIM:.0%}: {verdict}", highlight=False)
    console.print(f"{machine_line()}; one run, after a rehearsal of as many requests")
    write_report(output_json, report(options, found))
    return 0


def _load(options: LiveOptions, found: LiveFidelity) -> list[str]:
    before, after = found.load_average
    span_s = found.requests[-1].arrival_s
    return [
        f"random Llama, one process, one thread, float32; load average {before:.1f} before and {after:.1f} after",
        f"{options.num_short} prompts of {options.short_lens[0]} to {options.short_lens[1]} tokens and "
        f"{options.num_long} of {options.long_lens[0]:,} to {options.long_lens[1]:,} within {span_s:.1f} s (Poisson), "
        f"{options.output_lens[0]} to {options.output_lens[1]} output tokens each; seed {options.seed}",
        f"scheduler medha, policy lars, t_target_s {options.t_target_s:g}; load {options.load:g}; steps cost what a "
        f"profile measured now says times what a rehearsal took of it ({_named(found.factors)}), and "
        f"{found.overhead_s * 1e3:.2f} ms of the engine's own",
        f"steps computed for {found.stream.busy_ratio or math.nan:.2f} of the time that the profile says",
    ]


def _named(factors: Mapping[str, float]) -> str:
    return ", ".join(f"{kind} {factor:.2f}" for kind, factor in factors.items())


def _table(found: LiveFidelity) -> Table:
    table = Table(title="simulated against measured; milliseconds", box=SIMPLE_HEAD)
    table.add_column("", no_wrap=True)
    for name in ("requests", "measured", "simulated", "error"):
        table.add_column(name, justify="right", no_wrap=True)
    for one in found.figures:
        values = f"{one.measured * 1e3:,.1f}", f"{one.simulated * 1e3:,.1f}", f"{one.error:+.1%}"
        table.add_row(one.name, str(one.num_requests), *values)
    return table


def report(options: LiveOptions, found: LiveFidelity) -> dict[str, Any]:
    """The comparison as what is written."""
    simulated = found.outcome.requests
    return {
        "benchmark": "fidelity --live",
        "environment": stamp(),
        "model": RANDOM_LLAMA | options.config,
        "options": asdict(options),
        "load_average": found.load_average,
        "overhead_s": found.overhead_s,
        "factors": dict(found.factors),
        "busy_ratio": found.stream.busy_ratio,
        "prediction": dict(found.stream.prediction),
        "figures": [{**asdict(figure), "error": figure.error} for figure in found.figures],
        "requests": [
            {
                **asdict(request),
                "measured": asdict(served) | {"ttft_s": served.ttft_s},
                "simulated": {"first_token_s": first_s, "finished_s": finish_s},
            }
            for request, served, first_s, finish_s in zip(
                found.requests,
                found.stream.served,
                simulated.first_token_s.tolist(),
                simulated.finish_s.tolist(),
                strict=True,
            )
        ],
    }


app = make_app()


@app.command()
def live_fidelity_command(
    load: Annotated[float, typer.Option(help="Part of the simulated capacity that the stream takes.")] = 0.6,
    seed: Annotated[int, typer.Option(min=0, help="Of arrivals, lengths, prompts and weights.")] = 0,
    hf_overrides: Annotated[
        str | None, typer.Option(help="Fields of the random Llama's config.json as JSON.", show_default=False)
    ] = None,
    output_json: Annotated[Path | None, typer.Option(help="Write the report here.")] = None,
) -> int:
    """Simulated against measured request times: the engine of this machine, within three minutes."""
    return run_and_print(
        LiveOptions(load=load, seed=seed, shape=parse_hf_overrides(hf_overrides) if hf_overrides else None), output_json
    )


def main() -> NoReturn:
    """Entry point of ``python -m tools.live_fidelity``. Ends in SystemExit."""
    end_process(run_app(app, "python -m tools.live_fidelity"))


if __name__ == "__main__":
    main()
