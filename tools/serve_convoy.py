"""The convoy over HTTP: short requests that arrive while long prompts are read, by medha's server and by vLLM's.

python -m tools.serve_convoy --peer-python PYTHON --output-json convoy.json --plot docs/serve-convoy.png

One workload for all: prompts of ``--long`` tokens at 0 and ``--long-every`` seconds, and beside them short ones of 50
to 400 tokens, ``--rate`` a second by Poisson, 8 tokens each; tokens are drawn, so that nothing is shared. One random
Llama in float32, and as many threads for each server. Servers are started and asked one after the other, round by
round, by a client in this process; a request is timed from its sending. "no HTTP" is medha's engine alone, whose
threads wait as the server's do. Prints a table in Markdown: medians over rounds; of medha's server also what the short
requests waited beyond what its engine says of each of them; with ``--eta`` also how far off medha's predictions of the
long prompts' first tokens were once half of the prompt was read.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from medha.bench.compare import start_peer
from medha.bench.harness import Subject
from medha.models.needle import write_needle
from medha.workload.metrics import percentile

SHAPE = {"hidden_size": 512, "intermediate_size": 1408, "num_attention_heads": 8, "num_key_value_heads": 2}
SERVERS = {
    "medha": [],
    "medha, LARS": ["--policy", "lars"],
    "vLLM": [],
    "vLLM, 512 tokens a step": ["--max-num-batched-tokens", "512", "--long-prefill-token-threshold", "256"],
    "vLLM, 1,024 tokens a step": ["--max-num-batched-tokens", "1024", "--long-prefill-token-threshold", "512"],
    "medha, no HTTP": [],
}
START_S, REQUEST_S = 180.0, 900.0


@dataclass(frozen=True)
class Ask:
    """A request of the workload."""

    arrival_s: float
    prompt: list[int]
    num_outputs: int
    is_long: bool


@dataclass(frozen=True)
class Told:
    """When its first and its last token came, in seconds from its sending; what was said before: when, which share of
    the prompt was read, and in how many seconds the first token was due; the engine's own time to first token."""

    first_s: float
    last_s: float
    progress: Sequence[tuple[float, float, float]] = ()
    own_s: float | None = None


def workload(given: argparse.Namespace, vocab_size: int) -> list[Ask]:
    """Requests in order of arrival."""
    chance = np.random.default_rng(given.seed)
    asks = [
        Ask(given.long_every * i, chance.integers(0, vocab_size, given.long).tolist(), 8, True)
        for i in range(given.num_long)
    ]
    for arrival_s in 0.5 + np.cumsum(chance.exponential(1 / given.rate, given.num_short)):
        size = int(chance.integers(50, 401))
        asks.append(Ask(float(arrival_s), chance.integers(0, vocab_size, size).tolist(), 8, False))
    return sorted(asks, key=lambda ask: ask.arrival_s)


async def ask_one(port: int, ask: Ask, start: float, **flags: bool) -> Told:
    """Send a request at its time and read its stream; medha's ``flags`` may be ``return_progress`` and ``explain``."""
    await asyncio.sleep(max(start + ask.arrival_s - time.perf_counter(), 0.0))
    body = {"model": "m", "prompt": ask.prompt, "max_tokens": ask.num_outputs, "temperature": 0.0}
    body |= {"ignore_eos": True, "stream": True, **flags}
    data = json.dumps(body).encode()
    sent, first_s, last_s, own_s, got = time.perf_counter(), 0.0, 0.0, None, b""
    progress: list[tuple[float, float, float]] = []
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    fields = {"host": f"127.0.0.1:{port}", "content-type": "application/json", "connection": "close"}
    fields["content-length"] = str(len(data))
    head = "".join(f"{name}: {value}\r\n" for name, value in fields.items())
    writer.write(f"POST /v1/completions HTTP/1.1\r\n{head}\r\n".encode() + data)
    async for line in reader:
        got, now_s = got + line, time.perf_counter() - sent
        if b'"choices":[{' in line:
            last_s = now_s
            first_s = first_s or last_s
        elif b'"prompt_progress":' in line:
            said = json.loads(line.removeprefix(b"data: "))["prompt_progress"]
            progress.append((now_s, said["processed"] / said["total"], said["eta_s"]))
        elif b'"explanation":' in line:
            own_s = json.loads(line.removeprefix(b"data: "))["explanation"]["ttft_s"]
    writer.close()
    if b"[DONE]" not in got or b'"error"' in got:
        raise RuntimeError(f"a request failed: {got[-500:]!r}")
    return Told(first_s, last_s, progress, own_s)


async def ask_all(port: int, asks: list[Ask], *, is_medha: bool, reports: bool) -> list[Told]:
    """Serve the workload; ``reports`` asks how much of the long prompts has been read."""
    start = time.perf_counter()
    of_long, of_short = ({"return_progress": True} if reports else {}), ({"explain": True} if is_medha else {})
    told = [ask_one(port, ask, start, **(of_long if ask.is_long else of_short)) for ask in asks]
    return await asyncio.wait_for(asyncio.gather(*told), REQUEST_S)


def serve(name: str, folder: str, given: argparse.Namespace, asks: list[Ask], log: Path) -> list[Told]:
    """Start a server, warm it up by a short and a middling request, serve the workload, end it."""
    longest = given.long + 64
    if name == "medha, no HTTP":
        return without_http(folder, given, asks, longest)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    options = ["--host", "127.0.0.1", "--port", str(port), "--dtype", "float32", "--max-model-len", str(longest)]
    options += ["--served-model-name", "m", *SERVERS[name]]
    environment = os.environ | {"OMP_NUM_THREADS": str(given.num_threads)}
    if name.startswith("medha"):
        command = [sys.executable, "-m", "medha.serve", folder, "--num-threads", str(given.num_threads)]
        options += ["--kv-cache-memory-bytes", str(given.kv_bytes)]
    else:
        cores = ",".join(map(str, sorted(os.sched_getaffinity(0))[: given.num_threads]))
        environment |= {"VLLM_CPU_OMP_THREADS_BIND": cores, "VLLM_CPU_KVCACHE_SPACE": str(given.kv_bytes >> 30)}
        command = [given.peer_python, "-m", "vllm.entrypoints.openai.api_server", "--model", folder]
    with log.open("wb") as out:
        process = subprocess.Popen(
            [*command, *options], env=environment, stdout=out, stderr=out, start_new_session=True
        )
        try:
            wait_for(port, process, log)
            chance = np.random.default_rng(99)
            for size in (100, 3000):
                asyncio.run(ask_one(port, Ask(0.0, chance.integers(0, 256, size).tolist(), 8, False), 0.0))
            return asyncio.run(ask_all(port, asks, is_medha=name.startswith("medha"), reports=given.eta))
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGTERM)
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)


def wait_for(port: int, process: subprocess.Popen[bytes], log: Path) -> None:
    """Until a server answers."""
    end = time.monotonic() + START_S
    while time.monotonic() < end and process.poll() is None:
        with suppress(OSError), urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5) as answer:
            if answer.status == 200:
                return
        time.sleep(0.5)
    raise RuntimeError(f"a server did not start:\n{log.read_text(errors='replace')[-2000:]}")


def without_http(folder: str, given: argparse.Namespace, asks: list[Ask], longest: int) -> list[Told]:
    """The workload through medha's engine."""
    settings = {"model": folder, "max_model_len": longest, "dtype": "float32", "num_threads": given.num_threads}
    settings |= {"enable_prefix_caching": True, "seed": 0, "kv_cache_memory_bytes": given.kv_bytes}
    with start_peer("medha", sys.executable, settings) as engine:
        chance = np.random.default_rng(99)
        for size in (100, 3000):
            prompt = chance.integers(0, 256, size).tolist()
            engine.ask(prompts=[prompt], num_outputs=[8], way="arriving", arrivals=[0.0])
        prompts, numbers = [ask.prompt for ask in asks], [ask.num_outputs for ask in asks]
        arrivals = [ask.arrival_s for ask in asks]
        found = engine.ask(prompts=prompts, num_outputs=numbers, way="arriving", arrivals=arrivals)
    return [Told(first, last) for first, last in found["tokens"]]


def figures(asks: list[Ask], told: list[Told]) -> list[float]:
    """TTFT P50 and P99 of the short, their TPOT P50 and P99, the longs' median TTFT, tokens a second."""
    pairs = list(zip(asks, told, strict=True))
    ttft = [one.first_s for ask, one in pairs if not ask.is_long]
    tpot = [(one.last_s - one.first_s) / (ask.num_outputs - 1) for ask, one in pairs if not ask.is_long]
    longs = [one.first_s for ask, one in pairs if ask.is_long]
    total = sum(len(ask.prompt) + ask.num_outputs for ask in asks)
    end = max(ask.arrival_s + one.last_s for ask, one in pairs)
    found = [percentile(ttft, 50), percentile(ttft, 99), percentile(tpot, 50), percentile(tpot, 99)]
    return [float(one or 0.0) for one in found] + [statistics.median(longs), total / end]


def eta_errors(told: list[Told]) -> str:
    """How far off predictions of the first token were from where half of a prompt was read, in shares of the time that
    was left, where that was a second or more, and of the whole time to first token."""
    halves = [(at_s + eta_s - one.first_s, one.first_s - at_s, one.first_s)
              for one in told for at_s, share, eta_s in one.progress if share >= 0.5]  # fmt: skip
    of_left = [abs(off_s) / left_s for off_s, left_s, _ in halves if left_s >= 1]
    of_all = [abs(off_s) / first_s for off_s, _, first_s in halves]
    if not of_left:
        return "no prediction of a second or more"
    left, whole = (f"P50 {percentile(some, 50):.1%}, most {max(some):.1%}" for some in (of_left, of_all))
    return f"{len(halves)} predictions, off by {left} of 1 s or more that was left, {whole} of the TTFT"


def added(told: list[Told]) -> str:
    """What the short requests waited for their first tokens beyond what the engine says of each."""
    pairs = [(one.first_s - one.own_s, one.first_s) for one in told if one.own_s is not None]
    p50, p99 = (1e3 * (percentile([more_s for more_s, _ in pairs], at) or 0.0) for at in (50, 99))
    share = percentile([more_s / whole_s for more_s, whole_s in pairs], 50) or 0.0
    return f"HTTP adds P50 {p50:.1f} ms, P99 {p99:.1f} ms, {share:.1%} of a TTFT in the median"


def main() -> None:
    """Run the tool."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peer-python", help="an interpreter that has vLLM; without it medha alone is asked")
    parser.add_argument("--servers", type=lambda text: text.split(";"), default=list(SERVERS))
    parser.add_argument("--long", type=int, default=32768)
    parser.add_argument("--num-long", type=int, default=2)
    parser.add_argument("--long-every", type=float, default=20.0)
    parser.add_argument("--num-short", type=int, default=80)
    parser.add_argument("--rate", type=float, default=2.0)
    parser.add_argument("--kv-bytes", type=int, default=2 << 30)
    parser.add_argument("--num-threads", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--eta", action="store_true", help="tell how far off predictions of the long ones were")
    parser.add_argument("--output-json", type=Path)
    parser.add_argument("--from-json", type=Path, help="show what an earlier run wrote, and run nothing")
    parser.add_argument("--plot", type=Path, help="how the short ones' times to first token are distributed")
    given = parser.parse_args()
    if given.from_json is not None:
        saved = json.loads(given.from_json.read_text())
    else:
        saved = run(given)
        if given.output_json is not None:
            given.output_json.write_text(json.dumps(saved))
    asks = [Ask(at, [0] * size, number, is_long) for at, size, number, is_long in saved["asked"]]
    found = {name: [[Told(*one) for one in told] for told in runs] for name, runs in saved["runs"].items()}
    print("| server | short TTFT P50 | P99 | short TPOT P50 | P99 | long TTFT | tokens/s |")
    print("| --- | --- | --- | --- | --- | --- | --- |")
    for name, runs in found.items():
        *times, rate = map(statistics.median, zip(*(figures(asks, told) for told in runs), strict=True))
        p50, p99, tpot50, tpot99, long_s = times
        row = f"{p50:.3f} s | {p99:.3f} s | {1e3 * tpot50:.1f} ms | {1e3 * tpot99:.1f} ms | {long_s:.1f} s"
        print(f"| {name} | {row} | {rate:,.0f} |")
    for name, runs in found.items():
        if any(one.own_s is not None for told in runs for one in told):
            print(f"{name}: {added([one for told in runs for one in told])}")
    for name, runs in found.items() if given.eta else ():
        for told in runs:
            print(f"{name}: {eta_errors(told)}")
    if given.plot is not None:
        draw(given.plot, asks, found)


def run(given: argparse.Namespace) -> dict[str, Any]:
    """Ask every server in every round: what was asked (arrival, tokens, outputs, whether it is long), and when what
    came."""
    names = [name for name in given.servers if given.peer_python or not name.startswith("vLLM")]
    found: dict[str, list[list[list[Any]]]] = {name: [] for name in names}
    with (
        tempfile.TemporaryDirectory() as scratch,
        Subject(hf_overrides=SHAPE | {"vocab_size": 256}).checkpoint(
            given.long + 64, dtype="float32", seed=0
        ) as folder,
    ):
        for path in write_needle(Path(scratch) / "needle").glob("tokenizer*"):
            shutil.copy(path, folder)
        asks = workload(given, 256)
        for _ in range(given.runs):
            for name in names:
                told = serve(name, folder, given, asks, Path(scratch) / "log")
                found[name].append([list(astuple(one)) for one in told])
                print(name, [round(one, 4) for one in figures(asks, told)], file=sys.stderr, flush=True)
    asked = [[ask.arrival_s, len(ask.prompt), ask.num_outputs, ask.is_long] for ask in asks]
    return {"asked": asked, "runs": found}


def draw(path: Path, asks: list[Ask], found: dict[str, list[list[Told]]]) -> None:
    """The share of short requests, of all rounds, whose first token was there after so many seconds."""
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(7, 3.5), layout="constrained")
    for name, runs in found.items():
        pairs = [pair for told in runs for pair in zip(asks, told, strict=True)]
        axes.ecdf([one.first_s for ask, one in pairs if not ask.is_long], label=name)
    axes.set(xlabel="time to first token of a short request, s", ylabel="share of them", xscale="log")
    axes.grid(alpha=0.3)
    axes.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0))
    figure.savefig(path, dpi=110)


if __name__ == "__main__":
    main()
