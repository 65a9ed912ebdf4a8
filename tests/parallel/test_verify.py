"""``python -m medha.verify`` on several ranks: layouts that are well, and a merge that is not."""

import json
from math import prod
from pathlib import Path

import pytest

import medha.parallel.kvp as kvp
from medha.attention.merge import merge_partials
from tests.parallel.faults import Start, command

QUICK = ["--device", "cpu", "--needle-tokens", "512"]


def verify(rank: int, arguments: list[str], mutated: bool) -> None:
    """On each rank: the command, with log-sum-exps in base 2 in the library's merge between ranks."""
    if mutated:
        kvp.merge_partials = lambda parts, **_: merge_partials([(out, lse * 1.4426950408889634) for out, lse in parts])
    command(rank, arguments, "medha.verify")


def run(
    start: Start, folder: Path, options: list[str], *, mutated: bool = False
) -> tuple[int, list[str], list[dict[str, str]]]:
    """The code of rank 0, what each rank printed, and the rows of the report."""
    arguments = [*QUICK, "--output-json", str(folder / "report.json"), *options]
    job = start(prod(map(int, options[1::2])), verify, arguments, mutated)
    code, *others = job.wait()
    assert code is not None and set(others) == {0}, job.stderr(0)
    rows = json.loads((folder / "report.json").read_text())["checks"]
    return code, [job.stdout(rank) for rank in range(len(job.processes))], rows


@pytest.mark.parametrize(
    ("options", "layout"),
    [
        (["--kvp", "2", "--spp", "2"], "kvp=2 x spp=2 x tp=1, 4 ranks, float32"),
        (["--tp", "2"], "kvp=1 x spp=1 x tp=2, 2 ranks, float32"),
    ],
)
def test_all_is_well(tmp_path: Path, start: Start, options: list[str], layout: str) -> None:
    code, (out, *others), rows = run(start, tmp_path, options)
    assert code == 0, out
    assert layout in out
    assert set(others) == {""}  # one rank speaks
    assert {row["verdict"] for row in rows} == {"pass"}
    assert {"attention", "merge", "parity", "needle", "KV bytes"} <= {row["check"] for row in rows}


def test_a_wrong_merge_fails(tmp_path: Path, start: Start) -> None:
    """What needs no other rank is well."""
    code, (out, _), rows = run(start, tmp_path, ["--kvp", "2"], mutated=True)
    assert code != 0 and "FAIL" in out
    assert {row["check"] for row in rows if row["verdict"] == "FAIL"} == {"parity"}
