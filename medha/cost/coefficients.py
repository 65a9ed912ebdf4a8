"""What one pipeline stage of one group costs, as data: the coefficients that :mod:`medha.cost.predictor` reads.

The form follows from public kernel measurements. Attention of a chunk of c queries behind kv > 0 cached tokens is
``A(c) + B(c) * kv``, kv = 0 is another kernel regime with a table of its own, and A and B are constant within a tile
of queries (on an A100, 672 and 704 tokens cost the same, and so do 544 and 576). This form is the one that stays right
beyond the KV it was fitted on; random forests (Vidur) and quadratics in the chunk (Tetris, SGLang) do not. Attention
of a batch that mixes decodes and a chunk in one fused launch is not the sum of the two, see :class:`MixedAttention`.

Where coefficients come from: a hardware spec (:mod:`medha.cost.roofline`), or a profile that was measured, fitted
(:mod:`medha.profile.fit`) and written as JSON with the :class:`ProfileKey` of everything it depends on.

Every time is in seconds for the whole stage, that is for all of its layers.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from itertools import pairwise
from pathlib import Path

from medha.cost.json_form import check_fields, check_number, from_json, to_json
from medha.errors import ConfigError

_FORMAT = "medha-coefficients"


@dataclass(frozen=True, slots=True)
class Curve:
    """A non-decreasing piecewise-linear function: constant before its first point, linear after its last one.

    Attributes:
        x: increasing, above 0.
        y: seconds at x; at least 0, non-decreasing.
    """

    x: tuple[float, ...]
    y: tuple[float, ...]

    def __post_init__(self) -> None:
        _check_table("curve", self.x, y=self.y)

    @property
    def tail_slope(self) -> float:
        """Seconds per unit after the last point: the mean over the upper half, as the last interval is noisy."""
        half = next(i for i, x in enumerate(self.x) if 2 * x >= self.x[-1])
        rise, run = self.y[-1] - self.y[half], self.x[-1] - self.x[half]
        return rise / run if rise > 0 else self.y[-1] / self.x[-1]


@dataclass(frozen=True, slots=True)
class ChunkAttention:
    """Attention of one prefill chunk: ``a_s + b_s * kv`` behind kv cached tokens, ``first_s`` behind none.

    Attributes:
        tokens: chunk sizes, increasing, at least 1; each stands for the tile of queries it lies in.
        a_s: seconds; non-decreasing.
        b_s: seconds per cached token; non-decreasing.
        first_s: seconds where nothing is cached; non-decreasing.
        tile: queries of a tile; between the given sizes the tables are interpolated by number of tiles.
    """

    tokens: tuple[float, ...]
    a_s: tuple[float, ...]
    b_s: tuple[float, ...]
    first_s: tuple[float, ...]
    tile: int = 128

    def __post_init__(self) -> None:
        _check_table("chunks", self.tokens, a_s=self.a_s, b_s=self.b_s, first_s=self.first_s)
        check_fields("chunks", self)


@dataclass(frozen=True, slots=True)
class DecodeAttention:
    """Attention of a batch of decodes: ``a_s + b_s * mean_kv``, with another line for short ones.

    Kernels split the KV from some length on. With one line A100 tables are 4 to 11 % off in the median, with two 2 to
    4 %. Seconds need not rise with the batch, as kernels change their split with it.

    Attributes:
        batch: numbers of decodes, increasing, at least 1.
        a_s: seconds.
        b_s: seconds per token of mean KV length.
        short_kv: mean KV up to which the other line holds; 0 where there is one line.
        short_a_s, short_b_s: that line, or empty. It never exceeds the long line's start.
    """

    batch: tuple[float, ...]
    a_s: tuple[float, ...]
    b_s: tuple[float, ...]
    short_kv: float = 0.0
    short_a_s: tuple[float, ...] = ()
    short_b_s: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        check_fields("decodes", self)
        short = {"short_a_s": self.short_a_s, "short_b_s": self.short_b_s} if self.short_kv else {}
        _check_table("decodes", self.batch, rising=False, a_s=self.a_s, b_s=self.b_s, **short)


@dataclass(frozen=True, slots=True)
class MixedAttention:
    """Decodes and chunks in one fused variable-length launch, in which decodes lose their KV split.

    ``max(prefill_factor * chunks + decodes(mean_kv), straggler_a_s + straggler_b_s * max_kv)``: the work of all, or the
    longest decode, whose keys are read by one thread block a head. Over 18,960 measured mixed batches (vLLM 0.19, RTX
    PRO 6000) the sum of both parts measured alone is 24 % off in the median and 52 % too low in total.

    Attributes:
        prefill_factor: on the chunks' own attention time.
        decodes: cost of the decodes beside a chunk.
        straggler_a_s, straggler_b_s: seconds, and seconds per token, of the longest decode.
    """

    prefill_factor: float
    decodes: DecodeAttention
    straggler_a_s: float = 0.0
    straggler_b_s: float = 0.0

    def __post_init__(self) -> None:
        check_fields("mixed", self)


@dataclass(frozen=True, slots=True)
class Link:
    """Calls of one collective or transfer in a step, each ``alpha_s + tokens * bytes_per_token / bytes_per_s``.

    Attributes:
        calls: how many a step (two all-reduces a layer with TP, one send with SPP, one merge a layer with KVP).
        alpha_s: latency of a call in seconds.
        bytes_per_s: bandwidth.
        bytes_per_token: payload of a call.
    """

    calls: int
    alpha_s: float
    bytes_per_s: float
    bytes_per_token: float

    def __post_init__(self) -> None:
        check_fields("link", self)

    @property
    def fixed_s(self) -> float:
        """Seconds a step, whatever its tokens."""
        return self.calls * self.alpha_s

    @property
    def token_s(self) -> float:
        """Seconds a token."""
        return self.calls * self.bytes_per_token / self.bytes_per_s


@dataclass(frozen=True, slots=True)
class ProfileKey:
    """Everything that coefficients depend on.

    Attributes:
        machine: processor or accelerator, as its maker names it.
        model: architecture and shape, or a digest of them.
        layout: parallel degrees, and which stage was measured.
        torch_version: as torch gives it.
    """

    machine: str
    model: str
    dtype: str
    layout: str
    backend: str
    num_threads: int
    block_size: int
    torch_version: str

    def __post_init__(self) -> None:
        check_fields("key", self)

    def check(self, expected: ProfileKey, *, source: str = "profile") -> None:
        """Raise a ConfigError that names each field in which ``expected``, what is to be run, differs."""
        differing = [
            f"{item.name} is {getattr(self, item.name)!r}, running {getattr(expected, item.name)!r}"
            for item in fields(self)
            if getattr(self, item.name) != getattr(expected, item.name)
        ]
        if differing:
            raise ConfigError(f"{source} was measured for something else: {'; '.join(differing)}")


@dataclass(frozen=True, slots=True)
class Coefficients:
    """Costs of one stage of one group.

    Attributes:
        key: what they were measured for.
        linear: everything that works a token at a time, over tokens of the step.
        chunks, decodes: attention of prefill chunks and of decodes, each alone in a launch.
        mixed: attention of both in one launch; None where the backend runs segments one after the other (a sum).
        splits_kv: the decode kernel splits a long KV over the machine. If not, the longest decode of a batch is a
            lower bound on its attention.
        head: vocabulary projection and sampling over the number of decodes; None where the stage has no head.
        host_s: seconds a step, whatever it contains.
        tp, spp: all-reduces of the layers, and the send to the next stage.
        kvp: merges of one run of groups; per token and group beyond the first.
    """

    key: ProfileKey
    linear: Curve
    chunks: ChunkAttention
    decodes: DecodeAttention
    mixed: MixedAttention | None = None
    splits_kv: bool = True
    head: Curve | None = None
    host_s: float = 0.0
    tp: Link | None = None
    spp: Link | None = None
    kvp: Link | None = None

    def __post_init__(self) -> None:
        check_fields("stage", self)

    def to_json(self) -> str:
        """As the text of a JSON file; see :meth:`from_json`."""
        return to_json(self, _FORMAT)

    @classmethod
    def from_json(cls, text: str, *, expected: ProfileKey | None = None, source: str = "profile") -> Coefficients:
        """Read what :meth:`to_json` gave; ``source`` names it in messages.

        Raises:
            ConfigError: not such a file, a bad value, or measured for something else than ``expected``.
        """
        found = from_json(cls, text, format=_FORMAT, source=source)
        if expected is not None:
            found.key.check(expected, source=source)
        return found

    @classmethod
    def load(cls, path: Path, *, expected: ProfileKey | None = None) -> Coefficients:
        """Read a JSON file; see :meth:`from_json`."""
        try:
            text = path.read_text()
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"profile {path} cannot be read: {error}") from error
        return cls.from_json(text, expected=expected, source=f"profile {path}")


def _check_table(name: str, x: tuple[float, ...], *, rising: bool = True, **columns: tuple[float, ...]) -> None:
    """A table has a point, increasing x above 0, and finite columns, which never fall unless they may."""
    if not isinstance(x, tuple) or not x:
        raise ConfigError(f"{name} has no points; accepted: at least one")
    for column, values in {"x": x, **columns}.items():
        if not isinstance(values, tuple) or len(values) != len(x):
            raise ConfigError(f"{name}.{column}={values!r}; accepted: {len(x)} numbers")
        for value in values:
            check_number(f"{name}.{column}", value, None if column == "x" else 0.0)
    if any(after <= before for before, after in pairwise(x)):
        raise ConfigError(f"{name}: sizes fall or repeat; accepted: increasing sizes")
    for column, values in columns.items():
        if rising and any(after < before for before, after in pairwise(values)):
            raise ConfigError(f"{name}.{column} falls; accepted: seconds that never fall with the size")
