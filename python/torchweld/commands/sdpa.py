"""Which kernel torch's attention (SDPA) picks on this machine, and why it may be slow."""

from __future__ import annotations

from typing import Any

import torch

# The numbers that torch's choice returns.
_NAMES = {0: "math", 1: "flash", 2: "efficient", 3: "cudnn", 4: "overrideable"}
_SLOW = {
    "math": "it keeps all scores, of queries x keys, forward and backward",
    "efficient": "Flash and cuDNN are faster for most shapes",
    "overrideable": "the device's own package decides",
}
_FLAGS = ("flash", "cudnn", "mem_efficient", "math")
_TOKENS = 1024


def list_choices() -> list[tuple[str, str]]:
    """What torch would run for calls that models make, and what is switched off."""
    on_gpu = torch.cuda.is_available()
    device = torch.device("cuda" if on_gpu else "cpu")
    facts = [(name, _describe(_choose(device, **call))) for name, call in _CALLS.items()]
    off = [flag for flag in _FLAGS if not getattr(torch.backends.cuda, f"{flag}_sdp_enabled")()]
    if on_gpu and off:
        facts.append(("switched off", f"{', '.join(off)}: torch.backends.cuda.enable_*_sdp"))
    return facts


# As decoders train; with a mask, as of padding; with a bias that learns; with values of another
# width than keys, as in MLA; and in float32.
_CALLS: dict[str, dict[str, Any]] = {
    "causal": {},
    "with a mask": {"mask": True},
    "learnt bias": {"mask": True, "learns": True},
    "wider keys": {"width": 192},
    "float32": {"dtype": torch.float32},
}


def _choose(
    device: torch.device,
    mask: bool = False,
    learns: bool = False,
    width: int = 128,
    dtype: torch.dtype = torch.bfloat16,
) -> str:
    """The name of the kernel; the tensors are one element each, expanded."""

    def draw(last: int) -> torch.Tensor:
        one = torch.zeros(1, 2, _TOKENS, last, dtype=dtype, device=device)
        return one.requires_grad_()

    bias = None
    if mask:
        bias = torch.zeros(1, 1, _TOKENS, _TOKENS, dtype=dtype, device=device)
        bias.requires_grad_(learns)
    try:
        q, k, v = draw(width), draw(width), draw(128)
        return _NAMES[torch._fused_sdp_choice(q, k, v, bias, 0.0, bias is None)]
    except (RuntimeError, KeyError) as error:
        return f"none: {str(error).splitlines()[0]}"


def _describe(name: str) -> str:
    why = _SLOW.get(name)
    return name if why is None else f"{name}: {why}"
