"""KV in host memory: what goes out comes back bit by bit, in time for the compute, and changes no token.

On the CPU copies are made when they are issued; a substitute for the stream of CUDA makes them as late as it may. Real
streams are for a GPU. Which blocks are copied where is shown with the rest of a step's input.
"""

from functools import cache
from typing import Any

import pytest
import torch

from medha.attention.interface import LayerShape
from medha.batch import Batch
from medha.config import EngineConfig
from medha.engine.engine import Engine
from medha.errors import ConfigError
from medha.outputs import RequestMetrics
from medha.params import SamplingParams
from medha.worker.kv_cache import KVCache
from medha.worker.runner import Runner
from medha.worker.step_input import StepInput
from medha.worker.swap import HostCache, Wait
from tests.attention.test_torch_backend import make_flashinfer
from tests.engines import Late, build_engine, submitted
from tests.serving import Model, finish, random_ids
from tests.worker.test_graphs import Repeating
from tests.worker.test_kv_cache import make_cache

LENGTHS = (40, 3, 70, 25, 90)
SMALL = {"quantum_s": 0.25, "chunk_size": 16, "max_batch_tokens": 40, "block_size": 16, "num_blocks": 10}
SWAP = {"overcommit": True, "num_swap_blocks": 60, "prefix_caching": False}
NUM_TOKENS = 50
GREEDY = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True)
PENALTIES = SamplingParams(temperature=0.7, seed=9, repetition_penalty=1.3, max_tokens=NUM_TOKENS, ignore_eos=True)


# -- blocks ----------------------------------------------------------------------------------------------------


def test_the_hosts_pools_are_laid_out_as_the_devices_and_measuring_changes_nothing() -> None:
    cache = make_cache()
    memory = HostCache(cache, 3)
    assert memory.k[0].shape == (12, 2, 8) and memory.k[0].stride() == (8, 12 * 8, 1)
    assert len({pool.data_ptr() for pool in (*memory.k, *memory.v)}) == 4
    for pool in (*cache.k, *cache.v):
        pool.copy_(torch.randn(pool.shape))
    before = [pool.clone() for pool in (*cache.k, *cache.v)]
    assert memory.measure_block_s() > 0
    assert all(torch.equal(a, b) for a, b in zip(before, (*cache.k, *cache.v), strict=True))


# -- the engine ------------------------------------------------------------------------------------------------


def run(engine: Engine, *params: SamplingParams) -> tuple[list[list[int]], list[Batch], list[RequestMetrics]]:
    """Tokens of each request, which take the parameters by turns, the batches, and metrics of each request."""
    batches = submitted(engine)
    for i, length in enumerate(LENGTHS):
        engine.add_request(str(i), random_ids(length, seed=4), params[i % len(params)])
    finished = finish(engine)
    outputs = [finished[str(i)] for i in range(len(LENGTHS))]
    return [output.outputs[0].token_ids for output in outputs], batches, [output.metrics for output in outputs]


@cache
def undisturbed(bytes_model: Model, *params: SamplingParams) -> list[list[int]]:
    """Tokens of a run in which nobody gives way."""
    tokens, _, metrics = run(bytes_model.engine(**(SMALL | {"num_blocks": 64})), *params)
    assert not any(its.num_preemptions for its in metrics)
    return tokens


@pytest.mark.parametrize(
    ("room", "options"),
    [(0, {}), (0, {"depth": 2}), (4, {}), (60, {}), (60, {"depth": 2}), (60, {"async_scheduling": True})],
)
def test_tokens_are_those_of_an_ample_pool_and_none_is_computed_twice(
    bytes_model: Model, room: int, options: dict[str, Any]
) -> None:
    """But of who finds no room in the host."""
    engine = bytes_model.engine(**(SMALL | SWAP | options | {"num_swap_blocks": room}), host_cache=Late)
    tokens, batches, metrics = run(engine, GREEDY, PENALTIES)
    assert tokens == undisturbed(bytes_model, GREEDY, PENALTIES)
    assert metrics[1].num_preemptions and metrics[2].num_preemptions  # one of each kind
    num_preemptions, num_swaps = sum(its.num_preemptions for its in metrics), sum(its.num_swaps for its in metrics)
    assert num_preemptions >= 3
    if room < 60:
        assert (room > 0) <= num_swaps < num_preemptions
        return
    assert num_swaps == num_preemptions
    assert sum(batch.num_tokens for batch in batches) == sum(LENGTHS) + (NUM_TOKENS - 1) * len(LENGTHS)
    num_out, num_in = (sum(e.count for b in batches for e in getattr(b, way)) for way in ("swaps_out", "swaps_in"))
    assert num_out == num_in > 0


def test_a_request_in_host_memory_can_be_aborted(bytes_model: Model) -> None:
    engine = bytes_model.engine(**(SMALL | SWAP))
    for i, length in enumerate(LENGTHS):
        engine.add_request(str(i), random_ids(length, seed=4), GREEDY)
    aborted: set[str] = set()
    while engine.has_unfinished:
        engine.step()
        for request_id, live in list(engine.live.items()):
            if live.first.metrics.num_swaps and not aborted:
                assert engine.scheduler.memory.swapped_on(live.first.slot) == 0
                aborted.add(request_id)
                engine.abort(request_id)
    assert aborted
    assert engine.scheduler.memory.num_used == engine.scheduler.memory.hosts[0].pool.num_used == 0


def test_compute_that_does_not_wait_is_noticed(bytes_model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    move = HostCache.move
    monkeypatch.setattr(HostCache, "move", lambda *args: [lambda: None for _ in move(*args)])
    with pytest.raises(Exception, match="comes after all of its copies"):
        run(bytes_model.engine(**(SMALL | SWAP), host_cache=Late), GREEDY)


def test_what_comes_after_an_interrupt_comes_after_its_copies(bytes_model: Model) -> None:
    """It struck when copies had begun, and before the compute that would have waited for them."""
    engine = bytes_model.engine(**(SMALL | SWAP), host_cache=Late)
    eager = Runner._eager

    def interrupted(runner: Runner, step: StepInput, copies: list[Wait]) -> Any:
        if copies:
            assert runner.host.queued  # type: ignore[union-attr]
            raise KeyboardInterrupt
        return eager(runner, step, copies)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Runner, "_eager", interrupted)
        with pytest.raises(KeyboardInterrupt):
            run(engine, GREEDY)
    assert not engine.runner.host.queued  # type: ignore[attr-defined]
    engine.step()  # returns what was aborted
    assert run(engine, GREEDY)[0] == undisturbed(bytes_model, GREEDY)


# -- configuration ---------------------------------------------------------------------------------------------


def build(bytes_model: Model, **options: Any) -> Engine:
    return build_engine(EngineConfig.from_flat(str(bytes_model.folder), block_size=16, **options))


BLOCK_BYTES = 2 * 3 * 2 * 16 * 4 * 16  # keys and values, layers, KV heads, head dimension, float32, tokens


def test_swap_space_is_host_memory_of_a_rank(bytes_model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(HostCache, "measure_block_s", lambda self: 0.125)
    engine = build(bytes_model, num_kv_blocks=8, overcommit=True, swap_space=f"{5 * BLOCK_BYTES + 1}B")
    config = engine.scheduler.config
    assert (config.num_swap_blocks, config.swap_block_s) == (5, 0.125)
    assert engine.runner.host.num_blocks == 5  # type: ignore[attr-defined]
    engine = build(bytes_model, num_kv_blocks=8)
    assert (engine.scheduler.config.num_swap_blocks, engine.runner.host) == (0, None)


@pytest.mark.parametrize(
    ("size", "reason"),
    [
        ("4B", rf"^swap_space=4 bytes; accepted: 0, or at least .* {BLOCK_BYTES} bytes"),
        (2**30, r"^swap_space of \d+ blocks takes \d+ bytes of host memory"),  # GiB, which no system has
    ],
)
def test_swap_space_that_cannot_be(bytes_model: Model, size: Any, reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        build(bytes_model, num_kv_blocks=8, overcommit=True, swap_space=size)


@pytest.mark.parametrize(
    ("policy", "caching", "is_said"), [("lars", False, True), ("lars", True, False), ("priority", False, False)]
)
def test_swap_space_without_use_is_said(
    bytes_model: Model, policy: str, caching: bool, is_said: bool, caplog: pytest.LogCaptureFixture
) -> None:
    space = f"{8 * BLOCK_BYTES}B"
    build(bytes_model, num_kv_blocks=8, policy=policy, prefix_caching=caching, swap_space=space)
    assert any("swap_space has no use" in record.getMessage() for record in caplog.records) == is_said


@pytest.mark.parametrize(
    ("value", "size"), [("4GiB", 4 << 30), (0.5, 1 << 29), (4, 4 << 30), ("4", 4 << 30), ("0", 0), (0.0, 0)]
)
def test_a_number_as_swap_space_is_gib_as_in_vllm(value: Any, size: int) -> None:
    assert EngineConfig.from_flat("m", swap_space=value).cache.swap_bytes == size


# -- CUDA ------------------------------------------------------------------------------------------------------


@pytest.mark.gpu
def test_blocks_come_back_bit_by_bit_beside_compute_on_a_gpu() -> None:
    device = torch.device("cuda")
    shape = LayerShape(8, 8, 128, torch.bfloat16)
    cache = KVCache(shape, num_layers=4, num_blocks=64, block_size=256, device=device)
    host = HostCache(cache, 32)
    assert all(pool.is_pinned() for pool in (*host.k, *host.v))
    pools = (*cache.k, *cache.v)
    for pool in pools:
        pool.normal_()
    before = [pool[: 32 * 256].clone() for pool in pools]
    weights = torch.randn(4096, 4096, device=device)
    out = host.move([(0, 0, 32 * 256)], [])
    for layer in range(4):
        weights = weights @ weights / 64
        out[layer]()
        cache.k[layer].zero_()
        cache.v[layer].zero_()
    host.move([], [(32 * 256, 0, 32 * 256)])[-1]()
    assert all(torch.equal(a, pool[32 * 256 :]) for a, pool in zip(before, pools, strict=True))


def test_a_graph_comes_after_all_copies(bytes_model: Model) -> None:
    """FlashInfer's substitute below the engine; decodes alone are replayed, also beside blocks that go out."""
    engine = bytes_model.engine(
        **(SMALL | SWAP), backend=make_flashinfer(block_size=16), has_scratch=True, host_cache=Late
    )
    maker = Repeating()
    engine.runner.capture(maker, (1, 2, 4, 8))  # type: ignore[attr-defined]
    tokens, batches, _ = run(engine, GREEDY)
    assert tokens == undisturbed(bytes_model, GREEDY)
    assert any(batch.moves and batch.num_decodes == len(batch.rows) for batch in batches)
    assert len(maker.replayed) == sum(batch.num_decodes == len(batch.rows) for batch in batches)
