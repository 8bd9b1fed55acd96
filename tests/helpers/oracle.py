"""Runs an op forward and backward, and measures errors against its reference in float64."""

from __future__ import annotations

import functools
import os
from collections import defaultdict
from collections.abc import Callable, Iterable
from typing import Any

import torch

from torchweld.bench.cases import CASES
from torchweld.dispatch.autograd import as_tuple
from torchweld.dispatch.call import call
from torchweld.numerics import CONTRACT
from torchweld.registry import Op, TensorSpec, materialize

Results = dict[str, torch.Tensor]
LEAST_POOL = 10_000  # errors

TORCH = tuple(int(part) for part in torch.__version__.split(".")[:2])


def run(op: Op, inputs: list[Any], function: Callable[..., Any] | None = None) -> Results:
    """Public results and gradients by name, with a fixed random gradient of every result.

    `function` takes the forward's arguments. None means the op, on the selected backend.
    """
    named = dict(zip(op.forward_signature.arguments, inputs, strict=True))
    tensors = {
        name: named[name].detach().requires_grad_()
        for name in op.differentiable
        if named[name] is not None
    }
    inputs = list((named | tensors).values())
    results = function(*inputs) if function else call(op, *inputs)
    results = as_tuple(results)
    grads = [incoming(r) for r in results]
    gradients = torch.autograd.grad(results, list(tensors.values()), grads)
    found = dict(zip(op.public, [r.detach() for r in results], strict=True))
    return found | {f"grad_{n}": g for n, g in zip(tensors, gradients, strict=True)}


def total(results: Any) -> torch.Tensor:
    """The sum of all of an op's results."""
    return torch.stack([result.sum() for result in as_tuple(results)]).sum()


def saved_bytes(function: Callable[[], Any]) -> int:
    """The bytes that a function's graph saves for the backward."""
    kept = 0

    def count(t: torch.Tensor) -> torch.Tensor:
        nonlocal kept
        kept += t.numel() * t.itemsize
        return t

    with torch.autograd.graph.saved_tensors_hooks(count, lambda t: t):
        function()
    return kept


def is_floating(value: Any) -> bool:
    """Whether it is a floating-point tensor, and so not a mask or a seed."""
    return isinstance(value, torch.Tensor) and value.is_floating_point()


def incoming(result: torch.Tensor) -> torch.Tensor:
    """A random gradient for this result: the same at every call, and exact in every dtype."""
    generator = torch.Generator().manual_seed(1)
    grad = torch.randn(result.shape, generator=generator).bfloat16().half()
    return grad.to(result.device, result.dtype)


def exact(op: Op, inputs: list[Any]) -> Results:
    """The reference in float64 on the same values."""
    wide = [v.detach().double() if is_floating(v) else v for v in inputs]
    # torch's default epsilon depends on the dtype, so take the original values' epsilon.
    defaults = dict(zip(op.forward_signature.arguments, wide, strict=True))
    if defaults.get("eps", 0) is None:
        at = op.forward_signature.arguments.index("eps")
        kind = torch.float64 if inputs[0].dtype == torch.float64 else torch.float32
        wide[at] = torch.finfo(kind).eps
    return run(op, wide, op.reference)


def assert_right(op: Op, inputs: list[Any]) -> None:
    """Compare with the oracle: a wrong index is off by about 1, rounding by about 1e-6."""
    oracle = exact(op, inputs)
    grads = {f"grad_{name}": incoming(oracle[name]) for name in op.public}
    terms = CASES[op.name].terms(*inputs, **grads)
    unit = torch.finfo(inputs[0].dtype).eps / 2
    for name, value in run(op, inputs).items():
        assert torch.all((value - oracle[name]).abs() <= 16 * unit * terms[name] + 1e-30), name


def assert_bounded(
    op: Op, samples: list[list[Any]], ours: Callable[[list[Any]], Results] | None = None
) -> None:
    """Pool errors over these inputs, result by result. docs/numerics.md derives the bounds.

    `ours` runs the op; by default it is `run`. A failure shows the sample with the largest error.
    """
    ours = ours or functools.partial(run, op)
    pools: dict[Any, dict[str, Pool]] = defaultdict(lambda: defaultdict(Pool))
    pooled: dict[Any, list[list[Any]]] = defaultdict(list)
    for inputs in samples:
        oracle = exact(op, inputs)
        grads = {f"grad_{name}": incoming(oracle[name]) for name in op.public}
        terms = CASES[op.name].terms(*inputs, **grads)
        mine, theirs = ours(inputs), run(op, inputs, op.reference)
        for name, value in oracle.items():
            assert mine[name].dtype == theirs[name].dtype
            assert mine[name].shape == theirs[name].shape
            pool = pools[name, mine[name].dtype]
            pooled[name, mine[name].dtype].append(inputs)
            pool["ours"].add(mine[name] - value, terms[name])
            pool["eager"].add(theirs[name] - value, terms[name])
            pool["rounding"].add(value.to(mine[name].dtype) - value, terms[name])
            pool["terms"].add(terms[name], terms[name])
    cases = CASES[op.name]
    of_trusted = CONTRACT.of_trusted
    narrow = any(x.itemsize == 2 for x in samples[0] if isinstance(x, torch.Tensor))
    for (name, result_dtype), pool in pools.items():
        assert pool["ours"].count >= LEAST_POOL
        for at, measure in enumerate(("rms", "max")):
            error, eager, rounding, sums = (
                getattr(pool[kind], measure) for kind in ("ours", "eager", "rounding", "terms")
            )
            of_eager = cases.factor("eager", name) if narrow else of_trusted[0]
            if result_dtype == torch.float32:
                bound = max(of_eager * eager, cases.factor("fp32", name) * 2**-24 * sums)
            else:
                bound = min(of_eager * eager, cases.factor("rounding", name) * rounding)
            slack = of_trusted[at] / of_trusted[0]
            report = f"{name} {result_dtype} {measure}: {error:.3g}, bound {slack * bound:.3g}"
            print(f"{report}, eager {eager:.3g}, rounding {rounding:.3g}")
            assert error <= slack * bound, "\n".join(
                [report, *_describe(op, pooled[name, result_dtype][pool["ours"].find_worst()])]
            )


def _describe(op: Op, inputs: list[Any]) -> list[str]:
    """Lines that show a sample, and repeat the test that took it."""
    shown = [
        f"{str(value.dtype).removeprefix('torch.')} {[*value.shape]}"
        if isinstance(value, torch.Tensor)
        else repr(value)
        for value in inputs
    ]
    arguments = zip(op.forward_signature.arguments, shown, strict=True)
    sample = f"{op.name}({', '.join(f'{name}={value}' for name, value in arguments)})"
    path, _, test = os.environ["PYTEST_CURRENT_TEST"].rpartition(" ")[0].partition("::")
    words = test.rstrip("]").replace("[", " and ")
    return [f"largest error: {sample}", f"repeat: pytest {path} -k '{words}'"]


class Pool:
    """Errors of one result over many samples, each in units of the RMS of its sum of terms."""

    def __init__(self) -> None:
        self.errors: list[torch.Tensor] = []

    def add(self, error: torch.Tensor, terms: torch.Tensor) -> None:
        scale = terms.square().mean().sqrt()
        if not scale > 0:  # an empty sum is exact
            assert not error.any()
            error, scale = error.new_zeros(0), scale.new_ones(())
        self.errors.append((error.double() / scale).flatten())

    def find_worst(self) -> int:
        """Which of the samples, in the order of their adding, has the largest error."""
        largest = [e.abs().nan_to_num(torch.inf).max().item() if len(e) else 0 for e in self.errors]
        return largest.index(max(largest))

    @property
    def count(self) -> int:
        return sum(e.numel() for e in self.errors)

    @property
    def rms(self) -> float:
        return torch.cat(self.errors).square().mean().sqrt().item()

    @property
    def max(self) -> float:
        return torch.cat(self.errors).abs().max().item()


def sample_inputs(
    op: Op, dtype: torch.dtype, device: str, param_dtype: torch.dtype | None = None
) -> list[list[Any]]:
    """Every sample of the op, drawn."""
    return [
        materialize(arguments, dtype, device, param_dtype=param_dtype, seed=seed)
        for seed, arguments in enumerate(CASES[op.name].samples)
    ]


def assert_same_bits_on_any_threads(function: Callable[[], Iterable[torch.Tensor]]) -> None:
    """Run twice on one thread, then on more: only the shape may decide how work is split."""
    threads, results = torch.get_num_threads(), []
    try:
        for count in (1, 1, 2, 3):
            torch.set_num_threads(count)
            results.append(list(function()))
    finally:
        torch.set_num_threads(threads)
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))


def takes_several_trailing_dimensions(op: Op) -> bool:
    """Whether a parameter may have more than one dimension."""
    specs = [v for sample in CASES[op.name].samples for v in sample if isinstance(v, TensorSpec)]
    return any(spec.kind == "parameter" and len(spec.shape) > 1 for spec in specs)
