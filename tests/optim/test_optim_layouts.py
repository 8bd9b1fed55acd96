"""Optimizers: parameters, gradients and states with any memory layout."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from optimizers import draw, maker, same
from torchweld import optim

SHAPE = (5, 6, 70)
# An order of dimensions, and whether there are gaps between elements.
LAYOUT = st.tuples(st.permutations(range(len(SHAPE))), st.booleans())
KINDS = [
    pytest.param(optim.AdamW, {}, torch.float32, torch.float32, False, id="float32"),
    pytest.param(optim.AdamW, {}, torch.float32, "8bit", False, id="8bit"),
    pytest.param(optim.AdamW, {}, torch.float16, torch.bfloat16, True, id="masters"),
    pytest.param(optim.AdamW, {}, torch.bfloat16, torch.float32, "remainder", id="remainder"),
    pytest.param(optim.Lion, {}, torch.float32, torch.float32, False, id="lion"),
    pytest.param(
        optim.AdamW,
        {"stochastic_rounding": True},
        torch.bfloat16,
        torch.float32,
        False,
        id="stochastic",
    ),
    pytest.param(
        optim.TransformersAdafactor,
        {"lr": None, "beta1": 0.9},
        torch.bfloat16,
        torch.float32,
        True,
        id="adafactor",
    ),
    pytest.param(optim.LAMB, {}, torch.float32, torch.float32, False, id="lamb"),
    pytest.param(optim.LARS, {"momentum": 0.9}, torch.float32, torch.float32, False, id="lars"),
]


def lay_out(t: torch.Tensor, order: list[int], gaps: bool) -> torch.Tensor:
    """The same numbers, with dimensions in this order in memory."""
    sizes = [t.shape[d] for d in order]
    room = torch.full((*sizes, 2), 7, dtype=t.dtype)
    there = room[..., 0] if gaps else torch.empty(sizes, dtype=t.dtype)
    back = sorted(range(t.ndim), key=order.__getitem__)
    return there.permute(back).copy_(t)


def share_ratios(optimizer: Any, known: list[torch.Tensor]) -> None:
    """Make an adaptive rule use these ratios, and record its own where there is none.

    Its own ratios have sums in another order: n products in float64, each sum within n/2 roundings,
    a ratio of two roots within n, and so two ratios within 2n; and a few more.
    """
    own, bound = optimizer._ratios_of, (torch.Size(SHAPE).numel() + 8) * 2**-52
    to_come = iter(list(known))

    def ratios(of_norms: Any, *norms: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = of_norms(*norms)
        expected = next(to_come, None)
        if expected is None:
            known.append(found)
            return found
        torch.testing.assert_close(found, expected, rtol=bound, atol=0)
        return expected

    def ratios_of(*arguments: Any) -> Any:
        of_norms = own(*arguments)
        return of_norms and functools.partial(ratios, of_norms)

    optimizer._ratios_of = ratios_of


@settings(max_examples=10)
@given(layouts=st.lists(LAYOUT, min_size=5, max_size=5))
@pytest.mark.parametrize(("kind", "options", "dtype", "state_dtype", "masters"), KINDS)
def test_no_layout_changes_a_step(
    kind: Any,
    options: Any,
    dtype: torch.dtype,
    state_dtype: Any,
    masters: Any,
    layouts: list[Any],
    backend: str,
) -> None:
    """Each of a parameter's tensors has its own layout, or all have the same."""
    results: list[list[torch.Tensor]] = []
    ratios: list[torch.Tensor] = []
    for of_each in (None, layouts, layouts[:1] * len(layouts)):
        p = draw(dtype, [SHAPE])[0]
        optimizer = maker(kind, options, state_dtype, masters)([p])
        share_ratios(optimizer, ratios)
        for seed in range(2):
            generator = torch.Generator().manual_seed(seed)
            p.grad = torch.randn(SHAPE, generator=generator).to(dtype)
            if of_each and seed == 1:
                p.data, p.grad = (
                    lay_out(t, *at) for t, at in zip((p, p.grad), of_each, strict=False)
                )
                state = optimizer.state[p]
                like_p = [name for name, value in state.items() if value.shape == p.shape]
                for name, at in zip(like_p, of_each[2:], strict=False):
                    state[name] = lay_out(state[name], *at)
                written = {name: state[name] for name in like_p}
            optimizer.step()
        if of_each:
            assert all(optimizer.state[p][name] is t for name, t in written.items())
        results.append([p.detach(), *optimizer.state[p].values()])
    assert all(same(found, results[0]) for found in results[1:])
    assert len(ratios) == (2 if kind in (optim.LAMB, optim.LARS) else 0)


def test_what_lies_alike_is_not_copied() -> None:
    """Channels-last weights and their gradients, as convolutions have them."""
    p = draw(shapes=[(64, 32, 3, 3)])[0].detach().to(memory_format=torch.channels_last)
    p.requires_grad_()
    optimizer = optim.AdamW([p], max_grad_norm=1.0)
    p.grad = torch.randn_like(p)
    optimizer.step()
    for grad, copies in ((p.grad, set()), (p.grad.contiguous(), {"aten::contiguous"})):
        p.grad = grad
        with torch.profiler.profile(acc_events=True) as profile:
            optimizer.step()
        assert {event.key for event in profile.key_averages()} & {"aten::contiguous"} == copies


@pytest.mark.parametrize("state_dtype", [torch.float32, torch.bfloat16, "8bit"], ids=str)
def test_expanded_gradients_and_complex_numbers(state_dtype: Any, backend: str) -> None:
    """An expanded gradient's elements share memory. Strided parameters keep their strides."""
    made = []
    for module, stored in (
        (optim, {"state_dtype": state_dtype, "min_quantized_size": 0}),
        (torch.optim, {}),
    ):
        drawn = [p.detach() for p in draw(shapes=[(64, 20), (50, 6), (50, 6)])]
        params = [drawn[0][:, ::2], drawn[1], torch.view_as_complex(drawn[2].reshape(50, 3, 2))]
        optimizer = module.AdamW(params, 1e-2, **stored)
        for seed in range(3):
            generator = torch.Generator().manual_seed(seed)
            for p in params:
                p.grad = torch.randn(p.shape, generator=generator, dtype=p.dtype)
            params[1].grad = torch.randn(6, generator=generator).expand(50, 6)
            optimizer.step()
        made.append(params)
    atol = {torch.float32: 1e-7, torch.bfloat16: 1e-3}.get(state_dtype, 6e-3)
    for p, q in zip(*made, strict=True):
        assert p.stride() == q.stride()
        torch.testing.assert_close(p, q, rtol=1e-6, atol=atol)
