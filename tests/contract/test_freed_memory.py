"""Tensors whose storage was freed, as FSDP leaves a parameter that it has resharded."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_unflatten

import torchweld
from oracle import is_floating, run
from torchweld import functional
from torchweld.bench.cases import CASES
from torchweld.dispatch import native
from torchweld.dispatch.call import call
from torchweld.dispatch.warm import direct
from torchweld.registry import OPS, materialize

SENTENCE = "data is not allocated"
pytestmark = pytest.mark.skipif("torchweld_cpu" in native.missing, reason=f"{native.missing}")


class _Recording(TorchDispatchMode):
    """Keeps the arguments of the first call of each of our kernels."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: dict[str, tuple[Any, Any]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = str(func)
        if name.startswith("torchweld.") and name.endswith(".cpu") and name not in self.calls:
            leaves, spec = tree_flatten(args)
            kept = [v.detach().clone() if isinstance(v, torch.Tensor) else v for v in leaves]
            self.calls[name] = func, tree_unflatten(kept, spec)
        return func(*args, **(kwargs or {}))


def _record() -> dict[str, tuple[Any, Any]]:
    """The kernels behind every op and some optimizers, with arguments that they accept."""
    recording = _Recording()
    for op in OPS.values():
        if not hasattr(op, "reference") or op.name not in CASES:
            continue
        inputs = materialize(op.sized((3,), (8,)), torch.float32, requires_grad=True)
        with torchweld.use_backend("cpu"), recording:
            run(op, inputs)
            with torch.no_grad():
                call(op, *[v.detach() if is_floating(v) else v for v in inputs])
    logits = torch.randn(300, 400, requires_grad=True)
    with torchweld.use_backend("cpu"), recording:
        functional.cross_entropy(logits, torch.arange(300)).backward()
        functional.cross_entropy(logits, torch.randn(300, 400).softmax(-1)).backward()
        for kind in (torchweld.optim.AdamW, torchweld.optim.Lion, torchweld.optim.Adafactor):
            p = torch.nn.Parameter(torch.randn(64, 64))
            p.grad = torch.randn(64, 64)
            kind([p], lr=1e-3).step()
    return recording.calls


def _free_each(arguments: Any) -> Iterator[Any]:
    """The arguments with one tensor's storage freed, for each tensor that has elements."""
    leaves, spec = tree_flatten(arguments)
    for at, value in enumerate(leaves):
        if isinstance(value, torch.Tensor) and value.numel():
            given = [v.clone() if isinstance(v, torch.Tensor) else v for v in leaves]
            given[at].untyped_storage().resize_(0)
            yield tree_unflatten(given, spec)


def _find_error(function: Callable[..., Any], arguments: Sequence[Any]) -> str:
    try:
        function(*arguments)
    except RuntimeError as error:
        return str(error)
    return "none"


def test_every_kernel_says_so() -> None:
    """By torch's dispatcher, and without it as warm calls do.

    A kernel read the address of such a tensor, and the process ended. No test freed a storage.
    """
    calls = _record()
    names = {name.split(".")[1] for name in calls}
    expected = ("rms_norm_backward", "experts_multiply_", "loss_of_logits", "loss_rows", "adam")
    assert {*expected, "adafactor"} <= names
    for name, (function, arguments) in calls.items():
        ways = [function]
        if direct._load() is not None:
            ways.append(direct.make_direct(function, function))
        for way in ways:
            for freed in _free_each(arguments):
                assert SENTENCE in _find_error(way, freed), name


def test_public_calls() -> None:
    """First calls and warm ones, of an input, a weight and a view with an offset."""
    for freed in (0, 1):
        for _ in range(2):
            x, weight = torch.randn(600, 64)[1:], torch.ones(128)[64:]
            functional.rms_norm(x, [64], weight)
            (x, weight)[freed].untyped_storage().resize_(0)
            with pytest.raises(RuntimeError, match=SENTENCE):
                functional.rms_norm(x, [64], weight)
