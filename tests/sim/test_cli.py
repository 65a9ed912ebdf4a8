"""``medha simulate``."""

import gzip
import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest

from medha.cost.hardware import SPECS
from medha.errors import ConfigError
from medha.sim.cli import BARE, BARE_TEXT
from medha.sim.replica import KNOWN_MODELS
from medha.sim.simulator import Simulation
from medha.sim.study import NUM_REQUESTS
from medha.workload.io import write_trace
from medha.workload.synth import ARRIVALS, named_lengths, synthesize
from tests.commands import ENVIRONMENT, Command, without_torch

SMALL = ("--workload", "uniform:100-900,1-20", "--num-requests", 20, "--qps", 5)


def test_a_run_prints_and_writes_its_figures(command: Command, tmp_path: Path) -> None:
    done = command("simulate", *SMALL, "--output-json", tmp_path / "out.json")
    assert done.code == 0
    assert done.out.startswith("llama-3-8b on 1 x h100-80g (fitted): tp 1, spp 1, kvp 1, ")
    assert "Slowdown: TTFT over" in " ".join(done.out.split()) and "Over-saturated: the queue" in done.out
    assert "requests/s" in done.err and "batches/s" in done.err
    found = json.loads((tmp_path / "out.json").read_text())
    assert (found["format"], found["version"], found["complete"]) == ("medha-simulation", 1, True)
    assert found["config"]["workload"] == "uniform:100-900,1-20"
    assert found["config"]["hardware_spec"]["provenance"] == "fitted"
    (run,) = found["runs"]
    assert (run["scheduler"], run["policy"], run["completed"], run["failed"]) == ("medha", "priority", 20, 0)
    assert run["request_rate"] == 5.0
    for name in ("ttft", "tpot", "itl", "e2el"):
        assert {f"{figure}_{name}_ms" for figure in ("mean", "median", "std", "p99")} <= set(run)


def test_bare_it_compares_two_policies(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    """The command that it prints stands for it."""
    with monkeypatch.context() as fewer:
        fewer.setitem(BARE, "num_requests", 6)
        done = command("simulate")
    assert done.code == 0
    assert done.out.startswith(f"{BARE_TEXT}\nllama-3-8b on 8 x h100-80g")
    assert "priority, 0.3 requests/s" in done.out and "fcfs, 0.3 requests/s" in done.out
    systems_of = Mock(side_effect=ConfigError("enough"))
    monkeypatch.setattr("medha.sim.study.systems_of", systems_of)
    assert [command("simulate", *arguments).code for arguments in ((), BARE_TEXT.split()[2:])] == [2, 2]
    bare, as_printed = systems_of.call_args_list
    assert bare == as_printed


def test_several_systems_and_rates_are_compared(command: Command, tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    systems = ("--scheduler", "medha,sarathi", "--scheduler", "orca", "--policy", "edf,fcfs")
    assert command("simulate", *SMALL, *systems, "--qps", "2,8", "--output-json", out).code == 0
    runs = json.loads(out.read_text())["runs"]
    assert [run["label"] for run in runs] == [
        f"{name}, {rate} requests/s" for name in ("edf", "fcfs", "sarathi", "orca") for rate in (2, 8)
    ]
    assert [run["policy"] for run in runs] == ["edf", "edf", "fcfs", "fcfs", None, None, None, None]
    assert len({run["total_input_tokens"] for run in runs}) == 1  # other rates leave the lengths as they are


def test_a_trace_brings_its_own_requests_and_objectives(command: Command, tmp_path: Path) -> None:
    """A request that never fits is a failure."""
    plain, own, lengths = (tmp_path / name for name in ("plain.csv", "own.jsonl", "lengths.csv"))
    lengths.write_text("num_prefill_tokens,num_decode_tokens\n5,6\n7,8\n")
    plain.write_text("arrived_at,num_prefill_tokens,num_decode_tokens\n0,100,3\n0.5,200,4\n1.0,5000,5\n")
    slo_s = np.array([5.0, math.nan, math.nan, 5.0])
    write_trace(own, replace(synthesize("fixed:100,9", "uniform", qps=1, num_requests=4), ttft_slo_s=slo_s))

    def run(*arguments: object) -> Any:
        return json.loads(command("simulate", "--trace", *arguments, "--json", "-").out)["runs"][0]

    done = command("simulate", "--trace", plain, "--num-kv-blocks", 2)
    assert (done.code, "1 refused, as they never fit the KV memory." in done.out) == (3, True)
    whole = run(plain)
    assert (whole["completed"], whole["total_input_tokens"], whole["request_rate"]) == (3, 5300, 2.0)
    assert whole["slo_attainment"] == 1.0
    assert run(plain, "--slo-ttft-s", "1e-6")["slo_attainment"] == 0.0
    assert run(own, "--slo-ttft-s", "1e-6")["slo_attainment"] == 0.5
    assert run(own, "--slo-tpot-s", "1e-6")["slo_attainment"] == 0.0
    few = run(own, "--num-requests", 2, "--qps", 7)
    assert (few["completed"], few["request_rate"]) == (2, 7.0)
    assert [run(lengths, *rate)["completed"] for rate in (("--qps", 3), ("--arrivals", "at-once"))] == [2, 2]
    assert "without a rate; accepted: --request-rate, or" in command("simulate", "--trace", lengths).err


def test_stopping_at_a_virtual_time(command: Command) -> None:
    found = json.loads(command("simulate", *SMALL, "--stop-s", 2, "--json", "-").out)
    assert (found["complete"], found["runs"][0]["complete"]) == (False, False)
    assert 0 < found["runs"][0]["num_prompts"] < 20


def test_an_interrupt_keeps_what_was_found(command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out, complete, calls = tmp_path / "out.json", Simulation._complete, []

    def interrupted(simulation: Simulation) -> None:
        calls.append(None)
        if len(calls) == 30:
            raise KeyboardInterrupt
        complete(simulation)

    monkeypatch.setattr(Simulation, "_complete", interrupted)
    done = command("simulate", *SMALL, "--policy", "lars,edf", "--output-json", out)
    assert done.code == 130
    found = json.loads(out.read_text())
    assert (found["complete"], len(found["runs"])) == (False, 1)
    assert "unfinished" in done.out


def test_a_policy_that_fails_keeps_the_runs_before_it(
    command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "own.py").write_text("def late(columns, now_s):\n    return 1 / int(now_s < 1) * columns.arrival_s\n")
    monkeypatch.syspath_prepend(tmp_path)
    done, first = (command("simulate", *SMALL, "--policy", f"{name}own:late", "--json", "-") for name in ("fcfs,", ""))
    found, error = json.loads(done.out), "error: PolicyError: policy own:late: ZeroDivisionError: division by zero"
    assert [run["label"] for run in found["runs"]] == ["fcfs, 5 requests/s"]
    assert (found["complete"], first.out, done.code, first.code) == (False, "", 2, 2)
    assert [one.err.splitlines()[-1] for one in (done, first)] == [error] * 2


def test_the_timeline_has_stages_and_memory(command: Command, tmp_path: Path) -> None:
    path, again = tmp_path / "trace.json.gz", tmp_path / "again.json.gz"
    given = ("simulate", *SMALL, "--tp", 2, "--spp", 2, "--hardware", "a100-80g", "--timeline")
    done = command(*given, path)
    assert command(*given, again).out == done.out and again.read_bytes() == path.read_bytes()
    assert done.out.startswith("llama-3-8b on 4 x a100-80g (fitted): tp 2, spp 2, kvp 1, ")
    events = json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
    names = [event["args"]["name"] for event in events if event["ph"] == "M"]
    assert names == ["stages", "memory", "stage 0", "stage 1"]
    lanes = [{e["args"]["batch"] for e in events if (e["ph"], e["pid"], e["tid"]) == ("X", 0, i)} for i in (0, 1)]
    assert lanes[0] == lanes[1] and len(lanes[0]) > 20
    counters = {event["name"] for event in events if event["ph"] == "C"}
    assert counters == {"KV blocks in use (%)"}


def test_a_timeline_is_there_if_stdout_fails(command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("medha.cli.report.print_report", Mock(side_effect=ConfigError("nobody reads")))
    assert command("simulate", *SMALL, "--timeline", tmp_path / "t.json").code == 2
    assert json.loads((tmp_path / "t.json").read_text())["traceEvents"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--qps", "0"), "qps='0'; accepted: finite numbers above 0, comma separated"),
        (("--seed", 1), "arrivals='poisson' without a rate; accepted: --request-rate, or --arrivals at-once"),
        (("--qps", 1, "--hardware", "h100"), "spec 'h100' is not known; accepted: a100-80g, "),
        (("--qps", 1, "--model", "llama-9"), "model 'llama-9' is not known; accepted: llama-3-8b, "),
        (("--qps", 1, "--scheduler", "none"), "scheduler='none'; accepted: medha, static"),
        (("--qps", 1, "--policy", "none"), "policy='none'; accepted: edf, "),
        (("--qps", 1, "--scheduler", ","), "scheduler=','; accepted: names, comma separated"),
        (("--qps", 1, "--policy", ""), "policy=''; accepted: names, comma separated"),
        (("--qps", 1, "--scheduler", "orca", "--policy", "edf"), "policy='edf' is for the medha scheduler"),
        (("--qps", 1, "--plan-order", "edf"), "plan_order='edf' is for cdsp; accepted: --scheduler cdsp too"),
        (("--trace", "no-such-file"), "trace file no-such-file"),
        (("--trace", "x", "--workload", "medha-mix"), "workload='medha-mix' and trace='x'; accepted: one of the two"),
        (("--qps", 1, "--max-model-len", 500), "tokens and max_model_len=500; accepted: at least as many"),
        (("--qps", 1, "--max-kv-per-group", 10**8), "max_kv_per_group=100000000; accepted: a multiple"),
        (("--qps", 1, "--num-kv-blocks", 0), "num_kv_blocks=0; accepted: an integer from 1"),
        (("--qps", 1, "--slo-ttft-s", 0), "slo_ttft_s=0.0; accepted: a finite number above 0"),
        (("--qps", 1, "--stop-s", -1), "stop_s=-1.0; accepted: a finite number above 0"),
        (("--qps", 1e-3, "--stop-s", 9), "before stop_s=9.0 at 0.001 requests/s; accepted: above 3293.5"),
        (("--qps", "1,2", "--timeline", "t.json"), "timeline=t.json with 2 runs; accepted: one scheduler"),
        (("--trace", "x", "--json", "./x"), "output file x is x, which is read; accepted: another file"),
        (("--qps", 1, "--hardware", __file__, "--timeline", __file__), f"{__file__}, which is read; accepted: another"),
        (("--qps", 1, "--model", __file__, "--json", __file__), f"{__file__}, which is read; accepted: another file"),
        (("--qps", 1, "--json", "x", "--timeline", "./x"), "output file x is x, which is written too"),
        (("--qps", 1, "--timeline", "-"), "timeline=-; accepted: a file"),
        (("--qps", 1, "--output-json", "no/such/folder/x.json"), "report file no/such/folder/x.json cannot be written"),
    ],
)
def test_what_is_wrong_is_named(command: Command, arguments: tuple[object, ...], message: str) -> None:
    done = command("simulate", *arguments)
    assert (done.code, done.out, done.err.count("\n")) == (2, "", 1)
    assert message in done.err


def test_help_names_what_is_accepted(command: Command) -> None:
    text = " ".join(command("simulate", "--help").out.replace("│", " ").split())
    for name in (*KNOWN_MODELS, *named_lengths(), *(path.stem for path in SPECS.glob("*.json"))):
        assert name in text, name
    assert ", ".join(ARRIVALS) in text
    assert f"[default: (medha-mix, {NUM_REQUESTS} requests)]" in text


def test_without_torch_the_same_seed_gives_the_same_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: Command
) -> None:
    """Whatever the hash seed is."""
    given = ("simulate", *SMALL, "--spp", 2, "--policy", "lars,edf", "--seed")
    for name in ("1", "2"):
        monkeypatch.setitem(ENVIRONMENT, "PYTHONHASHSEED", name)
        assert "Over-saturated" in without_torch(*given, 1, "--json", tmp_path / name).stdout
    assert (tmp_path / "1").read_bytes() == (tmp_path / "2").read_bytes()
    other, one = json.loads(command(*given, 2, "--json", "-").out), json.loads((tmp_path / "1").read_bytes())
    assert [run["input_lens"] for run in other["runs"]] != [run["input_lens"] for run in one["runs"]]
