"""8-bit optimizers under bitsandbytes' names, with its arguments."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch.optim.optimizer import ParamsT
from typing_extensions import Unpack

from torchweld import checks
from torchweld.errors import ArgumentError
from torchweld.optim._base import FusedOptimizer
from torchweld.optim._codecs import EIGHT_BIT
from torchweld.optim._options import CautiousOptions, OwnOptions, takes
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
    """Checks bitsandbytes' arguments, and has 8-bit states."""

    _accepts: ClassVar[dict[str, Any]] = _ONLY

    def __init__(self, params: Any, *, min_8bit_size: int, **arguments: Any) -> None:
        for name, only in self._accepts.items():
            if (value := arguments.pop(name)) != only:
                raise ArgumentError(type(self).__name__, name, repr(value), repr(only))
        checks.count(type(self).__name__, "min_8bit_size", min_8bit_size)
        if arguments.get("min_quantized_size") is None:
            arguments["min_quantized_size"] = min_8bit_size
        super().__init__(params, state_dtype=EIGHT_BIT, **arguments)

    @classmethod
    def _find_kind(cls) -> type:
        return cls.__mro__[cls.__mro__.index(_EightBit) + 1]


class Adam8bit(_EightBit, Adam):
    """Adam with 8-bit states; takes bitsandbytes.optim.Adam8bit's arguments, and Adam's."""

    @takes(CautiousOptions, without="state_dtype")
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
        decoupled_weight_decay: bool = False,
        **options: Unpack[CautiousOptions],
    ) -> None:
        """As in bitsandbytes."""


class AdamW8bit(_EightBit, AdamW):
    """AdamW with 8-bit states; takes bitsandbytes.optim.AdamW8bit's arguments, and AdamW's."""

    @takes(CautiousOptions, without="state_dtype")
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
        **options: Unpack[CautiousOptions],
    ) -> None:
        """As in bitsandbytes."""


class LAMB8bit(_EightBit, LAMB):
    """LAMB with 8-bit states; takes bitsandbytes.optim.LAMB8bit's arguments by name, and LAMB's.

    max_unorm must be its default, 1: a tensor's step is at most lr times as long as the tensor, as
    in LAMB without a trust_clip.
    """

    _accepts: ClassVar[dict[str, Any]] = _ONLY | {
        "amsgrad": False,
        "adam_w_mode": True,
        "max_unorm": 1.0,
    }

    @takes(OwnOptions, without="state_dtype")
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
        **options: Unpack[OwnOptions],
    ) -> None:
        """As in bitsandbytes."""


class Lion8bit(_EightBit, Lion):
    """Lion with 8-bit states; takes bitsandbytes.optim.Lion8bit's arguments, and Lion's."""

    @takes(CautiousOptions, without="state_dtype")
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
        **options: Unpack[CautiousOptions],
    ) -> None:
        """As in bitsandbytes."""
