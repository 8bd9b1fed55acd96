"""Activations: the same list in every language, and errors over a dtype's whole range."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import torchweld
from conftest import PLACES, running_at
from torchweld import functional
from torchweld.nn.activation import Activation
from torchweld.ops import activation as activations
from torchweld.ops.activation import BIAS_ACT as OP

ROOT = Path(__file__).parents[2]
KINDS = pytest.mark.parametrize("kind", activations.KINDS, ids="-".join)
WHERE = pytest.mark.parametrize(
    "place",
    [
        pytest.param(name, marks=pytest.mark.skipif(missing is not None, reason=str(missing)))
        for name, (backend, _, missing) in PLACES.items()
        if backend in OP.sources
    ],
)
MODULES: dict[tuple[str, str], tuple[Callable[[], Any], Callable[[], Any] | None]] = {
    ("gelu", "none"): (torchweld.nn.GELU, torch.nn.GELU),
    ("gelu", "tanh"): (
        lambda: torchweld.nn.GELU("tanh"),
        lambda: torch.nn.GELU(approximate="tanh"),
    ),
    ("relu", "none"): (torchweld.nn.ReLU, torch.nn.ReLU),
    ("silu", "none"): (torchweld.nn.SiLU, torch.nn.SiLU),
    ("quick_gelu", "none"): (torchweld.nn.QuickGELU, None),
    ("relu2", "none"): (torchweld.nn.ReLUSquared, None),
    ("sigmoid", "none"): (torchweld.nn.Sigmoid, torch.nn.Sigmoid),
    ("tanh", "none"): (torchweld.nn.Tanh, torch.nn.Tanh),
}


def test_every_language_has_the_same_list() -> None:
    """Python's list, C++'s enum, Triton's branches and the docstring agree."""
    source = (ROOT / "csrc/core/act.h").read_text()
    listed = re.findall(r'^  X\(\w+, "(\w+)", "(\w+)"\)', source, re.MULTILINE)
    assert tuple(listed) == activations.KINDS
    pytest.importorskip("triton", reason="Triton is not installed")
    from torchweld.triton_kernels import act

    kinds = tuple(a if form == "none" else f"{a}_{form}" for a, form in activations.KINDS)
    assert kinds == act.KINDS
    for name, _ in activations.KINDS:
        assert f'"{name}"' in str(functional.bias_act.__doc__)


def _found(z: torch.Tensor, grad: torch.Tensor, kind: Any) -> tuple[torch.Tensor, torch.Tensor]:
    z = z.clone().requires_grad_()
    y = functional.bias_act(z, activation=kind[0], approximate=kind[1])
    return y.detach(), torch.autograd.grad(y, z, grad)[0]


def _eager(z: torch.Tensor, grad: torch.Tensor, kind: Any) -> tuple[torch.Tensor, torch.Tensor]:
    z = z.clone().requires_grad_()
    y = OP.reference(z, None, *kind)
    return y.detach(), torch.autograd.grad(y, z, grad)[0]


def _exact(z: torch.Tensor, grad: torch.Tensor, kind: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """The exact values: torch's own s * (1 - s) and 1 - tanh^2 would cancel in float64 too."""
    z, grad = z.double(), grad.double()
    y, slope = _eager(z, grad, kind)
    if kind[0] in ("sigmoid", "tanh"):
        e = torch.exp(-z.abs() * (2 if kind[0] == "tanh" else 1))
        slope = grad * e / (1 + e).square() * (4 if kind[0] == "tanh" else 1)
    return y, slope


@WHERE
@KINDS
def test_errors_from_end_to_end(place: str, kind: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """In float32 every element is within 4 u of its terms, not only the average.

    8 u in Triton, whose s * (1 - s) has an error of u / 2 where s is near 1.
    """
    bound = (4 if PLACES[place][0] == "cpu" else 8) * 2**-24
    with running_at(place, monkeypatch):
        device = PLACES[place][1]
        z = torch.linspace(-30, 30, 6001, device=device)
        grad = torch.linspace(1, 2, 6001, device=device)
        found = _found(z, grad, kind)
    exact = _exact(z, grad, kind)
    known = activations.ACTIVATIONS[kind]
    size = z.double().abs()
    for mine, true, terms in zip(
        found, exact, (known.value(size), grad * known.slope(size)), strict=True
    ):
        assert torch.all((mine - true).abs() <= bound * terms + 1e-37)


@KINDS
def test_no_result_on_the_cpu_is_subnormal(kind: Any) -> None:
    """A GEMM that reads such numbers takes many times as long."""
    z = torch.linspace(-110, 0, 440_001)
    with torchweld.use_backend("cpu"):
        results = _found(z, torch.ones_like(z), kind)
    for result in results:
        assert torch.all((result == 0) | (result.abs() >= torch.finfo(z.dtype).tiny))


@WHERE
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_tanh_is_exact_near_zero(
    place: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The relative error where (1 - e) / (1 + e) cancels, down to the smallest numbers."""
    if dtype == torch.float64 and place != "cpu":
        pytest.skip("float64 has a kernel only on the CPU")
    z = torch.cat(
        [torch.logspace(-30, 0, 4001, dtype=torch.float64), torch.linspace(0.4, 0.6, 4001)]
    )
    z = z.to(dtype)
    with running_at(place, monkeypatch):
        y = functional.bias_act(z.to(PLACES[place][1]), activation="tanh").cpu()
    exact = [math.tanh(value) for value in z.tolist()]
    relative = (y.double() / torch.tensor(exact, dtype=torch.float64) - 1).abs()
    assert relative.max() <= 6 * torch.finfo(dtype).eps / 2


NAN = torch.tensor([0x7FFFFFFF, -1, 0x7FC00001]).to(torch.int32).view(torch.float32)
FINITE = (0.0, 1e-45, 1e-38, 1e-10, 0.5, 1.0, 20.0, 60.0, 88.0, 104.0, 1e4, 1e18, 2e38, 3e38)


@WHERE
@KINDS
def test_extreme_values(place: str, kind: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Zeros and their neighbours, saturation, overflow, infinities, NaN with a payload."""
    finite = torch.tensor([*FINITE, *(-value for value in FINITE)])
    odd = torch.tensor([torch.inf, -torch.inf, torch.nan])
    z = torch.cat([finite, odd, NAN]).repeat(3)  # whole vectors, and a remainder
    with running_at(place, monkeypatch):
        at = z.to(PLACES[place][1])
        found = [t.cpu() for t in _found(at, torch.ones_like(at), kind)]
    theirs = _eager(z, torch.ones_like(z), kind)
    exact = _exact(z, torch.ones_like(z), kind)
    for mine, eager, true in zip(found, theirs, exact, strict=True):
        assert torch.all(eager[mine.isnan()].isnan())  # eager's vectors make NaN of gelu(inf) too
        lost = eager.isnan() & z.isnan()
        assert torch.all(mine[lost].isnan())
        rounded = true.float()
        right = rounded.isfinite() & eager.isfinite()
        torch.testing.assert_close(mine[right], rounded[right], rtol=2e-4, atol=1e-35)
        assert torch.equal(mine[rounded.isinf()], rounded[rounded.isinf()])


@WHERE
@pytest.mark.parametrize("activation", ["relu", "relu2"])
def test_kinks(place: str, activation: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """No gradient at zero and below, whatever the incoming gradient, as in torch."""
    z = torch.tensor([0.0, -0.0, -1.0, -torch.inf, 1e-40, 1.0])
    for arriving in (1.0, torch.inf, torch.nan):
        grad = torch.full_like(z, arriving)
        with running_at(place, monkeypatch):
            device = PLACES[place][1]
            found = _found(z.to(device), grad.to(device), (activation, "none"))[1].cpu()
        assert torch.equal(found[:4], torch.zeros(4))
        torch.testing.assert_close(
            found[4:], _eager(z, grad, (activation, "none"))[1][4:], equal_nan=True
        )


@pytest.mark.parametrize("kind", MODULES, ids="-".join)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_modules(kind: Any, dtype: torch.dtype) -> None:
    """Without arguments modules equal torch's, if torch has them."""
    ours, torchs = MODULES[kind]
    x = torch.randn(40, 33).to(dtype)
    expected = (torchs() if torchs else activations.ACTIVATIONS[kind].function)(x.double()).to(
        dtype
    )
    torch.testing.assert_close(ours()(x), expected)
    assert not list(ours().state_dict())


def test_a_module_for_every_activation() -> None:
    assert [*MODULES, ("identity", "none")] == list(activations.KINDS)
    for kind in activations.KINDS:
        assert torch.isfinite(Activation(*kind)(torch.randn(3))).all()


@pytest.mark.parametrize("backend", ["cpu", "eager"])
def test_identity_is_no_alias(backend: str) -> None:
    """The op does not return its argument, and no pass runs between the GEMMs."""
    x, w = torch.randn(6, 8), torch.randn(8, 8)
    with torchweld.use_backend(backend):
        y = functional.bias_act(x, activation="identity")
        assert torch.equal(y, x)
        assert y.data_ptr() != x.data_ptr()
        bias = w[0]
        assert torch.equal(
            functional.linear_act(x, w, bias, activation="identity"), x @ w.t() + bias
        )
        for recompute in (False, True):
            y = functional.mlp(x, w, bias, w, None, activation="identity", recompute=recompute)
            torch.testing.assert_close(y, (x @ w.t() + bias) @ w.t())
        batch = functional.batch_norm_act(x, None, None, training=True, activation="identity")
    torch.testing.assert_close(batch, torch.nn.functional.batch_norm(x, None, None, training=True))


def test_every_function_and_module_takes_them_all() -> None:
    x, w, mean, *others = torch.randn(6, 8), torch.randn(8, 8) / 3, *torch.rand(4, 8)
    for kind, backend in itertools.product(activations.KINDS, ("cpu", "eager")):
        named: dict[str, Any] = dict(zip(("activation", "approximate"), kind, strict=True))
        act = activations.ACTIVATIONS[kind].function
        normalised = torch.nn.functional.batch_norm(x, mean, *others, eps=0.1)
        with torchweld.use_backend(backend):
            for found, expected in (
                (functional.gated_act(x, x, **named), act(x) * x),
                (functional.linear_act(x, w, **named), act(x @ w.t())),
                (functional.mlp(x, w, None, w, None, **named), act(x @ w.t()) @ w.t()),
                (functional.gated_mlp(x, w, w, w, **named), (act(x @ w.t()) * (x @ w.t())) @ w.t()),
                (functional.normalize_act(x, mean, *others, eps=0.1, **named), act(normalised)),
                (functional.batch_norm_act(x, mean, *others, eps=0.1, **named), act(normalised)),
            ):
                torch.testing.assert_close(found, expected)
        for module in (
            torchweld.nn.LinearAct(8, 8, **named),
            torchweld.nn.MLP(8, 16, **named),
            torchweld.nn.GatedMLP(8, 16, **named),
            torchweld.nn.LinearBatchNormAct(8, 8, **named),
        ):
            assert torch.isfinite(module(x)).all()
