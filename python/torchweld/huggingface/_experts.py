"""The function that serves `experts_implementation="torchweld"`."""

from __future__ import annotations

from typing import Any

import torch

from torchweld import state
from torchweld.errors import ArgumentError
from torchweld.fusion.experts import find_form, run_experts

NAME = "torchweld"
# The attribute that holds a module's form once it is proven.
_FORM = "torchweld_form"


def experts(
    module: Any, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
) -> torch.Tensor:
    """The experts of a model of transformers by experts_mlp.

    The first call of a module proves its form. A graph that is captured before that has
    transformers' grouped products, which `fuse` welds in it.
    """
    form = vars(module).get(_FORM)
    if form is None:
        if state.is_compiling():
            from transformers.integrations.moe import grouped_mm_experts_forward as run

            return run(module, hidden_states, top_k_index, top_k_weights)  # type: ignore[no-any-return]
        form = _find(module)
    return run_experts(module, form, hidden_states, top_k_index, top_k_weights)


def _find(module: Any) -> Any:
    form = find_form(module)
    if isinstance(form, str):
        accepted = f"another one for {type(module).__name__}: {form}"
        raise ArgumentError("from_pretrained", "experts_implementation", repr(NAME), accepted)
    vars(module)[_FORM] = form
    return form
