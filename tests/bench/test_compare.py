"""``medha bench compare`` at a toy size: both sides run, agree and are reported; the protocol, with a made-up peer."""

import json
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from medha.bench.compare import _convoy_figures, start_peer
from medha.bench.harness import Subject
from medha.bench.timing import Worker
from medha.errors import ConfigError, RankFailedError
from tests.bench.conftest import Bench
from tests.bench.shapes import TINY
from tests.commands import wait_until

TWICE = ["--num-iters", "2"]

# vLLM as far as the worker uses it: prompts continue by counting, and what it was given is part of the answer.
FAKE_VLLM = """
import sys
from types import SimpleNamespace as Made
__version__ = "9.9"
class SamplingParams:
    def __init__(self, *, max_tokens, temperature, repetition_penalty, ignore_eos, detokenize):
        assert (temperature, repetition_penalty, ignore_eos, detokenize) == (0.0, 1.0, True, False)
        self.max_tokens = max_tokens
class LLM:
    def __init__(self, model, *, skip_tokenizer_init, enable_prefix_caching, dtype, max_model_len, seed,
                 kv_cache_memory_bytes):
        self.running = {}
        assert skip_tokenizer_init and not enable_prefix_caching
        assert not {"medha", "torch"} & set(sys.modules)
        print("vLLM is chatty")
    def generate(self, prompts, params, use_tqdm):
        starts = [given["prompt_token_ids"][-1] + 1 for given in prompts]
        return [Made(outputs=[Made(token_ids=range(at, at + one.max_tokens))]) for at, one in zip(starts, params)]
    llm_engine = property(lambda self: self)
    def add_request(self, name, prompt, params):
        self.running[name] = [0, params.max_tokens]
    def step(self):
        for state in self.running.values(): state[0] += 1
        made = [Made(request_id=name, finished=done == most, outputs=[Made(token_ids=range(done))])
            for name, (done, most) in self.running.items()]
        for one in made:
            if one.finished: del self.running[one.request_id]
        return made
"""


def test_transformers(bench: Bench) -> None:
    """A prefill, a batch of decodes, and requests of different lengths in padded batches and continuously; a model's
    defaults, by which half of the tokens would end an answer, count for no engine."""
    given = ["--input-len", "40", "--batch-size", "2", "--output-len", "4", "--num-prompts", "11"]
    defaults = {"repetition_penalty": 1.5, "num_beams": 3, "do_sample": True, "eos_token_id": list(range(32))}
    with Subject(hf_overrides=TINY).checkpoint(64, dtype="float32", seed=0) as folder:
        (Path(folder) / "generation_config.json").write_text(json.dumps(defaults))
        of = ["--model", folder, "--num-threads", "1"]
        report, done = bench("compare", *given, "--lengths", "uniform:4-40,2-9", *TWICE, of=of)
    results = report["results"]
    assert [(r["name"], r["way"]) for r in results] == [
        ("prefill 40", "transformers"),
        ("decode of 2", "transformers"),
        ("11 mixed", "padded by 8"),
        ("11 mixed", "continuous"),
    ]
    assert all(r["medha"]["runs"] == r["peer"]["runs"] == 2 for r in results)
    assert all(r["ratio"] == pytest.approx(r["peer"]["median_s"] / r["medha"]["median_s"]) for r in results)
    assert [r["num_equal"] for r in results[:2]] == [1, 2] and all(r["num_equal"] >= 9 for r in results[2:])
    assert results[2]["medha"] == results[3]["medha"]  # one run of medha stands against both
    assert [r["is_exact"] for r in results] == [True, True, False, False]
    engines = report["engines"]
    assert set(engines["transformers"]["versions"]) == {"transformers", "torch"}
    assert engines["medha"]["options"]["num_threads"] == 1
    assert report["options"]["num_prompts"] == 11
    assert "11 mixed" in done.out


def fake_python(tmp_path: Path) -> str:
    """An interpreter whose only engine is the made-up vLLM."""
    (tmp_path / "vllm").mkdir()
    (tmp_path / "vllm" / "__init__.py").write_text(FAKE_VLLM)
    (tmp_path / "torch.py").write_text("__version__ = '9.9'\n")
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nPYTHONPATH={tmp_path} exec {sys.executable} "$@"\n')
    python.chmod(0o755)
    return str(python)


def test_the_worker_of_vllm_speaks_the_protocol(tmp_path: Path) -> None:
    """With a made-up vLLM. Its interpreter needs no medha, and its chatter is kept apart."""
    python = fake_python(tmp_path)
    settings = {"model": "x", "dtype": "float32", "max_model_len": 9, "num_threads": 1, "seed": 0}
    settings |= {"kv_cache_memory_bytes": 64, "enable_prefix_caching": False}
    with start_peer("vllm", python, settings) as worker:
        assert worker.ready["versions"] == {"vllm": "9.9", "torch": "9.9"}
        assert worker.ready["options"]["skip_tokenizer_init"] is True
        answer = worker.ask(prompts=[[1, 5], [7]], num_outputs=[2, 1], way="vllm")
        assert answer["tokens"] == [[6, 7], [8]] and answer["seconds"] > 0
        with pytest.raises(ConfigError, match=r"^vllm: IndexError: list index out of range$"):
            worker.ask(prompts=[[]], num_outputs=[1], way="vllm")


def test_short_requests_that_arrive_beside_a_long_one(bench: Bench, tmp_path: Path) -> None:
    """With the made-up vLLM. Each engine's own options reach it, and its figures are of all its runs."""
    own = json.dumps({"medha": {"policy": "lars"}})
    given = ["--peer", "vllm", "--peer-python", fake_python(tmp_path), "--input-len", "300", "--batch-size", "3"]
    given += ["--output-len", "2", "--num-prompts", "3", "--lengths", "fixed:20,4", "--request-rate", "50"]
    report, done = bench("compare", *given, "--engine-options", own, *TWICE)
    differ = {"prefill 300": 1, "decode of 3": 3}
    assert [(r["name"], r["way"], r["is_exact"]) for r in report["results"]] == [(n, "vllm", False) for n in differ]
    assert report["notes"] == [f"{what} (vllm): tokens of {number} requests differ" for what, number in differ.items()]
    assert report["engines"]["vllm"]["options"]["enable_prefix_caching"] is False
    assert report["engines"]["medha"]["options"]["policy"] == "lars"
    assert [one["engine"] for one in report["convoys"]] == ["medha", "vllm"]
    for one in report["convoys"]:
        assert one["name"] == "prefill 300"
        runs = one["runs"]  # of each the long prompt and the short ones, first and last token of each
        assert [[len(times) for times in run] for run in runs] == [[2] * 4] * 2
        assert all(0 < first <= last for run in runs for first, last in run)
        ttft_s = sorted(first for run in runs for first, _ in run[1:])
        assert ttft_s[0] <= one["ttft_p50_s"] <= one["ttft_p99_s"] <= ttft_s[-1]
        assert one["tpot_p50_s"] > 0 and one["slowdown_p50"] > 0 and one["total_s"] >= one["long_s"] > 0
    assert "slowdown p50" in done.out


def test_an_answer_of_one_token_has_no_time_a_token() -> None:
    run = {"tokens": [[0.0, 9.0], [1.0, 1.0], [1.0, 2.0]], "seconds": 9.0}  # the long prompt, and two short ones
    figures = _convoy_figures([run], [[1.0, 1.0], [1.0, 1.0]], [1, 5])
    assert (figures["tpot_p50_s"], figures["tpot_p99_s"], figures["slowdown_p99"]) == (0.25, 0.25, pytest.approx(1.99))


def test_what_overrides_a_model_reaches_both_engines() -> None:
    given: Any = {"longest": 64, "dtype": "float32", "seed": 0}
    rope = {"rope_parameters": {"rope_theta": 5.0, "rope_type": "default"}}
    with Subject(hf_overrides=TINY | rope).checkpoint(**given) as made:
        changed = {"num_hidden_layers": 1, "rope_parameters": {"rope_theta": 7.0}}
        with Subject(made, changed).checkpoint(**given) as folder:
            shape = json.loads((Path(folder) / "config.json").read_text())
            assert (shape["num_hidden_layers"], shape["hidden_size"]) == (1, TINY["hidden_size"])
            assert shape["rope_parameters"] == {"rope_theta": 7.0, "rope_type": "default"}
            assert (Path(folder) / "model.safetensors").samefile(Path(made) / "model.safetensors")
        with Subject(made).checkpoint(**given) as folder:
            assert folder == made


COUNTING = """
import json, sys, threading
count = 0
def run():
    global count
    while True: count += 1
threading.Thread(target=run, daemon=True).start()
for line in sys.stdin: print(json.dumps({"count": count}), flush=True)
"""


def test_a_worker_is_stopped_while_it_is_not_asked() -> None:
    with Worker("counter", [sys.executable, "-c", COUNTING], {}) as worker:
        first = worker.ask()["count"]
        stat = Path(f"/proc/{worker._process.pid}/stat")
        wait_until(lambda: stat.read_text().rpartition(")")[2].split()[0] == "T")
        assert worker.ask()["count"] >= first


def test_a_worker_that_ends_cannot_start_or_answers_no_json_is_an_error() -> None:
    with pytest.raises(RankFailedError, match=r"^gone has ended: 5$"):
        Worker("gone", [sys.executable, "-c", "import os; os._exit(5)"], {})
    with pytest.raises(ConfigError, match=r"^x: /absent/python cannot be started: No such file or directory$"):
        Worker("x", ["/absent/python"], {})
    with pytest.raises(ConfigError, match=r"no JSON.*which is not JSON"):
        Worker("peer", [sys.executable, "-c", "input(); print('no JSON')"], {})


@pytest.mark.skipif(find_spec("vllm") is not None, reason="vLLM is here")
def test_a_peer_that_is_not_installed_is_an_error() -> None:
    settings = {"num_threads": 1, "enable_prefix_caching": False}
    with pytest.raises(ConfigError, match=r"^vllm: ModuleNotFoundError: No module named 'vllm'$"):
        start_peer("vllm", sys.executable, settings)
