"""Which coefficients the scheduler predicts with: a measured profile, or the stated default for the machine.

What a profile is measured for is its key; one of another machine, model or layout is refused.
"""

from __future__ import annotations

import platform
from pathlib import Path

import torch

from medha.config import EngineConfig, ModelConfig
from medha.environment import cpu_name
from medha.sched.coefficients import Coefficients, ProfileKey
from medha.sched.hardware import HardwareSheet, default_coefficients


def profile_key(
    config: EngineConfig, model: ModelConfig, *, backend: str, dtype: str, device: torch.device
) -> ProfileKey:
    """What a profile of this engine would be measured for."""
    parallel = config.parallel
    machine = torch.cuda.get_device_name(device) if device.type == "cuda" else cpu_name()
    shape = (
        f"{model.architecture} {model.num_layers}x{model.hidden_size}, {model.num_heads}/{model.num_kv_heads} heads of "
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
    """Coefficients of the slowest stage of a group: of ``config.profile``, or the default.

    Raises:
        ConfigError: the profile cannot be read, or was measured for something else.
    """
    name = str(dtype).removeprefix("torch.")
    key = profile_key(config, model, backend=backend, dtype=name, device=device)
    if config.profile is not None:
        return Coefficients.load(Path(config.profile), expected=key)
    parallel = config.parallel
    return default_coefficients(
        model,
        key=key,
        sheet=HardwareSheet() if device.type == "cuda" else HardwareSheet.cpu(torch.get_num_threads()),
        num_layers=len(parallel.layers_of(0, model.num_layers)),  # the first stages take one more
        dtype_bytes=dtype.itemsize,
        tp=parallel.tp,
        spp=parallel.spp,
        kvp=parallel.kvp,
    )
