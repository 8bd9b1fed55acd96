"""What is welded in one call is not in another: other arguments, inputs and dtypes."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

import torchweld
from fusable import check_fused, run
from torchweld import numerics
from torchweld.fusion.weld import Weld


class Norm(nn.Module):
    """An RMSNorm as Mamba's, with a gate, a residual and a flag."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.rand(64)), 1e-6

    def forward(
        self, x: Any, gate: Any = None, *, residual: Any = None, prenorm: bool = False
    ) -> Any:
        if gate is not None:
            x = x * functional.silu(gate)
        if residual is not None:
            x = x + residual
        y = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.eps) * self.weight
        return (y, x) if prenorm else y


class Gated(nn.Module):
    """A gated MLP with an argument that changes the result."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up = nn.Linear(64, 128), nn.Linear(64, 128)
        self.down, self.act = nn.Linear(128, 64), nn.SiLU()

    def forward(self, x: Any, scale: float = 1.0) -> Any:
        return self.down(self.act(self.gate(x)) * self.up(x)) * scale


class Output(nn.Module):
    """BertOutput's layers, with a flag."""

    def __init__(self) -> None:
        super().__init__()
        self.dense, self.norm, self.drop = nn.Linear(64, 64), nn.LayerNorm(64), nn.Dropout(0.1)

    def forward(self, x: Any, r: Any, skip: bool = False) -> Any:
        x = self.drop(self.dense(x))
        return x if skip else self.norm(x + r)


class Act(nn.Module):
    """QuickGELU with an argument that changes the result."""

    def forward(self, x: Any, shift: float = 0.0) -> Any:
        return x * torch.sigmoid(1.702 * (x + shift))


X, R = torch.randn(2, 5, 64), torch.randn(2, 5, 64)
# A module, and calls of it.
CALLS: dict[str, tuple[Callable[[], nn.Module], list[tuple[tuple[Any, ...], dict[str, Any]]]]] = {
    "norm": (
        Norm,
        [
            ((X,), {}),
            ((), {"x": X}),
            ((X,), {"prenorm": False}),
            ((X, None), {}),
            ((X, R), {}),
            ((X,), {"gate": R}),
            ((X,), {"residual": R}),
            ((X,), {"residual": R, "prenorm": True}),
            ((), {"prenorm": True, "x": X}),
        ],
    ),
    "gated MLP": (Gated, [((X,), {}), ((X, 2.0), {}), ((X,), {"scale": 2.0}), ((X, 1.0), {})]),
    "output": (
        Output,
        [
            ((X, R), {}),
            ((X,), {"r": R}),
            ((), {"r": R, "x": X}),
            ((X, R, True), {}),
            ((X, R), {"skip": True}),
        ],
    ),
    "activation": (Act, [((X,), {}), ((), {"x": X}), ((X, 0.5), {}), ((X,), {"shift": 0.5})]),
}


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.filterwarnings("ignore:fuse. .* has 8 graphs")  # one for each kind of arguments
@pytest.mark.usefixtures("own_graphs")
def test_other_arguments_are_other_calls(name: str) -> None:
    make, calls = CALLS[name]
    torch.manual_seed(0)
    model = nn.ModuleList([make()]).eval()
    ran = [functools.partial(run, model[0], *given, **named) for given, named in calls]
    assert check_fused(model, *ran, **numerics.CHAINED)
    assert isinstance(model[0], Weld)
    for given, named in (((), {}), ((X,) * 9, {}), ((X,), {"nonsense": 1}), ((X,), {"x": X})):
        with pytest.raises(TypeError):
            model[0](*given, **named)


@pytest.mark.usefixtures("own_graphs")
def test_calls_by_keyword_compile() -> None:
    model = torchweld.fuse(nn.Sequential(Norm()))
    compiled = torch.compile(lambda x, r: model[0](x, residual=r), fullgraph=True, backend="eager")
    expected = torchweld.unfuse(nn.Sequential(model[0]))[0](X, residual=R)
    torch.testing.assert_close(compiled(X, R), expected)


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.usefixtures("own_graphs")
def test_an_export_knows_the_arguments(name: str) -> None:
    """Export a weld by itself, whose inputs may have any number of rows."""
    make, calls = CALLS[name]
    model, inputs = make().eval(), calls[0][0]
    sizes = [{0: torch.export.Dim.DYNAMIC} for _ in inputs]
    more = [torch.cat([x, x.flip(0), x]) for x in inputs]
    expected = model(*more)
    welded = torchweld.fuse(model)
    assert isinstance(welded, Weld)
    program = torch.export.export(welded, inputs, dynamic_shapes=sizes)
    torch.testing.assert_close(program.module()(*more), expected)


class Argued(nn.Linear):
    """A linear layer with an argument more."""

    def forward(self, input: Any, factor: float = 1.0) -> Any:
        return functional.linear(input, factor * self.weight, self.bias)


@pytest.mark.usefixtures("own_graphs")
@pytest.mark.parametrize(
    ("layers", "becomes"),
    [((Argued(64, 64), nn.GELU()), "linear_act"), ((nn.Linear(64, 64), Act()), "gated_act")],
)
def test_a_layer_of_a_pair_takes_its_other_arguments(
    layers: tuple[nn.Module, nn.Module], becomes: str
) -> None:
    """A layer that is called by itself, with a factor, is no part of the pair."""
    model = nn.Sequential(*layers)
    calls = [(m, (X,)) for m in layers] + [
        (m, (X, 2.0)) for m in layers if type(m) in (Argued, Act)
    ]
    ran = [lambda m=m, args=args: [m(*args)] for m, args in [*calls, (model, (X,))]]
    assert check_fused(model, *ran, **numerics.CHAINED_SMALL) == [becomes]


# --- One call does not stand for all --------------------------------------------------------------


class ChannelsFirst(Norm):
    """Over the last dimension, but over the second of four."""

    def forward(self, x: Any) -> Any:  # type: ignore[override]
        dim = 1 if x.ndim == 4 else -1
        weight = self.weight[:, None, None] if x.ndim == 4 else self.weight
        return x * torch.rsqrt(x.square().mean(dim, keepdim=True) + self.eps) * weight


class OneToken(Gated):
    """An MLP with a branch for a single token."""

    def forward(self, x: Any) -> Any:  # type: ignore[override]
        y = super().forward(x)
        return 2 * y if x.shape[-2] == 1 else y


class Squeezes(Norm):
    """A norm that drops the dimension of one token: then sequences of a batch broadcast."""

    def forward(self, x: Any) -> Any:  # type: ignore[override]
        y = super().forward(x)
        return (y.squeeze(1) if y.ndim == 3 else y) + 0 * x


class Branches(nn.Module):
    """A block that branches on its data."""

    def __init__(self) -> None:
        super().__init__()
        self.fc, self.act = nn.Linear(64, 64), nn.GELU()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.fc(x)
        return self.act(y) if y.sum() > 0 else y


class Third(Norm):
    """Over the third dimension, which is the last of three."""

    def forward(self, x: Any) -> Any:  # type: ignore[override]
        return x * torch.rsqrt(x.square().mean(2, keepdim=True) + self.eps) * self.weight


class Clipped(Norm):
    """A norm that is another one for large values."""

    def forward(self, x: Any) -> Any:  # type: ignore[override]
        return super().forward(x.clamp(-6.0, 6.0))


class Wraps(Norm):
    """Another norm from the largest number of 16 bits on."""

    def forward(self, x: Any) -> Any:  # type: ignore[override]
        whole = x.to(torch.int32)
        return super().forward(x + whole.to(torch.int16).to(x.dtype) - whole.to(x.dtype))


@pytest.mark.parametrize(
    "make", [ChannelsFirst, OneToken, Squeezes, Third, Branches, Clipped, Wraps]
)
@pytest.mark.usefixtures("own_graphs")
def test_another_path(make: Callable[[], nn.Module]) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(make())
    inputs = [scale * torch.randn(2, n, 64) for n in (1, 5) for scale in (0.1, -1.0, 1e6)]
    inputs.append(torch.randn(2, 64, 3, 64))
    assert check_fused(model, *(lambda x=x: [model(x)] for x in inputs), **numerics.CHAINED_SMALL)


class OffsetLayerNorm(nn.Module):
    """Nemotron's: a LayerNorm whose weight is an offset from one."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.rand(64)), nn.Parameter(torch.rand(64))
        self.eps = 1e-5

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return functional.layer_norm(x, self.weight.shape, self.weight + 1, self.bias, self.eps)


@pytest.mark.parametrize("cast_first", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(
    "make", [OffsetLayerNorm, Norm, Gated, Output, Act, lambda: nn.LayerNorm(64)]
)
@pytest.mark.usefixtures("own_graphs")
def test_a_fused_model_can_be_cast(
    make: Callable[[], nn.Module], dtype: torch.dtype, cast_first: bool
) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(make()).eval()
    inputs = [X, R] if isinstance(model[0], Output) else [X]
    given = tuple(x.to(dtype) for x in inputs)
    expected = model.to(dtype)[0](*given)
    if not cast_first:
        model.float()
    torchweld.fuse(model[0])
    assert isinstance(model[0], Weld)
    y = model.to(dtype)[0](*given)
    assert y.dtype == dtype
    unit = torch.finfo(dtype).eps
    torch.testing.assert_close(y, expected, rtol=4 * unit, atol=4 * unit)


# --- The most copied code -------------------------------------------------------------------------


class NanoGPTsNorm(nn.Module):
    """The epsilon is a constant, and the bias may be None."""

    def __init__(self, bias: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(64))
        self.bias = nn.Parameter(torch.rand(64)) if bias else None

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return functional.layer_norm(input, self.weight.shape, self.weight, self.bias, 1e-5)


class LlamasFeedForward(nn.Module):
    """That of Meta's own llama, with the activation as a function."""

    def __init__(self) -> None:
        super().__init__()
        self.w1, self.w3 = nn.Linear(64, 128, bias=False), nn.Linear(64, 128, bias=False)
        self.w2 = nn.Linear(128, 64, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.w2(functional.silu(self.w1(x)) * self.w3(x))


class GatedByTanh(LlamasFeedForward):
    """The gate comes second."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.w2(self.w1(x) * functional.gelu(self.w3(x), approximate="tanh"))


HAS_NPU = False  # as diffusers keeps it: another device's kernel


def has_npu() -> bool:
    return HAS_NPU


@functools.lru_cache(maxsize=128)
def is_torch_version(operation: str, version: str) -> bool:
    return {"<": torch.__version__ < version}[operation]


class DiffusersGEGLU(nn.Module):
    """One layer computes both halves, a method activates the second.

    Its `**kwargs`, the question for another device and a function with a cache cost it its weld:
    the copy of before in this file had none of them.
    """

    def __init__(self) -> None:
        super().__init__()
        self.proj = nn.Linear(64, 256)

    def gelu(self, gate: torch.Tensor) -> torch.Tensor:
        if gate.device.type == "mps" and is_torch_version("<", "2.0.0"):
            return functional.gelu(gate.to(dtype=torch.float32)).to(dtype=gate.dtype)
        return functional.gelu(gate)

    def forward(self, x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        if len(args) > 0 or kwargs.get("scale") is not None:
            warnings.warn("scale is ignored", stacklevel=1)
        x = self.proj(x)
        if has_npu():
            return torch.neg(x)
        x, gate = x.chunk(2, dim=-1)
        return x * self.gelu(gate)


class SaysScale(DiffusersGEGLU):
    """An argument changes the result."""

    def forward(self, x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        x, gate = self.proj(x).chunk(2, dim=-1)
        return x * self.gelu(gate) * (1.0 if kwargs.get("scale") is None else kwargs["scale"])


@pytest.mark.usefixtures("own_graphs")
def test_named_arguments_and_flags_of_a_file() -> None:
    module = torchweld.fuse(DiffusersGEGLU())
    assert isinstance(module, Weld)
    x = torch.randn(5, 64)
    with pytest.warns(UserWarning, match="scale is ignored"):
        y = module(x, scale=2.0)
    torch.testing.assert_close(y, DiffusersGEGLU.forward(module, x), **numerics.CHAINED_SMALL)
    globals()["HAS_NPU"] = True
    try:
        torch.testing.assert_close(module(x), -module.proj(x))
    finally:
        globals()["HAS_NPU"] = False
    scales = torchweld.fuse(SaysScale())
    assert isinstance(scales, Weld)
    expected = SaysScale.forward(scales, x) * 3.0
    torch.testing.assert_close(scales(x, scale=3.0), expected, **numerics.CHAINED_SMALL)


class XTransformersGLU(nn.Module):
    """The activation is a module."""

    def __init__(self) -> None:
        super().__init__()
        self.proj, self.act, self.mult_bias = nn.Linear(64, 256), nn.SiLU(), 1.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x, gate = self.proj(x).chunk(2, -1)
        return x * self.act(gate) * self.mult_bias


class GatedNorm(nn.Module):
    """Bamba's norm of a product, or Qwen3-Next's product of a norm."""

    def __init__(self, order: str) -> None:
        super().__init__()
        self.weight, self.eps, self.order = nn.Parameter(torch.rand(64)), 1e-6, order

    def forward(self, x: torch.Tensor, gate: torch.Tensor | None = None) -> torch.Tensor:
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        factor = 1 if gate is None else functional.silu(gate.to(wide.dtype))
        wide = wide * factor if self.order == "first" else wide
        wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        wide = self.weight * wide.to(x.dtype)
        return (wide * factor if self.order == "last" else wide).to(x.dtype)


class TimmsSwiGLU(nn.Module):
    """timm's: two dropouts, and an identity where a norm may stand."""

    def __init__(self, p: float, norm: type[nn.Module] = nn.Identity) -> None:
        super().__init__()
        self.fc1_g, self.fc1_x = nn.Linear(64, 128), nn.Linear(64, 128)
        self.act, self.drop1 = nn.SiLU(), nn.Dropout(p)
        self.norm = norm(128)
        self.fc2, self.drop2 = nn.Linear(128, 64), nn.Dropout(p)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.drop1(self.act(self.fc1_g(x)) * self.fc1_x(x))
        return self.drop2(self.fc2(self.norm(x)))


class DropsLaterFirst(TimmsSwiGLU):
    """The dropout that comes first in the forward is registered last."""

    def __init__(self, p: float) -> None:
        super().__init__(p)
        first = self.drop1
        del self.drop1
        self.drop1 = first


class TimmsGlu(nn.Module):
    """timm's: one layer for both, the gate last."""

    def __init__(self, p: float) -> None:
        super().__init__()
        self.fc1, self.act, self.drop1 = nn.Linear(64, 256), nn.Sigmoid(), nn.Dropout(p)
        self.norm, self.fc2, self.drop2 = nn.Identity(), nn.Linear(128, 64), nn.Dropout(p)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first, second = self.fc1(x).chunk(2, -1)
        return self.drop2(self.fc2(self.norm(self.drop1(first * self.act(second)))))


class DropsLast(Gated):
    """One dropout, after the last layer."""

    def __init__(self, p: float) -> None:
        super().__init__()
        self.drop = nn.Dropout(p)

    def forward(self, x: Any) -> Any:  # type: ignore[override]
        return self.drop(super().forward(x))


class Quick(nn.Module):
    """x * sigmoid(factor * x): quick_gelu, silu, or neither."""

    def __init__(self, factor: float) -> None:
        super().__init__()
        self.factor = factor

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scaled = x if self.factor == 1 else self.factor * x
        return x * torch.sigmoid(scaled)


class Squared(nn.Module):
    """relu(x) squared, which is a gate by relu(x), too."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return functional.relu(x).square()


@pytest.mark.parametrize(
    ("make", "ops"),
    [
        (lambda: nn.Sequential(nn.Linear(64, 256), Squared()), {"linear_act"}),
        (DiffusersGEGLU, {"gated_act"}),
        (XTransformersGLU, {"gated_act"}),
        (lambda: NanoGPTsNorm(True), {"layer_norm"}),
        (lambda: NanoGPTsNorm(False), {"layer_norm"}),
        (LlamasFeedForward, {"gated_act"}),
        (GatedByTanh, {"gated_act"}),
        *((lambda p=p: TimmsSwiGLU(p), {"gated_act"}) for p in (0.0, 0.3)),
        (lambda: DropsLaterFirst(0.3), {"gated_act"}),
        (lambda: TimmsGlu(0.3), {"gated_act"}),
        (lambda: DropsLast(0.3), {"gated_act"}),
        (lambda: TimmsSwiGLU(0.3, nn.LayerNorm), {"gated_act", "layer_norm"}),
        (lambda: nn.Sequential(nn.Linear(64, 256), nn.GELU()), {"linear_act"}),
        (lambda: nn.Sequential(nn.Linear(64, 256), nn.ReLU(inplace=True)), {"linear_act"}),
        (lambda: nn.Sequential(nn.Linear(64, 256), nn.Sigmoid()), {"linear_act"}),
        (lambda: nn.Sequential(nn.Linear(64, 256), Quick(1.702)), {"linear_act"}),
        (lambda: nn.Sequential(nn.Linear(64, 256), Quick(1.0)), {"linear_act"}),
        (lambda: nn.Sequential(nn.LayerNorm(64), Quick(1.5)), {"layer_norm", "gated_act"}),
    ],
)
@pytest.mark.usefixtures("own_graphs")
def test_the_most_copied_code(make: Callable[[], nn.Module], ops: set[str]) -> None:
    """In float64; the same elements are dropped in the same places, also if p is set later."""
    torch.manual_seed(0)
    model = nn.Sequential(make()).double()
    x = X.double().requires_grad_()
    dropouts = [part for part in model.modules() if isinstance(part, nn.Dropout)]

    def run_with(p: float) -> list[torch.Tensor]:
        before = [part.p for part in dropouts]
        for at, part in enumerate(dropouts):
            part.p = p / (1 + at)  # in the other order they would drop others
        found = run(model, x)
        for part, own in zip(dropouts, before, strict=True):
            part.p = own
        return found

    calls: list[Any] = [functools.partial(run_with, p) for p in (0.0, 0.3)[: 1 + len(dropouts)]]
    assert {*check_fused(model, *calls, **numerics.CHAINED64)} == ops


@pytest.mark.parametrize("order", ["first", "last"])
@pytest.mark.usefixtures("own_graphs")
def test_a_gated_norm(order: str) -> None:
    """By position and by keyword; without a gate it is a norm by itself."""
    model = nn.ModuleList([GatedNorm(order)]).double()
    layer, x = model[0], X.double().requires_grad_()
    gate = x.detach().flip(0).requires_grad_()
    calls = [lambda: run(layer, x, gate), lambda: run(layer, x, gate=gate), lambda: run(layer, x)]
    ops = {*check_fused(model, *calls, **numerics.CHAINED64)}
    assert ops == {"rms_norm", "gated_act"}


def test_no_layer_is_taken_for_a_norm() -> None:
    """A layer scale has one weight too."""

    class LayerScale(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gamma = nn.Parameter(torch.ones(64))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * self.gamma

    assert not torchweld.explain_fusion(nn.Sequential(LayerScale()), X)
