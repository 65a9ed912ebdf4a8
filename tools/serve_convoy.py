"""The convoy over HTTP: short requests that arrive while long prompts are read, by medha's server and by vLLM's.

python -m tools.serve_convoy --peer-python PYTHON --output-json convoy.json --plot docs/serve-convoy.png

One workload for all: prompts of ``--long`` tokens at 0 and every ``--long-every`` seconds, and beside them short ones,
``--rate`` a second by Poisson, 8 tokens each (:func:`tools.live.long_and_short`). One random Llama in float32, and as
many threads for each server. Servers are started and asked one after the other, round by round, by a client in this
process; a request is timed from its sending. "no HTTP" is medha's engine alone, whose threads wait as the server's do.
Prints a table in Markdown: medians over rounds; with ``--eta`` also how far off medha's predictions of the long
prompts' first tokens were once half of the prompt was read.
"""

from __future__ import annotations

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
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import numpy as np

from medha.bench.compare import start_peer
from medha.bench.harness import Subject
from medha.engine.arrivals import Arrival
from medha.errors import ConfigError
from medha.models.needle import write_needle
from medha.workload.metrics import percentile
from tools.command import chosen, main, print_head, print_row
from tools.live import OUTPUT_LEN, Told, ask_one, ids_of, long_and_short

SHAPE = {"hidden_size": 512, "intermediate_size": 1408, "num_attention_heads": 8, "num_key_value_heads": 2}
VOCAB_SIZE = 256
SERVERS = {
    "medha": [],
    "medha, LARS": ["--policy", "lars"],
    "vLLM": [],
    "vLLM, 512 tokens a step": ["--max-num-batched-tokens", "512", "--long-prefill-token-threshold", "256"],
    "vLLM, 1,024 tokens a step": ["--max-num-batched-tokens", "1024", "--long-prefill-token-threshold", "512"],
    "medha, no HTTP": [],
}
START_S, REQUEST_S = 180.0, 900.0
WARM = [Arrival("warm", np.random.default_rng(99).integers(0, VOCAB_SIZE, size).tolist()) for size in (100, 3000)]


class Place(NamedTuple):
    """What all servers get: the checkpoint, tokens of the longest request, bytes of the KV pool, threads."""

    folder: str
    longest: int
    kv_bytes: int
    num_threads: int
    peer_python: str | None


async def ask_all(port: int, asks: Sequence[Arrival], *, is_medha: bool, reports: bool) -> list[Told]:
    """Serve the workload; ``reports`` asks how much of the long prompts has been read."""
    start = time.perf_counter()
    of_long, of_short = ({"return_progress": True} if reports else {}), ({"explain": True} if is_medha else {})
    told = [ask_one(port, ask, start, **(of_long if ask.tenant == "long" else of_short)) for ask in asks]
    return await asyncio.wait_for(asyncio.gather(*told), REQUEST_S)


def serve(name: str, place: Place, asks: Sequence[Arrival], log: Path, *, reports: bool) -> list[Told]:
    """Start a server, warm it up by a short and a middling request, serve the workload, end it."""
    if name == "medha, no HTTP":
        return without_http(place, asks)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    options = ["--host", "127.0.0.1", "--port", str(port), "--dtype", "float32", "--max-model-len", str(place.longest)]
    options += ["--served-model-name", "m", *SERVERS[name]]
    environment = os.environ | {"OMP_NUM_THREADS": str(place.num_threads)}
    if name.startswith("medha"):
        command = [sys.executable, "-m", "medha.serve", place.folder, "--num-threads", str(place.num_threads)]
        options += ["--kv-cache-memory-bytes", str(place.kv_bytes)]
    else:
        cores = ",".join(map(str, sorted(os.sched_getaffinity(0))[: place.num_threads]))
        environment |= {"VLLM_CPU_OMP_THREADS_BIND": cores, "VLLM_CPU_KVCACHE_SPACE": str(place.kv_bytes >> 30)}
        command = [str(place.peer_python), "-m", "vllm.entrypoints.openai.api_server", "--model", place.folder]
    with log.open("wb") as out:
        process = subprocess.Popen(
            [*command, *options], env=environment, stdout=out, stderr=out, start_new_session=True
        )
        try:
            wait_for(port, process, log)
            for ask in WARM:
                asyncio.run(ask_one(port, ask, 0.0))
            return asyncio.run(ask_all(port, asks, is_medha=name.startswith("medha"), reports=reports))
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


def without_http(place: Place, asks: Sequence[Arrival]) -> list[Told]:
    """The workload through medha's engine."""
    settings = {"model": place.folder, "max_model_len": place.longest, "dtype": "float32", "seed": 0}
    settings |= {"num_threads": place.num_threads, "enable_prefix_caching": True}
    settings |= {"kv_cache_memory_bytes": place.kv_bytes}
    with start_peer("medha", sys.executable, settings) as engine:
        for part in (*([one] for one in WARM), asks):
            prompts, arrivals = [ids_of(ask) for ask in part], [ask.arrival_s for ask in part]
            work = {"prompts": prompts, "num_outputs": [OUTPUT_LEN] * len(prompts), "arrivals": arrivals}
            found = engine.ask(**work, way="arriving")
    return [Told(first, last) for first, last in found["tokens"]]


def figures(asks: Sequence[Arrival], told: Sequence[Told]) -> list[float]:
    """TTFT P50 and P99 of the short, their TPOT P50 and P99, the longs' median TTFT, tokens a second."""
    pairs = list(zip(asks, told, strict=True))
    shorts, longs = ([one for ask, one in pairs if ask.tenant == kind] for kind in ("short", "long"))
    columns = [one.first_s for one in shorts], [(one.last_s - one.first_s) / (OUTPUT_LEN - 1) for one in shorts]
    found = [percentile(values, percent) or 0.0 for values in columns for percent in (50, 99)]
    total = sum(len(ask.prompt) + OUTPUT_LEN for ask in asks)
    end_s = max(ask.arrival_s + one.last_s for ask, one in pairs)
    return [*found, percentile([one.first_s for one in longs], 50) or 0.0, total / end_s]


def eta_errors(told: Sequence[Told]) -> str:
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


def added(told: Sequence[Told]) -> str:
    """What the short requests waited for their first tokens beyond what the engine says of each."""
    pairs = [(one.first_s - one.own_s, one.first_s) for one in told if one.own_s is not None]
    p50, p99 = (1e3 * (percentile([more_s for more_s, _ in pairs], at) or 0.0) for at in (50, 99))
    share = percentile([more_s / whole_s for more_s, whole_s in pairs], 50) or 0.0
    return f"HTTP adds P50 {p50:.1f} ms, P99 {p99:.1f} ms, {share:.1%} of a TTFT in the median"


def draw(path: Path, asks: Sequence[Arrival], found: Mapping[str, Sequence[Sequence[Told]]]) -> None:
    """The share of short requests, of all rounds, whose first token was there after so many seconds."""
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(7, 3.5), layout="constrained")
    for name, runs in found.items():
        pairs = [pair for told in runs for pair in zip(asks, told, strict=True)]
        axes.ecdf([one.first_s for ask, one in pairs if ask.tenant == "short"], label=name)
    axes.set(xlabel="time to first token of a short request, s", ylabel="share of them", xscale="log")
    axes.grid(alpha=0.3)
    axes.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0))
    figure.savefig(path, dpi=110)


def serve_convoy(
    peer_python: str | None = None,
    servers: str = ";".join(SERVERS),
    long: int = 32768,
    num_long: int = 2,
    long_every: float = 20.0,
    num_short: int = 80,
    rate: float = 2.0,
    kv_bytes: int = 2 << 30,
    num_threads: int = 2,
    seed: int = 0,
    runs: int = 3,
    eta: bool = False,
    output_json: Path | None = None,
    plot: Path | None = None,
) -> None:
    """Time a convoy on --servers of the table's names, with semicolons; vLLM's are asked where --peer-python has it.

    --eta tells how far off predictions of the long prompts' first tokens were.
    """
    names = chosen("servers", servers, SERVERS, ";")
    found: dict[str, list[list[Told]]] = {one: [] for one in names if peer_python or not one.startswith("vLLM")}
    if long < (warm := max(len(one.prompt) for one in WARM)):
        raise ConfigError(f"long={long}; accepted: at least {warm}, the longest prompt of the warm-up")
    long_at_s = [long_every * at for at in range(num_long)]
    sizes = {"vocab_size": VOCAB_SIZE, "long_len": long, "num_short": num_short}
    asks = long_and_short(seed, long_at_s=long_at_s, rate=rate, **sizes)
    subject = Subject(hf_overrides=SHAPE | {"vocab_size": VOCAB_SIZE})
    with tempfile.TemporaryDirectory() as scratch, subject.checkpoint(long + 64, dtype="float32", seed=0) as folder:
        for path in write_needle(Path(scratch) / "needle").glob("tokenizer*"):
            shutil.copy(path, folder)
        place = Place(folder, long + 64, kv_bytes, num_threads, peer_python)
        for _ in range(runs):
            for name, told in found.items():
                told.append(serve(name, place, asks, Path(scratch) / "log", reports=eta))
                print(name, [round(one, 4) for one in figures(asks, told[-1])], file=sys.stderr, flush=True)
    if output_json is not None:
        asked = [(ask.tenant, ask.arrival_s, len(ask.prompt), OUTPUT_LEN) for ask in asks]
        output_json.write_text(json.dumps({"asked": asked, "runs": found}))
    print_head("server", "short TTFT P50", "P99", "short TPOT P50", "P99", "long TTFT", "tokens/s")
    for name, told in found.items():
        medians = map(statistics.median, zip(*(figures(asks, one) for one in told), strict=True))
        p50, p99, tpot50, tpot99, long_s, per_s = medians
        tpots = f"{1e3 * tpot50:.1f} ms", f"{1e3 * tpot99:.1f} ms"
        print_row(name, f"{p50:.3f} s", f"{p99:.3f} s", *tpots, f"{long_s:.1f} s", f"{per_s:,.0f}")
    for name, told in found.items():
        if any(one.own_s is not None for each in told for one in each):
            print(f"{name}: {added([one for each in told for one in each])}")
    for name, told in found.items() if eta else ():
        for one in told:
            print(f"{name}: {eta_errors(one)}")
    if plot is not None:
        draw(plot, asks, found)


if __name__ == "__main__":
    main(serve_convoy)
