"""What fuse() welds in a model, told before it trains."""

from __future__ import annotations

import collections
import functools
from collections.abc import Iterable, Iterator
from typing import Any

import torch

from torchweld.errors import ArgumentError
from torchweld.fusion.graph import capture
from torchweld.fusion.graph.patterns import FINDERS
from torchweld.fusion.graph.regions import Region, list_layers, list_parts
from torchweld.fusion.graph.rewrite import Placed, leaving_out, rewrite
from torchweld.fusion.kernelized import list_kernelized
from torchweld.fusion.report import Filter, Weldable

_TOKENS = (2, 16)  # of an example that nobody gave


class _EnoughError(RuntimeError):
    """Ends a capture or a run that has told what it can."""


def explain(
    model: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], filter_fn: Filter | None
) -> list[Weldable]:
    """Capture a call of a model on fake tensors, and list what is welded and what is not.

    The call does not run. If its forward does not capture as a whole, the call runs until the
    last kind of layer begins, and each kind is captured by itself. Without a call it lists what the
    calls became that a fused model has captured. What `kernels.kernelize` did comes last.
    """
    rows = _explain_call(model, args, kwargs, filter_fn)
    welds = {(row.where, row.what) for row in rows if row.becomes}

    def told(row: Weldable) -> bool:
        return (row.where, row.what) in welds and bool(row.becomes or is_fused)

    is_fused = isinstance(model, Region)
    return [*rows, *(row for row in list_kernelized(model) if not told(row))]


def _explain_call(
    model: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], filter_fn: Filter | None
) -> list[Weldable]:
    if not args and not kwargs:
        if (captured := _list_captured(model)) is not None:
            return captured
        kwargs = _make_example(model)
    left_out = _list_left_out(model, filter_fn)
    placed, broken = _capture(model, args, kwargs, left_out)
    if broken:
        rows = [Weldable("", _name(model), reason=f"it is captured in parts: {broken}")]
        return [*rows, *_explain_layers(model, args, kwargs, left_out)]
    return list(_make_rows(model, "", placed))


def _list_left_out(model: torch.nn.Module, filter_fn: Filter | None) -> set[str]:
    """Names and ids of modules that this filter leaves out, or the one that the model has."""
    names = {
        name for name, part in model.named_modules() if filter_fn and not filter_fn(part, name)
    }
    if filter_fn is None:
        for start, part in model.named_modules():
            inner = part.weld_left_out if isinstance(part, Region) else ()
            names |= {".".join(filter(None, (start, name))) for name in inner}
    parts = dict(model.named_modules())
    return names | {str(id(parts[name])) for name in names if name in parts}


def _list_captured(model: torch.nn.Module) -> list[Weldable] | None:
    """What the calls became that a fused model has captured; None if there were none."""
    found: list[Weldable] | None = None
    for name, region in model.named_modules():
        captures = getattr(region, "weld_captures", None)
        rows: collections.Counter[Weldable] = collections.Counter()
        for slot in () if captures is None else captures.list_slots():
            found = found or []
            if slot.reason:
                reason = f"it is captured in parts: {slot.reason}"
                rows |= collections.Counter([Weldable(name, _name(region), reason=reason)])
            for placed in slot.made:  # such as those of two lengths, which have rows in common
                rows |= collections.Counter(_make_rows(region, name, placed))
        if found is not None:
            found += rows.elements()
    return found


def _capture(
    module: Any, args: tuple[Any, ...], kwargs: dict[str, Any], left_out: set[str]
) -> tuple[list[Placed], str]:
    """What becomes of a call's graph, or why there is none."""
    placed: list[Placed] = []

    def tell(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        placed.extend(rewrite(graph, FINDERS, leaving_out(left_out)).placed)
        raise _EnoughError

    kind: Any = next((cls for cls in type(module).__mro__ if "weld_captures" in vars(cls)), None)
    forward = module.forward if kind is None else super(kind, module).forward
    try:
        capture.make(_name(module), tell, whole=True)(forward, args, kwargs)
    except capture.CannotCaptureError as error:
        if not _is_enough(error):
            return [], capture.explain(error)
    return placed, ""


def _is_enough(error: BaseException | None) -> bool:
    while error is not None:
        if isinstance(error, _EnoughError) or isinstance(
            getattr(error, "inner_exception", None), _EnoughError
        ):
            return True
        error = error.__cause__
    return False


def _explain_layers(
    model: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], left_out: set[str]
) -> list[Weldable]:
    """Explain the first layer of each kind, and the parts of one that does not capture.

    The model calls them with their arguments.
    """
    rows: list[Weldable] = []
    known: set[str] = set()
    waiting: set[str] = set()
    handles = []

    def watch(parts: Iterable[tuple[str, Any, str]]) -> None:
        for name, part, structure in parts:
            if structure not in known:
                known.add(structure)
                waiting.add(structure)
                hook = functools.partial(tell, name, structure)
                handles.append(part.register_forward_pre_hook(hook, with_kwargs=True))

    def tell(name: str, structure: str, module: Any, given: Any, named: Any) -> None:
        if structure not in waiting:  # only at its first call
            return
        placed, broken = _capture(module, given, named, left_out)
        rows.extend(_make_rows(module, name, placed))
        if broken:
            rows.append(Weldable(name, _name(module), reason=f"no graph: {broken}"))
            watch((f"{name}.{path}", part, kind) for path, part, kind in list_parts(module))
        waiting.discard(structure)
        if not waiting:
            raise _EnoughError

    watch(list_layers(model))
    try:
        with torch.random.fork_rng():
            if waiting:
                model(*args, **kwargs)
    except _EnoughError:
        pass
    finally:
        for handle in handles:
            handle.remove()
    return rows


def _make_rows(module: torch.nn.Module, start: str, placed: list[Placed]) -> Iterator[Weldable]:
    modules = dict(module.named_modules())
    for each in placed:
        where = ".".join(filter(None, (start, each.module)))
        what = _name(modules.get(each.module, module))
        if each.reason:
            line = f" ({each.line})" if each.line else ""
            op = f"no {each.op}: " if each.op else ""
            yield Weldable(where, what, reason=f"{op}{each.reason}{line}")
        else:
            yield Weldable(where, what, each.op, welded=isinstance(module, Region))


def _name(module: Any) -> str:
    cls = type(module)
    return str(getattr(cls, "welded_from", cls).__name__)


def _make_example(model: Any) -> dict[str, Any]:
    """Tokens and labels for a language model of transformers."""
    words = getattr(getattr(model, "config", None), "vocab_size", None)
    modules = {type(part).__module__.partition(".")[0] for part in model.modules()}
    if "transformers" not in modules or not isinstance(words, int):
        accepted = "the arguments of a call of the model"
        raise ArgumentError("explain_fusion", "example", "empty", accepted)
    device = next(model.parameters()).device
    ids = torch.arange(_TOKENS[0] * _TOKENS[1], device=device).view(_TOKENS) % (words - 3) + 3
    return {"input_ids": ids, "labels": ids}
