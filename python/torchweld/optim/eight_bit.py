"""Optimizers with 8-bit states under bitsandbytes' names, with its arguments."""

from __future__ import annotations

from typing import Any

import torch

from torchweld.errors import ArgumentError
from torchweld.optim._base import FusedOptimizer
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

    def __init__(self, params: Any, *args: Any, min_8bit_size: int = 4096, **kwargs: Any) -> None:
        for name, only in self._only.items():
            value = kwargs.pop(name, only)
            if value != only:
                raise ArgumentError(type(self).__name__, name, repr(value), repr(only))
        kwargs.setdefault("min_quantized_size", min_8bit_size)
        super().__init__(params, *args, state_dtype=EIGHT_BIT, **kwargs)


class Adam8bit(_EightBit, Adam):
    """Adam with 8-bit states; takes bitsandbytes.optim.Adam8bit's arguments, and Adam's."""


class AdamW8bit(_EightBit, AdamW):
    """AdamW with 8-bit states; takes bitsandbytes.optim.AdamW8bit's arguments, and AdamW's."""


class LAMB8bit(_EightBit, LAMB):
    """LAMB with 8-bit states; takes bitsandbytes.optim.LAMB8bit's arguments by name, and LAMB's.

    max_unorm must be its default, 1: a tensor's step is at most lr times as long as the tensor, as
    in LAMB without a trust_clip.
    """

    _only = _ONLY | {"amsgrad": False, "adam_w_mode": True, "max_unorm": 1.0}

    def __init__(
        self,
        params: Any,
        lr: float | torch.Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        *args: Any,
        **kwargs: Any,
    ) -> None:
        super().__init__(params, lr, betas, eps, *args, **kwargs)


class Lion8bit(_EightBit, Lion):
    """Lion with 8-bit states; takes bitsandbytes.optim.Lion8bit's arguments, and Lion's."""
