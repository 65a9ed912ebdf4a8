"""What live tools share: engines of one random Llama, long prompts beside short ones, a client of a server."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

import numpy as np

from medha import LLM
from medha.bench.harness import Subject, random_prompt
from medha.bench.load import fixed_output
from medha.cli.options import parse_object
from medha.engine.arrivals import Arrival
from medha.engine.engine import Engine

SHORT_LENS, SHORT_FROM_S, OUTPUT_LEN = (50, 400), 0.5, 8


def random_llama(hf_overrides: str) -> Subject:
    """A random Llama under what a JSON object says of its ``config.json``; raises ConfigError where it is none."""
    return Subject(hf_overrides=parse_object("hf_overrides", hf_overrides))


@contextmanager
def engines_of(subject: Subject, options: Mapping[str, dict[str, Any]], *, longest: int) -> Iterator[dict[str, Engine]]:
    """An engine of the same random Llama for each set of options, for requests of so many tokens."""
    base: dict[str, Any] = {"load_format": "dummy", "prefix_caching": False, "max_model_len": longest}
    base |= {"hf_overrides": subject.overrides(longest)}
    with ExitStack() as stack:
        yield {name: stack.enter_context(LLM(subject.folder, **base | more)).engine for name, more in options.items()}


def long_and_short(
    seed: int | Sequence[int],
    *,
    vocab_size: int,
    long_len: int,
    long_at_s: Sequence[float],
    num_short: int,
    rate: float,
    output_len: int = OUTPUT_LEN,
) -> list[Arrival]:
    """Long prompts at these seconds, and short ones by a Poisson process, the same whatever the long ones are.

    Args:
        seed: of arrivals, lengths and tokens.
        vocab_size: tokens are below it; they are drawn, so that nothing is shared.
        long_len: prompt tokens.
        long_at_s: arrivals.
        num_short: requests of SHORT_LENS prompt tokens, the first of them after SHORT_FROM_S.
        rate: of these in a second.
        output_len: tokens that each request gets.
    """
    chance = np.random.default_rng(seed)
    low, high = SHORT_LENS
    short_at_s = (SHORT_FROM_S + np.cumsum(chance.exponential(1 / rate, num_short))).tolist()
    lengths = chance.integers(low, high, num_short, endpoint=True).tolist()
    rows = [("short", at_s, length) for at_s, length in zip(short_at_s, lengths, strict=True)]
    rows += [("long", at_s, long_len) for at_s in long_at_s]
    params = fixed_output(output_len)
    arrivals = [
        Arrival(f"{kind}-{i}", random_prompt(length, vocab_size, chance), params, arrival_s=at_s, tenant=kind)
        for i, (kind, at_s, length) in enumerate(rows)
    ]
    return sorted(arrivals, key=lambda one: one.arrival_s)


async def post(port: int, path: str, body: bytes) -> AsyncIterator[bytes]:
    """Send a body to a server of this machine; yields the lines of the answer as they come."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    fields = {"host": f"127.0.0.1:{port}", "content-type": "application/json", "content-length": len(body)}
    head = "".join(f"{name}: {value}\r\n" for name, value in {**fields, "connection": "close"}.items())
    writer.write(f"POST {path} HTTP/1.1\r\n{head}\r\n".encode() + body)
    async for line in reader:
        yield line
    writer.close()


class Told(NamedTuple):
    """When its first and its last token came, in seconds from its sending; what was said before: when, which share of
    the prompt was read, and in how many seconds the first token was due; the engine's own time to first token."""

    first_s: float
    last_s: float
    progress: Sequence[tuple[float, float, float]] = ()
    own_s: float | None = None


async def ask_one(port: int, ask: Arrival, start: float, **flags: bool) -> Told:
    """Send a request at its time and read its stream; medha's ``flags`` may be ``return_progress`` and ``explain``."""
    await asyncio.sleep(max(start + ask.arrival_s - time.perf_counter(), 0.0))
    body = {"model": "m", "prompt": ids_of(ask), "max_tokens": OUTPUT_LEN, "temperature": 0.0}
    body |= {"ignore_eos": True, "stream": True, **flags}
    data = json.dumps(body).encode()
    sent, first_s, last_s, own_s, got = time.perf_counter(), 0.0, 0.0, None, b""
    progress: list[tuple[float, float, float]] = []
    async for line in post(port, "/v1/completions", data):
        got, now_s = got + line, time.perf_counter() - sent
        if b'"choices":[{' in line:
            last_s = now_s
            first_s = first_s or last_s
        elif b'"prompt_progress":' in line:
            said = json.loads(line.removeprefix(b"data: "))["prompt_progress"]
            progress.append((now_s, said["processed"] / said["total"], said["eta_s"]))
        elif b'"explanation":' in line:
            own_s = json.loads(line.removeprefix(b"data: "))["explanation"]["ttft_s"]
    if b"[DONE]" not in got or b'"error"' in got:
        raise RuntimeError(f"a request failed: {got[-500:]!r}")
    return Told(first_s, last_s, progress, own_s)


def ids_of(ask: Arrival) -> list[int]:
    """Its prompt, as JSON has it."""
    ids: list[int] = np.asarray(ask.prompt).tolist()
    return ids
