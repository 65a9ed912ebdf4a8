from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.checkpoints import make_checkpoint
from tests.cuda import kernels
from tests.cuda.device import Device
from tests.cuda.serving import Served, serve
from tests.cuda.tensors import MODE


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint in float16 whose tokens are the same in float32 and in bfloat16, which rounds 8 times as much: no
    rounding decides one, by whatever kernels."""
    for seed in range(3, 60):  # the first of these is one where it was tried
        folder = tmp_path_factory.mktemp("cuda")
        shape = {"hidden_size": 128, "head_dim": 64, "num_attention_heads": 4, "num_hidden_layers": 2}
        make_checkpoint(folder, "llama", seed=seed, dtype=torch.float16, **shape)
        tokens = serve(folder, dtype="float32")
        if all(serve(folder, dtype=dtype) == tokens for dtype in ("bfloat16", "float16")):
            return folder
    raise AssertionError("rounding decides tokens with every seed")


@pytest.fixture
def device(request: pytest.FixtureRequest) -> Iterator[Device]:
    """The emulated device, with options as an indirect parameter; a fault that the test has not taken out fails it."""
    with pytest.MonkeyPatch.context() as patch:
        made = kernels.install(patch, **getattr(request, "param", {}))
        with MODE:
            yield made
        assert made.faults == []


@pytest.fixture
def expected(model: Path) -> Served:
    """What the CPU generates."""
    return serve(model)
