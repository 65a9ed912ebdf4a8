"""Dense attention in float64, and the rule that holds every faster path to it.

The rule is that of flash-attention: an output may be off by twice what ``F.scaled_dot_product_attention`` is off by in
the same dtype, plus two units in the last place, at least 5e-6, since the weights of merged parts carry the rounding of
a float32 log-sum-exp. Log-sum-exps are natural logarithms, -inf for an empty range, and float32 whatever the dtype of
the inputs, so their tolerance does not grow with it: ``LSE_ATOL``, and a millionth of the largest.

Legend: T query tokens of the batch, L query tokens of a row, S keys, N query heads, K KV heads, H head dimension, P
tokens in the pool.
"""

from collections.abc import Mapping

import torch
import torch.nn.functional as F

from medha.attention.interface import AttentionRows
from medha.verify.kernels import largest_error

# The CPU kernel exponentiates 16-bit inputs less finely: 6e-5 measured.
LSE_ATOL = {torch.float32: 1e-5, torch.bfloat16: 2e-4, torch.float16: 2e-4}

QKV = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
Result = tuple[torch.Tensor, torch.Tensor]
"""(out, lse)."""


def masked_attention(q_LNH: torch.Tensor, k_SKH: torch.Tensor, v_SKH: torch.Tensor, mask_LS: torch.Tensor) -> Result:
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


def visible(rows: AttentionRows, row: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The pool tokens of a row in position order, int64 [S], and which of them each query sees, bool [L, S]."""
    q_len, kv_len = int(rows.q_len[row]), int(rows.kv_len[row])
    pages = torch.from_numpy(rows.pages[rows.page_indptr[row] : rows.page_indptr[row + 1]]).long()
    index_S = (pages[:, None] * rows.page_size + torch.arange(rows.page_size)).flatten()[:kv_len]
    mask_LS = torch.ones(q_len, kv_len, dtype=torch.bool)
    return index_S, mask_LS.tril(kv_len - q_len) if rows.causal[row] else mask_LS


def assert_rows_close(result: Result, qkv: QKV, rows: AttentionRows, *, lse_atol: float | None = None) -> None:
    """Hold (out_TNH, lse_TN) of a ragged batch over a pool to the rule at the top of this file, row by row."""
    assert_all_close({"": result}, qkv, rows, lse_atol=lse_atol)


def assert_all_close(
    results: Mapping[str, Result], qkv: QKV, rows: AttentionRows, *, lse_atol: float | None = None
) -> None:
    """As :func:`assert_rows_close`, of several backends by name."""
    q_TNH, k_PKH, v_PKH = qkv
    for name, (out_TNH, lse_TN) in results.items():
        assert out_TNH.dtype == q_TNH.dtype and out_TNH.shape == q_TNH.shape, name
        assert lse_TN.dtype == torch.float32 and lse_TN.shape == q_TNH.shape[:2], name
    for row in range(len(rows)):
        at = slice(*rows.q_indptr[row : row + 2].tolist())
        index_S, mask_LS = (x.to(q_TNH.device) for x in visible(rows, row))
        its = {name: (out_TNH[at], lse_TN[at]) for name, (out_TNH, lse_TN) in results.items()}
        lse_least = LSE_ATOL[q_TNH.dtype] if lse_atol is None else lse_atol
        _assert_close(its, (q_TNH[at], k_PKH[index_S], v_PKH[index_S]), mask_LS, lse_least)


def _assert_close(results: Mapping[str, Result], qkv: QKV, mask: torch.Tensor, lse_atol: float) -> None:
    if mask.shape[1] == 0:
        for name, (out, lse) in results.items():
            assert not out.any() and bool((lse == -torch.inf).all()), name
        return
    want_LNH, want_LN = masked_attention(*qkv, mask)
    heads_first = [x.transpose(0, 1)[None].contiguous() for x in qkv]
    sdpa = F.scaled_dot_product_attention(*heads_first, attn_mask=mask, enable_gqa=True)[0].transpose(0, 1)
    least = max(5e-6, 2 * torch.finfo(qkv[0].dtype).eps * float(want_LNH.abs().max()))
    out_allowed = 2 * largest_error(sdpa, want_LNH) + least
    lse_allowed = lse_atol + 1e-6 * float(want_LN.abs().max())
    for name, (out, lse) in results.items():
        error = largest_error(out, want_LNH)
        assert error <= out_allowed, f"{name} output is off by {error:.3g}, {out_allowed:.3g} is allowed"
        error = largest_error(lse, want_LN)
        assert error <= lse_allowed, f"{name} log-sum-exp is off by {error:.3g}, {lse_allowed:.3g} is allowed"
