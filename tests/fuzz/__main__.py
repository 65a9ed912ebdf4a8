"""The long run: python -m tests.fuzz --runs 1000 --ranks 2-8"""

import os
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from pprint import pprint

from transformers.utils.logging import disable_progress_bar

from tests.fuzz.cases import Case, draw
from tests.fuzz.drive import failure_of
from tests.fuzz.reference import Failure
from tests.fuzz.shrink import shrink
from tests.parallel.workers import WorkerPool
from tools.command import main

SEEDS = Path(__file__).with_name("seeds.txt")
_SHRINK_S = 600.0
_RENEWED_AFTER = 300  # runs: what processes pile up over many engines goes with them


def recorded() -> Iterator[tuple[int, int]]:
    """(seed, ranks) of the list that every test run replays."""
    for line in SEEDS.read_text().splitlines():
        if fields := line.partition("#")[0].split():
            yield int(fields[0]), int(fields[1])


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


if __name__ == "__main__":
    os.environ["HF_HUB_OFFLINE"] = "1"
    disable_progress_bar()
    main(run)
