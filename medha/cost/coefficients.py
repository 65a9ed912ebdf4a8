"""What one pipeline stage of one group costs, as data, and the tables in which :mod:`medha.cost.predictor` looks it up.

The form follows from public kernel measurements. Attention of a chunk of c queries behind kv > 0 cached tokens is
``A(c) + B(c) * kv``, kv = 0 is another kernel regime with a table of its own, and A and B are constant within a tile
of queries (on an A100, 672 and 704 tokens cost the same, and so do 544 and 576). This form stays right beyond the KV it
was fitted on; random forests (Vidur) and quadratics in the chunk (Tetris, SGLang) do not.

Coefficients come from a hardware spec (:mod:`medha.cost.roofline`) or a measured profile (:mod:`medha.profile.fit`).
Times are seconds for all layers of the stage. Look-ups are in plain Python lists: the packer asks for one number at a
time, where numpy costs more than the arithmetic.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from medha.cost.json_form import JsonFile
from medha.errors import ConfigError

Floats = NDArray[np.float64]
_MAX_TILES = 1 << 15  # longest table of chunks; for larger batches the tile is doubled until it fits


@dataclass(frozen=True, slots=True)
class Curve:
    """Seconds ``y`` over ``x``, neither of which falls: constant before the first point, linear after the last one."""

    x: tuple[float, ...]
    y: tuple[float, ...]

    def __post_init__(self) -> None:
        _check_table("curve", self.x, y=self.y)


@dataclass(frozen=True, slots=True)
class ChunkAttention:
    """Attention of one prefill chunk: ``a_s + b_s * kv`` behind kv cached tokens, ``first_s`` behind none."""

    tokens: tuple[float, ...]  # chunk sizes, increasing, at least 1; each stands for the tile of queries it lies in
    a_s: tuple[float, ...]  # seconds; no column falls with the size
    b_s: tuple[float, ...]  # seconds per cached token
    first_s: tuple[float, ...]
    tile: int = 128  # queries of a tile; between the given sizes the tables are interpolated by number of tiles

    def __post_init__(self) -> None:
        _check_table("chunks", self.tokens, a_s=self.a_s, b_s=self.b_s, first_s=self.first_s)


@dataclass(frozen=True, slots=True)
class DecodeAttention:
    """Attention of a batch of decodes: ``a_s + b_s * mean_kv``, with another line for short ones, not split.

    Seconds need not rise with the batch, as kernels change their split with it.
    """

    batch: tuple[float, ...]  # numbers of decodes, increasing, at least 1
    a_s: tuple[float, ...]  # seconds
    b_s: tuple[float, ...]  # seconds per token of mean KV length
    short_kv: float = 0.0  # mean KV up to which the other line holds; 0 where there is one line
    short_a_s: tuple[float, ...] = ()  # that line, or empty; it never exceeds the long line's start
    short_b_s: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        short = {"short_a_s": self.short_a_s, "short_b_s": self.short_b_s} if self.short_kv else {}
        _check_table("decodes", self.batch, rising=False, a_s=self.a_s, b_s=self.b_s, **short)

    def line(self, count: int) -> Callable[[float], float]:
        """Seconds of so many decodes, given their mean KV; more than the table holds cost in proportion."""
        columns = (self.a_s, self.b_s, *((self.short_a_s, self.short_b_s) if self.short_kv else ()))
        a_s, b_s, *short = (float(np.interp(count, self.batch, column)) for column in columns)
        short_kv, beyond = self.short_kv, max(1.0, count / self.batch[-1])

        def seconds(mean_kv: float) -> float:
            found_s = a_s + b_s * max(mean_kv, short_kv)
            if mean_kv < short_kv:
                found_s = min(found_s, short[0] + short[1] * mean_kv)
            return found_s * beyond

        return seconds


@dataclass(frozen=True, slots=True)
class MixedAttention:
    """Decodes and chunks in one fused variable-length launch, in which decodes lose their KV split.

    ``max(prefill_factor * chunks + decodes(mean_kv), straggler_a_s + straggler_b_s * max_kv)``: the work of all, or the
    longest decode, whose keys are read by one thread block a head. Over 18,960 measured batches (vLLM 0.19, RTX PRO
    6000) the sum of both parts measured alone is 24 % off in the median.
    """

    prefill_factor: float
    decodes: DecodeAttention
    straggler_a_s: float = 0.0
    straggler_b_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Link:
    """Calls of one collective or transfer in a step, each ``alpha_s + tokens * bytes_per_token / bytes_per_s``: two
    all-reduces a layer with TP, one send a step with SPP, one merge a layer with KVP."""

    calls: int
    alpha_s: float
    bytes_per_s: float
    bytes_per_token: float

    @property
    def fixed_s(self) -> float:
        """Seconds a step, whatever its tokens."""
        return self.calls * self.alpha_s

    @property
    def token_s(self) -> float:
        """Seconds a token."""
        return self.calls * self.bytes_per_token / self.bytes_per_s


@dataclass(frozen=True, slots=True)
class RingCost:
    """What a chunk that is dealt to groups takes beside its computation."""

    link: Link  # sends of a block of keys and values to the next of a ring, one a layer; per token of the block
    step_s: float = 0.0  # of a step and layer beside the send: launches, merge, neighbours
    is_hidden: bool = False  # sends go on behind attention; not where it was measured what shows of them

    def seconds(self, slope_s: float, *, size: int, history: float, tokens: float) -> float:
        """Of a chunk over ``size`` groups: in each step what shows of the send, and the rest.

        ``slope_s`` is of attention, a key, over the queries of one group and the layers of the link.
        """
        link = self.link
        shown_s = link.fixed_s + link.token_s * (history + tokens) / size
        if self.is_hidden:
            shown_s = max(0.0, shown_s - slope_s * (history + tokens / 2) / size)
        return (size - 1) * (link.calls * self.step_s + shown_s)


@dataclass(frozen=True, slots=True)
class ProfileKey:
    """Everything that coefficients depend on."""

    machine: str
    model: str
    dtype: str
    layout: str
    backend: str
    num_threads: int
    block_size: int
    torch_version: str


@dataclass(frozen=True, slots=True)
class Coefficients(JsonFile):
    """Costs of one stage of one group."""

    format = "medha-coefficients"

    key: ProfileKey  # what they were measured for
    linear: Curve  # everything that works a token at a time, over tokens of the step
    chunks: ChunkAttention  # alone in a launch
    decodes: DecodeAttention  # likewise
    mixed: MixedAttention | None = None  # both in one launch; None where segments run one after the other (a sum)
    splits_kv: bool = True  # of a decode, over the machine; if not, a batch takes as long as its longest
    head: Curve | None = None  # vocabulary projection and sampling over the decodes; None where the stage has no head
    host_s: float = 0.0  # seconds a step, whatever it contains
    tp: Link | None = None  # all-reduces of the layers
    spp: Link | None = None  # the send to the next stage
    kvp: Link | None = None  # merges of one run of groups; per token and group beyond the first
    ring: RingCost | None = None  # of chunks that are dealt to groups

    @classmethod
    def load(cls, path: Path, *, expected: ProfileKey | None = None) -> Coefficients:
        """Read a JSON file; ConfigError where it is bad, or was measured for something else than ``expected``."""
        try:
            found = cls.from_json(path.read_text(), source=f"profile {path}")
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"profile {path} cannot be read: {error}") from error
        pairs = zip(asdict(found.key).items(), asdict(expected or found.key).values(), strict=True)
        if differing := [f"{name} is {own!r}, running {here!r}" for (name, own), here in pairs if own != here]:
            raise ConfigError(f"profile {path} was measured for something else: {'; '.join(differing)}")
        return found


def _check_table(name: str, x: tuple[float, ...], *, rising: bool = True, **columns: tuple[float, ...]) -> None:
    """A table has a point, increasing sizes, and as many seconds, which never fall unless they may."""
    for column, values in {"x": x, **columns}.items():
        if not values or len(values) != len(x):
            raise ConfigError(f"{name}.{column}={values!r}; accepted: {len(x) or 'some'} numbers")
        if ((rising or column == "x") and list(values) != sorted(values)) or len(set(x)) < len(x):
            accepted = "increasing sizes, and seconds that never fall with them"
            raise ConfigError(f"{name}.{column} falls; accepted: {accepted}")


# ---------------------------------------------------------------------------------------------------------------------
# Look-ups


class Line:
    """Straight lines between points, the first of which is at 0, and behind the last one of a given slope."""

    def __init__(self, x: list[float], y: list[float], tail: float) -> None:
        self.x, self.y = x, y
        self.slope: list[float] = [*(np.diff(y) / np.diff(x)).tolist(), tail]

    @classmethod
    def of(cls, curve: Curve, links: Sequence[Link | None] = ()) -> Line:
        """A curve with what collectives add per token."""
        token_s = sum(link.token_s for link in links if link is not None)
        x = [0.0, *curve.x]
        # behind the last point: the mean over the upper half, as the last interval is noisy
        half = next(i for i, at in enumerate(curve.x) if 2 * at >= curve.x[-1])
        rise, run = curve.y[-1] - curve.y[half], curve.x[-1] - curve.x[half]
        tail = rise / run if rise > 0 else curve.y[-1] / curve.x[-1]
        y = [value + token_s * at for at, value in zip(x, [curve.y[0], *curve.y], strict=True)]
        return cls(x, y, tail + token_s)

    def at(self, tokens: float) -> float:
        """Seconds for this many tokens."""
        i = bisect_right(self.x, tokens) - 1
        return self.y[i] + self.slope[i] * (tokens - self.x[i])


class Tiles:
    """Chunk attention by number of tiles, from 0 to that of the largest chunk."""

    def __init__(self, table: ChunkAttention, max_tokens: int) -> None:
        tile = table.tile
        while max_tokens > tile * _MAX_TILES:
            tile *= 2
        self.tile, self.max_tokens = tile, max_tokens
        sizes, *columns = _extended(table, max_tokens + tile)
        tiles = np.ceil(sizes / tile)
        last = np.append(tiles[1:] > tiles[:-1], True)  # of several sizes in a tile, the largest
        wanted = np.arange(1, -(-max_tokens // tile) + 1)
        a, b, first = (_monotone_cubic(wanted, tiles[last], column[last]) for column in columns)
        self.first: list[float] = [0.0, *first.tolist()]
        self.a: list[float] = [0.0, *np.maximum(a, first).tolist()]  # cached keys never make a chunk cheaper
        self.b: list[float] = [0.0, *b.tolist()]


def _extended(table: ChunkAttention, max_tokens: int) -> Floats:
    """[4, sizes]: sizes, A, B and KV 0 up to ``max_tokens``; a longer chunk costs what its parts cost in turn."""
    columns = np.array([table.tokens, table.a_s, table.b_s, table.first_s])
    size, a, b, first = columns[:, -1]
    parts = np.unique(np.geomspace(2.0, max(2.0, max_tokens / size + 1), 256).round())
    own = b * size * parts * (parts - 1) / 2
    more = np.array([size * parts, a * parts + own, b * parts, first + a * (parts - 1) + own])
    return np.concatenate([columns, more], axis=1)


def _monotone_cubic(at: NDArray[np.int64], x: Floats, y: Floats) -> Floats:
    """Piecewise cubic through points, two at least, non-decreasing where they are (Fritsch and Butland's slopes); flat
    before them.

    Attention of a chunk is a quadratic in its size, which straight lines between few sizes overestimate by up to 12 %.
    """
    width = np.diff(x)
    rise = np.diff(y) / width
    inner = np.zeros(len(x) - 2)
    before, after = rise[:-1], rise[1:]
    climbing = before * after > 0
    w1, w2 = (width[1:] + 2 * width[:-1])[climbing], (2 * width[1:] + width[:-1])[climbing]
    inner[climbing] = (w1 + w2) / (w1 / after[climbing] + w2 / before[climbing])
    slope = np.concatenate([[_end_slope(width, rise)], inner, [_end_slope(width[::-1], rise[::-1])]])
    inside = np.clip(at, x[0], x[-1])
    i = np.clip(np.searchsorted(x, inside, side="right") - 1, 0, len(rise) - 1)
    t = (inside - x[i]) / width[i]
    curve = y[i] * (1 + 2 * t) * (1 - t) ** 2 + width[i] * slope[i] * t * (1 - t) ** 2
    curve = curve + y[i + 1] * t**2 * (3 - 2 * t) - width[i] * slope[i + 1] * t**2 * (1 - t)
    return np.asarray(np.maximum.accumulate(curve), dtype=np.float64)


def _end_slope(width: Floats, rise: Floats) -> float:
    """Of the parabola through the three outermost points, within what keeps the first interval monotone."""
    if len(rise) < 2:
        return float(rise[0])
    slope = ((2 * width[0] + width[1]) * rise[0] - width[0] * rise[1]) / (width[0] + width[1])
    return float(min(max(slope, 0.0), 3 * rise[0]))
