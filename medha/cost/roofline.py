"""What any stage of any layout costs on a hardware spec: the one way from a spec to coefficients.

- A matrix product fills the machine with tiles of a few sizes, in waves, beside the reading and writing of its
  operands; the fastest tile size counts.
- Attention of a chunk is arithmetic on padded tiles of queries beside what the busiest thread block does alone. With a
  split KV that block's keys are spread over the machine; without, few tiles leave most of it idle.
- Attention of decodes is the reading of keys and values, with another line for short ones.
- A transfer is ``alpha + bytes / bandwidth``.

Two terms "beside" each other take ``(a**p + b**p) ** (1/p)``, from their maximum (p large) to their sum (p = 1). All of
it never falls with tokens or KV and is affine in KV. Chunks and decodes in one batch are separate launches, a sum.

Left out: the embedding (below 0.5 % of a prefill), clocks that fall under load, contention between links, and overlap
of communication with arithmetic. Placement: ``tp`` fastest, then ``spp``, ``kvp`` outermost, nodes filled in order.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from medha.config import ModelConfig, ParallelConfig
from medha.cost.coefficients import ChunkAttention, Coefficients, Curve, DecodeAttention, Floats, ProfileKey, RingCost
from medha.cost.hardware import HardwareSpec, LinkRates

MAX_SAMPLES = 256  # requests of a batch that sample a token at most, as far as tables and memory go
_LAYER_KERNELS = 5  # two norms, rotary embedding, activation and one residual addition; the other is fused into a norm
_MAX_CHUNK, _MAX_BATCH = 1 << 18, 1 << 16
_LSE_BYTES = 4
# Of an H200's peak, behind 512K tokens with 32 heads of 128 in bfloat16: 345 and 525 TFLOP/s.
_FA2_SHARE, _FA3_SHARE, _FA3_TILE = 0.35, 0.54, 128

# ---------------------------------------------------------------------------------------------------------------------
# Kernels: seconds of one layer's launches. ``tokens`` are of the chunk or batch, ``heads`` and ``kv_heads`` of one
# rank, ``head_dim`` the features of a head, ``dtype_bytes`` those of an element.


def gemm_s(spec: HardwareSpec, m: ArrayLike, n: ArrayLike, k: ArrayLike, *, dtype_bytes: int = 2) -> Floats:
    """Seconds of [m, k] times [k, n]; numbers or arrays that broadcast."""
    rates, (m, n, k) = spec.gemm, (np.asarray(size, dtype=np.float64) for size in (m, n, k))
    arithmetic: Floats = np.full((), np.inf)
    for (rows, columns), flops_per_s in zip(rates.tiles, rates.flops_per_s, strict=True):
        waves = np.ceil(m / rows) * np.ceil(n / columns) / spec.num_sms
        waves = waves + rates.wave_share * (np.ceil(waves) - waves)
        arithmetic = np.minimum(arithmetic, waves * spec.num_sms * rows * columns * 2 * k / flops_per_s)
    transfer = dtype_bytes * (m * n + m * k + n * k) / rates.bytes_per_s
    return rates.launch_s + _beside(arithmetic, transfer, rates.overlap_power)


def first_chunk_s(spec: HardwareSpec, tokens: ArrayLike, *, heads: ArrayLike, head_dim: int) -> Floats:
    """Seconds of causal attention with nothing cached, of one layer."""
    rates, c = spec.attention, np.asarray(tokens, dtype=np.float64)
    all_blocks = np.asarray(heads) * 2 * head_dim * c * (c + rates.tile_rows) / rates.flops_per_s
    return rates.launch_s + _beside(all_blocks, _block_s(spec, head_dim) * c, rates.overlap_power)


def chunk_slope_s(
    spec: HardwareSpec, tokens: ArrayLike, *, heads: float, kv_heads: float, head_dim: int, dtype_bytes: int = 2
) -> Floats:
    """Seconds that each cached token adds to the attention of a chunk, of one layer."""
    rates, tile = spec.attention, tile_tokens(spec, heads, kv_heads)
    rows = np.ceil(np.asarray(tokens, dtype=np.float64) / tile) * tile * heads
    read = _read_s(kv_heads * head_dim, dtype_bytes, rates.bytes_per_s)
    beside = read if rates.splits_kv else max(_block_s(spec, head_dim), read)
    return _beside(rows * 4 * head_dim / rates.flops_per_s, beside, rates.overlap_power)


def tile_tokens(spec: HardwareSpec, heads: float, kv_heads: float) -> int:
    """Tokens of a tile of queries."""
    rates = spec.attention
    return max(1, round(rates.tile_rows * kv_heads / heads)) if rates.splits_kv else rates.tile_rows


def decode_lines(spec: HardwareSpec, units: ArrayLike, *, head_dim: int, dtype_bytes: int = 2) -> tuple[Floats, ...]:
    """Attention of decodes over their mean KV, of one layer: a line for long ones, one for short ones.

    ``units`` are decodes times KV heads of one rank. Returns seconds and seconds per cached token: with a split KV of
    long decodes, then of those up to ``short_kv``; else of all, as one thread block reads all keys of a KV head.
    """
    rates, units = spec.attention, np.asarray(units, dtype=np.float64)
    read = _read_s(head_dim, dtype_bytes, rates.bytes_per_s) * units
    launch_s = rates.decode_launch_s + rates.decode_head_s * units
    if not rates.splits_kv:
        return launch_s, np.maximum(read, _read_s(head_dim, dtype_bytes, rates.block_bytes_per_s))
    short_read = np.maximum(read, _read_s(head_dim, dtype_bytes, rates.short_bytes_per_s))
    long_a = rates.decode_split_s * (1 + 1 / units) + rates.decode_head_s * units
    return long_a, read, launch_s, short_read


def elementwise_s(spec: HardwareSpec, num_bytes: ArrayLike, *, kernels: int) -> Floats:
    """Seconds of kernels that read and write so many bytes together."""
    rates = spec.elementwise
    return np.asarray(kernels * rates.launch_s + np.asarray(num_bytes) / rates.bytes_per_s, dtype=np.float64)


def _beside(one: ArrayLike, other: ArrayLike, power: float) -> Floats:
    """Between the larger and the sum of two times, without overflow or underflow of the powers."""
    one, other = np.asarray(one, dtype=np.float64), np.asarray(other, dtype=np.float64)
    larger = np.maximum(np.maximum(one, other), 1e-300)
    return np.asarray(larger * (1 + (np.minimum(one, other) / larger) ** power) ** (1 / power), dtype=np.float64)


def _block_s(spec: HardwareSpec, head_dim: int) -> float:
    """Seconds of one thread block for each key."""
    return spec.attention.tile_rows * 4 * head_dim / spec.attention.block_flops_per_s


def _read_s(features: float, dtype_bytes: int, bytes_per_s: float) -> float:
    """Seconds to read a token's key and value."""
    return 2 * features * dtype_bytes / bytes_per_s


# ---------------------------------------------------------------------------------------------------------------------
# One stage of one group


class Shard(NamedTuple):
    """What one rank of a stage computes: its layers, and its share of each, in elements of so many bytes."""

    model: ModelConfig
    layers: int
    heads: int
    kv_heads: int
    intermediate: int
    is_last: bool
    dtype_bytes: int

    @classmethod
    def of(cls, model: ModelConfig, parallel: ParallelConfig, stage: int, dtype_bytes: int = 2) -> Shard:
        """That of a stage; a ParallelConfigError where the layout does not split the model."""
        parallel.check_model(model)
        heads, inner = model.num_heads // parallel.tp, model.intermediate_size // parallel.tp
        layers, kv_heads = len(parallel.layers_of(stage, model.num_layers)), max(1, model.num_kv_heads // parallel.tp)
        return cls(model, layers, heads, kv_heads, inner, stage == parallel.spp - 1, dtype_bytes)

    def seconds(self, layer_s: Floats) -> tuple[float, ...]:
        return tuple((self.layers * layer_s).tolist())


def stage_coefficients(
    spec: HardwareSpec, model: ModelConfig, parallel: ParallelConfig, stage: int, *, dtype_bytes: int = 2
) -> Coefficients:
    """Costs of one stage of one group, with weights, activations and KV of ``dtype_bytes``.

    Where groups or tensor-parallel ranks lie differently on the nodes, the slowest counts. A merge's latency does not
    grow with its groups. The host's time is that of the first stage: the others prepare meanwhile.
    """
    shard = Shard.of(model, parallel, stage, dtype_bytes)
    row_bytes, merged_bytes = model.hidden_size * dtype_bytes, shard.heads * (model.head_dim * dtype_bytes + _LSE_BYTES)
    tp, spp, kvp = _links(spec, parallel, stage)
    name, layout = f"{spec.machine} ({spec.name}, {spec.provenance})", f"{layout_name(parallel)} stage {stage}"
    return Coefficients(
        key=ProfileKey(name, shape_name(model), f"{8 * dtype_bytes} bits", layout, "spec", 0, 1, "none"),
        linear=_linear(spec, shard),
        chunks=_chunks(spec, shard),
        decodes=_decodes(spec, shard),
        splits_kv=spec.attention.splits_kv,
        head=_head(spec, shard, parallel.tp) if shard.is_last else None,
        host_s=spec.host_s if stage == 0 else 0.0,
        tp=None if tp is None else tp.link(2 * shard.layers, row_bytes),
        spp=None if spp is None else spp.link(1, row_bytes),
        kvp=None if kvp is None else kvp.link(shard.layers, merged_bytes),
        ring=None if kvp is None else ring_cost(spec, shard, kvp),
    )


def ring_cost(spec: HardwareSpec, shard: Shard, link: LinkRates) -> RingCost:
    """What a chunk that is dealt to groups takes beside its computation; ``link`` joins a group and the next.

    Of a step counts what the transfer is not hidden behind attention, and ``ring_step_s``, which one column of Tetris's
    Table 1 sets for GPUs: 4,096 tokens on A100s leave 0.25, 0.52, 0.73 and 0.68 ms at 2, 4, 8 and 16 ranks.
    """
    block_bytes = 2 * shard.kv_heads * shard.model.head_dim * shard.dtype_bytes
    return RingCost(link.link(shard.layers, block_bytes), spec.ring_step_s, spec.hides_sends)


def linear_layer_s(spec: HardwareSpec, tokens: ArrayLike, shard: Shard) -> Floats:
    """Seconds of a layer without its attention."""
    m, hidden, inner = np.asarray(tokens, dtype=np.float64), shard.model.hidden_size, shard.intermediate
    width, kv_width = shard.heads * shard.model.head_dim, shard.kv_heads * shard.model.head_dim
    shapes = ((width + 2 * kv_width, hidden), (hidden, width), (2 * inner, hidden), (hidden, inner))
    products = sum(gemm_s(spec, m, n, k, dtype_bytes=shard.dtype_bytes) for n, k in shapes)
    touched = shard.dtype_bytes * (2 * 2 * hidden + 3 * hidden + 2 * (width + kv_width) + 3 * inner)
    return np.asarray(products + elementwise_s(spec, m * touched, kernels=_LAYER_KERNELS))


def _linear(spec: HardwareSpec, shard: Shard) -> Curve:
    tiles = np.arange(64.0, 1025.0, 64.0)  # where a row more costs a tile more, while that is much
    sizes = np.union1d(_grid(_MAX_BATCH), np.concatenate([tiles, tiles + 1]))
    return Curve(tuple(sizes.tolist()), shard.seconds(linear_layer_s(spec, sizes, shard)))


def _chunks(spec: HardwareSpec, shard: Shard) -> ChunkAttention:
    tile, head_dim = tile_tokens(spec, shard.heads, shard.kv_heads), shard.model.head_dim
    sizes = tile * _grid(_MAX_CHUNK // tile)
    first = first_chunk_s(spec, sizes, heads=shard.heads, head_dim=head_dim)
    heads, dtype_bytes = {"heads": shard.heads, "kv_heads": shard.kv_heads}, shard.dtype_bytes
    slope = chunk_slope_s(spec, sizes, **heads, head_dim=head_dim, dtype_bytes=dtype_bytes)
    a, b, own = map(shard.seconds, (np.maximum(first, spec.attention.cached_launch_s), slope, first))
    return ChunkAttention(tuple(sizes.tolist()), a, b, own, tile)


def hopper_chunks(spec: HardwareSpec, shard: Shard, chunks: ChunkAttention) -> ChunkAttention:
    """Attention of chunks by the two kernels of :mod:`medha.attention.flashinfer_backend`, which are slower than those
    of the tables that specs are fitted to: FA2 at one rate for chunks of any size, FA3 at a higher one in whole waves.
    """
    tokens, flops = np.asarray(chunks.tokens), 4 * shard.model.head_dim
    waves = np.ceil(shard.heads * np.ceil(tokens / _FA3_TILE) / spec.num_sms)
    fa2_s = shard.heads * tokens * flops / (_FA2_SHARE * spec.peak_flops_per_s)
    fa3_s = waves * spec.num_sms * _FA3_TILE * flops / (_FA3_SHARE * spec.peak_flops_per_s)
    read_s = _read_s(shard.kv_heads * shard.model.head_dim, shard.dtype_bytes, spec.attention.bytes_per_s)
    return replace(chunks, b_s=shard.seconds(np.maximum(np.minimum(fa2_s, fa3_s), read_s)))


def _decodes(spec: HardwareSpec, shard: Shard) -> DecodeAttention:
    batch = _grid(MAX_SAMPLES)
    units, dtype_bytes = batch * shard.kv_heads, shard.dtype_bytes
    lines = decode_lines(spec, units, head_dim=shard.model.head_dim, dtype_bytes=dtype_bytes)
    a, b, *short = map(shard.seconds, lines)
    return DecodeAttention(tuple(batch.tolist()), a, b, spec.attention.short_kv if short else 0.0, *short)


def _head(spec: HardwareSpec, shard: Shard, tp: int) -> Curve:
    """Vocabulary projection, gathering of the logits, sampling."""
    rows, vocab_size = _grid(4 * MAX_SAMPLES), shard.model.vocab_size
    seconds = gemm_s(spec, rows, -(-vocab_size // tp), shard.model.hidden_size, dtype_bytes=shard.dtype_bytes)
    seconds = seconds + spec.sample_s * rows
    if tp > 1:
        link = _within(spec.all_gather, tp) if tp <= spec.gpus_per_node else spec.node_all_reduce
        received = rows * vocab_size * shard.dtype_bytes * (1 - 1 / tp)
        seconds = seconds + link.alpha_s + received / link.bytes_per_s
    return Curve(tuple(rows.tolist()), tuple(seconds.tolist()))


def _links(spec: HardwareSpec, parallel: ParallelConfig, stage: int) -> tuple[LinkRates | None, ...]:
    """Rates of the all-reduces, of the send to the next stage and of the merges; None where there are none."""

    def node(stage: int, tp_rank: int, kvp_rank: int) -> int:
        return parallel.rank_of(stage=stage, tp_rank=tp_rank, kvp_rank=kvp_rank) // spec.gpus_per_node

    groups, ranks = range(parallel.kvp), range(parallel.tp)
    tp = spp = kvp = None
    if parallel.tp > 1:
        crosses = any(node(stage, 0, g) != node(stage, parallel.tp - 1, g) for g in groups)
        tp = spec.node_all_reduce if crosses else _within(spec.all_reduce, parallel.tp)
    if stage + 1 < parallel.spp:
        crosses = any(node(stage, r, g) != node(stage + 1, r, g) for g in groups for r in ranks)
        spp = spec.node_send if crosses else spec.send
    if parallel.kvp > 1:
        crosses = any(node(stage, r, 0) != node(stage, r, parallel.kvp - 1) for r in ranks)
        kvp = spec.node_send if crosses else _within(spec.all_gather, parallel.kvp)
    return tp, spp, kvp


def _within(rates: tuple[LinkRates, ...], ranks: int) -> LinkRates:
    """Rates for a number of ranks between or beyond the measured ones."""
    at, x = math.log2(ranks), [math.log2(link.ranks) for link in rates]
    alpha_s = float(np.interp(at, x, [link.alpha_s for link in rates]))
    return LinkRates(alpha_s, float(np.interp(at, x, [link.bytes_per_s for link in rates])), ranks)


def _grid(most: int) -> Floats:
    """Whole numbers from 1, four to a doubling where there are as many."""
    octave, quarter = np.divmod(np.arange(0, math.ceil(4 * math.log2(max(most, 1))) + 1), 4)
    return np.asarray(np.unique(np.minimum(2.0**octave * (1 + quarter / 4) // 1, most)), dtype=np.float64)


def shape_name(model: ModelConfig) -> str:
    return f"{model.architecture} {model.num_layers}x{model.hidden_size}"


def layout_name(parallel: ParallelConfig) -> str:
    return f"tp{parallel.tp} spp{parallel.spp} kvp{parallel.kvp}"
