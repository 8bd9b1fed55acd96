"""A graph of Dynamo, run on fake tensors: which node makes which tensor, by which steps."""

from __future__ import annotations

import contextlib
import operator
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import torch
from torch._guards import TracingContext
from torch.utils._pytree import tree_leaves, tree_map

from torchweld import state
from torchweld.fusion.graph.answers import may_write
from torchweld.fusion.graph.record import Record, Ref, find_storage, read_casts, recording

_AUTOCAST = (torch.amp.autocast_mode._enter_autocast, torch.amp.autocast_mode._exit_autocast)
# What computes but where Dynamo may note no value.
_WITHOUT_VALUES = (operator.setitem, operator.getitem, *_AUTOCAST)
_COUNTERS = (torch._C._log_api_usage_once,)  # they do nothing to what is computed
# Dynamo leaves the call where code asks; regions ask before each run.
_QUESTIONS = (state.is_transforming,)
_VALUES: tuple[type, ...] = (
    torch.Tensor,
    torch.SymInt,
    torch.SymFloat,
    torch.SymBool,
    int,
    float,
    complex,
    str,
)
_VALUES += (torch.dtype, torch.device, torch.layout, torch.memory_format, type(None), slice)
# What begins and ends torch.vmap, and by how many levels.
_BATCHING = {"lazy_load_decompositions": 0, "_vmap_increment_nesting": 1}
_BATCHING |= {"_vmap_decrement_nesting": -1}
_CHECKPOINT = torch.ops.higher_order.tag_activation_checkpoint


class CannotTraceError(RuntimeError):
    """What runs in the graph cannot be told from its operations."""


class Trace(torch.fx.Interpreter):
    """What a graph computes: a record, and for each node its place, its value and its steps.

    A node that does something else than to compute, such as to enter autocast or to register a
    hook, begins another epoch.
    """

    def __init__(self, module: torch.fx.GraphModule, mode: Any) -> None:
        super().__init__(module)
        self.record, self.mode = Record(), mode
        self.nodes = list(module.graph.nodes)
        self.place = {node: at for at, node in enumerate(self.nodes)}
        self.value: dict[torch.fx.Node, Any] = {}  # with Refs for tensors
        self.maker: dict[int, torch.fx.Node] = {}  # the first node that returns a tensor
        self._returning: dict[int, dict[torch.fx.Node, None]] = defaultdict(dict)
        self._made: dict[torch.fx.Node, list[int]] = defaultdict(list)
        self.effects: set[torch.fx.Node] = set()
        self._batches = 0  # levels of torch.vmap
        self.casts: dict[int, Any] = {0: read_casts()}

    @classmethod
    def of(cls, module: torch.fx.GraphModule) -> Trace:
        """Trace a graph whose nodes Dynamo made."""
        holders = [node for node in module.graph.nodes if node.op == "placeholder"]
        given = [node.meta.get("example_value") for node in holders]
        # The mode of Dynamo's own trace; the one in its context is for fresh tensors of backends.
        modes = {x.fake_mode for x in given if state.is_fake(x)}
        if len(modes) != 1:
            raise CannotTraceError("its inputs are no tensors")
        trace = cls(module, modes.pop())
        with trace.quietly(), torch.no_grad():
            # Other tensors with the same memory, since a graph may change sizes in place.
            fresh = [x.detach() if isinstance(x, torch.Tensor) else x for x in given]
        with trace.quietly(), recording(trace.record):
            trace.run(*fresh, enable_io_processing=False)
        return trace

    @contextlib.contextmanager
    def quietly(self) -> Iterator[None]:
        """Run on fake tensors without adding guards on sizes, or sizes."""
        environment, context = self.mode.shape_env, TracingContext.try_get()
        with self.mode, contextlib.ExitStack() as stack:
            if context is not None:  # DTensors of torch 2.10 take its mode
                stack.callback(setattr, context, "fake_mode", context.fake_mode)
                context.fake_mode = self.mode
            if environment is not None:
                stack.enter_context(environment.suppress_guards())
                # Of sizes that are data; the graph's own are known to Dynamo.
                stack.enter_context(environment.ignore_fresh_unbacked_symbols())
            yield

    def run_node(self, node: torch.fx.Node) -> Any:
        self.record.node = self.place[node]
        if node.op == "output":
            return None
        for given in node.all_input_nodes:
            if isinstance(x := self.env.get(given), torch.Tensor):
                # After a write it has a new number.
                self._make(self.record.number(x), given)
        out = self._run(node)
        value = tree_map(
            lambda x: Ref(self.record.number(x)) if isinstance(x, torch.Tensor) else x, out
        )
        self.note(node, value)
        if isinstance(out, torch.Tensor):
            self._make(self.record.number(out), node)
        return out

    def _make(self, number: int, node: torch.fx.Node) -> None:
        if number not in self.maker:
            self.maker[number] = node
            self._made[node].append(number)

    def note(self, node: torch.fx.Node, value: Any) -> None:
        """Note what a node returns."""
        self.value[node] = value
        if isinstance(value, Ref):
            self._returning[value.at][node] = None

    def forget(self, node: torch.fx.Node) -> None:
        """Forget what a node returned."""
        value = self.value.pop(node, None)
        if isinstance(value, Ref):
            self._returning[value.at].pop(node, None)

    def erase(self, node: torch.fx.Node) -> None:
        """Take a node out of the graph."""
        node.graph.erase_node(node)
        self.forget(node)
        for number in self._made.pop(node, ()):
            if self.maker.get(number) is node:
                del self.maker[number]

    def _run(self, node: torch.fx.Node) -> Any:
        if node.op == "get_attr":
            value = super().run_node(node)
            is_real = isinstance(value, torch.Tensor) and not state.is_fake(value)
            return self.mode.from_tensor(value) if is_real else value
        if node.op == "placeholder":
            return super().run_node(node)
        if isinstance(node.target, torch._ops.HigherOrderOperator):  # its body is another graph
            self._begin_epoch(node)
            return node.meta["example_value"]
        if node.target in _COUNTERS or (node.target in _QUESTIONS and not node.users):
            return None
        if self._batches or _name(node) in _BATCHING:
            return self._pass_over(node)
        if node.target is torch._C._set_grad_enabled:
            self._begin_epoch(node)
            return None
        if node.target == "item" and isinstance(node.meta.get("example_value"), torch.SymInt):
            self._begin_epoch(node)
            return node.meta["example_value"]  # another run would make another symbol
        computes = "example_value" in node.meta or node.target in _WITHOUT_VALUES
        if not computes or "functorch" in str(node.target):
            raise CannotTraceError(f"it calls {_name(node)}")
        out = super().run_node(node)
        if node.target in _AUTOCAST or not all(isinstance(x, _VALUES) for x in tree_leaves(out)):
            self._begin_epoch(node)
        return out

    def _pass_over(self, node: torch.fx.Node) -> Any:
        """Within torch.vmap nothing runs; what leaves it has the value that Dynamo found."""
        leaves = self._batches == 1 and _name(node) == "_remove_batch_dim"
        self._batches += _BATCHING.get(_name(node), 0)
        if may_write(node):
            raise CannotTraceError(f"torch.vmap calls {_name(node)}")
        self._begin_epoch(node)
        return node.meta["example_value"] if leaves else None

    def _begin_epoch(self, node: torch.fx.Node) -> None:
        self.effects.add(node)
        self.record.epoch += 1
        self.casts[self.record.epoch] = read_casts()

    # --- Questions

    def list_returning(self, number: int) -> list[torch.fx.Node]:
        """The nodes that return a tensor; some return their input."""
        return list(self._returning[number])

    def list_results(self) -> list[torch.fx.Node]:
        """The nodes that the graph returns."""
        return [x for x in tree_leaves(self.nodes[-1].args[0]) if isinstance(x, torch.fx.Node)]

    def describe_results(self) -> list[Any]:
        """Sizes, strides and shared memory of what the graph returns."""
        owners: dict[int, str] = {}
        described: list[Any] = []
        for node in self.nodes:
            if node.op == "placeholder" and isinstance(self.value[node], Ref):
                storage = find_storage(self.record.values[self.value[node].at])
                owners.setdefault(storage, f"input {self.place[node]}")
        for at, node in enumerate(self.list_results()):
            ref = self.value[node]
            if isinstance(ref, Ref):
                x = self.record.values[ref.at]
                owner = owners.setdefault(find_storage(x), f"result {at}")
                sizes = str(tuple(x.shape)), str(x.stride()), str(x.storage_offset())
                described.append((*sizes, x.dtype, x.device, owner))
            else:
                described.append(str(ref))
        return described


def _name(node: torch.fx.Node) -> str:
    return str(getattr(node.target, "__name__", node.target))


def list_bodies(module: torch.fx.GraphModule) -> Iterator[torch.fx.GraphModule]:
    """The bodies of activation checkpoints in a graph."""
    for node in module.graph.nodes:
        if node.op == "call_function" and node.target is _CHECKPOINT:
            body = getattr(module, str(node.args[0].target))
            if isinstance(body, torch.fx.GraphModule):
                yield body


def checkpoint(module: torch.fx.GraphModule) -> None:
    """Let activation checkpoints in a graph run as in eager torch, with their random state."""
    for node in list(module.graph.nodes):
        if node.op == "call_function" and node.target is _CHECKPOINT:
            node.target = _run_checkpointed
            module.recompile()


def _run_checkpointed(body: Any, *args: Any, **kwargs: Any) -> Any:
    from torch.utils.checkpoint import checkpoint as run

    options: dict[str, Any] = {**kwargs, "use_reentrant": False}
    options.pop("preserve_rng_state", None)  # False would be for compilers, which functionalize it
    if (context := body.meta.get("_checkpoint_context_fn")) is not None:
        options["context_fn"] = context
    return run(body, *args, **options)
