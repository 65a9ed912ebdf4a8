"""All figures by name, and what runs and writes them: for each a JSON and a PNG, and ``REPORT.md`` with a verdict on
every claim."""

from __future__ import annotations

import hashlib
import io
import json
import subprocess
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from importlib import import_module
from pathlib import Path

from examples.reproduce.claims import Claim
from examples.reproduce.plotting import Panel, draw
from examples.reproduce.result import RULE, VERDICTS, FigureResult, FigureSpec, Options, Ours, ratio, verdict
from medha.cost.hardware import SPECS
from medha.errors import ConfigError, hint

_MODULES = (
    *("requirements", "chunks", "stages", "kvp", "utilization", "example", "lengths"),
    *("disaggregation", "capacity", "decode_load", "schedulers", "pools", "layouts", "fragmentation"),
    *("tetris", "batching"),
)
FIGURES = {
    one.name: one
    for name in _MODULES
    for one in vars(import_module(f"examples.reproduce.figures.{name}")).values()
    if isinstance(one, FigureSpec)
}
SMALL = ("requirements", "adaptive-chunking", "example")
"""What is computed where nobody asks for more: within seconds."""


def find_figures(names: Sequence[str]) -> list[FigureSpec]:
    """Figures by name, each once, in the order of the registry; ``all`` is all, and none those of :data:`SMALL`.

    Raises:
        ConfigError: a name is not known.
    """
    wanted = set(names or SMALL)
    for name in names:
        if name != "all" and name not in FIGURES:
            accepted = f"all, {', '.join(FIGURES)}{hint(name, ['all', *FIGURES], cutoff=0.4)}"
            raise ConfigError(f"figure {name!r} is not known; accepted: {accepted}")
    if "all" in wanted:
        return list(FIGURES.values())
    return [figure for name, figure in FIGURES.items() if name in wanted]


UNDER_LOAD = ("capacity", "decode-under-load", "schedulers", "pools", "2d-3d", "tetris", "batching")
"""Figures of many requests that compete."""
_USED_SPECS = ("a100-80g", "h100-80g")
_NO_REPORTS = ":(exclude,top)*/results/*"  # whether a former report differs from the commit is no matter
_DPI = 130
_NUM_COLORS = 96
_SIGNS = {"at-least": "at least ", "at-most": "at most "}
_SPECS = (
    "Times are simulated, with the cost specs of `medha/cost/specs`: `a100-80g` is fitted to public kernel tables; "
    "`h100-80g` likewise, but for chunks behind a cache, elementwise kernels and links between nodes, which are "
    "derived (docs/simulator.md has the errors). 1M tokens are 2^20, "
    "except in `requirements`, where a million is 10^6. Nothing here ran on a GPU."
)


@dataclass(frozen=True, slots=True)
class Row:
    """One claim with what we get."""

    claim: Claim
    ours: Ours
    sentence: str

    @property
    def verdict(self) -> str:
        """One of VERDICTS."""
        return verdict(self.claim, self.ours)


def run_figure(figure: FigureSpec, claims: Sequence[Claim], options: Options) -> tuple[FigureResult, list[Row]]:
    """Compute a figure and judge the claims that point at it.

    Raises:
        RuntimeError: it leaves one of them unanswered, or answers another.
    """
    result = figure.run(options)
    own = [claim for claim in claims if claim.figure == figure.name]
    if differing := {claim.id for claim in own} ^ set(result.answers):
        raise RuntimeError(f"figure {figure.name} and claims.toml differ in {', '.join(sorted(differing))}")
    answers = [(claim, result.answers[claim.id]) for claim in own]
    return result, [Row(claim, answer.ours, claim.how.format(**answer.facts)) for claim, answer in answers]


def write_all(figures: Sequence[FigureSpec], claims: Sequence[Claim], options: Options, out: Path) -> None:
    """Run figures in order, and write their files and the report into a folder, which is made where it is not there.

    Raises:
        ConfigError: the folder cannot be written to.
    """
    try:
        out.mkdir(parents=True, exist_ok=True)
        rows, drawn = list[Row](), True
        for figure in figures:
            result, more = run_figure(figure, claims, options)
            rows += more
            (out / f"{figure.name}.json").write_text(_json(figure, result, more, options))
            drawn = save(result.panels, out / f"{figure.name}.png") and drawn
            print(f"{figure.name}: {_counts(more)}", file=sys.stderr)
        (out / "REPORT.md").write_text(report(figures, claims, rows, options, drawn=drawn))
    except OSError as error:
        raise ConfigError(f"out={str(out)!r} cannot be written to: {error}") from error


def save(panels: Sequence[Panel], path: Path) -> bool:
    """Draw panels into a PNG.

    Returns:
        False, and nothing is written, where matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
        from PIL import Image  # matplotlib brings it
    except ImportError:
        return False
    canvas = Figure(layout="constrained")
    draw(panels, canvas)
    drawn = io.BytesIO()
    canvas.savefig(drawn, dpi=_DPI, format="png")
    Image.open(drawn).convert("RGB").quantize(_NUM_COLORS).save(path, optimize=True)
    return True


def report(
    figures: Sequence[FigureSpec], claims: Sequence[Claim], rows: Sequence[Row], options: Options, *, drawn: bool
) -> str:
    """The text of ``REPORT.md``; the same figures and options give the same text."""
    whole = len(figures) == len(FIGURES)
    lines = [
        "# What the papers claim, and what we get",
        "",
        "v5 is arXiv:2409.17264v5, v4 the version before it, Tetris *Optimizing Long-context LLM Serving via "
        "Fine-grained Sequence Parallelism*, the post *Dynamic Batching: Orca, Sarathi, and Iteration-Level Scheduling "
        "Algorithms*.",
        _SPECS,
        _made_from(),
        "",
        f"**Rule.** {RULE}",
        "",
        *_summary(rows),
        f"{'All' if whole else 'Some'} figures, {'quick' if options.quick else 'in full'}, seed {options.seed}: "
        f"{_counts(rows)}.",
        "",
        *([] if drawn else ["matplotlib is not installed, so there are no PNGs; pip install 'medha[plot]'.", ""]),
    ]
    lines += _table(rows)
    if whole:
        lines += _unanswered(claims)
    lines += ["", "## Figures"]
    for figure in figures:
        lines += ["", f"`{figure.name}`: {figure.title}"]
        lines += ["", f"![{figure.title}]({figure.name}.png)"] if drawn else []
    return "\n".join(lines) + "\n"


def _made_from() -> str:
    """The commit, and the specs by their contents."""
    folder = Path(__file__).parent
    try:
        found = [
            subprocess.run(["git", *words], cwd=folder, check=True, capture_output=True, text=True).stdout.strip()
            for words in (("rev-parse", "--short=10", "HEAD"), ("diff", "--name-only", "HEAD", "--", ":/", _NO_REPORTS))
        ]
        commit = f"`{found[0]}`{' with changes' if found[1] else ''}"
    except (OSError, subprocess.CalledProcessError):
        commit = "a checkout without git"
    sums = {name: hashlib.sha256((SPECS / f"{name}.json").read_bytes()).hexdigest()[:10] for name in _USED_SPECS}
    return f"Made at {commit}; SHA-256 of the specs: {', '.join(f'{name} `{of}`' for name, of in sums.items())}."


def _summary(rows: Sequence[Row]) -> list[str]:
    """What holds under load, first."""
    loaded = [row for row in rows if row.claim.figure in UNDER_LOAD]
    if not loaded:
        return []
    holds = [row for row in loaded if row.verdict == "reproduced" and not row.claim.basis]
    listed = "; ".join(f"{row.claim.says} ({_amount(row.claim, row.ours)})" for row in holds)
    alone = [row for row in rows if row.claim.figure not in UNDER_LOAD]
    return [
        f"**Under load** {_counts(loaded)}. What holds: {listed or 'nothing'}.",
        "",
        f"**Of one request, one batch or a formula** {_counts(alone)}.",
        "",
    ]


def _table(rows: Sequence[Row]) -> list[str]:
    head = ("claim", "where", "paper", "ours", "ratio", "verdict", "how, and why it differs", "figure")
    table = []
    for row in rows:
        claim, relative = row.claim, ratio(row.claim, row.ours)
        said = f"{row.verdict} ({claim.basis})" if claim.basis else f"**{row.verdict}**"
        ours = (_amount(claim, row.ours), "" if relative is None else f"{relative:.2f}")
        table.append(
            (claim.says, claim.where, _paper(claim), *ours, said, _noted(row.sentence, claim), f"`{claim.figure}`")
        )
    return _markdown(head, table)


def _unanswered(claims: Sequence[Claim]) -> list[str]:
    """Claims that no figure can answer."""
    never = [claim for claim in claims if not claim.figure]
    table = [(claim.says, claim.where, _paper(claim), _noted(claim.reason, claim)) for claim in never]
    return ["", f"## Not answered here: {len(never)} claims", "", *_markdown(("claim", "where", "paper", "why"), table)]


def _markdown(head: Sequence[str], table: Sequence[Sequence[str]]) -> list[str]:
    rows = [head, ["---"] * len(head), *table]
    return [f"| {' | '.join(cell.replace('|', '/') for cell in row)} |" for row in rows]


def _noted(text: str, claim: Claim) -> str:
    return f"{text} Note: {claim.note}" if claim.note else text


def _paper(claim: Claim) -> str:
    return _SIGNS.get(claim.kind, "") + _amount(claim, claim.value)


def _amount(claim: Claim, value: float | tuple[float, ...]) -> str:
    """A number with its unit; of a statement, whether it holds."""
    if claim.kind == "statement":
        assert not isinstance(value, tuple)
        return "holds" if value >= 1 else "does not hold" if value <= 0 else f"holds in {100 * value:.0f} % of cases"
    numbers = value if isinstance(value, tuple) else (value,)
    texts = (f"{number:,.0f}" if abs(number) >= 1000 else f"{number:.3g}" for number in numbers)
    return f"{' to '.join(texts)} {claim.unit}"


def _counts(rows: Sequence[Row]) -> str:
    """Verdicts on what was simulated, and how many rows stand apart."""
    counts = Counter(row.verdict for row in rows if not row.claim.basis)
    bases = Counter(row.claim.basis for row in rows if row.claim.basis) + Counter(exceeds=counts.pop("exceeds", 0))
    apart = ", ".join(f"{count} {name}" for name, count in bases.items())
    tally = ", ".join(f"{counts[name]} {name}" for name in VERDICTS if name != "exceeds")
    return tally + (f"; not counted: {apart}" if apart else "")


def _json(figure: FigureSpec, result: FigureResult, rows: Sequence[Row], options: Options) -> str:
    claims = [
        {"id": row.claim.id, "paper": row.claim.value, "unit": row.claim.unit, "ours": row.ours, "verdict": row.verdict}
        for row in rows
    ]
    tree = {"figure": figure.name, "title": figure.title, "options": asdict(options), "claims": claims}
    return json.dumps(tree | {"panels": [asdict(panel) for panel in result.panels]}, indent=1) + "\n"
