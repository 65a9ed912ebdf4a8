"""A hardware spec: the rates of an accelerator and its links, whatever the model, each with its source.

In ``medha/cost/specs/``, ``a100-80g`` and ``h100-80g`` are fitted to public kernel tables by :mod:`tools.fit_spec`
(docs/simulator.md has the errors); ``h200-141g`` and ``b200-180g`` follow from the latter by published ratios, not
measured; ``cpu`` is one thread, assumed.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from medha.cost.coefficients import Link
from medha.cost.json_form import JsonFile
from medha.errors import ConfigError, hint

SPECS = Path(__file__).parent / "specs"
_PROVENANCES = ("fitted", "derived", "assumed")
_DEFAULT_GPU, _CPU = "a100-80g", "cpu"


@dataclass(frozen=True, slots=True)
class GemmRates:
    """Matrix products."""

    flops_per_s: tuple[float, ...]  # of a machine full of tiles, for each kind of them
    bytes_per_s: float  # of operands and result
    launch_s: float  # of one product
    overlap_power: float  # p of arithmetic beside bytes, at least 1
    wave_share: float  # 1 where a last wave that is not full costs a full one, 0 where it costs its share
    # Rows and columns of the output that one thread block computes; by default those of a GPU.
    tiles: tuple[tuple[int, int], ...] = ((64, 64), (128, 128), (128, 256))

    def __post_init__(self) -> None:
        if len(self.flops_per_s) != len(self.tiles):
            raise ConfigError(f"gemm.flops_per_s={self.flops_per_s!r}; accepted: {len(self.tiles)} numbers")


@dataclass(frozen=True, slots=True)
class AttentionRates:
    """Attention."""

    splits_kv: bool  # keys of one tile of queries, or of one decode, are spread over the machine
    flops_per_s: float  # of a machine full of tiles
    block_flops_per_s: float  # of one thread block that has a multiprocessor
    tile_rows: int  # query rows of a tile; with a split KV the query heads of a KV head share a tile
    overlap_power: float  # p of all the arithmetic beside the busiest block's (or beside the keys' bytes), at least 1
    launch_s: float  # least time of a chunk with nothing cached
    cached_launch_s: float  # the same behind cached tokens
    bytes_per_s: float  # of keys and values
    decode_launch_s: float  # of short decodes
    decode_split_s: float  # of decodes whose keys are split; one more for a batch of a single KV head
    decode_head_s: float  # more for each decode and KV head
    short_kv: float  # cached tokens up to which a decode counts as short
    short_bytes_per_s: float  # of one KV head of one decode that is short
    block_bytes_per_s: float  # of one KV head of one decode whose keys are not split


@dataclass(frozen=True, slots=True)
class ElementwiseRates:
    """Norms, rotary embedding, activation, additions: bytes that they read and write, and one such kernel."""

    bytes_per_s: float
    launch_s: float


@dataclass(frozen=True, slots=True)
class LinkRates:
    """A collective or transfer: ``alpha_s + bytes / bytes_per_s`` of the reduced tensor, of what is sent, or of what a
    rank receives of the others."""

    alpha_s: float
    bytes_per_s: float
    ranks: int = 2

    def link(self, calls: int, bytes_per_token: float) -> Link:
        """So many calls of it in a step."""
        return Link(calls, self.alpha_s, self.bytes_per_s, bytes_per_token)


@dataclass(frozen=True, slots=True)
class HardwareSpec(JsonFile):
    """One accelerator and its links."""

    format = "medha-hardware-spec"

    name: str
    machine: str  # as its maker names it
    provenance: str  # fitted to measurements, derived (by published ratios) or assumed
    peak_flops_per_s: float  # published, dense bfloat16 (float32 of a CPU); what MFU is relative to
    hbm_bytes_per_s: float  # published; what MBU is relative to
    memory_bytes: int  # of one accelerator
    num_sms: int  # multiprocessors
    gpus_per_node: int  # accelerators that the fast links join
    gemm: GemmRates
    attention: AttentionRates
    elementwise: ElementwiseRates
    host_s: float  # seconds of a step on the host: scheduling, input, output
    sample_s: float  # seconds of sampling a token
    control_s: float  # from a decision to its batch in the first of several stages: deciding, the host, the hop
    all_reduce: tuple[LinkRates, ...]  # within a node, by number of ranks
    all_gather: tuple[LinkRates, ...]  # likewise
    send: LinkRates  # within a node
    ring_step_s: float  # of a ring's step and layer beside attention and the send: launches, merge, neighbours
    hides_sends: bool  # a send goes on behind attention; not where the cores that compute send
    node_all_reduce: LinkRates  # where ranks span nodes
    node_send: LinkRates  # from an accelerator to one of another node
    sources: dict[str, str] = field(repr=False)  # of the fields above but the first three

    def __post_init__(self) -> None:
        if self.provenance not in _PROVENANCES:
            raise ConfigError(f"provenance={self.provenance!r}; accepted: {', '.join(_PROVENANCES)}")
        for name in ("all_reduce", "all_gather"):
            ranks = [link.ranks for link in getattr(self, name)]
            if not ranks or ranks != sorted(set(ranks)):
                raise ConfigError(f"{name}: ranks {ranks}; accepted: a list of links by increasing ranks")

    def times(self, count: int) -> HardwareSpec:
        """So many of it as one machine: threads of a CPU, whose links stay as they are."""

        def scaled(part: Any, *rates: str) -> Any:
            return replace(part, **{name: getattr(part, name) * count for name in rates})

        gemm = replace(self.gemm, flops_per_s=tuple(rate * count for rate in self.gemm.flops_per_s))
        machine: HardwareSpec = scaled(self, "peak_flops_per_s", "hbm_bytes_per_s", "num_sms")
        attention = scaled(self.attention, "flops_per_s", "bytes_per_s")
        elementwise = scaled(self.elementwise, "bytes_per_s")
        return replace(machine, gemm=scaled(gemm, "bytes_per_s"), attention=attention, elementwise=elementwise)


def load_spec(name_or_path: str | Path) -> HardwareSpec:
    """A spec that comes along, by name, or that of a JSON file; ConfigError where it is neither, or not valid."""
    known = sorted(path.stem for path in SPECS.glob("*.json"))
    path = SPECS / f"{name_or_path}.json" if str(name_or_path) in known else Path(name_or_path)
    try:
        return HardwareSpec.from_json(path.read_text(), source=f"hardware spec {name_or_path}")
    except (OSError, UnicodeDecodeError) as error:
        accepted = f"{', '.join(known)}, or the path of a JSON file{hint(str(name_or_path), known, cutoff=0.4)}"
        raise ConfigError(f"hardware spec {str(name_or_path)!r} is not known; accepted: {accepted}") from error


def spec_of_device(name: str | None, num_threads: int) -> HardwareSpec:
    """What a machine is taken for where nobody has measured it: an A100 for a GPU (``name``, as its driver gives it)
    that is not known, and for None a CPU of so many threads."""
    if name is None:
        return load_spec(_CPU).times(num_threads)
    words = re.split(r"[^a-z0-9]+", name.lower())
    known = (path.stem for path in sorted(SPECS.glob("*.json")))
    return load_spec(next((stem for stem in known if stem.split("-")[0] in words), _DEFAULT_GPU))
