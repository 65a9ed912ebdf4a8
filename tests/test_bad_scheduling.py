"""Policies and profiles that are wrong, from Python and from the command line; and hard but right requests."""

import gc
import json
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

import medha.engine.build
from medha import LLM
from medha.batch import Batch
from medha.config import EngineConfig, SchedulerConfig
from medha.engine.engine import Engine
from medha.engine.request import ModelLimits
from medha.errors import ConfigError
from medha.params import SamplingParams
from medha.sched.scheduler import Scheduler
from medha.worker.sampling import Sampled
from medha.worker.step import PendingStep, StepResult
from tests.commands import Command, run_python
from tests.engines import build_engine
from tests.sched.virtual import make_predictor
from tests.serving import Model

# -- options -----------------------------------------------------------------------------------------------------

POLICIES = "; accepted: edf, fcfs, ilrs, lars, lrs, sjf, srpt, priority, priority:NAME or package.module:name"
BAD_POLICIES: list[tuple[str, str]] = [
    ("larz", f"policy='larz'{POLICIES}; did you mean lars?"),
    ("", f"policy=''{POLICIES}"),
    ("no_such_module:first", "policy='no_such_module:first': cannot import 'no_such_module': ModuleNotFoundError"),
    ("math:no_such_function", "policy='math:no_such_function': math has no function 'no_such_function'"),
]

OPTIONS = ("--device", "cpu", "--num-kv-blocks", "16", "--block-size", "16", "--log-level", "error")

Refusal = Callable[..., str]


@pytest.fixture
def refusal(command: Command, bytes_model: Model) -> Refusal:
    """The one line with which ``medha generate`` refuses options."""

    def run(*arguments: object) -> str:
        done = command("generate", bytes_model.folder, "--prompt", "x", *arguments, *OPTIONS)
        assert (done.code, done.out, done.err.count("\n")) == (2, "", 1)
        return done.err

    return run


@pytest.mark.parametrize(("policy", "message"), BAD_POLICIES)
def test_an_unknown_policy_is_named_before_the_weights_are_read(
    bytes_model: Model, refusal: Refusal, monkeypatch: pytest.MonkeyPatch, policy: str, message: str
) -> None:
    monkeypatch.setattr(medha.engine.build, "build_runner", lambda *_, **__: pytest.fail("the weights are read"))
    with pytest.raises(ConfigError) as caught:
        LLM(bytes_model.folder, policy=policy, num_kv_blocks=4)
    assert str(caught.value).startswith(message)
    assert refusal(f"--policy={policy}").startswith(f"error: ConfigError: {message}")


# -- profiles ----------------------------------------------------------------------------------------------------


def config(model: Model, **options: Any) -> EngineConfig:
    fields = {"num_threads": 1, "num_kv_blocks": 16, "block_size": 16, "device": "cpu"}
    return EngineConfig.from_flat(str(model.folder), **fields, **options)


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("model", "another 2x64", "model is 'another 2x64', running "),
        ("machine", "Abacus 9", "machine is 'Abacus 9', running "),
        ("layout", "tp8 spp1 kvp1", "layout is 'tp8 spp1 kvp1', running 'tp1 spp1 kvp1'"),
    ],
)
def test_a_profile_of_something_else_is_refused_from_python_and_from_the_command_line(
    bytes_model: Model, tmp_path: Path, refusal: Refusal, field: str, value: str, message: str
) -> None:
    predictor = build_engine(config(bytes_model)).scheduler.predictor
    assert predictor is not None
    own, other = tmp_path / "own.json", tmp_path / "other.json"
    own.write_text(predictor.coefficients.to_json())
    tree = json.loads(own.read_text())
    tree["key"][field] = value
    other.write_text(json.dumps(tree))
    build_engine(config(bytes_model, profile=str(own)))
    with pytest.raises(ConfigError, match=f"^profile {other} was measured for something else: {message}"):
        build_engine(config(bytes_model, profile=str(other)))
    error = refusal("--num-threads", "1", "--profile", other)
    assert error.startswith(f"error: ConfigError: profile {other} was measured for something else: {message}")


@pytest.mark.parametrize("text", [None, "{", '{"format": "x"}'])
def test_a_profile_that_is_none_is_refused(
    bytes_model: Model, tmp_path: Path, refusal: Refusal, text: str | None
) -> None:
    path = tmp_path / "profile.json"
    if text is not None:
        path.write_text(text)
    assert str(path) in refusal("--profile", path)


# -- policies of one's own ---------------------------------------------------------------------------------------

OWN = "def newest_first(columns, now_s):\n    return -columns.arrival_s\n"
START = "import sys; from medha.sched.policy import load_policy; path = list(sys.path)\n"
LOAD = "print(load_policy('my_own_policy:newest_first').name, sys.path == path)"


@pytest.mark.parametrize(("flags", "is_found"), [(["-P"], False), ([], True)])
def test_a_policy_in_the_current_folder_is_found_as_python_m_finds_it(
    tmp_path: Path, flags: list[str], is_found: bool
) -> None:
    """An installed command has its own folder first on the path, and not the current one; so has this script."""
    (tmp_path / "here").mkdir()
    (tmp_path / "bin").mkdir()
    (tmp_path / "here" / "my_own_policy.py").write_text(OWN)
    script = tmp_path / "bin" / "script.py"
    script.write_text(START + LOAD)
    done = run_python(*flags, script, cwd=tmp_path / "here")
    if is_found:
        assert (done.returncode, done.stdout) == (0, "my_own_policy:newest_first True\n"), done.stderr
    else:
        assert "cannot import 'my_own_policy': ModuleNotFoundError" in done.stderr


# -- B21: thousands at once -----------------------------------------------------------------------------------

NUM_REQUESTS = 3_000


@dataclass
class VirtualRunner:
    """Samples token 7 for every row that samples; a batch takes what its tokens take, on a clock of its own."""

    now_s: float = 0.0
    num_open: int = 0

    def open(self, slot: int, *_: Any, **__: Any) -> None:
        self.num_open += 1

    def close(self, slot: int) -> None:
        self.num_open -= 1

    def submit(self, batch: Batch) -> PendingStep:
        busy_s = 0.01 + 1e-5 * batch.num_tokens
        self.now_s += busy_s
        rows = tuple(row for row in batch.rows if row.samples)
        return PendingStep(lambda: StepResult(rows, [Sampled(7, finite=True)] * len(rows), busy_s))

    def reset(self) -> None:
        pytest.fail("nothing was interrupted")

    def clock(self) -> float:
        return self.now_s


def resident_bytes() -> int:
    """Memory of this process."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def serve_all(engine: Engine, prompts: Sequence[list[int]]) -> tuple[int, int]:
    """Everything at once, to the end: how many were served whole, and the most memory meanwhile."""
    params = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True, output_kind="final_only")
    for i, prompt in enumerate(prompts):
        engine.add_request(str(i), prompt, params)
    assert engine.num_unfinished == len(prompts)
    num_served, most = 0, 0
    while engine.has_unfinished:
        num_served += sum(output.outputs[0].token_ids == [7] * 4 for output in engine.step())
        most = max(most, resident_bytes())
    return num_served, most


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="reads /proc")
def test_thousands_at_once_are_all_served_in_flat_memory() -> None:
    runner = VirtualRunner()
    scheduler = Scheduler(SchedulerConfig(), num_blocks=1024, block_size=16, predictor=make_predictor())
    engine = Engine(runner, scheduler, ModelLimits(256, 4096), clock=runner.clock)
    prompts = [[i % 256] * (5 + i % 50) for i in range(NUM_REQUESTS)]
    before = resident_bytes()
    num_served, first = serve_all(engine, prompts)
    assert num_served == NUM_REQUESTS
    gc.collect()
    num_served, second = serve_all(engine, prompts[:1000])
    assert num_served == 1000
    assert first - before < 200 * 2**20  # 20 KB a request
    assert second - first < 20 * 2**20  # nothing is kept of those that were served
    assert (runner.num_open, scheduler.num_running, scheduler.num_waiting, scheduler.memory.num_used) == (0, 0, 0, 0)
