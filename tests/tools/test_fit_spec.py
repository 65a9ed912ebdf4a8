"""Fits to tables that are made from a known spec, what follows where tables are missing, and the command."""

import json
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from medha.cost.hardware import SPECS, HardwareSpec, load_spec
from medha.cost.roofline import chunk_slope_s, decode_lines, first_chunk_s, gemm_s
from medha.errors import ConfigError
from tests.tools import write
from tools.command import run_tool
from tools.fit_spec import PUBLISHED, fit_spec, fit_spec_command
from tools.gpu_tables import Folders, chunks, decodes, derived_chunks, gemms, has_cached, links

H100 = load_spec("h100-80g")
HEADS = ((8, 1), (32, 4), (32, 8), (64, 8), (8, 8))
CONTEXT = "batch_size,num_heads,num_key_value_heads,isl,step,latency"
MADE = replace(H100.attention, bytes_per_s=2.5e12, flops_per_s=6e14, overlap_power=2.0)


def decode_ms(spec: HardwareSpec, units: float, kv: float) -> float:
    a, b, short_a, short_b = (float(x) for x in decode_lines(spec, units, head_dim=128))
    long = a + b * max(kv, 4096.0)
    return 1e3 * (min(long, short_a + short_b * kv) if kv < 4096 else long)


def write_tables(folder: Path, spec: HardwareSpec, *, unsplit: float = 1.0) -> None:
    """Tables that the spec explains; the keys of unshared heads take ``unsplit`` times as long."""
    sizes = [(m, n, k) for m in (1, 64, 200, 1024, 8192) for n in (1024, 6144) for k in (1024, 4096)]
    products = [(m, n, k, 1e3 * float(gemm_s(spec, m, n, k))) for m, n, k in sizes]
    write(folder / "gemm_x.csv", "m,n,k,latency", [*products, (9, 9, 9, 0.0)])
    prompts = [
        (1, heads, own, tokens, 0, 1e3 * float(first_chunk_s(spec, tokens, heads=heads, head_dim=128)))
        for heads, own in HEADS
        for tokens in (16, 128, 1024, 4096, 8192, 16384)
    ]
    write(folder / "context_attention_x.csv", CONTEXT, prompts)
    rows = [
        (b, heads, own, kv, (unsplit if heads == own else 1.0) * decode_ms(spec, b * own, kv))
        for heads, own in HEADS
        for b in (1, 8, 64)
        for kv in (63, 1023, 4095, 16383, 32767, 65535)
    ]
    write(folder / "generation_attention_x.csv.gz", "batch_size,num_heads,num_key_value_heads,step,latency", rows)


def test_a_gpu_with_tables_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is measured is fitted, with errors of what was not seen; the rest follows by published ratios."""
    monkeypatch.setattr("tools.fit_spec._ROUNDS", 20)
    made = replace(H100, attention=MADE)
    write_tables(tmp_path, made)
    gpu = replace(PUBLISHED["h100-80g"], name="mine", nvlink_bytes_per_s=450e9)
    spec, errors = fit_spec(gpu, Folders([tmp_path]), load_spec("a100-80g"))
    assert spec.name == "mine" and spec.provenance == "fitted"
    assert errors[0].rows == 20  # without the failed one
    assert errors[0].fitted.median < 0.02 and errors[0].fitted.p90 < 0.05
    assert spec.gemm.bytes_per_s == pytest.approx(H100.gemm.bytes_per_s, rel=0.05)
    assert max(spec.gemm.flops_per_s) == pytest.approx(max(H100.gemm.flops_per_s), rel=0.05)
    assert spec.attention.flops_per_s == pytest.approx(MADE.flops_per_s, rel=0.05)
    assert spec.attention.bytes_per_s == pytest.approx(MADE.bytes_per_s, rel=0.02)
    assert spec.all_reduce[0].bytes_per_s == 0.75 * load_spec("a100-80g").all_reduce[0].bytes_per_s
    assert spec.sources["gemm"].endswith("/gemm_x") and spec.sources["all_reduce"].startswith("derived, not measured")
    for row in errors:
        assert row.held_out is not None and row.fitted.median < 0.05 and row.held_out.median < 0.1, row
    assert [row.table.split(",")[0] for row in errors] == ["products", "decodes", "prefills", "chunks", "chunks of 1"]
    for tokens in (4, 4096):  # chunks behind a cache, which no table has
        slopes = [float(chunk_slope_s(one, tokens, heads=32, kv_heads=4, head_dim=128)) for one in (spec, made)]
        assert slopes[0] == pytest.approx(slopes[1], rel=0.15)


def test_vidurs_products_are_its_medians(tmp_path: Path) -> None:
    """A row is four products, each with other figures of its time behind the median."""
    names = ("attn_pre_proj", "attn_post_proj", "mlp_up_proj", "mlp_down_proj")
    times = ",".join(f"time_stats.{name}.{figure}" for name in names for figure in ("median", "std"))
    sizes = "num_tokens,n_embd,n_expanded_embd,n_head,n_kv_head,num_tensor_parallel_workers"
    write(tmp_path / "mlp.csv", f"{sizes},{times}", [(64, 4096, 14336, 32, 8, 2, 1, 9, 2, 9, 3, 9, 4, 9)])
    (table,) = gemms(Folders([tmp_path]))
    assert table.sizes.tolist() == [[64, 3072, 4096], [64, 4096, 2048], [64, 14336, 4096], [64, 4096, 7168]]
    assert table.seconds.tolist() == pytest.approx([1e-3, 2e-3, 3e-3, 4e-3])


def test_chunks_behind_a_cache_are_differences(tmp_path: Path) -> None:
    """A row of the prompts' table more is a chunk; decodes are chunks of one token, by the request."""
    write_tables(tmp_path, H100)
    data = Folders([tmp_path])
    assert not has_cached(chunks(data))
    prompts, ones = derived_chunks(data)
    assert prompts.sizes[0].tolist() == [4096, 4096, 8, 1]
    first, second = (float(first_chunk_s(H100, tokens, heads=8, head_dim=128)) for tokens in (4096, 8192))
    assert prompts.seconds[0] == pytest.approx(second - first)
    keys_s = 2 * 128 * 2 / H100.attention.bytes_per_s
    for (tokens, kv, _, own), seconds in zip(ones.sizes.tolist(), ones.seconds.tolist(), strict=True):
        assert tokens == 1 and seconds == pytest.approx(own * kv * keys_s, rel=1e-6)
    write(tmp_path / "context_attention_y.csv", CONTEXT, [(1, 8, 1, 64, 512, 1.0)])
    assert has_cached(chunks(Folders([tmp_path])))


@pytest.mark.parametrize("factor", [1.0, 9.0])
def test_whether_unshared_heads_split_their_keys_is_seen(tmp_path: Path, factor: float) -> None:
    write_tables(tmp_path, H100, unsplit=factor)
    names = [table.name.rpartition(", ")[2] for table in decodes(Folders([tmp_path]))]
    assert ("not split" in names) == (factor > 1)


@pytest.mark.parametrize(("fast", "factor"), [(False, 2.0), (True, 1.0)])
def test_sizes_of_messages_are_bytes_where_elements_are_too_fast(tmp_path: Path, fast: bool, factor: float) -> None:
    rows = [("all_gather", 2, 1 << n, (1 << n) / (4e8 if fast else 1e8) + 0.01) for n in range(8, 29)]
    write(tmp_path / "nccl_x.csv", "op_name,num_gpus,message_size,latency", rows)
    ((name, found),) = links(Folders([tmp_path]), "all_gather", 600e9)[2, 2]
    assert name.endswith(": 2 ranks, 2 a node")
    assert found[0].tolist() == pytest.approx([factor * 256 / 2, rows[0][-1] * 1e-3])  # a rank receives half


def test_what_neither_a_table_nor_a_base_tells_is_named(tmp_path: Path) -> None:
    write_tables(tmp_path, H100)
    with pytest.raises(ConfigError, match="no table tells elementwise of h100-80g; accepted: data that has one, or"):
        fit_spec(PUBLISHED["h100-80g"], Folders([tmp_path]), None)
    left = Folders([tmp_path], ["gemm", "context"])
    spec, errors = fit_spec(PUBLISHED["h100-80g"], left, load_spec("a100-80g"))
    assert not errors and spec.provenance == "derived"  # decodes without prompts are no attention
    with pytest.raises(ConfigError, match=r"data=.*nothing does not exist"):
        Folders([tmp_path / "nothing"])
    write(tmp_path / "gemm_y.csv", "m,n,latency", [(1, 2, 3)])
    with pytest.raises(ConfigError, match=r"no number in column 'k'; accepted: columns m, n, k, latency"):
        gemms(Folders([tmp_path]))


def test_command_derives_the_committed_specs(tmp_path: Path) -> None:
    for name in ("h200-141g", "b200-180g"):
        out = tmp_path / "out.json"
        assert run_tool(fit_spec_command, [name, "--base", "h100-80g", "--out", str(out)]) == 0
        assert out.read_text() == (SPECS / f"{name}.json").read_text()


def test_command_takes_a_gpu_from_a_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tools.fit_spec._ROUNDS", 3)
    path, out = tmp_path / "mine.json", tmp_path / "out.json"
    path.write_text(json.dumps(asdict(PUBLISHED["h200-141g"]) | {"name": "mine", "hbm_bytes_per_s": 6.7e12}))
    write_tables(tmp_path, H100)
    arguments = ["--base", "h100-80g", "--data", str(tmp_path), "--out", str(out)]
    assert run_tool(fit_spec_command, [str(path), *arguments]) == 0
    spec = load_spec(out)
    assert spec.name == "mine"
    assert spec.elementwise.bytes_per_s == pytest.approx(2 * H100.elementwise.bytes_per_s, rel=1e-3)
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 7 and "/gemm_x" in lines[2]
    path.write_text('{"name": "mine"}')
    assert run_tool(fit_spec_command, [str(path), "--base", "h100-80g"]) == 2
    assert "is not known" in capsys.readouterr().err
