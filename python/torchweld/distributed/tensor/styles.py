"""Styles of `parallelize_module` for fused modules, which torch's own styles refuse or gather.

Modules take and return local tensors. Ops get the place of a part in the whole tensor if they need
it, so that dropout drops the same elements as in one process.

A style with `ring` set takes a mesh of two dimensions, ring and tensor. The ring shards the
sequence outside of the styles, whose placements are along the tensor dimension.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch.distributed._functional_collectives import AsyncCollectiveTensor
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
from torch.utils.weak import WeakTensorKeyDictionary

from torchweld import nn, state
from torchweld.distributed.tensor.sums import Sums
from torchweld.errors import ArgumentError


def describe_nearest(size: int, count: int, least: int = 1) -> str:
    """Name the multiples of a count on both sides of a size, such as "4 or 8"."""
    below, above = size // count * count, -(-size // count) * count
    multiples = [n for n in dict.fromkeys((below, above)) if n >= max(least, 1)]
    return " or ".join(map(str, multiples or [-(-least // count) * count]))


def check_divides(
    function: str, actual: str, what: str, size: int, count: int, fits: bool = True
) -> None:
    """Check that a size of a model divides among devices; the error names the nearest sizes."""
    if size % count or not fits:
        nearest = describe_nearest(size, count)
        accepted = f"{what} that {count} devices divide; the nearest are {nearest}"
        raise ArgumentError(function, "model", f"with {actual}", accepted)


class Style(ParallelStyle):
    """The base class of styles, for a mesh of one dimension or of ring and tensor."""

    ring = False

    def __init__(self, **layouts: Any) -> None:
        super().__init__(**layouts)
        # The whole plan's pending checks.
        self.checks: list[Callable[[int], None]] = []
        self.sums = Sums()

    def _apply(self, module: torch.nn.Module, device_mesh: DeviceMesh) -> torch.nn.Module:
        """Change a module, after all checks of the plan."""
        for check in self.checks or [partial(self.check, type(module).__name__, module)]:
            check(device_mesh.size(-1))
        self.checks.clear()
        return self._change(module, device_mesh)

    def check(self, name: str, module: torch.nn.Module, count: int) -> None:
        """Raise an error if a module cannot be divided among this many devices."""

    def _change(self, module: torch.nn.Module, device_mesh: DeviceMesh) -> torch.nn.Module:
        raise NotImplementedError

    def place_rows(self, placement: Placement) -> tuple[Placement, ...]:
        """Return the placements of an activation [batch, length, ...]."""
        return (Shard(1), placement) if self.ring else (placement,)

    def place_weights(self, placement: Placement) -> tuple[Placement, ...]:
        """Return the placements of a parameter."""
        return (Replicate(), placement) if self.ring else (placement,)

    def distribute(
        self, module: torch.nn.Module, mesh: DeviceMesh, place: Callable[[torch.Tensor], Placement]
    ) -> None:
        """Convert a module's own parameters to DTensors; a shared parameter stays shared.

        After a backward pass their gradients have the same placements, as optimizers require.
        """
        for name, parameter in module.named_parameters(recurse=False):
            placements = self.place_weights(place(parameter))
            new = _MADE.get(parameter)
            if new is None or (new.device_mesh, new.placements) != (mesh, placements):
                source = None if state.is_fake(parameter) else 0  # it has nothing to send
                part = distribute_tensor(parameter.detach(), mesh, placements, src_data_rank=source)
                new = torch.nn.Parameter(part, requires_grad=parameter.requires_grad)
                if new.requires_grad:
                    self.sums.add(new)
                _MADE[parameter] = new
            module.register_parameter(name, new)

    def replicate(self, _: str, module: torch.nn.Module, mesh: DeviceMesh) -> None:
        """Convert a module's own parameters to DTensors that every device has."""
        self.distribute(module, mesh, lambda _: Replicate())


# Maps parameters to the DTensors made of them, as long as another module has the parameter.
_MADE: Any = WeakTensorKeyDictionary()


def _place(x: Any, mesh: DeviceMesh, placements: Sequence[Placement]) -> Any:
    if isinstance(x, DTensor):
        return x.redistribute(mesh, placements)
    return DTensor.from_local(x, mesh, placements, run_check=False)


def _to_local(x: Any) -> Any:
    if isinstance(x, tuple):
        return tuple(map(_to_local, x))
    return x.to_local() if isinstance(x, DTensor) else x


class _Wait(torch.autograd.Function):
    """Wait for the result of a collective."""

    @staticmethod
    def forward(_: Any, x: Any) -> torch.Tensor:
        return x.trigger_wait()  # type: ignore[no-any-return]

    @staticmethod
    def backward(_: Any, grad: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return grad


def _wait(x: Any) -> Any:
    """Wait where a compiled region may begin.

    A graph whose input is an AsyncCollectiveTensor returns no gradient for it, or a plain tensor.
    """
    return _Wait.apply(x) if isinstance(x, AsyncCollectiveTensor) else x


class ActivationParallel(Style):
    """Shard the rows of the stream, and replicate the module's parameters.

    Use it for norms, dropouts, attention without weights, and anything else that works on rows or
    heads.

    Args:
        placement: placement of the first input, and of all inputs with as many dimensions.
    """

    def __init__(self, placement: Placement) -> None:
        super().__init__()
        self.placement = placement

    def _change(self, module: torch.nn.Module, device_mesh: DeviceMesh) -> torch.nn.Module:
        return distribute_module(
            module, device_mesh, self.replicate, self._prepare_inputs, self._prepare_outputs
        )

    def _prepare_inputs(self, module: torch.nn.Module, inputs: Any, mesh: DeviceMesh) -> Any:
        rank = inputs[0].ndim
        rows: Sequence[Placement] = self.place_rows(self.placement)
        if len(inputs) == 1:  # a norm
            rows = _adapt_to_flat_rows(inputs[0], rows)
        check_rank(type(module).__name__, inputs[0], rows)

        def place(x: Any) -> Any:
            if not isinstance(x, torch.Tensor):
                return x
            whole = [Replicate()] * mesh.ndim
            return _place(x, mesh, whole if x.ndim != rank else rows)

        return tuple(map(place, inputs))

    def _prepare_outputs(self, module: torch.nn.Module, outputs: Any, mesh: DeviceMesh) -> Any:
        return _to_local(outputs)


class DropoutParallel(Style):
    """Run nn.Dropout on a shard: draw the mask of the whole tensor, and use the shard's part.

    A model then drops the same elements as in one process, and torch's generator advances alike.
    Every device generates random numbers for the whole tensor.

    Args:
        dim: the sharded dimension.
        along: the number of mesh dimensions that shard it, from the first on; None: all.
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
        if isinstance(x, DTensor):
            y = self._drop(module, mesh, x.to_local())
            return DTensor.from_local(y, x.device_mesh, x.placements, run_check=False)
        sizes, place = mesh.shape[: self.along], 0
        for size, at in zip(sizes, mesh.get_coordinate() or (), strict=False):
            place = place * size + at
        shape, count = list(x.shape), math.prod(sizes)
        shape[self.dim] *= count
        factors = torch.nn.functional.dropout(x.new_ones(shape), module.p)
        return x * factors.chunk(count, self.dim)[place]


class GatherInput(Style):
    """Gather the input of several column-parallel layers once, and reduce its gradient once.

    Args:
        placement: placement of the module's first input.
        name: the input's name, if it is passed by name.
        projections: for attention, the names of the layers whose heads are divided.
    """

    def __init__(
        self, placement: Placement, name: str = "hidden_states", projections: Sequence[str] = ()
    ) -> None:
        super().__init__()
        self.placement, self.name, self.projections = placement, name, projections

    def check(self, name: str, module: torch.nn.Module, count: int) -> None:
        width = get_head_width(module)
        for projection in self.projections if width else ():
            heads, rest = divmod(getattr(module, projection).weight.shape[0], width)
            actual, what = f"{heads} heads in {name}.{projection}", "numbers of heads and key heads"
            check_divides("tp_plan", actual, what, heads, count, not rest)

    def _change(self, module: torch.nn.Module, device_mesh: DeviceMesh) -> torch.nn.Module:
        def before(_: Any, args: Any, kwargs: Any) -> Any:
            return _replace_argument(
                args, kwargs, self.name, lambda x: self._gather(x, device_mesh)
            )

        module.register_forward_pre_hook(before, with_kwargs=True)
        if self.projections:
            features = [getattr(module, name).weight.shape[0] for name in self.projections]
            divide_counts(module, features, device_mesh.size(-1))
        return module

    def _gather(self, x: torch.Tensor, mesh: DeviceMesh) -> Any:
        check_rank("tp_plan", x, self.place_rows(self.placement))
        sharded = _place(x, mesh, self.place_rows(self.placement))
        return sharded.redistribute(mesh, self.place_rows(Replicate()))


def get_head_width(module: torch.nn.Module) -> int:
    """Return the width of this attention's heads; 0 if it has no such attribute."""
    names = ("head_dim", "attention_head_size", "head_width", "head_size", "key_value_proj_dim")
    widths = [value for name in names if isinstance(value := getattr(module, name, None), int)]
    return widths[0] if widths else 0


def divide_counts(module: Any, features: Sequence[int], count: int) -> None:
    """Divide an attention's head and feature counts by the number of devices.

    OPT, StableLM, T5 and RemBERT read these counts. `features`: the projections' feature counts.
    """
    names = ("num_heads", "num_key_value_heads", "num_attention_heads", "n_heads")
    widths = ("inner_dim", "all_head_size", "embed_dim")
    width = get_head_width(module)
    for name in (*names, *widths):
        value = getattr(module, name, None)
        if isinstance(value, int) and {value, value * width} & {*features}:
            setattr(module, name, value // count)


class SequenceParallelRegion(Style):
    """Shard the sequence from the block that begins the region to the block that ends it.

    Args:
        begins: whether the module continues with this device's part of the input.
        ends: whether to gather the module's output.
        name: the input's name, if it is passed by name.
    """

    def __init__(self, begins: bool, ends: bool, name: str = "hidden_states") -> None:
        super().__init__()
        self.begins, self.ends, self.name = begins, ends, name

    def _change(self, module: torch.nn.Module, device_mesh: DeviceMesh) -> torch.nn.Module:
        def move(x: Any, old: Placement, new: Placement) -> Any:
            if isinstance(x, tuple):
                return (move(x[0], old, new), *x[1:])
            x = _place(x, device_mesh, self.place_rows(old))
            return _wait(x.redistribute(device_mesh, self.place_rows(new)).to_local())

        def before(_: Any, args: Any, kwargs: Any) -> Any:
            return _replace_argument(args, kwargs, self.name, begin)

        def begin(x: torch.Tensor) -> torch.Tensor:
            if x.shape[1] % (count := device_mesh.size(-1)):
                accepted = f"a multiple of {count}, whose devices share the sequence"
                raise ArgumentError("tp_plan", "the sequence", f"{x.shape[1]} tokens", accepted)
            return move(x, Replicate(), Shard(1))

        if self.begins:
            module.register_forward_pre_hook(before, with_kwargs=True)
        if self.ends:
            module.register_forward_hook(lambda _, __, y: move(y, Shard(1), Replicate()))
        return module


class ResidualNormParallel(Style):
    """Shard the end of a BERT block: norm(dropout(dense(x)) + residual), welded, or without a norm.

    `dense` has its own style. This style places the residual and the norm's parameters.

    Args:
        placement: placement of the residual stream.
        name: the residual's name, if it is passed by name.
    """

    def __init__(self, placement: Placement, name: str = "input_tensor") -> None:
        super().__init__()
        self.placement, self.name = placement, name

    def _change(self, module: torch.nn.Module, device_mesh: DeviceMesh) -> torch.nn.Module:
        norm = getattr(module, get_norm_name(module), None)
        if norm is not None:  # a block that normalises first ends without one
            self.replicate("", norm, device_mesh)

        def before(_: Any, args: Any, kwargs: Any) -> Any:
            x, *rest = args
            _, kwargs = _replace_argument(rest, kwargs, self.name, self._make_placer(device_mesh))
            rest = [self._make_placer(device_mesh)(value) for value in rest]
            return (x, *rest), kwargs

        module.register_forward_pre_hook(before, with_kwargs=True)
        module.register_forward_hook(lambda _module, _args, outputs: _to_local(outputs))
        return module

    def _make_placer(self, mesh: DeviceMesh) -> Any:
        return lambda x: _place(x, mesh, self.place_rows(self.placement))


def get_norm_name(module: torch.nn.Module) -> str:
    """Return the name of the norm at the end of a post-norm block."""
    norms = (n for n, child in module.named_children() if isinstance(child, torch.nn.LayerNorm))
    return next(norms, "LayerNorm")


def _replace_argument(args: Any, kwargs: Any, name: str, change: Any) -> Any:
    """Replace the first argument, or the keyword argument of this name."""
    if args:
        return (change(args[0]), *args[1:]), kwargs
    return args, {**kwargs, name: change(kwargs[name])}


class FusedColwiseParallel(Style, ColwiseParallel):
    """ColwiseParallel, also for linear layers with an activation and for transposed weights."""

    def check(self, name: str, module: torch.nn.Module, count: int) -> None:
        weight: Any = module.weight
        features = weight.shape[1 if has_columns(module) else 0]
        # A gathered output, such as logits, can have any size.
        if not self.output_layouts[0].is_replicate():
            actual = f"{features} features in {name}"
            check_divides("tp_plan", actual, "features", features, count)

    def _change(self, module: torch.nn.Module, device_mesh: DeviceMesh) -> torch.nn.Module:
        def shard(_: str, layer: torch.nn.Module, mesh: DeviceMesh) -> None:
            dim = 1 if has_columns(layer) else 0
            self.distribute(layer, mesh, lambda p: Shard(dim if p.ndim > 1 else 0))

        return _distribute_layer(self, module, device_mesh, shard, Replicate())


class FusedRowwiseParallel(Style, RowwiseParallel):
    """RowwiseParallel, also for transposed weights: the input's features are sharded."""

    def _change(self, module: torch.nn.Module, device_mesh: DeviceMesh) -> torch.nn.Module:
        def shard(_: str, layer: torch.nn.Module, mesh: DeviceMesh) -> None:
            dim = 0 if is_embedding or is_transposed(layer) else 1
            self.distribute(layer, mesh, lambda p: Shard(dim) if p.ndim > 1 else Replicate())

        is_embedding = isinstance(module, torch.nn.Embedding)
        if not (is_embedding or isinstance(module, torch.nn.Linear) or is_transposed(module)):
            actual, accepted = f"a {type(module).__name__}", "a linear layer or an embedding"
            raise ArgumentError("FusedRowwiseParallel", "module", actual, accepted)
        if is_embedding and _looks_up_rows(module):
            lookup = partial(_forward_local_rows, module, _first_row(module, device_mesh))
            module.forward = lookup  # type: ignore[method-assign]
        if self.ring and isinstance(module, torch.nn.Linear):
            forward = partial(
                _forward_local_features, module, self.place_rows(*self.output_layouts)
            )
            module.forward = forward  # type: ignore[method-assign]
        return _distribute_layer(
            self, module, device_mesh, shard, Replicate() if is_embedding else Shard(-1)
        )


class VocabularyParallel(Style):
    """Shard the classes of a torchweld.nn.LinearCrossEntropy, of any number.

    Devices exchange a few numbers a row, never logits. The input and the target are local: along a
    ring they are the device's slice of the sequence, and the loss covers the whole sequence.
    """

    def check(self, name: str, module: torch.nn.Module, count: int) -> None:
        if not isinstance(module, nn.LinearCrossEntropy):
            actual, accepted = f"a {type(module).__name__}, {name}", "a LinearCrossEntropy"
            raise ArgumentError("VocabularyParallel", "module", actual, accepted)

    def _change(self, module: torch.nn.Module, device_mesh: DeviceMesh) -> torch.nn.Module:
        self.distribute(module, device_mesh, lambda _: Shard(0))
        forward = partial(self._forward, module.forward, device_mesh)
        module.forward = forward  # type: ignore[method-assign]
        return module

    def _forward(self, forward: Any, mesh: DeviceMesh, input: Any, target: Any) -> Any:
        rows = self.place_rows(Replicate())
        check_rank("VocabularyParallel", input, rows)
        inputs = [
            x if isinstance(x, DTensor) else DTensor.from_local(x, mesh, rows, run_check=False)
            for x in (input, target)
        ]
        return forward(*inputs).to_local()


def _distribute_layer(
    style: Any, module: torch.nn.Module, mesh: DeviceMesh, shard: Any, needed: Placement
) -> torch.nn.Module:
    """Shard a layer that needs this placement of its input, between the layouts of its style."""
    input_layout = style.place_rows(*style.input_layouts)
    output_layout = style.place_rows(*style.output_layouts)
    # Embeddings and heads wait. Layers in a block do not: another layer may run meanwhile.
    waits = needed.is_replicate() and output_layout[-1].is_replicate()

    def prepare_input(module: torch.nn.Module, inputs: Any, mesh: DeviceMesh) -> Any:
        layout = _adapt_to_flat_rows(inputs[0], input_layout)
        check_rank(type(module).__name__, inputs[0], layout)
        return style._prepare_input_fn(layout, style.place_rows(needed), module, inputs, mesh)

    def prepare_output(module: torch.nn.Module, outputs: Any, mesh: DeviceMesh) -> Any:
        layout = _adapt_to_flat_rows(outputs, output_layout)
        y = style._prepare_output_fn(layout, style.use_local_output, module, outputs, mesh)
        return _wait(y) if waits else y

    return distribute_module(module, mesh, shard, prepare_input, prepare_output)


def _adapt_to_flat_rows(x: torch.Tensor, placements: Sequence[Placement]) -> Sequence[Placement]:
    """Adapt placements to norms and layers in a block that flattens its rows, as OPT's does.

    Gathered rows are then in another order, which norms and linear layers keep.
    """
    if x.ndim != 2 or not x.is_floating_point() or len(placements) > 1:
        return placements
    return tuple(Shard(0) if placement == Shard(1) else placement for placement in placements)


def check_rank(name: str, x: torch.Tensor, placements: Sequence[Placement]) -> None:
    """Raise an error for flattened rows: their second dimension is not the sequence."""
    if x.ndim < 3 and x.is_floating_point() and Shard(1) in placements:
        accepted = "[batch, length, features]: devices share the sequence"
        raise ArgumentError(name, "the input", f"of shape {list(x.shape)}", accepted)


def _forward_local_features(
    layer: torch.nn.Linear, output_layout: Sequence[Placement], x: Any
) -> Any:
    """Run a linear layer on local features, which DTensor's rule would gather along a ring."""
    weight: Any = layer.weight
    y = torch.nn.functional.linear(
        x.to_local(), weight.to_local(grad_placements=(Partial(), Shard(1)))
    )
    whole = DTensor.from_local(y, x.device_mesh, (Shard(1), Partial()), run_check=False)
    whole = whole.redistribute(placements=output_layout)
    return whole if layer.bias is None else whole + layer.bias


def _looks_up_rows(module: Any) -> bool:
    """Whether an embedding does nothing but look up rows."""
    is_plain = type(module).forward is torch.nn.Embedding.forward
    has_options = module.max_norm is not None or module.scale_grad_by_freq or module.sparse
    return is_plain and not has_options


def _first_row(module: Any, mesh: DeviceMesh) -> int:
    """Return the first row of this device's part of an embedding, as Shard(0) divides it."""
    rows = -(-module.num_embeddings // mesh.size(-1))
    return min(mesh.get_local_rank(mesh.ndim - 1) * rows, module.num_embeddings)


def _forward_local_rows(module: Any, first: int, tokens: Any) -> Any:
    """Look up the tokens whose rows this device has; the others are zero.

    DTensor's own rule keeps the mask in a placement that several tensors share, and before torch
    2.12 the mask is sometimes gone when the rows are summed.
    """
    weight: Any = module.weight
    others = (Partial(),) * (weight.device_mesh.ndim - 1)
    rows = weight.to_local(grad_placements=(*others, Shard(0)))
    local = tokens.to_local()
    index = local - first
    is_here = (index >= 0) & (index < len(rows))
    padding = None if module.padding_idx is None else module.padding_idx - first
    if padding is not None and not 0 <= padding < len(rows):
        padding = None
    if not len(rows):  # More devices than words: this one looks up a row of zeros.
        rows = torch.nn.functional.pad(rows, (0, 0, 0, 1))
    # A token beyond the whole embedding stays out of range, so that the look-up fails.
    is_known = (local >= 0) & (local < module.num_embeddings)
    index = torch.where(is_here, index, torch.where(is_known, 0, module.num_embeddings))
    y = torch.nn.functional.embedding(index, rows, padding).masked_fill(~is_here[..., None], 0)
    placements = (*tokens.placements[:-1], Partial())
    return DTensor.from_local(y, tokens.device_mesh, placements, run_check=False)


def has_columns(module: torch.nn.Module) -> bool:
    """Whether a feature of the module's result is a column of its weight."""
    return is_transposed(module) or isinstance(module, torch.nn.Embedding)


def is_transposed(module: torch.nn.Module) -> bool:
    """Whether the weight is [in_features, out_features], as in the Conv1D of transformers."""
    return hasattr(module, "nx") and hasattr(module, "nf")
