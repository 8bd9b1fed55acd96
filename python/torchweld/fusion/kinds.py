"""Recognises what a module computes by running it: an activation, or a linear layer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.nn.functional import linear

from torchweld.fusion import probe
from torchweld.fusion.twin import CannotCopyError, Twin
from torchweld.ops.activation import ACTIVATIONS

_CPU = torch.device("cpu")


def recognise_activation(
    functions: Sequence[Callable[[torch.Tensor], Any]],
) -> tuple[str, str] | None:
    """Name and approximation of the activation that all these functions compute, or None.

    The functions run on small and large numbers.
    """
    x = torch.cat([torch.linspace(-12, 12, 961), torch.tensor([-1e3, -50.0, 50.0, 1e3])]).view(
        5, -1
    )
    try:
        with torch.no_grad():
            results = [function(x.clone()) for function in functions]
    except Exception as error:
        probe.read_refusal(error)
        return None
    for kind, known in ACTIVATIONS.items():
        expected = known.function(x.double())
        allowed = 2e-6 * (1 + expected.abs())
        if kind[0] != "identity" and all(_is_near(y, expected, allowed) for y in results):
            return kind
    return None


def recognise_module_activation(module: torch.nn.Module) -> tuple[str, str] | None:
    """The activation that a module computes in training and in evaluation, or None."""
    try:
        copies = [Twin(module, _CPU).module.train(training) for training in (True, False)]
    except CannotCopyError:
        return None
    return recognise_activation(copies)


def is_elementwise(module: torch.nn.Module) -> bool:
    """Whether a part of x gives the same part of the result, and the result is not x."""
    x = probe.values((5, 193), _CPU)
    try:
        copy = Twin(module, _CPU).module.train()
        with torch.no_grad():
            y, part = copy(x.clone()), copy(x[1:, :7].clone())
    except Exception as error:
        probe.read_refusal(error)
        return False
    same_shape = isinstance(y, torch.Tensor) and y.shape == x.shape
    return same_shape and _is_near(part, y[1:, :7].double(), 1e-6) and not torch.equal(y, x)


def recognise_linear(module: torch.nn.Module) -> str | None:
    """Whether a module with a matrix is a linear layer: "plain", "transposed", or None."""
    try:
        copy: Any = Twin(module, _CPU, torch.float32).module
        weight, bias = copy.weight.detach(), copy._parameters.get("bias")
        for form, matrix in (("plain", weight), ("transposed", weight.t())):
            if bias is not None and bias.shape != matrix.shape[:1]:
                continue
            with torch.no_grad():
                x = probe.values((2, 5, matrix.shape[1]), _CPU)
                expected = linear(x, matrix, bias)
                if _is_near(copy(x), expected.double(), 1e-4):
                    return form
    except Exception as error:
        probe.read_refusal(error)
    return None


def _is_near(y: Any, expected: torch.Tensor, allowed: Any) -> bool:
    same = isinstance(y, torch.Tensor) and y.shape == expected.shape
    return same and bool(((y.double() - expected).abs() <= allowed).all())
