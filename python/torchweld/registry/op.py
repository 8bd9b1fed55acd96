"""The declaration of an op."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import torch

from torchweld.registry.backends import BACKENDS, EAGER
from torchweld.registry.samples import take_rows
from torchweld.registry.schema import Signature
from torchweld.registry.sharding import Rows
from torchweld.state import why_not_now

OPS: dict[str, Op] = {}


@dataclass(kw_only=True, eq=False, repr=False)
class Differentiable:
    """What autograd needs of an op; torchweld.registry explains the argument names."""

    name: str
    forward: str
    backward: str
    # The backward pass in eager torch, differentiable by torch. Needed if the backward op does not
    # take all of the forward's arguments.
    backward_reference: Callable[..., Any] | None = None
    # Takes the forward's arguments; names the tensors that need not be saved for the backward op.
    unsaved: Callable[..., Collection[str]] | None = None
    # Input -> an incoming gradient that equals the input's own, and the condition on the forward's
    # arguments under which it does: {"residual": ("grad_y", lambda *_: True)}.
    same_gradient: dict[str, tuple[str, Callable[..., bool]]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.forward_signature, self.backward_signature = map(
            Signature, (self.forward, self.backward)
        )
        results, wanted = self.forward_signature.results, self.backward_signature.arguments
        # The forward's arguments by name: op.Args(*inputs).
        self.Args = self.forward_signature.Args
        # The forward's outputs that the public function returns, by name.
        self.public = [name for name in results if f"grad_{name}" in wanted]
        # Positions of the forward's tensors.
        kinds = enumerate(self.forward_signature.types)
        self.tensors_at = tuple(at for at, kind in kinds if "Tensor" in kind)


@dataclass(kw_only=True, eq=False, repr=False)
class Op(Differentiable):
    """The declaration of an op. `torchweld.dispatch.define` makes its kernels."""

    # Eager torch, differentiable by torch: from the forward's arguments to the public results.
    reference: Callable[..., Any]
    # Raises ArgumentError if the arguments are not acceptable. Called only after a failure.
    check: Callable[..., None]
    # The forward's outputs as empty tensors. None: one that is like the first argument.
    fake: Callable[..., tuple[torch.Tensor, ...]] | None = None
    # Which dimensions of the arguments may be sharded over devices.
    sharding: Rows
    # Backend -> the files with its kernels, from the repository's root; what they include or import
    # is derived. For Triton it is a module with a function for each schema, named as the op.
    sources: Mapping[str, Sequence[str]]
    # Arguments of a given size with every tensor present. Takes the leading sizes of the first
    # argument and the sizes of a row, which has one dimension unless the op takes several.
    sized: Callable[[tuple[int, ...], tuple[int, ...]], tuple[Any, ...]]
    # Takes the forward's arguments; counts the operations of both passes.
    flops: Callable[..., tuple[int, int]]
    # With fewer elements in the first argument eager is as fast on the CPU: torch's own op has a
    # node in C++, or ours is composed of several ops.
    small: int = 0
    # Dtypes in which eager takes less time on the CPU at any size: float64 kernels, which gradient
    # checks need, have no instruction set of their own.
    slower: tuple[torch.dtype, ...] = ()
    # Whether eager rounds 16-bit values between its steps. Kernels do not, so they also serve small
    # 16-bit inputs: a result must not depend on the size of its batch.
    eager_rounds: bool = False
    # Takes the public function's arguments by name; returns the forward's. None if they are equal.
    inputs: Callable[..., Sequence[Any]] | None = None
    # The backward op's results as empty tensors, where they are not like the inputs that it takes.
    fake_backward: Callable[..., tuple[torch.Tensor, ...]] | None = None
    dtypes: tuple[torch.dtype, ...] = (
        torch.float32,
        torch.bfloat16,
        torch.float16,
        torch.float64,
    )
    # Takes a backend and the known arguments of the forward by name. Says why the backend has no
    # kernel for them, if that depends on more than their dtype and device.
    refuses: Callable[[str, dict[str, Any]], str | None] | None = None
    # Takes the forward's arguments, as Args, and a number of rows; returns arguments like them with
    # about so many rows, to judge kernels by in float64. None: the first rows of each argument.
    sample: Callable[[Any, int], Sequence[Any]] | None = None
    # Takes the forward's arguments, as Args; returns what else than dtypes and widths decides which
    # tile or path of a kernel serves them. It is part of a call's class, and a sample has the same.
    regime: Callable[[Any], Any] | None = None
    # Takes that; makes a context in which kernels serve a sample as they serve the call, where the
    # sample alone would be too small for it.
    trial: Callable[[Any], AbstractContextManager[Any]] | None = None
    # Stand-in arguments while compiling, when sizes may be symbolic. None: some of `sized`.
    arguments_while_compiling: tuple[Any, ...] | None = None
    # Takes the forward's arguments: whether torch.compile gets the reference, which Inductor fuses
    # with what stands around it.
    left_to_compiler: Callable[..., bool] | None = None
    # Whether Inductor's own code may start the Triton kernels (dispatch/visible.py). Not where it
    # takes an answer of this machine to know what to launch.
    visible: bool = True
    # Device type -> the dtype in which eager computes and returns under autocast, if it has a rule.
    autocast: dict[str, torch.dtype] = field(default_factory=dict)
    # Backend -> its implementation, made by torchweld.dispatch.
    kernels: dict[str, Any] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        super().__post_init__()
        arguments, kinds = self.forward_signature.arguments, self.forward_signature.types
        made = {*self.backward_signature.results, *(f"grad_{n}" for n in self.same_gradient)}
        # The arguments that get a gradient, by name.
        self.differentiable = [n for n in arguments if f"grad_{n}" in made]
        # Positions of dropout's seed, of weights (factors of GEMMs, which have other sizes than
        # rows), and of flags that decide what a kernel does.
        self.seed_at = arguments.index("seed") if "seed" in arguments else None
        specs = enumerate(self.stand_in)
        self.weights_at = tuple(at for at, v in specs if getattr(v, "kind", "") == "weight")
        self.flags_at = tuple(at for at, kind in enumerate(kinds) if kind in ("bool", "str"))
        exact = (x for x in self.dtypes if x.itemsize != 2 or not self.eager_rounds)
        self.dtypes_of_eager = tuple(exact)
        # The backends it has kernels for, the preferred one first.
        self.backends = tuple(self.sources)
        OPS[self.name] = self

    def __repr__(self) -> str:
        return self.name

    @property
    def stand_in(self) -> tuple[Any, ...]:
        """Stand-in arguments for a compiled graph."""
        return self.arguments_while_compiling or self.sized((4096,), (1024,))

    def make_fakes(self, *inputs: Any) -> tuple[torch.Tensor, ...]:
        """The forward's outputs as empty tensors."""
        if self.fake is not None:
            return self.fake(*inputs)
        self.check(*inputs)
        return (torch.empty_like(inputs[0], memory_format=torch.contiguous_format),)

    def take_sample(self, inputs: Sequence[Any], rows: int) -> Sequence[Any]:
        """Cut the arguments to about `rows` rows."""
        if self.sample is not None:
            return self.sample(self.Args(*inputs), rows)
        columns = max(self.sharding.columns(*inputs), 1)
        return take_rows(inputs, rows, columns, self.weights_at)

    def find_regime(self, inputs: Sequence[Any]) -> Any:
        """What decides which tile or path serves these inputs; None: nothing does."""
        return None if self.regime is None else self.regime(self.Args(*inputs))

    def draws(self, inputs: Sequence[Any]) -> bool:
        """Whether the op drops elements of these inputs."""
        return self.seed_at is not None and inputs[self.seed_at] is not None

    def why_not(self, backend: str, inputs: Sequence[Any]) -> str | None:
        """Why this backend cannot serve these inputs; None if it can."""
        if backend == EAGER:
            return None
        if backend not in self.sources:
            return f"{self.name} has no {backend} kernel"
        x, its = inputs[0], BACKENDS[backend]
        on_cpu = x.is_cpu  # much cheaper to read than the device's type
        if ("cpu" if on_cpu else x.device.type) not in its.devices:
            # A missing library explains more than an unsupported device.
            return its.why_missing() or (
                f"{self.forward_signature.arguments[0]} is on {x.device};"
                f" it serves {' and '.join(sorted(its.devices))}"
            )
        if reason := its.why_missing() if on_cpu else its.why_not(x.device):
            return reason
        if x.dtype not in self.dtypes:
            return f"no kernel for {x.dtype}"
        if x.is_nested:
            return f"{self.forward_signature.arguments[0]} is a nested tensor, which eager serves"
        if backend != "cpu" and x.dtype == torch.float64:
            return "float64 has a kernel only on the CPU"
        if reason := why_not_now():
            return reason
        return None if self.refuses is None else self.why_refused(backend, inputs)

    def why_refused(self, backend: str, inputs: Sequence[Any]) -> str | None:
        """Why this backend has no kernel for these arguments; None if it has one."""
        if self.refuses is None:
            return None
        names = self.forward_signature.arguments  # the doctor passes fewer inputs
        arguments = dict(zip(names, inputs, strict=False))
        return self.refuses(backend, arguments)
