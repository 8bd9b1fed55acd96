"""The function that serves `experts_implementation="torchweld"`."""

from __future__ import annotations

from typing import Any

import torch

from torchweld.errors import ArgumentError
from torchweld.fusion.patterns.experts import find_form, run_experts

NAME = "torchweld"
# The attribute that holds a module's form once it was tried.
_FORM = "torchweld_form"


def experts(
    module: Any, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
) -> torch.Tensor:
    """The experts of a model of transformers by experts_mlp.

    The first call of a module tries it, which a graph cannot hold: make one before torch.compile.
    """
    form = vars(module).get(_FORM)
    if form is None:
        form = _try(module)
    return run_experts(module, form, hidden_states, top_k_index, top_k_weights)


@torch.compiler.disable
def _try(module: Any) -> Any:
    form = find_form(module)
    if isinstance(form, str):
        accepted = f"another one for {type(module).__name__}: {form}"
        raise ArgumentError("from_pretrained", "experts_implementation", repr(NAME), accepted)
    vars(module)[_FORM] = form
    return form
