"""``medha bench compare``: the same weights and prompts through medha and through transformers or vLLM.

Each engine is a worker process (:mod:`medha.bench.peers`) on the same threads and in the same dtype; it gets token ids,
greedy requests and exact numbers of tokens. Rounds are interleaved and whoever is not asked is stopped, so a slow spell
of the machine hits both alike and nobody's idle threads cost the other. The figure is the ratio of medians.
"""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_file

from medha.bench.harness import Report, Subject, write_config
from medha.bench.job import Worker
from medha.bench.load import Workload, described
from medha.bench.timing import Timing, in_turn
from medha.config import ModelConfig
from medha.errors import ConfigError
from medha.models.weights import expected_tensors
from medha.worker.shard import TORCH_DTYPES

PEERS = ("transformers", "vllm")
_DECODE_PROMPT = 128
_WARM_MIXED = 8
Tokens = list[list[int]]


@dataclass(frozen=True, slots=True)
class CompareOptions:
    """What is compared.

    Attributes:
        peer: who medha is compared with, run by the interpreter ``peer_python``.
        input_lens: of prompts that are read to their first token; none leaves them out.
        batch_size: requests that decode ``output_len`` tokens together; 0 leaves them out.
        mixed: requests of different lengths, all there at once; None leaves them out.
        t_target_s: seconds of a batch of medha's, whose chunks have at most 2,048 tokens.
        enable_prefix_caching: of vLLM; medha and transformers have none.
        warmup, runs: rounds of each case; the mixed requests warm up with the first eight.
        seed: of weights and prompts.
    """

    subject: Subject = field(default_factory=Subject)
    peer: str = "transformers"
    peer_python: str = sys.executable
    input_lens: tuple[int, ...] = (2048, 16384)
    batch_size: int = 16
    output_len: int = 32
    mixed: Workload | None = None
    dtype: str = "float32"
    num_threads: int = 2
    t_target_s: float = 1.0
    enable_prefix_caching: bool = False
    warmup: int = 1
    runs: int = 3
    seed: int = 0

    def __post_init__(self) -> None:
        if self.peer not in PEERS:
            raise ConfigError(f"peer={self.peer!r}; accepted: {', '.join(PEERS)}")
        if self.dtype not in TORCH_DTYPES:
            raise ConfigError(f"dtype={self.dtype!r}; accepted: {', '.join(TORCH_DTYPES)}")
        if not self.input_lens and not self.batch_size and self.mixed is None:
            raise ConfigError("input_len, batch_size and num_mixed are all left out; accepted: at least one of them")


@dataclass(frozen=True, slots=True)
class _Case:
    """Requests that are there at once, greedy, each of an exact number of tokens.

    Attributes:
        is_step: what counts is a decode step of all: the time beyond that of the first tokens, over the steps.
        is_even: all are of one length, so nobody pads and sums run in the same order.
    """

    name: str
    prompts: Tokens
    num_outputs: list[int]
    is_step: bool = False
    is_even: bool = True

    @property
    def firsts(self) -> _Case:
        """The first few of them, to warm up with."""
        return _Case(self.name, self.prompts[:_WARM_MIXED], self.num_outputs[:_WARM_MIXED], is_even=False)

    def run(self, worker: Worker, way: str, tokens: dict[str, Tokens]) -> float:
        """Run once; returns its seconds and notes the tokens."""
        answer = worker.ask("complete", prompts=self.prompts, num_outputs=self.num_outputs, way=way)
        tokens[way] = answer["tokens"]
        seconds: float = answer["seconds"]
        if not self.is_step:
            return seconds
        first = worker.ask("complete", prompts=self.prompts, num_outputs=[1] * len(self.prompts), way=way)
        return (seconds - float(first["seconds"])) / (self.num_outputs[0] - 1)


def compare(options: CompareOptions, *, on_run: Callable[[], None] = lambda: None) -> Report:
    """Run the comparison.

    Args:
        options: what to run.
        on_run: called after each run, warm-up included.

    Raises:
        ConfigError: the options are wrong, or the peer is not installed.
        RankFailedError: a worker ended.
    """
    load, model = os.getloadavg()[0], options.subject.model_config(longest=1)
    cases = _cases(options, model.vocab_size)
    with _weights(options, model, longest=_longest(cases)) as folder, ExitStack() as stack:
        settings = {"model": folder, "max_model_len": _longest(cases)} | {
            "dtype": options.dtype, "num_threads": options.num_threads, "t_target_s": options.t_target_s,
            "enable_prefix_caching": options.enable_prefix_caching, "seed": options.seed,
            "kv_tokens": max(sum(map(len, one.prompts)) + sum(one.num_outputs) for one in cases),
            "max_num_seqs": max(len(one.prompts) for one in cases),
        }  # fmt: skip
        pythons = {"medha": sys.executable, options.peer: options.peer_python}
        workers = {name: stack.enter_context(start_worker(name, at, settings)) for name, at in pythons.items()}
        results = [line for one in cases for line in _results(one, workers, options, on_run)]
    mixed = options.mixed and described(options.mixed, options.mixed.trace())
    engines = {name: {key: one.ready[key] for key in ("versions", "options")} for name, one in workers.items()}
    head = options.subject.head("compare", asdict(options) | {"mixed": mixed}, load, model)
    return head | {"engines": engines, "results": results}


def start_worker(name: str, python: str, settings: Mapping[str, object]) -> Worker:
    """The worker of an engine, run by an interpreter that has it."""
    threads = {"OMP_NUM_THREADS": str(settings["num_threads"])}
    own = {"PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path)} if python == sys.executable else {}
    script = str(Path(__file__).with_name("peers.py"))
    return Worker(name, [python, script, name], settings, environment=threads | own)


def _cases(options: CompareOptions, vocab_size: int) -> list[_Case]:
    chance = np.random.default_rng(options.seed)

    def prompts(lengths: Sequence[int]) -> Tokens:
        return [chance.integers(0, vocab_size, length).tolist() for length in lengths]

    cases = [_Case(f"prefill {length}", prompts([length]), [1]) for length in options.input_lens]
    if options.batch_size:
        number, name = options.batch_size, f"decode of {options.batch_size}"
        cases.append(_Case(name, prompts([_DECODE_PROMPT] * number), [options.output_len] * number, is_step=True))
    if options.mixed is not None:
        trace = options.mixed.trace()
        given = prompts(trace.prompt_tokens.tolist())
        cases.append(_Case(f"{len(trace)} mixed", given, trace.output_tokens.tolist(), is_even=False))
    return cases


def _longest(cases: Sequence[_Case]) -> int:
    return max(len(ids) + number for one in cases for ids, number in zip(one.prompts, one.num_outputs, strict=True))


@contextmanager
def _weights(options: CompareOptions, model: ModelConfig, *, longest: int) -> Iterator[str]:
    """The model's folder; of a random Llama with weights that every engine reads, normal of a spread of 0.2."""
    if options.subject.model is not None:
        yield options.subject.model
        return
    generator, dtype = torch.Generator().manual_seed(options.seed), TORCH_DTYPES[options.dtype]
    tensors = {
        name: (torch.ones(shape) if len(shape) == 1 else 0.2 * torch.randn(shape, generator=generator)).to(dtype)
        for name, shape in expected_tensors(model).items()
    }
    with tempfile.TemporaryDirectory(prefix="medha-bench-") as folder:
        shape = options.subject.shape
        most = max(longest, shape["max_position_embeddings"])
        write_config(Path(folder), shape | {"max_position_embeddings": most, "torch_dtype": options.dtype})
        save_file(tensors, Path(folder) / "model.safetensors", metadata={"format": "pt"})
        yield folder


def _results(
    case: _Case, workers: Mapping[str, Worker], options: CompareOptions, on_run: Callable[[], None]
) -> list[Report]:
    """A line for each way in which the peer runs a case; one run of medha's stands against all of them."""
    peer = workers[options.peer]
    ways = peer.ready["ways"][:1] if case.is_even else peer.ready["ways"]
    of_way = {"medha": workers["medha"], **dict.fromkeys(ways, peer)}
    tokens: dict[str, Tokens] = {}

    def contestants(one: _Case) -> dict[str, Callable[[], float]]:
        return {way: partial(one.run, worker, way, tokens) for way, worker in of_way.items()}

    in_turn(contestants(case if case.is_even else case.firsts), warmup=options.warmup, runs=0, on_run=on_run)
    timings = {
        way: Timing.of(found)
        for way, found in in_turn(contestants(case), warmup=0, runs=options.runs, on_run=on_run).items()
    }
    return [
        {
            "name": case.name,
            "way": way if len(ways) > 1 else options.peer,
            "medha": asdict(timings["medha"]),
            "peer": asdict(timings[way]),
            "ratio": timings[way].median_s / timings["medha"].median_s,
            "num_requests": len(case.prompts),
            "num_equal": sum(ours == theirs for ours, theirs in zip(tokens["medha"], tokens[way], strict=True)),
            "is_exact": options.dtype == "float32" and case.is_even and options.peer == "transformers",
        }
        for way in ways
    ]
