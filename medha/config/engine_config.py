"""How an engine is to run a model: every option once, as a field with its help text and what it accepts.

Keyword arguments of :class:`medha.LLM` and the options of the command line (:mod:`medha.cli.options`) are made from
these fields.
"""

from __future__ import annotations

import dataclasses
import difflib
import logging
import math
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from medha.config.fields import (
    BOOLEAN,
    POSITIVE,
    SHARE,
    TEXT,
    Check,
    OptionField,
    check_options,
    choice,
    integer,
    number,
    option,
    option_of,
    parsed_size,
)
from medha.config.foreign_options import FOREIGN_OPTIONS, note_foreign
from medha.config.model_config import DTYPES
from medha.errors import ConfigError

logger = logging.getLogger("medha")

SCHEDULERS = ("medha", "static", "orca", "sarathi", "vllm", "token-budget")
ADMISSIONS = ("all", "refuse", "relegate")
ATTENTION_BACKENDS = ("auto", "torch", "flashinfer")

# Headings of options: each is a group of medha.cli.options.
MODEL = "Model"
MEMORY = "Memory"
SCHEDULING = "Scheduling"
SERVING = "Requests that share the engine"
PARALLEL = "Parallel layout"
SIMULATED = "Simulated memory"  # what an engine finds out itself: given to it, it could contradict the machine


@dataclass(frozen=True, slots=True)
class CacheConfig:
    """The paged KV cache.

    Give the size of the pool at most one way; by default it holds ``max_model_len`` tokens for every request that may
    run, within half of the free memory.
    """

    block_size: int = option(256, MEMORY, "Tokens of a KV block.", integer(1, 65536))
    num_blocks: int | None = option(
        None,
        MEMORY,
        "Blocks of the KV pool.",
        integer(1, 2**31 - 1),
        name="num_kv_blocks",
        shown="what --kv-memory or the free memory holds",
    )
    memory_bytes: int | None = option(
        None, MEMORY, "Size of the KV pool, as 4GiB.", integer(1, 2**60), name="kv_memory", kind=str, shown="none"
    )
    gpu_memory_utilization: float = option(
        0.9,
        MEMORY,
        "Share of the GPU's memory that weights and pool may take.",
        number("a number above 0, at most 1", lambda value: 0 < value <= 1),
    )
    swap_bytes: int = option(
        0,
        MEMORY,
        "Host memory of a rank for the KV blocks of requests that give way: GiB, or as 512MiB; 0 computes them again.",
        integer(0, 2**60),
        name="swap_space",
        kind=str,
        shown="0",
    )

    def __post_init__(self) -> None:
        check_options(self)
        if self.num_blocks is not None and self.memory_bytes is not None:
            raise ConfigError("num_kv_blocks and kv_memory both size the KV pool; give one of them")


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """Who runs next, and the budgets of one step."""

    scheduler: str = option(
        "medha", SCHEDULING, f"One of {', '.join(SCHEDULERS)}; all but medha are classical.", choice(*SCHEDULERS)
    )
    # or a function of (columns, now_s), from Python: see medha.sched.policy
    policy: str | Callable[[Any, float], Any] = option(
        "lars",
        SCHEDULING,
        "Order of prefills of the medha scheduler: lars, ilrs, lrs, edf, srpt, sjf, fcfs, priority (class first, then "
        "lars), priority:NAME or package.module:name.",
        repr=False,
    )
    max_num_seqs: int = option(
        256, SERVING, "Requests started and not finished at once; rows of a batch.", integer(1, 65536)
    )
    max_batch_tokens: int = option(2048, SCHEDULING, "Query tokens of a batch.", integer(1, 2**24), is_length=True)
    chunk_size: int | None = option(
        None,
        SCHEDULING,
        "Query tokens of one prefill in a batch.",
        integer(1, 2**24),
        is_length=True,
        shown="what the batch's time holds; --max-batch-tokens with vllm, 512 with other schedulers",
    )
    depth: int | None = option(
        None,
        PARALLEL,
        "Batches in flight at most.",
        integer(1, 1024),
        shown="one a stage and one more; 1 with a single stage",
    )
    max_kv_per_group: int | None = option(
        None,
        PARALLEL,
        "KV tokens of a request on one KV-parallel group, in whole blocks; with more it takes the next group too.",
        integer(1, 2**31 - 1),
        is_length=True,
        shown="what a chunk of --min-chunk tokens fills a batch's time with, at least an even share of the longest",
    )
    t_target_s: float | None = option(
        None,
        SCHEDULING,
        "Seconds that a batch may take.",
        POSITIVE,
        shown="from the tightest TPOT objective among the running decodes and the depth, else --quantum-s",
    )
    quantum_s: float = option(
        0.25, SCHEDULING, "Seconds of a batch when no decode has a TPOT objective: how long a prefill holds up the "
        "others.", POSITIVE,
    )  # fmt: skip
    rho_max: float = option(
        0.4,
        SERVING,
        "Most of a batch's prefill time that a long prefill yields to short ones, from its slack; 0 is no space "
        "sharing.",
        SHARE,
    )
    long_threshold: int = option(
        8192,
        SERVING,
        "Prompt tokens from which a prefill is long: one of them a batch and group, and it yields.",
        integer(1, 2**31 - 1),
        is_length=True,
    )
    late_share: float = option(
        0.1, SERVING, "Share of a batch's prefill time for requests that are late or were passed over.", SHARE
    )
    patience_s: float = option(
        10.0,
        SERVING,
        "Seconds without a chunk after which a request counts as passed over; inf is never.",
        number("a number above 0", lambda value: value > 0),
    )
    # Below it the KV cache is read no faster than the arithmetic that it hides behind; the paper, v4 section 3.2, gives
    # about 40.
    min_chunk: int = option(
        64,
        SCHEDULING,
        "Tokens below which a chunk is not efficient, unless it ends its prompt.",
        integer(1, 2**31 - 1),
    )
    chunk_granularity: int = option(
        16, SCHEDULING, "Chunks are multiples of it, unless they end their prompt.", integer(1, 2**31 - 1)
    )
    deadline_floor_s: float = option(
        1.0,
        SERVING,
        "A request without a TTFT objective is due no earlier after its arrival, seconds.",
        POSITIVE,
    )
    deadline_factor: float = option(
        5.0,
        SERVING,
        "A request without a TTFT objective is due this many times its predicted prefill time alone after its arrival.",
        POSITIVE,
    )
    overcommit: bool = option(
        False,
        SERVING,
        "Let requests take whatever KV memory is free, not only what keeps everybody's end possible; where a running "
        "one then finds none, another gives way and is computed again.",
        BOOLEAN,
        flags=("--overcommit",),
    )
    # Predicted prefill times, and with them deadlines and slack, are those of a stream in either case.
    stream: bool = option(
        True,
        PARALLEL,
        "Whether a prompt's next chunk enters the pipeline before the one before has left it (stream pipeline "
        "parallelism) or waits meanwhile, as in Sarathi-Serve and vLLM.",
        BOOLEAN,
    )
    decode_lag: int | None = option(
        None,
        SCHEDULING,
        "1 schedules a request's next token while the one before is computed, so that the host prepares a batch while "
        "the device runs another; one rank, --depth 2. 0 waits for each token.",
        Check("0, 1 or None", lambda value: type(value) is int and value in (0, 1)),
        shown="1 on CUDA with one rank, else 0",
    )
    admission: str = option(
        "all",
        SERVING,
        "A request whose own TTFT objective could not be met even if it ran next: all (serve it as others), refuse, "
        "relegate (serve it without a deadline, after all others of its class).",
        choice(*ADMISSIONS),
    )
    num_swap_blocks: int = option(
        0, SIMULATED, "KV blocks of host memory of a group, for requests that give way.", integer(0, 2**31 - 1)
    )
    swap_block_s: float = option(
        0.0,
        SIMULATED,
        "Seconds in which a block moves to host memory or back.",
        number("a finite number from 0", lambda value: 0 <= value < math.inf),
    )

    def __post_init__(self) -> None:
        check_options(self)
        if self.scheduler != "medha" and self.admission != "all":
            raise ConfigError(
                f"admission={self.admission!r} needs predictions, which scheduler={self.scheduler!r} does not make; "
                "accepted: all"
            )
        if self.scheduler != "medha" and self.chunk_size is None:
            object.__setattr__(self, "chunk_size", self.max_batch_tokens if self.scheduler == "vllm" else 512)
        if self.decode_lag == 1 and self.depth not in (None, 2):
            raise ConfigError(f"depth={self.depth!r} with decode_lag=1; accepted: 2")

    def budget_text(self, *, has_tpot: bool) -> str:
        """What a batch may hold, and why, in words.

        Args:
            has_tpot: whether some request has a TPOT objective.
        """
        if self.scheduler != "medha":
            whole = self.scheduler in ("static", "orca")
            chunks = "whole prompts" if whole else f"chunks of at most {self.chunk_size:,}"
            return f"scheduler {self.scheduler}: batches of at most {self.max_batch_tokens:,} tokens, {chunks}"
        if self.t_target_s is not None:
            return f"a batch may take {self.t_target_s:g} s (t_target_s)"
        if has_tpot:
            return f"a batch may take what its decodes' TPOT objectives leave, else {self.quantum_s:g} s (quantum_s)"
        why = "quantum_s, as there is no TPOT objective"
        return f"a batch may take {self.quantum_s:g} s ({why}), and so may a token beside prefills"


@dataclass(frozen=True, slots=True)
class ParallelConfig:
    """How one model is spread over ranks. The world size is the product of the three degrees.

    Ranks are numbered with ``tp`` fastest, so that a tensor-parallel group lies inside a node, and ``kvp`` outermost.
    """

    tp: int = option(
        1, PARALLEL, "Tensor-parallel ranks: heads and MLP columns of each layer are split.", integer(1, 65536)
    )
    spp: int = option(1, PARALLEL, "Stream-pipeline stages: layers are split.", integer(1, 65536))
    kvp: int = option(
        1,
        PARALLEL,
        "KV-parallel groups: each holds the whole model; the KV cache of a long request is split over them.",
        integer(1, 65536),
    )
    tp_forward: str = option(
        "local",
        PARALLEL,
        "local (plain tensors, one all-reduce for each row-split layer) or dtensor (DTensor's modules, the reference).",
        choice("local", "dtensor"),
    )
    dist_timeout_s: float = option(
        120.0,
        PARALLEL,
        "Seconds that a collective or transfer may take.",
        number("seconds from 1 to 86400", lambda value: 1 <= value <= 86400),
        name="dist_timeout",
    )

    def __post_init__(self) -> None:
        check_options(self)

    @property
    def world_size(self) -> int:
        """Ranks in all."""
        return self.tp * self.spp * self.kvp

    def coordinates(self, rank: int) -> tuple[int, int, int]:
        """(kvp_rank, stage, tp_rank) of a global rank."""
        return rank // (self.spp * self.tp), rank // self.tp % self.spp, rank % self.tp

    def rank_of(self, *, stage: int, tp_rank: int, kvp_rank: int = 0) -> int:
        """The global rank at these coordinates."""
        return (kvp_rank * self.spp + stage) * self.tp + tp_rank

    def layers_of(self, stage: int, num_layers: int) -> range:
        """The layers of a stage: an even split, the first stages taking one more where it does not divide."""
        size, extra = divmod(num_layers, self.spp)
        start = stage * size + min(stage, extra)
        return range(start, start + size + (stage < extra))


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """Everything an engine is told at start, apart from the requests."""

    model: str = field(
        metadata={"option": OptionField(MODEL, "Hugging Face folder or hub id.", flags=("--model", "-m"))}
    )
    tokenizer: str | None = option(
        None, MODEL, "Folder or hub id of the tokenizer, if not the model's.", TEXT, shown="the model's"
    )
    revision: str | None = option(None, MODEL, "Branch, tag or commit on the hub.", TEXT, shown="main")
    dtype: str = option(
        "auto", MODEL, "auto (the checkpoint's), float32, bfloat16 or float16.", choice("auto", *DTYPES)
    )
    device: str = option(
        "auto",
        MODEL,
        "auto (CUDA where there is one), cpu, cuda or cuda:N.",
        Check(
            "auto, cpu, cuda, cuda:N",
            lambda value: isinstance(value, str) and re.fullmatch(r"auto|cpu|cuda(:\d+)?", value) is not None,
        ),
    )
    attention_backend: str = option(
        "auto",
        MODEL,
        "torch, flashinfer, or auto: FlashInfer on CUDA where it is installed and has kernels for the model's heads.",
        choice(*ATTENTION_BACKENDS),
    )
    cuda_graphs: bool = option(
        True,
        MODEL,
        "Whether batches of decodes alone run from CUDA graphs: on CUDA with FlashInfer, without tensor parallelism.",
        BOOLEAN,
        flags=("--cuda-graphs/--enforce-eager",),
    )
    max_model_len: int | None = option(
        None,
        MODEL,
        "Most tokens of a request, prompt and output.",
        integer(1, 2**31 - 1),
        is_length=True,
        shown="what the model claims",
    )
    rope_scaling: str | dict[str, Any] | None = option(
        None,
        MODEL,
        "In place of the model's RoPE scaling: a type (yarn, linear), or a JSON object as in rope_parameters.",
        Check("a type name or a mapping", lambda value: isinstance(value, (str, dict))),
        kind=str,
        shown="none",
    )
    hf_overrides: dict[str, Any] | None = option(
        None,
        MODEL,
        "JSON object merged over config.json, as '{\"hidden_size\": 64}'.",
        Check("a mapping", lambda value: isinstance(value, dict)),
        kind=str,
        shown="none",
    )
    load_format: str = option(
        "auto",
        MODEL,
        "auto or safetensors, or dummy (random weights, for benchmarks).",
        choice("auto", "safetensors", "dummy"),
    )
    seed: int = option(
        0,
        MODEL,
        "Of dummy weights, and of requests that bring none.",
        Check(
            "a 64-bit integer",
            lambda value: isinstance(value, int) and not isinstance(value, bool) and abs(value) < 2**63,
        ),
    )
    num_threads: int | None = option(None, MODEL, "CPU threads.", integer(1, 4096), shown="torch's choice")
    profile: str | None = option(
        None,
        SCHEDULING,
        "File that medha profile wrote for this machine, model and layout.",
        TEXT,
        shown="a spec for hardware of the kind, corrected while running",
    )
    cache: CacheConfig = field(default_factory=CacheConfig)
    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)

    def __post_init__(self) -> None:
        if not isinstance(self.model, str) or not self.model:
            raise ConfigError(f"model={self.model!r}; accepted: a folder or a hub id")
        check_options(self)
        if self.scheduler.decode_lag == 1 and self.parallel.world_size > 1:
            raise ConfigError(
                f"decode_lag=1 with {self.parallel.world_size} ranks: the others get a token from the first one; "
                "accepted: 0 or None"
            )
        whole = whole_blocks(self.scheduler.max_kv_per_group, self.cache.block_size)
        if whole != self.scheduler.max_kv_per_group:
            object.__setattr__(self, "scheduler", dataclasses.replace(self.scheduler, max_kv_per_group=whole))

    @classmethod
    def from_flat(cls, model: str, **options: Any) -> EngineConfig:
        """Build the tree from flat keyword arguments, the names that :class:`medha.LLM` takes.

        vLLM's names are accepted as aliases (``max_num_batched_tokens``, ``num_gpu_blocks_override``, ...), and its
        ``enforce_eager`` as the opposite of ``cuda_graphs``; what only others have is in
        :mod:`medha.config.foreign_options`. ``kv_memory`` is bytes, ``swap_space`` GiB as in vLLM, or both text
        (``4GiB``); lengths in tokens may be text, too (``128K``).

        Raises:
            ConfigError: an unknown name (the message proposes the nearest), a name given twice, or a bad value.
        """
        sections: dict[str, dict[str, Any]] = {"cache": {}, "scheduler": {}, "parallel": {}, "": {}}
        seen: set[str] = set()
        for name, value in options.items():
            if name == "enforce_eager" and isinstance(value, bool):
                name, value = "cuda_graphs", not value
            canonical = OPTION_ALIASES.get(name, name)
            if name in FOREIGN_OPTIONS:
                logger.info("%s", note_foreign(name, value, f"{name}={value!r}"))
                continue
            if canonical not in _OPTIONS:
                near = difflib.get_close_matches(name, [*_OPTIONS, *OPTION_ALIASES], n=1)
                hint = f"; did you mean {near[0]}?" if near else f"; known: {', '.join(sorted(_OPTIONS))}"
                raise ConfigError(f"unknown option {name}={value!r}{hint}")
            if canonical in seen:
                raise ConfigError(f"{canonical} is given twice, under its own name or an alias")
            seen.add(canonical)
            section, of = _OPTIONS[canonical]
            said = option_of(of)
            if canonical == "swap_space":
                value = _swap_bytes(given := value)
                if value is math.nan:
                    raise ConfigError(f"{name}={given!r}; accepted: GiB from 0 to {2**30}, or text as in '512MiB'")
            elif canonical == "kv_memory":
                value = parsed_size(name, value, "4GiB")
            elif said is not None and said.is_length:
                value = parsed_size(name, value, "128K")
            elif canonical == "dtype" and isinstance(value, str):
                value = _DTYPE_ALIASES.get(value, value)
            sections[section][of.name] = value
        return cls(
            model,
            cache=CacheConfig(**sections["cache"]),
            scheduler=SchedulerConfig(**sections["scheduler"]),
            parallel=ParallelConfig(**sections["parallel"]),
            **sections[""],
        )


SECTIONS: dict[str, type] = {
    "parallel": ParallelConfig,
    "cache": CacheConfig,
    "scheduler": SchedulerConfig,
    "": EngineConfig,
}
"""The dataclasses whose fields are options, by the field of EngineConfig."""

# By the name that users give: the section, and the field in it.
_OPTIONS: dict[str, tuple[str, dataclasses.Field[Any]]] = {
    said.name or of.name: (section, of)
    for section, cls in SECTIONS.items()
    for of in dataclasses.fields(cls)
    if (said := option_of(of)) is not None and said.panel != SIMULATED and of.name != "model"
}

_DTYPE_ALIASES = {"half": "float16", "fp16": "float16", "bf16": "bfloat16", "float": "float32", "fp32": "float32"}

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
    "tensor_parallel_size": "tp",
    "tp_size": "tp",
    "pipeline_parallel_size": "spp",
    "pp_size": "spp",
    "kv_parallel_size": "kvp",
    "scheduling_policy": "policy",
    "schedule_policy": "policy",
}


def whole_blocks(max_kv_per_group: int | None, block_size: int) -> int | None:
    """What of it blocks fill, one at least; says so where that is another number."""
    if max_kv_per_group is None or max_kv_per_group % block_size == 0:
        return max_kv_per_group
    whole = max(1, max_kv_per_group // block_size) * block_size
    logger.warning("max_kv_per_group=%d is taken as %d, blocks of %d tokens", max_kv_per_group, whole, block_size)
    return whole


def _swap_bytes(value: Any) -> Any:
    """Bytes of ``swap_space``: a number, be it text, is GiB as in vLLM; what is none is left to its check."""
    try:
        gib = float(value) if isinstance(value, (str, int, float)) and not isinstance(value, bool) else math.nan
    except (ValueError, OverflowError):
        return parsed_size("swap_space", value, "4GiB")
    return int(gib * 2**30) if 0 <= gib <= 2**30 else math.nan
