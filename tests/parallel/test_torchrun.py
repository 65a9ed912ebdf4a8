"""The command line under torchrun: the demo, two nodes, one speaker."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from medha.demo import layout_for
from medha.errors import ParallelConfigError
from medha.models.needle import write_needle
from tests.parallel.workers import free_port

TORCHRUN = [sys.executable, "-m", "torch.distributed.run"]
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1"}
DEMO = "from medha.demo import run_demo; raise SystemExit(run_demo(long_prompt_tokens=2048, live=False))"


def start(*arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [*TORCHRUN, *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=ENVIRONMENT
    )


def finish(process: subprocess.Popen[str]) -> tuple[int, str, str]:
    try:
        out, err = process.communicate(timeout=100)
    finally:
        process.kill()
    return process.returncode, out, err


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_the_demo_chooses_a_layout(tmp_path: Path, num_ranks: int) -> None:
    script = tmp_path / "demo.py"
    script.write_text(DEMO)
    code, out, err = finish(start("--standalone", "--nproc-per-node", str(num_ranks), str(script)))
    assert code == 0, err
    assert out.count("One document of 2,048 tokens") == 1  # one rank speaks
    assert f"Layout: spp=2 pipeline stages, tp={num_ranks // 2} tensor-parallel ranks in each." in out
    assert out.endswith("6 of 6 answers right.\n")


def test_two_nodes(tmp_path: Path) -> None:
    """Two launches on one machine, as on two nodes."""
    model = write_needle(tmp_path / "needle")
    requests = tmp_path / "requests.jsonl"
    prompts = [f"The code of {name} is {code}.\nThe code of {name} is" for name, code in (("Ada", 31), ("Bo", 12))]
    requests.write_text(
        "".join(json.dumps({"id": str(i), "prompt": prompt}) + "\n" for i, prompt in enumerate(prompts))
    )
    where = ["--nnodes", "2", "--nproc-per-node", "1", "--master-addr", "127.0.0.1", "--master-port", str(free_port())]
    what = ["-m", "medha.generate", "--model", str(model), "--spp", "2", "--max-model-len", "512"]
    nodes = [start(*where, "--node-rank", str(node), *what, "--requests", str(requests), "--json") for node in range(2)]
    (code, out, err), (other_code, other_out, other_err) = [finish(node) for node in nodes]
    assert (code, other_code) == (0, 0), err + other_err
    # lines come as requests end, and these two are as long
    assert {line["id"]: line["text"] for line in map(json.loads, out.splitlines())} == {"0": " 31.", "1": " 12."}
    assert len(out.splitlines()) == 2
    assert other_out == ""


def test_layouts_of_the_demo() -> None:
    assert layout_for(1) == {"tp": 1, "spp": 1}
    assert layout_for(8) == {"tp": 4, "spp": 2}
    with pytest.raises(ParallelConfigError, match=r"^the demo's model cannot .* 3 ranks; accepted: 1, 2, 4, 8, 16$"):
        layout_for(3)
