"""A worker of ``medha bench compare``: an engine that completes prompts of token ids, run as ``python peers.py NAME``.

Any Python runs this file that has the engine: beside the standard library it imports that engine alone. Standard output
belongs to the protocol (:mod:`medha.bench.job`); what an engine prints there goes to standard error. A function here
makes an engine of its settings; it returns the options that it chose, the ways in which it completes prompts that are
there at once (the first one is for prompts of one length), each with exactly so many greedy tokens, and its packages.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from copy import deepcopy
from functools import partial
from typing import Any

Prompts = list[list[int]]
Complete = Callable[[Prompts, list[int]], Prompts]
Engine = tuple[dict[str, Any], dict[str, Complete], tuple[str, ...]]
PAGE = 256
PADDED_BATCH = 8
ROWS, TOKENS = 8, 512  # of continuous batching; on a CPU more rows cost more, as each is scored against the keys of all


def medha(given: dict[str, Any]) -> Engine:
    """The whole engine: scheduler, paged cache, sampler."""
    from medha.llm import LLM
    from medha.params import SamplingParams

    options = {name: given[name] for name in ("dtype", "max_model_len", "num_threads")}
    options |= {"t_target_s": 1.0, "chunk_size": 2048, "block_size": PAGE, "num_kv_blocks": given["kv_blocks"]}
    llm = LLM(given["model"], **options)

    def complete(prompts: Prompts, num_outputs: list[int]) -> Prompts:
        params = [SamplingParams(temperature=0.0, max_tokens=number, ignore_eos=True) for number in num_outputs]
        return [list(one.outputs[0].token_ids) for one in llm.generate(prompts, params, use_tqdm=False)]

    return options, {"medha": complete}, ("medha", "torch")


def vllm(given: dict[str, Any]) -> Engine:
    """vLLM's offline engine without a tokenizer; its core runs in this process, which is stopped in turn."""
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    cores = sorted(os.sched_getaffinity(0))[: given["num_threads"]]
    os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", ",".join(map(str, cores)))
    from vllm import LLM, SamplingParams

    options = {name: given[name] for name in ("dtype", "max_model_len", "enable_prefix_caching", "seed")}
    options["kv_cache_memory_bytes"] = 2 * given["kv_bytes"]  # its blocks hold 32 to 128 tokens, and one stays empty
    llm = LLM(given["model"], skip_tokenizer_init=True, **options)

    def complete(prompts: Prompts, num_outputs: list[int]) -> Prompts:
        greedy = partial(SamplingParams, temperature=0.0, ignore_eos=True, detokenize=False)
        params = [greedy(max_tokens=number) for number in num_outputs]
        tokens = [{"prompt_token_ids": ids} for ids in prompts]
        return [list(one.outputs[0].token_ids) for one in llm.generate(tokens, params, use_tqdm=False)]

    return options | {"skip_tokenizer_init": True}, {"vllm": complete}, ("vllm", "torch")


def transformers(given: dict[str, Any]) -> Engine:
    """transformers at its best: ``sdpa`` attention. Prompts of one length make one batch, and others batches of eight
    in the order in which they come, filled up on the left; or they go through its own continuous batching."""
    import torch
    from transformers import AutoModelForCausalLM, ContinuousBatchingConfig, logging

    logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    torch.set_num_threads(given["num_threads"])
    options = {"dtype": given["dtype"], "attn_implementation": "sdpa"}
    model: Any = AutoModelForCausalLM.from_pretrained(given["model"], **options)
    model = model.to("cuda" if torch.cuda.is_available() else "cpu").eval()
    model.generation_config.eos_token_id = None

    def one_batch(prompts: Prompts, num_outputs: list[int]) -> Prompts:
        width = max(map(len, prompts))
        ids = torch.tensor([[0] * (width - len(one)) + one for one in prompts], device=model.device)
        mask = torch.tensor([[0] * (width - len(one)) + [1] * len(one) for one in prompts], device=model.device)
        greedy = partial(model.generate, do_sample=False, pad_token_id=0)
        found = greedy(ids, attention_mask=mask, max_new_tokens=max(num_outputs)).tolist()
        return [row[width : width + number] for row, number in zip(found, num_outputs, strict=True)]

    def padded(prompts: Prompts, num_outputs: list[int]) -> Prompts:
        size = len(prompts) if len(set(map(len, prompts))) == len(set(num_outputs)) == 1 else PADDED_BATCH
        starts = range(0, len(prompts), size)
        return [ids for i in starts for ids in one_batch(prompts[i : i + size], num_outputs[i : i + size])]

    def continuous(prompts: Prompts, num_outputs: list[int]) -> Prompts:
        config = deepcopy(model.generation_config)
        config.update(do_sample=False, pad_token_id=0, eos_token_id=-1)  # none ends it
        asked = list(zip(prompts, num_outputs, strict=True))
        rows, longest = min(ROWS, len(asked)), max(len(ids) + number for ids, number in asked)
        sizes: Any = {"page_size": PAGE, "num_blocks": rows * (-(-longest // PAGE) + 1), "max_batch_tokens": TOKENS}
        batching = ContinuousBatchingConfig(max_requests_per_batch=rows, **sizes)
        done: dict[str, list[int]] = {}
        run = partial(model.continuous_batching_context_manager, continuous_batching_config=batching)
        with run(generation_config=config) as manager:
            names = [manager.add_request(ids, max_new_tokens=number) for ids, number in asked]
            while len(done) < len(names):
                result = manager.get_result(timeout=1)
                if result is not None and result.is_finished():
                    if result.error is not None:
                        raise RuntimeError(f"continuous batching has failed: {result.error}")
                    done[result.request_id] = list(result.generated_tokens)
                elif result is None and not manager.is_running():
                    raise RuntimeError("continuous batching has ended early")
        return [done[name] for name in names]

    return options, {f"padded by {PADDED_BATCH}": padded, "continuous": continuous}, ("transformers", "torch")


def main() -> None:
    """Answer line after line until the input ends."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    sys.path[:] = [path for path in sys.path if path != os.path.dirname(os.path.abspath(__file__))]
    make = {"medha": medha, "transformers": transformers, "vllm": vllm}[sys.argv[1]]
    ways: dict[str, Complete] = {}
    for line in sys.stdin:
        request = json.loads(line)
        try:
            if not ways:
                options, ways, packages = make(request)
                answer: dict[str, Any] = {"options": options, "ways": list(ways)}
                answer["versions"] = {name: str(__import__(name).__version__) for name in packages}
            else:
                start = time.perf_counter()
                tokens = ways[request["way"]](request["prompts"], request["num_outputs"])
                answer = {"seconds": time.perf_counter() - start, "tokens": tokens}
        except Exception as error:  # whatever it is, the other side is to know
            answer = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    main()
