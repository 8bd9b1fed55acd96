"""The grouped products of experts_mlp on the CPU: expert by expert, in chunks of rows.

Rows are sorted by expert, and gathered into a buffer of bounded size. The backward pass does not
need the experts' results: with u = grad_y @ down, the gradient of a router weight is the sum of
u * hidden over its row, since <grad_y, hidden @ down.T> = <u, hidden>.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch

from torchweld.dispatch.bare import BareOp
from torchweld.ops.gemm import gemm
from torchweld.ops.opaque import define_opaque

# Numbers in the buffers of a chunk: enough rows for a GEMM of full speed.
_CHUNK = 2**25
# Where torch has no fast 16-bit GEMM, converting the factors pays off from this many rows on. The
# backward pass always converts them: it would round more often.
_CONVERTED_ROWS = 8


class Form(NamedTuple):
    """How the experts compute: experts_mlp explains the fields."""

    activation: str
    approximate: str
    gated: bool
    interleaved: bool
    transposed: bool
    weights_first: bool
    limit: float | None
    up_offset: float


class Factors(NamedTuple):
    """The experts' parameters, stacked."""

    gate_up: torch.Tensor
    down: torch.Tensor
    gate_up_bias: torch.Tensor | None
    down_bias: torch.Tensor | None


class Needs(NamedTuple):
    """The gradients that are wanted."""

    input: bool
    gate_up: bool
    down: bool
    weights: bool
    gate_up_bias: bool
    down_bias: bool


class Sorted(NamedTuple):
    """The rows in the order of their experts, the order kept within each."""

    order: torch.Tensor  # positions in the flat indices
    bounds: list[int]  # the first row of each expert, and the end of the last


def sort(indices: torch.Tensor, experts: int) -> Sorted:
    """Sort the flat indices; rows of indices outside [0, experts) are before and after all."""
    ids, order = indices.reshape(-1).sort(stable=True)
    bounds = torch.searchsorted(ids, torch.arange(experts + 1, device=ids.device, dtype=ids.dtype))
    return Sorted(order, bounds.tolist())


def accumulate_type(dtype: torch.dtype) -> torch.dtype:
    """The dtype of sums."""
    return torch.float32 if dtype.itemsize == 2 else dtype


# --- One expert -----------------------------------------------------------------------------------


class _Expert:
    """The parameters of one expert as the products take them."""

    def __init__(self, form: Form, factors: Factors, at: int, kind: torch.dtype) -> None:
        self.form = form
        gate_up, down, gate_up_bias, down_bias = factors
        self.gate_up = self.concatenate(self.lay(gate_up[at])).to(kind)
        self.down = self.lay(down[at]).to(kind)
        self.gate_up_bias = (
            None if gate_up_bias is None else self.concatenate(gate_up_bias[at]).to(kind)
        )
        self.down_bias = None if down_bias is None else down_bias[at].to(kind)

    def lay(self, factor: torch.Tensor) -> torch.Tensor:
        """A view of a factor, or of its gradient, as [out, in]."""
        return factor.t() if self.form.transposed else factor

    def concatenate(self, rows: torch.Tensor) -> torch.Tensor:
        """The rows of all gates, then the rows of all ups."""
        return torch.cat([rows[::2], rows[1::2]]) if self.form.interleaved else rows

    def multiply(self, rows: torch.Tensor) -> torch.Tensor:
        """The first product."""
        return torch.nn.functional.linear(rows, self.gate_up, self.gate_up_bias)

    def activate(self, z: torch.Tensor) -> torch.Tensor:
        """The hidden layer."""
        kind = self.form[:2]
        if not self.form.gated:
            return torch.ops.torchweld.bias_act.cpu(z, None, *kind)
        return torch.ops.torchweld.gated_act.cpu(*self._split(z), *kind)

    def _split(self, z: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        gate, up = z.chunk(2, -1)
        limit, offset = self.form[-2:]
        if limit is not None:
            gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
        return gate, up + offset if offset else up

    def find_gradient(self, z: torch.Tensor, grad: torch.Tensor) -> torch.Tensor:
        """The gradient of z from that of the hidden layer, which it may overwrite."""
        kind, limit = self.form[:2], self.form.limit
        if not self.form.gated:
            torch.ops.torchweld.bias_act_backward_.cpu(grad, z, None, *kind, False)
            return grad
        backward = torch.ops.torchweld.gated_act_backward.cpu
        grad_gate, grad_up = backward(grad, *self._split(z), *kind)
        if limit is not None:
            gate, up = z.chunk(2, -1)
            grad_gate.masked_fill_(gate > limit, 0)
            grad_up.masked_fill_(up.abs() > limit, 0)
        return torch.cat([grad_gate, grad_up], -1)


class _Chunk(NamedTuple):
    rows: slice  # in the order of experts
    places: torch.Tensor  # in the flat indices
    tokens: torch.Tensor


def _experts(
    form: Form, factors: Factors, rows: Sorted, top: int, converted_rows: int
) -> Iterator[tuple[int, _Expert | None, list[_Chunk]]]:
    """Every expert with its chunks of rows; one without rows has no parameters here."""
    gate_up, down, *_ = factors
    per_row = gate_up.shape[1] + gate_up.shape[2] + down.shape[1] + down.shape[2]
    most = max(1, _CHUNK // max(per_row, 1))
    for at, (first, end) in enumerate(zip(rows.bounds, rows.bounds[1:], strict=False)):
        chunks = []
        for begin in range(first, end, most):
            places = rows.order[begin : min(begin + most, end)]
            chunks.append(_Chunk(slice(begin, begin + len(places)), places, places // top))
        kind = gate_up.dtype
        if kind.itemsize == 2 and end - first >= converted_rows and not gemm.onednn_has(kind):
            kind = torch.float32
        yield at, _Expert(form, factors, at, kind) if chunks else None, chunks


class _Taken(NamedTuple):
    """The numbers of a chunk's rows in the backward pass."""

    grad: torch.Tensor
    input: torch.Tensor
    scale: torch.Tensor
    z: torch.Tensor | None  # None: it was not kept


def _scale(rows: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    return rows * weights[:, None]


def _add_rows(sums: torch.Tensor, tokens: torch.Tensor, rows: torch.Tensor) -> None:
    """Add to the rows of their tokens, in order."""
    sums.index_add_(0, tokens, rows.to(sums.dtype))


# --- Both passes ----------------------------------------------------------------------------------


def _run_forward(*inputs: Any) -> tuple[torch.Tensor, ...]:
    x, factors, indices, weights, form, (save,) = _read(inputs)
    with torch.autocast(x.device.type, enabled=False):
        return _forward(x, factors, indices, weights, form, save)


def _forward(
    x: torch.Tensor,
    factors: Factors,
    indices: torch.Tensor,
    weights: torch.Tensor,
    form: Form,
    save: bool,
) -> tuple[torch.Tensor, ...]:
    """The result, and what is kept for the backward pass: the order and the first products."""
    rows, flat, scales = sort(indices, factors.gate_up.shape[0]), _flatten(x), weights.reshape(-1)
    z_width = factors.gate_up.shape[2 if form.transposed else 1]
    kept = x.new_empty((len(rows.order) if save else 0, z_width))
    width = _find_out(factors, form)
    y = x.new_zeros((flat.shape[0], width), dtype=accumulate_type(x.dtype))
    for _, expert, chunks in _experts(form, factors, rows, indices.shape[-1], _CONVERTED_ROWS):
        for chunk in chunks:
            assert expert is not None
            kind = expert.gate_up.dtype
            given, scale = flat[chunk.tokens].to(kind), scales[chunk.places].to(kind)
            given = _scale(given, scale) if form.weights_first else given
            z = expert.multiply(given)
            if save:
                kept[chunk.rows] = z
            hidden = expert.activate(z)
            made = torch.nn.functional.linear(hidden, expert.down, expert.down_bias)
            _add_rows(y, chunk.tokens, made if form.weights_first else _scale(made, scale))
    return y.to(x.dtype).view(*x.shape[:-1], width), rows.order, kept


class _Gradients:
    """The gradients so far; None where one is not wanted."""

    def __init__(
        self, x: torch.Tensor, factors: Factors, weights: torch.Tensor, needs: Needs
    ) -> None:
        def make(need: bool, like: torch.Tensor | None) -> torch.Tensor | None:
            made = need and like is not None
            return torch.empty_like(like, memory_format=_PACKED) if made else None  # type: ignore[arg-type]

        kind = accumulate_type(x.dtype)
        self.x = x.new_zeros(x.shape, dtype=kind) if needs.input else None
        self.scales = weights.new_zeros(weights.numel()) if needs.weights else None
        self.gate_up = make(needs.gate_up, factors.gate_up)
        self.down = make(needs.down, factors.down)
        self.gate_up_bias = make(needs.gate_up_bias, factors.gate_up_bias)
        self.down_bias = make(needs.down_bias, factors.down_bias)
        self.factors = (self.gate_up, self.down, self.gate_up_bias, self.down_bias)


_PACKED = torch.contiguous_format


class _Sums:
    """The sums over one expert's chunks of a gradient of each of its parameters."""

    def __init__(self, gradients: _Gradients, at: int, expert: _Expert, chunks: int) -> None:
        self.gradients, self.at, self.expert, self.several = gradients, at, expert, chunks > 1
        self.made: dict[str, torch.Tensor] = {}
        self.in_place: set[str] = set()  # sums that are parts of the gradients themselves

    def add(self, name: str, part: torch.Tensor) -> None:
        """Add a chunk's part; several are added in float32."""
        if self.several:
            part = part.to(accumulate_type(part.dtype))
        self.made[name] = self.made[name].add_(part) if name in self.made else part

    def add_product(self, name: str, left: torch.Tensor, right: torch.Tensor) -> None:
        """Add left.t() @ right."""
        if name in self.made and left.dtype is self.made[name].dtype:
            self.made[name].addmm_(left.t(), right)
        elif (to := self._find(name, left.dtype)) is not None:
            self.made[name] = torch.mm(left.t(), right, out=to)
            self.in_place.add(name)
        else:
            self.add(name, gemm.weight_gradient(left, right))

    def _find(self, name: str, kind: torch.dtype) -> torch.Tensor | None:
        """This expert's part of a gradient, if a GEMM of this dtype can write to it."""
        part: torch.Tensor = getattr(self.gradients, name)[self.at]
        mixed = self.expert.form.interleaved and name == "gate_up"
        return (
            None if mixed or part.dtype is not kind or kind.itemsize == 2 else self.expert.lay(part)
        )

    def write(self) -> None:
        """Write the sums to the gradients, in the layout of the parameters."""
        for name, total in self.made.items():
            if name in self.in_place:
                continue
            to = getattr(self.gradients, name)[self.at]
            to = self.expert.lay(to) if to.ndim == 2 else to
            if self.expert.form.interleaved and name.startswith("gate_up"):
                to[::2], to[1::2] = total.chunk(2)
            else:
                to.copy_(total)


def _run_backward(*inputs: Any) -> tuple[torch.Tensor, ...]:
    grad, order, kept, *inputs = inputs  # type: ignore[assignment]
    x, factors, indices, weights, form, needs = _read(tuple(inputs))
    with torch.autocast(x.device.type, enabled=False):
        found = _backward(grad, order, kept, x, factors, indices, weights, form, Needs(*needs))
    return tuple([x.new_empty(0) if one is None else one for one in found])


def _backward(
    grad: torch.Tensor,
    order: torch.Tensor,
    kept: torch.Tensor,
    x: torch.Tensor,
    factors: Factors,
    indices: torch.Tensor,
    weights: torch.Tensor,
    form: Form,
    needs: Needs,
) -> tuple[torch.Tensor | None, ...]:
    """The gradients in the order of the arguments; z is computed again if it was not kept."""
    rows = sort(indices, factors.gate_up.shape[0])._replace(order=order)
    flat, grad, scales = _flatten(x), _flatten(grad), weights.reshape(-1)
    gradients = _Gradients(flat, factors, weights, needs)
    for at, expert, chunks in _experts(form, factors, rows, indices.shape[-1], 1):
        if expert is None:
            for one in gradients.factors:
                if one is not None:
                    one[at].zero_()
            continue
        kind, sums = expert.gate_up.dtype, _Sums(gradients, at, expert, len(chunks))
        for chunk in chunks:
            taken = _Taken(
                grad[chunk.tokens].to(kind),
                flat[chunk.tokens].to(kind),
                scales[chunk.places].to(kind),
                kept[chunk.rows].to(kind) if len(kept) else None,
            )
            _add_chunk(gradients, sums, needs, expert, chunk, taken)
        sums.write()
    return (
        None if gradients.x is None else gradients.x.to(x.dtype).view(x.shape),
        gradients.gate_up,
        gradients.down,
        None if gradients.scales is None else gradients.scales.view(weights.shape),
        gradients.gate_up_bias,
        gradients.down_bias,
    )


def _add_chunk(
    gradients: _Gradients,
    sums: _Sums,
    needs: Needs,
    expert: _Expert,
    chunk: _Chunk,
    of: _Taken,
) -> None:
    """Add a chunk's share of all gradients."""
    first, of_scales, grad, scale = expert.form.weights_first, gradients.scales, of.grad, of.scale
    taken = _scale(of.input, scale) if first else of.input
    z = expert.multiply(taken) if of.z is None else of.z
    if needs.down_bias:
        sums.add("down_bias", grad.sum(0) if first else scale @ grad)
    grad_hidden = grad @ expert.down
    if needs.down or (of_scales is not None and not first):
        hidden = expert.activate(z)
        if of_scales is not None and not first:
            made = _sum_products(grad_hidden, hidden)
            if expert.down_bias is not None:
                made += grad @ expert.down_bias
            of_scales[chunk.places] = made.to(of_scales.dtype)
        if needs.down:
            sums.add_product("down", grad, hidden if first else hidden.mul_(scale[:, None]))
    if not first:
        grad_hidden.mul_(scale[:, None])
    grad_z = expert.find_gradient(z, grad_hidden)
    if needs.gate_up_bias:
        sums.add("gate_up_bias", grad_z.sum(0))
    if needs.gate_up:
        sums.add_product("gate_up", grad_z, taken)
    if gradients.x is not None or (of_scales is not None and first):
        grad_taken = grad_z @ expert.gate_up
        if first and of_scales is not None:
            of_scales[chunk.places] = _sum_products(grad_taken, of.input).to(of_scales.dtype)
        if gradients.x is not None:
            _add_rows(gradients.x, chunk.tokens, _scale(grad_taken, scale) if first else grad_taken)


def _sum_products(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """The sum of a * b over each row."""
    return (a.to(accumulate_type(a.dtype)) * b).sum(-1)


# --- The ops --------------------------------------------------------------------------------------

_TENSORS = (
    "Tensor input, Tensor gate_up, Tensor down, Tensor indices, Tensor weights,"
    " Tensor? gate_up_bias, Tensor? down_bias"
)
FORM = (
    "str activation, str approximate, bool gated, bool interleaved, bool transposed,"
    " bool weights_first, float? limit, float up_offset"
)
_NEEDS = ", ".join(f"bool need_{name}" for name in Needs._fields)


def _read(inputs: tuple[Any, ...]) -> tuple[Any, ...]:
    x, gate_up, down, indices, weights, gate_up_bias, down_bias, *rest = inputs
    form, rest = Form(*rest[: len(Form._fields)]), rest[len(Form._fields) :]
    return x, Factors(gate_up, down, gate_up_bias, down_bias), indices, weights, form, rest


def _flatten(x: torch.Tensor) -> torch.Tensor:
    return x.reshape(x.shape[:-1].numel(), x.shape[-1])


def _find_out(factors: Factors, form: Form) -> int:
    return factors.down.shape[2 if form.transposed else 1]


def _fake_forward(*inputs: Any) -> tuple[torch.Tensor, ...]:
    x, factors, indices, _, form, (save,) = _read(inputs)
    z_width = factors.gate_up.shape[2 if form.transposed else 1]
    return (
        x.new_empty((*x.shape[:-1], _find_out(factors, form))),
        indices.new_empty((indices.numel(),), dtype=torch.int64),
        x.new_empty((indices.numel() if save else 0, z_width)),
    )


def _fake_backward(*inputs: Any) -> tuple[torch.Tensor, ...]:
    x, factors, _, weights, _, needs = _read(inputs[3:])
    sources = (x, factors.gate_up, factors.down, weights, factors.gate_up_bias, factors.down_bias)
    return tuple(
        [
            torch.empty_like(like, memory_format=_PACKED)
            if need and like is not None
            else x.new_empty(0)
            for need, like in zip(needs, sources, strict=True)
        ]
    )


_FORWARD = f"({_TENSORS}, {FORM}, bool save) -> (Tensor y, Tensor order, Tensor z)"
_BACKWARD = (
    f"(Tensor grad_y, Tensor order, Tensor z, {_TENSORS}, {FORM}, {_NEEDS}) -> ("
    + ", ".join(f"Tensor grad_{name}" for name in Needs._fields)
    + ")"
)
forward = define_opaque("experts_mlp", _FORWARD, _run_forward, _fake_forward)
backward = define_opaque("experts_mlp_backward", _BACKWARD, _run_backward, _fake_backward)


# --- Triton's kernels -----------------------------------------------------------------------------

TRITON_SOURCE = "triton_kernels/experts.py"


def _fake_triton_forward(*inputs: Any) -> tuple[torch.Tensor, ...]:
    """Its order has the places of all rows, the rows of all places, and the experts' bounds."""
    y, order, z = _fake_forward(*inputs)
    rows, experts = order.shape[0], inputs[1].shape[0]
    return y, order.new_empty((2 * rows + experts + 1,), dtype=torch.int32), z


def _define_triton(name: str, schema: str, fake: Any) -> Any:
    op = BareOp(name, schema, fake, backends=(), triton=TRITON_SOURCE)
    return op.overload("triton")


TRITON_FORWARD = _define_triton("experts_mlp", _FORWARD, _fake_triton_forward)
TRITON_BACKWARD = _define_triton("experts_mlp_backward", _BACKWARD, _fake_backward)
