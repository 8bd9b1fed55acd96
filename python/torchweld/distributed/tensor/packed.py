"""Styles for modules that store several layers side by side in one weight."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Partial, Placement
from torch.distributed.tensor.placement_types import _StridedShard

from torchweld.distributed.tensor.styles import (
    GatherInput,
    Style,
    check_divides,
    divide_counts,
    is_transposed,
)
from torchweld.errors import ArgumentError


class PackedColwiseParallel(Style):
    """Shard a layer that holds the features of several layers, one after the other.

    Each device has its part of each of these layers. If all have the same size, the weight is
    sharded within each. Otherwise each device has the whole weight and computes its own features.

    Args:
        placement: placement of the input.
        name: the packed layer's name in the module.
        parts: the number of features of each layer in it.
    """

    def __init__(self, placement: Placement, name: str, parts: Sequence[int]) -> None:
        super().__init__()
        self.placement, self.name, self.parts = placement, name, parts

    def check(self, name: str, module: Any, count: int) -> None:
        actual = f"{' + '.join(map(str, self.parts))} features in {name}.{self.name}"
        for part in self.parts:
            check_divides("tp_plan", actual, "features", part, count)

    def _change(self, module: Any, device_mesh: DeviceMesh) -> torch.nn.Module:
        GatherInput(self.placement)._change(module, device_mesh)
        layer, mesh, rows = getattr(module, self.name), device_mesh, None
        if len({*self.parts}) == 1:
            count = len(self.parts)
            self.distribute(layer, mesh, lambda _: _StridedShard(0, split_factor=count))
        else:
            self.replicate("", layer, mesh)
            rows = self._list_features(mesh.get_local_rank(), mesh.size())
        layer.forward = partial(_forward_features, layer, rows)
        return module

    def _list_features(self, rank: int, count: int) -> torch.Tensor:
        """Return the indices of this device's features."""
        whole = torch.arange(sum(self.parts)).split([*self.parts])
        return torch.cat([part.chunk(count)[rank] for part in whole])


def _forward_features(layer: Any, rows: torch.Tensor | None, x: Any) -> torch.Tensor:
    """Compute the layer's local features; the gradient of x is summed over the devices."""
    x = x.to_local(grad_placements=[Partial()])
    own: list[Any]
    if rows is None:
        own = [p if p is None else p.to_local() for p in (layer.weight, layer.bias)]
    else:
        whole = (layer.weight, layer.bias)
        full = [p if p is None else p.to_local(grad_placements=[Partial()]) for p in whole]
        own = [p if p is None else p.index_select(0, rows.to(p.device)) for p in full]
    weight = own[0].T if is_transposed(layer) else own[0]
    return torch.nn.functional.linear(x, weight, own[1])


class PackedHeadsParallel(PackedColwiseParallel):
    """Shard Phi3's attention, which has queries, keys and values in one layer and may use GQA.

    Its code reads the numbers of heads from the module and from its configuration.
    """

    def check(self, name: str, module: Any, count: int) -> None:
        heads = [part // module.head_dim for part in self.parts]
        actual = f"{heads[0]} heads and {heads[1]} key heads in {name}"
        for each in heads:
            check_divides("tp_plan", actual, "numbers of heads and key heads", each, count)

    def _change(self, module: Any, device_mesh: DeviceMesh) -> torch.nn.Module:
        count, heads = device_mesh.size(), module.config.num_attention_heads
        divide_counts(module, self.parts, count)
        module.config = _Config(module.config, num_attention_heads=heads // count)
        return super()._change(module, device_mesh)


class _Config:
    """A model's configuration with some values replaced."""

    def __init__(self, whole: Any, **own: Any) -> None:
        self._whole = whole
        vars(self).update(own)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "_whole":
            raise AttributeError(name)
        return getattr(self._whole, name)


class PackedConv1DParallel(Style):
    """Shard GPT-2's attention, which has queries, keys and values side by side in c_attn.

    Each device has its heads of all three: the weight is sharded within each third.

    Args:
        placement: placement of the input.
    """

    name = "c_attn"

    def __init__(self, placement: Placement) -> None:
        super().__init__()
        self.placement = placement

    def check(self, name: str, module: Any, count: int) -> None:
        if not hasattr(module.c_attn, "nf"):
            actual = f"with a {type(module.c_attn).__name__}, {name}.c_attn"
            accepted = "transformers' Conv1D with as many keys as queries"
            raise ArgumentError("tp_plan", "model", actual, accepted)
        if not hasattr(module, "num_heads"):
            actual = f"with a {type(module).__name__}, {name}, without num_heads"
            raise ArgumentError("tp_plan", "model", actual, "GPT-2's attention around c_attn")
        actual = f"{module.num_heads} heads in {name}"
        check_divides("tp_plan", actual, "a number of heads", module.num_heads, count)

    def _change(self, module: Any, device_mesh: DeviceMesh) -> torch.nn.Module:
        GatherInput(self.placement)._change(module, device_mesh)
        packed, count = module.c_attn, device_mesh.size()
        self.distribute(packed, device_mesh, lambda p: _StridedShard(p.ndim - 1, split_factor=3))
        module.split_size //= count
        packed.nf //= count
        packed.forward = partial(_forward_features, packed, None)
        return module
