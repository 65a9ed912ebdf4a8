"""Requests of different lengths, all there at once: medha against padded batches and continuous batching.

Padded batches are what a user of ``generate`` writes: eight requests at a time in the order in which they come, filled
up on the left, until the longest output of the eight is done. Continuous batching is transformers' own
(``continuous_batching_context_manager``), each request with its own number of output tokens. All are greedy.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch

from medha.bench.comparing import BLOCK_SIZE, Comparison, Pair
from medha.bench.timing import Timing, in_turn, timed
from medha.errors import ConfigError
from medha.params import SamplingParams
from medha.workload.trace import Trace

PADDED_BATCH = 8
CONTINUOUS_TOKENS = 512
CONTINUOUS_ROWS = 8
"""Requests that transformers' continuous batching runs at once: on the CPU it scores every query against the keys of
all of them under a mask, so that more requests also cost more."""

Tokens = list[list[int]]


@dataclass(frozen=True, slots=True)
class MixedRequest:
    """Prompt token ids, and how many tokens to generate."""

    prompt: list[int]
    num_outputs: int


def mixed_requests(trace: Trace, vocab_size: int, *, seed: int) -> list[MixedRequest]:
    """The requests of a trace with random prompts; arrivals do not count."""
    chance = np.random.default_rng(seed)
    lengths = zip(trace.prompt_tokens.tolist(), trace.output_tokens.tolist(), strict=True)
    return [MixedRequest(chance.integers(0, vocab_size, prompt).tolist(), output) for prompt, output in lengths]


def run_mixed(
    pair: Pair,
    requests: Sequence[MixedRequest],
    *,
    warmup: int,
    runs: int,
    on_run: Callable[[], None] = lambda: None,
) -> list[Comparison]:
    """Compare each way of transformers with medha.

    Args:
        pair: what runs them.
        requests: the workload.
        warmup: turns over its first batch alone, which do not count.
        runs: turns over all of it.
        on_run: called after each.

    Raises:
        ConfigError: transformers' continuous batching does not run here.
    """
    tokens: dict[str, Tokens] = {}
    sides: dict[str, Callable[[Pair, Sequence[MixedRequest]], Tokens]] = {"medha": _medha, **WAYS}

    def run(side: str, some: Sequence[MixedRequest]) -> None:
        tokens[side] = sides[side](pair, some)

    first = {side: partial(timed, partial(run, side, requests[:PADDED_BATCH])) for side in sides}
    in_turn(first, warmup=warmup, runs=0, on_run=on_run)
    whole = {side: partial(timed, partial(run, side, requests)) for side in sides}
    seconds = in_turn(whole, warmup=0, runs=runs, on_run=on_run)
    timings = {side: Timing.of(found) for side, found in seconds.items()}
    return [
        Comparison.of(
            f"{len(requests)} mixed, {way}",
            pair.dtype,
            timings["medha"],
            timings[way],
            tokens=(tokens["medha"], tokens[way]),
            is_padded=True,
        )
        for way in WAYS
    ]


def _medha(pair: Pair, requests: Sequence[MixedRequest]) -> Tokens:
    params = [SamplingParams(temperature=0.0, max_tokens=one.num_outputs, ignore_eos=True) for one in requests]
    outputs = pair.llm.generate([one.prompt for one in requests], params, use_tqdm=False)
    return [list(output.outputs[0].token_ids) for output in outputs]


def _padded(pair: Pair, requests: Sequence[MixedRequest]) -> Tokens:
    tokens = []
    for first in range(0, len(requests), PADDED_BATCH):
        batch = requests[first : first + PADDED_BATCH]
        width = max(len(one.prompt) for one in batch)
        ids = torch.tensor([[0] * (width - len(one.prompt)) + one.prompt for one in batch])
        mask = torch.tensor([[0] * (width - len(one.prompt)) + [1] * len(one.prompt) for one in batch])
        longest = max(one.num_outputs for one in batch)
        rows = pair.reference.generate(
            input_ids=ids, attention_mask=mask, max_new_tokens=longest, do_sample=False, pad_token_id=0
        )
        tokens += [row[width : width + one.num_outputs].tolist() for row, one in zip(rows, batch, strict=True)]
    return tokens


def _continuous(pair: Pair, requests: Sequence[MixedRequest]) -> Tokens:
    from transformers import ContinuousBatchingConfig

    config = deepcopy(pair.reference.generation_config)
    config.do_sample, config.eos_token_id, config.pad_token_id = False, -1, 0  # -1: none ends it
    longest = max(len(one.prompt) + one.num_outputs for one in requests)
    rows = min(CONTINUOUS_ROWS, len(requests))
    sizes = ContinuousBatchingConfig(
        page_size=BLOCK_SIZE,
        num_blocks=rows * (-(-longest // BLOCK_SIZE) + 1),
        max_batch_tokens=max(rows, CONTINUOUS_TOKENS),
        max_requests_per_batch=rows,
    )
    done: dict[str, Any] = {}
    with pair.reference.continuous_batching_context_manager(
        generation_config=config, continuous_batching_config=sizes
    ) as manager:
        names = [manager.add_request(one.prompt, max_new_tokens=one.num_outputs) for one in requests]
        while len(done) < len(names):
            result = manager.get_result(timeout=1)
            if result is not None and result.is_finished():
                done[result.request_id] = result
            elif result is None and not manager.is_running():
                raise ConfigError(
                    "transformers' continuous batching has ended early; accepted: a version that runs here"
                )
    failed = next((one.error for one in done.values() if one.error is not None), None)
    if failed is not None:
        raise ConfigError(f"transformers' continuous batching has failed: {failed}")
    return [list(done[name].generated_tokens) for name in names]


WAYS: dict[str, Callable[[Pair, Sequence[MixedRequest]], Tokens]] = {
    f"padded by {PADDED_BATCH}": _padded,
    "continuous": _continuous,
}
"""transformers' ways, by the name that they have in the result."""
