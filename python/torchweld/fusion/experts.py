"""Stacked experts of transformers' mixtures: the form of experts_mlp that computes the same.

transformers declares these modules: names of their parameters, how they are laid out, and a forward
by batched products that may stand in the place of the module's own. The form is what that forward
is proven to compute.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch

from torchweld import functional
from torchweld.fusion.graph.alone import STATES, Alone, CannotRecordError, State
from torchweld.fusion.graph.patterns.experts import find_experts
from torchweld.fusion.weld import why_not_change
from torchweld.ops.experts.grouped import Form

_FIRST, _LAST = ("gate_up_proj", "up_proj"), "down_proj"
_DECLARED = ("has_gate", "has_bias", "is_transposed")
# Patterns do not read torch's compound operations, which inference mode records whole. Autocast
# changes batched products and leaves grouped ones.
_STATES = [state for state in STATES if not (state.casts or state.inference)]
# Sizes of a recorded call: tokens, and experts for each.
_TOKENS, _TOP = 5, 2


def run_experts(
    module: Any, form: Form, x: torch.Tensor, indices: torch.Tensor, weights: torch.Tensor
) -> torch.Tensor:
    """The module's result by experts_mlp; its parameters are read at each call."""
    first = _name_first(form.gated)
    rows = functional.experts_mlp(
        *(x, getattr(module, first), module.down_proj, indices, weights),
        gate_up_bias=getattr(module, f"{first}_bias", None),
        down_bias=getattr(module, f"{_LAST}_bias", None),
        **form._asdict(),
    )
    return rows.to(x.dtype)


def _name_first(gated: bool) -> str:
    return _FIRST[0] if gated else _FIRST[1]


def looks_stacked(module: torch.nn.Module) -> bool:
    """Whether a module has what experts have: two or more tensors with a matrix for each."""
    return sum(p.ndim == 3 for p in module.parameters(recurse=False)) >= 2


def find_form(module: Any) -> Form | str:
    """The form of experts_mlp that computes what the module does, or why there is none."""
    parameters = dict(module.named_parameters(recurse=False))
    gated = _FIRST[0] in parameters
    first = _name_first(gated)
    if missing := {first, _LAST} - parameters.keys():
        return f"it has no {' and '.join(sorted(missing))}, where experts_mlp finds the experts"
    names = [first, _LAST, f"{first}_bias", f"{_LAST}_bias"]
    if others := parameters.keys() - {*names}:
        return f"experts_mlp does not take its {' and '.join(sorted(others))}"
    if len({p.shape[0] for p in parameters.values()}) > 1:
        return "its parameters are of different numbers of experts"
    if getattr(module, "has_post_expert_norm", False):
        return "its experts' results pass a norm before they are weighted"
    forward = _find_batched(module)
    if isinstance(forward, str):
        return forward
    width = parameters[first].shape[1 if module.is_transposed else 2]
    forms = {
        _prove(module, forward, [name for name in names if name in parameters], width, state)
        for state in _STATES
    }
    reasons = [form for form in forms if isinstance(form, str)]
    if not reasons and len(forms) > 1:
        return "it computes another thing in another dtype, or without gradients"
    return reasons[0] if reasons else forms.pop()


def _find_batched(module: Any) -> Callable[..., Any] | str:
    """transformers' forward by batched products, if the module leaves the choice to it."""
    if reason := why_not_change(module):
        return reason
    file: Any = sys.modules.get("transformers.integrations.moe")
    own: Any = getattr(type(module), "welded_from", type(module)).forward
    is_chosen = file is not None and getattr(own, "__globals__", None) is vars(file)
    if not is_chosen or not all(hasattr(module, name) for name in _DECLARED):
        return "it leaves no choice of an implementation to transformers"
    return file.batched_mm_experts_forward  # type: ignore[no-any-return]


def _prove(
    module: Any, forward: Callable[..., Any], names: list[str], width: int, state: State
) -> Form | str:
    device = module.down_proj.device
    given = (
        torch.empty(_TOKENS, width, device=device),
        torch.empty(_TOKENS, _TOP, dtype=torch.int64, device=device),
        torch.empty(_TOKENS, _TOP, device=device),
    )
    try:
        alone = Alone(module, forward, given, state)
    except CannotRecordError as error:
        return str(error)
    wanted = [".0", *names[:2], ".1", ".2", *names[2:]]
    for proposal in alone.list_whole(find_experts):
        if [alone.names.get(number) for number in proposal.inputs] == wanted:
            return proposal.constants[0].read_form()  # type: ignore[no-any-return]
    return "its forward computes something else than experts_mlp does in any form"
