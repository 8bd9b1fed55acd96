"""What a module computes by itself: its forward, recorded on fake tensors.

Nothing runs, and the module does not change. All sizes of the inputs but the last are symbols: a
forward that decides by them is recorded as none.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple, TypeVar

import torch
from torch._dispatch.python import enable_python_dispatcher
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext

from torchweld import isolate, state
from torchweld.fusion import refusals
from torchweld.fusion.graph.normal import aten
from torchweld.fusion.graph.patterns.activation import Activation, list_acts
from torchweld.fusion.graph.prove import Proposal, Prover, autocast_as
from torchweld.fusion.graph.record import Record, Step, list_devices, list_refs, recording

Forward = Callable[..., Any]  # of a module and its inputs
_Found = TypeVar("_Found")


class CannotRecordError(Exception):
    """Why a forward is not recorded."""


class State(NamedTuple):
    """What a forward may ask for.

    Attributes:
        dtype: of all floating tensors; None: their own.
        training: of the module and its parts; None: their own.
        grads: whether gradients are on.
        inference: whether inference mode is.
        casts: whether autocast is.
        transposed: whether the first two dimensions of inputs have each other's strides.
    """

    dtype: torch.dtype | None = None
    training: bool | None = None
    grads: bool = True
    inference: bool = False
    casts: bool = False
    transposed: bool = False

    @contextlib.contextmanager
    def within(self, device: str) -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            if self.casts:
                cast = torch.autocast(device, torch.bfloat16, cache_enabled=False)
                stack.enter_context(cast)
            stack.enter_context(torch.inference_mode(self.inference))
            stack.enter_context(torch.set_grad_enabled(self.grads))
            # torch 2.10's products of more than two dimensions ask for sizes as numbers otherwise.
            stack.enter_context(enable_python_dispatcher())
            yield


# A forward that is the same in all of them takes no other branch.
STATES = (
    State(torch.float32, True),
    State(torch.bfloat16, True),
    State(torch.float32, False, grads=False, transposed=True),
    State(torch.float32, False, grads=False, inference=True),
    State(torch.float32, True, casts=True),
)


class Alone:
    """A call of a module by itself.

    Attributes:
        record: its steps.
        names: of the numbers of inputs: the paths of the module's tensors, and ".0" of the first
            argument.
        outputs: numbers of what it returns.
    """

    def __init__(
        self,
        module: torch.nn.Module,
        forward: Forward,
        inputs: Sequence[torch.Tensor],
        state: State | None = None,
    ) -> None:
        """Record a call.

        Args:
            module: a module.
            forward: a function of the module and its inputs.
            inputs: tensors with the inputs' sizes, dtypes and devices.
            state: what the forward may ask for; None: gradients are on.
        """
        state = state or State()
        self._module, self._state, self.record = module, state, Record()
        self._device = inputs[0].device.type
        own = [*module.named_parameters(), *module.named_buffers()]
        self._own = [id(t) for _, t in own]
        with _apart():
            environment = ShapeEnv()
            self.mode = FakeTensorMode(shape_env=environment)
            with self.mode:
                fakes = [_make_fake(t, state) for _, t in own]
            given = [_make_symbolic(self.mode, x, state) for x in inputs]
            names = [*(name for name, _ in own), *(f".{at}" for at in range(len(given)))]
            self.names = {
                self.record.number(x): name for name, x in zip(names, [*fakes, *given], strict=True)
            }
            out = self._run(forward, [*fakes, *given])
        if environment.guards:
            raise CannotRecordError("its forward decides by the sizes of its input")
        self._check_grads()
        self._is_tuple = isinstance(out, tuple)
        results = out if isinstance(out, tuple) else (out,)
        if not all(isinstance(x, torch.Tensor) for x in results):
            raise CannotRecordError("it returns something else than tensors")
        self.outputs = [self.record.number(x) for x in results]

    def _run(self, forward: Forward, tensors: list[torch.Tensor]) -> Any:
        twin, given = self._place(tensors)
        before = _list_attributes(twin)
        try:
            with self.mode, recording(self.record), self._state.within(self._device):
                out = forward(twin, *given)
        except Exception as error:
            refusals.raise_others(error)
            text = f"{type(error).__name__}: {str(error)[:200]}"
            raise CannotRecordError(f"its forward does not run on fake tensors: {text}") from error
        after = _list_attributes(twin)
        if before.keys() != after.keys() or any(after[at] is not x for at, x in before.items()):
            raise CannotRecordError("its forward changes its attributes")
        return out

    def _check_grads(self) -> None:
        """Refuse a forward that computes a part without gradients, or changes one by a hook."""
        values = self.record.values
        if any(x._backward_hooks for x in values):
            raise CannotRecordError("its forward registers a hook")
        for step in self.record.steps if self._state.grads else ():
            if isinstance(step.func, str) or self._is_saved(step):
                continue
            given = [values[at] for at in list_refs((step.args, step.kwargs))]
            made = [x for at in step.outs if (x := values[at]).is_floating_point()]
            needs = made and any(x.requires_grad for x in given)
            if needs and not any(x.requires_grad for x in made):  # a norm's statistics need none
                raise CannotRecordError("its forward computes a part without gradients")

    def _is_saved(self, step: Step) -> bool:
        """Whether a step is autograd's, which saves a result."""
        return step.func is aten.detach.default and not self.record.users[step.outs[0]]

    def _place(self, tensors: Sequence[torch.Tensor]) -> tuple[Any, Sequence[torch.Tensor]]:
        """The module with other tensors, and the inputs."""
        twin = _copy(self._module, dict(zip(self._own, tensors, strict=False)))
        if self._state.training is not None:
            twin.train(self._state.training)
        return twin, tensors[len(self._own) :]

    def why_not(self, reference: Forward) -> str:
        """Why the forward is not what a reference with the same arguments is; "" if it is."""

        def run(*tensors: torch.Tensor) -> Any:
            twin, given = self._place(tensors)
            out = reference(twin, *given)
            results = out if isinstance(out, tuple) else (out,)
            if isinstance(out, tuple) != self._is_tuple or len(results) != len(self.outputs):
                raise ValueError("it returns other results")
            return out

        return self._prove(Proposal("", [*self.names], self.outputs, run, run))

    def list_whole(self, find: Callable[[Record, int], Iterable[Proposal]]) -> Iterator[Proposal]:
        """The proven welds that are all of the forward."""
        for at in range(len(self.record.steps)):
            for proposal in find(self.record, at):
                if proposal.outputs == self.outputs and not self._prove(proposal):
                    yield proposal

    def list_kinds(self) -> list[Activation]:
        """The activations in the forward."""
        steps = range(len(self.record.steps))
        return list({kind: None for at in steps for _, _, kind in list_acts(self.record, at)})

    def _prove(self, proposal: Proposal) -> str:
        with _apart(), self._state.within(self._device):
            found = Prover(self.record, self.mode).prove(proposal)
        if not isinstance(found, set):
            return found.text
        rest = (step for at, step in enumerate(self.record.steps) if at not in found)
        acting = next((step for step in rest if step.writes or step.is_random), None)
        return "" if acting is None else f"it also calls {acting.name}"


class Known:
    """Caches answers about modules. Modules of equal class, sizes and attributes share one."""

    def __init__(self) -> None:
        self._found: dict[Any, Any] = {}
        self._kept: list[Any] = []  # so that no other object gets its id

    def find(self, ask: Callable[[Any], _Found], module: torch.nn.Module) -> _Found:
        """What `ask` answers about a module, or has answered about one that is equal."""
        key = (ask, *(self._describe(path, part) for path, part in module.named_modules()))
        if key not in self._found:
            self._found[key] = ask(module)
        return self._found[key]  # type: ignore[no-any-return]

    def _describe(self, path: str, part: torch.nn.Module) -> Any:
        own = dict(vars(part))
        tensors = [
            (kind, name, t if t is None else (t.shape, t.stride(), t.dtype, t.device))
            for kind in ("_parameters", "_buffers")
            for name, t in own.pop(kind).items()
        ]
        parts = tuple(own.pop("_modules"))
        others = tuple((n, type(x), self._name(x)) for n, x in own.items() if n not in state.HOOKS)
        return path, type(part), parts, (*tensors,), others

    def _name(self, value: Any) -> Any:
        try:
            hash(value)
        except TypeError:
            if isinstance(value, dict):
                return tuple((name, type(x), self._name(x)) for name, x in value.items())
            if isinstance(value, (list, tuple, set)):
                return tuple((type(x), self._name(x)) for x in value)
            self._kept.append(value)
            return id(value)
        return value


@contextlib.contextmanager
def _apart() -> Iterator[None]:
    """Without the caller's modes and autocast."""
    off = tuple((kind, False, torch.get_autocast_dtype(kind)) for kind in list_devices())
    with refusals.unlogged(), isolate.leave_modes(), autocast_as(off):
        yield


def _make_fake(t: torch.Tensor, state: State) -> torch.Tensor:
    is_float = t.is_floating_point()
    dtype = state.dtype if state.dtype and is_float else t.dtype
    made = torch.empty_strided(t.shape, t.stride(), dtype=dtype, device=t.device)
    return made.requires_grad_(is_float and isinstance(t, torch.nn.Parameter) and state.grads)


def _make_symbolic(mode: Any, x: torch.Tensor, state: State) -> torch.Tensor:
    is_float = x.is_floating_point()
    x = x.to(state.dtype) if state.dtype and is_float else x
    if state.transposed and x.dim() > 2:
        x = x.transpose(0, 1).contiguous().transpose(0, 1)
    sizes = [DimDynamic.DUCK] * (x.dim() - 1) + [DimDynamic.STATIC]
    context: Any = StatelessSymbolicContext(dynamic_sizes=sizes)
    made = mode.from_tensor(x, symbolic_context=context)
    # torch's linear layer multiplies in another way where gradients are needed.
    return made.requires_grad_(is_float and state.grads)  # type: ignore[no-any-return]


def _copy(module: Any, tensors: dict[int, torch.Tensor]) -> Any:
    """A shallow copy of a module and its parts with other tensors and no hooks."""
    own, copied = vars(module), object.__new__(type(module))
    attributes = {**own, **{name: type(own[name])() for name in state.HOOKS}}
    for kind in ("_parameters", "_buffers"):
        attributes[kind] = {n: None if t is None else tensors[id(t)] for n, t in own[kind].items()}
    parts = own["_modules"].items()
    attributes["_modules"] = {n: None if p is None else _copy(p, tensors) for n, p in parts}
    vars(copied).update(attributes)
    return copied


def _list_attributes(module: torch.nn.Module) -> dict[tuple[str, str], Any]:
    return {
        (path, name): value
        for path, part in module.named_modules()
        for name, value in (*vars(part).items(), *part._parameters.items(), *part._buffers.items())
    }
