"""bias_dropout_add: bias, dropout and the addition to a residual stream in one pass."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from torchweld import checks
from torchweld.dispatch.call import call
from torchweld.dispatch.kernels import define
from torchweld.dispatch.way import short
from torchweld.errors import ArgumentError
from torchweld.ops.norm.common import MEASURED, MEASURED_ON_GPU
from torchweld.ops.residual.common import as_wide
from torchweld.random import Shard, draw_seed, drop, split_shard
from torchweld.registry import ELEMENTS, SEED, Cases, Numerics, Op, activation, parameter, residual
from torchweld.registry.cost import count_per_element


@short()
def bias_dropout_add(
    input: torch.Tensor,
    bias: torch.Tensor | None,
    residual: torch.Tensor,
    *,
    p: float = 0.0,
    training: bool = True,
    seed: torch.Tensor | int | None = None,
    shard: Shard | None = None,
) -> torch.Tensor:
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
    return call(OP, *_inputs(input, bias, residual, p, training, seed, shard))


def _inputs(
    input: torch.Tensor,
    bias: torch.Tensor | None,
    residual: torch.Tensor,
    p: float,
    training: bool,
    seed: torch.Tensor | int | None,
    shard: Shard | None,
) -> tuple[Any, ...]:
    p, seed = draw_seed("bias_dropout_add", "input", input, p, training, seed)
    return input, bias, as_wide(residual, input), p, seed, *split_shard(shard)


def _plainly_right(
    x: torch.Tensor, bias: torch.Tensor | None, residual: torch.Tensor, whole: Sequence[int] | None
) -> bool:
    """Whether the full check can be skipped; torch itself would accept more."""
    return (
        x.dtype in OP.dtypes
        and x.ndim > 0
        and residual.dtype is x.dtype
        and residual.shape == x.shape
        and (bias is None or (bias.dtype is x.dtype and bias.shape == x.shape[-1:]))
        and not whole
        and checks.all_dense(x, bias, residual)
    )


def _reference(
    x: torch.Tensor,
    bias: torch.Tensor | None,
    residual: torch.Tensor,
    p: float,
    seed: torch.Tensor | None,
    whole: Sequence[int] | None,
    offset: Sequence[int] | None,
) -> torch.Tensor:
    if not _plainly_right(x, bias, residual, whole):
        _check(x, bias, residual, p, seed, whole, offset)
    if residual.dtype is not x.dtype:  # add to a wider residual without rounding first
        x = x.to(torch.promote_types(x.dtype, residual.dtype))
    y = x if bias is None else x + bias
    return (residual + drop(y, p, seed, whole, offset)).to(residual.dtype).contiguous()


def _plain(
    x: torch.Tensor,
    bias: torch.Tensor | None,
    residual: torch.Tensor,
    p: float,
    seed: torch.Tensor | None,
    whole: Sequence[int] | None,
    offset: Sequence[int] | None,
) -> torch.Tensor:
    y = x if bias is None else x + bias
    y = torch.nn.functional.dropout(y, p) if seed is not None else y
    return (residual + y).to(residual.dtype)


def _backward_reference(
    grad_y: torch.Tensor,
    bias: torch.Tensor | None,
    p: float,
    seed: torch.Tensor | None,
    whole: Sequence[int] | None,
    offset: Sequence[int] | None,
    input_dtype: torch.dtype,
    need_input: bool,
    need_bias: bool,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    grad = drop(grad_y, p, seed, whole, offset)
    grad_bias = None if bias is None else grad.sum_to_size(bias.shape).to(bias.dtype)
    return grad.to(input_dtype), grad_bias


def _check(x: Any, bias: Any, residual: Any, p: Any, seed: Any, whole: Any, offset: Any) -> None:
    name = OP.name
    checks.dense(name, "input", x, OP.dtypes, jagged=seed is None)
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
    checks.dropout(name, "input", x, seed, whole, offset)


def _fake(
    x: torch.Tensor,
    bias: torch.Tensor | None,
    residual: torch.Tensor,
    p: float,
    seed: torch.Tensor | None,
    whole: Sequence[int] | None,
    offset: Sequence[int] | None,
) -> tuple[torch.Tensor, ...]:
    return (torch.empty_like(residual, memory_format=torch.contiguous_format),)


def _terms(
    x: torch.Tensor,
    bias: torch.Tensor | None,
    residual: torch.Tensor,
    p: float,
    seed: torch.Tensor | None,
    whole: Sequence[int] | None,
    offset: Sequence[int] | None,
    *,
    grad_y: torch.Tensor,
) -> dict[str, torch.Tensor]:
    """Sums of magnitudes."""
    added = x.double().abs() if bias is None else x.double().abs() + bias.double().abs()
    grad_input = drop(grad_y.double().abs(), p, seed, whole, offset)
    return {
        "y": residual.double().abs() + drop(added, p, seed, whole, offset),
        "grad_input": grad_input,
        "grad_bias": grad_input.sum_to_size(grad_input.shape[-1:]),
        "grad_residual": grad_y.double().abs(),
    }


def _sample(
    shape: tuple[int, ...],
    p: float,
    *,
    bias: bool = True,
    whole: Sequence[int] = (),
    offset: Sequence[int] = (),
) -> tuple[Any, ...]:
    tensors = (activation(*shape), parameter(shape[-1]) if bias else None, residual(*shape))
    return (*tensors, p, SEED if p else None, list(whole), list(offset))


# Tests resize the first one.
_SAMPLES = (
    _sample((5, 48), 0.1),
    _sample((1,), 0.0),
    _sample((3, 1), 0.5),
    _sample((7,), 0.25),
    _sample((5, 7), 0.25, bias=False),
    _sample((5, 7), 0.0, bias=False),
    _sample((2, 3, 31), 0.9),
    _sample((33, 64), 0.0),
    _sample((4, 50, 768), 0.1),
    _sample((17, 1000), 0.0),
    _sample((2, 8193), 0.1),
    _sample((2, 3, 2, 3, 5, 9), 1.0),
    _sample((2, 2, 4, 18), 0.3, whole=(2, 6, 9, 64), offset=(0, 3, 5, 27)),
    _sample((0, 64), 0.1),
    _sample((2, 0, 7), 0.0),
    _sample((3, 0), 0.1),
)


def _measured(shapes: Sequence[tuple[int, ...]]) -> tuple[tuple[Any, ...], ...]:
    return tuple(_sample(shape, p) for shape in shapes for p in (0.0, 0.1))


OP = Op(
    name="bias_dropout_add",
    forward="(Tensor input, Tensor? bias, Tensor residual, float p, Tensor? seed, SymInt[]? whole,"
    " SymInt[]? offset) -> Tensor y",
    backward="(Tensor grad_y, Tensor? bias, float p, Tensor? seed, SymInt[]? whole,"
    " SymInt[]? offset, ScalarType input_dtype, bool need_input, bool need_bias)"
    " -> (Tensor grad_input, Tensor grad_bias)",
    inputs=_inputs,
    reference=_reference,
    cases=Cases(
        plain=_plain,
        sized=lambda leading, row: _sample((*leading, *row), 0.1),
        flops=count_per_element(4, 2),
        samples=_SAMPLES,
        benchmarks=_measured(MEASURED),
        benchmarks_on_gpu=_measured(MEASURED_ON_GPU),
        tiny=_sample((1, 64), 0.1),
        numerics=Numerics(
            fp32=dict.fromkeys(("y", "grad_input", "grad_bias", "grad_residual"), 2.0), terms=_terms
        ),
    ),
    backward_reference=_backward_reference,
    same_gradient={
        "residual": ("grad_y", lambda *_: True),
        "input": (
            "grad_y",
            lambda x, _, residual, p, seed, *__: seed is None and x.dtype is residual.dtype,
        ),
    },
    check=_check,
    fake=_fake,
    sharding=ELEMENTS,
    sources={
        "cpu": ("csrc/cpu/bias_dropout_add.cpp",),
        "triton": ("triton_kernels/bias_dropout_add.py",),
    },
    small=2**20,
    eager_rounds=True,
)
define(OP)
