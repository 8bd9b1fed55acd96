"""Training steps of a model as CUDA graphs: the host then starts two of them, not each kernel."""

from __future__ import annotations

import functools
import inspect
import sys
import warnings
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, TypeVar
from unittest import mock

import torch
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from torchweld import state
from torchweld.dispatch import choice
from torchweld.dispatch.warm.guards import INCOMPARABLE, Guard, is_constant, make_guard
from torchweld.dispatch.warm.sizes import Varying
from torchweld.errors import ArgumentError
from torchweld.fusion.logits import LastLayer, Logits
from torchweld.warmup import warmup

# The alike call that is captured: trials have been made by then, and short ways found.
_CAPTURED_AT = 3
_DEVICE = "cuda"
_FSDP = {"FSDPModule", "FullyShardedDataParallel"}
_Model = TypeVar("_Model", bound=torch.nn.Module)


def keep_graphs(model: _Model, kinds: int = 4) -> _Model:
    """Have a model on a GPU run its training steps as CUDA graphs, in place.

    The third call of a kind is captured, by `torch.cuda.make_graphed_callables`: its forward and
    its backward pass are two graphs. Later calls of this kind replay them, with dropout that
    advances. Calls are of one kind if their arguments differ only in the numbers of tensors, and
    if autocast, the default dtype, torch's switches of precision and attention, the modules, their
    modes and the places of their parameters are the same. All other calls run the model's own
    forward: in evaluation, without gradients, on the CPU, with sparse tensors, with hooks of all
    modules, before the backward pass of the last call has run, under torch.compile, and of more
    than `kinds` kinds. So do calls of a model that cannot be captured; a warning says why.

        torchweld.keep_graphs(torchweld.fuse(model))

    The capture keeps settings that are no parameters or buffers, such as a module's rate of
    dropout. `del model.forward` ends it and frees the graphs; repr(model.forward) lists them.

    Args:
        model: any module, without DistributedDataParallel or FSDP around it.
        kinds: the most kinds of calls to keep graphs of. Each has memory of its own.

    Returns:
        The model.
    """
    if not isinstance(model, torch.nn.Module):
        raise ArgumentError(
            "keep_graphs", "model", f"a {type(model).__name__}", "a torch.nn.Module"
        )
    if isinstance(model, torch.nn.parallel.DistributedDataParallel):
        accepted = "the module inside, before it is wrapped"
        raise ArgumentError("keep_graphs", "model", "a DistributedDataParallel", accepted)
    if not isinstance(kinds, int) or kinds < 1:
        raise ArgumentError("keep_graphs", "kinds", kinds, "a number from 1")
    kept = model.__dict__.get("forward")
    before = kept.before if isinstance(kept, _KeptGraphs) else kept
    model.forward = _KeptGraphs(model, kinds, before)
    return model


class _RefusedError(Exception):
    """Why a call cannot be captured."""


class _KeptGraphs:
    """The forward of a model that keeps graphs."""

    def __init__(self, model: torch.nn.Module, most: int, before: Any) -> None:
        self.model, self.most, self.before = model, most, before
        self.kinds: list[_Kind] = []  # the last used first
        self.last: Callable[[], _CapturedStep | None] = lambda: None

    def __reduce__(self) -> Any:
        """Copies and pickles capture graphs of their own."""
        return _KeptGraphs, (self.model, self.most, self.before)

    @property
    def __wrapped__(self) -> Callable[..., Any]:
        """The model's own forward, whose signature this one has."""
        return self.before or functools.partial(type(self.model).forward, self.model)

    def __repr__(self) -> str:
        lines = [f"forward of {type(self.model).__name__}, {len(self.kinds)} kinds of calls:"]
        return "\n  ".join([*lines, *map(repr, self.kinds)])

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if state.is_compiling() or not (self.model.training and torch.is_grad_enabled()):
            return self.__wrapped__(*args, **kwargs)
        leaves, spec = tree_flatten((args, kwargs))
        kind = None
        if _may_capture(leaves):
            kind = self._find(leaves, (spec, *_describe_state(), *_list(self.model)))
        if kind is None:
            return self.__wrapped__(*args, **kwargs)
        waits = (last := self.last()) is not None and not last.ran
        if kind.calls == _CAPTURED_AT and kind.graph is None and not (kind.reason or waits):
            self._capture(kind, leaves, spec)
        if kind.graph is None or waits:
            return self.__wrapped__(*args, **kwargs)
        step = _CapturedStep(kind.graph)
        self.last = weakref.ref(step)
        return step.run([leaf for leaf in leaves if isinstance(leaf, torch.Tensor)])

    def _find(self, leaves: Sequence[Any], key: tuple[Any, ...]) -> _Kind | None:
        """The kind of a call, which may be new; None if later calls like it are not recognised."""
        kind = next((kind for kind in self.kinds if kind.holds(leaves, key)), None)
        if kind is None:
            matches = _make_guard(leaves)
            if matches is None:
                return None
            shapes = [list(leaf.shape) for leaf in leaves if isinstance(leaf, torch.Tensor)]
            kind = _Kind(matches, key, shapes)
        kind.calls = min(kind.calls + 1, _CAPTURED_AT)
        self.kinds = [kind, *[other for other in self.kinds if other is not kind]][: self.most]
        return kind

    def _capture(self, kind: _Kind, leaves: Sequence[Any], spec: TreeSpec) -> None:
        try:
            kind.graph = _capture(self.model, self.__wrapped__, leaves, spec)
        except Exception as error:
            cause: BaseException = error
            while cause.__context__ is not None:  # the end of a capture raises an error of its own
                cause = cause.__context__
            kind.reason = str(cause).partition("\n")[0] or type(cause).__name__
            warnings.warn(
                f"keep_graphs: {type(self.model).__name__} runs without a graph: {kind.reason}",
                RuntimeWarning,
                stacklevel=5,
            )


class _Kind:
    """Calls that are alike, and their graph."""

    def __init__(self, matches: Guard, key: tuple[Any, ...], shapes: Sequence[Any]) -> None:
        self._matches, self._key, self._shapes = matches, key, shapes
        self.calls = 0
        self.graph: _Graph | None = None
        self.reason: str | None = None

    def holds(self, leaves: Sequence[Any], key: tuple[Any, ...]) -> bool:
        """Whether a call is of this kind."""
        try:
            return key == self._key and self._matches(*leaves)
        except INCOMPARABLE:
            return False

    def __repr__(self) -> str:
        return (
            f"{self._shapes}: {'a graph' if self.graph else self.reason or f'{self.calls} calls'}"
        )


def _may_capture(leaves: Sequence[Any]) -> bool:
    tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
    return (
        bool(tensors)
        and all(t.device.type == _DEVICE and not t.is_nested for t in tensors)
        and not torch.nn.modules.module._has_any_global_hook()
        and not state.is_transforming()
        and torch._C._autograd._top_saved_tensors_default_hooks(True) is None
        and (_DEVICE != "cuda" or _is_gpu_ready(tensors))
    )


def _is_gpu_ready(tensors: Sequence[torch.Tensor]) -> bool:
    """Whether the tensors are on the current GPU, whose streams a capture takes."""
    current = torch.cuda.current_device()
    is_there = all(t.get_device() == current for t in tensors)
    return is_there and not state.is_capturing()


def _make_guard(leaves: Sequence[Any]) -> Guard | None:
    """Recognises calls with such leaves, of any strides: a graph has inputs of its own."""
    tensors = {at: leaf for at, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)}
    sizes: dict[int, list[int | None]] = {at: [*t.shape] for at, t in tensors.items()}
    strides: dict[int, list[int | None]] = {at: [None] * t.ndim for at, t in tensors.items()}
    return make_guard(leaves, varying=Varying(sizes, strides, ()))


# How cuBLAS adds, and which kernels serve scaled_dot_product_attention.
_SWITCHES: tuple[Callable[[], Any], ...] = (
    torch._C._get_cublas_allow_bf16_reduced_precision_reduction,
    torch._C._get_cublas_allow_fp16_reduced_precision_reduction,
    torch._C._get_cublas_allow_fp16_accumulation,
    torch._C._get_math_sdp_allow_fp16_bf16_reduction,
    torch._C._get_flash_sdp_enabled,
    torch._C._get_mem_efficient_sdp_enabled,
    torch._C._get_math_sdp_enabled,
    torch._C._get_cudnn_sdp_enabled,
    torch._C._get_sdp_priority_order,
)


def _describe_state() -> tuple[Any, ...]:
    """The settings outside the model that decide what a call does."""
    enabled = torch.is_autocast_enabled(_DEVICE)
    return (
        enabled and torch.get_autocast_dtype(_DEVICE),
        choice.forced,
        torch.are_deterministic_algorithms_enabled(),
        torch.get_default_dtype(),
        torch.backends.cuda.matmul.fp32_precision,  # by torch's older or newer switch
        *(read() for read in _SWITCHES),
        torch.backends.cudnn.conv.fp32_precision,  # type: ignore[attr-defined]
    )


def _list(model: torch.nn.Module) -> Iterator[Any]:
    """What of the model a graph holds: modules, their modes and hooks, addresses of tensors."""
    for module in model.modules():
        yield type(module)
        yield module.training
        if module is not model:
            yield state.count_hooks(module)
        for tensors in (module._parameters, module._buffers):
            for t in tensors.values():
                if t is not None:
                    yield type(t)
                    yield t.requires_grad
                    yield t.data_ptr() if type(t) in state.PLAIN else id(t)


class _Graph(NamedTuple):
    """A captured call: make_graphed_callables' function, its parameters, and how to return."""

    run: Callable[..., tuple[torch.Tensor, ...]]
    parameters: list[torch.nn.Parameter]
    returned: dict[str, Any]  # what the model returned: `spec` and `places`
    gradients: list[int]  # addresses of the gradients of parameters, once known


class _CapturedStep:
    """A call that a graph serves, until its backward pass has run."""

    def __init__(self, graph: _Graph) -> None:
        self.graph, self.ran = graph, False

    def run(self, inputs: Sequence[torch.Tensor]) -> Any:
        """Replay the forward pass."""
        _free_gradients(self.graph)
        made = self.graph.run(*inputs, *self.graph.parameters)
        node = next(t.grad_fn for t in made if t.grad_fn is not None)
        # The hooks keep this step alive as long as its backward pass may run.
        node.register_prehook(self._begin)
        node.register_hook(functools.partial(self._end, node.next_functions, len(inputs)))
        spec, places = self.graph.returned["spec"], self.graph.returned["places"]
        # Copies: the next replay writes to what this one returned.
        return tree_unflatten([place(made) for place in places], spec)

    def _begin(self, grads: Any) -> None:
        if self.ran:
            raise RuntimeError(
                "keep_graphs: the backward pass of a captured call runs once, and the next call"
                " overwrites what it needs; run such a step with the model's own forward"
            )

    def _end(self, edges: Any, inputs: int, grads: Any, _: Any) -> Any:
        """Note the addresses of gradients, and copy those that autograd does not accumulate."""
        self.ran = True
        self.graph.gradients[:] = [0 if g is None else g.data_ptr() for g in grads[inputs:]]
        return tuple(
            g if g is None or (at >= inputs and _accumulates(edges[at][0])) else g.clone()
            for at, g in enumerate(grads)
        )


def _accumulates(node: Any) -> bool:
    """Whether the running backward pass accumulates a leaf's gradient; grad() returns it."""
    return state.will_run(node) is not None


def _free_gradients(graph: _Graph) -> None:
    """Give gradients that autograd took from the graph's memory some of their own.

    The next replay writes there. It need not copy gradients that were set to None.
    """
    for p, address in zip(graph.parameters, graph.gradients, strict=False):
        if p.grad is not None and p.grad.data_ptr() == address:
            p.grad = p.grad.clone()


def _capture(
    model: torch.nn.Module, forward: Callable[..., Any], leaves: Sequence[Any], spec: TreeSpec
) -> _Graph:
    """Capture a call and its backward pass. Its warm-up changes no buffer and no generator."""
    _check(model)
    parameters = list(model.parameters())
    at = [i for i, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]
    samples = [leaves[i].detach().clone().requires_grad_(leaves[i].requires_grad) for i in at]
    # Leaves of their own: the nodes of the user's may belong to a graph that is still alive, and to
    # another stream. They share the parameters' memory, so that replays copy none.
    proxies = [_make_proxy(p) for p in parameters]
    owners = {id(proxy): p for proxy, p in zip(proxies, parameters, strict=True)}
    returned: dict[str, Any] = {}

    def run(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        given = [*leaves]
        for i, t in zip(at, tensors, strict=False):
            given[i] = t
        args, kwargs = tree_unflatten(given, spec)
        results, returned["spec"] = tree_flatten(forward(*args, **kwargs))
        made, returned["places"] = _sort(results, owners)
        return made

    device = samples[0].device
    enabled, dtype = torch.is_autocast_enabled(_DEVICE), torch.get_autocast_dtype(_DEVICE)
    with (
        torch.random.fork_rng([device.index] if device.type == "cuda" else []),
        torch.autocast(_DEVICE, dtype, enabled, cache_enabled=False),
        _restored([*model.buffers()]),
        _replaced(model, parameters, proxies),
        _masks_as_before(forward, spec, leaves),
        warnings.catch_warnings(),
    ):
        # Where warnings are errors this one would end a capture, which is right nevertheless.
        warnings.filterwarnings("ignore", "The AccumulateGrad node's stream does not match")
        given = (*samples, *proxies)
        # Not by make_graphed_callables, which keeps the last results of its warm-up, and by them
        # nodes of the warm-up's stream.
        warmup(lambda: _run_both_ways(run, given))
        graphed: Any = torch.cuda.make_graphed_callables(
            run, given, num_warmup_iters=0, allow_unused_input=True
        )
    return _Graph(graphed, parameters, returned, [])


def _run_both_ways(run: Callable[..., Any], given: Sequence[torch.Tensor]) -> None:
    made = [t for t in run(*given) if t.requires_grad]
    wanted = [t for t in given if t.requires_grad]
    torch.autograd.grad(made, wanted, [*map(torch.ones_like, made)], allow_unused=True)


def _check(model: torch.nn.Module) -> None:
    for name, module in model.named_modules():
        if any(
            "FSDP" in base.__name__ or "FullySharded" in base.__name__
            for base in type(module).__mro__
        ):
            raise _RefusedError("FSDP gathers its parameters at each call")
        if module is not model and state.count_hooks(module):
            raise _RefusedError(f"{name} has hooks, which a graph does not call")
        if any(type(p) not in state.PLAIN for p in module.parameters(recurse=False)):
            raise _RefusedError(f"{name} has a parameter of a subclass of Tensor")


@contextmanager
def _restored(buffers: Sequence[torch.Tensor]) -> Iterator[None]:
    before = [buffer.clone() for buffer in buffers]
    try:
        yield
    finally:
        with torch.no_grad():
            for buffer, value in zip(buffers, before, strict=True):
                buffer.copy_(value)


def _make_proxy(p: torch.nn.Parameter) -> torch.nn.Parameter:
    proxy = torch.nn.Parameter(p.detach(), p.requires_grad)
    proxy.__dict__.update(p.__dict__)
    return proxy


@contextmanager
def _replaced(
    model: torch.nn.Module,
    old: Sequence[torch.nn.Parameter],
    new: Sequence[torch.nn.Parameter],
) -> Iterator[None]:
    """Replace a model's parameters. A recomputation in the backward pass reads them, too."""
    by_id: dict[int, Any] = {id(p): q for p, q in zip(old, new, strict=True)}
    homes = [module._parameters for module in model.modules()]
    before = [dict(home) for home in homes]
    try:
        for home in homes:
            home.update({name: p if p is None else by_id[id(p)] for name, p in home.items()})
        yield
    finally:
        for home, own in zip(homes, before, strict=True):
            home.update(own)


def _sort(
    results: Sequence[Any], owners: dict[int, torch.nn.Parameter]
) -> tuple[tuple[torch.Tensor, ...], list[Any]]:
    """The tensors that a graph returns, and for each result what makes it of them.

    `owners` are the model's parameters by the ids of those that the capture took.
    """
    made: list[torch.Tensor] = []
    places: list[Any] = []
    for result in results:
        if isinstance(result, Logits) and result.recipe is not None:
            # Logits stay lazy, of a copy of the head's input and the model's own parameters.
            deferred, head = result.recipe
            own: list[Any] = [owners.get(id(t), t) for t in head]
            head = LastLayer(*own)
            places.append(functools.partial(_defer, len(made), deferred, head))
            made.append(deferred.x)
        elif isinstance(result, torch.Tensor):
            places.append(functools.partial(_copy, len(made), result.requires_grad))
            made.append(result)
        elif is_constant(result):
            places.append(functools.partial(_return, result))
        else:
            raise _RefusedError(f"it returns a {type(result).__name__}, which is no tensor")
    if not any(t.requires_grad for t in made):
        raise _RefusedError("no result requires a gradient")
    return tuple(made), places


def _defer(at: int, deferred: Any, head: Any, made: Sequence[torch.Tensor]) -> Any:
    return deferred.with_input(made[at].clone()).make_tensor(head)


def _copy(at: int, requires_grad: bool, made: Sequence[torch.Tensor]) -> torch.Tensor:
    return made[at].clone() if requires_grad else made[at].detach().clone()


def _return(value: Any, _: Sequence[torch.Tensor]) -> Any:
    return value


@contextmanager
def _masks_as_before(
    forward: Callable[..., Any], spec: TreeSpec, leaves: Sequence[Any]
) -> Iterator[None]:
    """Have transformers make no masks of all pairs, which it does in a capture: it cannot read
    there that none is needed.

    Without a mask or positions of the caller, positions that all rows share are no packed ones.
    """
    masks: Any = sys.modules.get("transformers.masking_utils")
    args, kwargs = tree_unflatten(list(leaves), spec)
    given = inspect.signature(forward).bind(*args, **kwargs).arguments
    given = {**given, **given.get("kwargs", {})}
    names = ("attention_mask", "position_ids", "past_key_values")
    if not hasattr(masks, "is_tracing") or any(given.get(name) is not None for name in names):
        yield
        return
    is_tracing, find = masks.is_tracing, masks.find_packed_sequence_indices

    def find_packed(ids: torch.Tensor) -> Any:
        return None if len(ids) > 1 and not ids.stride(0) else find(ids)

    with (
        mock.patch.object(masks, "is_tracing", lambda x=None: x is not None and is_tracing(x)),
        mock.patch.object(masks, "find_packed_sequence_indices", find_packed),
    ):
        yield
