"""A trace: when requests arrive and how long their prompts and outputs are, as columns of numpy arrays.

Lengths alone, no text: that is what a simulator and a load generator need. Files are read and written elsewhere.
"""

from __future__ import annotations

import math
from array import array
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, NamedTuple
from zlib import crc32

import numpy as np
from numpy.typing import NDArray

from medha.config.fields import check_number
from medha.errors import ConfigError
from medha.params import PRIORITIES

MAX_TOKENS = 100_000_000  # A longer prompt or output is taken for a mistake

NORMAL = PRIORITIES.index("normal")
_BLOCK = 65_536
_DTYPES: tuple[Any, ...] = (
    *(np.float64, np.int64, np.int64, np.dtypes.StringDType(), np.object_),
    *(np.float64, np.float64, np.int8, np.dtypes.StringDType()),
)


class TraceFormatError(ConfigError):
    """A trace file does not hold what its format asks for: what is wrong in which line, and what is accepted."""

    def __init__(self, path: Path | str, reason: str, place: str = "") -> None:
        super().__init__(f"{path}{', ' * bool(place)}{place}: {reason}")


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
    tenant: str | None = None


HASHED_TOKENS = 512  # that one id of ``prefix_hashes`` stands for


def prefix_ids(row: Row, unit: int) -> bytes:
    """The ids of a request's whole blocks as :mod:`medha.sched.prefix` has them, one each ``unit`` tokens; none where
    it brings no hashes, or units do not divide blocks."""
    count = row.prompt_tokens // HASHED_TOKENS
    if row.prefix_hashes is None or HASHED_TOKENS % unit or len(row.prefix_hashes) < count:
        return b""
    ids = np.empty((count, HASHED_TOKENS // unit, 2), np.int64)
    ids[:, :, 0] = np.array(row.prefix_hashes[:count], np.int64)[:, None]
    ids[:, :, 1] = np.arange(HASHED_TOKENS // unit) + (crc32((row.tenant or "").encode()) << 16)
    return ids.tobytes()


@dataclass(frozen=True, slots=True, eq=False)
class Trace:
    """Columns of one length, read-only; types, lengths and arrivals are checked, the values of others are the
    reader's affair. An array that can be written is copied."""

    arrival_s: NDArray[np.float64]  # seconds from 0, finite, non-decreasing
    prompt_tokens: NDArray[np.int64]  # 1 to MAX_TOKENS, as outputs
    output_tokens: NDArray[np.int64]
    request_ids: NDArray[Any] = None  # type: ignore[assignment]  # different strings (StringDType); numbers from 0
    prefix_hashes: NDArray[np.object_] | None = None  # an array("q") of ids of blocks of the prompt, or None, a request
    ttft_slo_s: NDArray[np.float64] | None = None  # above 0; NaN is no objective
    tpot_slo_s: NDArray[np.float64] | None = None
    priority: NDArray[np.int8] | None = None  # index of medha.params.PRIORITIES; None is normal for all
    tenant: NDArray[Any] | None = None  # names (StringDType), "" for whoever has none

    def __post_init__(self) -> None:
        ids = np.arange(len(self.arrival_s)) if self.request_ids is None else self.request_ids
        object.__setattr__(self, "request_ids", np.asarray(ids).astype(np.dtypes.StringDType(), copy=False))
        for name, dtype in zip(COLUMNS, _DTYPES, strict=True):
            if getattr(self, name) is None:
                continue
            given = np.asarray(getattr(self, name))
            try:
                column = given.astype(dtype, casting="same_kind", copy=bool(given.flags.writeable))
            except (ValueError, TypeError) as error:
                raise ConfigError(f"{name}: {error}; accepted: an array of {np.dtype(dtype)}") from error
            if column.ndim != 1 or (name != "arrival_s" and len(column) != len(self)):
                raise ConfigError(f"{name} has shape {column.shape}; accepted: one dimension, as long as arrival_s")
            column.flags.writeable = False
            object.__setattr__(self, name, column)
        is_right = (np.diff(self.arrival_s, prepend=0.0) >= 0) & np.isfinite(self.arrival_s)
        if not is_right.all():
            row = int(np.argmin(is_right))
            accepted = "finite seconds from 0, no less than the one before"
            raise ConfigError(f"arrival_s[{row}]={self.arrival_s[row].item()!r}; accepted: {accepted}")

    def __len__(self) -> int:
        return len(self.arrival_s)

    def __getitem__(self, rows: slice) -> Trace:
        """The requests of a slice, with ids and arrival times as they are; its step must be positive."""
        return Trace(*(None if column is None else column[rows] for column in self._columns))  # type: ignore[arg-type]

    @property
    def _columns(self) -> list[NDArray[Any] | None]:
        return [getattr(self, name) for name in COLUMNS]

    def rows(self) -> Iterator[Row]:
        """The requests one by one."""
        for start in range(0, len(self), _BLOCK):
            stop = min(start + _BLOCK, len(self))
            parts = [[None] * (stop - start) if c is None else c[start:stop].tolist() for c in self._columns]
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

    def first(self, num_requests: int | None, duration_s: float | None = None, qps: float | None = None) -> Trace:
        """The first requests, so many at most, at a rate or their own, and of these who comes before ``duration_s``."""
        if duration_s is not None:
            check_number("duration_s", duration_s)
        trace = self[:num_requests] if qps is None else self[:num_requests].scaled(qps)
        return trace if duration_s is None else trace[: int(np.searchsorted(trace.arrival_s, duration_s))]

    def scaled(self, qps: float) -> Trace:
        """The same requests at another mean rate: all gaps, and the time of the first arrival, by one factor."""
        check_number("qps", qps)
        if self.qps is None:
            raise ConfigError(f"a rate of {qps:g}: {len(self)} requests arrive at once; accepted: a trace with gaps")
        return replace(self, arrival_s=self.arrival_s * (self.qps / qps))

    def from_zero(self) -> Trace:
        """The same gaps with the first arrival at 0."""
        return replace(self, arrival_s=self.arrival_s - self.arrival_s[:1]) if len(self) else self


COLUMNS = tuple(field.name for field in fields(Trace))
"""Of a trace, in the order of the fields of a :class:`Row`."""


def _given(value: float | None) -> float | None:
    return None if value is None or math.isnan(value) else value


LONG_PROMPTS = (8_192, 32_768, 131_072)  # prompt lengths of which the share at or above is stated, in tokens


def trace_stats(trace: Trace) -> dict[str, Any]:
    """The figures of a trace with at least one request; ``qps`` is None where all arrive at once.

    ``gap_cv`` is the coefficient of variation of the gaps between arrivals, 1 for Poisson, and ``burstiness``
    1 / gap_cv**2, with which gamma arrivals have such gaps; both are None for fewer than 2 gaps. ``prefix_reuse`` is
    the share of prompt tokens, in whole hashed blocks, that an earlier prompt of the tenant began with; None without
    hashes.
    """
    gaps = np.diff(trace.arrival_s)
    mean = float(gaps.mean()) if len(gaps) else 0.0
    cv = float(gaps.std()) / mean if len(gaps) > 1 and mean > 0 else None
    return {
        "num_requests": len(trace),
        "first_arrival_s": float(trace.arrival_s[0]),
        "duration_s": trace.duration_s,
        "qps": trace.qps,
        "gap_cv": cv,
        "burstiness": 1 / cv**2 if cv is not None and cv > 1e-6 else None,
        "prompt_tokens": _length_stats(trace.prompt_tokens),
        "output_tokens": _length_stats(trace.output_tokens),
        "long_prompts": {
            f"from {length >> 10}K share": float((trace.prompt_tokens >= length).mean()) for length in LONG_PROMPTS
        },
        "prefix_reuse": None if trace.prefix_hashes is None else _prefix_reuse(trace),
    }


def _prefix_reuse(trace: Trace) -> float:
    seen: defaultdict[str | None, set[int]] = defaultdict(set)  # by tenant: none has what is another's
    num_reused = 0
    for row in trace.rows():
        ids = (row.prefix_hashes or array("q"))[: row.prompt_tokens // HASHED_TOKENS]
        num_reused += sum(one in seen[row.tenant] for one in ids)
        seen[row.tenant].update(ids)
    return num_reused * HASHED_TOKENS / int(trace.prompt_tokens.sum())


def _length_stats(tokens: NDArray[np.int64]) -> dict[str, float]:
    p50, p90, p99 = np.percentile(tokens, [50, 90, 99]).tolist()
    found = {"total": int(tokens.sum()), "mean": float(tokens.mean()), "min": int(tokens.min())}
    return {**found, "p50": p50, "p90": p90, "p99": p99, "max": int(tokens.max())}
