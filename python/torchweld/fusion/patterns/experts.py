"""Mixture-of-experts modules with stacked weights, such as transformers' experts."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator
from typing import Any

import torch

from torchweld import functional
from torchweld.dispatch.call import choose_automatically
from torchweld.dispatch.dtensor import is_dtensor
from torchweld.fusion import probe
from torchweld.fusion.patterns.activation import in_words
from torchweld.fusion.varies import why_it_varies
from torchweld.fusion.view import View, recognise_activation
from torchweld.fusion.weld import Proposal, Skipped, Tried, propose, read_parameters, why_not_change
from torchweld.ops.experts import mlp
from torchweld.ops.experts.grouped import Form

# Names of the parameters, as transformers has them.
_FIRST, _LAST = ("gate_up_proj", "up_proj"), "down_proj"
# Sizes of the smaller module of a trial: experts, hidden features, width, tokens.
_EXPERTS, _HIDDEN, _WIDTH, _TOKENS = 3, 6, 8, 16
# Other numbers of tokens.
_FEWER, _MORE = 1, 4096
# Inputs of two sizes reach limits. Of many tokens some come so near to one that float32, in which
# some classes compute, has another derivative than float64: gradients of many are of small inputs.
_SIZES, _SMALL = (4.0, 1e6), 0.25
# Candidates compute something else or the same up to a rounding to float32.
_NEAR = 1e-5


def _find_inputs(
    module: Any, form: Form, x: torch.Tensor, indices: torch.Tensor, weights: torch.Tensor
) -> tuple[Any, ...]:
    """The arguments of experts_mlp's op; the module's parameters are read at each call."""
    first = _FIRST[0] if form.gated else _FIRST[1]
    biases = [getattr(module, f"{name}_bias", None) for name in (first, _LAST)]
    return (x, getattr(module, first), module.down_proj, indices, weights, *biases, *form, False)


def run_experts(module: Any, form: Form, *arguments: torch.Tensor) -> torch.Tensor:
    """The module's result by experts_mlp."""
    x, gate_up, down, indices, weights, gate_up_bias, down_bias, *_ = _find_inputs(
        module, form, *arguments
    )
    biases = {"gate_up_bias": gate_up_bias, "down_bias": down_bias}
    return functional.experts_mlp(x, gate_up, down, indices, weights, **biases, **form._asdict())


class Experts(Tried):
    """experts_mlp on the module's parameters.

    On a GPU the class's own forward runs, such as transformers' grouped_mm, if no kernel serves:
    the op's eager form is slower.
    """

    weld_takes = 3
    weld_form: Form

    def weld_run(self, *arguments: torch.Tensor) -> Any:
        x = arguments[0]
        if not (_is_on_cpu(x) or is_dtensor(x)):  # the own forward takes no shards of experts
            inputs = _find_inputs(self, self.weld_form, *arguments)
            if choose_automatically(mlp.OP, inputs) not in mlp.OP.backends:
                return self.welded_from.forward(self, *arguments)
        return run_experts(self, self.weld_form, *arguments)


def _is_on_cpu(x: torch.Tensor) -> bool:
    """Whether a tensor is on the CPU. Tests replace this function."""
    return x.is_cpu


def find_experts(module: torch.nn.Module, view: View) -> Iterator[Proposal | Skipped]:
    """A module of experts, with two or more tensors of a matrix for each.

    Experts that are modules of their own are found as gated MLPs.
    """
    own = [p for p in module.parameters(recurse=False) if p.ndim == 3]
    what = type(module).__name__
    if len(own) < 2 or "expert" not in what.lower():
        return
    found = why_not_change(module) or why_it_varies(module) or find_form(module)
    if isinstance(found, str):
        yield Skipped(module, what, found)
        return
    kind = in_words((found.activation, found.approximate))
    # The activation may be welded, too: the module's own forward calls it, which may serve a GPU.
    settings = {"form": found, "inner": tuple(module._modules)}
    yield propose(module, Experts, f"experts_mlp ({kind})", settings, tried=True)


def find_form(module: Any) -> Form | str:
    """The form of experts_mlp that computes what the module does, or why there is none.

    Forms are tried on a smaller module of the same class, in float64 with gradients.
    """
    parameters = dict(module.named_parameters(recurse=False))
    gated = _FIRST[0] in parameters
    first = _FIRST[0] if gated else _FIRST[1]
    if missing := {first, _LAST} - parameters.keys():
        return f"it has no {' and '.join(sorted(missing))}, where experts_mlp finds the experts"
    others = parameters.keys() - {first, _LAST, f"{first}_bias", f"{_LAST}_bias"}
    if others:
        return f"experts_mlp does not take its {' and '.join(sorted(others))}"
    if len({p.shape[0] for p in parameters.values()}) > 1:
        return "its parameters are of different numbers of experts"
    names, _ = read_parameters(module)
    if len(names) < Experts.weld_takes:
        return "its forward does not take rows, indices and weights"
    if getattr(module, "has_post_expert_norm", False):
        return "its experts' results pass a norm before they are weighted"
    try:
        with probe.isolate({torch.device("cpu")}):
            small = _shrink(module, parameters, first)
            own = functools.partial(_call_own, small)
            expected = _run(own, small, _EXPERTS)
            for form in _list_forms(module, gated):
                function = functools.partial(run_experts, small, form)
                if not _is_near(_run(function, small, _EXPERTS), expected):
                    continue
                if not _keeps_dtype(small, form):
                    return "its result has the dtype of the router's weights"
                if not _takes_others(own, function, small):
                    return _OTHER_TOKENS
                return form if _skips_others(own, function, small) else _OTHER_INDICES
    except Exception as error:
        return f"a smaller copy of it: {probe.read_refusal(error)}"
    return "its forward computes something else than experts_mlp does in any form"


def _list_forms(module: Any, gated: bool) -> Iterator[Form]:
    """Candidates, the usual one first. A limit and an activation may be in a method of its own."""
    act_fn = getattr(module, "act_fn", None)
    kind = recognise_activation([act_fn]) if callable(act_fn) else None
    kinds = [kind] if kind else [("silu", "none"), ("quick_gelu", "none")]
    transposed = bool(getattr(module, "is_transposed", False))
    if not gated:
        yield from (Form(of[0], of[1], False, False, transposed, False, None, 0.0) for of in kinds)
        return
    limits = {getattr(module, name, None) for name in ("limit", "swiglu_limit")} - {None}
    usual = not getattr(module, "is_concatenated", True)
    for of, limit, offset, interleaved, weights_first in itertools.product(
        kinds, (None, *limits), (0.0, 1.0), (usual, not usual), (False, True)
    ):
        yield Form(of[0], of[1], True, interleaved, transposed, weights_first, limit, offset)


# --- The trial ------------------------------------------------------------------------------------


def _shrink(module: Any, parameters: dict[str, torch.Tensor], first: str) -> Any:
    """A shallow copy with few and small experts, of random values."""
    small, generator = _copy(module), torch.Generator().manual_seed(0)
    transposed = getattr(module, "is_transposed", False)
    hidden = parameters[_LAST].shape[1 if transposed else 2]
    wide = 2 if parameters[first].shape[2 if transposed else 1] == 2 * hidden else 1
    sizes = {
        first: ((_WIDTH, wide * _HIDDEN) if transposed else (wide * _HIDDEN, _WIDTH)),
        _LAST: ((_HIDDEN, _WIDTH) if transposed else (_WIDTH, _HIDDEN)),
        f"{first}_bias": (wide * _HIDDEN,),
        f"{_LAST}_bias": (_WIDTH,),
    }
    own = {
        name: torch.nn.Parameter(
            torch.randn(_EXPERTS, *sizes[name], generator=generator, dtype=torch.float64)
        )
        for name in parameters
    }
    attributes = {"_parameters": own, **_NUMBERS}
    attributes |= dict.fromkeys(("hidden_dim", "hidden_size"), _WIDTH)
    for name, value in attributes.items():
        if name in vars(module):
            vars(small)[name] = value
    return small


def _copy(module: Any) -> Any:
    """A shallow copy; copy.copy calls the constructor of a class that FSDP2 made."""
    small = object.__new__(type(module))
    vars(small).update(vars(module))
    return small


_NUMBERS = {
    "num_experts": _EXPERTS,
    **dict.fromkeys(("intermediate_dim", "intermediate_size", "expert_dim"), _HIDDEN),
}


def _call_own(module: Any, *inputs: torch.Tensor) -> Any:
    """The class's own forward, without transformers' choice of an implementation."""
    forward = type(module).forward
    return getattr(forward, "__wrapped__", forward)(module, *inputs)


def _run(function: Any, module: Any, experts: int, tokens: int = _TOKENS) -> list[torch.Tensor]:
    """Results and gradients of all floating inputs, in training and in evaluation."""
    results = []
    many = tokens > _TOKENS
    for training, size in itertools.product((True, False), (_SMALL, *_SIZES) if many else _SIZES):
        vars(module)["training"] = training
        generator = torch.Generator().manual_seed(1)
        x = size * torch.randn(tokens, _WIDTH, generator=generator, dtype=torch.float64)
        weights = torch.rand(tokens, 2, generator=generator, dtype=torch.float64)
        indices = torch.rand(tokens, experts, generator=generator).argsort(-1)[:, :2]
        leaves = [t.requires_grad_() for t in (x, weights)]
        y = function(leaves[0], indices, leaves[1])
        heads = torch.randn(y.shape, generator=generator, dtype=torch.float64).to(y.dtype)
        results.append(y)
        if not many or size == _SMALL:
            results += torch.autograd.grad(y, [*leaves, *module._parameters.values()], heads)
    return results


_OTHER_TOKENS = "it computes something else for other numbers of tokens"


def _takes_others(own: Any, function: Any, module: Any) -> bool:
    """Whether both compute the same of fewer and of more tokens."""
    return all(
        _is_near(*(_run(each, module, _EXPERTS, tokens) for each in (function, own)))
        for tokens in (_FEWER, _MORE)
    )


_OTHER_INDICES = "it does not skip indices from the number of experts on"


def _skips_others(own: Any, function: Any, module: Any) -> bool:
    """Whether the class skips the index after the last expert's, or refuses it."""
    try:
        expected = _run(own, module, _EXPERTS + 1)
    except (RuntimeError, IndexError):
        return True
    return _is_near(_run(function, module, _EXPERTS + 1), expected)


def _is_near(found: list[torch.Tensor], expected: list[torch.Tensor]) -> bool:
    return all(
        a.shape == b.shape and bool((a - b).abs().max() <= _NEAR * b.abs().max())
        for a, b in zip(found, expected, strict=True)
    )


def _keeps_dtype(small: Any, form: Form) -> bool:
    """Whether the result keeps the class's dtype with router weights of another dtype."""
    parameters = {name: p.detach().bfloat16() for name, p in small._parameters.items()}
    narrow = _copy(small)
    vars(narrow)["_parameters"] = parameters
    x, weights = torch.ones(1, _WIDTH).bfloat16(), torch.ones(1, 2)
    indices = torch.tensor([[0, 1]])
    own = _call_own(narrow, x, indices, weights)
    return own.dtype is run_experts(narrow, form, x, indices, weights).dtype  # type: ignore[no-any-return]
