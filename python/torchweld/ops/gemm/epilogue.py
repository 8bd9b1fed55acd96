"""linear_act in one kernel: a GEMM whose epilogue adds the bias and activates.

In Triton one of ours, for every activation; on CUDA cuBLASLt's, which has gelu by tanh.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any, NamedTuple

import torch
from torch.nn.functional import linear

from torchweld.dispatch import proof, verdicts
from torchweld.dispatch.autograd import (
    Differentiable,
    autograd_function,
    derivatives_of_reference,
)
from torchweld.dispatch.bare import BareOp
from torchweld.dispatch.proof import Results
from torchweld.ops.activation import bias_act
from torchweld.ops.activation import common as activations
from torchweld.ops.gemm import timing
from torchweld.ops.gemm.linear import LinearNode, misfit, trained
from torchweld.ops.gemm.timing import Contest, Timed
from torchweld.registry import BACKENDS, Signature
from torchweld.registry.constant import assume_constant_result

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
    " pass where it was timed to be faster (cuda: cuBLASLt's, only for gelu by tanh; the passes"
    " are Triton's)"
)
ONE_KERNEL = ("cuda", "triton")
# Backends whose passes between GEMMs are another one's.
PASSES = {"cuda": "triton"}

# With fewer products than these a GEMM takes microseconds, and its launch as long.
_SMALLEST = 2**28
# Beyond it a kernel would have to copy, see its _factor.
_LONGEST_ROW = 2**22
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
# What cuBLASLt asks of sizes, in elements, and of addresses, in bytes.
_MULTIPLE, _ALIGNMENT = 8, 16
# Its two algorithms, and how the second multiplies float32.
_PLAIN, _TF32 = 0, 1


def _fake(x, weight, bias, activation, approximate, tile, save_z):
    y = x.new_empty((*x.shape[:-1], weight.shape[0]))
    return y, torch.empty_like(y) if save_z else y.new_empty(0)


# y, and z, the sum before the activation. `tile` is a place in the Triton source's table, or one of
# cuBLASLt's algorithms.
BareOp(
    "linear_act",
    "(Tensor x, Tensor weight, Tensor? bias, str activation, str approximate, int tile,"
    " bool save_z) -> (Tensor y, Tensor z)",
    _fake,
    backends=("cuda",),
    triton=_SOURCE,
)


# --- Autograd -------------------------------------------------------------------------------------
# Two nodes, as the unfused form has them: the GEMM's, whose two gradients a schedule can run apart,
# and the activation's behind it. The kernel has run when the second one is made.


class _Linear(LinearNode):
    """The GEMM's node: z, and beside it what the activation's is to return."""

    @staticmethod
    def forward(ctx: Any, x: Any, weight: Any, bias: Any, backend: str, *how: Any) -> Any:
        y, z = kernel(backend)(x, weight, bias, *how, True)
        ctx.save_for_backward(x, weight)
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(y)
        return z, y


class _Activation:
    """The activation's node: bias_act's, but that y is there already."""

    backend = "triton"
    backward = bias_act.OP.kernels["triton"].backward

    def __init__(self) -> None:
        self.function = autograd_function(
            Differentiable(
                name="activated_with_its_gemm",
                forward_signature=Signature(
                    "(Tensor x, Tensor? bias, str activation, str approximate, Tensor y)"
                    " -> (Tensor activated)"
                ),
                backward_signature=Signature(
                    "(Tensor grad_activated, Tensor x, Tensor? bias, str activation,"
                    " str approximate, bool need_bias) -> (Tensor grad_x, Tensor grad_bias)"
                ),
                public=["activated"],
                eager_backward=derivatives_of_reference(bias_act.OP),
            ),
            self,
        )

    @staticmethod
    def forward(*given: Any) -> Any:
        return given[-1]

    @staticmethod
    def public(results: tuple[torch.Tensor, ...]) -> Any:
        return results[0]


_ACTIVATION = _Activation()


def kernel(backend: str) -> Any:
    """The backend's overload of the op."""
    return getattr(torch.ops.torchweld.linear_act, backend)


class Made(NamedTuple):
    """The activation, without a graph; where one is wanted, the sum before it and zeros.

    The sum has all of the bias in it; the zeros' gradient is the bias's.
    """

    y: torch.Tensor
    z: torch.Tensor | None
    zeros: torch.Tensor | None


def linear_act(
    backend: str,
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    activation: str,
    approximate: str,
    tile: int,
) -> Made:
    """What the kernel with this tile makes."""
    dtype = computed_in(x)
    x, weight = x.to(dtype), weight.to(dtype)
    if bias is not None and bias.dtype is not dtype:
        bias = bias.to(dtype) if backend == "cuda" else bias.float()
    how = (activation, approximate)
    if not trained(x, weight, bias):
        return Made(kernel(backend)(x, weight, bias, *how, tile, False)[0], None, None)
    given = None if bias is None else bias.detach()
    z, y = _Linear.apply(x, weight, given, backend, *how, tile)
    return Made(y, z, zeros_of(bias))


def activated(made: Made, activation: str, approximate: str) -> torch.Tensor:
    """The result, with a graph where one is wanted."""
    if made.z is None:
        return made.y
    return _ACTIVATION.function.apply(made.z, made.zeros, activation, approximate, made.y)


def computed_in(x: torch.Tensor) -> torch.dtype:
    """The dtype of a GEMM of x: autocast leaves float64 as it is."""
    kind = x.device.type
    cast = torch.is_autocast_enabled(kind) and x.dtype is not torch.float64
    return torch.get_autocast_dtype(kind) if cast else x.dtype


def zeros_of(bias: torch.Tensor | None) -> torch.Tensor | None:
    """Of which the bias's gradient is that, where the sum has the bias in it already."""
    return None if bias is None else bias - finite(bias)


def finite(bias: torch.Tensor) -> torch.Tensor:
    """What can be taken from the bias, constant: infinity less this is infinity yet."""
    largest = torch.finfo(bias.dtype).max
    return bias.detach().clamp(-largest, largest)


# --- Choice ---------------------------------------------------------------------------------------


def refuses(backend: str, given: Mapping[str, Any]) -> str | None:
    """Why cuBLASLt's epilogues cannot serve the op's arguments at all."""
    if backend != "cuda":
        return None
    kind = given.get("activation", "gelu"), given.get("approximate", "tanh")
    if kind[0] == "relu":
        return "cuBLASLt's relu makes 0 of NaN; torch's keeps it"
    if kind != ("gelu", "tanh"):
        return "cuBLASLt has no such epilogue; it has gelu by tanh"
    if missing := BACKENDS[PASSES[backend]].missing():
        return f"its passes between GEMMs are Triton's: {missing}"
    return None


def choose(
    backend: str,
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    activation: str,
    approximate: str,
    unfused: Callable[..., Any],
) -> int | None:
    """The tile to run with; None: the unfused form is faster, or nothing is known of its rival."""
    if why_not(backend, x, weight, bias) is not None:
        return None
    given = (x, weight, bias, activation, approximate)
    shapes = _shapes(backend, *given)
    return chosen(x, shapes, lambda: _time(backend, shapes, *given, unfused))


def chosen(x: torch.Tensor, shapes: str, time: Callable[[], Timed | None]) -> int | None:
    """What is kept for a class of shapes, or else is found by `time`; None: the unfused form."""
    if torch.compiler.is_compiling():
        return _kept_while_compiling(x.device, shapes)
    timed = timing.kept(x.device, shapes, rows_of(x))
    if timed is None and _may_time(x):
        timed = time()
    return None if timed is None else timed.chosen


def explain(
    backend: str,
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    activation: str,
    approximate: str,
) -> str:
    """Which of the two runs on a GPU backend, and why."""
    if backend not in ONE_KERNEL:
        return ""
    unfused = "torch's GEMM, then a pass for bias and activation"
    shapes = _shapes(backend, x, weight, bias, activation, approximate)
    return in_words(unfused, x, shapes, why_not(backend, x, weight, bias))


def in_words(unfused: str, x: torch.Tensor, shapes: str, reason: str | None) -> str:
    """Which of the two serves a class of shapes, and why; `reason` is against one kernel."""
    if reason is not None:
        return f"{unfused}: {reason}"
    timed = timing.kept(x.device, shapes, rows_of(x))
    if timed is None:
        return f"{unfused}: not timed yet, which a call outside of compiled code and graphs does"
    if timed.refused:
        return f"{unfused}: one kernel for all was wrong, or failed, on this GPU"
    ratio = timed.unfused_ms / timed.ms
    if timed.chosen is None:
        return f"{unfused}: one kernel for all was measured at {ratio:.2f}x its speed"
    return f"one kernel for all, measured at {ratio:.2f}x the speed of {unfused}"


def why_not(
    backend: str, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
) -> str | None:
    """Why one kernel cannot serve."""
    if reason := misfit(x, weight, bias):
        return reason
    given = [t for t in (x, weight, bias) if t is not None]
    if any(t.device != x.device or t.dtype not in _DTYPES for t in given):
        return "there are several devices, or a dtype that the kernel has not"
    if x.dtype is not weight.dtype and not torch.is_autocast_enabled(x.device.type):
        return "x and weight are of different dtypes"
    if weight.shape[1] >= _LONGEST_ROW:
        return f"more than {_LONGEST_ROW} input features"
    if backend == "cuda" and (reason := _why_not_cublaslt(weight, given)):
        return reason
    # While compiling nothing is timed, and the number of rows is not to become a guard.
    if not torch.compiler.is_compiling() and x.numel() * weight.shape[0] < _SMALLEST:
        return f"fewer than {_SMALLEST} products: too small to gain"
    return None


def _why_not_cublaslt(weight: torch.Tensor, given: Iterable[torch.Tensor]) -> str | None:
    if any(size == 0 or size % _MULTIPLE for size in weight.shape):
        return f"cuBLASLt serves numbers of features that are multiples of {_MULTIPLE}"
    # What is compiled has no addresses yet: the op, where it meets such a one, asks torch.
    if not torch.compiler.is_compiling() and any(t.data_ptr() % _ALIGNMENT for t in given):
        return f"cuBLASLt serves addresses that are multiples of {_ALIGNMENT} bytes"
    return None


def _shapes(backend, x, weight, bias, activation, approximate) -> str:
    """What a time depends on beside the number of rows, in words: sizes are constants in them."""
    columns, inner = weight.shape
    dtype = str(computed_in(x)).removeprefix("torch.")
    transposed = [name for name, t in (("x", x), ("weight", weight)) if t.stride(-1) != 1]
    words = [f"{inner} to {columns} {dtype}", *[f"{name} transposed" for name in transposed]]
    words += [activation, approximate, "bias" if bias is not None else "no bias"]
    words += ["cuBLASLt"] if backend == "cuda" else []
    return ", ".join([*words, "z saved" if trained(x, weight, bias) else "z not saved"])


def rows_of(x: torch.Tensor) -> int:
    """How many rows a GEMM of x has."""
    return x.shape[:-1].numel()


@assume_constant_result
def _kept_while_compiling(device: torch.device, shapes: str) -> int | None:
    """What is kept, which torch.compile takes for a constant."""
    timed = timing.kept(device, shapes, None)
    return None if timed is None else timed.chosen


def _may_time(x: torch.Tensor) -> bool:
    return (
        verdicts.mode == "time"
        and x.device.type == "cuda"
        and not torch.cuda.is_current_stream_capturing()
    )


def _time(backend, shapes, x, weight, bias, activation, approximate, unfused) -> Timed | None:
    dtype, save_z = computed_in(x), trained(x, weight, bias)
    how = (activation, approximate)
    names = ("y", "z") if save_z else ("y",)
    with torch.no_grad(), torch.autocast(x.device.type, enabled=False), torch.cuda.device_of(x):
        x, weight, bias = (t if t is None else t.to(dtype) for t in (x, weight, bias))

        def fused(tile: int, x: torch.Tensor) -> Results:
            return proof.named(kernel(backend)(x, weight, bias, *how, tile, save_z), *names)

        def trusted(x: torch.Tensor) -> Results:
            made = unfused(x, weight, bias, *how), linear(x, weight, bias)
            return proof.named(made, *names)

        def exact(x: torch.Tensor) -> Results:
            z = linear_in_float64(x, weight, bias)
            return proof.named((activations.ACTIVATIONS[how].function(z), z), *names)

        contest = Contest(
            tensors=[x],
            unfused=lambda x: unfused(x, weight, bias, *how),
            fused={t: partial(fused, t) for t in contenders(backend, dtype, x.shape[-1])},
            exact=exact,
            trusted=trusted,
            products_a_row=weight.numel(),
        )
        return timing.time(x.device, shapes, rows_of(x), contest)


def linear_in_float64(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
) -> torch.Tensor:
    """linear in float64, whose weight is widened piece by piece."""
    wide = x.double()
    z = torch.cat([wide @ some.double().t() for some in weight.split(_FEATURES)], -1)
    return z if bias is None else z + bias.double()


_FEATURES = 2048


def contenders(backend: str, dtype: torch.dtype, inner: int) -> Iterable[int]:
    """The tiles worth timing."""
    if backend == "triton":
        return timing.kernels().contenders(dtype, inner)
    tf32 = dtype == torch.float32 and timing.kernels().precision() == "tf32"
    return (_TF32 if tf32 else _PLAIN,)
