"""``medha bench compare``: The same weights and prompts through medha and through transformers or vLLM.

Each engine is a worker process (:mod:`medha.bench.peers`) on the same threads and in the same dtype; it gets token ids,
greedy requests and exact numbers of tokens. Rounds are interleaved and whoever is not asked is stopped, so a slow spell
of the machine hits both alike and nobody's idle threads cost the other. The figure is the ratio of medians.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from medha.bench.cli import ANY_COUNT, COUNT, SUBJECT, Report, asked, counted, verb, warmups
from medha.bench.harness import Subject
from medha.bench.load import Workload
from medha.bench.peers import PAGE, Prompts
from medha.bench.timing import Worker, in_turn, timing_of
from medha.cli.options import parse_lengths, parse_object
from medha.config.fields import POSITIVE, choice, integer
from medha.errors import ConfigError
from medha.worker.shard import TORCH_DTYPES
from medha.workload.metrics import percentile

_DECODE_PROMPT, _CONVOY_OUTPUT = 128, 8
_WARM_MIXED = 8


@dataclass(frozen=True, slots=True)
class CompareOptions:
    """What is compared; the mixed requests warm up with the first eight."""

    subject: Subject = field(default_factory=Subject)
    peer: str = asked("transformers", "transformers or vllm.", choice("transformers", "vllm"))
    peer_python: str = asked(
        sys.executable, "Interpreter that has the peer; vLLM's is that of a venv of its own.", shown="this one"
    )
    input_lens: tuple[int, ...] = asked(
        (2048, 16384), "Prompts to read, in tokens, or none.", name="input_len", kind=str, shown="2048,16384",
        read=lambda name, text: () if text == "none" else parse_lengths(name, text),
    )  # fmt: skip
    batch_size: int = asked(16, "Requests that decode together; 0 leaves them out.", ANY_COUNT)
    output_len: int = asked(32, "Tokens that each decodes.", integer(2, 2**31 - 1))
    num_prompts: int = asked(200, "Mixed requests, all there at once; 0 is none.", ANY_COUNT)
    lengths: str = asked("uniform:32-1024,4-128", "Of these, as medha trace synth.")
    request_rate: float | None = asked(
        None, "They arrive so many a second beside a prompt of each length, and all are timed.", POSITIVE, kind=float
    )
    engine_options: Mapping[str, Any] | None = asked(
        None, 'Options of an engine: \'{"vllm": {"max_num_batched_tokens": 512}}\'.', kind=str, read=parse_object
    )
    dtype: str = asked("float32", "float32, bfloat16 or float16.", choice(*TORCH_DTYPES))
    num_threads: int = asked(2, "CPU threads, the same for both.", COUNT)
    enable_prefix_caching: bool = asked(
        False, "Of medha and vLLM; rounds repeat the prompts, so all but the first hit."
    )
    seed: int = asked(0, "Of lengths, prompts and weights.", ANY_COUNT)
    warmup: int = warmups(1)
    runs: int = counted(3)

    def __post_init__(self) -> None:
        if not self.input_lens and not self.batch_size and not self.num_prompts:
            raise ConfigError("input_len, batch_size and num_prompts are all left out; accepted: at least one of them")
        few = not self.num_prompts or not self.input_lens
        if self.request_rate is not None and (self.peer == "transformers" or few):
            what = f"request_rate={self.request_rate:g} with peer={self.peer} and num_prompts={self.num_prompts}"
            lens = f"input_len={','.join(map(str, self.input_lens)) or 'none'}"
            accepted = "with peer=vllm, requests that arrive and a prompt beside them"
            raise ConfigError(f"{what}, {lens}; accepted: {accepted}")
        takers = {"medha", self.peer} - {"transformers"}
        if strange := sorted(set(self.engine_options or ()) - takers):
            raise ConfigError(f"engine_options of {', '.join(strange)}; accepted: of {' and '.join(sorted(takers))}")


class _Case(NamedTuple):
    """Greedy requests that are there at once; of ``is_step`` a decode of all counts: the time beyond that of the first
    tokens, over the steps."""

    name: str
    prompts: Prompts
    num_outputs: list[int]
    is_step: bool = False

    @property
    def lengths(self) -> list[int]:
        """Prompts and outputs; where all are equal nobody pads, and sums run in the same order."""
        return [len(ids) + number for ids, number in zip(self.prompts, self.num_outputs, strict=True)]

    def run(self, worker: Worker, way: str) -> tuple[float, Prompts]:
        """Run once; returns its seconds and the tokens."""
        answer = worker.ask(prompts=self.prompts, num_outputs=self.num_outputs, way=way)
        seconds = float(answer["seconds"])
        if self.is_step:
            first = worker.ask(prompts=self.prompts, num_outputs=[1] * len(self.prompts), way=way)
            seconds = (seconds - float(first["seconds"])) / (self.num_outputs[0] - 1)
        return seconds, answer["tokens"]


def compare(options: CompareOptions) -> Report:
    """The same weights and prompts through medha and through another engine at its best; ratios of medians.

    A ratio above 1 means that medha is faster. Exit code 3: tokens differ that rounding cannot be blamed for.
    """
    model = options.subject.model_config(longest=1)
    cases = _cases(options, model.vocab_size)
    longest, names = max(max(one.lengths) for one in cases), ("dtype", "num_threads", "enable_prefix_caching", "seed")
    settings: dict[str, Any] = {name: getattr(options, name) for name in names}
    settings["engine_options"] = options.engine_options or {}
    tokens = 2 * max(sum(one.lengths) + (len(one.lengths) + 1) * PAGE for one in cases)  # whatever a block's size is
    settings["kv_cache_memory_bytes"] = tokens * model.kv_bytes_per_token(TORCH_DTYPES[options.dtype].itemsize)
    pythons = {"medha": sys.executable, options.peer: options.peer_python}
    with options.subject.checkpoint(longest, dtype=options.dtype, seed=options.seed) as folder, ExitStack() as stack:
        settings |= {"model": folder, "max_model_len": longest}
        workers = {name: stack.enter_context(start_peer(name, at, settings)) for name, at in pythons.items()}
        arriving = [] if options.request_rate is None else [cases.pop()]
        results = [line for one in cases for line in _results(one, workers, options)]
        convoys = [line for one in arriving for line in _convoys(one, cases, workers, options)]
    engines = {name: {key: one.ready[key] for key in ("versions", "options")} for name, one in workers.items()}
    num_wrong = sum(one["num_requests"] - one["num_equal"] for one in results if one["is_exact"])
    found = {"engines": engines, "results": results, "convoys": convoys, "num_wrong": num_wrong}
    unequal = {f"{one['name']} ({one['way']})": one["num_requests"] - one["num_equal"] for one in results}
    found["notes"] = [f"{name}: tokens of {number} requests differ" for name, number in unequal.items() if number]
    return options.subject.head("compare", asdict(options), model) | found


def start_peer(name: str, python: str, settings: Mapping[str, object]) -> Worker:
    """An engine of :mod:`medha.bench.peers`, run by an interpreter that has it."""
    return Worker(name, [python, str(Path(__file__).with_name("peers.py")), name], settings)


def _cases(options: CompareOptions, vocab_size: int) -> list[_Case]:
    chance = np.random.default_rng(options.seed)

    def prompts(lengths: Sequence[int]) -> Prompts:
        return [chance.integers(0, vocab_size, length).tolist() for length in lengths]

    cases = [_Case(f"prefill {length}", prompts([length]), [1]) for length in options.input_lens]
    if number := options.batch_size:
        of_each = prompts([_DECODE_PROMPT] * number), [options.output_len] * number
        cases.append(_Case(f"decode of {number}", *of_each, is_step=True))
    if options.num_prompts:
        trace = Workload(options.num_prompts, lengths=options.lengths, seed=options.seed).trace
        cases.append(_Case(f"{len(trace)} mixed", prompts(trace.prompt_tokens.tolist()), trace.output_tokens.tolist()))
    return cases


def _results(case: _Case, workers: Mapping[str, Worker], options: CompareOptions) -> list[Report]:
    """A line for each way in which the peer runs a case; one run of medha's stands against all of them."""
    peer, is_even = workers[options.peer], len(set(case.lengths)) == 1
    ways = peer.ready["ways"][:1] if is_even else peer.ready["ways"]
    of_way = {"medha": workers["medha"], **dict.fromkeys(ways, peer)}
    few = case if is_even else _Case(case.name, case.prompts[:_WARM_MIXED], case.num_outputs[:_WARM_MIXED])
    for one, runs in ((few, options.warmup), (case, options.runs)):
        contestants = {way: partial(one.run, worker, way) for way, worker in of_way.items()}
        found = in_turn(contestants, warmup=0, runs=runs)
    timing = {way: timing_of([seconds for seconds, _ in ran]) for way, ran in found.items()}
    tokens = {way: ran[-1][1] for way, ran in found.items()}
    return [
        {
            "name": case.name,
            "way": way if len(ways) > 1 else options.peer,
            "medha": timing["medha"],
            "peer": timing[way],
            "ratio": timing[way]["median_s"] / timing["medha"]["median_s"],
            "num_requests": len(case.prompts),
            "num_equal": sum(ours == theirs for ours, theirs in zip(tokens["medha"], tokens[way], strict=True)),
            "is_exact": options.dtype == "float32" and is_even and options.peer == "transformers",
        }
        for way in ways
    ]


def _convoys(
    shorts: _Case, cases: Sequence[_Case], workers: Mapping[str, Worker], options: CompareOptions
) -> list[Report]:
    """Short requests by Poisson arrivals beside each long prompt, which comes first; by engine."""
    assert options.request_rate is not None, "somebody arrives"
    gaps = np.random.default_rng(options.seed).exponential(1 / options.request_rate, len(shorts.prompts))
    found = []
    for case in (one for one in cases if not one.is_step):
        prompts, numbers = [*case.prompts, *shorts.prompts], [_CONVOY_OUTPUT, *shorts.num_outputs]
        work = {"prompts": prompts, "num_outputs": numbers, "way": "arriving", "arrivals": [0.0, *np.cumsum(gaps)]}
        ask = {name: partial(worker.ask, **work) for name, worker in workers.items()}
        ran = in_turn(ask, warmup=options.warmup, runs=options.runs)
        for name, worker in workers.items():
            alone = [
                worker.ask(prompts=[ids], num_outputs=[number], way="arriving", arrivals=[0.0])["tokens"][0]
                for ids, number in zip(shorts.prompts, shorts.num_outputs, strict=True)
            ]
            found.append({"name": case.name, "engine": name} | _convoy_figures(ran[name], alone, shorts.num_outputs))
    return found


def _convoy_figures(ran: Sequence[Report], alone: Sequence[Sequence[float]], num_outputs: Sequence[int]) -> Report:
    """Of runs of a long prompt and short ones; ``alone`` has the times of the short ones without company."""
    runs = np.array([answer["tokens"] for answer in ran])  # [run, request, first or last token]
    first, last = runs[:, 1:, 0], runs[:, 1:, 1]
    more, slowdown = np.array(num_outputs) - 1, last / np.array(alone)[:, 1]
    tpot_s = (last - first)[:, more > 0] / more[more > 0]
    return {
        **{f"ttft_p{at}_s": percentile(first.ravel(), at) for at in (50, 99)},
        **{f"tpot_p{at}_s": percentile(tpot_s.ravel(), at) for at in (50, 99)},
        **{f"slowdown_p{at}": percentile(slowdown.ravel(), at) for at in (50, 99)},
        "long_s": percentile(runs[:, 0, 0], 50),
        "total_s": percentile([answer["seconds"] for answer in ran], 50),
        "runs": runs.tolist(),
    }


_SHOWS = {"results": ("name", "way", "medha", "peer", "ratio", "num_requests", "num_equal"), "convoys": ()}
_NOTES = (
    "interleaved, the idle side stopped",
    "equal: requests of which every token is the same; in 16 bits or with padding another order of sums may turn a tie",
)
verb("compare", CompareOptions, compare, _SHOWS, _NOTES, {name: SUBJECT[name] for name in ("model", "hf_overrides")})
