"""The contenders: eager, torchweld's backends, torch.compile, and installed peers."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from torchweld.bench.cases import CASES
from torchweld.bench.measure import attention
from torchweld.dispatch.call import call
from torchweld.registry import EAGER, Op

COMPILE = "compile"


@dataclass(frozen=True)
class Contender:
    """A function of the op's arguments, and the torchweld backend that it uses, if any."""

    name: str
    function: Callable[..., Any]
    backend: str | None = None
    judged: bool = True  # False if it drops different elements than the reference


@dataclass(frozen=True)
class Peer:
    """A package with some of the ops, and adapters that call its functions with our arguments."""

    package: str
    module: str
    functions: dict[str, Callable[[Any], Callable[..., Any]]]
    devices: Sequence[str] = ("cuda",)
    drops: bool = True  # whether it has dropout
    judged: bool = True  # whether its results should equal the reference's

    def why_missing(self) -> str | None:
        """Why the peer cannot take part, or None."""
        if importlib.util.find_spec(self.module.partition(".")[0]) is None:
            return f"not installed: pip install {self.package}"
        return None


# torch's kernels for dense attention. Its "math" kernel is eager torch.
_DENSE = {
    "sdpa_flash": "FLASH_ATTENTION",
    "sdpa_efficient": "EFFICIENT_ATTENTION",
    "sdpa_cudnn": "CUDNN_ATTENTION",
}
# The names of torch's dense attention, with its own choice of a kernel first.
DENSE = ("sdpa", *_DENSE)
# The peers' norms run only on GPUs, and FlexAttention's backward pass too.
PEERS = {
    "sdpa": Peer(
        "torch",
        "torch.nn.functional",
        {"block_sparse_attention": attention.dense},
        devices=("cpu", "cuda"),
        judged=False,
    ),
    **{
        name: Peer(
            "torch",
            "torch.nn.attention",
            {"block_sparse_attention": attention.dense_by(backend)},
            judged=False,
        )
        for name, backend in _DENSE.items()
    },
    "flex": Peer(
        "torch",
        "torch.nn.attention.flex_attention",
        {"block_sparse_attention": attention.flex},
        drops=False,
    ),
    # The floor of a GEMM with an epilogue.
    "gemm": Peer(
        "torch",
        "torch.nn.functional",
        {"linear_act": lambda m: lambda x, weight, bias, *_: m.linear(x, weight, bias)},
        devices=("cpu", "cuda"),
        judged=False,
    ),
    "liger": Peer(
        "liger-kernel",
        "liger_kernel.transformers.functional",
        {
            "layer_norm": lambda m: lambda x, shape, w, b, eps: m.liger_layer_norm(x, w, b, eps),
            # in_place would overwrite the gradient that all contenders share.
            "rms_norm": lambda m: (
                lambda x, shape, w, eps: m.liger_rms_norm(x, w, eps, in_place=False)
            ),
        },
    ),
    "apex": Peer(
        "apex",
        "apex.normalization.fused_layer_norm",
        {
            "layer_norm": lambda m: (
                lambda x, shape, w, b, eps: m.fused_layer_norm_affine(x, w, b, shape, eps)
            ),
            "rms_norm": lambda m: (
                lambda x, shape, w, eps: m.fused_rms_norm_affine(x, w, shape, eps)
            ),
        },
    ),
}


def rivals(device: str) -> list[str]:
    """The default contenders: torch.compile and the installed peers."""
    installed = [
        name
        for name, peer in PEERS.items()
        if device in peer.devices and peer.why_missing() is None
    ]
    return [COMPILE, *installed]


def contenders(
    op: Op, inputs: Sequence[Any], backends: Sequence[str], rivals: Sequence[str]
) -> tuple[list[Contender], dict[str, str]]:
    """Eager and the requested contenders that can take part, and why the others cannot."""
    plain = CASES[op.name].plain or op.reference
    judged = CASES[op.name].plain is None or not op.draws(inputs)
    contenders = [Contender(EAGER, plain, judged=judged)]
    absent: dict[str, str] = {}
    for backend in [b for b in op.sources if b in backends]:
        if reason := op.why_not(backend, inputs):
            absent[backend] = reason
        else:
            contenders.append(Contender(backend, partial(call, op), backend))
    for name in rivals:
        if name == COMPILE:
            torch.compiler.reset()  # compile each shape from scratch, as if it came first
            contenders.append(Contender(name, torch.compile(plain), judged=judged))
        elif name not in PEERS:
            continue  # a peer of the optimizers
        elif reason := PEERS[name].why_missing():
            absent[name] = reason
        elif op.name not in PEERS[name].functions:
            absent[name] = f"it has no {op.name}"
        elif inputs[0].device.type not in PEERS[name].devices:
            absent[name] = "it runs only on GPUs"
        elif op.draws(inputs) and not PEERS[name].drops:
            absent[name] = "it has no dropout"
        else:
            module = importlib.import_module(PEERS[name].module)
            function = PEERS[name].functions[op.name](module)
            contenders.append(Contender(name, function, judged=PEERS[name].judged))
    return contenders, absent
