"""A worker of ``medha bench compare``: an engine that completes prompts of token ids, run as ``python peers.py NAME``.

Any Python runs this file that has the engine: beside the standard library it imports that engine alone. Standard output
belongs to the protocol (:mod:`medha.bench.job`); what an engine prints there goes to standard error.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import json
import os
import sys
import time
from functools import partial
from typing import Any

Prompts = list[list[int]]
PADDED_BATCH = 8
CONTINUOUS_ROWS, CONTINUOUS_TOKENS, PAGE = 8, 512, 256  # on a CPU more rows cost more: each is scored against all keys


class Medha:
    """The whole engine: scheduler, paged cache, sampler."""

    packages, ways = ("medha", "torch"), ("medha",)

    def __init__(self, given: dict[str, Any]) -> None:
        from medha.llm import LLM
        from medha.params import SamplingParams

        self.options = {name: given[name] for name in ("dtype", "max_model_len", "num_threads", "t_target_s")}
        self.options |= {"chunk_size": 2048, "max_batch_tokens": 2048, "block_size": PAGE}
        self.options["num_kv_blocks"] = -(-given["kv_tokens"] // PAGE) + given["max_num_seqs"] + 1
        self._llm, self._params = LLM(given["model"], **self.options), SamplingParams

    def complete(self, prompts: Prompts, num_outputs: list[int], way: str) -> Prompts:
        params = [self._params(temperature=0.0, max_tokens=number, ignore_eos=True) for number in num_outputs]
        outputs = self._llm.generate(prompts, params, use_tqdm=False)
        return [list(output.outputs[0].token_ids) for output in outputs]


class Vllm:
    """vLLM's offline engine, without tokenizer; not a process of its own for the engine core."""

    packages, ways = ("vllm", "torch"), ("vllm",)

    def __init__(self, given: dict[str, Any]) -> None:
        os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
        os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", ",".join(map(str, _cpus(given["num_threads"]))))
        from vllm import LLM, SamplingParams

        self.options = {name: given[name] for name in ("dtype", "max_model_len", "enable_prefix_caching", "seed")}
        self.options["skip_tokenizer_init"] = True
        self._llm, self._params = LLM(given["model"], **self.options), SamplingParams

    def complete(self, prompts: Prompts, num_outputs: list[int], way: str) -> Prompts:
        common = {"temperature": 0.0, "ignore_eos": True, "detokenize": False}
        params = [self._params(max_tokens=number, **common) for number in num_outputs]
        outputs = self._llm.generate([{"prompt_token_ids": ids} for ids in prompts], params, use_tqdm=False)
        return [list(output.outputs[0].token_ids) for output in outputs]


class Transformers:
    """transformers at its best: sdpa attention; equal prompts in one batch, others in padded batches of eight in the
    order in which they come, filled up on the left, or in its own continuous batching."""

    packages, ways = ("transformers", "torch"), (f"padded by {PADDED_BATCH}", "continuous")

    def __init__(self, given: dict[str, Any]) -> None:
        import torch

        transformers: Any = importlib.import_module("transformers")

        transformers.logging.set_verbosity_error()
        torch.set_num_threads(given["num_threads"])
        self.options = {"dtype": given["dtype"], "attn_implementation": "sdpa", "rows": CONTINUOUS_ROWS}
        where = "cuda" if torch.cuda.is_available() else "cpu"
        model: Any = transformers.AutoModelForCausalLM.from_pretrained(
            given["model"], dtype=getattr(torch, given["dtype"]), attn_implementation="sdpa"
        )
        model.generation_config.eos_token_id = None
        self._torch, self._model = torch, model.to(where).eval()
        self._greedy = {"do_sample": False, "pad_token_id": 0}

    def complete(self, prompts: Prompts, num_outputs: list[int], way: str) -> Prompts:
        if way == "continuous":
            return self._continuous(prompts, num_outputs)
        is_even = len({(len(ids), number) for ids, number in zip(prompts, num_outputs, strict=True)}) == 1
        size = len(prompts) if is_even else PADDED_BATCH
        firsts = range(0, len(prompts), size)
        return [ids for i in firsts for ids in self._padded(prompts[i : i + size], num_outputs[i : i + size])]

    def _padded(self, prompts: Prompts, num_outputs: list[int]) -> Prompts:
        width = max(map(len, prompts))
        rows = [[0] * (width - len(ids)) + ids for ids in prompts]
        mask = [[0] * (width - len(ids)) + [1] * len(ids) for ids in prompts]
        tensor = partial(self._torch.tensor, device=self._model.device)
        options = {"attention_mask": tensor(mask), "max_new_tokens": max(num_outputs), **self._greedy}
        with self._torch.inference_mode():
            found = self._model.generate(tensor(rows), **options).tolist()
        return [row[width : width + number] for row, number in zip(found, num_outputs, strict=True)]

    def _continuous(self, prompts: Prompts, num_outputs: list[int]) -> Prompts:
        from copy import deepcopy

        from transformers import ContinuousBatchingConfig

        config = deepcopy(self._model.generation_config)
        config.update(**self._greedy, eos_token_id=-1)  # none ends it
        longest = max(len(ids) + number for ids, number in zip(prompts, num_outputs, strict=True))
        rows = min(CONTINUOUS_ROWS, len(prompts))
        sizes = ContinuousBatchingConfig(
            page_size=PAGE,
            num_blocks=rows * (-(-longest // PAGE) + 1),
            max_batch_tokens=max(rows, CONTINUOUS_TOKENS),
            max_requests_per_batch=rows,
        )
        done: dict[str, Any] = {}
        with self._model.continuous_batching_context_manager(
            generation_config=config, continuous_batching_config=sizes
        ) as manager:
            names = [
                manager.add_request(ids, max_new_tokens=number)
                for ids, number in zip(prompts, num_outputs, strict=True)
            ]
            while len(done) < len(names):
                result = manager.get_result(timeout=1)
                if result is not None and result.is_finished():
                    done[result.request_id] = result
                elif result is None and not manager.is_running():
                    raise RuntimeError("continuous batching has ended early")
        failed = next((one.error for one in done.values() if one.error is not None), None)
        if failed is not None:
            raise RuntimeError(f"continuous batching has failed: {failed}")
        return [list(done[name].generated_tokens) for name in names]


def _cpus(number: int) -> list[int]:
    """So many of the cores that this process may use."""
    return sorted(os.sched_getaffinity(0))[:number]


def main() -> None:
    """Answer line after line until the input ends."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    sys.path[:] = [path for path in sys.path if path != os.path.dirname(os.path.abspath(__file__))]
    engine: Any = None
    for line in sys.stdin:
        request = json.loads(line)
        try:
            if engine is None:
                engine = {"medha": Medha, "transformers": Transformers, "vllm": Vllm}[sys.argv[1]](request)
                versions = {name: importlib.metadata.version(name) for name in engine.packages}
                answer: dict[str, Any] = {"versions": versions, "options": engine.options, "ways": engine.ways}
            else:
                start = time.perf_counter()
                tokens = engine.complete(request["prompts"], request["num_outputs"], request["way"])
                answer = {"seconds": time.perf_counter() - start, "tokens": tokens}
        except Exception as error:  # whatever it is, the other side is to know
            answer = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    main()
