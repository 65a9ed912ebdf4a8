"""Attention on the CPU by a kernel of our own, ``cpu_kernel.cpp``, which the machine's compiler builds at first start.

torch's kernel for the CPU serves one row a call, reads neither pages nor a past and a chunk's own keys together, and
waits for memory in decodes over a long context. This one takes a step's rows at once, pages as they lie. Without a
compiler :mod:`medha.attention.torch_backend` serves in its place; both are held to the same reference.

The library is kept under ``$XDG_CACHE_HOME/medha`` (``~/.cache/medha``), named by its source, the compiler and the CPU.
It is put there whole by a rename, so that processes which build it at once do not meet; what torch has for this
(``torch.utils.cpp_extension.load``) waits without end for the lock of a build that was killed.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from medha.attention.interface import AttentionBackend, AttentionRows, LayerShape

_SOURCE = Path(__file__).with_name("cpu_kernel.cpp")
_FLAGS = ("-O3", "-march=native", "-std=c++17", "-shared", "-fPIC", "-fopenmp")
_BUILD_S = 120.0
_WIDEST = 16  # floats of the widest vector that there is


@dataclass(frozen=True, slots=True)
class _Plan:
    """The rows of a step."""

    arrays: list[npt.NDArray[Any]]  # what the arguments point to
    arguments: tuple[Any, ...]


class CpuBackend(AttentionBackend):
    """Partial attention through the compiled kernel."""

    name = "cpu"
    device_type = "cpu"
    reads_pages = False

    @classmethod
    def needs(cls, device: torch.device) -> str | None:
        """See :class:`~medha.attention.interface.AttentionBackend`."""
        return f"a CPU, not {device.type}" if device.type != "cpu" else _library()[1]

    @classmethod
    def lacks(cls, shape: LayerShape) -> str | None:
        """See :class:`~medha.attention.interface.AttentionBackend`."""
        if shape.head_dim % _WIDEST:
            return f"heads of {shape.head_dim}, no multiple of {_WIDEST}"
        if shape.dtype.itemsize == 2 and _has_16_bit_products():
            return f"{str(shape.dtype).removeprefix('torch.')} as fast as torch's on a CPU with products of 16 bits"
        return None

    def plan(self, rows: AttentionRows) -> _Plan:
        """Copies of the rows' arrays as the kernel takes them."""
        tables = (rows.q_indptr, rows.kv_len, rows.causal, rows.pages, rows.page_indptr)
        kinds = (np.int64, np.int64, np.bool_, np.int32, np.int64)
        arrays: list[npt.NDArray[Any]] = [np.array(table, kind) for table, kind in zip(tables, kinds, strict=True)]
        arguments = (ctypes.c_int64(len(rows)), *map(_pointer, arrays), ctypes.c_int64(rows.page_size))
        return _Plan(arrays, arguments)

    def run(
        self, q_TNH: torch.Tensor, k_PKH: torch.Tensor, v_PKH: torch.Tensor, plan: _Plan
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See :meth:`medha.attention.interface.AttentionBackend.run`."""
        library, missing = _library()
        assert library is not None, missing
        assert k_PKH.stride() == v_PKH.stride() and k_PKH.stride(2) == 1, "keys and values lie alike"
        q_TNH = q_TNH.contiguous()
        out_TNH = torch.empty_like(q_TNH)
        lse_TN = q_TNH.new_empty(q_TNH.shape[:2], dtype=torch.float32)
        attend = getattr(library, f"attend_{str(q_TNH.dtype).removeprefix('torch.')}")
        attend(
            *map(_pointer, (q_TNH, k_PKH, v_PKH)),
            *map(ctypes.c_int64, k_PKH.stride()[:2]),
            *map(_pointer, (out_TNH, lse_TN)),
            *map(ctypes.c_int64, (q_TNH.shape[1], *k_PKH.shape[1:])),
            *plan.arguments,
            ctypes.c_int(torch.get_num_threads()),
        )
        return out_TNH, lse_TN


def _pointer(x: torch.Tensor | npt.NDArray[Any]) -> ctypes.c_void_p:
    return ctypes.c_void_p(x.data_ptr() if isinstance(x, torch.Tensor) else x.ctypes.data)


def _has_16_bit_products() -> bool:
    return bool(torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported())


@cache
def _library() -> tuple[ctypes.CDLL | None, str | None]:
    """The kernel, compiled now if it has not been; or in words what is missing for that."""
    compiler = next(
        filter(None, map(shutil.which, filter(None, (os.environ.get("CXX"), "c++", "g++", "clang++")))), None
    )
    if compiler is None:
        return None, "a C++ compiler (c++, g++, clang++ or $CXX)"
    kept = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "medha"
    try:
        path = kept / f"cpu_kernel-{_name_of_build(compiler)}.so"
        if not path.exists():
            kept.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(dir=kept) as scratch:
                made = Path(scratch) / path.name
                command = [compiler, *_FLAGS, str(_SOURCE), "-o", str(made)]
                subprocess.run(command, check=True, capture_output=True, text=True, timeout=_BUILD_S)
                made.replace(path)
        return ctypes.CDLL(str(path)), None
    except subprocess.CalledProcessError as error:
        said = next((line for line in error.stderr.splitlines() if "error" in line), error.stderr.strip())
        return None, f"a C++ compiler that takes cpu_kernel.cpp ({compiler}: {said[:200]})"
    except (OSError, RuntimeError, subprocess.TimeoutExpired) as error:
        return None, f"its kernel, which {compiler} could not build in {kept} ({error})"


def _name_of_build(compiler: str) -> str:
    version = subprocess.run(
        [compiler, "--version"], check=True, capture_output=True, text=True, timeout=_BUILD_S
    ).stdout
    facts = Path("/proc/cpuinfo")
    cpu = next((line for line in facts.open() if line.startswith("flags")), "") if facts.exists() else ""
    parts = (_SOURCE.read_text(), *_FLAGS, version, platform.machine(), platform.processor(), cpu)
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:20]
