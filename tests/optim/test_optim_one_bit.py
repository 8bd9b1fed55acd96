"""1-bit optimizers in one process: parameters without elements or gradients, groups, loading."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import one_bit
import torchweld
from torchweld import optim

KINDS = {"OneBitAdam": one_bit.Adam, "OneBitLAMB": one_bit.Lamb}
BOTH = pytest.mark.parametrize("kind", KINDS)
FREEZE = 4
USED, EMPTY, UNUSED, FROZEN = "used", "empty", "unused", "frozen"


def _drawn(seed: int, shape: tuple[int, ...]) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def _params(sorts: list[str]) -> list[torch.Tensor]:
    """Parameters of some sorts; used ones are of different shapes."""
    found = []
    for i, sort in enumerate(sorts):
        shape = (0, 5) if sort == EMPTY else (3 + i, 5)
        found.append(_drawn(i, shape).requires_grad_(sort != FROZEN))
    return found


def _step(params: list[torch.Tensor], sorts: list[str], optimizer: Any, step: int) -> None:
    for i, (p, sort) in enumerate(zip(params, sorts, strict=True)):
        if sort in (USED, EMPTY):
            p.grad = _drawn(100 * step + i, tuple(p.shape))
    optimizer.step()


@settings(max_examples=25, deadline=None)
@given(
    kind=st.sampled_from(list(KINDS)),
    sorts=st.lists(st.sampled_from([USED, EMPTY, UNUSED, FROZEN]), min_size=1, max_size=5),
)
def test_parameters_without_elements_or_gradients(kind: str, sorts: list[str]) -> None:
    """Those with gradients step as the published algorithm does without the others."""
    params = _params(sorts)
    optimizer = getattr(optim, kind)(params, lr=1e-2, freeze_step=FREEZE, weight_decay=0.01)
    used = [i for i, sort in enumerate(sorts) if sort == USED]
    arrays = [params[i].detach().numpy().copy() for i in used]
    expected = KINDS[kind](arrays, 1, lr=1e-2, freeze_step=FREEZE, weight_decay=0.01)
    before = [p.detach().clone() for p in params]
    for step in range(FREEZE + 5):
        _step(params, sorts, optimizer, step)
        if used:
            expected.step([[_drawn(100 * step + i, tuple(params[i].shape)).numpy() for i in used]])
    for i, array in zip(used, arrays, strict=True):
        np.testing.assert_allclose(params[i].detach().numpy(), array, rtol=1e-5, atol=1e-5)
    others = [i for i in range(len(params)) if i not in used]
    assert all(torch.equal(params[i].detach(), before[i]) for i in others)


OPTIONS: list[dict[str, Any]] = [
    {"lr": 1e-2, "weight_decay": 0.1, "coeff_beta": 0.9},
    {"lr": 3e-2, "betas": (0.8, 0.99), "coeff_beta": 0.5, "factor_clip": (0.9, 1.1)},
    {"lr": 1e-2, "eps": 1e-3, "factor_threshold": 0.01, "trust_clip": (0.1, 0.7)},
    {"lr": 2e-2, "factor_clip": (0.3, 0.6), "factor_threshold": 0.5},
]


def test_every_group_has_its_own_options() -> None:
    """Every option differs in some group; also where a later group comes first."""
    for options in (OPTIONS, OPTIONS[::-1]):
        params = _params([USED] * len(options))
        groups = [{"params": [p]} | each for p, each in zip(params, options, strict=True)]
        optimizer = optim.OneBitLAMB(groups, freeze_step=FREEZE)
        arrays = [p.detach().numpy().copy() for p in params]
        expected = one_bit.Lamb(arrays, 1, options, freeze_step=FREEZE)
        for step in range(FREEZE + 12):
            _step(params, [USED] * len(params), optimizer, step)
            expected.step([[p.grad.numpy() for p in params]])  # type: ignore[union-attr]
            for p, array in zip(params, arrays, strict=True):
                np.testing.assert_allclose(p.detach().numpy(), array, rtol=1e-5, atol=1e-5)


@BOTH
def test_new_parameters_after_the_warm_up(kind: str) -> None:
    """They are refused where they come, and nothing changes; without a gradient they may stay."""
    sorts = [USED, UNUSED]
    params = _params(sorts)
    optimizer = getattr(optim, kind)(params, freeze_step=FREEZE)
    for step in range(FREEZE + 1):
        _step(params, sorts, optimizer, step)
    with pytest.raises(torchweld.ArgumentError, match="a new one"):
        optimizer.add_param_group({"params": [torch.zeros(3, requires_grad=True)]})
    assert len(optimizer.param_groups) == 1
    optimizer.add_param_group({"params": [torch.zeros(3)]})
    params[1].grad = torch.ones_like(params[1])
    with pytest.raises(torchweld.ArgumentError, match="a new one"):
        optimizer.step()
    assert params[1] not in optimizer.state or not optimizer.state[params[1]]
    params[1].grad = None
    _step(params, sorts, optimizer, FREEZE + 1)


@BOTH
def test_one_device(kind: str) -> None:
    """Momenta of several devices could not be joined after the warm-up: said at once."""
    params = [torch.zeros(3, requires_grad=True), torch.zeros(3, device="meta", requires_grad=True)]
    with pytest.raises(torchweld.ArgumentError, match="on cpu, meta"):
        getattr(optim, kind)(params, freeze_step=FREEZE)


@BOTH
def test_a_group_without_parameters(kind: str) -> None:
    params = _params([USED])
    optimizer = getattr(optim, kind)([{"params": []}, {"params": params}], freeze_step=FREEZE)
    for step in range(FREEZE + 2):
        _step(params, [USED], optimizer, step)
    params[0].grad = torch.ones(3, 5).to_sparse()
    with pytest.raises(torchweld.ArgumentError, match="a sparse"):
        optimizer.step()
    assert params[0].isfinite().all()


def test_phases_of_groups_agree() -> None:
    params = _params([USED, USED])
    optimizer = optim.OneBitAdam([{"params": [p]} for p in params], freeze_step=FREEZE)
    _step(params, [USED, USED], optimizer, 0)
    state = optimizer.state_dict()
    state["param_groups"][1]["steps_taken"] = FREEZE
    with pytest.raises(torchweld.ArgumentError, match="as many in all groups"):
        optimizer.load_state_dict(state)
