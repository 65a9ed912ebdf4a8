"""Which attention backend serves an engine: what was asked for, what the machine has, what the model's heads allow."""

from __future__ import annotations

import importlib.util

import torch

from medha.attention.flashinfer_backend import DTYPES, HEAD_DIMS, FlashInferBackend
from medha.attention.interface import AttentionBackend, LayerShape
from medha.attention.torch_backend import TorchBackend
from medha.errors import ConfigError

_HOPPER = 9


def choose_backend(
    name: str, shape: LayerShape, device: torch.device, *, block_size: int
) -> tuple[AttentionBackend, str]:
    """The attention backend for an engine, and in words why it is that one.

    Args:
        name: ``torch``, ``flashinfer``, or ``auto``: FlashInfer on CUDA where it is installed and has kernels for the
            model's heads, else torch.
        shape: of this rank's layers.
        device: where they run.
        block_size: tokens of a KV block.

    Raises:
        ConfigError: FlashInfer is asked for, and there is no CUDA device or no such package.
    """
    if name == "torch":
        return TorchBackend(), "as asked for"
    missing = _missing(device)
    if missing is not None:
        if name == "flashinfer":
            raise ConfigError(f"attention_backend='flashinfer' needs {missing}; accepted here: auto, torch")
        return TorchBackend(), f"flashinfer needs {missing}"
    lacking = _lacking(shape)
    if lacking is not None:
        return TorchBackend(), f"flashinfer has no kernel for {lacking}"
    return _flashinfer(device, block_size), "as asked for" if name == "flashinfer" else "CUDA, and it is installed"


def _missing(device: torch.device) -> str | None:
    """What this machine lacks for FlashInfer."""
    if device.type != "cuda":
        return f"a CUDA device, not {device}"
    if importlib.util.find_spec("flashinfer") is None:
        return "the package flashinfer-python (pip install 'medha[cuda]')"
    return None


def _lacking(shape: LayerShape) -> str | None:
    """What of a model FlashInfer has no kernel for."""
    if shape.head_dim not in HEAD_DIMS:
        return f"heads of {shape.head_dim} (it has {', '.join(map(str, HEAD_DIMS))})"
    if shape.dtype not in DTYPES:
        names = [str(dtype).removeprefix("torch.") for dtype in (shape.dtype, *DTYPES)]
        return f"{names[0]} (it has {', '.join(names[1:])})"
    return None


def _flashinfer(device: torch.device, block_size: int) -> FlashInferBackend:
    import flashinfer  # here because it is optional, and makes a cache folder when it is imported

    facts = torch.cuda.get_device_properties(device)
    return FlashInferBackend(
        flashinfer, block_size=block_size, num_sms=facts.multi_processor_count, has_fa3=facts.major == _HOPPER
    )
