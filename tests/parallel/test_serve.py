"""The server over two ranks: the tokens of one rank, and no stream is left behind when a rank dies."""

import json
import os
import signal
from pathlib import Path

import pytest

from tests.parallel.test_torchrun import ranks_of, wait_for
from tests.serve.process import serving
from tests.serving import Model

pytestmark = pytest.mark.ranks

SMALL = ("--max-model-len", "4096", "--num-kv-blocks", "64")
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")


@pytest.mark.parametrize("layout", ["spp", "kvp"])
def test_two_ranks_answer_as_one(bytes_model: Model, tmp_path: Path, layout: str) -> None:
    with serving(tmp_path / "one", bytes_model.folder, *SMALL) as server:
        expected = json.loads(server.complete("hello", 20).read())["choices"]
    with serving(tmp_path / "two", bytes_model.folder, *SMALL, f"--{layout}", 2, launcher=TORCHRUN) as server:
        assert json.loads(server.complete("hello", 20).read())["choices"] == expected
        lines = server.complete("hello", 20, stream=True).read().splitlines()
        pieces = [json.loads(line[6:])["choices"][0]["text"] for line in lines if line.startswith(b"data: {")]
        assert "".join(pieces) == expected[0]["text"] and len(pieces) > 5


def test_a_rank_that_is_killed_ends_the_streams_and_the_server(bytes_model: Model, tmp_path: Path) -> None:
    with serving(tmp_path / "log", bytes_model.folder, *SMALL, "--spp", 2) as server:
        answer = server.complete("hello", 4000, stream=True)
        answer.readline()
        wait_for(lambda: ranks_of(bytes_model.folder))
        (rank,) = ranks_of(bytes_model.folder)
        os.kill(rank, signal.SIGKILL)
        *_, error, done = [line for line in answer.read().splitlines() if line]
        assert json.loads(error[6:])["error"]["code"] == "engine_dead" and done == b"data: [DONE]"
        assert server.wait() == 4, server.log.read_text()
