"""Selective checkpoints under dropout, and recorded training graphs: eager's bits."""

from __future__ import annotations

import io
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed import _functional_collectives
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining import SplitPoint, pipeline
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.utils.checkpoint import CheckpointPolicy, checkpoint

import torchweld
from oracle import TORCH, saved_bytes
from processes import on
from seams import Counting
from stack import MODELS
from torchweld import functional, numerics
from torchweld.distributed.train.recompute import recompute, save_policy, selective_contexts
from torchweld.sparse import BlockLayout
from transformer import Transformer, compute_loss, make_batch

WIDTH, HEADS, ROWS, LENGTH = 64, 4, 2, 64
DEAR = ("mm", "addmm", "block_sparse_attention", "_linear_pointwise")


class _Block(nn.Module):
    """Our modules with dropout everywhere, attention by torch or ours, and a frozen layer."""

    def __init__(self, sparse: bool) -> None:
        super().__init__()
        self.norm1, self.qkv = torchweld.nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3 * WIDTH)
        layout = BlockLayout.longformer(LENGTH, block=16, attention="unidirectional")
        self.attention = torchweld.nn.BlockSparseAttention(layout, 0.2, causal=True)
        self.norm2 = torchweld.nn.DropoutAddLayerNorm(WIDTH, p=0.2, return_residual=True)
        self.mlp, self.gated = torchweld.nn.MLP(WIDTH, 128), torchweld.nn.GatedMLP(WIDTH, 128)
        self.add, self.drop = torchweld.nn.BiasDropoutAdd(0.2), nn.Dropout(0.2)
        self.frozen = torchweld.nn.LinearGELU(WIDTH, WIDTH).requires_grad_(False)
        self.scale = nn.Parameter(torch.ones(WIDTH))
        self.sparse = sparse

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        heads = self.qkv(self.norm1(x)).unflatten(-1, (3, HEADS, -1)).transpose(1, 3)
        q, k, v = heads.unbind(2)
        if self.sparse:
            mixed = self.attention(q, k, v)
        else:
            mixed = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        y, x = self.norm2(self.drop(mixed.transpose(1, 2).flatten(2)), x)
        x = self.add(self.mlp(y) + self.gated(y), None, x)
        # No gradient goes through it, but the one of the scale is its result.
        return x + self.scale * self.frozen(x.detach())


def _blocks(sparse: bool, dtype: torch.dtype) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*[_Block(sparse) for _ in range(2)]).to(dtype)


_Wrap = Callable[[nn.Module], Callable[[torch.Tensor], torch.Tensor]]


def _checkpoint(**how: Any) -> _Wrap:
    return lambda block: lambda x: checkpoint(block, x, use_reentrant=False, **how)


# Each with whether it keeps the results of expensive ops.
CHECKPOINTS: list[tuple[_Wrap, bool]] = [
    (_checkpoint(determinism_check="default"), False),
    (_checkpoint(context_fn=selective_contexts), True),
    (recompute, False),
    (partial(recompute, keep=True), True),
]


def _run(
    sparse: bool, dtype: torch.dtype, wrap: _Wrap = lambda block: block
) -> tuple[list[torch.Tensor], Counter[str]]:
    """Result, gradients, the generator's state afterwards, and the ops that were called."""
    model: Any = _blocks(sparse, dtype)
    x = torch.randn(ROWS, LENGTH, WIDTH).to(dtype).requires_grad_()
    y = x
    with Counting() as count:
        for block in [wrap(block) for block in model]:
            y = block(y)
        y.float().square().mean().backward()
    grads: list[Any] = [p.grad for p in (x, *model.parameters()) if p.requires_grad]
    return [y.detach(), *grads, torch.get_rng_state()], count.calls


@pytest.mark.parametrize(("sparse", "dtype"), [(False, torch.bfloat16), (True, torch.float32)])
def test_exact_under_dropout(sparse: bool, dtype: torch.dtype) -> None:
    """Full and selective checkpoints equal a run without them bit for bit, generator included."""
    with torchweld.use_backend("cpu"):
        expected, once = _run(sparse, dtype)
        for wrap, keeps in CHECKPOINTS:
            found, calls = _run(sparse, dtype, wrap)
            torch.testing.assert_close([*found], [*expected], **numerics.SAME)
            again = {name: calls[name] - once[name] for name in calls}
            dear = sum(n for name, n in again.items() if name in DEAR)
            assert (dear == 0) == keeps
            assert again["dropout_add_layer_norm"] == 2


@pytest.mark.skipif(TORCH < (2, 13), reason="torch 2.11 does not show policies what an op made")
def test_what_is_kept() -> None:
    """Each GEMM's result, attention's, and the input; no tensors of the steps between."""
    with torchweld.use_backend("cpu"):
        block = _blocks(True, torch.float32)[0]
        x = torch.randn(ROWS, LENGTH, WIDTH, requires_grad=True)
        kept = saved_bytes(
            lambda: checkpoint(block, x, use_reentrant=False, context_fn=selective_contexts)
        )
        assert kept == x.nbytes  # what the policy keeps is in the checkpoint's own store
        whole = saved_bytes(lambda: block(x))
        storages = _stored(block, x)
    rows = ROWS * LENGTH * 4
    attention = rows * WIDTH + rows * HEADS  # its result, and the sums of its rows
    gemms = rows * (3 * WIDTH + (128 + WIDTH) + (128 + 128 + WIDTH) + WIDTH)
    assert storages == attention + gemms < 0.7 * whole


def _stored(block: nn.Module, x: torch.Tensor) -> int:
    """Bytes of what the policy tells a checkpoint to keep."""
    kept = 0

    def policy(context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        nonlocal kept
        answer = save_policy(context, op, *args, **kwargs)
        if answer is CheckpointPolicy.MUST_SAVE and not context.is_recompute:
            out = context.op_output
            kept += sum(t.nbytes for t in (out if isinstance(out, tuple) else (out,)))
        return answer

    contexts = torch.utils.checkpoint.create_selective_checkpoint_contexts
    checkpoint(block, x, use_reentrant=False, context_fn=lambda: contexts(policy))
    return kept


@pytest.mark.parametrize("p", [0.0, 0.1])
def test_attention_that_drops_is_computed_again(p: float) -> None:
    """It draws in its kernel: if it were kept, later draws would change."""
    q = torch.empty(1, 1, 1, 8)
    op = torch.ops.aten._scaled_dot_product_flash_attention.default
    kept = save_policy(None, op, q, q, q, p) is CheckpointPolicy.MUST_SAVE
    assert kept == (p == 0)


@pytest.mark.parametrize("activation", ["gelu", "relu"])
def test_a_layer_that_does_not_learn_is_not_done_twice(activation: str) -> None:
    """Its activation is in place, unless a checkpoint keeps the tensor it would overwrite."""
    torch.manual_seed(0)
    x, w = torch.randn(128, WIDTH), torch.randn(WIDTH, WIDTH)
    scale = torch.ones(WIDTH, requires_grad=True)

    def run(s: torch.Tensor) -> torch.Tensor:
        return s * functional.linear_act(x, w, x[0], activation=activation)

    with torchweld.use_backend("cpu"):
        (expected,) = torch.autograd.grad(run(scale).sum(), scale)
        kept = checkpoint(run, scale, use_reentrant=False, context_fn=selective_contexts)
        (found,) = torch.autograd.grad(kept.sum(), scale)
    assert torch.equal(found, expected)


# --- Results that the block changes in place ------------------------------------------------------


class _InPlace(torch.autograd.Function):
    """A linear layer that adds its bias in place, as DeepSpeed's is."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, w: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, w)
        y = x @ w.T
        y += bias
        return y

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        x, w = ctx.saved_tensors
        return grads[0] @ w, (grads[0].mT @ x).sum(0), grads[0].sum((0, 1))


def _halve_first(y: torch.Tensor) -> torch.Tensor:
    first, second = torch.unsafe_chunk(y, 2, -1)
    return torch.cat([first.mul_(0.5), second], -1)


CHANGES: dict[str, Callable[[nn.Linear, torch.Tensor], torch.Tensor]] = {
    "layer": lambda fc, x: fc(x).add_(x),
    "product": lambda fc, x: (x @ fc.weight.T).add_(fc.bias),
    "view": lambda fc, x: fc(x).view(-1).mul_(2).view_as(x),
    "function": lambda fc, x: _InPlace.apply(x, fc.weight, fc.bias),
    "foreach": lambda fc, x: (y := fc(x), torch._foreach_mul_([y], 2.0))[0],
    "unsafe parts": lambda fc, x: _halve_first(fc(x)),
    "data": lambda fc, x: (y := fc(x), y.data.mul_(2))[0],
    "out": lambda fc, x: (y := fc(x), torch.mul(y.detach(), 2, out=y.detach()))[0],
    "ours": lambda fc, x: functional.linear_act(x, fc.weight, fc.bias, activation="gelu").mul_(2),
}


@pytest.mark.parametrize("backend", ["cpu", "eager"])
@pytest.mark.parametrize("change", CHANGES)
def test_a_kept_result_that_changes(change: str, backend: str) -> None:
    """The backward pass would make the change twice: an error, unless the result is not kept."""
    torch.manual_seed(0)
    fc, x = nn.Linear(WIDTH, WIDTH), torch.randn(ROWS, 8, WIDTH)

    def block(x: torch.Tensor) -> torch.Tensor:
        y = CHANGES[change](fc, x)
        return y.sin() * y

    def run(**how: Any) -> tuple[torch.Tensor, ...]:
        there = x.clone().requires_grad_()
        y = checkpoint(block, there, use_reentrant=False, **how) if how else block(there)
        return torch.autograd.grad(y.sum(), (there, fc.weight))

    with torchweld.use_backend(backend):
        expected = run()
        assert all(map(torch.equal, run(determinism_check="default"), expected))
        if change == "ours":
            assert all(map(torch.equal, run(context_fn=selective_contexts), expected))
        else:
            message = r"saved result of aten\.(addmm|mm)\.default in place, by aten\."
            with pytest.raises(torchweld.ArgumentError, match=message):
                run(context_fn=selective_contexts)


def test_sparse_tensors_have_no_memory_to_compare() -> None:
    """A block may change one that it made."""
    fc, x = nn.Linear(4, 4), torch.randn(3, 4, requires_grad=True)

    def block(x: torch.Tensor) -> torch.Tensor:
        at = torch.tensor([[0, 1, 1], [2, 0, 0]])
        graph = torch.sparse_coo_tensor(at, torch.ones(3), (3, 3), check_invariants=True)
        return torch.sparse.mm(graph.mul_(2), fc(x)).sin()

    (expected,) = torch.autograd.grad(block(x).sum(), x)
    y = checkpoint(block, x, use_reentrant=False, context_fn=selective_contexts)
    (found,) = torch.autograd.grad(y.sum(), x)
    assert torch.equal(found, expected)


def test_a_compiled_block_that_changes_a_kept_result() -> None:
    """A graph has no changes in place."""
    fc, x = nn.Linear(WIDTH, WIDTH), torch.randn(ROWS, 8, WIDTH, requires_grad=True)

    def block(x: torch.Tensor) -> torch.Tensor:
        return CHANGES["product"](fc, x).sin()

    compiled = torch.compile(
        lambda x: checkpoint(block, x, use_reentrant=False, context_fn=selective_contexts),
        fullgraph=True,
        backend="aot_eager",
    )
    expected = torch.autograd.grad(block(x).sum(), (x, fc.weight))
    found = torch.autograd.grad(compiled(x).sum(), (x, fc.weight))
    torch.testing.assert_close(found, expected)


@on(2)
def test_a_sum_over_devices_that_changes(rank: int) -> None:

    def block(x: torch.Tensor) -> torch.Tensor:
        total = _functional_collectives.all_reduce(x.detach(), "sum", torch.distributed.group.WORLD)
        return x.sin() * total.add_(1)

    x = torch.randn(8, WIDTH, requires_grad=True)
    with pytest.raises(torchweld.ArgumentError, match=r"all_reduce.* in place, by aten\.add_"):
        checkpoint(block, x, use_reentrant=False, context_fn=selective_contexts)


@on(2)
def test_reductions_over_devices_are_done_once(rank: int) -> None:
    """One in the forward and one in the backward, and none for the recomputation."""

    def run(**how: Any) -> tuple[list[torch.Tensor], int]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(WIDTH, 128), torchweld.nn.GELU(), nn.Linear(128, WIDTH))
        model.append(torchweld.nn.LayerNorm(WIDTH))
        mesh = init_device_mesh("cpu", (2,))
        parallelize_module(model, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
        x = torch.randn(32, WIDTH, requires_grad=True)
        with Counting() as count:
            checkpoint(model, x, use_reentrant=False, **how).square().mean().backward()
        sums = sum(n for name, n in count.calls.items() if "all_reduce" in name)
        found: list[Any] = [x.grad]
        grads = (p.grad for p in model.parameters())
        found += [g.to_local() if hasattr(g, "to_local") else g for g in grads]
        return found, sums

    (expected, again), (found, once) = run(), run(context_fn=selective_contexts)
    torch.testing.assert_close([*found], [*expected], **numerics.SAME)
    assert (again, once) == (3, 2)


# --- Graphs recorded by torch.export or the pipeline's tracer -------------------------------------


Forward = Callable[[torch.Tensor], torch.Tensor]
Recorded = tuple[Forward, Iterable[torch.nn.Module]]


def _exported(model: torch.nn.Module, tokens: torch.Tensor) -> Recorded:
    module = torch.export.export(model, (tokens,)).module()
    return module, [module]


def _loaded(model: torch.nn.Module, tokens: torch.Tensor) -> Recorded:
    file = io.BytesIO()
    torch.export.save(torch.export.export(model, (tokens,)), file)
    file.seek(0)
    module = torch.export.load(file).module()
    return module, [module]


def _compiled(model: torch.nn.Module, tokens: torch.Tensor) -> Recorded:
    module = torch.export.export(model, (tokens,)).module()
    return torch.compile(module, backend="aot_eager"), [module]


def _staged(model: torch.nn.Module, tokens: torch.Tensor) -> Recorded:
    pipe = pipeline(model, (tokens,), split_spec={"blocks.1": SplitPoint.BEGINNING})
    stages = [pipe.get_stage_module(number) for number in range(2)]
    return lambda tokens: stages[1](stages[0](tokens)), stages


def _step(forward: Forward, modules: Iterable[torch.nn.Module], batch: Any) -> dict[str, Any]:
    """The loss, and the gradients of a step."""
    tokens, targets = batch
    torch.manual_seed(1)  # both drop the same
    loss = compute_loss(forward(tokens), targets)
    loss.backward()
    named = [pair for module in modules for pair in module.named_parameters()]
    found = {"loss": loss.detach()} | {name: p.grad for name, p in named}
    for _, parameter in named:
        parameter.grad = None
    return found


# torch's own: of pytrees, and torch 2.11's of the buffers that it loads.
@pytest.mark.filterwarnings("ignore:.isinstance.treespec:FutureWarning")
@pytest.mark.filterwarnings("ignore:The given buffer is not writable:UserWarning")
@pytest.mark.parametrize("how", [_exported, _loaded, _compiled, _staged])
@pytest.mark.parametrize("name", MODELS)
def test_a_step(name: str, how: Callable[..., Recorded]) -> None:
    torch.manual_seed(0)
    settings = replace(MODELS[name], layers=2)
    model, batch = Transformer(settings), make_batch(settings, 2, 0)
    with torchweld.use_backend("cpu"):
        found = _step(*how(model, batch[0]), batch)
        expected = _step(model, [model], batch)
    assert found.keys() == expected.keys()
    for key, value in expected.items():
        assert found[key] is not None, f"{key} has no gradient"
        assert torch.equal(found[key], value), key
