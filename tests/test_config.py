"""EngineConfig from flat options: names, aliases, and every value that is refused."""

import dataclasses
import logging
import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from medha.cli.display import budget_text
from medha.config import CacheConfig, EngineConfig, ModelConfig, ParallelConfig, RopeConfig, SchedulerConfig
from medha.config.engine_config import FOREIGN_OPTIONS, OPTION_ALIASES
from medha.config.fields import parse_size
from medha.errors import ConfigError


def refusal(model: Any = "m", **options: Any) -> str:
    """What is said of a configuration that is refused."""
    with pytest.raises(ConfigError) as caught:
        EngineConfig.from_flat(model, **options)
    return str(caught.value)


def test_defaults() -> None:
    """The scheduler of vLLM has the budget of the batch alone."""
    config = EngineConfig.from_flat("folder")
    assert config == EngineConfig("folder")
    assert config.cache == CacheConfig(256, None, None, 0.9)
    assert config.scheduler == SchedulerConfig("medha", "priority", 256, 2048, None, None)
    chunks = {name: SchedulerConfig(name).chunk_size for name in ("medha", "sarathi", "vllm")}
    assert chunks == {"medha": None, "sarathi": 512, "vllm": 2048}
    assert SchedulerConfig("vllm", max_batch_tokens=100).chunk_size == 100
    assert SchedulerConfig("vllm", chunk_size=64).chunk_size == 64


@pytest.mark.parametrize(
    ("policy", "yielded", "guarded"),
    [("srpt", 0.4, 0.1), ("priority:edf", 0.4, 0.1), ("lars", 0.4, 0.0), ("edf", 0.0, 0.0), ("fcfs", 0.0, 0.0)],
)
def test_a_policy_of_the_papers_is_as_published(policy: str, yielded: float, guarded: float) -> None:
    for config in (SchedulerConfig(policy=policy), replace(SchedulerConfig(), policy=policy)):
        assert (config.yielded_share, config.guarded_share) == (yielded, guarded)
    config = SchedulerConfig(policy=policy, rho_max=0.2, late_share=0.3)
    assert (config.yielded_share, config.guarded_share) == (0.2, 0.3)
    assert SchedulerConfig(policy=policy).spare_share == (0.0 if not guarded else 0.125)
    assert SchedulerConfig(policy=policy, interactive_share=0.2).spare_share == 0.2
    assert SchedulerConfig(policy=policy, interactive_share=0.2, depth=3).spare_share == 0.0


# A name of vLLM or SGLang, and ours.
ALIASES = """
    max_num_batched_tokens:max_batch_tokens num_gpu_blocks_override:num_kv_blocks max_running_requests:max_num_seqs
    context_length:max_model_len chunked_prefill_size:chunk_size page_size:block_size tensor_parallel_size:tp
    pipeline_parallel_size:spp kv_parallel_size:kvp scheduling_policy:policy schedule_policy:policy
    enable_prefix_caching:prefix_caching
    kv_cache_memory_bytes:kv_memory mem_fraction_static:gpu_memory_utilization tokenizer_path:tokenizer tp_size:tp
    pp_size:spp
"""


def test_aliases() -> None:
    assert dict(pair.split(":") for pair in ALIASES.split()) == OPTION_ALIASES
    for alias, name in OPTION_ALIASES.items():
        value: Any = {"gpu_memory_utilization": 0.5, "tokenizer": "folder", "prefix_caching": True}.get(name, 77)
        assert EngineConfig.from_flat("m", **{alias: value}) == EngineConfig.from_flat("m", **{name: value})
        assert EngineConfig.from_flat("m", **{alias: value}) != EngineConfig.from_flat("m")
        for twice in ({name: 77, alias: 77}, {alias: 77, name: 78}):
            assert refusal(**twice).startswith(f"{name} is given twice")
    assert refusal(enforce_eager=True, cuda_graphs=False).startswith("cuda_graphs is given twice")
    assert [EngineConfig.from_flat("m", enforce_eager=eager).cuda_graphs for eager in (True, False)] == [False, True]
    assert EngineConfig.from_flat("m", context_length="128K").max_model_len == 131072
    assert EngineConfig.from_flat("m", sp_sizes=[1, 2]).scheduler.sp_sizes == (1, 2)  # ranks compare it
    for dtype in ("half", "torch.float16", torch.float16):
        assert EngineConfig.from_flat("m", dtype=dtype).dtype == "float16"


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("trust_remote_code", True), ("enable_chunked_prefill", True), ("quantization", None)),
        *(("served_model_name", "x"), ("uvicorn_log_level", "info"), ("disable_uvicorn_access_log", True)),
        *(("enable_prompt_tokens_details", True), ("disable_frontend_multiprocessing", True)),
        *(("enable_sleep_mode", False), ("runner", "auto"), ("runner", "generate"), ("override_generation_config", {})),
        *((name, None) for name in FOREIGN_OPTIONS),
    ],
)
def test_what_asks_for_nothing_is_noted(name: str, value: Any, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="medha"):
        assert EngineConfig.from_flat("m", **{name: value}) == EngineConfig.from_flat("m")
    assert f"{name}={value!r} changes nothing: " in caplog.text


@pytest.mark.parametrize(
    ("name", "value", "reason"),
    [
        ("disable_radix_cache", True, "prefix_caching=False keeps nothing"),
        ("chat_template", "x.jinja", "the model's folder has it, as chat_template.jinja"),
        ("enable_auto_tool_choice", True, "tools are not implemented"),
        *((name, "x", "a proxy before the server does it") for name in ("allowed_origins", "root_path", "uds")),
        ("ssl_ca_certs", "x", "a proxy before the server does it"),
        ("enable_chunked_prefill", False, "prompts are read in chunks; scheduler='orca' reads them whole"),
        ("quantization", "awq", "quantised weights are not implemented; load a float16 or bfloat16 checkpoint"),
        ("data_parallel_size", 2, "start a job for each replica"),
        ("data_parallel_size", True, "start a job for each replica"),
        ("port", 8000, "they are options of medha serve"),
        ("disable_sliding_window", True, "set max_model_len to the window"),
    ],
)
def test_what_others_do_is_refused_by_its_name(name: str, value: Any, reason: str) -> None:
    assert refusal(**{name: value}) == f"{name}={value!r} is not among medha's options: {reason}"


def test_max_kv_per_group_is_taken_in_whole_blocks(caplog: pytest.LogCaptureFixture) -> None:
    for given, taken in ((30_000, 29_952), (100, 256), (512, 512)):
        assert EngineConfig.from_flat("m", max_kv_per_group=given).scheduler.max_kv_per_group == taken
    assert [record.getMessage() for record in caplog.records] == [
        "max_kv_per_group=30000 is taken as 29952, blocks of 256 tokens",
        "max_kv_per_group=100 is taken as 256, blocks of 256 tokens",
    ]


@pytest.mark.parametrize(
    ("options", "has_tpot", "text"),
    [
        ({"quantum_s": 0.25}, False, "a batch may take 0.25 s (quantum_s, as there is no TPOT objective)"),
        ({}, True, "a batch may take what its decodes' TPOT objectives leave, else what one or two efficient chunks"),
        ({"t_target_s": 0.05}, False, "a batch may take 0.05 s (t_target_s)"),
        ({"scheduler": "vllm"}, False, "scheduler vllm: batches of at most 2,048 tokens, chunks of at most 2,048"),
        ({"scheduler": "orca"}, True, "scheduler orca: batches of at most 2,048 tokens, whole prompts"),
    ],
)
def test_the_time_of_a_batch_in_words(options: dict[str, Any], has_tpot: bool, text: str) -> None:
    assert budget_text(SchedulerConfig(**options), has_tpot=has_tpot).startswith(text)


def test_an_unknown_option_is_refused_with_what_is_near() -> None:
    known = "known: " + ", ".join(sorted({*VALUES, "policy", "plan_order"}))
    hints = {"chunk_sise": "did you mean chunk_size?", "num_blocks": "did you mean num_kv_blocks?", "zzz": known}
    for wrong, hint in hints.items():
        assert refusal(**{wrong: 3}) == f"unknown option {wrong}=3; {hint}"
    for section in ("cache", "parallel"):
        assert refusal(**{section: None}).startswith(f"unknown option {section}=None")


NAN, INF = math.nan, math.inf
NO_NUMBER = (NAN, "1", True, [1])
# Integers by their largest value; lengths may be text; the others may be None, too.
INTEGERS = {
    **{"block_size": 65536, "max_num_seqs": 65536, "tp": 65536, "spp": 65536, "kvp": 65536},
    "transfer_buffers": 1024,
    **{"min_chunk": 2**31 - 1, "chunk_granularity": 2**31 - 1},
}
LENGTHS = {"max_batch_tokens": 2**24, "long_threshold": 2**31 - 1}
OPTIONAL = {"num_kv_blocks": 2**31 - 1, "depth": 1024, "num_threads": 4096, "decode_tp": 65536}
OPTIONAL_LENGTHS = {"chunk_size": 2**24, "max_kv_per_group": 2**31 - 1, "max_model_len": 2**31 - 1}
WORDS: dict[str, str] = {
    "scheduler": "medha static orca sarathi vllm",
    "admission": "all refuse relegate",
    "tp_forward": "local dtensor",
    "dtype": "auto float32 bfloat16 float16",
    "attention_backend": "auto torch flashinfer",
    "load_format": "auto safetensors dummy",
}
NO_INTEGER = (0, -1, 2**63, 1.0, INF, *NO_NUMBER)
NO_LENGTH = (*(value for value in NO_INTEGER if value != "1"), "0", "-1", "1.5e3", "many")
NO_SECONDS = (0, -1, -0.5, INF, -INF, *NO_NUMBER)
NO_SHARE = (-0.1, 1, 1.0, INF, *NO_NUMBER)
# What each option refuses, and what it accepts.
VALUES: dict[str, tuple[Sequence[Any], Sequence[Any]]] = {
    **{name: ((*NO_INTEGER, None, most + 1), (1, most)) for name, most in INTEGERS.items()},
    **{name: ((*NO_LENGTH, None, most + 1), (1, most, "8k")) for name, most in LENGTHS.items()},
    **{name: ((*NO_INTEGER, most + 1), (1, most, None)) for name, most in OPTIONAL.items()},
    **{name: ((*NO_LENGTH, most + 1), (256, most, None, "1K")) for name, most in OPTIONAL_LENGTHS.items()},
    **{name: ((None, "", words.split()[-1].upper(), 1), words.split()) for name, words in WORDS.items()},
    **dict.fromkeys(("overcommit", "ring", "stream", "cuda_graphs"), ((None, 0, 1, "yes", NAN), (True, False))),
    **dict.fromkeys(("deadline_floor_s", "deadline_factor"), ((*NO_SECONDS, None), (1e-9, 1, 1e9))),
    **dict.fromkeys(("rho_max", "late_share", "interactive_share"), (NO_SHARE, (0, 0.4, 0.99))),
    **dict.fromkeys(("tokenizer", "revision", "profile"), ((3, True, "", ["a"]), (None, "a"))),
    "kv_memory": ((0, -1, 2**60 + 1, 1.0, NAN, True, [1], "4 of GiB", "-1", "0", ""), (1, None, 2**60, "1MiB")),
    "swap_space": (
        (-1, 2**30 + 1, None, -1.0, NAN, INF, "4 gib of", "-1", "", True, [1]),
        (0, 1, 2**30, 4.0, 0.0, "4GiB", "0", "4"),
    ),
    "gpu_memory_utilization": ((0, -0.5, 1.01, INF, None, *NO_NUMBER), (1, 1.0, 1e-9)),
    **dict.fromkeys(("t_target_s", "quantum_s"), (NO_SECONDS, (0.02, 1, None))),
    "patience_s": ((0, -1, -INF, None, *NO_NUMBER), (1, INF)),
    "dist_timeout": ((0, 0.5, -1, 86401, NAN, INF, "120", None), (1, 120.0, 86400)),
    "seed": ((1.0, 2**63, *NO_NUMBER), (None, 0, -1, 2**63 - 1)),
    "decode_replicas": ((None, -1, 4097, *NO_NUMBER), (0, 1, 4096)),
    "device": (
        (None, "", "gpu", "cuda:", "cuda:-1", "cuda:0 ", "mps", 0, "cpu\n", "cuda:01", "cuda:128", "cuda:" + "9" * 20),
        ("auto", "cpu", "cuda", "cuda:0", "cuda:15"),
    ),
    **dict.fromkeys(("async_scheduling", "prefix_caching"), ((0, 1, "on"), (True, False, None))),
    "rope_scaling": ((3, True, ["yarn"], NAN), (None, "yarn", {"rope_type": "linear", "factor": 2.0})),
    "hf_overrides": ((3, True, "{}", [("a", 1)]), (None, {}, {"rope_theta": 1e6})),
    "sp_sizes": ([(3,), (2, 1), (), 2], (None, (1,), (2, 8), "1,4")),
    "improvement_rate": ((1.5, 1.0, -0.1, True), (0, 0.5, "0.2", "rates.json")),
    "max_chunks": ((0, "x"), (None, 1, 4)),
    "tenant_weights": (
        (3, True, "{}", {"a": 0}, {"a": -1.0}, {"a": NAN}, {"a": INF}, {"a": "1"}, {1: 1.0}),
        (None, {}, {"a": 1, "": 0.5}),
    ),
}


def test_the_tables_cover_every_option_and_none_is_elsewhere_too() -> None:
    sections = (EngineConfig, CacheConfig, SchedulerConfig, ParallelConfig)
    flat = {f.name for cls in sections for f in dataclasses.fields(cls)}
    renamed = {"num_blocks": "num_kv_blocks", "memory_bytes": "kv_memory", "dist_timeout_s": "dist_timeout"}
    renamed |= {"swap_bytes": "swap_space"}
    names = {renamed.get(name, name) for name in flat} - {"model", "cache", "parallel"}
    names -= {"num_swap_blocks", "swap_block_s"}  # which an engine finds out
    assert set(VALUES) == names - {"policy", "plan_order"}  # which the scheduler reads
    assert not set(FOREIGN_OPTIONS) & {*OPTION_ALIASES, *VALUES, "policy"}


@pytest.mark.parametrize("name", VALUES)
def test_values(name: str) -> None:
    refused, accepted = VALUES[name]
    for value in refused:
        assert refusal(**{name: value}).startswith(f"{name}={value!r}; accepted: ")
    configs = {repr(EngineConfig.from_flat("m", **{name: value})) for value in accepted}
    assert len(configs) > 1  # it lands somewhere


@pytest.mark.parametrize("model", [None, "", 3, ["a"], b"a"])
def test_bad_model(model: Any) -> None:
    assert refusal(model) == f"model={model!r}; accepted: a folder or a hub id"
    assert refusal(device="gpu") == "device='gpu'; accepted: auto, cpu, cuda, cuda:N"


def test_sizes_of_the_pool() -> None:
    said = "num_kv_blocks and kv_memory both size the KV pool; give one of them"
    assert refusal(num_kv_blocks=4, kv_memory=1 << 20) == said
    llama3_8b = ModelConfig("LlamaForCausalLM", 128256, 4096, 14336, 32, 32, 8, 128, 8192, RopeConfig(theta=500000.0))
    assert llama3_8b.kv_bytes_per_token(2) == 128 * 1024


SIZES = {
    **{"1": 1, "1073741824": 1 << 30, "1.9": 1, "9007199254740993": 2**53 + 1, "100B": 100},
    **{"4GiB": 4 << 30, "4gib": 4 << 30, "4 GiB": 4 << 30, " 4GiB ": 4 << 30, "4Gi": 4 << 30, "0.5TiB": 1 << 39},
    **{"512MB": 512_000_000, "512M": 512 << 20, "512m": 512_000_000, "512MiB": 512 << 20, "2TB": 2 * 10**12},
    **{"128K": 131_072, "10M": 10 << 20, "10m": 10_000_000, "2kib": 2048, "1.5KiB": 1536, "1.5k": 1500},
}
NO_SIZES = "|  |GiB|-1|-4GiB|+4GiB|4PiB|4GiBs|4 G iB|1e9|1_000|1,5GiB|.5GiB|0|0GiB|0.5|0.0001KiB|nan|inf|0x10|4i|4ib"


def test_parse_size() -> None:
    assert {text: parse_size(text) for text in SIZES} == SIZES
    for text in (*NO_SIZES.split("|"), "4GiB 2MiB", "4\nGiB\n4", "9" * 400):
        with pytest.raises(ConfigError) as caught:
            parse_size(text)
        assert str(caught.value).startswith(f"size {text!r}; accepted: ")
