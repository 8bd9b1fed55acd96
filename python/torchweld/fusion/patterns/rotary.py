"""Attention whose queries and keys a function of its file rotates, after norms or without."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

from torchweld import functional
from torchweld.dispatch.dtensor import is_dtensor
from torchweld.errors import ArgumentError
from torchweld.fusion import probe
from torchweld.fusion.modules import forward_of, is_welded, why_not_change, why_not_copy
from torchweld.fusion.patterns.norm import RULES, find_norm
from torchweld.fusion.proposals import Left, Proposal
from torchweld.fusion.rewrite import reads, rewrite, unwrap, why_not
from torchweld.fusion.twin import Twin
from torchweld.fusion.view import View
from torchweld.fusion.weld import Change, Weld

_ROTATES = "apply_rotary_pos_emb"
# Norms that the rotation may take along, and the methods that then run in their place.
_NORMS = {"q_norm": "weld_q_norm", "k_norm": "weld_k_norm"}


class RotaryAttention(Weld):
    """An attention whose forward calls `weld_rotate` in place of the function of its file.

    The forward is made anew from its source, in the globals of its file: nothing else in it
    changes. `norm` has the settings of the norms that the rotation takes along. Their modules are
    not called.
    """

    weld_norm: tuple[tuple[str, Any], ...] = ()
    weld_interleaved: bool
    weld_partial: bool
    weld_keeps_dtype: bool
    weld_forward: Callable[..., Any]
    q_norm: torch.nn.Module
    k_norm: torch.nn.Module

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if "welded_from" in vars(cls):
            methods = _NORMS if cls.weld_norm else {}
            cls.weld_forward = rewrite(cls.welded_from.forward, _ROTATES, "weld_rotate", methods)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.weld_forward(*args, **kwargs)

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

    def weld_rotate(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
        unsqueeze_dim: int = 1,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Rotate queries and keys, in the dtypes that the attention's own code gives them."""
        if cos.shape[-1] != q.shape[-1] and not self.weld_partial:
            accepted = (
                f"{q.shape[-1]}, since the attention did not run with fewer when it was fused"
            )
            raise ArgumentError(_ROTATES, "cos", f"of last size {cos.shape[-1]}", accepted)
        norm = dict(self.weld_norm) if self.weld_takes_norms() else {}
        inner: list[Any] = [getattr(self, name) for name in _NORMS] if norm else []
        weights = [getattr(part, norm["weight_name"]) for part in inner]
        # transformers has an angle for each column to rotate.
        options: dict[str, Any] = {"rotary_dim": cos.shape[-1]}
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
        cos, sin = cos.unsqueeze(unsqueeze_dim), sin.unsqueeze(unsqueeze_dim)
        options["interleaved"] = self.weld_interleaved
        return functional.rotary_embedding_qk(q.to(dtype), k.to(dtype), cos, sin, **options)


class _Scope(torch.nn.Module):
    """An attention, called with the arguments that a probe has.

    `partial` also calls it with angles for only some of the columns, as partial rotations have.
    """

    def __init__(self, attention: torch.nn.Module, partial: bool) -> None:
        super().__init__()
        self.attention, self.partial = attention, partial

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> Any:
        some = cos.shape[-1] // 4 * 2
        tables = [(cos, sin), *([(cos[..., :some], sin[..., :some])] if self.partial else [])]
        return [
            self.attention(
                x,
                # Models do not learn angles.
                position_embeddings=tuple(table.detach() for table in pair),
                attention_mask=None,
            )[0]
            for pair in tables
        ]


def _rotates_partly(module: torch.nn.Module, inputs: tuple[Any, ...], device: torch.device) -> bool:
    """Whether an attention runs with angles for only some of the columns."""
    if inputs[1].shape[-1] < 4:
        return False
    try:
        probe.run(Twin(_Scope(module, True), device, torch.float32).module, inputs, torch.float32)
    except Exception as error:
        probe.read_refusal(error)
        return False
    return True


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


def find_rotary(module: torch.nn.Module, view: View) -> Iterator[Proposal | Left]:
    """An attention of transformers whose code rotates queries and keys by a function's name."""
    forward = forward_of(module)
    if is_welded(module) or not reads(forward, _ROTATES):
        return
    what = type(module).__name__
    reason = why_not_change(module) or why_not_copy(module)
    reason = reason or why_not(lambda: rewrite(forward, _ROTATES, "_"))
    width = getattr(module, "head_dim", None)
    hidden = next((p.shape[-1] for p in module.parameters() if p.ndim == 2), None)
    if reason is None and not (isinstance(width, int) and hidden):
        reason = "it has no head_dim, or no projection"
    if reason is not None:
        yield Left(module, what, reason)
        return
    assert isinstance(width, int)
    assert hidden is not None
    device = view.device(module)
    inputs = tuple(probe.values((2, 5, size), device) for size in (hidden, width, width))
    partial = view.ask_once(
        "rotates partly", module, lambda: _rotates_partly(module, inputs, device)
    )
    scope = _Scope(module, partial)
    takes_norms = why_not(lambda: rewrite(forward, _ROTATES, "_", _NORMS)) is None
    norms = [getattr(module, name, None) for name in _NORMS if takes_norms]
    for interleaved in (False, True):
        for norm in _list_norms(norms, view):
            becomes = "rotary_embedding_qk" + (", q and k norm" if norm else "")
            settings = {
                "norm": norm,
                "interleaved": interleaved,
                "partial": partial,
                "keeps_dtype": _keeps_dtype(forward),
                "inner": tuple(_NORMS) if norm else (),
            }
            changes = (Change(module, RotaryAttention, becomes, settings),)
            inner = tuple(part for part in norms if norm and isinstance(part, torch.nn.Module))
            yield Proposal(module, what, changes, scope, inner, inputs=inputs)


def _list_norms(norms: list[Any], view: View) -> Iterator[tuple[tuple[str, Any], ...]]:
    """The settings of norms that a rotation may take along, then none."""
    if norms and all(isinstance(norm, torch.nn.Module) and not is_welded(norm) for norm in norms):
        of_q, of_k = (list(_list_settings(norm, view)) for norm in norms)
        yield from (settings for settings in of_q if settings in of_k)
    yield ()


def _list_settings(norm: torch.nn.Module, view: View) -> Iterator[tuple[tuple[str, Any], ...]]:
    """The possible settings of a norm with a weight and without a mean or a bias."""
    for entry in find_norm(norm, view):
        settings = {} if isinstance(entry, Left) else entry.changes[0].settings
        if settings.get("centered") is False and settings.get("bias_name") is None:
            yield tuple(sorted(settings.items()))
