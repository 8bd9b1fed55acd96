"""The short way of a call: the bits of the whole path, and no call on it that is not like it."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import forward_ad
from torch.fx.experimental.proxy_tensor import make_fx
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import torchweld
from torchweld import functional
from torchweld.dispatch.autograd import as_tuple
from torchweld.dispatch.call import decide, decide_arranged
from torchweld.dispatch.warm import cache
from torchweld.errors import ArgumentError
from torchweld.ops.norm import RMS_NORM
from torchweld.random import Shard
from torchweld.sparse import BlockLayout

ROWS, WIDTH = 160, 64
LAYOUT = BlockLayout.sliding_window(64, 32, block=16)


def _x(*shape: int) -> torch.Tensor:
    return torch.randn(*(shape or (ROWS, WIDTH)))


def _columns(count: int) -> list[torch.Tensor]:
    return [torch.rand(WIDTH) + 0.5 for _ in range(count)]


def _samples(count: int) -> list[torch.Tensor]:
    return list(torch.randn(8, count * WIDTH).chunk(count, dim=-1))


def _angles() -> list[torch.Tensor]:
    angles = torch.rand(48, 32)
    return [_x(4, 2, 48, 64), angles.cos(), angles.sin()]


def _classes(rows: int, classes: int) -> torch.Tensor:
    target = torch.randint(0, classes, (rows,))
    target[1::5] = -100
    return target


# Arguments with a gradient, those without, and the rest.
Made = tuple[list[torch.Tensor], list[torch.Tensor], dict[str, Any]]
MAKE: dict[str, Callable[[], Made]] = {
    # With fewer elements it is torch's op, without a look-up.
    "layer_norm": lambda: ([_x(8208, WIDTH), *_columns(2)], [], {"normalized_shape": (WIDTH,)}),
    "rms_norm": lambda: ([_x(), *_columns(1)], [], {"normalized_shape": [WIDTH], "eps": 1e-5}),
    "dropout_add_layer_norm": lambda: ([_x(), _x(), *_columns(2)], [], {"p": 0.3}),
    "dropout_add_rms_norm": lambda: (
        [_x(), _x(), *_columns(1)],
        [],
        {"p": 0.0, "return_residual": True},
    ),
    "adaptive_layer_norm": lambda: ([_x(8, 128, WIDTH), *_samples(2)], [], {"eps": 1e-6}),
    "adaptive_rms_norm": lambda: ([_x(8, 128, WIDTH), *_samples(2)], [], {}),
    "gated_residual": lambda: ([_x(8, 128, WIDTH), *_samples(1), _x(8, 128, WIDTH)], [], {}),
    "gated_residual_layer_norm": lambda: (
        [_x(8, 128, WIDTH), *_samples(1), _x(8, 128, WIDTH), *_samples(2)],
        [],
        {"return_residual": True},
    ),
    "bias_dropout_add": lambda: ([_x(), *_columns(1), _x()], [], {"p": 0.2}),
    "bias_act": lambda: ([_x(), *_columns(1)], [], {"activation": "silu"}),
    "gated_act": lambda: ([_x(), _x()], [], {"activation": "gelu", "approximate": "tanh"}),
    "softmax_dropout": lambda: ([_x()], [], {"scale": 0.125, "p": 0.1}),
    "normalize_act": lambda: ([_x()], _columns(2), {"activation": "relu"}),
    "batch_norm_act": lambda: ([_x()], _columns(2), {"training": True, "activation": "relu"}),
    "linear_gelu": lambda: ([_x(1100, 64), _x(32, 64), _x(32)], [], {}),
    "linear_act": lambda: ([_x(1100, 64), _x(32, 64)], [], {"activation": "silu"}),
    "gated_mlp": lambda: ([_x(1100, 64), *(_x(64, 64) / 8 for _ in range(3))], [], {}),
    "rotary_embedding": lambda: (_angles()[:1], _angles()[1:], {}),
    "block_sparse_attention": lambda: (
        [_x(2, 2, 64, 32) for _ in range(3)],
        [],
        {"layout": LAYOUT},
    ),
    "cross_entropy": lambda: ([_x(320, 64)], [_classes(320, 64)], {"z_loss": 1e-3}),
    "linear_cross_entropy": lambda: (
        [_x(1100, 64), _x(300, 64)],
        [_classes(1100, 300)],
        {"label_smoothing": 0.1},
    ),
    "linear_logprobs": lambda: (
        [_x(1100, 64), _x(300, 64)],
        [_classes(1100, 300)],
        {"return_entropy": True},
    ),
    "logprobs": lambda: ([_x(320, 64)], [_classes(320, 64)], {"return_entropy": True}),
    # Few logits without an ignored row: torch's own ops serve.
    "cross_entropy, few": lambda: ([_x(8, 16)], [torch.arange(8)], {}),
    "logprobs, few": lambda: ([_x(8, 16)], [torch.arange(8)], {}),
    "linear_cross_entropy, few": lambda: ([_x(8, 64), _x(16, 64)], [torch.arange(8)], {}),
    "linear_logprobs, few": lambda: ([_x(8, 64), _x(16, 64)], [torch.arange(8)], {}),
}
NAMES = tuple(MAKE)
# Those whose arithmetic is torch's at any size of these, but for the activation.
DRAWING = ("dropout_add_layer_norm", "bias_dropout_add", "softmax_dropout")


class Call:
    """A public function with arguments."""

    def __init__(self, name: str, dtype: torch.dtype = torch.float32) -> None:
        self.name, self.function = name, getattr(functional, name.split(",")[0])
        torch.manual_seed(1)
        with_grad, without, self.rest = MAKE[name]()
        self.leaves = [t.to(dtype).requires_grad_() for t in with_grad]
        self.others = [t.to(dtype) if t.is_floating_point() else t for t in without]
        self.missed = 0

    def __call__(self, *leaves: Any, **changed: Any) -> Any:
        torch.manual_seed(7)
        return self.apply(self.function, *leaves, **changed)

    def apply(self, function: Callable[..., Any], *leaves: Any, **changed: Any) -> Any:
        given = [*(leaves or self.leaves), *self.others]
        rest = self.rest | changed
        if self.name in ("layer_norm", "rms_norm"):
            given.insert(1, rest.pop("normalized_shape"))
        return function(*given, **rest)

    def warm(self, *leaves: Any, **changed: Any) -> None:
        self(*leaves, **changed)
        before = self.missed
        self(*leaves, **changed)
        assert self.missed == before, "it has no short way"

    def gradients(self, results: Any) -> tuple[torch.Tensor, ...]:
        generator = torch.Generator().manual_seed(3)
        results = as_tuple(results)
        grads = [torch.randn(r.shape, generator=generator).to(r) for r in results]
        return torch.autograd.grad(results, self.leaves, grads)


@pytest.fixture
def call(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Call]:
    """A call that counts how often it found no short way."""
    cache.forget()
    name, dtype = request.param if isinstance(request.param, tuple) else (request.param, None)
    made = Call(name, dtype or torch.float32)
    scope, find = made.function.__globals__, cache._find

    def count(*given: Any) -> Any:
        made.missed += 1
        return find(*given)

    monkeypatch.setitem(scope, "_find", count)
    yield made
    cache.forget()


@contextmanager
def _whole_path() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        cache.forget()
        patch.setattr(cache, "make_guard", lambda *_, **__: None)
        yield
    cache.forget()


def _assert_equal(found: Any, wanted: Any) -> None:
    for a, b in zip(as_tuple(found), as_tuple(wanted), strict=True):
        assert a.dtype is b.dtype
        assert a.stride() == b.stride()
        assert torch.equal(a, b)


each = pytest.mark.parametrize("call", NAMES, indirect=True)
DTYPES = (torch.float32, torch.bfloat16, torch.float64)


@pytest.mark.parametrize(
    "call", [(n, d) for n in NAMES for d in DTYPES], indirect=True, ids=lambda p: f"{p[0]}-{p[1]}"
)
def test_bits_of_results_and_gradients(call: Call) -> None:
    call.warm()
    call.gradients(call())
    found = call()
    gradients = call.gradients(found)
    other = [torch.randn_like(t).requires_grad_() for t in call.leaves]
    of_others = call(*other)
    with torch.no_grad():
        call.warm()
        without = call()
    missed = call.missed
    with _whole_path():
        wanted = call()
        _assert_equal(found, wanted)
        _assert_equal(gradients, call.gradients(wanted))
        _assert_equal(of_others, call(*other))
        with torch.no_grad():
            _assert_equal(without, call())
    assert call.missed > missed
    assert all(a.grad_fn is not None for a in as_tuple(found))
    assert not any(a.requires_grad for a in as_tuple(without))


@each
def test_other_arguments_have_ways_of_their_own(call: Call) -> None:
    """Sizes, dtypes, strides, what needs a gradient, one tensor twice, a negative view."""
    call.warm()
    first, *rest = call.leaves
    changed: list[list[torch.Tensor]] = [
        [first.detach(), *rest],
        [first.detach().double(), *(t.detach().double() for t in rest)],
        [first.detach().transpose(0, 1).contiguous().transpose(0, 1), *rest],
        [torch._neg_view(first.detach()), *(t.detach() for t in rest)],
        [torch.nn.Parameter(first.detach()), *rest],
    ]
    if rest and rest[0].shape == first.shape:
        changed.append([first, first, *rest[1:]])
    if call.others and call.name != "rotary_embedding":
        changed.pop(1)  # others keep their dtype
    for leaves in changed:
        if call.name == "rotary_embedding" and leaves[0].dtype is torch.float64:
            continue
        for _ in range(2):
            found = call(*leaves)
        with _whole_path():
            _assert_equal(found, call(*leaves))
        call()


@each
def test_second_derivatives(call: Call) -> None:
    def derive() -> tuple[torch.Tensor | None, ...]:
        value = torch.stack([r.square().sum() for r in as_tuple(call())]).sum()
        first = torch.autograd.grad(value, call.leaves, create_graph=True)
        value = torch.stack([g.square().sum() for g in first]).sum()
        return torch.autograd.grad(value, call.leaves, allow_unused=True)

    call.warm()
    found = derive()
    with _whole_path():
        wanted = derive()
    for a, b in zip(found, wanted, strict=True):
        assert (a is None) == (b is None)
        assert a is None or torch.equal(a, b)


STATES: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "no_grad": torch.no_grad,
    "inference": torch.inference_mode,
    "bfloat16": lambda: torch.autocast("cpu", torch.bfloat16),
    "float16": lambda: torch.autocast("cpu", torch.float16),
    "eager": lambda: torchweld.use_backend("eager"),
    "meta": lambda: torch.device("meta"),
}


@pytest.mark.parametrize("state", STATES)
@each
def test_states_of_torch(call: Call, state: str) -> None:
    """A way that was found in a state serves only there; the other holds as well."""
    call.warm()
    plain = call()
    with STATES[state]():
        for _ in range(3):
            found = call()
        assert as_tuple(found)[0].is_inference() == (state == "inference")
    after = call()
    with _whole_path():
        with STATES[state]():
            _assert_equal(found, call())
        _assert_equal(plain, call())
        _assert_equal(after, plain)


@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning", "ignore:.*jit:DeprecationWarning")
@each
def test_transforms_and_recorders(call: Call) -> None:
    """torch.func, forward-mode AD, jit.trace, make_fx and fakes see the whole path."""
    call.warm()
    first, *rest = [t.detach() for t in call.leaves]
    call.warm(first, *rest)
    missed = call.missed
    torch.func.vjp(lambda x: call(x, *rest), first)
    assert call.missed > missed
    if call.name not in ("batch_norm_act",):
        torch.func.vmap(lambda x: call(x, *rest), randomness="same")(first[None])
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(first, torch.ones_like(first))
        out = as_tuple(call(dual, *rest))[0]
        assert forward_ad.unpack_dual(out).tangent is not None
    if call.name != "block_sparse_attention":
        graph = make_fx(lambda x: call(x, *rest))(first).graph
        assert len(graph.nodes) > 2
        traced = torch.jit.trace(lambda x: call(x, *rest), first, check_trace=False)
        assert "prim::Constant" in str(traced.graph)
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        assert type(as_tuple(call(mode.from_tensor(first), *rest))[0]).__name__ == "FakeTensor"
        assert type(as_tuple(call(first, *rest))[0]).__name__ == "FakeTensor"
    _assert_equal(call(first, *rest), call(first, *rest))


@each
def test_modes_see_calls(call: Call) -> None:
    seen: list[str] = []

    class Dispatch(TorchDispatchMode):
        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            seen.append("dispatch")
            return func(*args, **(kwargs or {}))

    class Function(TorchFunctionMode):
        def __torch_function__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            seen.append("function")
            return func(*args, **(kwargs or {}))

    call.warm()
    for mode in (Dispatch, Function):
        seen.clear()
        with mode():
            results = call()
        assert seen
    seen.clear()
    with Dispatch():
        call.gradients(call())
    assert seen
    results = call()
    seen.clear()
    with Dispatch():
        call.gradients(results)
    assert seen


@each
def test_a_compiled_call_is_whole(call: Call) -> None:
    call.warm()
    compiled = torch.compile(call.function, fullgraph=True, backend="aot_eager")
    found = as_tuple(call.apply(compiled))
    assert as_tuple(found)[0].grad_fn is not None
    if call.name not in DRAWING:
        torch.testing.assert_close(found, as_tuple(call()))
    torch.compiler.reset()


@each
def test_autograds_own_rules(call: Call) -> None:
    """Saved tensors' hooks, checkpoints, retained graphs, absent and strided gradients."""
    call.warm()
    with _whole_path():
        wanted = call.gradients(call())
    packed: list[torch.Tensor] = []

    def pack(t: torch.Tensor) -> torch.Tensor:
        packed.append(t)
        return t.clone()

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        results = call()
    _assert_equal(call.gradients(results), wanted)
    assert packed
    results = checkpoint(call, *call.leaves, use_reentrant=False)
    _assert_equal(call.gradients(results), wanted)
    first = as_tuple(call())[-1]
    grad = torch.ones_like(first).transpose(0, -1).contiguous().transpose(0, -1)
    once = torch.autograd.grad(first, call.leaves, grad, retain_graph=True, allow_unused=True)
    again = torch.autograd.grad(first, call.leaves, grad, allow_unused=True)
    with _whole_path():
        first = as_tuple(call())[-1]
        wanted = torch.autograd.grad(first, call.leaves, grad, allow_unused=True)
    for a, b, c in zip(once, again, wanted, strict=True):
        assert (a is None) == (b is None) == (c is None)
        assert a is None or (torch.equal(a, b) and torch.equal(a, c))
    results = call()
    call.gradients(results)
    with pytest.raises(RuntimeError, match="second time"):
        call.gradients(results)


@each
def test_subclasses_and_wrong_arguments_take_the_whole_path(call: Call) -> None:
    class Sub(torch.Tensor):
        pass

    call.warm()
    first, *rest = [t.detach() for t in call.leaves]
    call.warm(first, *rest)
    for _ in range(2):
        missed = call.missed
        found = call(first.as_subclass(Sub), *rest)
        assert call.missed > missed
    # The general path of losses, which reads no numbers, adds in another order.
    is_loss = "cross_entropy" in call.name or "logprobs" in call.name
    compare = torch.testing.assert_close if is_loss else _assert_equal
    compare(as_tuple(found)[0].as_subclass(torch.Tensor), as_tuple(call(first, *rest))[0])
    for wrong in (None, 3, np.ones((2, 2)), [first], first.to_sparse()):
        with pytest.raises((ArgumentError, TypeError)):
            call(wrong, *rest)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested")
@each
def test_nested_tensors_are_refused(call: Call) -> None:
    """torch's comparison of tensors would end the process."""
    given = [t.detach() for t in call.leaves]
    call.warm(*given)
    for at, t in enumerate(given):
        nested = torch.nested.nested_tensor([*t.unsqueeze(0)])  # of as many elements
        with pytest.raises((ArgumentError, TypeError, RuntimeError)):  # it has no sizes
            call(*given[:at], nested, *given[at + 1 :])


def _prepared(x: torch.Tensor, weight: torch.Tensor) -> tuple[Any, ...]:
    return x * 2, [WIDTH], weight, None


def _decide_prepared(input: torch.Tensor, weight: torch.Tensor) -> Any:
    return decide(RMS_NORM, *_prepared(input, weight))


def _decide_arranged(input: torch.Tensor, weight: torch.Tensor) -> Any:
    return decide_arranged(RMS_NORM, _prepared, {"input": input, "weight": weight})


def _decide_by_number(input: torch.Tensor, weight: torch.Tensor) -> Any:
    return decide(RMS_NORM, input, [WIDTH], None, float(weight[0]))


def _decide_both(input: torch.Tensor, weight: torch.Tensor) -> Any:
    return decide(RMS_NORM, input, [WIDTH], weight, None, returned=("y", "input"))


@pytest.mark.parametrize(
    ("decide_on", "is_kept"),
    [
        (_decide_prepared, False),
        (_decide_arranged, True),
        (_decide_by_number, False),
        (_decide_both, True),
    ],
)
def test_what_a_decision_takes(decide_on: Callable[..., Any], is_kept: bool) -> None:
    """A prepared argument is no raw one of its name, and a tensor's number is no constant."""
    whole: list[Any] = []

    def count(input: torch.Tensor, weight: torch.Tensor) -> Any:
        whole.append(input)
        return decide_on(input, weight)

    public: Any = cache.short()(count)
    for _ in range(3):
        given = _x(), torch.rand(WIDTH) + 0.5
        _assert_equal(public(*given), decide_on(*given).run())
    assert len(whole) == (1 if is_kept else 3)


@each
def test_four_threads(call: Call) -> None:
    call.warm()
    if call.name in DRAWING:
        call.rest = call.rest | {"p": 0.0}
    wanted, found = call.gradients(call()), []

    def work() -> None:
        for _ in range(20):
            found.append(call.gradients(call()))

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 80
    for gradients in found:
        _assert_equal(gradients, wanted)


@pytest.mark.parametrize("call", ["rms_norm"], indirect=True)
def test_a_list_that_is_changed_later_is_another(call: Call) -> None:
    shape = [WIDTH]
    call.warm(normalized_shape=shape)
    shape.insert(0, ROWS)
    with pytest.raises(ArgumentError):
        call(normalized_shape=shape)
    with pytest.raises(ArgumentError, match="sequence of ints"):  # an equal one
        call(normalized_shape=[float(WIDTH)])


@pytest.mark.parametrize("call", ["bias_dropout_add"], indirect=True)
def test_a_shard_that_is_changed_later_is_another(call: Call) -> None:
    shard = Shard([2 * ROWS, WIDTH], [0, 0])
    call.warm(shard=shard, p=0.5)
    first = call(shard=shard, p=0.5)
    shard.offsets[0] = ROWS  # type: ignore[index]
    second = call(shard=shard, p=0.5)
    assert not torch.equal(first, second)
    assert torch.equal(second, call(shard=Shard((2 * ROWS, WIDTH), (ROWS, 0)), p=0.5))


@pytest.mark.parametrize("call", ["softmax_dropout"], indirect=True)
def test_an_equal_value_of_another_class_is_another(call: Call) -> None:
    call.warm(scale=1.0, p=0.0)
    missed = call.missed
    for equal in (torch.tensor(1.0), True):
        with contextlib.suppress(ArgumentError):
            call(scale=equal, p=0.0)
        assert call.missed > missed
        missed = call.missed


@pytest.mark.parametrize("call", ["softmax_dropout"], indirect=True)
def test_numbers_of_tensors_are_no_constants(call: Call) -> None:
    """A given seed decides, and a tensor in place of a number is an error each time."""
    seeds = [torch.tensor([n]) for n in (3, 3, 4)]
    first, same, other = [call(seed=seed) for seed in seeds]
    assert torch.equal(first, same)
    assert not torch.equal(first, other)
    call.warm(scale=1.0)
    with pytest.raises(ArgumentError, match="scale"):
        call(scale=torch.tensor([1.0, 2.0]))
    assert torch.equal(call(seed=5), call(seed=5))
    assert not torch.equal(call(seed=5), call(seed=6))


@pytest.mark.parametrize("call", ["dropout_add_layer_norm"], indirect=True)
def test_each_call_draws(call: Call) -> None:
    call.warm()
    ours = [call.function(*call.leaves, p=0.5) for _ in range(3)]
    assert len({t.sum().item() for t in ours}) == 3


@pytest.mark.parametrize("call", ["rms_norm"], indirect=True)
def test_few_are_kept(call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache, "_SIZES", 3)
    weight = call.leaves[1]
    for rows in range(200, 210):
        call(_x(rows, WIDTH), weight)
    for eps in range(1, 10):
        call(eps=float(eps))
    ways = call.function.__globals__["_ways"]
    assert all(len(sizes) <= 3 for sizes in ways.values())
    assert all(len(kept) <= cache._ALIKE for sizes in ways.values() for kept in sizes.values())
    call.warm(eps=9.0)


@pytest.mark.parametrize("trains", [False, True])
def test_a_profile_names_each_call(trains: bool) -> None:
    """A warm call without gradients left no event at all: it passes torch's dispatcher by."""
    x, weight = torch.randn(64, 512, requires_grad=trains), torch.ones(512)
    gate = torch.randn(64, 512)

    def step() -> None:
        functional.rms_norm(x, [512], weight)
        functional.gated_act(x, gate)

    for _ in range(3):
        step()
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU], acc_events=True
    ) as profile:
        for _ in range(4):
            step()
    counts = {event.key: event.count for event in profile.key_averages()}
    assert counts["torchweld::rms_norm"] == counts["torchweld::gated_act"] == 4
