"""The command line: what it reads, writes, refuses, and how it ends."""

import json
import os
import pty
import re
import signal
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext, suppress
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

import medha.engine.build
import medha.verify.demo
from medha.cli.command import first_interrupt
from medha.cli.options import ENGINE, SAMPLING
from medha.config import EngineConfig
from medha.engine.replay import replay
from medha.errors import ConfigError
from medha.models.needle import make_haystack, write_needle
from medha.worker.runner import Runner
from tests.commands import Command, Done, parse, wait_until, without_torch, write_lines
from tests.sched.costs import PLAIN
from tests.serving import Model

ADA = "The code of Ada is 31-plum.\nThe code of Ada is"
BRUNO = "The code of Bruno is 58-fern.\nThe code of Bruno is"
EARLIER = "what an earlier run left\n"
KEYS = {"id", "text", "token_ids", "finish_reason", "num_prompt_tokens", "ttft_s", "tpot_s", "e2e_s", "error"}
EXTRA_KEYS = {"stop_reason", "num_output_tokens", "queue_s", "ttft_parts_s", "held_up_by", "met_slo", "is_relegated"}


@pytest.fixture
def folder(needle: Model) -> Path:
    return needle.folder


@pytest.fixture
def bare(command: Command) -> Command:
    """The command as typed, in this process."""
    return partial(command, "generate")


@pytest.fixture
def run(bare: Command, folder: Path) -> Command:
    """The command with the needle model and a small KV pool."""
    return partial(bare, "--model", folder, "--num-kv-blocks", "64")


@pytest.fixture
def run_rows(run: Command, tmp_path: Path) -> Command:
    """The same over a request file of these rows, with these options."""
    return lambda rows, *options: run("--requests", write_lines(tmp_path / "in.jsonl", *rows), *options)


@pytest.fixture
def _loads_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(medha.engine.build, "build_role", lambda *_, **__: pytest.fail("the model is loaded"))


# -- what it prints ----------------------------------------------------------------------------------------------


def test_one_prompt_streams_its_text_alone_to_stdout_and_several_have_a_line_each(run: Command) -> None:
    done = run("--prompt", ADA)
    assert (done.code, done.out) == (0, " 31-plum.\n")
    assert "LlamaForCausalLM" in done.err
    assert done.err.splitlines()[-1].startswith("medha: stop after 10 tokens, TTFT ")
    done = run("--prompt", ADA, "--prompt", BRUNO, "--prompt", "-- not_an_option", "--log-level", "warning")
    assert (done.code, done.err) == (0, "")
    first, second, _ = sorted(done.out.splitlines())
    assert first.startswith("prompt-0   31-plum.  [stop after 10 tokens, TTFT ")
    assert second.startswith("prompt-1   58-fern.  [stop after 10 tokens, TTFT ")


def test_prompt_file_is_one_prompt_to_the_byte(run: Command, tmp_path: Path) -> None:
    path = tmp_path / "prompt.txt"
    path.write_bytes("The code of Zoë is 7 €.\r\nThe code of Zoë is".encode())
    done = run("--prompt-file", path, "--json")
    assert done.rows[0]["text"] == " 7 €.\r"
    assert done.rows[0]["num_prompt_tokens"] == len(path.read_bytes())
    path.write_text(ADA, encoding="utf-8-sig")  # a byte order mark is no part of a prompt
    assert run("--prompt-file", path, "--json").rows[0]["num_prompt_tokens"] == len(ADA)


def test_standard_input_and_output_as_a_pipe(run: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def run_with(stdin: Path, *options: str) -> Done:
        with stdin.open() as given, monkeypatch.context() as patch:
            patch.setattr("sys.stdin", given)
            return run(*options, "--log-level", "warning")

    (prompt := tmp_path / "in").write_text(ADA)
    for options in ([], ["--prompt-file", "-"]):
        assert run_with(prompt, *options).out == " 31-plum.\n"
    reader, writer = os.pipe()
    with open(reader) as output, open(writer):
        requests = write_lines(tmp_path / "in.jsonl", {"prompt": ADA})
        done = run_with(requests, "--requests", "-", "--output", f"/dev/fd/{writer}")
        assert (done.code, done.err, json.loads(output.readline())["text"]) == (0, "", " 31-plum.")
    assert "neither of prompts and --requests given; accepted" in run_with(Path(os.devnull)).err


def test_request_file_to_output_file(run_rows: Command, tmp_path: Path) -> None:
    rows = [
        {"id": "text", "prompt": ADA},
        {"id": "ids", "prompt_token_ids": list(BRUNO.encode()), "stop": "fern"},
        {"id": "short", "prompt": ADA, "max_tokens": 3, "slo": {"ttft_s": 1e-6}},
        {"prompt": ADA, "max_tokens": None},
        {"id": "several", "prompt": ADA, "n": 3, "temperature": 1.5, "seed": 2, "ignore_eos": True, "logprobs": 0},
    ]
    output = tmp_path / "out.jsonl"
    output.write_text(EARLIER)
    done = run_rows(rows, "--output", output, "--overwrite", "--max-tokens", "8", "--admission", "relegate")
    assert (done.code, len(done.out.splitlines())) == (0, 4 + 3)  # a line a completion
    found = {row["id"]: row for row in parse(output.read_text())}
    several = found.pop("several")["outputs"]
    assert len({one["text"] for one in several}) == 3 and [len(one["logprobs"]) for one in several] == [8] * 3
    assert bytes(found["text"]["token_ids"]) == b" 31-plum"
    assert {i: (row["text"], row["finish_reason"], row["stop_reason"]) for i, row in found.items()} == {
        "text": (" 31-plum", "length", None),
        "ids": (" 58-", "stop", "fern"),
        "short": (" 31", "length", None),
        "line-4": (" 31-plum", "length", None),
    }
    for row in found.values():
        assert row["num_output_tokens"] == len(row["token_ids"])
        assert 0 <= row["queue_s"] <= row["ttft_s"] <= row["e2e_s"]
        assert set(row) == KEYS | EXTRA_KEYS and row["error"] is None
        assert (row["is_relegated"], row["met_slo"]) == ((True, False) if row["id"] == "short" else (False, None))


def test_explain_says_on_stderr_where_each_ttft_went(run: Command, run_rows: Command) -> None:
    rows = [{"id": "document", "prompt": make_haystack(3000).prompt}, {"id": "a\nb", "prompt": ADA}, {"prompt": ""}]
    done = run_rows(rows, "--explain", "--json", "--log-level", "error", "--policy", "fcfs")
    found = {row["id"]: row for row in done.rows}
    assert {line.split(":")[0] for line in done.err.splitlines() if line[0] != " "} == {"document", "a⏎b"}
    assert re.search(r"^a⏎b: TTFT \d+\.\d{3} s\n  own compute .*, other prefills .* \(document .*\)\n", done.err, re.M)
    assert sum(found["a\nb"]["ttft_parts_s"].values()) == pytest.approx(found["a\nb"]["ttft_s"], abs=1e-6)
    held_up_by = [found[name]["held_up_by"] for name in ("a\nb", "line-3")]
    assert (held_up_by[0][0][0], held_up_by[1], found["line-3"]["ttft_parts_s"]) == ("document", None, None)
    single = run("--prompt", ADA, "--explain", "--log-level", "error")
    assert single.out == " 31-plum.\n" and single.err.startswith("prompt-0: TTFT ")


def test_chat(bare: Command, tmp_path: Path) -> None:
    model = write_needle(tmp_path / "needle")
    (model / "chat_template.jinja").write_text("{% for m in messages %}{{ m.content }}{% endfor %}")
    done = bare(model, "--num-kv-blocks", "8", "--chat", "--prompt", ADA)
    assert (done.code, done.out) == (0, " 31-plum.\n")


@pytest.fixture
def ids_alone(tmp_path: Path) -> Path:
    """A model without a tokenizer."""
    folder = write_needle(tmp_path / "ids")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).unlink()
    return folder


@pytest.mark.usefixtures("_loads_nothing")
def test_text_that_a_model_cannot_take_is_found_before_it_is_loaded(
    bare: Command, folder: Path, ids_alone: Path, tmp_path: Path
) -> None:
    plain = write_needle(tmp_path / "plain")
    (plain / "tokenizer_config.json").write_text("{}")
    for model, options, message in (
        (ids_alone, ["x"], "prompt needs a tokenizer, and the model has none; accepted: prompt_token_ids"),
        (plain, ["x", "--chat"], "messages need a chat template, and the model has none; accepted: prompt"),
        (folder, [""], "the prompt is empty; accepted: at least one token"),
    ):
        done = bare(model, "--prompt", *options, "--log-level", "error")
        assert (done.code, done.err) == (2, f"error: ConfigError: {message}\n")


def test_a_model_without_tokenizer_takes_and_prints_ids(bare: Command, ids_alone: Path, tmp_path: Path) -> None:
    own = {"prompt_token_ids": list(ADA.encode())}
    requests = write_lines(tmp_path / "own.jsonl", own)
    done = bare(ids_alone, "--requests", requests, "--num-kv-blocks", "8")
    assert (done.code, done.out) == (0, " ".join(map(str, b" 31-plum.\n")) + " \n")
    requests = write_lines(tmp_path / "in.jsonl", {"prompt": "x"}, own, {"messages": []})
    done = bare(ids_alone, "--requests", requests, "--json", "--num-kv-blocks", "8", "--log-level", "warning")
    errors = {row["id"]: row["error"] and row["error"]["message"].partition(";")[0] for row in done.rows}
    none = "needs a tokenizer, and the model has none"
    assert (done.code, errors) == (3, {"line-1": f"prompt {none}", "line-2": None, "line-3": f"messages {none}"})
    assert f"medha: {ids_alone} has no tokenizer.json: prompts and answers are token ids\n" in done.err
    assert "medha: 2 of 3 requests cannot be run; the first: prompt needs a tokenizer" in done.err


# -- options -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "changes"),
    [
        ("--cuda-graphs --stream", {}),
        ("--enforce-eager --no-stream --overcommit", {"cuda_graphs": False, "stream": False, "overcommit": True}),
        ("-tp 2 -pp=3 --dtype half --swap-space 4", {"tp": 2, "spp": 3, "dtype": "float16", "swap_space": "4GiB"}),
        ("--max-model-len 2K --max-num-batched-tokens=1k", {"max_model_len": 2048, "max_batch_tokens": 1000}),
        ('--long_threshold 10M --hf-overrides {"a":1}', {"long_threshold": 10 << 20, "hf_overrides": {"a": 1}}),
        ('--rope_scaling={"rope_type":"linear","factor":2}', {"rope_scaling": {"rope_type": "linear", "factor": 2}}),
        ("--num-kv-blocks=64 --no-enable-prefix-caching", {"num_kv_blocks": 64, "prefix_caching": False}),
        ("--kv-memory=1GiB", {"kv_memory": "1GiB"}),
        ("--enable-prefix-caching", {"prefix_caching": True}),
        ("--trust-remote-code --served-model-name x --kv_cache_dtype=auto", {}),
    ],
)
def test_options_of_ours_and_of_vllm(
    bare: Command, folder: Path, monkeypatch: pytest.MonkeyPatch, given: str, changes: dict[str, Any]
) -> None:
    build_role = Mock(side_effect=ConfigError("no model is loaded here"))
    monkeypatch.setattr(medha.engine.build, "build_role", build_role)
    monkeypatch.setattr("medha.generate.__main__.own_ranks", lambda *_: nullcontext())
    monkeypatch.setattr("medha.generate.work._checked", lambda config, arrivals: arrivals)
    done = bare("--model_path", folder, "--prompt", "x", *given.split())
    assert (done.code, "no model is loaded here" in done.err) == (2, True), done.err
    assert build_role.call_args.args[0] == EngineConfig.from_flat(str(folder), **changes)


def test_options_that_change_nothing_are_noted_and_a_value_may_look_like_one(run: Command) -> None:
    """Some of vLLM's, and what greedy decoding ignores."""
    done = run("--prompt", ADA, "--trust-remote-code", "--served_model_name", "x", "--log-level", "error")
    assert (done.code, done.out) == (0, " 31-plum.\n")
    assert done.err.splitlines() == [
        "medha: --trust-remote-code changes nothing: no code of a checkpoint runs",
        "medha: --served_model_name x changes nothing: it is an option of medha serve",
    ]
    said = "medha: at temperature 0, the default, this changes nothing: --top-p; see --temperature\n"
    assert run("--prompt", ADA, "--max-tokens", "1", "--log-level", "warning", "--top-p", "0.9").err == said
    assert run("--prompt", "--trust-remote-code", "--max-tokens", "1").err.count("changes nothing") == 0
    assert run("--prompt", ADA, "--stop", "-tp").out == " 31-plum.\n"


def test_sampling_options(run: Command) -> None:
    options = ["--max_new_tokens=20", "--temperature", "0.9", "--top_p", "0.5", "--top-k=5", "--min-p", "0.1"]
    options += ["--repetition-penalty", "1.1", "--stop", "8", "--stop", "9", "--ignore_eos", "--seed", "3", "--json"]
    first, second = (run("--prompt", ADA, *options).rows[0] for _ in range(2))
    assert first["token_ids"] == second["token_ids"]
    assert run("--prompt", ADA, "--stop", "um", "--stop", "1").out == " 3\n"
    assert len(run("--prompt", ADA, "--ignore-eos", "--max-tokens", "25", "--json").rows[0]["token_ids"]) == 25


# -- what it refuses ---------------------------------------------------------------------------------------------

NO_CUDA = pytest.mark.skipif(medha.engine.build.torch.cuda.is_available(), reason="needs a machine without CUDA")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--prompt x", "no model; accepted: --model with a folder or hub id (the demo: `medha generate` alone)"),
        ("{model} --model {model} --prompt x", "ConfigError: the model is given twice: "),
        ("{model}", "ConfigError: neither of prompts and --requests given"),
        ("{model} --prompt x --requests {requests}", "ConfigError: both of prompts and --requests given"),
        ("{model} --requests {tmp}/gone.jsonl", "gone.jsonl: No such file or directory"),
        ("{model} --requests {long}", "xx: File name too long"),
        ("{model} --prompt x --output {long}", "xx: File name too long"),
        ("{model} --prompt-file {tmp}/latin-1.txt", "latin-1.txt: not UTF-8 at byte 2"),
        ("{model} --prompt x --output {tmp}", "Is a directory"),
        ("{model} --requests {requests} --chat", "ConfigError: --chat is for --prompt and --prompt-file"),
        ("{model} --requests {requests} --output {requests}", "which is read; accepted: another file"),
        ("{model} --prompt x --output {tmp}/old.jsonl", "old.jsonl is not empty; accepted: another file"),
        ("{model} --prompt x --overwrite", "ConfigError: --overwrite without --output"),
        ("{model} --prompt x --num-kv-blocks 64 --kv-memory 1GiB", "num_kv_blocks and kv_memory both size the KV pool"),
        (
            "{model} --requests {tmp}/trace.jsonl",
            "{tmp}/trace.jsonl is a trace (format mooncake): it has lengths and no prompts; to serve random prompts of "
            "these lengths: medha bench serve --dataset-path {tmp}/trace.jsonl, ",
        ),
        ("{model} --prompt x --resume --output {tmp}/o", "ConfigError: --resume without --requests"),
        (
            "{model} --requests {requests} --resume --overwrite --output {tmp}/o",
            "ConfigError: --overwrite and --resume given",
        ),
        ("{model} --prompt x --output {tmp}/o --timeline {tmp}/./o", "which is written too"),
        ("{model} --prompt x --output /dev/stdout", "/dev/stdout, which is written too"),  # a file or a pipe
        ("{model} --prompt x --journal -", "ConfigError: output file -; accepted: another name"),
        ("{model} --prompt x --hf-overrides [1]", "ConfigError: hf_overrides"),
        ("{model} --prompt x --journal {tmp}/gone/j", "gone/j: No such file or directory"),
        ("{model} --prompt x --log-level bogus", "ConfigError: log_level='bogus'; accepted: debug, info"),
        ("{model} --requests {requests} --top-p 7", "ValidationError: top_p=7; accepted"),
        ("{model} --prompt x --max-tokens many", "Invalid value for '--max-tokens': "),
        ("{model} --prompt x -q awq", "ConfigError: -q awq is not among medha's options: quantised"),
        ("{model} --prompt", "--prompt"),
        ("{tmp}/gone {anew}", "error: ModelLoadError: model '{tmp}/gone': no such folder"),
        ('{model} --hf-overrides {{"hiden_size":1}} {anew}', "did you mean hidden_size?"),
        ("{model} --max-model-len 99999999 {anew}", "error: ConfigError: max_model_len=99999999"),
        ("{model} --policy=larz {anew}", "error: ConfigError: policy='larz'; accepted: edf, fcfs"),
        ("{model} --profile {tmp}/gone {anew}", "error: ConfigError: profile {tmp}/gone cannot be read"),
        ("{model} --profile {tmp}/profile {anew}", "{tmp}/profile was measured for something else: "),
        pytest.param("{model} --device cuda {anew}", "error: ConfigError: device='cuda'", marks=NO_CUDA),
    ],
)
def test_bad_usage_is_one_line(
    bare: Command, folder: Path, tmp_path: Path, request: pytest.FixtureRequest, arguments: str, message: str
) -> None:
    """Before the model is loaded, or before what it is asked for leaves a trace."""
    if "{anew}" not in arguments:
        request.getfixturevalue("_loads_nothing")
    requests = write_lines(tmp_path / "requests.jsonl", {"prompt": "x"})
    (tmp_path / "latin-1.txt").write_bytes(b"Zo\xeb")
    (tmp_path / "old.jsonl").write_text(EARLIER)
    (tmp_path / "profile").write_text(PLAIN.to_json())
    write_lines(tmp_path / "trace.jsonl", {"timestamp": 0, "input_length": 5, "output_length": 5})
    names = {"model": folder, "requests": requests, "tmp": tmp_path, "long": "x" * 300}
    names["anew"] = f"--prompt x --output {tmp_path}/old.jsonl --overwrite --log-level warning"
    done = bare(*arguments.format(**names).split())
    assert (done.code, done.out, done.err.count("\n")) == (2, "", 1)
    assert done.err.startswith("error: ") and message.format(**names) in done.err
    assert (requests.read_text(), (tmp_path / "old.jsonl").read_text()) == ('{"prompt": "x"}\n', EARLIER)


BAD_LINES: dict[str, tuple[dict[str, Any] | str, str]] = {
    "line-2": ("{not json", "ValidationError"),
    "line-3": ({"prompt": ADA, "suffix": "x"}, "UnsupportedFeatureError"),
    "line-4": ({"prompt": ""}, "ValidationError"),
    "line-5": ({"prompt": "x" * 256}, "ContextLengthError"),
    "line-6": ({"id": "twice", "prompt": "x"}, "ValidationError"),
    "line-7": ({"messages": [{"role": "user", "content": "x" * 256}]}, "ContextLengthError"),
    "\ud800": ({"id": "\ud800", "prompt": ""}, "ValidationError"),
    "hopeless": ({"id": "hopeless", "prompt": ADA, "slo": {"ttft_s": 1e-6}}, "DeadlineError"),
}


def test_a_bad_line_is_an_error_line_and_the_others_run(run_rows: Command, tmp_path: Path) -> None:
    good = [{"id": "twice", "prompt": ADA}, {"id": "extra", "prompt": ADA, "user": 5, "metadata": {}, "tools": []}]
    rows, output = [good[0], *(line for line, _ in BAD_LINES.values()), good[1]], tmp_path / "out.jsonl"
    options = ["--max-model-len", "256", "--admission", "refuse", "--log-level", "warning"]
    done = run_rows(rows, "--output", output, *options)
    assert done.code == 3
    wrong, ignored, text = done.err.splitlines()
    assert ignored == "medha: request fields ignored (with how many lines): {'user': 1, 'metadata': 1}"
    where = f"in {tmp_path}/in.jsonl cannot be run; the first is line 2: a request: "
    assert re.fullmatch(rf"medha: \d of 10 requests {where}.*", wrong)
    assert text == "medha: 2 of 10 requests cannot be run; the first: the prompt is empty; accepted: at least one token"
    rows = parse(output.read_text())
    assert len(rows) == len(BAD_LINES) + 2
    served = [row for row in rows if row["error"] is None]
    assert [(row["id"], row["text"]) for row in served] == [("twice", " 31-plum."), ("extra", " 31-plum.")]
    failed = [row for row in rows if row["error"] is not None]
    assert {row["id"]: row["error"]["type"] for row in failed} == {i: kind for i, (_, kind) in BAD_LINES.items()}
    for row in failed:
        assert set(row) == KEYS | EXTRA_KEYS
        assert set(row["error"]) == {"type", "message"}
        assert 10 <= len(row["error"]["message"]) < 400
        assert (row["finish_reason"], row["token_ids"], row["ttft_s"]) == ("error", [], None)
        assert row["met_slo"] is (False if row["id"] == "hopeless" else None)


# -- how it ends -------------------------------------------------------------------------------------------------


def test_a_dead_engine_leaves_each_a_line(run_rows: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    original = Runner.run

    def run_three(self: Runner, step: Any) -> Any:
        if step.batch.batch_id == 3:
            raise RuntimeError("the device fell off")
        return original(self, step)

    monkeypatch.setattr(Runner, "run", run_three)
    rows = [{"id": "short", "prompt": ADA, "max_tokens": 2}, {"id": "a", "prompt": ADA}]
    rows += [{"id": "late", "prompt": ADA, "arrival_s": 100}]
    done = run_rows(rows, "--json", "--timeline", tmp_path / "t.json", "--journal", tmp_path / "run.journal")
    assert done.code == 4
    recorded = replay(tmp_path / "run.journal")
    assert (recorded.mismatch, recorded.num_batches) == (None, 4)
    assert done.err.endswith("error: EngineDeadError: a step failed: RuntimeError: the device fell off\n")
    assert done.err.count("Traceback") == 1
    ends = {row["id"]: (row["finish_reason"], row["text"], row["error"] and row["error"]["type"]) for row in done.rows}
    reason, text, error = ends.pop("a")  # it may have come some batches later
    assert (reason, error) == ("error", "EngineDeadError") and " 31".startswith(text)
    assert ends == {"short": ("length", " 3", None), "late": ("error", None, "EngineDeadError")}
    events = json.loads((tmp_path / "t.json").read_text())["traceEvents"]
    counters = {event["name"] for event in events if event["ph"] == "C"}
    assert counters == {"step time (ms)", "slack (s)"}


@pytest.mark.parametrize("option", ["--output", "--timeline"])
def test_a_full_disk_ends_the_run(run: Command, option: str) -> None:
    done = run("--prompt", ADA, option, "/dev/full", "--log-level", "warning")
    assert done.code == 3
    message = "output file /dev/full: No space left on device; what was written before is kept"
    assert done.err == f"error: RequestError: {message}\n"


def test_the_second_interrupt_is_raised() -> None:
    before = signal.getsignal(signal.SIGINT)
    with first_interrupt() as noted:
        assert not noted
        os.kill(os.getpid(), signal.SIGINT)
        assert noted == [signal.SIGINT]
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is before


def test_an_interrupt_keeps_what_was_written(run: Command, tmp_path: Path) -> None:
    rows = [
        {"id": "document", "prompt": make_haystack(60_000).prompt},
        {"id": "endless", "prompt": "hello", "max_tokens": 50_000, "ignore_eos": True},
        {"id": "short", "prompt": ADA, "max_tokens": 4},
        {"id": "late", "prompt": ADA, "arrival_s": 1000},
    ]
    requests, output = write_lines(tmp_path / "in.jsonl", *rows), tmp_path / "out.jsonl"
    files = ["--output", output, "--timeline", tmp_path / "t.json", "--journal", tmp_path / "run.journal"]

    def interrupt() -> None:
        wait_until(lambda: output.exists() and output.read_text().endswith("\n"))
        os.kill(os.getpid(), signal.SIGINT)

    with ThreadPoolExecutor(1) as pool:
        pool.submit(interrupt)
        done = run("--requests", requests, "--num-kv-blocks", "600", *files)
    assert done.code == 130 and "Traceback" not in done.err
    assert "interrupted; what was produced is kept" in done.err
    ends = {row["id"]: row for row in parse(output.read_text())}
    assert (ends["short"]["finish_reason"], ends["short"]["text"]) == ("length", " 31-")
    recorded = replay(tmp_path / "run.journal")
    assert (recorded.mismatch, recorded.num_batches > 3) == (None, True)
    reasons = {i: row["finish_reason"] for i, row in ends.items() if i != "short"}
    assert reasons == dict.fromkeys(("document", "endless", "late"), "abort")
    assert len(ends["endless"]["token_ids"]) >= 3
    assert ends["document"]["num_prompt_tokens"] == 60_000
    assert ends["late"]["e2e_s"] is None
    assert json.loads((tmp_path / "t.json").read_text())["traceEvents"]


def nobody() -> int:
    """The end of a pipe whose reader has gone."""
    reader, writer = os.pipe()
    os.close(reader)
    return writer


def test_stdout_and_stderr_that_take_nothing(run: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A full disk, and nobody. Where there is an output file all answers are in it."""
    ends, several, files = [], ("--prompt", BRUNO), (tmp_path / "one.jsonl", tmp_path / "other.jsonl")
    for names, takes_nothing, *more in (
        (["stdout"], "/dev/full", *several),
        (["stdout"], "/dev/full", *several, "--output", files[0]),
        (["stdout"], nobody()),
        (["stdout", "stderr"], nobody(), *several, "--output", files[1], "--json", "--explain"),
    ):
        with open(takes_nothing, "w") as stream, monkeypatch.context() as patch:
            for name in names:
                patch.setattr(sys, name, stream)
            done = run("--prompt", ADA, "--log-level", "warning", *more)
            ends.append((done.err, done.code))
    assert ends == [
        ("error: RequestError: stdout: No space left on device; what was written before is kept\n", 3),
        ("medha: stdout could not be written (No space left on device); all answers are in the output file\n", 0),
        ("", 1),
        ("", 0),
    ]
    assert [len(parse(path.read_text())) for path in files] == [2, 2]


# -- terminals, logs, help ---------------------------------------------------------------------------------------


def test_a_terminal_shows_bar_rate_time_left_and_count(run_rows: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [
        {"id": "document", "prompt": make_haystack(6_000).prompt},
        {"id": "talker", "prompt": "hello", "max_tokens": 40, "ignore_eos": True},
        {"id": "short", "prompt": ADA},
    ]
    master, terminal = pty.openpty()

    def shown() -> Iterator[bytes]:
        with open(master, "rb", 0) as screen, suppress(OSError):  # Linux's way to say that the other end is closed
            while data := screen.read(65536):
                yield data

    with ThreadPoolExecutor(1) as pool:
        seen = pool.submit(lambda: b"".join(shown()))
        with open(terminal, "w") as both, monkeypatch.context() as patch:
            patch.setenv("COLUMNS", "80")
            for name in ("stdout", "stderr"):
                patch.setattr(sys, name, both)
            assert run_rows(rows, "--chunk-size", "256").code == 0
    text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", seen.result().decode())
    assert re.search(r"document +[━╸╺ ]+ [\d,]+/6,000 +[\d,]+ tok/s +\d\d:\d\d", text)
    assert re.search(r"requests done +[━╸╺ ]+ [0-3]/3 ", text)  # which of them depends on the machine's speed
    assert re.search(r"short   31-plum\.  \[stop after 10 tokens, TTFT ", text)
    assert re.search(r"document   7429-amber\.  \[stop after 13 tokens, TTFT ", text)
    widths = [len(line) for line in re.split(r"[\r\n]+", text) if "tok/s" in line]
    assert widths and max(widths) <= 80


def test_log_level(run: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MEDHA_LOG_LEVEL", "warning")
    assert run("--prompt", ADA).err == ""
    assert "loading" in run("--prompt", ADA, "--log-level", "INFO").err
    monkeypatch.setenv("MEDHA_LOG_LEVEL", "bogus")
    done = run("--prompt", ADA)
    assert (done.code, done.err.split(";")[0]) == (2, "error: ConfigError: log_level='bogus'")


def test_no_argument_is_the_demo(bare: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    monkeypatch.setattr(medha.verify.demo, "run_demo", lambda *, live: seen.append(live) or 0)
    done = bare()
    said = "medha: no argument, so this is the demo: no download, about a minute; --help tells of the rest\n"
    assert (done.code, done.err) == (0, said)
    monkeypatch.setenv("MEDHA_NO_PROGRESS", "1")
    assert bare().code == 0
    assert seen == [True, False]
    assert bare("--no-progress").code == 2


def test_help_is_grouped_and_loads_no_torch() -> None:
    done = without_torch("--help", module="medha.generate")
    assert done.stderr == ""
    panels = re.findall(r"^╭─ ([A-Z][a-z ]+) ─", done.stdout, flags=re.MULTILINE)
    assert [p for p in panels if p not in ("Arguments", "Options")] == [
        *("Requests", "Output", "Model", "Sampling", "Memory", "Scheduling", "Requests that share the engine"),
        "Parallel layout",
    ]
    assert max(map(len, done.stdout.splitlines())) <= 80 and "…" not in done.stdout
    for name in {**ENGINE, **SAMPLING}:
        assert f"--{name.replace('_', '-')} " in done.stdout
