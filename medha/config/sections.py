"""Sections of an engine's configuration: the KV cache, the scheduler, the layout.

Each option is declared here once, which makes the file long: type, default, help, how it is read and what is accepted.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import Any

from medha.config import fields as panels
from medha.config.fields import (
    COUNT,
    FEW,
    POSITIVE,
    SHARE,
    Check,
    are_sp_sizes,
    are_weights,
    as_gib,
    as_length,
    as_rate,
    as_size,
    as_sp_sizes,
    check_options,
    choice,
    finite,
    integer,
    number,
    option,
    option_of,
)
from medha.config.model_config import ModelConfig
from medha.errors import ConfigError, ParallelConfigError

SCHEDULERS = ("medha", "static", "orca", "sarathi", "vllm")
CDSP = "cdsp"
"""Chunkwise dynamic sequence parallelism, whose groups do not decode."""
PUBLISHED = ("lars", "ilrs", "lrs", "edf", "fcfs")
"""Policies of the papers, which have no guard; of them ``lars`` alone is published with space sharing."""
_MEDHAS = ("policy", "rho_max", "long_threshold", "late_share", "interactive_share", "patience_s")
_UTILIZATION = number("a number above 0, at most 1", lambda share: 0 < share <= 1)
_PATIENCE = number("a number above 0", lambda seconds: seconds > 0)
_memory, _parallel = partial(option, panels.MEMORY), partial(option, panels.PARALLEL)
_scheduling, _serving = partial(option, panels.SCHEDULING), partial(option, panels.SERVING)
_simulated, _dealt = partial(option, panels.SIMULATED), partial(option, panels.DEALT)


@dataclass(frozen=True, slots=True)
class CacheConfig:
    """The paged KV cache.

    Give the size of the pool at most one way; by default it holds ``max_model_len`` tokens for every request that may
    run, within half of the memory that is free beside the weights.
    """

    block_size: int = _memory(256, "Tokens of a KV block.", FEW)
    num_blocks: int | None = _memory(
        None, "Blocks of the KV pool.", COUNT, name="num_kv_blocks", shown="what the memory holds"
    )
    memory_bytes: int | None = _memory(
        None, "Size of the KV pool, as 4GiB.", integer(1, 2**60), name="kv_memory", kind=str, shown="none", read=as_size
    )
    gpu_memory_utilization: float = _memory(
        0.9, "Share of the GPU's memory that weights and pool may take.", _UTILIZATION
    )
    swap_bytes: int = _memory(
        0,
        "Host memory of a rank for KV blocks of prefixes and of requests that give way: GiB, or as 512MiB; 0 is none.",
        integer(0, 2**60),
        name="swap_space",
        kind=str,
        shown="0",
        read=as_gib,
    )

    def __post_init__(self) -> None:
        check_options(self)
        if self.num_blocks is not None and self.memory_bytes is not None:
            raise ConfigError("num_kv_blocks and kv_memory both size the KV pool; give one of them")


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """Who runs next, and the budgets of one step."""

    scheduler: str = _scheduling(
        "medha",
        f"One of {', '.join(SCHEDULERS)} (all but medha are classical), or cdsp: without decode instances for requests "
        "of one new token.",
        choice(*SCHEDULERS, CDSP),
    )
    # or a function of (columns, now_s), from Python: see medha.sched.policy
    policy: str | Callable[[Any, float], Any] = _scheduling(
        "priority",
        "Order of prefills of the medha scheduler: priority (class first, then srpt), priority:NAME, srpt, lars, ilrs, "
        "lrs, edf, sjf, fcfs or package.module:name. Named alone, lars, ilrs, lrs, edf and fcfs are as published: no "
        "guard, and sharing with lars only.",
        repr=False,
    )
    max_num_seqs: int = _serving(256, "Requests started and not finished at once; rows of a batch.", FEW)
    max_batch_tokens: int = _scheduling(2048, "Query tokens of a batch.", integer(1, 2**24), read=as_length)
    chunk_size: int | None = _scheduling(
        None,
        "Query tokens of one prefill in a batch.",
        integer(1, 2**24),
        read=as_length,
        shown="what the batch's time holds; --max-batch-tokens with vllm, 512 with other schedulers",
    )
    depth: int | None = _parallel(
        None, "Batches in flight at most.", integer(1, 1024), shown="one a stage and one more; 1 with a single stage"
    )
    max_kv_per_group: int | None = _parallel(
        None,
        "KV tokens of a request on one KV-parallel group, in whole blocks; with more it takes the next group too.",
        COUNT,
        read=as_length,
        shown="the pool; of a request for which no group has room, or beside which others have less to read, what a "
        "chunk of --min-chunk tokens fills a batch's time with, at least an even share of the longest",
    )
    ring: bool = _parallel(
        False,
        "Spread a request that needs several KV-parallel groups over all of these at once; each computes a share of a "
        "chunk, by a ring, where that is predicted faster. Without prefix caching, --overcommit and swap.",
    )
    t_target_s: float | None = _scheduling(
        None,
        "Seconds that a batch may take.",
        POSITIVE,
        shown="from the tightest TPOT objective among the running decodes and the depth, else --quantum-s",
    )
    quantum_s: float | None = _scheduling(
        None,
        "Seconds of a batch when no decode has a TPOT objective: what a prefill holds up.",
        POSITIVE,
        shown="of the least chunk, 256 tokens or more, that the machine reads at 85 % of its speed",
    )
    rho_max: float | None = _serving(
        None,
        "Most of a batch's prefill time that a long prefill yields to short ones; 0 is no space sharing.",
        SHARE,
        shown="0.4; 0 with ilrs, lrs, edf and fcfs",
    )
    long_threshold: int = _serving(
        8192, "Prompt tokens from which a prefill is long: one a batch and group, and it yields.", COUNT, read=as_length
    )
    late_share: float | None = _serving(
        None,
        "Share of a batch's prefill time for requests that are late or were passed over (the guard); 0 is none.",
        SHARE,
        shown="0.1; 0 with lars, ilrs, lrs, edf and fcfs",
    )
    interactive_share: float | None = _serving(
        None,
        "Seconds of decodes, and of prompts of up to four quanta, for one of longer prefills.",
        SHARE,
        shown="0.125; 0 with lars, ilrs, lrs, edf and fcfs",
    )
    patience_s: float = _serving(
        10.0, "Seconds without a chunk after which a request counts as passed over; inf is never.", _PATIENCE
    )
    # Below it the KV cache is read no faster than the arithmetic that it hides behind; the paper, v4 section 3.2, gives
    # about 40.
    min_chunk: int = _scheduling(64, "Tokens below which a chunk is not efficient, unless it ends its prompt.", COUNT)
    chunk_granularity: int = _scheduling(16, "Chunks are multiples of it, unless they end their prompt.", COUNT)
    deadline_floor_s: float = _serving(
        1.0, "A request without a TTFT objective is due no earlier after its arrival, seconds.", POSITIVE
    )
    deadline_factor: float = _serving(
        5.0,
        "Without a TTFT objective a request is due so many times its predicted prefill time after its arrival.",
        POSITIVE,
    )
    overcommit: bool = _serving(
        False,
        "Let requests take whatever KV memory is free, not only what keeps everybody's end possible; where a running "
        "one then finds none, another gives way and is computed again.",
    )
    prefix_caching: bool | None = _serving(
        None,
        "Keep computed blocks when their request ends, for those that begin with the same tokens.",
        shown="on; off in benchmarks",
    )
    # Predicted prefill times, and with them deadlines and slack, are those of a stream in either case.
    stream: bool = _parallel(
        True,
        "Whether a prompt's next chunk enters the pipeline before the one before has left it (stream pipeline "
        "parallelism) or waits meanwhile, as in Sarathi-Serve and vLLM.",
    )
    async_scheduling: bool | None = _scheduling(
        None,
        "Schedule a request's next token before the one before is known, so that a batch is made, sent and prepared "
        "while another computes.",
        shown="on; off without stages where one machine's ranks compute on all its cores, and in such simulations",
    )
    tenant_weights: dict[str, float] | None = _serving(
        None,
        "JSON object of the tenants' shares of the compute time, as '{\"batch\": 0.5}'.",
        Check("a mapping of names to numbers above 0", are_weights),
        kind=str,
        shown="1 each",
    )
    admission: str = _serving(
        "all",
        "A request whose own TTFT objective could not be met even if it ran next: all (serve it as others), refuse, "
        "relegate (serve it without a deadline, after all others of its class).",
        choice("all", "refuse", "relegate"),
    )
    num_swap_blocks: int = _simulated(
        0, "KV blocks of host memory of a group, for prefixes and requests that give way.", integer(0, 2**31 - 1)
    )
    swap_block_s: float = _simulated(0.0, "Seconds in which a block moves to host memory or back.", finite(0))
    sp_sizes: tuple[int, ...] | None = _dealt(
        None,
        "Numbers of groups that a chunk may be dealt to, powers of two, comma separated; one alone is fixed groups.",
        Check("ascending powers of two", are_sp_sizes),
        kind=str,
        shown="all up to --kvp",
        read=as_sp_sizes,
    )
    max_chunks: int | None = _dealt(None, "Chunks of a prompt; 1 is one SP size a request.", COUNT, shown="any number")
    improvement_rate: float | str = _dealt(
        0.3,
        "Share of its TTFT that a request must save to get more groups, or a file of tools.best_rates.",
        Check("a number from 0 to below 1, or a file", lambda rate: isinstance(rate, str) or SHARE.holds(rate)),
        kind=str,
        shown="0.3",
        read=as_rate,
    )
    plan_order: str = _dealt(
        "arrival",
        "Who is planned first: arrival (as published: planned once, then kept), or a policy such as lrs, edf or lars: "
        "who has not started is planned anew in its order.",
    )

    def __post_init__(self) -> None:
        check_options(self)
        if self.scheduler != "medha" and self.admission != "all":
            what = f"admission={self.admission!r} needs predictions, which scheduler={self.scheduler!r} does not make"
            raise ConfigError(f"{what}; accepted: all")
        if self.ring and self.scheduler != "medha":
            raise ConfigError(f"ring with scheduler={self.scheduler!r}; accepted: medha")
        kept = ("prefix_caching", "overcommit", "num_swap_blocks")  # or moved, or preempted: nothing that is dealt is
        if self.ring:
            self._do_without("ring", *kept)
        if self.scheduler == CDSP:  # its chunks are as long as planned
            self._do_without("scheduler='cdsp'", *kept, "async_scheduling", "chunk_size", "depth")
        elif self.scheduler != "medha" and self.chunk_size is None:
            object.__setattr__(self, "chunk_size", self.max_batch_tokens if self.scheduler == "vllm" else 512)

    def _do_without(self, what: str, *names: str) -> None:
        """Refuse options that something does not have, and turn those off that are on where nothing is said."""
        for name in names:
            if getattr(self, name):
                raise ConfigError(f"{name}={getattr(self, name)!r} with {what}; accepted: without it")
            if name in ("prefix_caching", "async_scheduling"):
                object.__setattr__(self, name, False)

    def unread(self) -> list[str]:
        """Options that were given and that the scheduler does not read."""
        dealt = [f.name for f in fields(self) if (said := option_of(f)) is not None and said.panel == panels.DEALT]
        names = {"medha": dealt, CDSP: _MEDHAS}.get(self.scheduler, (*_MEDHAS, *dealt, "tenant_weights"))
        return [f.name for f in fields(self) if f.name in names and getattr(self, f.name) != f.default]

    @property
    def yielded_share(self) -> float:
        """``rho_max``, where none is given that of the policy."""
        published = 0.0 if self.policy in PUBLISHED and self.policy != "lars" else 0.4
        return published if self.rho_max is None else self.rho_max

    @property
    def guarded_share(self) -> float:
        """``late_share``, where none is given that of the policy."""
        published = 0.0 if self.policy in PUBLISHED else 0.1
        return published if self.late_share is None else self.late_share

    @property
    def spare_share(self) -> float:
        """``interactive_share``, where none is given that of the policy; 0 where decodes skip batches."""
        published = 0.0 if self.policy in PUBLISHED else 0.125
        return 0.0 if self.period > 1 else published if self.interactive_share is None else self.interactive_share

    @property
    def num_in_flight(self) -> int:
        """Batches in flight at most: ``depth``, where it is known."""
        return self.depth or (2 if self.async_scheduling else 1)

    @property
    def period(self) -> int:
        """In how many batches a decode comes round again: where its token need not be known, in one per stage."""
        return max(self.num_in_flight - 1, 1) if self.async_scheduling else self.num_in_flight

    def check_layout(self, parallel: ParallelConfig) -> None:
        """Refuse a layout that the scheduler cannot use."""
        if self.scheduler == CDSP and parallel.spp > 1:
            raise ConfigError(f"spp={parallel.spp} with scheduler='cdsp'; accepted: 1, its chunks are of whole groups")


@dataclass(frozen=True, slots=True)
class ParallelConfig:
    """How one model is spread over ranks: ``tp * spp * kvp`` of them, and behind these the decode instances.

    Ranks are numbered with ``tp`` fastest, so that a tensor-parallel group lies inside a node, and ``kvp`` outermost. A
    decode instance is one more group, with one stage and a tensor-parallel size of its own.
    """

    tp: int = _parallel(
        1, "Tensor-parallel ranks: heads and MLP columns of each layer are split.", FEW, flags=("--tp", "-tp")
    )
    spp: int = _parallel(1, "Stream-pipeline stages: layers are split.", FEW, flags=("--spp", "-pp"))
    kvp: int = _parallel(
        1,
        "KV-parallel groups: each holds the whole model, and a part of the KV of a long request.",
        FEW,
        flags=("--kvp", "-kvp"),
    )
    tp_forward: str = _parallel(
        "local",
        "local (plain tensors, one all-reduce for each row-split layer) or dtensor (DTensor's modules, the reference).",
        choice("local", "dtensor"),
    )
    dist_timeout_s: float = _parallel(
        120.0,
        "Seconds that a collective or transfer may take, and the computing that it waits for.",
        number("seconds from 1 to 86400", lambda value: 1 <= value <= 86400),
        name="dist_timeout",
    )
    decode_replicas: int = _parallel(
        0,
        "Decode instances: each has all layers on ranks of its own, behind the others, and takes a request over with "
        "its KV cache when its first token is drawn.",
        integer(0, 4096),
    )
    decode_tp: int | None = _parallel(None, "Tensor-parallel ranks of a decode instance.", FEW, shown="--tp")
    transfer_buffers: int = _parallel(
        4, "Requests that a decode instance takes over at once, and its ranks' staging buffers.", integer(1, 1024)
    )

    def __post_init__(self) -> None:
        check_options(self)

    def check_model(self, model: ModelConfig) -> None:
        """Refuse degrees that do not split a model."""
        if self.decode_tp is not None and not self.decode_replicas:
            raise ParallelConfigError(f"decode_tp={self.decode_tp} without decode_replicas; accepted: one or more")
        if self.spp > model.num_layers:
            what = f"spp={self.spp} stages for {model.num_layers} layers"
            raise ParallelConfigError(f"{what}; accepted: 1 to {model.num_layers}")
        heads, kv_heads, features = model.num_heads, model.num_kv_heads, model.intermediate_size
        divisors = [tp for tp in range(1, heads + 1) if heads % tp == 0 and features % tp == 0]
        fitting = [tp for tp in divisors if kv_heads % tp == 0 or tp % kv_heads == 0]
        for name, tp in (("tp", self.tp), ("decode_tp", self.decode_tp or self.tp)):
            if tp not in fitting:
                parts = f"{heads} query heads, {kv_heads} KV heads and {features} MLP features"
                accepted = ", ".join(map(str, fitting))
                raise ParallelConfigError(f"{name}={tp} does not divide {parts}; accepted: {accepted}")

    @property
    def world_size(self) -> int:
        """Ranks in all."""
        return self.num_prefill_ranks + self.decode_replicas * (self.decode_tp or self.tp)

    def __str__(self) -> str:
        behind = f" + {self.decode_replicas} x decode_tp={self.decode_tp or self.tp}" if self.decode_replicas else ""
        return f"tp={self.tp} x spp={self.spp} x kvp={self.kvp}{behind}"

    @property
    def num_prefill_ranks(self) -> int:
        """Ranks that are of no decode instance."""
        return self.tp * self.spp * self.kvp

    @property
    def num_groups(self) -> int:
        """KV-parallel groups, and behind them the decode instances."""
        return self.kvp + self.decode_replicas

    def of_group(self, group: int) -> ParallelConfig:
        """The layout of a group alone: of a decode instance one with its own degrees."""
        if group < self.kvp:
            return replace(self, decode_replicas=0, decode_tp=None)
        return replace(self, tp=self.decode_tp or self.tp, spp=1, kvp=1, decode_replicas=0, decode_tp=None)

    def coordinates(self, rank: int) -> tuple[int, int, int]:
        """(group, stage, tp_rank) of a global rank."""
        if (behind := rank - self.num_prefill_ranks) >= 0:
            instance, tp_rank = divmod(behind, self.decode_tp or self.tp)
            return self.kvp + instance, 0, tp_rank
        return rank // (self.spp * self.tp), rank // self.tp % self.spp, rank % self.tp

    def rank_of(self, *, stage: int, tp_rank: int, kvp_rank: int = 0) -> int:
        """The global rank at these coordinates; ``kvp_rank`` is the group."""
        if (instance := kvp_rank - self.kvp) >= 0:
            return self.num_prefill_ranks + instance * (self.decode_tp or self.tp) + tp_rank
        return (kvp_rank * self.spp + stage) * self.tp + tp_rank

    def layers_of(self, stage: int, num_layers: int) -> range:
        """The layers of a stage: an even split, the first stages taking one more where it does not divide."""
        size, extra = divmod(num_layers, self.spp)
        start = stage * size + min(stage, extra)
        return range(start, start + size + (stage < extra))
