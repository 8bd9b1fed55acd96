"""A part of a fused model means what it meant, whoever calls it and in whatever way."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._pytree import tree_leaves, tree_map_only

import torchweld
from fusable import MODELS, WIDTH, Parallel, rms, small_inputs  # noqa: F401
from selection import combine
from torchweld import numerics
from torchweld.fusion.weld import Weld

UNIT = 2.0**-23
X = torch.randn(8, 16, WIDTH, generator=torch.Generator().manual_seed(0))
_Way = Callable[[nn.Module, str, Any], Any]


@functools.cache
def _make(name: str, fused: bool = False) -> nn.Module:
    """A model without dropout, which tests only copy."""
    torch.manual_seed(0)
    model = MODELS[name]()
    for part in model.modules():
        if isinstance(part, nn.Dropout):
            part.p = 0.0
        if isinstance(part, nn.ReLU):
            part.inplace = False  # a call by itself would change the test's input
    if fused:
        torchweld.fuse(model)
        assert any(isinstance(part, Weld) for part in model.modules())
    return model


@functools.cache
def _list_calls(name: str) -> dict[str, Any]:
    """The arguments with which the plain model calls each of its submodules first."""
    model = copy.deepcopy(_make(name))
    found: dict[str, Any] = {}
    for part, module in model.named_modules():

        def note(_: Any, args: Any, kwargs: Any, part: str = part) -> None:
            found.setdefault(part, tree_map_only(torch.Tensor, torch.Tensor.detach, (args, kwargs)))

        module.register_forward_pre_hook(note, with_kwargs=True)
    model(X)
    return found


def _cast(value: Any, like: nn.Module) -> Any:
    dtype = next((p.dtype for p in like.parameters()), torch.float32)
    return tree_map_only(torch.Tensor, lambda x: x.to(dtype, copy=True).requires_grad_(), value)


def _double(result: Any) -> Any:
    return tree_map_only(torch.Tensor, lambda y: 2 * y, result)


# --- Ways to use a part of a model ---------------------------------------------------------------


def _call_it_alone(model: nn.Module, part: str, call: Any) -> Any:
    args, kwargs = call
    return model.get_submodule(part)(*args, **kwargs)


def _call_it_between(model: nn.Module, part: str, call: Any) -> Any:
    """Before, between and after passes of the model."""
    x = _cast(X, model)
    found = []
    for _ in range(2):
        found += [_call_it_alone(model, part, call), model(x)]
    return [*found, _call_it_alone(model, part, call)]


def _hook_it(model: nn.Module, part: str, call: Any) -> Any:
    """A hook that notes inputs and results, and hooks that change them."""
    module, seen, found = model.get_submodule(part), [], []
    x = _cast(X, model)
    hooks: list[Callable[[], Any]] = [
        lambda: module.register_forward_hook(lambda _m, args, y: seen.extend([args, y])),
        lambda: module.register_forward_hook(lambda _m, _args, y: _double(y)),
        lambda: module.register_forward_pre_hook(lambda _m, args: _double(args)),
    ]
    for register in hooks:
        handle = register()
        found.append(model(x))
        handle.remove()
    return [*found, seen, model(x)]


def _hook_its_gradients(model: nn.Module, part: str, call: Any) -> Any:
    module, seen = model.get_submodule(part), []
    module.register_full_backward_hook(lambda _m, gets, given: seen.extend([gets, given]))
    y = model(_cast(X, model).requires_grad_())
    y.backward(torch.linspace(-1, 1, y.numel(), dtype=y.dtype).view_as(y))
    return [y.detach(), seen]


class Around(nn.Module):
    """An adapter: the module around another one computes more."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return _double(self.inner(*args, **kwargs))

    def __getattr__(self, name: str) -> Any:
        own = vars(self)["_modules"]
        return own["inner"] if name == "inner" else getattr(own["inner"], name)


def _replace_it(model: nn.Module, part: str, call: Any) -> Any:
    if not part:
        return model(_cast(X, model))
    model.set_submodule(part, Around(model.get_submodule(part)))
    return model(_cast(X, model))


def _slice_it(model: nn.Module, part: str, call: Any) -> Any:
    """All beginnings and ends of a sequence."""
    sequence: Any = model.get_submodule(part)
    if not isinstance(sequence, nn.Sequential):
        return []
    ((x,), _), found = call, []
    for at in range(1, len(sequence) + 1):
        begin = sequence[:at](x)
        found += [begin, sequence[at:](begin)]
    return found


def _walk_it(model: nn.Module, part: str, call: Any) -> Any:
    """Keep each layer's result in a sequence, as well as the sequence's own."""
    sequence: Any = model.get_submodule(part)
    if not isinstance(sequence, nn.Sequential):
        return []
    (x,), _ = call
    found = [sequence(x)]
    for layer in sequence:
        found.append(x := layer(x))
    return found


# A batch norm's second pass changes the statistics that the gradients of the first need.
_SEVERAL_PASSES = (_call_it_between, _hook_it, _slice_it, _walk_it)
WAYS: list[_Way] = [
    _call_it_alone,
    _call_it_between,
    _hook_it,
    _hook_its_gradients,
    _replace_it,
    _slice_it,
    _walk_it,
]


def _run(model: nn.Module, part: str, way: _Way, call: Any) -> list[torch.Tensor]:
    """The results of a way to use a part, and all gradients."""
    model = copy.deepcopy(model)
    for module in model.modules():
        if isinstance(module, nn.BatchNorm1d) and way in _SEVERAL_PASSES:
            module.eval()
    call = _cast(call, model)
    results = [y for y in tree_leaves(way(model, part, call)) if isinstance(y, torch.Tensor)]
    heads = [y for y in results if y.requires_grad]
    leaves = [*(x for x in tree_leaves(call) if isinstance(x, torch.Tensor)), *model.parameters()]
    loss = sum(
        (y * torch.linspace(-1, 1, y.numel(), dtype=y.dtype).view_as(y)).sum() for y in heads
    )
    grads = torch.autograd.grad(loss, leaves, allow_unused=True) if heads else ()
    empty = torch.zeros(())
    return [y.detach() for y in results] + [empty if g is None else g for g in grads]


def _expect(name: str, way: _Way) -> list[tuple[list[torch.Tensor], list[torch.Tensor]]]:
    """What the plain model computes with each part, and in float64."""
    plain = _make(name)
    double = copy.deepcopy(plain).double()
    return [
        (_run(plain, part, way, call), _run(double, part, way, call))
        for part, call in _list_calls(name).items()
    ]


@pytest.mark.filterwarnings("ignore:Full backward hook is firing")  # for inputs by name
@pytest.mark.filterwarnings("ignore:fuse. .* has 8 graphs")  # each part with a hook is a kind
@pytest.mark.parametrize(
    ("name", "way"),
    combine(MODELS, WAYS),
    ids=lambda value: value if isinstance(value, str) else value.__name__.strip("_"),
)
def test_a_part_means_what_it_meant(name: str, way: _Way) -> None:
    """Results and gradients: no further from float64 than twice the original's, and some units."""
    fused = _make(name, fused=True)
    for (part, call), (expected, truth) in zip(
        _list_calls(name).items(), _expect(name, way), strict=True
    ):
        found = _run(fused, part, way, call)
        assert len(expected) == len(found) == len(truth), part
        scale = max(map(rms, truth), default=0.0)
        for a, b, exact in zip(expected, found, truth, strict=True):
            assert a.shape == b.shape, part
            assert rms(b - exact) <= 2 * rms(a - exact) + 8 * UNIT * scale, part


@pytest.mark.parametrize("part", ["fc1", "act1", "softmax", "drop"])
@pytest.mark.usefixtures("own_graphs")
def test_a_second_method_and_threads(part: str) -> None:
    """A method that calls a layer of a pair, while other threads run the forward."""
    from concurrent.futures import ThreadPoolExecutor

    plain: Any = Parallel()
    fused: Any = torchweld.fuse(copy.deepcopy(plain))
    expected = plain(X), plain.embed(X), plain.get_submodule(part)(X)

    def run(_: int) -> tuple[torch.Tensor, ...]:
        return fused(X), fused.embed(X), fused.get_submodule(part)(X)

    with ThreadPoolExecutor(4) as pool:
        for found in pool.map(run, range(32)):
            torch.testing.assert_close(found, expected, **numerics.CHAINED_SMALL)
