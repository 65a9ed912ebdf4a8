"""From configuration to engine: sizes, devices, defaults, and what the log says of them."""

import json
import logging
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import medha.engine.build
import medha.worker.sizing
from medha import LLM, SamplingParams
from medha.attention.flashinfer_backend import FlashInferBackend
from medha.attention.torch_backend import TorchBackend
from medha.config import EngineConfig, ParallelConfig
from medha.engine.build import _with_async, build_role
from medha.engine.engine import Engine
from medha.errors import ConfigError
from medha.models.hf_config import load_model_config
from medha.parallel import mesh
from medha.parallel.launch import Launch
from medha.text import Tokenizer
from medha.worker.shard import ModelShard, own_device, pick_device, wants_graphs
from tests.checkpoints import make_checkpoint
from tests.engines import build_engine, drained, make_engine
from tests.serving import GREEDY, Model
from tests.text.samples import word_level

KV_BYTES_PER_TOKEN = 2 * 3 * 2 * 16 * 4  # keys and values, layers, KV heads, head dimension, float32


def build(folder: Path, **options: Any) -> Engine:
    return build_engine(EngineConfig.from_flat(str(folder), **options))


def test_a_rank_that_is_built_has_nothing_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    """The others wait for it however long, as for a server without requests."""
    done: list[str] = []
    job, role = SimpleNamespace(monitor=SimpleNamespace(doing=done.append)), SimpleNamespace(describe=None)
    monkeypatch.setattr(medha.engine.build, "read_launch", lambda: object())
    monkeypatch.setattr(mesh, "meet", lambda *given: job)
    monkeypatch.setattr(medha.engine.build, "_build", lambda *given: done.append("built") or role)
    build_role(EngineConfig.from_flat("x", spp=2))
    assert done == ["start", "built", "idle"]


def pool(engine: Engine) -> tuple[int, int]:
    """(blocks, tokens a block), the same for scheduler and cache."""
    scheduler, cache = engine.scheduler, engine.runner.cache
    assert (scheduler.memory.num_blocks, scheduler.memory.block_size) == (cache.num_blocks, cache.block_size)
    assert cache.k[0].shape == (cache.num_blocks * cache.block_size, 2, 16)
    return cache.num_blocks, cache.block_size


@pytest.mark.parametrize(("dtype", "item_bytes"), [("float32", 4), ("bfloat16", 2)])
def test_pool_of_given_bytes(bytes_model: Model, dtype: str, item_bytes: int) -> None:
    block_bytes = KV_BYTES_PER_TOKEN * item_bytes // 4 * 32
    for extra in (0, block_bytes - 1):
        assert pool(build(bytes_model.folder, kv_memory=5 * block_bytes + extra, block_size=32, dtype=dtype)) == (5, 32)
    with pytest.raises(ConfigError) as caught:
        build(bytes_model.folder, kv_memory=block_bytes - 1, block_size=32, dtype=dtype)
    assert str(caught.value) == (
        f"kv_memory leaves {block_bytes - 1} bytes for the KV pool; a block of 32 tokens takes {block_bytes}"
    )


def test_default_pool_holds_every_request_that_may_run_and_takes_half_of_the_memory_at_most(
    bytes_model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert pool(build(bytes_model.folder, num_kv_blocks=7)) == (7, 256)
    assert pool(build(bytes_model.folder, max_model_len=100, max_num_seqs=3, block_size=32)) == (3 * 4, 32)
    assert 2**24 < medha.worker.sizing._available_memory() < 2**50
    block_bytes = KV_BYTES_PER_TOKEN * 32
    model = load_model_config(bytes_model.folder)
    weights = ModelShard.at(model, ParallelConfig(), 0, torch.float32, torch.device("cpu")).weight_bytes
    monkeypatch.setattr(medha.worker.sizing, "_available_memory", lambda: weights + 2 * (10 * block_bytes) + 1)
    assert pool(build(bytes_model.folder, block_size=32)) == (10, 32)
    monkeypatch.setattr(medha.worker.sizing, "_available_memory", lambda: weights + block_bytes)
    with pytest.raises(ConfigError, match=rf"free beside the weights leaves {block_bytes // 2} bytes for the KV pool"):
        build(bytes_model.folder, block_size=32)
    with pytest.raises(ConfigError, match=r"^a KV pool of 2147483647 blocks takes 108086391006560256 bytes"):
        build(bytes_model.folder, num_kv_blocks=2**31 - 1, block_size=65536)


def test_context_is_the_models_own_or_less(bytes_model: Model) -> None:
    for wanted, length in ((None, 8192), (8192, 8192), (100, 100)):
        assert build(bytes_model.folder, num_kv_blocks=4, max_model_len=wanted).limits.max_model_len == length
    with pytest.raises(ConfigError, match=r"^max_model_len=8193 exceeds the model's 8192 positions; accepted: .*yarn"):
        build(bytes_model.folder, num_kv_blocks=4, max_model_len=8193)
    stretched = build(bytes_model.folder, num_kv_blocks=4, max_model_len=10_000_000, rope_scaling="yarn")
    assert stretched.limits.max_model_len == 10_000_000
    assert stretched.runner.model.config.rope.factor == 10_000_000 / 8192


def test_dummy_weights_need_no_file(folder: Path) -> None:
    tokens = []
    assert build(folder, load_format="safetensors", num_kv_blocks=4).limits.vocab_size == 256
    (folder / "model.safetensors").unlink()
    for seed in (0, 0, 1):
        with LLM(folder, load_format="dummy", seed=seed, num_kv_blocks=4) as llm:
            tokens.append(llm.generate("Hello", GREEDY)[0].outputs[0].token_ids)
    assert len(tokens[0]) == 16
    assert tokens[0] == tokens[1] != tokens[2]


@pytest.mark.parametrize(
    ("saved", "asked", "used"),
    [
        (torch.float32, "auto", torch.float32),
        (torch.bfloat16, "auto", torch.bfloat16),
        (torch.float32, "bfloat16", torch.bfloat16),
        (torch.bfloat16, "float32", torch.float32),
    ],
)
def test_dtype(tmp_path: Path, saved: torch.dtype, asked: str, used: torch.dtype) -> None:
    make_checkpoint(tmp_path, "llama", dtype=saved)
    with LLM(tmp_path, dtype=asked, num_kv_blocks=4) as llm:
        assert llm.engine.runner.cache.k[0].dtype == used
        assert next(llm.engine.runner.model.parameters()).dtype == used
        assert llm.generate([1, 2], GREEDY)[0].outputs[0].finish_reason == "length"


def test_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    for device in ("cuda", "cuda:0", "cuda:7"):
        with pytest.raises(ConfigError, match=rf"^device='{device}'; accepted on this machine: cpu$"):
            pick_device(device)
    assert pick_device("auto") == pick_device("cpu") == torch.device("cpu")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert pick_device("auto") == torch.device("cuda")
    assert pick_device("cuda:1") == torch.device("cuda:1")
    with pytest.raises(ConfigError, match=r"accepted on this machine: cpu, cuda:0, cuda:1$"):
        pick_device("cuda:2")


def test_each_rank_of_a_node_has_its_own_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    current: list[torch.device] = []
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.setattr(torch.cuda, "set_device", current.append)
    cpu, cuda = torch.device("cpu"), torch.device("cuda")
    ranks = [Launch(rank=8 + i, world_size=16, local_rank=i, local_world_size=8, host="host", port=1) for i in range(5)]
    assert own_device(cpu, ranks[1]) == cpu and not current
    own = [own_device(cuda, None), *(own_device(cuda, launch) for launch in ranks[:4])]
    assert own == current == [torch.device("cuda", i) for i in (0, 0, 1, 2, 3)]
    assert own_device(torch.device("cuda", 2), ranks[0]) == torch.device("cuda", 2)
    wrong = r"device='cuda' for local rank 4; accepted: as many ranks as GPUs, 4 here, or"
    with pytest.raises(ConfigError, match=wrong):
        own_device(cuda, ranks[4])


def test_scheduling_is_async_where_anything_runs_beside_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    threads = torch.get_num_threads()

    def is_async(device: str, ranks: int = 1, local: int = 2, spare: int = 0, **options: Any) -> bool | None:
        monkeypatch.setattr(os, "sched_getaffinity", lambda pid: range(local * threads + spare))
        place = Launch(rank=0, world_size=ranks, local_rank=0, local_world_size=local, host="host", port=1)
        config = EngineConfig.from_flat("m", **options)
        return _with_async(config, torch.device(device), place if ranks > 1 else None).scheduler.async_scheduling

    assert is_async("cuda") and is_async("cuda", 2, tp=2) and is_async("cpu", async_scheduling=True)
    assert not is_async("cpu") and not is_async("cuda", async_scheduling=False)
    assert not is_async("cpu", 2, tp=2) and not is_async("cpu", 2, spare=-1, kvp=2)
    assert is_async("cpu", 2, spp=2) and is_async("cpu", 2, spare=1, tp=2) and is_async("cpu", 2, local=1, kvp=2)


def test_graphs_are_for_flashinfer() -> None:
    flashinfer = FlashInferBackend(None, block_size=256, num_sms=132, has_fa3=True)
    config = EngineConfig.from_flat("m")
    assert wants_graphs(config, flashinfer)
    assert wants_graphs(EngineConfig.from_flat("m", kvp=2, spp=2, tp=2), flashinfer)
    assert not wants_graphs(config, TorchBackend())
    assert not wants_graphs(EngineConfig.from_flat("m", cuda_graphs=False), flashinfer)


def test_tokenizer_of_another_folder(folder: Path, bytes_model: Model) -> None:
    (folder / "tokenizer.json").unlink()
    with LLM(folder, num_kv_blocks=4) as llm:
        assert llm.get_tokenizer() is None
    with LLM(folder, tokenizer=str(bytes_model.folder), num_kv_blocks=4) as llm:
        assert llm.generate("a", GREEDY)[0].prompt_token_ids == [97]


def test_a_text_goes_on_with_the_prompts(bytes_model: Model) -> None:
    engine = make_engine(bytes_model.decoder, tokenizer=Tokenizer(word_level()))
    for kind in ("final_only", "delta"):
        params = SamplingParams(max_tokens=3, allowed_token_ids=[4], ignore_eos=True, output_kind=kind)
        engine.add_request(kind, "x", params)
        assert "".join(output.outputs[0].text or "" for output in drained(engine)) == " hello hello hello"


@pytest.mark.parametrize(
    ("generation", "config", "tokenizer", "eos"),
    [
        ([10, 3], 7, "A", (10, 3)),
        (10, None, None, (10,)),
        (None, [7, 8], "A", (7, 8)),
        (None, None, "A", (65,)),
        (None, None, None, ()),
    ],
)
def test_end_of_sequence(
    folder: Path, caplog: pytest.LogCaptureFixture, generation: Any, config: Any, tokenizer: Any, eos: tuple[int, ...]
) -> None:
    """The first file that defines end-of-sequence ids has the word, and only a folder without any is warned about."""
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": generation}))
    fields = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**fields, "eos_token_id": config}))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": tokenizer}))
    assert build(folder, num_kv_blocks=4).limits.eos_token_ids == eos
    assert ["defines no end-of-sequence token" in message for message in caplog.messages] == ([] if eos else [True])


@pytest.mark.parametrize(("asked", "most"), [(None, 7), (12, 12), (3, 3)])
def test_the_models_own_max_new_tokens_bound_who_names_none(folder: Path, asked: int | None, most: int) -> None:
    (folder / "generation_config.json").write_text(json.dumps({"max_new_tokens": 7}))
    engine = build(folder, num_kv_blocks=4)
    assert engine.prepare("a", [1, 2], SamplingParams(max_tokens=asked)).max_tokens == most


def test_the_log_says_what_was_chosen(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    (folder / "generation_config.json").write_text(json.dumps({"temperature": 0.7, "eos_token_id": [10, 3]}))
    with caplog.at_level(logging.INFO, logger="medha"):
        build(folder, num_kv_blocks=5, block_size=64, max_model_len=100, device="cpu", attention_backend="torch")
        build(folder, num_kv_blocks=1, block_size=64, max_model_len=100, device="cpu")
    lines = [message for _, level, message in caplog.record_tuples if level == logging.INFO]
    assert lines[:4] == [
        "LlamaForCausalLM, 3 layers, float32 on cpu, attention torch",
        "longest request 100 tokens: context 100, KV pool 320 tokens",
        "step times from a hardware spec of the kind of this machine; medha profile measures them",
        "sampling defaults {'temperature': 0.7}, from generation_config.json",
    ]
    assert lines[5] == "longest request 64 tokens: context 100, KV pool 64 tokens"


@pytest.mark.parametrize(
    ("scheduler", "unread"),
    [
        ("medha", "improvement_rate, plan_order"),
        ("sarathi", "policy, rho_max, tenant_weights, improvement_rate, plan_order"),
        ("cdsp", "policy, rho_max"),
    ],
)
def test_the_log_names_options_that_change_nothing(
    folder: Path, caplog: pytest.LogCaptureFixture, scheduler: str, unread: str
) -> None:
    options = {"policy": "srpt", "rho_max": 0.0, "patience_s": 10, "tenant_weights": {"a": 2.0}, "quantum_s": 0.1}
    options |= {"max_kv_per_group": 512, "ring": scheduler == "medha"}  # of one group
    build(folder, num_kv_blocks=4, scheduler=scheduler, improvement_rate=0.1, plan_order="lars", **options)
    assert f"scheduler {scheduler} does not read {unread}" in caplog.messages
    alone = "max_kv_per_group: for requests on several KV-parallel groups, and there is one (kvp)"
    assert ("ring, " * (scheduler == "medha")) + alone in caplog.messages
