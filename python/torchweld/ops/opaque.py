"""Ops whose implementation branches on numbers in their tensors, so that graphs hold them whole."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from torchweld import state
from torchweld.dispatch.library import LIBRARY


def define_opaque(
    name: str, schema: str, run: Callable[..., Any], fake: Callable[..., Any]
) -> Callable[..., Any]:
    """Define `torchweld::name`, whose implementation branches on numbers in its tensors.

    Calls whose numbers Python may read run it directly; graphs hold the op.
    """
    LIBRARY.define(f"{name}{schema}")
    torch.library.register_fake(f"torchweld::{name}", fake, lib=LIBRARY)
    LIBRARY.impl(name, run, "CompositeExplicitAutograd")
    op = getattr(torch.ops.torchweld, name).default

    def call(*inputs: Any) -> Any:
        tensors = [value for value in inputs if isinstance(value, torch.Tensor)]
        return run(*inputs) if state.can_read(*tensors) else op(*inputs)

    return call
