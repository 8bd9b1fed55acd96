"""What Dynamo answers a forward that asks whether it is compiled, or branches on a number.

A region's graph runs in eager torch and has to compute what the forward computes there. Dynamo
tells each forward that it is compiled, and libraries compute other things then: transformers makes
a causal mask where it is compiled, and none where it finds by the numbers of its arguments that
none is needed. So the answer is no, and the branch on numbers that follows is decided by the
numbers of this call: small functions of the inputs, which every later call compares before its
graph runs.

All names of Dynamo's tracer that have an underscore or may change are here.
"""

from __future__ import annotations

import contextlib
import dis
import re
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import torch
from torch import _meta_registrations
from torch._dynamo import symbolic_convert, trace_rules
from torch._dynamo.exc import BackendCompilerFailed, Unsupported
from torch._dynamo.variables.constant import ConstantVariable
from torch._dynamo.variables.nn_module import NNModuleVariable, UnspecializedNNModuleVariable
from torch._dynamo.variables.tensor import TensorVariable
from torch._dynamo.variables.torch import TorchInGraphFunctionVariable

from torchweld import state
from torchweld.dispatch.warm import generate
from torchweld.fusion import refusals
from torchweld.fusion.graph import evaluated, repeat, shortcuts
from torchweld.fusion.graph.record import Record, recording

LARGEST = 64  # operations between a graph's inputs and a number that decides a branch
_QUESTIONS = ("compiler.is_compiling", "compiler.is_dynamo_compiling", "_utils.is_compiling")
_OURS = (
    *(f"{Path(path).parent}/" for path in (torch.__file__, __file__.split("/fusion/")[0])),
    generate.FILES,
)
_HANDS = (TensorVariable, NNModuleVariable, UnspecializedNNModuleVariable)
_MARK = torch._dynamo.mark_static_address  # says of a tensor that it stays in its place
_now = threading.local()


class OtherNumbersError(Exception):
    """A number that decided a branch at the capture is another one. Nothing has run yet."""


def holds(number: torch.Tensor, wanted: bool) -> None:
    """Stands in a graph for a branch that was decided."""


# Errors that another way to capture does not change: of the model's code, and of a backend.
_NO_FAULT = (Unsupported, BackendCompilerFailed)


class Answers:
    """The answers of one kind of capture. `decides` says whether it may branch on numbers."""

    # Lines of functions without tensors whose eager way Dynamo cannot follow: they are told yes.
    told_yes: ClassVar[set[tuple[Any, int]]] = set()

    def __init__(self, decides: bool) -> None:
        self.decides = decides
        self.repeats = repeat.Repeats() if decides and evaluated.IS_KNOWN else None
        self._denied: list[list[Any]] = []  # the frames that were told no, from the outermost one

    @contextlib.contextmanager
    def serve(self) -> Iterator[None]:
        _install()
        before, _now.answers = getattr(_now, "answers", None), self
        self._denied = []
        try:
            with _allowing(_find(state.CAPTURING[1])), _allowing(_MARK):
                yield
        finally:
            _now.answers = before

    def is_yes(self, tx: Any) -> bool:
        """What a frame is told that asks whether it is compiled."""
        if tx.f_code is state.has_compiler.__code__:
            return False
        if tx.f_code.co_filename.startswith(_OURS):
            return True  # torch has its own ways for Dynamo, and so has torchweld
        frames = list(_list_frames(tx))
        if any((each.f_code, each.lineno) in self.told_yes for each in frames):
            return True
        self._denied.append([(each.f_code, each.lineno, _has_tensors(each)) for each in frames])
        return False

    def learn(self, error: BaseException) -> bool:
        """After a capture failed: whether another attempt may help.

        It is without copies of layers if that failed, or with a yes, which changes no tensor.
        """
        if self.repeats is not None and self.repeats.made and not isinstance(error, _NO_FAULT):
            self.repeats = None
            return True
        stack = _FRAME.findall(str(error))
        for frames in reversed(self._denied):
            common = None
            for (code, line, has_tensors), (path, at, name) in zip(frames, stack, strict=False):
                if (code.co_filename, code.co_name) != (path, name):
                    break
                common = code, line, has_tensors
                if line != int(at):
                    break
            if common is not None and not common[2]:  # it failed in a function without tensors
                self.told_yes.add(common[:2])
                return True
        return False


_FRAME = re.compile(r'File "(.+?)", line (\d+), in (\w+)')


def _list_frames(tx: Any) -> list[Any]:
    """The frames that Dynamo is in, from the outermost one."""
    frames = []
    while tx is not None:
        frames.append(tx)
        tx = tx.parent
    return frames[::-1]


def _has_tensors(tx: Any) -> bool:
    """Whether a frame has a tensor or a module among its variables."""
    found = []

    def look(value: Any) -> None:
        if hasattr(value, "peek_value") and not value.is_realized():
            found.append(isinstance(value.peek_value(), (torch.Tensor, torch.nn.Module)))
        else:
            found.append(isinstance(value, _HANDS))

    symbolic_convert.VariableTracker.visit(look, dict(tx.symbolic_locals))
    return any(found)


# --- Numbers that decide branches -----------------------------------------------------------------


def _decide(tx: Any, value: Any) -> Any:
    """The truth of a tensor with one element in this call, as a constant; None: it is no constant.

    The graph gets a mark, so that later calls compare it.
    """
    if not isinstance(value, TensorVariable):
        return None
    proxy = value.as_proxy()
    try:
        number = _read(tx, proxy.node)
    except Exception as error:  # e.g. on the meta device
        refusals.raise_others(error)
        return None
    if number is None:
        return None
    tx.output.create_proxy("call_function", holds, (proxy, number), {})
    return ConstantVariable.create(number)


def _read(tx: Any, node: torch.fx.Node) -> bool | None:
    """The number in this call; None if it is no small function of the inputs as they came in."""
    cut = _cut(node)
    if cut is None:
        return None
    mode, record = tx.output.fake_mode, Record()
    fakes = [holder.meta["example_value"] for holder in cut.holders]
    with mode, recording(record), mode.shape_env.suppress_guards():
        cut.run(*fakes)
    if any(step.writes or step.is_random for step in record.steps):
        return None
    memory = {x.untyped_storage()._cdata for x in record.values}
    for each in node.graph.nodes:
        if may_write(each) and not memory.isdisjoint(_list_memory(each)):
            return None
    numbers = [holder.meta["grapharg"].example for holder in cut.holders]
    numbers = [x.node.hint if isinstance(x, torch.SymInt) else x for x in numbers]
    with torch.no_grad():
        return bool(cut.run(*numbers))


_OPERATORS = {"and_", "or_", "not_", "is_"}  # Python's, which are words
_IN_PLACE = {f"i{name}" for name in ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow")}
_IN_PLACE |= {f"i{name}" for name in ("and", "or", "xor", "lshift", "rshift", "matmul")}
_IN_PLACE |= {f"__{name}__" for name in _IN_PLACE}


def may_write(node: torch.fx.Node) -> bool:
    """Whether a node has the name of an operation that writes in place."""
    name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
    is_in_place = name.endswith("_") and not name.endswith("__") and name not in _OPERATORS
    writes = is_in_place or name in _IN_PLACE or "set" in name or "out" in node.kwargs
    return node.op not in ("placeholder", "get_attr") and writes


def _list_memory(node: torch.fx.Node) -> set[int]:
    values = [each.meta.get("example_value") for each in node.all_input_nodes]
    return {x.untyped_storage()._cdata for x in values if isinstance(x, torch.Tensor)}


def _list_ancestors(node: torch.fx.Node) -> set[torch.fx.Node] | None:
    """A node and all that it is computed from; None if that is much, or no plain operations."""
    found, waiting = {node}, [node]
    while waiting:
        each = waiting.pop()
        is_other = isinstance(each.target, torch._ops.HigherOrderOperator)
        if is_other or each.op not in ("placeholder", "call_function", "call_method"):
            return None
        new = set(each.all_input_nodes) - found
        found |= new
        waiting += new
        if len(found) > LARGEST:
            return None
    return found


class _Cut(NamedTuple):
    """The part of a graph that computes a number: its nodes, a module and the module's inputs."""

    nodes: set[torch.fx.Node]
    run: torch.fx.GraphModule
    holders: list[torch.fx.Node]


def _cut(result: torch.fx.Node) -> _Cut | None:
    nodes = _list_ancestors(result)
    if nodes is None:
        return None
    graph = torch.fx.Graph()
    copies: dict[torch.fx.Node, torch.fx.Node] = {}
    ordered = [node for node in result.graph.nodes if node in nodes]
    for node in ordered:
        copies[node] = graph.node_copy(node, copies.__getitem__)
    graph.output(copies[result])
    holders = [node for node in ordered if node.op == "placeholder"]
    return _Cut(nodes, torch.fx.GraphModule({}, graph), holders)


def take_out(module: torch.fx.GraphModule) -> Callable[..., None] | None:
    """Take the decided branches out of a graph; returns what compares them for the inputs."""
    marks = [node for node in module.graph.nodes if node.target is holds]
    if not marks:
        return None
    cuts = [cut for mark in marks if (cut := _cut(mark.all_input_nodes[0])) is not None]  # all
    wanted = [mark.args[1] for mark in marks]
    for mark in reversed(marks):
        module.graph.erase_node(mark)
    places = {node: at for at, node in enumerate(module.graph.find_nodes(op="placeholder"))}
    tests = [
        (cut.run, [places[holder] for holder in cut.holders], number)
        for cut, number in zip(cuts, wanted, strict=True)
    ]
    pure = set().union(*(cut.nodes for cut in cuts))
    for node in reversed(list(module.graph.nodes)):
        if node in pure and node.op != "placeholder" and not node.users:
            module.graph.erase_node(node)
    module.recompile()

    def compare(*args: Any) -> None:
        with torch.no_grad():
            for run, inputs, number in tests:
                if bool(run(*[args[at] for at in inputs])) != number:
                    raise OtherNumbersError

    return compare


# --- Dynamo's tables ------------------------------------------------------------------------------


def _answer(handle: Callable[..., Any]) -> Callable[..., Any]:
    def handle_question(variable: Any, tx: Any, *args: Any, **kwargs: Any) -> Any:
        answers = getattr(_now, "answers", None)
        if answers is None or answers.is_yes(tx):
            return handle(variable, tx, *args, **kwargs)
        return ConstantVariable.create(False)

    return handle_question


def _branch(jump: Callable[..., Any]) -> Callable[..., Any]:
    def jump_or_decide(tx: Any, inst: Any) -> Any:
        if _decides():
            number = _decide(tx, tx.stack[-1].realize())
            if number is not None:
                tx.pop()
                tx.push(number)
        return jump(tx, inst)

    return jump_or_decide


def _call_layer(evaluate: Callable[..., Any]) -> Callable[..., Any]:
    def call_or_copy(module: Any, tx: Any, args: Any, kwargs: Any) -> Any:
        repeats = getattr(getattr(_now, "answers", None), "repeats", None)
        if repeats is None or not hasattr(type(module.value), "weld_captures"):
            return evaluate(module, tx, args, kwargs)
        return repeats.call(evaluate, module, tx, args, kwargs)

    return call_or_copy


def _item(method: Callable[..., Any]) -> Callable[..., Any]:
    def read_or_decide(variable: Any, *args: Any, **kwargs: Any) -> Any:
        if _decides() and variable.dtype is torch.bool:
            tx = args[0] if args else symbolic_convert.InstructionTranslator.current_tx()
            number = _decide(tx, variable)
            if number is not None:
                return number
        return method(variable, *args, **kwargs)

    return read_or_decide


def _attribute(read: Callable[..., Any]) -> Callable[..., Any]:
    """Dynamo does not guard on what made a tensor: a leaf's graph would serve results of others."""

    def read_or_refuse(variable: Any, tx: Any, name: str) -> Any:
        if name in _OF_AUTOGRAD and getattr(_now, "answers", None) is not None:
            raise Unsupported(f"a forward reads {name} of a tensor, which no guard compares")
        return read(variable, tx, name)

    return read_or_refuse


_OF_AUTOGRAD = ("grad_fn", "is_leaf", "retains_grad", "output_nr")


def _widen(find_sizes: Callable[..., Any]) -> Callable[..., Any]:
    """torch's own sizes of grouped products refuse dtypes that its kernels take."""

    def find_any_sizes(a: torch.Tensor, b: torch.Tensor, *rest: Any, **named: Any) -> Any:
        is_served = getattr(_now, "answers", None) is not None
        if not is_served or a.dtype is not b.dtype or a.dtype not in (torch.float32, torch.float16):
            return find_sizes(a, b, *rest, **named)
        made = find_sizes(a.to(torch.bfloat16), b.to(torch.bfloat16), *rest, **named)
        return made.to(a.dtype)

    return find_any_sizes


def _decides() -> bool:
    answers = getattr(_now, "answers", None)
    return answers is not None and answers.decides


def _tell_capturing(variable: Any, tx: Any, *args: Any, **kwargs: Any) -> Any:
    """Whether a stream captures, which is a key of a region's graphs."""
    is_served = getattr(_now, "answers", None) is not None
    return ConstantVariable.create(state.is_capturing_at_all()) if is_served else None


def _pass_over(variable: Any, tx: Any, *args: Any, **kwargs: Any) -> Any:
    """A call that changes nothing of what is computed, nor of what eager torch runs."""
    return ConstantVariable.create(None) if getattr(_now, "answers", None) is not None else None


@contextlib.contextmanager
def _allowing(function: Any) -> Iterator[None]:
    """Let Dynamo ask its table for a function that it leaves out or forbids otherwise."""
    allowed = trace_rules._allowed_callable_ids
    is_new = function is not None and id(function) not in allowed()
    is_forbidden = getattr(function, "_dynamo_forbidden", False)
    if is_new:
        allowed.add(id(function))
    if is_forbidden:
        function._dynamo_forbidden = False
    try:
        yield
    finally:
        if is_new:
            allowed.remove(id(function))
        if is_forbidden:
            function._dynamo_forbidden = True


_PLACES: tuple[tuple[Any, str, Callable[..., Any]], ...] = (
    (_meta_registrations, "_meta_grouped_mm_common", _widen),
    (TensorVariable, "method_item", _item),
    (TensorVariable, shortcuts.READ, _attribute),
    (UnspecializedNNModuleVariable, "call_function", _call_layer),
    *shortcuts.PLACES,
)
_lock = threading.Lock()
_installed: set[int] = set()


def _install() -> None:
    """Put the functions above into Dynamo's tables, once; without answers they do nothing."""
    with _lock:
        handlers = TorchInGraphFunctionVariable._get_handlers()
        if id(handlers) in _installed:
            return
        # All names are read before anything is changed: another Dynamo may lack one.
        made = [(home, name, wrap(getattr(home, name))) for home, name, wrap in _PLACES]
        for question in (_find(name) for name in _QUESTIONS):
            if question in handlers:
                handlers[question] = _answer(handlers[question])
        for name in state.CAPTURING:
            if (question := _find(name)) is not None:  # not of XPU in torch 2.10
                handlers.setdefault(question, _tell_capturing)
        handlers.setdefault(_MARK, _pass_over)
        for home, name, function in made:
            setattr(home, name, function)
        table: Any = getattr(TensorVariable, "tp_methods", {})  # torch 2.14 calls methods by it
        if "item" in table:
            table["item"] = type(table["item"])(TensorVariable.method_item)
        shortcuts.install(lambda: getattr(_now, "answers", None) is not None)
        jumps = [dis.opmap[name] for name in dis.opmap if re.search("JUMP.*_IF_(TRUE|FALSE)", name)]
        for cls in shortcuts.list_subclasses(symbolic_convert.InstructionTranslatorBase):
            for opcode in jumps:
                if (jump := cls.dispatch_table[opcode]) is not None:
                    cls.dispatch_table[opcode] = _branch(jump)
        _installed.add(id(handlers))


def _find(name: str) -> Any:
    found: Any = torch
    for part in name.split("."):
        found = getattr(found, part, None)
    return found
