"""``python -m medha.verify`` under torchrun: layouts that are well, and one that is not."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.parallel.test_torchrun import finish, start

QUICK = ["--device", "cpu", "--needle-tokens", "512,1024"]
BASE_2 = """
import medha.parallel.kvp as kvp
from medha.attention.merge import merge_partials
from medha.verify.__main__ import main
kvp.merge_partials = lambda parts: merge_partials([(out, lse * 1.4426950408889634) for out, lse in parts])
main()
"""
ORDER_BY_ARRIVAL = """
import os
import medha.parallel.kvp as kvp
from medha.attention.merge import merge_partials
from medha.verify.__main__ import main
if os.environ["RANK"] == "1":
    kvp.merge_partials = lambda parts: merge_partials(parts[::-1])
main()
"""


def verify(
    num_ranks: int, program: list[str], report: Path, *options: str
) -> tuple[int, str, str, list[dict[str, str]]]:
    """Exit code, stdout, stderr, rows."""
    where = ["--standalone", "--nproc-per-node", str(num_ranks)]
    code, out, err = finish(start(*where, *program, *QUICK, "--output-json", str(report), *options))
    return code, out, err, json.loads(report.read_text())["checks"] if report.exists() else []


@pytest.mark.parametrize(
    ("num_ranks", "options", "layout", "absent"),
    [
        (4, ["--kvp", "2", "--spp", "2"], "kvp=2 x spp=2 x tp=1, 4 ranks, float32", {"tp"}),
        (2, ["--tp", "2"], "kvp=1 x spp=1 x tp=2, 2 ranks, float32", {"kvp", "spp"}),
    ],
)
def test_all_is_well(tmp_path: Path, num_ranks: int, options: list[str], layout: str, absent: set[str]) -> None:
    code, out, err, rows = verify(num_ranks, ["-m", "medha.verify"], tmp_path / "report.json", *options)
    assert code == 0, out + err
    assert out.count("medha verify:") == 1  # one rank speaks
    assert layout in out
    assert {row["check"] for row in rows if row["verdict"] == "not run"} == absent
    assert {row["verdict"] for row in rows if row["check"] not in absent} == {"pass"}
    assert {"attention", "merge", "control", "parity", "needle", "KV bytes"} <= {row["check"] for row in rows}


def test_a_merge_in_base_2_fails(tmp_path: Path) -> None:
    """The library's own merge between ranks: its row and the parity fail, what needs no other rank does not."""
    program = tmp_path / "program.py"
    program.write_text(BASE_2)
    code, out, _, rows = verify(2, [str(program)], tmp_path / "report.json", "--kvp", "2")
    assert code != 0
    assert "FAIL" in out
    assert {row["check"] for row in rows if row["verdict"] == "FAIL"} == {"kvp", "parity"}


def test_a_merge_in_another_order_fails(tmp_path: Path) -> None:
    """The value is right, and the bits differ between the groups."""
    program = tmp_path / "program.py"
    program.write_text(ORDER_BY_ARRIVAL)
    code, _, _, rows = verify(3, [str(program)], tmp_path / "report.json", "--kvp", "3")
    assert code != 0
    failing = [row["what"] for row in rows if row["verdict"] == "FAIL"]
    assert len(failing) == 1
    assert failing[0].startswith("same bits in all groups")
