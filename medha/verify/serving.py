"""The engine itself in the layout: a random model against a plain forward, and a fact in a long document.

Legend: V vocabulary.
"""

from __future__ import annotations

import resource
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import torch

from medha.config import CacheConfig, EngineConfig, ParallelConfig
from medha.engine.admission import Prompt
from medha.engine.build import RankHandle, build_role
from medha.engine.engine import Engine
from medha.errors import ParallelConfigError
from medha.models.hf_config import load_model_config
from medha.models.needle import HEAD_DIM, NUM_KV_HEADS, NUM_LAYERS, make_haystack
from medha.models.reference import Weights, llama_config, next_token_logprobs, random_weights
from medha.outputs import RequestOutput
from medha.parallel.mesh import check_layout
from medha.params import SamplingParams
from medha.verify.rows import FAIL, PASS, Row, Setting, exact, held, not_run

Show = Callable[[str], None]
"""Told what is going on, often."""

LOGPROB_LIMIT = {"float32": 1e-4, "bfloat16": 0.5}
"""How far a log-probability of the engine may be from the plain forward's, which runs in float64."""

_BLOCK = CacheConfig().block_size
_GROUP_TOKENS = 2 * _BLOCK
_NEW_TOKENS = 24
_NUM_LOGPROBS = 20
_ANSWER_TOKENS = 32
_LONG_NEEDLE = 16384  # tokens; a longer document is read in larger chunks
_NEEDLE_CHUNK = 2048


def random_llama(parallel: ParallelConfig, dtype: str) -> dict[str, Any]:
    """The ``config.json`` of a small model that the layout divides: two query heads a KV head."""
    num_kv_heads = parallel.tp if parallel.tp > 1 else 2
    return llama_config(
        num_hidden_layers=max(2, parallel.spp),
        num_attention_heads=2 * num_kv_heads,
        num_key_value_heads=num_kv_heads,
        intermediate_size=parallel.tp * -(-256 // parallel.tp),
        dtype=dtype,
    )


def parity_rows(setting: Setting, folder: Path) -> Iterator[Row]:
    """Greedy tokens and log-probabilities of a random model, against the plain forward of the same weights.

    Every rank calls it; the rows come on rank 0.

    Args:
        setting: with its dtype resolved.
        folder: checkpoint of :func:`random_llama`.
    """
    kvp = setting.parallel.kvp
    # one that needs every group, two that grow in decode where there are groups, short ones
    grouped = ((kvp - 1) * _GROUP_TOKENS + 200, _GROUP_TOKENS - 8, _GROUP_TOKENS - 8)
    lengths = (*(grouped if kvp > 1 else (712,)), 130, 17, 1)
    ids = (torch.randint(0, 512, (n,), generator=torch.Generator().manual_seed(i)) for i, n in enumerate(lengths))
    options = {
        "max_model_len": max(lengths) + _NEW_TOKENS,
        "num_kv_blocks": 6 * len(lengths),
        "chunk_size": 128,
        "max_batch_tokens": 192,
        "max_kv_per_group": _GROUP_TOKENS if kvp > 1 else None,
        "quantum_s": 0.25,  # so that a request grows where its group is full, whatever steps take on this machine
    }
    params = SamplingParams(
        temperature=0.0, max_tokens=_NEW_TOKENS, ignore_eos=True, logprobs=_NUM_LOGPROBS, output_kind="final_only"
    )
    what = f"{len(lengths)} requests of 1 to {max(lengths):,} tokens"
    with joined(setting, folder, **options) as role:
        if role.engine is None:
            return
        outputs = answers(role.engine, [{"prompt_token_ids": prompt.tolist()} for prompt in ids], params)
        limit = LOGPROB_LIMIT[setting.dtype]
        shape = random_llama(setting.parallel, setting.dtype)
        yield from compared(outputs, shape, random_weights(shape, seed=0), what=what, limit=limit)


def compared(
    outputs: Sequence[RequestOutput], shape: Mapping[str, Any], weights: Weights, *, what: str, limit: float
) -> Iterator[Row]:
    """Hold outputs to the plain forward over prompt and tokens: at each step what was drawn, and how likely it was.

    A token is right if no other is likelier by more than ``limit``, which is what rounding may turn round.
    """
    num_tokens = num_wrong = 0
    errors = [torch.zeros(1, dtype=torch.float64)]
    for output in outputs:
        completion = output.outputs[0]
        if output.error is not None or completion.logprobs is None or len(completion.logprobs) != _NEW_TOKENS:
            yield Row("parity", "a request", str(output.error or "its tokens are missing"), "no error", FAIL)
            continue
        prompt = list(output.prompt_token_ids or ())
        logprobs_TV = next_token_logprobs(shape, weights, [*prompt, *completion.token_ids[:-1]])
        for row_V, token, entries in zip(
            logprobs_TV[len(prompt) - 1 :], completion.token_ids, completion.logprobs, strict=True
        ):
            num_tokens += 1
            num_wrong += bool(row_V.max() - row_V[token] > limit)
            theirs = torch.tensor([entry.logprob for entry in entries.values()], dtype=torch.float64)
            errors.append((theirs - row_V[list(entries)]).abs())
    yield exact("parity", f"{num_tokens} greedy tokens, {what}", num_wrong)
    yield held("parity", f"log-probabilities of {_NUM_LOGPROBS} a token", float(torch.cat(errors).max()), limit)


def needle_rows(setting: Setting, folder: Path, everyone: Callable[[Any], list[Any]], show: Show) -> Iterator[Row]:
    """For each length and depth whether the fact is found, and whether no rank held more of the document than its part.

    Every rank calls it; the rows on rank 0 are the result.

    Args:
        setting: what is checked.
        folder: of the needle model.
        everyone: from this rank's value to those of all, once the engine has left; every rank calls it.
        show: told how far reading is.
    """
    for num_tokens, depth in product(setting.needle_tokens, setting.needle_depths):
        start = time.perf_counter()
        row, kv_bytes = find_needle(setting, folder, num_tokens, depth, show)
        seconds = time.perf_counter() - start
        peak_bytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
        found: list[tuple[int | None, int]] = everyone((kv_bytes, peak_bytes))
        details = {**(row.details or {}), "peak_memory_bytes": max(peak for _, peak in found)}
        yield replace(row, seconds=seconds, details=details)
        yield memory_row(setting.parallel, num_tokens, [size for size, _ in found])


def find_needle(setting: Setting, folder: Path, num_tokens: int, depth: float, show: Show) -> tuple[Row, int | None]:
    """Read a document with the needle model and ask for the fact in it; every rank calls it.

    Returns:
        The row, of rank 0; and the bytes of keys and values that this rank held at the end, None where nothing ran.
    """
    what = f"fact at {depth:.0%} of {num_tokens:,} tokens, float32"
    parallel = setting.parallel
    try:
        check_layout(parallel, load_model_config(folder), parallel.world_size)
    except ParallelConfigError as error:
        return not_run("needle", what, str(error)), None
    max_model_len = num_tokens + _ANSWER_TOKENS
    chunk_size = _NEEDLE_CHUNK if num_tokens > _LONG_NEEDLE else 512
    options = {
        "max_model_len": max_model_len,
        "num_kv_blocks": -(-max_model_len // (parallel.kvp * _BLOCK)),
        "scheduler": "sarathi",  # chunks of one size, whatever they take
        "chunk_size": chunk_size,
        "max_batch_tokens": chunk_size,
    }
    haystack = make_haystack(num_tokens, depth=depth)
    row = Row("needle", what, "")  # of the other ranks
    with joined(setting, folder, **options) as role:
        if role.engine is not None:
            params = SamplingParams(temperature=0.0, max_tokens=_ANSWER_TOKENS, output_kind="final_only")
            output = answers(role.engine, [haystack.prompt], params, show)[0]
            found, wanted = output.outputs[0].text, haystack.answer.rstrip("\n")
            figures = {"found": found == wanted, "ttft_s": output.metrics.ttft}
            details = {"num_tokens": num_tokens, "depth": depth, **figures}
            row = Row("needle", what, repr(found), repr(wanted), PASS if found == wanted else FAIL, details=details)
    slots = role.runner.slots
    num_blocks = sum(len(slots.blocks(slot)) for slot in range(len(slots.held)))
    return row, num_blocks * role.runner.cache.block_bytes


def memory_row(parallel: ParallelConfig, num_tokens: int, kv_bytes: Sequence[int | None]) -> Row:
    """Whether no rank held more of the document's keys and values than its share, a tenth and a block more.

    Args:
        parallel: the layout.
        num_tokens: of the document.
        kv_bytes: of each rank.
    """
    known = [size for size in kv_bytes if size is not None]
    if len(known) < len(kv_bytes):
        return not_run("KV bytes", "of a rank", "the needle was not run")
    token_bytes = 2 * NUM_LAYERS * NUM_KV_HEADS * HEAD_DIM * 4
    whole = num_tokens * token_bytes
    parts = parallel.kvp * parallel.spp * min(parallel.tp, NUM_KV_HEADS)
    limit = (1.1 * whole + _BLOCK * token_bytes * parallel.kvp) / parts  # the block is of one group
    verdict = PASS if 0 < max(known) <= limit else FAIL
    what = f"most of a rank, of {whole / 2**20:,.1f} MiB in 1/{parts}"
    return Row("KV bytes", what, f"{max(known) / whole:.1%}", f"{limit / whole:.1%}", verdict, max(known) / limit)


def joined(setting: Setting, folder: Path, **options: Any) -> RankHandle:
    """This rank's role in serving a model, to be closed; on the others than rank 0 it is followed to its end then."""
    parallel = setting.parallel
    options |= {"tp": parallel.tp, "spp": parallel.spp, "kvp": parallel.kvp, "device": setting.device}
    return build_role(EngineConfig.from_flat(str(folder), attention_backend=setting.attention_backend, **options))


def answers(
    engine: Engine, prompts: Sequence[Prompt], params: SamplingParams, show: Show = lambda text: None
) -> list[RequestOutput]:
    """Serve prompts that arrive together, showing how far reading is; outputs in their order."""
    for i, prompt in enumerate(prompts):
        engine.add_request(str(i), prompt, params)
    outputs: dict[str, RequestOutput] = {}
    while engine.has_unfinished:
        outputs |= {output.request_id: output for output in engine.step() if output.finished}
        show(", ".join(f"{done:,} of {total:,} tokens" for _, done, total in engine.prefills()))
    return [outputs[str(i)] for i in range(len(prompts))]
