"""Runs twins on small inputs, without side effects on the caller."""

from __future__ import annotations

import inspect
import random
import re
import signal
import traceback
import warnings
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any, NamedTuple

import numpy
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from torchweld.dispatch.choice import use_backend
from torchweld.dispatch.proof import is_out_of_memory
from torchweld.fusion.twin import CannotCopyError
from torchweld.numerics import have_equal_numbers

_SEED = 21
_LARGE = 2**22
_GLOBAL_HOOKS = [
    value
    for name, value in vars(torch.nn.modules.module).items()
    if name.startswith("_global_") and isinstance(value, dict)
]


@contextmanager
def isolate(devices: Collection[torch.device]) -> Iterator[None]:
    """Run without the caller's random states, global hooks and modes, and restore them."""
    saved = [dict(hooks) for hooks in _GLOBAL_HOOKS]
    python, arrays = random.getstate(), numpy.random.get_state()
    # Use kernels for small inputs too.
    cuda = [device for device in devices if device.type == "cuda"]
    kernels = nullcontext() if cuda else use_backend("cpu", "eager")
    on_meta = torch.get_default_device().type == "meta"
    # A call seeds all GPUs that are in use.
    gpus = range(torch.cuda.device_count()) if torch.cuda.is_initialized() else ()
    try:
        for hooks in _GLOBAL_HOOKS:
            hooks.clear()
        with (
            torch.random.fork_rng(gpus),
            torch.inference_mode(False),
            torch.enable_grad(),
            torch.autocast("cuda" if cuda else "cpu", enabled=False),
            torch.device("cpu") if on_meta else nullcontext(),
            kernels,
            warnings.catch_warnings(),
        ):
            warnings.simplefilter("ignore")
            yield
    finally:
        for hooks, before in zip(_GLOBAL_HOOKS, saved, strict=True):
            hooks.update(before)
        random.setstate(python)
        numpy.random.set_state(arrays)


def values(shape: Sequence[int], device: torch.device) -> torch.Tensor:
    """Standard normal rows. Every second row is small, so that an epsilon matters."""
    generator = torch.Generator().manual_seed(_SEED)
    numbers = torch.empty(shape, dtype=torch.float32, device="cpu").normal_(generator=generator)
    rows = numbers.view(-1, shape[-1])
    rows[1::2] *= 1e-3
    return numbers.to(device)


class Results(NamedTuple):
    """A run's outputs, then its gradients and buffers. A gradient that does not exist is None."""

    outputs: list[torch.Tensor]
    others: list[torch.Tensor | None]


def run(
    module: torch.nn.Module,
    inputs: Sequence[Any],
    dtype: torch.dtype,
    within: AbstractContextManager[Any] | None = None,
) -> Results:
    """Run a module forward and backward on inputs cast to this dtype.

    The forward pass and the backward pass each run `within` a context.
    """
    within = within or nullcontext()
    arguments = [_make_leaf(value, dtype) for value in inputs]
    with within:
        result = call(module, arguments)
    outputs = [value for value in tree_leaves(result) if isinstance(value, torch.Tensor)]
    leaves = [value for value in arguments if isinstance(value, torch.Tensor)]
    leaves += [parameter for parameter in module.parameters() if parameter.requires_grad]
    graphs = [value for value in outputs if value.requires_grad]
    grads: list[torch.Tensor | None] = [None] * len(leaves)
    if graphs:
        # Not in the direction of the inputs, along which a norm's gradient is zero.
        heads = [
            values(y.shape or (1,), y.device).flip(-1).view(y.shape).to(y.dtype) for y in graphs
        ]
        with within:
            grads = list(torch.autograd.grad(graphs, leaves, heads, allow_unused=True))
    return Results([y.detach() for y in outputs], [*grads, *module.buffers()])


def freeze_large(module: torch.nn.Module) -> None:
    """Skip the slow gradients of a twin's large parameters; one check per dtype is enough."""
    for parameter in module.parameters():
        if parameter.numel() > _LARGE:
            parameter.requires_grad_(False)


def call(module: torch.nn.Module, inputs: Sequence[Any], seed: int = _SEED) -> Any:
    """Call a module. Every call with the same seed draws the same random numbers."""
    torch.default_generator.manual_seed(seed)
    if torch.cuda.is_initialized():  # else torch.manual_seed would replace the user's seed of GPUs
        torch.cuda.manual_seed_all(seed)
    random.seed(seed)
    numpy.random.seed(seed)
    return module(*inputs)


def read_random_states() -> tuple[Any, ...]:
    """How far the generators are that a call seeds."""
    cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []
    states = [state.numpy().tobytes() for state in (torch.default_generator.get_state(), *cuda)]
    _, keys, *others = numpy.random.get_state(legacy=True)
    return (*states, random.getstate(), numpy.asarray(keys).tobytes(), *others)


def depends_on_seed(module: torch.nn.Module, inputs: Sequence[Any], dtype: torch.dtype) -> bool:
    """Whether calls with two seeds return different numbers."""
    with torch.no_grad():
        arguments = [_make_leaf(value, dtype) for value in inputs]
        a, b = (tree_leaves(call(module, arguments, seed)) for seed in (_SEED, _SEED + 1))
    pairs = [pair for pair in zip(a, b, strict=True) if isinstance(pair[0], torch.Tensor)]
    return not all(have_equal_numbers(*pair) for pair in pairs)


def _make_leaf(value: Any, dtype: torch.dtype) -> Any:
    return value.detach().to(dtype, copy=True).requires_grad_() if value is not None else None


# --- Inputs ---------------------------------------------------------------------------------------


def find_inputs(module: torch.nn.Module, device: torch.device) -> list[Any] | str:
    """Find inputs on which a twin runs, or the reason why there are none."""
    names = name_required(module)
    if names is None or not names:
        return "it takes no input by position"
    freeze_large(module)
    reason = "it did not run: nothing in it says how wide its input is"
    for width in _list_widths(module):
        for shape in ((2, 5, width), (10, width), (2, 3, 4, width), (2, width, 4, 4)):
            x = values(shape, device)
            rest = len(names) - 1
            for others in ([None] * rest, [x] * rest) if rest else ([],):
                try:
                    run(module, [x, *others], torch.float32)
                except Exception as raised:
                    reason = read_refusal(raised)
                else:
                    return [x, *others]
    return reason


def vary(inputs: Sequence[Any]) -> Iterator[tuple[str, list[Any]]]:
    """Vary inputs so that a module may take another path: by values, lengths and dimensions.

    With four dimensions, the second is as long as the last: a norm over the second would show.
    """
    # The largest ones reach limits, such as the largest number of 16 bits.
    changes = (torch.Tensor.abs, lambda x: -x.abs(), lambda x: 30 * x, lambda x: 1e6 * x)
    for seed, change in enumerate(changes):
        others = [_map_floating(x, lambda x: change(_draw_like(x, seed))) for x in inputs]  # noqa: B023
        yield "other values", others
    tensors = [x for x in inputs if isinstance(x, torch.Tensor)]
    if not all(x.ndim == 3 and x.is_floating_point() for x in tensors):
        return
    yield "one token", [_map_floating(x, lambda x: x[:, :1]) for x in inputs]
    yield "one dimension", [_map_floating(x, lambda x: x[0, 0]) for x in inputs]
    yield "two dimensions", [_map_floating(x, lambda x: x[0]) for x in inputs]
    widths = {x.shape[-1] for x in tensors}
    second = min(widths) if len(widths) == 1 and min(widths) <= _SQUARE else 3
    for shape, what in (((2, second), "three"), ((1, second, 2), "four")):
        yield (
            f"{what} dimensions",
            [_map_floating(x, lambda x: values((*shape, x.shape[-1]), x.device)) for x in inputs],  # noqa: B023
        )


_SQUARE = 2048  # the widest input that is tried with as many tokens


def _map_floating(value: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    floating = isinstance(value, torch.Tensor) and value.is_floating_point()
    return change(value) if floating else value


def _draw_like(x: torch.Tensor, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(x.shape, generator=generator).to(x.device, x.dtype)


def name_required(module: torch.nn.Module) -> list[str] | None:
    """Name a call's first argument and its other required arguments."""
    parameters = [
        p
        for p in inspect.signature(module.forward).parameters.values()
        if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD, p.VAR_POSITIONAL)
    ]
    others = [
        p.name for p in parameters[1:] if p.default is p.empty and p.kind is not p.VAR_POSITIONAL
    ]
    return [parameters[0].name, *others] if parameters else None


def _list_widths(module: torch.nn.Module) -> list[int]:
    """List the widths to try for an input: the widths of the layers, in order."""
    widths: dict[int, None] = {}
    for part in module.modules():
        weight = getattr(part, "weight", None)
        if isinstance(weight, torch.Tensor) and weight.ndim in (1, 2):
            width = getattr(part, "in_features", None)
            sizes = (weight.shape[-1], weight.shape[0]) if width is None else (width,)
            widths.update(dict.fromkeys(sizes))
    return list(widths)[:4]


# Errors of a module's code on inputs that it does not take.
_REFUSALS = (
    *(ArithmeticError, AssertionError, AttributeError, ImportError, LookupError, NameError),
    *(RuntimeError, TypeError, ValueError),
)


def read_refusal(error: Exception) -> str:
    """Say why a module does not run in a trial, in one short line.

    Other errors are raised again: whatever a signal's handler raised, or a lack of memory.
    """
    refuses = isinstance(error, _REFUSALS) or type(error) is Exception
    if not refuses or is_out_of_memory(error) or was_raised_by_handler(error):
        raise error
    text = str(error)
    if missing := re.search(r"missing \d+ required [^:]*: (.*)", text):
        return f"it did not run: its forward also needs {missing[1]}"
    if isinstance(error, CannotCopyError):
        return text
    return f"it did not run: {type(error).__name__}{_find_place(error)}"


def was_raised_by_handler(error: Exception) -> bool:
    """Whether the handler of a signal raised it, as for a timeout."""
    handlers = [signal.getsignal(number) for number in signal.valid_signals()]
    codes = {getattr(handler, "__code__", None) for handler in handlers if callable(handler)}
    return any(frame.f_code in codes for frame, _ in traceback.walk_tb(error.__traceback__))


def _find_place(error: Exception) -> str:
    """Where a module's code raised: the innermost line outside of torch and torchweld."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if not frame.filename.startswith(_LIBRARIES)]
    return f" in {own[-1].name} ({Path(own[-1].filename).name}:{own[-1].lineno})" if own else ""


_LIBRARIES = (str(Path(torch.__file__).parent), str(Path(__file__).parents[1]))


# --- What runs after what -------------------------------------------------------------------------


class Edge(NamedTuple):
    """A module and the consumer of its result: a module, or the name of a function.

    Softmax and dropout as functions are edges of the module that calls them.
    """

    producer: torch.nn.Module
    consumer: torch.nn.Module | str


_FUNCTIONS: dict[Any, str] = {
    getattr(torch.nn.functional, name): f"torch.nn.functional.{name}"
    for name in ("gelu", "relu", "silu", "sigmoid", "tanh")
} | {torch.relu: "torch.relu", torch.sigmoid: "torch.sigmoid", torch.tanh: "torch.tanh"}
_OF_CALLER: dict[Any, str] = {
    torch.nn.functional.softmax: "softmax",
    torch.softmax: "softmax",
    torch.Tensor.softmax: "softmax",
    torch.nn.functional.dropout: "dropout",
    torch.dropout: "dropout",
    torch.nn.functional.layer_norm: "layer_norm",
    torch.nn.functional.rms_norm: "rms_norm",
    torch.rms_norm: "rms_norm",
    torch.nn.functional.cross_entropy: "cross_entropy",
}
FUNCTIONS = {**_FUNCTIONS, **_OF_CALLER}


class _Watch(TorchFunctionMode):
    """Records which module produces a tensor, and which consumes it."""

    def __init__(self) -> None:
        super().__init__()
        self.makers: dict[int, torch.nn.Module] = {}
        self.edges: list[Edge] = []
        self._outputs: list[Any] = []  # alive, so that ids stay unique
        self._running: list[torch.nn.Module] = []

    def __torch_function__(
        self, function: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if self._running and not is_leaf(caller := self._running[-1]):
            if function in _FUNCTIONS and args:  # of a part of a layer's result, the caller's
                maker = self.makers.get(id(args[0]), caller)
                self.edges.append(Edge(maker, _FUNCTIONS[function]))
            elif function in _OF_CALLER:
                self.edges.append(Edge(caller, _OF_CALLER[function]))
        return function(*args, **(kwargs or {}))

    def before(self, module: torch.nn.Module, args: Any, kwargs: Any) -> None:
        self._running.append(module)
        if is_leaf(module):
            for value in tree_leaves((args, kwargs)):
                if id(value) in self.makers:
                    self.edges.append(Edge(self.makers[id(value)], module))

    def after(self, module: torch.nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        self._running.pop()
        if is_leaf(module):
            self._outputs.append(output)
            if isinstance(output, torch.Tensor):
                self.makers[id(output)] = module


def watch(module: torch.nn.Module, inputs: Sequence[Any]) -> list[Edge]:
    """Run a twin in training, and list the edges between its leaves."""
    watching = _Watch()
    handles = []
    for part in module.modules():
        handles.append(part.register_forward_pre_hook(watching.before, with_kwargs=True))
        handles.append(part.register_forward_hook(watching.after, with_kwargs=True))
    try:
        module.train()
        with watching:
            call(module, inputs)
    finally:
        for handle in handles:
            handle.remove()
    return watching.edges


def is_leaf(module: torch.nn.Module) -> bool:
    """Whether a module contains no others, or only modules that compute its parameters."""
    return module._modules.keys() <= {"parametrizations"}
