"""``medha simulate --scheduler cdsp``: the scheduler's lanes on the virtual clock, baselines by options, refusals."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from medha.cli.command import run_app
from medha.config import ParallelConfig, SchedulerConfig
from medha.cost.hardware import load_spec
from medha.cost.improvement import LoadWindow, RateTable
from medha.sim.replica import Replica, find_model
from medha.sim.simulator import Simulation
from medha.workload.synth import synthesize
from tests.commands import Command
from tools.best_rates import app, played_ttft_s

SPEC, MODEL = load_spec("a100-80g"), find_model("llama-3-8b")
CDSP = ("--scheduler", "cdsp", "--hardware", "a100-80g", "--kvp", 8, "--prefill-only")
LOAD = ("--workload", "tetris-short", "--num-prompts", 30, "--qps", "1")


@pytest.mark.parametrize(
    "options", [{}, {"improvement_rate": 0.0, "max_chunks": 1}, {"sp_sizes": (8,)}, {"sp_sizes": (2, 8)}], ids=str
)
def test_the_simulation_is_what_the_plans_say(options: dict[str, object]) -> None:
    load = synthesize("tetris-medium", qps=2.0, num_requests=150)
    load = replace(load, output_tokens=np.ones_like(load.output_tokens))
    config = SchedulerConfig("cdsp", **options)  # type: ignore[arg-type]
    one = Replica(SPEC, MODEL, ParallelConfig(kvp=16), config, max_model_len=200_000)
    scheduler, pipeline = one.build()
    outcome = Simulation(scheduler, pipeline, load).run()
    said = played_ttft_s(scheduler.planner, load, LoadWindow(float(one.scheduler.improvement_rate)))
    assert outcome.times.ttft_s == pytest.approx(said, rel=1e-4)  # a chunk may be a token longer, by rounding
    assert outcome.num_batches > len(load) or "max_chunks" in options or options.get("sp_sizes") == (8,)
    assert scheduler.memory.num_used == 0


def test_the_command_compares_it_with_medha(command: Command, tmp_path: Path) -> None:
    done = command("simulate", *CDSP, *LOAD, "--scheduler", "medha", "--output-json", tmp_path / "out.json")
    assert done.code == 0 and "scheduler cdsp: chunks as planned, any SP size" in done.out
    runs = json.loads((tmp_path / "out.json").read_text())["runs"]
    assert [run["scheduler"] for run in runs] == ["cdsp", "medha"]
    assert all(run["completed"] == 30 and run["median_tpot_ms"] is None for run in runs)


def test_rates_are_found_and_used(command: Command, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "rates.json"
    arguments = map(str, (path, *CDSP[2:], *LOAD[:-1], "1,3"))
    assert run_app(app, "best_rates", list(arguments)) == 0 and "improvement rates" in capsys.readouterr().out
    table = RateTable.from_json(path.read_text())
    assert table.qps == (1.0, 3.0) and table.hardware == "a100-80g" and table.load.startswith("tetris-short, 30")
    assert command("simulate", *CDSP, *LOAD, "--improvement-rate", path).code == 0
    for others, named in (
        (("--hardware", "h100-80g"), "hardware 'a100-80g'; accepted: 'h100-80g'"),
        (("--model", "qwen2.5-14b-1m"), "model"),
        (("--kvp", 16), "layout 'tp 1, kvp 8"),
        (("--sp-sizes", "1,2"), "layout 'tp 1, kvp 8, SP 1,2,4,8, any"),
    ):
        wrong = command("simulate", *CDSP, *LOAD, *others, "--improvement-rate", path)
        assert wrong.code == 2 and f"the improvement rates are for {named}" in " ".join(wrong.err.split()), wrong.err


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ("--sp-sizes 3", "sp_sizes=(3,); accepted: ascending powers of two"),
        ("--sp-sizes 1,16", "sp_sizes='1,16'; accepted: ascending powers of two up to kvp=8"),
        ("--improvement-rate 1.5", "improvement_rate=1.5; accepted: a number from 0 to below 1"),
        ("--improvement-rate no.json", "improvement_rate='no.json' (No such file or directory); accepted: a number"),
        ("--plan-order no", "policy='no'; accepted:"),
    ],
)
def test_what_is_refused(command: Command, options: str, says: str) -> None:
    done = command("simulate", *CDSP, *LOAD, *options.split())
    assert done.code == 2 and says in " ".join(done.err.split()), done.err


def test_outputs_are_refused_by_name(command: Command) -> None:
    done = command("simulate", *CDSP[:-1], *LOAD)
    assert done.code == 2 and "scheduler='cdsp' with outputs of more than a token" in done.err
