"""The dense attention of ``medha verify`` against torch's and against the one that the other tests are held to."""

import pytest
import torch
import torch.nn.functional as F

from medha.verify.kernels import dense_attention, largest_error, lse_limit, out_limit
from tests.attention.reference import masked_attention


def random_qkv(L: int, S: int, N: int = 8, K: int = 2, H: int = 64) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(L * 1000 + S)
    return tuple(torch.randn(T, heads, H, generator=generator) for T, heads in ((L, N), (S, K), (S, K)))


@pytest.mark.parametrize(("L", "S", "causal"), [(1, 1, True), (1, 300, False), (7, 300, True), (40, 40, True)])
def test_against_torch_and_the_tests_own(L: int, S: int, causal: bool) -> None:
    q, k, v = random_qkv(L, S)
    out, lse = dense_attention(q, k, v, causal=causal)
    mask = torch.ones(L, S, dtype=torch.bool)
    mask = mask.tril(S - L) if causal else mask
    theirs = F.scaled_dot_product_attention(
        *(x.double().transpose(0, 1)[None] for x in (q, k, v)), attn_mask=mask, enable_gqa=True
    )
    torch.testing.assert_close(out, theirs[0].transpose(0, 1), rtol=0, atol=1e-12)
    torch.testing.assert_close((out, lse), masked_attention(q, k, v, mask), rtol=0, atol=1e-12)


def test_no_keys() -> None:
    out, lse = dense_attention(*random_qkv(3, 0), causal=False)
    assert torch.equal(out, torch.zeros(3, 8, 64, dtype=torch.float64))
    assert torch.equal(lse, torch.full((3, 8), -torch.inf, dtype=torch.float64))


def test_largest_error() -> None:
    zeros = torch.zeros(3)
    assert largest_error(zeros, zeros) == 0.0
    assert largest_error(zeros.fill_(-torch.inf), zeros) == 0.0
    for bad in (torch.nan, torch.inf, -torch.inf):
        assert largest_error(torch.tensor([bad, 0.0]), torch.zeros(2)) == float("inf")


def test_limits_grow_with_what_is_compared() -> None:
    assert out_limit(torch.tensor([0.1]), torch.float32) == 2e-5
    assert out_limit(torch.tensor([-2.0]), torch.bfloat16) == 4 * 2**-7 * 2.0
    assert lse_limit(torch.tensor([10.0]), torch.float32) == pytest.approx(2e-5)
