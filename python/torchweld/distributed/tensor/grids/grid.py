"""Tensor parallelism on grids of processes: 2D (SUMMA), 2.5D and 3D.

Each process has a block of every activation and of every matrix. With q processes along a side:

    2d    q x q       activations 1/q^2, matrices 1/q^2
    2.5d  d x q x q   each layer of the grid has its rows; matrices 1/q^2, gradients summed over d
    3d    q x q x q   activations 1/q^3, matrices 1/q^3

A SUMMA product broadcasts q blocks of each factor along rows and columns of the grid. Each of its
two derivatives broadcasts q blocks of a factor and reduces q blocks of the result. A 3D product
gathers both factors along a dimension each and reduce-scatters the result along the third one. Its
derivatives do the same, with the gathered factors of the forward pass. It exchanges the roles of
the first two dimensions, so that linear layers come in pairs. Activations are DTensors, so that our
ops run on the blocks and drop the same elements as in one process. Norms gather the features of
their rows.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard
from torch.distributed.tensor.parallel import parallelize_module

from torchweld import functional, nn
from torchweld.distributed.tensor.styles import Style, check_divides, describe_nearest
from torchweld.distributed.tensor.sums import Sums
from torchweld.errors import ArgumentError

Placements = tuple[Placement, ...]
# The first and the second of each pair of linear layers.
_FIRST = ("q_proj", "k_proj", "v_proj", "fc1", "gate_proj", "up_proj", "head", "lm_head")
_SECOND = ("o_proj", "out_proj", "fc2", "down_proj")
_HEADS = ("head", "lm_head")
_ROWS, _FEATURES, _WHOLE = Shard(0), Shard(2), Replicate()


def find_side(mode: str, size: int, depth: int = 1) -> int:
    """Return the processes along a side of the grid, or raise an error with the nearest sizes."""
    power = 3 if mode == "3d" else 2
    depth = depth if mode == "2.5d" else 1
    side = round((size / depth) ** (1 / power))
    if side**power * depth != size:
        below = max(math.floor((size / depth) ** (1 / power)), 1)
        sizes = " or ".join(str(n**power * depth) for n in (below, below + 1))
        shape = {"2d": "q x q", "2.5d": f"{depth} x q x q", "3d": "q x q x q"}[mode]
        raise ArgumentError("Parallel", "tensor", f"{size} in {mode}", f"{shape}, such as {sizes}")
    return side


@dataclass(frozen=True)
class MeshGrid:
    """The placements of a mode's blocks on a mesh.

    Attributes:
        mesh: dimensions row and column; depth, row and column; or first, second and depth.
        stream: placements of activations [batch, length, features] outside of pairs of layers.
        inner: the placements between the two linear layers of a pair.
    """

    mesh: DeviceMesh
    stream: Placements
    inner: Placements

    @classmethod
    def make(cls, mode: str, device: str, size: int, depth: int = 1) -> MeshGrid:
        """Make the grid of all processes."""
        q = find_side(mode, size, depth)
        if mode == "3d":
            mesh = init_device_mesh(device, (q, q, q), mesh_dim_names=("first", "second", "depth"))
            return cls(mesh, (_ROWS, _FEATURES, _ROWS), (_FEATURES, _ROWS, _ROWS))
        if mode == "2.5d":
            names = ("depth", "row", "column")
            mesh = init_device_mesh(device, (depth, q, q), mesh_dim_names=names)
            return cls(mesh, (_ROWS, _ROWS, _FEATURES), (_ROWS, _ROWS, _FEATURES))
        mesh = init_device_mesh(device, (q, q), mesh_dim_names=("row", "column"))
        return cls(mesh, (_ROWS, _FEATURES), (_ROWS, _FEATURES))

    @property
    def is_cube(self) -> bool:
        """Whether products are 3D."""
        return self.stream != self.inner

    def place_weight(self, is_first: bool) -> Placements:
        """Return the placements of a weight [out_features, in_features]."""
        if self.is_cube:
            return (Shard(0), Shard(1), Shard(1)) if is_first else (Shard(1), Shard(0), Shard(1))
        return (*[_WHOLE] * (self.mesh.ndim - 2), Shard(1), Shard(0))

    def place_features(self, is_first: bool, dim: int = 0) -> Placements:
        """Return the placements of a parameter of features after a layer of a pair."""
        layout = self.inner if is_first else self.stream
        return tuple(Shard(dim) if p == _FEATURES else _WHOLE for p in layout)

    def count(self, placement: Placement) -> int:
        """Count the parts of the batch, or of the features."""
        return math.prod(self.mesh.size(at) for at, p in enumerate(self.stream) if p == placement)

    def multiply(self, x: Any, weight: Any, is_first: bool) -> Any:
        """Compute x @ weight.T of DTensors [batch, length, in] and [out, in]."""
        here, there = (self.stream, self.inner) if is_first else (self.inner, self.stream)
        x = x.redistribute(placements=here)
        summed = tuple(Partial() if p == _WHOLE else p for p in self.place_weight(is_first))
        blocks = [x.to_local(), weight.to_local(grad_placements=summed)]
        if torch.is_autocast_enabled(x.device.type):
            blocks = [block.to(torch.get_autocast_dtype(x.device.type)) for block in blocks]
        get_group = self.mesh.get_group
        if self.is_cube:
            groups = [get_group(name) for name in ("first", "second", "depth")]
            y = _Cube.apply(*blocks, *(groups if is_first else [groups[1], groups[0], groups[2]]))
        else:
            y = _Summa.apply(*blocks, get_group("row"), get_group("column"))
        return self.wrap(y, there)

    def wrap(self, x: torch.Tensor, placements: Placements) -> Any:
        """Make a DTensor of this process's block."""
        return DTensor.from_local(x, self.mesh, placements, run_check=False)


class _Summa(torch.autograd.Function):
    """The product x @ w.T of blocks on a square grid, by SUMMA.

    Process (i, j) has block (i, j) of x. Its block of w has input features i and output features j.
    """

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, w: torch.Tensor, row: Any, column: Any) -> torch.Tensor:
        ctx.save_for_backward(x, w)
        ctx.groups = row, column
        y = x.new_zeros((*x.shape[:-1], w.shape[0]))
        for at in range(dist.get_world_size(row)):
            y += _broadcast(x, column, at) @ _broadcast(w, row, at).T
        return y

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:  # type: ignore[override]
        x, w = ctx.saved_tensors
        row, column = ctx.groups
        grad, dx, dw = grad.contiguous(), None, None
        flat = grad.flatten(0, -2)
        for at in range(dist.get_world_size(row)):
            part = _reduce(grad @ _broadcast(w, row, at), column, at)
            dx = part if dist.get_rank(column) == at else dx
            part = _reduce(flat.T @ _broadcast(x, column, at).flatten(0, -2), row, at)
            dw = part if dist.get_rank(row) == at else dw
        return dx, dw, None, None


def _broadcast(x: torch.Tensor, group: Any, at: int) -> torch.Tensor:
    x = x.contiguous() if dist.get_rank(group) == at else torch.empty_like(x).contiguous()
    dist.broadcast(x, group=group, group_src=at)
    return x


def _reduce(x: torch.Tensor, group: Any, at: int) -> torch.Tensor:
    x = x.contiguous()
    dist.reduce(x, group=group, group_dst=at)
    return x


class _Cube(torch.autograd.Function):
    """The product x @ w.T of blocks on a cube.

    x has rows along `out` and `depth`, and features along `inside`; w has its output features along
    `out`, its input features along `inside` and `depth`; the result has rows along `inside` and
    `depth`, and features along `out`.
    """

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, w: torch.Tensor, out: Any, inside: Any, depth: Any
    ) -> torch.Tensor:
        x, w = _gather(x, out, 0), _gather(w, depth, 1)
        ctx.save_for_backward(x, w)
        ctx.groups = out, inside, depth
        return _scatter_sum(x @ w.T, inside, 0)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:  # type: ignore[override]
        x, w = ctx.saved_tensors
        out, inside, depth = ctx.groups
        grad = _gather(grad, inside, 0)
        dx = _scatter_sum(grad @ w, out, 0)
        dw = _scatter_sum(grad.flatten(0, -2).T @ x.flatten(0, -2), depth, 1)
        return dx, dw, None, None, None


def _gather(x: torch.Tensor, group: Any, dim: int) -> torch.Tensor:
    x = x.movedim(dim, 0).contiguous()
    whole = x.new_empty((dist.get_world_size(group) * x.shape[0], *x.shape[1:]))
    dist.all_gather_into_tensor(whole, x, group=group)
    return whole.movedim(0, dim)


def _scatter_sum(x: torch.Tensor, group: Any, dim: int) -> torch.Tensor:
    x = x.movedim(dim, 0).contiguous()
    part = x.new_empty((x.shape[0] // dist.get_world_size(group), *x.shape[1:]))
    dist.reduce_scatter_tensor(part, x, group=group)
    return part.movedim(0, dim)


# --- The style ------------------------------------------------------------------------------------


class GridParallel(Style):
    """Run a module on the blocks of a grid: a linear layer, an embedding, or a norm.

    Args:
        grid: the grid.
        is_first: whether a linear layer is the first of a pair.
        gathers: whether a linear layer's result is gathered, as logits are.
    """

    def __init__(self, grid: MeshGrid, is_first: bool = True, gathers: bool = False) -> None:
        super().__init__()
        self.grid, self.is_first, self.gathers = grid, is_first, gathers

    def check(self, name: str, module: torch.nn.Module, count: int) -> None:
        for parameter in module.parameters(recurse=False):
            side = self.grid.count(_FEATURES)
            # A cube cuts input features twice. Norms have whole parameters.
            sizes = [(n, side) for n in parameter.shape[isinstance(module, torch.nn.Embedding) :]]
            if self.grid.is_cube and parameter.ndim > 1 and not _is_embedding(module):
                sizes[1] = (sizes[1][0], side * side)
            for size, parts in sizes:
                actual = f"{size} features in {name}"
                check_divides("parallelize", actual, "features", size, parts)

    def _change(self, module: torch.nn.Module, device_mesh: DeviceMesh) -> torch.nn.Module:
        grid, first = self.grid, self.is_first
        if _is_embedding(module):
            sharded = tuple(Shard(1) if p == _FEATURES else Shard(0) for p in self.grid.stream)
            self.distribute_as(module, lambda _: sharded)
            module.forward = partial(self._embed, module)  # type: ignore[method-assign]
        elif _is_linear(module):
            places = (grid.place_features(first), grid.place_weight(first))
            self.distribute_as(module, lambda p: places[p.ndim - 1])
            module.forward = partial(self._multiply, module)  # type: ignore[method-assign]
        else:
            self.distribute_as(module, lambda _: (_WHOLE,) * grid.mesh.ndim)
            module.register_forward_hook(self._place_results)
        return module

    def distribute_as(self, module: torch.nn.Module, place: Any) -> None:
        """Convert a module's own parameters to DTensors on the grid."""
        for name, parameter in module.named_parameters(recurse=False):
            whole = DTensor.from_local(
                parameter.detach(), self.grid.mesh, [_WHOLE] * self.grid.mesh.ndim, run_check=False
            )
            part = whole.redistribute(placements=place(parameter))
            new = torch.nn.Parameter(part, requires_grad=parameter.requires_grad)
            if new.requires_grad:
                self.sums.add(new)
            module.register_parameter(name, new)

    def _multiply(self, module: Any, input: Any) -> Any:
        y = self.grid.multiply(input, module.weight, self.is_first)
        layout, bias = y.placements, None
        if module.bias is not None:
            grads = tuple(Shard(0) if p == _FEATURES else Partial() for p in layout)
            bias = module.bias.to_local(grad_placements=grads)
        z = y.to_local()
        if isinstance(module, nn.LinearAct):
            act, approximate = module.activation, module.approximate
            z = functional.bias_act(z, bias, activation=act, approximate=approximate)
        elif bias is not None:
            z = z + bias
        y = self.grid.wrap(z, layout)
        return y.redistribute(placements=[_WHOLE] * len(layout)).to_local() if self.gathers else y

    def _embed(self, module: Any, tokens: torch.Tensor) -> Any:
        grid = self.grid
        rows = tuple(_ROWS if p == _ROWS else _WHOLE for p in grid.stream)
        if tokens.shape[0] == 1:  # positions, which all rows have
            rows = (_WHOLE,) * grid.mesh.ndim
        elif tokens.shape[0] % (count := grid.count(_ROWS)):
            accepted = f"a multiple of {count} parts of the batch; the nearest are "
            accepted += describe_nearest(tokens.shape[0], count)
            raise ArgumentError("parallelize", "rows", str(tokens.shape[0]), accepted)
        mine = grid.wrap(tokens, (_WHOLE,) * grid.mesh.ndim).redistribute(placements=rows)
        columns = tuple(Shard(1) if p == _FEATURES else _WHOLE for p in grid.stream)
        grads = tuple(
            place if place == Shard(1) else Partial() if row == _ROWS else _WHOLE
            for place, row in zip(columns, rows, strict=True)
        )
        weight = module.weight.redistribute(placements=columns).to_local(grad_placements=grads)
        y = torch.nn.functional.embedding(mine.to_local(), weight)
        layout = [
            _FEATURES if p == _FEATURES else row for p, row in zip(grid.stream, rows, strict=True)
        ]
        return grid.wrap(y, tuple(layout))

    def _place_results(self, _: Any, __: Any, results: Any) -> Any:
        """Cut the features of a norm's results, which it computed for whole rows."""
        if isinstance(results, tuple):
            return tuple(r.redistribute(placements=self.grid.stream) for r in results)
        return results.redistribute(placements=self.grid.stream)


def _is_embedding(module: torch.nn.Module) -> bool:
    return isinstance(module, torch.nn.Embedding)


def _is_linear(module: torch.nn.Module) -> bool:
    return isinstance(module, (torch.nn.Linear, nn.LinearAct))


def plan_grid(model: torch.nn.Module, grid: MeshGrid) -> dict[str, GridParallel]:
    """Choose the style of each module with parameters; raise an error for unknown ones."""
    styles: dict[str, GridParallel] = {}
    for name, module in model.named_modules():
        own = name.rpartition(".")[2]
        if _is_linear(module) and own in (*_FIRST, *_SECOND):
            styles[name] = GridParallel(grid, own in _FIRST, own in _HEADS)
        elif isinstance(module, (torch.nn.Embedding, *_NORMS)):
            styles[name] = GridParallel(grid)
        elif [*module.parameters(recurse=False)]:
            actual = f"with a {type(module).__name__}, {name}"
            accepted = f"torchweld.nn's norms, embeddings, and linear layers {', '.join(_FIRST)}"
            raise ArgumentError("parallelize", "model", actual, f"{accepted}, {', '.join(_SECOND)}")
    sums = Sums()
    checks = [
        partial(style.check, name, model.get_submodule(name)) for name, style in styles.items()
    ]
    for style in styles.values():
        style.checks, style.sums = checks, sums  # type: ignore[assignment]
    return styles


_NORMS = (nn.LayerNorm, nn.RMSNorm, nn.DropoutAddLayerNorm, nn.DropoutAddRMSNorm)


def parallelize_on_grid(model: Any, mode: str, device: str, size: int, depth: int) -> Any:
    """Shard a whole model on the grid of all processes."""
    grid = MeshGrid.make(mode, device, size, depth)
    _check_heads(model, grid)
    return parallelize_module(model, grid.mesh, dict(plan_grid(model, grid)))


def _check_heads(model: torch.nn.Module, grid: MeshGrid) -> None:
    module: Any
    for name, module in model.named_modules():
        if hasattr(module, "head_width"):
            heads = module.q_proj.weight.shape[0] // module.head_width
            actual, count = f"{heads} heads in {name}", grid.count(_FEATURES)
            check_divides("parallelize", actual, "numbers of heads", heads, count)
