"""Coefficients where no profile is there: a roofline over a sheet of rates.

Such a form is 5 to 20 % off on measured kernels even with the right rates (3 coefficients of attention: 4.6 to 19 %
median on four GPUs; 4 of linear layers: 1.4 to 3.6 %), and the rates here are a guess. Expect a factor of a few until
:mod:`medha.cost.correction` has seen some steps, or measure with ``medha profile``.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

from medha.config import ModelConfig
from medha.cost.coefficients import ChunkAttention, Coefficients, Curve, DecodeAttention, Link, ProfileKey
from medha.errors import ConfigError


@dataclass(frozen=True, slots=True)
class HardwareSheet:
    """Rates that a machine reaches, not its peaks. The defaults are of an A100; see :meth:`cpu`.

    Attributes:
        flops_per_s: of large matrix products.
        attention_flops_per_s: of attention.
        bytes_per_s: of reading weights and KV.
        launch_s: of one attention call in one layer.
        host_s: of a step on the host.
        link_alpha_s, link_bytes_per_s: of a collective or transfer.
        tile: queries of an attention tile.
    """

    flops_per_s: float = 2.0e14
    attention_flops_per_s: float = 1.5e14
    bytes_per_s: float = 1.6e12
    launch_s: float = 1e-5
    host_s: float = 1e-3
    link_alpha_s: float = 3e-5
    link_bytes_per_s: float = 1e11
    tile: int = 128

    def __post_init__(self) -> None:
        for item in fields(self):
            value = getattr(self, item.name)
            if not 0 < value < float("inf"):
                raise ConfigError(f"{item.name}={value!r}; accepted: a finite number above 0")

    @classmethod
    def cpu(cls, num_threads: int) -> HardwareSheet:
        """A generic CPU in float32: 40 GFLOP/s and 6 GB/s a thread."""
        return cls(
            flops_per_s=4e10 * num_threads,
            attention_flops_per_s=3e10 * num_threads,
            bytes_per_s=6e9 * num_threads,
            launch_s=5e-5,
            link_alpha_s=1e-4,
            link_bytes_per_s=2e9,
            tile=32,
        )


def default_coefficients(
    model: ModelConfig,
    *,
    key: ProfileKey,
    sheet: HardwareSheet,
    num_layers: int,
    dtype_bytes: int,
    tp: int = 1,
    spp: int = 1,
    kvp: int = 1,
    has_head: bool = True,
) -> Coefficients:
    """The stated default: linear layers take the larger of arithmetic and reading the weights, attention the larger of
    arithmetic and reading the KV, and a mixed batch is the sum of its parts.

    Args:
        model: its whole shape.
        key: what it is for.
        sheet: rates.
        num_layers: of this stage.
        dtype_bytes: bytes of a weight and of a key or value element.
        tp, spp, kvp: parallel degrees.
        has_head: the stage ends in the vocabulary projection.
    """
    heads, kv_heads = model.num_heads / tp, max(1.0, model.num_kv_heads / tp)
    width = heads * model.head_dim
    layer = model.hidden_size * (2 * width + 2 * kv_heads * model.head_dim + 3 * model.intermediate_size / tp)
    sizes = tuple(float(2**i) for i in range(15))

    def dense(weights: float, rows: float) -> float:
        return max(2 * weights * rows / sheet.flops_per_s, weights * dtype_bytes / sheet.bytes_per_s)

    read_s = num_layers * 2 * kv_heads * model.head_dim * dtype_bytes / sheet.bytes_per_s
    score_s = num_layers * 4 * width / sheet.attention_flops_per_s
    launch_s = num_layers * sheet.launch_s
    padded = [max(size, sheet.tile) for size in sizes]
    own = tuple(launch_s + score_s * rows * rows / 2 for rows in padded)
    hidden_bytes = model.hidden_size * dtype_bytes
    link = (sheet.link_alpha_s, sheet.link_bytes_per_s)
    return Coefficients(
        key=key,
        linear=Curve(sizes, tuple(num_layers * dense(layer, size) for size in sizes)),
        chunks=ChunkAttention(sizes, own, tuple(max(score_s * rows, read_s) for rows in padded), own, tile=sheet.tile),
        decodes=DecodeAttention(
            sizes[:11], (launch_s,) * 11, tuple(max(score_s, read_s) * size for size in sizes[:11])
        ),
        head=Curve(sizes, tuple(dense(model.vocab_size * model.hidden_size / tp, size) for size in sizes))
        if has_head
        else None,
        host_s=sheet.host_s,
        tp=Link(2 * num_layers, *link, hidden_bytes) if tp > 1 else None,
        spp=Link(1, *link, hidden_bytes) if spp > 1 else None,
        kvp=Link(num_layers, *link, heads * (model.head_dim * dtype_bytes + 4)) if kvp > 1 else None,
    )
