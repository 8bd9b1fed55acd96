"""A linear layer and its activation in one kernel: a GEMM with bias and activation at its end.

- triton: our kernel, for every activation, if a trial found it faster than two steps.
- cuda: cuBLASLt's, under the same condition, only for gelu by tanh.
- cpu: oneDNN's 16-bit GEMM, if no gradient is needed.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch.nn.functional import linear
from torch.utils._python_dispatch import _disable_current_modes

from torchweld.dispatch.autograd import (
    Differentiable,
    autograd_function,
    derive_from_reference,
    exports_a_derivative,
)
from torchweld.dispatch.bare import BareOp
from torchweld.dispatch.engine.judge import name_results
from torchweld.dispatch.engine.question import Results
from torchweld.ops.activation import bias_act
from torchweld.ops.activation import common as activations
from torchweld.ops.gemm import common as layers
from torchweld.ops.gemm import fused_choice, gemm
from torchweld.ops.gemm.fused_choice import Contest, Kind
from torchweld.registry import BACKENDS, Signature

_SOURCE = "triton_kernels/linear_act.py"
SOURCES: dict[str, tuple[str, ...]] = {
    "cpu": activations.SOURCES["cpu"],
    "cuda": (
        "csrc/cuda/linear_act.cu",
        *activations.SOURCES["triton"],
    ),
    "triton": (_SOURCE, *activations.SOURCES["triton"]),
}
MADE_OF = (
    "torch's GEMMs; after the first {}. On the GPU one kernel replaces the first GEMM and that"
    " pass if a trial measured it faster (cuda: cuBLASLt's, only for gelu by tanh; the passes"
    " are Triton's)"
)
ONE_KERNEL = ("cuda", "triton")

# With fewer products a GEMM takes microseconds, no longer than its launch.
_SMALLEST = 2**28
# Triton's kernel would have to copy longer rows, see its _factor.
_LONGEST_ROW = 2**22
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
# cuBLASLt's requirements on sizes, in elements, and on addresses, in bytes.
_MULTIPLE, _ALIGNMENT = 8, 16
# cuBLASLt's two algorithms; the second multiplies float32 as TF32.
_PLAIN, _TF32 = 0, 1
# oneDNN's names of activations. relu is left out, since oneDNN's turns NaN into 0.
_ONEDNN = {"gelu": "gelu", "silu": "swish", "sigmoid": "sigmoid", "tanh": "tanh"}


def _fake(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    activation: str,
    approximate: str,
    tile: int,
    save_z: bool,
) -> tuple[torch.Tensor, ...]:
    y = x.new_empty((*x.shape[:-1], weight.shape[0]))
    return y, torch.empty_like(y) if save_z else y.new_empty(0)


# y, and z, the sum before the activation. `tile` is an index into the Triton source's table, or one
# of cuBLASLt's algorithms.
BareOp(
    "linear_act",
    "(Tensor input, Tensor weight, Tensor? bias, str activation, str approximate, int tile,"
    " bool save_z) -> (Tensor y, Tensor z)",
    _fake,
    backends=("cuda",),
    triton=_SOURCE,
)


def _fake_gradients(
    grad_y: torch.Tensor,
    z: torch.Tensor,
    bias: torch.Tensor | None,
    activation: str,
    approximate: str,
) -> tuple[torch.Tensor, ...]:
    grad_z = torch.empty_like(z, memory_format=torch.contiguous_format)
    return grad_z, z.new_empty(0) if bias is None else torch.empty_like(bias)


# The gradients of z and, if a bias is given, of the bias, which z already contains.
BareOp(
    "act_backward",
    "(Tensor grad_y, Tensor z, Tensor? bias, str activation, str approximate)"
    " -> (Tensor grad_z, Tensor grad_bias)",
    _fake_gradients,
    backends=(),
    triton=activations.SOURCES["triton"][0],
)


def linear_and_act(
    backend: str,
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    activation: str,
    approximate: str,
) -> torch.Tensor:
    """activation(linear(x, weight, bias)), in one kernel if that is faster, else in two steps."""
    if activation == "identity":
        return gemm.linear(x, weight, bias)
    arguments = (x, weight, bias, activation, approximate)
    if (tile := choose_tile_for(backend, *arguments)) is not None:
        return _join(_in_one_kernel(backend, *arguments, tile), activation, approximate)
    if backend == "cpu" and _onednn_activates(*arguments):
        algorithm = approximate if activation == "gelu" else ""
        return gemm.onednn(x, weight, bias, _ONEDNN[activation], algorithm)
    return layers.run_in_two_steps(backend, *arguments)


def _onednn_activates(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    activation: str,
    approximate: str,
) -> bool:
    """Whether oneDNN can run these and is faster: it writes once, and does not round the sum.

    In float32 torch's own GEMM is faster by more than the time of the pass.
    """
    if activation not in _ONEDNN or (activation, approximate) not in activations.KINDS:
        return False
    if gemm.wants_gradient(x, weight, bias) or not gemm.is_served_by_onednn(x, weight, bias):
        return False
    return _onednn_keeps_nan(x.dtype, activation, approximate)


@functools.cache
def _onednn_keeps_nan(dtype: torch.dtype, activation: str, approximate: str) -> bool:
    """Whether oneDNN's activation maps NaN to NaN; torch 2.10's float16 sigmoid returns 0."""
    with _disable_current_modes():
        x, weight = torch.full((2, 8), torch.nan, dtype=dtype), torch.ones(3, 8, dtype=dtype)
        algorithm = approximate if activation == "gelu" else ""
        y = gemm.onednn(x, weight, None, _ONEDNN[activation], algorithm)
        return bool(y.isnan().all())


class Unjoined(NamedTuple):
    """A layer whose sum z is in autograd's graph, but whose activation y is not yet.

    z includes all of the bias, whose gradient comes from the activation's node. If no gradient is
    needed, y is the result, and z and bias are None.
    """

    y: torch.Tensor
    z: torch.Tensor | None
    bias: torch.Tensor | None


def run_unjoined(
    backend: str,
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    activation: str,
    approximate: str,
) -> Unjoined:
    """The layer up to its activation's node, in one kernel if that is faster.

    For callers with their own node for the activation.
    """
    arguments = (x, weight, bias, activation, approximate)
    if (tile := choose_tile_for(backend, *arguments)) is not None:
        return _in_one_kernel(backend, *arguments, tile)
    z = linear(x, weight, None if bias is None else bias.detach())
    y = layers.act(backend, z.detach(), None, activation, approximate)
    return Unjoined(y, z, None if bias is None else bias.to(z.dtype))


# --- One kernel and its nodes ---------------------------------------------------------------------
# There are two nodes, as in two steps: first the GEMM's, whose gradients a pipeline schedule can
# run separately, then the activation's. The kernel runs when the first node is created.


def kernel(backend: str) -> Any:
    """The backend's overload of the op."""
    return getattr(torch.ops.torchweld.linear_act, backend)


def _in_one_kernel(
    backend: str,
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    activation: str,
    approximate: str,
    tile: int,
) -> Unjoined:
    dtype = gemm.find_dtype(x)
    x, weight = x.to(dtype), weight.to(dtype)
    if bias is not None and bias.dtype is not dtype:
        bias = bias.to(dtype) if backend == "cuda" else bias.float()
    how = (activation, approximate)
    if not gemm.wants_gradient(x, weight, bias):
        return Unjoined(kernel(backend)(x, weight, bias, *how, tile, False)[0], None, None)
    detached_bias = None if bias is None else bias.detach()
    z, y = _Linear.apply(x, weight, detached_bias, backend, *how, tile)
    return Unjoined(y, z, bias)


def _join(layer: Unjoined, activation: str, approximate: str) -> torch.Tensor:
    """The activation, in the graph if a gradient is needed."""
    if layer.z is None:
        return layer.y
    return _ACTIVATION.function.apply(None, layer.z, layer.bias, activation, approximate, layer.y)


class _Linear(gemm.LinearNode):
    """The GEMM's node: returns z, and y for the activation's node."""

    @staticmethod
    def forward(ctx: Any, x: Any, weight: Any, bias: Any, backend: str, *how: Any) -> Any:
        y, z = kernel(backend)(x, weight, bias, *how, True)
        ctx.save_for_backward(x, weight)
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(y)
        return z, y


def gradients(
    grad_y: torch.Tensor,
    z: torch.Tensor,
    bias: torch.Tensor | None,
    activation: str,
    approximate: str,
    need_bias: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The gradients of z, which contains the bias, and of the bias."""
    backward = torch.ops.torchweld.act_backward.triton
    return backward(grad_y, z, bias if need_bias else None, activation, approximate)


_derivatives_of_bias_act = derive_from_reference(bias_act.OP)


def _derivatives(
    grad_y: torch.Tensor, z: torch.Tensor, bias: torch.Tensor | None, *how: Any
) -> tuple[torch.Tensor | None, ...]:
    """Differentiable gradients, for second derivatives."""
    return _derivatives_of_bias_act(grad_y, z, layers.make_zeros_with_graph(bias), *how)


class _Activation:
    """The activation's node; y is already computed."""

    backend = "triton"
    backward = staticmethod(gradients)

    def __init__(self) -> None:
        self.function = autograd_function(
            Differentiable(
                name="activated_with_its_gemm",
                forward_signature=Signature(
                    "(Tensor input, Tensor? bias, str activation, str approximate, Tensor y)"
                    " -> (Tensor activated)"
                ),
                backward_signature=Signature(
                    "(Tensor grad_activated, Tensor input, Tensor? bias, str activation,"
                    " str approximate, bool need_bias) -> (Tensor grad_input, Tensor grad_bias)"
                ),
                public=["activated"],
                eager_backward=_derivatives,
            ),
            self,
        )

    @staticmethod
    def forward(*arguments: Any) -> Any:
        y = arguments[-1]
        return torch.ops.aten._unsafe_view(y, y.shape)  # a node must not return its input


_ACTIVATION = _Activation()


# --- Choice ---------------------------------------------------------------------------------------


def why_not_epilogue(backend: str, arguments: Mapping[str, Any]) -> str | None:
    """Why cuBLASLt's epilogues cannot serve the op's arguments at all."""
    if backend != "cuda":
        return None
    kind = arguments.get("activation", "gelu"), arguments.get("approximate", "tanh")
    if kind[0] == "relu":
        return "cuBLASLt's relu makes 0 of NaN; torch's keeps it"
    if kind != ("gelu", "tanh"):
        return "cuBLASLt has no such epilogue; it has gelu by tanh"
    if missing := BACKENDS[layers.PASSES[backend]].why_missing():
        return f"its passes between GEMMs are Triton's: {missing}"
    return None


def choose_tile_for(
    backend: str,
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    activation: str,
    approximate: str,
) -> int | None:
    """The tile for one kernel; None: no kernel can serve, or two steps are faster."""
    if backend not in ONE_KERNEL or why_not(backend, x, weight, bias) is not None:
        return None
    arguments = (x, weight, bias, activation, approximate)
    tiles = partial(list_tiles, backend, x, weight)
    contest = partial(_make_contest, backend, *arguments)
    return fused_choice.choose_tile(x, _kind(backend, *arguments), tiles, contest)


def explain(
    backend: str,
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    activation: str,
    approximate: str,
) -> str:
    """Whether a GPU backend runs one kernel or two steps, and why."""
    if backend not in ONE_KERNEL:
        return ""
    unfused = "torch's GEMM, then a pass for bias and activation"
    kind = _kind(backend, x, weight, bias, activation, approximate)
    return fused_choice.explain(unfused, x, kind, why_not(backend, x, weight, bias))


def why_not(
    backend: str, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
) -> str | None:
    """Why one kernel cannot serve."""
    if exports_a_derivative():
        return "inside torch.export: its two nodes would lose their derivative"
    if reason := gemm.why_not_fused(x, weight, bias):
        return reason
    tensors = [t for t in (x, weight, bias) if t is not None]
    if any(t.device != x.device or t.dtype not in _DTYPES for t in tensors):
        return "the tensors are on several devices, or of an unsupported dtype"
    if x.dtype is not weight.dtype and not torch.is_autocast_enabled(x.device.type):
        return "input and weight are of different dtypes"
    if weight.shape[1] >= _LONGEST_ROW:
        return f"more than {_LONGEST_ROW} input features"
    if backend == "cuda" and (reason := _why_not_cublaslt(weight, tensors)):
        return reason
    # While compiling nothing is timed, and the number of rows must not become a guard.
    if not torch.compiler.is_compiling() and x.numel() * weight.shape[0] < _SMALLEST:
        return f"fewer than {_SMALLEST} products: too small to gain"
    return None


def _why_not_cublaslt(weight: torch.Tensor, tensors: Iterable[torch.Tensor]) -> str | None:
    if any(size == 0 or size % _MULTIPLE for size in weight.shape):
        return f"cuBLASLt serves numbers of features that are multiples of {_MULTIPLE}"
    # While compiling there are no addresses yet; the op leaves a misaligned one to torch.
    if not torch.compiler.is_compiling() and any(t.data_ptr() % _ALIGNMENT for t in tensors):
        return f"cuBLASLt serves addresses that are multiples of {_ALIGNMENT} bytes"
    return None


def _kind(
    backend: str,
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    activation: str,
    approximate: str,
) -> Kind:
    """Everything that a timing depends on besides the rows; sizes are text, hence constants."""
    columns, inner = weight.shape
    transposed = [name for name, t in (("input", x), ("weight", weight)) if t.stride(-1) != 1]
    return (
        ("op", f"linear_act in one kernel by {backend}"),
        ("dtype", str(gemm.find_dtype(x)).removeprefix("torch.")),
        ("features", f"{inner} to {columns}"),
        ("transposed", " ".join(transposed)),
        ("activation", f"{activation} {approximate}"),
        ("bias", bias is not None),
        ("saves z", gemm.wants_gradient(x, weight, bias)),
    )


def _make_contest(
    backend: str,
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    activation: str,
    approximate: str,
) -> Contest:
    """One kernel with each of its tiles against two steps."""
    dtype, save_z = gemm.find_dtype(x), gemm.wants_gradient(x, weight, bias)
    x, weight = x.detach().to(dtype), weight.detach().to(dtype)
    bias = None if bias is None else bias.detach().to(dtype)
    how = (activation, approximate)
    names = ("y", "z") if save_z else ("y",)

    def unfused(x: torch.Tensor) -> torch.Tensor:
        return layers.run_in_two_steps(backend, x, weight, bias, *how)

    def fused(tile: int, x: torch.Tensor) -> Results:
        return name_results(kernel(backend)(x, weight, bias, *how, tile, save_z), *names)

    def trusted(x: torch.Tensor) -> Results:
        return name_results((unfused(x), linear(x, weight, bias)), *names)

    def exact(x: torch.Tensor) -> Results:
        z = linear_in_float64(x, weight, bias)
        return name_results((activations.ACTIVATIONS[how].function(z), z), *names)

    return Contest(
        tensors=[x],
        unfused=unfused,
        fused={t: partial(fused, t) for t in list_tiles(backend, x, weight)},
        exact=exact,
        trusted=trusted,
        products_a_row=weight.numel(),
    )


def linear_in_float64(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
) -> torch.Tensor:
    """linear in float64. The weight is converted piece by piece to save memory."""
    wide = x.double()
    z = torch.cat([wide @ some.double().t() for some in weight.split(_FEATURES)], -1)
    return z if bias is None else z + bias.double()


_FEATURES = 2048


def list_tiles(backend: str, x: torch.Tensor, weight: torch.Tensor) -> Sequence[int]:
    """The tiles worth timing, or cuBLASLt's algorithm."""
    dtype = gemm.find_dtype(x)
    if backend == "triton":
        return list(fused_choice.kernels().contenders(x.to(dtype), weight.to(dtype)))
    return (cublaslts_algorithm(dtype),)


def cublaslts_algorithm(dtype: torch.dtype) -> int:
    """The algorithm that multiplies as torch's own GEMMs do."""
    return (
        _TF32 if dtype == torch.float32 and fused_choice.kernels().precision() == "tf32" else _PLAIN
    )
