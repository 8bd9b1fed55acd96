"""rotary_embedding_qk: the rotation of queries and keys by the same angles."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch

from torchweld import functional
from torchweld.fusion.graph.normal import aten
from torchweld.fusion.graph.patterns import rms_norm
from torchweld.fusion.graph.prove import Proposal
from torchweld.fusion.graph.record import Number, Record, Ref, Step, list_refs

_CAST = aten._to_copy.default


class Form(NamedTuple):
    """How a rotation is written.

    `wide` says what is cast to float32: nothing; the input ("early"); or the input and what is
    turned, each by itself ("late"). With `rest`, columns after the rotated ones do not change.
    """

    interleaved: bool = False
    wide: str = ""
    rest: bool = False


class _Rotation(NamedTuple):
    x: Ref
    cos: Ref
    sin: Ref
    out: int
    form: Form


def _turn(x: Any, form: Form) -> Any:
    if form.interleaved:
        return torch.stack((-x[..., 1::2], x[..., ::2]), dim=-1).flatten(-2)
    half = x.shape[-1] // 2
    return torch.cat((-x[..., half:], x[..., :half]), dim=-1)


def rotate(x: Any, cos: Any, sin: Any, form: Form) -> Any:
    width = cos.shape[-1]
    given = x[..., :width] if form.rest else x
    plain = given.float() if form.wide else given
    turned = _turn(plain if form.wide == "early" else given, form)
    if form.wide == "late":
        turned = turned.float()
    y = (plain * cos) + (turned * sin)
    y = y.to(x.dtype) if form.wide else y
    return torch.cat((y, x[..., width:]), dim=-1) if form.rest else y


def _both(q: Any, k: Any, cos: Any, sin: Any, seq_dim: int, form: Form) -> Any:
    return rotate(q, cos, sin, form), rotate(k, cos, sin, form)


def _run_both(q: Any, k: Any, cos: Any, sin: Any, seq_dim: int, form: Form) -> Any:
    q, k = _promote(q, cos, form), _promote(k, cos, form)
    cos, sin = fit_angles(q, cos, sin)
    return functional.rotary_embedding_qk(q, k, cos, sin, **_options(cos, seq_dim, form))


def _one(x: Any, cos: Any, sin: Any, seq_dim: int, form: Form) -> Any:
    return rotate(x, cos, sin, form)


def _run_one(x: Any, cos: Any, sin: Any, seq_dim: int, form: Form) -> Any:
    x = _promote(x, cos, form)
    cos, sin = fit_angles(x, cos, sin)
    return functional.rotary_embedding(x, cos, sin, **_options(cos, seq_dim, form))


def _promote(x: Any, cos: Any, form: Form) -> Any:
    """The dtype of the result: under autocast the angles'."""
    return x if form.wide else x.to(torch.result_type(x, cos))


def fit_angles(x: torch.Tensor, cos: Any, sin: Any) -> tuple[Any, Any]:
    """Angles in a dtype that the op takes beside x's."""
    if x.dtype == torch.float64:
        return cos.to(x.dtype), sin.to(x.dtype)
    return cos, sin


def _options(cos: Any, seq_dim: int, form: Form) -> dict[str, Any]:
    width = cos.shape[-1]
    return {"rotary_dim": width, "seq_dim": seq_dim, "interleaved": form.interleaved}


def find_rotary(record: Record, at: int) -> Iterator[Proposal]:
    """Two such sums with the same angles, where this step is the first one; or one sum."""
    for first in _read(record, record.steps[at]):
        x, cos, sin, out, form = first
        if (seq_dim := _find_seq_dim(record, x, cos, form)) is None:
            continue
        constants = seq_dim, form
        for product in record.readers(cos.at, aten.mul.Tensor):
            for total in record.readers(product.outs[0], aten.add.Tensor):
                for other in _read(record, total):
                    if (other.cos, other.sin, other.form) != (cos, sin, form) or other.out <= out:
                        continue
                    if _find_seq_dim(record, other.x, cos, form) == seq_dim:
                        inputs = [x.at, other.x.at, cos.at, sin.at]
                        outputs, name = [out, other.out], "rotary_embedding_qk"
                        yield Proposal(name, inputs, outputs, _both, _run_both, constants)
        inputs = [x.at, cos.at, sin.at]
        yield Proposal("rotary_embedding", inputs, [out], _one, _run_one, constants)


class Norms(NamedTuple):
    """The norms of each head's queries and keys, as rms_norm writes them, before the rotation."""

    eps: float
    kind: str
    is_turned: bool  # heads and tokens change places after the norm


# Which values of a norm are rounded, in the op's words.
_ROUNDING = {"rounded": "both", **dict.fromkeys(("wide", "cast", "plus_one", "torch"), "result")}


def _normed(
    q: Any, k: Any, q_weight: Any, k_weight: Any, cos: Any, sin: Any, *how: Any
) -> tuple[Any, Any]:
    _, form, norms = how
    q, k = (
        rms_norm.compute(x, weight, norms.eps, norms.kind)
        for x, weight in ((q, q_weight), (k, k_weight))
    )
    if norms.is_turned:
        q, k = q.transpose(1, 2), k.transpose(1, 2)
    return rotate(q, cos, sin, form), rotate(k, cos, sin, form)


def _run_normed(
    q: Any, k: Any, q_weight: Any, k_weight: Any, cos: Any, sin: Any, *how: Any
) -> tuple[Any, Any]:
    seq_dim, form, norms = how
    if norms.is_turned:
        q, k = q.transpose(1, 2), k.transpose(1, 2)
    cos, sin = fit_angles(q, cos, sin)
    return functional.rotary_embedding_qk(
        *(q, k, cos, sin),
        q_norm_weight=q_weight,
        k_norm_weight=k_weight,
        norm_eps=norms.eps,
        norm_plus_one=norms.kind == "plus_one",
        norm_rounding=_ROUNDING[norms.kind],
        **_options(cos, seq_dim, form),
    )


def find_normed_rotary(record: Record, at: int) -> Iterator[Proposal]:
    """The rotation of queries and keys with the norms before it."""
    for pair in find_rotary(record, at):
        if pair.op != "rotary_embedding_qk":
            continue
        q, k, cos, sin = pair.inputs
        for (x, x_weight, norms), (y, y_weight, others) in itertools.product(
            _list_norms(record, q), _list_norms(record, k)
        ):
            if norms == others:
                inputs, constants = [x, y, x_weight, y_weight, cos, sin], (*pair.constants, norms)
                yield Proposal(pair.op, inputs, pair.outputs, _normed, _run_normed, constants)


def _list_norms(record: Record, rotated: int) -> Iterator[tuple[int, int, Norms]]:
    """Norms of the last dimension that made what is rotated."""
    turn = record.maker(Ref(rotated), aten.transpose.int)
    is_turned = turn is not None and turn.args[1:] == (Number("1"), Number("2"))
    out = turn.args[0].at if turn is not None and is_turned else rotated
    waiting, left = [out], 6  # steps up to the root
    while waiting and left:
        number, left = waiting.pop(0), left - 1
        at = record.made_by.get(number)
        if at is None:
            continue
        for x, weight, end, eps, kind in rms_norm.list_norms(record, at):
            if end == out and weight is not None and kind in _ROUNDING:
                yield x, weight, Norms(eps, kind, is_turned)
        waiting += list_refs(record.steps[at].args)


def _read(record: Record, step: Step) -> Iterator[_Rotation]:
    """Readings of a sum as a rotation, those of more operations first."""
    if step.func is not aten.add.Tensor or not all(isinstance(each, Ref) for each in step.args):
        return
    products = [record.maker(each, aten.mul.Tensor) for each in step.args]
    for plain, turned in (products, products[::-1]):
        if plain is None or turned is None or not isinstance(plain.args[0], Ref):
            continue
        cos, sin = plain.args[1], turned.args[1]
        found = _read_turn(record, record.strip(turned.args[0], _CAST))
        if found is None or not isinstance(cos, Ref) or not isinstance(sin, Ref):
            continue
        base, interleaved = found
        for wide, x, out in _list_widths(record, plain.args[0], base, step.outs[0]):
            sliced = record.maker(x, aten.slice.Tensor)
            for joined in record.readers(out, aten.cat.default):
                if sliced is not None:
                    form = Form(interleaved, wide, rest=True)
                    yield _Rotation(sliced.args[0], cos, sin, joined.outs[0], form)
            yield _Rotation(x, cos, sin, out, Form(interleaved, wide))


def _read_turn(record: Record, value: Any) -> tuple[Ref, bool] | None:
    """What is turned by a quarter, and whether its pairs are interleaved."""
    joined = record.maker(value, aten.cat.default)
    stacked = record.maker(record.strip(value, aten.view.default), aten.stack.default)
    made = joined or stacked
    negative = made and record.maker(made.args[0][0], aten.neg.default)
    half = negative and record.maker(negative.args[0], aten.slice.Tensor)
    return (half.args[0], made is stacked) if half else None


def _list_widths(
    record: Record, plain: Ref, base: Ref, total: int
) -> Iterator[tuple[str, Ref, int]]:
    """Where casts to float32 stand, the input before them and the result after them."""
    ends = [step.outs[0] for step in record.readers(total, _CAST)]
    cast = record.maker(plain, _CAST)
    if cast is not None:
        wide = "early" if plain == base else "late"
        yield from ((wide, cast.args[0], end) for end in ends)
    if plain == base:
        yield "", plain, total


def _find_seq_dim(record: Record, x: Ref, cos: Ref, form: Form) -> int | None:
    """The dimension of x that counts tokens, where the angles have the form that the op takes."""
    sizes, angles = (list(map(str, record.shape(each))) for each in (x, cos))
    if len(sizes) != 4 or len(angles) not in (2, 4):
        return None
    if (angles[-1] == sizes[-1]) == form.rest:
        return None
    if len(angles) == 4 and angles[0] not in ("1", sizes[0]):
        return None
    if angles[-2] == sizes[-2] and (len(angles) == 2 or angles[-3] == "1"):
        return -2
    if len(angles) == 4 and angles[-2] == "1" and angles[-3] == sizes[-3]:
        return -3
    return None
