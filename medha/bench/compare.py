"""``medha bench compare``: the same weights and prompts through medha and through Hugging Face transformers.

transformers runs at its best: ``sdpa`` attention, inference mode, logits of the last token alone, whole prompts, equal
lengths in a batch (so nothing is padded), a warm cache of code paths. Both run in one process on the same threads,
interleaved, and the figure is the ratio of medians. medha runs through its whole engine: scheduler, paged cache,
sampler.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from medha.bench.model import describe, random_llama
from medha.bench.report import Timing, check_writable, interleaved, machine_line, stamp, write_report
from medha.errors import ConfigError
from medha.llm import LLM
from medha.request import SamplingParams


@dataclass(frozen=True, slots=True)
class CompareOptions:
    """What is compared: prefill of each prompt length, decode of a batch."""

    prompt_lens: tuple[int, ...] = (2048, 16384)
    decode_batch: int = 16
    decode_prompt_len: int = 128
    decode_tokens: int = 32
    dtype: str = "float32"
    num_threads: int = 2
    warmup: int = 1
    runs: int = 3
    seed: int = 0
    hf_overrides: Mapping[str, Any] | None = None

    @property
    def shape(self) -> dict[str, Any]:
        """Fields of the model's ``config.json``."""
        return random_llama(self.hf_overrides)


@dataclass(frozen=True, slots=True)
class Comparison:
    """One line of the result; ``ratio`` above 1 means that medha is faster."""

    name: str
    medha: Timing
    transformers: Timing
    same_tokens: bool

    @property
    def ratio(self) -> float:
        """transformers' median over medha's."""
        return self.transformers.median_s / self.medha.median_s


def compare(
    options: CompareOptions, *, output_json: Path | None = None, on_run: Callable[[], None] = lambda: None
) -> list[Comparison]:
    """Run the comparison.

    Args:
        options: what to run.
        output_json: where to write the report.
        on_run: called after each timed run, for a progress bar; see :func:`num_runs`.

    Raises:
        ConfigError: transformers is not installed.
    """
    torch.set_num_threads(options.num_threads)
    with tempfile.TemporaryDirectory(prefix="medha-bench-") as folder:
        reference = _make_model(Path(folder), options)
        longest = max(*options.prompt_lens, options.decode_prompt_len) + options.decode_tokens
        llm = LLM(
            folder,
            max_model_len=longest,
            num_kv_blocks=max(-(-longest // 256), options.decode_batch * 2) + 1,
            chunk_size=2048,
            max_batch_tokens=2048,
        )
    results = [_prefill(llm, reference, length, options, on_run) for length in options.prompt_lens]
    results.append(_decode(llm, reference, options, on_run))
    write_report(
        output_json,
        {
            "benchmark": "compare",
            "environment": stamp(),
            "model": options.shape,
            "options": {name: getattr(options, name) for name in options.__slots__},
            "results": [
                {
                    "name": r.name,
                    "medha": r.medha,
                    "transformers": r.transformers,
                    "ratio": r.ratio,
                    "same_tokens": r.same_tokens,
                }
                for r in results
            ],
        },
    )
    return results


def run_and_print(options: CompareOptions, output_json: Path | None) -> int:
    """Run with a progress bar on stderr, print the table on stdout; returns 0, or 3 where tokens differ."""
    check_writable(output_json)
    with Progress(console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("comparing", total=num_runs(options))
        results = compare(options, output_json=output_json, on_run=lambda: bar.advance(task))
    table = Table(title=f"medha against transformers: {describe(options.shape)}")
    table.add_column("what", no_wrap=True)
    for name in ("medha ms", "min-max", "HF ms", "min-max", "ratio"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("tokens")
    for result in results:
        timings = (result.medha, result.transformers)
        table.add_row(
            result.name,
            *(cell for timing in timings for cell in timing.cells_ms()),
            f"{result.ratio:.2f}x",
            "equal" if result.same_tokens else "DIFFER",
        )
    console = Console()
    console.print(table)
    console.print(
        f"{machine_line()}; {options.num_threads} threads, {options.dtype}; "
        f"median of {options.runs} after {options.warmup} warm-up, interleaved"
    )
    return 0 if all(result.same_tokens for result in results) else 3


def num_runs(options: CompareOptions) -> int:
    """How often ``on_run`` is called."""
    return 2 * (options.warmup + options.runs) * (len(options.prompt_lens) + 1)


def _make_model(folder: Path, options: CompareOptions) -> Any:
    """Write a random Llama checkpoint; returns it as a transformers model."""
    try:
        import transformers
    except ImportError as error:
        raise ConfigError("bench compare needs transformers; pip install 'medha[bench]'") from error
    torch.manual_seed(options.seed)
    config = transformers.LlamaConfig(**options.shape, initializer_range=0.2)
    model = transformers.LlamaForCausalLM(config).to(getattr(torch, options.dtype)).eval()
    model.save_pretrained(folder)
    model.set_attn_implementation("sdpa")
    return model


def _prefill(llm: LLM, reference: Any, length: int, options: CompareOptions, on_run: Callable[[], None]) -> Comparison:
    """Time to the first token of one prompt."""
    prompt = _prompts(1, length, options)[0]
    first: dict[str, int] = {}

    def ours() -> None:
        (output,) = llm.generate(prompt, SamplingParams(temperature=0.0, max_tokens=1), use_tqdm=False)
        first["medha"] = output.outputs[0].token_ids[0]

    def theirs() -> None:
        with torch.inference_mode():
            output = reference(torch.tensor([prompt]), use_cache=True, logits_to_keep=1)
            first["transformers"] = int(output.logits[0, -1].argmax())

    timings = interleaved(
        {"medha": ours, "transformers": theirs}, warmup=options.warmup, runs=options.runs, on_run=on_run
    )
    same = first["medha"] == first["transformers"]
    return Comparison(f"prefill {length}", timings["medha"], timings["transformers"], same)


def _decode(llm: LLM, reference: Any, options: CompareOptions, on_run: Callable[[], None]) -> Comparison:
    """Seconds of one decode step of a whole batch, prefill left out."""
    prompts = _prompts(options.decode_batch, options.decode_prompt_len, options)
    tokens: dict[str, list[list[int]]] = {}
    seconds: dict[str, list[float]] = {"medha": [], "transformers": []}

    def ours() -> None:
        params = SamplingParams(temperature=0.0, max_tokens=options.decode_tokens, output_kind="final_only")
        engine = llm.engine
        for i, prompt in enumerate(prompts):
            engine.add_request(f"decode-{i}", prompt, params)
        found: dict[str, list[int]] = {}
        starts: list[float] = []
        while engine.has_unfinished:
            found.update({o.request_id: o.outputs[0].token_ids for o in engine.step()})
            if not starts and not engine.prefills():
                starts.append(engine.now())  # the step that ended the last prefill is over
        seconds["medha"].append((engine.now() - starts[0]) / (options.decode_tokens - 1))
        tokens["medha"] = [found[f"decode-{i}"] for i in range(len(prompts))]

    @torch.inference_mode()
    def theirs() -> None:
        output = reference(torch.tensor(prompts), use_cache=True, logits_to_keep=1)
        column = output.logits[:, -1].argmax(-1)
        columns = [column]
        start = llm.engine.now()
        for _ in range(options.decode_tokens - 1):
            output = reference(column[:, None], past_key_values=output.past_key_values, use_cache=True)
            column = output.logits[:, -1].argmax(-1)
            columns.append(column)
        seconds["transformers"].append((llm.engine.now() - start) / (options.decode_tokens - 1))
        tokens["transformers"] = torch.stack(columns, dim=1).tolist()

    interleaved({"medha": ours, "transformers": theirs}, warmup=options.warmup, runs=options.runs, on_run=on_run)
    return Comparison(
        f"decode of {len(prompts)}",
        Timing.of(seconds["medha"][options.warmup :]),
        Timing.of(seconds["transformers"][options.warmup :]),
        tokens["medha"] == tokens["transformers"],
    )


def _prompts(count: int, length: int, options: CompareOptions) -> list[list[int]]:
    generator = torch.Generator().manual_seed(options.seed)
    ids = torch.randint(0, options.shape["vocab_size"], (count, length), generator=generator)
    return [[int(token) for token in row] for row in ids]
