"""A worker of ``medha bench compare``: an engine that completes prompts of token ids, run as ``python peers.py NAME``.

Any Python runs this file that has the engine: beside the standard library it imports that engine alone. Standard output
belongs to the protocol of :class:`medha.bench.timing.Worker`. A function here makes an engine of its settings; it
returns the options that it chose, the ways in which it completes prompts that are there at once (the first one is for
prompts of one length), each with exactly so many greedy tokens, and its packages.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

Prompts = list[list[int]]
Engine = tuple[dict[str, Any], dict[str, Callable[..., Any]], tuple[str, ...]]
PAGE = 256
ARRIVING = "arriving"  # a way that is asked for by name alone
PADDED_BATCH = 8
ROWS, TOKENS = 8, 512  # of continuous batching; on a CPU more rows cost more, as each is scored against the keys of all


def medha(given: dict[str, Any]) -> Engine:
    """The whole engine as commands run it: scheduler, paged cache, sampler."""
    from medha.cli.command import bound_spinning

    bound_spinning()
    from medha.llm import LLM
    from medha.params import SamplingParams

    more = {"block_size": PAGE} | {name: given[name] for name in ("num_threads", "enable_prefix_caching")}
    return _offline("medha", LLM, SamplingParams, given, more)


def vllm(given: dict[str, Any]) -> Engine:
    """vLLM's offline engine without a tokenizer; its core runs in this process, which is stopped in turn."""
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    cores = sorted(os.sched_getaffinity(0))[: given["num_threads"]]
    os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", ",".join(map(str, cores)))
    from vllm import LLM, SamplingParams

    more = {"enable_prefix_caching": given["enable_prefix_caching"], "skip_tokenizer_init": True}
    return _offline("vllm", LLM, SamplingParams, given, more)


def _offline(name: str, llm_class: Any, params_class: Any, given: dict[str, Any], more: dict[str, Any]) -> Engine:
    options = {key: given[key] for key in ("dtype", "max_model_len", "seed", "kv_cache_memory_bytes")} | more
    options |= given.get("engine_options", {}).get(name, {})
    llm = llm_class(given["model"], **options)
    greedy = partial(params_class, temperature=0.0, repetition_penalty=1.0, ignore_eos=True, detokenize=False)

    def complete(prompts: Prompts, num_outputs: list[int]) -> Prompts:
        params = [greedy(max_tokens=number) for number in num_outputs]
        outputs = llm.generate([{"prompt_token_ids": ids} for ids in prompts], params, use_tqdm=False)
        return [[*one.outputs[0].token_ids] for one in outputs]

    def arriving(prompts: Prompts, num_outputs: list[int], arrivals: Sequence[float]) -> list[tuple[float, float]]:
        """Serve prompts that arrive at these seconds, in order; from then to the first and last token of each."""
        engine = llm.engine if name == "medha" else llm.llm_engine
        shorts_first = options.get("scheduling_policy") == "priority"
        first, last, added = [0.0] * len(prompts), [0.0] * len(prompts), 0
        start = time.perf_counter()
        while not all(last):
            while added < len(prompts) and arrivals[added] <= time.perf_counter() - start:
                asked, params = {"prompt_token_ids": prompts[added]}, greedy(max_tokens=num_outputs[added])
                order = {"priority": len(prompts[added])} if shorts_first else {}
                engine.add_request(str(added), asked, params, **order)
                added += 1
            if all(last[:added]):
                time.sleep(max(0.0, arrivals[added] - (time.perf_counter() - start)))
            for output in () if all(last[:added]) else engine.step():
                at, now = int(output.request_id), time.perf_counter() - start
                if len(output.outputs[0].token_ids) and not first[at]:
                    first[at] = now - arrivals[at]
                last[at] = now - arrivals[at] if output.finished else 0.0
        return list(zip(first, last, strict=True))

    return options, {name: complete, ARRIVING: arriving}, (name, "torch")


def transformers(given: dict[str, Any]) -> Engine:
    """transformers at its best: ``sdpa`` attention. Prompts of one length make one batch, and others batches of eight
    in the order in which they come, filled up on the left; or they go through its own continuous batching."""
    import torch
    from transformers import AutoModelForCausalLM, ContinuousBatchingConfig, GenerationConfig, logging

    logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    torch.set_num_threads(given["num_threads"])
    options = {"dtype": given["dtype"], "attn_implementation": "sdpa"}
    model: Any = AutoModelForCausalLM.from_pretrained(given["model"], **options)
    model = model.to("cuda" if torch.cuda.is_available() else "cpu").eval()
    model.generation_config = GenerationConfig()  # type: ignore[no-untyped-call]  # the folder's may ask for more work

    def padded(prompts: Prompts, num_outputs: list[int]) -> Prompts:
        size = len(prompts) if len(set(map(len, prompts))) == len(set(num_outputs)) == 1 else PADDED_BATCH
        found: Prompts = []
        for i in range(0, len(prompts), size):
            batch, numbers = prompts[i : i + size], num_outputs[i : i + size]
            width = max(map(len, batch))
            ids = torch.tensor([[0] * (width - len(one)) + one for one in batch], device=model.device)
            mask = torch.tensor([[0] * (width - len(one)) + [1] * len(one) for one in batch], device=model.device)
            greedy = partial(model.generate, do_sample=False, pad_token_id=0, max_new_tokens=max(numbers))
            rows = greedy(ids, attention_mask=mask).tolist()
            found += [row[width : width + number] for row, number in zip(rows, numbers, strict=True)]
        return found

    def continuous(prompts: Prompts, num_outputs: list[int]) -> Prompts:
        config: Any = GenerationConfig(do_sample=False, pad_token_id=0, eos_token_id=-1)  # type: ignore[no-untyped-call]
        asked = list(zip(prompts, num_outputs, strict=True))
        rows, longest = min(ROWS, len(asked)), max(len(ids) + number for ids, number in asked)
        sizes: Any = {"page_size": PAGE, "num_blocks": rows * (-(-longest // PAGE) + 1), "max_batch_tokens": TOKENS}
        batching = ContinuousBatchingConfig(max_requests_per_batch=rows, **sizes)
        run = partial(model.continuous_batching_context_manager, continuous_batching_config=batching)
        done: dict[str, list[int]] = {}
        with run(generation_config=config) as manager:
            names = [manager.add_request(ids, max_new_tokens=number) for ids, number in asked]
            while len(done) < len(names):
                result = manager.get_result(timeout=1)
                if (result is None and not manager.is_running()) or (result is not None and result.error is not None):
                    raise RuntimeError(f"continuous batching has failed: {result and result.error}")
                if result is not None and result.is_finished():
                    done[result.request_id] = list(result.generated_tokens)
        return [done[name] for name in names]

    return options, {f"padded by {PADDED_BATCH}": padded, "continuous": continuous}, ("transformers", "torch")


def main() -> None:
    """Answer line after line until the input ends."""
    if sys.platform == "linux":  # ends with who has started it, also while it is stopped
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    sys.path[:] = [path for path in sys.path if path != os.path.dirname(os.path.abspath(__file__))]
    make = {"medha": medha, "transformers": transformers, "vllm": vllm}[sys.argv[1]]
    if make is not medha and os.environ.get("GOMP_SPINCOUNT") == "10000":  # as our command has set it; theirs spin on
        del os.environ["GOMP_SPINCOUNT"], os.environ["OMP_WAIT_POLICY"]
    ways: dict[str, Callable[..., Any]] = {}
    for line in sys.stdin:
        given = json.loads(line)
        try:
            if ways:
                start = time.perf_counter()
                more = [given["arrivals"]] if "arrivals" in given else []
                tokens = ways[given["way"]](given["prompts"], given["num_outputs"], *more)
                answer: dict[str, Any] = {"seconds": time.perf_counter() - start, "tokens": tokens}
            else:
                os.environ["OMP_NUM_THREADS"] = str(given["num_threads"])
                options, ways, packages = make(given)
                versions = {name: str(__import__(name).__version__) for name in packages}
                answer = {"options": options, "ways": [way for way in ways if way != ARRIVING], "versions": versions}
        except Exception as error:  # whatever it is, the other side is to know
            answer = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    main()
