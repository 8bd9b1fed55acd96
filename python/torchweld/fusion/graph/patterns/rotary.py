"""rotary_embedding_qk: the rotation of queries and keys by the same angles."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from torchweld import functional
from torchweld.fusion.graph.normal import aten
from torchweld.fusion.graph.prove import Proposal
from torchweld.fusion.graph.record import Record, Ref, Step


def _turn(x: Any) -> Any:
    half = x.shape[-1] // 2
    return torch.cat((-x[..., half:], x[..., :half]), dim=-1)


def _rotate(x: Any, cos: Any, sin: Any) -> Any:
    return (x * cos) + (_turn(x) * sin)


def _both(q: Any, k: Any, cos: Any, sin: Any, seq_dim: int) -> Any:
    return _rotate(q, cos, sin), _rotate(k, cos, sin)


def _run_both(q: Any, k: Any, cos: Any, sin: Any, seq_dim: int) -> Any:
    return functional.rotary_embedding_qk(q, k, cos, sin, rotary_dim=cos.shape[-1], seq_dim=seq_dim)


def _one(x: Any, cos: Any, sin: Any, seq_dim: int) -> Any:
    return _rotate(x, cos, sin)


def _run_one(x: Any, cos: Any, sin: Any, seq_dim: int) -> Any:
    return functional.rotary_embedding(x, cos, sin, rotary_dim=cos.shape[-1], seq_dim=seq_dim)


def find_rotary(record: Record, at: int) -> Iterator[Proposal]:
    """Two such sums with the same angles, where this step is the first one; or one sum."""
    if (first := _read(record, record.steps[at])) is None:
        return
    x, cos, sin = first
    if (seq_dim := _find_seq_dim(record, x, cos)) is None:
        return
    out = record.steps[at].outs[0]
    for product in record.readers(cos.at, aten.mul.Tensor):
        for total in record.readers(product.outs[0], aten.add.Tensor):
            other = _read(record, total)
            if other is None or other[1:] != (cos, sin) or total.outs[0] <= out:
                continue
            if _find_seq_dim(record, other[0], cos) == seq_dim:
                inputs, outputs = [x.at, other[0].at, cos.at, sin.at], [out, total.outs[0]]
                yield Proposal("rotary_embedding_qk", inputs, outputs, _both, _run_both, (seq_dim,))
    yield Proposal("rotary_embedding", [x.at, cos.at, sin.at], [out], _one, _run_one, (seq_dim,))


def _read(record: Record, step: Step) -> tuple[Ref, Ref, Ref] | None:
    """What is rotated, and the cosines and sines."""
    if step.func is not aten.add.Tensor or not all(isinstance(each, Ref) for each in step.args):
        return None
    products = [record.maker(each, aten.mul.Tensor) for each in step.args]
    for plain, turned in (products, products[::-1]):
        joined = turned and record.maker(turned.args[0], aten.cat.default)
        negative = joined and record.maker(joined.args[0][0], aten.neg.default)
        x: Any = negative and record.strip(negative.args[0], aten.slice.Tensor)
        if plain is None or turned is None or x is None or plain.args[0] != x:
            continue
        cos, sin = plain.args[1], turned.args[1]
        if isinstance(cos, Ref) and isinstance(sin, Ref):
            return x, cos, sin
    return None


def _find_seq_dim(record: Record, x: Ref, cos: Ref) -> int | None:
    """The dimension of x that counts tokens, where the angles have the form that the op takes."""
    sizes, angles = (list(map(str, record.shape(each))) for each in (x, cos))
    if len(sizes) != 4 or angles[-1] != sizes[-1]:
        return None
    if len(angles) == 4 and angles[0] not in ("1", sizes[0]):
        return None
    if len(angles) not in (2, 4):
        return None
    if angles[-2] == sizes[-2] and (len(angles) == 2 or angles[-3] == "1"):
        return -2
    if len(angles) == 4 and angles[-2] == "1" and angles[-3] == sizes[-3]:
        return -3
    return None
