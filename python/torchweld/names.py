"""The strings that arguments of public functions accept, as types."""

from typing import Literal

ActivationName = Literal[
    "gelu", "relu", "silu", "quick_gelu", "relu2", "sigmoid", "tanh", "identity"
]
Approximation = Literal["none", "tanh"]
Reduction = Literal["mean", "sum", "none"]
Accumulation = Literal["float32", "parameter", "grad"]
BackendName = Literal["eager", "cpu", "cuda", "triton", "gpu"]
StateName = Literal["8bit"]
