"""The declaration of an op."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from torchweld.registry.backends import BACKENDS, EAGER, parts
from torchweld.registry.schema import Signature
from torchweld.registry.sharding import Rows

OPS: dict[str, Op] = {}


@dataclass(frozen=True)
class Numerics:
    """How exact an op is, derived in docs/numerics.md.

    A 16-bit result may be off by `rounding[name]` times what rounding the exact result costs, 1.1
    where it is not named; a float32 result by `fp32[name]` unit roundoffs of the sum of its terms'
    magnitudes, which `terms` returns by name: it takes the forward's arguments and `grad_y`.
    """

    fp32: dict[str, float]
    terms: Callable[..., dict[str, torch.Tensor]]
    rounding: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True, eq=False, repr=False)
class Op:
    """The declaration of an op. `torchweld.dispatch.define` makes its kernels."""

    name: str
    forward: str
    backward: str
    # Eager torch, differentiable by torch: the forward's arguments to the public results.
    reference: Callable[..., Any]
    # Raises ArgumentError if the arguments are not acceptable. Called only when something failed.
    check: Callable[..., None]
    # The forward's outputs as empty tensors.
    fake: Callable[..., tuple[torch.Tensor, ...]]
    # Which dimensions of the arguments may be sharded over devices.
    sharding: Rows
    # Backend -> the files with its kernels, from the repository's root; what they include or import
    # is derived. Triton's is a module that has a function for each schema, under the op's name.
    sources: Mapping[str, Sequence[str]]
    samples: tuple[tuple[Any, ...], ...]
    # Arguments of a given size with every tensor present: takes the first one's leading sizes and
    # those that make a row, which are of one dimension unless the op takes several.
    sized: Callable[[tuple[int, ...], tuple[int, ...]], tuple[Any, ...]]
    # Takes the forward's arguments; counts the operations of forward and backward.
    flops: Callable[..., tuple[int, int]]
    # Arguments worth a measurement: on the CPU, on a GPU, and so few that only the call costs.
    benchmarks: tuple[tuple[Any, ...], ...]
    benchmarks_on_gpu: tuple[tuple[Any, ...], ...]
    tiny: tuple[Any, ...]
    numerics: Numerics
    # With fewer elements in the first argument, eager is as fast: there is less work than overhead.
    # A call that draws random numbers never falls back, since eager draws them in many steps.
    small: int
    # Takes the public function's arguments by name; returns the forward's, where they differ.
    inputs: Callable[..., Sequence[Any]] | None = None
    # Plain torch for the benchmark, where the reference is slower. With dropout it is: torch's own
    # drops other elements than ours.
    plain: Callable[..., Any] | None = None
    # The backward in eager torch, differentiable by torch. Needed if the backward does not take all
    # of the forward's arguments.
    backward_reference: Callable[..., Any] | None = None
    # Takes the forward's arguments; names those of the backward that need not be saved.
    unsaved: Callable[..., Collection[str]] | None = None
    # Input -> the gradient that its own equals, and a condition on the forward's arguments under
    # which it does: {"residual": ("grad_y", lambda *_: True)}.
    same_gradient: dict[str, tuple[str, Callable[..., bool]]] = field(default_factory=dict)
    dtypes: tuple[torch.dtype, ...] = (
        torch.float32,
        torch.bfloat16,
        torch.float16,
        torch.float64,
    )
    # Takes a backend and the forward's arguments by name, as far as they are known. Says why the
    # backend has no kernel for them, where that depends on more than their dtype and device.
    refuses: Callable[[str, dict[str, Any]], str | None] | None = None
    # Device type -> the dtype that eager computes and returns under autocast, if it has a rule.
    autocast: dict[str, torch.dtype] = field(default_factory=dict)
    forward_signature: Signature = field(init=False)
    backward_signature: Signature = field(init=False)
    # Names of the forward's arguments that get a gradient, and where the dropout's seed is.
    differentiable: list[str] = field(init=False)
    seed_at: int | None = field(init=False)
    # Where the forward has tensors; where they are weights, the factors of GEMMs, whose sizes are
    # not the rows'; where it has flags, which decide what a kernel does.
    tensors_at: tuple[int, ...] = field(init=False)
    weights_at: tuple[int, ...] = field(init=False)
    flags_at: tuple[int, ...] = field(init=False)
    # Backend -> its implementation, made by torchweld.dispatch. "cuda/triton" has the forward of
    # one and the backward of the other.
    kernels: dict[str, Any] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        object.__setattr__(self, "forward_signature", Signature(self.forward))
        object.__setattr__(self, "backward_signature", Signature(self.backward))
        arguments = self.forward_signature.arguments
        made = {*self.backward_signature.results, *(f"grad_{n}" for n in self.same_gradient)}
        object.__setattr__(self, "differentiable", [n for n in arguments if f"grad_{n}" in made])
        seed_at = arguments.index("seed") if "seed" in arguments else None
        object.__setattr__(self, "seed_at", seed_at)
        kinds = list(enumerate(self.forward_signature.types))
        object.__setattr__(self, "tensors_at", tuple(i for i, kind in kinds if "Tensor" in kind))
        specs = ((i, value) for sample in self.samples for i, value in enumerate(sample))
        weights = {i for i, value in specs if getattr(value, "kind", "") == "weight"}
        object.__setattr__(self, "weights_at", tuple(sorted(weights)))
        flags = tuple(i for i, kind in kinds if kind in ("bool", "str"))
        object.__setattr__(self, "flags_at", flags)
        OPS[self.name] = self

    def __repr__(self) -> str:
        return self.name

    @property
    def backends(self) -> Sequence[str]:
        """The backends that it has kernels for, the preferred one first."""
        return tuple(self.sources)

    def draws(self, inputs: Sequence[Any]) -> bool:
        """Whether these inputs make it drop something."""
        return self.seed_at is not None and inputs[self.seed_at] is not None

    @property
    def public(self) -> list[str]:
        """Names of the forward's outputs that the public function returns."""
        wanted = self.backward_signature.arguments
        return [name for name in self.forward_signature.results if f"grad_{name}" in wanted]

    def why_not(self, backend: str, inputs: Sequence[Any]) -> str | None:
        """Why this backend cannot serve these inputs; None if it can."""
        if backend == EAGER:
            return None
        if len(both := parts(backend)) > 1:
            return next((r for part in both if (r := self.why_not(part, inputs))), None)
        if backend not in self.sources:
            return f"{self.name} has no {backend} kernel"
        x, served = inputs[0], BACKENDS[backend].devices
        if x.device.type not in served:
            # A missing library explains more than a device that it would not serve.
            return BACKENDS[backend].missing() or (
                f"{self.forward_signature.arguments[0]} is on {x.device};"
                f" it serves {' and '.join(sorted(served))}"
            )
        if reason := BACKENDS[backend].why_not(x.device):
            return reason
        if x.dtype not in self.dtypes:
            return f"no kernel for {x.dtype}"
        if x.is_nested:
            return f"{self.forward_signature.arguments[0]} is a nested tensor, which eager serves"
        if backend != "cpu" and x.dtype == torch.float64:
            return "float64 has a kernel on the CPU alone"
        return in_the_way() or self.refused(backend, inputs)

    def refused(self, backend: str, inputs: Sequence[Any]) -> str | None:
        """Why this backend has no kernel for arguments like these; None if it has."""
        if self.refuses is None:
            return None
        names = self.forward_signature.arguments  # more than there are inputs, to the doctor
        given = dict(zip(names, inputs, strict=False))
        for part in parts(backend):
            if reason := self.refuses(part, given):
                return reason
        return None


def in_the_way() -> str | None:
    """What torch is doing at the moment that only eager serves; None if nothing."""
    if torch._C._are_functorch_transforms_active():
        return "inside a torch.func transform, whose rules eager has"
    if torch.autograd.forward_ad._current_level >= 0:
        return "inside forward-mode AD, whose rules eager has"
    if torch.jit.is_tracing():
        return "while torch.jit.trace records, which takes eager's ops"
    if torch.compiler.is_exporting() and torch.onnx.is_in_onnx_export():
        return "inside torch.onnx.export, which knows eager's ops"
    return None
