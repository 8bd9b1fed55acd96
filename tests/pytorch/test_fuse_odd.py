"""Odd modules: fuse() is right, or skips them with a reason."""

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
from torchweld.fusion import Weld
from ways import by_graph, is_by_graph, way  # noqa: F401

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
ODD: dict[str, tuple[Callable[[], nn.Module], set[str], str]] = {
    "shared linear": (_shared_linear, {"0.act"}, "0.fc is shared"),
    "shared activation": (_shared_activation, {"0.act"}, "0.act is shared"),
    "shared norm": (lambda: nn.Sequential(*[_norm()] * 2), {"0"}, ""),
    "tied weights": (_tied, {"0.fc"}, ""),
    "weight norm": (_of(lambda: parametrizations.weight_norm(_fc())), {"act"}, "parametrized"),
    "spectral norm": (
        lambda: _pair(parametrizations.spectral_norm(_fc())).eval(),
        *({"act"}, "parametrized"),
    ),
    "parametrized norm": (
        lambda: parametrizations.weight_norm(_norm(), dim=None),
        *(set(), "parametrized"),
    ),
    "pruned": (_of(lambda: prune.l1_unstructured(_fc(), "weight", 0.5)), {"act"}, "another kind"),
    "functional on the weight": (
        _calls(lambda m, x: m.act(linear(x, m.fc.weight)), fc=_fc, act=nn.GELU),
        *({"act"}, ""),
    ),
    "unknown activation": (_of(act=nn.Mish), set(), "its activation is none of torchweld's"),
    "softmax behind a linear layer": (_of(act=lambda: nn.Softmax(dim=-1)), set(), ""),
    "functional softmax and dropout": (
        lambda: Calls(lambda m, x: dropout(softmax(m.fc(x), -1), 0.1, m.training), fc=_fc()).eval(),
        *(set(), FUNCTIONS),
    ),
    "functional dropout around a module": (
        lambda: Calls(
            lambda m, x: x + dropout(m.out(m.act(m.fc(x))), 0.1, m.training),
            **{"fc": _fc(), "act": nn.GELU(), "out": _fc()},
        ).eval(),
        *({"act"}, FUNCTIONS),
    ),
    "functional activation": (_calls(lambda m, x: gelu(m.fc(x)), fc=_fc), set(), "function"),
    "used twice": (
        _calls(lambda m, x: m.act(z := m.fc(x)) + z, fc=_fc, act=nn.GELU),
        *({"act"}, STRAIGHT),
    ),
    "used by two modules": (
        _calls(lambda m, x: m.act(z := m.fc(x)) + m.other(z), fc=_fc, act=nn.GELU, other=_fc),
        *({"act"}, "also feeds others"),
    ),
    "two linears, one activation": (
        _calls(lambda m, x: m.act(m.fc(x)) + m.act(m.other(x)), fc=_fc, other=_fc, act=nn.GELU),
        *({"act"}, "follows several"),
    ),
    "a loop": (
        _calls(_loop, layers=lambda: nn.ModuleList([_fc(), _fc()]), act=NewGELU),
        *({"act"}, "follows several"),
    ),
    "a dropout of zero between": (
        lambda: nn.Sequential(_fc(), nn.Dropout(0.0), nn.GELU()),
        *({"2"}, ""),
    ),
    "hook on the linear": (
        lambda: _hooked("fc", "register_forward_hook", _no_op),
        *({"act"}, "forward hooks"),
    ),
    "pre-hook on the activation": (
        lambda: _hooked("act", "register_forward_pre_hook", _no_op),
        *({"act"}, "forward pre hooks"),
    ),
    "backward hook on the activation": (
        lambda: _hooked("act", "register_full_backward_hook", _no_op),
        *({"act"}, "backward hooks"),
    ),
    "forward on the instance": (_patched, set(), "set on the instance"),
    "an activation of who knows what": (
        _calls(lambda m, x: m.act(x.clone()), act=nn.GELU),
        *({"act"}, "how wide"),
    ),
    "in-place activation behind a linear": (_of(act=lambda: nn.ReLU(inplace=True)), {"fc"}, ""),
    "leaky relu": (_of(act=nn.LeakyReLU), set(), "none of torchweld's"),
    "clipped gelu": (_of(act=ClippedGELU), set(), "none of torchweld's"),
    "prelu": (_of(act=nn.PReLU), set(), ""),
    "glu": (lambda: nn.Sequential(_fc(128), nn.GLU()), set(), ""),
    "doubled norm": (lambda: Doubled(WIDTH), set(), "computes something else"),
    "wide layer norm": (lambda: WideLayerNorm(WIDTH), {""}, ""),
    "norm of two dimensions": (lambda: nn.LayerNorm((8, WIDTH)), {""}, ""),
    "hidden epsilon": (Hidden, {""}, ""),
    "adapter": (_of(lambda: Adapted(WIDTH, WIDTH)), {"act"}, "another kind"),
    "subclass": (_of(lambda: Named(WIDTH, WIDTH)), {"fc"}, ""),
    "transposed": (_of(Transposed), {"fc"}, ""),
    "without a bias": (_of(lambda: nn.Linear(WIDTH, 8, bias=False)), {"fc"}, ""),
    "no features": (_of(lambda: _fc(0)), {"act"}, "did not run"),
    "nested sequence": (
        lambda: nn.Sequential(nn.Sequential(_fc()), nn.GELU()),
        *({"1"}, "is not Sequential's own"),
    ),
    "sequence with a residual": (lambda: Around(_fc(), nn.GELU()), {"1"}, "calls super()"),
    "scripted": (lambda: torch.jit.script(_norm()), set(), "scripted"),
    "traced": (lambda: torch.fx.symbolic_trace(_pair()), {"act"}, "traced"),
    "knows its model": (_parent, {"0.fc"}, ""),
    "holds a tensor": (lambda: _pair(factor=ONE), {"fc"}, ""),
    "frozen": (lambda: _pair().requires_grad_(False), {"fc"}, ""),
    "in evaluation": (lambda: _pair().eval(), {"fc"}, ""),
    "bfloat16": (lambda: _pair().bfloat16(), {"fc"}, ""),
    "float64": (lambda: nn.Sequential(_pair(), PlainRMSNorm()).double(), {"0.fc", "1"}, ""),
    "float32 norm in a bfloat16 model": (
        _calls(lambda m, x: m.norm(m.fc(x)), fc=lambda: _fc().bfloat16(), norm=PlainRMSNorm),
        *({"norm"}, ""),
    ),
    "a norm reads its number": (_numbered(NumberedNorm), {"0"}, "something else"),
    "a helper reads a number": (
        _numbered(lambda: NumberedGated(nn.SiLU())),
        *(set(), "uses `_divide`"),
    ),
    "a linear layer reads its number": (
        _numbered(lambda: _pair(NumberedLinear(WIDTH, WIDTH))),
        *({"0.fc", "1.act"}, "another kind of linear"),
    ),
    "nothing": (nn.Identity, set(), ""),
    "no norm": (lambda: nn.Sequential(nn.Unflatten(-1, (4, 4, 4)), nn.Flatten()), set(), ""),
}


def _welds(model: nn.Module) -> set[str]:
    """The welds that explain_fusion has a row of."""
    return {name for name, m in model.named_modules() if isinstance(m, Weld) and m.weld_becomes}


def _input(model: nn.Module) -> torch.Tensor:
    dtype = next((p.dtype for p in model.parameters()), torch.float32)
    return torch.randn(4, 8, WIDTH, generator=torch.Generator().manual_seed(1)).to(dtype)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.filterwarnings("ignore::UserWarning")  # of nn.Linear without features
@pytest.mark.parametrize("name", ODD)
def test_right_or_left_alone(name: str) -> None:
    build, expected, reason = ODD[name]
    torch.manual_seed(0)
    model = build()
    x = _input(model)
    before = model(x)
    reasons = [row.reason for row in torchweld.explain_fusion(model) if row.reason]
    assert bool(reasons) == bool(reason), reasons
    assert not reason or any(reason in found for found in reasons), reasons
    torchweld.fuse(model)
    welded = _welds(model)
    assert welded == expected
    tolerance = numerics.BFLOAT16 if x.dtype == torch.bfloat16 else {}
    torch.testing.assert_close(model(x), before, **tolerance)
    torchweld.unfuse(model)
    assert torch.equal(model(x), before)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.filterwarnings("ignore::UserWarning")  # of nn.Linear without features
@pytest.mark.parametrize("name", ODD)
@pytest.mark.usefixtures("by_graph")
def test_right_by_graph(name: str) -> None:
    """In a call that captures and one that does not, and as before after unfuse()."""
    torch.manual_seed(0)
    model = ODD[name][0]()
    x = _input(model)
    before = model(x)
    tolerance = numerics.BFLOAT16 if x.dtype == torch.bfloat16 else {}
    torchweld.fuse(model)
    for _ in range(2):
        torch.testing.assert_close(model(x), before, **tolerance)
    torchweld.unfuse(model)
    assert torch.equal(model(x), before)
    assert not _welds(model)


def test_a_module_that_needs_what_a_probe_has_not() -> None:
    """It is skipped, with the error; its activation is welded separately."""
    model: Any = nn.Sequential(Failing())
    rows = {row.where: row for row in torchweld.explain_fusion(model)}
    assert "did not run" in rows["0.act"].reason or rows["0.act"].becomes
    torchweld.fuse(model)
    assert not isinstance(model[0].fc, Weld)
    x = torch.randn(3, WIDTH)
    expected = 2 * gelu(model[0].fc(x))
    torch.testing.assert_close(model[0](x, {"scale": 2.0}), expected)


@pytest.mark.parametrize("kind", ["gated", "feed_forward", "norm"])
@pytest.mark.usefixtures("way")
def test_on_the_meta_device(kind: str) -> None:
    """It is tried on a copy with values; the model gets values later, as with to_empty."""
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


@pytest.mark.usefixtures("way")
def test_a_lazy_layer_is_welded_when_it_is_one() -> None:
    """By graph fuse() raised an error, since a lazy parameter has no sizes."""
    model = nn.Sequential(nn.LazyLinear(8), nn.GELU())
    torchweld.fuse(model)
    assert not isinstance(model[0], Weld)
    expected = model(torch.ones(2, WIDTH))
    torchweld.fuse(torchweld.unfuse(model))
    assert isinstance(model[0], Weld) or is_by_graph()
    torch.testing.assert_close(model(torch.ones(2, WIDTH)), expected)


@pytest.mark.usefixtures("way")
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


@pytest.mark.usefixtures("way")
def test_gradients_are_not_touched() -> None:
    model = nn.Sequential(_pair(), PlainRMSNorm())
    model(torch.randn(2, WIDTH)).sum().backward()
    before = {name: p.grad for name, p in model.named_parameters()}
    values = copy.deepcopy(model.state_dict())
    torchweld.fuse(model)
    assert all(p.grad is before[name] for name, p in model.named_parameters())
    assert all(torch.equal(value, values[name]) for name, value in model.state_dict().items())


class OfWords(nn.Module):
    """A model that somebody wrote by hand: its own forward calls functions, on indices of words."""

    def __init__(self, linear: bool) -> None:
        super().__init__()
        self.words, self.scale = nn.Embedding(50, WIDTH), nn.Parameter(torch.ones(WIDTH))
        self.fc = _fc() if linear else nn.Identity()

    def forward(self, x: torch.Tensor, labels: torch.Tensor | None = None) -> torch.Tensor:
        h = nn.functional.gelu(self.fc(self.words(x)))
        h = nn.functional.layer_norm(h, (WIDTH,), self.scale)
        logits = linear(h, self.words.weight)
        if labels is None:
            return logits
        return nn.functional.cross_entropy(logits.flatten(0, -2), labels.flatten())


@pytest.mark.parametrize("has_linear", [True, False])
def test_functions_of_a_model_that_takes_no_rows(has_linear: bool) -> None:
    """It had no row: a trial with rows of numbers does not run it, and nothing else looked."""
    (row,) = (row for row in torchweld.explain_fusion(OfWords(has_linear)) if row.where == "")
    assert row.what == "torch.nn.functional.gelu + layer_norm + cross_entropy"
    assert FUNCTIONS in row.reason


class Shared(nn.Module):
    """GELU."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.gelu(x)


shared = Shared()


def test_a_module_that_other_models_share_keeps_its_class() -> None:
    """transformers' Flaubert and XLM hold `transformers.activations.gelu`, which CamemBERT's head
    calls as a function. `fuse` of one changed the other. No test looked at a second model.
    """
    model = nn.ModuleList([shared, Shared()])
    torchweld.fuse(model)
    first, second = torchweld.explain_fusion(model)
    assert (type(shared), first.becomes) == (Shared, "")
    assert first.reason == f"other models share it: it is a global, {__name__}.shared"
    assert (type(model[1]), second.becomes) != (Shared, "")
