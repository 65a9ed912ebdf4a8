"""Attention on the CPU by a kernel of our own, ``medha/cpu/attention.cpp``.

torch's kernel for the CPU serves one row a call, reads neither pages nor a past and a chunk's own keys together, and
waits for memory in decodes over a long context. This one takes a step's rows at once, pages as they lie. Without a
compiler :mod:`medha.attention.torch_backend` serves in its place; both are held to the same reference.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from medha.attention.interface import AttentionBackend, AttentionRows, LayerShape
from medha.attention.merge import Partial
from medha.cpu.library import function, library

_WIDEST = 16  # floats of the widest vector that there is


_Plan = tuple[tuple[int, ...], list[npt.NDArray[Any]]]
"""The kernel's arguments for the rows of a step, and the arrays to which they point."""


class CpuBackend(AttentionBackend):
    """Partial attention through the compiled kernel."""

    name = "cpu"
    device_type = "cpu"

    @classmethod
    def needs(cls, device: torch.device) -> str | None:
        """See :class:`~medha.attention.interface.AttentionBackend`."""
        return f"a CPU, not {device.type}" if device.type != "cpu" else library()[1]

    @classmethod
    def lacks(cls, shape: LayerShape) -> str | None:
        """See :class:`~medha.attention.interface.AttentionBackend`."""
        return f"heads of {shape.head_dim}, no multiple of {_WIDEST}" if shape.head_dim % _WIDEST else None

    def plan(self, rows: AttentionRows) -> _Plan:
        """Copies of the rows' arrays as the kernel takes them."""
        tables = (rows.q_indptr, rows.kv_len, rows.causal, rows.pages, rows.page_indptr)
        kinds = (np.int64, np.int64, np.bool_, np.int32, np.int64)
        arrays: list[npt.NDArray[Any]] = [np.array(table, kind) for table, kind in zip(tables, kinds, strict=True)]
        return (len(rows), *(array.ctypes.data for array in arrays), rows.page_size), arrays

    def run(self, q_TNH: torch.Tensor, k_PKH: torch.Tensor, v_PKH: torch.Tensor, plan: _Plan) -> Partial:
        """See :meth:`medha.attention.interface.AttentionBackend.run`."""
        assert k_PKH.stride() == v_PKH.stride() and k_PKH.stride(2) == 1, "keys and values lie alike"
        if q_TNH.stride()[1:] != (q_TNH.shape[2], 1):
            q_TNH = q_TNH.contiguous()
        out_TNH = q_TNH.new_empty(q_TNH.shape)
        lse_TN = q_TNH.new_empty(q_TNH.shape[:2], dtype=torch.float32)
        function("attend", q_TNH.dtype)(
            *(q_TNH.data_ptr(), k_PKH.data_ptr(), v_PKH.data_ptr(), q_TNH.stride(0), *k_PKH.stride()[:2]),
            *(out_TNH.data_ptr(), lse_TN.data_ptr(), q_TNH.shape[1], *k_PKH.shape[1:]),
            *plan[0],
            torch.get_num_threads(),
        )
        return out_TNH, lse_TN
