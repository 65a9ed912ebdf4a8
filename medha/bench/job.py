"""Jobs of several ranks that a benchmark starts by itself, and what each of their ranks runs.

A job is started once and then asked for one prefill at a time, so that two jobs can take turns; one that is not asked
waits for a line on its standard input and takes no time. The ranks get the environment that torchrun would set.
"""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import torch

import medha
from medha.build import Role, build_role
from medha.config import EngineConfig, ParallelConfig
from medha.distributed import DrivingRunner
from medha.errors import ConfigError, RankFailedError
from medha.request import SamplingParams
from medha.runner import Runner
from medha.timeline import RankRecords, decode_records, encode_records

_LAUNCH = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_END_S = 30.0


@dataclass(frozen=True, slots=True)
class Prefill:
    """One prompt read.

    Attributes:
        ttft_s: seconds from adding the request to its first token.
        ranks: what each rank ran.
    """

    ttft_s: float
    ranks: tuple[RankRecords, ...]


def parse_layout(text: str) -> ParallelConfig:
    """``spp2``, ``tp2`` or ``tp2spp2`` as degrees.

    Raises:
        ConfigError: none of these.
    """
    found = re.fullmatch(r"(?:tp(\d+))?[x*·]?(?:spp(\d+))?", text.strip())
    if found is None or not any(found.groups()):
        raise ConfigError(f"layout {text!r}; accepted: for example spp2, tp2 or tp2spp2")
    tp, spp = (int(degree or 1) for degree in found.groups())
    return ParallelConfig(tp=tp, spp=spp)


class Job:
    """The processes of one layout, one thread each.

    Args:
        model: folder.
        layout: degrees; one rank runs without any process group.
        options: of the engine, by their flat names.
    """

    def __init__(self, model: str, layout: ParallelConfig, options: Mapping[str, Any]) -> None:
        size = layout.world_size
        settings = json.dumps({"model": model, "tp": layout.tp, "spp": layout.spp, "num_threads": 1, **options})
        base = _plain_environment()
        port = _free_port()
        self._ranks = [
            subprocess.Popen(
                [sys.executable, "-m", "medha.bench.job", settings],
                env=base if size == 1 else base | _launch(rank, size, port),
                stdin=subprocess.PIPE if rank == 0 else subprocess.DEVNULL,
                stdout=subprocess.PIPE if rank == 0 else subprocess.DEVNULL,
                text=True,
                start_new_session=True,  # Ctrl-C is for the benchmark, which ends its jobs
            )
            for rank in range(size)
        ]
        self._read()  # it has loaded

    def prefill(self, prompt_len: int, *, seed: int) -> Prefill:
        """Read a random prompt and wait for the first token.

        Raises:
            RankFailedError: the job has ended; its ranks have said why on stderr.
        """
        first = self._ranks[0].stdin
        assert first is not None, "rank 0 has a pipe"
        try:
            first.write(json.dumps({"prompt_len": prompt_len, "seed": seed}) + "\n")
            first.flush()
        except BrokenPipeError as error:
            raise self._failed() from error
        answer = self._read()
        ranks = tuple(decode_records(text.encode()) for text in answer["ranks"])
        return Prefill(answer["ttft_s"], ranks)

    def __enter__(self) -> Job:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        try:
            if value is None:
                self._ranks[0].communicate(timeout=_END_S)  # the end of its input is the end of the job
                for rank in self._ranks:
                    rank.wait(timeout=_END_S)
        finally:
            for rank in self._ranks:
                rank.kill()
                rank.wait()

    def _read(self) -> dict[str, Any]:
        output = self._ranks[0].stdout
        assert output is not None, "rank 0 has a pipe"
        line = output.readline()
        if not line:
            raise self._failed()
        answer: dict[str, Any] = json.loads(line)
        return answer

    def _failed(self) -> RankFailedError:
        for rank in self._ranks:
            rank.kill()
        return RankFailedError(f"a job of {len(self._ranks)} ranks has ended: {[rank.wait() for rank in self._ranks]}")


def _plain_environment() -> dict[str, str]:
    """This process's environment without a launcher, with one thread, and with medha where it is found here."""
    kept = {name: value for name, value in os.environ.items() if name not in _LAUNCH}
    path = [str(Path(medha.__file__).parents[1]), *filter(None, [kept.get("PYTHONPATH")])]
    return kept | {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(path)}


def _launch(rank: int, size: int, port: int) -> dict[str, str]:
    """What torchrun would set on one node."""
    values = (rank, rank, size, size, "127.0.0.1", port)
    return {name: str(value) for name, value in zip(_LAUNCH, values, strict=True)}


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def run_rank(settings: Mapping[str, Any]) -> None:
    """What a process of a job does: rank 0 reads prompts as it is asked, the others follow."""
    role = build_role(EngineConfig.from_flat(**settings))
    if role.engine is not None:
        _answer({"ready": True})
        for line in sys.stdin:
            _answer(_prefill(role, **json.loads(line)))
    role.close()


def _prefill(role: Role, *, prompt_len: int, seed: int) -> dict[str, Any]:
    engine = role.engine
    assert engine is not None, "rank 0 has the engine"
    generator = torch.Generator().manual_seed(seed)
    prompt = torch.randint(0, role.limits.vocab_size, (prompt_len,), generator=generator).tolist()
    params = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True)
    start = time.perf_counter()
    engine.add_request("prefill", prompt, params)
    while engine.has_unfinished:
        engine.step()
    ttft_s = time.perf_counter() - start
    ranks = [encode_records(records).decode() for records in _records(engine.runner)]
    return {"ttft_s": ttft_s, "ranks": ranks}


def _records(runner: object) -> list[RankRecords]:
    if isinstance(runner, DrivingRunner):
        return runner.gather_records()
    assert isinstance(runner, Runner), "one rank runs by itself"
    return [RankRecords(0, 0, 0, runner.recorder.take())]


def _answer(value: Mapping[str, Any]) -> None:
    print(json.dumps(value), flush=True)


if __name__ == "__main__":
    run_rank(json.loads(sys.argv[1]))
