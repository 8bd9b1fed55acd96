"""Styles of `parallelize_module` for fused modules, which torch's own styles refuse or gather.

Modules take and return local tensors. Ops that need the place of a part in the whole tensor are
told: dropout then drops the same elements as in one process.
"""

from __future__ import annotations

from collections.abc import Callable
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


def _placed(x: Any, mesh: DeviceMesh, placement: Placement) -> Any:
    if isinstance(x, DTensor):
        return x.redistribute(mesh, [placement])
    return DTensor.from_local(x, mesh, [placement], run_check=False)


def _local(x: Any) -> Any:
    if isinstance(x, tuple):
        return tuple(map(_local, x))
    return x.to_local() if isinstance(x, DTensor) else x


def _distribute(
    module: torch.nn.Module, mesh: DeviceMesh, place: Callable[[str, torch.Tensor], Placement]
) -> None:
    """Convert a module's own parameters to DTensors, with placements by name."""
    for name, parameter in module.named_parameters(recurse=False):
        part = distribute_tensor(parameter.detach(), mesh, [place(name, parameter)])
        made = torch.nn.Parameter(part, requires_grad=parameter.requires_grad)
        module.register_parameter(name, made)
    _align_gradients(module)


def _align_gradients(module: torch.nn.Module) -> None:
    """Give gradients their parameters' placements, as optimizers require.

    A partial gradient is summed.
    """
    for parameter in module.parameters(recurse=False):
        if parameter.requires_grad:
            parameter.register_post_accumulate_grad_hook(_align)


def _align(parameter: Any) -> None:
    if parameter.grad.placements != parameter.placements:
        parameter.grad = parameter.grad.redistribute(placements=parameter.placements)


def _replicate(_: str, module: torch.nn.Module, mesh: DeviceMesh) -> None:
    _distribute(module, mesh, lambda *_: Replicate())


class Rows(ParallelStyle):
    """Shard the rows of the stream, and replicate the module's parameters.

    For norms, dropouts, attention without weights, and anything else that works on rows or heads.

    Args:
        placement: placement of the first input, and of all inputs of the same rank.
    """

    def __init__(self, placement: Placement) -> None:
        super().__init__()
        self.placement = placement

    def _apply(self, module: torch.nn.Module, device_mesh: DeviceMesh) -> torch.nn.Module:
        return distribute_module(module, device_mesh, _replicate, self._inputs, self._outputs)

    def _inputs(self, module: torch.nn.Module, inputs: Any, mesh: DeviceMesh) -> Any:
        rank = inputs[0].ndim

        def placed(x: Any) -> Any:
            if not isinstance(x, torch.Tensor):
                return x
            whole = x.ndim != rank
            return _placed(x, mesh, Replicate() if whole else self.placement)

        return tuple(map(placed, inputs))

    def _outputs(self, module: torch.nn.Module, outputs: Any, mesh: DeviceMesh) -> Any:
        return _local(outputs)


class Dropped(ParallelStyle):
    """nn.Dropout of a shard: draw the mask of the whole tensor, and use the shard's part.

    So a model drops the same elements as in one process, and torch's generator advances alike.
    Every device generates random numbers for the whole tensor.

    Args:
        dim: the sharded dimension.
    """

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.dim = dim

    def _apply(self, module: torch.nn.Module, device_mesh: DeviceMesh) -> torch.nn.Module:
        assert isinstance(module, torch.nn.Dropout)
        module.forward = partial(self._drop, module, device_mesh)  # type: ignore[method-assign]
        return module

    def _drop(self, module: torch.nn.Dropout, mesh: DeviceMesh, x: torch.Tensor) -> torch.Tensor:
        if not module.training or module.p == 0:
            return x
        shape = list(x.shape)
        shape[self.dim] *= mesh.size()
        factors = torch.nn.functional.dropout(x.new_ones(shape), module.p)
        return x * factors.chunk(mesh.size(), self.dim)[mesh.get_local_rank()]


class Gather(ParallelStyle):
    """Gather the input of several column-parallel layers once, and reduce its gradient once.

    Args:
        placement: placement of the module's first input.
        name: the input's name, if it is passed by name.
    """

    def __init__(self, placement: Placement, name: str = "hidden_states") -> None:
        super().__init__()
        self.placement, self.name = placement, name

    def _apply(self, module: torch.nn.Module, device_mesh: DeviceMesh) -> torch.nn.Module:
        def before(_: Any, args: Any, kwargs: Any) -> Any:
            return _changed(args, kwargs, self.name, lambda x: self._whole(x, device_mesh))

        module.register_forward_pre_hook(before, with_kwargs=True)
        return module

    def _whole(self, x: torch.Tensor, mesh: DeviceMesh) -> Any:
        return _placed(x, mesh, self.placement).redistribute(mesh, [Replicate()])


class Stream(ParallelStyle):
    """Shard the sequence from the block that begins it to the one that ends it.

    Args:
        begins: continue with this device's part of the input.
        ends: gather the output.
        name: the input's name, if it is passed by name.
    """

    def __init__(self, begins: bool, ends: bool, name: str = "hidden_states") -> None:
        super().__init__()
        self.begins, self.ends, self.name = begins, ends, name

    def _apply(self, module: torch.nn.Module, device_mesh: DeviceMesh) -> torch.nn.Module:
        def moved(x: Any, was: Placement, becomes: Placement) -> Any:
            if isinstance(x, tuple):
                return (moved(x[0], was, becomes), *x[1:])
            return _placed(x, device_mesh, was).redistribute(device_mesh, [becomes]).to_local()

        def before(_: Any, args: Any, kwargs: Any) -> Any:
            return _changed(args, kwargs, self.name, lambda x: moved(x, Replicate(), Shard(1)))

        if self.begins:
            module.register_forward_pre_hook(before, with_kwargs=True)
        if self.ends:
            module.register_forward_hook(lambda _, __, y: moved(y, Shard(1), Replicate()))
        return module


class AddedAndNormalized(ParallelStyle):
    """The end of a welded post-norm block: norm(dropout(dense(x)) + residual).

    `dense` has its own style; this one places the residual and the norm's parameters.

    Args:
        placement: placement of the stream.
        name: the residual's name, if it is passed by name.
    """

    def __init__(self, placement: Placement, name: str = "input_tensor") -> None:
        super().__init__()
        self.placement, self.name = placement, name

    def _apply(self, module: torch.nn.Module, device_mesh: DeviceMesh) -> torch.nn.Module:
        norm: Any = getattr(module, getattr(module, "weld_norm", "LayerNorm"))
        _replicate("", norm, device_mesh)

        def before(_: Any, args: Any, kwargs: Any) -> Any:
            x, *rest = args
            _, kwargs = _changed(rest, kwargs, self.name, self._place(device_mesh))
            rest = [self._place(device_mesh)(value) for value in rest]
            return (x, *rest), kwargs

        module.register_forward_pre_hook(before, with_kwargs=True)
        module.register_forward_hook(lambda _module, _args, outputs: _local(outputs))
        return module

    def _place(self, mesh: DeviceMesh) -> Any:
        return lambda x: _placed(x, mesh, self.placement)


def _changed(args: Any, kwargs: Any, name: str, change: Any) -> Any:
    """Replace the first argument, or the one of this name."""
    if args:
        return (change(args[0]), *args[1:]), kwargs
    return args, {**kwargs, name: change(kwargs[name])}


class Columns(ColwiseParallel):
    """ColwiseParallel, also for linear layers with an activation and for transposed weights."""

    def _apply(self, module: torch.nn.Module, device_mesh: DeviceMesh) -> torch.nn.Module:
        def cut(_: str, layer: torch.nn.Module, mesh: DeviceMesh) -> None:
            dim = 1 if is_transposed(layer) else 0
            _distribute(layer, mesh, lambda _, parameter: Shard(dim if parameter.ndim > 1 else 0))

        return distribute_module(
            module,
            device_mesh,
            cut,
            partial(self._prepare_input_fn, self.input_layouts, self.desired_input_layouts),
            partial(self._prepare_output_fn, self.output_layouts, self.use_local_output),
        )


class ColumnsOfRows(RowwiseParallel):
    """RowwiseParallel, also for transposed weights: the input's features are sharded."""

    def _apply(self, module: torch.nn.Module, device_mesh: DeviceMesh) -> torch.nn.Module:
        if is_transposed(module):
            self.desired_input_layouts: tuple[Placement, ...] = (Shard(-1),)
            return distribute_module(
                module,
                device_mesh,
                _cut_inputs,
                partial(self._prepare_input_fn, self.input_layouts, self.desired_input_layouts),
                partial(self._prepare_output_fn, self.output_layouts, self.use_local_output),
            )
        super()._apply(module, device_mesh)
        _align_gradients(module)
        return module


def _cut_inputs(_: str, layer: torch.nn.Module, mesh: DeviceMesh) -> None:
    def place(_: str, parameter: torch.Tensor) -> Placement:
        return Shard(0) if parameter.ndim > 1 else Replicate()

    _distribute(layer, mesh, place)


def is_transposed(module: torch.nn.Module) -> bool:
    """Whether its weight is [in_features, out_features], as in the Conv1D of transformers."""
    return hasattr(module, "nx") and hasattr(module, "nf")


class Packed(ParallelStyle):
    """GPT-2's attention, with queries, keys and values side by side in c_attn.

    Each device has its heads of all three: the weight is sharded within each third.

    Args:
        placement: placement of the input.
    """

    def __init__(self, placement: Placement) -> None:
        super().__init__()
        self.placement = placement

    def _apply(self, module: Any, device_mesh: DeviceMesh) -> torch.nn.Module:
        Gather(self.placement)._apply(module, device_mesh)
        packed, count = module.c_attn, device_mesh.size()

        def thirds(_: str, parameter: torch.Tensor) -> Placement:
            return _StridedShard(parameter.ndim - 1, split_factor=3)

        _distribute(packed, device_mesh, thirds)
        module.split_size //= count
        packed.nf //= count
        packed.forward = partial(_project, packed)
        return module


def _project(layer: Any, x: Any) -> torch.Tensor:
    """The layer's local features; the gradient of x is summed over the devices."""
    x = x.to_local(grad_placements=[Partial()])
    return torch.nn.functional.linear(x, layer.weight.to_local().T, layer.bias.to_local())
