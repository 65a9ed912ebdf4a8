"""The journal: a live run comes to the same decisions again, and whatever is changed in it is found."""

import io
import json
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from medha import LLM
from medha.batch import Batch
from medha.config import SchedulerConfig
from medha.cost.predictor import KINDS
from medha.engine.engine import Engine
from medha.engine.journal import Journal
from medha.engine.replay import replay
from medha.errors import ConfigError, DeadlineError, EngineDeadError
from medha.models.needle import make_haystack
from medha.params import SLO, SamplingParams
from medha.sched.policy import Columns
from medha.sched.scheduler import Scheduler
from tests.commands import Command, write_lines
from tests.engines import drained
from tests.sched.virtual import Drive, Job, make_predictor
from tests.serving import Model

# -- a live run -------------------------------------------------------------------------------------------


def live_engine(model: Model, file: io.StringIO, **options: Any) -> Engine:
    """An engine on the real clock, under the paper's scheduler and a journal."""
    config = {"max_batch_tokens": 64, "quantum_s": 0.02, "long_threshold": 300, "min_chunk": 16} | options
    predictor = make_predictor(max_tokens=64)
    engine = model.engine(num_blocks=100, block_size=16, scheduler="medha", predictor=predictor, **config)
    engine.record(file)
    return engine


def add(engine: Engine, number: int, num_prompt: int, *, priority: str = "normal", ttft_s: float | None = None) -> None:
    tokens = np.random.default_rng(number).integers(0, engine.limits.vocab_size, num_prompt).tolist()
    params = SamplingParams(temperature=0.0, max_tokens=1 + number % 5, ignore_eos=True)
    slo = SLO(ttft_s) if ttft_s else None
    engine.add_request(str(number), tokens, params, slo=slo, priority=priority)


def serve(engine: Engine) -> None:
    """Prompts short and long that come as others run; one is aborted, and once all is abandoned."""
    for number in range(12):
        add(engine, number, (5, 700, 40, 350, 16)[number % 5], ttft_s=(None, 0.2)[number % 2])
        engine.step()
    engine.abort("6")
    engine.step()
    engine.abandon()
    for number in range(12, 18):
        add(engine, number, 60 * (number - 10), priority="high" if number % 2 else "low")
    drained(engine)


@pytest.fixture(scope="module")
def recorded(bytes_model: Model) -> list[str]:
    file = io.StringIO()
    serve(live_engine(bytes_model, file, policy="priority"))
    return file.getvalue().splitlines()


def test_a_live_run_replays_to_the_same_decisions(recorded: list[str]) -> None:
    calls = [json.loads(line).get("call") for line in recorded]
    assert calls[0] is None
    assert set(calls[1:]) == {"add", "cancel", "schedule", "complete", "fresh"}
    assert calls.count("schedule") > 30
    assert replay(recorded).mismatch is None


class Failing(io.StringIO):
    """A journal that raises an error, once, in place of taking its n-th line of some call."""

    def __init__(self, call: str, num_left: int, error: BaseException) -> None:
        super().__init__()
        self.call, self.num_left, self.error = f'"call":"{call}"', num_left, error

    def write(self, text: str) -> int:
        self.num_left -= self.call in text
        if self.num_left == 0:
            self.num_left = -1
            raise self.error
        return super().write(text)


def test_what_was_learned_before_an_interrupt_is_written_down(bytes_model: Model) -> None:
    """The scheduler has completed a batch, and its predictor has learned, of which the journal knows nothing."""
    file = Failing("complete", 3, KeyboardInterrupt())
    engine = live_engine(bytes_model, file)
    add(engine, 0, 700)
    with suppress(KeyboardInterrupt):
        drained(engine)
    assert file.num_left == -1
    for number in (1, 2, 3):
        add(engine, number, 200 * number)
    drained(engine)
    replayed = replay(file.getvalue().splitlines())
    assert (replayed.mismatch, replayed.num_batches > 20) == (None, True)


def test_a_journal_that_cannot_take_an_abort_ends_the_engine(bytes_model: Model) -> None:
    engine = live_engine(bytes_model, Failing("cancel", 1, OSError(28, "No space left on device")))
    names = [str(number) for number in range(600)]
    for name in names:
        engine.add_request(name, [1, 2])
    engine.end(names)
    assert engine.num_unfinished == 0
    with pytest.raises(EngineDeadError, match="No space left on device; what was written before is kept"):
        engine.step()


def test_completions_of_one_request_are_judged_as_one(bytes_model: Model) -> None:
    """What was learned in a slow minute refuses all but the first request; it refused the second completion of that."""
    engine = live_engine(bytes_model, file := io.StringIO(), admission="refuse")
    for kind in KINDS:
        engine.scheduler.predictor.observe(kind, 1.0, 5.0)
    engine.abandon()  # what was learned is written down
    slo = SLO(1.5 * engine.scheduler.prefill_left_s(0, 100, corrected=False))
    for request_id, params in (("two", SamplingParams(n=2, max_tokens=4)), ("one", None)):
        with suppress(DeadlineError):
            engine.add_request(request_id, [1] * 100, params, slo=slo)
    assert [len(one.outputs) for one in drained(engine) if one.finished] == [2]
    assert replay(file.getvalue().splitlines()).mismatch is None


def test_a_changed_byte_is_reported_with_its_batch(recorded: list[str]) -> None:
    for number, line in enumerate(recorded[:30]):
        entry = json.loads(line)
        if entry.get("call") != "schedule" or entry["batch"] is None:
            continue
        batch = Batch.from_ints(entry["batch"])
        entry["batch"][11] ^= 1  # query tokens of its first row
        mismatch = replay([*recorded[:number], json.dumps(entry), *recorded[number + 1 :]]).mismatch
        assert mismatch.startswith(f"line {number + 1}, schedule (batch {batch.batch_id}):\nrecorded batch")
        assert mismatch.endswith(f"\nreplayed {batch}")


@pytest.mark.parametrize(
    ("call", "change"), [("add", {"deadline_s": 1.5}), ("cancel", {"closed": [77]}), ("complete", {"closed": [77]})]
)
def test_other_decisions_are_compared_too(recorded: list[str], call: str, change: dict[str, Any]) -> None:
    number = next(i for i, line in enumerate(recorded) if json.loads(line).get("call") == call)
    changed = json.dumps(json.loads(recorded[number]) | change)
    mismatch = replay([*recorded[:number], changed, *recorded[number + 1 :]]).mismatch
    assert mismatch.startswith(f"line {number + 1}, {call} (batch ")


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ([], "journal line 1 cannot be read"),
        (["{"], "journal line 1 cannot be read: JSONDecodeError"),
        (["[]"], "journal line 1 cannot be read"),
        (['{"format": "other", "version": 1}'], "accepted: medha-journal, version 3"),
        ([None, '{"call": "other", "now_s": 1}'], "journal line 2 cannot be read: ValueError: call 'other'"),
        ([None, '{"call": "schedule", "now_s": 1}'], "journal line 2 cannot be read"),
        ([None, '"x"'], "journal line 2 cannot be read"),
        ([None, "\x00"], "journal line 2 cannot be read"),
    ],
)
def test_what_is_no_journal_is_refused(recorded: list[str], lines: list[str | None], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        replay(recorded[0] if line is None else line for line in lines)


def some_policy(columns: Columns, now_s: float) -> np.ndarray[Any, Any]:
    return columns.arrival_s


def test_a_policy_that_is_a_function_cannot_be_recorded_by_name_it_can_before_anything_is_learned() -> None:
    sizes: dict[str, Any] = {"num_blocks": 9, "block_size": 16, "predictor": make_predictor()}
    with pytest.raises(ConfigError, match=r"^policy=<function some_policy.* cannot be recorded; accepted: a name"):
        Journal(Scheduler(SchedulerConfig(policy=some_policy), **sizes), io.StringIO())
    file = io.StringIO()
    sched = Scheduler(SchedulerConfig(policy=f"{__name__}:some_policy"), **sizes)
    Drive(sched, [Job(0.0, 50, 2)], lambda batch: 0.1, observers=[Journal(sched, file)]).run()
    assert replay(file.getvalue().splitlines()).mismatch is None
    sched.predictor.observe("prefill", 1.0, 2.0)
    with pytest.raises(ConfigError, match="learned nothing"):
        Journal(sched, file)


def test_a_journal_that_cannot_be_written_is_left_as_it_was(tmp_path: Path) -> None:
    (file := tmp_path / "run.journal").write_text("earlier")
    with pytest.raises(ConfigError, match="decisions of one scheduler; accepted: without decode_replicas"):
        LLM("nowhere", decode_replicas=1, journal=file)
    assert file.read_text() == "earlier"


@pytest.mark.parametrize(("make", "why"), [(io.BytesIO, "bytes-like"), (io.StringIO, "closed file")])
def test_what_cannot_be_written_to_is_told(bytes_model: Model, make: Any, why: str) -> None:
    file = make()
    if why == "closed file":
        live = live_engine(bytes_model, file)
        file.close()
        with pytest.raises(EngineDeadError, match=f"^journal : .*{why}"):
            add(live, 0, 5)
    with pytest.raises(EngineDeadError, match=f"^journal : .*{why}.*; what was written before is kept$"):
        live_engine(bytes_model, file)


def test_a_cut_last_line_is_left_out(recorded: list[str], tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "cut.jsonl"
    path.write_text("\n".join(recorded)[:-5])
    cut, whole = replay(path), replay(recorded)
    assert cut.mismatch is None and cut.num_calls == whole.num_calls - 1
    assert caplog.messages == [f"{path} is truncated: its last line, which lacks its end, is left out"]
    path.write_text(recorded[0][:-5])
    with pytest.raises(ConfigError, match=r"cut\.jsonl is not a medha journal, or is truncated in its first line"):
        replay(path)
    with pytest.raises(ConfigError, match=r"^journal .*gone\.journal: No such file or directory$"):
        replay(tmp_path / "gone.journal")


ADA = "The code of Ada is 31-plum.\nThe code of Ada is"
ROWS = [
    {"id": "document", "prompt": make_haystack(3000).prompt},
    {"id": "soon", "prompt": ADA, "arrival_s": 0.05, "slo": {"ttft_s": 2.0, "tpot_s": 0.1}},
    {"id": "wrong", "prompt": ""},
    {"id": "later", "prompt": ADA, "arrival_s": 0.3, "priority": "high"},
]


@pytest.mark.parametrize(
    "options",
    [["--chunk-size", "128", "--policy", "priority"], ["--scheduler", "sarathi", "--block-size", "64"]],
    ids=["medha", "sarathi"],
)
def test_a_run_replays(needle: Model, tmp_path: Path, command: Command, options: list[str]) -> None:
    journal, requests = tmp_path / "run.journal", write_lines(tmp_path / "in.jsonl", *ROWS)
    journal.write_text("what an earlier run left\n")
    given = ["--requests", requests, "--num-kv-blocks", "64", "--log-level", "error", "--journal", journal, *options]
    assert command("generate", needle.folder, *given).code == 3  # a line is wrong
    lines = journal.read_text().splitlines()
    calls = [json.loads(line).get("call") for line in lines]
    assert (calls[0], calls.count("add")) == (None, 3)
    batches = [line for line in lines if '"call":"schedule"' in line and "null" not in line]
    done = command("replay", journal)
    expected = f"{len(batches):,} batches and {len(calls) - 1:,} calls compared: every decision is the same\n"
    assert (done.code, done.out) == (0, expected)
    head = json.loads(lines[0])
    head["config"]["chunk_size"] = 96
    journal.write_text("\n".join([json.dumps(head), *lines[1:]]))
    done = command("replay", journal)
    assert (done.code, done.err, done.out.startswith("after 0 batches and ")) == (1, "", True)
    for text in ("that are the same, line ", "\nrecorded batch 0: ", "\nreplayed batch 0: "):
        assert text in done.out
