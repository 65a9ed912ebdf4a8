"""Dense attention in float64, and the rule that holds every faster path to it.

The rule is that of flash-attention: an output may be off by twice what ``F.scaled_dot_product_attention`` is off by in
the same dtype, plus two units in the last place, at least 5e-6, since the weights of merged parts carry the rounding of
a float32 log-sum-exp. Log-sum-exps are natural logarithms, -inf for an empty range, and float32 whatever the dtype of
the inputs, so their tolerance does not grow with it: ``LSE_ATOL``, and a millionth of the largest.

Legend: T query tokens of the batch, L query tokens of a segment, S keys, N query heads, K KV heads, H head dimension, P
tokens in the pool.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F

from medha.attention.interface import Segment

# The CPU kernel exponentiates 16-bit inputs less finely: 6e-5 measured.
LSE_ATOL = {torch.float32: 1e-5, torch.bfloat16: 2e-4, torch.float16: 2e-4}


def masked_attention(
    q_LNH: torch.Tensor, k_SKH: torch.Tensor, v_SKH: torch.Tensor, mask_LS: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention of each query over the keys that its mask row names.

    Returns:
        (out_LNH, lse_LN), float64; 0 and -inf where a query sees nothing.
    """
    group = q_LNH.shape[1] // k_SKH.shape[1]
    k_SNH, v_SNH = (x.double().repeat_interleave(group, dim=1) for x in (k_SKH, v_SKH))
    scores_NLS = torch.einsum("lnh,snh->nls", q_LNH.double(), k_SNH) * q_LNH.shape[-1] ** -0.5
    scores_NLS = scores_NLS.masked_fill(~mask_LS, -torch.inf)
    lse_NL = torch.logsumexp(scores_NLS, dim=-1)
    weights_NLS = torch.exp(scores_NLS - lse_NL.masked_fill(lse_NL == -torch.inf, 0.0)[..., None])
    return torch.einsum("nls,snh->lnh", weights_NLS, v_SNH), lse_NL.transpose(0, 1)


def visible(segment: Segment, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """The pool tokens of a segment in position order, int64 [S], and which of them each query sees, bool [L, S]."""
    runs = [torch.arange(first, first + count, device=device) for first, count in segment.ranges]
    index_S = torch.cat(runs) if runs else torch.empty(0, dtype=torch.int64, device=device)
    mask_LS = torch.ones(segment.q_len, len(index_S), dtype=torch.bool, device=device)
    return index_S, mask_LS.tril(len(index_S) - segment.q_len) if segment.causal else mask_LS


def assert_attention_close(
    out_LNH: torch.Tensor,
    lse_LN: torch.Tensor,
    qkv: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    mask_LS: torch.Tensor,
) -> None:
    """Hold an attention output over the keys of ``qkv`` to the rule at the top of this file."""
    q_LNH, k_SKH, v_SKH = qkv
    assert out_LNH.dtype == q_LNH.dtype
    assert out_LNH.shape == q_LNH.shape
    assert lse_LN.dtype == torch.float32
    assert lse_LN.shape == q_LNH.shape[:2]
    want_LNH, want_LN = masked_attention(q_LNH, k_SKH, v_SKH, mask_LS)
    if len(k_SKH) == 0:
        assert torch.equal(out_LNH, torch.zeros_like(q_LNH))
        assert torch.equal(lse_LN, torch.full_like(lse_LN, -torch.inf))
        return
    sdpa = F.scaled_dot_product_attention(
        *(x.transpose(0, 1)[None].contiguous() for x in qkv), attn_mask=mask_LS, enable_gqa=True
    )
    allowed = 2 * _error(sdpa[0].transpose(0, 1), want_LNH)
    allowed += max(5e-6, 2 * torch.finfo(q_LNH.dtype).eps * float(want_LNH.abs().max()))
    error = _error(out_LNH, want_LNH)
    assert error <= allowed, f"output is off by {error:.3g}, {allowed:.3g} is allowed"
    allowed = LSE_ATOL[q_LNH.dtype] + 1e-6 * float(want_LN.abs().max())
    error = _error(lse_LN, want_LN)
    assert error <= allowed, f"log-sum-exp is off by {error:.3g}, {allowed:.3g} is allowed"


def assert_segments_close(
    result: tuple[torch.Tensor, torch.Tensor],
    qkv: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    segments: Sequence[Segment],
) -> None:
    """Hold (out_TNH, lse_TN) of a ragged batch over a pool to the rule, segment by segment."""
    q_TNH, k_PKH, v_PKH = qkv
    for segment in segments:
        rows = slice(segment.q_start, segment.q_start + segment.q_len)
        index_S, mask_LS = visible(segment, q_TNH.device)
        local = (q_TNH[rows], k_PKH[index_S], v_PKH[index_S])
        assert_attention_close(result[0][rows], result[1][rows], local, mask_LS)


def _error(got: torch.Tensor, want: torch.Tensor) -> float:
    """Largest absolute difference; inf when anything is not finite, so that no NaN passes a comparison."""
    error = (got.double() - want).abs()
    return float(error.max()) if bool(torch.isfinite(error).all()) else float("inf")
