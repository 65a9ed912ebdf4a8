"""The long run: python -m tests.fuzz --runs 1000 --ranks 2-8"""

import os
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import is_dataclass, replace
from pathlib import Path
from pprint import pprint
from typing import Any

from transformers.utils.logging import disable_progress_bar

from tests.fuzz.cases import Ask, Case, draw
from tests.fuzz.drive import failure_of
from tests.fuzz.reference import Failure
from tests.parallel.workers import WorkerPool
from tools.command import main

SEEDS = Path(__file__).with_name("seeds.txt")
_SHRINK_S = 600.0
_RENEWED_AFTER = 300  # runs: what processes pile up over many engines goes with them
_KEPT = ("temperature", "seed", "max_tokens")  # of requests: without them there is more, or what no reference tells


def run(runs: int = 100, ranks: str = "1", first: int = 0) -> int:
    """Run so many seeds from the first on, over a number of ranks or, as in 2-8, over each of these by turns; a failure
    is shrunk, printed and recorded."""
    least, _, most = ranks.partition("-")
    numbers = range(int(least), int(most or least) + 1)
    num_failed = 0
    with closing(WorkerPool()) as workers:
        try:
            for number, seed in enumerate(range(first, first + runs), start=1):
                world = numbers[seed % len(numbers)]
                failure = failure_of(draw(seed, world), workers)
                if failure is not None:
                    num_failed += 1
                    _keep(seed, world, failure, workers)
                if number % 20 == 0 or number == runs:
                    print(f"{number} of {runs}, to seed {seed}, {num_failed} failed", flush=True)
                if number % _RENEWED_AFTER == 0:
                    workers.close()
        except KeyboardInterrupt:
            print(f"stopped; --first {seed} goes on from here", flush=True)
    return int(num_failed > 0)


def _keep(seed: int, ranks: int, failure: Failure, workers: WorkerPool) -> None:
    """Shrink a failing case and print it, for :func:`tests.fuzz.drive.failure_of`; its seed joins the recorded ones."""
    print(f"seed {seed} on {ranks} ranks: {failure}\nshrinking for up to {_SHRINK_S:.0f} s", flush=True)
    with SEEDS.open("a") as file:
        file.write(f"{seed} {ranks}  # {failure.kind}\n")

    def fails(case: Case) -> bool:
        found = failure_of(case, workers)
        return found is not None and found.kind == failure.kind

    pprint(shrink(draw(seed, ranks), fails, limit_s=_SHRINK_S), width=118, sort_dicts=False)


def shrink(case: Case, fails: Callable[[Case], bool], *, limit_s: float) -> Case:
    """The smallest case found, within the time, that still ``fails`` in the same way."""
    end_s = time.monotonic() + limit_s
    index = num_passed = 0  # those since the last that failed
    while num_passed < len(candidates := [less for less in smaller(case) if less != case]) and time.monotonic() < end_s:
        candidate = candidates[index % len(candidates)]
        if fails(candidate):
            case, num_passed = candidate, 0
        else:
            index, num_passed = index + 1, num_passed + 1
    return case


def smaller(value: Any) -> Iterator[Any]:
    """The same with a little less in it: fewer requests or names, a field as it is by default, less in one part; some
    of it may be no case that can run, which fails in another way."""
    if is_dataclass(value):
        plain = type(value)()
        for name, its in sorted(vars(value).items(), key=lambda field: field[0] != "asks"):
            default = () if name in ("length", "params") else (getattr(plain, name),)  # of which there is more
            yield from (replace(value, **{name: less}) for less in (*default, *smaller(its)))
    elif isinstance(value, dict):
        names = [name for name in value if name not in _KEPT]
        yield from ({other: its for other, its in value.items() if other != name} for name in names)
        yield from (value | {name: less} for name in value if name != "seed" for less in smaller(value[name]))
    elif isinstance(value, tuple):
        sizes = [len(value) // 2**n for n in range(1, len(value).bit_length())] if Ask in map(type, value) else []
        yield from (value[:at] + value[at + size :] for size in sizes for at in range(0, len(value), size))
        for at, one in enumerate(value):
            yield from ((*value[:at], less, *value[at + 1 :]) for less in smaller(one))
    elif isinstance(value, int) and value > 1:
        yield from (value // 2, value - 1)


if __name__ == "__main__":
    os.environ["HF_HUB_OFFLINE"] = "1"
    disable_progress_bar()
    main(run)
