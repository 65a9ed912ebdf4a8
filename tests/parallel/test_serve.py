"""The server over two ranks: the tokens of one rank, and no stream is left behind when a rank dies."""

import json
import os
import signal
from pathlib import Path

import pytest

from tests.parallel.test_torchrun import running
from tests.serve.process import serving
from tests.serving import Model

pytestmark = pytest.mark.ranks

SMALL = ("--max-model-len", "4096", "--num-kv-blocks", "64")
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")


@pytest.mark.parametrize(
    ("layout", "launcher"),
    [("--spp 2", TORCHRUN), ("--kvp 2", TORCHRUN), ("--decode-replicas 1", TORCHRUN), ("--decode-replicas 1", ())],
)
def test_two_ranks_answer_as_one_and_end(
    bytes_model: Model, tmp_path: Path, layout: str, launcher: tuple[str, ...]
) -> None:
    with serving(tmp_path / "one", bytes_model.folder, *SMALL) as server:
        expected = json.loads(server.complete("hello", 20).read())["choices"]
    with serving(tmp_path / "two", bytes_model.folder, *SMALL, *layout.split(), launcher=launcher) as server:
        assert json.loads(server.complete("hello", 20).read())["choices"] == expected
        lines = server.complete("hello", 20, stream=True).read().splitlines()
        pieces = [json.loads(line[6:])["choices"][0]["text"] for line in lines if line.startswith(b"data: {")]
        assert "".join(pieces) == expected[0]["text"] and len(pieces) > 5
        server.process.terminate()
        assert launcher or server.process.wait(60) == 0, server.log.read_text()  # torchrun has a code of its own


@pytest.mark.parametrize("launcher", [(), TORCHRUN], ids=["own ranks", "torchrun"])
def test_a_rank_that_is_killed_under_load_ends_every_stream_and_the_server(
    bytes_model: Model, tmp_path: Path, launcher: tuple[str, ...]
) -> None:
    """Some are read, some are answered, and one has not begun when it dies."""
    many = ("--max-model-len", "4096", "--num-kv-blocks", "512", "--max-num-seqs", "7")
    with serving(tmp_path / "log", bytes_model.folder, *many, "--spp", 2, launcher=launcher) as server:
        answers = [server.complete("hello" * size, 2000, stream=True) for size in (1, 1, 1, 1, 300, 300, 300, 1)]
        answers[0].readline()
        ranks = running(str(bytes_model.folder))
        (killed,) = [pid for pid, environment in ranks.items() if b"\0RANK=1\0" in environment]
        os.kill(killed, signal.SIGKILL)
        for answer in answers:
            *_, error, done = [line for line in answer.read().splitlines() if line]
            assert json.loads(error[6:])["error"]["code"] == "engine_dead" and done == b"data: [DONE]"
        code = server.process.wait(30)
        assert code == (1 if launcher else 4), server.log.read_text()  # torchrun has a code of its own
        assert "RankFailedError" in server.log.read_text()
