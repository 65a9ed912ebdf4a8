"""``python -m medha.generate``: load a checkpoint and complete prompts, many at once.

With no argument at all it runs the demo (:mod:`medha.demo`). Text goes to stdout, everything else to stderr.
Exit codes: 0 done, 2 bad usage or model, 3 some requests failed, 4 the engine failed, 130 interrupted.
"""

from __future__ import annotations

import logging
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Annotated, Any, TextIO

import typer

from medha.config import EngineConfig, parse_bytes
from medha.errors import ConfigError, MedhaError, exit_code

if TYPE_CHECKING:
    from medha.driver import Arrival
    from medha.engine import Engine

logger = logging.getLogger("medha")

_FAILED_REQUESTS = 3

app = typer.Typer(
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

Model = Annotated[
    str | None, typer.Option("--model", "--model-path", "-m", help="Hugging Face folder or hub id.", show_default=False)
]


@app.command()
def generate(
    model_argument: Annotated[str | None, typer.Argument(metavar="[MODEL]", show_default=False)] = None,
    model: Model = None,
    prompt: Annotated[list[str] | None, typer.Option(help="Text to complete; may be repeated.")] = None,
    prompt_file: Annotated[Path | None, typer.Option(help="File whose text is one prompt.")] = None,
    requests: Annotated[Path | None, typer.Option(help="JSON lines, one request each.")] = None,
    output: Annotated[Path | None, typer.Option(help="JSON lines, appended as each request finishes.")] = None,
    json_lines: Annotated[bool, typer.Option("--json", help="Print output lines as JSON on stdout.")] = False,
    chat: Annotated[bool, typer.Option(help="Wrap --prompt in the model's chat template.")] = False,
    max_tokens: Annotated[int, typer.Option("--max-tokens", "--max-new-tokens")] = 128,
    temperature: Annotated[float | None, typer.Option(help="Greedy (0) unless given.")] = None,
    top_p: Annotated[float | None, typer.Option()] = None,
    top_k: Annotated[int | None, typer.Option()] = None,
    min_p: Annotated[float | None, typer.Option()] = None,
    repetition_penalty: Annotated[float | None, typer.Option()] = None,
    stop: Annotated[list[str] | None, typer.Option(help="End at this text; may be repeated.")] = None,
    ignore_eos: Annotated[bool, typer.Option("--ignore-eos")] = False,
    logprobs: Annotated[int | None, typer.Option()] = None,
    seed: Annotated[int, typer.Option(help="Of sampling and of dummy weights.")] = 0,
    tokenizer: Annotated[str | None, typer.Option()] = None,
    revision: Annotated[str | None, typer.Option()] = None,
    dtype: Annotated[str, typer.Option(help="auto, float32, bfloat16 or float16.")] = "auto",
    device: Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N.")] = "auto",
    attention_backend: Annotated[str, typer.Option(help="auto or torch.")] = "auto",
    load_format: Annotated[str, typer.Option(help="auto, safetensors or dummy (random weights).")] = "auto",
    max_model_len: Annotated[int | None, typer.Option("--max-model-len", "--context-length")] = None,
    rope_scaling: Annotated[str | None, typer.Option(help="A type (yarn, linear) or a JSON object.")] = None,
    hf_overrides: Annotated[str | None, typer.Option(help="JSON object merged over config.json.")] = None,
    block_size: Annotated[int, typer.Option("--block-size", "--page-size", help="KV tokens a block.")] = 256,
    num_kv_blocks: Annotated[int | None, typer.Option("--num-kv-blocks", "--num-gpu-blocks-override")] = None,
    kv_memory: Annotated[str | None, typer.Option(help="KV pool, for example 4GiB.")] = None,
    gpu_memory_utilization: Annotated[float, typer.Option(help="Share of GPU memory to use.")] = 0.9,
    max_num_seqs: Annotated[int, typer.Option("--max-num-seqs", "--max-running-requests")] = 256,
    max_batch_tokens: Annotated[int, typer.Option("--max-batch-tokens", "--max-num-batched-tokens")] = 2048,
    chunk_size: Annotated[int, typer.Option("--chunk-size", "--chunked-prefill-size")] = 512,
    num_threads: Annotated[int | None, typer.Option(help="CPU threads.")] = None,
    timeline: Annotated[Path | None, typer.Option(help="Chrome/Perfetto trace of what ran (.json, .json.gz).")] = None,
    log_level: Annotated[str, typer.Option(envvar="MEDHA_LOG_LEVEL")] = "info",
    no_progress: Annotated[bool, typer.Option("--no-progress", envvar="MEDHA_NO_PROGRESS")] = False,
) -> None:
    """Complete prompts with a Hugging Face checkpoint. With no argument at all: a demo that needs no download."""
    sampling = {
        "max_tokens": max_tokens,
        "temperature": 0.0 if temperature is None else temperature,
        "top_p": top_p,
        "top_k": top_k,
        "min_p": min_p,
        "repetition_penalty": repetition_penalty,
        "stop": stop or None,
        "ignore_eos": ignore_eos,
        "logprobs": logprobs,
    }
    options = {
        "tokenizer": tokenizer,
        "revision": revision,
        "dtype": dtype,
        "device": device,
        "attention_backend": attention_backend,
        "load_format": load_format,
        "max_model_len": max_model_len,
        "block_size": block_size,
        "num_kv_blocks": num_kv_blocks,
        "gpu_memory_utilization": gpu_memory_utilization,
        "max_num_seqs": max_num_seqs,
        "max_batch_tokens": max_batch_tokens,
        "chunk_size": chunk_size,
        "num_threads": num_threads,
        "seed": seed,
    }
    job = Job(
        model=model_argument,
        model_option=model,
        prompts=list(prompt or []),
        prompt_file=prompt_file,
        requests=requests,
        output=output,
        json_lines=json_lines,
        chat=chat,
        sampling={name: value for name, value in sampling.items() if value is not None},
        options=options,
        rope_scaling=rope_scaling,
        hf_overrides=hf_overrides,
        kv_memory=kv_memory,
        timeline=timeline,
        live=not no_progress,
        log_level=log_level,
    )
    raise typer.Exit(guarded(lambda: run_job(job)))


@dataclass(frozen=True, slots=True)
class Job:
    """What the command line asked for."""

    model: str | None
    model_option: str | None
    prompts: list[str]
    prompt_file: Path | None
    requests: Path | None
    output: Path | None
    json_lines: bool
    chat: bool
    sampling: dict[str, Any]
    options: dict[str, Any]
    rope_scaling: str | None
    hf_overrides: str | None
    kv_memory: str | None
    timeline: Path | None
    live: bool
    log_level: str


def run_job(job: Job) -> int:
    """Load, serve, write; returns the exit code.

    Raises:
        MedhaError: nothing could be served.
    """
    from medha.build import build_engine
    from medha.driver import drive
    from medha.jsonl import write_line
    from medha.timeline import Timeline

    start_logging(job.log_level)
    config = _engine_config(job)
    arrivals = _arrivals(job)
    timeline = None if job.timeline is None else Timeline()
    failed = 0
    with ExitStack() as stack:
        file = None if job.output is None else stack.enter_context(_opened(job.output))
        if job.timeline is not None:
            stack.enter_context(_opened(job.timeline))
        engine = build_engine(config, timeline=timeline)
        logger.info("sampling: %s", ", ".join(f"{name}={value}" for name, value in job.sampling.items()))
        interrupted = stack.enter_context(first_interrupt())
        display = stack.enter_context(_display(job, engine, single=len(arrivals) == 1))
        for output in drive(engine, arrivals, should_stop=lambda: bool(interrupted), on_step=display.refresh):
            display.update(output)
            if output.finished:
                failed += output.error is not None
                if file is not None:
                    write_line(file, output)
        if timeline is not None and job.timeline is not None:
            timeline.write(job.timeline)
    if interrupted:
        logger.warning("interrupted; what was produced is kept")
        return exit_code(KeyboardInterrupt())
    return _FAILED_REQUESTS if failed else 0


def guarded(run: Callable[[], int]) -> int:
    """Run a command; an error of ours becomes one line on stderr and its exit code."""
    try:
        return run()
    except MedhaError as error:
        print(f"error: {type(error).__name__}: {error}", file=sys.stderr)
        return exit_code(error)
    except KeyboardInterrupt as interrupt:
        return exit_code(interrupt)


@contextmanager
def first_interrupt() -> Iterator[list[int]]:
    """Within, the first Ctrl-C is noted in the list that is yielded; the second raises KeyboardInterrupt."""
    noted: list[int] = []

    def note(signum: int, frame: FrameType | None) -> None:
        if noted:
            raise KeyboardInterrupt
        noted.append(signum)

    try:
        before = signal.signal(signal.SIGINT, note)
    except ValueError:  # not the main thread: there is no Ctrl-C to note
        yield noted
        return
    try:
        yield noted
    finally:
        signal.signal(signal.SIGINT, before)


def start_logging(level: str) -> None:
    """Log medha's own messages to stderr.

    Raises:
        ConfigError: no such level.
    """
    number = logging.getLevelNamesMapping().get(level.upper())
    if number is None:
        raise ConfigError(f"log_level={level!r}; accepted: debug, info, warning, error")
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter("medha: %(message)s"))
    logger.handlers[:] = [handler]
    logger.setLevel(number)


def hyphened(arguments: list[str]) -> list[str]:
    """The arguments with ``_`` in option names replaced by ``-``, so that both spellings work."""
    out = []
    for argument in arguments:
        name, equals, value = argument.partition("=")
        out.append(name.replace("_", "-") + equals + value if name.startswith("--") else argument)
    return out


def _one_model(argument: str | None, option: str | None) -> str:
    if argument is not None and option is not None:
        raise ConfigError(f"the model is given twice: {argument!r} and --model {option!r}")
    model = argument if argument is not None else option
    if model is None:
        raise ConfigError("no model; accepted: --model with a Hugging Face folder or hub id (or no argument: the demo)")
    return model


def _engine_config(job: Job) -> EngineConfig:
    from medha.models.hf_config import parse_hf_overrides

    options = dict(job.options)
    if job.kv_memory is not None:
        options["kv_memory"] = parse_bytes(job.kv_memory)
    if job.rope_scaling is not None:
        text = job.rope_scaling
        options["rope_scaling"] = parse_hf_overrides(text) if text.lstrip().startswith("{") else text
    if job.hf_overrides is not None:
        options["hf_overrides"] = parse_hf_overrides(job.hf_overrides)
    return EngineConfig.from_flat(_one_model(job.model, job.model_option), **options)


def _arrivals(job: Job) -> list[Arrival]:
    """The requests of the command line, from whichever source is given."""
    from medha.driver import Arrival
    from medha.jsonl import read_requests
    from medha.request import SamplingParams

    texts = list(job.prompts)
    if job.prompt_file is not None:
        try:
            texts.append(job.prompt_file.read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"prompt file {job.prompt_file}: {error}") from error
    if bool(texts) == (job.requests is not None):
        given = "both" if texts else "neither"
        raise ConfigError(f"{given} of prompts and --requests given; accepted: --prompt, --prompt-file or --requests")
    sampling = {**job.sampling, "output_kind": "delta"}
    if job.requests is not None:
        return read_requests(job.requests, sampling)
    params = SamplingParams.from_dict(sampling)
    prompts = [{"messages": [{"role": "user", "content": text}]} if job.chat else text for text in texts]
    return [Arrival(f"prompt-{i}", prompt, params) for i, prompt in enumerate(prompts)]


@contextmanager
def _opened(path: Path) -> Iterator[TextIO]:
    """Open an output file now, so that one that cannot be written is found before the run."""
    try:
        file = path.open("w", encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"output file {path}: {error.strerror}") from error
    with file:
        yield file


def _display(job: Job, engine: Engine, *, single: bool) -> AbstractContextManager[Any]:
    from rich.console import Console

    from medha.display import Display, JsonLines, StreamedText

    if job.json_lines:
        return JsonLines(sys.stdout)
    if single:
        return StreamedText(Display(engine, Console(stderr=True), live=job.live), sys.stdout)
    return Display(engine, Console(), live=job.live)


def main(argv: list[str] | None = None) -> None:
    """Entry point: the demo without arguments, the command with some. Ends in SystemExit."""
    arguments = sys.argv[1:] if argv is None else argv
    if arguments:
        app(args=hyphened(arguments), prog_name="medha.generate")
    from medha.demo import run_demo

    sys.exit(guarded(run_demo))


if __name__ == "__main__":
    main()
