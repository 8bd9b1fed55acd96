"""Adaptive layer norms and gated residuals, as in the blocks of diffusion transformers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch

from torchweld import functional
from torchweld.fusion.graph.normal import aten
from torchweld.fusion.graph.prove import Proposal
from torchweld.fusion.graph.record import Record, Ref, as_float

_CAST = aten._to_copy.default


class _Modulated(NamedTuple):
    """A norm without parameters, multiplied by 1 + scale, with shift added to it."""

    x: Ref
    scale: Ref
    shift: Ref
    eps: float
    y: int
    # "wide": in float32, rounded to x's dtype at the end. "rows": one is added to a row for each
    # sample before it becomes a factor, as in diffusers' AdaLayerNormContinuous.
    kind: frozenset[str]


def _of_samples(x: Any, modulation: Any) -> Any:
    """A row for each sample, [batch, width], as a factor of [batch, tokens, width]."""
    return modulation.unsqueeze(1) if modulation.dim() < x.dim() else modulation


def _norm(x: Any, scale: Any, shift: Any, eps: float, kind: frozenset[str]) -> Any:
    wide = x.float() if "wide" in kind else x
    y = torch.nn.functional.layer_norm(wide, x.shape[-1:], None, None, eps)
    is_rows = "rows" in kind
    y = y * (_of_samples(x, 1 + scale) if is_rows else 1 + _of_samples(x, scale))
    y = y + _of_samples(x, shift)
    return y.type_as(x) if "wide" in kind else y


def _run_norm(x: Any, scale: Any, shift: Any, eps: float, kind: frozenset[str]) -> Any:
    return functional.adaptive_layer_norm(x, scale, shift, eps=eps)


def _gate(x: Any, gate: Any, branch: Any, kind: str) -> Any:
    product = _of_samples(x, gate) * branch
    return (x.float() + product).type_as(x) if kind == "wide" else x + product


def _run_gate(x: Any, gate: Any, branch: Any, kind: str) -> Any:
    return functional.gated_residual(x, gate, branch)


def _gate_and_norm(
    x: Any, gate: Any, branch: Any, scale: Any, shift: Any, eps: float, kinds: tuple[Any, Any]
) -> Any:
    z = _gate(x, gate, branch, kinds[0])
    return z, _norm(z, scale, shift, eps, kinds[1])


def _run_gate_and_norm(
    x: Any, gate: Any, branch: Any, scale: Any, shift: Any, eps: float, kinds: tuple[str, str]
) -> Any:
    y, z = functional.gated_residual_layer_norm(
        x, gate, branch, scale, shift, eps=eps, return_residual=True
    )
    return z, y


def find_modulated_norm(record: Record, at: int) -> Iterator[Proposal]:
    """adaptive_layer_norm, with the gated residual before it if there is one."""
    for norm in _read_norms(record, at):
        for gated, z in _read_gates(record, norm.x):
            x, gate, branch, kind = gated
            # One op takes modulations of one shape and dtype, and a stream that the norm reads.
            given = [_before(record, each) for each in (gate, norm.scale, norm.shift)]
            if len({_form(record, each) for each in given}) == 1:
                inputs = [x.at, given[0].at, branch.at, given[1].at, given[2].at]
                constants = (norm.eps, (kind, norm.kind))
                outputs = [z, norm.y]
                name = "gated_residual_layer_norm"
                yield Proposal(name, inputs, outputs, _gate_and_norm, _run_gate_and_norm, constants)
        given = [_before(record, each) for each in (norm.scale, norm.shift)]
        inputs, how = [norm.x.at, *(each.at for each in given)], (norm.eps, norm.kind)
        yield Proposal("adaptive_layer_norm", inputs, [norm.y], _norm, _run_norm, how)


def find_gated_residual(record: Record, at: int) -> Iterator[Proposal]:
    step = record.steps[at]
    if step.func is not aten.add.Tensor:
        return
    for (x, gate, branch, kind), z in _read_sums(record, at):
        inputs = [x.at, _before(record, gate).at, branch.at]
        yield Proposal("gated_residual", inputs, [z], _gate, _run_gate, (kind,))


def _before(record: Record, modulation: Ref) -> Ref:
    """The rows of samples before the view that makes them a factor, which may come too late."""
    view = record.maker(modulation, aten.unsqueeze.default)
    if view is None or len(record.shape(modulation)) != 3 or view.args[1].text != "1":
        return modulation
    source: Ref = view.args[0]
    return source


def _form(record: Record, value: Ref) -> Any:
    tensor = record.values[value.at]
    return tuple(map(str, tensor.shape)), tensor.dtype


def _modulates(record: Record, modulation: Any, x: Ref) -> bool:
    """Whether a tensor has the shape of a modulation of x for each sample, or for each token."""
    if not isinstance(modulation, Ref):
        return False
    its, sizes = record.shape(modulation), record.shape(x)
    if len(its) != len(sizes) or len(sizes) < 2 or str(its[-1]) != str(sizes[-1]):
        return False
    if record.values[modulation.at].dtype not in (record.values[x.at].dtype, torch.float32):
        return False
    at = 0
    while at < len(its) - 1 and str(its[at]) == str(sizes[at]):
        at += 1
    return all(str(size) == "1" for size in its[at:-1])


def _read_norms(record: Record, at: int) -> Iterator[_Modulated]:
    step = record.steps[at]
    if step.func is not aten.native_layer_norm.default:
        return
    source, shape, weight, bias, eps = step.args
    number = as_float(eps)
    if weight is not None or bias is not None or len(shape) != 1 or number is None:
        return
    normed = Ref(step.outs[0])
    for product in record.readers(normed.at, aten.mul.Tensor):
        for factor in (each for each in product.args if each != normed):
            view = record.maker(factor, aten.unsqueeze.default)
            plus = record.maker(view.args[0] if view else factor, aten.add.Tensor)
            scale = None if plus is None else plus.args[0]
            kind = frozenset(("rows",) if view else ())
            for total in record.readers(product.outs[0], aten.add.Tensor):
                made = Ref(product.outs[0])
                for shift in (each for each in total.args[:2] if each != made):
                    if not isinstance(scale, Ref) or not isinstance(shift, Ref):
                        continue
                    norm = _Modulated(source, scale, shift, number, total.outs[0], kind)
                    yield from _read_ends(record, norm, factor)


def _read_ends(record: Record, norm: _Modulated, factor: Ref) -> Iterator[_Modulated]:
    """The norm in the dtype of its input, or in float32 between two casts."""
    cast = record.maker(norm.x, _CAST)
    if cast is not None:
        x = cast.args[0]
        if all(_modulates(record, each, x) for each in (factor, norm.shift)):
            for end in record.readers(norm.y, _CAST):
                yield norm._replace(x=x, y=end.outs[0], kind=norm.kind | {"wide"})
    if all(_modulates(record, each, norm.x) for each in (factor, norm.shift)):
        yield norm


_Gated = tuple[Ref, Ref, Ref, str]


def _read_gates(record: Record, z: Ref) -> Iterator[tuple[_Gated, int]]:
    """The gated residuals that made a tensor."""
    if z.at in record.made_by:
        made = record.made_by[z.at]
        step = record.steps[made]
        if step.func is _CAST and isinstance(step.args[0], Ref):
            made = record.made_by.get(step.args[0].at, -1)
        if made >= 0 and record.steps[made].func is aten.add.Tensor:
            yield from ((gated, out) for gated, out in _read_sums(record, made) if out == z.at)


def _read_sums(record: Record, at: int) -> Iterator[tuple[_Gated, int]]:
    """Readings of a sum as a gated residual, each with the number of its result."""
    total = record.steps[at]
    if len(total.args) != 2:
        return
    for stream, product in (total.args, total.args[::-1]):
        made = record.maker(product, aten.mul.Tensor)
        if made is None or not isinstance(stream, Ref):
            continue
        cast = record.maker(stream, _CAST)
        for gate, branch in (made.args, made.args[::-1]):
            if not isinstance(branch, Ref) or not _modulates(record, gate, branch):
                continue
            if record.shape(gate) == record.shape(branch):
                continue  # a product of two activations
            if cast is not None and record.shape(cast.args[0]) == record.shape(branch):
                for end in record.readers(total.outs[0], _CAST):
                    yield (cast.args[0], gate, branch, "wide"), end.outs[0]
            if record.shape(stream) == record.shape(branch):
                yield (stream, gate, branch, "plain"), total.outs[0]
