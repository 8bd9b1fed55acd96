"""What torch does with results and gradients: changes in place, higher orders, batches, records."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

import selection
import torchweld
from conftest import Target
from torchweld import numerics
from torchweld.bench.cases import CASES
from torchweld.dispatch.autograd import as_tuple
from torchweld.dispatch.call import call
from torchweld.dispatch.warm import cache
from torchweld.ops.gemm import common as layers
from torchweld.registry import OPS, Op, materialize

LARGEST = 4000  # elements of a tensor
Function = Callable[..., tuple[torch.Tensor, ...]]


def _calls(op: Op, step: int = 1, first: int = 0) -> Iterator[tuple[Function, list[torch.Tensor]]]:
    """For small samples, every `step`th, the op as a function of its differentiable tensors."""
    for arguments in CASES[op.name].samples[first::step]:
        inputs = materialize(arguments, torch.float64, requires_grad=True)
        at = [i for i, v in enumerate(inputs) if isinstance(v, torch.Tensor) and v.requires_grad]
        if max(inputs[i].numel() for i in at) > LARGEST:
            continue

        def function(
            *tensors: torch.Tensor, inputs: list[Any] = inputs, at: list[int] = at
        ) -> tuple[torch.Tensor, ...]:
            given = list(inputs)
            for i, tensor in zip(at, tensors, strict=True):
                given[i] = tensor
            return as_tuple(call(op, *given))

        yield function, [inputs[i] for i in at]


def _loss(results: tuple[torch.Tensor, ...]) -> torch.Tensor:
    """A number that depends on every result, and not linearly."""
    return torch.stack([result.sin().sum() for result in results]).sum()


def _gradients(function: Function, tensors: list[torch.Tensor], **how: Any) -> Any:
    return torch.autograd.grad(_loss(function(*tensors)), tensors, **how)


def _second(function: Function, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    first = _gradients(function, tensors, create_graph=True)
    return [
        torch.zeros_like(t) if g is None else g
        for t, g in zip(
            tensors, torch.autograd.grad(_loss(first), tensors, allow_unused=True), strict=True
        )
    ]


def _assert_close(ours: Any, expected: Any) -> None:
    torch.testing.assert_close(ours, expected, **numerics.SECOND64)


@pytest.mark.parametrize("backend", ["cpu", "eager"])
@pytest.mark.targets(composites=True)
def test_second_derivatives_at_every_sample(op: Op, backend: str) -> None:
    """The derivatives of what create_graph=True returns equal the reference's."""
    for function, tensors in _calls(op):
        with torchweld.use_backend("eager"):
            expected = _second(function, tensors)
        with torchweld.use_backend(backend):
            _assert_close(_second(function, tensors), expected)


@pytest.mark.parametrize("backend", ["cpu", "eager"])
@pytest.mark.targets(composites=True)
def test_gradients_in_batches(op: Op, backend: str) -> None:
    """torch.autograd.grad(..., is_grads_batched=True) runs backwards inside vmap."""
    with torchweld.use_backend(backend):
        for function, tensors in _calls(op):
            results = function(*tensors)
            each = [[torch.full_like(r, float(n)) for r in results] for n in (1, 2)]
            expected = [
                torch.autograd.grad(results, tensors, grads, retain_graph=True) for grads in each
            ]
            batches = [torch.stack(grads) for grads in zip(*each, strict=True)]
            found = torch.autograd.grad(results, tensors, batches, is_grads_batched=True)
            _assert_close(found, [torch.stack(grads) for grads in zip(*expected, strict=True)])


@pytest.mark.parametrize("backend", ["cpu", "eager"])
@pytest.mark.targets(composites=True)
def test_make_fx_records_gradients(op: Op, backend: str) -> None:
    with torchweld.use_backend(backend):
        # Each backend has every second one of these samples.
        for function, tensors in _calls(op, 4 if selection.WHOLE else 8, 4 * (backend == "eager")):
            recorded = make_fx(lambda *given: _gradients(function, list(given)))(*tensors)  # noqa: B023
            with torch.no_grad():
                found = recorded(*tensors)
            _assert_close(found, _gradients(function, tensors))


# torch.func.linearize scripts its graph, which torch 2.13 warns of; constant folding warns too.
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore:Attempted to insert a get_attr")
@pytest.mark.targets(composites=True)
def test_linearize(op: Op) -> None:
    """Forward-mode derivatives, recorded: their sum over all directions of ones."""
    # As test_make_fx_records_gradients does with every second one of these samples.
    for function, tensors in _calls(op, *((4, 0) if selection.WHOLE else (8, 4))):
        expected = sum(g.sum() for g in _gradients(function, tensors))
        primals = [t.detach() for t in tensors]
        _, pushed = torch.func.linearize(lambda *given: _loss(function(*given)), *primals)  # noqa: B023
        torch.testing.assert_close(pushed(*map(torch.ones_like, primals)), expected)


# --- Recomputation, under the same ----------------------------------------------------------------

RECOMPUTED = {
    "linear_act": lambda x, w, b: torchweld.functional.linear_act(x, w, b, recompute=True),
    "mlp": lambda x, w, b: torchweld.functional.mlp(x, w, b, w.mT, None, recompute=True),
    "gated_mlp": lambda x, w, b: (
        torchweld.functional.gated_mlp(x, w, w, w.mT, recompute=True) + b.sum()
    ),
}


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore:Attempted to insert a get_attr")
@pytest.mark.parametrize("backend", ["cpu", "eager"])
@pytest.mark.parametrize("name", RECOMPUTED)
def test_recomputation(name: str, backend: str) -> None:
    tensors = [
        torch.randn(*sizes, dtype=torch.float64, requires_grad=True)
        for sizes in ((2, 3, 8), (16, 8), (16,))
    ]

    def function(*given: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return (RECOMPUTED[name](*given),)

    expected = _gradients(function, tensors)
    with torchweld.use_backend(backend):
        recorded = make_fx(lambda *given: _gradients(function, list(given)))(*tensors)
        with torch.no_grad():
            _assert_close(recorded(*tensors), expected)
        result = function(*tensors)[0]
        grads = torch.stack([torch.ones_like(result), torch.full_like(result, 2.0)])
        batch = torch.autograd.grad(
            result, tensors, grads, is_grads_batched=True, retain_graph=True
        )
        once = torch.autograd.grad(result, tensors, torch.ones_like(result))
        _assert_close(batch, [torch.stack([g, 2 * g]) for g in once])
    primals = [t.detach() for t in tensors]
    _, pushed = torch.func.linearize(lambda *given: _loss(function(*given)), *primals)
    torch.testing.assert_close(
        pushed(*map(torch.ones_like, primals)), sum(g.sum() for g in expected)
    )


@pytest.mark.filterwarnings("ignore:There is a performance drop")
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("backend", [None, "cpu", "eager"])
@pytest.mark.parametrize("name", RECOMPUTED)
def test_recomputation_inside_vmap(name: str, backend: str | None, dtype: torch.dtype) -> None:
    """A batch of backward passes recomputes by what the forward pass ran, outside of vmap.

    The recomputation asked anew which backend serves: inside vmap eager does, which saves other
    tensors. is_grads_batched uses another vmap, which our kernels do not see.
    """
    sizes = ((2, 300, 8), (16, 8), (16,))
    tensors = [torch.randn(*size).to(dtype).requires_grad_() for size in sizes]
    with torchweld.use_backend(backend):
        result = RECOMPUTED[name](*tensors)

    def differentiate(grad: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return torch.autograd.grad(result, tensors, grad, retain_graph=True)

    grads = torch.randn(2, *result.shape).to(dtype)
    expected = [torch.stack(each) for each in zip(*map(differentiate, grads), strict=True)]
    for _ in range(2):
        found = torch.func.vmap(differentiate)(grads)
        for one, wanted in zip(found, expected, strict=True):
            error = (one.double() - wanted.double()).abs().max()
            assert error <= 4 * torch.finfo(dtype).eps * wanted.double().abs().max()


# --- Changes in place -----------------------------------------------------------------------------


def _assert_changes_in_place(
    function: Function, tensors: list[torch.Tensor], saved: set[int]
) -> None:
    """Each result can be doubled in place, which doubles the gradients.

    Where the backward reads a result (`saved`), torch may raise that it was changed, as after its
    own ops.
    """
    for at, before in enumerate(function(*tensors)):
        expected = torch.autograd.grad(before.sum(), tensors, allow_unused=True, retain_graph=True)
        result = function(*tensors)[at]
        value = result.detach().clone()
        result.mul_(2)
        assert torch.equal(result.detach(), 2 * value)
        try:
            found = torch.autograd.grad(result.sum(), tensors, allow_unused=True)
        except RuntimeError as error:
            if at in saved and "modified by an inplace operation" in str(error):
                continue
            raise
        for a, b in zip(found, expected, strict=True):
            assert (a is None) == (b is None)
            if a is not None:
                torch.testing.assert_close(a, 2 * b)


@pytest.mark.targets(composites=True)
def test_results_change_in_place(target: Target) -> None:
    """A result is no view of what a node saves or was given, as torch's own results are not."""
    op = target.op
    by_backward = op.backward_signature.arguments
    saved = {at for at, name in enumerate(op.public) if name in by_backward}
    # The CPU has all samples, other places every second one.
    step = 1 if target.place == "cpu" or selection.WHOLE else 2
    for arguments in CASES[op.name].samples[::step]:
        inputs = materialize(arguments, torch.float32, target.device, requires_grad=True)
        at = [i for i, v in enumerate(inputs) if isinstance(v, torch.Tensor) and v.requires_grad]
        if max(inputs[i].numel() for i in at) > LARGEST or op.why_refused(target.backend, inputs):
            continue
        _assert_changes_in_place(
            lambda *_: as_tuple(call(op, *inputs)),  # noqa: B023
            [inputs[i] for i in at],
            saved,
        )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("leading", [(64,), (2, 32)])
@pytest.mark.parametrize("name", ["linear_act", "mlp", "gated_mlp"])
def test_results_of_gemms_change_in_place(
    name: str,
    leading: tuple[int, ...],
    recompute: bool,
    dtype: torch.dtype,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With oneDNN's GEMM too, which serves large products."""
    monkeypatch.setattr(layers.gemm, "_SMALLEST", 0)
    inputs = materialize(OPS[name].sized(leading, (64,)), dtype, requires_grad=True)
    tensors = [v for v in inputs if isinstance(v, torch.Tensor)]
    op: Any = OPS[name]

    def function(*_: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return (cache.run_decision(layers.decide_recomputed(recompute, op, *inputs)),)

    with torchweld.use_backend("cpu"):
        _assert_changes_in_place(function, tensors, set())


# --- Retained graphs ------------------------------------------------------------------------------


def _write_uncounted(grad: torch.Tensor, how: str) -> None:
    """Triple a gradient in a way of which autograd counts no version."""
    if how == "inference":
        with torch.inference_mode():
            grad.mul_(3)
    elif how == "data":
        grad.data.mul_(3)
    else:
        grad.numpy()[...] *= 3


@pytest.mark.parametrize("how", ["inference", "data", "numpy"])
@pytest.mark.targets(composites=True)
def test_a_retained_graph_reads_the_gradient_as_it_is_now(op: Op, how: str) -> None:
    """A second run of a retained graph does not take what a first run made of the old gradient.

    Nodes kept the gradients that a first run did not use, and compared the incoming tensor and
    its version only: `g.mul_(3)` of an inference tensor counts none, and the weight's gradient was
    a third of the right one. Tests changed gradients in ways that autograd counts.
    """
    for function, tensors in _calls(op, 1 if selection.WHOLE else 3):
        if len(tensors) == 1:
            continue
        with torchweld.use_backend("cpu"):
            results = function(*tensors)
        with torch.inference_mode(how == "inference"):
            grads = [torch.ones_like(r.detach()) for r in results]
        torch.autograd.grad(results, tensors[0], grads, retain_graph=True, allow_unused=True)
        for grad in grads:
            _write_uncounted(grad, how)
        fresh, again = function(*tensors), [grad.clone() for grad in grads]
        options = {"allow_unused": True, "materialize_grads": True}
        expected = torch.autograd.grad(fresh, tensors[1:], again, **options)
        _assert_close(torch.autograd.grad(results, tensors[1:], grads, **options), expected)


@pytest.mark.targets(composites=True)
def test_a_retained_graph_keeps_no_gradient(op: Op) -> None:
    """A run for one input, which retains the graph, leaves no memory taken.

    Gradients of weights were kept until the graph died. No test looked at memory after such a run.
    """
    gc.freeze()  # only what the calls make is searched
    try:
        for function, tensors in _calls(op, 1 if selection.WHOLE else 3):
            for _ in range(2):  # the first call may make what is made once
                with torchweld.use_backend("cpu"):
                    results = function(*tensors)
                grads = [torch.ones_like(r) for r in results]
                before = _count_tensors()
                torch.autograd.grad(
                    results, tensors[0], grads, retain_graph=True, allow_unused=True
                )
                after = _count_tensors()
            assert after == before
    finally:
        gc.unfreeze()


def _count_tensors() -> int:
    gc.collect()
    return sum(isinstance(value, torch.Tensor) for value in gc.get_objects())
