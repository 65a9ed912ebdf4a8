"""Rows of the table: a figure, its limit and the verdict; and how the ranks put theirs together.

What ranks tell each other goes as JSON through the store at which they met, so a row arrives even where collectives do
not work.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from medha.config import ParallelConfig
from medha.parallel.mesh import Job, wait_for_all

PASS = "pass"
FAIL = "FAIL"
NOT_RUN = "not run"
_LIMIT_S = 600.0  # how long the slowest rank may take longer than this one


@dataclass(frozen=True, slots=True)
class Setting:
    """What is checked.

    Attributes:
        device, dtype, attention_backend: as those of :class:`medha.config.EngineConfig`, except that the dtype ``auto``
            is float32 on a CPU and bfloat16 on a GPU.
        needle_depths: where the fact lies, as shares of a document; each is looked for in each length.
    """

    parallel: ParallelConfig  # the layout
    device: str = "auto"
    dtype: str = "auto"
    attention_backend: str = "auto"
    needle_tokens: tuple[int, ...] = (8192,)  # lengths of the documents that are read at the end
    needle_depths: tuple[float, ...] = (0.1,)


@dataclass(frozen=True, slots=True)
class Row:
    """One line of the table.

    Attributes:
        check, what: which check, and what of it.
        verdict: :data:`PASS`, :data:`FAIL` or :data:`NOT_RUN`.
    """

    check: str
    what: str
    figure: str  # what was found, or why nothing was
    limit: str = ""  # what it may be
    verdict: str = PASS
    strain: float = 0.0  # the error as a share of its limit; the rank with the most is shown
    seconds: float = 0.0  # how long it took
    details: Mapping[str, Any] | None = None  # figures of it for the report, where there are more

    def shown(self) -> dict[str, Any]:
        """The row of the printed table and of the report."""
        columns = ("check", "what", "figure", "limit", "verdict")
        return {name: getattr(self, name) for name in columns} | {"seconds": round(self.seconds, 3)}


def held(check: str, what: str, error: float, limit: float) -> Row:
    """An error and its limit; NaN is no pass."""
    strain = error / limit if error < float("inf") else float("inf")  # inf for NaN as well
    return Row(check, what, f"{error:.1e}", f"{limit:.1e}", PASS if error <= limit else FAIL, strain)


def exact(check: str, what: str, num_wrong: int) -> Row:
    """Something of which nothing may be wrong."""
    return Row(check, what, f"{num_wrong} wrong", "0 wrong", FAIL if num_wrong else PASS, num_wrong)


def not_run(check: str, what: str, reason: str) -> Row:
    """Something that this layout or machine does not have."""
    return Row(check, what, reason, "", NOT_RUN)


def failed(check: str, error: BaseException) -> Row:
    """A check that ended with an error."""
    return Row(check, "ended with an error", f"{type(error).__name__}: {error}", "no error", FAIL, float("inf"))


def timed(rows: Iterable[Row]) -> list[Row]:
    """The rows of a check, each with the seconds it took to come."""
    done = []
    last = time.perf_counter()
    for row in rows:
        now = time.perf_counter()
        done.append(replace(row, seconds=now - last))
        last = now
    return done


def attempted(check: str, rows: Iterable[Row]) -> list[Row]:
    """:func:`timed` for what one rank does by itself: an error is a row."""
    try:
        return timed(rows)
    except Exception as error:
        return [failed(check, error)]


def gathered(job: Job | None, name: str, value: Any) -> list[Any]:
    """A JSON value of every rank, rank 0's first, or of this process alone; every rank calls it, once for each name.

    Raises:
        RankFailedError: a rank has failed.
    """
    return [value] if job is None else wait_for_all(job, name, value, limit_s=_LIMIT_S)


def worst(job: Job | None, name: str, rows: Sequence[Row]) -> list[Row]:
    """The rows of all ranks, of each the one from the rank where it is worst; every rank calls it."""
    everyone = gathered(job, name, [asdict(row) for row in rows])
    return worst_of([[Row(**row) for row in its_rows] for its_rows in everyone])


def worst_of(rows_by_rank: Sequence[Sequence[Row]]) -> list[Row]:
    """Of each row the worst rank's; one that failed somewhere says where."""
    found: dict[tuple[str, str], list[tuple[int, Row]]] = {}
    for rank, rows in enumerate(rows_by_rank):
        for row in rows:
            found.setdefault((row.check, row.what), []).append((rank, row))
    worst = []
    for located in found.values():
        _, row = max(located, key=lambda pair: (pair[1].verdict == FAIL, pair[1].strain))
        bad = [str(rank) for rank, other in located if other.verdict == FAIL]
        where = f" (rank {', '.join(bad)})" if bad and len(rows_by_rank) > 1 else ""
        worst.append(replace(row, what=row.what + where, seconds=max(other.seconds for _, other in located)))
    return worst
