"""8-bit optimizers under bitsandbytes' names, with its arguments."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch.optim.optimizer import ParamsT
from typing_extensions import Unpack

from torchweld.errors import ArgumentError
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
_LAMBS_ONLY: dict[str, Any] = {"amsgrad": False, "adam_w_mode": True, "max_unorm": 1.0}


def _store_8bit(
    optimizer: Any, options: Mapping[str, Any], min_8bit_size: int, *own: Any, **lambs: Any
) -> dict[str, Any]:
    """The options of 8-bit states, after a check of bitsandbytes' arguments: `own` as in _ONLY."""
    given = dict(zip(_ONLY, own, strict=True)) | lambs
    for name, value in given.items():
        only = (_ONLY | _LAMBS_ONLY)[name]
        if value != only:
            raise ArgumentError(type(optimizer).__name__, name, repr(value), repr(only))
    asked = options.get("min_quantized_size")
    size = min_8bit_size if asked is None else asked
    return {**options, "state_dtype": EIGHT_BIT, "min_quantized_size": size}


class Adam8bit(Adam):
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
        stored = _store_8bit(
            *(self, options, min_8bit_size),
            *(optim_bits, args, percentile_clipping, block_wise, is_paged),
        )
        super().__init__(
            *(params, lr, betas, eps, weight_decay, amsgrad),
            decoupled_weight_decay=decoupled_weight_decay,
            **stored,
        )


class AdamW8bit(AdamW):
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
        stored = _store_8bit(
            *(self, options, min_8bit_size),
            *(optim_bits, args, percentile_clipping, block_wise, is_paged),
        )
        super().__init__(params, lr, betas, eps, weight_decay, amsgrad, **stored)


class LAMB8bit(LAMB):
    """LAMB with 8-bit states; takes bitsandbytes.optim.LAMB8bit's arguments by name, and LAMB's.

    max_unorm must be its default, 1: a tensor's step is at most lr times as long as the tensor, as
    in LAMB without a trust_clip.
    """

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
        stored = _store_8bit(
            *(self, options, min_8bit_size),
            *(optim_bits, args, percentile_clipping, block_wise, is_paged),
            amsgrad=amsgrad,
            adam_w_mode=adam_w_mode,
            max_unorm=max_unorm,
        )
        super().__init__(
            *(params, lr, betas, eps, weight_decay),
            bias_correction=bias_correction,
            grad_averaging=grad_averaging,
            trust_clip=trust_clip,
            always_adapt=always_adapt,
            **stored,
        )


class Lion8bit(Lion):
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
        stored = _store_8bit(
            *(self, options, min_8bit_size),
            *(optim_bits, args, percentile_clipping, block_wise, is_paged),
        )
        super().__init__(params, lr, betas, weight_decay, **stored)
