"""``medha profile`` at a toy size: what it writes is what an engine of the same key loads, and nothing else does."""

import dataclasses
import io
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from medha.batch import Batch
from medha.bench.harness import RANDOM_LLAMA
from medha.config import EngineConfig, ModelConfig, ParallelConfig, RopeConfig
from medha.cost.coefficients import Coefficients, Line, Link, ProfileKey, RingCost
from medha.cost.hardware import load_spec, spec_of_device
from medha.cost.predictor import Predictor, Work
from medha.cost.roofline import stage_coefficients
from medha.engine.replay import replay
from medha.errors import ConfigError
from medha.params import SamplingParams
from medha.profile.calibrate import Effort, Measured, families, fit, measure, run_in_turn, slowest_stage
from medha.profile.meter import StageTime
from medha.profile.steps import Step, chunk, decodes
from medha.sched.decision import Prediction
from medha.timeline import Timeline
from tests.bench.shapes import TINY
from tests.commands import Command
from tests.engines import build_engine, drained
from tests.parallel.workers import WorkerPool, run_medha

TINIEST = Effort(chunks=(16, 64), batches=(1, 4), limit_s=0.5, total_s=0.5, min_repeats=2, max_repeats=2)
OPTIONS = {"load_format": "dummy", "device": "cpu", "dtype": "float32", "block_size": 64}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    shape = json.loads((RANDOM_LLAMA / "config.json").read_text()) | TINY
    (folder / "config.json").write_text(json.dumps(shape))
    return folder


@pytest.fixture(scope="module")
def profile(model: Path) -> Path:
    """A file of the tiny model, one process, one thread."""
    path = model.parent / "profile.json"
    path.write_text(measure(config(model), TINIEST, max_kv=256)[0].to_json())
    return path


def config(model: Path, **options: Any) -> EngineConfig:
    return EngineConfig.from_flat(str(model), **{**OPTIONS, "num_threads": 1, "max_num_seqs": 2, **options})


def test_an_engine_predicts_with_its_profile_as_its_journal_and_timeline_say(
    model: Path, profile: Path, tmp_path: Path
) -> None:
    timeline, file = Timeline(), io.StringIO()
    engine = build_engine(config(model, profile=str(profile)), timeline=timeline)
    seen: list[tuple[Batch, Prediction | None, float]] = []
    engine.on_step = lambda batch, prediction, busy_s: seen.append((batch, prediction, busy_s))
    predictor = engine.scheduler.predictor
    assert predictor.coefficients == Coefficients.load(profile)
    assert not any(count for _, count in predictor.learned.values())
    engine.record(file)
    engine.add_request("a", [1, 2, 3] * 100, SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True))
    drained(engine)
    assert all(prediction is not None and busy_s > 0 for _, prediction, busy_s in seen)
    counts = {kind: count for kind, (_, count) in predictor.learned.items()}
    assert counts == {"decode": 3, "mixed": 0, "prefill": len(seen) - 3}
    timeline.write(tmp_path / "a.json")
    events = json.loads((tmp_path / "a.json").read_text())["traceEvents"]
    assert sum(event["ph"] == "C" and event["name"] == "step time (ms)" for event in events) == len(seen)
    lines = file.getvalue().splitlines()
    recorded = json.loads(lines[0])["predictor"]
    assert Coefficients.from_json(json.dumps(recorded["coefficients"])) == Coefficients.load(profile)
    assert recorded["max_tokens"] == engine.scheduler.config.max_batch_tokens
    assert replay(lines).mismatch is None


def test_without_a_profile_it_is_a_spec_for_the_hardware_with_the_same_key(model: Path, profile: Path) -> None:
    default, measured = build_engine(config(model)).scheduler.predictor.coefficients, Coefficients.load(profile)
    assert default.key == measured.key and default.linear != measured.linear
    assert default.host_s == load_spec("cpu").host_s


def test_a_cpu_is_so_many_threads_and_a_gpu_has_the_spec_of_its_name() -> None:
    model = dataclasses.replace(MODEL, hidden_size=2048, intermediate_size=8192)
    one, four = (stage_coefficients(spec_of_device(None, n), model, ParallelConfig(), 0, dtype_bytes=4) for n in (1, 4))
    weights = 4 * (2048 * (64 + 2 * 32 + 64) + 3 * 2048 * 8192)  # of the layers; a token reads each, 4 bytes at 6 GB/s
    assert one.linear.y[0] >= weights * 4 / 6e9
    assert one.linear.y[-1] == pytest.approx(2 * weights * one.linear.x[-1] / 4e10, rel=0.05)
    assert Line.of(one.linear).slope[-1] == pytest.approx(4 * Line.of(four.linear).slope[-1], rel=1e-3)
    for device, name in {"A100-SXM4-80GB": "a100-80g", "H200": "h200-141g", "GeForce RTX 4090": "a100-80g"}.items():
        assert spec_of_device(f"NVIDIA {device}", 1) == load_spec(name)


def test_what_was_measured(profile: Path) -> None:
    found = Coefficients.load(profile)
    assert (found.linear.x, found.chunks.tokens) == ((1.0, 4.0, 16.0, 64.0), (16.0, 64.0))
    assert found.head is not None and found.head.x == found.decodes.batch == (1.0, 4.0)
    assert found.host_s > 0
    assert (found.tp, found.spp, found.kvp, found.mixed) == (None, None, None, None)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"hf_overrides": {"hidden_size": 16}}, r"model is '.*2x32, .*', running '.*2x16, .*'"),
        ({"num_threads": 2}, r"num_threads is 1, running 2"),
        ({"dtype": "bfloat16"}, r"dtype is 'float32', running 'bfloat16'(; backend is .*)?"),  # by machine
        ({"block_size": 32}, r"block_size is 64, running 32"),
    ],
)
def test_a_profile_of_something_else_is_refused(model: Path, profile: Path, options: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=f"profile {profile} was measured for something else: {message}$"):
        build_engine(config(model, profile=str(profile), **options))


def test_the_command_writes_the_file(model: Path, tmp_path: Path, command: Command) -> None:
    path = tmp_path / "written.json"
    arguments = ["profile", model, "--quick", "--max-kv", "64", "--num-threads", "1", "--dtype", "float32"]
    done = command(*arguments, "--device", "cpu", "--log-level", "error", "--output", path)
    found = Coefficients.load(path)
    assert (found.key.layout, found.key.num_threads) == ("tp1 spp1 kvp1", 1)
    assert done.code == 0 and "a decode behind 64" in done.out and "one behind 64 " in done.out
    assert json.loads(command(*arguments, "--output", "-").out).keys() == json.loads(path.read_text()).keys()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--max-kv", "4096"], r"ConfigError: max_kv=4096; accepted: 1 to 1024"),
        (["--spp", "2"], r"ParallelConfigError: tp=1 x spp=2 x kvp=1 needs 2 ranks"),
        (["--output", "/absent/profile.json"], r"ConfigError: report file /absent/profile.json cannot be written"),
    ],
)
def test_what_cannot_be_measured_is_refused(
    model: Path, options: list[str], message: str, tmp_path: Path, command: Command
) -> None:
    common = ["--log-level", "error", "--quick", "--output", tmp_path / "profile.json"]
    done = command("profile", model, *common, *options)
    assert done.code == 2 and message in " ".join(done.err.split())


@pytest.mark.parametrize("axis", [*(pytest.param(axis, marks=pytest.mark.slow) for axis in ("spp", "tp")), "kvp"])
def test_every_rank_takes_part(workers: WorkerPool, model: Path, tmp_path: Path, axis: str) -> None:
    path = tmp_path / "profile.json"
    command = f"profile {model} --{axis} 2 --quick --max-kv 512 --num-threads 1 --dtype float32 --block-size 64".split()
    assert [code for code, _ in workers.run(run_medha, 2, [*command, "--output", str(path)])] == [0, 0]
    found = Coefficients.load(path)
    assert f"{axis}2" in found.key.layout
    for link in ("tp", "spp", "kvp"):
        assert (getattr(found, link) is not None) == (link == axis == "kvp")
    assert (found.ring is not None) == (axis == "kvp")


# -- the parts, without a clock ----------------------------------------------------------------------------------------


def test_steps_that_take_too_long_are_left_out_and_the_others_run_in_turn() -> None:
    ran: list[Step] = []

    def run(step: Step) -> tuple[int, float]:
        """On paper: a second a million (tokens x (cached + 1000))."""
        ran.append(step)
        return len(ran), sum(part.q_len * (part.position + 1000) for part in step) / 1e6

    effort = Effort(chunks=(16, 64, 256, 1024), batches=(1, 16), limit_s=0.3, total_s=1e9, max_repeats=3)
    wanted = families(effort, max_kv=131072, num_groups=1, block_size=64)
    steps = run_in_turn(SimpleNamespace(run=run), effort, wanted, lambda done: None)  # type: ignore[arg-type]
    assert max(step[0].q_len for step in ran) == 256  # 1,024 tokens are left out with nothing cached already
    assert {step[0].q_len for step in steps.values()} == {1, 16, 64, 256}
    runs = list(steps.values())
    distinct = len(set(runs))
    assert len(runs) == 3 * distinct
    for number in range(3):
        assert len(set(runs[distinct * number : distinct * (number + 1)])) == distinct
    assert max(len(step) * step[0].position for step in runs if step[0].is_decode) >= 131072


MODEL = ModelConfig("Paper", 100, 64, 128, 4, 4, 2, 16, 4096, RopeConfig())
KEY = ProfileKey("paper", "paper", "float32", "tp1 spp1 kvp1", "torch", 1, 64, "0")


def stage_time(step: Step) -> StageTime:
    """A stage whose costs are exactly of the predictor's form."""
    tokens = sum(part.q_len for part in step)
    if step[0].is_decode:
        attention = sum(20e-6 + 1e-9 * part.position for part in step)
        return StageTime(attention, 0.0, 1e-3 + 1e-5 * tokens, 2e-4 + 1e-5 * len(step), 3e-4 + 5e-6 * (len(step) - 1))
    attention = (5e-5 if step[0].position else 4e-5) + 1e-10 * tokens * (tokens / 2 + step[0].position)
    return StageTime(attention, 0.0, 1e-3 + 1e-5 * tokens, 0.0, 3e-4)


def test_a_stage_of_the_predictors_form_is_found_again() -> None:
    steps = [step for family in families(Effort(), max_kv=65536, num_groups=1, block_size=64) for step in family]
    measured = [Measured(step, stage_time(step)) for step in steps]
    predictor = Predictor(fit(measured, KEY, MODEL, ParallelConfig(), stage=0, dtype_bytes=4))
    for step in (*steps, chunk(448, 30000), chunk(1024, 900000), decodes(24, 10000), decodes(3, 500000)):
        works = [Work(part.q_len, part.position, part.is_decode) for part in step]
        assert predictor.predict(works) == pytest.approx(stage_time(step).busy_s, rel=0.03), step
    mixed = decodes(8, 2048)
    real = stage_time(mixed).busy_s + stage_time(chunk(256, 4096)).attention_s + 256e-5
    works = [Work(1, 2048, True)] * 8 + [Work(256, 4096, False)]
    assert predictor.predict(works) == pytest.approx(real, rel=0.03)


def test_what_a_ring_takes_beside_its_computation_is_found_again() -> None:
    """From chunks that were dealt to 2 and to 4 groups; one of them ran once beside something else."""
    wanted = [step for steps in families(Effort(), max_kv=65536, num_groups=4, block_size=64) for step in steps]
    alone = [step for step in wanted if step[0].num_groups == 1]
    given = [Measured(step, stage_time(step)) for step in alone], KEY, MODEL, ParallelConfig(kvp=4)
    predictor = Predictor(fit(*given, stage=0, dtype_bytes=4))
    ring = RingCost(Link(4, 1e-3, 256 / 2e-7, 256))  # a millisecond, and 0.2 us a token, a layer
    dealt = []
    for (row,) in (step for step in wanted if step[0].is_dealt):
        own = -(-row.q_len // row.num_groups)
        alone_s = predictor.tick().with_chunk(own, row.position + (row.q_len - own) // 2)
        whole_s = alone_s + ring.seconds(0.0, size=row.num_groups, history=row.position, tokens=row.q_len)
        dealt += [(row, whole_s), (row, whole_s), (row, (1 + (row.q_len > 1000)) * whole_s)]
    assert {row.num_groups for row, _ in dealt} == {2, 4}
    found = fit(*given, stage=0, dtype_bytes=4, dealt=dealt).ring
    assert found is not None and (found.step_s, found.is_hidden) == (0.0, False)
    assert (found.link.calls, found.link.bytes_per_token) == (4, 256.0)
    assert found.link.alpha_s == pytest.approx(1e-3, rel=0.01)
    assert found.link.bytes_per_s == pytest.approx(256 / 2e-7, rel=0.01)


def test_the_slowest_stage_is_the_one_that_counts() -> None:
    steps = {0: chunk(16, 0), 1: decodes(2, 64)}
    fast = {number: stage_time(step) for number, step in steps.items()}
    slow = {number: time._replace(linear_s=2 * time.linear_s) for number, time in fast.items()}
    stage, rows = slowest_stage([fast, slow, fast], steps)
    assert stage == 1
    assert [row.time for row in rows] == [slow[0], slow[1]]
