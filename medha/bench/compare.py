"""``medha bench compare``: the same weights and prompts through medha and through Hugging Face transformers.

transformers runs at its best: ``sdpa`` attention, inference mode, logits of the last token alone, whole prompts, equal
lengths in a batch (so nothing is padded), a warm cache of code paths. Both run in one process on the same threads,
interleaved, and the figure is the ratio of medians. medha runs through its whole engine: scheduler, paged cache,
sampler. Requests of different lengths are in :mod:`medha.bench.compare_mixed`.
"""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

from medha.bench.compare_mixed import PADDED_BATCH, WAYS, mixed_requests, run_mixed
from medha.bench.comparing import BLOCK_SIZE, Comparison, Pair
from medha.bench.model import describe, random_llama
from medha.bench.timing import Timing, interleaved
from medha.bench.workloads import Workload, described, longest_of
from medha.cli.report import check_writable, machine_line, progress, stamp, write_report
from medha.cli.table import counted, figures_table, report_console
from medha.errors import ConfigError
from medha.llm import LLM
from medha.params import SamplingParams
from medha.worker.shard import TORCH_DTYPES
from medha.workload.trace import Trace


@dataclass(frozen=True, slots=True)
class CompareOptions:
    """What is compared, in each dtype.

    Attributes:
        prompt_lens: of prompts that are read to their first token, in tokens; none leaves it out.
        decode_batch: requests that decode together; 0 leaves it out.
        decode_prompt_len, decode_tokens: their prompts, and what each generates.
        mixed: requests of different lengths, all there at once; None leaves them out.
        dtypes: names.
        t_target_s: seconds of a batch of medha's, whose chunks have at most 2,048 tokens.
        warmup, runs: of each side and line; the mixed workload warms up with its first batch.
        seed: of weights and prompts.
    """

    prompt_lens: tuple[int, ...] = (2048, 16384)
    decode_batch: int = 16
    decode_prompt_len: int = 128
    decode_tokens: int = 32
    mixed: Workload | None = None
    dtypes: tuple[str, ...] = ("float32",)
    num_threads: int = 2
    t_target_s: float = 1.0
    warmup: int = 1
    runs: int = 3
    seed: int = 0
    hf_overrides: Mapping[str, Any] | None = None

    def __post_init__(self) -> None:
        wrong = [name for name in self.dtypes if name not in TORCH_DTYPES]
        if wrong or not self.dtypes:
            raise ConfigError(f"dtype={','.join(self.dtypes)!r}; accepted: {', '.join(TORCH_DTYPES)}, comma separated")
        if not self.prompt_lens and not self.decode_batch and self.mixed is None:
            raise ConfigError("prompt_lens, decode_batch and mixed are all left out; accepted: at least one of them")

    @property
    def shape(self) -> dict[str, Any]:
        """Fields of the model's ``config.json``."""
        return random_llama(self.hf_overrides)

    @property
    def num_runs(self) -> int:
        """How many runs there are in all, warm-up included."""
        lines = len(self.prompt_lens) + bool(self.decode_batch)
        sides = 2 * lines + (1 + len(WAYS)) * (self.mixed is not None)
        return len(self.dtypes) * sides * (self.warmup + self.runs)


def compare(
    options: CompareOptions, *, output_json: Path | None = None, on_run: Callable[[], None] = lambda: None
) -> list[Comparison]:
    """Run the comparison.

    Args:
        options: what to run.
        output_json: where to write the report.
        on_run: called after each timed run, for a progress bar; see :attr:`CompareOptions.num_runs`.

    Raises:
        ConfigError: the options are wrong, or transformers is not installed.
    """
    torch.set_num_threads(options.num_threads)
    trace = None if options.mixed is None else options.mixed.trace()
    results: list[Comparison] = []
    for dtype in options.dtypes:
        pair = _make_pair(options, dtype, trace)
        results += [_prefill(pair, length, options, on_run) for length in options.prompt_lens]
        if options.decode_batch:
            results.append(_decode(pair, options, on_run))
        if trace is not None:
            requests = mixed_requests(trace, options.shape["vocab_size"], seed=options.seed)
            results += run_mixed(pair, requests, warmup=options.warmup, runs=options.runs, on_run=on_run)
    given = asdict(options)
    if options.mixed is not None and trace is not None:
        given["mixed"] = {**described(options.mixed, trace), "padded_batch": PADDED_BATCH}
    write_report(
        output_json,
        {
            "benchmark": "compare",
            "environment": stamp(),
            "model": options.shape,
            "options": given,
            "results": [result.report() for result in results],
        },
    )
    return results


def run_and_print(options: CompareOptions, output_json: Path | None) -> int:
    """Run with a progress bar on stderr, print the table on stdout.

    Returns:
        0, or 3 where tokens differ that rounding cannot be blamed for: in float32, without padding.
    """
    check_writable(output_json)
    with progress("comparing", options.num_runs) as advance:
        results = compare(options, output_json=output_json, on_run=advance)
    table = figures_table(
        f"medha against transformers: {describe(options.shape)}",
        ("medha ms\nmin-max", "HF ms\nmin-max", "ratio", "tokens"),
        words=("what", "dtype"),
    )
    for result in results:
        timings = (result.medha, result.transformers)
        table.add_row(
            result.name,
            result.dtype,
            *("\n".join(timing.cells_ms()) for timing in timings),
            f"{result.ratio:.2f}x",
            result.tokens_text,
        )
    console = report_console()
    console.print(table)
    console.print(
        f"{machine_line()}; {counted(options.num_threads, 'thread')}; "
        f"batches of medha's of {options.t_target_s:g} s at most; "
        f"median of {options.runs} after {options.warmup} warm-up, interleaved",
        highlight=False,
    )
    console.print(
        "tokens: of how many requests every one is the same; in 16 bits or with padding another order of "
        "sums may turn a tie",
        highlight=False,
    )
    return 0 if all(result.same_tokens for result in results if result.is_exact) else 3


def _make_pair(options: CompareOptions, dtype: str, trace: Trace | None) -> Pair:
    """A random Llama as a transformers model, and the same weights in medha."""
    try:
        import transformers
    except ImportError as error:
        raise ConfigError("bench compare needs transformers; pip install 'medha[bench]'") from error
    torch.manual_seed(options.seed)
    config = transformers.LlamaConfig(**options.shape, initializer_range=0.2)
    model: Any = transformers.LlamaForCausalLM(config)
    model = model.to(TORCH_DTYPES[dtype]).eval()
    model.set_attn_implementation("sdpa")
    lengths = [length + 1 for length in options.prompt_lens]
    if options.decode_batch:
        lengths.append(options.decode_prompt_len + options.decode_tokens)
    blocks = [_blocks(length) for length in lengths]
    if options.decode_batch:
        blocks.append(options.decode_batch * _blocks(lengths[-1]))
    if trace is not None:
        lengths.append(longest_of(trace))
        blocks.append(sum(_blocks(int(total)) for total in trace.prompt_tokens + trace.output_tokens))
    with tempfile.TemporaryDirectory(prefix="medha-bench-") as folder:
        model.save_pretrained(folder)
        llm = LLM(
            folder,
            dtype=dtype,
            max_model_len=max(lengths),
            block_size=BLOCK_SIZE,
            num_kv_blocks=max(blocks) + 1,
            chunk_size=2048,
            max_batch_tokens=2048,
            t_target_s=options.t_target_s,
        )
    return Pair(dtype, llm, model)


def _blocks(num_tokens: int) -> int:
    return -(-num_tokens // BLOCK_SIZE)


def _prefill(pair: Pair, length: int, options: CompareOptions, on_run: Callable[[], None]) -> Comparison:
    """Time to the first token of one prompt."""
    prompt = _prompts(1, length, options)[0]
    first: dict[str, int] = {}

    def ours() -> None:
        (output,) = pair.llm.generate(prompt, SamplingParams(temperature=0.0, max_tokens=1), use_tqdm=False)
        first["medha"] = output.outputs[0].token_ids[0]

    def theirs() -> None:
        with torch.inference_mode():
            output = pair.reference(torch.tensor([prompt]), use_cache=True, logits_to_keep=1)
            first["transformers"] = int(output.logits[0, -1].argmax())

    timings = interleaved(
        {"medha": ours, "transformers": theirs}, warmup=options.warmup, runs=options.runs, on_run=on_run
    )
    return Comparison.of(
        f"prefill {length}",
        pair.dtype,
        timings["medha"],
        timings["transformers"],
        tokens=([[first["medha"]]], [[first["transformers"]]]),
    )


def _decode(pair: Pair, options: CompareOptions, on_run: Callable[[], None]) -> Comparison:
    """Mean seconds of a step in which the whole batch decodes; steps with a prompt, or after an end, are left out."""
    prompts = _prompts(options.decode_batch, options.decode_prompt_len, options)
    tokens: dict[str, list[list[int]]] = {}
    seconds: dict[str, list[float]] = {"medha": [], "transformers": []}
    engine = pair.llm.engine

    def ours() -> None:
        params = SamplingParams(temperature=0.0, max_tokens=options.decode_tokens)
        ends: list[tuple[float, int]] = []
        engine.on_step = lambda batch, _, __: ends.append((engine.now(), batch.num_decodes))
        outputs = pair.llm.generate(prompts, params, use_tqdm=False)
        engine.on_step = None
        steps = [end - before for (before, _), (end, decoding) in pairwise(ends) if decoding == len(prompts)]
        if not steps:
            raise ConfigError(
                f"decode_tokens={options.decode_tokens}; accepted: more, so that all {len(prompts)} decode at once"
            )
        seconds["medha"].append(statistics.fmean(steps))
        tokens["medha"] = [list(output.outputs[0].token_ids) for output in outputs]

    @torch.inference_mode()
    def theirs() -> None:
        output = pair.reference(torch.tensor(prompts), use_cache=True, logits_to_keep=1)
        column = output.logits[:, -1].argmax(-1)
        columns = [column]
        start = engine.now()
        for _ in range(options.decode_tokens - 1):
            output = pair.reference(column[:, None], past_key_values=output.past_key_values, use_cache=True)
            column = output.logits[:, -1].argmax(-1)
            columns.append(column)
        seconds["transformers"].append((engine.now() - start) / (options.decode_tokens - 1))
        tokens["transformers"] = torch.stack(columns, dim=1).tolist()

    interleaved({"medha": ours, "transformers": theirs}, warmup=options.warmup, runs=options.runs, on_run=on_run)
    return Comparison.of(
        f"decode of {len(prompts)}",
        pair.dtype,
        *(Timing.of(seconds[side][options.warmup :]) for side in ("medha", "transformers")),
        tokens=(tokens["medha"], tokens["transformers"]),
    )


def _prompts(count: int, length: int, options: CompareOptions) -> list[list[int]]:
    generator = torch.Generator().manual_seed(options.seed)
    ids = torch.randint(0, options.shape["vocab_size"], (count, length), generator=generator)
    return [[int(token) for token in row] for row in ids]
