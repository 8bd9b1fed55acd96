"""The ops of a residual stream: dropout, the addition, and the norm that follows, in one pass.

    bias_dropout_add(x, residual) = residual + dropout(x + bias)
    dropout_add_norm(x, residual): z = residual + dropout(x), y = norm(z)

Read on in: csrc/core/dropout_add_norm.h, csrc/cpu/dropout_add_norm.cpp,
csrc/cpu/bias_dropout_add.cpp, triton_kernels/dropout_add_norm.py,
triton_kernels/bias_dropout_add.py, bench/cases/residual.py.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from torchweld import checks
from torchweld.dispatch.call import call, decide
from torchweld.dispatch.kernels import define
from torchweld.dispatch.warm.cache import short
from torchweld.errors import ArgumentError
from torchweld.ops import norm as norms
from torchweld.random import Shard, draw_seed, drop, split_shard
from torchweld.registry import ELEMENTS, SEED, Op, Rows, activation, parameter, residual
from torchweld.registry.cost import count_per_element

# --- bias_dropout_add -----------------------------------------------------------------------------


@short()
def bias_dropout_add(
    input: Tensor,
    bias: Tensor | None,
    residual: Tensor,
    *,
    p: float = 0.0,
    training: bool = True,
    seed: Tensor | int | None = None,
    shard: Shard | None = None,
) -> Tensor:
    """residual + dropout(input + bias, p).

    Args:
        input: [*, width]; float32, bfloat16, float16 (or float64).
        bias: [width], in input's dtype, or float32 for 16-bit input; None: no bias.
        residual: of input's shape; of input's dtype, or float32 and 16 bits in either order.
        p: probability that an element is dropped if training is true.
        training: False drops nothing.
        seed: what to drop, see torchweld.random; None draws one from torch's generator.
        shard: the place of input in a larger tensor, sharded in any dimensions.

    Returns:
        A contiguous tensor of residual's shape, of the wider of the two dtypes. The backward needs
        only the seed and the bias.
    """
    return decide(BIAS_DROPOUT_ADD, *_add_inputs(input, bias, residual, p, training, seed, shard))


def _add_inputs(
    input: Any, bias: Any, residual: Any, p: Any, training: Any, seed: Any, shard: Any
) -> tuple[Any, ...]:
    p, seed = draw_seed("bias_dropout_add", "input", input, p, training, seed)
    return input, bias, norms.promote_residual(residual, input), p, seed, *split_shard(shard)


def _add(
    x: Tensor, bias: Tensor | None, residual: Tensor, p: float, seed: Tensor | None, *place: Any
) -> Tensor:
    plainly_right = (  # torch itself would accept more
        x.dtype in BIAS_DROPOUT_ADD.dtypes
        and x.ndim > 0
        and residual.dtype is x.dtype
        and residual.shape == x.shape
        and (bias is None or (bias.dtype is x.dtype and bias.shape == x.shape[-1:]))
        and not place[0]
        and checks.all_dense(x, bias, residual)
    )
    if not plainly_right:
        _check_add(x, bias, residual, p, seed, *place)
    if residual.dtype is not x.dtype:  # add to a wider residual without rounding first
        x = x.to(torch.promote_types(x.dtype, residual.dtype))
    y = x if bias is None else x + bias
    return (residual + drop(y, p, seed, *place)).to(residual.dtype).contiguous()


def _add_backward(
    grad_y: Tensor, bias: Tensor | None, p: float, seed: Tensor | None, *rest: Any
) -> tuple[Tensor, Tensor | None]:
    whole, offset, input_dtype, *_ = rest
    grad = drop(grad_y, p, seed, whole, offset)
    grad_bias = None if bias is None else grad.sum_to_size(bias.shape).to(bias.dtype)
    return grad.to(input_dtype), grad_bias


def _check_add(x: Any, bias: Any, residual: Any, p: Any, seed: Any, *place: Any) -> None:
    name = BIAS_DROPOUT_ADD.name
    checks.dense(name, "input", x, BIAS_DROPOUT_ADD.dtypes, jagged=seed is None)
    if x.ndim == 0:
        raise ArgumentError(name, "input", "0-dimensional", "at least one")
    dtypes = checks.beside(x)
    if bias is not None:
        checks.dense(name, "bias", bias, dtypes, "input")
        checks.like(name, "bias", bias, x, "input")
        checks.shaped(name, "bias", bias, x.shape[-1:], "input's last dimension")
    checks.dense(name, "residual", residual, dtypes, "input", jagged=x.is_nested)
    checks.like(name, "residual", residual, x, "input")
    checks.shaped(name, "residual", residual, x.shape, "input's shape")
    checks.dropout(name, "input", x, seed, *place)


def _size_add(leading: tuple[int, ...], row: tuple[int, ...]) -> tuple[Any, ...]:
    shape = (*leading, *row)
    return activation(*shape), parameter(shape[-1]), residual(*shape), 0.1, SEED, [], []


BIAS_DROPOUT_ADD = Op(
    name="bias_dropout_add",
    forward="(Tensor input, Tensor? bias, Tensor residual, float p, Tensor? seed, SymInt[]? whole,"
    " SymInt[]? offset) -> Tensor y",
    backward="(Tensor grad_y, Tensor? bias, float p, Tensor? seed, SymInt[]? whole,"
    " SymInt[]? offset, ScalarType input_dtype, bool need_input, bool need_bias)"
    " -> (Tensor grad_input, Tensor grad_bias)",
    inputs=_add_inputs,
    reference=_add,
    backward_reference=_add_backward,
    same_gradient={
        "residual": ("grad_y", lambda *_: True),
        "input": (
            "grad_y",
            lambda x, _, residual, p, seed, *__: seed is None and x.dtype is residual.dtype,
        ),
    },
    check=_check_add,
    fake=lambda x, bias, residual, *_: (norms.result(residual),),
    sharding=ELEMENTS,
    sized=_size_add,
    flops=count_per_element(4, 2),
    sources={
        "cpu": ("csrc/cpu/bias_dropout_add.cpp",),
        "triton": ("triton_kernels/bias_dropout_add.py",),
    },
    eager_rounds=True,
    # A kernel draws for eight columns at once, compiled code for each by itself.
    left_to_compiler=lambda x, bias, residual, p, seed, *_: seed is None,
)
define(BIAS_DROPOUT_ADD)


# --- dropout_add_layer_norm and dropout_add_rms_norm ----------------------------------------------


@short()
def dropout_add_layer_norm(
    input: Tensor,
    residual: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None = None,
    *,
    normalized_shape: Sequence[int] | None = None,
    eps: float = 1e-5,
    return_residual: bool = False,
    y_dtype: torch.dtype | None = None,
    p: float = 0.0,
    training: bool = True,
    seed: Tensor | int | None = None,
    shard: Shard | None = None,
) -> Any:
    """layer_norm(z) with z = dropout(input, p) + residual.

    Post-norm needs only the result; pre-norm also needs z, the residual stream:

        x, stream = dropout_add_layer_norm(x, stream, weight, bias, p=0.1, return_residual=True)

    Args:
        input: [*, *normalized_shape]; float32, bfloat16, float16 (or float64).
        residual: of input's shape; of input's dtype, or float32 and 16 bits in either order; None:
            zeros.
        weight, bias: of normalized_shape, in input's dtype, or float32 and 16 bits in either order.
        normalized_shape: the last dimensions of input, which are normalised; None: weight's shape,
            or without a weight the last dimension.
        eps: added to the variance, >= 0.
        return_residual: return (y, z).
        y_dtype: dtype of y: input's, or float32 for 16-bit input; None: input's, or under autocast
            torch's norm's: float32 on CUDA and with a float32 residual.
        p: probability that an element of input is dropped if training is true.
        training: False drops nothing.
        seed: what to drop, see torchweld.random; None draws one from torch's generator.
        shard: the place of input in a larger tensor, sharded only in dimensions before
            normalized_shape.

    Returns:
        y; z, of the wider of input's and residual's dtypes.
    """
    how = (p, eps, training, seed, shard, normalized_shape, y_dtype)
    return ADD_LAYER_NORM.decide(return_residual, input, residual, (weight, bias), *how)


@short()
def dropout_add_rms_norm(
    input: Tensor,
    residual: Tensor | None,
    weight: Tensor | None,
    *,
    normalized_shape: Sequence[int] | None = None,
    eps: float | None = None,
    return_residual: bool = False,
    y_dtype: torch.dtype | None = None,
    p: float = 0.0,
    training: bool = True,
    seed: Tensor | int | None = None,
    shard: Shard | None = None,
) -> Any:
    """rms_norm(z) with z = dropout(input, p) + residual.

    Post-norm needs only the result; pre-norm also needs z, the residual stream:

        x, stream = dropout_add_rms_norm(x, stream, weight, p=0.1, return_residual=True)

    Args:
        input, residual, normalized_shape: as in `dropout_add_layer_norm`.
        weight: of normalized_shape, in input's dtype, or float32 and 16 bits in either order.
        eps: added to the mean square, >= 0; None: as in rms_norm.
        return_residual, y_dtype: as in `dropout_add_layer_norm`.
        p, training, seed, shard: as in `dropout_add_layer_norm`.

    Returns:
        y; z, of the wider of input's and residual's dtypes.
    """
    how = (p, eps, training, seed, shard, normalized_shape, y_dtype)
    return ADD_RMS_NORM.decide(return_residual, input, residual, (weight,), *how)


class _AddNorm:
    """The op of a norm's name: the norm of dropout(x) + residual. It returns z and y."""

    def __init__(self, norm: Op, parameters: Sequence[str], flops: tuple[int, int]) -> None:
        self.norm, self.parameters = norm, parameters
        self.centered = norm is norms.LAYER_NORM
        statistics = "Tensor mean, Tensor rstd" if self.centered else "Tensor rstd"
        eps = "float eps" if self.centered else "float? eps"
        learnt = ", ".join(f"Tensor? {name}" for name in parameters)
        dropping = f"float p, {eps}, Tensor? seed, SymInt[]? whole, SymInt[]? offset"
        needs = ", ".join(f"bool need_{name}" for name in ("input", "residual", *parameters))
        grads = ", ".join(f"Tensor grad_{name}" for name in ("input", "residual", *parameters))
        shape = "SymInt[] normalized_shape"
        self.op = Op(
            name=f"dropout_add_{norm.name}",
            forward=f"(Tensor input, Tensor? residual, {shape}, {learnt}, {dropping}, bool wide_y)"
            f" -> (Tensor z, Tensor y, {statistics})",
            backward=f"(Tensor? grad_z, Tensor? grad_y, Tensor z, {shape}, {learnt}, {dropping},"
            f" {statistics}, ScalarType input_dtype, {needs}) -> ({grads})",
            inputs=self._inputs_by_name,
            reference=self._reference,
            backward_reference=self._backward,
            # Without dropout, x and residual have the same gradient.
            same_gradient={
                "input": (
                    "grad_residual",
                    lambda *inputs: self._is_shared(self.op.Args(*inputs)),
                )
            },
            check=self._check,
            fake=self._fake,
            sharding=Rows(lambda x, residual, normalized_shape, *_: len(normalized_shape)),
            sized=self._size,
            flops=count_per_element(*flops),
            sources={
                "cpu": ("csrc/cpu/dropout_add_norm.cpp",),
                "triton": ("triton_kernels/dropout_add_norm.py",),
            },
            eager_rounds=True,
            # As above; and Inductor starts the GPU's kernel itself, so that it keeps the norm too.
            left_to_compiler=lambda *inputs: not (inputs[0].is_cuda or self.op.draws(inputs)),
        )
        define(self.op)

    def decide(
        self, returns_z: bool, x: Tensor, residual: Tensor | None, parameters: Any, *rest: Any
    ) -> Any:
        """What serves the public function's arguments."""
        inputs = self._inputs(x, residual, parameters, *rest)
        if residual is not None or self.op.draws(inputs):
            return decide(self.op, *inputs, returned=("y", "z") if returns_z else "y")
        args = self.op.Args(*inputs)
        kind = x.device.type if isinstance(x, Tensor) else "meta"  # the check raises
        autocast_widens = kind in self.norm.autocast and checks.autocasts(kind)
        if not (args.wide_y or autocast_widens):
            how = (args.normalized_shape, *parameters, args.eps)
            return decide(self.norm, x, *how, returned=("y", "input") if returns_z else "y")
        wide = x.float() if args.wide_y else x
        learnt = map(norms.as_float32, parameters) if args.wide_y else parameters
        y = call(self.norm, wide, args.normalized_shape, *learnt, args.eps).to(wide.dtype)
        return (y, x) if returns_z else y

    @staticmethod
    def _is_shared(args: Any) -> bool:
        """Whether both have the same gradient."""
        if args.residual is None or args.seed is not None:
            return False
        return args.residual.dtype is args.input.dtype

    def _inputs_by_name(self, *, return_residual: bool = False, **given: Any) -> tuple[Any, ...]:
        parameters = tuple(given.pop(name) for name in self.parameters)
        return self._inputs(given.pop("input"), given.pop("residual"), parameters, **given)

    def _inputs(
        self,
        x: Any,
        residual: Any,
        parameters: tuple[Any, ...],
        p: Any,
        eps: Any,
        training: Any,
        seed: Any,
        shard: Any,
        normalized_shape: Any,
        y_dtype: Any,
    ) -> tuple[Any, ...]:
        p, seed = draw_seed(self.op.name, "input", x, p, training, seed)
        if normalized_shape is None:  # without a shape, the check raises
            last = parameters[0] is None
            like, dims = (x, slice(-1, None)) if last else (parameters[0], slice(None))
            normalized_shape = getattr(like, "shape", ())[dims]
        residual = norms.promote_residual(residual, x)
        wide_y = self._wide_y(x, residual, y_dtype)
        return x, residual, normalized_shape, *parameters, p, eps, seed, *split_shard(shard), wide_y

    def _wide_y(self, x: Any, residual: Any, y_dtype: torch.dtype | None) -> bool:
        """Whether to return float32 for 16-bit x. Defaults to torch's type promotion.

        Under autocast torch's norm returns the dtype of x + residual, or float32 on devices whose
        autocast rule says so.
        """
        if not isinstance(x, Tensor):  # the check raises
            return False
        if y_dtype is None:
            kind = x.device.type
            if x.dtype.itemsize != 2 or not checks.autocasts(kind):
                return False
            return kind in self.norm.autocast or getattr(residual, "dtype", None) is torch.float32
        if y_dtype not in checks.beside(x):
            accepted = checks.names(checks.beside(x))
            raise ArgumentError(self.op.name, "y_dtype", y_dtype, accepted)
        return y_dtype is not x.dtype

    def _reference(
        self, x: Tensor, residual: Tensor | None, shape: Sequence[int], *rest: Any
    ) -> tuple[Tensor, Tensor]:
        *parameters, p, eps, seed, whole, offset, _ = rest
        plainly_right = (  # torch itself would accept more
            (residual is None or (residual.shape == x.shape and residual.dtype is x.dtype))
            and all(value is None or value.dtype is x.dtype for value in parameters)
            and (eps is None or eps >= 0)
            and not whole
            and checks.all_dense(x, residual)
        )
        if not plainly_right:
            self._check(x, residual, shape, *rest)
        dropping = (p, seed, whole, offset, len(shape))
        return self.compute(lambda x: drop(x, *dropping), x, residual, shape, *rest)

    def compute(
        self,
        drop: Callable[[Tensor], Tensor],
        x: Tensor,
        residual: Tensor | None,
        shape: Sequence[int],
        *rest: Any,
    ) -> tuple[Tensor, Tensor]:
        """z, contiguous as from the kernels, and y in eager torch, with this kind of dropout.

        The result of dropout is not rounded before it is added to a wider residual.
        """
        *parameters, _, eps, _, _, _, wide_y = rest
        if residual is None:
            z = drop(x).contiguous()
        else:
            kind = torch.promote_types(x.dtype, residual.dtype)
            z = drop(x if x.dtype is kind else x.to(kind)) + residual
            z = z.to(residual.dtype).contiguous()
        dtype = torch.promote_types(x.dtype, torch.float32) if wide_y else x.dtype
        kind, wide = torch.promote_types(z.dtype, dtype), z
        if kind.itemsize > 2:
            wide, parameters = z.to(kind), [p if p is None else p.to(kind) for p in parameters]
        return z, self.norm.reference(wide, shape, *parameters, eps).to(dtype)

    def _backward(
        self, grad_z: Any, grad_y: Any, z: Tensor, shape: Sequence[int], *rest: Any
    ) -> tuple[Tensor | None, ...]:
        """Gradients of x, residual and the parameters in eager torch, for second derivatives."""
        count = len(self.parameters)
        parameters, (p, eps, seed, whole, offset) = rest[:count], rest[count : count + 5]
        input_dtype = rest[count + (7 if self.centered else 6)]
        kind = torch.promote_types(z.dtype, torch.float32)
        dropping = (p, seed, whole, offset, len(shape))
        if grad_y is None:  # only z was used; zero times infinity would be NaN
            nothing = [None if value is None else torch.zeros_like(value) for value in parameters]
            return drop(grad_z.to(kind), *dropping).to(input_dtype), grad_z, *nothing
        leading = z.ndim - len(shape)
        rows, dims = tuple(range(leading)), tuple(range(leading, z.ndim))
        wide, grad = z.to(kind), grad_y.to(kind)
        if self.centered:
            wide = wide - wide.mean(dims, keepdim=True)
        eps = torch.finfo(kind).eps if eps is None else eps
        rstd = (wide.square().mean(dims, keepdim=True) + eps).rsqrt()
        x_hat = wide * rstd
        g = grad if parameters[0] is None else grad * parameters[0].to(kind)
        total = g - x_hat * (g * x_hat).mean(dims, keepdim=True)
        if self.centered:
            total = total - g.mean(dims, keepdim=True)
        total = total * rstd
        if grad_z is not None:
            total = total + grad_z
        sums = [
            None if value is None else (term.sum(rows) if rows else term).to(value.dtype)
            for value, term in zip(parameters, (grad * x_hat, grad), strict=False)
        ]
        return drop(total, *dropping).to(input_dtype), total.to(z.dtype), *sums

    def _check(self, x: Any, residual: Any, shape: Any, *rest: Any) -> None:
        *parameters, _, eps, seed, whole, offset, _ = rest
        name = self.op.name
        checks.dense(name, "input", x, self.op.dtypes, jagged=seed is None)
        if (weight := parameters[0]) is not None:  # normalized_shape may come from it
            checks.dense(name, "weight", weight, checks.parameters_beside(x), "input")
            meaning = f"the last dimensions of input, whose shape is {list(x.shape)}: for instance"
            checks.shaped(name, "weight", weight, x.shape[x.ndim - weight.ndim :], meaning)
        eps = 0.0 if eps is None and not self.centered else eps
        norms.check(self.op, x, shape, parameters, eps)
        if residual is not None:
            checks.dense(name, "residual", residual, checks.beside(x), "input", jagged=x.is_nested)
            checks.like(name, "residual", residual, x, "input")
            checks.shaped(name, "residual", residual, x.shape, "input's shape")
        checks.dropout(name, "input", x, seed, whole, offset)
        if whole and list(whole[x.ndim - len(shape) :]) != list(shape):
            accepted = f"whole rows: ending in {list(shape)}"
            raise ArgumentError(name, "shard", f"of sizes {list(whole)}", accepted)

    def _fake(
        self, x: Tensor, residual: Tensor | None, shape: Sequence[int], *rest: Any
    ) -> tuple[Tensor, ...]:
        z = norms.result(x if residual is None else residual)
        statistics = [norms.statistics(x, shape) for _ in range(1 + self.centered)]
        y = x.new_empty(x.shape, dtype=statistics[0].dtype if rest[-1] else x.dtype)
        return z, y, *statistics

    def _size(self, leading: tuple[int, ...], row: tuple[int, ...]) -> tuple[Any, ...]:
        x, added = activation(*leading, *row), residual(*leading, *row)
        learnt = [parameter(*row)] * len(self.parameters)
        return (x, added, list(row), *learnt, 0.1, 1e-5, SEED, [], [], False)


ADD_LAYER_NORM = _AddNorm(norms.LAYER_NORM, ("weight", "bias"), (11, 16))
ADD_RMS_NORM = _AddNorm(norms.RMS_NORM, ("weight",), (8, 14))
