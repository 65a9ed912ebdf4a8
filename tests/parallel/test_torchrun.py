"""The commands on several ranks: the demo, ``medha.verify``, two nodes, one speaker, the server."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from math import prod
from pathlib import Path

import pytest

import medha.parallel.kvp as kvp
from medha.attention.merge import merge_partials
from medha.config import EngineConfig
from medha.generate.layout import choose_layout
from medha.parallel.launch import Launch
from medha.parallel.own_ranks import launch_environment, reserved_port
from medha.params import SamplingParams
from medha.verify.demo import run_demo
from tests.child.test_process import is_there
from tests.commands import parse, run_python, wait_until, write_lines
from tests.parallel.faults import Job, Start, command
from tests.serve.process import Process, last_events, serving
from tests.serving import Model, serve_one

LAYERS = ("--hf-overrides", '{"num_hidden_layers": 1}')
PROMPT = "The code of Ada is 31.\nThe code of Ada is"
OWN_RANKS = ["--max-model-len", "4096", "--spp", "2", "--dist-timeout", "250"]  # a rank took 120 s to start once
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")


def demo(rank: int) -> None:
    raise SystemExit(run_demo(long_prompt_tokens=512, live=False))


def test_the_demo_chooses_a_layout(start: Start) -> None:
    out, other = start(2, demo).end_well()
    assert out.count("One document of 512 tokens") == 1
    assert other == ""  # one rank speaks
    assert "Layout: spp=2 pipeline stages, tp=1 tensor-parallel ranks in each." in out
    assert out.endswith("6 of 6 answers right.\n")


def verify(rank: int, arguments: list[str], mutated: bool) -> None:
    """On each rank: the command, with log-sum-exps in base 2 in the library's merge between ranks."""
    if mutated:
        kvp.merge_partials = lambda parts, **_: merge_partials([(out, lse * 1.4426950408889634) for out, lse in parts])
    command(rank, arguments, "medha.verify")


@pytest.mark.parametrize(
    ("options", "layout", "wrong"),
    [
        ("--kvp 2 --spp 2", "kvp=2 x spp=2 x tp=1, 4 ranks, float32", set()),
        ("--tp 2", "kvp=1 x spp=1 x tp=2, 2 ranks, float32", set()),
        ("--kvp 2", "FAIL", {"parity"}),  # what needs no other rank is well
    ],
)
def test_verify_says_if_all_is_well(tmp_path: Path, start: Start, options: str, layout: str, wrong: set[str]) -> None:
    report, words = tmp_path / "report.json", options.split()
    arguments = ["--device", "cpu", "--needle-tokens", "256", "--output-json", str(report), *words]
    job = start(prod(map(int, words[1::2])), verify, arguments, bool(wrong))
    code, *codes = job.wait()
    out, *others = map(job.stdout, range(len(job.processes)))
    assert code is not None and bool(code) == bool(wrong), out
    assert set(codes) == {0} and set(others) == {""}, job.stderr(0)  # one rank speaks
    assert layout in out
    rows = json.loads(report.read_text())["checks"]
    assert {row["check"] for row in rows if row["verdict"] == "FAIL"} == wrong
    assert wrong or {row["verdict"] for row in rows} == {"pass"}
    assert {"attention", "merge", "parity", "needle", "KV bytes"} <= {row["check"] for row in rows}


def test_two_nodes(needle: Model, tmp_path: Path) -> None:
    prompts = [f"The code of {name} is {code}.\nThe code of {name} is" for name, code in (("Ada", 31), ("Bo", 12))]
    rows = [{"id": str(i), "prompt": prompt} for i, prompt in enumerate(prompts)]
    requests = write_lines(tmp_path / "requests.jsonl", *rows)
    what = ["-m", "medha.generate", "--model", needle.folder, "--spp", 2, "--max-model-len", 512]
    what += ["--requests", requests, "--json"]
    with reserved_port() as port, ThreadPoolExecutor(2) as pool:
        where = [*TORCHRUN[:2], "--nnodes", 2, "--nproc-per-node", 1]
        where += ["--master-addr", "127.0.0.1", "--master-port", port]
        first, second = pool.map(lambda node: run_python(*where, "--node-rank", node, *what), range(2))
    assert (first.returncode, second.returncode) == (0, 0), first.stderr + second.stderr
    # lines come as requests end, and these two are as long
    assert {line["id"]: line["text"] for line in parse(first.stdout)} == {"0": " 31.", "1": " 12."}
    assert len(first.stdout.splitlines()) == 2
    assert second.stdout == ""


def test_a_layout_is_chosen_for_a_model(needle: Model, start: Start) -> None:
    job = start(2, command, [str(needle.folder), "--max-model-len", "512", "--prompt", PROMPT])
    assert job.end_well()[0] == " 31.\n"
    assert "medha: layout of 2 ranks: spp=2, as none was asked for with --tp, --spp or --kvp\n" in job.stderr(0)
    config = EngineConfig.from_flat(str(needle.folder))
    sizes = ((3, 3), (8, 8), (8, 2), (8, 6))  # the last two: of nodes of 6 and of 2 ranks
    layouts = [choose_layout(config, Launch(0, size, 0, local, "h", 1)) for size, local in sizes]
    assert layouts[:2] == [{"tp": 1, "spp": 1, "kvp": 3}, {"tp": 4, "spp": 2, "kvp": 1}]
    assert layouts[2:] == [{"tp": 1, "spp": 1, "kvp": 8}] * 2  # tensor-parallel groups lie within a node
    for option in ({"scheduler": "cdsp"}, {"ring": True}):
        config = EngineConfig.from_flat(str(needle.folder), **option)
        assert choose_layout(config, Launch(0, 2, 0, 2, "h", 1)) == {"tp": 1, "spp": 1, "kvp": 2}


def test_bad_usage_is_said_where_the_launcher_ends() -> None:
    wrong = ("-m", "medha.generate", "-m", "x", "--tp", "0")
    done = run_python(*TORCHRUN, *wrong)
    assert done.returncode == 1
    lines, said = done.stderr.splitlines(), "ConfigError: tp=0; accepted: an integer from 1 to 65536"
    assert lines[-2] == f"  traceback : {said}"
    assert lines.count(f"error: {said}") <= 1  # of rank 0, which the launcher may end before it has said so


def running(*texts: str) -> dict[int, bytes]:
    """Processes with all of these texts in their command line, and their environments."""
    found = {}
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(OSError):
            if all(text.encode() in path.read_bytes() for text in texts):
                found[int(path.parent.name)] = (path.parent / "environ").read_bytes()
    return found


ranks_of = partial(running, "medha.generate.follow")
"""Processes that a command has started as further ranks over a model."""


def without_launcher(rank: int, arguments: list[str], module: str = "medha.generate") -> None:
    """As ``command`` where nobody has started ranks: it starts the others itself."""
    for name in launch_environment(0, 1, 1):
        del os.environ[name]
    command(rank, arguments, module)


def test_an_error_of_ranks_that_the_command_starts_itself(needle: Model, start: Start) -> None:
    words = [*OWN_RANKS, str(needle.folder), *LAYERS, "--prompt", PROMPT, "--log-level", "error"]
    job = start(1, without_launcher, words)
    assert job.wait() == [2]
    assert job.stderr(0) == "error: ParallelConfigError: spp=2 stages for 1 layers; accepted: 1 to 1\n"
    wait_until(lambda: not ranks_of(str(needle.folder)))


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGKILL, -9)])
def test_own_ranks_end_with_the_first(
    needle: Model, tmp_path: Path, start: Start, number: signal.Signals, code: int
) -> None:
    output = tmp_path / "out.jsonl"
    rows = [{"id": "a", "prompt": PROMPT}, {"id": "b", "prompt": "x", "max_tokens": 4000, "ignore_eos": True}]
    files = ["--requests", str(write_lines(tmp_path / "requests.jsonl", *rows)), "--output", str(output)]
    job = start(1, without_launcher, [*OWN_RANKS, str(needle.folder), *files])
    (process,) = job.processes
    wait_until(lambda: process.exitcode is not None or (output.exists() and output.stat().st_size))
    assert process.exitcode is None, job.stderr(0)
    assert len(ranks_of(str(needle.folder))) == 1
    os.kill(process.pid, number)
    assert job.wait() == [code]
    wait_until(lambda: not ranks_of(str(needle.folder)))
    lines = parse(output.read_text())
    assert [(row["id"], row["finish_reason"]) for row in lines] == [("a", "stop"), ("b", "abort")][: len(lines)]
    assert len(lines) == (2 if code == 130 else 1)
    assert lines[0]["text"] == " 31."


ORPHANS = """
import os
from medha.parallel.own_ranks import own_processes, own_ranks
with own_ranks(2, ["medha.generate", "--model", ".", "--tp", "2", "--prompt", "a"]):
    print(own_processes[1], flush=True)
    os.kill(os.getpid(), 9)
"""


def test_a_rank_ends_whose_parent_died_before_it_looked() -> None:
    with subprocess.Popen([sys.executable, "-c", ORPHANS], stdout=subprocess.PIPE) as parent:
        rank = int(parent.stdout.readline())
        try:
            wait_until(lambda: not is_there(rank), limit_s=120)  # it took more than 200 s
        finally:
            if is_there(rank):
                os.kill(rank, signal.SIGKILL)


# -- the server: the tokens of one rank, and no stream is left behind when a rank dies ---------------------------------


SIZES = ("--max-model-len", "4096", "--num-kv-blocks", "512")
ANY_PORT = ("--port", "0")


class Forked(Process):
    """The server of a job whose ranks were forked."""

    def __init__(self, job: Job) -> None:
        self.log, self.process, self.port = job.folder / "stderr-0", job.processes[0]._popen, 0
        self.log.touch()
        wait_until(lambda: self._is_up() or self.process.poll() is not None, told=lambda: job.stderr(0))


@pytest.mark.parametrize(
    ("layout", "has_launcher"), [("--kvp", False), ("--spp", True)], ids=["kvp, own ranks", "spp, torchrun"]
)
def test_two_ranks_answer_as_one_until_one_is_killed_under_load(
    bytes_model: Model, tmp_path: Path, start: Start, layout: str, has_launcher: bool
) -> None:
    """Which ends every stream, and the server: some are read, some are answered, and one has not begun."""
    greedy = SamplingParams(temperature=0.0, max_tokens=100, ignore_eos=True)  # longer than what comes together
    expected = serve_one(bytes_model.engine(), "hello", greedy).outputs[0].text
    words = [str(bytes_model.folder), *SIZES, "--max-num-seqs", "7", layout, "2"]
    with (
        serving(tmp_path / "log", *words, launcher=TORCHRUN)
        if has_launcher
        else Forked(start(1, without_launcher, [*words, *ANY_PORT], "medha.serve"))
    ) as server:
        assert json.loads(server.complete("hello", 100).read())["choices"][0]["text"] == expected
        lines = server.complete("hello", 100, stream=True).read().splitlines()
        pieces = [json.loads(line[6:])["choices"][0]["text"] for line in lines if line.startswith(b"data: {")]
        assert "".join(pieces) == expected and len(pieces) > 5
        answers = [server.complete("hello" * size, 2000, stream=True) for size in (1, 1, 1, 1, 300, 300, 300, 1)]
        answers[0].readline()
        ranks = running(str(bytes_model.folder))
        (killed,) = [pid for pid, environment in ranks.items() if b"\0RANK=1\0" in environment]
        os.kill(killed, signal.SIGKILL)
        for answer in answers:
            event, done = last_events(answer)
            assert event["error"]["code"] == "engine_dead" and done == b"data: [DONE]"
        code = server.wait()
        assert code == (1 if has_launcher else 4), server.log.read_text()  # torchrun has a code of its own
        assert "RankFailedError" in server.log.read_text()


CDSP = "--scheduler cdsp --kvp 2 --sp-sizes 1,2 --improvement-rate 0.1 --max-chunks 2"


@pytest.mark.parametrize(
    ("size", "target", "options"), [(1, without_launcher, ""), (3, command, CDSP)], ids=["medha, own ranks", "cdsp"]
)
def test_a_decode_instance_answers_as_one_rank_and_ends(
    bytes_model: Model, start: Start, size: int, target: Callable[..., None], options: str
) -> None:
    """Also the ranks that the server started itself: they are told to stop before it waits for them."""
    greedy = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True)
    expected = serve_one(bytes_model.engine(), "hello", greedy).outputs[0].text
    words = [str(bytes_model.folder), *SIZES, *ANY_PORT, "--decode-replicas", "1", *options.split()]
    with Forked(start(size, target, words, "medha.serve")) as server:
        answer = json.loads(server.complete("hello", 20, explain=True).read())
        assert answer["choices"][0]["text"] == expected
        assert answer["explanation"]["decode_wait_s"] > 0
        server.process.terminate()
        assert server.wait() == 0, server.log.read_text()
