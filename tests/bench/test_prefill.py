"""``medha bench prefill`` at a toy size."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from medha.bench.cli import app
from medha.bench.harness import Subject, layer_parameters, loaded, shape_of
from medha.bench.load import fixed_output, serve_load
from medha.bench.prefill import useful_flops
from medha.cli.command import run_app
from medha.engine.arrivals import Arrival
from tests.bench.shapes import ON_TINY, TINY

SMALL = [*ON_TINY, "--num-iters", "2"]


@pytest.mark.usefixtures("_small_rates")
def test_table_and_report(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "prefill.json"
    given = ["--prompt-lens", "300,20", "--t-target-s", "0.5", "--max-batch-tokens", "128", "--output-json", str(path)]
    assert run_app(app, "bench", ["prefill", *SMALL, *given]) == 0
    report = json.loads(path.read_text())
    rate = report["matrix_product"]["per_s"]
    lines = report["results"]
    ways = [(line["prompt_len"], line["way"]) for line in lines]
    assert ways == [(20, "whole"), (20, "adaptive"), (300, "whole"), (300, "adaptive")]
    assert [line["num_chunks"] for line in lines[:3]] == [1, 1, 1] and lines[3]["num_chunks"] >= 3
    for line, whole in zip(lines, (lines[0], lines[0], lines[2], lines[2]), strict=True):
        assert line["timing"]["runs"] == 2
        seconds = line["timing"]["median_s"]
        assert line["flops_per_s"] == pytest.approx(line["flops"] / seconds)
        assert line["mfu"] == pytest.approx(line["flops_per_s"] / rate)
        assert line["mfu"] > 0
        assert line["ratio"] == pytest.approx(seconds / whole["timing"]["median_s"])
    text = capsys.readouterr().out
    assert "MFU" in text and "adaptive" in text


def test_useful_operations() -> None:
    model = shape_of(Subject(hf_overrides=TINY), longest=64)
    assert useful_flops(model, 10) == 2 * layer_parameters(model) * 10 + 2 * 10**2 * 2 * 16 * 2


def test_two_engines_over_the_same_weights_say_the_same() -> None:
    """In turn, in whatever order, with different chunks: the blocks that one has left do not reach the other."""
    subject = Subject(hf_overrides=TINY, engine={"num_threads": 1, "block_size": 16})
    with loaded(subject, longest=80, chunk_size=64) as local:
        other = local.engine_with(chunk_size=16)
        prompts = [list(range(1, 61)), list(range(60, 0, -1))]
        said: dict[int, set[tuple[float, ...]]] = {0: set(), 1: set()}
        tokens: dict[int, set[tuple[int, ...]]] = {0: set(), 1: set()}
        for turn in range(6):
            engine = (local.engine, other)[turn % 2]
            local.take_over(engine)
            which = turn // 2 % 2
            engine.add_request("prompt", prompts[which], fixed_output(8).reported("cumulative"))
            outputs = []
            while engine.has_unfinished:
                outputs += engine.step()
            tokens[which].add(tuple(outputs[-1].outputs[0].token_ids))
            said[which].add((outputs[-1].metrics.num_chunks,))
        assert [len(found) for found in tokens.values()] == [1, 1]
        assert said == {0: {(1,), (4,)}, 1: {(1,), (4,)}}
        local.take_over(local.engine)
        served = serve_load(local.engine, [Arrival("last", prompts[0], fixed_output(2))])
    assert [one.output_len for one in served.outcomes] == [2]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--t-target-s", "0"], "t_target_s=0.0; accepted"),
        (["--prompt-lens", "1.5"], "prompt_lens='1.5'; accepted"),
        (["--output-json", "absent/prefill.json"], "absent/prefill.json cannot be written"),
    ],
)
def test_bad_input(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_app(app, "bench", ["prefill", *SMALL, *arguments]) == 2
    assert message in " ".join(capsys.readouterr().err.split())
