"""Logits of a training step, which are computed only if something reads them."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch.utils._pytree import tree_map_only

from torchweld import state
from torchweld.dispatch.autograd import differentiate
from torchweld.dispatch.dtensor import is_dtensor
from torchweld.ops.gemm.linear_act import linear_as_torch

_ADVICE = (
    "fuse() left out the logits of this training step: unfuse the model, or leave it out by"
    " filter_fn, to compute with them"
)
_STALE = (
    "fuse() left out the logits of this training step, and the last layer's weights changed since"
    " or were sharded: read outputs.logits before that, as before optimizer.step()"
)


class LastLayer(NamedTuple):
    """The weight and bias of a language model's head."""

    weight: torch.Tensor
    bias: torch.Tensor | None


class Deferred:
    """Logits that are not computed: the head's input, and what the model does with the logits."""

    def __init__(self, x: torch.Tensor, classes: int, steps: tuple[Any, ...] = ()) -> None:
        self.x, self.classes, self.steps = x, classes, steps

    @property
    def device(self) -> torch.device:
        return self.x.device

    @property
    def shape(self) -> torch.Size:
        return torch.Size((*self.x.shape[:-1], self.classes))

    def read_options(self) -> dict[str, Any]:
        """The logit scale and the soft cap of the loss's function.

        The logits are `after * tanh(scale * z)`, or `after * scale * z` without the tanh.
        """
        scale, cap = 1.0, None
        for function, *given in self.steps:
            if function is torch.tanh:
                cap = 1.0
            elif function is not operator.add and given:
                factor = given[0] if function is operator.mul else 1 / given[0]
                scale *= factor
                cap = None if cap is None else cap * factor
        scale = round(scale) if abs(scale - round(scale)) < 1e-12 else scale  # (1 / 30) * 30
        return {"logit_scale": None if scale == 1 else scale, "softcap": cap}

    def compute(self, head: Callable[[torch.Tensor], Any]) -> torch.Tensor:
        """The logits."""
        z = head(self.x)
        for function, *given in self.steps:
            z = function(z, *given)
        return z  # type: ignore[no-any-return]

    def make_tensor(self, head: LastLayer) -> Any:
        """The logits for the caller of the model: a tensor, if a later call can compute them."""
        compiling = state.is_compiling() or state.is_transforming()
        if compiling or is_dtensor(self.x) or is_dtensor(head.weight):
            return self
        made = _Head.apply(self, self.x, head.weight, head.bias)
        made.recipe = self, head
        return made

    def with_input(self, x: torch.Tensor) -> Deferred:
        """The logits of another input of the head."""
        return Deferred(x, self.classes, self.steps)

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        raise RuntimeError(_ADVICE)

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"{name}: {_ADVICE}")

    def _refuse(self, *given: Any) -> Any:
        raise RuntimeError(_ADVICE)

    __len__ = __iter__ = __getitem__ = __neg__ = __bool__ = __float__ = _refuse
    __add__ = __mul__ = __truediv__ = __radd__ = __sub__ = __rsub__ = __rmul__ = __rtruediv__ = (
        __pow__
    ) = _refuse
    __matmul__ = __lt__ = __le__ = __gt__ = __ge__ = _refuse


class Logits(torch.Tensor):
    """Lazy logits: computed when an operation first reads their values.

    Autograd sees an ordinary tensor. Before the first read it keeps the head's input, not the
    logits.
    """

    # The function that computes the values, or other lazy logits that share their values; None
    # once computed.
    _source: Any
    _made: torch.Tensor
    # What they are made of, a Deferred and its head; None of a view or a copy.
    recipe: tuple[Deferred, LastLayer] | None = None

    @staticmethod
    def make(like: Any, dtype: torch.dtype, source: Callable[[], torch.Tensor] | Logits) -> Logits:
        """Make one of this shape and dtype."""
        size, device = like.shape, like.device
        made = torch.Tensor._make_wrapper_subclass(Logits, size, dtype=dtype, device=device)
        made._source = source
        return made

    @torch._disable_dynamo
    def compute(self) -> torch.Tensor:
        """The values, without a graph."""
        if self._source is not None:
            with torch.inference_mode(False), torch.no_grad():
                shares = isinstance(self._source, Logits)
                self._made = self._source.compute() if shares else self._source()
            self._source = None
        return self._made

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        own, kwargs = args[0] if args else None, kwargs or {}
        if function in _LATER and isinstance(own, Logits) and kwargs.keys() <= _KEPT:
            root = own._source if isinstance(own._source, Logits) else own
            compute = root._source
            if compute is not None and own.shape == torch.Size(args[1] if args[1:] else own.shape):
                dtype, copies = kwargs.get("dtype", own.dtype), _LATER[function]
                # A copy does not see what is written to the original later.
                source = (lambda: function(compute(), **kwargs)) if copies else root
                return Logits.make(own, dtype, source)
        args, kwargs = tree_map_only(Logits, Logits.compute, (args, kwargs))
        return function(*args, **kwargs)

    def __deepcopy__(self, memo: Any) -> Any:
        return self._plain().__deepcopy__(memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self._plain().__reduce_ex__(protocol)

    def retain_grad(self) -> None:
        """Refused: the loss's gradient does not pass through the logits."""
        raise RuntimeError(_ADVICE)

    def _plain(self) -> torch.Tensor:
        """A leaf with the values, for methods that need memory of their own."""
        return self.compute().detach().requires_grad_(self.requires_grad)


# Operations that need no values, and whether their result has memory of its own.
_LATER = {
    torch.ops.aten.detach.default: False,
    torch.ops.aten.alias.default: False,
    torch.ops.aten.view.default: False,
    torch.ops.aten.clone.default: True,
    torch.ops.aten._to_copy.default: True,
}
_KEPT = {"dtype", "memory_format"}
for _name in ("numpy", "tolist", "data_ptr", "untyped_storage", "storage", "__dlpack__"):
    setattr(Logits, _name, lambda self, *a, _n=_name, **k: getattr(self._plain(), _n)(*a, **k))


class _Head(torch.autograd.Function):
    """The head and the steps after it, without a run of the head in the forward pass."""

    @staticmethod
    def forward(ctx: Any, deferred: Deferred, *tensors: Any) -> Any:
        device, dtype = deferred.device.type, deferred.x.dtype
        enabled = torch.is_autocast_enabled(device)
        cast = torch.get_autocast_dtype(device) if enabled else None
        kept: list[Any] = [t if t is None else t.detach() for t in tensors]
        kept += [given[0] for function, *given in deferred.steps if function is operator.add]
        versions, numbers = _mark(kept)

        def compute(x: torch.Tensor, *weights: Any) -> torch.Tensor:
            with torch.autocast(device, cast, enabled):
                again = deferred.with_input(x)
                return again.compute(lambda x: linear_as_torch(x, *weights))

        def make() -> torch.Tensor:
            if any(map(_is_freed, kept)):
                raise RuntimeError(_STALE)
            versions_now, numbers_now = _mark(kept)
            if versions_now != versions or not torch.equal(numbers_now, numbers):
                raise RuntimeError(_STALE)
            return compute(*kept[: len(tensors)])

        ctx.compute = compute
        ctx.save_for_backward(*tensors)
        if cast is not None and dtype != torch.float64:
            dtype = cast
        for function, *given in deferred.steps:
            if function is torch.Tensor.float:
                dtype = torch.float32
            elif function is operator.add:
                dtype = torch.promote_types(dtype, given[0].dtype)
        return Logits.make(deferred, dtype, make)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        with torch.enable_grad():
            # Of views, so that no hook of a parameter runs here.
            inputs: list[Any] = [t if t is None else t.view_as(t) for t in ctx.saved_tensors]
            y = ctx.compute(*inputs)
        return None, *differentiate([y], inputs, [grad], create_graph=torch.is_grad_enabled())


def _mark(tensors: list[Any]) -> tuple[list[int], torch.Tensor]:
    """Numbers that change if one of the tensors does. Fused optimizers do not count versions."""
    return [t._version for t in tensors if t is not None], tensors[1].diagonal().clone()


def _is_freed(tensor: torch.Tensor | None) -> bool:
    """Whether FSDP freed the tensor's memory."""
    return tensor is not None and not tensor.untyped_storage().nbytes()
