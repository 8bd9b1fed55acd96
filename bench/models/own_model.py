"""`torchweld bench --model pkg.module:build`: times a model eager, compiled and fused."""

from __future__ import annotations

import copy
import importlib
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves, tree_map

import torchweld
from torchweld import optim
from torchweld.bench.measure.contenders import COMPILE
from torchweld.bench.measure.machine import Refusal
from torchweld.bench.models import training
from torchweld.bench.models.training import Learner

LEARNING_RATE = 1e-4
SECONDS = 12.0  # of steps
EAGER, EIGHT_BIT = "eager", "fused, 8-bit AdamW"
Built = tuple[nn.Module, Any]


def built(name: str) -> Built:
    """Import and call `pkg.module:build`, which returns a model and a batch of its arguments."""
    module, colon, function = name.partition(":")
    if not colon:
        raise Refusal(f"--model: {name!r} is not of the form pkg.module:build")
    sys.path.insert(0, os.getcwd())  # the user's module is here
    try:
        pair = getattr(importlib.import_module(module), function)()
    except (ImportError, AttributeError) as error:
        raise Refusal(f"--model: {name}: {error}") from error
    finally:
        sys.path.remove(os.getcwd())
    if not (isinstance(pair, tuple) and len(pair) == 2 and isinstance(pair[0], nn.Module)):
        kind = type(pair).__name__
        raise Refusal(
            f"--model: {name}() returned a {kind}, not a model and a batch of its arguments"
        )
    return pair


CONTENDERS = (EAGER, COMPILE, "fused", EIGHT_BIT)


def chosen(against: Sequence[str] | None) -> list[str]:
    """The contenders that --vs names, or all for None."""
    return [c for c in CONTENDERS if against is None or c != COMPILE or c in against]


def measure(
    model: nn.Module, batch: Any, device: str, contenders: Sequence[str] = CONTENDERS
) -> list[dict[str, Any]]:
    """Print what fuse() changes and every contender's times, and return the times."""
    model, batch = model.to(device).train(), _move(batch, device)
    fused = copy.deepcopy(model)
    torchweld.fuse(fused)
    print(_call(lambda *x, **named: torchweld.explain_fusion(fused, *x, **named), batch))
    ways: dict[str, Callable[[], nn.Module]] = {
        EAGER: lambda: model,
        COMPILE: lambda: training.compiled(copy.deepcopy(model)),
        "fused": lambda: fused,
        EIGHT_BIT: lambda: torchweld.fuse(copy.deepcopy(model)),
    }
    learners = [_learner(way, ways[way](), batch) for way in ways if way in contenders]
    rows = training.measure(learners, seconds=SECONDS / len(learners), at_least=5)
    print()
    training.table(rows).show()
    return rows


def _learner(name: str, model: nn.Module, batch: Any) -> Learner:
    trained = [p for p in model.parameters() if p.requires_grad]
    if name == EIGHT_BIT:
        optimizer: torch.optim.Optimizer = optim.AdamW8bit(trained, LEARNING_RATE)
    elif name == "fused":
        optimizer = optim.AdamW(trained, LEARNING_RATE)
    else:
        optimizer = torch.optim.AdamW(trained, LEARNING_RATE, fused=True)
    return Learner(name, model, optimizer, lambda model, _: _loss(model, batch))


def _call(function: Callable[..., Any], batch: Any) -> Any:
    if isinstance(batch, Mapping):
        return function(**batch)
    return function(batch) if isinstance(batch, torch.Tensor) else function(*batch)


def _loss(model: nn.Module, batch: Any) -> torch.Tensor:
    """The model's own loss, if it returns one; else the mean square of its results."""
    result = _call(model, batch)
    loss = getattr(result, "loss", None)
    if loss is None and isinstance(result, torch.Tensor) and result.ndim == 0:
        loss = result
    if loss is not None:
        return loss
    tensors = [v for v in tree_leaves(result) if isinstance(v, torch.Tensor)]
    return torch.stack([t.float().square().mean() for t in tensors if t.requires_grad]).sum()


def _move(batch: Any, device: str) -> Any:
    return tree_map(lambda v: v.to(device) if isinstance(v, torch.Tensor) else v, batch)
