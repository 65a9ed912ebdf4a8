"""A 1M-token request is admitted while a short one decodes: nothing that is said or done in a step grows with it.

What is asserted is what bounds the time: the size of each batch and message, and that the tokens are copied once.
"""

from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np

from medha import LLM, SamplingParams
from medha.parallel.control import encode
from tests.checkpoints import make_checkpoint
from tests.engines import drained
from tests.parallel.workers import WorkerPool

NUM_TOKENS = 1_000_000
SHORT = 10_000
CHUNK = 256
OPTIONS = {
    "scheduler": "sarathi",
    "chunk_size": CHUNK,
    "max_batch_tokens": CHUNK,
    "max_num_seqs": 4,
    "block_size": 256,
    "num_kv_blocks": NUM_TOKENS // 256 + 8,
    "seed": 1,
    "kvp": 2,
    "prefix_caching": False,  # the long prompt begins as the short one
}
NUM_STEPS = 12
ROW_INTS = 64  # a generous bound on the integers of a message beside token ids, for the two rows of these batches
OPEN_INTS = 256  # and of the sampling parameters of a new request


def admit(folder: Path) -> list[tuple[list[int], list[int]]] | None:
    """On each rank: add a short and a long prompt while another request decodes, abort each after some chunks; rank 0
    returns the integers of each message and of each batch meanwhile."""
    with LLM(folder, **OPTIONS) as llm:
        return [_admit_one(llm.engine, length) for length in (SHORT, NUM_TOKENS)] if llm.is_driver else None


def _admit_one(engine: Any, length: int) -> tuple[list[int], list[int]]:
    prompt = np.random.default_rng(0).integers(0, 256, length, dtype=np.int32)
    params = SamplingParams(temperature=0.0, max_tokens=200, ignore_eos=True, output_kind="final_only")
    engine.add_request("short", [1, 2, 3], params)
    for _ in range(NUM_STEPS):
        engine.step()
    runner, sender = engine.runner, engine.runner.sender
    with (
        patch.object(sender, "send", wraps=sender.send) as send,
        patch.object(runner, "submit", wraps=runner.submit) as submit,
    ):
        engine.add_request("long", prompt, params)
        for _ in range(NUM_STEPS):
            engine.step()
    messages = [len(encode(call.args[0])) for call in send.call_args_list]
    batches = [len(call.args[0].to_ints()) for call in submit.call_args_list]
    assert engine.prefills()[0][1] >= (NUM_STEPS - 4) * (CHUNK - 1)
    engine.abort("long")
    (output,) = engine.step()
    assert (output.request_id, output.outputs[0].finish_reason) == ("long", "abort")
    assert len(output.prompt_token_ids) == length
    engine.abort("short")
    drained(engine)
    return messages, batches


def test_a_million_tokens_beside_a_decode(workers: WorkerPool, tmp_path: Path) -> None:
    """Two layers, as the needle model has, with so small keys that 1M tokens of them are 130 MB a layer (not used)."""
    shape = {"num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16}
    make_checkpoint(tmp_path, "llama", vocab_size=256, max_position_embeddings=1 << 24, **shape)
    (_, short_batches), (messages, batches) = workers.run(admit, 2, tmp_path)[0]
    assert batches == short_batches
    assert max(batches) <= ROW_INTS
    assert max(messages) <= CHUNK + ROW_INTS + OPEN_INTS
    assert max(messages[8:]) <= CHUNK + ROW_INTS
