"""Exact merge of attention over parts of a KV range by log-sum-exp (online softmax).

Source: the paper's KV parallelism, arXiv 2409.17264 v5 section 3.3 ("combined using online-softmax"). Every
log-sum-exp here is a natural logarithm in float32, -inf for an empty part.
"""

from __future__ import annotations

from collections.abc import Sequence
from ctypes import c_void_p

import torch

from medha.cpu.library import function

Partial = tuple[torch.Tensor, torch.Tensor]
"""Output and log-sum-exp of attention over a part of the keys."""


def merge_partials(partials: Sequence[Partial], *, by_kernel: bool = False) -> Partial:
    """Attention over the union of disjoint KV parts, from attention over each.

    Sums run in float32 in the order given, so equal inputs in equal order give equal bits.

    Args:
        partials: (out [..., H] any float dtype, lse [...] float32) of each part, at least one, shapes equal.
        by_kernel: by one of the CPU's own, which is there and takes contiguous parts.

    Returns:
        (out, lse) of the union; out in the dtype of the first part. Rows empty in every part are 0 and -inf.
    """
    if len(partials) == 1:
        return partials[0]
    if by_kernel:
        assert all(x.is_contiguous() for part in partials for x in part), "the kernel is given pointers alone"
        out, lse = torch.empty_like(partials[0][0]), torch.empty_like(partials[0][1])
        parts = [(c_void_p * len(partials))(*[x.data_ptr() for x in some]) for some in zip(*partials, strict=True)]
        sizes = len(partials), lse.numel(), out.size(-1)
        function("merge", out.dtype)(*parts, *sizes, out.data_ptr(), lse.data_ptr(), torch.get_num_threads())
        return out, lse
    lse_parts = torch.stack([lse for _, lse in partials])
    lse = torch.logsumexp(lse_parts, dim=0)
    # An empty part has weight 0; where all are empty, lse is -inf and -inf - -inf would be nan.
    weights = torch.exp(lse_parts - lse.masked_fill(lse == -torch.inf, 0.0)).unsqueeze(-1)
    out = partials[0][0].float() * weights[0]
    for (part, _), weight in zip(partials[1:], weights[1:], strict=True):
        out.addcmul_(part.float(), weight)
    return out.to(partials[0][0].dtype), lse
