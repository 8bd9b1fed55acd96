"""rms_norm, also of a sum that other operations read: residual + norm."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from torchweld import functional
from torchweld.fusion.graph.normal import aten
from torchweld.fusion.graph.prove import Proposal
from torchweld.fusion.graph.record import Record, Ref, as_float

_CAST = aten._to_copy.default
# How the weight is applied: to what is rounded already, as in Llama; in float32, as in OLMo 2, or
# cast to it, as in Gemma 3n; as an offset from one in float32, as in Gemma; without a cast of the
# rounded input, as in T5; and as torch's own function applies it where it is made of other ones.
_KINDS = ("rounded", "wide", "cast", "plus_one", "promoted", "torch")


def compute(x: Any, weight: Any, eps: float, kind: str) -> Any:
    if kind == "torch":
        return torch.nn.functional.rms_norm(x, x.shape[-1:], weight, eps)
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    scale = torch.rsqrt((wide * wide).mean(-1, keepdim=True) + eps)
    if kind == "promoted":
        return weight * (x * scale).to(weight.dtype)
    wide = wide * scale
    if weight is None:
        return wide.to(x.dtype)
    if kind == "rounded":
        return weight * wide.to(x.dtype)
    if kind == "wide":
        return (weight * wide).to(x.dtype)
    if kind == "cast":
        return (wide * weight.to(wide.dtype)).to(x.dtype)
    return (wide * (weight.to(wide.dtype) + 1.0)).to(x.dtype)


def _run_norm(x: Any, weight: Any, eps: float, kind: str) -> Any:
    if kind == "plus_one":
        weight = weight.to(torch.promote_types(x.dtype, torch.float32)) + 1.0
    return functional.rms_norm(x, weight.shape, weight, eps)


def _norm_only(x: Any, eps: float, kind: str) -> Any:
    return compute(x, None, eps, kind)


def _run_norm_only(x: Any, eps: float, kind: str) -> Any:
    return functional.rms_norm(x, x.shape[-1:], None, eps)


def _add_norm(x: Any, residual: Any, weight: Any, eps: float, kind: str) -> Any:
    z = residual + x
    return z, compute(z, weight, eps, kind)


def _run_add_norm(x: Any, residual: Any, weight: Any, eps: float, kind: str) -> Any:
    y, z = functional.dropout_add_rms_norm(x, residual, weight, eps=eps, return_residual=True)
    return z, y


def find_rms_norm(record: Record, at: int) -> Iterator[Proposal]:
    step = record.steps[at]
    if step.name == "_fused_rms_norm" and len(step.args) == 4:  # torch's own function
        x, sizes, weight, eps = step.args
        end, constants = [step.outs[0]], (as_float(eps), "torch")
        if isinstance(weight, Ref) and record.shape(weight) == record.shape(x)[-1:]:
            yield Proposal("rms_norm", [x.at, weight.at], end, compute, _run_norm, constants)
        elif weight is None and len(sizes) == 1:
            yield Proposal("rms_norm", [x.at], end, _norm_only, _run_norm_only, constants)
    for x, weight, out, eps, kind in list_norms(record, at):
        if weight is None:
            yield Proposal("rms_norm", [x], [out], _norm_only, _run_norm_only, (eps, kind))
        else:
            yield Proposal("rms_norm", [x, weight], [out], compute, _run_norm, (eps, kind))


def find_add_rms_norm(record: Record, at: int) -> Iterator[Proposal]:
    for x, weight, out, eps, kind in list_norms(record, at):
        total = record.maker(Ref(x), aten.add.Tensor)
        if total is None or weight is None or kind == "plus_one":
            continue
        a, b = total.args[:2]
        if isinstance(a, Ref) and isinstance(b, Ref) and record.shape(a) == record.shape(b):
            inputs = [b.at, a.at, weight]
            yield Proposal(
                "dropout_add_rms_norm", inputs, [x, out], _add_norm, _run_add_norm, (eps, kind)
            )


def list_norms(record: Record, at: int) -> Iterator[tuple[int, int | None, int, float, str]]:
    """Inputs, weights and results of norms whose root is this step."""
    step = record.steps[at]
    if step.func is not aten.rsqrt.default:
        return
    total = record.maker(step.args[0], aten.add.Tensor)
    if total is None and (made := record.made_by.get(step.args[0].at)) is not None:
        total = record.steps[made]
        if total.func is not aten.add_.Scalar:
            return
    is_torchs = total is not None and bool(total.writes)
    # Through factors, so that an explanation can name them.
    inside = total and record.strip(total.args[0], aten.mul.Tensor)
    mean = inside and record.maker(inside, aten.mean.dim)
    square = mean and record.maker(mean.args[0], aten.mul.Tensor)
    eps = None if total is None else as_float(total.args[1])
    if square is None or eps is None:
        return
    wide = square.args[0]
    x = record.strip(wide, _CAST)
    scales = [step.outs[0], *_list_casts(record, step.outs[0])]
    for normed in (each for scale in scales for each in record.readers(scale, aten.mul.Tensor)):
        ends = [normed.outs[0], *_list_casts(record, normed.outs[0])]
        for end in ends:
            for scaled in record.readers(end, aten.mul.Tensor):
                a, b = scaled.args
                weight = b if a == Ref(end) else a
                plus = record.maker(weight, aten.add.Tensor)
                inner = record.strip(weight if plus is None else plus.args[0], _CAST)
                if isinstance(inner, Ref) and record.shape(inner) == record.shape(x)[-1:]:
                    kinds = ("rounded", "wide", "promoted") if inner == weight else ("cast",)
                    kinds = ("plus_one",) if plus else kinds
                    for out in (*_list_casts(record, scaled.outs[0]), scaled.outs[0]):
                        for kind in ("torch",) if is_torchs else kinds:
                            yield x.at, inner.at, out, eps, kind
        for end in reversed(ends):
            yield x.at, None, end, eps, "torch" if is_torchs else ""


def _list_casts(record: Record, number: int) -> list[int]:
    return [step.outs[0] for step in record.readers(number, _CAST)]
