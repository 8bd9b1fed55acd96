"""experts_mlp: a mixture's experts, by grouped products or by a product for each row."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any, NamedTuple

import torch

from torchweld import functional
from torchweld.dispatch.call import choose_automatically
from torchweld.fusion.graph.normal import aten
from torchweld.fusion.graph.patterns.activation import Activation, compute, list_acts
from torchweld.fusion.graph.prove import Proposal
from torchweld.fusion.graph.record import Number, Record, Ref, Step, as_float, list_refs
from torchweld.ops.experts import mlp
from torchweld.ops.experts.grouped import Form

_GROUPED, _BATCHED = aten._grouped_mm.default, aten.bmm.default
_CAST, _UNSQUEEZE = aten._to_copy.default, aten.unsqueeze.default
# Steps between the two products, and from the last one to the sum over a token's experts.
_BETWEEN, _AFTER = 24, 8


class How(NamedTuple):
    """How experts are written."""

    grouped: bool
    biases: bool
    kind: Activation
    gated: bool
    interleaved: bool
    transposed: bool
    limit: float | None
    up_offset: float
    wide: bool = False  # gate and product in float32

    def read_form(self) -> Form:
        """In the words of experts_mlp."""
        name, approximate = self.kind.name, self.kind.approximate
        layout = self.gated, self.interleaved, self.transposed
        return Form(name, approximate, *layout, False, self.limit, self.up_offset)


# --- In plain torch, as transformers writes it ----------------------------------------------------


def _reference(
    x: Any, gate_up: Any, down: Any, indices: Any, weights: Any, *more: Any
) -> torch.Tensor:
    *biases, how = more
    run = _run_grouped if how.grouped else _run_batched
    rows = run(x, (gate_up, down), indices.reshape(-1), weights.reshape(-1), biases, how)
    return rows.view(*indices.shape, rows.shape[-1]).sum(dim=1).to(x.dtype)  # type: ignore[no-any-return]


def _run_grouped(x: Any, factors: Any, ids: Any, weights: Any, biases: Any, how: How) -> Any:
    experts, top = factors[0].shape[0], ids.shape[0] // x.shape[0]
    sorted_ids, order = torch.sort(ids)
    rows, scales = x[order // top], weights[order]
    numbers = sorted_ids.float() if x.device.type in ("cpu", "mps") else sorted_ids.int()
    counts = torch.histc(numbers, bins=experts, min=0, max=experts - 1)
    ends = torch.cumsum(counts, dim=0, dtype=torch.int32)

    def multiply(rows: Any, at: int) -> Any:
        matrix = factors[at] if how.transposed else factors[at].transpose(-2, -1)
        z = torch.nn.functional.grouped_mm(rows.to(matrix.dtype), matrix, offs=ends)
        return z.add_(biases[at][sorted_ids]) if biases else z

    rows = multiply(_activate(multiply(rows, 0), how), 1) * scales.unsqueeze(-1)
    places = torch.empty_like(order)
    places[order] = torch.arange(order.size(0), device=x.device)
    return rows[places]


def _run_batched(x: Any, factors: Any, ids: Any, weights: Any, biases: Any, how: How) -> Any:
    def multiply(rows: Any, at: int) -> Any:
        matrix = factors[at][ids]
        if how.transposed:
            z = torch.bmm(rows.unsqueeze(1), matrix).squeeze(1)
        else:
            z = torch.bmm(matrix, rows.unsqueeze(-1)).squeeze(-1)
        return z.add_(biases[at][ids]) if biases else z

    rows = x.repeat_interleave(ids.shape[0] // x.shape[0], dim=0)
    return multiply(_activate(multiply(rows, 0), how), 1) * weights.unsqueeze(-1)


def _activate(z: Any, how: How) -> Any:
    if not how.gated:
        return compute(z, how.kind)
    gate, up = (z[..., ::2], z[..., 1::2]) if how.interleaved else z.chunk(2, dim=-1)
    if how.wide:
        gate, up = gate.float(), up.float()
    if how.limit is not None:
        gate, up = gate.clamp(max=how.limit), up.clamp(min=-how.limit, max=how.limit)
    if how.up_offset:
        up = up + how.up_offset
    return (compute(gate, how.kind) * up).to(z.dtype)


# --- By torchweld ---------------------------------------------------------------------------------


def _run(x: Any, gate_up: Any, down: Any, indices: Any, weights: Any, *more: Any) -> torch.Tensor:
    *biases, how = more
    form = how.read_form()
    device = x.device.type
    if device not in ("cpu", "meta"):
        inputs = (x, gate_up, down, indices, weights, *(biases or (None, None)), *form, False)
        if choose_automatically(mlp.OP, inputs) not in mlp.OP.backends:
            return _reference(x, gate_up, down, indices, weights, *more)  # eager's is slower
    # Autocast does not change grouped products.
    with torch.autocast(device, enabled=False) if how.grouped else nullcontext():
        first, last = biases or (None, None)
        rows = functional.experts_mlp(
            *(x.to(gate_up.dtype) if how.grouped else x, gate_up, down, indices, weights),
            gate_up_bias=first,
            down_bias=last,
            **form._asdict(),
        )
    return rows.to(x.dtype)


# --- The finder -----------------------------------------------------------------------------------


def find_experts(record: Record, at: int) -> Iterator[Proposal]:
    """From the second product to the first one, and to the sum over a token's experts."""
    last = record.steps[at]
    if last.func not in (_GROUPED, _BATCHED):
        return
    is_grouped = last.func is _GROUPED
    for transposed in (False, True):
        for how, first, given in _read(record, last, is_grouped, transposed):
            inputs = _read_inputs(record, first, last, how)
            ends = inputs and _list_ends(record, last, inputs)
            for weights, out in ends or ():
                assert inputs
                x, gate_up, down, indices = inputs
                numbers = [x, gate_up, down, indices, weights, *given]
                yield Proposal("experts_mlp", numbers, [out], _reference, _run, (how,))


def _read(
    record: Record, last: Step, is_grouped: bool, transposed: bool
) -> Iterator[tuple[How, Step, list[int]]]:
    """Ways to write what lies between two products, the first product and the biases."""
    found = _split(record, last, transposed)
    first, between = _climb(record, found[0], last.func) if found else (None, [])
    if first is None:
        return
    biases = [_find_bias(record, product) for product in (first, last)]
    given = [bias.at for bias in biases if bias is not None]
    kinds = [kind for step in between if (kind := _read_kind(record, step))]
    slices = [step for step in between if step.func is aten.slice.Tensor]
    in_turn = any(len(step.args) == 5 for step in slices)  # with a step of two
    limits = [as_float(step.args[2]) for step in between if step.func is aten.clamp.default]
    sums = [step.args[1] for step in between if step.func is aten.add.Tensor]
    offsets = [number for each in sums if (number := as_float(each))]
    casts = any(step.func is _CAST for step in between)  # or autocast's
    for kind in kinds[:1]:
        # The activation may have a sum, too.
        for offset, wide in itertools.product((*offsets, 0.0), (False, True)[: 1 + casts]):
            rest = (*limits, None)[0], offset, wide
            how = How(is_grouped, bool(given), kind, bool(slices), in_turn, transposed, *rest)
            yield how, first, given


def _split(record: Record, product: Step, transposed: bool) -> tuple[Any, Any, Any] | None:
    """The rows, the experts' matrices and, where rows choose them, the rows' experts."""
    if product.func is _GROUPED:
        rows, matrices = product.args[:2]
        if not transposed:
            turned = record.maker(matrices, aten.transpose.int)
            matrices = turned and turned.args[0]
        return (rows, matrices, None) if isinstance(matrices, Ref) else None
    both = [record.strip(each, _CAST) for each in product.args]  # autocast's
    chosen, column = both[::-1] if transposed else both
    chosen, column = record.maker(chosen, aten.index.Tensor), record.maker(column, _UNSQUEEZE)
    return (column.args[0], chosen.args[0], chosen.args[1][0]) if chosen and column else None


def _climb(record: Record, rows: Ref, func: Any) -> tuple[Step | None, list[Step]]:
    """The last product before some rows, and the steps after it."""
    waiting, seen = [rows.at], set()
    between: list[Step] = []
    while waiting and len(between) < _BETWEEN:
        at = record.made_by.get(waiting.pop(0), -1)
        if at < 0 or at in seen:
            continue
        seen.add(at)
        step = record.steps[at]
        if step.func is func:
            return step, between
        between.append(step)
        waiting += list_refs(step.args)
    return None, []


def _find_bias(record: Record, product: Step) -> Ref | None:
    """The table whose rows are added to a product."""
    for out in (product.outs[0], *_list_results(record, product.outs[0], aten.squeeze.dim)):
        for total in record.readers(out, aten.add_.Tensor):
            if chosen := record.maker(total.args[1], aten.index.Tensor):
                return chosen.args[0]  # type: ignore[no-any-return]
    return None


def _list_results(record: Record, number: int, *funcs: Any) -> list[int]:
    return [step.outs[0] for step in record.readers(number, *funcs)]


def _read_kind(record: Record, step: Step) -> Activation | None:
    kinds = (kind for _, _, kind in list_acts(record, record.made_by[step.outs[0]]))
    return next(kinds, None)


def _read_inputs(
    record: Record, first: Step, last: Step, how: How
) -> tuple[int, int, int, int] | None:
    """The tokens, both tables of matrices and the tokens' experts."""
    parts = [_split(record, product, how.transposed) for product in (first, last)]
    if parts[0] is None or parts[1] is None:
        return None
    rows, ids = parts[0][0], parts[0][2]
    if how.grouped:
        chosen = record.maker(record.strip(rows, _CAST), aten.index.Tensor)
        token = chosen and record.maker(chosen.args[1][0], aten.floor_divide.default)
        sort = token and record.maker(token.args[0], aten.sort.default)
        if not chosen or not sort:
            return None
        rows, ids = chosen.args[0], sort.args[0]
    else:
        for func in (aten.view.default, aten.clone.default, aten.expand.default, _UNSQUEEZE):
            repeated = record.maker(rows, func)
            rows = repeated and repeated.args[0]
    indices = _find_table(record, ids)
    if indices is None or not isinstance(rows, Ref):
        return None
    inputs = rows.at, parts[0][1].at, parts[1][1].at, indices
    fits = [record.values[number].ndim for number in inputs] == [2, 3, 3, 2]
    return inputs if fits else None


def _find_table(record: Record, flat: Any) -> int | None:
    """The matrix, with a row for each token, that a vector lists."""
    while (step := record.maker(flat, aten.view.default, aten.clone.default)) is not None:
        flat = step.args[0]
        if len(record.shape(flat)) == 2:
            return flat.at  # type: ignore[no-any-return]
    return None


def _list_ends(record: Record, last: Step, inputs: Any) -> Iterator[tuple[int, int]]:
    """The weights' table and the result; a cast of the result comes first."""
    outs = [last.outs[0], *_list_results(record, last.outs[0], aten.squeeze.dim)]
    outs += [out for each in outs for out in _list_results(record, each, aten.add_.Tensor)]
    for product in (each for out in outs for each in record.readers(out, aten.mul.Tensor)):
        for column in (record.maker(each, _UNSQUEEZE) for each in product.args):
            if column is None:
                continue
            flat = column.args[0]
            if (chosen := record.maker(flat, aten.index.Tensor)) is not None:
                flat = chosen.args[0]
            weights = _find_table(record, flat)
            total = _find_sum(record, product.outs[0])
            if weights is not None and total is not None:
                for out in (*_list_results(record, total, _CAST), total):
                    yield weights, out


def _find_sum(record: Record, number: int) -> int | None:
    """The sum over each token's experts."""
    for _ in range(_AFTER):
        for step in record.readers(number, aten.sum.dim_IntList):
            return step.outs[0] if step.args[1] == (Number("1"),) else None
        following = _list_results(record, number, aten.index.Tensor, aten.view.default)
        if not following:
            return None
        number = following[0]
    return None
