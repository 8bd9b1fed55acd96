"""Styles of `parallelize_module` for fused modules, which torch's own styles refuse or gather.

Modules take and return local tensors. Ops that need the place of a part in the whole tensor are
told: dropout then drops the same elements as in one process.

A style with `ring` set takes a mesh of two dimensions, ring and tensor. The ring shards the
sequence outside of the styles: what a style says is along the second dimension.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import (
    DTensor,
    Partial,
    Placement,
    Replicate,
    Shard,
    distribute_module,
    distribute_tensor,
)
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel
from torch.distributed.tensor.placement_types import _StridedShard
from torch.utils.weak import WeakTensorKeyDictionary

from torchweld.errors import ArgumentError


class Style(ParallelStyle):
    """A style along the only dimension of a mesh, or along the second one of ring and tensor."""

    ring = False

    def __init__(self, **layouts: Any) -> None:
        super().__init__(**layouts)
        # The whole plan, if it has one, until it is checked.
        self.plan: list[tuple[str, torch.nn.Module, Style]] = []

    def _apply(self, module: torch.nn.Module, device_mesh: DeviceMesh) -> torch.nn.Module:
        """Change a module, once every style of the plan can do that with its own."""
        for name, other, style in self.plan or [(type(module).__name__, module, self)]:
            style.check(name, other, device_mesh.size(-1))
        self.plan.clear()
        return self._change(module, device_mesh)

    def check(self, name: str, module: torch.nn.Module, count: int) -> None:
        """Raise an error if a module cannot be divided among this many devices."""

    def _change(self, module: torch.nn.Module, device_mesh: DeviceMesh) -> torch.nn.Module:
        raise NotImplementedError

    def rows(self, placement: Placement) -> tuple[Placement, ...]:
        """The placements of an activation [batch, length, ...]."""
        return (Shard(1), placement) if self.ring else (placement,)

    def weights(self, placement: Placement) -> tuple[Placement, ...]:
        """The placements of a parameter."""
        return (Replicate(), placement) if self.ring else (placement,)

    def distribute(
        self, module: torch.nn.Module, mesh: DeviceMesh, place: Callable[[torch.Tensor], Placement]
    ) -> None:
        """Convert a module's own parameters to DTensors; one that modules share stays one.

        Their gradients get the same placements, as optimizers require: a partial one is summed.
        """
        for name, parameter in module.named_parameters(recurse=False):
            placements = self.weights(place(parameter))
            made = _MADE.get(parameter)
            if made is None or (made.device_mesh, made.placements) != (mesh, placements):
                part = distribute_tensor(parameter.detach(), mesh, placements)
                made = torch.nn.Parameter(part, requires_grad=parameter.requires_grad)
                if made.requires_grad:
                    made.register_hook(partial(_align, part.placements))
                _MADE[parameter] = made
            module.register_parameter(name, made)

    def replicate(self, _: str, module: torch.nn.Module, mesh: DeviceMesh) -> None:
        """Convert a module's own parameters to DTensors that every device has."""
        self.distribute(module, mesh, lambda _: Replicate())


# From parameters to the DTensors made of them, as long as another module has the parameter.
_MADE: Any = WeakTensorKeyDictionary()


def _align(wanted: Sequence[Placement], grad: Any) -> Any:
    """Give a gradient these placements before it is added to others."""
    if grad.placements == wanted:
        return grad
    pairs = zip(grad.placements, wanted, strict=True)
    # Cut a replicated gradient before it is summed: then only this device's part is sent.
    cut = [its if was.is_replicate() else was for was, its in pairs]
    return grad.redistribute(placements=cut).redistribute(placements=wanted)


def _placed(x: Any, mesh: DeviceMesh, placements: Sequence[Placement]) -> Any:
    if isinstance(x, DTensor):
        return x.redistribute(mesh, placements)
    return DTensor.from_local(x, mesh, placements, run_check=False)


def _local(x: Any) -> Any:
    if isinstance(x, tuple):
        return tuple(map(_local, x))
    return x.to_local() if isinstance(x, DTensor) else x


class Rows(Style):
    """Shard the rows of the stream, and replicate the module's parameters.

    For norms, dropouts, attention without weights, and anything else that works on rows or heads.

    Args:
        placement: placement of the first input, and of all inputs of the same rank.
    """

    def __init__(self, placement: Placement) -> None:
        super().__init__()
        self.placement = placement

    def _change(self, module: torch.nn.Module, device_mesh: DeviceMesh) -> torch.nn.Module:
        return distribute_module(module, device_mesh, self.replicate, self._inputs, self._outputs)

    def _inputs(self, module: torch.nn.Module, inputs: Any, mesh: DeviceMesh) -> Any:
        rank = inputs[0].ndim
        check_rank(type(module).__name__, inputs[0], self.rows(self.placement))

        def placed(x: Any) -> Any:
            if not isinstance(x, torch.Tensor):
                return x
            whole = [Replicate()] * mesh.ndim
            return _placed(x, mesh, whole if x.ndim != rank else self.rows(self.placement))

        return tuple(map(placed, inputs))

    def _outputs(self, module: torch.nn.Module, outputs: Any, mesh: DeviceMesh) -> Any:
        return _local(outputs)


class Dropped(Style):
    """nn.Dropout of a shard: draw the mask of the whole tensor, and use the shard's part.

    So a model drops the same elements as in one process, and torch's generator advances alike.
    Every device generates random numbers for the whole tensor.

    Args:
        dim: the sharded dimension.
        along: how many of the mesh's dimensions shard it, from the first; None: all.
    """

    def __init__(self, dim: int, along: int | None = None) -> None:
        super().__init__()
        self.dim, self.along = dim, along

    def _change(self, module: torch.nn.Module, device_mesh: DeviceMesh) -> torch.nn.Module:
        assert isinstance(module, torch.nn.Dropout)
        module.forward = partial(self._drop, module, device_mesh)  # type: ignore[method-assign]
        return module

    def _drop(self, module: torch.nn.Dropout, mesh: DeviceMesh, x: torch.Tensor) -> torch.Tensor:
        if not module.training or module.p == 0:
            return x
        sizes, place = mesh.shape[: self.along], 0
        for size, at in zip(sizes, mesh.get_coordinate() or (), strict=False):
            place = place * size + at
        shape, count = list(x.shape), math.prod(sizes)
        shape[self.dim] *= count
        factors = torch.nn.functional.dropout(x.new_ones(shape), module.p)
        return x * factors.chunk(count, self.dim)[place]


class Gather(Style):
    """Gather the input of several column-parallel layers once, and reduce its gradient once.

    Args:
        placement: placement of the module's first input.
        name: the input's name, if it is passed by name.
        projections: in attention, the names of its layers whose heads are divided.
    """

    def __init__(
        self, placement: Placement, name: str = "hidden_states", projections: Sequence[str] = ()
    ) -> None:
        super().__init__()
        self.placement, self.name, self.projections = placement, name, projections

    def check(self, name: str, module: torch.nn.Module, count: int) -> None:
        width = head_width(module)
        for projection in self.projections if width else ():
            heads, rest = divmod(getattr(module, projection).weight.shape[0], width)
            if rest or heads % count:
                came = f"with {heads} heads in {name}.{projection}"
                accepted = f"numbers of heads and key heads that {count} devices divide"
                raise ArgumentError("tp_plan", "model", came, accepted)

    def _change(self, module: torch.nn.Module, device_mesh: DeviceMesh) -> torch.nn.Module:
        def before(_: Any, args: Any, kwargs: Any) -> Any:
            return _changed(args, kwargs, self.name, lambda x: self._whole(x, device_mesh))

        module.register_forward_pre_hook(before, with_kwargs=True)
        return module

    def _whole(self, x: torch.Tensor, mesh: DeviceMesh) -> Any:
        check_rank("tp_plan", x, self.rows(self.placement))
        placed = _placed(x, mesh, self.rows(self.placement))
        return placed.redistribute(mesh, self.rows(Replicate()))


def head_width(module: torch.nn.Module) -> int:
    """The width of a head of this attention; 0 if it does not say."""
    names = ("head_dim", "attention_head_size", "head_width", "head_size")
    found = [value for name in names if isinstance(value := getattr(module, name, None), int)]
    return found[0] if found else 0


class Stream(Style):
    """Shard the sequence from the block that begins it to the one that ends it.

    Args:
        begins: continue with this device's part of the input.
        ends: gather the output.
        name: the input's name, if it is passed by name.
    """

    def __init__(self, begins: bool, ends: bool, name: str = "hidden_states") -> None:
        super().__init__()
        self.begins, self.ends, self.name = begins, ends, name

    def _change(self, module: torch.nn.Module, device_mesh: DeviceMesh) -> torch.nn.Module:
        def moved(x: Any, was: Placement, becomes: Placement) -> Any:
            if isinstance(x, tuple):
                return (moved(x[0], was, becomes), *x[1:])
            x = _placed(x, device_mesh, self.rows(was))
            return x.redistribute(device_mesh, self.rows(becomes)).to_local()

        def before(_: Any, args: Any, kwargs: Any) -> Any:
            return _changed(args, kwargs, self.name, begin)

        def begin(x: torch.Tensor) -> torch.Tensor:
            if x.shape[1] % (count := device_mesh.size(-1)):
                accepted = f"a multiple of {count}, whose devices share the sequence"
                raise ArgumentError("tp_plan", "the sequence", f"{x.shape[1]} tokens", accepted)
            return moved(x, Replicate(), Shard(1))

        if self.begins:
            module.register_forward_pre_hook(before, with_kwargs=True)
        if self.ends:
            module.register_forward_hook(lambda _, __, y: moved(y, Shard(1), Replicate()))
        return module


class AddedAndNormalized(Style):
    """The end of a welded post-norm block: norm(dropout(dense(x)) + residual).

    `dense` has its own style; this one places the residual and the norm's parameters.

    Args:
        placement: placement of the stream.
        name: the residual's name, if it is passed by name.
    """

    def __init__(self, placement: Placement, name: str = "input_tensor") -> None:
        super().__init__()
        self.placement, self.name = placement, name

    def _change(self, module: torch.nn.Module, device_mesh: DeviceMesh) -> torch.nn.Module:
        norm = module.get_submodule(norm_of(module))
        self.replicate("", norm, device_mesh)

        def before(_: Any, args: Any, kwargs: Any) -> Any:
            x, *rest = args
            _, kwargs = _changed(rest, kwargs, self.name, self._place(device_mesh))
            rest = [self._place(device_mesh)(value) for value in rest]
            return (x, *rest), kwargs

        module.register_forward_pre_hook(before, with_kwargs=True)
        module.register_forward_hook(lambda _module, _args, outputs: _local(outputs))
        return module

    def _place(self, mesh: DeviceMesh) -> Any:
        return lambda x: _placed(x, mesh, self.rows(self.placement))


def norm_of(module: torch.nn.Module) -> str:
    """The name of the norm at the end of a welded post-norm block."""
    return getattr(module, "weld_norm", "LayerNorm")


def _changed(args: Any, kwargs: Any, name: str, change: Any) -> Any:
    """Replace the first argument, or the one of this name."""
    if args:
        return (change(args[0]), *args[1:]), kwargs
    return args, {**kwargs, name: change(kwargs[name])}


class Columns(Style, ColwiseParallel):
    """ColwiseParallel, also for linear layers with an activation and for transposed weights."""

    def check(self, name: str, module: torch.nn.Module, count: int) -> None:
        weight: Any = module.weight
        features = weight.shape[1 if is_transposed(module) else 0]
        # What is gathered next can be of any size, such as logits.
        if features % count and not self.output_layouts[0].is_replicate():
            came = f"with {features} features in {name}"
            raise ArgumentError("tp_plan", "model", came, f"features that {count} devices divide")

    def _change(self, module: torch.nn.Module, device_mesh: DeviceMesh) -> torch.nn.Module:
        def cut(_: str, layer: torch.nn.Module, mesh: DeviceMesh) -> None:
            dim = 1 if is_transposed(layer) else 0
            self.distribute(layer, mesh, lambda p: Shard(dim if p.ndim > 1 else 0))

        return _between(self, module, device_mesh, cut, Replicate())


class ColumnsOfRows(Style, RowwiseParallel):
    """RowwiseParallel, also for transposed weights: the input's features are sharded."""

    def _change(self, module: torch.nn.Module, device_mesh: DeviceMesh) -> torch.nn.Module:
        def cut(_: str, layer: torch.nn.Module, mesh: DeviceMesh) -> None:
            dim = 0 if looked_up or is_transposed(layer) else 1
            self.distribute(layer, mesh, lambda p: Shard(dim) if p.ndim > 1 else Replicate())

        looked_up = isinstance(module, torch.nn.Embedding)
        if not (looked_up or isinstance(module, torch.nn.Linear) or is_transposed(module)):
            came, accepted = f"a {type(module).__name__}", "a linear layer or an embedding"
            raise ArgumentError("ColumnsOfRows", "module", came, accepted)
        if self.ring and isinstance(module, torch.nn.Linear):
            module.forward = partial(_summed, module, self.rows(*self.output_layouts))  # type: ignore[method-assign]
        return _between(self, module, device_mesh, cut, Replicate() if looked_up else Shard(-1))


def _between(
    style: Any, module: torch.nn.Module, mesh: DeviceMesh, cut: Any, wanted: Placement
) -> torch.nn.Module:
    """Cut a layer whose input is `wanted`; its style says what comes in and what goes out."""
    comes, goes = style.rows(*style.input_layouts), style.rows(*style.output_layouts)
    return distribute_module(
        module,
        mesh,
        cut,
        partial(_arrive, style._prepare_input_fn, comes, style.rows(wanted)),
        partial(style._prepare_output_fn, goes, style.use_local_output),
    )


def _arrive(prepare: Any, comes: Any, wanted: Any, module: Any, inputs: Any, mesh: Any) -> Any:
    check_rank(type(module).__name__, inputs[0], comes)
    return prepare(comes, wanted, module, inputs, mesh)


def check_rank(name: str, x: torch.Tensor, placements: Sequence[Placement]) -> None:
    """Raise an error for rows that were flattened: their second dimension is not the sequence."""
    if x.ndim < 3 and x.is_floating_point() and Shard(1) in placements:
        accepted = "[batch, length, features]: devices share the sequence"
        raise ArgumentError(name, "the input", f"of shape {list(x.shape)}", accepted)


def _summed(layer: torch.nn.Linear, goes: Sequence[Placement], x: Any) -> Any:
    """A linear layer of local features, which DTensor's rule would gather along a ring."""
    weight: Any = layer.weight
    y = torch.nn.functional.linear(
        x.to_local(), weight.to_local(grad_placements=(Partial(), Shard(1)))
    )
    whole = DTensor.from_local(y, x.device_mesh, (Shard(1), Partial()), run_check=False)
    whole = whole.redistribute(placements=goes)
    return whole if layer.bias is None else whole + layer.bias


def is_transposed(module: torch.nn.Module) -> bool:
    """Whether its weight is [in_features, out_features], as in the Conv1D of transformers."""
    return hasattr(module, "nx") and hasattr(module, "nf")


class Packed(Style):
    """GPT-2's attention, with queries, keys and values side by side in c_attn.

    Each device has its heads of all three: the weight is sharded within each third.

    Args:
        placement: placement of the input.
    """

    def __init__(self, placement: Placement) -> None:
        super().__init__()
        self.placement = placement

    def check(self, name: str, module: Any, count: int) -> None:
        if module.num_heads % count:
            came, accepted = f"with {module.num_heads} heads in {name}", "a number of heads"
            raise ArgumentError("tp_plan", "model", came, f"{accepted} that {count} devices divide")

    def _change(self, module: Any, device_mesh: DeviceMesh) -> torch.nn.Module:
        Gather(self.placement)._change(module, device_mesh)
        packed, count = module.c_attn, device_mesh.size()
        self.distribute(packed, device_mesh, lambda p: _StridedShard(p.ndim - 1, split_factor=3))
        module.split_size //= count
        packed.nf //= count
        packed.forward = partial(_project, packed)
        return module


def _project(layer: Any, x: Any) -> torch.Tensor:
    """The layer's local features; the gradient of x is summed over the devices."""
    x = x.to_local(grad_placements=[Partial()])
    return torch.nn.functional.linear(x, layer.weight.to_local().T, layer.bias.to_local())
