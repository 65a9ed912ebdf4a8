"""Long documents on two groups of two stages: the logits of one rank, and a quarter of its KV cache on each.

A random checkpoint tells what the needle cannot: an error in a log-sum-exp moves every logit.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.checkpoints import make_checkpoint, random_prompt
from tests.parallel import workers as pool
from tests.parallel.workers import WorkerPool

TOLERANCE = 1e-4
"""Of logits, relative to the largest."""

NUM_TOKENS = 4
BLOCK_SIZE = 64
NUM_LAYERS, NUM_KV_HEADS, HEAD_DIM = 2, 2, 16
LAYOUT = {"kvp": 2, "spp": 2}


@dataclass(frozen=True)
class Seen:
    """What a rank saw: tokens on rank 0, logits [num_tokens, V] where it samples, the most bytes of KV that it held."""

    tokens: list[list[int]]
    logits: Any
    kv_bytes: int


def generate(folder: str, prompt: list[int], options: dict[str, Any]) -> Seen:
    """On each rank: generate greedily, with the logits behind the tokens."""
    from medha import LLM, SamplingParams

    params = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True)
    with recording() as (logits, held), LLM(folder, **options) as llm:
        outputs = llm.generate([{"prompt_token_ids": prompt}], params)
    return Seen(
        [output.outputs[0].token_ids for output in outputs], torch.cat(logits).numpy() if logits else None, max(held)
    )


@contextmanager
def recording() -> Iterator[tuple[list[torch.Tensor], list[int]]]:
    """Collect the logits from which this rank draws, and the bytes of its KV blocks after each batch."""
    import medha.worker.runner
    from medha.worker.runner import Runner

    logits: list[torch.Tensor] = []
    held: list[int] = []
    draw, run = medha.worker.runner.sample, Runner.run

    def sample(logits_SV: torch.Tensor, *rest: Any) -> Any:
        logits.append(logits_SV.clone())
        return draw(logits_SV, *rest)

    def run_and_count(self: Runner, *rest: Any) -> Any:
        result = run(self, *rest)
        held.append(self.tables.num_blocks * self.cache.block_bytes)
        return result

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(medha.worker.runner, "sample", sample)
        patch.setattr(Runner, "run", run_and_count)
        yield logits, held


def check(workers: WorkerPool, folder: Path, num_tokens: int, *, chunk_size: int, share: int) -> None:
    """A prompt of ``num_tokens`` on one rank and on kvp2 spp2, at most ``share`` tokens a group."""
    longest = num_tokens + NUM_TOKENS
    rope = {"rope_type": "default", "rope_theta": 1e7}
    make_checkpoint(
        folder, "llama", num_hidden_layers=NUM_LAYERS, max_position_embeddings=longest, rope_parameters=rope
    )
    prompt = random_prompt(num_tokens, seed=3)
    options = {"chunk_size": chunk_size, "max_batch_tokens": chunk_size, "block_size": BLOCK_SIZE, "num_threads": 1}
    options |= {"max_model_len": longest, "scheduler": "sarathi"}
    alone = options | {"num_kv_blocks": -(-longest // BLOCK_SIZE)}
    together = options | {"num_kv_blocks": share // BLOCK_SIZE, "max_kv_per_group": share, **LAYOUT}
    (one,) = workers.run(generate, 1, str(folder), prompt, alone)
    ranks = workers.run(generate, 4, str(folder), prompt, together)

    assert [seen.logits is not None for seen in ranks] == [False, True, False, False]  # the leading group's last stage
    assert [seen.tokens for seen in ranks] == [one.tokens, [], [], []]
    assert one.logits.shape == ranks[1].logits.shape == (NUM_TOKENS, len(one.logits[0]))
    error = abs(ranks[1].logits - one.logits).max() / abs(one.logits).max()
    print(f"\n  {num_tokens} tokens: largest difference of logits {error:.1e} of the largest logit")
    assert error <= TOLERANCE

    layer_bytes = 2 * BLOCK_SIZE * NUM_KV_HEADS * HEAD_DIM * 4
    blocks = [share // BLOCK_SIZE, -(-(longest - 1 - share) // BLOCK_SIZE)]
    assert one.kv_bytes == -(-(longest - 1) // BLOCK_SIZE) * NUM_LAYERS * layer_bytes
    assert [seen.kv_bytes for seen in ranks] == [count * layer_bytes for count in blocks for _ in range(2)]
    assert max(seen.kv_bytes for seen in ranks) <= 1.1 * one.kv_bytes / 4


def test_logits_at_4k(workers: WorkerPool, tmp_path: Path) -> None:
    """The shard's end is not a chunk's: the prefill grows onto the second group in the middle."""
    check(workers, tmp_path, 4096, chunk_size=256, share=2112)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_logits_at_128k(workers: WorkerPool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool, "TIMEOUT_S", 1800.0)
    check(workers, tmp_path, 131072, chunk_size=2048, share=65536 + 64)
