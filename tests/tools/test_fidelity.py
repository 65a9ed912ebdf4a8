"""``python -m tools.fidelity``: a small folder and run made by hand, and a toy run on this machine's engine."""

import json
import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from medha.bench.load import NotedStep
from medha.cli.report import print_report
from medha.config import EngineConfig
from medha.cost.coefficients import Curve, ProfileKey
from medha.cost.hardware import LinkRates
from medha.cost.predictor import KINDS, Predictor, Work
from medha.errors import ConfigError
from medha.sched.decision import Prediction
from tests.bench.shapes import TINY
from tests.sched.costs import FREE
from tests.tools import write
from tools.command import run_tool
from tools.fidelity import fidelity, fidelity_command, read_run
from tools.kernels import fit_kernels, read_kernels
from tools.live_fidelity import (
    LIVE_LLAMA,
    LiveOptions,
    Rehearsed,
    figures_of,
    live_fidelity,
    make_mix,
    simulate,
    spread,
    taught_by,
)

LAYERS = 32
HOST_S = 1e-3
CHUNKS = (16, 32, 64, 128, 256, 512)
KVS = (16, 64, 256, 512, 1024, 2048, 4096)
BATCHES = (1, 2, 4, 8, 16)
Request = tuple[float, int, int]


def chunk_us(chunk: float, kv: float) -> float:
    return 10 + 0.05 * chunk + 2e-4 * chunk * (kv + chunk / 2)


def decode_us(count: float, kv: float) -> float:
    return 5 + 0.02 * count * (1 + kv / 16)


def mixed_us(chunk: float, kv: float, count: float, kv_decode: float) -> float:
    return max(chunk_us(chunk, kv) + 2 * decode_us(count, kv_decode), 8 + 0.01 * kv_decode)


def dense_us(tokens: float) -> float:
    return max(100.0, 0.5 * tokens)


def write_profile(folder: Path) -> None:
    rows: list[Sequence[object]] = [(c, kv, 0, 0, chunk_us(c, kv)) for c in CHUNKS for kv in (0, *KVS)]
    rows += [(0, 0, n, kv, decode_us(n, kv)) for n in BATCHES for kv in KVS]
    rows += [(c, p, n, kv, mixed_us(c, p, n, kv)) for c in CHUNKS for p in (0, *KVS) for n in BATCHES for kv in KVS]
    write(folder / "attention.csv.gz", "prefill_chunk,kv_prefill,n_decode,kv_decode,time_us", rows)
    tokens = [1, 16, 64, 128, *range(192, 513, 16)]
    parts = {"embedding": 3.0, "final_layernorm": 2.0, "layernorm": 4.0}
    rows = [(name, t, us) for name, us in parts.items() for t in tokens]
    write(folder / "dense.csv", "layer,tokens,time_us", [*rows, *(("mlp", t, dense_us(t)) for t in tokens)])
    heads = [(name, n, us * n) for name, us in (("lm_head", 20.0), ("sampler", 1.0)) for n in (1, 4, 16)]
    write(folder / "per_sequence.csv", "layer,sequences,time_us", heads)


def serve(requests: Sequence[Request], *, max_num_seqs: int, budget: int) -> list[tuple[float, float]]:
    """First and last token of each request under vLLM's rule, with the formulas above; one step after another."""
    waiting, running, now_s = list(range(len(requests))), list[int](), 0.0
    done, made, times = [0] * len(requests), [0] * len(requests), [(0.0, 0.0)] * len(requests)
    while waiting or running:
        left, decodes, chunks = budget, [], []
        for i in running:
            size = min(max(requests[i][1] - done[i], 1), left)
            (decodes if done[i] >= requests[i][1] else chunks).append((i, size))
            left -= size
        while waiting and requests[waiting[0]][0] <= now_s and left > 0 and len(running) < max_num_seqs:
            i = waiting.pop(0)
            running.append(i)
            chunks.append((i, min(requests[i][1], left)))
            left -= chunks[-1][1]
        if not running:
            now_s = requests[waiting[0]][0]
            continue
        tokens, count = sum(size for _, size in chunks), len(decodes)
        mean_kv = sum(done[i] for i, _ in decodes) / max(count, 1)
        chunk = sum(chunk_us(size, done[i]) for i, size in chunks)
        attention_us = chunk + (2 if chunks else 1) * decode_us(count, mean_kv) * bool(count)
        sampling = [i for i, size in [*decodes, *chunks] if done[i] + size >= requests[i][1]]
        dense = LAYERS * (dense_us(tokens + count) + 8) + 5 + 21 * len(sampling)
        now_s += HOST_S + (LAYERS * attention_us + dense) * 1e-6
        for i, size in [*decodes, *chunks]:
            done[i] += size
        for i in sampling:
            made[i] += 1
            times[i] = (times[i][0] or now_s, now_s)
            if made[i] == requests[i][2]:
                running.remove(i)
    return times


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("run")
    (path / "profile").mkdir()
    (path / "vllm_run").mkdir()
    write_profile(path / "profile")
    rng = np.random.default_rng(0)
    arrivals = np.cumsum(rng.exponential(0.08, 40)) + 3.0
    requests = [(float(t), int(rng.integers(20, 900)), int(rng.integers(2, 40))) for t in arrivals]
    times = serve(requests, max_num_seqs=8, budget=512)
    rows = [(f"r{i}", p, o, t, t, *at) for i, ((t, p, o), at) in enumerate(zip(requests, times, strict=True))]
    header = "request_id,input_tokens,output_tokens,queued_s,scheduled_s,first_token_s,last_token_s"
    write(path / "vllm_run" / "requests.csv", header, rows[::-1])  # in any order
    settings = {"max_num_seqs": 8, "max_num_batched_tokens": 512, "tensor_parallel_size": 1, "max_model_len": None}
    meta = {"model": "meta-llama/Llama-3.1-8B", "engine_kwargs": settings}
    (path / "vllm_run" / "meta.json").write_text(json.dumps(meta))
    return path


@pytest.fixture
def copy(folder: Path, tmp_path: Path) -> Path:
    """A copy that a test may change."""
    return shutil.copytree(folder, tmp_path / "copy")


def test_tables_become_costs_of_all_layers(folder: Path) -> None:
    kernels = read_kernels(folder / "profile", LAYERS)
    assert kernels.max_chunk == 512
    assert kernels.linear.y[0] == pytest.approx((LAYERS * (100 + 2 * 4) + 3 + 2) * 1e-6)  # a layer has two norms
    assert kernels.head.y == pytest.approx((21e-6, 84e-6, 336e-6))
    key = ProfileKey("", "", "", "", "", num_threads=0, block_size=16, torch_version="")
    predictor = Predictor(fit_kernels(kernels, key, host_s=HOST_S), max_tokens=512)
    rest_s = HOST_S + (LAYERS * (0.5 * 258 + 8) + 5 + 2 * 21) * 1e-6
    batch = [Work(1, 1024, True)] * 2 + [Work(256, 512, False)]
    assert predictor.predict(batch) == pytest.approx(rest_s + LAYERS * mixed_us(256, 512, 2, 1024) * 1e-6, rel=0.05)


def test_a_small_pool_makes_requests_wait(folder: Path, copy: Path) -> None:
    """Whether it is asked for or the run's own."""

    def ttft_s(path: Path, num_kv_tokens: int | None = None) -> float:
        return float(fidelity(path, num_kv_tokens=num_kv_tokens)["TTFT"]["mean"]["simulated_s"])

    small = with_settings(copy, kv_cache={"num_kv_tokens": 1500})
    assert min(ttft_s(folder, 1500), ttft_s(small)) > 1.5 * ttft_s(folder)
    with pytest.raises(ConfigError, match=r"^num_kv_tokens=96; accepted: at least the \d+ tokens of request r\d+$"):
        ttft_s(folder, 100)


@pytest.mark.parametrize(
    ("settings", "pool", "expected"),
    [
        ({}, {}, (16, None)),
        ({}, {"num_gpu_blocks": 101}, (16, 100)),  # one is nobody's
        ({"block_size": 32}, {"num_gpu_blocks": 101}, (32, 100)),
        ({"block_size": 32}, {"block_size": 128, "num_kv_tokens": 1000}, (128, 7)),
        ({}, {"num_kv_tokens": 1000}, (16, 62)),
        ({"page_size": 64}, {}, (64, None)),
    ],
)
def test_the_pool_is_what_the_run_says(
    copy: Path, settings: dict[str, object], pool: dict[str, int], expected: tuple[int, int | None]
) -> None:
    run = read_run(with_settings(copy, kv_cache=pool, **settings) / "vllm_run")
    assert (run.block_size, run.num_blocks) == expected


def test_another_engines_names_and_a_model_from_a_path(folder: Path, copy: Path) -> None:
    path = with_settings(copy, max_num_seqs=None, max_num_batched_tokens=None, disable_radix_cache=True)
    with_settings(path, max_running_requests=8, chunked_prefill_size=512)
    config = path / "model" / "config.json"
    config.parent.mkdir()
    config.write_text(json.dumps({**LIVE_LLAMA, **TINY, "model_type": "llama", "num_hidden_layers": LAYERS}))
    run = read_run(path / "vllm_run", model=str(config))
    assert (run.config.max_num_seqs, run.config.max_batch_tokens, run.config.prefix_caching) == (8, 512, False)
    assert run.model.hidden_size == TINY["hidden_size"]
    report = fidelity(path, model=str(config))
    assert report["TTFT"]["mean"] == fidelity(folder)["TTFT"]["mean"]  # the tables say what layers cost


def test_what_prompts_share_is_computed_once(copy: Path) -> None:
    """Two prompts of 1,024 tokens, one after the other, the same but for what ``hash_ids`` says."""
    header = "input_tokens,output_tokens,queued_s,first_token_s,last_token_s"
    rows = [(1024, 2, 0.0, 1.0, 2.0), (1100, 2, 5.0, 6.0, 7.0)]

    def second_s(*hashes: str, **settings: object) -> float:
        lines = [(*row, text) for row, text in zip(rows, hashes, strict=True)] if hashes else rows
        write(copy / "vllm_run" / "requests.csv", header + (",hash_ids" if hashes else ""), lines)
        report = fidelity(with_settings(copy, **settings))
        return float(report["TTFT"]["P99"]["simulated_s"] + report["TTFT"]["median"]["simulated_s"])

    alone_s, shared_s = second_s(), second_s("1 2", "1 2")
    assert shared_s < 0.8 * alone_s
    assert second_s("1 2", "3 4") == second_s("1 2", "1 2", enable_prefix_caching=False) == alone_s
    with pytest.raises(ConfigError, match=r"requests\.csv, hash_ids: .*'x'.*accepted: whole numbers with blanks"):
        second_s("1 x", "1 2")


def test_several_ranks_need_a_link(folder: Path, copy: Path) -> None:
    path = with_settings(copy, tensor_parallel_size=2)
    none, fast, slow = (
        fidelity(one, link=link)["makespan"]["simulated_s"]
        for one, link in ((folder, None), (path, LinkRates(0.0, 1e15)), (path, LinkRates(2e-4, 1e10)))
    )
    assert fast == pytest.approx(none, rel=1e-4) and slow > 1.1 * none
    with pytest.raises(ConfigError, match=r"tensor_parallel_size=1 .*accepted: a link, .* and none with one"):
        fidelity(folder, link=LinkRates(1e-5, 1e11))
    arguments = ["--run", str(path), "--link-bandwidth"]
    assert run_tool(fidelity_command, [*arguments, "100"]) == 2
    assert run_tool(fidelity_command, [*arguments, "100", "--link-latency", "10"]) == 0


def with_settings(path: Path, *, kv_cache: object = None, **settings: object) -> Path:
    """The folder with other settings of the engine."""
    meta = json.loads((path / "vllm_run" / "meta.json").read_text())
    meta["engine_kwargs"] |= settings
    meta |= {"kv_cache": kv_cache} if kv_cache is not None else {}
    (path / "vllm_run" / "meta.json").write_text(json.dumps(meta))
    return path


@pytest.mark.parametrize(
    ("name", "words", "message"),
    [
        ("profile/attention.csv.gz", None, r"profile has no attention\.csv; accepted: a folder"),
        ("profile/per_sequence.csv", None, r"profile has no per_sequence\.csv"),
        ("vllm_run/meta.json", None, r"vllm_run has no meta\.json"),
        ("profile/dense.csv", ("time_us", "another"), r"dense\.csv lacks time_us; accepted: columns"),
        ("vllm_run/requests.csv", ("queued_s", "another"), r"requests\.csv lacks queued_s"),
        ("profile/dense.csv", ("mlp,16,", "mlp,16,x"), r"dense\.csv has a value that is no number"),
    ],
)
def test_what_is_wrong_in_a_folder_is_named(copy: Path, name: str, words: tuple[str, str] | None, message: str) -> None:
    """A file that is missing, and one with a word in place of another."""
    if words is None:
        (copy / name).unlink()
    else:
        (copy / name).write_text((copy / name).read_text().replace(*words))
    with pytest.raises(ConfigError, match=message):
        fidelity(copy)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"max_num_seqs": None}, r"meta\.json: max_num_seqs=None; accepted: a whole number$"),
        ({"max_num_batched_tokens": 4096}, r"max_num_batched_tokens=4096 .*accepted: at most 512"),
        ({"data_parallel_size": 2}, r"data_parallel_size=2; accepted: 1$"),
        ({"pipeline_parallel_size": 2}, r"pipeline_parallel_size=2; accepted: 1$"),
        ({"tensor_parallel_size": 2}, r"tensor_parallel_size=2 .* and link=None; accepted: a link"),
        ({"kv_cache": 7}, r"meta\.json: kv_cache=7; accepted: an object with num_gpu_blocks or num_kv_tokens$"),
        ({"kv_cache": {"num_kv_tokens": "7"}}, r"num_kv_tokens='7'; accepted: a whole number$"),
    ],
)
def test_settings_that_cannot_be_simulated(copy: Path, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        fidelity(with_settings(copy, **settings))


def test_the_simulation_comes_near_what_was_measured(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """As the command tells."""
    path = tmp_path / "report.json"
    assert run_tool(fidelity_command, ["--run", str(folder), "--output-json", str(path)]) == 0
    out = capsys.readouterr().out
    assert "meta-llama/Llama-3.1-8B: simulated against measured" in out and "makespan: " in out and "met" in out
    written = json.loads(path.read_text())
    assert written["benchmark"] == "fidelity" and written["run"]["num_requests"] == 40
    assert written["of each request"]["latency_error"] < 0.04 and abs(written["TTFT"]["mean"]["error"]) < 0.05
    assert [one["verdict"] for one in written["aims"].values()] == ["met"] * 4
    assert fidelity(folder, host_s=20e-3)["makespan"]["error"] > 0.1
    assert run_tool(fidelity_command, []) == 2
    assert "--run" in capsys.readouterr().err


# Live

TOY = LiveOptions(
    num_short=4,
    num_long=1,
    runs=2,
    short_lens=(5, 40),
    long_lens=(300, 400),
    output_lens=(3, 6),
    shape={**TINY, "max_position_embeddings": 2048},
)


def test_a_simulation_of_known_costs_and_its_comparison() -> None:
    coefficients = replace(FREE, linear=Curve((1.0, 1000.0), (0.01, 0.01)))
    config = EngineConfig.from_flat("nothing", max_model_len=500, num_kv_blocks=100, block_size=256)
    mix, is_long = make_mix(TOY)
    trace = spread(mix, 10.0, seed=0)
    found = simulate(config, coefficients, trace)
    measured = replace(found, finish_s=2 * found.finish_s - found.first_token_s)
    figures = figures_of(measured, found, is_long)
    assert list(figures) == [f"{metric}, {whose}" for whose in ("all", "long", "short") for metric in ("TTFT", "TPOT")]
    assert figures["TTFT, long"]["P90"]["error"] == 0
    assert figures["TPOT, all"]["median"]["simulated_s"] == pytest.approx(0.01, rel=0.3)
    assert figures["TPOT, short"]["median"]["error"] == pytest.approx(-0.5)
    doubled, one = Rehearsed(dict.fromkeys(KINDS, (2.0, 10)), dict.fromkeys(KINDS, (1.5, 0.005)), {}, 1.0), trace[:1]
    twice = simulate(config, coefficients, one, doubled)
    assert twice.e2el_s == pytest.approx(2 * simulate(config, coefficients, one).e2el_s)
    late = simulate(config, coefficients, one, doubled._replace(host_s={"decode": 0.5}, after_pause=3.0))
    assert late.ttft_s == pytest.approx(3 * twice.ttft_s)
    assert late.tpot_s == pytest.approx(twice.tpot_s + 0.5)


def test_what_a_rehearsal_teaches() -> None:
    """Three decodes, before one of which the engine had nothing to do, and a chunk."""
    said = [Prediction("decode", 0.5, 0.5, 1.0), Prediction("prefill", 1.0, 0.5, 1.0)]
    rows = ((said[0], 2.0, 0.012), (said[0], 4.0, 0.004), (said[0], 6.0, 1.0), (said[1], 5.0, 0.002), (None, 9.0, 9.0))
    found = taught_by([NotedStep(1, *row) for row in rows])
    assert found.factors == {"decode": (3.0, 2), "prefill": (2.5, 1)}
    assert found.lines == {"decode": (3.0, 0.0), "prefill": (2.5, 0.0)}
    assert found.host_s == {"decode": 0.008, "prefill": 0.002} and found.after_pause == 2.0
    longer = [NotedStep(1, replace(said[0], seconds=said_s), 2 * said_s - 0.5, 0.0) for said_s in (0.5, 1.0) * 4]
    assert taught_by(longer).lines["decode"] == pytest.approx((1.0, -0.5))


def test_a_toy_run_on_the_engine() -> None:
    report = live_fidelity(TOY)
    assert min(report["host_s"].values()) > 0 and report["after_pause"] > 0
    assert set(report["factors"]) <= {"prefill", "decode", "mixed"} and min(report["factors"].values()) > 0
    assert len(report["aims"]) == 4 and report["TTFT, short"]["P99"]["measured_s"] > 0
    print_report(json.loads(json.dumps(report, default=str)))
