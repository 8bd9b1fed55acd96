"""The check at first use: CPU kernels stand for a GPU's."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils import checkpoint
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

import torchweld
from conftest import PLACES, running_at
from torchweld.bench.cases import CASES
from torchweld.bench.cases.declare import vary
from torchweld.dispatch import choice, op_proof, proof
from torchweld.dispatch.autograd import as_tuple
from torchweld.dispatch.call import call, is_too_small, run_checkpointed
from torchweld.dispatch.op_proof import make_question
from torchweld.dispatch.proof import ROWS, Judge
from torchweld.ops.activation import ACTIVATIONS
from torchweld.random import Shard
from torchweld.registry import EAGER, OPS, Op, materialize
from torchweld.sparse import BlockLayout
from torchweld.sparse.lists import token_mask
from trying import Trials, forget

LAYER_NORM = OPS["layer_norm"]


def test_sizes_that_are_small_for_the_cpu_are_tried_on_a_gpu() -> None:
    with FakeTensorMode():
        for op in OPS.values():
            at_hand, on_gpu = (torch.empty(8, 8, device=device) for device in ("cpu", "cuda"))
            rest = [None] * len(op.forward_signature.arguments[1:])
            assert is_too_small(op, [at_hand, *rest]) is (op.small > 64)
            assert not is_too_small(op, [on_gpu, *rest])


def test_a_result_that_is_absent_is_right() -> None:
    """Rotary embeddings of one tensor have an empty second result."""
    x, cos = torch.randn(1, 2, 7, 64), torch.randn(7, 64)
    op = OPS["rotary_embedding"]
    inputs = [x, None, cos, cos, None, None, None, 64, False, False, None, False, "none", None]
    question = make_question(op, inputs)
    judge = Judge(question.exact(), question.trusted(), question.rounded)
    found = question.run("cpu")
    assert 0 in {value.numel() for value in found.values()}
    assert judge.find_fault(found) is None
    name, y = next((name, value) for name, value in found.items() if value.numel())
    assert judge.find_fault({**found, name: y + 1}) is not None


@pytest.mark.targets(composites=True)
@pytest.mark.parametrize("train", [True, False])
@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_right_kernels_pass(
    op: Op, kind: torch.dtype, train: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a part of the rows, and without a trace in torch's random numbers or the inputs."""
    monkeypatch.setattr(op_proof, "ROWS", 24)
    inputs = materialize(op.sized((7, 11), (64,)), kind, requires_grad=train)
    before = torch.get_rng_state()
    question = make_question(op, inputs)
    assert question.kind["direction"] == ("full" if train else "fwd")
    judge = Judge(question.exact(), question.trusted())
    assert judge.find_fault(question.run("cpu")) is None
    sample = op.take_sample(inputs, 24)
    has_rows = op.sharding.columns(*inputs) < inputs[0].ndim  # else they are taken together
    assert sample[0].shape[:-1].numel() <= 24 or CASES[op.name].has_dense_reference or not has_rows
    assert torch.equal(torch.get_rng_state(), before)
    assert all(v.grad is None for v in inputs if isinstance(v, torch.Tensor))


@pytest.mark.skipif(PLACES["interpreter"][2] is not None, reason=str(PLACES["interpreter"][2]))
@pytest.mark.parametrize("name", ["bias_act", "gated_act"])
def test_right_kernels_pass_on_few_numbers(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of few numbers eager's error is small by luck: the bound has some roundings besides.

    A first call of 4 x 64 refused the kernel of GELU's tanh form once in six times, and kept that.
    Tests had 24 rows or more, and the CPU's kernels, whose exponentials are more exact.
    """
    arguments = [
        vary(name, (rows,), (width,), activation=kind, approximate=form)
        for (kind, form), (rows, width) in itertools.product(ACTIVATIONS, ((2, 8), (5, 7), (4, 64)))
    ]
    with running_at("interpreter", monkeypatch):
        for each, seed in itertools.product(arguments, range(6)):
            inputs = materialize(each, torch.float32, requires_grad=True, seed=seed)
            question = make_question(OPS[name], inputs)
            judge = Judge(question.exact(), question.trusted())
            assert judge.find_fault(question.run("triton")) is None, (each, seed)


@pytest.mark.usefixtures("trials")
def test_a_planted_kernel_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """With one warning; the call has eager's result, and `explain` says why."""
    x = torch.randn(1024, 2048)
    kernel = LAYER_NORM.kernels["cpu"]
    forward = kernel.forward

    def wrong(*inputs: Any) -> Any:
        y, *rest = forward(*inputs)
        return y * 1.01, *rest

    monkeypatch.setattr(kernel, "forward", wrong)
    given = (x, [2048], None, None, 1e-5)
    with pytest.warns(RuntimeWarning, match="cpu for layer_norm, fwd, float32, width 2048"):
        assert torch.equal(call(LAYER_NORM, *given), LAYER_NORM.reference(*given))
    for _ in range(2):  # a second warning would be an error
        assert torch.equal(call(LAYER_NORM, *given), LAYER_NORM.reference(*given))
    reasons = torchweld.explain("layer_norm", x, [2048]).reasons
    assert "at its first use here: wrong result: y is off by" in reasons["cpu"]


@pytest.mark.usefixtures("trials")
def test_a_kernel_that_raises_is_off(monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(*inputs: Any) -> Any:
        raise RuntimeError("no kernel image is available for execution on the device")

    monkeypatch.setattr(LAYER_NORM.kernels["cpu"], "forward", failing)
    given = (torch.randn(1024, 2048), [2048], None, None, 1e-5)
    with pytest.warns(RuntimeWarning, match="no kernel image"):
        assert torch.equal(call(LAYER_NORM, *given), LAYER_NORM.reference(*given))


@pytest.mark.usefixtures("trials")
def test_a_transform_leaves_no_verdict() -> None:
    """No kernel can serve inside torch.func; outside, kernels can and are tried."""
    x = torch.randn(8, 128, 2048)
    norm = torchweld.functional.layer_norm
    torch.func.vmap(lambda x: norm(x, [2048]))(x)
    assert choice.choose(LAYER_NORM, (x, [2048], None, None, 1e-5)) == "cpu"
    torch.func.vmap(lambda x: norm(x, [2048]))(x)


@pytest.mark.usefixtures("trials")
@pytest.mark.parametrize("wrong", [False, True])
def test_a_compiled_graph_takes_what_is_proven(
    wrong: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At trace time, on numbers of its own; or from what served such calls before."""
    monkeypatch.setattr(choice, "is_on_gpu", lambda x: True)
    ran = []
    kernel = LAYER_NORM.kernels["cpu"]
    forward = kernel.forward

    def run(*given: Any) -> Any:
        ran.append(1)
        y, *rest = forward(*given)
        return y + wrong, *rest

    monkeypatch.setattr(kernel, "forward", run)
    traced = []

    @torch.compile(fullgraph=True, backend="eager")
    def chosen(x: torch.Tensor) -> torch.Tensor:
        name = choice.choose(LAYER_NORM, (x, [2048], None, None, 1e-5))
        traced.append(name)
        return x + 1

    before = torch.get_rng_state()
    with pytest.warns(RuntimeWarning, match="off by") if wrong else nullcontext():
        chosen(torch.randn(1024, 2048))
    del before
    assert set(traced) == {EAGER if wrong else "cpu"}
    assert ran
    tried = len(ran)
    torch.compiler.reset()
    chosen(torch.randn(32, 2048))
    assert len(ran) == tried, "it is tried once"


def _refuse(dtype: torch.dtype, patch: pytest.MonkeyPatch) -> None:
    """Plant a kernel that fails for a dtype."""
    kernel = LAYER_NORM.kernels["cpu"]
    forward = kernel.forward

    def run(x: torch.Tensor, *rest: Any) -> Any:
        if x.dtype is dtype:
            raise RuntimeError("no kernel image")
        return forward(x, *rest)

    patch.setattr(kernel, "forward", run)


@pytest.mark.usefixtures("trials")
@pytest.mark.parametrize(("kept_as", "chosen"), [(torch.float32, EAGER), (torch.bfloat16, "cpu")])
def test_a_compiled_graph_takes_what_served_its_dtype(
    kept_as: torch.dtype, chosen: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At another size, too; a verdict on another dtype says nothing, and the op is tried."""
    given = (torch.randn(1024, 512, dtype=kept_as), [512], None, None, 1e-5)
    with monkeypatch.context() as patch:
        _refuse(kept_as, patch)
        with pytest.warns(RuntimeWarning, match="no kernel image"):
            assert choice.choose(LAYER_NORM, given) == EAGER
    assert op_proof.choose_while_compiling("layer_norm", None, torch.float32, "fwd") == chosen


def test_dtypes_are_tried_apart(trials: Trials, monkeypatch: pytest.MonkeyPatch) -> None:
    """A verdict on float16 says nothing of bfloat16, which has a trial and a verdict of its own."""
    given = {
        dtype: (torch.randn(1024, 2048, dtype=dtype), [2048], None, None, 1e-5)
        for dtype in (torch.bfloat16, torch.float16, torch.float32)
    }
    _refuse(torch.float16, monkeypatch)
    with pytest.warns(RuntimeWarning, match="no kernel image"):
        chosen = [choice.choose(LAYER_NORM, each) for each in given.values()]
    assert chosen == ["cpu", EAGER, "cpu"]
    kept = {entry.kind["dtype"]: entry.answer for entry in trials.checker.entries()}
    assert kept.keys() == {str(dtype).removeprefix("torch.") for dtype in given}
    assert len({op_proof.class_of(LAYER_NORM, each) for each in given.values()}) == 3
    assert not trials.timed


def test_a_linear_layers_class_has_its_features() -> None:
    """GEMMs that widen the same rows differently are checked apart; the rows may vary."""
    x, op = torch.randn(8, 64), OPS["linear_act"]

    def of(features: int, rows: int = 8) -> tuple[tuple[Any, ...], str]:
        given = (x[:rows], torch.randn(features, 64), None, "gelu", "tanh")
        return op_proof.class_of(op, given), str(make_question(op, given))

    for at in (0, 1):
        assert of(256)[at] != of(1024)[at]
        assert of(256)[at] == of(256)[at]
        assert of(256)[at] == of(256, 2)[at]


@pytest.mark.usefixtures("trials")
def test_a_warm_call_does_not_ask_for_its_class(monkeypatch: pytest.MonkeyPatch) -> None:
    torchweld.functional.layer_norm(torch.randn(1024, 2048), [2048])
    monkeypatch.setattr(op_proof, "class_of", lambda *_: pytest.fail("it asks"))
    torchweld.functional.layer_norm(torch.randn(1024, 2048), [2048])


@pytest.mark.usefixtures("trials")
def test_what_is_not_settled_is_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """While a graph is captured eager serves, and no short way is kept for it."""
    x = torch.randn(1024, 2048)
    with monkeypatch.context() as capturing:
        capturing.setattr(proof, "is_capturing", lambda _: True)
        with pytest.warns(RuntimeWarning, match="captured"):
            torchweld.functional.layer_norm(x, [2048])
    asked: list[int] = []
    class_of = op_proof.class_of
    monkeypatch.setattr(op_proof, "class_of", lambda *g: (asked.append(1), class_of(*g))[1])
    torchweld.functional.layer_norm(x, [2048])
    assert asked


@pytest.mark.usefixtures("trials")
def test_warming_up_leaves_nothing_to_try(monkeypatch: pytest.MonkeyPatch) -> None:
    given = (torch.randn(1024, 2048), [2048], None, None, 1e-5)
    torchweld.warmup(lambda: call(LAYER_NORM, *given))
    monkeypatch.setattr(proof, "is_capturing", lambda _: True)  # a warning would be an error
    assert choice.choose(LAYER_NORM, given) == "cpu"


# --- Apart from the caller ------------------------------------------------------------------------


def _train(context: Callable[[Callable[..., Any]], Callable[..., Any]]) -> torch.Tensor:
    """The gradient of a norm that is first used inside a context."""
    x = torch.randn(1024, 2048, generator=torch.Generator().manual_seed(0)).requires_grad_()
    norm = torch.nn.Parameter(torch.ones(2048))

    def block(x: torch.Tensor) -> torch.Tensor:
        return torchweld.functional.layer_norm(x, [2048], norm).square()

    context(block)(x).sum().backward()
    assert x.grad is not None
    return x.grad


def _selective(block: Callable[..., Any]) -> Callable[..., Any]:
    keep = partial(checkpoint.create_selective_checkpoint_contexts, [torch.ops.aten.mm.default])
    return partial(checkpoint.checkpoint, block, use_reentrant=False, context_fn=keep)


CONTEXTS: dict[str, Callable[[Callable[..., Any]], Callable[..., Any]]] = {
    "checkpoint": lambda block: partial(checkpoint.checkpoint, block, use_reentrant=False),
    "reentrant checkpoint": lambda block: partial(checkpoint.checkpoint, block, use_reentrant=True),
    "selective checkpoint": _selective,
    "recompute": lambda block: partial(run_checkpointed, block),
}


@pytest.mark.parametrize("name", CONTEXTS)
def test_a_first_use_inside_a_checkpoint(name: str, trials: Trials) -> None:
    """The trial's own saved tensors are not the checkpoint's, which would call the op again."""
    found = _train(CONTEXTS[name])
    assert trials.answers(), "it was tried"
    with torchweld.use_backend("cpu"):
        torch.testing.assert_close(found, _train(lambda block: block))


class _Seen(TorchDispatchMode):
    """The elements of all tensors that operations return."""

    def __init__(self) -> None:
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        self.elements += sum(t.numel() for t in as_tuple(found) if isinstance(t, torch.Tensor))
        return found


class _SeenFunctions(TorchFunctionMode):
    def __init__(self) -> None:
        super().__init__()
        self.called: list[Any] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.called.append(func)
        return func(*args, **(kwargs or {}))


def test_modes_and_hooks_of_the_caller_see_no_trial(
    trials: Trials, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A second first use, with everything the caller may have on, shows what a warm one shows."""

    def watch() -> tuple[Any, ...]:
        packed: list[int] = []
        given = torch.randn(1024, 2048).requires_grad_()
        hooks = torch.autograd.graph.saved_tensors_hooks(
            lambda t: (packed.append(t.numel()), t)[1], lambda t: t
        )
        with (
            _Seen() as seen,
            _SeenFunctions() as functions,
            FlopCounterMode(display=False) as flops,
            hooks,
        ):
            torchweld.functional.layer_norm(given, [2048]).sum().backward()
        return packed, seen.elements, len(functions.called), flops.get_total_flops()

    cold = watch()
    assert len(trials.answers()) == 1
    forget(monkeypatch)
    warm = watch()
    assert len(trials.answers()) == 1
    assert cold == warm


def test_a_trial_in_inference_mode(trials: Trials) -> None:
    """And the later training, which is a class of its own."""
    x = torch.randn(1024, 2048)
    with torch.inference_mode():
        torchweld.functional.layer_norm(torch.randn(1024, 2048), [2048])
        torchweld.functional.layer_norm(x, [2048])
    x.requires_grad_()
    torchweld.functional.layer_norm(x, [2048]).sum().backward()
    assert len(trials.answers()) == 2
    assert [answer.backend for answer in trials.answers()] == ["cpu"] * 2


# --- Samples --------------------------------------------------------------------------------------

ATTENTION = OPS["block_sparse_attention"]


def _attention(
    queries: int, keys: int, heads: int = 4, key_heads: int = 2, **kwargs: Any
) -> tuple[Any, ...]:
    """A call's inputs, with full, partial and absent blocks that differ by head."""
    lengths = (queries, keys)
    layout = BlockLayout.sliding_window(lengths, window_size=(100, 30), block=32)
    q = torch.randn(2, heads, queries, 16, requires_grad=True)
    k, v = (torch.randn(2, key_heads, keys, 16, requires_grad=True) for _ in range(2))
    return tuple(ATTENTION.inputs(q, k, v, layout, **kwargs))


@pytest.mark.parametrize(
    "given",
    [
        lambda: _attention(5000, 5000),
        lambda: _attention(3000, 3000, 8, 1, causal=True),
        lambda: _attention(1, 4500),
        lambda: _attention(700, 5000, causal=True, dropout_p=0.2, seed=3),
        lambda: _attention(2100, 2100, 4, 4, sinks=torch.randn(4), softcap=4.0),
        lambda: _attention(2100, 2100, alibi_slopes=torch.rand(2, 4)),
        lambda: _attention(2100, 2100, key_padding_mask=torch.rand(2, 2100) > 0.9),
        lambda: _attention(2100, 2100, 8, 2, shard=Shard((2, 16, 2100, 16), (0, 8, 0, 0))),
    ],
)
def test_attention_of_many_tokens_is_checked(given: Callable[[], Any], trials: Trials) -> None:
    """And serves without being timed against dense eager attention."""
    inputs = given()
    sample = ATTENTION.take_sample(inputs, 4093)
    assert sample[0].numel() < 2**20
    ATTENTION.check(*sample)
    assert choice.choose(ATTENTION, inputs) == "cpu"
    (answer,) = trials.answers()
    assert (answer.backend, answer.faults) == ("cpu", {})


def test_a_sample_of_attention_has_its_layouts_blocks() -> None:
    """Windows at both ends, of the first and the last key head and sequence."""
    inputs = _attention(3000, 2800, 6, 3)
    whole = token_mask(inputs[5], inputs[6], inputs[9], 32, 3000, 2800)
    sample = ATTENTION.take_sample(inputs, 4093)
    assert [x.shape[:3] for x in sample[:3]] == [(2, 4, 509), (2, 2, 509), (2, 2, 509)]
    rows = token_mask(sample[5], sample[6], sample[9], 32, 509, 509)
    columns = token_mask(sample[7], sample[8], sample[9], 32, 509, 509)
    last_query, last_key = 2491 // 32 * 32, 2291 // 32 * 32
    lines, keys = (slice(first, first + 509) for first in (last_query, last_key))
    assert torch.equal(rows[:1], whole[:1, :, :509, :509])
    assert torch.equal(rows[1:], whole[:1, :, lines, keys])
    assert rows[1].any()
    # Both lists store a block's mask in the same orientation, so that only blocks can be compared.
    of_rows, of_columns = (
        torch.nn.functional.max_pool2d(x[:, 0].float(), 32, ceil_mode=True) for x in (rows, columns)
    )
    assert torch.equal(of_columns, of_rows.mT)
    assert torch.equal(sample[0][1], inputs[0][1, [0, 1, 4, 5], lines])
    assert torch.equal(sample[1][1], inputs[1][1, [0, 2], keys])


def test_a_row_of_several_dimensions_is_not_cut(trials: Trials) -> None:
    x = torch.randn(4, 5000, 8, requires_grad=True)
    given = (x, [5000, 8], None, None, 1e-5)
    assert choice.choose(LAYER_NORM, given) == "cpu"
    assert trials.answers()[0].faults == {}
    long = (torch.randn(20000, 3, 8), [3, 8], None, None, 1e-5)
    assert LAYER_NORM.take_sample(long, ROWS)[0].shape == (ROWS, 3, 8)
    assert ROWS % 2


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("direction", ["fwd", "full"])
def test_a_compiled_attention_takes_a_kernel(
    dtype: torch.dtype, direction: str, trials: Trials
) -> None:
    """What stands for its arguments is what a kernel can serve."""
    name = ATTENTION.name
    assert op_proof.choose_while_compiling(name, None, dtype, direction) == "cpu"
    assert [answer.backend for answer in trials.answers()] == ["cpu"]


@pytest.mark.targets(composites=True)
def test_what_stands_in_while_compiling_is_served_by_every_kernel(op: Op) -> None:
    """Else a compiled model would never take it."""
    given = materialize(op.stand_in, torch.float32)
    assert all(
        op.why_refused(backend, given) is None for backend in op.backends if backend != "cuda"
    )
