"""Specs as JSON, and the costs and memory that follow from them, against closed forms."""

import functools
import re
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from medha.config import ModelConfig, ParallelConfig, SchedulerConfig
from medha.cost.coefficients import Coefficients
from medha.cost.hardware import SPECS, HardwareSpec, load_spec
from medha.cost.predictor import Predictor, Work
from medha.cost.roofline import Shard, chunk_slope_s, first_chunk_s, hopper_chunks, linear_layer_s, stage_coefficients
from medha.errors import ConfigError
from medha.models.decoder import TP_PLAN, Decoder
from medha.sim.replica import Replica, activation_bytes, find_model, kv_bytes_per_token, weights_bytes
from medha.worker.shard import ModelShard
from tests.sched.costs import changed as changed_file

NAMES = ("a100-80g", "b200-180g", "h100-80g", "h200-141g")
A100, H100 = load_spec("a100-80g"), load_spec("h100-80g")
LLAMA_8B, LLAMA_70B, QWEN = (find_model(name) for name in ("llama-3-8b", "llama-3-70b", "qwen2.5-14b-1m"))
TIED = replace(LLAMA_8B, tie_word_embeddings=True, qk_norm=True, o_bias=True, qkv_bias=True)
changed = functools.partial(changed_file, A100)


def predictor(spec: HardwareSpec, *of: Any, max_tokens: int = 16384) -> Predictor:
    """Of a model, a layout and a stage."""
    return Predictor(stage_coefficients(spec, *of), max_tokens=max_tokens)


def chunk_s(model: Predictor, tokens: int, kv: int = 0) -> float:
    return model.predict([Work(tokens, kv, False)])


# -- specs -----------------------------------------------------------------------------------------------------


def test_the_specs_that_come_along() -> None:
    assert sorted(path.stem for path in SPECS.glob("*.json")) == sorted(("cpu", *NAMES))
    for name in NAMES:
        spec = load_spec(name)
        assert spec.name == name
        assert spec.provenance == ("fitted" if name in ("a100-80g", "h100-80g") else "derived")
        assert HardwareSpec.from_json(spec.to_json()) == spec
        assert set(spec.sources) == {item.name for item in fields(spec)} - {"name", "machine", "provenance", "sources"}
        for part in ("gemm", "all_reduce", "attention"):
            assert ("derived, not measured" in spec.sources[part]) == (spec.provenance == "derived")
    assert "derived, not measured: a100-80g" in H100.sources["elementwise"]  # no table has them
    assert "chunks behind a cache are derived" in H100.sources["attention"]


def test_every_rate_is_below_what_is_published() -> None:
    for spec in map(load_spec, NAMES):
        assert max(spec.gemm.flops_per_s) < 0.8 * spec.peak_flops_per_s
        assert 0.4 * spec.peak_flops_per_s < spec.attention.flops_per_s < 0.75 * spec.peak_flops_per_s
        for bytes_per_s in (spec.gemm.bytes_per_s, spec.attention.bytes_per_s, spec.elementwise.bytes_per_s):
            assert 0.4 * spec.hbm_bytes_per_s < bytes_per_s < 0.95 * spec.hbm_bytes_per_s
        assert spec.node_send.bytes_per_s < spec.send.bytes_per_s


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (changed("gemm.launch_s", 0), "gemm.launch_s=0; accepted: a finite number above 0"),
        (changed("gemm.flops_per_s", [1e12]), "gemm.flops_per_s=.*; accepted: 3 numbers"),
        (changed("gemm.tiles", [[64], [64, 64], [64, 64]]), "gemm.tiles=.*; accepted: a list of 2"),
        (changed("gemm.wave_share", 1.5), "gemm.wave_share=1.5; accepted: a finite number of at least 0, at most 1"),
        (changed("attention.overlap_power", 0.5), "attention.overlap_power=0.5; accepted: a finite number of at least"),
        (changed("attention.tile_rows", 1.5), "attention.tile_rows=1.5; accepted: a whole number of at least 1"),
        (changed("all_reduce", []), "all_reduce: ranks .*; accepted: a list of links"),
        (changed("all_gather.0.ranks", 1), "all_gather.ranks=1; accepted: a whole number of at least 2"),
        (changed("provenance", "guessed"), "provenance='guessed'; accepted: fitted, derived, assumed"),
        pytest.param("[" * 100_000, "spec x is not JSON", id="deep"),
    ],
)
def test_a_bad_spec_is_refused_by_field(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        HardwareSpec.from_json(text, source="spec x")
    assert str(caught.value).startswith("spec x")


def test_a_spec_of_ones_own(tmp_path: Path) -> None:
    path = tmp_path / "mine.json"
    path.write_text(changed("name", "mine"))
    assert load_spec(path) == replace(A100, name="mine")
    with pytest.raises(ConfigError, match=r"spec 'a100' is not known; accepted: a100-80g, .*did you mean a100-80g\?"):
        load_spec("a100")
    with pytest.raises(ConfigError, match=r"accepted: .*, or the path of a JSON file$"):
        load_spec(tmp_path / "q")


# -- costs -----------------------------------------------------------------------------------------------------


def test_coefficients_are_of_the_stage() -> None:
    parallel = ParallelConfig(tp=8, spp=2, kvp=2)
    first, last = (stage_coefficients(H100, LLAMA_70B, parallel, stage) for stage in (0, 1))
    assert first.head is None and last.head is not None
    assert first.spp is not None and last.spp is None
    assert first.tp is not None and (first.tp.calls, first.tp.bytes_per_token) == (2 * 40, 8192 * 2)
    assert first.kvp is not None and (first.kvp.calls, first.kvp.bytes_per_token) == (40, 8 * (128 * 2 + 4))
    assert "fitted" in first.key.machine and first.key.layout == "tp8 spp2 kvp2 stage 0"
    assert Coefficients.from_json(first.to_json()) == first
    alone = stage_coefficients(A100, LLAMA_8B, ParallelConfig(), 0)
    assert alone.tp is alone.spp is alone.kvp is None


def test_links_are_of_the_network_where_ranks_span_nodes() -> None:
    def links(*degrees: int, stage: int = 0) -> list[float | None]:
        found = stage_coefficients(A100, LLAMA_8B, ParallelConfig(*degrees), stage)
        return [link and link.bytes_per_s for link in (found.tp, found.spp, found.kvp)]

    node, inside = A100.node_send.bytes_per_s, A100.send.bytes_per_s
    reduces = {link.ranks: link.bytes_per_s for link in A100.all_reduce}
    gathers = {link.ranks: link.bytes_per_s for link in A100.all_gather}
    assert links(4, 2) == [reduces[4], inside, None]
    assert links(4, 4) == [reduces[4], inside, None]
    assert links(4, 4, stage=1) == [reduces[4], node, None]  # ranks 4 to 7, then 8 to 11
    assert links(8, 2) == [reduces[8], node, None]
    assert links(2, 2, 2) == [reduces[2], inside, gathers[2]]
    assert links(2, 2, 4) == [reduces[2], inside, node]
    assert links(16) == [A100.node_all_reduce.bytes_per_s, None, None]


def test_prefills_of_llama_3_8b_on_an_a100() -> None:
    """Measured by others: 0.98 s for 10,000, 24.9 s for 100,000 and 79.4 s for 200,000 tokens (MInference), 0.28 s for
    4,096 and 29.2 s for 131,072 tokens (Tetris)."""
    measured = {10_000: 0.98, 100_000: 24.9, 200_000: 79.4, 4096: 0.28, 131_072: 29.2}
    for tokens, seconds in measured.items():
        costs = predictor(A100, LLAMA_8B, ParallelConfig(), 0, max_tokens=tokens)
        assert 0.75 < costs.predict([Work(tokens, 0, False, samples=True)]) / seconds < 1.2


def test_ten_million_tokens_lie_on_the_line() -> None:
    costs = predictor(H100, LLAMA_70B, ParallelConfig(tp=8, spp=16), 3)
    for tokens in (64, 2048, 16384):
        times = [chunk_s(costs, tokens, kv) for kv in (1_000_000, 4_000_000, 10_000_000)]
        assert times[1] - times[0] == pytest.approx((times[2] - times[1]) / 2, rel=1e-9)
    short, long = (costs.predict([Work(1, kv, True)]) for kv in (1_000_000, 10_000_000))
    read_s = 9_000_000 * kv_bytes_per_token(LLAMA_70B, ParallelConfig(tp=8, spp=16), 3) / H100.attention.bytes_per_s
    assert long - short == pytest.approx(read_s, rel=1e-9)


@pytest.mark.parametrize("splits_kv", [True, False])
def test_tables_follow_the_forms_between_their_points(splits_kv: bool) -> None:
    spec = replace(A100, attention=replace(A100.attention, splits_kv=splits_kv))
    costs = predictor(spec, LLAMA_8B, ParallelConfig(), 0)
    for tokens in (48, 200, 777, 3000, 11_111):
        first = float(first_chunk_s(spec, tokens, heads=32, head_dim=128))
        slope = float(chunk_slope_s(spec, tokens, heads=32, kv_heads=8, head_dim=128))
        layer = float(linear_layer_s(spec, tokens, Shard.of(LLAMA_8B, ParallelConfig(), 0)))
        assert chunk_s(costs, tokens) == pytest.approx(32 * (first + layer) + spec.host_s, rel=0.06)
        rise = chunk_s(costs, tokens, 3_000_000) - chunk_s(costs, tokens, 2_000_000)
        assert rise == pytest.approx(32e6 * slope, rel=0.02)


# -- memory ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("model", [LLAMA_8B, LLAMA_70B, QWEN, TIED], ids=["8b", "70b", "qwen", "tied"])
@pytest.mark.parametrize("degrees", [(1, 1), (2, 1), (8, 4), (1, 3), (4, 2)])
def test_weights_are_those_that_the_engine_loads(model: ModelConfig, degrees: tuple[int, int]) -> None:
    parallel = ParallelConfig(*degrees)
    for stage in range(parallel.spp):
        part = ModelShard.at(model, parallel, parallel.rank_of(stage=stage, tp_rank=0), torch.bfloat16)
        with torch.device("meta"):
            parameters = dict(Decoder(part.model, part.layers).named_parameters())
        held = 0
        for name, parameter in parameters.items():
            module, _, kind = name.rpartition(".")
            split = TP_PLAN.get(re.sub(r"\.\d+\.", ".*.", module))
            is_split = split is not None and not (split == "row" and kind == "bias")
            held += 2 * parameter.numel() // (parallel.tp if is_split else 1)
        assert weights_bytes(model, parallel, stage) == part.weight_bytes == held
        assert kv_bytes_per_token(model, parallel, stage) == 4 * len(part.layers) * part.num_kv_heads * model.head_dim


def test_pool_is_what_is_left() -> None:
    parallel = ParallelConfig(tp=8, spp=2)
    replica = Replica(H100, LLAMA_70B, parallel, SchedulerConfig(max_batch_tokens=4096), utilization=0.8)
    tokens = replica.pool_tokens()
    stages = [(LLAMA_70B, parallel, stage) for stage in (0, 1)]
    most = max(weights_bytes(*stage) + activation_bytes(*stage, 4096) for stage in stages)
    assert tokens == (int(0.8 * H100.memory_bytes) - most) // (2 * 40 * 1 * 128 * 2)
    assert replace(replica, parallel=replace(parallel, kvp=4)).pool_tokens() == tokens


def test_a_model_that_does_not_fit_says_by_how_much() -> None:
    message = (
        r"LlamaForCausalLM 80x8192 at tp=1 spp=1 does not fit a100-80g: stage 0 needs 141.1 GB for weights and 0.6 GB "
        r"for activations of 2048 tokens, and 77.3 GB are there \(0.9 of 85.9 GB\); accepted: more tp or spp"
    )
    with pytest.raises(ConfigError, match=message):
        Replica(A100, LLAMA_70B).pool_tokens()
    assert Replica(A100, LLAMA_70B, ParallelConfig(tp=4)).pool_tokens() > 100_000
    with pytest.raises(ConfigError, match=r"utilization=1\.5; accepted"):
        Replica(A100, LLAMA_8B, utilization=1.5).pool_tokens()


def test_chunks_of_flashinfer_on_hopper() -> None:
    """Steps of an 8B model on an H200, milliseconds as medha took: in FA2 below 257 tokens, in FA3 from there."""
    spec, model = load_spec("h200-141g"), find_model("llama-3.1-8b")
    stage = stage_coefficients(spec, model, ParallelConfig(), 0)
    table = hopper_chunks(spec, Shard.of(model, ParallelConfig(), 0), stage.chunks)
    predictor = Predictor(replace(stage, chunks=table))
    measured = {(128, 131072): 32.96, (256, 131072): 61.87, (384, 131072): 72.23, (512, 131072): 80.79}
    measured |= {(2048, 32768): 118.05, (2048, 131072): 319.42, (128, 250000): 57.0, (512, 250000): 143.72}
    for (tokens, kv), ms in measured.items():
        assert predictor.predict([Work(tokens, kv, False)]) == pytest.approx(ms / 1e3, rel=0.09)
