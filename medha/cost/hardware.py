"""What an accelerator and its links take, whatever the model, and from that the costs of any stage of any layout.

A :class:`Sheet` holds rates, each with its source; ``medha/cost/specs/`` has some. ``a100-80g`` is fitted to public
kernel tables by :mod:`tools.fit_spec`, whose docstring gives the errors. The others are derived from it by the
ratios of published figures: derived, not measured. The forms:

- A matrix product fills the machine with tiles of three sizes, in waves, beside the reading and writing of its
  operands; the fastest tile size counts.
- Attention of a chunk is arithmetic on padded tiles of queries beside what the busiest thread block does alone. With a
  split KV that block's keys are spread over the machine; without, few tiles leave most of it idle.
- Attention of decodes is the reading of keys and values, with another line for short ones.
- A transfer is ``alpha + bytes / bandwidth``.

Two terms "beside" each other take ``(a**p + b**p) ** (1/p)``, from their maximum (p large) to their sum (p = 1). All of
it is non-decreasing in tokens and KV and affine in KV, so 10M tokens lie on the line of 16K. Chunks and decodes in one
batch are separate launches, that is a sum.

Left out: the embedding (below 0.5 % of a prefill), clocks that fall under load, contention between links, and overlap
of communication with arithmetic. Placement: ``tp`` fastest, then ``spp``, ``kvp`` outermost, nodes filled in order.
"""

from __future__ import annotations

import difflib
import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from medha.config import ModelConfig, ParallelConfig
from medha.cost.coefficients import ChunkAttention, Coefficients, Curve, DecodeAttention, Link, ProfileKey
from medha.errors import ConfigError

Floats = NDArray[np.float64]

SHEETS = Path(__file__).parent / "specs"
GEMM_TILES = ((64, 64), (128, 128), (128, 256))
"""Rows and columns of the output that one thread block computes."""
BACKENDS = {"split-kv": True, "no-split-kv": False}
_FORMAT, _VERSION = "medha-hardware-sheet", 1
_LAYER_KERNELS = 5
"""Two norms, rotary embedding, activation and one residual addition; the other is fused into a norm."""
_MAX_CHUNK = 1 << 18
_MAX_BATCH = 1 << 16
_LSE_BYTES = 4
_MAX_SAMPLES = 256


@dataclass(frozen=True, slots=True)
class GemmRates:
    """Matrix products in bfloat16.

    Attributes:
        flops_per_s: of a machine full of tiles, for each of :data:`GEMM_TILES`.
        bytes_per_s: of operands and result.
        launch_s: of one product.
        overlap_power: p of arithmetic beside bytes, at least 1.
        wave_share: 1 where a last wave that is not full costs a full one, 0 where it costs its share.
    """

    flops_per_s: tuple[float, ...]
    bytes_per_s: float
    launch_s: float
    overlap_power: float
    wave_share: float

    def __post_init__(self) -> None:
        _check_part("gemm", self)
        if len(self.flops_per_s) != len(GEMM_TILES):
            raise ConfigError(f"gemm.flops_per_s={self.flops_per_s!r}; accepted: {len(GEMM_TILES)} numbers")


@dataclass(frozen=True, slots=True)
class AttentionRates:
    """Attention in bfloat16.

    Attributes:
        splits_kv: keys of one tile of queries, or of one decode, are spread over the machine.
        flops_per_s: of a machine full of tiles.
        block_flops_per_s: of one thread block that has a multiprocessor to itself.
        tile_rows: query rows of a tile; with a split KV the query heads of a KV head share a tile.
        overlap_power: p of all the arithmetic beside the busiest block's (or beside the keys' bytes), at least 1.
        launch_s: least time of a chunk with nothing cached.
        cached_launch_s: least time of a chunk behind cached tokens.
        bytes_per_s: of keys and values.
        decode_launch_s: of short decodes.
        decode_split_s: of decodes whose keys are split, with one more for a batch of a single KV head.
        decode_head_s: more of it for each decode and KV head.
        short_kv: cached tokens up to which a decode counts as short.
        short_bytes_per_s: of one KV head of one short decode.
        block_bytes_per_s: of one KV head of one decode where keys are not split.
    """

    splits_kv: bool
    flops_per_s: float
    block_flops_per_s: float
    tile_rows: int
    overlap_power: float
    launch_s: float
    cached_launch_s: float
    bytes_per_s: float
    decode_launch_s: float
    decode_split_s: float
    decode_head_s: float
    short_kv: float
    short_bytes_per_s: float
    block_bytes_per_s: float

    def __post_init__(self) -> None:
        _check_part("attention", self)


@dataclass(frozen=True, slots=True)
class ElementwiseRates:
    """Norms, rotary embedding, activation, additions.

    Attributes:
        bytes_per_s: of what they read and write.
        launch_s: of one such kernel.
    """

    bytes_per_s: float
    launch_s: float

    def __post_init__(self) -> None:
        _check_part("elementwise", self)


@dataclass(frozen=True, slots=True)
class LinkRates:
    """A collective or transfer: ``alpha_s + bytes / bytes_per_s``.

    Attributes:
        alpha_s: latency.
        bytes_per_s: of the payload: the reduced tensor, what is sent, or what a rank receives of the others.
        ranks: taking part.
    """

    alpha_s: float
    bytes_per_s: float
    ranks: int = 2

    def __post_init__(self) -> None:
        _check_part("link", self)


@dataclass(frozen=True, slots=True)
class Sheet:
    """One accelerator and its links.

    Attributes:
        name: of the sheet.
        machine: as its maker names it.
        provenance: ``measured`` (fitted to measurements) or ``derived`` (by published ratios).
        peak_flops_per_s: published, dense bfloat16; what MFU is relative to.
        hbm_bytes_per_s: published; what MBU is relative to.
        memory_bytes: of one accelerator.
        num_sms: multiprocessors.
        gpus_per_node: accelerators that the fast links join.
        gemm, attention, elementwise: rates.
        host_s: seconds of a step on the host: scheduling, input, output.
        sample_s: seconds of sampling a token.
        all_reduce: within a node, by number of ranks.
        all_gather: within a node, by number of ranks.
        send: within a node.
        node_all_reduce: where ranks span nodes.
        node_send: from one accelerator to one of another node.
        sources: of each of the fields above but the first three.
    """

    name: str
    machine: str
    provenance: str
    peak_flops_per_s: float
    hbm_bytes_per_s: float
    memory_bytes: int
    num_sms: int
    gpus_per_node: int
    gemm: GemmRates
    attention: AttentionRates
    elementwise: ElementwiseRates
    host_s: float
    sample_s: float
    all_reduce: tuple[LinkRates, ...]
    all_gather: tuple[LinkRates, ...]
    send: LinkRates
    node_all_reduce: LinkRates
    node_send: LinkRates
    sources: dict[str, str] = field(repr=False)

    def __post_init__(self) -> None:
        _check_part("sheet", self)
        if self.provenance not in ("measured", "derived"):
            raise ConfigError(f"sheet.provenance={self.provenance!r}; accepted: 'measured' or 'derived'")
        for name in ("all_reduce", "all_gather"):
            ranks = [link.ranks for link in getattr(self, name)]
            if not ranks or ranks != sorted(set(ranks)):
                raise ConfigError(f"{name}: ranks {ranks}; accepted: at least one, increasing")
        self._check_sources()

    def _check_sources(self) -> None:
        needed = {item.name for item in fields(self)} - {"name", "machine", "provenance", "sources"}
        given = self.sources if isinstance(self.sources, dict) else {}
        without = sorted(name for name in needed if not isinstance(given.get(name), str) or not given[name])
        if without or (unknown := sorted(set(given) - needed)):
            wrong = f"none for {', '.join(without)}" if without else f"unknown {', '.join(unknown)}"
            raise ConfigError(f"sources: {wrong}; accepted: a text for each of {', '.join(sorted(needed))}")

    def to_json(self) -> str:
        """As the text of a JSON file; see :meth:`from_json`."""
        return json.dumps({"format": _FORMAT, "version": _VERSION, **asdict(self)}, indent=2) + "\n"

    @classmethod
    def from_json(cls, text: str, *, source: str = "sheet") -> Sheet:
        """Read what :meth:`to_json` gave, or one written by hand.

        Args:
            text: JSON.
            source: how a message names it.

        Raises:
            ConfigError: not such a file, or naming the field that is unknown, missing or wrong.
        """
        try:
            tree = json.loads(text)
        except ValueError as error:
            raise ConfigError(f"{source} is not JSON: {error}") from error
        if not isinstance(tree, dict) or (tree.pop("format", None), tree.pop("version", None)) != (_FORMAT, _VERSION):
            raise ConfigError(f"{source}; accepted: a file of format {_FORMAT!r}, version {_VERSION}")
        try:
            found: Sheet = _build(cls, "sheet", tree)
        except ConfigError as error:
            raise ConfigError(f"{source}: {error}") from error
        return found


def load_sheet(name_or_path: str | Path) -> Sheet:
    """A sheet that comes along, by name, or that of a JSON file.

    Raises:
        ConfigError: there is no such sheet or file, or it is not valid.
    """
    known = sorted(path.stem for path in SHEETS.glob("*.json"))
    path = SHEETS / f"{name_or_path}.json" if str(name_or_path) in known else Path(name_or_path)
    try:
        return Sheet.from_json(path.read_text(), source=f"sheet {name_or_path}")
    except (OSError, UnicodeDecodeError) as error:
        near = difflib.get_close_matches(str(name_or_path), known, n=1, cutoff=0.4)
        hint = f"; did you mean {near[0]}?" if near else ""
        accepted = f"{', '.join(known)}, or the path of a JSON file"
        raise ConfigError(f"sheet {str(name_or_path)!r} is not known; accepted: {accepted}{hint}") from error


# ---------------------------------------------------------------------------------------------------------------------
# Kernels: seconds of one layer's launches


def gemm_s(sheet: Sheet, m: ArrayLike, n: ArrayLike, k: ArrayLike, *, dtype_bytes: int = 2) -> Floats:
    """Seconds of [m, k] times [k, n].

    Args:
        sheet: rates.
        m, n, k: numbers or arrays that broadcast.
        dtype_bytes: of an element.
    """
    rates, (m, n, k) = sheet.gemm, (np.asarray(size, dtype=np.float64) for size in (m, n, k))
    arithmetic: Floats = np.full((), np.inf)
    for (rows, columns), flops_per_s in zip(GEMM_TILES, rates.flops_per_s, strict=True):
        waves = np.ceil(m / rows) * np.ceil(n / columns) / sheet.num_sms
        waves = waves + rates.wave_share * (np.ceil(waves) - waves)
        arithmetic = np.minimum(arithmetic, waves * sheet.num_sms * rows * columns * 2 * k / flops_per_s)
    transfer = dtype_bytes * (m * n + m * k + n * k) / rates.bytes_per_s
    return rates.launch_s + _beside(arithmetic, transfer, rates.overlap_power)


def first_chunk_s(sheet: Sheet, tokens: ArrayLike, *, heads: ArrayLike, head_dim: int) -> Floats:
    """Seconds of causal attention with nothing cached, of one layer.

    Args:
        sheet: rates.
        tokens: of the chunk.
        heads: query heads of one rank.
        head_dim: features of a head.
    """
    rates, c = sheet.attention, np.asarray(tokens, dtype=np.float64)
    all_blocks = np.asarray(heads) * 2 * head_dim * c * (c + rates.tile_rows) / rates.flops_per_s
    return rates.launch_s + _beside(all_blocks, _block_s(sheet, head_dim) * c, rates.overlap_power)


def chunk_slope_s(
    sheet: Sheet, tokens: ArrayLike, *, heads: float, kv_heads: float, head_dim: int, dtype_bytes: int = 2
) -> Floats:
    """Seconds that each cached token adds to the attention of a chunk, of one layer.

    Args:
        sheet: rates.
        tokens: of the chunk.
        heads, kv_heads: query and KV heads of one rank.
        head_dim: features of a head.
        dtype_bytes: of a key or value element.
    """
    rates, tile = sheet.attention, tile_tokens(sheet, heads, kv_heads)
    rows = np.ceil(np.asarray(tokens, dtype=np.float64) / tile) * tile * heads
    read = _read_s(kv_heads * head_dim, dtype_bytes, rates.bytes_per_s)
    beside = read if rates.splits_kv else max(_block_s(sheet, head_dim), read)
    return _beside(rows * 4 * head_dim / rates.flops_per_s, beside, rates.overlap_power)


def tile_tokens(sheet: Sheet, heads: float, kv_heads: float) -> int:
    """Tokens of a tile of queries."""
    rates = sheet.attention
    return max(1, round(rates.tile_rows * kv_heads / heads)) if rates.splits_kv else rates.tile_rows


def decode_lines(
    sheet: Sheet, units: ArrayLike, *, head_dim: int, dtype_bytes: int = 2
) -> tuple[Floats, Floats, Floats, Floats]:
    """Attention of decodes with a split KV over their mean KV, of one layer: a line for long ones, one for short ones.

    Args:
        sheet: rates.
        units: decodes times KV heads of one rank.
        head_dim: features of a head.
        dtype_bytes: of a key or value element.

    Returns:
        Seconds and seconds per cached token of long decodes, then of those up to ``short_kv``.
    """
    rates, units = sheet.attention, np.asarray(units, dtype=np.float64)
    read = _read_s(head_dim, dtype_bytes, rates.bytes_per_s) * units
    short_read = np.maximum(read, _read_s(head_dim, dtype_bytes, rates.short_bytes_per_s))
    long_a = rates.decode_split_s * (1 + 1 / units) + rates.decode_head_s * units
    return long_a, read, rates.decode_launch_s + rates.decode_head_s * units, short_read


def unsplit_decode_line(
    sheet: Sheet, units: ArrayLike, *, head_dim: int, dtype_bytes: int = 2
) -> tuple[Floats, Floats]:
    """The same where one thread block reads all keys of a KV head; arguments as of :func:`decode_lines`."""
    rates = sheet.attention
    _, read, launch_s, _ = decode_lines(sheet, units, head_dim=head_dim, dtype_bytes=dtype_bytes)
    return launch_s, np.maximum(read, _read_s(head_dim, dtype_bytes, rates.block_bytes_per_s))


def elementwise_s(sheet: Sheet, num_bytes: ArrayLike, *, kernels: int) -> Floats:
    """Seconds of kernels that read and write so many bytes together."""
    rates = sheet.elementwise
    return np.asarray(kernels * rates.launch_s + np.asarray(num_bytes) / rates.bytes_per_s, dtype=np.float64)


def _beside(one: ArrayLike, other: ArrayLike, power: float) -> Floats:
    """Between the larger and the sum of two times, without overflow or underflow of the powers."""
    one, other = np.asarray(one, dtype=np.float64), np.asarray(other, dtype=np.float64)
    larger = np.maximum(np.maximum(one, other), 1e-300)
    return np.asarray(larger * (1 + (np.minimum(one, other) / larger) ** power) ** (1 / power), dtype=np.float64)


def _block_s(sheet: Sheet, head_dim: int) -> float:
    """Seconds of one thread block for each key."""
    return sheet.attention.tile_rows * 4 * head_dim / sheet.attention.block_flops_per_s


def _read_s(features: float, dtype_bytes: int, bytes_per_s: float) -> float:
    """Seconds to read a token's key and value."""
    return 2 * features * dtype_bytes / bytes_per_s


def _seconds(values: Floats) -> tuple[float, ...]:
    return tuple(values.tolist())


# ---------------------------------------------------------------------------------------------------------------------
# One stage of one group


@dataclass(frozen=True, slots=True)
class _Shard:
    """What one rank of a stage computes: its layers, and its share of each."""

    layers: int
    heads: int
    kv_heads: int
    intermediate: int
    is_first: bool
    is_last: bool

    @classmethod
    def of(cls, model: ModelConfig, parallel: ParallelConfig, stage: int) -> _Shard:
        if not isinstance(stage, int) or not 0 <= stage < parallel.spp:
            raise ConfigError(f"stage={stage!r}; accepted: 0 to {parallel.spp - 1}")
        if parallel.spp > model.num_layers:
            raise ConfigError(f"spp={parallel.spp} stages; accepted: 1 to {model.num_layers}, the layers of the model")
        tp, own = parallel.tp, model.num_kv_heads
        if model.num_heads % tp or model.intermediate_size % tp or max(tp, own) % min(tp, own):
            raise ConfigError(
                f"tp={tp}; accepted: a divisor of {model.num_heads} query heads and {model.intermediate_size} MLP "
                f"features that divides {own} KV heads or is a multiple of them"
            )
        layers, inner = len(parallel.layers_of(stage, model.num_layers)), model.intermediate_size // tp
        return cls(layers, model.num_heads // tp, max(1, own // tp), inner, stage == 0, stage == parallel.spp - 1)


def stage_coefficients(
    sheet: Sheet,
    model: ModelConfig,
    parallel: ParallelConfig,
    stage: int,
    *,
    dtype_bytes: int = 2,
    backend: str | None = None,
) -> Coefficients:
    """Costs of one stage of one group, for :class:`medha.cost.predictor.Predictor`.

    Where groups or tensor-parallel ranks lie differently on the nodes, the slowest counts. The last stage sends nothing
    on. A merge's latency does not grow with its groups. The host's time is that of the first stage: what is to run is
    known to the others before it reaches them, so they prepare it while those before them compute.

    Args:
        sheet: rates.
        model: whole shape.
        parallel: layout.
        stage: 0 to ``parallel.spp - 1``.
        dtype_bytes: of weights, activations and KV: 2, or 1 where bytes halve and arithmetic stays that of bfloat16.
        backend: ``split-kv`` or ``no-split-kv``; None is what the sheet says.

    Raises:
        ConfigError: no such stage or backend, or the layout does not split the model.
    """
    if dtype_bytes not in (1, 2):
        raise ConfigError(f"dtype_bytes={dtype_bytes!r}; accepted: 1 or 2, as the rates are those of bfloat16")
    sheet, shard = _with_backend(sheet, backend), _Shard.of(model, parallel, stage)
    hidden_bytes = model.hidden_size * dtype_bytes
    merged_bytes = shard.heads * (model.head_dim * dtype_bytes + _LSE_BYTES)
    tp, spp, kvp = _links(sheet, parallel, stage)
    return Coefficients(
        key=_key(sheet, model, parallel, stage, dtype_bytes),
        linear=_linear(sheet, model, shard, dtype_bytes),
        chunks=_chunks(sheet, model, shard, dtype_bytes),
        decodes=_decodes(sheet, model, shard, dtype_bytes),
        splits_kv=sheet.attention.splits_kv,
        head=_head(sheet, model, parallel, dtype_bytes) if shard.is_last else None,
        host_s=sheet.host_s if stage == 0 else 0.0,
        tp=_link(tp, 2 * shard.layers, hidden_bytes),
        spp=_link(spp, 1, hidden_bytes),
        kvp=_link(kvp, shard.layers, merged_bytes),
    )


def _link(rates: LinkRates | None, calls: int, bytes_per_token: float) -> Link | None:
    return None if rates is None else Link(calls, rates.alpha_s, rates.bytes_per_s, bytes_per_token)


def linear_layer_s(
    sheet: Sheet,
    tokens: ArrayLike,
    *,
    hidden: float,
    heads_width: float,
    kv_width: float,
    intermediate: float,
    dtype_bytes: int = 2,
) -> Floats:
    """Seconds of a layer without its attention.

    Args:
        sheet: rates.
        tokens: of the batch.
        hidden: model dimension.
        heads_width, kv_width: features of this rank's query heads, and of its key heads.
        intermediate: this rank's MLP features.
        dtype_bytes: of an element.
    """
    m = np.asarray(tokens, dtype=np.float64)
    shapes = (
        (heads_width + 2 * kv_width, hidden),
        (hidden, heads_width),
        (2 * intermediate, hidden),
        (hidden, intermediate),
    )
    products = sum(gemm_s(sheet, m, n, k, dtype_bytes=dtype_bytes) for n, k in shapes)
    touched = dtype_bytes * (2 * 2 * hidden + 3 * hidden + 2 * (heads_width + kv_width) + 3 * intermediate)
    return np.asarray(products + elementwise_s(sheet, m * touched, kernels=_LAYER_KERNELS))


def _linear(sheet: Sheet, model: ModelConfig, shard: _Shard, dtype_bytes: int) -> Curve:
    tiles = np.arange(64.0, 1025.0, 64.0)  # where a row more costs a tile more, while that is much
    sizes = np.union1d(_grid(1, _MAX_BATCH), np.concatenate([tiles, tiles + 1]))
    layer_s = linear_layer_s(
        sheet,
        sizes,
        hidden=model.hidden_size,
        heads_width=shard.heads * model.head_dim,
        kv_width=shard.kv_heads * model.head_dim,
        intermediate=shard.intermediate,
        dtype_bytes=dtype_bytes,
    )
    return Curve(_seconds(sizes), _seconds(shard.layers * layer_s))


def _chunks(sheet: Sheet, model: ModelConfig, shard: _Shard, dtype_bytes: int) -> ChunkAttention:
    tile = tile_tokens(sheet, shard.heads, shard.kv_heads)
    sizes = tile * _grid(1, _MAX_CHUNK // tile)
    first = first_chunk_s(sheet, sizes, heads=shard.heads, head_dim=model.head_dim)
    slope = chunk_slope_s(
        sheet, sizes, heads=shard.heads, kv_heads=shard.kv_heads, head_dim=model.head_dim, dtype_bytes=dtype_bytes
    )
    columns = np.maximum(first, sheet.attention.cached_launch_s), slope, first
    a, b, own = (_seconds(shard.layers * column) for column in columns)
    return ChunkAttention(_seconds(sizes), a, b, own, tile)


def _decodes(sheet: Sheet, model: ModelConfig, shard: _Shard, dtype_bytes: int) -> DecodeAttention:
    batch, rates = _grid(1, _MAX_SAMPLES), sheet.attention
    lines_of = decode_lines if rates.splits_kv else unsplit_decode_line
    lines = lines_of(sheet, batch * shard.kv_heads, head_dim=model.head_dim, dtype_bytes=dtype_bytes)
    a, b, *short = (_seconds(shard.layers * line) for line in lines)
    return DecodeAttention(_seconds(batch), a, b, rates.short_kv if short else 0.0, *short)


def _head(sheet: Sheet, model: ModelConfig, parallel: ParallelConfig, dtype_bytes: int) -> Curve:
    """Vocabulary projection, gathering of the logits, sampling."""
    rows = _grid(1, 4 * _MAX_SAMPLES)
    seconds = gemm_s(sheet, rows, -(-model.vocab_size // parallel.tp), model.hidden_size, dtype_bytes=dtype_bytes)
    seconds = seconds + sheet.sample_s * rows
    if parallel.tp > 1:
        link = _within(sheet.all_gather, parallel.tp) if parallel.tp <= sheet.gpus_per_node else sheet.node_all_reduce
        received = rows * model.vocab_size * dtype_bytes * (1 - 1 / parallel.tp)
        seconds = seconds + link.alpha_s + received / link.bytes_per_s
    return Curve(_seconds(rows), _seconds(seconds))


def _links(
    sheet: Sheet, parallel: ParallelConfig, stage: int
) -> tuple[LinkRates | None, LinkRates | None, LinkRates | None]:
    """Rates of the all-reduces, of the send to the next stage and of the merges; None where there are none."""

    def node(stage: int, tp_rank: int, kvp_rank: int) -> int:
        return parallel.rank_of(stage=stage, tp_rank=tp_rank, kvp_rank=kvp_rank) // sheet.gpus_per_node

    groups, ranks = range(parallel.kvp), range(parallel.tp)
    tp = spp = kvp = None
    if parallel.tp > 1:
        crosses = any(node(stage, 0, g) != node(stage, parallel.tp - 1, g) for g in groups)
        tp = sheet.node_all_reduce if crosses else _within(sheet.all_reduce, parallel.tp)
    if stage + 1 < parallel.spp:
        crosses = any(node(stage, r, g) != node(stage + 1, r, g) for g in groups for r in ranks)
        spp = sheet.node_send if crosses else sheet.send
    if parallel.kvp > 1:
        crosses = any(node(stage, r, 0) != node(stage, r, parallel.kvp - 1) for r in ranks)
        kvp = sheet.node_send if crosses else _within(sheet.all_gather, parallel.kvp)
    return tp, spp, kvp


def _within(rates: tuple[LinkRates, ...], ranks: int) -> LinkRates:
    """Rates for a number of ranks between or beyond the measured ones."""
    at, x = math.log2(ranks), [math.log2(link.ranks) for link in rates]
    alpha_s = float(np.interp(at, x, [link.alpha_s for link in rates]))
    return LinkRates(alpha_s, float(np.interp(at, x, [link.bytes_per_s for link in rates])), ranks)


def _with_backend(sheet: Sheet, backend: str | None) -> Sheet:
    if backend is None:
        return sheet
    if backend not in BACKENDS:
        raise ConfigError(f"backend={backend!r}; accepted: {', '.join(BACKENDS)}")
    return replace(sheet, attention=replace(sheet.attention, splits_kv=BACKENDS[backend]))


def _grid(least: int, most: int) -> Floats:
    """Whole numbers, four to a doubling where there are as many."""
    steps = np.arange(0, math.ceil(4 * math.log2(max(most / least, 1))) + 1)
    octave, quarter = np.divmod(steps, 4)
    return np.asarray(np.unique(np.minimum(least * 2.0**octave * (1 + quarter / 4) // 1, most)), dtype=np.float64)


def _key(sheet: Sheet, model: ModelConfig, parallel: ParallelConfig, stage: int, dtype_bytes: int) -> ProfileKey:
    return ProfileKey(
        machine=f"{sheet.machine} (sheet {sheet.name}, {sheet.provenance})",
        model=f"{_shape(model)}, {model.num_heads}/{model.num_kv_heads} heads of {model.head_dim}",
        dtype="bfloat16" if dtype_bytes == 2 else "8 bits",
        layout=f"tp{parallel.tp} spp{parallel.spp} kvp{parallel.kvp} stage {stage}",
        backend=next(name for name, splits in BACKENDS.items() if splits == sheet.attention.splits_kv),
        num_threads=0,
        block_size=1,
        torch_version="none",
    )


def _shape(model: ModelConfig) -> str:
    return f"{model.architecture} {model.num_layers}x{model.hidden_size}"


# ---------------------------------------------------------------------------------------------------------------------
# Memory of one rank


def weights_bytes(model: ModelConfig, parallel: ParallelConfig, stage: int, *, dtype_bytes: int = 2) -> int:
    """Bytes of the parameters on one rank: norms whole, all else its share; KV heads at least one a rank.

    Raises:
        ConfigError: no such stage, or the layout does not split the model.
    """
    shard, D, H = _Shard.of(model, parallel, stage), model.hidden_size, model.head_dim
    qkv = (shard.heads + 2 * shard.kv_heads) * H
    layer = D * qkv + shard.heads * H * D + 3 * D * shard.intermediate + 2 * D
    layer += model.qkv_bias * qkv + model.o_bias * D + model.qk_norm * 2 * H
    vocabulary = model.vocab_size * D // parallel.tp
    tables = shard.is_first + shard.is_last
    if model.tie_word_embeddings and parallel.spp == 1:
        tables = 1
    return dtype_bytes * (shard.layers * layer + tables * vocabulary + shard.is_last * D)


def kv_bytes_per_token(model: ModelConfig, parallel: ParallelConfig, stage: int, *, dtype_bytes: int = 2) -> int:
    """Bytes of keys and values that a token leaves on one rank of its group.

    Raises:
        ConfigError: no such stage, or the layout does not split the model.
    """
    shard = _Shard.of(model, parallel, stage)
    return 2 * shard.layers * shard.kv_heads * model.head_dim * dtype_bytes


def activation_bytes(
    model: ModelConfig, parallel: ParallelConfig, stage: int, max_batch_tokens: int, *, dtype_bytes: int = 2
) -> int:
    """Bytes of the largest set of tensors alive at once on one rank.

    Four of the model dimension (residual, normed, output, pipeline buffer), and the larger of attention's (queries,
    keys, values, output) and the MLP's (gate, up, product); on the last stage float32 logits of 256 tokens.

    Raises:
        ConfigError: no such stage, or the layout does not split the model.
    """
    shard = _Shard.of(model, parallel, stage)
    attention = (2 * shard.heads + 2 * shard.kv_heads) * model.head_dim
    token = 4 * model.hidden_size + max(attention, 3 * shard.intermediate)
    return int(max_batch_tokens * token * dtype_bytes + shard.is_last * _MAX_SAMPLES * model.vocab_size * 4)


def kv_pool_tokens(
    sheet: Sheet,
    model: ModelConfig,
    parallel: ParallelConfig,
    *,
    utilization: float = 0.9,
    max_batch_tokens: int = 2048,
    dtype_bytes: int = 2,
) -> int:
    """Tokens whose keys and values fit on each group beside weights and activations: those of its fullest stage.

    Args:
        sheet: whose memory.
        model, parallel: what is held.
        utilization: share of the memory that may be used, above 0, at most 1.
        max_batch_tokens: query tokens of a batch.
        dtype_bytes: of an element.

    Raises:
        ConfigError: they do not fit, with the numbers, or the layout does not split the model.
    """
    _check("utilization", utilization, most=1.0)
    _check_int("max_batch_tokens", max_batch_tokens)
    usable, tokens = int(sheet.memory_bytes * utilization), []
    for stage in range(parallel.spp):
        weights = weights_bytes(model, parallel, stage, dtype_bytes=dtype_bytes)
        activations = activation_bytes(model, parallel, stage, max_batch_tokens, dtype_bytes=dtype_bytes)
        token = kv_bytes_per_token(model, parallel, stage, dtype_bytes=dtype_bytes)
        if (left := usable - weights - activations) < token:
            raise ConfigError(
                f"{_shape(model)} at tp={parallel.tp} spp={parallel.spp} does not fit {sheet.name}: stage {stage} "
                f"needs {weights / 1e9:.1f} GB for weights and {activations / 1e9:.1f} GB for activations of "
                f"{max_batch_tokens} tokens, and {usable / 1e9:.1f} GB are there ({utilization:g} of "
                f"{sheet.memory_bytes / 1e9:.1f} GB); accepted: more tp or spp, or smaller batches"
            )
        tokens.append(left // token)
    return min(tokens)


# ---------------------------------------------------------------------------------------------------------------------
# Reading and checking

_BOUNDS: dict[str, tuple[float | None, float]] = {
    "overlap_power": (1.0, math.inf),
    "wave_share": (0.0, 1.0),
    "host_s": (0.0, math.inf),
    "sample_s": (0.0, math.inf),
}
_TYPES: dict[str, tuple[type, str]] = {"bool": (bool, "true or false"), "str": (str, "a text")}
_LISTS = ("flops_per_s", "all_reduce", "all_gather")
_PARTS: dict[str, type[Any]] = {
    "gemm": GemmRates,
    "attention": AttentionRates,
    "elementwise": ElementwiseRates,
    "all_reduce": LinkRates,
    "all_gather": LinkRates,
    "send": LinkRates,
    "node_all_reduce": LinkRates,
    "node_send": LinkRates,
}


def _build(kind: type[Any], where: str, tree: object) -> Any:
    """A dataclass from decoded JSON; lists become tuples."""
    if not isinstance(tree, Mapping):
        raise ConfigError(f"{where} is {tree!r}; accepted: an object")
    names = {item.name for item in fields(kind)}
    if unknown := sorted(set(tree) - names):
        raise ConfigError(f"{where} has unknown fields {', '.join(unknown)}; known: {', '.join(sorted(names))}")
    if missing := sorted(names - set(tree)):
        raise ConfigError(f"{where} lacks {', '.join(missing)}")
    return kind(**{name: _value(name, value) for name, value in tree.items()})


def _value(name: str, value: object) -> Any:
    if isinstance(value, list) and name in _LISTS:
        return tuple(_build(_PARTS[name], name, item) if name in _PARTS else item for item in value)
    return _build(_PARTS[name], name, value) if name in _PARTS else value


def _check_part(where: str, part: Any) -> None:
    """Check each field of a part by its declared type and its name."""
    for item in fields(part):
        name, value = f"{where}.{item.name}", getattr(part, item.name)
        if item.type == "int":
            _check_int(name, value, least=2 if item.name == "ranks" else 1)
        elif item.type == "float":
            _check(name, value, *_BOUNDS.get(item.name, (None, math.inf)))
        elif item.type == "tuple[float, ...]":
            for number in value if isinstance(value, tuple) else (value,):
                _check(name, number)
        elif item.type in _TYPES:
            kind, accepted = _TYPES[item.type]
            if not isinstance(value, kind) or value == "":
                raise ConfigError(f"{name}={value!r}; accepted: {accepted}")
        elif item.type == "tuple[LinkRates, ...]" and (
            not isinstance(value, tuple) or not all(isinstance(link, LinkRates) for link in value)
        ):
            raise ConfigError(f"{name}={value!r}; accepted: a list of links, one for each number of ranks")


def _check(name: str, value: object, least: float | None = None, most: float = math.inf) -> None:
    """A finite number above 0, or of at least ``least``, and at most ``most``."""
    number = value if isinstance(value, (int, float)) and not isinstance(value, bool) else math.nan
    above = number > 0 if least is None else number >= least
    if not math.isfinite(number) or not above or number > most:
        bound = "above 0" if least is None else f"of at least {least:g}"
        raise ConfigError(
            f"{name}={value!r}; accepted: a finite number {bound}" + f", at most {most:g}" * (most < math.inf)
        )


def _check_int(name: str, value: object, *, least: int = 1) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise ConfigError(f"{name}={value!r}; accepted: a whole number of at least {least}")
