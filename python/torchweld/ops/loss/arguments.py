"""Checks of the arguments of losses, the rows that losses make of them, and this device's part."""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from torchweld import checks, state
from torchweld.dispatch.dtensor import (
    as_dtensor,
    is_dtensor,
    is_strided,
    replicate,
    take_part,
)
from torchweld.dispatch.library import LIBRARY
from torchweld.errors import ArgumentError
from torchweld.ops.loss import rows
from torchweld.ops.loss.rows import How

FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
INDICES = (torch.int64, torch.int32, torch.uint8)
REDUCTIONS = ("mean", "sum", "none")
# Whether a target out of range raises an error on a GPU too: the check waits for the GPU.
_CHECKS_ON_GPU = os.environ.get("TORCHWELD_CHECK_TARGETS", "0") not in ("", "0")


def check_tensor(
    function: str, name: str, value: Any, dtypes: tuple[torch.dtype, ...] = FLOATS, beside: str = ""
) -> None:
    """Check for a dense tensor of one of these dtypes, whole on this device."""
    checks.dense(function, name, value, dtypes, beside)
    _refuse_dtensor(function, name, value)


def check_companion(
    function: str,
    name: str,
    value: Any,
    like: torch.Tensor,
    dtypes: tuple[torch.dtype, ...] = FLOATS,
    beside: str = "",
    **shape: Any,
) -> None:
    """Check for such a tensor on the device of the input; `shape` is that of checks.companion."""
    _refuse_dtensor(function, name, value)
    checks.companion(function, name, value, dtypes, like, "input", beside=beside, **shape)


def _refuse_dtensor(function: str, name: str, value: Any) -> None:
    if is_dtensor(value):
        accepted = "a plain tensor: gather it with full_tensor()"
        raise ArgumentError(function, name, "a DTensor", accepted)


def check_number(
    function: str,
    name: str,
    value: Any,
    accepted: str = "a number > 0",
    fits: Callable[[float], bool] = lambda x: 0 < x < math.inf,
) -> None:
    """Check for a number that fits, by default a positive finite one."""
    is_number = isinstance(value, checks.NUMBER) and not isinstance(value, bool)
    if not (is_number and fits(value)):
        raise ArgumentError(function, name, repr(value), accepted)


def check_choice(function: str, name: str, value: Any, accepted: tuple[Any, ...]) -> None:
    """Check for one of several values."""
    if not any(value is one or (isinstance(one, str) and value == one) for one in accepted):
        raise ArgumentError(function, name, repr(value), " or ".join(map(repr, accepted)))


def check_indices(function: str, name: str, value: Any, device: torch.device) -> None:
    """Check for indices of classes on this device."""
    check_tensor(function, name, value, INDICES)
    if value.device != device:
        raise ArgumentError(function, name, f"on {value.device}", f"the device of input, {device}")


def is_checked(target: torch.Tensor) -> bool:
    """Whether a target that is not a class raises an error; else its row becomes NaN."""
    return target.device.type == "cpu" or _CHECKS_ON_GPU


def _mark_ignored(
    target: torch.Tensor, classes: int, ignore_index: int, function: str
) -> torch.Tensor:
    target = target.to(torch.int64)
    ignored = target == ignore_index
    if is_checked(target):
        bad = ((target < 0) | (target >= classes)) & ~ignored
        if bool(bad.any()):
            first = bad.nonzero()[0].tolist()
            place = ", ".join(map(str, first))
            raise ArgumentError(
                function,
                f"target[{place}]" if first else "target",
                target[tuple(first)].item(),
                f"0 to {classes - 1}, or ignore_index, {ignore_index}",
            )
    else:  # kernels make a row NaN for a target that is neither -1 nor a class
        target = torch.where(target < 0, classes, target.clamp(max=classes))
    return torch.where(ignored, -1, target)


LIBRARY.define(
    "mark_ignored(Tensor target, SymInt classes, int ignore_index, str function) -> Tensor"
)
LIBRARY.impl("mark_ignored", _mark_ignored, "CompositeExplicitAutograd")
torch.library.register_fake(
    "torchweld::mark_ignored",
    lambda target, *_: torch.empty_like(
        target, dtype=torch.int64, memory_format=torch.contiguous_format
    ),
    lib=LIBRARY,
)


def _mark_batch(info: Any, at: tuple[Any, ...], target: torch.Tensor, *others: Any) -> Any:
    """vmap's rule: an error names the place in the whole batch."""
    marked = torch.ops.torchweld.mark_ignored.default(target.movedim(at[0], 0), *others)
    return marked, 0


torch.library.register_vmap("torchweld::mark_ignored", _mark_batch, lib=LIBRARY)


def mark_ignored(
    function: str, target: torch.Tensor, classes: int, ignore_index: int
) -> torch.Tensor:
    """Replace ignored targets by -1. An error names the first target that is not a class.

    On a GPU a target that is not a class makes its row NaN instead, without waiting for the GPU.
    """
    if state.can_read(target):
        return _mark_ignored(target, classes, ignore_index, function)
    marked = torch.ops.torchweld.mark_ignored.default(target, classes, ignore_index, function)
    return marked  # type: ignore[no-any-return]


class Settings(NamedTuple):
    """What calls of one kind have in common: checked arguments that are not tensors."""

    function: str
    leading: tuple[int, ...]  # the sizes of the rows
    classes: int
    ignored: Any  # the target of ignored rows
    several: int | None  # targets of a row; None: probabilities
    scale: float
    softcap: float  # 0: none
    logits_dtype: torch.dtype
    kind: torch.dtype  # of the sums
    reduction: str = "none"
    label_smoothing: float = 0.0
    z_loss: float = 0.0


def check_settings(
    function: str,
    like: torch.Tensor,
    logits_dtype: torch.dtype,
    leading: tuple[int, ...],
    classes: int,
    *,
    ignored: Any,
    several: int | None,
    weight: torch.Tensor | None = None,
    logit_scale: float | None = None,
    softcap: float | None = None,
    temperature: float | torch.Tensor | None = None,
) -> Settings:
    """Check what rows with these leading sizes become before a loss is made of them."""
    if several is not None and type(ignored) is not int:
        raise ArgumentError(function, "ignore_index", repr(ignored), "an integer")
    scale = 1.0 if logit_scale is None else logit_scale
    accepted = "a finite number other than 0"
    check_number(function, "logit_scale", scale, accepted, lambda x: 0 < abs(x) < math.inf)
    if softcap is not None:
        check_number(function, "softcap", softcap)
    share = 1.0
    if isinstance(temperature, torch.Tensor):
        check_companion(function, "temperature", temperature, like)
        if temperature.shape != leading:
            accepted = f"a number, or a tensor of the rows' shape, {list(leading)}"
            actual = f"of shape {list(temperature.shape)}"
            raise ArgumentError(function, "temperature", actual, accepted)
        _refuse_gradient(function, "temperature", temperature)
    elif temperature is not None:
        check_number(function, "temperature", temperature)
        share = float(temperature)
    if weight is not None:
        how: dict[str, Any] = {"shape": (classes,), "meaning": "one weight a class"}
        check_companion(function, "weight", weight, like, **how)
        _refuse_gradient(function, "weight", weight)
    # A number is folded into scale and cap: cap * tanh(scale * z / cap) / T.
    factors = (scale / share, 0.0 if softcap is None else softcap / share)
    kind = rows.accumulate_type(logits_dtype)
    return Settings(function, leading, classes, ignored, several, *factors, logits_dtype, kind)


def check_terms(
    settings: Settings,
    like: torch.Tensor,
    token_weights: torch.Tensor | None,
    reduction: str,
    label_smoothing: float,
    z_loss: float,
) -> Settings:
    """Check what a loss is made of, and add it to the settings."""
    function = settings.function
    check_choice(function, "reduction", reduction, REDUCTIONS)
    check_number(function, "label_smoothing", label_smoothing, "0 to 1", lambda x: 0 <= x <= 1)
    check_number(function, "z_loss", z_loss, "a finite number", lambda x: abs(x) < math.inf)
    if token_weights is not None:
        how: dict[str, Any] = {"shape": settings.leading, "meaning": "one weight a row"}
        check_companion(function, "token_weights", token_weights, like, **how)
    return Settings(*settings[:-3], reduction, float(label_smoothing), float(z_loss))


def check_target(
    function: str,
    target: Any,
    like: torch.Tensor,
    leading: tuple[int, ...],
    shape: tuple[int, ...],
) -> int | None:
    """Check for a class of each row, or for probabilities of this shape; returns `several`."""
    if isinstance(target, torch.Tensor) and target.is_floating_point():
        how: dict[str, Any] = {"shape": shape, "meaning": "one probability a class"}
        check_companion(function, "target", target, like, **how)
        return None
    check_indices(function, "target", target, like.device)
    checks.shaped(function, "target", target, leading, "one class a row")
    return 1


def read_rows(
    settings: Settings, target: torch.Tensor, weight: torch.Tensor | None, temperature: Any
) -> tuple[torch.Tensor, How]:
    """The targets as rows, and how u follows from the logits."""
    q = inverse = sum_of_weights = None
    count, kind, classes = math.prod(settings.leading), settings.kind, settings.classes
    if settings.several is None:
        q = target.reshape(count, target.shape[-1])
        q = q if q.dtype in (settings.logits_dtype, kind) else q.to(kind)
        target = q.new_empty((count, 0), dtype=torch.int64)
    else:
        marked = mark_ignored(settings.function, target, classes, settings.ignored)
        target = marked.reshape(count, settings.several)
    if isinstance(temperature, torch.Tensor):
        inverse = temperature.detach().reshape(-1).to(kind).reciprocal()
    if weight is not None:
        weight = weight.detach().to(kind)
        sum_of_weights = weight.sum()
    scaling = (settings.scale, settings.softcap)
    return target, How(sum_of_weights, weight, q, inverse, *scaling, classes, kind)


def _refuse_gradient(function: str, name: str, value: torch.Tensor) -> None:
    if value.requires_grad and torch.is_grad_enabled():
        raise ArgumentError(function, name, "a tensor that requires grad", "one without")


# --- Of several devices -----------------------------------------------------------------------


class Classes(NamedTuple):
    """The classes of this device, of a vocabulary that the devices of a group share."""

    group: str  # the name of the process group
    begin: int
    size: int
    whole: int  # the number of all classes
    most: int  # the largest number of classes that a device has


class Place(NamedTuple):
    """The rows and classes that this device holds of tensors on a mesh; without one, all."""

    function: str
    mesh: Any = None
    of_rows: tuple[Any, ...] = ()  # placements of tensors that have the input's leading dimensions
    leading: tuple[int, ...] = ()  # of the rows of all devices
    shared_along: int | None = None  # the dimension of the mesh that shares the vocabulary
    classes: Classes | None = None  # None: the device has all classes

    def take_rows(self, name: str, value: Any) -> Any:
        """Take this device's rows of a tensor; return any other value unchanged."""
        if self.mesh is None or not isinstance(value, torch.Tensor):
            return value
        if tuple(value.shape[: len(self.leading)]) != self.leading:
            accepted = f"the rows' shape, {[*self.leading]}"
            raise ArgumentError(self.function, name, f"of shape {[*value.shape]}", accepted)
        return take_part(self.function, name, value, self.mesh, self.of_rows, self.of_rows)

    def take_target(self, target: Any) -> Any:
        """Take this device's rows of a target, and its classes of probabilities."""
        soft = isinstance(target, torch.Tensor) and target.is_floating_point()
        if not soft or self.classes is None:
            return self.take_rows("target", target)
        shape = (*self.leading, self.classes.whole)
        checks.shaped(self.function, "target", target, shape, "one probability a class")
        if target.requires_grad and torch.is_grad_enabled():
            accepted = "ones without, where devices share the classes"
            actual = "probabilities that require grad"
            raise ArgumentError(self.function, "target", actual, accepted)
        from torch.distributed.tensor import Shard

        last, at = len(self.leading), self.shared_along
        placements = [Shard(last) if i == at else of for i, of in enumerate(self.of_rows)]
        return take_part(self.function, "target", target, self.mesh, placements, placements)

    def take_whole(self, name: str, value: Any) -> Any:
        """All of a tensor."""
        if self.mesh is None:
            return value
        whole = replicate(self.mesh)
        return take_part(self.function, name, value, self.mesh, whole, whole)

    def take_classes(self, target: torch.Tensor, how: How) -> tuple[torch.Tensor, How]:
        """Number targets from this device's first class on, and take its classes' weights.

        Other devices' targets are ELSEWHERE; -1 and targets that are not classes do not change.
        The sum of weights still covers all classes.
        """
        if self.classes is None:
            return target, how
        _, begin, size, whole, _ = self.classes
        here = target - begin
        here = torch.where((here >= 0) & (here < size), here, rows.ELSEWHERE)
        here = torch.where(target >= whole, size, here)
        if how.weight is not None:
            how = how._replace(weight=how.weight[begin : begin + size])
        return torch.where(target == -1, -1, here), how

    def add_up(self, x: torch.Tensor) -> torch.Tensor:
        """The sum over the devices that have different rows."""
        if self.mesh is None:
            return x
        from torch.distributed.tensor import DTensor, Partial, Replicate

        if all(isinstance(of, Replicate) for of in self.of_rows):
            return x
        parts = [of if isinstance(of, Replicate) else Partial() for of in self.of_rows]
        total = DTensor.from_local(x, self.mesh, parts, run_check=False)
        return total.redistribute(self.mesh, replicate(self.mesh)).to_local()  # type: ignore[no-any-return]

    def wrap(self, result: Any) -> Any:
        """Results of each row, or one number that all devices have, as DTensors."""
        if self.mesh is None:
            return result
        if isinstance(result, tuple):
            return tuple(map(self.wrap, result))
        if result.ndim == 0:
            return as_dtensor(result, self.mesh, replicate(self.mesh), ())
        shape = (*self.leading, *result.shape[len(self.leading) :])
        return as_dtensor(result.contiguous(), self.mesh, self.of_rows, shape)


def find_place(function: str, input: Any, weight: Any, bias: Any) -> tuple[Place, Any]:
    """Where this device's part of the work is, and its input, weight and bias."""
    if not any(map(is_dtensor, (input, weight, bias))):
        return Place(function), (input, weight, bias)
    if not is_dtensor(input):
        accepted = (
            "a DTensor, as linear_weight is: from_local(input, mesh, [Replicate()]) where devices "
            "share the vocabulary. Of a layer under FSDP2 call the forward, which gathers its "
            "weight once"
        )
        raise ArgumentError(function, "input", "a plain tensor", accepted)
    from torch.distributed.tensor import Partial, Replicate, Shard

    mesh, count = input.device_mesh, input.ndim - 1
    on_weight = weight.placements if is_dtensor(weight) else replicate(mesh)
    if is_dtensor(weight) and weight.device_mesh != mesh:
        raise ArgumentError(function, "linear_weight", "on another mesh", "the mesh of input")
    along = [at for at, of in enumerate(on_weight) if not isinstance(of, Replicate)]
    fits = [isinstance(on_weight[at], Shard) and on_weight[at].dim == 0 for at in along]
    if not all(fits) or len(along) > 1 or any(map(is_strided, on_weight)):
        placed = ", ".join(map(str, on_weight))
        accepted = "Shard(0) along at most one dimension of the mesh, Replicate() along the others"
        raise ArgumentError(function, "linear_weight", f"a DTensor placed {placed}", accepted)
    shared = along[0] if along else None
    if any(map(is_strided, input.placements)):
        raise ArgumentError(function, "input", "a DTensor with strided shards", "Shard(dim)")
    of_rows, on_input, of_classes = [], [], []
    for at, of in enumerate(input.placements):
        keeps = at != shared and isinstance(of, Shard) and of.dim < count
        of_rows.append(of if keeps else Replicate())
        on_input.append(Partial() if at == shared else of_rows[-1])
        of_classes.append(Shard(0) if at == shared else Partial() if keeps else Replicate())
    classes = None
    if shared is not None:
        whole, size = weight.shape[0], mesh.size(shared)
        each = -(-whole // size)
        begin = min(each * mesh.get_local_rank(shared), whole)
        group = mesh.get_group(shared).group_name
        classes = Classes(group, begin, min(each, whole - begin), whole, each)
    of_weight = tuple(on_weight)
    parts = (
        take_part(function, "input", input, mesh, of_rows, on_input),
        take_part(function, "linear_weight", weight, mesh, of_weight, of_classes),
        take_part(function, "linear_bias", bias, mesh, of_weight, of_classes),
    )
    leading = tuple(input.shape[:-1])
    return Place(function, mesh, tuple(of_rows), leading, shared, classes), parts
