"""Whether a change keeps what a module computes: tried on twins, in several dtypes."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import torch

from torchweld.fuse import probe
from torchweld.fuse.twin import Twin
from torchweld.fuse.weld import Change

# Errors are those against float64: their root mean square, then the largest. Either may be
# this many times the original's, and this many units of rounding of the result more.
_OF_ORIGINAL = (2.0, 4.0)
_ROUNDINGS = {torch.float32: (4.0, 16.0), torch.bfloat16: (1.5, 4.0), torch.float16: (1.5, 4.0)}


def why_different(
    scope: torch.nn.Module,
    changes: Sequence[Change],
    inputs: Sequence[Any],
    device: torch.device,
    *,
    drops: bool,
) -> str | None:
    """How results or gradients differ after the changes; None: they agree.

    Args:
        scope: what is run: the modules that change are parts of it.
        changes: of parts of `scope`.
        inputs: on which it runs.
        device: where it runs.
        drops: whether a change draws its dropout from torchweld's stream. Nothing is dropped then;
            else both drop the same.
    """
    own = {p.dtype for p in scope.parameters() if p.dtype in _ROUNDINGS} - {torch.float32}
    for dtype in (torch.float32, *sorted(own, key=str)):
        for cast in (None, torch.bfloat16) if dtype == torch.float32 else (None,):
            found = _differs(scope, changes, inputs, device, drops, dtype, cast)
            if found is not None:
                return found
    return None


def _differs(
    scope: torch.nn.Module,
    changes: Sequence[Change],
    inputs: Sequence[Any],
    device: torch.device,
    drops: bool,
    dtype: torch.dtype,
    cast: torch.dtype | None,
) -> str | None:
    kept = None if dtype != torch.float32 else dtype
    original, changed = Twin(scope, device, kept), Twin(scope, device, kept)
    exact = Twin(scope, device, torch.float64)
    for change in changes:
        change.of(changed.of(change.module)).apply()
    modules = (original.module, changed.module, exact.module)
    if drops:
        for part in (part for module in modules for part in module.modules()):
            drop_nothing(part)
    for training in (True, False):
        for module in modules:
            module.train(training)
        where = f"in {'training' if training else 'evaluation'}, {str(cast or dtype)[6:]}"
        as_cast = nullcontext() if cast is None else torch.autocast(device.type, cast)
        with as_cast:
            try:
                expected = probe.run(original.module, inputs, dtype)
            except Exception:
                if dtype == torch.float32 and cast is None:
                    raise
                return None  # nothing to keep: the original does not run so
            try:
                found = probe.run(changed.module, inputs, dtype)
            except Exception as error:
                return f"it raised {where}: {error}"
        try:
            truth = probe.run(exact.module, [_rounded(x, dtype) for x in inputs], torch.float64)
        except Exception:
            truth = expected  # it has a dtype of its own inside
        if reason := _compare(expected, found, truth, cast or dtype):
            return f"{reason} {where}"
    return None


def drop_nothing(module: torch.nn.Module) -> None:
    """Set every probability of dropout to zero."""
    if isinstance(module, torch.nn.modules.dropout._DropoutNd):
        module.p = 0.0
    elif isinstance(module, torch.nn.MultiheadAttention):
        module.dropout = 0.0


def _rounded(value: Any, dtype: torch.dtype) -> Any:
    return value.to(dtype) if isinstance(value, torch.Tensor) else value


def _compare(
    expected: probe.Ran, found: probe.Ran, truth: probe.Ran, dtype: torch.dtype
) -> str | None:
    results = [ran.outputs for ran in (expected, found, truth)]
    others = [ran.others for ran in (expected, found, truth)]
    for name, lists in (("results", results), ("gradients or buffers", others)):
        if len({len(values) for values in lists}) > 1:
            return f"the number of {name} differs"
        for a, b, exact in zip(*lists, strict=True):
            if (a is None) != (b is None):
                return f"{name} are missing"
            if a is not None and (reason := _why_far(a, b, exact, dtype)):
                return f"{name} {reason}"
    return None


def _why_far(
    a: torch.Tensor, b: torch.Tensor, truth: torch.Tensor | None, dtype: torch.dtype
) -> str | None:
    if a.shape != b.shape or a.dtype != b.dtype:
        return f"differ: {b.dtype} of shape {list(b.shape)}, not {a.dtype} of {list(a.shape)}"
    if not a.is_floating_point() or truth is None or truth.shape != a.shape:
        return None if torch.equal(a, b) else "differ"
    truth = truth.double()
    if not truth.isfinite().all() or not a.numel():
        return None if torch.equal(a.isfinite(), b.isfinite()) else "differ where they are finite"
    errors = [(value.double() - truth).abs() for value in (a, b)]
    eps = torch.finfo(dtype).eps
    measures = (lambda t: t.square().mean().sqrt(), lambda t: t.abs().max())
    for measure, of_original, roundings in zip(
        measures, _OF_ORIGINAL, _ROUNDINGS[dtype], strict=True
    ):
        allowed = of_original * measure(errors[0]) + roundings * eps * measure(truth)
        if not measure(errors[1]) <= allowed:
            ratio = float(measure(errors[1]) / (eps * measure(truth)))
            return f"differ by {ratio:.3g} units of rounding"
    return None
