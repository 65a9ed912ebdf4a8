"""``medha bench accuracy``: how often a step takes what was predicted, against how often it takes what it took before.

The real engine, with the paper's scheduler, reads a mix of short, middle and long prompts that arrive by steps, so the
mix is the same on any machine. A step's prediction is the one made before dispatch. After every step one of a set of
steps, which the engine ran in a first, uncounted round, is run again by hand: how often those come within 15 % of the
median of their own four runs nearest in time is what the machine allows (a shared machine drifts).
"""

from __future__ import annotations

import math
import random
import statistics
import tempfile
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from itertools import cycle, islice, product
from pathlib import Path
from typing import Any, NamedTuple

from medha.batch import Batch
from medha.bench.cli import COUNT, SUBJECT, Report, asked, verb
from medha.bench.harness import Local, Subject, on_ranks
from medha.cli.options import pick
from medha.config.fields import finite
from medha.cost.predictor import KINDS, Kind
from medha.engine.engine import Engine
from medha.errors import ConfigError
from medha.params import SamplingParams
from medha.profile.calibrate import QUICK, measure
from medha.profile.steps import Step, step_of
from medha.sched.decision import Prediction

TOLERANCE = 0.15
KV_RANGES = (1024, 4096, 16384, 65536)
"""Upper ends of the ranges; a step counts by the longest KV cache in it."""
_ALL = "all"
_NEAR = 4
_BLOCK_SIZE = 256


@dataclass(frozen=True, slots=True)
class AccuracyOptions:
    """What is run: rounds of a mix of requests, after one that does not count; without a ``profile``, what steps cost
    is measured first.

    While a long prompt is read ``num_short`` and ``num_middle`` others come, ``steps_between`` steps apart in the mean;
    a second long one is read alone. Pairs are the fewest and most tokens; ``shapes`` steps of each kind and KV range
    are repeated.
    """

    subject: Subject = field(default_factory=Subject)
    num_rounds: int = asked(3, "Counted rounds of the mix.", COUNT)
    long_len: int = asked(16384, "Tokens of the long prompt of a round.", COUNT)
    t_target_s: float = asked(0.25, "Seconds that a step may take.", finite(0, is_open=True))
    seed: int = 0
    num_short: int = 40
    num_middle: int = 4
    short_lens: tuple[int, int] = (50, 500)
    middle_lens: tuple[int, int] = (1500, 4000)
    output_lens: tuple[int, int] = (4, 24)
    steps_between: float = 4.0
    shapes: int = 3

    @property
    def max_model_len(self) -> int:
        """Tokens of the longest request."""
        return max(self.long_len, self.middle_lens[1], self.short_lens[1]) + self.output_lens[1]

    @property
    def num_blocks(self) -> int:
        """KV blocks of all of the mix at once, so that no request waits for memory."""
        lens = [self.long_len, *[self.middle_lens[1]] * self.num_middle, *[self.short_lens[1]] * self.num_short]
        return sum(-(-(length + self.output_lens[1]) // _BLOCK_SIZE) for length in lens) + 2048 // _BLOCK_SIZE


class Ran(NamedTuple):
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
    def cell(self) -> tuple[Kind, str]:
        """Its kind, and the range of the longest KV cache in it."""
        return self.kind, kv_range(max(part.position for part in self.step))


def kv_range(kv: int) -> str:
    """The range that a KV length lies in, in words."""
    for low, high in zip((0, *KV_RANGES), KV_RANGES, strict=False):
        if kv < high:
            return f"{low // 1024}K-{high // 1024}K"
    return f"{KV_RANGES[-1] // 1024}K-"


def accuracy(options: AccuracyOptions) -> Report:
    """Predicted against real step times of the engine, beside the machine's own repeatability; one process.

    Without --profile, what steps cost is measured first.
    """
    subject, longest = options.subject, options.max_model_len
    engine: dict[str, Any] = {"t_target_s": options.t_target_s, "block_size": _BLOCK_SIZE, "seed": options.seed}
    engine["num_kv_blocks"] = options.num_blocks
    with tempfile.TemporaryDirectory(prefix="medha-bench-") as folder:
        if subject.engine.get("profile") is None:
            found = measure(subject.config(longest=longest, **engine), QUICK, max_kv=options.long_len)
            assert found is not None, "one process measures"
            engine["profile"] = str(Path(folder) / "profile.json")
            Path(engine["profile"]).write_text(found.to_json())
        report = on_ranks(subject, lambda local: _measure(local, options), longest=longest, fills=True, **engine)
    assert report is not None, "one process has the engine"
    return report


def _measure(local: Local, options: AccuracyOptions) -> Report:
    predictor = local.engine.scheduler.predictor
    if local.config.parallel.world_size > 1 or local.config.scheduler.scheduler != "medha":
        raise ConfigError("accuracy is of the medha scheduler's predictions on one rank; accepted: no other")
    ran, repeated = _run(local, options)
    return local.report("accuracy", asdict(options)) | {
        "tolerance": TOLERANCE,
        "lines": lines_of(ran, repeated),
        "factors": {kind: predictor.factor(kind) for kind in KINDS},
    }


def _run(local: Local, options: AccuracyOptions) -> tuple[list[Ran], list[tuple[Step, Kind, float]]]:
    """All rounds; the steps of the counted ones, and the runs of identical steps."""
    hand, ran = local.hand, list[Ran]()
    repeated: list[tuple[Step, Kind, float]] = []
    turns: Iterator[tuple[Step, Kind]] = iter(())

    def note(batch: Batch, prediction: Prediction | None, busy_s: float) -> None:
        assert prediction is not None, "the medha scheduler predicts every batch"
        ran.append(Ran(step_of(batch), prediction.kind, prediction.seconds, busy_s))

    local.engine.on_step = note
    for number in range(1 + options.num_rounds):
        for _ in _round(local.engine, options, number):
            for step, kind in islice(turns, 1):
                repeated.append((step, kind, hand.run(step)[1]))
        if number == 0:
            turns = cycle(_shapes(ran, options.shapes, seed=options.seed))
            ran.clear()
    return ran, repeated


def _round(engine: Engine, options: AccuracyOptions, number: int) -> Iterator[None]:
    """One mix of requests to its end, then a long prompt alone; yields after every step."""
    dice = random.Random(options.seed * 1_000_003 + number)
    lens = [dice.randint(*options.short_lens) for _ in range(options.num_short)]
    lens += [dice.randint(*options.middle_lens) for _ in range(options.num_middle)]
    dice.shuffle(lens)
    due, num_steps = 0.0, 0
    waiting = []
    for length in [options.long_len, *lens]:
        waiting.append((due, length))
        due += dice.expovariate(1 / options.steps_between)
    waiting.append((math.inf, options.long_len))
    while waiting or engine.has_unfinished:
        while waiting and (waiting[0][0] <= num_steps or not engine.has_unfinished):
            _, length = waiting.pop(0)
            prompt = [dice.randrange(engine.limits.vocab_size) for _ in range(length)]
            params = SamplingParams(temperature=0.0, max_tokens=dice.randint(*options.output_lens), ignore_eos=True)
            engine.add_request(f"{number}-{len(waiting)}", prompt, params)
        engine.step()
        num_steps += 1
        yield


def _shapes(ran: Sequence[Ran], number: int, *, seed: int) -> list[tuple[Step, Kind]]:
    """A few steps of each kind and KV range, in mixed order."""
    cells: dict[tuple[Kind, str], list[Step]] = defaultdict(list)
    for one in ran:
        cells[one.cell].append(one.step)
    dice = random.Random(seed)
    chosen = [(step, cell[0]) for cell, of in cells.items() for step in dice.sample(of, min(number, len(of)))]
    dice.shuffle(chosen)
    return chosen


def repeats_of(repeated: Sequence[tuple[Step, Kind, float]]) -> list[Ran]:
    """Each run of a step that ran at least three times; expected is the median of its runs nearest in time, whose order
    ``repeated`` has."""
    by_step: dict[tuple[Step, Kind], list[float]] = defaultdict(list)
    for step, kind, seconds in repeated:
        by_step[step, kind].append(seconds)
    return [
        Ran(step, kind, statistics.median(_nearest(times, i)), times[i])
        for (step, kind), times in by_step.items()
        if len(times) >= 3
        for i in range(len(times))
    ]


def _nearest(times: Sequence[float], index: int) -> list[float]:
    """The other times nearest to ``index``."""
    return [times[i] for i in sorted(range(len(times)), key=lambda i: abs(i - index))[1 : 1 + _NEAR]]


def lines_of(ran: Sequence[Ran], repeated: Sequence[tuple[Step, Kind, float]]) -> list[Report]:
    """The lines of the result: all steps, each kind, each kind and KV range; KV is the longest in a step.

    ``within``: share of steps within the tolerance of their prediction; ``repeatability``: of identical steps within it
    of each other (kinds and KV ranges weigh as among the steps; None without any); ``ratio`` is of the two.
    ``mean_signed`` is above 0 where predictions are too long.
    """
    repeats = repeats_of(repeated)
    lines: list[Report] = []
    for kind, kv in [(_ALL, _ALL), *product(KINDS, (_ALL, *map(kv_range, (0, *KV_RANGES))))]:
        steps = [one for one in ran if kind in (_ALL, one.kind) and kv in (_ALL, one.cell[1])]
        if not steps:
            continue
        within = statistics.fmean(one.is_within for one in steps)
        share, cells = _repeatability(steps, repeats), {one.cell for one in steps}
        line = {"kind": kind, "kv": kv, "steps": len(steps), "within": within}
        line |= {"repeats": sum(one.cell in cells for one in repeats), "repeatability": share}
        line |= {"ratio": within / share if share else None}
        line |= {"mean_abs": statistics.fmean(abs(one.error) for one in steps)}
        lines.append(line | {"mean_signed": statistics.fmean(one.error for one in steps)})
    return lines


def _repeatability(steps: Sequence[Ran], same: Sequence[Ran]) -> float | None:
    """Share of repeats within the tolerance, kinds and KV ranges weighing as they do among ``steps``."""
    shares: dict[tuple[Kind, str], list[bool]] = defaultdict(list)
    for one in same:
        shares[one.cell].append(one.is_within)
    known = [statistics.fmean(found) for one in steps if (found := shares.get(one.cell))]
    return statistics.fmean(known) if known else None


_NOTES = (
    f"within: steps within {TOLERANCE:.0%} of their prediction, made before dispatch; repeatability: identical steps "
    "within that of the median of their four runs nearest in time; KV: the longest in a step",
)
verb("accuracy", AccuracyOptions, accuracy, {"factors": (), "lines": ()}, _NOTES, SUBJECT, pick("profile"))
