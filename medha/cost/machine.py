"""Which coefficients the scheduler predicts with: a measured profile, or a hardware spec for the machine.

What a profile is measured for is its key; one of another machine, model or layout is refused.
"""

from __future__ import annotations

import platform
import re
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from medha.config import EngineConfig, ModelConfig
from medha.cost.coefficients import Coefficients, ProfileKey
from medha.cost.hardware import spec_of_device
from medha.cost.predictor import Predictor, slowest_of
from medha.cost.roofline import shape_name, stage_coefficients

if TYPE_CHECKING:
    import torch


def profile_key(
    config: EngineConfig, model: ModelConfig, *, backend: str, dtype: str, device: torch.device
) -> ProfileKey:
    """What a profile of this engine would be measured for."""
    import torch  # here because simulation does without

    parallel = config.parallel
    machine = torch.cuda.get_device_name(device) if device.type == "cuda" else cpu_name()
    shape = (
        f"{shape_name(model)}, {model.num_heads}/{model.num_kv_heads} heads of "
        f"{model.head_dim}, MLP {model.intermediate_size}, vocabulary {model.vocab_size}"
    )
    return ProfileKey(
        machine=machine or platform.machine(),
        model=shape,
        dtype=dtype,
        layout=f"tp{parallel.tp} spp{parallel.spp} kvp{parallel.kvp}",
        backend=backend,
        num_threads=torch.get_num_threads(),
        block_size=config.cache.block_size,
        torch_version=torch.__version__,
    )


def load_coefficients(
    config: EngineConfig, model: ModelConfig, *, backend: str, dtype: torch.dtype, device: torch.device
) -> Coefficients:
    """Coefficients of the slowest stage of a group: of ``config.profile``, or of a spec for hardware of this kind.

    Raises:
        ConfigError: the profile cannot be read, or was measured for something else.
    """
    import torch  # here because simulation does without

    name, parallel = str(dtype).removeprefix("torch."), config.parallel
    key = profile_key(config, model, backend=backend, dtype=name, device=device)
    if config.profile is not None:
        return Coefficients.load(Path(config.profile), expected=key)
    gpu = torch.cuda.get_device_name(device) if device.type == "cuda" else None
    spec = spec_of_device(gpu, torch.get_num_threads())
    stages = (
        stage_coefficients(spec, model, parallel, stage, dtype_bytes=dtype.itemsize) for stage in range(parallel.spp)
    )
    return replace(slowest_of([Predictor(stage) for stage in stages]).coefficients, key=key)


def cpu_name() -> str:
    """The processor as its maker names it."""
    try:
        names = re.findall(r"^model name\s*:\s*(.*)$", Path("/proc/cpuinfo").read_text(), re.M)
    except OSError:
        names = []
    return names[0].strip() if names else platform.processor()
