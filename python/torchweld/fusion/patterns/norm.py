"""LayerNorm and RMSNorm: torch's, and other modules that compute the same."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import torch

from torchweld import functional, nn
from torchweld.fusion import probe
from torchweld.fusion.twin import CannotCopyError, Twin
from torchweld.fusion.view import View
from torchweld.fusion.weld import (
    Proposal,
    Skipped,
    Tried,
    Weld,
    forward_of,
    propose,
    read_parameters,
)
from torchweld.numerics import is_almost

# Rules for the dtype of a result, given the dtypes of x and the weight.
RULES = {
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


class Norm(Tried):
    """A norm over the dimensions of its weight, or over the last one without a weight.

    `weight_name` and `bias_name` are names of attributes. `eps` is the name of an attribute, or a
    number if the code has a constant. With `offset`, 1 is added to the weight. `rule` determines
    the dtype of the result. The product of silu(gate) and x is normalised, or silu(gate) multiplies
    the norm, or there is no gate.
    """

    weld_gate: str | None

    weld_weight_name: str | None
    weld_bias_name: str | None
    weld_eps: str | float
    weld_centered: bool
    weld_offset: bool
    weld_rule: str

    def weld_run(self, x: torch.Tensor, *gates: Any) -> Any:
        if any(gate is None or gate.dtype is not x.dtype for gate in gates):
            return self.welded_from.forward(self, x, *gates)
        gate: Any = gates[0] if gates else None
        if self.weld_gate == "first":
            x = functional.gated_act(gate, x, activation="silu")
        y = self.weld_normalize(x)
        return functional.gated_act(gate, y, activation="silu") if self.weld_gate == "last" else y

    def weld_normalize(self, x: torch.Tensor) -> torch.Tensor:
        """The norm, without a gate."""
        eps = self.weld_eps
        if isinstance(eps, str):
            eps = getattr(self, eps)
        if self.weld_weight_name is None:
            normalize = functional.layer_norm if self.weld_centered else functional.rms_norm
            return normalize(x, x.shape[-1:], eps=eps)
        weight = getattr(self, self.weld_weight_name)
        bias = getattr(self, self.weld_bias_name) if self.weld_bias_name else None
        dtype = x.dtype
        if weight.dtype is not dtype:
            dtype = RULES[self.weld_rule](dtype, weight.dtype)
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


def find_norm(module: torch.nn.Module, view: View) -> Iterator[Proposal | Skipped]:
    """A leaf with a weight, an epsilon and optionally a bias."""
    what = type(module).__name__
    computed = torch.nn.utils.parametrize.is_parametrized(module)
    if module._modules and not computed:
        return
    forward = forward_of(module)
    weld, becomes = _TORCHS.get(forward, (Norm, ""))
    if weld is Norm and not module._parameters and _list_epsilons(module) and forward:
        yield from _propose_without_weight(module, view)
        return
    if weld is Norm and not _looks_like_norm(module):
        if hasattr(module, "normalized_shape") and not module._parameters:
            reason = "it has no weight: call torchweld.functional.layer_norm or rms_norm"
            yield Skipped(module, what, reason)
        return
    if (
        weld is Norm
        and not _list_epsilons(module)
        and not view.ask_once("norm", module, lambda: _normalises(module))
    ):
        return
    if weld is not Norm:
        inputs = (probe.values((4, *module.normalized_shape), view.device(module)),)  # type: ignore[misc]
        known = type(module).__module__.startswith("torch.")
        yield propose(module, weld, becomes, inputs=inputs, known=known)
    else:
        yield from _propose_other(module, what, view)


def _looks_like_norm(module: torch.nn.Module) -> bool:
    """Whether a module has a weight, at most a bias of the same length, and no buffer."""
    parameters = [value for value in module._parameters.values() if value is not None]
    same_shape = len({value.shape for value in parameters}) == 1
    buffered = any(value is not None for value in module._buffers.values())
    return same_shape and 1 <= len(parameters) <= 2 and parameters[0].ndim == 1 and not buffered


def _takes_channels_first(module: torch.nn.Module) -> bool:
    """Whether a module normalises dimension 1 of images, and takes no rows."""
    width = next(module.parameters()).shape[0]
    return not _normalises(module, (3, width)) and _normalises(module, (2, width, 3, 2))


def _normalises(module: torch.nn.Module, shape: tuple[int, ...] = ()) -> bool:
    """Whether a multiple of x gives the same result as x, as in norms. By default x has rows."""
    try:
        copy = Twin(module, torch.device("cpu"), torch.float32).module
        width = next(copy.parameters(), torch.empty(_WIDTH)).shape[0]
        x = 10 * torch.randn(shape or (3, width), generator=torch.Generator().manual_seed(0))
        with torch.no_grad():
            y, scaled = copy(x), copy(4 * x)
    except Exception as error:
        probe.read_refusal(error)
        return False
    same = isinstance(y, torch.Tensor) and y.shape == x.shape == scaled.shape
    return same and is_almost(y, scaled) and not torch.equal(y, x)


_WIDTH = 48  # of the rows on which a module without a weight is tried
# Epsilons that models have as constants in their code.
_CONSTANTS = (1e-5, 1e-6, 1e-8, 1e-12)


def _list_epsilons(module: torch.nn.Module) -> list[str]:
    attributes = vars(module).items()
    return [name for name, value in attributes if isinstance(value, float) and 0 < value < 0.1]


def _propose_without_weight(module: torch.nn.Module, view: View) -> Iterator[Proposal]:
    """A norm over the last dimension, as NanoChat's."""
    if not view.ask_once("norm", module, lambda: _normalises(module)):
        return
    inputs = (probe.values((2, 5, _WIDTH), view.device(module)),)
    for centered, eps in itertools.product((False, True), _list_epsilons(module)):
        settings = {"weight_name": None, "eps": eps, "centered": centered, "gate": None}
        becomes = "layer_norm" if centered else "rms_norm"
        yield propose(module, Norm, becomes, settings, inputs=inputs)


def _propose_other(module: torch.nn.Module, what: str, view: View) -> Iterator[Proposal | Skipped]:
    names = [name for name, value in module._parameters.items() if value is not None]
    weight = module._parameters[names[0]]
    assert weight is not None
    bias = names[1] if len(names) == 2 else None
    device = view.device(module)
    try:
        rule = view.ask_once("rule", module, lambda: _find_rule(module, device))
    except CannotCopyError as error:
        yield Skipped(module, what, str(error))
        return
    if view.ask_once("channels first", module, lambda: _takes_channels_first(module)):
        reason = "it normalises the channels of [N, C, H, W]; our norms are over the last dimension"
        yield Skipped(module, what, reason)
        return
    x = probe.values((2, 5, *weight.shape), device)
    for gate, centered, offset, eps in itertools.product(
        _list_gates(module),
        (True,) if bias else (False, True),
        (False, True),
        _list_epsilons(module) or _CONSTANTS,
    ):
        inputs = (x,) if gate is None else (x, x.flip(1))
        settings: dict[str, Any] = {"weight_name": names[0], "bias_name": bias, "eps": eps}
        settings |= {"centered": centered, "offset": offset, "rule": rule, "gate": gate}
        settings |= {} if gate is None else {"takes": 2}
        becomes = ("layer_norm" if centered else "rms_norm") + (", weight + 1" if offset else "")
        becomes += {None: "", "first": " of gated_act (silu)", "last": ", gated_act (silu)"}[gate]
        yield propose(module, Norm, becomes, settings, inputs=inputs)


def _list_gates(module: torch.nn.Module) -> tuple[str | None, ...]:
    """Where a gate may be applied: nowhere in a forward of one argument."""
    names, defaults = read_parameters(module)
    if len(names) != 2 or defaults.get(names[1]) is not None:
        return (None,)
    return ("first", "last", *([None] if names[1] in defaults else []))


def _find_rule(module: torch.nn.Module, device: torch.device) -> str:
    """The rule for the result's dtype if x and weight differ in dtype."""
    possible = set(RULES)
    for x, weight in ((torch.bfloat16, torch.float32), (torch.float32, torch.bfloat16)):
        copy = Twin(module, device, weight).module
        shape = next(copy.parameters()).shape
        try:
            with torch.no_grad():
                y = copy(probe.values((2, *shape), device).to(x))
        except Exception as error:
            probe.read_refusal(error)
            continue  # the module does not mix dtypes
        possible &= {name for name, rule in RULES.items() if rule(x, weight) == y.dtype}
    return next((name for name in RULES if name in possible), "x")
