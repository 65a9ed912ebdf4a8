"""``python -m examples.reproduce``: the papers' figures and claims, computed anew. Heavy imports are inside."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from medha.cli.command import end_process, make_app, run_app

app = make_app()


@app.command()
def reproduce(
    names: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[all | NAME …]",
            help="Figures; three small ones by default. Without --quick loads are played for an hour.",
            show_default=False,
        ),
    ] = None,
    out: Annotated[Path, typer.Option(help="Folder for REPORT.md and a PNG and a JSON of each figure.")] = Path(
        "reproduction"
    ),
    quick: Annotated[bool, typer.Option("--quick", help="Fewer points: within five minutes on two cores.")] = False,
    seed: Annotated[int, typer.Option(min=0, help="Of what is drawn; the same seed gives the same report.")] = 0,
) -> int:
    """Compute the figures of the Medha papers, with a verdict on each of their claims."""
    from examples.reproduce.claims import load_claims
    from examples.reproduce.report import find_figures, write_all
    from examples.reproduce.result import Options

    figures = find_figures(names or [])
    write_all(figures, load_claims(), Options(quick, seed), out)
    print(out / "REPORT.md")
    return 0


if __name__ == "__main__":
    end_process(run_app(app, "python -m examples.reproduce"))
