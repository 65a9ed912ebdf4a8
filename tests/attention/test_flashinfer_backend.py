"""FlashInferBackend over kernels in torch: launches, plans, the choice of it; on a GPU, over the package's own.

That its results are attention is shown with the other backend's.
"""

import gc
import importlib.util
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.distributed import HashStore

from medha.attention.flashinfer_backend import FlashInferBackend, FlashInferPlan, workspace_bytes
from medha.attention.interface import AttentionRows, LayerShape
from medha.attention.staging import to_device
from medha.attention.torch_backend import TorchBackend
from medha.errors import ConfigError
from medha.verify.kernels import rows_over
from medha.worker.shard import choose_backend
from tests.attention.reference import QKV, assert_rows_close
from tests.attention.test_torch_backend import CPU, Model, Shape, build, make_flashinfer, run
from tests.cuda.kernels import import_flashinfer

MODEL = Model(4, 2, 64)


def in_blocks(
    lengths: list[int], block_size: int, *, q_lens: list[int] | None = None, model: Model = MODEL
) -> tuple[QKV, AttentionRows]:
    """Causal rows of so many keys, each in two runs of blocks."""
    shapes = [
        Shape(q_len, (length // 2 // block_size * block_size, length - length // 2 // block_size * block_size), True)
        for length, q_len in zip(lengths, q_lens or [1] * len(lengths), strict=True)
    ]
    return build(model, shapes, page_size=block_size)


# -- plans and wrappers ----------------------------------------------------------------------------------------


def test_plans_of_one_step_do_not_disturb_each_other_and_the_next_step_takes_their_wrappers() -> None:
    """As with KV parallelism: a plan for the rows of one group, and one for those of several."""
    parts = [in_blocks(lengths, 256) for lengths in ([700, 300], [90, 512])]
    backend = make_flashinfer()
    for _ in range(3):
        plans = [backend.plan(rows) for _, rows in parts]
        for _ in range(2):  # layers, in which the plans run in turn
            for plan, (qkv, rows) in zip(plans, parts, strict=True):
                assert_rows_close(backend.run(*qkv, plan), qkv, rows)
        del plans, plan
        gc.collect()
    assert [w._plan_info.num_plans for w in backend.api.made] == [[3], [3]]


def test_pages_that_were_sent_with_the_rest_of_the_step_are_read_where_they_lie() -> None:
    qkv, rows = in_blocks([700, 300], 256)
    _, rows.device_pages = to_device([rows.kv_len, rows.pages], CPU, into=torch.empty(99, dtype=torch.uint8))
    backend = make_flashinfer()
    assert_rows_close(run(qkv, rows, backend), qkv, rows)
    assert backend.api.made[0]._paged_kv_indices_buf.data_ptr() == rows.device_pages.data_ptr()


def test_a_page_table_of_more_than_32_bits_is_refused() -> None:
    _, rows = in_blocks([700], 256)
    rows.page_indptr = rows.page_indptr << 32
    with pytest.raises(OverflowError, match=f"page table of {3 << 32} pages needs 64 bits"):
        FlashInferPlan(rows)


@pytest.mark.parametrize(
    ("chunks", "has_fa3", "kernels"),
    [
        ([(300, 600), (300, 600)], False, ["fa2"]),
        ([(300, 600)], True, ["fa3"]),  # 4 heads x 3 tiles, 7 multiprocessors
        ([(128, 600)], True, ["fa2"]),  # fill not two thirds of them
        ([(140, 600)], True, ["fa2"]),  # two waves, of which the second is short
        ([(1, 300), (1, 300), (128, 600), (129, 600)], True, ["decode", "fa3"]),
        ([(1, 300), (90, 4000), (300, 600)], True, ["decode", "fa2", "fa3"]),
    ],
)
def test_chunks_run_in_fa3_if_it_ends_first(chunks: list[tuple[int, int]], has_fa3: bool, kernels: list[str]) -> None:
    q_lens, lengths = ([*part] for part in zip(*chunks, strict=True))
    qkv, rows = in_blocks(lengths, 64, q_lens=q_lens)
    backend = make_flashinfer(num_sms=7, has_fa3=has_fa3)
    assert_rows_close(run(qkv, rows, backend), qkv, rows)
    decode = backend.api.BatchDecodeWithPagedKVCacheWrapper
    assert ["decode" if isinstance(w, decode) else w._backend for w in backend.api.made] == kernels


def test_workspace_covers_what_flashinfer_cuts_out_of_it() -> None:
    """Its formula: query heads x tiles x rows of a tile x (H + 1) x 4 bytes, as many as a row is cut into at most."""
    shape = LayerShape(32, 8, 128, torch.bfloat16)
    assert 0 <= workspace_bytes(shape, num_sms=132) - 32 * 54 * 128 * 129 * 4 <= 1 << 20
    wide = LayerShape(64, 8, 128, torch.bfloat16)
    assert workspace_bytes(wide, num_sms=132) > 128 << 20  # the usual 128 MiB fail there
    # In a graph each row has a tile of 16 of its own, whatever the batch.
    assert workspace_bytes(shape, num_sms=132, num_decodes=512) >= 32 * (512 + 511 * 4 // 16) * 16 * 129 * 4


def test_a_larger_layer_gets_a_larger_workspace_and_new_wrappers() -> None:
    backend = make_flashinfer(num_sms=132)
    for model in (Model(4, 2, 64), Model(8, 1, 128), Model(4, 2, 64)):
        qkv, rows = in_blocks([700], 256, model=model)
        assert_rows_close(run(qkv, rows, backend), qkv, rows)
    assert len(backend.api.made) == 2


# -- choice ----------------------------------------------------------------------------------------------------

SHAPE = LayerShape(8, 2, 128, torch.bfloat16)
CUDA = torch.device("cuda", 0)


def choose_on(
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    shape: LayerShape,
    *,
    installed: bool = True,
    wrong: str | None = None,
    capability: tuple[int, int] = (9, 0),
) -> Any:
    """The choice as a CUDA machine would make it."""
    import_flashinfer()  # which looks for other packages too
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object() if installed else None)
    monkeypatch.setattr(FlashInferBackend, "build", lambda device, block_size: make_flashinfer(block_size=block_size))
    monkeypatch.setattr(FlashInferBackend, "build_kernels", lambda self, shape, device: wrong)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    return choose_backend(name, shape, CUDA, block_size=128)


HEADS_OF_80, FLOAT32 = LayerShape(8, 2, 80, torch.bfloat16), LayerShape(8, 2, 64, torch.float32)
NO_HEADS_OF_80 = "flashinfer has no kernel for heads of 80 (it has 64, 128, 256)"
NO_FLOAT32 = "flashinfer has no kernel for float32 (it has float16, bfloat16)"
NOT_INSTALLED = "flashinfer needs the package flashinfer-python (pip install 'medha[cuda]')"
NO_NVCC = "flashinfer's kernels could not be built: Could not find nvcc"
TOO_OLD = "flashinfer needs a GPU of compute capability 8.0 or later"


@pytest.mark.parametrize(
    ("name", "shape", "machine", "want"),
    [
        ("auto", SHAPE, {}, ("flashinfer", "what it needs is here")),
        ("auto", SHAPE, {"installed": False}, ("torch", NOT_INSTALLED)),
        ("torch", SHAPE, {}, ("torch", "as asked for")),
        ("auto", HEADS_OF_80, {}, ("torch", NO_HEADS_OF_80)),
        ("flashinfer", HEADS_OF_80, {}, ("torch", NO_HEADS_OF_80)),
        ("flashinfer", FLOAT32, {}, ("torch", NO_FLOAT32)),
        ("auto", SHAPE, {"wrong": "Could not find nvcc"}, ("torch", NO_NVCC)),
        ("flashinfer", SHAPE, {"wrong": "Could not find nvcc"}, ("torch", NO_NVCC)),
        ("auto", SHAPE, {"capability": (7, 0)}, ("torch", TOO_OLD)),
    ],
)
def test_the_choice_on_cuda(
    name: str, shape: LayerShape, machine: dict[str, Any], want: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    backend, why = choose_on(monkeypatch, name, shape, **machine)
    assert (backend.name, why) == want
    assert backend.name == "torch" or backend.block_size == 128


@pytest.mark.parametrize("broken", ["FA2", "FA3"])
def test_all_ranks_do_without_what_one_cannot_build(broken: str, monkeypatch: pytest.MonkeyPatch) -> None:
    store = HashStore()

    def build_kernels(self: FlashInferBackend, shape: LayerShape, device: torch.device) -> str | None:
        wrong = "Could not find nvcc" if device.index == 1 else None
        self.no_fa3 = wrong if broken == "FA3" else None
        return wrong if broken == "FA2" else None

    def choose(rank: int) -> Any:
        launch, monitor = SimpleNamespace(rank=rank, world_size=2), SimpleNamespace(has_failure=False)
        job = SimpleNamespace(store=store, launch=launch, monitor=monitor)
        ranks: Any = SimpleNamespace(rank=rank, job=job, config=SimpleNamespace(world_size=2))
        return choose_backend("auto", SHAPE, torch.device("cuda", rank), block_size=128, ranks=ranks)

    choose_on(monkeypatch, "auto", SHAPE)
    monkeypatch.setattr(FlashInferBackend, "build_kernels", build_kernels)
    with ThreadPoolExecutor(2) as threads:
        found = list(threads.map(choose, range(2)))
    for backend, why in found:
        if broken == "FA2":
            assert (backend.name, why) == ("torch", f"{NO_NVCC} (rank 1)")
        else:
            assert (backend.name, backend.no_fa3) == ("flashinfer", "Could not find nvcc (rank 1)")


def test_what_was_chosen_is_told() -> None:
    backend = make_flashinfer(num_sms=132)
    assert backend.describe(LayerShape(32, 8, 128, torch.bfloat16)) == (
        "FA2 with a long context in some 33 parts a KV head, for 132 multiprocessors; no FA3: no Hopper GPU"
    )
    backend = make_flashinfer(num_sms=132, has_fa3=True)
    assert backend.describe(LayerShape(32, 8, 128, torch.bfloat16)).endswith("FA3 for chunks of 257 tokens on")


def test_flashinfer_asked_for_where_it_cannot_be(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match=r"attention_backend='flashinfer' needs a CUDA device, not cpu; accepted"):
        choose_backend("flashinfer", SHAPE, CPU, block_size=256)
    with pytest.raises(ConfigError, match=r"needs the package flashinfer-python .*; accepted here: auto, torch"):
        choose_on(monkeypatch, "flashinfer", SHAPE, installed=False)


# -- the package's kernels -------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize(("num_heads", "num_kv_heads"), [(8, 2), (32, 8), (4, 4), (8, 1)])
def test_flashinfer_on_a_gpu(num_heads: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype) -> None:
    pytest.importorskip("flashinfer")
    device = torch.device("cuda", 0)
    shape = LayerShape(num_heads, num_kv_heads, head_dim, dtype)
    backend, why = choose_backend("flashinfer", shape, device, block_size=256)
    assert isinstance(backend, FlashInferBackend), why
    model = Model(num_heads, num_kv_heads, head_dim, dtype, head_major=False)
    batch = [Shape(1, runs, True) for runs in ((1,), (63,), (64,), (65,), (300,), (768, 512, 2))]
    batch += [Shape(40, (512, 256, 30), True), Shape(4096, (4096,), True)]
    batch += [Shape(5, (), False), Shape(9, (256, 80), False)]
    for seed in range(3):
        qkv, rows = build(model, batch, page_size=256, seed=seed, device=device)
        plan = backend.plan(rows)
        for _ in range(2):
            # its row sums are of probabilities rounded to the dtype
            assert_rows_close(backend.run(*qkv, plan), qkv, rows, lse_atol=torch.finfo(dtype).eps / 2)
        assert_rows_close(run(qkv, rows, TorchBackend()), qkv, rows)


@pytest.mark.parametrize(("num_sms", "heads"), [(132, 32), (114, 64), (78, 40)])
def test_fa3_is_tried_with_a_chunk_that_runs_in_it(num_sms: int, heads: int) -> None:
    backend = FlashInferBackend(None, block_size=16, num_sms=num_sms, has_fa3=True)
    least = backend._fa3_tokens(LayerShape(heads, 8, 128, torch.bfloat16))
    for q_len, kernel in ((least, "fa3"), (least - 1, "fa2")):
        assert backend.kernels_of(rows_over([(q_len, [(0, q_len)], True)], 16), heads) == [kernel]
