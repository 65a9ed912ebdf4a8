"""What a seed of the fuzzer draws: a checkpoint, a layout, options, requests and a clock, all of it plain data.

A case prints as Python, and does the same wherever it runs, as its time is its own. What :func:`draw` makes of a seed
changes whenever it is edited: a failure that is to be kept is kept as its case.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from math import inf
from typing import Any

import numpy as np

from medha.params import PRIORITIES
from medha.sched.policy import Columns, Floats

_LETTERS = "abcde \n"


@dataclass(frozen=True)
class Model:
    """A random checkpoint with a tokenizer; ``shape`` replaces fields of its ``config.json``.

    Attributes:
        family: of :data:`tests.checkpoints.FAMILIES`.
        stored: dtype of the checkpoint.
        shard_size: of its files, as transformers takes it.
        num_textless: so many of the last ids have no text.
        seed: of its weights and of the text of each id.
    """

    family: str = "llama"
    tied: bool = False
    stored: str = "float32"
    shard_size: str | None = None
    num_textless: int = 0
    shape: dict[str, Any] = field(default_factory=dict)
    eos: tuple[int, ...] = ()
    seed: int = 0

    @property
    def vocab(self) -> int:
        """Size of the vocabulary."""
        return int(self.shape.get("vocab_size", 211))

    @property
    def pieces(self) -> list[str]:
        """The text of each id that has some."""
        rng = random.Random(self.seed)
        pieces: dict[str, None] = {}
        while len(pieces) < self.vocab - self.num_textless:
            pieces["".join(rng.choices(_LETTERS, k=rng.randint(1, 4)))] = None
        return list(pieces)


@dataclass(frozen=True)
class Ask:
    """One request.

    Attributes:
        length, seed: of its random prompt.
        params: of :class:`medha.SamplingParams`.
        at: the step before which it is added.
        abort: so many steps later it is aborted.
        slo: TTFT and TPOT.
        num_shared: so many of its first tokens are those of a document that others share.
    """

    length: int = 8
    seed: int = 0
    params: dict[str, Any] = field(default_factory=lambda: {"temperature": 0.0})
    at: int = 0
    abort: int | None = None
    priority: str = "normal"
    slo: tuple[float | None, float | None] | None = None
    num_shared: int = 0

    @property
    def max_tokens(self) -> int:
        """At most so many tokens come out."""
        return int(self.params.get("max_tokens", 16))


@dataclass(frozen=True)
class Case:
    """One run.

    Attributes:
        layout: tp, spp, kvp.
        decode: decode instances behind these ranks, and tp of each.
        options: others of :class:`medha.LLM`.
        step_s, token_s: what a step takes, and each token of it; both are multiplied by about 1, and in a step of 20 by
            ``spike``.
        abandon: the step before which everything is abandoned, as by an interrupt.
    """

    model: Model = field(default_factory=Model)
    asks: tuple[Ask, ...] = (Ask(),)
    layout: tuple[int, int, int] = (1, 1, 1)
    decode: tuple[int, int] = (0, 0)
    options: dict[str, Any] = field(default_factory=dict)
    step_s: float = 1e-3
    token_s: float = 1e-5
    spike: float = 1.0
    abandon: int | None = None

    @property
    def world(self) -> int:
        """Ranks."""
        tp, spp, kvp = self.layout
        return tp * spp * kvp + self.decode[0] * self.decode[1]


def by_age(columns: Columns, now_s: float) -> Floats:
    """A user's policy."""
    return np.asarray(columns.work_left_s - 0.1 * (now_s - columns.arrival_s))


_OPTIONS: dict[str, list[Any]] = {
    "scheduler": ["medha"] * 6 + ["static", "orca", "sarathi", "sarathi", "vllm"],
    "policy": ["lars", "ilrs", "lrs", "edf", "srpt", "sjf", "fcfs", "priority", "priority:edf", f"{__name__}:by_age"],
    "admission": ["all", "all", "all", "refuse", "relegate"],
    "max_num_seqs": [1, 2, 3, 5, 8, 256],
    "max_batch_tokens": [2, 7, 16, 64, 97, 200, 512, 2048],
    "chunk_size": [None, None, None, 1, 3, 8, 17, 64, 300],
    "depth": [None, None, 1, 2, 3, 4],
    "stream": [True, True, False],
    "t_target_s": [None] * 6 + [1e-6, 1e-4, 0.002, 0.01, 0.1],
    "quantum_s": [1e-6, 0.001, 0.01, 0.25, 5.0],
    "rho_max": [0.0, 0.4, 0.99],
    "long_threshold": [1, 20, 200, 8192],
    "late_share": [0.0, 0.1, 0.5, 0.99],
    "patience_s": [1e-6, 0.01, 10.0, inf],
    "min_chunk": [1, 8, 64, 1000],
    "chunk_granularity": [1, 16, 100],
    "deadline_floor_s": [1.0, 1.0, 1e-6],
    "deadline_factor": [5.0, 5.0, 1e-6, 100.0],
}
_PARAMS: dict[str, list[Any]] = {
    "repetition_penalty": [0.5, 1.3, 5.0],
    "frequency_penalty": [-2.0, 0.5, 2.0],
    "presence_penalty": [-2.0, 0.5, 2.0],
    "logprobs": [0, 1, 20],
    "ignore_eos": [True],
    "output_kind": ["delta", "final_only"],
}
_CUTS: dict[str, list[Any]] = {"top_k": [1, 3, 20, 10**6], "top_p": [1e-6, 0.3, 0.9, 1.0], "min_p": [0.01, 0.5, 1.0]}


def draw(seed: int, ranks: int = 1) -> Case:
    """The case of a seed on so many ranks, some of which may be decode instances."""
    rng = random.Random(f"{seed} on {ranks}, with instances")  # apart, so that all else of a seed stays as it was
    return _draw(seed, ranks) if rng.random() < 0.75 or ranks == 1 else _with_instances(rng, seed, ranks)


def _with_instances(rng: random.Random, seed: int, ranks: int) -> Case:
    """A case on fewer ranks, with the others as decode instances and a scheduler that hands over to them."""
    case = _draw(seed, ranks - (behind := rng.randint(1, ranks - 1)))
    shape, (_, spp, kvp) = case.model.shape, case.layout
    kv_heads, divided = shape["num_key_value_heads"], (shape["num_attention_heads"], shape["intermediate_size"])
    degrees = [
        tp
        for tp in range(1, behind + 1)
        if behind % tp == 0 and not any(n % tp for n in divided) and (kv_heads % tp == 0 or tp % kv_heads == 0)
    ]
    tp, options = rng.choice(degrees), case.options | {"transfer_buffers": rng.choice([1, 1, 2, 4])}
    options |= {"scheduler": "cdsp" if spp == 1 and rng.random() < 0.4 else "medha", "overcommit": False}
    longest = max(ask.length + ask.max_tokens - 1 for ask in case.asks)
    if rng.random() < 0.8:  # else the longest are refused
        options["num_kv_blocks"] = max(options["num_kv_blocks"], -(-longest // options["block_size"]))
    dropped = ["swap_space"]
    if options["scheduler"] == "cdsp":
        dropped += ["chunk_size", "depth", "async_scheduling", "prefix_caching", "admission"]
        options["max_num_seqs"] = max(options["max_num_seqs"], kvp)
        options["num_kv_blocks"] += -(-2 // options["block_size"]) + 1  # by which shares are even
        options |= {"improvement_rate": rng.choice([0.0, 0.3]), "max_chunks": rng.choice([None, 1, 2])}
        options["plan_order"] = rng.choice(["arrival", "arrival", "lrs", "srpt"])
    options = {name: value for name, value in options.items() if name not in dropped}
    return replace(case, decode=(behind // tp, tp), options=options, abandon=None)


def _draw(seed: int, ranks: int) -> Case:
    rng = random.Random(f"{seed} on {ranks}")
    degrees = range(1, ranks + 1)
    # Few stages, as there are few layers; of two layouts more often the one that splits the KV cache.
    layouts = [(t, s, k) for t in degrees for s in degrees[:5] for k in degrees if t * s * k == ranks]
    layout = rng.choices(layouts, [1 + 2 * (kvp > 1) for _, _, kvp in layouts])[0]
    model = _model(rng, layout)
    options = {name: rng.choice(values) for name, values in _OPTIONS.items()}
    is_pressed = rng.random() < 0.6  # memory is so short that who runs gives way again and again
    if is_pressed:
        lengths, counts = [rng.randint(1, 24) for _ in range(4)], [4, 12, 40, 40]
    else:
        budget_s, chunk = options["t_target_s"] or options["quantum_s"], options["chunk_size"] or 1000
        is_slow = min(options["max_batch_tokens"], chunk) < 20 or budget_s < 0.002  # it takes hundreds of batches
        longest = 40 if is_slow else 120 if ranks > 2 else 400
        lengths, counts = [1, 2, *(rng.randint(1, longest) for _ in range(4))], [1, 2, 5, 12, 20]
    span = rng.choice([0, 0, 20, 60])
    num_asks = rng.randint(6, 12) if is_pressed else rng.randint(1, 9)
    asks = [_ask(rng, model, lengths, counts, span) for _ in range(num_asks)]
    options |= _memory(rng, model, layout, asks, is_pressed=is_pressed)
    if is_pressed and not options["overcommit"]:
        options |= {"scheduler": "medha", "policy": rng.choice(["priority", "priority:edf", "priority:srpt"])}
    if options["scheduler"] != "medha":
        del options["admission"]
    if rng.random() < 0.05:
        options["max_model_len"] = rng.randint(2, 2 * max(lengths))
    if ranks == 1 and rng.random() < 0.3:
        options |= {"async_scheduling": True, "depth": None}
    if layout[0] > 1 and rng.random() < 0.15:
        options["tp_forward"] = "dtensor"
    step_s, token_s = rng.choice([1e-5, 1e-3, 0.1]), rng.choice([1e-7, 1e-5, 1e-3])
    abandon = rng.randint(1, 40) if ranks == 1 and rng.random() < 0.05 else None
    shares = random.Random(f"{seed} shares")  # apart, so that all else of a seed stays as it was
    asks = [replace(ask, num_shared=shares.choice([0, ask.length // 2, ask.length - 1, ask.length])) for ask in asks]
    options |= {"prefix_caching": shares.random() < 0.9}
    shares.choice([0, 1])  # for an option that there was, so that a seed stays the case that it is
    if ranks > 1:
        options["async_scheduling"] = shares.choice([True, False])
    asks.sort(key=lambda ask: ask.at)
    spike = rng.choice([1.0, 1.0, 100.0])
    return Case(model, tuple(asks), layout, (0, 0), options, step_s, token_s, spike, abandon)


def _model(rng: random.Random, layout: tuple[int, int, int]) -> Model:
    """A checkpoint that can be laid out so."""
    tp, spp, _ = layout
    kv_heads = rng.choice([n for n in (1, 2, 3, 4, 7, 8) if n % tp == 0 or tp % n == 0])
    heads = kv_heads * rng.choice([n for n in (1, 2, 4, 7, 8, tp) if kv_heads * n % tp == 0])
    vocab = rng.choice([37, 61, 97, 131, 253])
    shape: dict[str, Any] = {
        "vocab_size": vocab,
        "hidden_size": heads * max(1, round(rng.choice([16, 24, 40, 64]) / heads)),
        "intermediate_size": tp * rng.choice([5, 12, 16, 24]),
        "num_hidden_layers": max(spp, rng.choice([1, 2, 3, 5])),
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": rng.choice([n for n in (2, 4, 6, 10, 14, 16, 18, 26) if n * heads <= 400]),
    }
    family = rng.choice(
        ["llama", "llama-llama3", "llama-linear", "llama-yarn", "llama-bias", "mistral", "qwen2", "qwen3"]
    )
    if family in ("llama", "qwen2") and rng.random() < 0.4:  # their config.json may leave it out
        shape["hidden_size"] = heads * shape.pop("head_dim")
    shape["initializer_range"] = min(1.0, round(1.6 / shape["hidden_size"] ** 0.5, 3))
    eos = sorted(rng.sample(range(vocab), rng.choice([0, 1, 3])))
    stored = rng.choice(["float32"] * 4 + ["bfloat16", "float16"])
    size, textless = rng.choice([None, None, "20KB"]), rng.choice([0, 0, 3])
    return Model(family, rng.random() < 0.5, stored, size, textless, shape, tuple(eos), rng.randrange(2**31))


def _memory(
    rng: random.Random, model: Model, layout: tuple[int, int, int], asks: Sequence[Ask], *, is_pressed: bool
) -> dict[str, Any]:
    """Block size, pools and shards; under pressure there is little more than the longest request needs."""
    tp, spp, kvp = layout
    needed = -(-max(ask.length + ask.max_tokens - 1 for ask in asks) // kvp)
    block_size = rng.choice([1, 2, 3, 5, 16] if is_pressed else [1, 3, 5, 16, 32, 64, 256])
    slack = [0.7, 1.0, 2.0, 6.0]
    if is_pressed:
        slack = [1.0, 1.5, 2.5] if kvp > 1 else [1.0, 1.0, 1.3]
    blocks = max(1, -(-int(needed * rng.choice(slack)) // block_size))
    options: dict[str, Any] = {"block_size": block_size, "num_kv_blocks": blocks, "overcommit": rng.random() < 0.5}
    if is_pressed:
        options["max_num_seqs"] = rng.choice([3, 5, 8, 256])
    if kvp > 1:  # the longest request needs a shard on each group, where there may be room for another
        options["max_kv_per_group"] = blocks * block_size
        options["num_kv_blocks"] += rng.choice([0, 0, 1, blocks] if is_pressed else [0, blocks, 2 * blocks])
    if rng.random() < 0.5:
        shape = model.shape
        head_dim = shape.get("head_dim", shape["hidden_size"] // shape["num_attention_heads"])
        heads = max(1, shape["num_key_value_heads"] // tp) * -(-shape["num_hidden_layers"] // spp)
        options["swap_space"] = f"{rng.choice([1, 3, 20, 1000]) * 2 * heads * head_dim * 4 * block_size}B"
    return options


def _ask(rng: random.Random, model: Model, lengths: Sequence[int], counts: Sequence[int], span: int) -> Ask:
    """A request within the first ``span`` steps."""
    max_tokens = rng.choice(counts)
    params: dict[str, Any] = {"max_tokens": max_tokens, "temperature": 0.0}
    if rng.random() < 0.4:
        seed = rng.choice([0, -2, 2**63 - 1, -(2**63), rng.randrange(2**40)])
        params |= {"temperature": rng.choice([0.3, 1.0, 2.0]), "seed": seed}
        params |= {name: rng.choice(values) for name, values in _CUTS.items() if rng.random() < 0.3}
    params |= {name: rng.choice(values) for name, values in _PARAMS.items() if rng.random() < 0.3}
    if rng.random() < 0.25:
        params["min_tokens"] = rng.choice([1, max_tokens // 2, max_tokens // 2, max_tokens])
    if rng.random() < 0.25:
        params["stop_token_ids"] = rng.sample(range(model.vocab), rng.randint(1, model.vocab // 4))
    if rng.random() < 0.25:
        params["stop"] = ["".join(rng.choices(_LETTERS, k=rng.randint(1, 4))) for _ in range(rng.randint(1, 3))]
        params["include_stop_str_in_output"] = rng.random() < 0.4
    slo = (rng.choice([None, 1e-9, 0.01, 1.0]), rng.choice([None, 1e-9, 0.01, 1.0])) if rng.random() < 0.4 else None
    abort = rng.randint(0, 40) if rng.random() < 0.15 else None
    return Ask(rng.choice(lengths), rng.randrange(4), params, rng.randint(0, span), abort, rng.choice(PRIORITIES), slo)
