"""The ``medha`` command. A verb's own module holds its work; what is heavy is imported when a verb runs."""

from __future__ import annotations

import json
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, NoReturn

import typer

from medha.bench.cli import app as bench_app
from medha.cli.command import end_process, make_app, run_app
from medha.cli.report import environment, print_report
from medha.generate.__main__ import generate
from medha.profile.cli import profile
from medha.serve.__main__ import serve
from medha.sim.cli import plan, simulate
from medha.verify.__main__ import verify
from medha.workload.cli import app as trace_app

app = make_app(help="Serve long-context LLMs without convoys.")
for verb in (generate, plan, profile, serve, simulate, verify):
    app.command()(verb)
app.add_typer(bench_app, name="bench")
app.add_typer(trace_app, name="trace")


@app.callback(invoke_without_command=True)
def medha_command(
    context: typer.Context,
    show_version: Annotated[bool, typer.Option("--version", "-v", help="Print the version and exit.")] = False,
) -> None:
    """Serve long-context LLMs without convoys."""
    if show_version:
        print(f"medha {version('medha')}")
        raise typer.Exit()
    if context.invoked_subcommand is None:
        print(context.get_help())


@app.command()
def env(as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False) -> int:
    """Print versions, devices and threads, for a bug report."""
    facts = environment()
    if as_json:
        print(json.dumps(facts, indent=2))
    else:
        print_report({name: ", ".join(fact) if isinstance(fact, list) else fact for name, fact in facts.items()})
    return 0


@app.command()
def replay(
    journal: Annotated[Path, typer.Argument(metavar="FILE", help="What medha generate --journal wrote.")],
) -> int:
    """Repeat the decisions of a recorded run, without its model, and say whether they are the same; 1: one differs."""
    from medha.engine.replay import replay as replayed

    found = replayed(journal)
    counts = f"{found.num_batches:,} batches and {found.num_calls:,} calls"
    if found.mismatch is None:
        print(f"{counts} compared: every decision is the same")
        return 0
    print(f"after {counts} that are the same, {found.mismatch}")
    return 1


def main() -> NoReturn:
    """Entry point of ``medha``. Ends in SystemExit."""
    end_process(run_app(app, "medha"))


if __name__ == "__main__":
    main()
