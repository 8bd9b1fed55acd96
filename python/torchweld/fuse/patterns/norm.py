"""LayerNorm and RMSNorm: torch's, and other modules that compute the same."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import torch

from torchweld import functional, nn
from torchweld.fuse import probe
from torchweld.fuse.twin import CannotCopyError, Twin
from torchweld.fuse.view import Left, Proposal, View, forward_of, is_welded, why_fixed
from torchweld.fuse.weld import Change, Weld

# Rules for the dtype of a result, given the dtypes of x and the weight.
_RULES = {
    "x": lambda x, weight: x,
    "wider": torch.promote_types,
    "weight": lambda x, weight: weight,
}


class LayerNorm(Weld):
    """torch.nn.LayerNorm."""

    forward = nn.LayerNorm.forward


class RMSNorm(Weld):
    """torch.nn.RMSNorm."""

    forward = nn.RMSNorm.forward


class Norm(Weld):
    """A norm over the dimensions of its weight.

    `weight_name` and `bias_name` are names of attributes, and `eps` is one too or, where the code
    has a constant, a number. With `offset`, 1 is added to the weight. `rule` determines the dtype
    of the result.
    """

    weld_weight_name: str
    weld_bias_name: str | None
    weld_eps: str | float
    weld_centered: bool
    weld_offset: bool
    weld_rule: str

    def forward(self, *given: Any, **named: Any) -> Any:
        tried = self.weld_tried(given, named)
        if tried is None:
            return self.welded_from.forward(self, *given, **named)
        (x,) = tried
        weight = getattr(self, self.weld_weight_name)
        bias = getattr(self, self.weld_bias_name) if self.weld_bias_name else None
        eps = self.weld_eps
        if isinstance(eps, str):
            eps = getattr(self, eps)
        dtype = x.dtype
        if weight.dtype is not dtype:
            dtype = _RULES[self.weld_rule](dtype, weight.dtype)
            x = x.to(torch.promote_types(x.dtype, dtype))
        if self.weld_offset:
            weight = (weight if weight.dtype == torch.float64 else weight.float()) + 1.0
            bias = bias if bias is None else bias.to(weight.dtype)
        if self.weld_centered:
            return functional.layer_norm(x, weight.shape, weight, bias, eps).to(dtype)
        return functional.rms_norm(x, weight.shape, weight, eps).to(dtype)


_TORCHS: dict[Any, tuple[type[Weld], str]] = {
    torch.nn.LayerNorm.forward: (LayerNorm, "layer_norm"),
    torch.nn.RMSNorm.forward: (RMSNorm, "rms_norm"),
}


def find_norm(module: torch.nn.Module, view: View) -> Iterator[Proposal | Left]:
    """A leaf with a weight, an epsilon and optionally a bias."""
    what = type(module).__name__
    computed = torch.nn.utils.parametrize.is_parametrized(module)
    if is_welded(module) or (module._modules and not computed):
        return
    forward = forward_of(module)
    weld, becomes = _TORCHS.get(forward, (Norm, ""))
    if weld is Norm and not _looks_like_one(module):
        if hasattr(module, "normalized_shape") and not module._parameters:
            reason = "it has no weight: call torchweld.functional.layer_norm or rms_norm"
            yield Left(module, what, reason)
        return
    if (
        weld is Norm
        and not _epsilons(module)
        and not view.once("norm", module, _normalises(module))
    ):
        return
    if fixed := why_fixed(module):
        yield Left(module, what, fixed)
    elif weld is not Norm:
        inputs = (probe.values((4, *module.normalized_shape), view.device(module)),)  # type: ignore[misc]
        yield Proposal(module, what, (Change(module, weld, becomes),), module, inputs=inputs)
    else:
        yield from _others(module, what, view)


def _looks_like_one(module: torch.nn.Module) -> bool:
    given = [value for value in module._parameters.values() if value is not None]
    same_shape = len({value.shape for value in given}) == 1
    buffered = any(value is not None for value in module._buffers.values())
    return same_shape and 1 <= len(given) <= 2 and given[0].ndim == 1 and not buffered


def _normalises(module: torch.nn.Module) -> Callable[[], bool]:
    """Whether rows that are a multiple of each other give the same, as norms do."""

    def answer() -> bool:
        try:
            copy = Twin(module, torch.device("cpu"), torch.float32).module
            width = next(copy.parameters()).shape[0]
            x = 10 * torch.randn(3, width, generator=torch.Generator().manual_seed(0))
            with torch.no_grad():
                y, scaled = copy(x), copy(4 * x)
        except Exception:
            return False
        same = isinstance(y, torch.Tensor) and y.shape == x.shape == scaled.shape
        return same and torch.allclose(y, scaled, rtol=1e-3, atol=1e-3) and not torch.equal(y, x)

    return answer


# Epsilons that stand in code as constants.
_CONSTANTS = (1e-5, 1e-6, 1e-8, 1e-12)


def _epsilons(module: torch.nn.Module) -> list[str]:
    found = vars(module).items()
    return [name for name, value in found if isinstance(value, float) and 0 < value < 0.1]


def _others(module: torch.nn.Module, what: str, view: View) -> Iterator[Proposal | Left]:
    names = [name for name, value in module._parameters.items() if value is not None]
    weight = module._parameters[names[0]]
    assert weight is not None
    bias = names[1] if len(names) == 2 else None
    device = view.device(module)
    try:
        rule = view.once("rule", module, lambda: _rule(module, device))
    except CannotCopyError as error:
        yield Left(module, what, str(error))
        return
    inputs = (probe.values((2, 5, *weight.shape), device),)
    for centered, offset, eps in itertools.product(
        (True,) if bias else (False, True), (False, True), _epsilons(module) or _CONSTANTS
    ):
        settings: dict[str, Any] = {"weight_name": names[0], "bias_name": bias, "eps": eps}
        settings |= {"centered": centered, "offset": offset, "rule": rule}
        becomes = ("layer_norm" if centered else "rms_norm") + (", weight + 1" if offset else "")
        changes = (Change(module, Norm, becomes, settings),)
        yield Proposal(module, what, changes, module, inputs=inputs)


def _rule(module: torch.nn.Module, device: torch.device) -> str:
    """The rule for the result's dtype if x and weight differ in dtype."""
    possible = set(_RULES)
    for x, weight in ((torch.bfloat16, torch.float32), (torch.float32, torch.bfloat16)):
        copy = Twin(module, device, weight).module
        shape = next(copy.parameters()).shape
        try:
            with torch.no_grad():
                y = copy(probe.values((2, *shape), device).to(x))
        except Exception:
            continue  # it does not mix them
        possible &= {name for name, rule in _RULES.items() if rule(x, weight) == y.dtype}
    return next((name for name in _RULES if name in possible), "x")
