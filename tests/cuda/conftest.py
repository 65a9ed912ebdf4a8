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
    """A checkpoint in float16 whose tokens are the same in float32, also before its weights were rounded, and by the
    attention of torch: no rounding of float16 decides one, by whatever kernels."""
    for seed in range(3, 60):
        folder, exact = tmp_path_factory.mktemp("cuda"), tmp_path_factory.mktemp("exact")
        shape = {"hidden_size": 128, "head_dim": 64, "num_attention_heads": 4, "num_hidden_layers": 2}
        for path, dtype in ((folder, torch.float16), (exact, torch.float32)):
            make_checkpoint(path, "llama", seed=seed, dtype=dtype, **shape)
        others = serve(exact, dtype="float32"), serve(folder, dtype="float32"), serve(folder, attention_backend="torch")
        if others == (serve(folder),) * len(others):
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


@pytest.fixture(scope="session")
def expected(model: Path) -> Served:
    """What the CPU generates."""
    return serve(model)
