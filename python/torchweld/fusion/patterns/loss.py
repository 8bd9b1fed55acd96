"""A language model of transformers that computes logits and their loss in its forward."""

from __future__ import annotations

import ast
import copy
import functools
import inspect
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from types import FunctionType
from typing import Any

import torch

from torchweld import functional
from torchweld.dispatch.dtensor import is_dtensor
from torchweld.fusion import probe
from torchweld.fusion.logits import Deferred
from torchweld.fusion.rewrite import (
    CannotRewriteError,
    compile_like,
    parse,
    read_own,
    reads,
    unwrap,
    why_not,
)
from torchweld.fusion.trial import why_not_same
from torchweld.fusion.view import View
from torchweld.fusion.weld import (
    Change,
    Proposal,
    Rewritten,
    Skipped,
    Weld,
    forward_of,
    name_hooks,
    why_not_change,
)
from torchweld.ops.gemm import gemm
from torchweld.ops.gemm.linear_act import linear_as_torch

# A forward calls its model's own loss function, or makes torch's module and calls that.
_LOSS, _CROSS_ENTROPY = "loss_function", "CrossEntropyLoss"
_KNOWN = "transformers.loss.loss_utils"
_SHIFTS = {"ForCausalLMLoss": True, "ForMaskedLMLoss": False}  # whether a label is the next word's
_HEADS = ("lm_head", "embed_out", "output_projection", "cls", "predictions", "proj_out")
_SERVED = {"logits", "labels", "vocab_size", "num_items_in_batch", "ignore_index", "shift_labels"}
_WORDS, _FEATURES = 37, 16  # of the model that is tried


class LanguageLoss(Rewritten):
    """A model whose training steps compute the loss from the head's input.

    Its forward is recompiled from source, in the globals of its file. In training, with labels, it
    returns lazy logits, computed when they are read.
    """

    weld_head_name: str
    weld_path: str
    weld_compiles: bool  # to a loss from the head's input
    weld_others: tuple[str, ...]  # arguments that the loss function takes, and weld_loss does not
    training: bool
    loss_function: Any

    @classmethod
    def weld_rewrite(cls, forward: Any) -> Callable[..., Any]:
        return _rewrite(forward, cls.weld_head_name)

    def _get_name(self) -> str:
        """The class's own name: the Trainer looks it up to decide whether to shift labels."""
        return type(self).__name__

    def weld_get_last(self) -> Any:
        """The linear layer that computes logits: the head, or its last layer."""
        return getattr(self, self.weld_head_name).get_submodule(self.weld_path)

    def weld_head(self, x: Any, labels: Any) -> Any:
        """The logits, deferred where only the loss is wanted."""
        head: Any = getattr(self, self.weld_head_name)
        last = self.weld_get_last()
        wants_loss = labels is not None and self.training and torch.is_grad_enabled()
        if not wants_loss or LossHead not in type(last).__mro__:
            return head(x)
        if last is not head:
            return self.weld_last(head, x)
        if torch.compiler.is_compiling():
            return Deferred(x, head.weight.shape[0]) if self.weld_compiles else head(x)
        on_a_ring = is_dtensor(head.weight) and head.weight.device_mesh.ndim > 1
        if on_a_ring or name_hooks(head, besides="torch.distributed"):
            return head(x)
        return Deferred(x, head.weight.shape[0])

    def weld_last(self, head: Any, x: Any) -> Any:
        """What the head returns if its last layer defers the logits, or the logits themselves."""
        last = self.weld_get_last()
        inside = [head]
        for name in self.weld_path.split("."):
            inside.append(getattr(inside[-1], name))
        hooked = any(name_hooks(module, besides=None) for module in inside)
        if hooked or torch.compiler.is_compiling() or is_dtensor(last.weight):
            return head(x)
        vars(last)["weld_defers"] = True
        try:
            return head(x)
        finally:
            del vars(last)["weld_defers"]

    def weld_loss(self, *args: Any, **kwargs: Any) -> Any:
        """The loss, as transformers' ForCausalLMLoss or ForMaskedLMLoss computes it."""
        arguments = dict(zip(("logits", "labels", "vocab_size"), args, strict=False)) | kwargs
        logits = arguments["logits"]
        if not isinstance(logits, Deferred):
            return self.loss_function(*args, **kwargs)
        head = self.weld_get_last()
        served = _is_known(self.loss_function) and arguments["vocab_size"] == head.weight.shape[0]
        if not served or any(name in arguments for name in self.weld_others):
            return self.loss_function(**arguments | {"logits": logits.compute(head)})
        ignored, count = arguments.get("ignore_index", -100), arguments.get("num_items_in_batch")
        shifts = _SHIFTS[self.loss_function.__name__]
        target = arguments.get("shift_labels") if shifts else arguments["labels"]
        if target is None:
            target = torch.nn.functional.pad(arguments["labels"], (0, 1), value=ignored)[..., 1:]
        target = target.to(logits.x.device).reshape(logits.x.shape[:-1])
        options = {"ignore_index": ignored, **logits.read_options()}
        options["reduction"] = "mean" if count is None else "sum"
        loss = head(logits.x, weld_loss=(target, options))
        if count is None:
            return loss
        return loss / (count.to(loss.device) if isinstance(count, torch.Tensor) else count)

    def weld_cross_entropy(self, loss: Any, logits: Any, target: Any) -> Any:
        """The loss, as torch's CrossEntropyLoss computes it."""
        if not isinstance(logits, Deferred):
            return loss(logits, target)
        head, x = self.weld_get_last(), logits.x
        if type(loss) is not torch.nn.CrossEntropyLoss or target.is_floating_point():
            return loss(logits.compute(head), target)
        names = ("weight", "ignore_index", "reduction", "label_smoothing")
        options = {name: getattr(loss, name) for name in names}
        made = head(x, weld_loss=(target, options | logits.read_options()))
        return made if torch.is_autocast_enabled(x.device.type) else made.to(x.dtype)

    def weld_result(self, logits: Any) -> Any:
        """What the model returns as its logits."""
        head = self.weld_get_last()
        return logits.make_tensor(head) if isinstance(logits, Deferred) else logits


class LossHead(Weld):
    """The layer of a LanguageLoss that computes logits, or the loss in their place."""

    weld_defers = False

    def forward(self, x: Any, weld_loss: Any = None) -> Any:
        own: Any = self
        if weld_loss is None:
            if self.weld_defers:
                return Deferred(x, len(own.weight))
            if gemm.is_converted(x, own.weight, own.bias):
                return linear_as_torch(x, own.weight, own.bias)
            return self.welded_from.forward(self, x)
        target, options = weld_loss
        bias, row = own.bias, options.pop("row")
        if row is not None:
            bias = row if bias is None else bias + row
        # The loss is float32, as with logits.float().
        keeps = x.dtype.itemsize != 2 or torch.is_autocast_enabled(x.device.type)
        with nullcontext() if keeps else torch.autocast(x.device.type, x.dtype):
            return functional.linear_cross_entropy(
                x, own.weight, target, linear_bias=bias, **options
            )


def find_loss(module: torch.nn.Module, view: View) -> Iterator[Proposal | Skipped]:
    """A model of transformers whose forward calls its head, and then its loss.

    The loss is self.loss_function, or torch's CrossEntropyLoss.
    """
    inner = unwrap(forward_of(module))
    if not (reads(inner, _LOSS) or reads(inner, _CROSS_ENTROPY)):
        return
    code = inner.__code__
    what = type(module).__name__
    heads = [name for name in _HEADS if name in code.co_names and name in module._modules]
    head = module._modules[heads[0]] if len(heads) == 1 else None
    path = None if head is None else _find_path(module, head)
    if head is None or path is None:  # a loss of something else than words
        return
    last = head.get_submodule(path)
    reason = _why_not(module, last, heads[0], view)
    # Dynamo follows no tanh of an object, and a CrossEntropyLoss made in a forward is a function.
    compiles = not (reads(inner, _CROSS_ENTROPY) or "tanh" in code.co_names)
    settings = {"head_name": heads[0], "path": path, "compiles": compiles}
    settings["others"] = _list_others(getattr(module, _LOSS, None)) if reason is None else ()
    if reason is None:
        reason = view.ask_once("loss", module, lambda: _why_not_same(module, settings))
    if reason is not None:
        yield Skipped(module, what, reason)
        return
    becomes = "linear_cross_entropy in training, logits when read"
    changes = (Change(module, LanguageLoss, becomes, settings), Change(last, LossHead))
    yield Proposal(module, what, changes, module, tried=True)


def _find_path(module: Any, head: torch.nn.Module) -> str | None:
    """The path from the head to the layer that computes logits, or None if there is none."""
    if not any(True for _ in head.children()):
        return ""
    try:
        last = module.get_output_embeddings()
    except Exception as error:
        probe.read_refusal(error)
        return None
    return next((path for path, part in head.named_modules() if part is last), None)


def _is_known(loss: Any) -> bool:
    return getattr(loss, "__module__", "") == _KNOWN and getattr(loss, "__name__", "") in _SHIFTS


def _list_others(loss: Any) -> tuple[str, ...]:
    """What a loss function and the functions that it calls take, besides what weld_loss does.

    A word in their code may be the name of what they read from their keywords.
    """
    code = getattr(loss, "__code__", None)
    called = [loss, *(loss.__globals__.get(name) for name in code.co_names)] if code else []
    functions = [each for each in called if isinstance(each, FunctionType)]
    taken = {name for each in functions for name in inspect.signature(each).parameters}
    words = (word for each in functions for word in each.__code__.co_consts)
    read = {word for word in words if isinstance(word, str) and word.isidentifier()}
    return tuple(sorted((taken | read) - _SERVED))


def _why_not(module: Any, head: torch.nn.Module, name: str, view: View) -> str | None:
    """Why the model's source, its loss or its head do not allow it, or None."""
    if reason := why_not_change(module) or view.why_not_inner(head, True):
        return reason
    if view.linear(head) != "plain":
        return f"its {name} is a {type(head).__name__}, not a plain linear layer"
    if reads(type(module).forward, _LOSS) and (reason := _why_not_its_function(module)):
        return reason
    return why_not(lambda: _rewrite(type(module).forward, name))


def _why_not_its_function(module: Any) -> str | None:
    try:
        loss = module.loss_function
    except Exception as error:
        return f"its loss function cannot be read: {probe.read_refusal(error)}"
    if not _is_known(loss):
        called = getattr(loss, "__name__", type(loss).__name__)
        return f"its loss function is {called}, not {' or '.join(_SHIFTS)}"
    return None


# --- A trial on a small model ---------------------------------------------------------------------


class _Outputs:
    """What the model's body returns; it has nothing but hidden states."""

    def __init__(self, x: torch.Tensor) -> None:
        self.last_hidden_state = x

    def __getitem__(self, at: Any) -> Any:
        return self.last_hidden_state if at == 0 else ()

    def __getattr__(self, name: str) -> Any:
        return None


class _Body(torch.nn.Module):
    """Stands in for the model's body: returns given hidden states, and has the body's numbers."""

    def __init__(self, hidden_states: list[torch.Tensor], real: Any) -> None:
        super().__init__()
        self.hidden_states = hidden_states
        numbers = (bool, int, float)
        vars(self).update({k: v for k, v in vars(real).items() if isinstance(v, numbers)})

    @property
    def decoder(self) -> _Body:
        """The body of models whose forward calls self.model.decoder."""
        return self

    def forward(self, *args: Any, **kwargs: Any) -> _Outputs:
        return _Outputs(self.hidden_states[0])


class _LossScope(torch.nn.Module):
    """The model with a small head and without a body, called in the ways that trainers do."""

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: torch.Tensor) -> list[Any]:
        for part in self.model.modules():
            if isinstance(part, _Body):
                part.hidden_states[:] = [x]
        places = torch.arange(x[..., 0].numel(), device=x.device).reshape(x.shape[:-1])
        labels = (places * 7 + 3) % _WORDS
        labels = torch.where(places % 3 == 1, -100, labels)
        results = []
        ways: list[dict[str, Any]] = [{}]
        if reads(type(self.model).forward, _LOSS):
            ways += [
                {"num_items_in_batch": 5},
                {"num_items_in_batch": torch.tensor(4, device=x.device)},
                {"shift_labels": labels.flip(-1)},
            ]
        for more in ways:
            # Tokens are not read: the body is gone.
            made = self.model(input_ids=labels.clamp(0), labels=labels, return_dict=True, **more)
            results += [made.loss, made.logits]
        return results


def _shrink(module: Any, name: str, path: str) -> tuple[_LossScope, torch.nn.Linear, int]:
    """The scope to try the changes in, the layer that computes its logits, and its features."""
    head = module._modules[name]
    last: Any = head.get_submodule(path)
    small = torch.nn.Linear(last.in_features if path else _FEATURES, _WORDS, last.bias is not None)
    features = getattr(module.config, "hidden_size", last.in_features) if path else _FEATURES
    shrunk = copy.deepcopy(head, {id(last): small})
    model = torch.nn.Module.__new__(type(module))
    rows = {
        key: torch.zeros(*each.shape[:-1], _WORDS)
        for key, each in module._buffers.items()
        if each is not None and each.shape[-1:] == last.weight.shape[:1]
    }
    empty: dict[str, Any] = {"_parameters": {}, "_buffers": rows}
    children = {
        key: shrunk if key == name else _Body([], child) for key, child in module._modules.items()
    }
    vars(model).update({**vars(module), **empty, "_modules": children})
    vars(model)["config"] = _count_words(module.config)
    if "vocab_size" in vars(model):
        vars(model)["vocab_size"] = _WORDS
    return _LossScope(model), small, features


def _count_words(config: Any) -> Any:
    """A config, and those inside, such as that of its language model, with few words."""
    small = copy.copy(config)
    for name, inner in vars(config).items():
        if hasattr(inner, "vocab_size"):
            vars(small)[name] = _count_words(inner)
    small.vocab_size = _WORDS
    return small


def _why_not_same(module: torch.nn.Module, settings: dict[str, Any]) -> str | None:
    """How the loss and its gradients differ on a small model, or None."""
    device = torch.device("cpu")
    try:
        scope, last, features = _shrink(module, settings["head_name"], settings["path"])
        changes = (Change(scope.model, LanguageLoss, "", settings), Change(last, LossHead))
        inputs = [probe.values((2, 5, features), device)]
        return why_not_same(scope, changes, inputs, device, drops=False)
    except Exception as error:
        return probe.read_refusal(error)


# --- Source ---------------------------------------------------------------------------------------


def _rewrite(forward: Any, head: str) -> Callable[..., Any]:
    """The forward with `self.weld_head` and `self.weld_loss` for the head and the loss function."""
    tree, function = parse(forward)
    names = [argument.arg for argument in function.args.args]
    if "labels" not in names:
        raise CannotRewriteError("its forward takes no labels")
    calls = _LossCalls(names[0], head, reads(forward, _LOSS))
    tree = calls.visit(tree)
    if calls.heads != 1 or calls.losses != 1 or calls.logits is None:
        raise CannotRewriteError(
            f"its forward does not assign {head}'s result once and call one loss once"
        )
    tree = _Results(names[0], calls.logits).visit(tree)
    return functools.wraps(forward)(compile_like(forward, tree, function))


class _LossCalls(ast.NodeTransformer):
    """Replaces the calls of the head and of the loss function, and finds the logits' name."""

    def __init__(self, own: str, head: str, has_function: bool) -> None:
        self.own, self.head, self.has_function = own, head, has_function
        self.heads = self.losses = 0
        self.logits: str | None = None
        self.modules: set[str] = set()  # names of losses of torch's

    def visit_Call(self, node: ast.Call) -> ast.AST:
        self.generic_visit(node)
        name = node.func
        if isinstance(name, ast.Name) and name.id in self.modules:
            self.losses += 1
            method = read_own(self.own, "weld_cross_entropy")
            return ast.Call(method, [name, *node.args], node.keywords)
        if not (isinstance(name, ast.Attribute) and isinstance(name.value, ast.Name)):
            return node
        if name.value.id != self.own:
            return node
        if name.attr == self.head and len(node.args) == 1 and not node.keywords:
            self.heads += 1
            name.attr = "weld_head"
            node.args.append(ast.Name("labels", ast.Load()))
        elif name.attr == _LOSS:
            self.losses += 1
            name.attr = "weld_loss"
        return node

    def visit_Assign(self, node: ast.Assign) -> ast.AST:
        before = self.heads
        self.generic_visit(node)
        target = node.targets[0]
        if len(node.targets) != 1 or not isinstance(target, ast.Name):
            return node
        if self.heads > before:
            self.logits = target.id
        if not self.has_function and _makes_cross_entropy(node.value):
            self.modules.add(target.id)
        return node


def _makes_cross_entropy(value: ast.expr) -> bool:
    called = value.func if isinstance(value, ast.Call) else None
    return _CROSS_ENTROPY in (getattr(called, "id", None), getattr(called, "attr", None))


class _Results(ast.NodeTransformer):
    """Replaces the logits in what the forward returns, and in tuples made for that."""

    def __init__(self, own: str, logits: str) -> None:
        self.own, self.logits = own, logits
        self.inside = False

    def visit_Name(self, node: ast.Name) -> ast.AST:
        if not self.inside or node.id != self.logits or not isinstance(node.ctx, ast.Load):
            return node
        return ast.Call(read_own(self.own, "weld_result"), [node], [])

    def visit_Return(self, node: ast.Return) -> ast.AST:
        return self._replace_inside(node)

    def visit_Tuple(self, node: ast.Tuple) -> ast.AST:
        return self._replace_inside(node)

    def _replace_inside(self, node: ast.AST) -> ast.AST:
        before, self.inside = self.inside, True
        self.generic_visit(node)
        self.inside = before
        return node
