"""The benchmark's cases: an op's declared shapes, in a dtype and in three directions.

Each file has the cases of a family of ops, which the tests read too.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from torchweld.bench.cases.declare import CASES as CASES
from torchweld.bench.cases.declare import derive
from torchweld.dispatch.proof import ROWS
from torchweld.registry import OPS, Made, Op, TensorSpec, materialize
from torchweld.registry.cost import results

for _module in pkgutil.iter_modules(__path__, f"{__name__}."):
    importlib.import_module(_module.name)
CASES |= {name: derive(name) for name in OPS if name not in CASES}

# The most elements of the first argument, or of an attention's scores, to check in float64, with
# several tensors of that size.
MOST_JUDGED = 2**26
DTYPES = {"cpu": (torch.float32, torch.bfloat16), "cuda": (torch.bfloat16, torch.float32)}


@dataclass(frozen=True)
class Case:
    """An op with arguments of one shape and dtype, on one device."""

    op: Op
    arguments: tuple[Any, ...]
    dtype: torch.dtype
    device: str

    def __str__(self) -> str:
        words = [self.op.name, "x".join(map(str, self.shape)), self.variant, name_dtype(self.dtype)]
        return " ".join(filter(None, words))

    @property
    def variant(self) -> str:
        """How it differs from the op's other cases of this shape: "mask, scale 0.125"."""
        everywhere = set.intersection(
            *[set(_in_words(self.op, a)) for a in CASES[self.op.name].benchmarks]
        )
        return ", ".join(
            word for word in _in_words(self.op, self.arguments) if word not in everywhere
        )

    @property
    def shape(self) -> tuple[int, ...]:
        return next(a.shape for a in self.arguments if isinstance(a, TensorSpec))

    def draw(self) -> Problem:
        """Random values for the arguments, and a gradient for each public result."""
        inputs = materialize(self.arguments, self.dtype, self.device, requires_grad=True)
        return self.problem(inputs)

    def problem(self, inputs: list[Any]) -> Problem:
        """These inputs with a random gradient for each public result."""
        problem = Problem(self, inputs, [])
        generator = torch.Generator(self.device).manual_seed(1)
        outputs = results(self.op, inputs)
        for like in (outputs[name] for name in self.op.public):
            values = torch.randn(like.shape, generator=generator, device=self.device)
            problem.grads.append(values.to(like.dtype))
        return problem

    def part(self) -> Case:
        """The case with few enough rows to check in float64, or itself if it has few enough."""
        shape = self.shape
        while torch.Size(shape).numel() > MOST_JUDGED and max(shape[:-1], default=1) > 1:
            at = next(at for at, size in enumerate(shape) if size > 1)
            shape = (*shape[:at], shape[at] // 2, *shape[at + 1 :])
        if shape == self.shape:
            return self
        arguments = [
            TensorSpec(_like(a.shape, self.shape, shape), a.kind)
            if isinstance(a, TensorSpec) and a.kind != "weight"
            else a
            for a in self.arguments
        ]
        return replace(self, arguments=tuple(arguments))


def _like(shape: tuple[int, ...], old: tuple[int, ...], new: tuple[int, ...]) -> tuple[int, ...]:
    """Resize a shape that equals or broadcasts to `old` so that it fits `new`."""
    beside = zip(shape, old[-len(shape) :], new[-len(shape) :], strict=True)
    return tuple(changed if size == was else size for size, was, changed in beside)


def _in_words(op: Op, arguments: Sequence[Any]) -> list[str]:
    """The arguments in words, without those that are None, off or implied by the shape."""
    words = []
    for name, value in zip(op.forward_signature.arguments, arguments, strict=True):
        if isinstance(value, TensorSpec) or value is True:
            words += [name] if name != "seed" else []
        elif isinstance(value, Made):
            words.append(f"{len(value.make())} {name}")
        elif isinstance(value, str):
            words += [value] if value != "none" else []
        elif value and not isinstance(value, list):
            words.append(f"{name} {value:g}")
    return words


@dataclass(frozen=True, eq=False)
class Problem:
    """The inputs of a case, which require gradients, and the gradients of its public results."""

    case: Case
    inputs: list[Any]
    grads: list[torch.Tensor]

    @property
    def op(self) -> Op:
        return self.case.op

    def part(self) -> Problem:
        """The problem to check in float64: itself, or one with fewer rows."""
        if CASES[self.op.name].has_dense_reference:
            return self._take_sample() if self._count_scores() > MOST_JUDGED else self
        case = self.case.part()
        return self if case is self.case else case.draw()

    def _count_scores(self) -> int:
        """The scores of queries and keys, which the reference of an attention keeps."""
        queries, keys = self.inputs[:2]
        return int(queries.shape[:-1].numel() * keys.shape[-2])

    def _take_sample(self) -> Problem:
        """The problem of the rows that the op itself takes as a sample."""
        sample = [
            v.detach().clone().requires_grad_(v.requires_grad) if isinstance(v, torch.Tensor) else v
            for v in self.op.take_sample(self.inputs, ROWS)
        ]
        return self.case.problem(sample)

    def forward(self, function: Callable[..., Any]) -> tuple[torch.Tensor, ...]:
        """The function's results, always as a tuple."""
        results = function(*self.inputs)
        return results if isinstance(results, tuple) else (results,)

    def backward(self, results: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        """The gradients of every input tensor. A peer may return a result without a gradient."""
        pairs = zip(results, self.grads, strict=True)
        made, grads = zip(*[(y, grad) for y, grad in pairs if y.requires_grad], strict=True)
        return torch.autograd.grad(made, list(self.leaves().values()), grads)

    def tensors(self) -> dict[str, torch.Tensor]:
        """The tensors among the inputs, by name."""
        named = zip(self.op.forward_signature.arguments, self.inputs, strict=True)
        return {name: value for name, value in named if isinstance(value, torch.Tensor)}

    def leaves(self) -> dict[str, torch.Tensor]:
        """The tensors that require gradients."""
        return {name: value for name, value in self.tensors().items() if value.requires_grad}

    def double(self) -> Problem:
        """The same problem in float64."""
        wide = [
            v.detach().double().requires_grad_(v.requires_grad)
            if isinstance(v, torch.Tensor) and v.is_floating_point()
            else v
            for v in self.inputs
        ]
        return Problem(self.case, wide, [grad.double() for grad in self.grads])


def name_dtype(dtype: torch.dtype) -> str:
    """float32 for torch.float32."""
    return str(dtype).removeprefix("torch.")


# Positions in the list of an op's shapes, sorted by size.
SMALLEST, MIDDLE = 0.0, 0.5


def cases(
    ops: Iterable[Op],
    device: str,
    dtypes: Sequence[torch.dtype],
    sizes: Sequence[float] | None = None,
) -> list[Case]:
    """The cases to measure: all shapes of each op, or only the shapes of these sizes."""
    cases = []
    for op in ops:
        its = CASES[op.name]
        arguments = its.benchmarks if device == "cpu" else its.benchmarks_on_gpu
        if sizes is not None:
            ordered = sorted(arguments, key=_elements)
            arguments = tuple(ordered[int(size * len(ordered))] for size in sizes)
        for sample in arguments:
            cases += [Case(op, sample, dtype, device) for dtype in dtypes if dtype in op.dtypes]
    return cases


def _elements(arguments: Sequence[Any]) -> int:
    return next(torch.Size(a.shape).numel() for a in arguments if isinstance(a, TensorSpec))
