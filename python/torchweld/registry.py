"""What an op is: one declaration, from which everything else is derived.

An op is declared once, in `ops/<op>.py`, as an `Op`: two schemas, an eager reference, a check, a
fake. Each backend has its own overload of the schemas (`torchweld::layer_norm.cpu`, `.cuda`,
`.triton`), so that the choice of a backend is a choice of an op, visible in graphs and to
checkpointing policies. The argument names of the two schemas say how forward and backward belong
together, and the autograd function is built from them:

* `grad_y` in the backward's arguments is the gradient of the forward's output `y`, and makes `y`
  one of the public results; the forward's other outputs are kept for the backward alone;
* an argument named like a forward's input or output is that value, saved; where an input is not
  among them, the declaration has a `backward_reference`;
* `x_dtype` is the dtype of input `x`, and `need_weight` whether the gradient of input `weight` is
  wanted;
* `grad_x` in the backward's results is the gradient of input `x`, and is like `x`.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from pathlib import PurePosixPath
from typing import Any

import torch

from torchweld import _native
from torchweld._autograd import autograd_function

LIBRARY = torch.library.Library("torchweld", "DEF")
LIBRARY.define("use_cpu_kernels(int selected, int baseline) -> ()")
# Of torch's generator of the device of `fresh`, which is not read: a new tensor at every call keeps
# compilers from taking two calls for one.
LIBRARY.define("seed(Tensor fresh) -> Tensor", tags=(torch.Tag.nondeterministic_seeded,))

OPS: dict[str, Op] = {}


# --- Backends ---------------------------------------------------------------------------------


@dataclass
class Backend:
    """A way to run ops: the device types that it serves, and why it is not there, if it is not."""

    name: str
    devices: set[str]
    missing: Callable[[], str | None]


# Looked up once: torch.compile traces through what asks for it.
_TRITON_MISSING = (
    "triton is not installed; CUDA builds of torch bring it"
    if importlib.util.find_spec("triton") is None
    else None
)


BACKENDS = {
    backend.name: backend
    for backend in (
        Backend("cpu", {"cpu"}, lambda: _native.missing.get("torchweld_cpu")),
        Backend("cuda", {"cuda"}, lambda: _native.missing.get("torchweld_cuda")),
        Backend("triton", {"cuda"}, lambda: _TRITON_MISSING),
    )
}
# Not an entry of BACKENDS: it needs no overload, its autograd is torch's, and it always serves.
EAGER = "eager"


# --- Samples ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class TensorSpec:
    """A tensor argument of a sample: its shape, and what kind of tensor it is."""

    shape: tuple[int, ...]
    kind: str = "activation"

    @property
    def parameter(self) -> bool:
        """Whether it has the trailing sizes of what flows alone."""
        return self.kind in ("parameter", "boolean", "constant", "variance")


def activation(*shape: int) -> TensorSpec:
    """A tensor that flows: of the tested dtype."""
    return TensorSpec(shape)


def parameter(*shape: int) -> TensorSpec:
    """A tensor that is learnt: of the tested dtype, or float32 under a 16-bit one."""
    return TensorSpec(shape, "parameter")


def residual(*shape: int) -> TensorSpec:
    """A tensor that flows, of a dtype as parameters have it."""
    return TensorSpec(shape, "residual")


def weight(*shape: int) -> TensorSpec:
    """A factor of a GEMM, of the tested dtype: so small that sums of products are as what flows."""
    return TensorSpec(shape, "weight")


def constant(*shape: int) -> TensorSpec:
    """A tensor like a parameter that gets no gradient."""
    return TensorSpec(shape, "constant")


def variance(*shape: int) -> TensorSpec:
    """A constant that is not negative."""
    return TensorSpec(shape, "variance")


def boolean(*shape: int) -> TensorSpec:
    """A tensor of which most elements are True."""
    return TensorSpec(shape, "boolean")


# What dropout draws from: a number that uses both halves of its 64 bits.
SEED = TensorSpec((1,), "seed")
_SEED = 0x1234_5678_9ABC_DEF0


def materialize(
    arguments: Sequence[Any],
    dtype: torch.dtype,
    device: str | torch.device = "cpu",
    *,
    param_dtype: torch.dtype | None = None,
    requires_grad: bool = False,
    seed: int = 0,
) -> list[Any]:
    """The sample's arguments with its tensors drawn from a normal distribution."""
    generator = torch.Generator(device=device).manual_seed(seed)

    def draw(argument: Any) -> Any:
        if not isinstance(argument, TensorSpec):
            return argument
        if argument.kind == "seed":
            return torch.full(argument.shape, _SEED + seed, dtype=torch.int64, device=device)
        values = torch.randn(argument.shape, generator=generator, device=device)
        if argument.kind == "boolean":
            return values > -0.7
        if argument.kind == "weight":
            values = values / max(argument.shape[-1], 1) ** 0.5
        else:  # Away from zero mean and unit scale, where mistakes in statistics and weights show.
            values = values * 0.5 + 1.0 if argument.parameter else values * 1.5 + 0.25
        if argument.kind == "variance":
            values = values.abs()
        wide = argument.parameter or argument.kind == "residual"
        values = values.to((param_dtype or dtype) if wide else dtype)
        return values.requires_grad_(
            requires_grad and argument.kind not in ("constant", "variance")
        )

    return [draw(argument) for argument in arguments]


# --- Ops --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Signature:
    """Names and types of a schema's arguments and results."""

    schema: str
    arguments: tuple[str, ...] = field(init=False)
    types: tuple[str, ...] = field(init=False)
    results: tuple[str, ...] = field(init=False)

    def __post_init__(self) -> None:
        parsed = torch._C.parse_schema(f"op{self.schema}")
        object.__setattr__(self, "arguments", tuple(a.name for a in parsed.arguments))
        object.__setattr__(self, "types", tuple(str(a.type) for a in parsed.arguments))
        object.__setattr__(self, "results", tuple(r.name for r in parsed.returns))


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
    """The declaration of an op. Registering it is making it."""

    name: str
    forward: str
    backward: str
    # Eager torch, differentiable by torch: the forward's arguments to the public results.
    reference: Callable[..., Any]
    # Raises ArgumentError if the arguments are not acceptable. Called only when something failed.
    check: Callable[..., None]
    # The forward's outputs as empty tensors.
    fake: Callable[..., tuple[torch.Tensor, ...]]
    # The forward's arguments to the number of the first one's last dimensions that make a row: in
    # the others a tensor may be a shard.
    columns: Callable[..., int]
    # Backend -> the files its kernels are made of, from the repository's root. Triton's first file
    # is the module that has a function for each schema, under the op's name.
    sources: dict[str, tuple[str, ...]]
    samples: tuple[tuple[Any, ...], ...]
    # Arguments worth a measurement: on the CPU, on a GPU, and so few that only the call costs.
    benchmarks: tuple[tuple[Any, ...], ...]
    benchmarks_on_gpu: tuple[tuple[Any, ...], ...]
    tiny: tuple[Any, ...]
    numerics: Numerics
    # With fewer elements in the first argument, eager is as fast: there is less work than overhead.
    # Not so where random numbers are drawn, which eager does in many steps.
    small: int
    # The public function's arguments, by name, to the forward's, where they differ.
    inputs: Callable[..., Sequence[Any]] | None = None
    # The same in plain torch, for the benchmark, where the reference is slower than that: torch's
    # own dropout drops other elements than ours.
    plain: Callable[..., Any] | None = None
    # The backward's arguments to its results, in eager torch, differentiable by torch; needed where
    # they are not all of the forward's arguments.
    backward_reference: Callable[..., Any] | None = None
    # The forward's arguments to those tensors of the backward's that need not be saved for them.
    unsaved: Callable[..., Collection[str]] | None = None
    # Input -> the gradient that its own equals, and for which of the forward's arguments it does:
    # {"residual": ("grad_y", lambda *_: True)}.
    same_gradient: dict[str, tuple[str, Callable[..., bool]]] = field(default_factory=dict)
    dtypes: tuple[torch.dtype, ...] = (
        torch.float32,
        torch.bfloat16,
        torch.float16,
        torch.float64,
    )
    # A backend, and the forward's arguments by name as far as they are known, to why it has no
    # kernel for them, where that depends on more than their dtype and device.
    refuses: Callable[[str, dict[str, Any]], str | None] | None = None
    # Device type -> dtype that eager computes and returns under autocast, where it has a rule.
    autocast: dict[str, torch.dtype] = field(default_factory=dict)
    forward_signature: Signature = field(init=False)
    backward_signature: Signature = field(init=False)
    # Names of the forward's arguments that get a gradient, and where the dropout's seed is.
    differentiable: list[str] = field(init=False)
    seed_at: int | None = field(init=False)
    kernels: dict[str, Kernel] = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "forward_signature", Signature(self.forward))
        object.__setattr__(self, "backward_signature", Signature(self.backward))
        arguments = self.forward_signature.arguments
        made = {*self.backward_signature.results, *(f"grad_{n}" for n in self.same_gradient)}
        object.__setattr__(self, "differentiable", [n for n in arguments if f"grad_{n}" in made])
        seed_at = arguments.index("seed") if "seed" in arguments else None
        object.__setattr__(self, "seed_at", seed_at)
        object.__setattr__(self, "kernels", self._kernels())
        OPS[self.name] = self

    def _kernels(self) -> dict[str, Kernel]:
        return {name: Kernel(self, name) for name in self.sources}

    def __repr__(self) -> str:
        return self.name

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
        if backend not in self.sources:
            return f"{self.name} has no {backend} kernel"
        if reason := BACKENDS[backend].missing():
            return reason
        x = inputs[0]
        if x.device.type not in BACKENDS[backend].devices:
            served = " and ".join(sorted(BACKENDS[backend].devices))
            return f"{self.forward_signature.arguments[0]} is on {x.device}; it serves {served}"
        if x.dtype not in self.dtypes:
            return f"no kernel for {x.dtype}"
        if backend != "cpu" and x.dtype == torch.float64:
            return "float64 has a kernel on the CPU alone"
        if torch._C._are_functorch_transforms_active():
            return "inside a torch.func transform, whose rules eager has"
        if torch.autograd.forward_ad._current_level >= 0:
            return "inside forward-mode AD, whose rules eager has"
        return self.refused(backend, inputs)

    def refused(self, backend: str, inputs: Sequence[Any]) -> str | None:
        """Why this backend has no kernel for arguments like these; None if it has."""
        if self.refuses is None:
            return None
        names = self.forward_signature.arguments  # more than there are inputs, to the doctor
        return self.refuses(backend, dict(zip(names, inputs, strict=False)))


@dataclass(frozen=True, eq=False, repr=False)
class Seam(Op):
    """GEMMs of torch's and ops of ours between them, which share one choice of a backend.

    It has no kernel and no autograd function of its own, and its schemas only name its arguments:
    torch differentiates the GEMMs, so that the gradients of their two factors are graph nodes that
    a schedule can run apart.
    """

    # The backend for the ops, then the forward's arguments, to the result.
    fused: Callable[..., Any] = field(kw_only=True)
    # A backend and the forward's arguments to a word on how it runs them, where that is measured.
    detail: Callable[..., str] | None = None
    # For the docs: what it is made of, where {} stands for the kernels, and what it saves.
    made_of: str = "torch's GEMMs; between them {}"
    saves: str = (
        "the GEMMs' inputs and the result of the first; with `recompute`, only the op's inputs"
    )

    def _kernels(self) -> dict[str, Kernel]:
        return {}


def _as_torch(results: tuple[torch.Tensor, ...]) -> Any:
    return results if len(results) > 1 else results[0]


class Kernel:
    """One backend's implementation of an op: its two overloads and its autograd function."""

    def __init__(self, op: Op, backend: str) -> None:
        self.backend = backend
        for suffix, schema, fake in (
            ("", op.forward, _fake_forward(op)),
            ("_backward", op.backward, _fake_backward(op)),
        ):
            name = f"{op.name}{suffix}.{backend}"
            LIBRARY.define(f"{name}{schema}")
            torch.library.register_fake(f"torchweld::{name}", fake, lib=LIBRARY)
            if backend == "triton":
                implement_in_triton(LIBRARY, f"{op.name}{suffix}", op.sources["triton"][0])
        results = op.forward_signature.results
        self._public_at = [results.index(name) for name in op.public]
        self.forward = getattr(getattr(torch.ops.torchweld, op.name), backend)
        self.backward = getattr(getattr(torch.ops.torchweld, f"{op.name}_backward"), backend)
        self.function = autograd_function(op, self)

    def public(self, results: tuple[torch.Tensor, ...]) -> Any:
        """Of the forward's results those that the public function returns."""
        if len(self._public_at) == 1:
            return results[self._public_at[0]]
        return tuple([results[i] for i in self._public_at])


def implement_in_triton(library: torch.library.Library, name: str, source: str) -> None:
    """By the function of that name in `source`, imported at its first call: it takes a while."""

    def implementation(*inputs: Any) -> Any:
        module = importlib.import_module(f"torchweld.triton_kernels.{PurePosixPath(source).stem}")
        return getattr(module, name)(*inputs)

    library.impl(f"{name}.triton", implementation, "CUDA")
    library.impl(f"{name}.triton", implementation, "CPU")  # the interpreter


def _fake_forward(op: Op) -> Callable[..., Any]:
    """The declared fake, once it is sure that no argument is on the meta device by mistake."""

    def fake(*inputs: Any) -> Any:
        devices = {value.device for value in inputs if isinstance(value, torch.Tensor)}
        if len(devices) > 1:
            raise RuntimeError(f"{op.name}: arguments are on several devices: {devices}")
        return _as_torch(op.fake(*inputs))

    return fake


def _fake_backward(op: Op) -> Callable[..., Any]:
    """Gradients are like the inputs they belong to, and empty where they are not wanted.

    An input that was not saved is like the first result, or the gradient of that.
    """
    types = zip(op.forward_signature.arguments, op.forward_signature.types, strict=True)
    optional = {name for name, kind in types if "Optional" in kind}

    def fake(*inputs: Any) -> Any:
        given = dict(zip(op.backward_signature.arguments, inputs, strict=True))
        first = op.public[0]
        flowing = given[f"grad_{first}"] if given.get(first) is None else given[first]

        def gradient(name: str) -> torch.Tensor:
            value = given.get(name)
            absent = name in given and value is None and name in optional
            if absent or not given.get(f"need_{name}", True):
                return flowing.new_empty(0)
            like = flowing if value is None else value
            dtype = given.get(f"{name}_dtype", like.dtype)
            return torch.empty_like(like, dtype=dtype, memory_format=torch.contiguous_format)

        results = op.backward_signature.results
        return _as_torch(tuple(gradient(name.removeprefix("grad_")) for name in results))

    return fake
