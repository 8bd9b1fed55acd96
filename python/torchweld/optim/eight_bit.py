"""8-bit optimizers under bitsandbytes' names, with its arguments."""

from __future__ import annotations

from typing import Any

import torch
from torch.optim.optimizer import ParamsT

from torchweld.errors import ArgumentError
from torchweld.optim._base import FusedOptimizer, collect_arguments
from torchweld.optim._codecs import EIGHT_BIT
from torchweld.optim.adam import Adam, AdamW
from torchweld.optim.lamb import LAMB
from torchweld.optim.lion import Lion

# Arguments of bitsandbytes that have only one accepted value here.
_ONLY: dict[str, Any] = {
    "optim_bits": 32,
    "args": None,
    "percentile_clipping": 100,
    "block_wise": True,
    "is_paged": False,
}


class _EightBit(FusedOptimizer):
    _only = _ONLY

    def __init__(self, **arguments: Any) -> None:
        for name, only in self._only.items():
            value = arguments.pop(name, only)
            if value != only:
                raise ArgumentError(type(self).__name__, name, repr(value), repr(only))
        smallest, asked = arguments.pop("min_8bit_size"), arguments.pop("min_quantized_size")
        arguments["min_quantized_size"] = smallest if asked is None else asked
        super().__init__(**arguments, state_dtype=EIGHT_BIT)


class Adam8bit(_EightBit, Adam):
    """Adam with 8-bit states; takes bitsandbytes.optim.Adam8bit's arguments, and Adam's."""

    def __init__(
        self,
        params: ParamsT,
        lr: float | torch.Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        optim_bits: int = 32,
        args: Any = None,
        min_8bit_size: int = 4096,
        percentile_clipping: int = 100,
        block_wise: bool = True,
        is_paged: bool = False,
        *,
        maximize: bool = False,
        foreach: bool | None = None,
        capturable: bool = False,
        differentiable: bool = False,
        fused: bool | None = None,
        decoupled_weight_decay: bool = False,
        master_weights: bool | str = False,
        min_quantized_size: int | None = None,
        stochastic_rounding: bool = False,
        max_grad_norm: float | None = None,
        ema_decay: float | None = None,
        cautious: bool = False,
        cautious_decay: bool = False,
    ) -> None:
        super().__init__(**collect_arguments(locals()))


class AdamW8bit(_EightBit, AdamW):
    """AdamW with 8-bit states; takes bitsandbytes.optim.AdamW8bit's arguments, and AdamW's."""

    def __init__(
        self,
        params: ParamsT,
        lr: float | torch.Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        amsgrad: bool = False,
        optim_bits: int = 32,
        args: Any = None,
        min_8bit_size: int = 4096,
        percentile_clipping: int = 100,
        block_wise: bool = True,
        is_paged: bool = False,
        *,
        maximize: bool = False,
        foreach: bool | None = None,
        capturable: bool = False,
        differentiable: bool = False,
        fused: bool | None = None,
        master_weights: bool | str = False,
        min_quantized_size: int | None = None,
        stochastic_rounding: bool = False,
        max_grad_norm: float | None = None,
        ema_decay: float | None = None,
        cautious: bool = False,
        cautious_decay: bool = False,
    ) -> None:
        super().__init__(**collect_arguments(locals()))


class LAMB8bit(_EightBit, LAMB):
    """LAMB with 8-bit states; takes bitsandbytes.optim.LAMB8bit's arguments by name, and LAMB's.

    max_unorm must be its default, 1: a tensor's step is at most lr times as long as the tensor, as
    in LAMB without a trust_clip.
    """

    _only = _ONLY | {"amsgrad": False, "adam_w_mode": True, "max_unorm": 1.0}

    def __init__(
        self,
        params: ParamsT,
        lr: float | torch.Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        *,
        bias_correction: bool = True,
        grad_averaging: bool = True,
        trust_clip: tuple[float, float] | None = None,
        always_adapt: bool = True,
        amsgrad: bool = False,
        adam_w_mode: bool = True,
        optim_bits: int = 32,
        args: Any = None,
        min_8bit_size: int = 4096,
        percentile_clipping: int = 100,
        block_wise: bool = True,
        is_paged: bool = False,
        max_unorm: float = 1.0,
        maximize: bool = False,
        foreach: bool | None = None,
        capturable: bool = False,
        differentiable: bool = False,
        fused: bool | None = None,
        master_weights: bool | str = False,
        min_quantized_size: int | None = None,
        stochastic_rounding: bool = False,
        max_grad_norm: float | None = None,
        ema_decay: float | None = None,
    ) -> None:
        super().__init__(**collect_arguments(locals()))


class Lion8bit(_EightBit, Lion):
    """Lion with 8-bit states; takes bitsandbytes.optim.Lion8bit's arguments, and Lion's."""

    def __init__(
        self,
        params: ParamsT,
        lr: float | torch.Tensor = 1e-4,
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0.0,
        optim_bits: int = 32,
        args: Any = None,
        min_8bit_size: int = 4096,
        percentile_clipping: int = 100,
        block_wise: bool = True,
        is_paged: bool = False,
        *,
        maximize: bool = False,
        foreach: bool | None = None,
        capturable: bool = False,
        differentiable: bool = False,
        fused: bool | None = None,
        master_weights: bool | str = False,
        min_quantized_size: int | None = None,
        stochastic_rounding: bool = False,
        max_grad_norm: float | None = None,
        ema_decay: float | None = None,
        cautious: bool = False,
        cautious_decay: bool = False,
    ) -> None:
        super().__init__(**collect_arguments(locals()))
