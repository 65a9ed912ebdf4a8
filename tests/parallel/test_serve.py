"""The server over two ranks: the tokens of one rank, and no stream is left behind when a rank dies."""

import json
import os
import signal
from pathlib import Path

import pytest

from medha.params import SamplingParams
from tests.parallel.test_torchrun import running
from tests.serve.process import last_events, serving
from tests.serving import Model, serve_one

TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")


@pytest.mark.parametrize(
    ("layout", "launcher"), [("--kvp", ()), ("--spp", TORCHRUN)], ids=["kvp, own ranks", "spp, torchrun"]
)
def test_two_ranks_answer_as_one_until_one_is_killed_under_load(
    bytes_model: Model, tmp_path: Path, layout: str, launcher: tuple[str, ...]
) -> None:
    """Which ends every stream, and the server: some are read, some are answered, and one has not begun."""
    greedy = SamplingParams(temperature=0.0, max_tokens=400, ignore_eos=True)  # longer than what comes together
    expected = serve_one(bytes_model.engine(), "hello", greedy).outputs[0].text
    many = ("--max-model-len", "4096", "--num-kv-blocks", "512", "--max-num-seqs", "7")
    with serving(tmp_path / "log", bytes_model.folder, *many, layout, 2, launcher=launcher) as server:
        assert json.loads(server.complete("hello", 400).read())["choices"][0]["text"] == expected
        lines = server.complete("hello", 400, stream=True).read().splitlines()
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
        assert code == (1 if launcher else 4), server.log.read_text()  # torchrun has a code of its own
        assert "RankFailedError" in server.log.read_text()


CDSP = ("--scheduler", "cdsp", "--kvp", 2, "--sp-sizes", "1,2", "--improvement-rate", 0.1, "--max-chunks", 2)


@pytest.mark.parametrize("options", [(), CDSP], ids=["medha", "cdsp"])
def test_a_decode_instance_answers_as_one_rank_and_ends(
    bytes_model: Model, tmp_path: Path, options: tuple[object, ...]
) -> None:
    """Also the ranks that the server started itself: they are told to stop before it waits for them."""
    greedy = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True)
    expected = serve_one(bytes_model.engine(), "hello", greedy).outputs[0].text
    sizes = ("--max-model-len", "4096", "--num-kv-blocks", "512")
    with serving(tmp_path / "log", bytes_model.folder, *sizes, "--decode-replicas", 1, *options) as server:
        answer = json.loads(server.complete("hello", 20, explain=True).read())
        assert answer["choices"][0]["text"] == expected
        assert answer["explanation"]["decode_wait_s"] > 0
        server.process.terminate()
        assert server.wait() == 0, server.log.read_text()
