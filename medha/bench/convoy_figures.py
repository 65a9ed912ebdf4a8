"""What ``medha bench convoy`` makes of the requests that a system served: figures by length, ratios between systems.

TTFT is from arrival to the first token, queueing included. TPOT is (last - first token) / (tokens - 1) of a request.
Percentiles are by nearest rank, and a request without a first token counts as one that waits for ever. An SLO is
attained by a request that has finished and whose first token came by its deadline.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from medha.bench.job import Ask, Served

PERCENTILES = (50, 90, 99)
SHORT = "short"
LONG = "long"


@dataclass(frozen=True, slots=True)
class Bucket:
    """Requests of similar length.

    Attributes:
        name: for tables, for example ``50-199``.
        low, high: prompt tokens, both included.
    """

    name: str
    low: int
    high: int

    def holds(self, request: Ask) -> bool:
        """Whether a request is of this length."""
        return self.low <= request.num_prompt_tokens <= self.high


@dataclass(frozen=True, slots=True)
class BucketFigures:
    """What became of the requests of one bucket; seconds, None for a request that never came that far.

    Attributes:
        ttft_s, slowdown: P50, P90 and P99; the second is TTFT over that of such a request alone.
        mean_ttft_s: None if a request got no token.
        tpot_p99_s: over those with two tokens or more.
        attainment: share of the requests that met their deadline.
    """

    bucket: str
    num_requests: int
    num_finished: int
    ttft_s: tuple[float | None, ...]
    mean_ttft_s: float | None
    slowdown: tuple[float | None, ...]
    tpot_p99_s: float | None
    attainment: float


@dataclass(frozen=True, slots=True)
class SystemFigures:
    """One system's line of the result.

    Attributes:
        buckets: those of the options, then all short and all long requests.
        tpot_p99_s: over all requests.
        span_s: from the start of the stream to the last end.
        requests_per_s, tokens_per_s: finished requests, and prompt and output tokens of these, over the span.
    """

    system: str
    buckets: tuple[BucketFigures, ...]
    tpot_p99_s: float | None
    span_s: float
    requests_per_s: float
    tokens_per_s: float

    def bucket(self, name: str) -> BucketFigures:
        """The bucket of this name."""
        return next(figures for figures in self.buckets if figures.bucket == name)


@dataclass(frozen=True, slots=True)
class Ratios:
    """One system against whole prefills and against the best chunked baseline; above 1 is sooner for the short ones.

    Attributes:
        short_p50, short_p99: TTFT of short requests under whole prefills over this system's.
        chunked_p50, chunked_p99: the same with the lowest among the chunked baselines.
        long_mean, long_last, long_worst: TTFT of long requests over that under whole prefills: of the means, of the
            last ones to get a token, and of the same request at worst.
        tpot: P99 of TPOT over the target.
        is_attained: of each bucket, whether the SLO attainment is no worse than that of the best baseline.
    """

    system: str
    short_p50: float | None
    short_p99: float | None
    chunked_p50: float | None
    chunked_p99: float | None
    long_mean: float | None
    long_last: float | None
    long_worst: float | None
    tpot: float | None
    is_attained: Mapping[str, bool]


def percentile(values: Sequence[float | None], percent: float) -> float | None:
    """By nearest rank, None counting as infinite; None if that is the answer or there are no values."""
    if not values:
        return None
    finite = [math.inf if value is None else value for value in values]
    found = float(np.percentile(finite, percent, method="inverted_cdf"))
    return found if math.isfinite(found) else None


def system_figures(
    system: str,
    requests: Sequence[Ask],
    served: Sequence[Served],
    *,
    buckets: Sequence[Bucket],
    alone: Mapping[str, float],
) -> SystemFigures:
    """Figures of one system.

    Args:
        system: its name.
        requests: as they were asked.
        served: in the same order.
        buckets: names and lengths.
        alone: TTFT in seconds of each request alone, by its id.
    """
    pairs = list(zip(requests, served, strict=True))
    figures = []
    for bucket in buckets:
        figures.append(_bucket_figures(bucket.name, [pair for pair in pairs if bucket.holds(pair[0])], alone))
    finished = [(request, one) for request, one in pairs if one.has_finished]
    span_s = max((one.finished_s or 0.0 for one in served), default=0.0)
    tokens = sum(request.num_prompt_tokens + request.num_output_tokens for request, _ in finished)
    return SystemFigures(
        system,
        tuple(figures),
        _tpot_p99(served),
        span_s,
        len(finished) / span_s if span_s else 0.0,
        tokens / span_s if span_s else 0.0,
    )


def _bucket_figures(name: str, pairs: Sequence[tuple[Ask, Served]], alone: Mapping[str, float]) -> BucketFigures:
    ttfts = [one.ttft_s for _, one in pairs]
    slowdowns = [None if one.ttft_s is None else one.ttft_s / alone[one.request_id] for _, one in pairs]
    known = [ttft for ttft in ttfts if ttft is not None]
    return BucketFigures(
        name,
        len(pairs),
        sum(one.has_finished for _, one in pairs),
        tuple(percentile(ttfts, percent) for percent in PERCENTILES),
        sum(known) / len(known) if known and len(known) == len(ttfts) else None,
        tuple(percentile(slowdowns, percent) for percent in PERCENTILES),
        _tpot_p99([one for _, one in pairs]),
        sum(_is_attained(request, one) for request, one in pairs) / len(pairs) if pairs else 1.0,
    )


def _is_attained(request: Ask, served: Served) -> bool:
    deadline_s = request.ttft_s if request.ttft_s is not None else math.inf
    return served.has_finished and served.ttft_s is not None and served.ttft_s <= deadline_s


def _tpot_p99(served: Sequence[Served]) -> float | None:
    return percentile([one.tpot_s for one in served if one.tpot_s is not None], 99)


def ratios(
    figures: SystemFigures,
    *,
    whole: SystemFigures,
    chunked: Sequence[SystemFigures],
    served: Sequence[Served],
    whole_served: Sequence[Served],
    long_ids: frozenset[str],
    tpot_target_s: float,
) -> Ratios:
    """One system against the baselines.

    Args:
        figures: of the system.
        whole: of whole prefills.
        chunked: of the baselines that cut prompts into chunks.
        served, whole_served: the requests of the system and of whole prefills, in the same order.
        long_ids: which of them are long.
        tpot_target_s: seconds.
    """
    p50, _, p99 = figures.bucket(SHORT).ttft_s
    whole_p50, _, whole_p99 = whole.bucket(SHORT).ttft_s
    best = [_least([one.bucket(SHORT).ttft_s[i] for one in chunked]) for i in (0, 2)]
    pairs = [(a.ttft_s, b.ttft_s) for a, b in zip(served, whole_served, strict=True) if a.request_id in long_ids]
    worst = [_over(ours, theirs) for ours, theirs in pairs]
    lasts = [_most([pair[i] for pair in pairs]) for i in (0, 1)]
    return Ratios(
        figures.system,
        _over(whole_p50, p50),
        _over(whole_p99, p99),
        _over(best[0], p50),
        _over(best[1], p99),
        _over(figures.bucket(LONG).mean_ttft_s, whole.bucket(LONG).mean_ttft_s),
        _over(*lasts),
        _most(worst),
        _over(figures.tpot_p99_s, tpot_target_s),
        {
            one.bucket: one.attainment >= max(other.bucket(one.bucket).attainment for other in (whole, *chunked))
            for one in figures.buckets
        },
    )


def _over(a: float | None, b: float | None) -> float | None:
    return None if a is None or not b else a / b


def _least(values: Sequence[float | None]) -> float | None:
    return min((value for value in values if value is not None), default=None)


def _most(values: Sequence[float | None]) -> float | None:
    """The largest; None if one is not known."""
    known = [value for value in values if value is not None]
    return max(known) if known and len(known) == len(values) else None
