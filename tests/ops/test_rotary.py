"""rotary_embedding: layouts of models, norms, positions, strides, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import torchweld
from torchweld import functional, numerics
from torchweld.functional import rotary_embedding, rotary_embedding_qk

B, H, S, D = 2, 4, 6, 16
X = torch.randn(B, H, S, D, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
HALF = torch.outer(torch.arange(S).double(), 10000.0 ** (-torch.arange(0, D, 2) / D))


def _halves(x: torch.Tensor, angles: torch.Tensor) -> torch.Tensor:
    """Llama's code."""
    both, (one, other) = torch.cat((angles, angles), -1), x.chunk(2, -1)
    return x * both.cos() + torch.cat((-other, one), -1) * both.sin()


def _pairs(x: torch.Tensor, angles: torch.Tensor) -> torch.Tensor:
    """Complex numbers of neighbours."""
    turned = torch.view_as_complex(x.unflatten(-1, (-1, 2)).contiguous()) * torch.polar(
        torch.ones_like(angles), angles
    )
    return torch.view_as_real(turned).flatten(-2)


pytestmark = pytest.mark.usefixtures("on_cpu")


# --- Layouts --------------------------------------------------------------------------------------


def test_halves_with_either_table() -> None:
    full = torch.cat((HALF, HALF), -1)
    for angles in (HALF, full, full.expand(B, S, D), full.expand(B, 1, S, D)):
        torch.testing.assert_close(
            rotary_embedding(X, angles.cos(), angles.sin()), _halves(X, HALF)
        )


def test_pairs_and_complex_angles() -> None:
    expected = _pairs(X, HALF)
    twice = HALF.repeat_interleave(2, -1)
    for angles in (HALF, twice):
        found = rotary_embedding(X, angles.cos(), angles.sin(), interleaved=True)
        torch.testing.assert_close(found, expected)
    complex_angles = torch.polar(torch.ones_like(HALF), HALF)
    found = rotary_embedding(X, complex_angles, None, interleaved=True)
    torch.testing.assert_close(found, expected)


def test_partial_and_proportional() -> None:
    some = HALF[:, :3]
    for cos, sin, how in (
        (some.cos(), some.sin(), {}),
        (*(torch.cat((t, t), -1) for t in (some.cos(), some.sin())), {"rotary_dim": 6}),
    ):
        found = rotary_embedding(X, cos, sin, **how)
        torch.testing.assert_close(found[..., :6], _halves(X[..., :6], some))
        assert torch.equal(found[..., 6:], X[..., 6:])
    padded = torch.nn.functional.pad(some, (0, D // 2 - 3))
    found = rotary_embedding(X, some.cos(), some.sin(), proportional=True)
    torch.testing.assert_close(found, _halves(X, padded))


def test_tokens_before_heads_without_copies() -> None:
    """A transposed view gives a result with its strides, and seq_dim=-3 the same numbers."""
    expected = rotary_embedding(X, HALF.cos(), HALF.sin())
    plain = X.transpose(1, 2).contiguous()
    view = plain.transpose(1, 2)
    found = rotary_embedding(view, HALF.cos(), HALF.sin())
    assert found.stride() == view.stride()
    assert torch.equal(found, expected)
    assert torch.equal(
        rotary_embedding(plain, HALF.cos(), HALF.sin(), seq_dim=-3), expected.transpose(1, 2)
    )
    packed = torch.randn(B, S, 3, H, D, dtype=torch.float64)
    q, k = rotary_embedding_qk(packed[:, :, 0], packed[:, :, 1], HALF.cos(), HALF.sin(), seq_dim=-3)
    for result, at in ((q, 0), (k, 1)):
        torch.testing.assert_close(
            result.transpose(1, 2), _halves(packed[:, :, at].transpose(1, 2), HALF)
        )


def test_positions_of_packed_documents() -> None:
    """Documents of 4 and 2 tokens, and another row that begins in the middle."""
    positions = torch.tensor([[0, 1, 2, 3, 0, 1], [3, 4, 5, 0, 0, 2]])
    for given_positions in (positions, positions.int()):
        found = rotary_embedding(X, HALF.cos(), HALF.sin(), given_positions)
        torch.testing.assert_close(found, _halves(X, HALF[positions][:, None]))
    flat = X[0].transpose(0, 1)  # [tokens, heads, width]
    found = rotary_embedding(flat, HALF.cos(), HALF.sin(), positions[0], seq_dim=-3)
    torch.testing.assert_close(found, _halves(X[0], HALF[positions[0]]).transpose(0, 1))


@pytest.mark.parametrize("key_heads", [4, 2])
@pytest.mark.parametrize("how", [{}, {"interleaved": True}, {"rotary_dim": 8}], ids=str)
def test_a_packed_projection_in_place(key_heads: int, how: dict[str, Any]) -> None:
    """Queries and keys turn where they are, the gradient too; values are left."""
    every = 4 + 2 * key_heads
    angles = HALF[:, : how.get("rotary_dim", D) // 2]
    tables = (angles.cos() * 1.5, angles.sin() * 1.5)  # as YaRN has: the transpose is no inverse
    layer = torch.randn(7, every * D, dtype=torch.float64, requires_grad=True)
    x = torch.randn(B, S, 7, dtype=torch.float64)
    results = []
    for in_place in (False, True):
        qkv = x @ layer
        pointer = qkv.data_ptr()
        if in_place:
            y = functional.rotary_embedding_packed_(
                qkv, *tables, heads=4, key_heads=key_heads, **how
            )
            assert y.data_ptr() == pointer
        else:
            q, k, v = qkv.unflatten(-1, (every, D)).split([4, key_heads, key_heads], -2)
            q, k = rotary_embedding_qk(q, k, *tables, seq_dim=-3, **how)
            y = torch.cat((q, k, v), -2).flatten(-2)
        grad = torch.autograd.grad(y.sin().sum(), layer)
        results.append((y, *grad))
    torch.testing.assert_close(*results)
    run = lambda t: functional.rotary_embedding_packed_(  # noqa: E731
        t * 1, *tables, heads=4, key_heads=key_heads, **how
    )
    small = torch.randn(S, every * D, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(run, small, fast_mode=True)
    assert torch.autograd.gradgradcheck(run, small, fast_mode=True)


def test_a_packed_projection_that_something_needs_is_refused() -> None:
    """A leaf, and a result that something else has saved: autograd says so."""
    qkv, tables = torch.randn(S, 6 * D, dtype=torch.float64), (HALF.cos(), HALF.sin())
    packed, leaf = functional.rotary_embedding_packed_, qkv.requires_grad_()
    with pytest.raises(torchweld.ArgumentError, match="qkv is a leaf that requires grad"):
        packed(leaf, *tables, heads=2)
    saved = (leaf * 1).sin()
    y = saved.sin()
    packed(saved, *tables, heads=2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


def test_documents_by_their_offsets() -> None:
    """Positions count from 0 in each; behind the last document again."""
    flat = X[0].transpose(0, 1)  # [tokens, heads, width]
    positions = torch.tensor([0, 1, 2, 0, 1, 0])
    for dtype in (torch.int32, torch.int64):
        offsets = torch.tensor([0, 3, 3, 5], dtype=dtype)
        found = rotary_embedding(flat, HALF.cos(), HALF.sin(), cu_seqlens=offsets, seq_dim=-3)
        torch.testing.assert_close(found, _halves(X[0], HALF[positions]).transpose(0, 1))
        q, _ = rotary_embedding_qk(X, X, HALF.cos(), HALF.sin(), cu_seqlens=offsets)
        torch.testing.assert_close(q, _halves(X, HALF[positions]))


@given(
    pairs=st.integers(0, 20),
    rest=st.integers(0, 9),
    heads=st.integers(1, 5),
    key_heads=st.integers(1, 5),
    tokens=st.integers(0, 40),
    interleaved=st.booleans(),
    norm=st.booleans(),
)
def test_any_size(**drawn: Any) -> None:
    pairs, rest, heads, key_heads, tokens, interleaved, norm = drawn.values()
    generator = torch.Generator().manual_seed(pairs + 31 * rest + heads)
    width = 2 * pairs + rest + (pairs + rest == 0)
    q, k = (
        torch.randn(2, n, tokens, width, generator=generator, dtype=torch.float64)
        for n in (heads, key_heads)
    )
    angles = torch.randn(tokens, pairs, generator=generator, dtype=torch.float64)
    weight = torch.randn(width, generator=generator, dtype=torch.float64)
    how: dict[str, Any] = {"norm_eps": 1e-6} if norm else {}
    if norm:
        how |= {"q_norm_weight": weight, "k_norm_weight": -weight}
    found = rotary_embedding_qk(
        q,
        k,
        angles.cos(),
        angles.sin(),
        interleaved=interleaved,
        rotary_dim=2 * pairs,
        **how,
    )
    for x, w, result in ((q, weight, found[0]), (k, -weight, found[1])):
        y = torch.nn.functional.rms_norm(x, [width], w, 1e-6) if norm else x
        turned = (_pairs if interleaved else _halves)(y[..., : 2 * pairs], angles)
        torch.testing.assert_close(result, torch.cat((turned, y[..., 2 * pairs :]), -1))


@pytest.mark.parametrize("across_heads", [False, True])
@pytest.mark.parametrize("rounding", ["none", "result", "both"])
@pytest.mark.parametrize("wide", ["q_norm_weight", "k_norm_weight"])
def test_norm_weights_of_two_dtypes(wide: str, rounding: str, across_heads: bool) -> None:
    """As when one of two norms is kept in float32: each as in a call of its own."""
    x = [t.to(torch.bfloat16).requires_grad_() for t in (X, X[:, :2].flip(-1))]
    weights = {}
    for name, t in zip(("q_norm_weight", "k_norm_weight"), x, strict=True):
        count = D * t.shape[1] if across_heads else D
        weight = torch.linspace(0.5, 2, count, dtype=torch.float32)
        weights[name] = weight.to(torch.float32 if name == wide else x[0].dtype).requires_grad_()
    tables = HALF.cos().float(), HALF.sin().float()
    how: dict[str, Any] = {"norm_eps": 1e-6, "norm_rounding": rounding}
    how["norm_across_heads"] = across_heads
    both = rotary_embedding_qk(*x, *tables, **weights, **how)
    for result, t, weight in zip(both, x, weights.values(), strict=True):
        apart = rotary_embedding(t, *tables, norm_weight=weight, **how)
        torch.testing.assert_close(result, apart, **numerics.SAME)
        grad = X[:, : t.shape[1]].to(t.dtype).cos()
        found, expected = (
            torch.autograd.grad(y, (t, weight), grad, retain_graph=True) for y in (result, apart)
        )
        torch.testing.assert_close(found, expected, **numerics.SAME)
    weights["q_norm_weight"] = weights["q_norm_weight"].detach().double()
    with pytest.raises(torchweld.ArgumentError, match="norm_weight"):
        rotary_embedding_qk(*x, *tables, **weights, **how)


def test_float32_angles_beside_bfloat16() -> None:
    """At position 100000 angles of 16 bits are wrong; results are rounded once."""
    x = X.bfloat16()
    angles = HALF + 1e5
    found = rotary_embedding(x, angles.cos().float(), angles.sin().float())
    assert found.dtype == torch.bfloat16
    expected = _halves(x.double(), angles)
    assert (found.double() - expected).abs().max() <= 2**-8 * expected.abs().max()


def test_learnt_angles_get_a_gradient() -> None:
    if torchweld.dispatch.choice.forced == ("cpu",):
        pytest.skip("no kernel has it")
    cos = HALF.cos().requires_grad_()
    torch.autograd.gradcheck(lambda c: rotary_embedding(X, c, HALF.sin()), cos)


def test_the_module_keeps_float32_angles_when_it_is_cast() -> None:
    module = torchweld.nn.RotaryEmbedding(D, 8, attention_factor=1.3)
    expected = 1.3 * _halves(X, HALF)
    q, k = module(X, X[:, :1])
    torch.testing.assert_close(q, expected, **numerics.ROUNDED)
    torch.testing.assert_close(k, expected[:, :1], **numerics.ROUNDED)
    found = module.bfloat16()(X.bfloat16(), X.bfloat16(), torch.arange(S).expand(B, S))[0]
    assert (found.double() - expected).abs().max() <= 2**-7 * expected.abs().max()
    assert not module.state_dict()
    with pytest.raises(torchweld.ArgumentError, match="max_positions, 8"):
        module(torch.randn(1, 9, 9, D), torch.randn(1, 9, 9, D))


# --- Norms ----------------------------------------------------------------------------------------


def _norm_of(x: torch.Tensor, weight: torch.Tensor, rounding: str) -> torch.Tensor:
    """As Gemma 3 ("result", weight + 1) and Qwen3 ("both") write it."""
    wide = x.float()
    x_hat = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)
    if rounding == "both":
        return weight * x_hat.to(x.dtype)
    return (x_hat * (1.0 + weight.float())).to(x.dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("rounding", ["result", "both"])
def test_norms_round_as_the_family(rounding: str, dtype: torch.dtype) -> None:
    """Without a rotation 16-bit results are the family's, but where a sum's order decides."""
    x = torch.randn(4, 8, 32, 64, generator=torch.Generator().manual_seed(1)).to(dtype)
    weight = torch.randn(64, generator=torch.Generator().manual_seed(2)).to(dtype)
    ones, zeros = torch.ones(32, 32), torch.zeros(32, 32)
    how: dict[str, Any] = {"norm_plus_one": rounding == "result", "norm_rounding": rounding}
    found = rotary_embedding(x, ones, zeros, norm_weight=weight, norm_eps=1e-6, **how)
    expected = _norm_of(x, weight, rounding)
    different = (found != expected).double().mean()
    assert different < 1e-3
    once = rotary_embedding(x, ones, zeros, norm_weight=weight, norm_eps=1e-6)
    if rounding == "both":
        assert (once != expected).double().mean() > 0.05  # the test would notice


def test_a_norm_across_heads() -> None:
    """OLMo 2's: over the projection, before it is split into heads."""
    flat = torch.randn(B, S, H * D, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(H * D, dtype=torch.float64, requires_grad=True)
    normed = torch.nn.functional.rms_norm(flat, [H * D], weight, 1e-5)
    expected = _halves(normed.view(B, S, H, D).transpose(1, 2), HALF)
    how: dict[str, Any] = {"norm_weight": weight, "norm_eps": 1e-5, "norm_across_heads": True}
    apart = flat.view(B, S, H, D)
    found = rotary_embedding(apart.transpose(1, 2), HALF.cos(), HALF.sin(), **how)
    torch.testing.assert_close(found, expected)
    second = rotary_embedding(apart, HALF.cos(), HALF.sin(), seq_dim=-3, **how)
    torch.testing.assert_close(second.transpose(1, 2), expected)
    grad = torch.randn_like(expected)
    wanted = torch.autograd.grad(expected, (flat, weight), grad)
    for y, g in ((found, grad), (second, grad.transpose(1, 2))):
        torch.testing.assert_close(torch.autograd.grad(y, (flat, weight), g), wanted)


def test_one_result_may_be_unused() -> None:
    q, k = X.clone().requires_grad_(), X[:, :2].clone().requires_grad_()
    rotated = rotary_embedding_qk(q, k, HALF.cos(), HALF.sin(), norm_eps=1e-6)
    rotated[1].sum().backward()
    assert q.grad is None or not q.grad.any()
    assert k.grad.any()
