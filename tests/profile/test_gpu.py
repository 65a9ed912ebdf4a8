"""``medha profile`` on a GPU; on the emulated one see ``tests/cuda``."""

import pytest

from medha.config import EngineConfig
from medha.cost.predictor import Predictor, Work
from medha.profile.calibrate import Effort, measure
from tests.serving import Model


@pytest.mark.gpu
@pytest.mark.parametrize("attention_backend", ["flashinfer", "torch"])
def test_what_grows_with_the_keys_is_told_apart(needle: Model, attention_backend: str) -> None:
    if attention_backend == "flashinfer":
        pytest.importorskip("flashinfer")
    effort = Effort(chunks=(64, 256), batches=(1, 16), lengths=(1024, 16384, 131072), total_s=5.0)
    options = {"num_kv_blocks": 600, "attention_backend": attention_backend}
    config = EngineConfig.from_flat(str(needle.folder), device="cuda", dtype="bfloat16", **options)
    found = measure(config, effort, max_kv=131072)
    assert found is not None
    predictor = Predictor(found[0])
    chunks = [predictor.predict([Work(256, kv, False)]) for kv in (0, 131072)]
    decodes = [predictor.predict([Work(1, kv, True)] * 16) for kv in (1024, 131072)]
    assert chunks[1] > 1.2 * chunks[0] and decodes[1] > decodes[0]
