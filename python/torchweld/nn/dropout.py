"""Modules of ops with dropout; in eval() they drop nothing."""

import numbers
from collections.abc import Sequence

import torch

from torchweld import checks, functional


class SoftmaxDropout(torch.nn.Module):
    """Attention probabilities from scores: scale, mask, softmax and dropout in one pass.

    Args:
        p: probability that an element is dropped while training.
        scale: multiplies the scores, 1 / sqrt(head size) in attention.
        causal: the last query sees every key, and each earlier query sees one key fewer.
    """

    def __init__(self, p: float = 0.0, scale: float = 1.0, causal: bool = False) -> None:
        super().__init__()
        checks.probability("SoftmaxDropout", p)
        checks.factor("SoftmaxDropout", "scale", scale)
        self.p, self.scale, self.causal = p, scale, causal

    def forward(self, input: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        return functional.softmax_dropout(
            input,
            mask,
            scale=self.scale,
            causal=self.causal,
            p=self.p,
            training=self.training,
        )

    def extra_repr(self) -> str:
        return f"p={self.p}, scale={self.scale}, causal={self.causal}"


class BiasDropoutAdd(torch.nn.Module):
    """residual + dropout(input + bias, p); the bias, owned by the previous layer, is an argument.

    Args:
        p: probability that an element is dropped while training.
    """

    def __init__(self, p: float = 0.0) -> None:
        super().__init__()
        checks.probability("BiasDropoutAdd", p)
        self.p = p

    def forward(
        self, input: torch.Tensor, bias: torch.Tensor | None, residual: torch.Tensor
    ) -> torch.Tensor:
        return functional.bias_dropout_add(input, bias, residual, p=self.p, training=self.training)

    def extra_repr(self) -> str:
        return f"p={self.p}"


class _DropoutAddNorm(torch.nn.Module):
    # Names of the function, which torch.fx finds by its name, and of the parameters.
    _function: str
    _names: tuple[str, ...]

    def __init__(
        self,
        normalized_shape: int | Sequence[int],
        p: float,
        eps: float | None,
        return_residual: bool,
        y_dtype: torch.dtype | None,
    ) -> None:
        super().__init__()
        checks.probability(type(self).__name__, p)
        checks.epsilon(type(self).__name__, 0.0 if eps is None else eps)
        integers = (int, numbers.Integral)  # the latter for NumPy
        sizes = (normalized_shape,) if isinstance(normalized_shape, integers) else normalized_shape
        for size in sizes if isinstance(sizes, Sequence) else [sizes]:
            checks.count(type(self).__name__, "normalized_shape", size)
        self.normalized_shape = tuple([int(size) for size in sizes])
        self.eps = eps
        self.p, self.return_residual, self.y_dtype = p, return_residual, y_dtype

    def _learn(
        self, name: str, wanted: bool, device: torch.device | str | None, dtype: torch.dtype | None
    ) -> None:
        value = torch.empty(self.normalized_shape, device=device, dtype=dtype) if wanted else None
        self.register_parameter(name, None if value is None else torch.nn.Parameter(value))

    def reset_parameters(self) -> None:
        """Weights of one, biases of zero."""
        for name, parameter in self.named_parameters():
            torch.nn.init.constant_(parameter, 1.0 if name == "weight" else 0.0)

    def forward(
        self, input: torch.Tensor, residual: torch.Tensor | None = None
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        y, z = getattr(functional, self._function)(
            input,
            residual,
            *[getattr(self, name) for name in self._names],
            p=self.p,
            eps=self.eps,
            training=self.training,
            return_residual=True,
            normalized_shape=self.normalized_shape,
            y_dtype=self.y_dtype,
        )
        return (y, z) if self.return_residual else y

    def extra_repr(self) -> str:
        return (
            f"{self.normalized_shape}, p={self.p}, eps={self.eps}, "
            f"return_residual={self.return_residual}"
        )


class DropoutAddLayerNorm(_DropoutAddNorm):
    """layer_norm(dropout(input, p) + residual), with the parameters of torch.nn.LayerNorm.

    A block that normalises after the residual connection takes only the result:

        x = norm(attention(x), x)

    A block that normalises before it leaves its final addition to the first norm of the next
    layer. With return_residual=True the norm also returns the residual stream:

        x, stream = norm(attention(x), stream)

    The arguments of torch.nn.LayerNorm come first and in its order; ours are keyword-only.

    Args:
        normalized_shape: the last dimensions, which are normalised.
        eps: added to the variance.
        elementwise_affine: False: neither weight nor bias.
        bias: False: no bias.
        device, dtype: of the parameters.
        p: probability that an element of the input is dropped while training.
        return_residual: return (y, dropout(input, p) + residual).
        y_dtype: dtype of y; None: as in torch.nn.LayerNorm, so under autocast float32 on CUDA or
            with a float32 residual. If y only goes to linear layers, as in pre-norm blocks, the
            input's dtype is as good.
    """

    weight: torch.nn.Parameter | None
    bias: torch.nn.Parameter | None
    eps: float
    _function, _names = "dropout_add_layer_norm", ("weight", "bias")

    def __init__(
        self,
        normalized_shape: int | Sequence[int],
        eps: float = 1e-5,
        elementwise_affine: bool = True,
        bias: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        p: float = 0.0,
        return_residual: bool = False,
        y_dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(normalized_shape, p, eps, return_residual, y_dtype)
        self._learn("weight", elementwise_affine, device, dtype)
        self._learn("bias", elementwise_affine and bias, device, dtype)
        self.reset_parameters()


class DropoutAddRMSNorm(_DropoutAddNorm):
    """rms_norm(dropout(input, p) + residual), with the parameter of torch.nn.RMSNorm.

    Used like DropoutAddLayerNorm; eps=None is the machine epsilon, as in torch.
    """

    weight: torch.nn.Parameter | None
    eps: float | None
    _function, _names = "dropout_add_rms_norm", ("weight",)

    def __init__(
        self,
        normalized_shape: int | Sequence[int],
        eps: float | None = None,
        elementwise_affine: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        p: float = 0.0,
        return_residual: bool = False,
        y_dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(normalized_shape, p, eps, return_residual, y_dtype)
        self._learn("weight", elementwise_affine, device, dtype)
        self.reset_parameters()
