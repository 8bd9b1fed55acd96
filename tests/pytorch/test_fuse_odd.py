"""Odd modules: what is welded in them, and that it is right."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import dropout, gelu, linear, softmax
from torch.nn.utils import parametrizations, prune

import torchweld
from fusable import FeedForward, Gated, NewGELU, PlainRMSNorm, small_inputs  # noqa: F401
from torchweld import numerics
from torchweld.fusion.weld import Weld

WIDTH = 64
ONE = torch.ones(1)


class Calls(nn.Module):
    """A module with given submodules and a given forward."""

    def __init__(self, forward: Callable[[Any, torch.Tensor], Any], **parts: nn.Module) -> None:
        super().__init__()
        for name, part in parts.items():
            self.add_module(name, part)
        self.call = forward

    def forward(self, x: torch.Tensor) -> Any:
        return self.call(self, x)


def _fc(out: int = WIDTH) -> nn.Linear:
    return nn.Linear(WIDTH, out)


class Pair(nn.Module):
    """A layer and its activation, times a number."""

    def __init__(self, fc: nn.Module, act: nn.Module, factor: Any) -> None:
        super().__init__()
        self.fc, self.act, self.factor = fc, act, factor

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.act(self.fc(x))
        return y if self.factor is None else y * self.factor


def _pair(
    fc: nn.Module | None = None, act: nn.Module | None = None, factor: Any = None
) -> nn.Module:
    return Pair(fc or _fc(), act or nn.GELU(), factor)


def _shared_linear() -> nn.Module:
    fc = _fc()
    return nn.Sequential(_pair(fc, nn.GELU()), _pair(fc, nn.SiLU()))


def _shared_activation() -> nn.Module:
    act = NewGELU()
    return nn.Sequential(_pair(act=act), _pair(act=act))


def _tied() -> nn.Module:
    model = nn.Sequential(_pair(), _fc())
    model[1].weight = model[0].fc.weight
    return model


def _hooked(part: str, register: str, hook: Callable[..., None]) -> nn.Module:
    model = _pair()
    getattr(model.get_submodule(part), register)(hook)
    return model


def _patched() -> nn.Module:
    norm: Any = nn.LayerNorm(WIDTH)
    found = norm.forward
    norm.forward = lambda x: 2 * found(x)
    return norm


class Doubled(nn.LayerNorm):
    """Not a layer norm."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return 2 * super().forward(input)


class WideLayerNorm(nn.LayerNorm):
    """In float32 for any input, as in many models."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        wide = nn.functional.layer_norm(
            input.float(), self.normalized_shape, self.weight.float(), self.bias.float(), self.eps
        )
        return wide.type_as(input)


class Adapted(nn.Linear):
    """An adapter that computes more."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return super().forward(input) + input[..., :1]


class Named(nn.Linear):
    """A subclass that changes nothing."""


class NumberedNorm(PlainRMSNorm):
    """The deeper the layer, the smaller the result."""

    layer_idx = 0

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return super().forward(hidden_states) / (1 + self.layer_idx)


class NumberedGated(Gated):
    """A helper gets the module."""

    layer_idx = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return _divide(self, super().forward(x))


class NumberedLinear(nn.Linear):
    """A linear layer only as the first."""

    layer_idx = 0

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return super().forward(input) / (1 + getattr(self, "layer_idx", 0))


def _divide(layer: Any, y: torch.Tensor) -> torch.Tensor:
    return y / (1 + layer.layer_idx)


def _numbered(make: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    """Two layers that differ only in their numbers."""

    def build() -> nn.Module:
        layers = [make(), make()]
        for at, layer in enumerate(layers):
            for part in layer.modules():
                part.layer_idx = at  # type: ignore[assignment]
        return nn.Sequential(*layers)

    return build


class Hidden(nn.Module):
    """A norm with its epsilon hard-coded."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * self.weight


class ClippedGELU(nn.Module):
    """gelu, except for large numbers."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return gelu(x).clamp(-10, 10)


class Transposed(nn.Module):
    """GPT-2's Conv1D."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.randn(WIDTH, 96)), nn.Parameter(torch.ones(96))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        size = (*x.size()[:-1], len(self.bias))
        return torch.addmm(self.bias, x.view(-1, x.size(-1)), self.weight).view(size)


class Failing(nn.Module):
    """Runs only with its model's own inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.fc, self.act = _fc(), nn.GELU()

    def forward(self, x: torch.Tensor, table: dict[str, float]) -> torch.Tensor:
        return self.act(self.fc(x)) * table["scale"]


class Around(nn.Sequential):
    """A Sequential with a forward of its own."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + super().forward(x)


def _parent() -> nn.Module:
    """A submodule references its model."""
    model: Any = nn.Sequential(_pair())
    model[0].model = [model]
    return model


def _no_op(*_: Any) -> None:
    pass


def _loop(m: Any, x: torch.Tensor) -> torch.Tensor:
    for layer in m.layers:
        x = m.act(layer(x))
    return x


def _calls(forward: Callable[..., Any], **parts: Callable[[], nn.Module]) -> Any:
    return lambda: Calls(forward, **{name: make() for name, make in parts.items()})


def _of(fc: Callable[[], nn.Module] = _fc, act: Callable[[], nn.Module] = nn.GELU) -> Any:
    return lambda: _pair(fc(), act())


def _norm() -> nn.Module:
    return nn.LayerNorm(WIDTH)


STRAIGHT, FUNCTIONS = "does not pass the layer's result straight", "functions, which fuse() cannot"
# How the module is made, what is welded, and the reason if not.
ODD: dict[str, tuple[Callable[[], nn.Module], set[str]]] = {
    "shared linear": (_shared_linear, {"linear_act"}),
    "shared activation": (_shared_activation, {"linear_act"}),
    "shared norm": (lambda: nn.Sequential(*[_norm()] * 2), {"layer_norm"}),
    "tied weights": (_tied, {"linear_act"}),
    "weight norm": (_of(lambda: parametrizations.weight_norm(_fc())), {"linear_act"}),
    "spectral norm": (lambda: _pair(parametrizations.spectral_norm(_fc())).eval(), {"linear_act"}),
    "parametrized norm": (lambda: parametrizations.weight_norm(_norm(), dim=None), set()),
    "pruned": (_of(lambda: prune.l1_unstructured(_fc(), "weight", 0.5)), {"linear_act"}),
    "functional on the weight": (
        _calls(lambda m, x: m.act(linear(x, m.fc.weight)), fc=_fc, act=nn.GELU),
        {"linear_act"},
    ),
    "unknown activation": (_of(act=nn.Mish), set()),
    "softmax behind a linear layer": (_of(act=lambda: nn.Softmax(dim=-1)), set()),
    "functional softmax and dropout": (
        lambda: Calls(lambda m, x: dropout(softmax(m.fc(x), -1), 0.1, m.training), fc=_fc()).eval(),
        set(),
    ),
    "functional dropout around a module": (
        lambda: Calls(
            lambda m, x: x + dropout(m.out(m.act(m.fc(x))), 0.1, m.training),
            **{"fc": _fc(), "act": nn.GELU(), "out": _fc()},
        ).eval(),
        {"linear_act"},
    ),
    "functional activation": (_calls(lambda m, x: gelu(m.fc(x)), fc=_fc), {"linear_act"}),
    "used twice": (_calls(lambda m, x: m.act(z := m.fc(x)) + z, fc=_fc, act=nn.GELU), set()),
    "used by two modules": (
        _calls(lambda m, x: m.act(z := m.fc(x)) + m.other(z), fc=_fc, act=nn.GELU, other=_fc),
        set(),
    ),
    "two linears, one activation": (
        _calls(lambda m, x: m.act(m.fc(x)) + m.act(m.other(x)), fc=_fc, other=_fc, act=nn.GELU),
        {"linear_act"},
    ),
    "a loop": (
        _calls(_loop, layers=lambda: nn.ModuleList([_fc(), _fc()]), act=NewGELU),
        {"linear_act"},
    ),
    "a dropout of zero between": (
        lambda: nn.Sequential(_fc(), nn.Dropout(0.0), nn.GELU()),
        {"linear_act"},
    ),
    "hook on the linear": (lambda: _hooked("fc", "register_forward_hook", _no_op), {"linear_act"}),
    "pre-hook on the activation": (
        lambda: _hooked("act", "register_forward_pre_hook", _no_op),
        {"linear_act"},
    ),
    "backward hook on the activation": (
        lambda: _hooked("act", "register_full_backward_hook", _no_op),
        set(),
    ),
    "forward on the instance": (_patched, set()),
    "an activation of who knows what": (_calls(lambda m, x: m.act(x.clone()), act=nn.GELU), set()),
    "in-place activation behind a linear": (_of(act=lambda: nn.ReLU(inplace=True)), {"linear_act"}),
    "leaky relu": (_of(act=nn.LeakyReLU), set()),
    "clipped gelu": (_of(act=ClippedGELU), {"linear_act"}),
    "prelu": (_of(act=nn.PReLU), set()),
    "glu": (lambda: nn.Sequential(_fc(128), nn.GLU()), set()),
    "doubled norm": (lambda: Doubled(WIDTH), {"layer_norm"}),
    "wide layer norm": (lambda: WideLayerNorm(WIDTH), {"layer_norm"}),
    "norm of two dimensions": (lambda: nn.LayerNorm((8, WIDTH)), {"layer_norm"}),
    "hidden epsilon": (Hidden, {"rms_norm"}),
    "adapter": (_of(lambda: Adapted(WIDTH, WIDTH)), set()),
    "subclass": (_of(lambda: Named(WIDTH, WIDTH)), {"linear_act"}),
    "transposed": (_of(Transposed), {"linear_act"}),
    "without a bias": (_of(lambda: nn.Linear(WIDTH, 8, bias=False)), {"linear_act"}),
    "no features": (_of(lambda: _fc(0)), {"linear_act"}),
    "nested sequence": (lambda: nn.Sequential(nn.Sequential(_fc()), nn.GELU()), {"linear_act"}),
    "sequence with a residual": (lambda: Around(_fc(), nn.GELU()), {"linear_act"}),
    "scripted": (lambda: torch.jit.script(_norm()), set()),
    "traced": (lambda: torch.fx.symbolic_trace(_pair()), set()),
    "knows its model": (_parent, {"linear_act"}),
    "holds a tensor": (lambda: _pair(factor=ONE), {"linear_act"}),
    "frozen": (lambda: _pair().requires_grad_(False), {"linear_act"}),
    "in evaluation": (lambda: _pair().eval(), {"linear_act"}),
    "bfloat16": (lambda: _pair().bfloat16(), {"linear_act"}),
    "float64": (
        lambda: nn.Sequential(_pair(), PlainRMSNorm()).double(),
        {"linear_act", "rms_norm"},
    ),
    "float32 norm in a bfloat16 model": (
        _calls(lambda m, x: m.norm(m.fc(x)), fc=lambda: _fc().bfloat16(), norm=PlainRMSNorm),
        {"rms_norm"},
    ),
    "a norm reads its number": (_numbered(NumberedNorm), {"rms_norm"}),
    "a helper reads a number": (_numbered(lambda: NumberedGated(nn.SiLU())), {"gated_act"}),
    "a linear layer reads its number": (
        _numbered(lambda: _pair(NumberedLinear(WIDTH, WIDTH))),
        set(),
    ),
    "nothing": (nn.Identity, set()),
    "no norm": (lambda: nn.Sequential(nn.Unflatten(-1, (4, 4, 4)), nn.Flatten()), set()),
}


def _is_fused(model: nn.Module) -> bool:
    return any(isinstance(part, Weld) for part in model.modules())


def _input(model: nn.Module) -> torch.Tensor:
    dtype = next((p.dtype for p in model.parameters()), torch.float32)
    return torch.randn(4, 8, WIDTH, generator=torch.Generator().manual_seed(1)).to(dtype)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.filterwarnings("ignore::UserWarning")  # of nn.Linear without features
@pytest.mark.parametrize("name", ODD)
@pytest.mark.usefixtures("own_graphs")
def test_odd_modules(name: str) -> None:
    """In a call that captures and one that does not, and as before after unfuse()."""
    build, ops = ODD[name]
    torch.manual_seed(0)
    model = build()
    x = _input(model)
    before = model(x)
    tolerance = numerics.BFLOAT16 if x.dtype == torch.bfloat16 else {}
    torchweld.fuse(model)
    for _ in range(2):
        torch.testing.assert_close(model(x), before, **tolerance)
    if _is_fused(model):
        found = {row.becomes for row in torchweld.explain_fusion(model) if row.welded}
        assert found - {"linear"} == ops  # in 16 bits without units
    torchweld.unfuse(model)
    assert torch.equal(model(x), before)
    assert not _is_fused(model)


@pytest.mark.usefixtures("own_graphs")
def test_a_module_that_needs_a_dictionary() -> None:
    model: Any = torchweld.fuse(nn.ModuleList([Failing()]))
    x = torch.randn(3, WIDTH)
    expected = 2 * gelu(model[0].fc(x))
    torch.testing.assert_close(model[0](x, {"scale": 2.0}), expected)
    assert [row.becomes for row in torchweld.explain_fusion(model)] == ["linear_act"]


@pytest.mark.parametrize("kind", ["gated", "feed_forward", "norm"])
@pytest.mark.usefixtures("own_graphs")
def test_on_the_meta_device(kind: str) -> None:
    """The model gets values later, as with to_empty."""
    made = {
        "gated": lambda: Gated(nn.SiLU()),
        "feed_forward": lambda: FeedForward(nn.GELU()).eval(),
        "norm": lambda: PlainRMSNorm(1.0),
    }[kind]
    real = made()
    with torch.device("meta"):
        model = made()
        torchweld.fuse(model)
    assert all(parameter.is_meta for parameter in model.parameters())
    assert any(isinstance(module, Weld) for module in model.modules())
    model.train(real.training).to_empty(device="cpu").load_state_dict(real.state_dict())
    x = _input(real)
    torch.testing.assert_close(model(x), real(x))


@pytest.mark.usefixtures("own_graphs")
def test_a_lazy_layer_is_welded_when_it_is_one() -> None:
    """fuse() raised an error once, since a lazy parameter has no sizes."""
    model = nn.Sequential(nn.LazyLinear(8), nn.GELU())
    torchweld.fuse(model)
    assert not isinstance(model[0], Weld)
    expected = model(torch.ones(2, WIDTH))
    torchweld.fuse(torchweld.unfuse(model))
    torch.testing.assert_close(model(torch.ones(2, WIDTH)), expected)
    assert [row.becomes for row in torchweld.explain_fusion(model)] == ["linear_act"]


@pytest.mark.usefixtures("own_graphs")
def test_global_hooks_and_modes_of_the_caller() -> None:
    """Global hooks, autocast, inference mode and other defaults do not change."""
    called: list[nn.Module] = []
    handle = nn.modules.module.register_module_forward_hook(lambda m, *_: called.append(m))
    model = nn.Sequential(_pair(), PlainRMSNorm())
    try:
        torch.set_default_dtype(torch.bfloat16)
        with torch.inference_mode(), torch.autocast("cpu", torch.bfloat16), torch.device("meta"):
            torchweld.fuse(model)
        assert torch.get_default_dtype() is torch.bfloat16
        torch.set_default_dtype(torch.float32)
        assert not called
        model(torch.randn(2, WIDTH))
        assert model in called
    finally:
        torch.set_default_dtype(torch.float32)
        handle.remove()
    model(torch.randn(2, WIDTH))
    assert len([row for row in torchweld.explain_fusion(model) if row.welded]) == 2


@pytest.mark.usefixtures("own_graphs")
def test_gradients_are_not_touched() -> None:
    model = nn.Sequential(_pair(), PlainRMSNorm())
    model(torch.randn(2, WIDTH)).sum().backward()
    before = {name: p.grad for name, p in model.named_parameters()}
    values = copy.deepcopy(model.state_dict())
    torchweld.fuse(model)
    assert all(p.grad is before[name] for name, p in model.named_parameters())
    assert all(torch.equal(value, values[name]) for name, value in model.state_dict().items())


class Shared(nn.Module):
    """GELU."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.gelu(x)


shared = Shared()


def test_a_module_that_other_models_share_keeps_its_class() -> None:
    """transformers' Flaubert and XLM hold `transformers.activations.gelu`, which CamemBERT's head
    calls as a function. `fuse` of one changed the other. No test looked at a second model.
    """
    torchweld.fuse(nn.ModuleList([shared, Shared()]))
    assert type(shared) is Shared
