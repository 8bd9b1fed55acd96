"""The work of a model: flops, memory traffic, parameters and saved bytes of each of its layers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.func import functional_call
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.flop_counter import flop_registry

from torchweld import checks
from torchweld.distributed.layers import find_layers
from torchweld.errors import ArgumentError
from torchweld.registry import OPS


@dataclass(frozen=True)
class Unit:
    """A part that a pipeline does not cut: a layer, or everything before the first layer or after
    the last one.

    The figures are for the example, usually one sequence, without parallelism.

    Attributes:
        flops: of the forward pass's matrix products and attention.
        traffic: bytes that all other ops of the forward pass read and write.
        parameters: the number of parameters.
        saved: bytes that the forward pass saves for the backward pass.
        kept: the saved bytes that a selective checkpoint keeps: results of matrix products.
        out: bytes of the result.
    """

    flops: float
    traffic: float
    parameters: int
    saved: float
    kept: float
    out: float


@dataclass(frozen=True)
class Work:
    """A model's units in order, its numbers of heads, and the length of its sequences."""

    units: tuple[Unit, ...]
    heads: int
    length: int
    fits: Callable[[int], bool] = lambda _: True

    @property
    def parameters(self) -> int:
        """The number of all parameters."""
        return sum(unit.parameters for unit in self.units)


def check_positive(op: str, **values: Any) -> None:
    """Check that sizes and rates are numbers above 0."""
    for name, value in values.items():
        checks.number(op, name, value, lambda v: v > 0, "a number above 0")


def describe_transformer(
    layers: int, width: int, heads: int, vocabulary: int, length: int, itemsize: int = 2
) -> Work:
    """Describe a GPT with hidden layers of four widths from its sizes, for one sequence.

    A layer has 12 width^2 parameters. For each token it saves 10 vectors of the width and 4 hidden
    vectors; attention saves no scores.
    """
    sizes = {"layers": layers, "width": width, "heads": heads, "vocabulary": vocabulary}
    for name, size in (sizes | {"length": length, "itemsize": itemsize}).items():
        checks.count("describe_transformer", name, size, 1)
    if width % heads:
        raise ArgumentError(
            "describe_transformer", "width", str(width), f"a multiple of {heads} heads"
        )
    stream = float(length * width * itemsize)
    scores = 4.0 * length**2 * width
    layer = Unit(
        flops=24.0 * length * width**2 + scores,
        traffic=16 * stream,
        parameters=12 * width**2 + 13 * width,
        saved=18 * stream,
        kept=9 * stream,
        out=stream,
    )
    table = (vocabulary + length) * width
    first = Unit(0.0, 3 * stream, table, stream / width, 0.0, stream)
    logits = float(length * vocabulary * itemsize)
    head = Unit(
        2.0 * length * width * vocabulary,
        4 * logits,
        vocabulary * width,
        3 * logits,
        logits,
        logits,
    )
    return Work((first, *[layer] * layers, head), heads, length, lambda n: heads % n == 0)


def measure_work(
    model: torch.nn.Module,
    example: tuple[torch.Tensor, ...],
    fits: Callable[[int], bool],
    autocast: torch.dtype | None = None,
) -> Work:
    """Measure the work of each unit in a forward pass on fake tensors.

    The model may be on the meta device. `fits` says which numbers of devices divide its matrices.
    """
    layers = [*find_layers(model).values()]
    counter = _Counter(len(layers), [*model.parameters(), *model.buffers()])
    hooks = [layer.register_forward_pre_hook(counter.enter) for layer in layers]
    hooks += [layers[-1].register_forward_hook(counter.leave)] if layers else []
    try:
        with (
            FakeTensorMode(allow_non_fake_inputs=True),
            torch.autocast("cpu", autocast or torch.bfloat16, enabled=autocast is not None),
        ):
            own = {
                name: torch.empty(p.shape, dtype=p.dtype).requires_grad_(p.requires_grad)
                for name, p in (*model.named_parameters(), *model.named_buffers())
            }
            args = tree_map_only(
                torch.Tensor, lambda t: torch.zeros(t.shape, dtype=t.dtype), example
            )
            counter.ignore(own.values())
            with torch.autograd.graph.saved_tensors_hooks(counter.save, lambda t: t), counter:
                counter.note_result(functional_call(model, own, args))
    finally:
        for hook in hooks:
            hook.remove()
    inside = {id(p) for layer in layers for p in layer.parameters()}
    sizes = [sum(p.numel() for p in layer.parameters()) for layer in layers]
    outside = [p.numel() for p in model.parameters() if id(p) not in inside]
    first = max(outside, default=0)
    sizes = [first, *sizes, sum(outside) - first]
    units = [
        Unit(f, t, n, s, k, o)
        for f, t, n, s, k, o in zip(
            *(counter.flops, counter.traffic, sizes, counter.saved, counter.kept, counter.out),
            strict=True,
        )
    ]
    return Work(tuple(units), 0, example[0].shape[-1], fits)


# Our ops with matrix products. Their flops are counted; for all other ops, the traffic.
_PRODUCTS = (
    *("block_sparse_attention", "experts_mlp", "linear_act", "linear_batch_norm_act"),
    *("mlp", "gated_mlp"),
)


class _Counter(TorchDispatchMode):
    """Adds up flops, traffic and saved bytes for the unit that is running."""

    def __init__(self, layers: int, parameters: list[Any]) -> None:
        super().__init__()
        count = layers + 2
        self.at, self._seen = 0, set[int]()
        self._products: set[int] = set()
        self._held: list[Any] = []
        self.flops, self.traffic, self.saved = ([0.0] * count for _ in range(3))
        self.kept, self.out = ([0.0] * count for _ in range(2))

    def ignore(self, tensors: Any) -> None:
        """Do not count these saved tensors: parameters and buffers."""
        self._seen |= {t.untyped_storage()._cdata for t in tensors}

    def enter(self, *_: Any) -> None:
        self.at += 1

    def leave(self, _: Any, __: Any, result: Any) -> None:
        self.note_result(result)
        self.out[:-1] = [self.out[self.at]] * (len(self.out) - 1)  # all units return the stream
        self.at += 1

    def note_result(self, result: Any) -> None:
        self.out[self.at] = _count_bytes(result)

    def save(self, t: torch.Tensor) -> torch.Tensor:
        storage = t.untyped_storage()
        if storage._cdata not in self._seen:
            self._seen.add(storage._cdata)
            self._held.append(t)  # so that no other storage gets the same address
            self.saved[self.at] += storage.nbytes()
            if storage._cdata in self._products:
                self.kept[self.at] += storage.nbytes()
        return t

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        packet = getattr(func, "overloadpacket", None)
        name = func._schema.name.partition("::")[2]
        if packet in flop_registry:
            self.flops[self.at] += flop_registry[packet](*args, **(kwargs or {}), out_val=result)
        elif func.namespace == "torchweld" and name in _PRODUCTS:
            inputs = args[: len(OPS[name].forward_signature.arguments)]
            self.flops[self.at] += OPS[name].flops(*inputs)[0]
        else:
            if not func.is_view and func.namespace != "prim":
                self.traffic[self.at] += _count_bytes(args) + _count_bytes(result)
            return result
        for t in _list_tensors(result):
            self._held.append(t)
            self._products.add(t.untyped_storage()._cdata)
        return result


def _count_bytes(values: Any) -> float:
    return float(sum(t.nbytes for t in _list_tensors(values)))


def _list_tensors(values: Any) -> list[torch.Tensor]:
    return [t for t in tree_leaves(values) if isinstance(t, torch.Tensor)]
