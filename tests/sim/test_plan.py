"""``medha plan``: layouts that do not fit, the best of obvious cases, and bad input."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from medha.config import SchedulerConfig
from medha.cost.hardware import load_spec
from medha.sim.plan import Goal, Layout, Planner
from medha.sim.replica import Replica, find_model
from tests.commands import Command

SPEC = load_spec("a100-80g")
MODEL = find_model("llama-3-8b")


def planner(goal: Goal, **options: object) -> Planner:
    return Planner(Replica(**{"spec": SPEC, "model": MODEL, **options}), goal)  # type: ignore[arg-type]


def test_layouts_use_every_accelerator_and_keep_tp_in_a_node() -> None:
    layouts = planner(Goal(32, 1000, 1.0, 1.0)).layouts()
    assert all(x.replicas * x.tp * x.spp * x.kvp == 32 and x.tp <= 8 for x in layouts)
    assert len(set(layouts)) == len(layouts) == 52  # of 56 products of 2**5 four have tp of 16 or 32
    assert layouts[0] == Layout(32, 1, 1, 1) and Layout(1, 8, 2, 2) in layouts
    assert len(planner(Goal(6, 1000, 1.0, 1.0)).layouts()) == 16


def test_a_short_context_decodes_beside_chunks_too() -> None:
    """Of others as long as it, as many as outlast its decode."""
    found = planner(Goal(1, 4000, 20.0, 0.04)).candidate(Layout(1, 1, 1, 1))
    assert 1.8 * found["tpot_s"] < found["tpot_beside_s"] <= 0.04 and found["meets"]


def test_what_does_not_fit_is_named_with_numbers() -> None:
    model = find_model("llama-3-70b")
    found = planner(Goal(2, 4000, 10.0, 1.0), model=model).candidate(Layout(2, 1, 1, 1))
    assert found["ttft_s"] is None
    (reason,) = found["reasons"]
    assert reason["kind"] == "does not fit the memory" and "141.1 GB for weights" in reason["text"]
    small = replace(SPEC, memory_bytes=20 * 10**9)
    found = planner(Goal(1, 100_000, 10.0, 1.0), spec=small).candidate(Layout(1, 1, 1, 1))
    (reason,) = found["reasons"]
    assert reason["kind"] == "context does not fit"
    assert reason["text"] == (
        f"context and output are 100,033 tokens, and the KV pool of a replica holds {found['num_kv_tokens']:,}"
    )
    found = planner(Goal(64, 100, 10.0, 1.0)).candidate(Layout(1, 1, 64, 1))
    assert [reason["kind"] for reason in found["reasons"]] == ["does not split the model"]


def test_more_accelerators_a_replica_where_one_is_too_slow() -> None:
    found = planner(Goal(4, 30_000, 2.0, 0.1)).plan()
    best = found[0]
    assert not best["reasons"] and best["layout"]["replicas"] == 2
    assert best["ttft_s"] <= 2.0
    alone = next(one for one in found if one["name"] == str(Layout(4, 1, 1, 1)))
    assert [reason["kind"] for reason in alone["reasons"]] == ["TTFT above 2 s"]
    assert alone["ttft_s"] > 1.5 * best["ttft_s"]


def test_far_too_late_is_given_up() -> None:
    (found,) = planner(Goal(1, 200_000, 1.0, 0.05)).plan()
    assert found["ttft_s"] is None
    assert found["reasons"][0]["text"] == "TTFT not met, objective 1 s; given up after 5.3 s"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--gpus", "0"], "gpus=0; accepted: 1 to 4096"),
        (["--context", "9000", "--max-model-len", "8500"], "context=9000; accepted: at most max_model_len=8500"),
        (["--context", "0"], "context=0; accepted: at least 1 token"),
        (["--ttft-s", "0"], "ttft_s=0.0; accepted: a finite number above 0"),
    ],
)
def test_bad_input(arguments: list[str], message: str, command: Command) -> None:
    done = command("plan", "--gpus", "1", "--context", "1000", "--ttft-s", "1", "--tpot-s", "1", *arguments)
    assert done.code == 2 and message in done.err


def test_the_command(tmp_path: Path, command: Command) -> None:
    path = tmp_path / "plan.json"
    given = ["plan", "--gpus", "2", "--tpot-s", "0.05", "--hardware", "a100-80g", "--json", path, "--context"]
    done = command(*given, "4000", "--ttft-s", "1")
    assert done.code == 0 and "2 x tp1 spp1 kvp1" in done.out
    assert "llama-3-8b on 2 x a100-80g (fitted), 4 layouts" in done.out
    report = json.loads(path.read_text())
    assert (report["format"], report["version"], report["options"]["context"]) == ("medha-plan", 1, 4000)
    best, *others = report["layouts"]  # with as many replicas as possible, as all are fast enough
    assert [one["meets"] for one in (best, *others)] == [True] * 4
    assert [one["layout"]["replicas"] for one in (best, *others)] == [2, 1, 1, 1]
    assert 0.9 < best["headroom"] < 1 and best["tpot_beside_s"] > best["tpot_s"]
    done = command(*given, "4000", "--ttft-s", "0.001")
    assert done.code == 1 and "no layout meets everything" in done.out
    assert {one["meets"] for one in json.loads(path.read_text())["layouts"]} == {False}
    done = command(*given, "9k", "--ttft-s", "5")  # more than the model's own
    assert "medha: llama-3-8b claims 8,192 positions; its RoPE is taken as scaled to 9,000\n" in done.err
    assert done.code == 0
    assert "a prompt of 9,000 tokens, TTFT 5 s, TPOT 50 ms" in " ".join(done.out.split())


def test_the_prompt_beside_is_longer_than_the_decode() -> None:
    replica = Replica(load_spec("h100-80g"), MODEL, scheduler=SchedulerConfig(max_batch_tokens=256))
    found = Planner(replica, Goal(16, 400_000, 400.0, 0.026)).candidate(Layout(1, 1, 16, 1))
    assert not found["meets"] and found["tpot_beside_s"] > 0.028
