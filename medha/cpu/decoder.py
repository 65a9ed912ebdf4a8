"""The CPU's own kernels of ``decoder.cpp`` over tensors: packed products, norms, RoPE, writes to the KV pool.

Legend: T tokens, D model dimension, N heads, H head dimension.
"""

from __future__ import annotations

from collections.abc import Sequence
from ctypes import c_int64

import torch
import torch.nn.functional as F

from medha.cpu.library import function, library


class PackedLinear:
    """``F.linear`` with a weight [out, in], which is laid out once for the kernel; with a gate of the same shape
    ``silu(F.linear(x, gate)) * F.linear(x, weight)``."""

    def __init__(
        self, weight: torch.Tensor, bias: torch.Tensor | None = None, *, gate: torch.Tensor | None = None
    ) -> None:
        (num_out, self._num_in), self._dtype = weight.shape, weight.dtype
        parts = [_in_blocks(one) for one in (gate, weight) if one is not None]
        self._packed = torch.stack(parts, dim=1) if gate is not None else parts[0]
        self._bias = None if bias is None else bias.contiguous()
        self._multiply, self._is_gated = function("linear", self._dtype), gate is not None
        self._outputs, self._block = range(num_out), parts[0].size(1) // self._num_in
        self._stride = len(parts) * self._num_in * weight.itemsize

    def outputs_of(self, index: int, count: int) -> range:
        """The outputs of one of so many parts, which begins at a block; the last ones may be shorter, or empty."""
        width = -(-len(self._outputs) // (count * self._block)) * self._block
        return self._outputs[index * width : (index + 1) * width]

    def __call__(self, x: torch.Tensor, outputs: range | None = None) -> torch.Tensor:
        """Of [S, in] all outputs, or those of a part."""
        assert x.dtype == self._dtype and x.size(1) == self._num_in, "the kernel is given pointers alone"
        outputs = self._outputs if outputs is None else outputs
        x, rows, first, num_out = x.contiguous(), x.size(0), outputs.start, len(outputs)  # len(x) takes longer
        out = x.new_empty(rows, num_out)
        at_bias = None if self._bias is None else self._bias.data_ptr() + first * self._bias.itemsize
        at_weight, sizes = self._packed.data_ptr() + first * self._stride, (rows, self._num_in, num_out)
        threads = torch.get_num_threads()
        self._multiply(x.data_ptr(), at_weight, at_bias, out.data_ptr(), *sizes, self._is_gated, threads)
        return out


def rmsnorm(x: torch.Tensor, weight: torch.Tensor, eps: float, residual: torch.Tensor | None = None) -> torch.Tensor:
    """The norm over the last dimension; with a residual as :func:`fused_add_rmsnorm`, in the memory of ``x``."""
    assert residual is None or x.is_contiguous(), "it is written in place"
    x, dim = x.contiguous(), weight.size(0)
    assert x.dtype == weight.dtype and x.size(-1) == dim, "the kernel is given pointers alone"
    out = torch.empty_like(x) if residual is None else x
    sizes = x.numel() // dim, dim, torch.get_num_threads()
    pointers = (None if one is None else one.data_ptr() for one in (x, residual, weight, out))
    function("rmsnorm", x.dtype)(*pointers, *sizes, eps)
    return out


def fused_add_rmsnorm(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float) -> None:
    """Add ``x`` to the residual, and put the norm of the sum in ``x``; both are contiguous."""
    rmsnorm(x, weight, eps, residual)


def apply_rope(_: object, q_TNH: torch.Tensor, k_TNH: torch.Tensor, head_dim: int, cos_sin_TH: torch.Tensor) -> None:
    """Rotate queries and keys in place; heads of a token lie beside each other. Angles are those of each token."""
    for x in (q_TNH, k_TNH):
        sizes = *x.shape, x.stride(0), torch.get_num_threads()
        function("rotate", x.dtype)(x.data_ptr(), cos_sin_TH.data_ptr(), *sizes)


def write(pairs: Sequence[tuple[torch.Tensor, torch.Tensor]], targets: torch.Tensor, kept: torch.Tensor | None) -> None:
    """Put tokens [T, N, H] into pools [P, N, H] at ``targets``: all of them, or those of the indices ``kept``; for each
    (pool, tokens)."""
    at_kept = None if kept is None else kept.data_ptr()
    for pool, new_TNH in pairs:
        assert pool.dtype == new_TNH.dtype and pool.shape[1:] == new_TNH.shape[1:], "the kernel is given pointers alone"
        if new_TNH.stride()[1:] != (new_TNH.size(2), 1):
            new_TNH = new_TNH.contiguous()
        strides = (size * pool.itemsize for size in (*pool.stride()[:2], new_TNH.stride(0)))
        sizes = targets.size(0), new_TNH.size(1), new_TNH.size(2) * pool.itemsize, torch.get_num_threads()
        function("write_tokens")(pool.data_ptr(), new_TNH.data_ptr(), targets.data_ptr(), at_kept, *strides, *sizes)


def _in_blocks(weight: torch.Tensor) -> torch.Tensor:
    """[out, in] as [out / block, (in / together, block, together)], zeros behind the last outputs."""
    kernels, missing = library()
    assert kernels is not None, missing
    num_in, block = weight.shape[1], int(kernels.block_of_outputs())
    together = kernels.inputs_together(c_int64(num_in)) if weight.dtype == torch.bfloat16 else 1
    padded = F.pad(weight, (0, 0, 0, -len(weight) % block))
    return padded.view(-1, block, num_in // together, together).transpose(1, 2).reshape(-1, num_in * block)
