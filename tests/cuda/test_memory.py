"""The KV pool on the emulated device: what a run takes in all stays within its share of the memory, and uses it."""

import gc
from dataclasses import replace
from pathlib import Path
from unittest.mock import patch

import pytest
import torch

from medha import LLM
from medha.config import ParallelConfig
from medha.engine import build
from medha.errors import ConfigError
from tests.cuda.device import Device
from tests.cuda.serving import PROMPTS, SAMPLING, params

MEMORY = 512 << 20
pytestmark = pytest.mark.parametrize("device", [{"memory": MEMORY}], indirect=True)
OPTIONS = {"device": "cuda", "dtype": "float16", "block_size": 16, "max_num_seqs": 64, "max_batch_tokens": 512}


def test_all_of_a_run_is_within_its_share_of_the_memory_and_left_to_the_next(model: Path, device: Device) -> None:
    pools = []
    wanted = [params(**each, max_tokens=4) for each in SAMPLING * 8]
    gc.disable()  # it frees nothing that is waited for
    try:
        for share in (0.75, 0.6):
            with LLM(model, gpu_memory_utilization=share, max_model_len=4096, **OPTIONS) as llm:
                device.most_allocated = device.allocated
                llm.generate(PROMPTS * 8, wanted, use_tqdm=False)
                pools.append(llm.engine.scheduler.memory.num_blocks)
            assert 0.8 * share * MEMORY < device.most_allocated <= share * MEMORY
            assert device.allocated <= 16  # a constant, which the first of a process leaves
    finally:
        gc.enable()
    assert pools[1] < pools[0] < 64 * 4096 // 16  # as memory bounds them, not what requests may use


def test_messages_of_merges_are_counted(model: Path, device: Device) -> None:
    """As of a batch that all lies on several groups."""
    with patch.object(build, "bytes_beside_kv", side_effect=build.bytes_beside_kv) as measured:
        LLM(model, max_model_len=4096, cuda_graphs=False, **OPTIONS).close()
    (config, *rest), shape = measured.call_args.args, measured.call_args.args[1].layer_shape
    two, three = (replace(config, parallel=ParallelConfig(kvp=count)) for count in (2, 3))
    more = build.bytes_beside_kv(three, *rest) - build.bytes_beside_kv(two, *rest)
    part = torch.empty(512, shape.num_heads, shape.head_dim, dtype=shape.dtype), torch.empty(512, shape.num_heads)
    assert more == 2 * sum(one.nbytes for one in part)


def test_a_share_that_steps_alone_take_is_refused(model: Path, device: Device) -> None:
    with pytest.raises(ConfigError, match=r"gpu_memory_utilization leaves -?[0-9]+ bytes for the KV pool"):
        LLM(model, gpu_memory_utilization=0.2, **OPTIONS)
