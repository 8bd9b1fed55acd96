"""Layers in the form that `kernels` accepts: no constructor, only `forward` and two flags.

`kernels` binds such a forward to a module of the model, so that `self` is that module.
"""

from __future__ import annotations

from functools import partial
from types import BuiltinFunctionType, FunctionType
from typing import Any, NamedTuple

import torch

from torchweld import functional, state
from torchweld.fusion.graph.alone import Alone, CannotRecordError
from torchweld.fusion.graph.patterns import rotary


class RMSNorm(torch.nn.Module):
    """x / rms(x), times the weight if there is one."""

    can_torch_compile = has_backward = True

    def forward(self: Any, hidden_states: torch.Tensor) -> torch.Tensor:
        return _normalize(self, hidden_states)


class RMSNormZeroCentered(torch.nn.Module):
    """x / rms(x), times 1 + weight."""

    can_torch_compile = has_backward = True

    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        weight = self.weight if self.weight.dtype == torch.float64 else self.weight.float()
        return functional.rms_norm(x, weight.shape, weight + 1.0, read_epsilon(self))


class RMSNormGated(torch.nn.Module):
    """The norm, times the activation of a gate."""

    can_torch_compile = has_backward = True

    def forward(self: Any, hidden_states: torch.Tensor, gate: Any = None) -> torch.Tensor:
        y = _normalize(self, hidden_states)
        if gate is None:
            return y
        activation: Any = "silu" if self.activation == "swish" else self.activation
        if gate.dtype == y.dtype:
            return functional.gated_act(gate, y, activation=activation)
        wide = torch.promote_types(gate.dtype, y.dtype)
        product = functional.gated_act(gate.to(wide), y.to(wide), activation=activation)
        return product.to(y.dtype)


class LayerNorm(torch.nn.Module):
    """torch.nn.LayerNorm, or a module with its attributes."""

    can_torch_compile = has_backward = True

    def forward(self: Any, input: torch.Tensor) -> torch.Tensor:
        shape = getattr(self, "normalized_shape", None) or self.weight.shape
        bias = getattr(self, "bias", None)
        return functional.layer_norm(input, shape, self.weight, bias, read_epsilon(self))


class SwiGLUMLP(torch.nn.Module):
    """down_proj(silu(gate_proj(x)) * up_proj(x))."""

    can_torch_compile = has_backward = True

    def forward(self: Any, x: torch.Tensor) -> Any:
        gate, up = self.gate_proj(x), self.up_proj(x)
        return self.down_proj(functional.gated_act(gate, up, activation="silu"))


class GeGLUMLP(torch.nn.Module):
    """down_proj(gelu(gate_proj(x)) * up_proj(x)), by tanh unless `act_fn` is by erf."""

    can_torch_compile = has_backward = True

    def forward(self: Any, x: torch.Tensor) -> Any:
        how: Any = "none" if is_by_erf(getattr(self, "act_fn", None)) else "tanh"
        gate, up = self.gate_proj(x), self.up_proj(x)
        return self.down_proj(functional.gated_act(gate, up, activation="gelu", approximate=how))


class LinearAct(torch.nn.Module):
    """A linear layer with its activation, and what follows them in the module."""

    can_torch_compile = has_backward = True

    def forward(self: Any, hidden_states: torch.Tensor) -> Any:
        return run_parts(self, self.torchweld_parts, hidden_states)


class SiLU(torch.nn.Module):
    """x * sigmoid(x)."""

    can_torch_compile = has_backward = True

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return functional.bias_act(input, activation="silu")


class GELU(torch.nn.Module):
    """gelu by erf."""

    can_torch_compile = has_backward = True

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return functional.bias_act(input, activation="gelu")


class GELUTanh(torch.nn.Module):
    """gelu by tanh."""

    can_torch_compile = has_backward = True

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return functional.bias_act(input, activation="gelu", approximate="tanh")


class QuickGELU(torch.nn.Module):
    """x * sigmoid(1.702 x)."""

    can_torch_compile = has_backward = True

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return functional.bias_act(input, activation="quick_gelu")


class RotaryPosEmb(torch.nn.Module):
    """apply_rotary_pos_emb of transformers, with the transpose as its gradient.

    The same name stands for functions that pair columns in two ways, so that each is read once.
    A function that does neither runs itself.
    """

    can_torch_compile = has_backward = True

    def forward(
        self: Any,
        q: torch.Tensor,
        k: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
        unsqueeze_dim: int = 1,
    ) -> Any:
        own, angles = type(self), cos.shape[-1]
        columns = q.shape[-1] if angles == q.shape[-1] else 2 * angles
        form = find_rotary_form(own, angles == columns)
        heads_at = unsqueeze_dim % q.ndim - q.ndim
        if form == "" or columns != q.shape[-1] or heads_at not in (-3, -2) or q.dtype != k.dtype:
            return own.forward(self, q, k, cos, sin, unsqueeze_dim)
        if cos.dtype not in (q.dtype, torch.float32) or q.dtype == torch.float64:
            cos, sin = cos.to(q.dtype), sin.to(q.dtype)
        return functional.rotary_embedding_qk(
            q,
            k,
            cos.unsqueeze(unsqueeze_dim),
            sin.unsqueeze(unsqueeze_dim),
            interleaved=form == "pairs",
            seq_dim=-2 if heads_at == -3 else -3,
        )


class ForCausalLMLoss(torch.nn.Module):
    """The loss of transformers' language models, of their logits."""

    can_torch_compile = has_backward = True

    def forward(
        self,
        logits: torch.Tensor,
        labels: Any,
        vocab_size: int,
        num_items_in_batch: Any = None,
        ignore_index: int = -100,
        shift_labels: Any = None,
        **kwargs: Any,
    ) -> torch.Tensor:
        if shift_labels is None:
            labels = torch.nn.functional.pad(labels, (0, 1), value=ignore_index)
            shift_labels = labels[..., 1:].contiguous()
        wide = logits if logits.dtype == torch.float64 else logits.float()
        loss = functional.cross_entropy(
            wide.view(-1, vocab_size),
            shift_labels.view(-1).to(logits.device),
            ignore_index=ignore_index,
            reduction="mean" if num_items_in_batch is None else "sum",
            inplace=wide is not logits,  # nobody else has the copy
        )
        if isinstance(num_items_in_batch, torch.Tensor):
            num_items_in_batch = num_items_in_batch.to(loss.device)
        return loss if num_items_in_batch is None else loss / num_items_in_batch


# What a layer runs, in words of `explain_fusion`.
for _layer, _becomes in {
    RMSNorm: "rms_norm",
    RMSNormZeroCentered: "rms_norm, weight + 1",
    RMSNormGated: "rms_norm, gated_act",
    LayerNorm: "layer_norm",
    SwiGLUMLP: "gated_act (silu)",
    GeGLUMLP: "gated_act (gelu)",
    LinearAct: "linear_act",
    SiLU: "bias_act (silu)",
    GELU: "bias_act (gelu)",
    GELUTanh: "bias_act (gelu by tanh)",
    QuickGELU: "bias_act (quick_gelu)",
    RotaryPosEmb: "rotary_embedding_qk",
    ForCausalLMLoss: "cross_entropy",
}.items():
    _layer.forward.torchweld_becomes = _becomes  # type: ignore[attr-defined]


def _normalize(module: Any, x: torch.Tensor) -> torch.Tensor:
    weight = getattr(module, "weight", None)
    shape = getattr(module, "normalized_shape", None) or x.shape[-1:]
    return functional.rms_norm(x, shape, weight, read_epsilon(module))


def read_epsilon(module: Any) -> Any:
    return module.variance_epsilon if hasattr(module, "variance_epsilon") else module.eps


def is_by_erf(act_fn: Any) -> bool:
    """Whether a module is torch's GELU by erf, or transformers'."""
    function = getattr(act_fn, "act", None)
    return getattr(act_fn, "approximate", "") == "none" or function is torch.nn.functional.gelu


_PLAIN = (bool, int, float, str, type(None), FunctionType, BuiltinFunctionType)


class PartKind(NamedTuple):
    """What a part was when its layer was named."""

    was: type
    forward: Any
    settings: dict[str, Any]

    @classmethod
    def of(cls, part: Any) -> PartKind:
        own = vars(part).items()
        settings = {n: v for n, v in own if type(v) in _PLAIN and n not in ("training", "forward")}
        return cls(type(part), type(part).forward, settings)


class Parts(NamedTuple):
    """Children of a module: a linear layer, its activation, and what runs after them.

    `torchweld.huggingface.name_layers` leaves it on the module as `torchweld_parts`.
    """

    linear: str
    act: str
    after: tuple[str, ...]
    activation: Any
    approximate: Any
    is_transposed: bool  # the layer's weight, as Conv1D's
    kinds: tuple[PartKind, PartKind]  # of the layer and its activation


def run_parts(module: Any, parts: Parts, x: torch.Tensor) -> Any:
    """Compute the layer and its activation as one, if both are as they were."""
    linear, act = getattr(module, parts.linear), getattr(module, parts.act)
    if all(map(_is_as_named, (linear, act), parts.kinds)):
        weight = linear.weight.mT if parts.is_transposed else linear.weight
        how = {"activation": parts.activation, "approximate": parts.approximate}
        x = functional.linear_act(x, weight, linear.bias, **how)
    else:
        x = act(linear(x))
    for name in parts.after:
        x = getattr(module, name)(x)
    return x


def _is_as_named(part: Any, kind: PartKind) -> bool:
    """Whether a part has no hook, and no forward but its own and ours."""
    forward = vars(part).get("forward")
    is_own = forward is None or hasattr(forward, "torchweld_becomes")
    return is_own and not state.count_hooks(part) and PartKind.of(part) == kind


# How functions pair columns, by their class and whether they take an angle for each column.
_FORMS: dict[tuple[Any, bool], str] = {}


@torch.compiler.assume_constant_result
def find_rotary_form(own: Any, by_column: bool) -> str:
    """How the forward of a class pairs columns: "halves", "pairs", or "" for neither.

    Args:
        own: the class that `kernels` made of a function, whose forward takes no attribute of it.
        by_column: whether cos and sin have an angle for each column, rather than for each pair.
    """
    if (own, by_column) not in _FORMS:
        _FORMS[own, by_column] = _prove_rotation(own, by_column)
    return _FORMS[own, by_column]


def _prove_rotation(own: Any, by_column: bool) -> str:
    sizes = (2, 4, 5, 8), (2, 3, 5, 8), *2 * [(2, 5, 8 if by_column else 4)]
    inputs = [torch.empty(size, device="cpu") for size in sizes]
    try:
        alone = Alone(torch.nn.Module(), lambda _, *given: own.forward(None, *given), inputs)
    except CannotRecordError:  # it takes angles of the other kind, among others
        return ""
    rotate = _rotate_by_column if by_column else _rotate_by_pair
    for form in ("halves", "pairs"):
        if not alone.why_not(partial(_rotate_both, rotate, form == "pairs")):
            return form
    return ""


def _rotate_both(
    rotate: Any, interleaved: bool, _: Any, q: Any, k: Any, cos: Any, sin: Any
) -> tuple[Any, Any]:
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    return rotate(q, cos, sin, interleaved), rotate(k, cos, sin, interleaved)


def _rotate_by_column(x: Any, cos: Any, sin: Any, interleaved: bool) -> Any:
    return rotary.rotate(x, cos, sin, rotary.Form(interleaved))


def _rotate_by_pair(x: Any, cos: Any, sin: Any, interleaved: bool) -> Any:
    first, second = (x[..., ::2], x[..., 1::2]) if interleaved else torch.chunk(x, 2, dim=-1)
    both = first * cos - second * sin, second * cos + first * sin
    return torch.stack(both, dim=-1).flatten(-2) if interleaved else torch.cat(both, dim=-1)
