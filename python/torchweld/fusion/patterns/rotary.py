"""Attention whose queries and keys a function of its file rotates, after norms or without."""

from __future__ import annotations

import inspect
import itertools
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch

from torchweld import functional
from torchweld.dispatch.dtensor import is_dtensor
from torchweld.errors import ArgumentError
from torchweld.fusion import probe
from torchweld.fusion.patterns.norm import RULES, find_norm
from torchweld.fusion.patterns.plain import ATTENTION, is_slow_attention, serve_products
from torchweld.fusion.rewrite import reads, rewrite, unwrap, why_not
from torchweld.fusion.settings import Names, has_globals, list_read
from torchweld.fusion.straight import Kind, why_not_straight
from torchweld.fusion.twin import Twin
from torchweld.fusion.view import View
from torchweld.fusion.weld import (
    Proposal,
    Rewritten,
    Skipped,
    Weld,
    forward_of,
    propose,
    why_not_change,
    why_not_copy,
)

# Names of functions that rotate by cosines and sines, and by complex numbers.
_ROTATES, _ROTATES_COMPLEX = "apply_rotary_pos_emb", "apply_rotary_emb"
# How many tensors they take.
_TAKES = {_ROTATES: 4, _ROTATES_COMPLEX: 3}
_WIDTHS = ("qk_rope_head_dim", "head_dim", "head_size")
# What an attention gets: tables for each row of a batch, complex numbers, or tables of the last
# tokens, which the rows of a batch share.
_BATCHED, _COMPLEX, _LAST = "batched", "complex", "last"
# How a function reads its angles: per column, per pair, or the first half of the per-column angles;
# and whether pairs are interleaved.
_FORMS = (
    *(("columns", False), ("columns", True), ("half", True), ("pairs", False), ("pairs", True)),
)
# Values that == compares.
_PLAIN = (bool, int, float, str)
# In a trial: the most rows of a batch, the length of a long text, and a factor of numbers.
_ROWS, _LONG, _LARGE = 2, 4100, 1e3
# Norms that the rotation may take along, and the methods that then run in their place.
_NORMS = {"q_norm": "weld_q_norm", "k_norm": "weld_k_norm"}


class RotaryAttention(Rewritten):
    """An attention whose forward calls `weld_rotate` in place of the function of its file.

    The forward is recompiled from source, in the globals of its file, with no other change. `norm`
    has the settings of the norms that are fused into the rotation. Their modules are not called.
    """

    weld_norm: tuple[tuple[str, Any], ...] = ()
    weld_function: str
    weld_angles: str
    weld_tables: str
    weld_heads_at: int  # where complex angles get a dimension for the heads
    weld_interleaved: bool
    weld_partial: bool
    weld_keeps_dtype: bool
    weld_attends: bool  # by torch's attention, on a CPU that would be slow in 16 bits
    # Names of what the function of its file takes, with the defaults of those after the angles, and
    # whether it ignores all others. With values that no trial gave it, it runs itself.
    weld_names: tuple[str, ...]
    weld_others: dict[str, Any]
    weld_ignores_more: bool
    weld_own_function: Callable[..., Any]
    weld_globals: Names  # what that function reads from its file
    q_norm: torch.nn.Module
    k_norm: torch.nn.Module

    @classmethod
    def weld_rewrite(cls, forward: Any) -> Callable[..., Any]:
        function = unwrap(forward).__globals__[cls.weld_function]
        cls.weld_own_function = staticmethod(function)
        function = _open(function)
        parameters = inspect.signature(function).parameters.values()
        named = [p for p in parameters if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
        cls.weld_globals = list_read((unwrap(function),))
        first = _TAKES[cls.weld_function]
        names = ("q", "k", "cos", "sin")[:first]  # of a wrapper that hides them
        cls.weld_names = names if len(named) < first else tuple(p.name for p in named)
        cls.weld_others = {p.name: p.default for p in named[first:]}
        # A function that reads them is not welded.
        cls.weld_ignores_more = any(p.kind == p.VAR_KEYWORD for p in parameters)
        methods = _NORMS if cls.weld_norm else {}
        made = rewrite(forward, cls.weld_function, "weld_rotate", methods)
        return serve_products(made) if cls.weld_attends else made

    def weld_takes_norms(self) -> bool:
        """Whether the rotation takes the norms along."""
        norm = dict(self.weld_norm)
        if not (norm and self.weld_may_skip()):
            return False
        # A plan's replicated weights: the modules know where their gradients are added.
        weights = (getattr(getattr(self, name), norm["weight_name"]) for name in _NORMS)
        return not any(map(is_dtensor, weights))

    def weld_q_norm(self, x: torch.Tensor) -> Any:
        return x if self.weld_takes_norms() else self.q_norm(x)

    def weld_k_norm(self, x: torch.Tensor) -> Any:
        return x if self.weld_takes_norms() else self.k_norm(x)

    def weld_is_unlike(self, given: dict[str, Any]) -> bool:
        """Whether the function of the file gets what no trial gave it, or changed."""
        if not has_globals(self.weld_globals):
            return True
        for name, value in given.items():
            if name not in self.weld_names:
                if not self.weld_ignores_more:
                    return True
            elif name in self.weld_others and name != "unsqueeze_dim":
                default = self.weld_others[name]
                if value is not default and not (isinstance(value, _PLAIN) and value == default):
                    return True
        return False

    def weld_rotate(
        self, *args: Any, weld_left: bool = True, **more: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Rotate queries and keys, in the dtypes that the attention's own code gives them.

        `weld_left` says whether their norms are left to the rotation.
        """
        given = self.weld_others | dict(zip(self.weld_names, args, strict=False)) | more
        q, k, cos = (given.pop(name) for name in self.weld_names[:3])
        takes_norms = weld_left and self.weld_takes_norms()
        if self.weld_is_unlike(given) or len(args) > len(self.weld_names):
            if takes_norms:
                q, k = self.q_norm(q), self.k_norm(k)
            more = {name: value for name, value in more.items() if name not in self.weld_names[:2]}
            return self.weld_own_function(q, k, *args[2:], **more)  # type: ignore[no-any-return]
        if self.weld_function == _ROTATES_COMPLEX:
            cos, sin, unsqueeze_dim = cos.real, cos.imag, self.weld_heads_at
        else:
            sin, unsqueeze_dim = given[self.weld_names[3]], given.get("unsqueeze_dim", 1)
        width = cos.shape[-1]
        if self.weld_angles == "half":
            cos, sin = cos[..., : width // 2], sin[..., : width // 2]
        rotated = cos.shape[-1] * (1 if self.weld_angles == "columns" else 2)
        if rotated != q.shape[-1] and not self.weld_partial:
            accepted = (
                f"for {q.shape[-1]} columns, since the attention did not run with fewer when it was"
                " fused"
            )
            raise ArgumentError(self.weld_function, "cos", f"of last size {width}", accepted)
        norm = dict(self.weld_norm) if takes_norms else {}
        inner: list[Any] = [getattr(self, name) for name in _NORMS] if norm else []
        weights = [getattr(part, norm["weight_name"]) for part in inner]
        options: dict[str, Any] = {"rotary_dim": rotated}
        options["seq_dim"] = -3 if unsqueeze_dim in (2, -2) else -2
        dtype = q.dtype
        if norm:
            eps = norm["eps"]
            options["norm_eps"] = getattr(inner[0], eps) if isinstance(eps, str) else eps
            options["norm_plus_one"] = norm["offset"]
            dtype = RULES[norm["rule"]](dtype, weights[0].dtype)
        if not self.weld_keeps_dtype:
            dtype = torch.promote_types(dtype, cos.dtype)
        if norm:
            fits = weights[0].dtype in (dtype, torch.float32)
            weights = weights if fits else [weight.to(dtype) for weight in weights]
            options["q_norm_weight"], options["k_norm_weight"] = weights
        if cos.dtype not in (dtype, torch.float32) or dtype == torch.float64:
            cos, sin = cos.to(dtype), sin.to(dtype)
        if self.weld_tables == _LAST:  # the other tokens are turned by an angle of zero
            before = (0, 0, q.shape[-2] - cos.shape[-2], 0)
            cos = torch.nn.functional.pad(cos, before, value=1.0)
            sin = torch.nn.functional.pad(sin, before)
        else:
            cos, sin = cos.unsqueeze(unsqueeze_dim), sin.unsqueeze(unsqueeze_dim)
        options["interleaved"] = self.weld_interleaved
        return functional.rotary_embedding_qk(q.to(dtype), k.to(dtype), cos, sin, **options)


class _RotaryScope(torch.nn.Module):
    """An attention, called with as many angles as each of `widths` says.

    With the name of its function it returns too what that makes of other tensors: softmax hides
    much, and the function may decide by lengths.
    """

    def __init__(
        self,
        attention: torch.nn.Module,
        widths: tuple[int, ...],
        tables: str,
        function: str = "",
        normed: bool = False,
    ) -> None:
        super().__init__()
        self.attention, self.widths, self.tables = attention, widths, tables
        self.function, self.normed = function, normed
        # What a forward needs besides, such as Falcon's alibi, may be None.
        self.others = dict.fromkeys((probe.name_required(attention) or [])[1:])

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> Any:
        results = []
        for width in self.widths:
            # Models do not learn angles.
            angles: Any = (cos[..., :width].detach(), sin[..., :width].detach())
            if self.tables == _LAST:
                angles = tuple(table[0, 2:] for table in angles)
            elif self.tables == _COMPLEX:
                wide = torch.promote_types(cos.dtype, torch.float32)
                angles = torch.complex(*(angle.to(wide) for angle in angles))
            given = {**self.others, "position_embeddings": angles, "attention_mask": None}
            calls: list[_Call] = []
            with _record(self.attention, self.function, calls):
                results.append(self.attention(x, **given)[0])
            if len(x) <= _ROWS:  # traffic is measured with more rows
                results += [y for call in calls for y in _repeat(call, x.shape[1], self.normed)]
        return results


class _Call(NamedTuple):
    """A call of the function that rotates, and what it returned."""

    rotate: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    result: Any


@contextmanager
def _record(attention: Any, function: str, calls: list[_Call]) -> Iterator[None]:
    """List an attention's calls of its function, or of the weld's in its place."""
    if not function:
        yield
        return
    is_weld = isinstance(attention, RotaryAttention)
    name = "weld_rotate" if is_weld else function
    place = vars(attention) if is_weld else unwrap(forward_of(attention)).__globals__
    rotate = getattr(attention, name) if is_weld else place[name]
    mine = threading.get_ident()

    def record(*args: Any, **kwargs: Any) -> Any:
        result = rotate(*args, **kwargs)
        if threading.get_ident() == mine:
            calls.append(_Call(rotate, args, kwargs, result))
        return result

    place[name] = record
    try:
        yield
    finally:
        if is_weld:
            del place[name]
        else:
            place[name] = rotate


def _repeat(call: _Call, tokens: int, normed: bool) -> Iterator[torch.Tensor]:
    """The results of a call, and of calls with other lengths, tables and sizes of numbers."""
    yield from call.result
    if tokens < 2 or len(call.args) < 3 or not all(x.ndim == 4 for x in call.args[:2]):
        return
    q, k, *rest = call.args
    at = [dim for dim in (1, 2) if q.shape[dim] == k.shape[dim] == tokens]
    if len(at) != 1:  # as many heads as tokens
        return

    def again(change: Callable[..., Any], table: Callable[..., Any]) -> Iterator[torch.Tensor]:
        others = [table(x) if isinstance(x, torch.Tensor) else x for x in rest]
        yield from call.rotate(change(q), change(k), *others, **call.kwargs)

    first = (slice(None),) * at[0] + (slice(1),)
    yield from again(lambda x: x[first], lambda x: x[..., -1:, :])
    if rest[0].ndim == 3:
        yield from again(lambda x: x, lambda x: x[:1])
    times = -(-_LONG // tokens)
    with torch.no_grad():
        # One head of one row.
        one = (slice(1),) + ((slice(None), slice(1)) if at[0] == 1 else (slice(1),))
        sizes = (1, times, 1, 1) if at[0] == 1 else (1, 1, times, 1)
        yield from again(
            lambda x: x[one].repeat(sizes),
            lambda x: x[:1].repeat(1, times, 1) if x.ndim == 3 else x.repeat(times, 1),
        )
        if not normed:  # a norm takes the size away
            yield from again(lambda x: _LARGE * x, lambda x: x)


def _list_widths(
    module: torch.nn.Module, head: int, tables: str, inputs: tuple[Any, ...], device: Any
) -> tuple[int, ...]:
    """How many angles an attention takes: at most two numbers, the largest first."""
    numbers = {value for value in vars(module).values() if type(value) is int and value < head}
    sizes = {head, head // 2, head // 4 * 2, *numbers}
    sizes = {size // 2 for size in sizes} if tables == _COMPLEX else sizes
    widths: list[int] = []
    for width in sorted((size for size in sizes if size > 1), reverse=True):  # one serves all pairs
        try:
            twin = Twin(_RotaryScope(module, (width,), tables), device, torch.float32)
            probe.run(twin.module, inputs, torch.float32)
        except Exception as error:
            probe.read_refusal(error)
            continue
        widths.append(width)
        if len(widths) == 2:
            break
    return tuple(widths)


def _keeps_dtype(forward: Any) -> bool:
    """Whether the function of a forward's file returns 16 bits where the angles have 32."""
    x, angles = torch.ones(1, 1, 1, 8, dtype=torch.bfloat16), torch.ones(1, 1, 8)
    rotate = unwrap(forward).__globals__.get(_ROTATES)
    if rotate is None:
        return False
    try:
        result = rotate(x, x, angles, angles)[0]
    except Exception as error:
        probe.read_refusal(error)
        return False
    return isinstance(result, torch.Tensor) and result.dtype == torch.bfloat16


def _why_not_rotates(function: Any, takes: int) -> str | None:
    """Why a function of a forward's file may compute something else on other calls, or None."""
    function = _open(function)
    parameters = {} if unwrap(function) is None else inspect.signature(function).parameters
    # What calls choose: this argument, and those that `**keywords` take, of whatever name.
    chosen = {"unsqueeze_dim": Kind.SIZE} if "unsqueeze_dim" in parameters else {}
    if any(each.kind == each.VAR_KEYWORD for each in parameters.values()):
        chosen["any other"] = Kind.TENSOR
    reason = why_not_straight(function, takes, compared=True, named=chosen)
    return reason and reason.replace("its forward", getattr(function, "__name__", "its rotation"))


def _open(function: Any) -> Any:
    """The function that `kernels` made a module of, unless `kernelize` gave it another forward."""
    if isinstance(function, torch.nn.Module):
        forward = type(function).forward
        if inspect.ismethod(function.forward) and function.forward.__func__ is forward:
            return inspect.getclosurevars(forward).nonlocals.get("func", function)
    return function


def rotates(forward: Any) -> bool:
    """Whether a forward reads the name of a function that rotates."""
    return reads(forward, _ROTATES) or reads(forward, _ROTATES_COMPLEX)


def find_rotary(module: torch.nn.Module, view: View) -> Iterator[Proposal | Skipped]:
    """An attention of transformers whose code rotates queries and keys by a function's name."""
    forward = forward_of(module)
    names = [name for name in (_ROTATES, _ROTATES_COMPLEX) if reads(forward, name)]
    if not names:
        return
    what, function = type(module).__name__, names[0]
    reason = why_not_change(module) or why_not_copy(module)
    reason = reason or why_not(lambda: rewrite(forward, function, "_"))
    reason = reason or _why_not_rotates(unwrap(forward).__globals__[function], _TAKES[function])
    head = next((n for n in _WIDTHS if isinstance(getattr(module, n, None), int)), None)
    hidden = next((p.shape[-1] for p in module.parameters() if p.ndim == 2), None)
    if reason is None and not (head and hidden):
        reason = "it rotates, but no head_dim says how wide a head is"
    if reason is not None:
        yield Skipped(module, what, reason)
        return
    width: Any = getattr(module, str(head))
    device = view.device(module)
    x, cos = (probe.values((2, 5, size), device) for size in (hidden, width))  # type: ignore[arg-type]
    # Equal ones would turn all tokens by the same angle, and attention sees only differences.
    inputs = (x, cos, cos.flip(-1))
    widths, tables = (), ""
    for tables in (_COMPLEX,) if function == _ROTATES_COMPLEX else (_BATCHED, _LAST):
        widths = view.ask_once(
            f"angles {tables}",
            module,
            lambda: _list_widths(module, width, tables, inputs, device),  # noqa: B023
            numbered=False,
        )
        if widths:
            break
    if not widths:
        yield Skipped(module, what, "it did not run with angles that fuse() knows")
        return
    takes_norms = why_not(lambda: rewrite(forward, function, "_", _NORMS)) is None
    norms = [getattr(module, name, None) for name in _NORMS if takes_norms]
    is_complex = tables == _COMPLEX
    attends = is_slow_attention(module)
    forms = itertools.product(_FORMS[-1:], (1, 2)) if is_complex else ((f, 1) for f in _FORMS)
    for (angles, interleaved), at in forms:
        for norm in _list_norms(norms, view):
            becomes = "rotary_embedding_qk" + (", q and k norm" if norm else "")
            becomes += f"; {ATTENTION}" if attends else ""
            settings = {
                "norm": norm,
                "function": function,
                "angles": angles,
                "tables": tables,
                "heads_at": at,
                "interleaved": interleaved,
                "partial": len(widths) > 1,
                "keeps_dtype": is_complex or _keeps_dtype(forward),
                "attends": attends,
                "inner": tuple(_NORMS) if norm else (),
            }
            scope = _RotaryScope(module, widths, tables, function, bool(norm))
            inner = tuple(part for part in norms if norm and isinstance(part, torch.nn.Module))
            yield propose(
                module, RotaryAttention, becomes, settings, scope, inner=inner, inputs=inputs
            )


def _list_norms(norms: list[Any], view: View) -> Iterator[tuple[tuple[str, Any], ...]]:
    """The settings of norms that a rotation may take along, then none."""
    modules = [n for n in norms if isinstance(n, torch.nn.Module) and not isinstance(n, Weld)]
    if norms and len(modules) == len(norms):
        of_q, of_k = (list(_list_settings(norm, view)) for norm in norms)
        yield from (settings for settings in of_q if settings in of_k)
    yield ()


def _list_settings(norm: torch.nn.Module, view: View) -> Iterator[tuple[tuple[str, Any], ...]]:
    """The possible settings of a norm with a weight and without a mean or a bias."""
    for entry in find_norm(norm, view):
        settings = {} if isinstance(entry, Skipped) else entry.changes[0].settings
        if (
            settings.get("centered") is False
            and settings["weight_name"] is not None
            and settings.get("bias_name") is None
            and not settings["gate"]
        ):
            yield tuple(sorted(settings.items()))
