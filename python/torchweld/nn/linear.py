"""Linear layers with their activation, and the feed-forward blocks made of them."""

import math
from typing import Any

import torch

from torchweld import checks, functional
from torchweld.dispatch.call import run_checkpointed
from torchweld.names import ActivationName, Approximation
from torchweld.ops import activation as activations


class LinearAct(torch.nn.Module):
    """activation(input @ weight.T + bias), with torch.nn.Linear's parameters and state_dict keys.

    It does not derive from torch.nn.Linear: code that replaces or adapts linear layers (LoRA,
    float8) would silently lose the activation.

    Args:
        in_features: last size of the input.
        out_features: last size of the output.
        bias: whether there is one.
        device, dtype: of the parameters.
        activation: "gelu", "relu", "silu" or another of bias_act's.
        approximate: of gelu, as in torch: "none" (by erf, the default) or "tanh".
        recompute: save only the input, and recompute the rest in the backward pass.
    """

    bias: torch.nn.Parameter | None

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        device: Any = None,
        dtype: torch.dtype | None = None,
        *,
        activation: ActivationName = "gelu",
        approximate: Approximation = "none",
        recompute: bool = False,
    ) -> None:
        super().__init__()
        name = type(self).__name__
        activations.check(name, activation, approximate)
        for argument, size in (("in_features", in_features), ("out_features", out_features)):
            checks.count(name, argument, size)
        self.in_features, self.out_features = in_features, out_features
        self.activation, self.approximate, self.recompute = activation, approximate, recompute
        empty = torch.empty((out_features, in_features), device=device, dtype=dtype)
        self.weight = torch.nn.Parameter(empty)
        if bias:
            self.bias = torch.nn.Parameter(torch.empty(out_features, device=device, dtype=dtype))
        else:
            self.register_parameter("bias", None)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Initialise as torch.nn.Linear does."""
        torch.nn.init.kaiming_uniform_(self.weight, a=math.sqrt(5))
        if self.bias is not None:
            bound = 1 / math.sqrt(self.in_features) if self.in_features > 0 else 0
            torch.nn.init.uniform_(self.bias, -bound, bound)

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return functional.linear_act(
            input,
            self.weight,
            self.bias,
            activation=self.activation,
            approximate=self.approximate,
            recompute=self.recompute,
        )

    def extra_repr(self) -> str:
        return (
            f"in_features={self.in_features}, out_features={self.out_features},"
            f" bias={self.bias is not None}, activation={self.activation!r},"
            f" approximate={self.approximate!r}"
        )


class LinearGELU(LinearAct):
    """LinearAct with gelu.

    Args:
        in_features: last size of the input.
        out_features: last size of the output.
        bias: whether there is one.
        device, dtype: of the parameters.
        approximate: as in torch.nn.GELU: "none" (by erf, the default) or "tanh".
        recompute: save only the input, and recompute the rest in the backward pass.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        device: Any = None,
        dtype: torch.dtype | None = None,
        *,
        approximate: Approximation = "none",
        recompute: bool = False,
    ) -> None:
        super().__init__(
            in_features,
            out_features,
            bias,
            approximate=approximate,
            recompute=recompute,
            device=device,
            dtype=dtype,
        )


class _Block(torch.nn.Module):
    """A block that can be recomputed in the backward pass instead of saving intermediates."""

    def __init__(self, recompute: bool) -> None:
        super().__init__()
        self.recompute = recompute

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        if self.recompute and torch.is_grad_enabled():
            return run_checkpointed(self._forward, input)
        return self._forward(input)

    def _forward(self, x: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError


def _check_sizes(module: str, in_features: int, hidden_features: int) -> None:
    checks.count(module, "in_features", in_features)
    checks.count(module, "hidden_features", hidden_features)


class MLP(_Block):
    """fc2(activation(fc1(input))): fc1 is a LinearAct, fc2 a torch.nn.Linear.

    Args:
        in_features: last size of the input.
        hidden_features: last size between the layers.
        out_features: last size of the output; None: in_features.
        bias: whether the layers have one.
        device, dtype: of the parameters.
        activation: "gelu", "relu", "silu" or another of bias_act's.
        approximate: of gelu, as in torch: "none" (by erf, the default) or "tanh".
        recompute: save only the input, and recompute the rest in the backward pass.
    """

    def __init__(
        self,
        in_features: int,
        hidden_features: int,
        out_features: int | None = None,
        bias: bool = True,
        device: Any = None,
        dtype: torch.dtype | None = None,
        *,
        activation: ActivationName = "gelu",
        approximate: Approximation = "none",
        recompute: bool = False,
    ) -> None:
        super().__init__(recompute)
        out_features = in_features if out_features is None else out_features
        _check_sizes("MLP", in_features, hidden_features)
        checks.count("MLP", "out_features", out_features)
        kwargs: dict[str, Any] = {"device": device, "dtype": dtype}
        self.fc1 = LinearAct(
            in_features,
            hidden_features,
            bias,
            activation=activation,
            approximate=approximate,
            **kwargs,
        )
        self.fc2 = torch.nn.Linear(hidden_features, out_features, bias, **kwargs)

    def _forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.fc2(self.fc1(x))


class GatedMLP(_Block):
    """down_proj(activation(gate_proj(input)) * up_proj(input)), with torch.nn.Linear layers.

    It has the state_dict keys of Llama, Mistral, Qwen and Gemma.

    Args:
        in_features: last size of the input and the output.
        hidden_features: last size of gate and up.
        bias: whether the layers have one.
        device, dtype: of the parameters.
        activation: "silu" (SwiGLU), "gelu" (GeGLU), "relu" (ReGLU) or another of bias_act's.
        approximate: of gelu, as in torch: "none" (by erf, the default) or "tanh".
        recompute: save only the input, and recompute the rest in the backward pass.
    """

    def __init__(
        self,
        in_features: int,
        hidden_features: int,
        bias: bool = False,
        device: Any = None,
        dtype: torch.dtype | None = None,
        *,
        activation: ActivationName = "silu",
        approximate: Approximation = "none",
        recompute: bool = False,
    ) -> None:
        super().__init__(recompute)
        _check_sizes("GatedMLP", in_features, hidden_features)
        activations.check("GatedMLP", activation, approximate)
        self.activation, self.approximate = activation, approximate
        kwargs: dict[str, Any] = {"device": device, "dtype": dtype}
        self.gate_proj = torch.nn.Linear(in_features, hidden_features, bias, **kwargs)
        self.up_proj = torch.nn.Linear(in_features, hidden_features, bias, **kwargs)
        self.down_proj = torch.nn.Linear(hidden_features, in_features, bias, **kwargs)

    def _forward(self, x: torch.Tensor) -> torch.Tensor:
        gate, up = self.gate_proj(x), self.up_proj(x)
        return self.down_proj(
            functional.gated_act(gate, up, activation=self.activation, approximate=self.approximate)
        )

    def extra_repr(self) -> str:
        return f"activation={self.activation!r}, approximate={self.approximate!r}"
