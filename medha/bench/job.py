"""Jobs of several ranks that a benchmark starts by itself: the side that starts and asks them.

A job is started once and then asked for one piece of work at a time, so that two jobs can take turns; one that is not
asked waits for a line on its standard input and takes no time. The ranks get the environment that torchrun would set;
what they do is in :mod:`medha.bench.ranks`.
"""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

from medha.config import ParallelConfig
from medha.errors import ConfigError, RankFailedError
from medha.parallel.launch import launch_variables, start_python
from medha.timeline import RankRecords, decode_records

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


@dataclass(frozen=True, slots=True)
class Ask:
    """A request of a stream; its prompt is random.

    Attributes:
        num_output_tokens: exactly so many; no end of sequence ends it.
        arrival_s: seconds after the start of the stream.
        ttft_s: seconds from arrival to when its first token is due; None leaves the deadline to the scheduler.
    """

    request_id: str
    num_prompt_tokens: int
    num_output_tokens: int
    arrival_s: float = 0.0
    ttft_s: float | None = None


@dataclass(frozen=True, slots=True)
class Served:
    """What became of a request of a stream; times in seconds after the start of the stream.

    Attributes:
        first_token_s: None where there was none.
        finished_s: when it ended; None where it was never queued.
        has_finished: it has all of its tokens.
        tpot_s: mean time between tokens after the first; None with fewer than two.
        deadline_s: seconds from arrival that the scheduler went by; None is none.
        num_chunks: batches in which its prompt was read.
    """

    request_id: str
    arrival_s: float
    first_token_s: float | None
    finished_s: float | None
    has_finished: bool
    tpot_s: float | None
    deadline_s: float | None
    deadline_is_derived: bool
    num_chunks: int

    @property
    def ttft_s(self) -> float | None:
        """Arrival to first token, seconds."""
        return None if self.first_token_s is None else self.first_token_s - self.arrival_s


@dataclass(frozen=True, slots=True)
class Stream:
    """Requests served as they arrived.

    Attributes:
        served: in the order of the requests.
        prediction: count, mean absolute and mean signed error of predicted batch seconds, as shares, since the start.
        overhead_s: seconds of a step beyond what it computed, the median; None with several ranks.
        busy_ratio: computed seconds relative to uncorrected predictions; None where nothing is predicted.
        factors: the same by kind of step, and how many steps there were.
    """

    served: tuple[Served, ...]
    prediction: Mapping[str, float]
    overhead_s: float | None = None
    busy_ratio: float | None = None
    factors: Mapping[str, tuple[float, int]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class LastWords:
    """What a rank says when it ends.

    Attributes:
        spans: (what, start, seconds) of each measured call, ``attention`` or ``packing``; times as in its records.
        kv_bytes: keys and values of the blocks that were in use at the end of its last request.
        peak_memory_bytes: most memory that it has held resident.
    """

    spans: tuple[tuple[str, float, float], ...]
    kv_bytes: int
    peak_memory_bytes: int


def parse_layout(text: str) -> ParallelConfig:
    """``kvp2``, ``tp2`` or ``kvp2spp2`` as degrees; the axes in any order, each at most once.

    Raises:
        ConfigError: none of these.
    """
    found = re.findall(r"([a-z]+)(\d+)[x*·]?", text.strip())
    degrees = {axis: int(degree) for axis, degree in found}
    whole = re.fullmatch(r"(?:(?:kvp|spp|tp)\d+(?:[x*·](?!$))?)+", text.strip())
    if whole is None or len(degrees) < len(found):
        raise ConfigError(f"layout {text!r}; accepted: for example spp2, tp2, kvp2 or kvp2spp2")
    return ParallelConfig(tp=degrees.get("tp", 1), spp=degrees.get("spp", 1), kvp=degrees.get("kvp", 1))


class Job:
    """The processes of one layout.

    Args:
        model: folder.
        layout: degrees; one rank runs without any process group.
        options: of the engine, by their flat names; one thread a rank unless they say otherwise.
        held: what the KV cache holds from the start, see :class:`medha.profile.held.Held`; nothing by default.
    """

    def __init__(
        self, model: str, layout: ParallelConfig, options: Mapping[str, Any], *, held: Mapping[str, Any] | None = None
    ) -> None:
        degrees = {"tp": layout.tp, "spp": layout.spp, "kvp": layout.kvp}
        settings = json.dumps({"engine": {"model": model, "num_threads": 1, **degrees, **options}, "held": held})
        self._ranks = _start(["medha.bench.ranks", settings], layout.world_size)
        self._read()  # it has loaded

    def prefill(self, prompt_len: int, *, seed: int) -> Prefill:
        """Read a random prompt and wait for the first token; raises as :meth:`ask`."""
        answer = self.ask("prefill", prompt_len=prompt_len, seed=seed)
        return Prefill(answer["ttft_s"], records_in(answer))

    def serve(self, requests: Sequence[Ask], *, seed: int, limit_s: float) -> Stream:
        """Serve requests as they arrive, for at most ``limit_s`` seconds; raises as :meth:`ask`."""
        answer = self.ask("serve", requests=[asdict(request) for request in requests], seed=seed, limit_s=limit_s)
        served = {one["request_id"]: Served(**one) for one in answer["served"]}
        by_request = tuple(served[request.request_id] for request in requests)
        factors = {kind: (float(factor), int(count)) for kind, (factor, count) in answer["factors"].items()}
        return Stream(by_request, answer["prediction"], answer["overhead_s"], answer["busy_ratio"], factors)

    def ask(self, work: str, **arguments: Any) -> dict[str, Any]:
        """Have a piece of work done; see :mod:`medha.bench.ranks` for which there are.

        Raises:
            RankFailedError: the job has ended; its ranks have said why on stderr.
        """
        first = self._ranks[0].stdin
        assert first is not None, "rank 0 has a pipe"
        try:
            first.write(json.dumps({"work": work, **arguments}) + "\n")
            first.flush()
        except BrokenPipeError as error:
            raise self._failed() from error
        return self._read()

    def end(self) -> tuple[LastWords, ...]:
        """Let the ranks go; returns the last words of each; raises as :meth:`ask`."""
        said = [rank.communicate(timeout=_END_S)[0] for rank in self._ranks]  # the end of its input ends rank 0
        if any(rank.returncode for rank in self._ranks):
            raise self._failed()
        answers = [json.loads(text.splitlines()[-1]) for text in said]
        return tuple(LastWords(**{**answer, "spans": tuple(map(tuple, answer["spans"]))}) for answer in answers)

    def __enter__(self) -> Job:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        try:
            if value is None and any(rank.poll() is None for rank in self._ranks):
                self.end()
        finally:
            _kill(self._ranks)

    def _read(self) -> dict[str, Any]:
        output = self._ranks[0].stdout
        assert output is not None, "rank 0 has a pipe"
        line = output.readline()
        if not line:
            raise self._failed()
        answer: dict[str, Any] = json.loads(line)
        return answer

    def _failed(self) -> RankFailedError:
        return RankFailedError(f"a job of {len(self._ranks)} ranks has ended: {_kill(self._ranks)}")


def measure_profile(model: str, layout: ParallelConfig, path: Path, *, max_kv: int) -> None:
    """Have the ranks of a layout measure what steps cost, one thread each, as ``medha profile --quick`` does.

    Args:
        model: folder.
        layout: degrees.
        path: file to write, for the option ``profile`` of a job in float32 on the CPU.
        max_kv: longest KV cache in tokens.

    Raises:
        RankFailedError: a rank has failed, and has said why on stderr.
    """
    options = {"output": path, "tp": layout.tp, "spp": layout.spp, "kvp": layout.kvp, "max-kv": max_kv}
    options |= {"num-threads": 1, "dtype": "float32", "device": "cpu", "log-level": "warning"}
    flags = [text for name, value in options.items() for text in (f"--{name}", str(value))]
    ranks = _start(["medha.__main__", "profile", model, *flags, "--quick"], layout.world_size)
    try:
        for rank in ranks:
            rank.communicate()
    finally:
        codes = _kill(ranks)
    if any(codes):
        raise RankFailedError(f"medha profile on {len(ranks)} ranks has ended: {codes}")


def _start(module: Sequence[str], size: int) -> list[subprocess.Popen[str]]:
    """Start a module with its arguments on every rank; only rank 0 is written to, and all are read from."""
    ranks: list[dict[str, str]] = [{}] if size == 1 else launch_variables(size)
    return [
        start_python(
            module,
            {"OMP_NUM_THREADS": "1", **variables},
            stdin=subprocess.DEVNULL if rank else subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        for rank, variables in enumerate(ranks)
    ]


def _kill(ranks: Sequence[subprocess.Popen[str]]) -> list[int]:
    """End what has not ended; returns the exit codes."""
    for rank in ranks:
        rank.kill()
    return [rank.wait() for rank in ranks]


def records_in(answer: Mapping[str, Any]) -> tuple[RankRecords, ...]:
    """What each rank ran, from an answer that says so."""
    return tuple(decode_records(text.encode()) for text in answer["ranks"])
