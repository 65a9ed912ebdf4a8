"""Frozen configuration: what a model is, and how an engine is to run it.

Plain data, standard library only. Every dataclass checks itself when it is built, so an object that exists is valid.
Reading a Hugging Face ``config.json`` into a :class:`ModelConfig` is the work of :mod:`medha.models.hf_config`.
"""

from __future__ import annotations

import dataclasses
import difflib
import logging
import math
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from decimal import Decimal
from typing import Any, Literal

from medha.errors import ConfigError
from medha.foreign_options import FOREIGN_OPTIONS, note_foreign

logger = logging.getLogger("medha")

DTYPES = ("float32", "bfloat16", "float16")
RopeType = Literal["default", "linear", "llama3", "yarn"]


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """Rotary position embedding of a model, complete: no field depends on the length of a request.

    Attributes:
        rope_type: which rule turns theta into inverse frequencies.
        theta: base of the frequencies.
        factor: how far the context is stretched (linear, llama3, yarn); 1 otherwise.
        original_max_position_embeddings: trained context in tokens (llama3, yarn).
        low_freq_factor, high_freq_factor: band limits (llama3).
        beta_fast, beta_slow: ramp limits in rotations (yarn).
        truncate: round the ramp limits to whole dimensions (yarn).
        attention_factor: cos and sin are multiplied by it (yarn); 1 otherwise.
    """

    rope_type: RopeType = "default"
    theta: float = 10000.0
    factor: float = 1.0
    original_max_position_embeddings: int | None = None
    low_freq_factor: float | None = None
    high_freq_factor: float | None = None
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    attention_factor: float = 1.0


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Shape of a decoder-only model, independent of who wrote its ``config.json``.

    Attributes:
        architecture: name in ``config.json``, for example ``LlamaForCausalLM``.
        dtype: dtype of the checkpoint: ``float32``, ``bfloat16`` or ``float16``.
        max_position_embeddings: longest context in tokens that the model claims, stretching by RoPE included.
        qkv_bias, o_bias: whether the attention projections carry a bias.
        qk_norm: RMSNorm over each query and key head (Qwen3).
        eos_token_ids: ids that end a sequence, from ``config.json``; may be empty.
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_position_embeddings: int
    rope: RopeConfig
    rms_norm_eps: float = 1e-6
    qkv_bias: bool = False
    o_bias: bool = False
    qk_norm: bool = False
    tie_word_embeddings: bool = False
    dtype: str = "float32"
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()

    def kv_bytes_per_token(self, dtype_bytes: int) -> int:
        """Bytes of keys and values that one token leaves in the cache, over all layers."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * dtype_bytes


@dataclass(frozen=True, slots=True)
class CacheConfig:
    """The paged KV cache.

    Give the size of the pool at most one way; by default it holds ``max_model_len`` tokens for every request that may
    run, within half of the free memory.

    Attributes:
        block_size: tokens a block.
        num_blocks: blocks in the pool.
        memory_bytes: bytes of the pool.
        gpu_memory_utilization: share of the GPU's memory that weights and pool may take (CUDA only).
        swap_bytes: host memory of a rank for the blocks of requests that give way, in bytes; 0 computes them again.
    """

    block_size: int = 256
    num_blocks: int | None = None
    memory_bytes: int | None = None
    gpu_memory_utilization: float = 0.9
    swap_bytes: int = 0

    def __post_init__(self) -> None:
        _check_positive_int("block_size", self.block_size, 65536)
        _check_positive_int("num_kv_blocks", self.num_blocks, 2**31 - 1, optional=True)
        _check_positive_int("kv_memory", self.memory_bytes, 2**60, optional=True)
        if self.num_blocks is not None and self.memory_bytes is not None:
            raise ConfigError("num_kv_blocks and kv_memory both size the KV pool; give one of them")
        value = self.gpu_memory_utilization
        if not isinstance(value, (int, float)) or isinstance(value, bool) or not 0 < value <= 1:
            raise ConfigError(f"gpu_memory_utilization={value!r}; accepted: a number above 0, at most 1")
        _check_int("swap_space in bytes", self.swap_bytes, 2**60)


SCHEDULERS = ("medha", "static", "orca", "sarathi", "vllm", "token-budget")
ADMISSIONS = ("all", "refuse", "relegate")


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """Who runs next, and the budgets of one step.

    Attributes:
        scheduler: ``medha``, or a classical one: ``static``, ``orca``, ``sarathi``, ``vllm``, ``token-budget``.
        policy: order of prefills of the medha scheduler: ``fcfs``, ``sjf``, ``srpt``, ``edf``, ``lrs``, ``ilrs``,
            ``lars``, ``priority`` (class first, then lars) or ``priority:NAME``, ``package.module:name``, or a function
            of (columns, now_s); see :mod:`medha.sched.policy`.
        max_num_seqs: requests started and not finished at once, and rows of a batch.
        max_batch_tokens: query tokens of a batch.
        chunk_size: query tokens of one prefill in a batch; None is whatever the time budget holds with the medha
            scheduler, ``max_batch_tokens`` with ``vllm``, and 512 with the others that cut prompts into chunks.
        t_target_s: seconds that a batch may take. None derives it from the tightest TPOT objective among the running
            decodes and the depth, and is ``quantum_s`` where there is none.
        quantum_s: seconds of a batch when no decode asks for less: how long a running prefill may hold up the others.
        rho_max: most of a batch's prefill time that a long prefill yields to short ones, from its slack; 0 is no space
            sharing.
        long_threshold: prompts of so many tokens are long: one of them a batch and group, and it yields.
        late_share: share of a batch's prefill time for requests that are late or were passed over; 0 is no guard.
        patience_s: seconds without a chunk after which a request counts as passed over.
        min_chunk: tokens below which a chunk is not efficient, unless it ends its prompt: reading the KV cache is then
            not hidden behind arithmetic (the paper, v4 section 3.2, gives about 40).
        chunk_granularity: chunks are multiples of it, unless they end their prompt.
        deadline_floor_s, deadline_factor: a request without a TTFT objective is due ``max(floor, factor * its predicted
            prefill time alone)`` after its arrival.
        depth: batches in flight at most; None is one a stage and one more, or 1 with a single stage.
        max_kv_per_group: KV tokens of one request on one KV-parallel group, rounded to whole blocks; a request
            takes the next group when it has as many. None is as many as a chunk of ``min_chunk`` fills a batch's time
            with, at least an even share of the longest request, and at most the pool.
        overcommit: let requests take whatever KV memory is free instead of only what keeps everybody's end possible;
            where a running one then finds none, another gives way and is computed again later.
        stream: chunks of one prompt follow each other into the pipeline before the one before has left it: stream
            pipeline parallelism. False is pipelined micro-batches as in Sarathi-Serve and vLLM: a prompt's next chunk
            waits until the one before has left the last stage, and other requests fill the stages meanwhile. Predicted
            prefill times, and with them deadlines and slack, are those of a stream in either case.
        decode_lag: 1 lets a request's next token be scheduled while the one before is computed, so that the host
            prepares a batch while the device runs another; what turns out to come after a request's end is dropped. It
            needs one rank, and ``depth`` is then 2. 0 waits for each token. None is 1 on CUDA with one rank, else 0.
        admission: what becomes of a request whose own TTFT objective could not be met even if it ran next: ``all``
            serves it as any other, ``refuse`` does not take it, ``relegate`` serves it without a deadline, after
            all others of its class. Only ``medha`` predicts, so with another scheduler it is ``all``.
        num_swap_blocks: blocks of host memory of each group; an engine finds it from its ``swap_space``.
        swap_block_s: seconds in which a block moves to host memory or back; an engine measures it at start.
    """

    scheduler: str = "medha"
    policy: str | Callable[[Any, float], Any] = field(default="lars", repr=False)
    max_num_seqs: int = 256
    max_batch_tokens: int = 2048
    chunk_size: int | None = None
    depth: int | None = None
    max_kv_per_group: int | None = None
    t_target_s: float | None = None
    quantum_s: float = 0.25
    rho_max: float = 0.4
    long_threshold: int = 8192
    late_share: float = 0.1
    patience_s: float = 10.0
    min_chunk: int = 64
    chunk_granularity: int = 16
    deadline_floor_s: float = 1.0
    deadline_factor: float = 5.0
    overcommit: bool = False
    stream: bool = True
    decode_lag: int | None = None
    admission: str = "all"
    num_swap_blocks: int = 0
    swap_block_s: float = 0.0

    def __post_init__(self) -> None:
        _check_choice("scheduler", self.scheduler, SCHEDULERS)
        _check_choice("admission", self.admission, ADMISSIONS)
        if self.scheduler != "medha" and self.admission != "all":
            raise ConfigError(
                f"admission={self.admission!r} needs predictions, which scheduler={self.scheduler!r} does not make; "
                "accepted: all"
            )
        if self.scheduler != "medha" and self.chunk_size is None:
            object.__setattr__(self, "chunk_size", self.max_batch_tokens if self.scheduler == "vllm" else 512)
        _check_positive_int("max_num_seqs", self.max_num_seqs, 65536)
        _check_positive_int("max_batch_tokens", self.max_batch_tokens, 2**24)
        _check_positive_int("chunk_size", self.chunk_size, 2**24, optional=True)
        for name in ("long_threshold", "min_chunk", "chunk_granularity"):
            _check_positive_int(name, getattr(self, name), 2**31 - 1)
        if self.t_target_s is not None:
            _check_seconds("t_target_s", self.t_target_s)
        for name in ("quantum_s", "deadline_floor_s", "deadline_factor"):
            _check_seconds(name, getattr(self, name))
        _check_seconds("patience_s", self.patience_s, may_be_inf=True)
        for name in ("rho_max", "late_share"):
            value = getattr(self, name)
            if not isinstance(value, (int, float)) or isinstance(value, bool) or not 0 <= value < 1:
                raise ConfigError(f"{name}={value!r}; accepted: a number from 0 to below 1")
        for name in ("overcommit", "stream"):
            if not isinstance(getattr(self, name), bool):
                raise ConfigError(f"{name}={getattr(self, name)!r}; accepted: True or False")
        _check_positive_int("depth", self.depth, 1024, optional=True)
        if self.decode_lag is not None and (type(self.decode_lag) is not int or self.decode_lag not in (0, 1)):
            raise ConfigError(f"decode_lag={self.decode_lag!r}; accepted: 0, 1 or None")
        if self.decode_lag == 1 and self.depth not in (None, 2):
            raise ConfigError(f"depth={self.depth!r} with decode_lag=1; accepted: 2")
        _check_positive_int("max_kv_per_group", self.max_kv_per_group, 2**31 - 1, optional=True)
        _check_int("num_swap_blocks", self.num_swap_blocks, 2**31 - 1)
        seconds = self.swap_block_s
        if not isinstance(seconds, (int, float)) or isinstance(seconds, bool) or not 0 <= seconds < math.inf:
            raise ConfigError(f"swap_block_s={seconds!r}; accepted: a finite number from 0")

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

    Attributes:
        tp: tensor-parallel degree: heads and MLP columns of each layer are split.
        spp: stream-pipeline stages: layers are split.
        kvp: KV-cache-parallel groups: each holds the whole model; the KV cache of a long request is split over them.
        tp_forward: ``local`` runs plain tensors with one all-reduce per row-split layer; ``dtensor`` runs the DTensor
            modules themselves, the reference.
        dist_timeout_s: how long a collective or transfer may take before it is an error.
    """

    tp: int = 1
    spp: int = 1
    kvp: int = 1
    tp_forward: str = "local"
    dist_timeout_s: float = 120.0

    def __post_init__(self) -> None:
        for name in ("tp", "spp", "kvp"):
            _check_positive_int(name, getattr(self, name), 65536)
        _check_choice("tp_forward", self.tp_forward, ("local", "dtensor"))
        value = self.dist_timeout_s
        if not isinstance(value, (int, float)) or isinstance(value, bool) or not 1 <= value <= 86400:
            raise ConfigError(f"dist_timeout={self.dist_timeout_s!r}; accepted: seconds from 1 to 86400")

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
    """Everything an engine is told at start, apart from the requests.

    Attributes:
        model: local Hugging Face folder, or hub id.
        tokenizer: folder or hub id of the tokenizer when it is not the model's.
        revision: hub revision.
        dtype: ``auto`` (the checkpoint's), or one of ``float32``, ``bfloat16``, ``float16``.
        device: ``auto`` (CUDA when there is one), ``cpu``, ``cuda`` or ``cuda:N``.
        attention_backend: ``torch``, ``flashinfer``, or ``auto``: FlashInfer on CUDA where it is installed and has
            kernels for the model's heads, else torch.
        cuda_graphs: run batches of decodes alone from CUDA graphs, on CUDA with FlashInfer and without tensor
            parallelism; False (vLLM's ``enforce_eager``) never does.
        max_model_len: longest prompt plus output in tokens; by default what the model claims.
        rope_scaling: replaces the model's RoPE scaling: a type name, or a mapping as in ``rope_parameters``.
        hf_overrides: merged over ``config.json``.
        load_format: ``auto`` (safetensors), or ``dummy`` (random weights, for benchmarks).
        seed: of dummy weights and of requests that bring none.
        num_threads: CPU threads; None leaves torch's choice.
        profile: JSON file that ``medha profile`` wrote for this machine, model and layout; None predicts step times
            from a spec for hardware of the kind, corrected while running.
    """

    model: str
    tokenizer: str | None = None
    revision: str | None = None
    dtype: str = "auto"
    device: str = "auto"
    attention_backend: str = "auto"
    cuda_graphs: bool = True
    max_model_len: int | None = None
    rope_scaling: str | dict[str, Any] | None = None
    hf_overrides: dict[str, Any] | None = None
    load_format: str = "auto"
    seed: int = 0
    num_threads: int | None = None
    profile: str | None = None
    cache: CacheConfig = field(default_factory=CacheConfig)
    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)

    def __post_init__(self) -> None:
        if not isinstance(self.model, str) or not self.model:
            raise ConfigError(f"model={self.model!r}; accepted: a folder or a hub id")
        _check_choice("dtype", self.dtype, ("auto", *DTYPES))
        _check_choice("attention_backend", self.attention_backend, ATTENTION_BACKENDS)
        if not isinstance(self.cuda_graphs, bool):
            raise ConfigError(f"cuda_graphs={self.cuda_graphs!r}; accepted: True or False")
        _check_choice("load_format", self.load_format, ("auto", "safetensors", "dummy"))
        _check_positive_int("max_model_len", self.max_model_len, 2**31 - 1, optional=True)
        _check_positive_int("num_threads", self.num_threads, 4096, optional=True)
        if not isinstance(self.seed, int) or isinstance(self.seed, bool) or abs(self.seed) >= 2**63:
            raise ConfigError(f"seed={self.seed!r}; accepted: a 64-bit integer")
        for name in ("tokenizer", "revision", "profile"):
            value = getattr(self, name)
            if value is not None and (not isinstance(value, str) or not value):
                raise ConfigError(f"{name}={value!r}; accepted: a string")
        if self.rope_scaling is not None and not isinstance(self.rope_scaling, (str, dict)):
            raise ConfigError(f"rope_scaling={self.rope_scaling!r}; accepted: a type name or a mapping")
        if self.hf_overrides is not None and not isinstance(self.hf_overrides, dict):
            raise ConfigError(f"hf_overrides={self.hf_overrides!r}; accepted: a mapping")
        if self.scheduler.decode_lag == 1 and self.parallel.world_size > 1:
            raise ConfigError(
                f"decode_lag=1 with {self.parallel.world_size} ranks: the others get a token from the first one; "
                "accepted: 0 or None"
            )
        whole = whole_blocks(self.scheduler.max_kv_per_group, self.cache.block_size)
        if whole != self.scheduler.max_kv_per_group:
            object.__setattr__(self, "scheduler", dataclasses.replace(self.scheduler, max_kv_per_group=whole))
        if not isinstance(self.device, str) or not re.fullmatch(r"auto|cpu|cuda(:\d+)?", self.device):
            raise ConfigError(f"device={self.device!r}; accepted: auto, cpu, cuda, cuda:N")

    @classmethod
    def from_flat(cls, model: str, **options: Any) -> EngineConfig:
        """Build the tree from flat keyword arguments, the names that :class:`medha.LLM` takes.

        vLLM's names are accepted as aliases (``max_num_batched_tokens``, ``num_gpu_blocks_override``, ...), and its
        ``enforce_eager`` as the opposite of ``cuda_graphs``; what only others have is in
        :mod:`medha.foreign_options`. ``kv_memory`` is bytes, ``swap_space`` GiB as in vLLM, or both text (``4GiB``);
        lengths in tokens may be text, too (``128K``).

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
            if canonical not in _OPTION_SECTIONS:
                near = difflib.get_close_matches(name, [*_OPTION_SECTIONS, *OPTION_ALIASES], n=1)
                hint = f"; did you mean {near[0]}?" if near else f"; known: {', '.join(sorted(_OPTION_SECTIONS))}"
                raise ConfigError(f"unknown option {name}={value!r}{hint}")
            if canonical in seen:
                raise ConfigError(f"{canonical} is given twice, under its own name or an alias")
            seen.add(canonical)
            if canonical == "swap_space":
                value = _swap_bytes(given := value)
                if value is math.nan:
                    raise ConfigError(f"{name}={given!r}; accepted: GiB from 0 to {2**30}, or text as in '512MiB'")
            elif canonical == "kv_memory":
                value = _size(name, value, "4GiB")
            elif canonical in _LENGTHS:
                value = _size(name, value, "128K")
            elif canonical == "dtype" and isinstance(value, str):
                value = _DTYPE_ALIASES.get(value, value)
            section, field_name = _OPTION_SECTIONS[canonical]
            sections[section][field_name] = value
        return cls(
            model,
            cache=CacheConfig(**sections["cache"]),
            scheduler=SchedulerConfig(**sections["scheduler"]),
            parallel=ParallelConfig(**sections["parallel"]),
            **sections[""],
        )


ATTENTION_BACKENDS = ("auto", "torch", "flashinfer")

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

# Lengths in tokens, which may be text.
_LENGTHS = ("max_model_len", "max_batch_tokens", "chunk_size", "max_kv_per_group", "long_threshold")

# What an engine finds out itself: given, it could contradict the memory that there is.
_FOUND_AT_START = ("num_swap_blocks", "swap_block_s")

_OPTION_SECTIONS: dict[str, tuple[str, str]] = {
    "block_size": ("cache", "block_size"),
    "num_kv_blocks": ("cache", "num_blocks"),
    "kv_memory": ("cache", "memory_bytes"),
    "gpu_memory_utilization": ("cache", "gpu_memory_utilization"),
    "swap_space": ("cache", "swap_bytes"),
    **{f.name: ("scheduler", f.name) for f in dataclasses.fields(SchedulerConfig) if f.name not in _FOUND_AT_START},
    "tp": ("parallel", "tp"),
    "spp": ("parallel", "spp"),
    "kvp": ("parallel", "kvp"),
    "tp_forward": ("parallel", "tp_forward"),
    "dist_timeout": ("parallel", "dist_timeout_s"),
    **{
        f.name: ("", f.name)
        for f in dataclasses.fields(EngineConfig)
        if f.name not in ("model", "cache", "scheduler", "parallel")
    },
}


def whole_blocks(max_kv_per_group: int | None, block_size: int) -> int | None:
    """What of it blocks fill, one at least; says so where that is another number."""
    if max_kv_per_group is None or max_kv_per_group % block_size == 0:
        return max_kv_per_group
    whole = max(1, max_kv_per_group // block_size) * block_size
    logger.warning("max_kv_per_group=%d is taken as %d, blocks of %d tokens", max_kv_per_group, whole, block_size)
    return whole


def parse_size(text: str) -> int:
    """A size in bytes or a length in tokens, in any of its spellings.

    As in vLLM ``1k`` is 1,000 and ``1K`` 1,024, likewise m, g and t; with a B (``KB``) they are 1,000s and with an i
    (``KiB``, ``Ki``) 1,024s in either case.

    Raises:
        ConfigError: not a positive number with a known unit.
    """
    match = re.fullmatch(r"\s*(\d{1,30}(?:\.\d{1,30})?)\s*(?:([kmgt])(i?))?(b?)\s*", text, flags=re.IGNORECASE)
    if not match:
        raise ConfigError(f"size {text!r}; accepted: a number, alone or with k, K, KB, KiB (or M, G, T so)")
    unit = match[2] or ""
    is_binary = match[3] or (unit.isupper() and not match[4])
    size = int(Decimal(match[1]) * (1024 if is_binary else 1000) ** " kmgt".index(unit.lower() or " "))
    if size < 1:
        raise ConfigError(f"size {text!r}; accepted: at least 1")
    return size


def _size(name: str, value: Any, example: str) -> Any:
    """The number of a size or length that is text; anything else is left to its check."""
    if not isinstance(value, str):
        return value
    try:
        return parse_size(value)
    except ConfigError as error:
        raise ConfigError(f"{name}={value!r}; accepted: as in {example!r} ({error})") from None


def _swap_bytes(value: Any) -> Any:
    """Bytes of ``swap_space``: a number, be it text, is GiB as in vLLM; what is none is left to its check."""
    try:
        gib = float(value) if isinstance(value, (str, int, float)) and not isinstance(value, bool) else math.nan
    except (ValueError, OverflowError):
        return _size("swap_space", value, "4GiB")
    return int(gib * 2**30) if 0 <= gib <= 2**30 else math.nan


def _check_int(name: str, value: Any, high: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value <= high:
        raise ConfigError(f"{name}={value!r}; accepted: an integer from 0 to {high}")


def _check_positive_int(name: str, value: Any, high: int, *, optional: bool = False) -> None:
    if optional and value is None:
        return
    if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= high:
        raise ConfigError(f"{name}={value!r}; accepted: an integer from 1 to {high}")


def _check_seconds(name: str, value: Any, *, may_be_inf: bool = False) -> None:
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool) and value > 0
    if not is_number or (value == math.inf and not may_be_inf):
        raise ConfigError(f"{name}={value!r}; accepted: a {'' if may_be_inf else 'finite '}number above 0")


def _check_choice(name: str, value: Any, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise ConfigError(f"{name}={value!r}; accepted: {', '.join(choices)}")
