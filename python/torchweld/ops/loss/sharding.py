"""Losses of sharded tensors: this device's rows and classes, and what devices exchange.

Logits stay where they are computed. Devices that share the classes exchange a few numbers a row.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from torchweld import checks
from torchweld.dispatch.dtensor import (
    as_dtensor,
    is_dtensor,
    is_strided,
    replicate,
    take_part,
)
from torchweld.errors import ArgumentError
from torchweld.ops.loss import rows
from torchweld.ops.loss.results import Outputs
from torchweld.ops.loss.rows import LossTransform
from torchweld.registry import why_not_now


class Classes(NamedTuple):
    """The classes of this device, of a vocabulary that the devices of a group share."""

    group: str  # the name of the process group
    begin: int
    size: int
    whole: int  # the number of all classes
    most: int  # the largest number of classes that a device has
    function: str


class Sharding(NamedTuple):
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

    def take_classes(
        self, target: torch.Tensor, how: LossTransform
    ) -> tuple[torch.Tensor, LossTransform]:
        """Number targets from this device's first class on, and take its classes' weights.

        Other devices' targets are ELSEWHERE; -1 and targets that are not classes do not change.
        The sum of weights still covers all classes.
        """
        if self.classes is None:
            return target, how
        begin, size, whole = self.classes[1:4]
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

    def refuse_transforms(self, name: str) -> None:
        """Refuse what only eager torch serves, with all classes on this device."""
        if self.classes is not None:
            accepted = "one that no transform sees: devices share its classes"
            raise ArgumentError(self.function, name, why_not_now(), accepted)

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


def find_sharding(function: str, input: Any, weight: Any, bias: Any) -> tuple[Sharding, Any]:
    """Where this device's part of the work is, and its input, weight and bias."""
    if not any(map(is_dtensor, (input, weight, bias))):
        return Sharding(function), (input, weight, bias)
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
    classes = None if shared is None else _find_classes(function, mesh, shared, weight.shape[0])
    of_weight = tuple(on_weight)
    parts = (
        take_part(function, "input", input, mesh, of_rows, on_input),
        take_part(function, "linear_weight", weight, mesh, of_weight, of_classes),
        take_part(function, "linear_bias", bias, mesh, of_weight, of_classes),
    )
    leading = tuple(input.shape[:-1])
    return Sharding(function, mesh, tuple(of_rows), leading, shared, classes), parts


def find_sharding_of_logits(function: str, logits: torch.Tensor) -> tuple[Sharding, torch.Tensor]:
    """Where this device's part of given logits [*, V] is, and that part."""
    if not is_dtensor(logits):
        return Sharding(function), logits
    from torch.distributed.tensor import Replicate, Shard

    given: Any = logits
    mesh, last = given.device_mesh, given.ndim - 1
    own = [of if isinstance(of, Shard) else Replicate() for of in given.placements]
    along = [at for at, of in enumerate(own) if isinstance(of, Shard) and of.dim == last]
    if len(along) > 1 or any(map(is_strided, given.placements)):
        placed = ", ".join(map(str, given.placements))
        accepted = "no strided shards, and shards of the classes along one dimension of the mesh"
        raise ArgumentError(function, "input", f"a DTensor placed {placed}", accepted)
    shared = along[0] if along else None
    classes = None if shared is None else _find_classes(function, mesh, shared, given.shape[last])
    of_rows = tuple(Replicate() if at == shared else of for at, of in enumerate(own))
    part = take_part(function, "input", logits, mesh, own, own)
    return Sharding(function, mesh, of_rows, tuple(given.shape[:-1]), shared, classes), part


def _find_classes(function: str, mesh: Any, shared: int, whole: int) -> Classes:
    """The classes of this device, if a dimension of the mesh shares them."""
    each = -(-whole // mesh.size(shared))
    begin = min(each * mesh.get_local_rank(shared), whole)
    group = mesh.get_group(shared).group_name
    return Classes(group, begin, min(each, whole - begin), whole, each, function)


# --- What devices exchange


def reduce(x: torch.Tensor, operation: str, group: str) -> torch.Tensor:
    """The sum, or another operation, over the devices of a group."""
    ops = torch.ops._c10d_functional
    reduced = ops.all_reduce.default(x.contiguous(), operation, group)
    return ops.wait_tensor.default(reduced)  # type: ignore[no-any-return]


def combine(
    own: Classes,
    made: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    target: torch.Tensor,
    wanted: Outputs,
    soft: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Combine the devices' results into the row kernel's results for the whole vocabulary.

    Devices exchange, for each row, the largest logit; then the sum of exponentials, the targets'
    logits and the other sums that are wanted; then the class of the largest logit, if wanted.
    """
    picked, statistics, argmax = made
    mine = statistics[:, rows.HIGHEST]
    highest = reduce(mine, "max", own.group)
    # Where both are -inf, their difference is NaN.
    step = torch.where(mine == highest, 0, mine - highest)
    factor, total = step.exp(), statistics[:, rows.SUM]
    sums = {rows.SUM: factor * total}
    if wanted.entropy:
        entropy = factor * (statistics[:, rows.ENTROPY_SUM] + step * total)
        sums[rows.ENTROPY_SUM] = torch.where(factor == 0, 0, entropy)
    if wanted.smooth:
        sums[rows.SMOOTH] = statistics[:, rows.SMOOTH]
    if soft:
        sums[rows.DOT], sums[rows.MASS] = statistics[:, rows.DOT], statistics[:, rows.MASS]
    packed = torch.cat([torch.stack([*sums.values()], 1), picked], 1)
    packed = reduce(packed, "sum", own.group)
    columns = [torch.zeros_like(mine)] * rows.STATISTICS
    columns[rows.HIGHEST] = highest
    for at, column in enumerate(sums):
        columns[column] = packed[:, at]
    ignored = rows.is_ignored(target)
    whole = torch.where(ignored.unsqueeze(1), statistics, torch.stack(columns, 1))
    if wanted.argmax:
        best = torch.where((mine == highest) & (argmax >= 0), argmax + own.begin, own.whole)
        best = reduce(best, "min", own.group)
        # No logit of a row with NaN is the largest.
        argmax = torch.where(ignored, -1, torch.where(best == own.whole, 0, best))
    return packed[:, len(sums) :].contiguous(), whole, argmax


def run_both(
    own: Classes,
    logits: torch.Tensor,
    target: torch.Tensor,
    coefficients: torch.Tensor,
    grad_picked: torch.Tensor,
    *rest: Any,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The row kernel with this name, whose results are of the whole vocabulary."""
    *given, smooth, argmax = rest
    made = rows.FORWARD.run(logits, target, *given, False, smooth, argmax)
    made = combine(own, made, target, Outputs(smooth=smooth, argmax=argmax), given[1] is not None)
    grads = (made[1], coefficients, grad_picked)
    rows.BACKWARD_IN_PLACE.run(logits, target, *grads, *given)
    return made


def refuse_second_derivatives(classes: Classes | None) -> None:
    """Refuse second derivatives: they need all logits at once, which no device has."""
    if classes is not None:
        accepted = "False where devices share the classes"
        raise ArgumentError(classes.function, "create_graph", "True", accepted)
