"""What code may decide by that cannot be read as straight, such as a loop over experts.

A trial of a smaller module shows what such code computes for some tokens. It shows no branch that
they do not take. So a condition may read only what is the same in every call, or what the trial
varies: the module's settings, an expert's number, and whether anything is there.
"""

from __future__ import annotations

import ast
import inspect
import itertools
import re
import textwrap
from types import FunctionType

import torch

from torchweld.fusion.rewrite import CannotRewriteError, unwrap, why_not
from torchweld.fusion.settings import is_torchs, list_codes, list_read

# States of torch that no trial has, places of tensors, and random numbers: no code may read these.
_VARIES_NAMES = (
    "environ bfloat16 float16 half is_autocast_enabled is_compiling is_grad_enabled is_inference"
    " is_inference_mode_enabled get_num_threads get_default_dtype requires_grad data_ptr stride"
    " storage_offset is_contiguous bernoulli dropout multinomial normal normal_ rand rand_like"
    " randint randn randn_like random uniform_ initial_seed"
)
_VARIES = frozenset(_VARIES_NAMES.split())
_SIZES = {"shape", "size", "numel", "nelement", "ndim", "dim"}
# Functions of Python that decide by their arguments, that count, and that ask for a setting.
_DECIDE = {"all", "any", "bool", "float", "max", "min"}
_COUNT = {"enumerate", "len", "zip"}
_ASK = {"getattr", "hasattr", "isinstance"}
# How many rows or numbers there are of something.
_COUNTED = re.compile(r"(?:len\()?(\w+)(?:\)|\.shape\[0\]|\.size\(0\)|\.numel\(\)|\.nelement\(\))")


def why_it_varies(module: torch.nn.Module) -> str | None:
    """Why a module's forward may compute something else on other calls, or None."""
    methods = _list_methods(type(module))
    helpers = [value for *_, value in list_read(methods) if isinstance(value, FunctionType)]
    functions = dict.fromkeys([*methods, *helpers])
    codes = [code for each in functions for code in list_codes(each.__code__)]
    named = sorted(_VARIES.intersection(name for code in codes for name in code.co_names))
    if named:
        return f"its code reads {' and '.join(named)}, which may change"
    return next(filter(None, (why_not(_VariationReader(each).read) for each in functions)), None)


def _list_methods(cls: type) -> tuple[FunctionType, ...]:
    """A class's forward and the methods that it calls, without their decorators."""
    classes = itertools.takewhile(lambda each: each is not torch.nn.Module, cls.__mro__)
    owned = [vars(each) for each in classes]
    found, names = list[FunctionType](), ["forward"]
    for name in names:  # which grows
        for value in (own.get(name) for own in owned):
            function = unwrap(value.fget if isinstance(value, property) else value)
            if function is not None and not is_torchs(function):
                found.append(function)
                read = {each for code in list_codes(function.__code__) for each in code.co_names}
                names += sorted(read.difference(names))
    return tuple(found)


class _VariationReader:
    """Looks at what a function decides by."""

    def __init__(self, function: FunctionType) -> None:
        self._function = function
        self._locals = {*function.__code__.co_varnames}
        # Names of what is the same in every call, of what is not, and of sizes.
        self._fixed, self._other, self._sizes = {"self"}, set[str](), set[str]()

    def read(self) -> None:
        """Refuse a condition that may be another one on other calls."""
        tree = ast.parse(textwrap.dedent(inspect.getsource(self._function))).body[0]
        if not isinstance(tree, ast.FunctionDef):
            raise CannotRewriteError("its code has a function that is not defined by itself")
        for statement in (*tree.body, *tree.body):  # what a loop assigns, its next turn reads
            self._visit(statement)

    def _visit(self, node: ast.AST) -> None:
        match node:
            case ast.Try() | ast.Match():
                _refuse(node)
            case ast.If(test=test) | ast.IfExp(test=test) | ast.While(test=test):
                self._decide(test)
            case ast.For(target=target, iter=several) | ast.comprehension(target, several):
                if self._has_size(several):
                    _refuse(several)
                self._keep(target, ast.Constant(0))
            case ast.BoolOp(values=values):
                self._decide(*values[:-1])
            case ast.Call(func=ast.Name(id=name), args=args) if name in _DECIDE:
                self._decide(*args)
            case ast.Compare(ops=[ast.Is() | ast.IsNot() | ast.In() | ast.NotIn()]):
                self._decide(node)
            case ast.Compare() if self._has_size(node):
                self._decide(node)
            case ast.BinOp(op=op) | ast.AugAssign(op=op) if self._has_size(node):
                if isinstance(op, (ast.FloorDiv, ast.Mod, ast.RShift)):
                    _refuse(node)  # zero up to some size
        # The names of a comprehension are known before what it computes of them.
        children = ast.iter_child_nodes(node)
        for child in sorted(children, key=lambda each: not isinstance(each, ast.comprehension)):
            self._visit(child)
        match node:
            case ast.comprehension(ifs=ifs):
                self._decide(*ifs)
            case ast.Assign(targets=targets, value=value):
                for target in targets:
                    self._keep(target, value)
            case ast.NamedExpr(target=target, value=value):
                self._keep(target, value)
            case ast.AugAssign(target=target) | ast.AnnAssign(target=target):
                self._other |= _list_names(target)  # a loop counts by it
                self._keep(target, node)

    def _keep(self, target: ast.expr, value: ast.AST) -> None:
        """Keep what is known of a value for the names that get it."""
        names = _list_names(target)
        if not self._is_fixed(value):
            self._other |= names
        if self._has_size(value):
            self._sizes |= names
        self._fixed = (self._fixed | names) - self._other

    def _decide(self, *tests: ast.expr) -> None:
        for test in tests:
            if not self._is_fixed(test):
                _refuse(test)

    def _is_fixed(self, node: ast.AST) -> bool:
        """Whether a value is the same in every call, or one that the trial varies."""
        match node:
            case ast.BoolOp(values=values):
                return all(map(self._is_fixed, values))
            case ast.UnaryOp(op=ast.Not(), operand=operand):
                return self._is_fixed(operand)
            case ast.Compare(ops=[ast.Is() | ast.IsNot()], comparators=[ast.Constant(value=None)]):
                return True
            case ast.Compare(left=left, ops=[_], comparators=[ast.Constant(value=0)]):
                counted = _COUNTED.fullmatch(ast.unparse(left))
                return self._is_fixed(left) or bool(counted and counted[1] in self._locals)
        known = self._fixed | _DECIDE | _COUNT | _ASK | {"int"}
        return _is_width(node) or _list_names(node) <= known

    def _has_size(self, node: ast.AST) -> bool:
        """Whether a value may be the number of rows, or computed from it."""
        match node:
            case _ if _is_width(node) or self._is_fixed(node):
                return False
            case ast.Name(id=name):
                return name in self._sizes
            case ast.Attribute(attr=name) | ast.Call(func=ast.Attribute(attr=name)) if (
                name in _SIZES
            ):
                return True
            case ast.Call(func=ast.Name(id=name)) if name in _COUNT:
                return True
            case ast.Call(func=ast.Attribute(value=value)) if ast.unparse(value) != "math":
                return False  # a tensor, whose size this may be
            case ast.Attribute():
                return False
        return any(map(self._has_size, ast.iter_child_nodes(node)))


def _refuse(node: ast.AST) -> None:
    text = ast.unparse(node).partition("\n")[0]
    raise CannotRewriteError(f"its code decides by `{text}`, which may change")


def _list_names(node: ast.AST) -> set[str]:
    return {each.id for each in ast.walk(node) if isinstance(each, ast.Name)}


def _is_width(node: ast.AST) -> bool:
    """Whether a value is the size of a tensor's last dimension."""
    match node:
        case ast.Subscript(value=ast.Attribute(attr="shape"), slice=last):
            return ast.unparse(last) == "-1"
        case ast.Call(func=ast.Attribute(attr="size"), args=[last]):
            return ast.unparse(last) == "-1"
    return False
