"""Attention as its definition says, in float64, and how far a backend may be from it.

What ``medha verify`` holds a machine's backend to. Log-sum-exps are natural logarithms, -inf for an empty range.

Legend: L query tokens, S keys, N query heads, K KV heads, H head dimension.
"""

from __future__ import annotations

import torch

_LSE_LIMIT = {torch.float32: 1e-5, torch.bfloat16: 2e-4, torch.float16: 2e-4}


def dense_attention(
    q_LNH: torch.Tensor, k_SKH: torch.Tensor, v_SKH: torch.Tensor, *, causal: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """A dense softmax over all scores at once.

    Args:
        q_LNH, k_SKH, v_SKH: any float dtype, one device.
        causal: query j sees the keys up to ``S - L + j``; otherwise all.

    Returns:
        (out_LNH, lse_LN), float64; 0 and -inf where there is no key.
    """
    L, N, H = q_LNH.shape
    k_SNH, v_SNH = (x.double().repeat_interleave(N // k_SKH.shape[1], dim=1) for x in (k_SKH, v_SKH))
    scores_NLS = torch.einsum("lnh,snh->nls", q_LNH.double(), k_SNH) * H**-0.5
    if causal:
        sees_LS = torch.ones(L, len(k_SKH), dtype=torch.bool, device=q_LNH.device).tril(len(k_SKH) - L)
        scores_NLS = scores_NLS.masked_fill(~sees_LS, -torch.inf)
    lse_NL = torch.logsumexp(scores_NLS, dim=-1)
    weights_NLS = torch.exp(scores_NLS - lse_NL.masked_fill(lse_NL == -torch.inf, 0.0)[..., None])
    return torch.einsum("nls,snh->lnh", weights_NLS, v_SNH), lse_NL.transpose(0, 1)


def out_limit(want: torch.Tensor, dtype: torch.dtype) -> float:
    """How far an output may be off: four units in the last place of the largest number in it, at least 2e-5."""
    return max(2e-5, 4 * torch.finfo(dtype).eps * float(want.abs().max()))


def lse_limit(want: torch.Tensor, dtype: torch.dtype) -> float:
    """How far a log-sum-exp, float32 whatever ``dtype`` the inputs have, may be off."""
    return _LSE_LIMIT[dtype] + 1e-6 * float(want.abs().max())


def largest_error(got: torch.Tensor, want: torch.Tensor) -> float:
    """Largest absolute difference; equal infinities differ by 0, anything else that is not finite by inf."""
    error = torch.where(got == want, 0.0, (got.double() - want.double()).abs())
    return float(error.max()) if bool(torch.isfinite(error).all()) else float("inf")
