"""How an engine is to run a model: every option once, as a field with its help text and what it accepts.

Keyword arguments of :class:`medha.LLM` and the options of the command line (:mod:`medha.cli.options`) are made from
these fields and those of :mod:`medha.config.sections`.
"""

from __future__ import annotations

import dataclasses
import logging
import re
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from medha.config.fields import (
    COUNT,
    MODEL,
    SCHEDULING,
    SIMULATED,
    TEXT,
    Check,
    as_length,
    check_options,
    choice,
    integer,
    option,
    option_of,
    read_option,
)
from medha.config.model_config import DTYPES
from medha.config.sections import CDSP, CacheConfig, ParallelConfig, SchedulerConfig
from medha.errors import ConfigError, hint

logger = logging.getLogger("medha")

ATTENTION_BACKENDS = {
    "flashinfer": "medha.attention.flashinfer_backend:FlashInferBackend",
    "cpu": "medha.attention.cpu_backend:CpuBackend",
    "torch": "medha.attention.torch_backend:TorchBackend",
}
"""The class of each :class:`medha.attention.interface.AttentionBackend`; ``auto`` takes the first that can serve."""

_DTYPE_ALIASES = {"half": "float16", "fp16": "float16", "bf16": "bfloat16", "float": "float32", "fp32": "float32"}
_DTYPE_ALIASES |= {f"torch.{name}": name for name in DTYPES}  # what the dtypes themselves are called
_model = partial(option, MODEL)
_FOLDER = Check("a folder or a hub id", TEXT.holds)
_MAPPING = Check("a mapping", lambda value: isinstance(value, dict))
_FORMAT = choice("auto", "safetensors", "dummy")
_SEED = integer(-(2**63), 2**63 - 1, "a 64-bit integer")
_DEVICE_NAME = re.compile(r"auto|cpu|cuda(:(0|[1-9]\d?))?")
_DEVICE = Check("auto, cpu, cuda, cuda:N", lambda name: _DEVICE_NAME.fullmatch(str(name)) is not None)


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """Everything an engine is told at start, apart from the requests."""

    model: str = _model(dataclasses.MISSING, "Hugging Face folder or hub id.", _FOLDER, flags=("--model", "-m"))
    tokenizer: str | None = _model(
        None, "Folder or hub id of the tokenizer, if not the model's.", TEXT, shown="the model's"
    )
    revision: str | None = _model(None, "Branch, tag or commit on the hub.", TEXT, shown="main")
    dtype: str = _model(
        "auto",
        "auto (of config.json, float32 where it has none), float32, bfloat16 or float16.",
        choice("auto", *DTYPES),
        read=lambda _, value: _DTYPE_ALIASES.get(str(value), value),
    )
    device: str = _model("auto", "auto (CUDA where there is one), cpu, cuda or cuda:N.", _DEVICE)
    attention_backend: str = _model(
        "auto",
        f"{', '.join(ATTENTION_BACKENDS)}, or auto: FlashInfer on CUDA where it is installed and has kernels for the "
        "model's heads, medha's own kernel on a CPU where there is a C++ compiler, else torch.",
        choice("auto", *ATTENTION_BACKENDS),
    )
    cuda_graphs: bool = _model(
        True,
        "Whether batches of decodes alone run from CUDA graphs: on CUDA with FlashInfer.",
        flags=("--cuda-graphs/--enforce-eager",),
    )
    max_model_len: int | None = _model(
        None, "Most tokens of a request, prompt and output.", COUNT, read=as_length, shown="what the model claims"
    )
    rope_scaling: str | dict[str, Any] | None = _model(
        None,
        "In place of the model's RoPE scaling: a type (yarn, linear), or a JSON object as in rope_parameters.",
        Check("a type name or a mapping", lambda value: isinstance(value, (str, dict))),
        kind=str,
        shown="none",
    )
    hf_overrides: dict[str, Any] | None = _model(
        None, "JSON object merged over config.json, as '{\"hidden_size\": 64}'.", _MAPPING, kind=str, shown="none"
    )
    load_format: str = _model("auto", "auto or safetensors, or dummy (random, by layout).", _FORMAT)
    seed: int = _model(
        0, "Of dummy weights, and of requests that bring none.", _SEED, read=lambda _, seed: 0 if seed is None else seed
    )
    num_threads: int | None = _model(None, "CPU threads.", integer(1, 4096), shown="torch's choice")
    profile: str | None = option(
        SCHEDULING, None, "File of medha profile, for this machine, model and layout.", TEXT, shown="a hardware spec"
    )
    cache: CacheConfig = field(default_factory=CacheConfig)
    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)

    def __post_init__(self) -> None:
        check_options(self)
        self.scheduler.check_layout(self.parallel)
        unswapped = "scheduler='cdsp'" if self.scheduler.scheduler == CDSP else "ring" if self.scheduler.ring else None
        if self.parallel.decode_replicas:  # what is handed over is kept, and moves once
            unswapped = unswapped or "decode_replicas"
            if self.scheduler.scheduler not in ("medha", CDSP):
                what = f"scheduler={self.scheduler.scheduler!r} with decode_replicas"
                raise ConfigError(f"{what}; accepted: medha, {CDSP}")
            if self.scheduler.overcommit:
                raise ConfigError("overcommit=True with decode_replicas; accepted: without it")
        if unswapped is not None and self.cache.swap_bytes:
            raise ConfigError(f"swap_space={self.cache.swap_bytes} with {unswapped}; accepted: 0")
        whole = whole_blocks(self.scheduler.max_kv_per_group, self.cache.block_size)
        if whole != self.scheduler.max_kv_per_group:
            object.__setattr__(self, "scheduler", dataclasses.replace(self.scheduler, max_kv_per_group=whole))

    @classmethod
    def from_flat(cls, model: str, **options: Any) -> EngineConfig:
        """Build the tree from flat keyword arguments, the names that :class:`medha.LLM` takes.

        vLLM's names are accepted as aliases (``max_num_batched_tokens``, ``num_gpu_blocks_override``, ...), and its
        ``enforce_eager`` as the opposite of ``cuda_graphs``; what only others have is in
        :data:`FOREIGN_OPTIONS`. ``kv_memory`` is bytes, ``swap_space`` GiB as in vLLM, or both text
        (``4GiB``); lengths in tokens may be text, too (``128K``).
        """
        sections: dict[str, dict[str, Any]] = {section: {} for section in SECTIONS}
        for name, value in options.items():
            if name == "enforce_eager" and isinstance(value, bool):
                name, value = "cuda_graphs", not value
            canonical = OPTION_ALIASES.get(name, name)
            if name in FOREIGN_OPTIONS:
                logger.info("%s", note_foreign(name, value, f"{name}={value!r}"))
                continue
            if canonical not in _OPTIONS:
                meant = hint(name, [*_OPTIONS, *OPTION_ALIASES]) or f"; known: {', '.join(sorted(_OPTIONS))}"
                raise ConfigError(f"unknown option {name}={value!r}{meant}")
            section, of = _OPTIONS[canonical]
            if of.name in sections[section]:
                raise ConfigError(f"{canonical} is given twice, under its own name or an alias")
            sections[section][of.name] = read_option(of, value, name)
        parts: dict[str, Any] = {part: SECTIONS[part](**given) for part, given in sections.items() if part}
        return cls(model, **parts, **sections[""])


SECTIONS = {"parallel": ParallelConfig, "cache": CacheConfig, "scheduler": SchedulerConfig, "": EngineConfig}
"""The dataclasses whose fields are options, by the field of EngineConfig."""

# By the name that users give: the section, and the field in it.
_OPTIONS: dict[str, tuple[str, dataclasses.Field[Any]]] = {
    said.name or of.name: (section, of)
    for section, cls in SECTIONS.items()
    for of in dataclasses.fields(cls)
    if (said := option_of(of)) is not None and said.panel != SIMULATED and of.name != "model"
}

# Other names by which users of vLLM and SGLang know an option.
OPTION_ALIASES = {
    "max_num_batched_tokens": "max_batch_tokens",
    "num_gpu_blocks_override": "num_kv_blocks",
    "kv_cache_memory_bytes": "kv_memory",
    "mem_fraction_static": "gpu_memory_utilization",
    "max_running_requests": "max_num_seqs",
    "context_length": "max_model_len",
    "chunked_prefill_size": "chunk_size",
    "page_size": "block_size",
    "tokenizer_path": "tokenizer",
    **dict.fromkeys(("tensor_parallel_size", "tp_size"), "tp"),
    **dict.fromkeys(("pipeline_parallel_size", "pp_size"), "spp"),
    "kv_parallel_size": "kvp",
    **dict.fromkeys(("scheduling_policy", "schedule_policy"), "policy"),
    "enable_prefix_caching": "prefix_caching",
}

_FLAG, _ANY = (True, False), None

FOREIGN_OPTIONS: dict[str, tuple[tuple[Any, ...] | None, str]] = {
    **dict.fromkeys(("api_key", "host", "port"), ((), "they are options of medha serve")),
    **dict.fromkeys(("allowed_origins", "root_path", "ssl_ca_certs", "uds"), ((), "a proxy before the server does it")),
    **dict.fromkeys(("num_speculative_tokens", "speculative_config"), ((), "speculative decoding is not implemented")),
    **dict.fromkeys(("disable_log_requests", "disable_uvicorn_access_log"), (_FLAG, "requests are not logged")),
    **dict.fromkeys(("backend", "save_result"), ((), "bench runs medha itself; --output-json FILE writes its report")),
    "compilation_config": (("0",), "nothing is compiled; cuda_graphs=True captures decodes"),
    "cpu_offload_gb": ((0, "0"), "weights stay on their device; spread the model with tp or spp"),
    "chat_template": ((), "the model's folder has it, as chat_template.jinja"),
    **dict.fromkeys(("cuda_graph_sizes", "max_seq_len_to_capture"), (_ANY, "graphs hold decodes of all sizes")),
    "data_parallel_size": ((1, "1"), "start a job for each replica"),
    "decode_context_parallel_size": ((1, "1"), "kvp splits the KV cache of long requests, over ranks of its own"),
    "disable_custom_all_reduce": (_FLAG, "collectives are those of torch.distributed"),
    "disable_frontend_multiprocessing": (_FLAG, "the process of rank 0 has the server"),
    "disable_log_stats": (_FLAG, "statistics are in the outputs alone"),
    "disable_sliding_window": ((False,), "set max_model_len to the window"),
    "disable_radix_cache": ((False,), "prefix_caching=False keeps nothing"),
    "distributed_executor_backend": (("mp", "uni", "external_launcher"), "ranks are torchrun's, or the command's own"),
    "download_dir": ((), "set HF_HOME"),
    "enable_auto_tool_choice": ((False,), "tools are not implemented"),
    "enable_chunked_prefill": ((True,), "prompts are read in chunks; scheduler='orca' reads them whole"),
    "enable_expert_parallel": ((False,), "mixtures of experts are not implemented"),
    "enable_prompt_tokens_details": (_FLAG, "usage has them"),
    "enable_sleep_mode": ((False,), "LLM.close gives back all memory"),
    "enable_lora": ((False,), "adapters are not implemented; merge them into the checkpoint"),
    "generation_config": (("auto",), "generation_config.json gives defaults; a request's own fields go before them"),
    "hf_token": ((), "set HF_TOKEN"),
    "kv_cache_dtype": (("auto",), "keys and values are kept in the model's dtype"),
    "override_generation_config": (({},), "fields of SamplingParams go before generation_config.json"),
    "max_logprobs": (_ANY, "a request may ask for up to 20"),
    **dict.fromkeys(("max_long_partial_prefills", "max_num_partial_prefills"), ((1, "1"), "a batch's time bounds it")),
    "max_total_tokens": ((), "num_kv_blocks, of block_size tokens each, sizes the KV pool"),
    "num_scheduler_steps": ((1, "1"), "every step is scheduled"),
    "limit_mm_per_prompt": ((), "models are of text alone"),
    "preemption_mode": ((), "swap_space lets requests that give way go to host memory"),
    "guided_decoding_backend": ((), "structured outputs are not implemented"),
    "tokenizer_revision": ((), "revision is that of model and tokenizer"),
    "prefill_context_parallel_size": ((1, "1"), "kvp splits the KV cache of long requests, over ranks of its own"),
    "enable_log_requests": ((False,), "outputs tell what became of each request"),
    "long_prefill_token_threshold": ((0, "0"), "long_threshold and rho_max say what long prompts yield"),
    "quantization": ((), "quantised weights are not implemented; load a float16 or bfloat16 checkpoint"),
    "rope_theta": ((), "hf_overrides={'rope_theta': ...} changes config.json"),
    "served_model_name": (_ANY, "it is an option of medha serve"),
    "skip_tokenizer_init": ((False,), "a folder without tokenizer.json serves token ids"),
    **dict.fromkeys(("runner", "task"), (("auto", "generate"), "models generate")),
    "tokenizer_mode": (("auto", "hf"), "tokenizer.json is what is read"),
    "uvicorn_log_level": (_ANY, "log_level is that of medha serve as well"),
    "trust_remote_code": (_FLAG, "no code of a checkpoint runs"),
    "code_revision": (_ANY, "no code of a checkpoint runs"),
}
"""Options of vLLM and SGLang that medha does not have: which values, beside None, ask for nothing (None: any does), and
why. One whose values are True or False is a flag of the command line; the others take a value there."""


def whole_blocks(max_kv_per_group: int | None, block_size: int) -> int | None:
    """What of it blocks fill, one at least; says so where that is another number."""
    if max_kv_per_group is None or max_kv_per_group % block_size == 0:
        return max_kv_per_group
    whole = max(1, max_kv_per_group // block_size) * block_size
    logger.warning("max_kv_per_group=%d is taken as %d, blocks of %d tokens", max_kv_per_group, whole, block_size)
    return whole


def note_foreign(name: str, value: Any, typed: str) -> str:
    """What to tell of an option of this table that asks for nothing, which the user wrote as ``typed``; ConfigError
    where it asks for something."""
    idle, why = FOREIGN_OPTIONS[name]
    if idle is None or any(value is one or (type(value) is type(one) and value == one) for one in (None, *idle)):
        return f"{typed} changes nothing: {why}"
    raise ConfigError(f"{typed} is not among medha's options: {why}")
