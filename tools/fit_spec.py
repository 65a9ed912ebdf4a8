"""Hardware specs from public kernel tables, and how far off they are; what no table tells follows from another spec.

    python -m tools.fit_spec a100-80g --data DIR/vidur --data DIR/a100_sxm --without generation_attention_sglang
    python -m tools.fit_spec h100-80g --data DIR/h100_sxm --base a100-80g --out medha/cost/specs/h100-80g.json
    python -m tools.fit_spec h200-141g --base h100-80g --out medha/cost/specs/h200-141g.json
    python -m tools.fit_spec mine.json --data TABLES --base h100-80g --out mine-spec.json

The specs that come along are from tables of github.com/microsoft/vidur (data/profiling @7d47513; of @e2d00e9 the
attention of CodeLlama-34b and the host's times) and github.com/ai-dynamo/aiconfigurator (systems/data: a100_sxm
@095f58a, h100_sxm of November 2026).

A GPU is one of PUBLISHED or a JSON file with its fields; :mod:`tools.gpu_tables` says which files are read. Rates of
one kind of kernel are fitted together by descent along one after the other, to the mean absolute logarithm of predicted
over measured. Rows weigh as the root of their time, as a long context consists of long ones, and each table the same.
Errors are of the fit; of fits from which a quarter of the shapes is held out in turn; and, where there are several
tables of a kind, of a fit without that table. docs/simulator.md has those of the specs that come along.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import numpy as np
import typer

from medha.cost.coefficients import Floats
from medha.cost.hardware import AttentionRates, ElementwiseRates, GemmRates, HardwareSpec, LinkRates, load_spec
from medha.errors import ConfigError
from tools import gpu_tables
from tools.command import main
from tools.gpu_tables import Folders, Table

_GEMM_RATES = ("flops_per_s", "bytes_per_s", "launch_s", "overlap_power", "wave_share")
_DECODE_RATES = (
    *("bytes_per_s", "decode_launch_s", "decode_split_s", "decode_head_s"),
    *("short_bytes_per_s", "block_bytes_per_s"),
)
_CHUNK_RATES: tuple[str, ...] = ("flops_per_s", "block_flops_per_s", "overlap_power", "launch_s", "cached_launch_s")
_UNTOLD = ("ring_step_s", "hides_sends")  # of which no table tells
_AS_PUBLISHED = ("name", "machine", "peak_flops_per_s", "hbm_bytes_per_s", "num_sms", "gpus_per_node")
_CHUNKS_DERIVED = (
    "chunks behind a cache are derived: differences of prompts, decodes as chunks of one token, and the launch of a "
    "decode whose keys are split"
)
_ROUNDS, _FOLDS = 60, 4


@dataclass(frozen=True, slots=True)
class Published:
    """An accelerator's published figures.

    Attributes:
        name, machine: of the spec.
        peak_flops_per_s, hbm_bytes_per_s, memory_mib, num_sms: dense bfloat16; as nvidia-smi shows the memory.
        nvlink_bytes_per_s: both ways together.
        product_share: of its peak that the largest matrix products reach (github.com/stas00/ml-engineering, maximum
            achievable matmul FLOPS).
        network: latency and bytes a second of a transfer to another node, one accelerator.
        gpus_per_node: that the fast links join.
    """

    name: str
    machine: str
    peak_flops_per_s: float
    product_share: float
    hbm_bytes_per_s: float
    memory_mib: int
    num_sms: int
    nvlink_bytes_per_s: float
    network: tuple[float, float] = (1.9e-5, 0.72 * 50e9)  # fitted to Vidur's h100_dgx/send_recv, two nodes, 400 Gbit/s
    gpus_per_node: int = 8


PUBLISHED = {
    one.name: one
    for one in (
        Published("a100-80g", "NVIDIA A100 80GB SXM", 312e12, 0.859, 2.039e12, 81920, 108, 600e9),
        Published("h100-80g", "NVIDIA H100 80GB SXM", 989e12, 0.803, 3.35e12, 81559, 132, 900e9),
        Published("h200-141g", "NVIDIA H200 141GB SXM", 989e12, 0.803, 4.8e12, 143771, 132, 900e9),
        Published("b200-180g", "NVIDIA B200 180GB SXM", 2250e12, 0.776, 8.0e12, 183359, 148, 1800e9),
    )
}
_A100 = PUBLISHED["a100-80g"]


def start() -> HardwareSpec:
    """From where the rates of kernels are sought: an A100's about; another GPU's are by published ratios."""
    return replace(
        load_spec(_A100.name),
        gemm=GemmRates((2.0e14, 2.3e14, 2.3e14), 1.6e12, 5e-6, overlap_power=2.4, wave_share=0.2),
        attention=AttentionRates(
            splits_kv=True,
            flops_per_s=1.9e14,
            block_flops_per_s=2.4e12,
            tile_rows=128,
            overlap_power=1.3,
            launch_s=1.2e-5,
            cached_launch_s=3e-5,
            bytes_per_s=1.6e12,
            decode_launch_s=1.3e-5,
            decode_split_s=2e-5,
            decode_head_s=5e-8,
            short_kv=4096.0,
            short_bytes_per_s=2e11,
            block_bytes_per_s=2.2e10,
        ),
        elementwise=ElementwiseRates(1.4e12, 3e-6),
    )


# ---------------------------------------------------------------------------------------------------------------------
# Fits


class FitError(NamedTuple):
    """Errors of predicted over measured on a table; shares, 0.01 is 1 %."""

    median: float  # absolute, like the P90
    p90: float
    total: float  # of the sums, signed

    @classmethod
    def of(cls, predicted: Floats, real: Floats) -> FitError:
        """From seconds of each row."""
        median, p90 = np.percentile(np.abs(predicted / real - 1), [50, 90]).tolist()
        return cls(median, p90, float(predicted.sum() / real.sum() - 1))


class TableErrors(NamedTuple):
    """Those of a table; None where nothing was held out, or no other table is of its kind."""

    table: str
    rows: int
    fitted: FitError
    held_out: FitError | None
    left_out: FitError | None


def fit(spec: HardwareSpec, part: str, names: Sequence[str], tables: Sequence[Table]) -> HardwareSpec:
    """Descent along the logarithm of one rate after the other; a step grows where it helps and shrinks where not."""

    def tried_with(values: Floats) -> tuple[float, HardwareSpec]:
        try:
            tried = replace(spec, **{part: _with_rates(getattr(spec, part), names, values)})
        except ConfigError:  # out of its bounds
            return np.inf, spec
        return sum(_distance(table.predicted(tried), table.seconds) for table in tables), tried

    values = np.concatenate([np.atleast_1d(getattr(getattr(spec, part), name)) for name in names])
    best, fitted = tried_with(values)
    steps = np.full(len(values), 0.3)
    for _ in range(_ROUNDS):
        for i in range(len(values)):
            for sign in (1, -1):
                moved = values.copy()
                moved[i] *= np.exp(sign * steps[i])
                loss, found = tried_with(moved)
                if loss < best:
                    best, fitted, values = loss, found, moved
                    break
            steps[i] *= 1.3 if values is moved else 0.6
    return fitted


def _with_rates(part: Any, names: Sequence[str], values: Floats) -> Any:
    """A part of the spec with other rates, in four digits."""
    left, changes = map(_rounded, values.tolist()), dict[str, Any]()
    for name in names:
        old = getattr(part, name)
        changes[name] = tuple(islice(left, len(old))) if isinstance(old, tuple) else next(left)
    return replace(part, **changes)


def _distance(predicted: Floats, real: Floats) -> float:
    return float(np.average(np.abs(np.log(predicted / real)), weights=np.sqrt(real)))


def _rounded(value: float) -> float:
    return float(f"{value:.4g}")


def _errors(
    before: HardwareSpec, fitted: HardwareSpec, part: str, names: Sequence[str], tables: Sequence[Table]
) -> list[TableErrors]:
    """Errors of a fit by table, and of those from the same start that did not see a row's shape, or its table."""
    unseen = [np.empty(len(table.seconds)) for table in tables]
    for fold in range(_FOLDS):
        held = [table.shapes % _FOLDS == fold for table in tables]
        seen = fit(before, part, names, [table.part(~out) for table, out in zip(tables, held, strict=True)])
        for table, out, predicted in zip(tables, held, unseen, strict=True):
            predicted[out] = table.part(out).predicted(seen)
    found = []
    for table, predicted in zip(tables, unseen, strict=True):
        others = [other for other in tables if other is not table]
        left_out = FitError.of(table.predicted(fit(before, part, names, others)), table.seconds) if others else None
        own, held_out = (FitError.of(seconds, table.seconds) for seconds in (table.predicted(fitted), predicted))
        found.append(TableErrors(table.name, len(table.seconds), own, held_out, left_out))
    return found


def _fit_link(ranks: int, tables: Sequence[tuple[str, Floats]]) -> tuple[LinkRates, list[TableErrors]]:
    """Latency and bandwidth by least squares of the relative error, each table counting the same."""
    size, seconds = np.concatenate([rows for _, rows in tables]).T
    weight = np.concatenate([np.full(len(rows), len(rows) ** -0.5) for _, rows in tables])
    matrix = np.stack([weight / seconds, weight * size / seconds], axis=1)
    alpha_s, byte_s = np.linalg.lstsq(matrix, weight, rcond=None)[0].tolist()
    link = LinkRates(_rounded(alpha_s), _rounded(1 / byte_s), ranks)
    return link, [
        TableErrors(name, len(rows), FitError.of(link.alpha_s + rows[:, 0] / link.bytes_per_s, rows[:, 1]), None, None)
        for name, rows in tables
    ]


def fit_spec(gpu: Published, data: Folders, base: HardwareSpec | None) -> tuple[HardwareSpec, list[TableErrors]]:
    """The spec of a GPU and its errors by table.

    Args:
        gpu: what is published of it.
        data: its tables.
        base: a spec from which what no table tells follows by published ratios.

    Raises:
        ConfigError: a table cannot be read, or neither a table nor a base tells a rate.
    """
    spec = derived(start(), _A100, gpu)
    basis = None if base is None else derived(base, published(base.name), gpu)
    sources = dict.fromkeys(("peak_flops_per_s", "hbm_bytes_per_s", "num_sms"), "published; dense bfloat16")
    sources |= {"memory_bytes": "published, as nvidia-smi shows it", "gpus_per_node": "published"}
    told = basis or spec
    spec = replace(spec, ring_step_s=told.ring_step_s, hides_sends=told.hides_sends)
    sources |= {name: told.sources[name] for name in _UNTOLD}
    errors: list[TableErrors] = []

    def is_fitted(name: str, files: set[str], *more: str) -> bool:
        """Whether files tell a part; else it is taken from the basis."""
        nonlocal spec
        if files:
            sources.update(dict.fromkeys((name, *more), f"fit to {', '.join(sorted(files))}"))
            return True
        if basis is None:
            raise ConfigError(f"no table tells {name} of {gpu.name}; accepted: data that has one, or the option base")
        spec = replace(spec, **{one: getattr(basis, one) for one in (name, *more)})
        sources.update({one: basis.sources[one] for one in (name, *more)})
        return False

    chunks, chunk_rates = gpu_tables.chunks(data), _CHUNK_RATES
    if chunks and not gpu_tables.has_cached(chunks):
        chunks, chunk_rates = [*chunks, *gpu_tables.derived_chunks(data)], _CHUNK_RATES[:-1]
    parts: dict[str, list[tuple[tuple[str, ...], list[Table]]]] = {
        "gemm": [(_GEMM_RATES, gpu_tables.gemms(data))],
        "elementwise": [(("bytes_per_s", "launch_s"), gpu_tables.elementwise(data))],
        "attention": [(_DECODE_RATES, gpu_tables.decodes(data)), (chunk_rates, chunks)],
    }
    for part, kinds in parts.items():
        whole = all(tables for _, tables in kinds)
        if is_fitted(part, {table.source for _, tables in kinds for table in tables if table.source and whole}):
            for names, tables in kinds:
                before, spec = spec, fit(spec, part, names, tables)
                errors += _errors(before, spec, part, names, tables)
            if part == "attention" and "cached_launch_s" not in chunk_rates:
                rates = spec.attention
                least_s = max(rates.launch_s, rates.decode_split_s)
                spec = replace(spec, attention=replace(rates, cached_launch_s=least_s))
                sources[part] += f"; {_CHUNKS_DERIVED}"
    for name, op, across in (
        ("all_reduce", "all_reduce", False),
        ("all_gather", "all_gather", False),
        ("send", "send_recv", False),
        ("node_all_reduce", "all_reduce", True),
        ("node_send", "send_recv", True),
    ):
        found = gpu_tables.links(data, op, gpu.nvlink_bytes_per_s)
        measured = [
            (ranks, tables)
            for (ranks, per_node), tables in sorted(found.items())
            if per_node == (min(ranks - 1, gpu.gpus_per_node) if across else ranks)
        ]
        is_one = isinstance(getattr(spec, name), LinkRates)
        measured = measured[-1:] if is_one else measured
        if is_fitted(name, {table.split(":")[0] for _, tables in measured for table, _ in tables}):
            links, more = zip(*(_fit_link(*one) for one in measured), strict=True)
            found_links: dict[str, Any] = {name: links[0] if is_one else links}
            spec = replace(spec, **found_links)
            errors += [error._replace(table=f"{name}, {error.table}") for some in more for error in some]
    host = gpu_tables.host(data)
    if is_fitted("host_s", set() if host is None else {host[0]}, "sample_s") and host is not None:
        spec = replace(spec, host_s=_rounded(host[1]), sample_s=_rounded(host[2]))
    provenance = "fitted" if all(sources[part].startswith("fit") for part in ("gemm", "attention")) else "derived"
    return replace(spec, provenance=provenance, sources={**sources, "control_s": "assumed"}), errors


# ---------------------------------------------------------------------------------------------------------------------
# Other accelerators, by published ratios


def derived(spec: HardwareSpec, of: Published, to: Published) -> HardwareSpec:
    """A spec for another accelerator: arithmetic by the ratio of peaks times that of the shares which the largest
    products reach, bytes by that of HBM bandwidths, links by that of NVLink's; launches and latencies unchanged."""
    flops = to.peak_flops_per_s * to.product_share / (of.peak_flops_per_s * of.product_share)
    memory = to.hbm_bytes_per_s / of.hbm_bytes_per_s
    block = of.num_sms / to.num_sms  # a machine's rate is shared by its multiprocessors
    nvlink = to.nvlink_bytes_per_s / of.nvlink_bytes_per_s
    attention = {
        **{"flops_per_s": flops, "block_flops_per_s": flops * block, "bytes_per_s": memory},
        **dict.fromkeys(("short_bytes_per_s", "block_bytes_per_s"), memory * block),
    }
    network = LinkRates(*to.network)
    ratio = f"derived, not measured: {spec.name} by the ratio of"
    by_peak = (
        f"{ratio} peaks times that of the shares which products reach, bytes by that of HBM bandwidths, launches "
        "unchanged"
    )
    as_published: dict[str, Any] = {name: getattr(to, name) for name in _AS_PUBLISHED}
    return replace(
        spec,
        **as_published,
        memory_bytes=to.memory_mib * 2**20,
        gemm=_times(spec.gemm, flops_per_s=flops, bytes_per_s=memory),
        attention=_times(spec.attention, **attention),
        elementwise=_times(spec.elementwise, bytes_per_s=memory),
        all_reduce=tuple(_times(link, bytes_per_s=nvlink) for link in spec.all_reduce),
        all_gather=tuple(_times(link, bytes_per_s=nvlink) for link in spec.all_gather),
        send=_times(spec.send, bytes_per_s=nvlink),
        node_all_reduce=_times(spec.node_all_reduce, bytes_per_s=network.bytes_per_s / spec.node_send.bytes_per_s),
        node_send=network,
        sources={
            **dict.fromkeys(("gemm", "attention", "elementwise"), by_peak),
            **dict.fromkeys(("host_s", "sample_s"), f"that of {spec.name}"),
            **{name: spec.sources[name] for name in _UNTOLD},
            **dict.fromkeys(("all_reduce", "all_gather", "send"), f"{ratio} NVLink bandwidths, latency unchanged"),
            "node_all_reduce": f"{ratio} node_send, latency unchanged",
            "node_send": (
                "derived, not measured: 0.72 of 400 Gbit/s an accelerator and 19 us, as fitted to Vidur's "
                "h100_dgx/send_recv, two nodes"
            ),
        },
    )


def _times(part: Any, **ratios: float) -> Any:
    """A part of a spec with some of its rates multiplied."""
    values = [np.atleast_1d(getattr(part, name)) * ratio for name, ratio in ratios.items()]
    return _with_rates(part, tuple(ratios), np.concatenate(values))


def published(name_or_path: str) -> Published:
    """One of PUBLISHED, or that of a JSON file with its fields."""
    if name_or_path in PUBLISHED:
        return PUBLISHED[name_or_path]
    try:
        found = json.loads(Path(name_or_path).read_text(encoding="utf-8"))
        return Published(**found | ({"network": tuple(found["network"])} if "network" in found else {}))
    except (OSError, ValueError, TypeError) as error:
        accepted = f"{', '.join(PUBLISHED)}, or a JSON file of {', '.join(Published.__slots__)}"
        raise ConfigError(f"GPU {name_or_path!r} is not known ({error}); accepted: {accepted}") from error


def fit_spec_command(
    gpu: Annotated[str, typer.Argument(help="A known GPU, or a JSON file of what is published of one.")],
    data: Annotated[list[Path] | None, typer.Option(help="Folder or file of its tables; may be given again.")] = None,
    without: Annotated[list[str] | None, typer.Option(help="Leave out files whose names begin so.")] = None,
    base: Annotated[str | None, typer.Option(help="Spec from which what no table tells is derived.")] = None,
    out: Annotated[Path | None, typer.Option(help="Write the spec here.")] = None,
) -> None:
    """Fit a hardware spec to kernel tables, and print how far off it is on each."""
    tables = Folders(data or [], without or [])
    spec, errors = fit_spec(published(gpu), tables, None if base is None else load_spec(base))
    if out is not None:
        out.write_text(spec.to_json(), encoding="utf-8")
    if errors:
        print(f"{'':<84}{'fitted':>22} {'shapes held out':>16} {'table left out':>16}")
        print(f"{'table':<76}{'rows':>8}{'median':>8}{'P90':>7}{'total':>7}" + f" {'median':>9}{'total':>7}" * 2)
    for table, rows, fitted, *others in errors:
        more = "".join(f" {e.median:>9.1%}{e.total:>+7.1%}" if e else f"{'':>17}" for e in others)
        print(f"{table:<76}{rows:>8,}{fitted.median:>8.1%}{fitted.p90:>7.1%}{fitted.total:>+7.1%}{more}".rstrip())


if __name__ == "__main__":
    main(fit_spec_command)
