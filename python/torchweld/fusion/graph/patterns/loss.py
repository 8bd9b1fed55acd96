"""linear_cross_entropy: the last layer of a language model and its loss."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any, NamedTuple

import torch

from torchweld import functional
from torchweld.fusion.graph.normal import aten
from torchweld.fusion.graph.prove import Late, Proposal
from torchweld.fusion.graph.record import Record, Ref, Step, as_float
from torchweld.fusion.logits import Deferred
from torchweld.names import Reduction
from torchweld.ops.loss.head import GATHERED_LINEAR, SharedHead

# Bytes of logits from which the loss is welded in a graph that Inductor compiles.
LEAST_COMPILED = 4 << 20
_REDUCTIONS: tuple[Reduction, ...] = ("none", "mean", "sum")
_CAST, _VIEW = aten._to_copy.default, aten.view.default
_SPREAD = _VIEW, aten.expand.default  # what a layer makes of its input and weight
_PRODUCTS = (aten.mm.default, aten.addmm.default, aten.bmm.default)
_LOSSES = aten.nll_loss_forward.default, aten.nll_loss2d_forward.default
_SCALES = {aten.mul.Tensor: operator.mul, aten.div.Tensor: operator.truediv}

# What stands between the last layer and the loss, as in `Deferred`: a function and a number.
_Steps = tuple[tuple[Any, ...], ...]
_ADD = operator.add, None  # the row is a tensor by itself


def _flatten(logits: Any) -> Any:
    return logits.view(-1, logits.shape[-1])


def _shift(logits: Any) -> Any:
    return logits[..., :-1, :].contiguous()


def _shift_and_flatten(logits: Any) -> Any:
    return logits[..., :-1, :].reshape(-1, logits.shape[-1])


def _turn(logits: Any) -> Any:
    return logits.transpose(1, 2)


def _permute(logits: Any) -> Any:
    return logits.permute(0, 2, 1)


class _Options(NamedTuple):
    """What a loss is computed with besides the input, the weight and the target.

    Of the tensors between the weight and the target, `names` are "bias" and "row". The head is
    shared if devices share its classes.
    """

    names: tuple[str, ...]
    steps: _Steps
    ignored: int
    reduction: Reduction
    head: SharedHead | None = None


def _reference(h: Any, weight: Any, *given: Any) -> Any:
    *more, target, options = given
    tensors = dict(zip(options.names, more, strict=True))
    compute = torch.nn.functional.linear if options.head is None else options.head.compute_logits
    z = compute(h, weight, tensors.get("bias"))
    for function, *numbers in options.steps:
        z = function(z, tensors["row"]) if function is operator.add else function(z, *numbers)
    return torch.nn.functional.cross_entropy(
        z, target, ignore_index=options.ignored, reduction=options.reduction
    )


def _run(h: Any, weight: Any, *given: Any) -> Any:
    *more, target, options = given
    tensors, steps = dict(zip(options.names, more, strict=True)), options.steps
    row, bias = tensors.get("row"), tensors.get("bias")
    if row is not None:
        bias = row.flatten() if bias is None else bias + row.flatten()
    if (_shift,) in steps or (_shift_and_flatten,) in steps:
        h = _shift(h)
    numbers = Deferred(h, 0, tuple(step for step in steps if step != _ADD)).read_options()
    is_wide, device = (torch.Tensor.float,) in steps, h.device.type
    # Under autocast the loss of 16-bit logits is float32, as with logits.float().
    keeps = not is_wide or h.dtype.itemsize != 2 or torch.is_autocast_enabled(device)
    h, target = h.reshape(-1, h.shape[-1]), target.flatten()
    if options.head is not None:
        h, weight, bias = options.head.as_dtensors(h, weight, bias)
        target = options.head.place(target)
    with nullcontext() if keeps else torch.autocast(device, h.dtype):
        loss = functional.linear_cross_entropy(
            h,
            weight,
            target,
            linear_bias=bias,
            ignore_index=options.ignored,
            reduction=options.reduction,
            logit_scale=numbers["logit_scale"],
            softcap=numbers["softcap"],
        )
    return loss if options.head is None else loss.to_local()


def find_loss(record: Record, at: int) -> Iterator[Proposal]:
    step = record.steps[at]
    if step.func not in _LOSSES:
        return
    logs, target, class_weight, reduction, ignored = step.args
    if step.func is not _LOSSES[0]:  # classes come before the tokens, [B, V, T]
        views = [record.maker(each, _VIEW) for each in (logs, target)]
        if None in views or _REDUCTIONS[int(reduction.text)] == "none":
            return
        logs, target = (view.args[0] for view in views)  # type: ignore[union-attr]
    soft = record.maker(logs, aten._log_softmax.default)
    found = None if soft is None or class_weight is not None else _climb(record, soft.args[0])
    if found is None:
        return
    product, path, row = found
    layer = _read_layer(record, product)
    steps = tuple(kind for _, kind in path[1:])
    if layer is None or steps.count((torch.tanh,)) > 1:
        return
    flat, matrix, bias, head = layer
    results: dict[int, Any] = {}  # what the model may return, and the steps before it
    for number, kind in path:
        if kind in ((_flatten,), (_shift,), (_turn,), (_permute,)):
            break
        results[number] = steps[: len(results)]
    rows = [] if row is None else [row]
    names = (*(["bias"] if bias else []), *(["row"] if rows else []))
    options = _Options(names, steps, int(ignored.text), _REDUCTIONS[int(reduction.text)], head)
    kinds = [options]
    if steps[-2:] == ((_shift,), (_flatten,)):  # perhaps by one reshape
        kinds.append(options._replace(steps=(*steps[:-2], (_shift_and_flatten,))))
    shapes = [*_list_before(record, flat), flat]
    if steps[-1:] in (((_turn,),), ((_permute,),)):
        shapes = [x for x in shapes if isinstance(x, Ref) and len(record.shape(x)) == 3]
    for inner, options, x in itertools.product((False, True), kinds, shapes):
        given = [x, matrix, *bias]
        if inner:  # autocast's casts are a part of the layer
            given = [record.strip(each, _CAST) for each in given]
        given += rows
        if not all(isinstance(each, Ref) for each in given):
            return
        h, weight, *more = (each.at for each in given)
        tensors = dict(zip(names, more, strict=True))
        late = Late(results, h, weight, tensors.get("bias"), tensors.get("row"))
        if head is not None:
            late = late._replace(weight=None, bias=None)
        inputs, out = [h, weight, *more, target.at], step.outs[0]
        name = "linear_cross_entropy"
        yield Proposal(name, inputs, [out], _reference, _run, (options,), late)


def _read_layer(record: Record, product: Step) -> tuple[Any, Any, list[Any], Any] | None:
    """The input, weight and bias of the last layer, and its head if devices share its classes."""
    if product.func is GATHERED_LINEAR:
        x, weight, bias, _, classes, devices, group = product.args
        head = SharedHead(int(classes.text), int(devices.text), group)
        return x, weight, [] if bias is None else [bias], head
    *bias, flat, turned = product.args
    turning = record.maker(record.strip(turned, *_SPREAD), aten.transpose.int)
    return None if turning is None else (flat, turning.args[0], bias, None)


def find_large_loss(record: Record, at: int) -> Iterator[Proposal]:
    """Losses of so many logits that their memory matters, where Inductor would compile them."""
    for proposal in find_loss(record, at):
        h, weight = (record.values[number] for number in proposal.inputs[:2])
        rows = hint_int(h.numel()) // weight.shape[1]
        if rows * weight.shape[0] * h.dtype.itemsize >= LEAST_COMPILED:
            yield proposal


def hint_int(size: Any) -> int:
    """A size, also of a tensor whose sizes are symbols, without a guard on it."""
    return int(size.node.hint) if isinstance(size, torch.SymInt) else int(size)


def _climb(record: Record, value: Any) -> tuple[Step, list[tuple[int, Any]], Ref | None] | None:
    """The product that logits come from, the tensors and steps from there to the loss, and a row.

    The row is what is added to the layer's result, such as BART's final_logits_bias.
    """
    path: list[tuple[int, Any]] = []
    row: Ref | None = None
    while isinstance(value, Ref) and value.at in record.made_by:
        step = record.steps[record.made_by[value.at]]
        product = step if step.func in (*_PRODUCTS, GATHERED_LINEAR) else None
        if step.func is _VIEW:  # the linear layer's own
            product = record.maker(step.args[0], *_PRODUCTS)
        if product is not None:
            return product, [(value.at, (torch.nn.functional.linear,)), *reversed(path)], row
        before, number = step.args[0], as_float(step.args[1]) if len(step.args) == 2 else None
        if row is not None:
            return None  # only of the layer's own result
        if not path and step.func in (aten.transpose.int, aten.permute.default):
            path.append((value.at, (_turn if step.func is aten.transpose.int else _permute,)))
        elif step.func is _VIEW and len(step.args[1]) == 2:
            path.append((value.at, (_flatten,)))
        elif step.func is aten.clone.default and record.maker(before, aten.slice.Tensor):
            path.append((value.at, (_shift,)))
            before = record.strip(before, aten.slice.Tensor)
        elif step.func is _CAST and dict(step.kwargs) == {"dtype": torch.float32}:
            path.append((value.at, (torch.Tensor.float,)))
        elif step.func is aten.tanh.default:
            path.append((value.at, (torch.tanh,)))
        elif step.func in _SCALES and number:
            path.append((value.at, (_SCALES[step.func], number)))
        elif step.func is aten.add.Tensor and _is_row(record, *step.args):
            path.append((value.at, _ADD))
            row = step.args[1]
        else:
            return None
        value = before
    return None


def _list_before(record: Record, value: Any) -> Iterator[Any]:
    """The tensors that a value shows in another shape, the nearest first."""
    while (step := record.maker(value, *_SPREAD)) is not None:
        value = step.args[0]
        yield value


def _is_row(record: Record, logits: Any, row: Any, *rest: Any) -> bool:
    """Whether a tensor is constant and has one number for each class."""
    if rest or not isinstance(row, Ref) or row.at in record.made_by:
        return False
    sizes = [str(size) for size in record.shape(row)]
    return sizes[-1:] == [str(record.shape(logits)[-1])] and set(sizes[:-1]) <= {"1"}
