"""Losses on several processes that share rows or classes: the numbers of one process."""

# Parameters and results are DTensors, which torch's annotations do not say.
# mypy: disable-error-code="attr-defined, union-attr"

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import parallelize_module

from comparing import assert_grads, assert_whole, differentiate, grads_of, whole_of
from processes import on
from refusing import refuses
from torchweld import functional, nn, numerics
from torchweld.distributed import CountCollectives, tp_plan
from torchweld.distributed.tensor.styles import VocabularyParallel
from torchweld.errors import ArgumentError
from transformer import Settings, Transformer

# --- Losses over a shared vocabulary --------------------------------------------------------------


ROWS, FEATURES = 12, 8
# Sums of so few terms are exact in float64 but for some roundings, of results of at most 20.
CLOSE = numerics.CHAINED64


def _make(classes: int) -> dict[str, torch.Tensor]:
    made = torch.Generator().manual_seed(3)

    def draw(*sizes: int) -> torch.Tensor:
        return torch.randn(*sizes, generator=made, dtype=torch.float64)

    target = torch.randint(0, classes, (ROWS,), generator=made)
    target[1::4] = -100
    return {
        "input": draw(ROWS, FEATURES),
        "linear_weight": draw(classes, FEATURES),
        "linear_bias": draw(classes),
        "target": target,
        "weight": draw(classes).abs() + 0.1,
        "token_weights": draw(ROWS).abs(),
        "temperature": draw(ROWS).abs() + 0.5,
        "probabilities": draw(ROWS, classes).softmax(1),
    }


def _place(t: torch.Tensor, mesh: Any, at: int | None) -> Any:
    return distribute_tensor(t, mesh, [Replicate() if at is None else Shard(at)])


def _losses(made: dict[str, torch.Tensor]) -> list[dict[str, Any]]:
    some = 5 * 8 * (len(made["weight"]) + 3 * FEATURES)  # bytes of 5 rows
    return [
        {"target": made["target"].clamp(0, 2)},
        {"target": made["target"].clamp(0, 2), "reduction": "none"},
        {"label_smoothing": 0.1, "z_loss": 0.01, "softcap": 3.0, "memory": some},
        {"weight": made["weight"], "label_smoothing": 0.2, "reduction": "sum", "memory": some},
        {"token_weights": made["token_weights"], "reduction": "none", "logit_scale": 0.5},
        {"temperature": made["temperature"], "return_lse": True, "z_loss": 0.1},
        {"target": made["probabilities"], "weight": made["weight"], "label_smoothing": 0.1},
    ]


@pytest.mark.parametrize(
    ("count", "classes", "backend"),
    [(2, 2050, "cpu"), (2, 13, "eager"), (4, 13, "cpu"), (4, 5, "cpu"), (4, 13, None)],
)
@on("count")
def test_a_shared_vocabulary(rank: int, count: int, classes: int, backend: str | None) -> None:
    """Gradients kept and recomputed, chunks, and uneven shares: of 5 words the last has none."""
    mesh, made = init_device_mesh("cpu", (count,)), _make(classes)
    one = [made[name] for name in ("input", "linear_weight", "linear_bias")]
    several = torch.stack([made["target"], made["target"].roll(1)], 1)
    every = dict.fromkeys(("return_entropy", "return_lse", "return_argmax"), True)
    calls: list[tuple[Any, dict[str, Any]]] = [
        *(
            (functional.linear_cross_entropy, {"target": made["target"], **kw})
            for kw in _losses(made)
        ),
        (functional.linear_logprobs, {"target": several, "temperature": 0.7, **every}),
        (functional.linear_logprobs, {"target": several.clamp(0, 1)}),
    ]
    # Rows that devices share are gathered: the vocabulary is what they share here.
    for rows in (None, 0):
        shards = [_place(one[0], mesh, rows), *(_place(t, mesh, 0) for t in one[1:])]
        for function, given in calls:
            run = lambda x, w, b, f=function, g=given: f(x, w, linear_bias=b, **g)  # noqa: E731
            assert_whole(differentiate(run, shards), differentiate(run, one), **CLOSE)


@on(2)
def test_what_travels_is_counted(rank: int) -> None:
    """Forward: few numbers a row, and never the logits. Backward: the input's gradient."""
    mesh, made = init_device_mesh("cpu", (2,)), _make(300)
    word = 8  # bytes
    x, w = _place(made["input"], mesh, None), _place(made["linear_weight"], mesh, 0)
    x, w = (t.detach().requires_grad_() for t in (x, w))
    K = 3
    target = made["target"][:, None].expand(-1, K)
    for entropy, numbers in ((False, 2 + K), (True, 3 + K)):
        with CountCollectives() as forward:
            found = functional.linear_logprobs(x, w, target, return_entropy=entropy)
        results = found if isinstance(found, tuple) else (found,)
        assert dict(forward.bytes) == {"all-reduce": ROWS * numbers * word}
        assert forward.calls["all-reduce"] == 2
        with CountCollectives() as backward:
            sum(r.sum() for r in results).backward()
        assert dict(backward.bytes) == {"all-reduce": ROWS * FEATURES * word}
    counted = int((made["target"] != -100).sum())
    with CountCollectives() as both:  # with kept gradients only rows that count travel
        loss = functional.linear_cross_entropy(x, w, made["target"], label_smoothing=0.1)
    assert dict(both.bytes) == {"all-reduce": counted * 4 * word}
    with CountCollectives() as backward:
        loss.backward()
    assert dict(backward.bytes) == {"all-reduce": ROWS * FEATURES * word}


@pytest.mark.parametrize("backend", ["cpu", None])
@on(4)
def test_rows_and_vocabulary_on_a_mesh(rank: int, backend: str | None) -> None:
    """A mesh of rows and vocabulary: the mean is of the rows of all devices."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
    made = _make(13)
    made["target"][:5] = -100  # the devices have different numbers of rows that count
    x = distribute_tensor(made["input"], mesh, [Shard(0), Replicate()])
    w = distribute_tensor(made["linear_weight"], mesh, [Replicate(), Shard(0)])
    one = [made["input"], made["linear_weight"]]
    for kw in _losses(made)[:6]:
        run = partial(functional.linear_cross_entropy, **{"target": made["target"], **kw})
        assert_whole(differentiate(run, [x, w]), differentiate(run, one), **CLOSE)


@on(2)
def test_what_is_refused(rank: int) -> None:
    mesh, made = init_device_mesh("cpu", (2,)), _make(13)
    x, w = _place(made["input"], mesh, None), _place(made["linear_weight"], mesh, 0)
    target = made["target"]

    def refuse(argument: str, message: str, *given: Any, **kw: Any) -> None:
        for call in (functional.linear_cross_entropy, functional.linear_logprobs):
            with pytest.raises(ArgumentError, match=message) as raised:
                call(*given, **kw)
            assert raised.value.argument == argument

    refuse("input", "input is a plain tensor; accepted: a DTensor", made["input"], w, target)
    refuse(
        "linear_weight",
        r"placed S\(1\)|Shard\(dim=1\)",
        x,
        _place(made["linear_weight"], mesh, 1),
        target,
    )
    part = DTensor.from_local(made["linear_weight"], mesh, [Partial()])
    refuse("linear_weight", "placed .*P", x, part, target)
    plain = made["linear_weight"].clone().requires_grad_()
    refuse("linear_weight", "a plain tensor that requires grad", x, plain, target)
    bias = made["linear_bias"].clone().requires_grad_()
    refuse("linear_bias", "a plain tensor that requires grad", x, w, target, linear_bias=bias)
    refuse("target", r"of shape \[5\]", x, w, target[:5])
    refuse(r"target[0]", "target.0. is 13; accepted: 0 to 12", x, w, target.clone().fill_(13))
    other = init_device_mesh("cpu", (2, 1))
    elsewhere = distribute_tensor(made["linear_weight"], other, [Replicate()] * 2)
    refuse("linear_weight", "another mesh", x, elsewhere, target)
    with pytest.raises(ArgumentError, match="input is a DTensor; accepted: a plain tensor"):
        functional.cross_entropy(x, target.clamp(0, 7))
    x.requires_grad_()
    loss = functional.linear_cross_entropy(x, w, target)
    refuses("create_graph", torch.autograd.grad, loss, x, create_graph=True)


@on(2)
def test_a_head_under_fsdp_is_gathered_once(rank: int) -> None:
    """FSDP2 gathers a head once for a call of many chunks, and once for its backward pass."""
    mesh = init_device_mesh("cpu", (2,))
    torch.manual_seed(0)
    head = nn.LinearCrossEntropy(FEATURES, 301, memory=20000)  # one row of gradients is 1204 bytes
    x = torch.randn(2, 40, FEATURES)
    target = torch.randint(0, 301, (2, 40))
    one = x.clone().requires_grad_()
    loss = head(one, target)
    loss.backward()
    wanted = head.weight.grad.clone()
    head.weight.grad = None
    fully_shard(head, mesh=mesh, reshard_after_forward=True)
    mine = x[rank].clone().requires_grad_()
    with CountCollectives() as count:
        found = head(mine, target[rank])
        assert count.calls["all-gather"] == 1
        found.backward()
    assert count.calls["all-gather"] == 2
    assert count.calls["reduce-scatter"] == 1
    torch.testing.assert_close(head.weight.grad.full_tensor(), wanted)
    torch.testing.assert_close(mine.grad, one.grad[rank] * 2)
    with pytest.raises(ArgumentError, match="Of a layer under FSDP2 call the forward"):
        functional.linear_cross_entropy(mine, head.weight, target[rank])


class _WithLoss(torch.nn.Module):
    """Blocks of a transformer, and a head that computes the loss."""

    def __init__(self, tied: bool) -> None:
        super().__init__()
        self.body = Transformer(
            Settings(vocabulary=61, length=8, width=16, heads=4, layers=1, dropout=0.0)
        )
        self.body.norm = self.body.head = None
        self.lm_head = nn.LinearCrossEntropy(16, 61, label_smoothing=0.1, z_loss=0.01)
        if tied:
            assert isinstance(self.body.token, torch.nn.Embedding)
            self.lm_head.weight = self.body.token.weight

    def forward(self, tokens: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return self.lm_head(self.body(tokens), labels)


@pytest.mark.parametrize("tied", [False, True])
@on(2)
def test_a_plan_shares_the_vocabulary(rank: int, tied: bool) -> None:
    torch.manual_seed(0)
    model = _WithLoss(tied)
    tokens, labels = torch.randint(0, 61, (3, 8)), torch.randint(0, 61, (3, 8))
    labels[:, 2:4] = -100
    loss = model(tokens, labels)
    loss.backward()
    wanted = grads_of(model)
    model.zero_grad()
    mesh = init_device_mesh("cpu", (2,))
    parallelize_module(model, mesh, tp_plan(model))
    assert model.lm_head.weight.placements == (Shard(0),)
    with CountCollectives() as count:
        found = model(tokens, labels)
    # The embedding, attention and MLP; then the numbers of each row.
    assert count.calls == {"all-reduce": 3 + 2}
    found.backward()
    torch.testing.assert_close(found, loss)
    assert_grads(model, wanted, rtol=1e-4, atol=1e-6)


@on(4)
def test_a_ring_and_a_shared_vocabulary(rank: int) -> None:
    """On a mesh of ring and tensor each device has a slice of the tokens; the mean is of all."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("ring", "tensor"))
    torch.manual_seed(0)
    head = nn.LinearCrossEntropy(16, 13)
    x, labels = torch.randn(3, 8, 16), torch.randint(0, 13, (3, 8))
    labels[:, :3] = -100
    one = x.clone().requires_grad_()
    loss = head(one, labels)
    loss.backward()
    wanted = head.weight.grad.clone()
    head.weight.grad = None
    style = VocabularyParallel()
    style.ring = True
    parallelize_module(head, mesh, style)
    at = mesh.get_local_rank("ring") * 4
    mine = x[:, at : at + 4].clone().requires_grad_()
    found = head(mine, labels[:, at : at + 4])
    found.backward()
    torch.testing.assert_close(found, loss)
    torch.testing.assert_close(mine.grad, one.grad[:, at : at + 4])
    torch.testing.assert_close(head.weight.grad.full_tensor(), wanted)


@on(2)
def test_compiled_whole(rank: int) -> None:
    """fullgraph, with the exchanges in the graph."""
    mesh, made = init_device_mesh("cpu", (2,)), _make(13)
    given = _place(made["input"], mesh, None), _place(made["linear_weight"], mesh, 0)

    def run(x: Any, weight: Any) -> Any:
        return functional.linear_cross_entropy(x, weight, made["target"], label_smoothing=0.1)

    compiled = torch.compile(run, fullgraph=True, backend="aot_eager")
    expected = map(whole_of, differentiate(run, given))
    assert_whole(differentiate(compiled, given), expected, **CLOSE)


# --- Logits that devices share -------------------------------------------------------------------


def _list_logprobs(made: dict[str, torch.Tensor]) -> list[dict[str, Any]]:
    several = torch.stack([made["target"], made["target"].roll(1)], 1)
    every = dict.fromkeys(("return_entropy", "return_lse", "return_argmax"), True)
    return [
        {"target": made["target"]},
        {"target": several.clamp(0, 1), "softcap": 3.0},
        {"target": several, "temperature": made["temperature"], "logit_scale": 0.5, **every},
        {"target": several[:, :0], "return_entropy": True},
    ]


@pytest.mark.parametrize(
    ("count", "classes", "backend"),
    [(2, 2050, "cpu"), (2, 13, "eager"), (4, 5, "cpu"), (4, 13, None)],
)
@on("count")
def test_logprobs_of_shared_logits(
    rank: int, count: int, classes: int, backend: str | None
) -> None:
    """By classes, even and uneven, by rows, of copies, and of sums; the last of 5 has no class."""
    mesh, made = init_device_mesh("cpu", (count,)), _make(classes)
    one = made["linear_weight"].new_empty(ROWS, classes).copy_(made["probabilities"].log() * 3)
    parts = DTensor.from_local(one / count, mesh, [Partial()])
    for logits in (_place(one, mesh, 1), _place(one, mesh, 0), _place(one, mesh, None), parts):
        for given in _list_logprobs(made):
            run = lambda x, g=given: functional.logprobs(x, **g)  # noqa: E731
            found = differentiate(run, [logits])
            assert all(isinstance(t, DTensor) for t in found)
            assert_whole(found, differentiate(run, [one]), **CLOSE)


@on(4)
def test_logprobs_on_a_mesh_of_rows_and_classes(rank: int) -> None:
    """Targets are whole on every device, or placed as the rows are; batches have two dimensions."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
    made = _make(13)
    one = made["probabilities"].log().view(3, 4, 13)
    logits = distribute_tensor(one, mesh, [Shard(1), Shard(2)])
    target, temperature = (made[name].view(3, 4) for name in ("target", "temperature"))
    placed = distribute_tensor(target, mesh, [Shard(1), Replicate()])
    every = dict.fromkeys(("return_entropy", "return_lse", "return_argmax"), True)
    run = partial(functional.logprobs, temperature=temperature, **every)
    expected = differentiate(lambda x: run(x, target), [one])
    for given in (target, placed):
        found = differentiate(lambda x, t=given: run(x, t), [logits])
        assert found[0].placements == (Shard(1), Replicate())
        assert found[-1].placements == (Shard(1), Shard(2))
        assert_whole(found, expected, **CLOSE)


@on(2)
def test_logprobs_send_a_few_numbers_a_row(rank: int) -> None:
    mesh, made = init_device_mesh("cpu", (2,)), _make(300)
    logits = _place(made["probabilities"].log(), mesh, 1).detach().requires_grad_()
    for entropy, numbers in ((False, 3), (True, 4)):
        with CountCollectives() as forward:
            found = functional.logprobs(logits, made["target"], return_entropy=entropy)
        results = found if isinstance(found, tuple) else (found,)
        assert dict(forward.bytes) == {"all-reduce": ROWS * numbers * 8}
        with CountCollectives() as backward:
            sum(r.sum() for r in results).backward()
        assert not backward.bytes
    rows = _place(made["probabilities"].log(), mesh, 0)
    with CountCollectives() as forward:
        functional.logprobs(rows, made["target"])
    assert not forward.bytes


@on(2)
def test_logprobs_write_over_shared_logits(rank: int) -> None:
    mesh, made = init_device_mesh("cpu", (2,)), _make(13)
    one = made["probabilities"].log()
    leaf = _place(one, mesh, 1).detach().requires_grad_()
    logits = leaf * 1
    log_p, entropy = functional.logprobs(logits, made["target"], inplace=True, return_entropy=True)
    (log_p.sum() + entropy.sum()).backward()
    plain = one.clone().requires_grad_()
    log_p, entropy = functional.logprobs(plain, made["target"], return_entropy=True)
    (log_p.sum() + entropy.sum()).backward()
    assert_whole([leaf.grad], [plain.grad], **CLOSE)
    assert torch.equal(logits.detach().to_local(), leaf.grad.to_local())


@on(2)
def test_compiled_logprobs(rank: int) -> None:
    mesh, made = init_device_mesh("cpu", (2,)), _make(13)
    one = made["probabilities"].log()

    def run(x: Any) -> Any:
        return functional.logprobs(x, made["target"], return_entropy=True)

    for at in (0, 1):
        torch._dynamo.reset()
        compiled = torch.compile(run, fullgraph=True, backend="aot_eager")
        found = differentiate(compiled, [_place(one, mesh, at)])
        assert_whole(found, differentiate(run, [one]), **CLOSE)


@on(2)
def test_what_logprobs_refuse(rank: int) -> None:
    """Nothing is computed before: the calls of one process do not wait for the other's."""
    mesh, made = init_device_mesh("cpu", (2,)), _make(13)
    one, target = made["probabilities"].log(), made["target"]
    x = _place(one, mesh, 1)
    refuse = partial(refuses, call=functional.logprobs)
    grid = init_device_mesh("cpu", (2, 1))
    twice = DTensor.from_local(x.to_local(), grid, [Shard(1), Shard(1)])
    whole, elsewhere = (
        distribute_tensor(target, on, [Replicate()] * on.ndim) for on in (mesh, grid)
    )
    integers, leaf = _place(target[:, None], mesh, 0), x.detach().requires_grad_()
    with CountCollectives() as count:
        refuse(r"target is of shape \[5\]", input=x, target=target[:5])
        refuse(r"target\[0\] is 13; accepted: 0 to 12", input=x, target=target * 0 + 13)
        refuse("temperature is of shape", input=x, target=target, temperature=one[:2, 0])
        refuse("input is of dtype torch.int64", input=integers, target=target)
        refuse("target is a DTensor", input=one, target=whole)
        refuse(
            "inplace is True for logits that are a leaf", input=leaf, target=target, inplace=True
        )
        refuse(r"input is a DTensor placed", input=twice, target=target)
        refuse("target is on another mesh", input=x, target=elsewhere)
    assert not count.bytes
    found = functional.logprobs(leaf, target)
    error = refuses("create_graph", torch.autograd.grad, found.sum(), leaf, create_graph=True)
    assert "logprobs" in str(error)
