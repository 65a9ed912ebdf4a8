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
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.parallel.test_torchrun import ENVIRONMENT, TORCHRUN

pytestmark = pytest.mark.slow

START_LIMIT_S = 60.0
END_LIMIT_S = 15.0
"""Within so many seconds after the cable is cut, both nodes have ended: ten for the ranks, the rest for torchrun."""

ADDRESSES = ("10.77.0.1", "10.77.0.2")
INTERFACE = "cable"
OPTIONS = "--block-size 64 --num-kv-blocks 96 --num-threads 1 --max-model-len 4096 --spp 2 --dist-timeout 8"


def ip(*arguments: str) -> str:
    return subprocess.run(["ip", *arguments], check=True, capture_output=True, text=True).stdout


@dataclass
class Node:
    """A network namespace and the launcher that runs in it; what its ranks say goes to the folder."""

    name: str
    folder: Path
    launcher: subprocess.Popen[bytes] | None = None

    def start(self, *command: str) -> None:
        environment = {**ENVIRONMENT, "GLOO_SOCKET_IFNAME": INTERFACE}
        with (self.folder / "stdout").open("wb") as out, (self.folder / "stderr").open("wb") as err:
            inside = ["ip", "netns", "exec", self.name, *TORCHRUN, *command]
            self.launcher = subprocess.Popen(inside, stdout=out, stderr=err, env=environment)

    @property
    def said(self) -> str:
        return (self.folder / "stderr").read_text()

    def remove(self) -> None:
        """End what still runs here, then delete the namespace."""
        for pid in ip("netns", "pids", self.name).split():
            with suppress(ProcessLookupError):
                os.kill(int(pid), signal.SIGKILL)
        if self.launcher is not None:
            self.launcher.wait()
        ip("netns", "delete", self.name)


@pytest.fixture
def nodes(tmp_path: Path) -> Iterator[list[Node]]:
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


def test_a_cut_cable_ends_both_nodes(model: Path, tmp_path: Path, nodes: list[Node]) -> None:
    """No connection closes: rank 0 waits in vain for a transfer, and rank 1 gets no answer from the store."""
    requests, output = tmp_path / "requests.jsonl", tmp_path / "out.jsonl"
    lines = [{"id": "short", "prompt": "a", "max_tokens": 1}, {"id": "long", "prompt": "b", "max_tokens": 4000}]
    requests.write_text("".join(json.dumps(line | {"ignore_eos": True}) + "\n" for line in lines))
    for number, node in enumerate(nodes):
        where = ["--nnodes", "2", "--nproc-per-node", "1", "--node-rank", str(number)]
        where += ["--master-addr", ADDRESSES[0], "--master-port", "29500"]
        files = ["--requests", str(requests), "--output", str(output)]
        node.start(*where, "-m", "medha.generate", "--model", str(model), *OPTIONS.split(), *files)
    deadline = time.monotonic() + START_LIMIT_S
    while not (output.is_file() and output.read_text()):
        assert time.monotonic() < deadline, nodes[0].said + nodes[1].said
        time.sleep(0.02)
    ip("-n", nodes[1].name, "link", "set", INTERFACE, "down")
    cut_s = time.monotonic()
    try:
        codes = [node.launcher.wait(cut_s + END_LIMIT_S - time.monotonic()) for node in nodes if node.launcher]
    except subprocess.TimeoutExpired:
        codes = []
    assert len(codes) == 2 and all(codes), (codes, nodes[0].said, nodes[1].said)
    assert f"gloo listens on {INTERFACE}" in nodes[0].said
    assert "error: RankFailedError: rank 1 (stage 1) is silent for" in nodes[0].said
    assert "error: RankFailedError: torchrun's agent is stopped or cannot be reached" in nodes[1].said
    assert all("exitcode  : 4 " in node.said for node in nodes)
    rows = {row["id"]: row["finish_reason"] for row in map(json.loads, output.read_text().splitlines())}
    assert rows == {"short": "length", "long": "error"}
