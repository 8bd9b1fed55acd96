"""Named architectures of transformers: fuse() in each dtype; tp_plan is right or refuses."""

from __future__ import annotations

import copy
from typing import Any

import named_models
import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import parallelize_module

import torchweld
from processes import processes
from stack_seams import keep_model
from torchweld.distributed import tp_plan, zero3
from torchweld.errors import ArgumentError

pytestmark = pytest.mark.filterwarnings("ignore")


def _run(model: torch.nn.Module, name: str, dtype: torch.dtype) -> torch.Tensor:
    batch = named_models.make_batch(name)
    given = {key: x.to(dtype) if x.is_floating_point() else x for key, x in batch.items()}
    with torch.no_grad():
        return model.to(dtype).eval()(**given).logits.double()  # type: ignore[no-any-return]


@pytest.mark.parametrize("name", named_models.NAMES)
def test_fused_in_each_dtype(name: str) -> None:
    """In 16 bits the fused model is as near to the exact one as the eager model."""
    model = named_models.build(name)
    fused = torchweld.fuse(copy.deepcopy(model))
    exact = _run(copy.deepcopy(model), name, torch.float64)
    size = _find_rms(exact)
    # Many models compute their norms or angles in float32 whatever the parameters are.
    assert _find_rms(_run(copy.deepcopy(fused), name, torch.float64) - exact) <= 1e-6 * size
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        eager = _find_rms(_run(copy.deepcopy(model), name, dtype) - exact)
        ours = _find_rms(_run(copy.deepcopy(fused), name, dtype) - exact)
        assert ours <= 1.5 * eager + torch.finfo(dtype).eps * size


def _find_rms(x: torch.Tensor) -> float:
    return x.square().mean().sqrt().item()


def _compare(whole: Any, given: dict[str, torch.Tensor], loss: Any, sequence: bool) -> str:
    """Return "right", or the reason why the plan refuses the model."""
    model = copy.deepcopy(whole)
    model.zero_grad()
    try:
        parallelize_module(model, init_device_mesh("cpu", (2,)), tp_plan(model, sequence))
    except ArgumentError as error:
        assert not any(isinstance(p, DTensor) for p in model.parameters())
        return f"refused: {error}"
    try:
        found = model(**given).loss
    except ArgumentError as error:  # the number of an image's patches is known only now
        return f"refused: {error}"
    _check(model, whole, given, found, loss)
    return "right"


def _check(model: Any, whole: Any, given: dict[str, torch.Tensor], found: Any, loss: Any) -> None:
    """Hold a shared model's loss, gradients and logits to the whole model's."""
    found.backward()
    torch.testing.assert_close(found, loss, rtol=1e-9, atol=1e-11)
    wanted = dict(whole.named_parameters())
    largest = max(p.grad.abs().max().item() for p in wanted.values() if p.grad is not None)
    for key, parameter in model.named_parameters():
        grad, target = parameter.grad, wanted[key].grad
        assert (grad is None) == (target is None), key
        if grad is not None:
            full = grad.full_tensor() if isinstance(grad, DTensor) else grad
            # Some models compute norms, angles and routers in float32.
            assert (full - target).abs().max() <= 2**-21 * largest, key
    with torch.inference_mode():
        logits, expected = (each(**given).logits for each in (model, whole))
    logits = logits.full_tensor() if isinstance(logits, DTensor) else logits
    torch.testing.assert_close(logits, expected, rtol=1e-5, atol=1e-6)


def _build(name: str) -> tuple[Any, dict[str, torch.Tensor], torch.Tensor]:
    """Build a fused model with gradients, its batch and its loss."""
    whole: Any = torchweld.fuse(named_models.build(name).double().train())
    batch = named_models.make_batch(name)
    given = {key: x.double() if x.is_floating_point() else x for key, x in batch.items()}
    loss = whole(**given).loss
    assert whole(**given).loss == loss  # nothing is random
    loss.backward()
    return whole, given, loss.detach()


def _plan(rank: int, name: str) -> None:
    whole, given, loss = _build(name)
    plans = {"tensor": False, "sequence": True}
    found = {key: _compare(whole, given, loss, plans[key]) for key in plans}
    if rank == 0:
        keep_model(name, found)


@pytest.mark.parametrize("name", named_models.NAMES)
def test_a_plan_is_right_or_refused(name: str) -> None:
    """Losses and gradients of two processes in float64, with and without a sharded sequence."""
    with processes(2) as two:
        two.run("cpu", _plan, name)


def _shard(rank: int, name: str) -> None:
    whole, given, loss = _build(name)
    model: Any = zero3(copy.deepcopy(whole), init_device_mesh("cpu", (2,)))
    model.zero_grad()
    _check(model, whole, given, model(**given).loss, loss)


@pytest.mark.parametrize("name", ["SqueezeBert", "Funnel"])
def test_zero3_is_right(name: str) -> None:
    """The one calls `forward` of its layers, the other holds them in lists of lists."""
    with processes(2) as two:
        two.run("cpu", _shard, name)
