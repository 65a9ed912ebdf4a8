"""Hardware specs from public kernel tables, and how far off they are.

    python -m tools.fit_spec --data DIR --out medha/cost/specs/a100-80g.json    # fits, and prints the errors
    python -m tools.fit_spec derive --out medha/cost/specs                      # the other specs, from that one

DIR holds copies of the public files that the spec's sources name, under ``vidur/`` and ``aiconfigurator/``. Rates of
one kind of kernel are fitted together by descent along one after the other, to the mean absolute logarithm of predicted
over measured. Rows weigh as the root of their time, as a long context consists of long ones, and each table the same.

Errors on the A100 tables (median of the rows, and of the sum): products 4 to 6 %, prefills up to 16K 6 % (-1 % for
vLLM's kernel, +11 % for SGLang's), FlashInfer chunks 8 % (-8 %), decodes 9 to 18 % (-5 to +1 %). Collectives are 16 to
26 % off, as no line fits their middle.
Whole prefills, to which nothing is fitted: 0.80 to 0.88 of MInference's times from 10K to 200K (a plain Hugging Face
forward), 1.07 to 1.15 of Tetris's from 4K to 128K (tests/cost/test_hardware.py).
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from medha.cost.coefficients import Floats
from medha.cost.hardware import AttentionRates, ElementwiseRates, GemmRates, HardwareSpec, LinkRates, load_spec
from medha.cost.roofline import chunk_slope_s, decode_lines, elementwise_s, first_chunk_s, gemm_s
from medha.errors import ConfigError
from tools.tables import read_records

_VIDUR = "github.com/microsoft/vidur @7d47513 data/profiling"
_VIDUR_OLD = "github.com/microsoft/vidur @e2d00e9 data/profiling/a100"
_AICONF = "github.com/ai-dynamo/aiconfigurator @095f58a aic-core/src/aiconfigurator_core/systems/data/a100_sxm"
_MLP = ("Meta-Llama-3-8B", "CodeLlama-34b")
_ELEMENTWISE = ("input_layernorm", "post_attention_layernorm", "attn_rope", "mlp_act", "add")
_GEMM_RATES = ("flops_per_s", "bytes_per_s", "launch_s", "overlap_power", "wave_share")
_DECODE_RATES = (
    *("bytes_per_s", "decode_launch_s", "decode_split_s", "decode_head_s"),
    *("short_bytes_per_s", "block_bytes_per_s"),
)
_CHUNK_RATES = ("flops_per_s", "block_flops_per_s", "overlap_power", "launch_s", "cached_launch_s")
_HEAD_DIM = 128
_ROUNDS = 60

Predict = Callable[[HardwareSpec, Floats], Floats]


class FitError(NamedTuple):
    """Errors of predicted over measured on a table; shares, 0.01 is 1 %."""

    table: str
    rows: int
    median: float  # absolute, like the P90
    p90: float
    total: float  # of the sums, signed

    @classmethod
    def of(cls, table: str, predicted: Floats, real: Floats) -> FitError:
        """From seconds of each row."""
        median, p90 = np.percentile(np.abs(predicted / real - 1), [50, 90]).tolist()
        return cls(table, len(real), median, p90, float(predicted.sum() / real.sum() - 1))


_FittedLink = tuple[LinkRates, list[FitError]]


@dataclass(frozen=True, slots=True)
class _Rows:
    """A table: columns as ``predict`` reads them."""

    table: str
    sizes: Floats
    seconds: Floats
    predict: Predict

    def error(self, spec: HardwareSpec) -> FitError:
        return FitError.of(self.table, self.predict(spec, self.sizes), self.seconds)


def fit_a100(data: Path) -> tuple[HardwareSpec, list[FitError]]:
    """The A100 spec and its errors.

    Args:
        data: folder of the tables.

    Raises:
        ConfigError: a table cannot be read.
    """
    spec, link_errors = _start(data)
    errors: list[FitError] = []
    for part, names, tables in (
        ("gemm", _GEMM_RATES, _gemms(data)),
        ("elementwise", ("bytes_per_s", "launch_s"), _elementwise(data)),
        ("attention", _DECODE_RATES, _decodes(data)),
        ("attention", _CHUNK_RATES, _chunks(data)),
    ):
        spec = _fit(spec, part, names, tables)
        errors += [rows.error(spec) for rows in tables]
    return spec, errors + link_errors


def _fit(spec: HardwareSpec, part: str, names: Sequence[str], tables: list[_Rows]) -> HardwareSpec:
    """Descent along the logarithm of one rate after the other; a step grows where it helps and shrinks where not."""

    def tried_with(values: Floats) -> tuple[float, HardwareSpec]:
        try:
            tried = replace(spec, **{part: _with_rates(getattr(spec, part), names, values)})
        except ConfigError:  # out of its bounds
            return np.inf, spec
        return sum(_distance(rows.predict(tried, rows.sizes), rows.seconds) for rows in tables), tried

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
    left, changes = [_rounded(value) for value in values.tolist()], {}
    for name in names:
        old = getattr(part, name)
        count = len(old) if isinstance(old, tuple) else 1
        changes[name] = tuple(left[:count]) if isinstance(old, tuple) else left[0]
        left = left[count:]
    return replace(part, **changes)


def _distance(predicted: Floats, real: Floats) -> float:
    return float(np.average(np.abs(np.log(predicted / real)), weights=np.sqrt(real)))


def _rounded(value: float) -> float:
    return float(f"{value:.4g}")


# ---------------------------------------------------------------------------------------------------------------------
# Tables


def _floats(record: dict[str, str], *names: str) -> list[float]:
    return [float(record[name] or 0) for name in names]


def _rows(table: str, values: list[list[float]], predict: Predict) -> _Rows:
    """A table from rows that end in milliseconds; failed ones, of 0, are left out."""
    array = np.array(values)
    array = array[array[:, -1] > 0]
    return _Rows(table, array[:, :-1], array[:, -1] * 1e-3, predict)


def _mlp(data: Path, model: str) -> list[tuple[list[float], dict[str, float]]]:
    """Tokens, hidden size, this rank's widths of queries, keys and MLP; and milliseconds of each operation."""
    found = []
    for record in read_records(data / f"vidur/a100/{model}/mlp.csv.gz"):
        tp, tokens, hidden, inner, heads, kv = _floats(
            record, "num_tensor_parallel_workers", "num_tokens", "n_embd", "n_expanded_embd", "n_head", "n_kv_head"
        )
        timed = {name.split(".")[1]: float(ms) for name, ms in record.items() if name.startswith("time_stats.")}
        found.append(([tokens, hidden, hidden / tp, hidden / heads * kv / tp, inner / tp], timed))
    return found


def _gemms(data: Path) -> list[_Rows]:
    def predict(spec: HardwareSpec, sizes: Floats) -> Floats:
        return gemm_s(spec, *sizes.T)

    records = read_records(data / "aiconfigurator/a100_sxm/gemm_vllm_0.14.0.csv.gz")
    tables = [_rows("products, vLLM", [_floats(r, "m", "n", "k", "latency") for r in records], predict)]
    for model in _MLP:
        rows = []
        for (m, hidden, width, kv, inner), ms in _mlp(data, model):
            rows += [[m, width + 2 * kv, hidden, ms["attn_pre_proj"]], [m, hidden, width, ms["attn_post_proj"]]]
            rows += [[m, 2 * inner, hidden, ms["mlp_up_proj"]], [m, hidden, inner, ms["mlp_down_proj"]]]
        tables.append(_rows(f"products, {model}", rows, predict))
    return tables


def _elementwise(data: Path) -> list[_Rows]:
    def predict(spec: HardwareSpec, sizes: Floats) -> Floats:
        return elementwise_s(spec, 2 * sizes[:, 0] * sizes[:, 1], kernels=len(_ELEMENTWISE))

    tables = []
    for model in _MLP:
        rows = [
            [m, 7 * hidden + 2 * (width + kv) + 3 * inner, sum(ms[name] for name in _ELEMENTWISE)]
            for (m, hidden, width, kv, inner), ms in _mlp(data, model)
        ]
        tables.append(_rows(f"elementwise, {model}", rows, predict))
    return tables


def _chunks(data: Path) -> list[_Rows]:
    """Columns: tokens, cached tokens, query heads, KV heads. Rows of one prompt."""

    def predict(spec: HardwareSpec, sizes: Floats) -> Floats:
        c, kv, heads, _ = sizes.T
        first = first_chunk_s(spec, c, heads=heads, head_dim=_HEAD_DIM)
        slope = np.zeros_like(c)
        for pair in np.unique(sizes[kv > 0, 2:], axis=0):
            at = (sizes[:, 2:] == pair).all(axis=1)
            slope[at] = chunk_slope_s(spec, c[at], heads=pair[0], kv_heads=pair[1], head_dim=_HEAD_DIM)
        later = np.maximum(first, spec.attention.cached_launch_s) + slope * kv
        return np.asarray(np.where(kv > 0, later, first), dtype=np.float64)

    tables = []
    for name in ("vllm_0.14.0", "sglang_0.5.10"):
        records = read_records(data / f"aiconfigurator/a100_sxm/context_attention_{name}.csv.gz")
        columns = ("isl", "step", "num_heads", "num_key_value_heads", "latency")
        rows = [_floats(record, *columns) for record in records if float(record["batch_size"]) == 1]
        tables.append(_rows(f"prefill attention, {name}", rows, predict))
    names = ("prefill_chunk_size", "kv_cache_size")
    records = read_records(data / "vidur/a100/Meta-Llama-3-8B/attention_sample_flashinfer_kv_le_7744.csv")
    rows = [[*_floats(r, *names), 32.0, 8.0, float(r["attn_prefill_median_ms"])] for r in records]
    return [*tables, _rows("chunks, FlashInfer", rows, predict)]


def _decodes(data: Path) -> list[_Rows]:
    """Columns: decodes times KV heads, cached tokens. vLLM splits no keys where each query head has its own."""

    def predict(spec: HardwareSpec, sizes: Floats) -> Floats:
        units, kv = sizes.T
        a, b, short_a, short_b = decode_lines(spec, units, head_dim=_HEAD_DIM)
        long = a + b * np.maximum(kv, spec.attention.short_kv)
        short = np.where(kv < spec.attention.short_kv, short_a + short_b * kv, np.inf)
        return np.asarray(np.minimum(short, long), dtype=np.float64)

    def predict_unsplit(spec: HardwareSpec, sizes: Floats) -> Floats:
        whole = replace(spec, attention=replace(spec.attention, splits_kv=False))
        a, b = decode_lines(whole, sizes[:, 0], head_dim=_HEAD_DIM)
        return np.asarray(a + b * sizes[:, 1], dtype=np.float64)

    records = read_records(data / "aiconfigurator/a100_sxm/generation_attention_vllm_0.14.0.csv.gz")
    columns = ("batch_size", "num_heads", "num_key_value_heads", "step", "latency")
    tables = []
    for shares, what, form in ((True, "vllm_0.14.0", predict), (False, "vllm_0.14.0, not split", predict_unsplit)):
        measured = [_floats(record, *columns) for record in records]
        rows = [[batch * own, kv, ms] for batch, heads, own, kv, ms in measured if (heads > own) == shares]
        tables.append(_rows(f"decodes, {what}", rows, form))
    records = read_records(data / "vidur/a100/CodeLlama-34b/attention_tp2.csv.gz")
    names = ("batch_size", "kv_cache_size", "time_stats.attn_decode.median")
    rows = [_floats(record, *names) for record in records if record["is_prefill"] != "True"]
    rows = [[4 * batch, kv, ms] for batch, kv, ms in rows]
    return [*tables, _rows("decodes, FlashAttention-2 of early 2024", rows, predict)]


def _link(data: Path, ranks: int, op: str, *, per_node: int = 0, nccl: bool = False) -> _FittedLink:
    """Latency and bandwidth by least squares of the relative error, each table counting the same.

    Tables are Vidur's (there is none of gathers) and, where asked for, NCCL's. The sizes in the latter are bytes: as
    elements of 2 bytes, as they are said to be, they would take 1.4 times the published bandwidth of the links, and as
    bytes they agree with Vidur's. Of a gather a rank's own part is not received.
    """
    tables, received = {}, 1 - 1 / ranks if op == "all_gather" else 1.0
    if op != "all_gather":
        here = {"num_workers": str(ranks), "devices_per_node": str(per_node or ranks)}
        records = read_records(data / f"vidur/network/a100_dgx/{op}.csv.gz")
        rows = [_floats(r, "size", f"time_stats.{op}.median") for r in records if r.items() >= here.items()]
        tables[f"{op}, {ranks} ranks, {per_node or ranks} a node, Vidur"] = rows
    if nccl:
        here = {"op_name": op, "num_gpus": str(ranks)}
        records = read_records(data / "aiconfigurator/a100_sxm/nccl_2.27.3.csv.gz")
        rows = [_floats(r, "message_size", "latency") for r in records if r.items() >= here.items()]
        tables[f"{op}, {ranks} ranks, NCCL 2.27"] = [[size * received, ms] for size, ms in rows]
    measured = {name: np.array(rows)[np.array(rows)[:, 1] > 0] * [1.0, 1e-3] for name, rows in tables.items()}
    size, seconds = np.concatenate(list(measured.values())).T
    weight = np.concatenate([np.full(len(rows), len(rows) ** -0.5) for rows in measured.values()])
    matrix = np.stack([weight / seconds, weight * size / seconds], axis=1)
    alpha_s, byte_s = np.linalg.lstsq(matrix, weight, rcond=None)[0].tolist()
    link = LinkRates(_rounded(alpha_s), _rounded(1 / byte_s), ranks)
    return link, [
        FitError.of(name, link.alpha_s + rows[:, 0] / link.bytes_per_s, rows[:, 1]) for name, rows in measured.items()
    ]


def _host(data: Path) -> tuple[float, float]:
    """Seconds of a step on the host with a batch of none, and of sampling one token."""
    records = read_records(data / "vidur/a100/cpu_overheads_codellama34b_tp2.csv")
    batch = [float(record["batch_size"]) for record in records]
    names = ("schedule_median", "prepare_inputs_e2e_median", "process_model_outputs_median")
    _, own_ms = np.polyfit(batch, [sum(_floats(record, *names)) for record in records], 1)
    sample_ms, fixed_ms = np.polyfit(batch, [_floats(record, "sampler_e2e_median")[0] for record in records], 1)
    return _rounded((max(own_ms, 0.0) + fixed_ms) * 1e-3), _rounded(sample_ms * 1e-3)


def _start(data: Path) -> tuple[HardwareSpec, list[FitError]]:
    """The A100 spec before its kernels are fitted, links and host done; errors of the links."""
    reduces, gathers = (
        [_link(data, ranks, op, nccl=True) for ranks in (2, 4, 8)] for op in ("all_reduce", "all_gather")
    )
    singles = [
        _link(data, 2, "send_recv"),
        _link(data, 16, "all_reduce", per_node=8),
        _link(data, 2, "send_recv", per_node=1),
    ]
    host_s, sample_s = _host(data)
    spec = HardwareSpec(
        name="a100-80g",
        machine="NVIDIA A100 80GB SXM",
        provenance="measured",
        peak_flops_per_s=312e12,
        hbm_bytes_per_s=2.039e12,
        memory_bytes=81920 * 2**20,
        num_sms=108,
        gpus_per_node=8,
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
        host_s=host_s,
        sample_s=sample_s,
        control_s=1e-3,
        all_reduce=tuple(link for link, _ in reduces),
        all_gather=tuple(link for link, _ in gathers),
        send=singles[0][0],
        node_all_reduce=singles[1][0],
        node_send=singles[2][0],
        sources=_SOURCES,
    )
    return spec, [error for _, errors in (*reduces, *gathers, *singles) for error in errors]


_MLP_SOURCE = f"{_VIDUR}/compute/a100: mlp.csv of Meta-Llama-3-8B and CodeLlama-34b"
_SOURCES = {
    **dict.fromkeys(("peak_flops_per_s", "hbm_bytes_per_s", "num_sms"), "NVIDIA A100 80GB SXM data sheet, white paper"),
    "memory_bytes": "81,920 MiB, as nvidia-smi shows it",
    "gpus_per_node": "NVIDIA DGX A100 data sheet",
    "gemm": f"fit to {_AICONF}/gemm/vllm/0.14.0 and {_MLP_SOURCE}",
    "attention": (
        f"fit to {_AICONF}/attention: vllm/0.14.0 (prefill, decode), sglang/0.5.10 (prefill); {_VIDUR}/compute/a100: a "
        f"sample of attention.csv of Meta-Llama-3-8B (FlashInfer chunks); {_VIDUR_OLD}/attention.csv (decodes). "
        "tile_rows and short_kv are set, not fitted"
    ),
    "elementwise": f"fit to {_MLP_SOURCE}",
    "host_s": f"fit to {_VIDUR_OLD}/cpu_overheads.csv: scheduling, input, sampling and output of a batch of none",
    "sample_s": f"fit to {_VIDUR_OLD}/cpu_overheads.csv: sampler over batch size",
    "control_s": "assumed",
    "all_reduce": f"fit to {_VIDUR}/network/a100_dgx/all_reduce.csv and {_AICONF}/comm/nccl/2.27.3",
    "all_gather": f"fit to {_AICONF}/comm/nccl/2.27.3",
    "send": f"fit to {_VIDUR}/network/a100_dgx/send_recv.csv, one node",
    "node_all_reduce": f"fit to {_VIDUR}/network/a100_dgx/all_reduce.csv, 16 ranks on two nodes",
    "node_send": f"fit to {_VIDUR}/network/a100_dgx/send_recv.csv, two nodes; 31 % of the published 200 Gbit/s",
}


# ---------------------------------------------------------------------------------------------------------------------
# Other accelerators, by published ratios


@dataclass(frozen=True, slots=True)
class _Published:
    """An accelerator's figures, and the share of its peak that the largest matrix products reach."""

    name: str
    machine: str
    peak_flops_per_s: float
    product_share: float
    hbm_bytes_per_s: float
    memory_mib: int
    num_sms: int
    nvlink_bytes_per_s: float


_A100_SHARE, _A100_NVLINK = 0.859, 600e9
_OTHERS = (
    _Published("h100-80g", "NVIDIA H100 80GB SXM", 989e12, 0.803, 3.35e12, 81559, 132, 900e9),
    _Published("h200-141g", "NVIDIA H200 141GB SXM", 989e12, 0.803, 4.8e12, 143771, 132, 900e9),
    _Published("b200-180g", "NVIDIA B200 180GB SXM", 2250e12, 0.776, 8.0e12, 183359, 148, 1800e9),
)
_NETWORK = LinkRates(1.9e-5, 0.72 * 50e9)
_KERNELS_DERIVED = (
    "derived, not measured: arithmetic of a100-80g by the ratio of peaks times that of the shares which the largest "
    "products reach (A100 0.859, H100 and H200 0.803, B200 0.776: github.com/stas00/ml-engineering, "
    "maximum achievable matmul FLOPS); bytes by the ratio of HBM bandwidths; launches unchanged"
)
_LINKS_DERIVED = "derived, not measured: a100-80g by the ratio of NVLink bandwidths, 600 GB/s there; latency unchanged"
_DERIVED = {
    **dict.fromkeys(
        ("peak_flops_per_s", "hbm_bytes_per_s", "num_sms"), "NVIDIA data sheet, white paper; dense bfloat16"
    ),
    "memory_bytes": "as nvidia-smi shows it",
    "gpus_per_node": "NVIDIA DGX data sheet",
    **dict.fromkeys(("gemm", "attention", "elementwise"), _KERNELS_DERIVED),
    **dict.fromkeys(("host_s", "sample_s", "control_s"), "that of a100-80g"),
    **dict.fromkeys(("all_reduce", "all_gather", "send"), _LINKS_DERIVED),
    "node_all_reduce": "derived, not measured: that of a100-80g by the ratio of node_send, latency unchanged",
    "node_send": (
        "derived, not measured: 0.72 of 400 Gbit/s an accelerator and 19 us, as fitted to "
        f"{_VIDUR}/network/h100_dgx/send_recv.csv, two nodes"
    ),
}


def derived_specs(a100: HardwareSpec) -> list[HardwareSpec]:
    """H100, H200 and B200 from the fitted A100 spec and published ratios: derived, not measured."""
    return [_derived(a100, published) for published in _OTHERS]


def _derived(a100: HardwareSpec, to: _Published) -> HardwareSpec:
    flops = to.peak_flops_per_s * to.product_share / (a100.peak_flops_per_s * _A100_SHARE)
    memory = to.hbm_bytes_per_s / a100.hbm_bytes_per_s
    block = a100.num_sms / to.num_sms  # a machine's rate is shared by its multiprocessors
    nvlink = to.nvlink_bytes_per_s / _A100_NVLINK
    attention = {
        "flops_per_s": flops,
        "block_flops_per_s": flops * block,
        "bytes_per_s": memory,
        "short_bytes_per_s": memory * block,
        "block_bytes_per_s": memory * block,
    }
    return replace(
        a100,
        name=to.name,
        machine=to.machine,
        provenance="derived",
        peak_flops_per_s=to.peak_flops_per_s,
        hbm_bytes_per_s=to.hbm_bytes_per_s,
        memory_bytes=to.memory_mib * 2**20,
        num_sms=to.num_sms,
        gemm=replace(
            _times(a100.gemm, bytes_per_s=memory),
            flops_per_s=tuple(_rounded(rate * flops) for rate in a100.gemm.flops_per_s),
        ),
        attention=_times(a100.attention, **attention),
        elementwise=_times(a100.elementwise, bytes_per_s=memory),
        all_reduce=tuple(_times(link, bytes_per_s=nvlink) for link in a100.all_reduce),
        all_gather=tuple(_times(link, bytes_per_s=nvlink) for link in a100.all_gather),
        send=_times(a100.send, bytes_per_s=nvlink),
        node_all_reduce=_times(a100.node_all_reduce, bytes_per_s=_NETWORK.bytes_per_s / a100.node_send.bytes_per_s),
        node_send=_NETWORK,
        sources=_DERIVED,
    )


def _times(part: Any, **ratios: float) -> Any:
    """A part of a spec with some of its rates multiplied."""
    return replace(part, **{name: _rounded(getattr(part, name) * ratio) for name, ratio in ratios.items()})


def run(arguments: Sequence[str] | None = None) -> int:
    """The command; see the module. Returns 0, or 2 where a table or spec is bad."""
    parser = argparse.ArgumentParser(prog="python -m tools.fit_spec", description="Fit and check hardware specs.")
    parser.add_argument("command", nargs="?", choices=("fit", "derive"), default="fit")
    parser.add_argument("--data", type=Path, help="folder of the tables (fit)")
    parser.add_argument("--out", type=Path, required=True, help="file (fit) or folder (derive) to write")
    given = parser.parse_args(arguments)
    if given.command == "fit" and given.data is None:
        parser.error("fit needs --data")
    try:
        if given.command == "derive":
            for spec in derived_specs(load_spec("a100-80g")):
                (given.out / f"{spec.name}.json").write_text(spec.to_json())
            return 0
        spec, errors = fit_a100(given.data)
        given.out.write_text(spec.to_json())
    except (ConfigError, OSError) as error:
        print(error, file=sys.stderr)
        return 2
    print(f"{'table':<44}{'rows':>8}{'median':>9}{'P90':>8}{'total':>9}")
    for e in errors:
        print(f"{e.table:<44}{e.rows:>8,}{e.median:>9.1%}{e.p90:>8.1%}{e.total:>+9.1%}")
    return 0


if __name__ == "__main__":
    sys.exit(run())
