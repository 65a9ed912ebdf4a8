"""Made-up coefficients, and hypothesis strategies for them."""

import json
from bisect import bisect_right
from itertools import accumulate
from typing import Any

from hypothesis import strategies as st

from medha.cost.coefficients import (
    ChunkAttention,
    Coefficients,
    Curve,
    DecodeAttention,
    Link,
    MixedAttention,
    ProfileKey,
)
from medha.cost.json_form import JsonFile
from medha.cost.predictor import Predictor

KEY = ProfileKey("a machine", "llama 4x64", "float32", "tp1 spp1 kvp1 stage 0", "torch", 2, 256, "2.13.0")

PLAIN = Coefficients(
    key=KEY,
    linear=Curve((1.0, 64.0, 256.0, 1024.0), (2e-3, 3e-3, 8e-3, 30e-3)),
    chunks=ChunkAttention(
        (16.0, 64.0, 256.0, 1024.0),
        (1e-4, 4e-4, 3e-3, 40e-3),
        (1e-8, 2e-8, 8e-8, 32e-8),
        (1e-4, 3e-4, 2e-3, 30e-3),
        tile=16,
    ),
    decodes=DecodeAttention((1.0, 8.0, 64.0), (1e-4, 2e-4, 4e-4), (1e-8, 6e-8, 40e-8)),
    host_s=1e-3,
)
"""A stage that runs segments one after the other."""

FREE = Coefficients(
    KEY, Curve((1.0,), (0.0,)), ChunkAttention((1.0,), (0.0,), (0.0,), (0.0,)), DecodeAttention((1.0,), (0.0,), (0.0,))
)
"""A stage that takes no time; a test replaces what it is about."""


def efficient_kv(predictor: Predictor, budget_s: float, num_tokens: int) -> int:
    """Cached tokens behind which a chunk alone takes at most ``budget_s``."""
    tick = predictor.tick()
    return bisect_right(range(1 << 20), budget_s, key=lambda kv: tick.with_chunk(num_tokens, kv)) - 1


def changed(file: JsonFile, path: str, value: Any) -> str:
    """The text of a file with another value at a path of names and indices; ``...`` deletes it."""
    tree: Any = json.loads(file.to_json())
    node = tree
    *parents, last = path.split(".")
    for name in parents:
        node = node[int(name) if name.isdigit() else name]
    if value is ...:
        del node[last]
    else:
        node[last] = value
    return json.dumps(tree)


def rising(count: int, scale: float) -> st.SearchStrategy[tuple[float, ...]]:
    """Columns of ``count`` seconds that never fall, flat parts included."""
    steps = st.lists(st.just(0.0) | st.floats(1e-3, 1.0), min_size=count, max_size=count)
    return steps.map(lambda drawn: tuple(accumulate(step * scale for step in drawn)))


def sizes(high: int) -> st.SearchStrategy[tuple[float, ...]]:
    """One to five increasing sizes."""
    return st.sets(st.integers(1, high), min_size=1, max_size=5).map(lambda found: tuple(map(float, sorted(found))))


@st.composite
def curves(draw: st.DrawFn) -> Curve:
    x = draw(sizes(400))
    return Curve(x, draw(rising(len(x), 1e-2)))


@st.composite
def decode_tables(draw: st.DrawFn) -> DecodeAttention:
    x = draw(sizes(16))
    columns = [draw(rising(len(x), scale)) for scale in (1e-3, 1e-7, 1e-3, 1e-7)]
    if draw(st.booleans()):
        return DecodeAttention(x, columns[0], columns[1])
    return DecodeAttention(x, columns[0], columns[1], 100.0, columns[2], columns[3])


LINKS = st.none() | st.builds(Link, st.integers(1, 8), st.floats(0, 1e-3), st.floats(1e6, 1e10), st.floats(1.0, 4096.0))


@st.composite
def coefficients(draw: st.DrawFn) -> Coefficients:
    """Any stage: tables that jump or are flat, with and without a head, links, a fused mixed launch, a KV split."""
    x = draw(sizes(400))
    columns = [draw(rising(len(x), scale)) for scale in (1e-2, 1e-7, 1e-2)]
    mixed = st.builds(MixedAttention, st.floats(0.5, 2.0), decode_tables(), st.floats(0, 1e-3), st.floats(0, 1e-6))
    return Coefficients(
        key=KEY,
        linear=draw(curves()),
        chunks=ChunkAttention(x, columns[0], columns[1], columns[2], tile=draw(st.sampled_from([1, 8, 64]))),
        decodes=draw(decode_tables()),
        mixed=draw(st.none() | mixed),
        splits_kv=draw(st.booleans()),
        head=draw(st.none() | curves()),
        host_s=draw(st.floats(0, 1e-3)),
        tp=draw(LINKS),
        spp=draw(LINKS),
        kvp=draw(LINKS),
    )
