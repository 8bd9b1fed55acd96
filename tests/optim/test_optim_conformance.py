"""torch's own conformance data, torch.testing._internal.common_optimizers, on our classes.

It includes every input and every error input with which torch tests Adam, AdamW, SGD and Adafactor
on the CPU. Intended differences:

* A group has each parameter once, after torch's warning: threads would step the same memory side by
  side, where torch takes two steps.
* differentiable=True is refused: a kernel has no derivative.
* SGD takes sparse gradients with weight_decay, which are made dense.
* Adafactor steps parameters without elements, where torch divides by their number.
* Muon takes stacks of matrices; a vector is refused as torch does.
* Moments of 16-bit parameters are float32 by default.
"""

from __future__ import annotations

import copy
import importlib
import pickle
import sys
import types
import unittest
import warnings
from collections.abc import Iterator
from typing import Any

import hypothesis
import pytest
import torch

import torchweld
from optimizers import U
from torchweld import optim


def _torchs_data() -> Any:
    """Its import needs a package for other tests, warns, and changes global settings."""
    sys.modules.setdefault("expecttest", types.SimpleNamespace(TestCase=unittest.TestCase))  # type: ignore[arg-type]
    frozen = torch.backends.flags_frozen()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return importlib.import_module("torch.testing._internal.common_optimizers")
    finally:
        if not frozen:
            torch.backends.__allow_nonbracketed_mutation_flag = True
        hypothesis.settings.load_profile("torchweld")


DATA = _torchs_data()
# Muon takes only matrices and iterates in bfloat16: its inputs have a test of their own below.
(MUON,) = (info for info in DATA.optim_db if info.optim_cls is torch.optim.Muon)
INFOS = {
    info.optim_cls.__name__: info
    for info in DATA.optim_db
    if info.optim_cls is not torch.optim.Muon
    and getattr(optim, info.optim_cls.__name__, None) is not None
    and issubclass(getattr(optim, info.optim_cls.__name__), info.optim_cls)
}


def test_every_class_of_torchs_name_is_here() -> None:
    assert set(INFOS) == {"SGD", "Adam", "AdamW", "Adafactor"}


def _inputs() -> Iterator[Any]:
    for name, info in INFOS.items():
        for given in info.optim_inputs_func(device="cpu"):
            yield pytest.param(name, given, id=f"{name}-{given.desc}")


def _errors() -> Iterator[Any]:
    for name, info in {**INFOS, "Muon": MUON}.items():
        for given in info.optim_error_inputs_func(device="cpu", dtype=torch.float32):
            yield pytest.param(name, given, id=f"{name}-{given.optimizer_error_input.desc}")


INPUTS = pytest.mark.parametrize(("name", "given"), list(_inputs()))


def _params(dtype: torch.dtype, name: str = "") -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes: list[tuple[int, ...]] = [(10, 10), (6,), (1,), (), (3, 4, 5)]
    if name != "Adafactor":
        shapes.append((0, 3))
    drawn = [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]
    return [t.to(dtype).requires_grad_() for t in drawn]


def _step(params: list[torch.Tensor], optimizer: Any, number: int) -> None:
    generator = torch.Generator().manual_seed(number)
    for i, p in enumerate(params):
        grad = torch.randn(p.shape, generator=generator, dtype=torch.float64)
        p.grad = None if (i + number) % 4 == 3 else grad.to(p.dtype)  # some gradients are missing
    optimizer.step()


def _both(name: str, given: Any, dtype: torch.dtype, **more: Any) -> list[Any]:
    made = []
    for module in (optim, torch.optim):
        params = _params(dtype, name)
        made.append((params, getattr(module, name)(params, **copy.deepcopy(given.kwargs), **more)))
    return made


@INPUTS
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.complex64], ids=str)
def test_inputs(name: str, given: Any, dtype: torch.dtype) -> None:
    """torch's parameters after seven steps, within roundings, and the entries of its state."""
    if dtype.is_complex and not INFOS[name].supports_complex:
        return
    (ours, mine), (theirs, peer) = _both(name, given, dtype, foreach=False)
    for number in range(7):
        _step(ours, mine, number)
        _step(theirs, peer, number)
    unit = U if dtype != torch.float64 else 2.0**-53
    for p, q in zip(ours, theirs, strict=True):
        # A step is at most of the parameter's size here, and rounds it some twenty times.
        torch.testing.assert_close(p, q, rtol=0, atol=7 * 20 * unit * 10)
        assert mine.state[p].keys() - {"step"} == {
            key for key, value in peer.state[q].items() if value is not None and key != "step"
        }
        assert all(type(value) is torch.Tensor for value in mine.state[p].values())
        for key, value in peer.state[q].items():
            if key != "step" and value is not None:
                assert mine.state[p][key].shape == value.shape
                assert mine.state[p][key].dtype == value.dtype


@INPUTS
def test_flags_choose_nothing(name: str, given: Any) -> None:
    """Each of torch's implementations except the differentiable one."""
    results = []
    for flag in ("plain", *INFOS[name].supported_impls):
        params = _params(torch.float32)
        kwargs = copy.deepcopy(given.kwargs) | ({} if flag == "plain" else {flag: True})
        if flag == "differentiable":
            with pytest.raises(torchweld.ArgumentError, match="differentiable"):
                getattr(optim, name)(params, **kwargs)
            continue
        if flag == "foreach" and any(torch.is_tensor(v) for v in kwargs.values()):
            continue  # rejected by torch's constructor, except for capturable
        optimizer = getattr(optim, name)(params, **kwargs)
        for number in range(3):
            _step(params, optimizer, number)
        results.append(params)
    for params in results[1:]:
        assert all(torch.equal(p, q) for p, q in zip(params, results[0], strict=True))


@INPUTS
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_sixteen_bits(name: str, given: Any, dtype: torch.dtype) -> None:
    """No farther from float64 than torch, whose moments are rounded too."""
    of_dtype = INFOS[name].optim_inputs_func(device="cpu", dtype=dtype)
    (given,) = [other for other in of_dtype if other.desc == given.desc]
    (ours, mine), (theirs, peer) = _both(name, given, dtype, foreach=False)
    exact = [p.detach().double().requires_grad_() for p in ours]
    oracle = getattr(torch.optim, name)(exact, **copy.deepcopy(given.kwargs), foreach=False)
    for number in range(5):
        for params, optimizer in ((ours, mine), (theirs, peer)):
            _step(params, optimizer, number)
        for p, e in zip(ours, exact, strict=True):
            e.grad = None if p.grad is None else p.grad.double()
        oracle.step()
    off = [
        torch.cat([(p.double() - e).flatten() for p, e in zip(params, exact, strict=True)])
        for params in (ours, theirs)
    ]
    rounding = torch.cat([(e.to(dtype).double() - e).flatten() for e in exact])
    errors = [error.square().mean().sqrt() for error in off]
    # A bfloat16 that is rounded at each of five steps: a walk of five roundings.
    assert errors[0] <= max(1.1 * errors[1], 5**0.5 * 1.1 * rounding.square().mean().sqrt())


@pytest.mark.parametrize(("name", "error"), list(_errors()))
def test_error_inputs(name: str, error: Any) -> None:
    """torch's errors, raised at the same point, with torch's text where torch raises them."""
    given, cls = error.optimizer_error_input, getattr(optim, name)
    params = _params(torch.float32)[:1] if name == "Muon" else _params(torch.float32)
    if given.desc == "only support 2D parameters":
        params = [torch.ones(3)]
    elif given.params is not None:
        params = given.params
    if issubclass(error.error_type, Warning):
        with pytest.warns(error.error_type, match=error.error_regex):
            optimizer = cls(params, **given.kwargs)
        assert len(optimizer.param_groups[0]["params"]) == len(set(params))
    elif error.error_on == DATA.OptimizerErrorEnum.CONSTRUCTION_ERROR:
        with pytest.raises(error.error_type, match=error.error_regex):
            cls(params, **given.kwargs)
    else:
        optimizer = cls(params, **given.kwargs)
        with pytest.raises(error.error_type, match="complex"):
            optimizer.step()


@pytest.mark.parametrize("name", INFOS)
def test_metadata(name: str) -> None:
    """What torch declares for its class: sparse gradients, complex parameters, capturable."""
    info, cls = INFOS[name], getattr(optim, name)
    assert not info.only_supports_sparse_grads
    assert not info.step_requires_closure

    def takes(p: torch.Tensor, grad: torch.Tensor, **kwargs: Any) -> bool:
        p.grad = grad
        try:
            cls([p], **kwargs).step()
        except (RuntimeError, TypeError):
            return False
        return True

    dense = torch.ones(4, 3)
    assert takes(dense.clone().requires_grad_(), dense.to_sparse()) == info.supports_sparse
    if info.supports_sparse:
        assert takes(dense.clone().requires_grad_(), dense.to_sparse(), weight_decay=0.1)
    if name == "Adafactor":
        assert takes(torch.ones(0, 3).requires_grad_(), torch.ones(0, 3))
    wide = dense.to(torch.complex64)
    assert takes(wide.clone().requires_grad_(), wide) == info.supports_complex
    takes_capturable = takes(dense.clone().requires_grad_(), dense, capturable=True)
    assert takes_capturable == info.has_capturable_arg


@INPUTS
def test_sparse_gradients_as_torch_tests_them(name: str, given: Any) -> None:
    """Where torch takes them: the step of the dense gradient."""
    if not INFOS[name].supports_sparse:
        return
    results = []
    for sparse in (True, False):
        p = torch.linspace(-1, 1, 24).view(6, 4).requires_grad_()
        optimizer = getattr(optim, name)([p], **copy.deepcopy(given.kwargs))
        for row in (1, 4, 1):
            dense = torch.zeros(6, 4)
            dense[row] = 0.5
            p.grad = dense.to_sparse(1) if sparse else dense
            optimizer.step()
        results.append(p.detach())
    assert torch.equal(*results)


@INPUTS
def test_schedulers_copies_and_checkpoints(name: str, given: Any) -> None:
    """torch's schedulers; deepcopy, pickle and state_dict in mid-run, also to torch's class."""
    for schedulers in INFOS[name].scheduler_inputs:
        (ours, mine), (theirs, peer) = _both(name, given, torch.float32, foreach=False)
        pairs = [[make(o) for make in schedulers] for o in (mine, peer)]
        for number in range(4):
            for params, optimizer, of in ((ours, mine, pairs[0]), (theirs, peer, pairs[1])):
                _step(params, optimizer, number)
                for scheduler in of:
                    late = isinstance(scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau)
                    scheduler.step(1.0) if late else scheduler.step()
            rates = [float(o.param_groups[0]["lr"]) for o in (mine, peer)]
            assert rates[0] == pytest.approx(rates[1], rel=1e-6)
        torch.testing.assert_close([*ours], [*theirs], rtol=0, atol=4 * 20 * U * 10)
    others = [copy.deepcopy(mine), pickle.loads(pickle.dumps(mine))]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        peer.load_state_dict(copy.deepcopy(mine.state_dict()))
        again = getattr(optim, name)(ours, **copy.deepcopy(given.kwargs))
        again.load_state_dict(copy.deepcopy(peer.state_dict()))
    start = [p.detach().clone() for p in ours]
    _step(ours, mine, 9)
    for other in others:
        copies = other.param_groups[0]["params"]
        _step(copies, other, 9)
        assert all(torch.equal(p, q) for p, q in zip(copies, ours, strict=True))
    with torch.no_grad():
        expected = [p.clone() for p in ours]
        for p, s in zip(ours, start, strict=True):
            p.copy_(s)
    _step(ours, again, 9)
    torch.testing.assert_close([*ours], [*expected], rtol=0, atol=20 * U)


# --- Muon ---


@pytest.mark.parametrize("given", MUON.optim_inputs_func(device="cpu"), ids=lambda g: g.desc)
def test_inputs_of_muon(given: Any) -> None:
    """torch's parameters within the roundings of two iterations in bfloat16, and its states."""
    results = []
    for module in (optim, torch.optim):
        generator = torch.Generator().manual_seed(0)
        params = [torch.randn(s, generator=generator).requires_grad_() for s in ((10, 10), (6, 9))]
        optimizer = module.Muon(params, **copy.deepcopy(given.kwargs))
        for number in range(7):
            _step(params, optimizer, number)
        results.append((params, optimizer))
    (ours, mine), (theirs, peer) = results
    lr = float(mine.param_groups[0]["lr"])
    for p, q in zip(ours, theirs, strict=True):
        # Fifteen roundings of a direction of norm 3.2; the smallest singular values grow by 3.4 a
        # step, and so do roundings there.
        assert (p - q).norm() <= 7 * lr * 15 * 2.0**-9 * 10
        assert mine.state[p].keys() - {"step"} == peer.state[q].keys()
        momentum = peer.state[q]["momentum_buffer"]
        torch.testing.assert_close(mine.state[p]["momentum_buffer"], momentum, rtol=0, atol=8 * U)
