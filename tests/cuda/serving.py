"""What the tests of the emulated device serve: a few requests of every kind of sampling."""

from pathlib import Path
from typing import Any

from medha import LLM, SamplingParams
from tests.engines import drained

Served = list[list[int]]

PROMPTS = [[(7 * i + i * j + j * j) % 211 for j in range(length)] for i, length in enumerate((5, 70, 33, 150, 64))]
SAMPLING: list[dict[str, Any]] = [
    {},
    {"temperature": 0.8, "top_p": 0.9, "seed": 3},
    {"logprobs": 2},
    {"temperature": 0.7, "top_k": 5, "min_p": 0.01, "seed": 4},
    {"repetition_penalty": 1.3, "presence_penalty": 0.2, "logit_bias": {7: 1.5}, "min_tokens": 3},
]
POOL = {"num_kv_blocks": 24, "block_size": 16, "max_num_seqs": 5, "max_batch_tokens": 96, "chunk_size": 48}

SWAP = {"quantum_s": 0.25, "num_kv_blocks": 20, "block_size": 8, "overcommit": True, "swap_space": "1MiB"}


def params(**options: Any) -> SamplingParams:
    return SamplingParams(**{"temperature": 0.0, "max_tokens": 8, "ignore_eos": True} | options)


def add_all(llm: LLM, **options: Any) -> None:
    """Give the engine all prompts, with the same parameters."""
    for i, prompt in enumerate(PROMPTS):
        llm.engine.add_request(str(i), prompt, params(**options))


def serve(
    folder: Path, *, device: str = "cpu", dtype: str = "float16", num_requests: int = len(PROMPTS), **options: Any
) -> Served:
    """The tokens of the first prompts."""
    with LLM(folder, device=device, dtype=dtype, **POOL | options) as llm:
        return complete(llm, num_requests)


def drive(llm: LLM) -> Served:
    """As :func:`complete`, where rank 0 drives the engine; nothing on the ranks that follow it."""
    if not llm.is_driver:
        llm.follow()
        return []
    for index, (prompt, wanted) in enumerate(zip(PROMPTS, SAMPLING, strict=True)):
        llm.engine.add_request(str(index), prompt, params(**wanted, output_kind="final_only"))
    return [output.outputs[0].token_ids for output in sorted(drained(llm.engine), key=lambda output: output.request_id)]


def complete(llm: LLM, num_requests: int = len(PROMPTS)) -> Served:
    wanted = [params(**each) for each in SAMPLING[:num_requests]]
    outputs = llm.generate(PROMPTS[:num_requests], wanted, use_tqdm=False)
    return [output.outputs[0].token_ids for output in outputs]
