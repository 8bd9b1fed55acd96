"""Products of an activation and another tensor, anywhere in a forward: `F.silu(gate) * up`."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch

from torchweld import functional
from torchweld.fusion.patterns.activation import in_words
from torchweld.fusion.patterns.rotary import rotates
from torchweld.fusion.rewrite import compile_like, look_up, parse, read_own, unwrap, why_not
from torchweld.fusion.view import View
from torchweld.fusion.weld import Proposal, Rewritten, forward_of, propose
from torchweld.ops.activation import ACTIVATIONS

_FUNCTIONS = {
    torch.nn.functional.silu: "silu",
    torch.nn.functional.gelu: "gelu",
    torch.nn.functional.relu: "relu",
    torch.relu: "relu",
    torch.sigmoid: "sigmoid",
    torch.nn.functional.sigmoid: "sigmoid",
}


class Gate(NamedTuple):
    """The activation of a product: a submodule's, or a function's."""

    module: str | None
    activation: Any  # names.ActivationName
    approximate: Any


class GatedProduct(Rewritten):
    """A module whose forward calls `weld_multiply` for its products with an activation.

    The forward is made from its source, in the globals of its file: nothing else in it changes.
    """

    weld_gates: tuple[Gate, ...]

    @classmethod
    def weld_rewrite(cls, forward: Any) -> Callable[..., Any]:
        kinds = {gate.module: gate[1:] for gate in cls.weld_gates if gate.module is not None}
        return compile_like(forward, *_replace_products(forward, kinds)[:2])

    def weld_multiply(self, at: int, gate: Any, up: Any) -> Any:
        """The product number `at`: one pass if the tensors are alike, else the module's own."""
        name, activation, approximate = self.weld_gates[at]
        if (
            isinstance(up, torch.Tensor)
            and up.shape == gate.shape
            and up.dtype is gate.dtype
            and up.is_floating_point()
            and self.weld_may_skip()
        ):
            return functional.gated_act(gate, up, activation=activation, approximate=approximate)
        if name is not None:
            return getattr(self, name)(gate) * up
        return ACTIVATIONS[activation, approximate].function(gate) * up


def find_gated_product(module: torch.nn.Module, view: View) -> Iterator[Proposal]:
    """A module whose forward multiplies the result of an activation by something."""
    inner = unwrap(forward_of(module))
    # Rotary attention, norms with gates and experts have welds of their own.
    own = [p for p in module._parameters.values() if p is not None]
    others = rotates(inner) or any(p.ndim == 3 for p in own) or (own and not module._modules)
    if inner is None or others:
        return
    kinds = {
        name: kind for name, c in module._modules.items() if c and (kind := view.activation(c))
    }
    names = {*kinds, "silu", "gelu", "relu", "sigmoid"}
    if names.isdisjoint(inner.__code__.co_names):
        return
    found: list[tuple[Gate, ...]] = []
    if (
        why_not(lambda: found.append(_replace_products(forward_of(module), kinds)[2]))
        or not found[0]
    ):
        return
    gates = found[0]
    skipped = tuple(dict.fromkeys(gate.module for gate in gates if gate.module is not None))
    words = dict.fromkeys(in_words(gate[1:]) for gate in gates)
    becomes = f"gated_act ({', '.join(words)})"
    parts = tuple(module.get_submodule(name) for name in skipped)
    settings = {"gates": gates, "inner": skipped}
    yield propose(module, GatedProduct, becomes, settings, inner=parts)


def _replace_products(
    forward: Any, kinds: dict[str, tuple[str, str]]
) -> tuple[ast.Module, ast.FunctionDef, tuple[Gate, ...]]:
    """The forward's tree with `weld_multiply` for its products, and their activations."""
    tree, function = parse(forward)
    products = _Products(function.args.args[0].arg, unwrap(forward).__globals__, kinds)
    products.visit(function)
    return tree, function, tuple(products.gates)


class _Products(ast.NodeTransformer):
    """Replaces products with an activation's call by calls of `weld_multiply`."""

    def __init__(self, own: str, names: dict[str, Any], kinds: dict[str, tuple[str, str]]) -> None:
        self.own, self.names, self.kinds = own, names, kinds
        self.gates: list[Gate] = []

    def visit_BinOp(self, node: ast.BinOp) -> ast.AST:
        if isinstance(node.op, ast.Mult):
            for side, other in ((node.left, node.right), (node.right, node.left)):
                gate = self._read_activation(side)
                if gate is not None and isinstance(side, ast.Call):
                    return self._replace(node, gate, side.args[0], other)
        return self.generic_visit(node)

    def _replace(self, node: ast.BinOp, gate: Gate, x: ast.expr, other: ast.expr) -> ast.AST:
        """The call, whose arguments are computed in the order of the product's."""
        at = len(self.gates)
        self.gates.append(gate)
        given = [ast.keyword("gate", self.visit(x)), ast.keyword("up", self.visit(other))]
        if other is node.left:
            given.reverse()
        return ast.Call(read_own(self.own, "weld_multiply"), [ast.Constant(at)], given)

    def _read_activation(self, side: ast.expr) -> Gate | None:
        """The activation that an expression calls on one argument."""
        if not (isinstance(side, ast.Call) and len(side.args) == 1):
            return None
        if isinstance(side.args[0], ast.Starred):
            return None
        options = {key.arg: getattr(key.value, "value", None) for key in side.keywords}
        match side.func:
            case ast.Attribute(value=ast.Name(id=self.own), attr=name):
                kind = None if options else self.kinds.get(name)
                return None if kind is None else Gate(name, *kind)
        called = look_up(side.func, self.names)
        activation = _FUNCTIONS.get(called) if callable(called) else None
        approximate = options.pop("approximate", "none")
        if options or (activation, approximate) not in ACTIVATIONS:
            return None
        return Gate(None, str(activation), str(approximate))
