"""The long run: ``python -m tests.fuzz --runs 1000 --ranks 2-8``."""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from transformers.utils.logging import disable_progress_bar

from tests.fuzz.cases import Case, draw
from tests.fuzz.drive import check_case
from tests.fuzz.reference import Failure
from tests.parallel.workers import WorkerPool

SEEDS = Path(__file__).with_name("seeds.txt")
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


def run(seeds: Sequence[tuple[int, int]], log: Path) -> int:
    """Run seeds, a line of the log for each; a seed that fails is printed and recorded. Returns how many failed."""
    log.parent.mkdir(parents=True, exist_ok=True)
    num_failed = 0
    workers = WorkerPool()
    with log.open("a") as file:
        try:
            for number, (seed, ranks) in enumerate(seeds, start=1):
                begin_s = time.monotonic()
                failure = failure_of(draw(seed, ranks), workers)
                seconds = round(time.monotonic() - begin_s, 2)
                result = "ok" if failure is None else failure.kind
                file.write(json.dumps({"seed": seed, "ranks": ranks, "result": result, "seconds": seconds}) + "\n")
                file.flush()
                if failure is not None:
                    num_failed += 1
                    print(f"seed {seed} on {ranks} ranks: {failure}\n{draw(seed, ranks)}", flush=True)
                    with SEEDS.open("a") as recorded:
                        recorded.write(f"{seed} {ranks}  # {failure.kind}\n")
                if number % 20 == 0 or number == len(seeds):
                    print(f"{number} of {len(seeds)}, {num_failed} failed; log {log}", flush=True)
                if number % _RENEWED_AFTER == 0:
                    workers.close()
        except KeyboardInterrupt:
            print(f"stopped; FIRST={seed} (--first) goes on from here", flush=True)
        finally:
            workers.close()
    return num_failed


def _range(text: str) -> range:
    """``N`` or ``N-M`` ranks."""
    first, _, last = text.partition("-")
    return range(int(first), int(last or first) + 1)


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("--runs", type=int, default=100)
    parser.add_argument(
        "--ranks", type=_range, default=range(1, 2), help="a number, or two as in 2-8: one after the other"
    )
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--log", type=Path, default=Path("runs/fuzz/log.jsonl"))
    given = parser.parse_args()
    os.environ["HF_HUB_OFFLINE"] = "1"
    disable_progress_bar()
    seeds = [(seed, given.ranks[seed % len(given.ranks)]) for seed in range(given.first, given.first + given.runs)]
    raise SystemExit(run(seeds, given.log) > 0)


if __name__ == "__main__":
    main()
