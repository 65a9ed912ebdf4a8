"""Two nodes for torchrun: two network namespaces joined by a virtual cable, which can be cut.

Without the right to make namespaces the tests are skipped and say so. Two launches on one machine are in
tests/parallel/test_torchrun.py, what is silent or cannot be reached in tests/parallel/test_health.py.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
import uuid
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from medha import LLM, SamplingParams
from tests.parallel.test_torchrun import ENVIRONMENT, TORCHRUN

pytestmark = pytest.mark.slow

LAYOUT = ("--kvp", "2", "--max-kv-per-group", "640")
"""One rank on each node; the long request grows onto the second one."""

START_LIMIT_S = 60.0
END_LIMIT_S = 15.0
"""Within so many seconds after the cable is cut, both nodes have ended: ten for the ranks, the rest for torchrun."""

ADDRESSES = ("10.77.0.1", "10.77.0.2")
INTERFACE = "cable"
SIZES = "--chunk-size 64 --max-batch-tokens 64 --block-size 64 --num-kv-blocks 96 --num-threads 1 --max-model-len 4096"


def ip(*arguments: str) -> str:
    """Run ``ip``; returns what it printed."""
    return subprocess.run(["ip", *arguments], check=True, capture_output=True, text=True).stdout


@dataclass
class Node:
    """A network namespace and the launcher that runs in it.

    Attributes:
        name: of the namespace.
        folder: for what its ranks say.
    """

    name: str
    folder: Path
    launchers: list[subprocess.Popen[bytes]] = field(default_factory=list)

    def start(self, *command: str) -> None:
        """Run torchrun with these arguments."""
        environment = {**ENVIRONMENT, "GLOO_SOCKET_IFNAME": INTERFACE}
        with (self.folder / "stdout").open("wb") as out, (self.folder / "stderr").open("wb") as err:
            inside = ["ip", "netns", "exec", self.name, *TORCHRUN, *command]
            self.launchers.append(subprocess.Popen(inside, stdout=out, stderr=err, env=environment))

    def wait(self, limit_s: float) -> int | None:
        """The launcher's exit code, None if it still runs after so many seconds."""
        try:
            return self.launchers[-1].wait(limit_s)
        except subprocess.TimeoutExpired:
            return None

    @property
    def said(self) -> str:
        """What was written to stderr."""
        return (self.folder / "stderr").read_text()

    def remove(self) -> None:
        """End what still runs here, then delete the namespace."""
        for pid in ip("netns", "pids", self.name).split():
            with suppress(ProcessLookupError):
                os.kill(int(pid), signal.SIGKILL)
        for launcher in self.launchers:
            launcher.wait()
        ip("netns", "delete", self.name)


@pytest.fixture
def nodes(tmp_path: Path) -> Iterator[list[Node]]:
    """Two nodes with a cable between them."""
    with ExitStack() as stack:
        try:
            made = [_make_node(stack, tmp_path / f"node-{number}") for number in range(2)]
            _connect(made)
        except (FileNotFoundError, subprocess.CalledProcessError) as error:
            reason = getattr(error, "stderr", None) or str(error)
            pytest.skip(f"no network namespaces here: {reason.strip()}")
        yield made


def _make_node(stack: ExitStack, folder: Path) -> Node:
    folder.mkdir()
    node = Node(f"medha-{uuid.uuid4().hex[:12]}", folder)
    ip("netns", "add", node.name)
    stack.callback(node.remove)
    ip("netns", "exec", node.name, "true")  # to be in one may take more rights than to make it
    return node


def _connect(nodes: Sequence[Node]) -> None:
    first, second = (node.name for node in nodes)
    ip("link", "add", INTERFACE, "netns", first, "type", "veth", "peer", "name", INTERFACE, "netns", second)
    for name, address in zip((first, second), ADDRESSES, strict=True):
        ip("-n", name, "address", "add", f"{address}/24", "dev", INTERFACE)
        ip("-n", name, "link", "set", INTERFACE, "up")
        ip("-n", name, "link", "set", "lo", "up")


def start_job(nodes: Sequence[Node], model: Path, requests: Path, output: Path, *layout: str) -> None:
    """Serve a request file on one rank a node."""
    for number, node in enumerate(nodes):
        where = ["--nnodes", "2", "--nproc-per-node", "1", "--node-rank", str(number)]
        where += ["--master-addr", ADDRESSES[0], "--master-port", "29500"]
        what = ["-m", "medha.generate", "--model", str(model), *SIZES.split(), *layout]
        node.start(*where, *what, "--requests", str(requests), "--output", str(output))


def rows_of(path: Path) -> dict[str, dict[str, Any]]:
    """The output lines by request."""
    return {row["id"]: row for row in map(json.loads, path.read_text().splitlines())}


def test_tokens_over_a_network_are_those_of_one_process(model: Path, tmp_path: Path, nodes: list[Node]) -> None:
    prompts = {"long": "The sea and the sky. " * 60, "short": "a"}
    requests, output = tmp_path / "requests.jsonl", tmp_path / "out.jsonl"
    lines = [{"id": name, "prompt": prompt, "max_tokens": 16, "ignore_eos": True} for name, prompt in prompts.items()]
    requests.write_text("".join(json.dumps(line) + "\n" for line in lines))
    start_job(nodes, model, requests, output, *LAYOUT)
    params = SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True)
    with LLM(str(model), max_model_len=4096, num_kv_blocks=96, block_size=64, num_threads=1) as llm:
        expected = {
            name: result.outputs[0].token_ids
            for name, result in zip(prompts, llm.generate(list(prompts.values()), params), strict=True)
        }
    assert [node.wait(START_LIMIT_S) for node in nodes] == [0, 0], nodes[0].said + nodes[1].said
    assert {name: row["token_ids"] for name, row in rows_of(output).items()} == expected
    assert f"gloo listens on {INTERFACE}" in nodes[0].said


def test_a_cut_cable_ends_both_nodes(
    model: Path, tmp_path: Path, nodes: list[Node], capsys: pytest.CaptureFixture[str]
) -> None:
    """No connection closes: rank 0 waits in vain for a transfer, and rank 1 gets no answer from the store."""
    requests, output = tmp_path / "requests.jsonl", tmp_path / "out.jsonl"
    lines = [{"id": "short", "prompt": "a", "max_tokens": 1}, {"id": "long", "prompt": "b", "max_tokens": 4000}]
    requests.write_text("".join(json.dumps(line | {"ignore_eos": True}) + "\n" for line in lines))
    start_job(nodes, model, requests, output, "--spp", "2", "--dist-timeout", "8")
    deadline = time.monotonic() + START_LIMIT_S
    while not (output.is_file() and output.read_text()):
        assert time.monotonic() < deadline, nodes[0].said + nodes[1].said
        time.sleep(0.02)
    ip("-n", nodes[1].name, "link", "set", INTERFACE, "down")
    cut_s = time.monotonic()
    codes = [node.wait(cut_s + END_LIMIT_S - time.monotonic()) for node in nodes]
    with capsys.disabled():
        print(f"\n  cable cut: both nodes ended after {time.monotonic() - cut_s:.1f} s")
    assert all(codes), (codes, nodes[0].said, nodes[1].said)
    assert "error: RankFailedError: rank 1 (stage 1) is silent for" in nodes[0].said
    assert "error: RankFailedError: torchrun's agent is stopped or cannot be reached" in nodes[1].said
    assert all("exitcode  : 4 " in node.said for node in nodes)
    ends = {name: row["finish_reason"] for name, row in rows_of(output).items()}
    assert ends == {"short": "length", "long": "error"}
