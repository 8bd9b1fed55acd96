"""rotary_embedding's Triton kernels in the interpreter, or on a GPU.

They serve only some of the op's samples, so that the contract leaves them out.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

import torchweld
from oracle import incoming, sample_inputs
from selection import TRITON_DEVICE as DEVICE
from selection import of_triton
from torchweld import numerics
from torchweld.bench.cases import CASES
from torchweld.functional import rotary_embedding, rotary_embedding_qk
from torchweld.ops.rotary.op import OP
from watched import assert_right_if_watched

pytestmark = of_triton

SERVED = [
    at for at, given in enumerate(CASES[OP.name].samples) if OP.why_refused("triton", given) is None
]
# Keys with fewer heads; proportional pairs with an angle a column; interleaved pairs with a norm.
TELLING = (6, 10, 11)


def test_most_samples_are_served() -> None:
    assert len(SERVED) >= 18


@pytest.mark.parametrize(
    ("dtype", "param_dtype", "at"),
    [(torch.float32, torch.float32, at) for at in SERVED]
    + [(torch.float16, param, at) for at in TELLING for param in (torch.float16, torch.float32)],
    ids=lambda value: str(value).removeprefix("torch."),
)
def test_samples(dtype: torch.dtype, param_dtype: torch.dtype, at: int) -> None:
    """Errors are bounded, exactly the results are written, and fakes are right."""
    assert_right_if_watched(OP, "triton", sample_inputs(OP, dtype, DEVICE, param_dtype)[at])


def _tensor(*shape: int) -> torch.Tensor:
    made = torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))
    return made.to(DEVICE)


def _assert_as_eager(function: Any, *tensors: torch.Tensor) -> Any:
    """The kernels' results and gradients equal eager's; the results of the kernels."""
    found = []
    for backend in ("triton", "eager"):
        leaves = [t.detach().requires_grad_() for t in tensors]
        with torchweld.use_backend(backend):
            results = function(*leaves)
        loss = sum((y.float() * incoming(y).float()).sum() for y in results)
        found.append([*results, *torch.autograd.grad(loss, leaves)])
    for mine, theirs in zip(*found, strict=True):
        # Sums of some hundred terms near 1 in float32: 1e-5 is a hundred roundings.
        torch.testing.assert_close(mine, theirs, **numerics.SUMMED)
    return found[0]


@pytest.mark.parametrize("interleaved", [False, True], ids=["halves", "interleaved"])
@pytest.mark.parametrize("norm", [False, True], ids=["plain", "norm"])
def test_views_of_a_projection_are_not_copied(interleaved: bool, norm: bool) -> None:
    """[batch, tokens, heads, width] and its transposed view, with positions of 32 and 64 bits."""
    table, weight = _tensor(9, 6), _tensor(16)
    packed = _tensor(2, 5, 3, 4, 16)
    positions = torch.tensor([[0, 1, 2, 0, 1], [8, 3, 0, 0, 7]], device=DEVICE)
    how: dict[str, Any] = {"interleaved": interleaved, "rotary_dim": 12}

    def run(seq_dim: int, positions: torch.Tensor) -> list[torch.Tensor]:
        def rotate(packed: torch.Tensor, weight: torch.Tensor) -> Any:
            q, k = packed[:, :, 0], packed[:, :, 1, :2]
            if seq_dim == -2:
                q, k = q.transpose(1, 2), k.transpose(1, 2)
            norms = {"q_norm_weight": weight, "k_norm_weight": -weight, "norm_eps": 1e-6}
            given = how | (norms | {"norm_plus_one": True} if norm else {})
            results: Any = rotary_embedding_qk(
                q, k, table.cos(), table.sin(), positions, seq_dim=seq_dim, **given
            )
            assert results[0].stride() == torch.empty_like(q).stride()
            if seq_dim == -2:
                results = tuple(y.transpose(1, 2) for y in results)
            return results if norm else (*results, weight * 1)

        return _assert_as_eager(rotate, packed, weight)

    found, other = run(-3, positions), run(-2, positions.int())
    torch.testing.assert_close(found[:-1], other[:-1], **numerics.SAME)


@pytest.mark.parametrize("rounding", ["result", "both"])
def test_norms_round_as_eager(rounding: str) -> None:
    """16-bit results are eager's, but where the order of a sum decides a rounding."""
    x, weight = _tensor(2, 3, 8, 32).half(), _tensor(32).half()
    table = _tensor(8, 16)
    found = []
    for backend in ("triton", "eager"):
        with torchweld.use_backend(backend):
            how: dict[str, Any] = {"norm_eps": 1e-6, "norm_rounding": rounding}
            found.append(rotary_embedding(x, table.cos(), table.sin(), norm_weight=weight, **how))
    assert (found[0] != found[1]).double().mean() < 0.01
    torch.testing.assert_close(*found, rtol=2**-9, atol=2**-9)


@pytest.mark.parametrize("norm", [False, True], ids=["plain", "norm"])
def test_positions_without_a_row_give_nan_and_read_nothing(norm: bool) -> None:
    """The columns that are rotated, in the rows of the position, forward and backward."""
    from torchweld.triton_kernels import rotary

    x, table = _tensor(3, 4, 8), _tensor(5, 3)
    positions = torch.tensor([0, 5, -1, 4], device=DEVICE)
    how: Any = (6, False, False, 1e-6 if norm else None, False, "none", None)
    given: Any = (x, None, table.cos(), table.sin(), positions, None, None)
    y, _, rstd, _ = rotary.rotary_embedding(*given, *how)
    saved: Any = (x, None) if norm else (None, None)
    none = y.new_empty(0)
    back = [y.nan_to_num(), none, *saved, *given[2:], *how, rstd, none, False, False]
    grad = rotary.rotary_embedding_backward(*back)[0]
    bad = torch.zeros_like(x, dtype=torch.bool)
    bad[:, 1:3, :6] = True
    assert torch.equal(y.isnan(), bad)
    if norm:
        bad[:, 1:3] = True  # the mean of the row has them
    assert torch.equal(grad.isnan(), bad)


REFUSED: dict[str, tuple[tuple[int, ...], dict[str, Any], str]] = {
    "heads": ((2, 4, 3, 8), {"norm_eps": 1e-6, "norm_across_heads": True}, "norm across heads"),
    "width": ((1, 1, 2, 1026), {}, "wider than 1024"),
    "dimensions": ((1, 2, 2, 2, 8), {}, "5 dimensions"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_kernels_lack_is_refused_and_eager_serves(name: str) -> None:
    shape, how, reason = REFUSED[name]
    x, table = _tensor(*shape), _tensor(shape[-2], shape[-1] // 2)
    with pytest.raises(torchweld.BackendError, match=reason):
        rotary_embedding(x, table.cos(), table.sin(), **how)
    with torchweld.use_backend("triton", "eager"):
        y = rotary_embedding(x, table.cos(), table.sin(), **how)
    with torchweld.use_backend("eager"):
        assert torch.equal(y, rotary_embedding(x, table.cos(), table.sin(), **how))
