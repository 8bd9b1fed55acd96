"""Dynamo, as regions use it: functions with a code of their own, and what it must guard on.

All names of torch that have an underscore and that captures use are here.
"""

from __future__ import annotations

import collections
import contextlib
import itertools
import logging
import re
import threading
import warnings
from collections.abc import Callable, Iterator
from types import FunctionType
from typing import Any

import torch
import torch._dynamo
from torch._C._dynamo.eval_frame import set_code_exec_strategy
from torch._dynamo import config, convert_frame, eval_frame
from torch._dynamo.eval_frame import OptimizeContext, _debug_get_cache_entry_list
from torch._dynamo.types import FrameAction, FrameExecStrategy

from torchweld import state
from torchweld.fusion import refusals
from torchweld.fusion.graph.answers import Answers, take_out


class CannotCaptureError(Exception):
    """What a capture raises before it runs anything of the call. Its cause is Dynamo's error."""


_numbers = itertools.count()


def make(name: str, backend: Callable[..., Any], whole: bool) -> Callable[..., Any]:
    """A function that runs `run(*args, **kwargs)` by graphs, which `backend` gets.

    `whole` raises an error if the call is not captured as one graph. Dynamo counts variants of a
    code object, and learns from it which sizes change: this function has its own.
    """

    def call(run: Any, args: Any, kwargs: Any) -> Any:
        return run(*args, **kwargs)

    code = call.__code__.replace(co_name=f"{name}_{next(_numbers)}")
    own = FunctionType(code, call.__globals__, name)

    def compile_graph(module: torch.fx.GraphModule, inputs: Any) -> Callable[..., Any]:
        compare = take_out(module)
        ready = backend(module, inputs)
        return ready if compare is None else _in_turn(compare, ready)

    compile_graph.is_torchwelds = True  # type: ignore[attr-defined]
    try:
        context = torch._dynamo.optimize(  # type: ignore[no-untyped-call]
            compile_graph, nopython=whole
        )
        if isinstance(context, OptimizeContext):  # not with TORCHDYNAMO_DISABLE=1
            context.callback = _Patched(context.callback, Answers(decides=whole))
        return context(own)  # type: ignore[no-any-return]
    except (AttributeError, TypeError) as error:  # of a release with another Dynamo
        return _failing(f"torch {torch.__version__} has another Dynamo: {error}")


def _failing(reason: str) -> Callable[..., Any]:
    def call(*_: Any) -> Any:
        raise CannotCaptureError(reason)

    return call


def _in_turn(compare: Callable[..., Any], run: Callable[..., Any]) -> Callable[..., Any]:
    @torch._dynamo.disable
    def call(*args: Any) -> Any:
        compare(*args)
        return run(*args)

    return call


def _without_names(find: Callable[..., Any]) -> Callable[..., Any]:
    """Dynamo imports all of its backends, Inductor too, to wrap one for its minifier."""

    def find_or_take(backend: Any) -> Any:
        return backend if hasattr(backend, "is_torchwelds") else find(backend)

    return find_or_take


eval_frame.get_compiler_fn = _without_names(eval_frame.get_compiler_fn)
# Settings of later versions: what is forgotten after a compilation for known backends only, which
# are imported for that; and a log of what a frame writes.
_LATER: dict[str, Any] = {
    "invalidate_compile_context_weakrefs": False,
    "side_effect_replay_policy": "silent",
}
_LATER = {name: value for name, value in _LATER.items() if hasattr(config, name)}


def is_known(run: Any) -> bool:
    """Whether a function has a graph: none after torch.compiler.reset()."""
    return bool(_debug_get_cache_entry_list(run._torchdynamo_orig_callable.__code__))


def only_known(run: Any) -> Callable[..., Any]:
    """The same function, which captures nothing more; what no graph serves runs as it is."""
    return torch._dynamo.run(run._torchdynamo_orig_callable)  # type: ignore[no-any-return]


# Dynamo's own lock, so that two locks cannot wait for each other.
_LOCK: Any = getattr(convert_frame, "compile_lock", contextlib.nullcontext())


class _Patched:
    """Dynamo's compiler of a frame, with settings for this compilation only."""

    def __init__(self, compile_frame: Any, answers: Answers) -> None:
        vars(self).update(vars(compile_frame))  # torch reads attributes from C
        self._compile_frame, self._answers = compile_frame, answers

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        settings = config.patch(
            skip_nnmodule_hook_guards=False,  # hooks that are registered later count
            recompile_limit=64,  # regions count by themselves
            optimize_ddp=False,  # the graph runs in eager torch, whose hooks fire one by one
            # The name in torch 2.10; later ones have it as an alias.
            ignore_logger_methods=config.ignore_logger_methods | _list_logging(),
            specialize_float=True,  # a factor is a part of what is proven
            **_LATER,
        )
        # Settings, warnings and Dynamo's tables are the process's: one thread captures at a time.
        with _LOCK, warnings.catch_warnings(), settings, refusals.unlogged():
            # Dynamo reads gradients of inputs, which warns, and gives advice how to write models.
            warnings.simplefilter("ignore")
            while True:
                try:
                    with self._answers.serve():
                        return self._compile_frame(*args, **kwargs)
                except Exception as error:  # Dynamo's own errors have many types
                    _raise_others(error)
                    if not self._answers.learn(error):
                        raise CannotCaptureError(str(error)) from error


def _raise_others(error: Exception) -> None:
    """Raise an error that is none of the model's, as it was before Dynamo wrapped it."""
    inner = getattr(error, "inner_exception", None)  # of a backend, which has asked already
    if isinstance(inner, Exception):
        refusals.raise_others(inner)
    before = error.__context__
    if isinstance(before, Exception) and refusals.was_raised_by_handler(error):
        raise before
    refusals.raise_others(error)


def _list_logging() -> set[Any]:
    """Methods of loggers that write: `logger.warning`, and what libraries add to the class."""
    writing = {"debug", "info", "warning", "warn", "error", "exception", "critical", "log"}
    methods = vars(logging.Logger).items()
    return {
        method
        for name, method in methods
        if name in writing or getattr(method, "__module__", "logging") != "logging"
        if callable(method)
    }


_lock = threading.Lock()
_skipping: collections.Counter[Any] = collections.Counter()  # codes


@contextlib.contextmanager
def skipping(code: Any) -> Iterator[None]:
    """Let functions with this code, and all that they call, run outside of what Dynamo runs."""
    _count(code, 1)
    try:
        yield
    finally:
        _count(code, -1)


def _count(code: Any, change: int) -> None:
    with _lock:
        _skipping[code] += change
        # torch.compiler.reset() forgets it: it is set again at each beginning.
        if change > 0 or not _skipping[code]:
            action = FrameAction.SKIP if change > 0 else FrameAction.DEFAULT
            set_code_exec_strategy(code, FrameExecStrategy(action, action))


def is_impossible() -> bool:
    """Whether something is active that sees each operation, so that a call runs as it is."""
    return (
        state.has_other_modes()
        or state.is_transforming()
        or state.is_fx_tracing()
        or state.is_tracing()
        or state.has_forward_ad()
    )


_FRAME = re.compile(r'File "(.+?)", line (\d+), in ')


def explain(error: BaseException) -> str:
    """In one line why a capture failed, with the file and line of the user's code."""
    text = str(error)
    frames = [frame for frame in _FRAME.findall(text) if "/torch/" not in frame[0]]
    where = f" at {frames[-1][0]}:{frames[-1][1]}" if frames else ""
    first = next((line.strip() for line in text.splitlines() if line.strip()), "")
    return f"{first or type(error).__name__}{where}"
