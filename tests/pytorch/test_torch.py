"""Contract 3: torch's own machinery, from opcheck to torch.compile, autocast and functorch."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import forward_ad

import selection
import torchweld
from conftest import Target
from oracle import incoming, is_floating, run, total
from torchweld import functional, numerics
from torchweld.bench.cases import CASES
from torchweld.bench.measure.host_times import PAIRS, Timed
from torchweld.dispatch import choice, proof
from torchweld.dispatch.autograd import as_tuple
from torchweld.dispatch.call import call
from torchweld.distributed.ring.attention import _RingAttention
from torchweld.registry import BACKENDS, Made, Op, TensorSpec, materialize

IMITATED = ("interpreter", "emulator")


def _sample(sized_as: Op | Target, **kwargs: Any) -> list[Any]:
    return materialize(sized_as.sized((4, 5), (768,)), **kwargs)


def _evaluated(op: Op, leading: tuple[int, ...]) -> list[Any]:
    """A sample that updates no running statistics: torch's transforms refuse that."""
    names = op.forward_signature.arguments
    inputs = materialize(op.sized(leading, (768,)), torch.float32)
    return [False if name == "training" else v for name, v in zip(names, inputs, strict=True)]


def _overloads(target: Target) -> tuple[Any, Any]:
    kernel = target.op.kernels[target.backend]
    return kernel.forward, kernel.backward


def _equal(found: Any, expected: Any) -> bool:
    pairs = zip(as_tuple(found), as_tuple(expected), strict=True)
    return all(torch.equal(f, e) for f, e in pairs)


def _backward_arguments(op: Op, inputs: list[Any], results: Any) -> list[Any]:
    values = dict(zip(op.forward_signature.arguments, inputs, strict=True))
    values |= dict(zip(op.forward_signature.results, as_tuple(results), strict=True))
    values |= {f"grad_{name}": incoming(values[name]) for name in op.public}
    values |= {f"{name}_dtype": value.dtype for name, value in values.items() if is_floating(value)}
    values |= {f"need_{name}": values[name] is not None for name in op.forward_signature.arguments}
    return [values[name] for name in op.backward_signature.arguments]


# opcheck's parts; the last one takes ten times as long as the others. Fakes are right or wrong for
# a sample in a dtype; the graph is the same in each dtype.
FAKES = ("test_schema", "test_autograd_registration", "test_faketensor")
GRAPH = "test_aot_dispatch_dynamic"


def _graph_is_traced(target: Target, dtype: torch.dtype, at: int, samples: int) -> bool:
    """Each sample in a dtype, and each dtype with a sample."""
    number = target.dtypes.index(dtype)
    if target.place in IMITATED:
        return selection.WHOLE or number == 0
    return selection.WHOLE or (at - number) % min(samples, len(target.dtypes)) == 0


def test_opcheck(target: Target, dtype: torch.dtype) -> None:
    """Schema, fake and functionalisation agree with the implementation, dynamic shapes included.

    It concerns the graph, so one sample is enough where kernels are imitated.
    """
    forward, backward = _overloads(target)
    samples = [
        s for s in CASES[target.op.name].samples if len(s[0].shape) == 2 and s[0].shape[-1] > 1
    ]
    samples = samples[: 1 if target.place in IMITATED else 4]
    for at, arguments in enumerate(samples):
        parts = (*FAKES, GRAPH) if _graph_is_traced(target, dtype, at, len(samples)) else FAKES
        inputs = materialize(arguments, dtype, target.device)
        torch.library.opcheck(forward, inputs, test_utils=parts)
        given = _backward_arguments(target.op, inputs, forward(*inputs))
        torch.library.opcheck(backward, given, test_utils=parts)


def test_compile_equals_eager(target: Target) -> None:
    """One graph, and the same bits.

    Inductor calls the op of the graph that aot_eager calls, whichever kernel imitates it.
    """
    compiler = "aot_eager" if target.place in IMITATED else "inductor"
    inputs = _sample(target, dtype=torch.float32, device=target.device)
    eager = run(target.op, inputs)
    for backend in ("aot_eager", "inductor") if selection.WHOLE else (compiler,):
        torch._dynamo.reset()
        compiled = torch.compile(
            lambda *inputs: call(target.op, *inputs), fullgraph=True, backend=backend
        )
        for name, value in run(target.op, inputs, compiled).items():
            assert torch.equal(value, eager[name]), name


_ROUTED = torch.tensor([[0, 1], [1, 0], [0, 1], [1, 0]]), torch.full((4, 2), 0.5)
_TWICE: dict[str, Any] = {
    "bias_dropout_add": lambda x, w: functional.bias_dropout_add(x, None, x, p=0.1),
    "dropout_add_rms_norm": lambda x, w: functional.dropout_add_rms_norm(x, x, w, p=0.1)[0],
    "gated_residual": lambda x, w: functional.gated_residual(x, w.expand(4, 8), x),
    "normalize_act": lambda x, w: functional.normalize_act(x, w, w),
    "batch_norm_act": lambda x, w: functional.batch_norm_act(x, None, None, w, w, True),
    "experts_mlp": lambda x, w: functional.experts_mlp(
        x, *[w.diag().expand(2, 8, 8)] * 2, *_ROUTED, gated=False
    ),
    "mlp": lambda x, w: functional.mlp(x, *[w.diag(), w] * 2),
    "linear_cross_entropy": lambda x, w: functional.linear_cross_entropy(x, x, _ROUTED[0][:, 0]),
    "rotary_embedding_qk": lambda x, w: functional.rotary_embedding_qk(
        *[x.view(1, 1, 4, 8)] * 2, *[w.detach().expand(4, 8)] * 2
    )[0],
}


@pytest.mark.parametrize("name", _TWICE)
def test_one_tensor_for_two_arguments_compiles(name: str) -> None:
    """Dynamo's autograd.Function takes no tensor twice, so that fullgraph raised an error."""
    torch._dynamo.reset()
    results = []
    with torchweld.use_backend("cpu"):
        for function in (
            _TWICE[name],
            torch.compile(_TWICE[name], fullgraph=True, backend="aot_eager"),
        ):
            torch.manual_seed(0)
            x, w = torch.randn(4, 8, requires_grad=True), torch.rand(8, requires_grad=True)
            y = function(x, w)
            results.append([y, *torch.autograd.grad(y.square().sum(), (x, w), allow_unused=True)])
    for found, expected in zip(*results, strict=True):
        torch.testing.assert_close(found, expected, **numerics.ROUNDED)


# It tests the call and the fakes, which are the same wherever kernels are imitated. By default the
# second graph is the one of dynamic=True, which test_the_automatic_choice_compiles has first.
@pytest.mark.targets(not_at=IMITATED)
@pytest.mark.parametrize("dynamic", [True, None] if selection.WHOLE else [None])
def test_no_recompilation(target: Target, dynamic: bool | None) -> None:
    """dynamic=True compiles once; by default the second size compiles again and no later one."""
    torch._dynamo.reset()
    compiled = torch.compile(
        lambda *inputs: call(target.op, *inputs),
        fullgraph=True,
        backend="aot_eager",
        dynamic=dynamic,
    )
    # Not 4: torch identifies equal sizes, and a layout's lines are four numbers.
    for position, rows in enumerate((7, 6, 9, 12)):
        settled = position >= (1 if dynamic else 2)
        inputs = materialize(
            target.sized((rows, 5), (768,)), torch.float32, target.device, requires_grad=True
        )
        with torch._dynamo.config.patch(error_on_recompile=settled):
            total(compiled(*inputs)).backward()


def test_compiled_choice_can_change(op: Op) -> None:
    """Graphs guard on the backend in force: another one recompiles instead of being ignored."""
    torch._dynamo.reset()
    graphs: list[set[Any]] = []

    def record(graph: torch.fx.GraphModule, _: Any) -> Any:
        graphs.append({node.target for node in graph.graph.nodes})
        return graph.forward

    compiled = torch.compile(lambda *inputs: call(op, *inputs), fullgraph=True, backend=record)
    inputs = _sample(op, dtype=torch.float32)
    for backend in ("eager", "cpu"):
        with torchweld.use_backend(backend):
            compiled(*inputs)
    kernel = op.kernels["cpu"].forward
    assert [kernel in graph for graph in graphs] == [False, True]


def test_the_automatic_choice_compiles(op: Op, monkeypatch: pytest.MonkeyPatch) -> None:
    """In one graph, also when a GPU's answers are looked up, and for any size."""
    torch._dynamo.reset()
    monkeypatch.setattr(choice, "is_on_gpu", lambda x: True)
    monkeypatch.setattr(proof, "mode", "time")
    monkeypatch.setattr(BACKENDS["cpu"], "why_missing", lambda: "not here")
    for backend in ("cuda", "triton"):
        monkeypatch.setattr(BACKENDS[backend], "why_missing", lambda: None)
        monkeypatch.setattr(BACKENDS[backend], "devices", {"cpu", "cuda"})
    # Dynamo decides on graphs and sizes. What AOTAutograd would trace next is plain torch.
    backend = "aot_eager" if selection.WHOLE else "eager"
    compiled = torch.compile(
        lambda *inputs: call(op, *inputs), fullgraph=True, backend=backend, dynamic=True
    )
    for rows, recompiles in ((7, True), (6, False)):
        inputs = materialize(op.sized((rows, 5), (768,)), torch.float32)
        with torch._dynamo.config.patch(error_on_recompile=not recompiles):
            torch.testing.assert_close(compiled(*inputs), op.reference(*inputs))


@contextmanager
def _autocast(device: str) -> Iterator[None]:
    """torch.autocast to bfloat16, for CUDA even without CUDA: fake tensors follow its rules."""
    torch.set_autocast_dtype(device, torch.bfloat16)
    torch.set_autocast_enabled(device, True)
    try:
        yield
    finally:
        torch.set_autocast_enabled(device, False)


def _empty(argument: Any, dtype: torch.dtype, device: str) -> Any:
    if isinstance(argument, torch.Tensor):
        return torch.empty(argument.shape, dtype=argument.dtype, device=device)
    if not isinstance(argument, TensorSpec):
        return argument
    kinds = {"boolean": torch.bool, "padding": torch.bool, "seed": torch.int64}
    return torch.empty(argument.shape, dtype=kinds.get(argument.kind, dtype), device=device)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_autocast_has_eagers_dtype(
    op: Op, device: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On each device the result under autocast has the dtype of eager's."""
    backend = next((b for b in op.sources if device in BACKENDS[b].devices), None)
    if backend is None:
        pytest.skip(f"{op.name} has no kernel for {device}")
    if op.name == "block_sparse_attention" and device == "cuda" and not torch.cuda.is_available():
        pytest.skip("its reference indexes, which asks for the device; test_block_sparse.py has it")
    monkeypatch.setattr(BACKENDS[backend], "why_missing", lambda: None)
    sample = [v.make() if isinstance(v, Made) else v for v in op.sized((4, 5), (768,))]
    with FakeTensorMode(), _autocast(device):
        inputs = [_empty(v, dtype, device) for v in sample]
        with torchweld.use_backend(backend):
            plain = CASES[op.name].plain or op.reference  # the reference needs an existing device
            ours, eager = as_tuple(call(op, *inputs)), as_tuple(plain(*inputs))
            assert [result.dtype for result in ours] == [result.dtype for result in eager]


@pytest.mark.targets(composites=True)
def test_vmap_is_right_and_a_named_backend_refuses(op: Op) -> None:
    inputs = _evaluated(op, (5,))
    x = torch.randn(4, 5, 768)
    batched = torch.func.vmap(lambda x: call(op, x, *inputs[1:]))
    expected = torch.func.vmap(lambda x: op.reference(x, *inputs[1:]))(x)
    assert _equal(batched(x), expected)
    with torchweld.use_backend("cpu"), pytest.raises(torchweld.BackendError, match=r"torch\.func"):
        batched(x)


@pytest.mark.targets(composites=True)
def test_forward_mode_is_right_and_a_named_backend_refuses(op: Op) -> None:
    """Never a silent zero."""
    inputs = _evaluated(op, (20,))
    x, tangent = inputs[0], torch.randn_like(inputs[0])
    for function in (torch.func.jvp, _dual_jvp):
        found = function(lambda x: call(op, x, *inputs[1:]), (x,), (tangent,))[1]
        expected = function(lambda x: op.reference(x, *inputs[1:]), (x,), (tangent,))[1]
        if op.name == "rotary_embedding":  # its second result depends on another tensor
            found, expected = found[:1], expected[:1]
        assert _equal(found, expected)
        assert all(derivative.any() for derivative in as_tuple(found))
        with torchweld.use_backend("cpu"), pytest.raises(torchweld.BackendError):
            function(lambda x: call(op, x, *inputs[1:]), (x,), (tangent,))


@pytest.mark.parametrize("name", [name for name, pair in PAIRS.items() if pair.leaves])
def test_gradients_with_a_tangent(name: str) -> None:
    """Forward-mode AD of a backward pass, whose graph was made outside, cold and warm.

    Every op lost the tangent silently: kernels read a gradient's numbers only, and tests of
    forward-mode AD ended at results. A backward pass is linear in its gradients: the results'
    tangents are what it makes of the gradients' tangents.
    """
    pair = PAIRS[name]
    given = [t.requires_grad_() if at < pair.leaves else t for at, t in enumerate(_draw(pair))]
    leaves = given[: pair.leaves]
    for _ in range(3):
        results = [y for y in as_tuple(pair.ours(*given)) if y.requires_grad]
        grads, tangents = ([torch.randn_like(y) for y in results] for _ in range(2))
        how: Any = {"allow_unused": True, "retain_graph": True}
        wanted = torch.autograd.grad(results, leaves, tangents, **how)
        with forward_ad.dual_level():
            duals = [*map(forward_ad.make_dual, grads, tangents)]
            made = torch.autograd.grad(results, leaves, duals, **how)
            found = [None if each is None else forward_ad.unpack_dual(each) for each in made]
        for each, expected, exact in zip(
            found, wanted, torch.autograd.grad(results, leaves, grads, **how), strict=True
        ):
            if each is None or expected is None:
                assert each is expected
                continue
            assert not each.primal.requires_grad
            for one, other in ((each.primal, exact), (each.tangent, expected)):
                assert one is not None
                # Terms of a batch norm's gradient are about 1, and cancel.
                most = 8 * numerics.REORDERED * (1 + other.abs().max())
                assert (one - other).abs().max() <= most


def _draw(pair: Timed) -> list[torch.Tensor]:
    return [t.detach() for t in pair.draw(*pair.sizes[0])]


def test_attention_along_a_ring_refuses_tangents() -> None:
    """Its kernels would lose them."""
    with forward_ad.dual_level(), pytest.raises(RuntimeError, match="tangent"):
        _RingAttention.backward(None, forward_ad.make_dual(torch.ones(1), torch.ones(1)), None)


def _dual_jvp(function: Any, primals: Any, tangents: Any) -> Any:
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(primals[0], tangents[0])
        results = [torch.autograd.forward_ad.unpack_dual(r) for r in as_tuple(function(dual))]
        return tuple(result[0] for result in results), tuple(result[1] for result in results)


def test_checkpoint_policies_see_the_op(target: Target) -> None:
    """MUST_SAVE runs the forward once, recomputation twice."""
    from torch.utils.checkpoint import (
        CheckpointPolicy,
        checkpoint,
        create_selective_checkpoint_contexts,
    )

    forward, _ = _overloads(target)
    seen: list[Any] = []

    def policy(context: Any, op: Any, *args: Any, **kwargs: Any) -> Any:
        seen.append(op)
        keep = op is forward
        return CheckpointPolicy.MUST_SAVE if keep else CheckpointPolicy.PREFER_RECOMPUTE

    inputs = _sample(target, dtype=torch.float32, device=target.device, requires_grad=True)
    results = checkpoint(
        lambda *given: call(target.op, *given),
        *inputs,
        use_reentrant=False,
        context_fn=lambda: create_selective_checkpoint_contexts(policy),
    )
    total(results).backward()
    assert forward in seen
    expected = run(target.op, inputs)
    assert _equal(results, tuple(expected[name] for name in target.op.public))


def test_schema_and_implementation_agree(target: Target) -> None:
    """The stable ABI does not check argument types: distinct values must arrive where they belong.

    Every argument is changed in turn, and the result must change as the reference's does.
    """
    op = target.op
    inputs = _sample(target, dtype=torch.float32, device=target.device)
    base = op.reference(*inputs)
    for position, value in enumerate(inputs):
        changed = list(inputs)
        if is_floating(value):
            # Adding a number would change no softmax.
            changed[position] = value.flip(tuple(range(value.ndim)))
        elif isinstance(value, torch.Tensor) and value.dtype == torch.bool:
            changed[position] = ~value
        elif isinstance(value, torch.Tensor) and value.dtype == torch.int32:
            continue  # a layout's lists, whose numbers depend on each other
        elif isinstance(value, torch.Tensor):
            changed[position] = value + 1
        elif op.forward_signature.arguments[position] == "wide_y":
            continue  # nothing in float32; test_autocast.py has it
        elif isinstance(value, bool):
            changed[position] = not value
        elif isinstance(value, float):
            changed[position] = value + 0.25
        else:
            continue
        expected = op.reference(*changed)
        same = zip(as_tuple(expected), as_tuple(base), strict=True)
        unchanged = all(torch.allclose(e, b) for e, b in same)
        assert not unchanged, op.forward_signature.arguments[position]
        torch.testing.assert_close(call(op, *changed), expected)


def test_nodes_have_the_ops_name(op: Op) -> None:
    """In grad_fn, in the profiler, and in the output of anomaly detection."""
    inputs = materialize(CASES[op.name].samples[0], torch.float32)
    seen: set[str] = set()

    def function(*given: Any) -> Any:
        found = call(op, *given)
        seen.update(result.grad_fn.name() for result in as_tuple(found))
        return found

    with torchweld.use_backend("cpu"), torch.profiler.profile(acc_events=True) as profile:
        run(op, inputs, function)
    assert seen == {f"{op.name}_cpuBackward"}
    assert any(f"{op.name}_cpuBackward" in event.key for event in profile.key_averages())


def test_a_tensor_that_left_a_transform() -> None:
    """Its wrapper of torch.func.grad is dead, and autograd records calls with it as with others."""
    left: list[torch.Tensor] = []

    def function(x: torch.Tensor) -> torch.Tensor:
        left.append(x)
        return x.square().sum()

    torch.func.grad(function)(torch.randn(3, 64))
    weight = torch.ones(64, requires_grad=True)
    with torchweld.use_backend("cpu"):
        ours = torchweld.functional.layer_norm(left[0], (64,), weight)
    theirs = torch.nn.functional.layer_norm(left[0], (64,), weight)
    (mine,) = torch.autograd.grad(ours.sin().sum(), weight)
    (wanted,) = torch.autograd.grad(theirs.sin().sum(), weight)
    torch.testing.assert_close(mine, wanted)
