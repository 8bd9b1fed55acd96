"""Trials of a change on twins: whether results stay the same, and how many bytes move."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from torchweld import numerics
from torchweld.fusion import probe
from torchweld.fusion.twin import Twin
from torchweld.fusion.weld import Change
from torchweld.numerics import Strictness, find_change, measure

# The most elements of a gradient that are compared.
_SAMPLE = 2**20


def why_not_same(
    scope: torch.nn.Module,
    changes: Sequence[Change],
    inputs: Sequence[Any],
    device: torch.device,
    *,
    drops: bool,
) -> str | None:
    """How results or gradients differ after the changes, or None if they agree.

    Args:
        scope: the module to run, which contains the changed modules.
        changes: changes of submodules of `scope`.
        inputs: inputs of `scope`; variations of them are tried too.
        device: the device of the run.
        drops: whether a change draws dropout from torchweld's stream. If so, one run drops nothing
            and one drops everything; else both forms drop the same elements.
    """
    own = {p.dtype for p in scope.parameters()} - {torch.float32}
    for dtype in sorted(numerics.MODULE, key=lambda dtype: (dtype != torch.float32, str(dtype))):
        original, changed = _make_pair(scope, changes, device, None if dtype in own else dtype)
        twins = _Twins(original, changed, Twin(scope, device, torch.float64).module)
        # The model may be cast to a dtype that is not its own.
        once = dtype != torch.float32 and dtype not in own
        runs = [_Run(inputs, once=once)]
        if dtype == torch.float32:
            runs.append(_Run(inputs, cast=torch.bfloat16))
            runs.append(_Run(inputs, ", without gradients", once=True, grads=False))
            runs += [_Run(x, f", with {what}", once=True) for what, x in probe.vary(inputs)]
        for each in runs:
            reason = _why_not_same_runs(twins, each, device, drops, dtype)
            if reason is not None:
                return reason + each.what
    return None


class _Run(NamedTuple):
    """Inputs, and the state of torch in a run.

    `once` runs evaluation only. It accepts inputs that the original refuses.
    """

    inputs: Sequence[Any]
    what: str = ""
    cast: torch.dtype | None = None
    once: bool = False
    grads: bool = True


class _Twins(NamedTuple):
    """Copies of a scope: the original, the changed one, and the original in float64."""

    original: torch.nn.Module
    changed: torch.nn.Module
    exact: torch.nn.Module


def _make_pair(
    scope: torch.nn.Module,
    changes: Sequence[Change],
    device: torch.device,
    dtype: torch.dtype | None,
) -> tuple[torch.nn.Module, torch.nn.Module]:
    """Copies of a scope before and after the changes, which share their parameters."""
    original = Twin(scope, device, dtype)
    changed = Twin(scope, device, dtype, original)
    for change in changes:
        change._replace(module=changed.of(change.module)).apply()
    return original.module, changed.module


def _why_not_same_runs(
    twins: _Twins, given: _Run, device: torch.device, drops: bool, dtype: torch.dtype
) -> str | None:
    """How the twins differ, or None."""
    inputs, _, cast, once, grads = given
    # Dropouts of probability zero, or of equal ones, get others: the user may set them later.
    own = [p for p in map(_read_dropout, twins.original.modules()) if p is not None]
    some = 0.25 if 0 in own or len(set(own)) < len(own) else None
    runs = ((True, 0.0), (True, 1.0), (False, 1.0)) if drops else ((True, some), (False, None))
    for training, p in runs[-1:] if once else runs:
        for twin in twins:
            for part in twin.modules():
                part.training = training
            if p is not None:
                _set_dropouts(twin, p)
        within = nullcontext() if cast is None else torch.autocast(device.type, cast)
        with within, torch.set_grad_enabled(grads):
            try:
                expected = probe.run(twins.original, inputs, dtype)
            except Exception as error:
                probe.read_refusal(error)
                if dtype == torch.float32 and cast is None and not once:
                    raise
                return None  # nothing to compare: the original does not run on these inputs
            if once and not _is_finite(expected):
                return None
            drawn = probe.read_random_states()
            try:
                results = probe.run(twins.changed, inputs, dtype)
            except Exception as error:
                return f"with the change {probe.read_refusal(error)}"
        # The weld draws what dropouts drop elsewhere. With theirs at zero nothing may be drawn.
        if drops and training:
            is_random = p == 0 and probe.depends_on_seed(twins.original, inputs, dtype)
        else:
            is_random = drawn != probe.read_random_states()
        if is_random:
            return "it draws random numbers that the change does not"
        with torch.set_grad_enabled(grads):
            truth = _run_exact(twins.exact, inputs, dtype) or expected
            rounded = None
            if (cast or dtype) in numerics.SHORT:
                rounded = _run_exact(twins.exact, inputs, dtype, _Rounding(cast or dtype))
        strictness = (numerics.PATHS if once else numerics.MODULE)[cast or dtype]
        compared = (expected, results, truth, rounded or expected)
        if reason := _why_not_same_results(compared, cast or dtype, strictness):
            where = f"in {'training' if training else 'evaluation'}, {str(cast or dtype)[6:]}"
            return f"it computes something else: {reason} {where}"
        for twin in (twins.original, twins.exact):  # the changed one shares parameters
            probe.freeze_large(twin)
    return None


def _run_exact(
    module: torch.nn.Module,
    inputs: Sequence[Any],
    dtype: torch.dtype,
    within: AbstractContextManager[Any] | None = None,
) -> probe.Results | None:
    """The results in float64 of inputs in this dtype; None if it computes in a dtype of its own."""
    rounded = [x.to(dtype) if isinstance(x, torch.Tensor) else x for x in inputs]
    try:
        return probe.run(module, rounded, torch.float64, within)
    except Exception as error:
        probe.read_refusal(error)
        return None


class _Rounding(TorchDispatchMode):
    """Rounds what float64 operations take and give to numbers of another dtype.

    The module does not know: it takes the branches that it takes in float64.
    """

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self._info = torch.finfo(dtype)

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        given = (args, kwargs or {})
        if not (function.is_view or function._schema.is_mutable):
            given = tree_map(self._round, given)
        result = function(*given[0], **given[1])
        for made in () if function.is_view else tree_leaves(result):
            rounded = self._round(made)
            if rounded is not made:
                made.copy_(rounded)
        return result

    def _round(self, value: Any) -> Any:
        is_number = isinstance(value, torch.Tensor) and value.dtype == torch.float64
        if not is_number or value._is_zerotensor():
            return value
        scaled = value * (1 + self._info.eps * 2**52)
        near = scaled - (scaled - value)  # of a shorter significand; large ones stay finite
        step = self._info.tiny * self._info.eps
        return torch.where(near.isfinite(), (near / step).round() * step, value)


def _is_finite(results: probe.Results) -> bool:
    values = (*results.outputs, *results.others)
    return all(y is None or bool(y.isfinite().all()) for y in values)


def _read_dropout(module: torch.nn.Module) -> float | None:
    return module.p if isinstance(module, torch.nn.modules.dropout._DropoutNd) else None


def _set_dropouts(module: torch.nn.Module, p: float) -> None:
    """Give each dropout a probability of its own, unless all or none is dropped."""
    of_each = itertools.repeat(p) if p in (0, 1) else (p / n for n in itertools.count(1))
    for part in module.modules():
        if isinstance(part, torch.nn.modules.dropout._DropoutNd):
            part.p = next(of_each)
        elif isinstance(part, torch.nn.MultiheadAttention):
            part.dropout = next(of_each)


def _why_not_same_results(
    compared: Sequence[probe.Results], dtype: torch.dtype, strictness: Strictness
) -> str | None:
    """How results differ from the expected ones, or None.

    What is compared: the expected results, those after the change, exact ones, and exact ones with
    each operation's result rounded.
    """
    if len({len(each.outputs) for each in compared}) > 1:
        return "the number of results differs"
    for values in zip(*(each.outputs for each in compared), strict=True):
        if reason := _why_not_near(values, dtype, strictness):
            return f"results {reason}"
    # A gradient may be zero except for rounding, such as a bias's before a batch norm.
    # Measure its error relative to the sizes of the other gradients.
    exact = [y for y in compared[2].others if y is not None and y.is_floating_point()]
    sizes = tuple(map(max, zip((0.0, 0.0), *(measure(_sample(y)) for y in exact), strict=True)))
    for before, after, *others in zip(*(each.others for each in compared), strict=True):
        if before is None or after is None:
            if before is not after:
                return "gradients are missing"
        elif reason := _why_not_near((before, after, *others), dtype, strictness, sizes):
            return f"gradients or buffers {reason}"
    return None


def _why_not_near(values: Sequence[torch.Tensor | None], *how: Any) -> str | None:
    """Why the second value is too far from the exact one; `how` are find_change's arguments."""
    before, after, exact, rounded = values
    assert before is not None
    assert after is not None
    if before.shape != after.shape or before.dtype != after.dtype:
        made = f"{after.dtype} of shape {list(after.shape)}"
        return f"differ: {made}, not {before.dtype} of {list(before.shape)}"
    if before.is_floating_point() and exact is not None and exact.shape == before.shape:
        before, after, exact = (_sample(value) for value in (before, after, exact))
        rounded = None if rounded is None else _sample(rounded)
    return find_change(before, after, exact, rounded, *how)


def _sample(values: torch.Tensor) -> torch.Tensor:
    """Take at most _SAMPLE elements, spread over the tensor, in order."""
    step = max(1, values.numel() // _SAMPLE)
    return values if step == 1 else values.flatten()[:: step + 1 - step % 2]


# --- Traffic --------------------------------------------------------------------------------------

_MORE, _SMALL = 32, 2**22
_GEMMS = ("mm", "bmm", "addmm", "baddbmm", "linear", "attention", "convolution", "matmul")
_VIEWS = ("detach", "empty", "empty_like", "_unsafe_view", "_reshape_alias")


class _Count(TorchDispatchMode):
    """Counts the bytes that operations read and write."""

    def __init__(self) -> None:
        super().__init__()
        self.nbytes = 0

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        result = function(*args, **(kwargs or {}))
        name = function._schema.name.partition("::")[2]
        if not (function.is_view or name in _VIEWS or any(part in name for part in _GEMMS)):
            tensors = tree_leaves((args, kwargs, result))
            self.nbytes += sum(t.nbytes for t in tensors if isinstance(t, torch.Tensor))
        return result


def measure_gain(
    scope: torch.nn.Module,
    changes: Sequence[Change],
    inputs: Sequence[Any],
    device: torch.device,
) -> float | None:
    """The factor by which the passes of `scope` move fewer bytes after the changes, or None.

    None if there are no bytes to compare with.
    """
    # Enough rows that the traffic of parameters matters as little as in training.
    more = _MORE if sum(p.numel() for p in scope.parameters()) < _SMALL else 2
    rows = [x if x is None else torch.cat([x] * more) for x in inputs]

    def count_bytes(module: torch.nn.Module) -> int:
        probe.freeze_large(module)  # gradients of large parameters are results of GEMMs
        count = _Count()
        probe.run(module.train(), rows, torch.float32, count)
        return count.nbytes

    before, after = map(count_bytes, _make_pair(scope, changes, device, torch.float32))
    return before / after if after else None
