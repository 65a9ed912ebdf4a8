"""The long run, and the search for defects that are put in.

python -m tests.fuzz run --runs 1000 --ranks 2-8
python -m tests.fuzz mutations [NAME ...]
"""

import os
import random
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from pprint import pprint
from typing import Annotated

import typer
from transformers.utils.logging import disable_progress_bar

from medha.cli.command import make_app, run_app
from tests.fuzz.cases import Case, draw
from tests.fuzz.drive import check_case
from tests.fuzz.mutations import MUTATIONS
from tests.fuzz.reference import Failure
from tests.fuzz.shrink import shrink
from tests.parallel.workers import WorkerPool

SEEDS = Path(__file__).with_name("seeds.txt")
_SHRINK_S = 600.0
_RENEWED_AFTER = 300  # runs: what processes pile up over many engines goes with them


def failure_of(case: Case, workers: WorkerPool | None, *, mutation: str | None = None) -> Failure | None:
    """What is wrong with a case."""
    with tempfile.TemporaryDirectory(prefix="fuzz-") as folder:
        try:
            check_case(case, Path(folder), workers, mutation=mutation)
        except Failure as failure:
            return failure
    return None


def recorded() -> Iterator[tuple[int, int]]:
    """(seed, ranks) of the list that every test run replays."""
    for line in SEEDS.read_text().splitlines():
        if fields := line.partition("#")[0].split():
            yield int(fields[0]), int(fields[1])


def run(
    runs: Annotated[int, typer.Option(help="How many seeds.")] = 100,
    ranks: Annotated[str, typer.Option(help="A number, or two as in 2-8: one after the other.")] = "1",
    first: Annotated[int, typer.Option(help="The first seed.")] = 0,
) -> int:
    """Run seeds; a failure is shrunk, printed and recorded."""
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


def mutations(
    names: Annotated[list[str] | None, typer.Argument(help="Which defects; all by default.")] = None,
    first: Annotated[int | None, typer.Option(help="The first seed; a random one by default.")] = None,
    limit_s: float = 600.0,
) -> None:
    """Put defects in and look for them."""
    first = random.SystemRandom().randrange(2**32) if first is None else first
    with closing(WorkerPool()) as workers:
        for name in names or MUTATIONS:
            print(f"{name:24}{find(name, workers, first=first, limit_s=limit_s)}", flush=True)


def _keep(seed: int, ranks: int, failure: Failure, workers: WorkerPool) -> None:
    """Shrink a failing case and print it, for :func:`tests.fuzz.drive.check_case`; its seed joins the recorded ones."""
    print(f"seed {seed} on {ranks} ranks: {failure}\nshrinking for up to {_SHRINK_S:.0f} s", flush=True)
    with SEEDS.open("a") as file:
        file.write(f"{seed} {ranks}  # {failure.kind}\n")

    def fails(case: Case) -> bool:
        found = failure_of(case, workers)
        return found is not None and found.kind == failure.kind

    pprint(shrink(draw(seed, ranks), fails, limit_s=_SHRINK_S), width=118, sort_dicts=False)


def find(name: str, workers: WorkerPool, *, first: int, limit_s: float) -> str:
    """Look for a defect with fresh seeds; returns what was found, and after how long."""
    ranks = MUTATIONS[name].ranks
    begin_s, seed = time.monotonic(), first
    while (seconds := time.monotonic() - begin_s) < limit_s:
        failure = failure_of(draw(seed, ranks), workers if ranks > 1 else None, mutation=name)
        seed += 1
        if failure is not None and failure.kind in ("AttributeError", "TypeError", "NameError"):
            return f"does not fit the code: {failure}"
        if failure is not None:
            when = f"run {seed - first}, after {time.monotonic() - begin_s:.1f} s"
            return f"found by seed {seed - 1} on {ranks} ranks, {when}: {failure.kind}"
    return f"NOT found in {seed - first} runs on {ranks} ranks, {seconds:.0f} s"


if __name__ == "__main__":
    os.environ["HF_HUB_OFFLINE"] = "1"
    disable_progress_bar()
    app = make_app(help=__doc__)
    for command in (run, mutations):
        app.command()(command)
    sys.exit(run_app(app, "python -m tests.fuzz"))
