"""linear_act: torch's GEMM, then bias and activation in one pass of ours; on a GPU all at once."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch.nn.functional import linear

from torchweld import checks
from torchweld.dispatch.bare import BareOp
from torchweld.dispatch.call import call, checkpointed, run_on
from torchweld.errors import ArgumentError
from torchweld.ops.activation import bias_act
from torchweld.ops.activation import common as activations
from torchweld.ops.gemm import epilogue, onednn
from torchweld.ops.gemm import linear as gemm
from torchweld.registry import ROWS, Composite, Numerics, activation
from torchweld.registry import weight as weight_spec
from torchweld.registry.cost import of_gemms


def linear_act(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    activation: str = "gelu",
    approximate: str = "none",
    recompute: bool = False,
) -> torch.Tensor:
    """activation(linear(x, weight, bias)); its backward has both gradients of the sum in one pass.

    For the backward x and the sum before the activation are saved.

    Args:
        x: [*, in_features]; float32, bfloat16, float16 (or float64).
        weight: [out_features, in_features].
        bias: [out_features].
        activation: "gelu", "relu", "silu" or another of bias_act's.
        approximate: of gelu, as in torch: "none" (by erf, the default) or "tanh".
        recompute: save x alone, and compute the rest again in the backward.

    Returns:
        A tensor [*, out_features].
    """
    return recomputed(recompute, OP, x, weight, bias, activation, approximate)


def linear_gelu(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    approximate: str = "none",
    recompute: bool = False,
) -> torch.Tensor:
    """gelu(linear(x, weight, bias)): linear_act with torch's defaults for gelu.

    Args:
        x: [*, in_features]; float32, bfloat16, float16 (or float64).
        weight: [out_features, in_features].
        bias: [out_features].
        approximate: "none" (by erf, the default) or "tanh".
        recompute: save x alone, and compute the rest again in the backward.

    Returns:
        A tensor [*, out_features].
    """
    return recomputed(recompute, OP, x, weight, bias, "gelu", approximate)


def recomputed(recompute: bool, op: Composite, *inputs: Any) -> torch.Tensor:
    """The op's result; with `recompute`, nothing but its inputs is saved for the backward."""
    if recompute and torch.is_grad_enabled():
        return checkpointed(call, op, *inputs)
    return call(op, *inputs)


# The same pass over what nobody else holds: no new pages, and half the lines in the caches.
BareOp("bias_act_", "(Tensor(a!) x, Tensor? bias, str activation, str approximate) -> ()")


def activated(backend, x, weight, bias, activation, approximate):
    """linear, then bias_act on this backend; by one kernel where there is one, and it is faster."""
    if activation == "identity":
        return gemm.linear(x, weight, bias)
    given = (x, weight, bias, activation, approximate)
    if (made := in_one(backend, *given)) is not None:
        return epilogue.activated(made, activation, approximate)
    if backend == "cpu" and (y := onednn.linear_act(*given)) is not None:
        return y
    return in_two(backend, *given)


def in_one(backend, x, weight, bias, activation, approximate):
    """What one kernel makes, where there is one and it is faster."""
    if backend not in epilogue.ONE_KERNEL:
        return None
    given = (x, weight, bias, activation, approximate)
    tile = epilogue.choose(backend, *given, partial(in_two, backend))
    return None if tile is None else epilogue.linear_act(backend, *given, tile)


def in_two(backend, x, weight, bias, activation, approximate):
    """linear, then bias_act on this backend."""
    z, bias = summed(x, weight, bias, activation)
    return act(backend, z, bias, activation, approximate)


def with_sum(backend, x, weight, bias, activation, approximate):
    """The same, with what a kernel needs that takes the gradient back through the activation."""
    z = linear(x, weight, None if bias is None else bias.detach())
    y = act(backend, z.detach(), None, activation, approximate)
    return epilogue.Made(y, z, epilogue.zeros_of(None if bias is None else bias.to(z.dtype)))


def act(backend, z, bias, activation, approximate):
    """bias_act on this backend, in place where z is wanted no more."""
    if backend == "cpu" and not is_saved(z, bias) and is_ours(z):
        torch.ops.torchweld.bias_act_.cpu(z, bias, activation, approximate)
        return z
    passes = epilogue.PASSES.get(backend, backend)
    return run_on(bias_act.OP, passes, (z, bias, activation, approximate))


# Of a 16-bit bias. The sum is rounded as the GEMM leaves it, which costs least where that is small:
# with all of the bias in it for the derivative, since that bends most near a sum of 0; with none of
# it for the result, which large sums are rounded for. With three quarters both are closer to the
# truth than with all. The rest is exact: numbers within a factor of 2 differ by one of their kind.
_GEMMS_SHARE = 0.75


def summed(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, activation: str
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """What the GEMM makes, and the bias that is left to the activation's pass."""
    if activation == "relu":
        # Its derivative jumps where the sum changes its sign: no rounding before the bias is added.
        return gemm.linear(x, weight, bias), None
    dtype = epilogue.computed_in(x)
    if bias is None or dtype.itemsize > 2:
        return gemm.linear(x, weight), bias
    if bias.dtype is not dtype:
        bias = bias.to(torch.promote_types(bias.dtype, torch.float32))
    most = (_GEMMS_SHARE * epilogue.finite(bias)).to(dtype)
    return gemm.linear(x, weight, most), bias - most


def is_saved(z: torch.Tensor, bias: torch.Tensor | None) -> bool:
    """Whether z is wanted in a backward."""
    trained = z.requires_grad or (bias is not None and bias.requires_grad)
    return trained and torch.is_grad_enabled()


def is_ours(z: torch.Tensor) -> bool:
    """Whether a GEMM's result may be written to: not where it is traced or kept."""
    # A mode that sees the GEMM may have kept its result, as a selective checkpoint does.
    if torch.compiler.is_compiling() or torch._C._len_torch_dispatch_stack():
        return False
    return type(z) is torch.Tensor and z.is_contiguous()


def _fused(backend, x, weight, bias, activation, approximate):
    if not fits(x, weight, bias):
        _check_all(x, weight, bias, activation, approximate)
    return activated(backend, x, weight, bias, activation, approximate)


def _reference(x, weight, bias, activation, approximate):
    if not fits(x, weight, bias):
        _check_all(x, weight, bias, activation, approximate)
    return activations.activate(OP, linear(x, weight, bias), activation, approximate)


def _check_all(x, weight, bias, activation, approximate):
    check(OP.name, x, weight=weight, bias=bias)
    activations.check(OP.name, activation, approximate)


def fits(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> bool:
    """Whether torch's GEMM can be trusted to say what else is wrong with these."""
    return (
        weight.ndim == 2
        and checks.all_dense(x, weight, bias)
        and (bias is None or (bias.dtype is weight.dtype and bias.shape == weight.shape[:1]))
    )


def check(name: str, x: Any, of: str = "x", *, jagged: bool = True, **parameters: Any) -> None:
    """A GEMM's weight and, after it, its bias, which fit x; x has its width from `of`."""
    checks.dense(name, "x", x, OP.dtypes, jagged=jagged)
    if x.ndim == 0:
        raise ArgumentError(name, "x", "of no dimensions", "[*, in_features]")
    dtypes = OP.dtypes if checks.autocasts(x.device.type) else (x.dtype,)
    (weight_name, weight), (bias_name, bias) = parameters.items()
    checks.dense(name, weight_name, weight, dtypes, of)
    checks.like(name, weight_name, weight, x, "x")
    if weight.ndim != 2 or weight.shape[1] != x.shape[-1]:
        accepted = f"[out_features, {x.shape[-1]}], to go with {of}"
        raise ArgumentError(name, weight_name, f"of shape {list(weight.shape)}", accepted)
    if bias is None:
        return
    checks.dense(name, bias_name, bias, [weight.dtype], weight_name)
    checks.like(name, bias_name, bias, x, "x")
    if bias.shape != weight.shape[:1]:
        accepted = f"[{weight.shape[0]}], as {weight_name} is {list(weight.shape)}"
        raise ArgumentError(name, bias_name, f"of shape {list(bias.shape)}", accepted)


def _fake(x, weight, bias, activation, approximate):
    return (x.new_empty((*x.shape[:-1], weight.shape[0])),)


def _terms(x, weight, bias, activation, approximate, grad_y):
    """bias_act's, with every product of the GEMMs a term."""
    known = activations.ACTIVATIONS[activation, approximate]
    x, weight, grad = x.double().abs(), weight.double().abs(), grad_y.double().abs()
    z = linear(x, weight, None if bias is None else bias.double().abs())
    grad_z = grad * known.slope(z)
    return {
        "y": known.value(z),
        "grad_x": grad_z @ weight,
        "grad_weight": outer(grad_z, x),
        "grad_bias": grad_z.sum_to_size(grad_z.shape[-1:]),
    }


def outer(grad: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """A weight's gradient: the sum over the rows of grad and x."""
    return torch.einsum("...n,...k->nk", grad, x)


def arguments(leading: tuple[int, ...], width: int, features: int) -> tuple[Any, ...]:
    """x, weight and bias of a sample."""
    return (activation(*leading, width), weight_spec(features, width), activation(features))


# Leading sizes, in_features, out_features: one element, odd and prime sizes, one to five
# dimensions, no rows, no features on either side, and as many as the pools of errors ask for.
SHAPES: tuple[tuple[tuple[int, ...], int, int], ...] = (
    ((), 1, 1),
    ((3,), 5, 7),
    ((2, 3), 31, 13),
    ((2, 1, 3), 8, 24),
    ((2, 1, 3, 1), 17, 19),
    ((256,), 67, 127),
    ((2,), 7, 8193),
    ((3,), 5, 4096),
    ((0,), 8, 5),
    ((2, 0, 3), 8, 5),
    ((3,), 0, 4),
    ((3,), 4, 0),
)


def _samples():
    found = [(*arguments(*shape), "gelu", "none") for shape in SHAPES]
    found += [
        (*arguments(*shape), *kind) for shape in SHAPES[1:6] for kind in activations.KINDS[1:]
    ]
    without = [
        (*arguments(*shape)[:2], None, *kind) for shape in SHAPES[1:3] for kind in activations.KINDS
    ]
    return (*found, *without)


_RESULTS = ("y", "grad_x", "grad_weight", "grad_bias")

OP = Composite(
    name="linear_act",
    forward="(Tensor x, Tensor weight, Tensor? bias, str activation, str approximate)"
    " -> (Tensor y)",
    backward="(Tensor grad_y, Tensor x, Tensor weight, Tensor? bias, str activation,"
    " str approximate) -> (Tensor grad_x, Tensor grad_weight, Tensor grad_bias)",
    reference=_reference,
    fused=_fused,
    check=_check_all,
    fake=_fake,
    sharding=ROWS,
    sized=lambda leading, row: (*arguments(leading, *row, *row), "gelu", "none"),
    flops=lambda x, weight, *_: of_gemms(x.numel() * weight.shape[0]),
    sources=epilogue.SOURCES,
    refuses=epilogue.refuses,
    detail=epilogue.explain,
    made_of=epilogue.MADE_OF,
    samples=_samples(),
    benchmarks=tuple(
        (*arguments((rows,), *features), "gelu", "none")
        for rows, *features in ((64, 768, 3072), (2048, 768, 3072), (2048, 4096, 11008))
    ),
    benchmarks_on_gpu=tuple(
        (*arguments((8192,), *features), "gelu", kind)
        for features in ((1024, 4096), (4096, 16384))
        for kind in ("none", "tanh")
    ),
    tiny=(*arguments((1,), 64, 64), "gelu", "none"),
    # A 16-bit z, or its gradient, is rounded before the result is.
    numerics=Numerics(
        fp32=dict.fromkeys(_RESULTS, 2.0), terms=_terms, rounding=dict.fromkeys(_RESULTS, 2.0)
    ),
    small=65536,
)
