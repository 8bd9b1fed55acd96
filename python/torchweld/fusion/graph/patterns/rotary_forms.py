"""rotary_embedding_qk, written as a product of complex numbers or half by half."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch

from torchweld import functional
from torchweld.fusion.graph.normal import aten
from torchweld.fusion.graph.patterns.rotary import fit_angles
from torchweld.fusion.graph.prove import Proposal
from torchweld.fusion.graph.record import Record, Ref, Step

_CAST, _VIEW, _MUL = aten._to_copy.default, aten.view.default, aten.mul.Tensor


class _RotationForm(NamedTuple):
    x: int
    angles: tuple[Ref, ...]
    outs: list[int]  # the ends that it may have, the one after a cast first
    back: str = ""  # how one turns the other way: "minus" a product, or by "negative" sines


def _rotate(x: Any, angles: tuple[Any, ...], back: str) -> Any:
    if len(angles) == 1:  # complex numbers
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        z = torch.view_as_complex(wide.reshape(*x.shape[:-1], -1, 2))
        return torch.view_as_real(z * angles[0]).flatten(3).type_as(x)
    cos, sin = angles
    first, second = torch.chunk(x, 2, dim=-1)
    if back:
        turned = first * -sin + second * cos if back == "negative" else second * cos - first * sin
        return torch.cat((first * cos + second * sin, turned), dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


def _both(q: Any, k: Any, *given: Any) -> Any:
    *angles, _, back = given
    return _rotate(q, tuple(angles), back), _rotate(k, tuple(angles), back)


def _read_angles(x: Any, *given: Any) -> tuple[tuple[Any, Any], dict[str, Any]]:
    """Angles and options of the ops for x."""
    *angles, seq_dim, back = given
    interleaved = len(angles) == 1
    if interleaved:
        cos, sin = (x.repeat_interleave(2, -1) for x in (angles[0].real, angles[0].imag))
    else:
        cos, sin = (torch.cat((x, x), -1) for x in angles)
        sin = -sin if back else sin
    return fit_angles(x, cos, sin), {"seq_dim": seq_dim, "interleaved": interleaved}


def _run_both(q: Any, k: Any, *given: Any) -> Any:
    angles, options = _read_angles(q, *given)
    return functional.rotary_embedding_qk(q, k, *angles, **options)


def _one(x: Any, *given: Any) -> Any:
    *angles, _, back = given
    return _rotate(x, tuple(angles), back)


def _run_one(x: Any, *given: Any) -> Any:
    angles, options = _read_angles(x, *given)
    return functional.rotary_embedding(x, *angles, **options)


def find_rotary_forms(record: Record, at: int) -> Iterator[Proposal]:
    """Two rotations with the same angles, where this step belongs to the first one; or one."""
    for first in _read(record, record.steps[at]):
        own = _find_seq_dim(record, first.x, first.angles[0])
        constants = own, first.back
        for product in record.readers(first.angles[0].at, _MUL):
            for second in _read(record, product):
                is_like = (second.angles, second.back) == (first.angles, first.back)
                if not is_like or second.outs[0] <= first.outs[0]:
                    continue
                if own is None or _find_seq_dim(record, second.x, first.angles[0]) != own:
                    continue
                for outs in zip(first.outs, second.outs, strict=False):
                    inputs = [first.x, second.x, *(angles.at for angles in first.angles)]
                    name = "rotary_embedding_qk"
                    yield Proposal(name, inputs, list(outs), _both, _run_both, constants)
        for out in first.outs if own is not None else ():
            inputs = [first.x, *(angles.at for angles in first.angles)]
            yield Proposal("rotary_embedding", inputs, [out], _one, _run_one, constants)


def _read(record: Record, step: Step) -> Iterator[_RotationForm]:
    """Rotations whose first product is this step."""
    if step.func is not _MUL or not all(isinstance(each, Ref) for each in step.args):
        return
    out = step.outs[0]
    if record.values[out].is_complex():
        for z, angles in (step.args, step.args[::-1]):
            pairs = record.maker(z, aten.view_as_complex.default)
            if split := pairs and record.maker(pairs.args[0], _VIEW):
                x = record.strip(split.args[0], _CAST, aten.clone.default)
                for end in _follow(record, [out], aten.view_as_real.default, _VIEW):
                    yield _RotationForm(x.at, (angles,), [*_follow(record, [end], _CAST), end])
        return
    half, cos = step.args
    split = record.maker(half, aten.slice.Tensor)
    if split is None:
        return
    for minus in record.readers(out, aten.sub.Tensor):
        turned = record.maker(minus.args[1], _MUL)
        if turned is not None and isinstance(turned.args[1], Ref) and len(minus.args) == 2:
            for end in _follow(record, [minus.outs[0]], aten.cat.default):
                yield _RotationForm(split.args[0].at, (cos, turned.args[1]), [end])
    for plus in record.readers(out, aten.add.Tensor):
        turned = record.maker(plus.args[1], _MUL)
        if turned is not None and isinstance(turned.args[1], Ref) and len(plus.args) == 2:
            for end in _follow(record, [plus.outs[0]], aten.cat.default):
                for back in ("minus", "negative"):
                    angles = cos, turned.args[1]
                    yield _RotationForm(split.args[0].at, angles, [end], back)


def _follow(record: Record, numbers: list[int], *funcs: Any) -> list[int]:
    """The results of operations, one after another."""
    for func in funcs:
        numbers = [step.outs[0] for number in numbers for step in record.readers(number, func)]
    return numbers


def _find_seq_dim(record: Record, x: int, angles: Ref) -> int | None:
    """The dimension of x that counts tokens, where the angles have the form that the op takes."""
    sizes, by = ([str(size) for size in record.values[at].shape] for at in (x, angles.at))
    if len(sizes) != 4 or len(by) != 4 or by[0] not in ("1", sizes[0]):
        return None
    if by[1] == "1" and by[2] == sizes[2]:
        return -2
    return -3 if by[2] == "1" and by[1] == sizes[1] else None
