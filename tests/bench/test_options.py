"""Options that commands of ``medha bench`` share."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from medha.bench.cli import app
from medha.bench.harness import Subject, fitting
from medha.bench.options import MEMORY, MODEL, SCHEDULING, SERVING, WORKLOAD, subject_of, workload_of
from medha.cli.command import run_app
from medha.config import EngineConfig
from medha.models.needle import write_needle


def defaults(*groups: Any) -> dict[str, Any]:
    return {name: default for group in groups for name, (_, default) in group.items()}


def test_defaults_are_those_of_the_engine() -> None:
    subject = subject_of(defaults(MODEL, SCHEDULING, SERVING, MEMORY), seed=3)
    assert EngineConfig.from_flat("-", **subject.options) == EngineConfig.from_flat("-", load_format="dummy", seed=3)


def test_given_options_reach_the_engine_and_the_workload(tmp_path: Path) -> None:
    given = defaults(MODEL, SCHEDULING, SERVING, WORKLOAD) | {"chunk_size": 64, "rho_max": 0.1, "hf_overrides": "{}"}
    subject = subject_of(given)
    assert (subject.engine["chunk_size"], subject.engine["rho_max"], subject.hf_overrides) == (64, 0.1, {})
    assert "num_prompts" not in subject.engine and "model" not in subject.engine
    workload = workload_of(given | {"num_prompts": 3, "input_len": 9}, seed=4, request_rate=2.0)
    assert (workload.num_prompts, workload.input_len, workload.seed, workload.request_rate) == (3, 9, 4, 2.0)


def test_lengths_that_a_model_does_not_take_are_left_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = write_needle(tmp_path / "needle")
    most = json.loads((model / "config.json").read_text())["max_position_embeddings"]
    lengths = (most - 1, 100, most, 2 * most)
    assert fitting(Subject(str(model)), "context", lengths, more=1) == (most - 1, 100)
    left_out = f"medha: context {most:,}, {2 * most:,} left out: the model takes {most:,} positions\n"
    assert capsys.readouterr().err == left_out
    assert fitting(Subject(str(model)), "context", (2 * most,), more=1) == (2 * most,)
    assert fitting(Subject(), "context", lengths, more=1) == lengths
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("has_tpot", [True, False])
def test_what_a_batch_may_take_is_said(has_tpot: bool, capsys: pytest.CaptureFixture[str]) -> None:
    subject_of(defaults(MODEL, SCHEDULING), has_tpot=has_tpot)
    said = "decodes' TPOT objectives leave" if has_tpot else "0.25 s (quantum_s, as there is no TPOT objective)"
    assert said in capsys.readouterr().err
    subject_of(defaults(MODEL))
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("command", ["latency", "throughput", "serve", "decode", "prefill"])
def test_help_lists_own_and_shared_options(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_app(app, "bench", [command, "--help"]) == 0
    text = capsys.readouterr().out
    assert "--output-json" in text and "--hf-overrides" in text and "--given" not in text
    assert ("--rho-max" in text) == (command in ("throughput", "serve"))
