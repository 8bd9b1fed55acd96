"""rotary_embedding_qk: a rotation of pairs that is written as a product of complex numbers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch

from torchweld import functional
from torchweld.fusion.graph.normal import aten
from torchweld.fusion.graph.prove import Proposal
from torchweld.fusion.graph.record import Record, Ref, Step

_CAST, _VIEW = aten._to_copy.default, aten.view.default


class _Rotation(NamedTuple):
    x: int
    angles: Ref
    outs: list[int]  # the ends that it may have, the one after a cast first


def _rotate(x: Any, angles: Any) -> Any:
    z = torch.view_as_complex(x.float().reshape(*x.shape[:-1], -1, 2))
    return torch.view_as_real(z * angles).flatten(3).type_as(x)


def _both(q: Any, k: Any, angles: Any, seq_dim: int) -> Any:
    return _rotate(q, angles), _rotate(k, angles)


def _run_both(q: Any, k: Any, angles: Any, seq_dim: int) -> Any:
    cos, sin = (x.repeat_interleave(2, -1) for x in (angles.real, angles.imag))
    return functional.rotary_embedding_qk(q, k, cos, sin, seq_dim=seq_dim, interleaved=True)


def find_complex_rotary(record: Record, at: int) -> Iterator[Proposal]:
    """Two products with the same angles, where this step is the first one."""
    first = _read(record, record.steps[at])
    if first is None:
        return
    for product in record.readers(first.angles.at, aten.mul.Tensor):
        second = _read(record, product)
        if second is None or second.outs[0] <= first.outs[0]:
            continue
        seq_dims = [_find_seq_dim(record, each.x, first.angles) for each in (first, second)]
        if seq_dims[0] is None or seq_dims[0] != seq_dims[1]:
            continue
        for outs in zip(first.outs, second.outs, strict=False):
            inputs = [first.x, second.x, first.angles.at]
            name, constants = "rotary_embedding_qk", (seq_dims[0],)
            yield Proposal(name, inputs, list(outs), _both, _run_both, constants)


def _read(record: Record, step: Step) -> _Rotation | None:
    """A product of complex numbers: a tensor seen as such, and angles."""
    if step.func is not aten.mul.Tensor or not record.values[step.outs[0]].is_complex():
        return None
    for z, angles in (step.args, step.args[::-1]):
        pairs = record.maker(z, aten.view_as_complex.default)
        split = pairs and record.maker(pairs.args[0], _VIEW)
        if not split or not isinstance(angles, Ref):
            continue
        x = record.strip(split.args[0], _CAST, aten.clone.default)
        for real in record.readers(step.outs[0], aten.view_as_real.default):
            for flat in record.readers(real.outs[0], _VIEW):
                cast = [end.outs[0] for end in record.readers(flat.outs[0], _CAST)]
                return _Rotation(x.at, angles, [*cast, flat.outs[0]])
    return None


def _find_seq_dim(record: Record, x: int, angles: Ref) -> int | None:
    """The dimension of x that counts tokens, where the angles have the form that the op takes."""
    sizes, by = ([str(size) for size in record.values[at].shape] for at in (x, angles.at))
    if len(sizes) != 4 or len(by) != 4 or by[0] not in ("1", sizes[0]):
        return None
    if by[1] == "1" and by[2] == sizes[2]:
        return -2
    return -3 if by[2] == "1" and by[1] == sizes[1] else None
