"""The convoy over HTTP: short requests that arrive while long prompts are read, by medha's server and by vLLM's.

python -m tools.serve_convoy --peer-python PYTHON --output-json convoy.json --plot docs/serve-convoy.png

One workload for all: prompts of ``--long`` tokens at 0 and ``--long-every`` seconds, and beside them short ones of 50
to 400 tokens, ``--rate`` a second by Poisson, 8 tokens each; tokens are drawn, so that nothing is shared. One random
Llama in float32, and as many threads for each server. Servers are started and asked one after the other, round by
round, by a client in this process; a request is timed from its sending. "no HTTP" is medha's engine alone, whose
threads wait as the server's do. Prints a table in Markdown: medians over rounds.
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
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from medha.bench.compare import start_peer
from medha.bench.harness import Subject, random_prompt
from medha.bench.load import fixed_output
from medha.bench.timing import in_turn
from medha.engine.arrivals import Arrival
from medha.models.needle import write_needle
from medha.workload.metrics import percentile
from tools.command import chosen, main, print_head, print_row
from tools.live import long_and_short, post

SHAPE = {"hidden_size": 512, "intermediate_size": 1408, "num_attention_heads": 8, "num_key_value_heads": 2}
VOCAB_SIZE, OUTPUT_LEN = 256, 8
SERVERS = {
    "medha": [],
    "medha, LARS": ["--policy", "lars"],
    "vLLM": [],
    "vLLM, 512 tokens a step": ["--max-num-batched-tokens", "512", "--long-prefill-token-threshold", "256"],
    "vLLM, 1,024 tokens a step": ["--max-num-batched-tokens", "1024", "--long-prefill-token-threshold", "512"],
    "medha, no HTTP": [],
}
START_S, REQUEST_S = 180.0, 900.0
Told = tuple[float, float]
"""When the first and the last token of a request came, in seconds from its sending."""
Ask = Callable[[Sequence[Arrival]], list[Told]]


class Asked(NamedTuple):
    """A request of the workload."""

    arrival_s: float
    prompt_tokens: int
    num_outputs: int
    is_long: bool


@dataclass(frozen=True)
class Setting:
    """What is the same for every server."""

    folder: str
    max_model_len: int
    num_threads: int
    kv_bytes: int
    peer_python: str | None
    log: Path


def serve(name: str, setting: Setting, arrivals: Sequence[Arrival]) -> list[Told]:
    """Start a server, warm it up by a short and a middling request, serve the workload, end it."""
    chance = np.random.default_rng(99)
    server = without_http(setting) if name == "medha, no HTTP" else over_http(name, setting)
    with server as ask:
        for size in (100, min(3000, setting.max_model_len - 2 * OUTPUT_LEN)):
            ask([Arrival("warm", random_prompt(size, VOCAB_SIZE, chance), fixed_output(OUTPUT_LEN))])
        told = ask(arrivals)
    p50, p99 = (percentile([first_s for first_s, _ in told], at) for at in (50, 99))
    print(f"{name}: TTFT of all P50 {p50:.4f}, P99 {p99:.4f} s", file=sys.stderr, flush=True)
    return told


@contextmanager
def over_http(name: str, setting: Setting) -> Iterator[Ask]:
    """A server in a process of its own."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    options = ["--host", "127.0.0.1", "--port", str(port), "--dtype", "float32"]
    options += ["--max-model-len", str(setting.max_model_len), "--served-model-name", "m", *SERVERS[name]]
    threads, environment = setting.num_threads, os.environ | {"OMP_NUM_THREADS": str(setting.num_threads)}
    if name.startswith("medha"):
        command = [sys.executable, "-m", "medha.serve", setting.folder, "--num-threads", str(threads)]
        options += ["--kv-cache-memory-bytes", str(setting.kv_bytes)]
    else:
        cores = ",".join(map(str, sorted(os.sched_getaffinity(0))[:threads]))
        for spinning in ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT"):  # how threads of our commands wait; theirs spin on
            environment.pop(spinning, None)
        environment |= {"VLLM_CPU_OMP_THREADS_BIND": cores, "VLLM_CPU_KVCACHE_SPACE": str(setting.kv_bytes >> 30)}
        command = [str(setting.peer_python), "-m", "vllm.entrypoints.openai.api_server", "--model", setting.folder]
    with setting.log.open("wb") as out:
        process = subprocess.Popen(
            [*command, *options], env=environment, stdout=out, stderr=out, start_new_session=True
        )
        try:
            wait_for(port, process, setting.log)
            yield lambda arrivals: asyncio.run(ask_all(port, arrivals))
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


async def ask_all(port: int, arrivals: Sequence[Arrival]) -> list[Told]:
    """Send each request at its time and read its stream."""
    start_s = time.perf_counter()

    async def ask(one: Arrival) -> Told:
        await asyncio.sleep(max(start_s + one.arrival_s - time.perf_counter(), 0.0))
        body = {"model": "m", "prompt": _ids(one), "max_tokens": OUTPUT_LEN, "temperature": 0.0}
        first_s, last_s, got = await post(
            port, "/v1/completions", json.dumps(body | {"ignore_eos": True, "stream": True}).encode()
        )
        if b"[DONE]" not in got or b'"error"' in got:
            raise RuntimeError(f"a request failed: {got[-500:]!r}")
        return first_s, last_s

    return await asyncio.wait_for(asyncio.gather(*map(ask, arrivals)), REQUEST_S)


def _ids(one: Arrival) -> list[int]:
    return [int(token) for token in np.asarray(one.prompt)]


@contextmanager
def without_http(setting: Setting) -> Iterator[Ask]:
    """Medha's engine in a process of its own."""
    settings: dict[str, Any] = {"model": setting.folder, "max_model_len": setting.max_model_len, "dtype": "float32"}
    settings |= {"num_threads": setting.num_threads, "enable_prefix_caching": True, "seed": 0}
    settings |= {"kv_cache_memory_bytes": setting.kv_bytes}
    with start_peer("medha", sys.executable, settings) as engine:

        def ask(arrivals: Sequence[Arrival]) -> list[Told]:
            prompts, at_s = [_ids(one) for one in arrivals], [one.arrival_s for one in arrivals]
            work = {"prompts": prompts, "num_outputs": [OUTPUT_LEN] * len(prompts), "arrivals": at_s}
            found: list[Told] = engine.ask(**work, way="arriving")["tokens"]
            return found

        yield ask


def figures(asked: Sequence[Asked], told: Sequence[Told]) -> list[float]:
    """TTFT P50 and P99 of the short, their TPOT P50 and P99, the longs' median TTFT, tokens a second."""
    pairs = [(one, first_s, last_s) for one, (first_s, last_s) in zip(asked, told, strict=True)]
    ttft = [first_s for one, first_s, _ in pairs if not one.is_long]
    tpot = [(last_s - first_s) / (one.num_outputs - 1) for one, first_s, last_s in pairs if not one.is_long]
    longs = [first_s for one, first_s, _ in pairs if one.is_long]
    total = sum(one.prompt_tokens + one.num_outputs for one in asked)
    end_s = max(one.arrival_s + last_s for one, _, last_s in pairs)
    found = [percentile(ttft, 50), percentile(ttft, 99), percentile(tpot, 50), percentile(tpot, 99)]
    return [float(one or 0.0) for one in found] + [statistics.median(longs), total / end_s]


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
    output_json: Path | None = None,
    from_json: Path | None = None,
    plot: Path | None = None,
) -> None:
    """Serve short requests beside long prompts; --peer-python has vLLM (without it medha alone is asked), --from-json
    shows what an earlier run wrote, --plot draws how the short ones' times to first token are distributed."""
    if from_json is not None:
        saved = json.loads(from_json.read_text())
    else:
        names = [one for one in chosen("servers", servers, SERVERS, ";") if peer_python or not one.startswith("vLLM")]
        at_s = [long_every * i for i in range(num_long)]
        arrivals = long_and_short(
            seed, vocab_size=VOCAB_SIZE, long_len=long, long_at_s=at_s, num_short=num_short, rate=rate
        )
        longest, subject = long + 64, Subject(hf_overrides=SHAPE | {"vocab_size": VOCAB_SIZE})
        with (
            tempfile.TemporaryDirectory() as scratch,
            subject.checkpoint(longest, dtype="float32", seed=0) as folder,
        ):
            for path in write_needle(Path(scratch) / "needle").glob("tokenizer*"):
                shutil.copy(path, folder)
            setting = Setting(folder, longest, num_threads, kv_bytes, peer_python, Path(scratch) / "log")
            found = in_turn({name: partial(serve, name, setting, arrivals) for name in names}, warmup=0, runs=runs)
        asked = [Asked(one.arrival_s, len(_ids(one)), OUTPUT_LEN, one.tenant == "long") for one in arrivals]
        saved = {"asked": asked, "runs": found}
        if output_json is not None:
            output_json.write_text(json.dumps(saved))
    show([Asked(*one) for one in saved["asked"]], saved["runs"], plot)


def show(asked: Sequence[Asked], found: Mapping[str, Sequence[Sequence[Told]]], plot: Path | None) -> None:
    """Print the table, and draw the share of short requests, of all rounds, whose first token was there after so many
    seconds."""
    print_head("server", "short TTFT P50", "P99", "short TPOT P50", "P99", "long TTFT", "tokens/s")
    for name, runs in found.items():
        p50, p99, tpot50, tpot99, long_s, rate = map(
            statistics.median, zip(*(figures(asked, told) for told in runs), strict=True)
        )
        tpots = f"{1e3 * tpot50:.1f} ms", f"{1e3 * tpot99:.1f} ms"
        print_row(name, f"{p50:.3f} s", f"{p99:.3f} s", *tpots, f"{long_s:.1f} s", f"{rate:,.0f}")
    if plot is not None:
        import matplotlib.pyplot as plt

        figure, axes = plt.subplots(figsize=(7, 3.5), layout="constrained")
        for name, runs in found.items():
            pairs = [pair for told in runs for pair in zip(asked, told, strict=True)]
            axes.ecdf([first_s for one, (first_s, _) in pairs if not one.is_long], label=name)
        axes.set(xlabel="time to first token of a short request, s", ylabel="share of them", xscale="log")
        axes.grid(alpha=0.3)
        axes.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0))
        figure.savefig(plot, dpi=110)


if __name__ == "__main__":
    main(serve_convoy)
