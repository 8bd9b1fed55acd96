"""Which backend serves a call of an op on a GPU: its class, and the sample to check (proof.py)."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from torch._subclasses.fake_tensor import unset_fake_temporarily

from torchweld.dispatch import proof
from torchweld.dispatch.autograd import as_tuple
from torchweld.dispatch.proof import ROWS, Question, Results
from torchweld.dispatch.warm.guards import ALIGNMENT
from torchweld.registry import EAGER, OPS, Composite, Op, materialize
from torchweld.registry.constant import assume_constant_result
from torchweld.state import why_not_now

# The rows of a sample whose op contains GEMMs: a prime, like ROWS.
_ROWS_BEHIND_GEMMS = 251


def choose_on_gpu(op: Op, inputs: Sequence[Any]) -> str:
    """The backend for a call on this GPU; the first call of its class checks the kernels."""
    if why_not_now() is not None:  # tensors of a transform have no address, which a class has
        return EAGER
    backend, _ = proof.pick(class_of(op, inputs), partial(make_question, op, inputs))
    if op.why_refused(backend, inputs) is not None:
        backend = EAGER
    return backend


@assume_constant_result
def choose_while_compiling(name: str, index: int | None, dtype: torch.dtype, direction: str) -> str:
    """The backend for an op in a compiled graph, the same at every size.

    If all stored answers for this op, direction and dtype name a kernel, the graph uses the op's
    preferred one of them; if some name eager, eager. If there are none, the op is tried now on
    random inputs. torch.compile treats the result as a constant.
    """
    device = torch.device("cpu") if index is None else torch.device("cuda", index)
    like = {"op": name, "direction": direction, "dtype": dtype}
    backends = proof.checker_for(device).find_backends(**like)
    if not backends:
        op, train = OPS[name], direction == "full"
        with unset_fake_temporarily(), torch.random.fork_rng(devices=[]):
            inputs = materialize(op.stand_in, dtype, device, requires_grad=train)
            with torch.set_grad_enabled(train):
                backends = {choose_on_gpu(op, inputs)}
    return EAGER if EAGER in backends else min(backends, key=OPS[name].backends.index)


def find_direction(inputs: Sequence[Any]) -> str:
    """The direction of a call with these inputs: "full" if a gradient is needed, else "fwd"."""
    tensors = [value for value in inputs if isinstance(value, torch.Tensor)]
    wanted = torch.is_grad_enabled() and any(t.requires_grad for t in tensors)
    return "full" if wanted else "fwd"


def class_of(op: Op, inputs: Sequence[Any]) -> tuple[Any, ...]:
    """The key of a class of calls: one answer holds for all calls with an equal key."""
    x, train = inputs[0], torch.is_grad_enabled()
    kind = _kind_of(x)
    autocast = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None
    width = x.size(-1) if x.ndim else 1
    alike = [op.name, x.get_device(), autocast, width, train]
    for at in op.tensors_at:
        if (t := inputs[at]) is None:
            alike.append(None)
        else:
            aligned = t.data_ptr() % ALIGNMENT == 0 and t.is_contiguous()
            alike += t.dtype, aligned, train and t.requires_grad
    for at in op.weights_at:
        alike.append(inputs[at].size(0))  # output widths differ between GEMMs of one input width
    for at in op.flags_at:
        alike.append(inputs[at])
    if op.regime is not None:
        alike.append(op.find_regime(inputs))
    return tuple(alike)


def make_question(op: Op, inputs: Sequence[Any]) -> Question:
    """The question for a call with these inputs."""
    _, _, autocast, width, _, *rest = class_of(op, inputs)
    direction, is_composite = find_direction(inputs), isinstance(op, Composite)
    regime = op.find_regime(inputs)
    # The dtype in which autocast computes this op; None if it has no rule for it.
    cast_to = autocast if is_composite or autocast is None else op.autocast.get(_kind_of(inputs[0]))

    @functools.cache
    def draw_sample() -> list[Any]:
        """Take few enough rows for their float64 copies to fit in memory next to the model."""
        rows = _ROWS_BEHIND_GEMMS if is_composite else ROWS
        return [_make_leaf(value, cast_to) for value in op.take_sample(inputs, rows)]

    def run(backend: str) -> Results:
        sample = draw_sample()
        with nullcontext() if op.trial is None else op.trial(regime):
            return _find_results(op, backend, sample, direction)

    def run_exactly() -> Results:
        return _find_results(op, EAGER, [*map(_widen, draw_sample())], direction)

    return Question(
        kind={
            "op": op.name,
            "direction": direction,
            "dtype": inputs[0].dtype,
            "width": width,
            "autocast": autocast,
            "arguments": rest,
        },
        device=inputs[0].device,
        fallback=EAGER,
        candidates=[b for b in op.backends if op.why_not(b, inputs) is None],
        run=run,
        trusted=lambda: run(EAGER),
        exact=run_exactly,
    )


def _kind_of(x: torch.Tensor) -> str:
    return "cuda" if x.is_cuda else x.device.type


def _find_results(op: Op, backend: str, inputs: Sequence[Any], direction: str) -> Results:
    """Results and gradients by name, detached from the user's graph."""
    train = direction == "full"
    with torch.set_grad_enabled(train):
        results = as_tuple(_run(op, backend, inputs))
        by_name = {name: r.detach() for name, r in zip(op.public, results, strict=True)}
        if not train:
            return by_name
        names = op.forward_signature.arguments
        leaves = [name for name, v in zip(names, inputs, strict=True) if _is_leaf(v)]
        flowing = [_draw_gradient(result) for result in results]
        gradients = torch.autograd.grad(results, list(filter(_is_leaf, inputs)), flowing)
    return by_name | {f"grad_{n}": g for n, g in zip(leaves, gradients, strict=True)}


def _run(op: Op, backend: str, inputs: Sequence[Any]) -> Any:
    if backend == EAGER:
        return op.reference(*inputs)
    if isinstance(op, Composite):
        return op.plan(backend, *inputs)(*inputs)
    return op.kernels[backend](*inputs)


def _is_leaf(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.requires_grad


def _draw_gradient(result: torch.Tensor) -> torch.Tensor:
    """Random numbers, the same at every call, that every dtype represents exactly."""
    generator = torch.Generator(result.device).manual_seed(1)
    values = torch.randn(result.shape, generator=generator, device=result.device)
    return values.bfloat16().half().to(result.dtype)


def _make_leaf(value: Any, dtype: torch.dtype | None) -> Any:
    """A leaf with the tensor's values; floating-point tensors are cast to `dtype` if given."""
    if not isinstance(value, torch.Tensor):
        return value
    # Running statistics, which some ops write to, have one dimension.
    leaf = value.detach().clone() if value.ndim <= 1 else value.detach()
    if dtype is not None and value.is_floating_point():
        leaf = leaf.to(dtype)
    return leaf.requires_grad_(value.requires_grad)


def _widen(value: Any) -> Any:
    """A floating-point tensor in float64; any other value unchanged."""
    if not (isinstance(value, torch.Tensor) and value.is_floating_point()):
        return value
    return value.detach().double().requires_grad_(value.requires_grad)
