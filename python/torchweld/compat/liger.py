"""Liger's classes and functions whose arguments agree; docs/migrating.md lists the others.

Results are new tensors, where Liger's rotation and losses write over their inputs.
"""

from __future__ import annotations

from typing import Any

import torch

from torchweld import functional
from torchweld.errors import ArgumentError
from torchweld.names import Approximation

_LLAMA, _GEMMA = "llama", "gemma"


class LigerRMSNorm(torch.nn.Module):
    """x / rms(x) * (offset + weight), in float32 inside.

    Args:
        hidden_size: the last size of the input.
        eps: added to the mean square.
        offset: 0.0, or 1.0 as Gemma has it.
        casting_mode: "llama" or "gemma": both are computed in float32 and rounded once.
        init_fn: "ones" or "zeros".
        in_place, row_mode: have no effect.
        elementwise_affine: whether there is a weight.
    """

    def __init__(
        self,
        hidden_size: int,
        eps: float = 1e-6,
        offset: float = 0.0,
        casting_mode: str = _LLAMA,
        init_fn: str = "ones",
        in_place: bool = True,
        row_mode: bool | None = None,
        elementwise_affine: bool = True,
    ) -> None:
        super().__init__()
        _check("LigerRMSNorm", "casting_mode", casting_mode, (_LLAMA, _GEMMA))
        _check("LigerRMSNorm", "init_fn", init_fn, ("ones", "zeros"))
        self.variance_epsilon, self.offset = eps, offset
        self.hidden_size, self.casting_mode = hidden_size, casting_mode
        weight = getattr(torch, init_fn)(hidden_size) if elementwise_affine else None
        self.weight = None if weight is None else torch.nn.Parameter(weight)

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return liger_rms_norm(hidden_states, self.weight, self.variance_epsilon, self.offset)

    def extra_repr(self) -> str:
        return f"{self.hidden_size}, eps={self.variance_epsilon}, offset={self.offset}"


class LigerRMSNormForGemma(LigerRMSNorm):
    """LigerRMSNorm with Gemma's defaults."""

    def __init__(
        self,
        hidden_size: int,
        eps: float = 1e-6,
        offset: float = 1.0,
        casting_mode: str = _GEMMA,
        init_fn: str = "zeros",
        in_place: bool = True,
        row_mode: bool | None = None,
    ) -> None:
        super().__init__(hidden_size, eps, offset, casting_mode, init_fn, in_place, row_mode)


class LigerFusedAddRMSNorm(torch.nn.Module):
    """LigerRMSNorm of hidden_states + residual; it returns the norm and the sum.

    Args:
        hidden_size, eps, offset, casting_mode, init_fn, in_place: as of LigerRMSNorm.
    """

    def __init__(
        self,
        hidden_size: int,
        eps: float = 1e-6,
        offset: float = 0.0,
        casting_mode: str = _LLAMA,
        init_fn: str = "ones",
        in_place: bool = False,
    ) -> None:
        super().__init__()
        _check("LigerFusedAddRMSNorm", "casting_mode", casting_mode, (_LLAMA, _GEMMA))
        _check("LigerFusedAddRMSNorm", "init_fn", init_fn, ("ones", "zeros"))
        self.variance_epsilon, self.offset = eps, offset
        self.weight = torch.nn.Parameter(getattr(torch, init_fn)(hidden_size))

    def forward(self, hidden_states: torch.Tensor, residual: torch.Tensor) -> Any:
        given = (hidden_states, residual, self.weight, self.variance_epsilon, self.offset)
        return liger_fused_add_rms_norm(*given)


class LigerLayerNorm(torch.nn.Module):
    """LayerNorm with a weight and a bias; `bias=True` draws its first values, as Liger does.

    Args:
        hidden_size: the last size of the input.
        eps: added to the variance.
        bias: whether the bias begins with normal values, not zeros.
        init_fn: "ones" or "zeros", of the weight.
    """

    def __init__(
        self, hidden_size: int, eps: float = 1e-6, bias: bool = False, init_fn: str = "ones"
    ) -> None:
        super().__init__()
        _check("LigerLayerNorm", "init_fn", init_fn, ("ones", "zeros"))
        self.variance_epsilon, self.hidden_size = eps, hidden_size
        self.weight = torch.nn.Parameter(getattr(torch, init_fn)(hidden_size))
        first = torch.randn(hidden_size) if bias else torch.zeros(hidden_size)
        self.bias = torch.nn.Parameter(first)

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        shape = self.weight.shape
        given = (hidden_states, shape, self.weight, self.bias, self.variance_epsilon)
        return functional.layer_norm(*given)


class _GatedMLP(torch.nn.Module):
    _activation, _approximate = "", "none"

    def __init__(self, config: Any, intermediate_size: int | None = None) -> None:
        super().__init__()
        self.config, self.hidden_size = config, config.hidden_size
        self.intermediate_size = intermediate_size or config.intermediate_size
        sizes = self.hidden_size, self.intermediate_size
        self.gate_proj = torch.nn.Linear(*sizes, bias=False)
        self.up_proj = torch.nn.Linear(*sizes, bias=False)
        self.down_proj = torch.nn.Linear(*sizes[::-1], bias=False)

    def forward(self, x: torch.Tensor) -> Any:
        kind: Any = {"activation": self._activation, "approximate": self._approximate}
        return self.down_proj(functional.gated_act(self.gate_proj(x), self.up_proj(x), **kind))


class LigerSwiGLUMLP(_GatedMLP):
    """down_proj(silu(gate_proj(x)) * up_proj(x)), with the sizes of a config of transformers."""

    _activation = "silu"

    def __init__(self, config: Any, intermediate_size: int | None = None) -> None:
        _check(type(self).__name__, "config.hidden_act", config.hidden_act, ("silu", "swish"))
        super().__init__(config, intermediate_size)


class LigerQwen3MoeSwiGLUMLP(LigerSwiGLUMLP):
    """LigerSwiGLUMLP."""


class LigerMLP(LigerSwiGLUMLP):
    """LigerSwiGLUMLP, of the config's sizes."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)


class LigerPhi3SwiGLUMLP(torch.nn.Module):
    """down_proj(silu(gate) * up), with gate and up the halves of gate_up_proj(x)."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        _check("LigerPhi3SwiGLUMLP", "config.hidden_act", config.hidden_act, ("silu", "swish"))
        self.config, self.hidden_size = config, config.hidden_size
        self.intermediate_size = config.intermediate_size
        sizes = self.hidden_size, self.intermediate_size
        self.gate_up_proj = torch.nn.Linear(sizes[0], 2 * sizes[1], bias=False)
        self.down_proj = torch.nn.Linear(*sizes[::-1], bias=False)

    def forward(self, x: torch.Tensor) -> Any:
        gate, up = self.gate_up_proj(x).chunk(2, dim=-1)
        return self.down_proj(liger_swiglu(gate, up))


class LigerBlockSparseTop2MLP(torch.nn.Module):
    """w2(silu(w1(x)) * w3(x)), an expert of Mixtral."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        name = "LigerBlockSparseTop2MLP"
        _check(name, "config.hidden_act", config.hidden_act, ("silu", "swish"))
        self.ffn_dim, self.hidden_dim = config.intermediate_size, config.hidden_size
        self.w1 = torch.nn.Linear(self.hidden_dim, self.ffn_dim, bias=False)
        self.w2 = torch.nn.Linear(self.ffn_dim, self.hidden_dim, bias=False)
        self.w3 = torch.nn.Linear(self.hidden_dim, self.ffn_dim, bias=False)

    def forward(self, x: torch.Tensor) -> Any:
        return self.w2(liger_swiglu(self.w1(x), self.w3(x)))


class LigerGEGLUMLP(_GatedMLP):
    """down_proj(gelu(gate_proj(x)) * up_proj(x)), with gelu by tanh."""

    _activation, _approximate = "gelu", "tanh"

    def __init__(self, config: Any) -> None:
        super().__init__(config)


class LigerReLUSquared(torch.nn.Module):
    """relu(x)^2."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return liger_relu_squared(x)


class LigerSoftmax(torch.nn.Module):
    """Softmax over the last dimension."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return liger_softmax(x)


class LigerCrossEntropyLoss(torch.nn.Module):
    """Cross entropy of logits; arguments are liger_cross_entropy's."""

    def __init__(
        self,
        weight: torch.Tensor | None = None,
        ignore_index: int = -100,
        lse_square_scale: float = 0.0,
        label_smoothing: float = 0.0,
        reduction: str = "mean",
        softcap: float | None = None,
        **returned: bool,
    ) -> None:
        super().__init__()
        _refuse("LigerCrossEntropyLoss", returned)
        self.weight = weight
        self.how: dict[str, Any] = {"ignore_index": ignore_index, "reduction": reduction}
        self.how |= {"lse_square_scale": lse_square_scale, "softcap": softcap}
        self.how["label_smoothing"] = label_smoothing

    def forward(self, _input: torch.Tensor, target: torch.Tensor) -> Any:
        return liger_cross_entropy(_input, target, self.weight, **self.how)


class LigerFusedLinearCrossEntropyLoss(torch.nn.Module):
    """Cross entropy of a linear layer's logits, which exist only in chunks.

    Arguments are liger_fused_linear_cross_entropy's.
    """

    def __init__(
        self,
        ce_weight: torch.Tensor | None = None,
        ignore_index: int = -100,
        lse_square_scale: float = 0.0,
        label_smoothing: float = 0.0,
        reduction: str = "mean",
        softcap: float | None = None,
        **returned: Any,
    ) -> None:
        super().__init__()
        accum_dtype = returned.pop("accum_dtype", None)
        _refuse("LigerFusedLinearCrossEntropyLoss", returned)
        self.ce_weight = ce_weight
        self.how: dict[str, Any] = {"ignore_index": ignore_index, "softcap": softcap}
        self.how |= {"lse_square_scale": lse_square_scale, "label_smoothing": label_smoothing}
        self.how |= {"reduction": reduction, "accum_dtype": accum_dtype}

    def forward(
        self,
        lin_weight: torch.Tensor,
        _input: torch.Tensor,
        target: torch.Tensor,
        bias: torch.Tensor | None = None,
    ) -> Any:
        given = (_input, lin_weight, target, bias, self.ce_weight)
        return liger_fused_linear_cross_entropy(*given, **self.how)


def liger_rms_norm(
    X: torch.Tensor,  # noqa: N803
    W: torch.Tensor | None,  # noqa: N803
    eps: float,
    offset: float = 0.0,
    casting_mode: str = _LLAMA,
    in_place: bool = True,
) -> torch.Tensor:
    """X / rms(X) * (offset + W); arguments are LigerRMSNorm's."""
    _check("liger_rms_norm", "casting_mode", casting_mode, (_LLAMA, _GEMMA))
    return functional.rms_norm(X, X.shape[-1:], _add_offset(W, offset), eps)


def liger_fused_add_rms_norm(
    X: torch.Tensor,  # noqa: N803
    R: torch.Tensor,  # noqa: N803
    W: torch.Tensor,  # noqa: N803
    eps: float,
    offset: float = 0.0,
    casting_mode: str = _LLAMA,
    in_place: bool = True,
) -> Any:
    """liger_rms_norm(X + R, W, eps, offset), and X + R."""
    _check("liger_fused_add_rms_norm", "casting_mode", casting_mode, (_LLAMA, _GEMMA))
    weight = _add_offset(W, offset)
    return functional.dropout_add_rms_norm(X, R, weight, eps=eps, return_residual=True)


def liger_layer_norm(
    X: torch.Tensor,  # noqa: N803
    W: torch.Tensor,  # noqa: N803
    B: torch.Tensor,  # noqa: N803
    eps: float,
) -> torch.Tensor:
    """torch.nn.functional.layer_norm over the last dimension."""
    return functional.layer_norm(X, W.shape, W, B, eps)


def _add_offset(weight: torch.Tensor | None, offset: float) -> torch.Tensor | None:
    if weight is None or not offset:
        return weight
    return (weight if weight.dtype == torch.float64 else weight.float()) + offset


def liger_relu_squared(x: torch.Tensor) -> torch.Tensor:
    """relu(x)^2."""
    return functional.bias_act(x, activation="relu2")


def liger_softmax(x: torch.Tensor) -> torch.Tensor:
    """Softmax over the last dimension."""
    return functional.softmax_dropout(x)


def liger_swiglu(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """silu(a) * b."""
    return functional.gated_act(a, b, activation="silu")


def liger_geglu(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """gelu(a) * b, by tanh."""
    how: Approximation = "tanh"
    return functional.gated_act(a, b, activation="gelu", approximate=how)


def liger_cross_entropy(
    input: torch.Tensor,
    target: torch.Tensor,
    weight: torch.Tensor | None = None,
    size_average: bool | None = None,
    ignore_index: int = -100,
    reduce: bool | None = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
    lse_square_scale: float = 0.0,
    softcap: float | None = None,
    **returned: bool,
) -> Any:
    """torch.nn.functional.cross_entropy, with lse_square_scale * lse^2 and a soft cap."""
    _refuse("liger_cross_entropy", returned)
    kind: Any = reduction
    return functional.cross_entropy(
        *(input, target, weight, size_average, ignore_index, reduce, kind, label_smoothing),
        z_loss=lse_square_scale,
        softcap=softcap,
    )


def liger_fused_linear_cross_entropy(
    input: torch.Tensor,
    weight: torch.Tensor,
    target: torch.Tensor,
    bias: torch.Tensor | None = None,
    ce_weight: torch.Tensor | None = None,
    ignore_index: int = -100,
    lse_square_scale: float = 0.0,
    label_smoothing: float = 0.0,
    reduction: str = "mean",
    softcap: float | None = None,
    **returned: Any,
) -> Any:
    """liger_cross_entropy(input @ weight.T + bias, target) in chunks.

    `accum_dtype` None and torch.float32 sum the weight's gradient in float32.
    """
    accum_dtype = returned.pop("accum_dtype", None)
    if accum_dtype not in (None, torch.float32):
        accepted = "None or torch.float32"
        name = "liger_fused_linear_cross_entropy"
        raise ArgumentError(name, "accum_dtype", repr(accum_dtype), accepted)
    _refuse("liger_fused_linear_cross_entropy", returned)
    kind: Any = reduction
    return functional.linear_cross_entropy(
        *(input, weight, target),
        linear_bias=bias,
        weight=ce_weight,
        ignore_index=ignore_index,
        z_loss=lse_square_scale,
        label_smoothing=label_smoothing,
        reduction=kind,
        softcap=softcap,
    )


def liger_rotary_pos_emb(
    q: torch.Tensor,
    k: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    position_ids: None = None,
    unsqueeze_dim: int = 1,
    rotary_dim: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Rotate q and k, [batch, heads, tokens, width], by cos and sin, [batch, tokens, angles]."""
    for name, given, accepted in (
        ("position_ids", position_ids, None),
        ("unsqueeze_dim", unsqueeze_dim, 1),
    ):
        if given != accepted:
            raise ArgumentError("liger_rotary_pos_emb", name, repr(given), repr(accepted))
    if rotary_dim is None:  # cos has an angle for each column that is rotated
        rotary_dim = cos.shape[-1]
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    return functional.rotary_embedding_qk(q, k, cos, sin, rotary_dim=rotary_dim)


liger_rope = liger_rotary_pos_emb


def _check(name: str, argument: str, given: str, accepted: tuple[str, ...]) -> None:
    if given not in accepted:
        raise ArgumentError(name, argument, repr(given), " or ".join(map(repr, accepted)))


def _refuse(name: str, returned: dict[str, Any]) -> None:
    """Refuse Liger's further results and what this function does not know."""
    for argument, given in returned.items():
        known = argument.startswith("return_") or argument == "use_token_scaling"
        if not known:
            raise TypeError(f"{name}() got an unexpected keyword argument {argument!r}")
        if given:
            accepted = "False: see torchweld.functional.linear_logprobs and token_weights"
            raise ArgumentError(name, argument, repr(given), accepted)
