"""``medha bench accuracy``: how often a step takes what was predicted, against how often it takes what it took before.

The real engine, with the paper's scheduler, reads a mix of short, middle and long prompts; arrivals are in steps, so
the mix is the same on any machine. Each step's prediction is the one the packer made before dispatch, with the
correction of that moment. After every step of the engine one of a set of steps is run again, made by hand to the shape
of steps that the engine ran in a first, uncounted round. How often those come within 15 % of the median of their own
other runs is what the machine allows. Where a machine drifts, as a shared one does, a prediction that follows it beats
that; so the same is counted against the other runs nearest in time, and the larger share is what predictions are held
to. All shares are of the same run.
"""

from __future__ import annotations

import math
import random
import statistics
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, astuple, dataclass, field
from itertools import cycle
from pathlib import Path
from typing import Any

from medha.batch import Batch
from medha.bench.harness import Local, Report, Shown, Subject, on_ranks
from medha.cost.correction import KINDS, Kind
from medha.engine.engine import Engine
from medha.errors import ConfigError
from medha.params import SamplingParams
from medha.profile.calibrate import QUICK
from medha.profile.measure import measure
from medha.profile.steps import Step, StepRunner, step_of
from medha.sched.decision import Prediction

TOLERANCE = 0.15
KV_RANGES = (1024, 4096, 16384, 65536)
"""Upper ends of the ranges; a step counts by the longest KV cache in it."""
_ALL = "all"
_NEAR = 4
_BLOCK_SIZE = 256


@dataclass(frozen=True, slots=True)
class AccuracyOptions:
    """What is run.

    Attributes:
        subject: what runs; without a ``profile`` among its engine's options, what steps cost is measured first.
        num_rounds: counted rounds of the mix, after one that is not.
        num_short, num_middle: requests of a round that come while a long one is read; a second one is read alone.
        short_lens, middle_lens: least and most prompt tokens.
        long_len: prompt tokens of a long request.
        output_lens: least and most output tokens.
        steps_between: mean number of steps between arrivals.
        t_target_s: seconds of a step.
        shapes: steps to repeat of each kind and KV range.
    """

    subject: Subject = field(default_factory=Subject)
    num_rounds: int = 3
    num_short: int = 40
    num_middle: int = 4
    short_lens: tuple[int, int] = (50, 500)
    middle_lens: tuple[int, int] = (1500, 4000)
    long_len: int = 16384
    output_lens: tuple[int, int] = (4, 24)
    steps_between: float = 4.0
    t_target_s: float = 0.25
    shapes: int = 3
    seed: int = 0

    def __post_init__(self) -> None:
        if self.num_rounds < 1:
            raise ConfigError(f"num_rounds={self.num_rounds}; accepted: at least 1")

    @property
    def max_model_len(self) -> int:
        """Tokens of the longest request."""
        return max(self.long_len, self.middle_lens[1], self.short_lens[1]) + self.output_lens[1]

    @property
    def num_blocks(self) -> int:
        """KV blocks of all of the mix at once, so that no request waits for memory."""
        lens = [self.long_len, *[self.middle_lens[1]] * self.num_middle, *[self.short_lens[1]] * self.num_short]
        return sum(-(-(length + self.output_lens[1]) // _BLOCK_SIZE) for length in lens) + 2048 // _BLOCK_SIZE


@dataclass(frozen=True, slots=True)
class Ran:
    """One step: its shape and kind, the seconds expected of it and those it took."""

    step: Step
    kind: Kind
    expected_s: float
    busy_s: float

    @property
    def error(self) -> float:
        """Signed, as a share of the time taken."""
        return self.expected_s / self.busy_s - 1.0

    @property
    def is_within(self) -> bool:
        """Whether it took what was expected, within the tolerance on either side."""
        return abs(self.busy_s / self.expected_s - 1.0) <= TOLERANCE

    @property
    def kv_range(self) -> str:
        """By the longest KV cache in it."""
        return kv_range(max(part.kv_before for part in self.step))


@dataclass(frozen=True, slots=True)
class Line:
    """One line of the result.

    Attributes:
        kind, kv: which steps.
        steps: how many the engine ran.
        within: share of them within the tolerance of their prediction.
        repeats: runs of identical steps.
        repeatability: share of those within the tolerance of the median of their other runs, kinds and KV ranges
            weighing as among the steps; None without any.
        near: the same against the runs nearest in time.
        ratio: ``within`` over the larger of these two.
        mean_abs, mean_signed: error of the predictions; above 0 where they are too long.
    """

    kind: str
    kv: str
    steps: int
    within: float
    repeats: int
    repeatability: float | None
    near: float | None
    ratio: float | None
    mean_abs: float
    mean_signed: float


@dataclass(slots=True)
class _Log:
    """Steps of the engine since it was last cleared."""

    ran: list[Ran] = field(default_factory=list)

    def note(self, batch: Batch, prediction: Prediction | None, busy_s: float) -> None:
        assert prediction is not None, "the medha scheduler predicts every batch"
        self.ran.append(Ran(step_of(batch), prediction.kind, prediction.seconds, busy_s))


def kv_range(kv: int) -> str:
    """The range that a KV length lies in, in words."""
    for low, high in zip((0, *KV_RANGES), KV_RANGES, strict=False):
        if kv < high:
            return f"{low // 1024}K-{high // 1024}K"
    return f"{KV_RANGES[-1] // 1024}K-"


def accuracy(options: AccuracyOptions, *, on_progress: Callable[[float], None] = lambda done: None) -> Report:
    """Run the measurement, in one process.

    Args:
        options: what to run.
        on_progress: called with the share done.

    Raises:
        ConfigError: the options are wrong, or the profile is of something else.
    """
    subject, longest = options.subject, options.max_model_len
    engine: dict[str, Any] = {"t_target_s": options.t_target_s, "block_size": _BLOCK_SIZE, "seed": options.seed}
    engine["num_kv_blocks"] = options.num_blocks
    with tempfile.TemporaryDirectory(prefix="medha-bench-") as folder:
        if subject.engine.get("profile") is None:
            with subject.folder(longest) as model:
                config = subject.config(model, longest=longest, **engine)
                found = measure(config, QUICK, max_kv=options.long_len, on_progress=lambda at: on_progress(0.4 * at))
            assert found is not None, "one process measures"
            engine["profile"] = str(Path(folder) / "profile.json")
            Path(engine["profile"]).write_text(found.to_json())

        def work(local: Local) -> Report:
            return _measure(local, options, lambda at: on_progress(0.4 + 0.6 * at))

        report = on_ranks(subject, work, longest=longest, fills=True, **engine)
    assert report is not None, "one process has the engine"
    return report


def _measure(local: Local, options: AccuracyOptions, on_progress: Callable[[float], None]) -> Report:
    predictor = local.engine.scheduler.predictor
    if local.config.parallel.world_size > 1 or predictor is None or local.config.scheduler.scheduler != "medha":
        raise ConfigError("accuracy is of the medha scheduler's predictions on one rank; accepted: no other")
    sizes = {"block_size": _BLOCK_SIZE, "num_blocks": local.role.runner.cache.num_blocks}
    hand = StepRunner(local.engine.runner, vocab_size=local.model.vocab_size, **sizes)
    log, repeated = _run(local.engine, hand, options, on_progress)
    return local.report("accuracy", asdict(options)) | {
        "tolerance": TOLERANCE,
        "lines": [asdict(line) for line in lines_of(log.ran, repeated)],
        "chunks": [
            {"kv": kv, "median_tokens": size, "chunks": count} for kv, (size, count) in chunks_of(log.ran).items()
        ],
        "factors": {kind: predictor.factor(kind) for kind in KINDS},
        "steps": [[ran.kind, [astuple(part) for part in ran.step], ran.expected_s, ran.busy_s] for ran in log.ran],
        "repeats": [[kind, [astuple(part) for part in step], seconds] for step, kind, seconds in repeated],
    }


def _run(
    engine: Engine, hand: StepRunner, options: AccuracyOptions, on_progress: Callable[[float], None]
) -> tuple[_Log, list[tuple[Step, Kind, float]]]:
    """All rounds; the log of the counted ones, and the runs of identical steps."""
    log = _Log()
    engine.on_step = log.note
    repeated: list[tuple[Step, Kind, float]] = []
    turns: Iterable[tuple[Step, Kind]] = ()
    for number in range(1 + options.num_rounds):
        ahead = iter(turns)

        def again(ahead: Iterable[tuple[Step, Kind]] = ahead) -> None:
            for step, kind in ahead:
                repeated.append((step, kind, hand.run(step)[1]))
                break

        _round(engine, options, number, after_step=again)
        if number == 0:
            turns = cycle(_shapes(log.ran, options.shapes, seed=options.seed))
            log.ran.clear()
        on_progress((number + 1) / (1 + options.num_rounds))
    return log, repeated


def _round(engine: Engine, options: AccuracyOptions, number: int, *, after_step: Callable[[], None]) -> None:
    """One mix of requests to its end, then a long prompt alone."""
    dice = random.Random(options.seed * 1_000_003 + number)
    lens = [dice.randint(*options.short_lens) for _ in range(options.num_short)]
    lens += [dice.randint(*options.middle_lens) for _ in range(options.num_middle)]
    dice.shuffle(lens)
    due = 0.0
    waiting = []
    for length in [options.long_len, *lens]:
        waiting.append((due, length))
        due += dice.expovariate(1 / options.steps_between)
    waiting.append((math.inf, options.long_len))
    num_steps = 0
    while waiting or engine.has_unfinished:
        while waiting and (waiting[0][0] <= num_steps or not engine.has_unfinished):
            _, length = waiting.pop(0)
            prompt = [dice.randrange(engine.limits.vocab_size) for _ in range(length)]
            params = SamplingParams(temperature=0.0, max_tokens=dice.randint(*options.output_lens), ignore_eos=True)
            engine.add_request(f"{number}-{len(waiting)}", prompt, params)
        engine.step()
        num_steps += 1
        after_step()


def _shapes(ran: Sequence[Ran], number: int, *, seed: int) -> list[tuple[Step, Kind]]:
    """A few steps of each kind and KV range, in mixed order."""
    cells: dict[tuple[Kind, str], list[Step]] = defaultdict(list)
    for one in ran:
        cells[one.kind, one.kv_range].append(one.step)
    dice = random.Random(seed)
    chosen = [
        (step, kind) for (kind, _), steps in cells.items() for step in dice.sample(steps, min(number, len(steps)))
    ]
    dice.shuffle(chosen)
    return chosen


def repeats_of(repeated: Sequence[tuple[Step, Kind, float]], *, near: int | None = None) -> list[Ran]:
    """Each run of a step that ran at least three times, with the median of its other runs as what is expected.

    Args:
        repeated: in order of time.
        near: take the median of this many other runs, the nearest in time, in place of all.
    """
    by_step: dict[tuple[Step, Kind], list[float]] = defaultdict(list)
    for step, kind, seconds in repeated:
        by_step[step, kind].append(seconds)
    return [
        Ran(step, kind, statistics.median(_others(times, i, near or len(times))), times[i])
        for (step, kind), times in by_step.items()
        if len(times) >= 3
        for i in range(len(times))
    ]


def _others(times: Sequence[float], index: int, number: int) -> list[float]:
    """As many of the other times, the nearest to ``index``."""
    nearest = sorted((i for i in range(len(times)) if i != index), key=lambda i: abs(i - index))
    return [times[i] for i in nearest[:number]]


def lines_of(ran: Sequence[Ran], repeated: Sequence[tuple[Step, Kind, float]]) -> tuple[Line, ...]:
    """The lines of the result: all steps, each kind, each kind and KV range."""
    repeats, near = repeats_of(repeated), repeats_of(repeated, near=_NEAR)
    ends = [kv_range(end - 1) for end in KV_RANGES] + [kv_range(KV_RANGES[-1])]
    wanted = [(kind, kv) for kind in (_ALL, *KINDS) for kv in (_ALL, *(ends if kind != _ALL else ()))]
    lines = []
    for kind, kv in wanted:
        steps = [one for one in ran if kind in (_ALL, one.kind) and kv in (_ALL, one.kv_range)]
        if steps:
            lines.append(_line(kind, kv, steps, repeats, near))
    return tuple(lines)


def _line(kind: str, kv: str, steps: Sequence[Ran], repeats: Sequence[Ran], near: Sequence[Ran]) -> Line:
    within = statistics.fmean(one.is_within for one in steps)
    shares = _repeatability(steps, repeats), _repeatability(steps, near)
    best = max((share for share in shares if share is not None), default=None)
    cells = {(one.kind, one.kv_range) for one in steps}
    return Line(
        kind,
        kv,
        len(steps),
        within,
        sum((one.kind, one.kv_range) in cells for one in repeats),
        *shares,
        within / best if best else None,
        statistics.fmean(abs(one.error) for one in steps),
        statistics.fmean(one.error for one in steps),
    )


def _repeatability(steps: Sequence[Ran], same: Sequence[Ran]) -> float | None:
    """Share of repeats within the tolerance, kinds and KV ranges weighing as they do among ``steps``."""
    shares: dict[tuple[Kind, str], list[bool]] = defaultdict(list)
    for one in same:
        shares[one.kind, one.kv_range].append(one.is_within)
    known = [statistics.fmean(found) for one in steps if (found := shares.get((one.kind, one.kv_range)))]
    return statistics.fmean(known) if known else None


def chunks_of(ran: Sequence[Ran]) -> dict[str, tuple[float, int]]:
    """By KV range, the median tokens of chunks that had what the decodes left to themselves, and their number."""
    by_range: dict[str, list[int]] = defaultdict(list)
    chunks = [[part for part in one.step if not part.is_decode] for one in ran]
    for part in sorted((alone[0] for alone in chunks if len(alone) == 1), key=lambda part: part.kv_before):
        if not part.samples:  # the end of a prompt is as long as it is
            by_range[kv_range(part.kv_before)].append(part.q_len)
    return {name: (statistics.median(sizes), len(sizes)) for name, sizes in by_range.items()}


def shown(report: Report) -> Shown:
    """What is printed of the report."""
    options = report["options"]
    return {name: report[name] for name in ("factors", "lines", "chunks")}, [
        f"within: steps within {report['tolerance']:.0%} of their prediction, made before dispatch; repeatability: "
        "identical steps within that of the median of their other runs; near: of those nearest in time; ratio: to "
        "the larger; KV: the longest in a step",
        f"steps of {options['t_target_s']:g} s, seed {options['seed']}, {options['num_rounds']} rounds after one "
        "that does not count",
    ]
