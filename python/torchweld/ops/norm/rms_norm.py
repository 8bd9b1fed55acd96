"""rms_norm: divide by the root mean square over the last dimensions, then scale."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from torchweld.dispatch.call import call
from torchweld.dispatch.kernels import define
from torchweld.dispatch.way import short
from torchweld.errors import ArgumentError
from torchweld.ops.norm import common as norms
from torchweld.registry import Cases, Op, Rows
from torchweld.registry.cost import count_per_element


@short(small=True)
def rms_norm(
    input: torch.Tensor,
    normalized_shape: Sequence[int],
    weight: torch.Tensor | None = None,
    eps: float | None = None,
) -> torch.Tensor:
    """Root mean square normalisation with the semantics of torch.nn.functional.rms_norm.

    Args:
        input: [*, *normalized_shape]; float32, bfloat16, float16 (or float64).
        normalized_shape: the last dimensions of input, which are normalised.
        weight: of normalized_shape, in input's dtype, or float32 and 16 bits in either order.
        eps: added to the mean square, >= 0; None: as in torch, the machine epsilon of the dtype of
            the arithmetic, 2^-23, or 2^-52 for float64.

    Returns:
        A tensor of input's shape and dtype, contiguous, or channels_last if input is.
    """
    return call(OP, input, normalized_shape, weight, eps)


def _reference(
    x: torch.Tensor, normalized_shape: Sequence[int], weight: torch.Tensor | None, eps: float | None
) -> torch.Tensor:
    if eps is not None and not eps >= 0:
        raise ArgumentError("rms_norm", "eps", repr(eps), "a number >= 0 or None")
    if weight is not None and weight.dtype is not x.dtype:  # eager warns about this
        _check(x, normalized_shape, weight, eps)
        weight = norms.as_float32(weight)
        return torch.rms_norm(x.float(), normalized_shape, weight, eps).to(x.dtype)
    y = torch.rms_norm(x, normalized_shape, weight, eps)
    if y.numel() == 0:  # its fake has other strides
        return torch.layer_norm(x, normalized_shape, weight)
    return y


def _check(x: Any, normalized_shape: Any, weight: Any, eps: Any) -> None:
    norms.check(OP, x, normalized_shape, 0.0 if eps is None else eps, weight=weight)


def _refuses(backend: str, arguments: Mapping[str, Any]) -> str | None:
    """torch's rms_norm keeps channels_last; the kernels write packed rows."""
    x = arguments.get("input")
    if not isinstance(x, torch.Tensor) or x.is_contiguous():
        return None
    kept = {4: torch.channels_last, 5: torch.channels_last_3d}.get(x.ndim)
    if kept is None or not x.is_contiguous(memory_format=kept):
        return None
    return "x is channels_last, which eager keeps"


def _fake(
    x: torch.Tensor, normalized_shape: Sequence[int], weight: torch.Tensor | None, eps: float | None
) -> tuple[torch.Tensor, ...]:
    return norms.result(x), norms.statistics(x, normalized_shape)


# torch after 2.11 computes it in float32 under CUDA's autocast.
_AUTOCAST = torch._C._dispatch_has_kernel_for_dispatch_key("aten::rms_norm", "AutocastCUDA")

OP = Op(
    name="rms_norm",
    forward="(Tensor input, SymInt[] normalized_shape, Tensor? weight, float? eps)"
    " -> (Tensor y, Tensor rstd)",
    backward="(Tensor grad_y, Tensor input, SymInt[] normalized_shape, Tensor? weight, float? eps,"
    " Tensor rstd, bool need_weight) -> (Tensor grad_input, Tensor grad_weight)",
    reference=_reference,
    check=_check,
    fake=_fake,
    sharding=Rows(norms.columns),
    cases=Cases(
        sized=norms.sized(1, 1e-5),
        flops=count_per_element(5, 10),
        samples=norms.samples(1, 1e-6) + norms.samples(1, None)[:5],
        benchmarks=norms.benchmarks(norms.MEASURED, 1, 1e-6),
        benchmarks_on_gpu=norms.benchmarks(norms.MEASURED_ON_GPU, 1, 1e-6),
        tiny=norms.benchmarks([(1, 64)], 1, 1e-6)[0],
        numerics=norms.numerics(centered=False),
    ),
    sources=norms.SOURCES,
    refuses=_refuses,
    small=8192,
    autocast={"cuda": torch.float32} if _AUTOCAST else {},
)
define(OP)
