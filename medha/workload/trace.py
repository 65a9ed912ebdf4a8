"""A trace: when requests arrive and how long their prompts and outputs are, as columns of numpy arrays.

Lengths alone, no text: that is what a simulator and a load generator need. Files are read and written elsewhere.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from medha.errors import ConfigError
from medha.params import PRIORITIES

MAX_TOKENS = 100_000_000
"""A longer prompt or output is taken for a mistake."""

NORMAL = PRIORITIES.index("normal")
_BLOCK = 65_536
_COLUMNS = ("arrival_s", "prompt_tokens", "output_tokens", "request_ids")
_OPTIONAL = ("prefix_hashes", "ttft_slo_s", "tpot_slo_s", "priority")


class TraceFormatError(ConfigError):
    """A trace file does not hold what its format asks for.

    Attributes:
        path: the file.
        line: its line, from 1, or None where the whole file is meant.
        reason: what is wrong, the value, and what is accepted.
    """

    def __init__(self, path: Path | str, line: int | None, reason: str) -> None:
        super().__init__(f"{path}{'' if line is None else f', line {line}'}: {reason}")
        self.path = Path(path)
        self.line = line
        self.reason = reason

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.path, self.line, self.reason)


class Row(NamedTuple):
    """One request of a trace. Seconds and tokens; None is not given, and ``priority`` an index of PRIORITIES."""

    arrival_s: float | None
    prompt_tokens: int
    output_tokens: int
    request_id: str | None = None
    prefix_hashes: array[int] | None = None
    ttft_slo_s: float | None = None
    tpot_slo_s: float | None = None
    priority: int | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Trace:
    """Columns of one length, read-only, checked when built. An array that can be written is copied.

    Args:
        arrival_s: float64, seconds from 0, finite, non-decreasing.
        prompt_tokens, output_tokens: int64, 1 to MAX_TOKENS.
        request_ids: different strings (a numpy StringDType column); by default the requests are numbered from 0.
        prefix_hashes: object column, an ``array("q")`` a request, or None: ids of the blocks of the prompt, equal
            where two prompts begin alike. The length of a block (512 tokens in Mooncake's) is the file's affair.
        ttft_slo_s, tpot_slo_s: float64, seconds above 0; NaN is no objective.
        priority: int8, index of :data:`medha.params.PRIORITIES`; None is normal for all.

    Raises:
        ConfigError: a column is wrong; the message names the column, the row and the value.
    """

    arrival_s: NDArray[np.float64]
    prompt_tokens: NDArray[np.int64]
    output_tokens: NDArray[np.int64]
    request_ids: NDArray[Any] = field(default_factory=lambda: np.arange(0))
    prefix_hashes: NDArray[np.object_] | None = None
    ttft_slo_s: NDArray[np.float64] | None = None
    tpot_slo_s: NDArray[np.float64] | None = None
    priority: NDArray[np.int8] | None = None

    def __post_init__(self) -> None:
        self._set("arrival_s", np.float64)
        for name in ("prompt_tokens", "output_tokens"):
            self._set(name, np.int64)
        if not len(self.request_ids):
            object.__setattr__(self, "request_ids", np.arange(len(self)))
        self._set("request_ids", np.dtypes.StringDType())
        for name, dtype in zip(_OPTIONAL, (np.object_, np.float64, np.float64, np.int8), strict=True):
            if getattr(self, name) is not None:
                self._set(name, dtype)
        self._check()

    def _set(self, name: str, dtype: Any) -> None:
        try:
            column = np.asarray(getattr(self, name))
            if np.dtype(dtype).kind == "i" and column.dtype.kind not in "iu" and column.size:
                raise ValueError(f"dtype {column.dtype}")
            cast = column.astype(dtype, copy=bool(column.flags.writeable))
            if cast.dtype.kind == "i" and (cast != column).any():
                raise ValueError("a number out of range")
        except (ValueError, TypeError, OverflowError) as error:
            raise ConfigError(f"{name}: {error}; accepted: an array of {np.dtype(dtype)}") from error
        if cast.ndim != 1 or (name != "arrival_s" and len(cast) != len(self)):
            raise ConfigError(f"{name} has shape {cast.shape}; accepted: one dimension, as long as arrival_s")
        cast.flags.writeable = False
        object.__setattr__(self, name, cast)

    def _check(self) -> None:
        arrival_s = self.arrival_s
        self._refuse("arrival_s", ~(np.isfinite(arrival_s) & (arrival_s >= 0)), "seconds, finite and not negative")
        late = np.zeros(len(self), dtype=bool)
        late[1:] = arrival_s[1:] < arrival_s[:-1]
        self._refuse("arrival_s", late, "no less than the one before")
        for name in ("prompt_tokens", "output_tokens"):
            column = getattr(self, name)
            self._refuse(name, (column < 1) | (column > MAX_TOKENS), f"1 to {MAX_TOKENS}")
        for name in ("ttft_slo_s", "tpot_slo_s"):
            column = getattr(self, name)
            if column is not None:
                self._refuse(name, ~((column > 0) & (column < np.inf) | np.isnan(column)), "seconds above 0, or NaN")
        if self.priority is not None:
            self._refuse("priority", (self.priority < 0) | (self.priority >= len(PRIORITIES)), "0 to 3")
        repeated = np.zeros(len(self), dtype=bool)
        repeated[repeats(self.request_ids)[0]] = True
        self._refuse("request_ids", repeated, "different ids")

    def _refuse(self, name: str, wrong: NDArray[np.bool_], accepted: str) -> None:
        if wrong.any():
            row = int(np.argmax(wrong))
            value = getattr(self, name)[row : row + 1].tolist()[0]
            raise ConfigError(f"{name}[{row}]={value!r:.80}; accepted: {accepted}")

    @classmethod
    def from_unsorted(cls, arrival_s: ArrayLike, prompt_tokens: ArrayLike, output_tokens: ArrayLike) -> Trace:
        """A trace of requests in any order, sorted by arrival; those of one time keep their order.

        Raises:
            ConfigError: as of :class:`Trace`.
        """
        times = np.asarray(arrival_s, dtype=np.float64)
        order = np.argsort(times, kind="stable")
        return cls(times[order], np.asarray(prompt_tokens)[order], np.asarray(output_tokens)[order])

    def __len__(self) -> int:
        return len(self.arrival_s)

    def __getitem__(self, rows: slice) -> Trace:
        """The requests of a slice, with ids and arrival times as they are; its step must be positive."""
        columns: dict[str, Any] = {name: getattr(self, name) for name in (*_COLUMNS, *_OPTIONAL)}
        return Trace(**{name: column[rows] for name, column in columns.items() if column is not None})

    def rows(self) -> Iterator[Row]:
        """The requests one by one."""
        for start in range(0, len(self), _BLOCK):
            columns = (getattr(self, name) for name in (*_COLUMNS, *_OPTIONAL))
            stop = min(start + _BLOCK, len(self))
            parts = [[None] * (stop - start) if c is None else c[start:stop].tolist() for c in columns]
            for row in map(Row, *parts):
                yield row._replace(ttft_slo_s=_given(row.ttft_slo_s), tpot_slo_s=_given(row.tpot_slo_s))

    @property
    def duration_s(self) -> float:
        """From the first arrival to the last, seconds; 0 without requests."""
        return float(self.arrival_s[-1] - self.arrival_s[0]) if len(self) else 0.0

    @property
    def qps(self) -> float | None:
        """Requests a second, 1 / the mean gap between arrivals; None where all arrive at once."""
        return (len(self) - 1) / self.duration_s if self.duration_s > 0 else None

    @property
    def longest(self) -> int:
        """Tokens of the longest request, prompt and output; of at least one."""
        return int((self.prompt_tokens + self.output_tokens).max())

    def head(self, num_requests: int) -> Trace:
        """The first requests, all if there are no more.

        Raises:
            ConfigError: ``num_requests`` is negative.
        """
        if num_requests < 0:
            raise ConfigError(f"num_requests={num_requests}; accepted: 0 or more")
        return self[:num_requests]

    def window(self, duration_s: float, start_s: float = 0.0) -> Trace:
        """The requests that arrive from ``start_s`` on, before ``start_s + duration_s``; ``start_s`` becomes 0."""
        first, last = np.searchsorted(self.arrival_s, [start_s, start_s + duration_s])
        part = self[int(first) : int(last)]
        return part.with_arrivals(part.arrival_s - start_s)

    def scaled(self, qps: float) -> Trace:
        """The same requests at another mean rate: all gaps, and the time of the first arrival, by one factor.

        Args:
            qps: requests a second, as of :attr:`qps`.

        Raises:
            ConfigError: not above 0, or all requests arrive at once, so that there are no gaps to scale.
        """
        if not 0 < qps < math.inf:
            raise ConfigError(f"qps={qps!r}; accepted: a finite number above 0")
        if self.qps is None:
            raise ConfigError(f"qps={qps:g}: the {len(self)} requests arrive at once; accepted: a trace with gaps")
        return self.time_scaled(self.qps / qps)

    def time_scaled(self, factor: float) -> Trace:
        """Every arrival time multiplied by ``factor``.

        Raises:
            ConfigError: the factor is negative or not finite.
        """
        if not 0 <= factor < math.inf:
            raise ConfigError(f"factor={factor!r}; accepted: a finite number, not negative")
        return self.with_arrivals(self.arrival_s * factor)

    def from_zero(self) -> Trace:
        """The same gaps with the first arrival at 0."""
        return self.with_arrivals(self.arrival_s - self.arrival_s[:1]) if len(self) else self

    def with_arrivals(self, arrival_s: NDArray[np.float64]) -> Trace:
        """The same requests at other times (seconds, non-decreasing).

        Raises:
            ConfigError: as of :class:`Trace`.
        """
        return replace(self, arrival_s=arrival_s)


def repeats(ids: NDArray[Any]) -> tuple[NDArray[np.intp], NDArray[np.intp]]:
    """Rows whose id an earlier row has, in order, and for each the nearest such row."""
    order = np.argsort(ids, kind="stable")
    same = ids[order[1:]] == ids[order[:-1]]
    later, earlier = order[1:][same], order[:-1][same]
    by_row = np.argsort(later)
    return later[by_row], earlier[by_row]


def _given(value: float | None) -> float | None:
    return None if value is None or math.isnan(value) else value


LONG_PROMPTS = (8_192, 32_768, 131_072)
"""Prompt lengths of which the share at or above is stated, in tokens."""


@dataclass(frozen=True, slots=True)
class LengthStats:
    """Tokens of prompts or outputs; percentiles by linear interpolation."""

    total: int
    mean: float
    min: int
    p50: float
    p90: float
    p99: float
    max: int

    @classmethod
    def of(cls, tokens: NDArray[np.int64]) -> LengthStats:
        """Of one column, which is not empty."""
        p50, p90, p99 = (float(q) for q in np.percentile(tokens, [50, 90, 99]))
        return cls(int(tokens.sum()), float(tokens.mean()), int(tokens.min()), p50, p90, p99, int(tokens.max()))


@dataclass(frozen=True, slots=True)
class TraceStats:
    """A trace in figures.

    Attributes:
        first_arrival_s, duration_s: seconds; the duration is from the first arrival to the last.
        qps: requests a second, None where all arrive at once.
        gap_cv: coefficient of variation of the gaps between arrivals, 1 for Poisson; None for fewer than 2 gaps.
        burstiness: 1 / gap_cv**2, the value that generates such gaps with gamma arrivals; None also for equal gaps.
        long_prompts: by length, the share of prompts of at least that length.
    """

    num_requests: int
    first_arrival_s: float
    duration_s: float
    qps: float | None
    gap_cv: float | None
    burstiness: float | None
    prompt_tokens: LengthStats
    output_tokens: LengthStats
    long_prompts: dict[str, float]


def trace_stats(trace: Trace) -> TraceStats:
    """The figures of a trace with at least one request."""
    gaps = np.diff(trace.arrival_s)
    mean = float(gaps.mean()) if len(gaps) else 0.0
    cv = float(gaps.std()) / mean if len(gaps) > 1 and mean > 0 else None
    return TraceStats(
        len(trace),
        float(trace.arrival_s[0]),
        trace.duration_s,
        trace.qps,
        cv,
        1 / cv**2 if cv is not None and cv > 1e-6 else None,
        LengthStats.of(trace.prompt_tokens),
        LengthStats.of(trace.output_tokens),
        {f"from {length >> 10}K share": float((trace.prompt_tokens >= length).mean()) for length in LONG_PROMPTS},
    )
