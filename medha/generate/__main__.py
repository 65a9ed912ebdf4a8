"""``python -m medha.generate``, also ``medha generate``: complete prompts with a checkpoint, many at once.

With no argument at all it runs the demo (:mod:`medha.verify.demo`). Exit codes and streams: :mod:`medha.cli.command`.
"""

from __future__ import annotations

import gc
import json
import logging
import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, redirect_stdout
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TextIO

import typer
from rich.console import Console

from medha.cli import command
from medha.cli.display import Display, StreamedText, budget_text, print_explanation
from medha.cli.files import emptied, opened
from medha.cli.options import ENGINE, MODEL, SAMPLING, LogLevel, ModelArgument, but, engine_options, takes
from medha.cli.report import report_console
from medha.config import EngineConfig
from medha.engine.arrivals import Arrival, drive
from medha.engine.jsonl import OutputLines, unwritable_reported
from medha.errors import ConfigError
from medha.generate.work import requested
from medha.parallel.launch import Launch, is_first_rank, is_launched, read_launch
from medha.parallel.own_ranks import own_ranks
from medha.timeline import Timeline

if TYPE_CHECKING:
    from medha.engine.engine import Engine

logger = logging.getLogger("medha")
app = command.make_app()
_asked = partial(typer.Option, rich_help_panel="Requests", show_default=False)
_written = partial(typer.Option, rich_help_panel="Output")
File = Path | None
_RESUME = (
    "Go on with the --output of a run of the same --requests and options that was cut short. What has a line there is "
    "skipped, also with an error of its own; what was aborted, or lost with the engine, runs again. The tokens are "
    "those of one whole run."
)


@app.command()
@takes({**MODEL, **but(SAMPLING, max_tokens=128, temperature=0.0), **ENGINE})
def generate(
    context: typer.Context,
    model_argument: ModelArgument = None,
    prompt: Annotated[list[str] | None, _asked(help="Text to complete; may be repeated.")] = None,
    prompt_file: Annotated[
        File, _asked(help="File whose text is one prompt, to the byte; - is stdin, as is a pipe alone.")
    ] = None,
    requests: Annotated[
        File, _asked(help="JSON lines, one request each, OpenAI's batch lines too; - is stdin.")
    ] = None,
    chat: Annotated[bool, _asked("--chat", help="Put prompts into the model's chat template.")] = False,
    dry_run: Annotated[
        bool, _written("--dry-run", help="Print rank map, memory and longest context; load nothing.")
    ] = False,
    output: Annotated[File, _written(help="New or empty file for JSON lines, one as each request ends.")] = None,
    overwrite: Annotated[bool, _written("--overwrite", help="Start --output anew.")] = False,
    resume: Annotated[bool, _written("--resume", help=_RESUME)] = False,
    json_lines: Annotated[bool, _written("--json", help="The same lines on stdout in place of text.")] = False,
    timeline: Annotated[File, _written(help="Chrome trace of what ran (.json or .json.gz), replaced.")] = None,
    journal: Annotated[File, _written(help="What the scheduler was asked and decided; replaced.")] = None,
    explain: Annotated[bool, _written("--explain", help="Say on stderr where each TTFT went.")] = False,
    log_level: LogLevel = "info",
    no_progress: Annotated[
        bool, _written("--no-progress", help="Draw nothing on a terminal.", envvar="MEDHA_NO_PROGRESS")
    ] = False,
    **given: Any,
) -> int:
    """Complete prompts with a Hugging Face checkpoint. With no argument at all: a demo that needs no download.

    Options may be spelled with _ for -, and by the names that vLLM and SGLang have for them.
    """
    command.start_logging(log_level)
    if not _given(context, *context.params):
        from medha.verify.demo import run_demo

        logger.info("no argument, so this is the demo: no download, about a minute; --help tells of the rest")
        return run_demo(live=not no_progress)
    config, options, launch = asked_config(context, model_argument, given)
    if dry_run:
        from medha.generate.layout import run_dry

        return run_dry(config, report_console()) if is_first_rank() else 0
    if not is_first_rank():
        from medha.generate.follow import follow

        return follow(config)
    arrivals, earlier = requested(context.params, config)
    if earlier.done and not arrivals and not is_launched():
        return command.FAILED_REQUESTS if earlier.num_failed else 0
    with ExitStack() as stack:
        if launch is None and config.parallel.world_size > 1:
            logger.info("starting %d ranks on this machine", config.parallel.world_size)
            stack.enter_context(own_ranks(config.parallel.world_size, ["medha.generate.follow", json.dumps(options)]))
        files = [None if path is None else stack.enter_context(opened(path)) for path in (output, timeline, journal)]
        code = _serve(config, arrivals, files, context.params)
    return code or (command.FAILED_REQUESTS if earlier.num_failed else 0)


def asked_config(
    context: typer.Context, model_argument: str | None, given: Mapping[str, Any]
) -> tuple[EngineConfig, dict[str, Any], Launch | None]:
    """What a command was given for the engine, the same as flat options, and what the launcher says; the layout is
    chosen where none is asked for."""
    options = engine_options(given)
    if model_argument is not None and given["model"] is not None:
        raise ConfigError(f"the model is given twice: {model_argument!r} and --model {given['model']!r}")
    options["model"] = model_argument or given["model"]
    if options["model"] is None:
        raise ConfigError("no model; accepted: --model with a folder or hub id (the demo: `medha generate` alone)")
    launch = read_launch()
    if launch is not None and not _given(context, "tp", "spp", "kvp", "decode_replicas"):
        from medha.generate.layout import choose_layout

        options |= choose_layout(EngineConfig.from_flat(**options), launch)
    return EngineConfig.from_flat(**options), options, launch


def _given(context: typer.Context, *names: str) -> bool:
    """Whether one of these parameters stands in the command line."""
    sources = [context.get_parameter_source(name) for name in names]
    return any(source is not None and source.name == "COMMANDLINE" for source in sources)


def _serve(
    config: EngineConfig, arrivals: list[Arrival], opened_files: Sequence[TextIO | None], given: Mapping[str, Any]
) -> int:
    """Load the model and run the requests, with what the command was given; returns the exit code.

    ``opened_files`` are the open files of ``--output``, ``--timeline`` and ``--journal``.
    """
    from medha.engine.build import build_role
    from medha.engine.journal import check_recordable

    output, timeline, journal = opened_files
    if journal is not None:
        check_recordable(config.scheduler, config.parallel.decode_replicas)
    json_lines, live = given["json_lines"], not given["no_progress"]
    trace = None if timeline is None else Timeline()
    logger.info("%s", budget_text(config.scheduler, has_tpot=any(a.slo and a.slo.tpot_s for a in arrivals)))
    logger.info("loading %s", config.model)
    role = build_role(config, timeline=trace)
    engine = role.engine
    assert engine is not None, "the first rank has the engine"
    gc.freeze()  # what torch and the model have made stays: going through it would hold up every batch
    with ExitStack() as stack:
        if trace is not None and timeline is not None:
            stack.callback(unwritable_reported(timeline.name)(trace.write), Path(timeline.name))
        if journal is not None:
            engine.record(emptied(journal))
        interrupted = stack.enter_context(command.first_interrupt())
        stack.enter_context(command.state_on_signal(role.describe))
        stdout, stdout_failure = command.lossy(sys.stdout)
        stack.enter_context(redirect_stdout(stdout))
        stack.callback(stdout.flush)
        view = _view(engine, arrivals, json_lines=json_lines, live=live)
        stack.enter_context(view)
        files = [] if output is None else [emptied(output) if given["overwrite"] else output]
        lines = OutputLines(engine, arrivals, files + [sys.stdout] * json_lines)
        stack.callback(lines.close)
        if role.part is not None:
            role.part.ranks.monitor.before_end = lines.fail
        num_failed = 0

        def should_stop() -> bool:
            return bool(interrupted) or (not files and stdout_failure() is not None)

        for piece in drive(engine, arrivals, should_stop=should_stop, on_step=view.refresh):
            view.update(piece)
            whole = lines.add(piece)
            if whole is not None:
                view.finish(whole)
                if given["explain"]:
                    print_explanation(whole)
                num_failed += whole.error is not None
        sys.stdout.flush()
        lost = stdout_failure()
    role.close()
    if interrupted:
        logger.warning("interrupted; what was produced is kept")
        return 128 + interrupted[0]
    return _end_of(num_failed, lost, has_file=bool(files))


def _end_of(num_failed: int, lost: OSError | None, *, has_file: bool) -> int:
    """The exit code of a run; RequestError where stdout could not be written, and the answers are nowhere else.

    Nothing is said of a reader that had enough.
    """
    if lost is not None and has_file:
        logger.warning("stdout could not be written (%s); all answers are in the output file", lost.strerror)
    elif isinstance(lost, BrokenPipeError):
        return 1
    elif lost is not None:
        with unwritable_reported("stdout"):
            raise lost
    return command.FAILED_REQUESTS if num_failed else 0


def _view(engine: Engine, arrivals: Sequence[Arrival], *, json_lines: bool, live: bool) -> Display:
    single = len(arrivals) == 1 and not json_lines and (arrivals[0].params is None or arrivals[0].params.n == 1)
    stderr = Console(stderr=True) if live and not (json_lines and sys.stdout.isatty()) else None
    if single:
        return StreamedText(engine.prefills, sys.stdout, live=stderr)
    return Display(engine.prefills, lines=None if json_lines else Console(), live=stderr, num_requests=len(arrivals))


if __name__ == "__main__":
    command.end_process(command.run_app(app, "python -m medha.generate"))
