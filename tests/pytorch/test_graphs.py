"""keep_graphs: which calls are captured, and that replays train a model as its own forward does.

On the CPU a fake stands for torch's graphs, with static memory that replays overwrite.
"""

from __future__ import annotations

import copy
import inspect
import io
import pickle
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy, gelu
from torch.utils._pytree import tree_flatten
from torch.utils.flop_counter import FlopCounterMode

import torchweld
from fake_graphs import FakeGraphs
from model_with_head import WORDS, LanguageModel
from selection import GPU
from torchweld import graphs, numerics
from torchweld.errors import ArgumentError
from torchweld.fusion.logits import Logits

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.skipif(not GPU, reason="no GPU"))]
WIDTH = 32


class Out(NamedTuple):
    """Tensors with a gradient and without, and a constant."""

    loss: torch.Tensor | None
    hidden: torch.Tensor
    counts: torch.Tensor
    name: str = "out"


class Small(nn.Module):
    """Called as models of transformers are: by keywords, with several results."""

    def __init__(self, p: float = 0.0) -> None:
        super().__init__()
        self.words = nn.Embedding(11, WIDTH)
        self.fc = nn.Linear(WIDTH, WIDTH)
        self.norm = nn.BatchNorm1d(WIDTH)
        self.drop = nn.Dropout(p)
        self.head = nn.Linear(WIDTH, 11, bias=False)
        self.head.weight = self.words.weight

    def forward(
        self,
        ids: torch.Tensor,
        labels: torch.Tensor | None = None,
        *,
        scale: float = 1.0,
        extra: Any = None,
    ) -> Out:
        x = self.norm(self.words(ids).flatten(0, 1))
        x = x + self.drop(gelu(self.fc(x))) * scale
        logits = self.head(x)
        loss = None if labels is None else cross_entropy(logits.float(), labels.flatten())
        return Out(loss, x, logits.argmax(-1))


def draw(at: int, device: str, rows: int = 3) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(at)
    return {
        name: torch.randint(0, 11, (rows, 5), generator=generator).to(device)
        for name in ("ids", "labels")
    }


@pytest.fixture(params=DEVICES)
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "cpu":
        monkeypatch.setattr(graphs, "_DEVICE", "cpu")
    return str(request.param)


class Pair(NamedTuple):
    """A model, its copy that keeps graphs, and what counts captures: a fake, or None on a GPU."""

    plain: Small
    kept: Small
    fake: FakeGraphs | None

    def counted(self) -> tuple[int, int]:
        """The kinds of calls that have a graph, and all."""
        forward: Any = self.kept.forward
        kinds = forward.kinds
        return sum(kind.graph is not None for kind in kinds), len(kinds)


@pytest.fixture
def make(device: str, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Pair]:
    def make(p: float = 0.0, **options: Any) -> Pair:
        torch.manual_seed(0)
        plain = Small(p).to(device)
        kept = torchweld.keep_graphs(copy.deepcopy(plain), **options)
        fake = None
        if device == "cpu":
            fake = FakeGraphs(kept)
            monkeypatch.setattr(torch.cuda, "make_graphed_callables", fake.make)
        return Pair(plain, kept, fake)

    return make


def train(
    model: nn.Module,
    device: str,
    steps: int = 7,
    *,
    micro: int = 1,
    to_none: bool = True,
    rows: Callable[[int], int] = lambda at: 3,
    dtype: torch.dtype | None = None,
) -> list[torch.Tensor]:
    """Losses, gradients' norms and parameters; each loss is alive until the next one."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    scaler = torch.amp.GradScaler(device, init_scale=8.0)
    losses, norms = [], []
    for at in range(steps):
        for part in range(micro):
            number = at * micro + part
            with torch.autocast(device, dtype or torch.bfloat16, enabled=dtype is not None):
                out = model(**draw(number, device, rows(number)))
            loss = out.loss / micro
            losses += [loss.detach(), out.counts]
            scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        norms.append(nn.utils.clip_grad_norm_(model.parameters(), 0.5))
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad(set_to_none=to_none)
    return [*losses, *norms, *(t.detach().clone() for t in model.state_dict().values())]


def call_often(model: nn.Module, device: str) -> None:
    for at in range(5):
        model(**draw(at, device))


def assert_same(mine: list[torch.Tensor], theirs: list[torch.Tensor]) -> None:
    torch.testing.assert_close(mine, theirs, **numerics.SUMMED_SMALL)


@pytest.mark.parametrize(
    "how",
    [
        {},
        {"micro": 3},
        {"micro": 2, "to_none": False},
        {"to_none": False},
        {"dtype": torch.bfloat16},
        {"rows": lambda at: 3 + at % 2},
        {"rows": lambda at: 2 if at == 4 else 3},
    ],
    ids=["plain", "accumulated", "accumulated in place", "zeroed", "autocast", "shapes", "odd one"],
)
def test_trains_as_without(make: Any, device: str, how: dict[str, Any]) -> None:
    """Losses that were kept, scaled and clipped gradients, and parameters after several steps."""
    plain, kept, fake = pair = make()
    expected = train(plain, device, 9, **how)
    assert_same(train(kept, device, 9, **how), expected)
    found = pair.counted()
    assert found == ((2, 2) if "rows" in how and how["rows"](1) == 4 else (1, found[1]))
    if fake is not None:
        assert fake.forwards == fake.backwards >= 5


def test_dropout_advances(make: Any, device: str) -> None:
    """Replays on the same numbers drop other elements, and the rate is kept."""
    _, kept, _ = pair = make(0.5)
    batch = draw(0, device, 40)
    results = []
    for _ in range(6):
        out = kept(**batch)
        out.loss.backward()
        results.append(out.hidden.detach())
    assert pair.counted() == (1, 1)
    for a, b in zip(results[3:], results[2:], strict=False):
        assert 0.2 < float((a != b).double().mean()) < 0.8


def test_what_is_not_captured(make: Any, device: str) -> None:
    """Evaluation, calls without gradients, objects, modes, a constant that always differs."""
    _, kept, _ = pair = make()
    batch = draw(0, device)
    sparse = torch.eye(3, device=device).to_sparse()
    for at in range(4):
        with torch.no_grad():
            assert kept(**batch).loss.grad_fn is None
        kept.eval()
        kept(**batch)
        kept.train()
        kept(**batch, extra=object())
        kept(**batch, extra=sparse)
        with nn.modules.module.register_module_forward_hook(lambda *_: None):
            kept(**batch)
        with torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t):
            kept(**batch)
        with FlopCounterMode(display=False) as counter:
            kept(**batch)
        assert counter.get_total_flops()
        kept(**batch, scale=float(at))
    assert pair.counted() == (0, 4)
    for _ in range(4):
        kept(**batch)
    assert pair.counted() == (1, 4)


def test_what_makes_another_kind(make: Any, device: str) -> None:
    """Another module, mode, place of a parameter, precision, and what requires a gradient."""
    _, kept, _ = pair = make()
    batch = draw(0, device)

    def count() -> int:
        kept.forward.kinds.clear()
        for _ in range(4):
            kept(**batch).loss.backward()
        assert pair.counted() == (1, 1)
        for change in changes:
            change()
            kept(**batch).loss.backward()
        return pair.counted()[1]

    changes: list[Callable[[], Any]] = [lambda: kept.fc.weight.requires_grad_(False)]
    assert count() == 2
    assert kept.fc.weight.grad is not None
    kept.fc.weight.requires_grad_()
    changes[:] = [kept.drop.eval, lambda: setattr(kept, "fc", copy.deepcopy(kept.fc))]
    assert count() == 3
    weight = torch.zeros_like(kept.fc.weight)
    changes[:] = [lambda: setattr(kept.fc.weight, "data", weight)]
    assert count() == 2
    switch = torch.backends.cuda.matmul
    changes[:] = [lambda: setattr(switch, "fp32_precision", "tf32")]
    try:
        assert count() == 2
    finally:
        switch.fp32_precision = "none"
    out = kept(**batch)
    torch.testing.assert_close(out.loss, Small.forward(kept, **batch).loss)


SWITCHES: dict[str, tuple[Callable[[], Any], Callable[[Any], None]]] = {
    **{
        name: (
            lambda name=name: getattr(torch.backends.cuda.matmul, name),  # type: ignore[misc]
            lambda value, name=name: setattr(torch.backends.cuda.matmul, name, value),  # type: ignore[misc]
        )
        for name in (
            "allow_bf16_reduced_precision_reduction",
            "allow_fp16_reduced_precision_reduction",
            "allow_fp16_accumulation",
        )
    },
    "flash attention": (
        torch.backends.cuda.flash_sdp_enabled,
        torch.backends.cuda.enable_flash_sdp,
    ),
    "efficient attention": (
        torch.backends.cuda.mem_efficient_sdp_enabled,
        torch.backends.cuda.enable_mem_efficient_sdp,
    ),
    "attention in steps": (
        torch.backends.cuda.math_sdp_enabled,
        torch.backends.cuda.enable_math_sdp,
    ),
    "cuDNN's attention": (
        torch.backends.cuda.cudnn_sdp_enabled,
        torch.backends.cuda.enable_cudnn_sdp,
    ),
    "sums of attention in steps": (
        torch.backends.cuda.fp16_bf16_reduction_math_sdp_allowed,
        torch.backends.cuda.allow_fp16_bf16_reduction_math_sdp,
    ),
}


@pytest.mark.parametrize("name", [*SWITCHES, "default dtype"])
def test_a_switch_makes_another_kind(make: Any, device: str, name: str) -> None:
    """The kind left these switches out: a graph went on with the kernels of the capture."""
    _, kept, _ = pair = make()
    batch = draw(0, device)
    for _ in range(4):
        kept(**batch).loss.backward()
    assert pair.counted() == (1, 1)
    if name == "default dtype":
        before, change = torch.get_default_dtype(), torch.set_default_dtype
        other: Any = torch.float64
    else:
        read, change = SWITCHES[name]
        before = read()
        other = not before
    change(other)
    try:
        kept(**batch)
    finally:
        change(before)
    assert len(kept.forward.kinds) == 2


def test_buffers_and_generators_are_as_after_a_call(make: Any, device: str) -> None:
    """The warm-up of a capture changes no running statistics and draws no numbers for others."""
    plain, kept, _ = make(0.5)
    drawn = []
    for model in (plain, kept):
        torch.manual_seed(7)
        for at in range(3):
            model(**draw(at, device))
        drawn.append(torch.rand(3, device=device))
    assert torch.equal(*drawn) or device == "cuda"
    assert int(kept.norm.num_batches_tracked) == 3
    if device == "cpu":  # elsewhere a graph draws other numbers
        torch.testing.assert_close(kept.norm.running_var, plain.norm.running_var)


def test_several_calls_before_one_backward_pass(make: Any, device: str) -> None:
    """The second call has its own forward, since a replay would overwrite what the first saved."""
    plain, kept, fake = make()
    grads = []
    for model in (plain, kept):
        for _ in range(4):
            model(**draw(0, device)).loss.backward()
        model.zero_grad()
        sum(model(**draw(at, device)).loss for at in range(3)).backward()
        grads.append([p.grad for p in model.parameters()])
    assert_same(*grads)
    if fake is not None:
        assert fake.forwards == 3
    loss = kept(**draw(0, device)).loss
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="runs once"):
        loss.backward()


def test_gradients_that_are_returned_are_kept(make: Any, device: str) -> None:
    """The result of grad() is not overwritten by a later step, and hooks of parameters run."""
    plain, kept, _ = pair = make()
    found: list[list[torch.Tensor]] = []
    for model in (plain, kept):
        seen: list[torch.Tensor] = []
        model.fc.bias.register_hook(lambda g, seen=seen: seen.append(g.clone()))
        parameters = list(model.parameters())
        grads: list[torch.Tensor] = []
        for at in range(5):
            grads += torch.autograd.grad(model(**draw(at, device)).loss, parameters)
        found.append([*grads, *seen])
    assert len(found[0]) == 5 * len(parameters) + 5
    assert pair.counted() == (1, 1)
    assert_same(found[1], found[0])


def test_gradients_of_inputs(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A part of a model may keep graphs: gradients go on to what made its input."""
    torch.manual_seed(0)
    below = nn.Linear(4, 4).to(device)
    part = torchweld.keep_graphs(nn.Sequential(nn.Linear(4, 4), nn.GELU()).to(device))
    monkeypatch.setattr(torch.cuda, "make_graphed_callables", FakeGraphs(part).make)
    if device == "cuda":
        monkeypatch.undo()
    xs = [torch.randn(3, 4, device=device) for _ in range(6)]
    for x in xs:
        part(below(x)).square().sum().backward()
    expected = below.weight.grad
    below.weight.grad = None
    del part.forward
    for x in xs:
        part(below(x)).square().sum().backward()
    torch.testing.assert_close(expected, below.weight.grad)


def test_a_failed_capture_is_told_once(make: Any, device: str) -> None:
    plain, kept, fake = pair = make()
    if fake is None:
        pytest.skip("a failed capture may leave CUDA in a state of its own")
    fake.error = RuntimeError("operation not permitted when stream is capturing\nand more")
    parameters = dict(kept.named_parameters())
    with pytest.warns(RuntimeWarning, match="permitted when stream is capturing$") as told:
        mine = train(kept, device)
    assert len(told) == 1
    assert_same(mine, train(plain, device))
    assert pair.counted() == (0, 1)
    assert "permitted" in repr(kept.forward)
    assert all(p is parameters[name] for name, p in kept.named_parameters())


@pytest.mark.parametrize("which", ["hook", "object", "nothing"])
def test_reasons(make: Any, device: str, which: str, monkeypatch: pytest.MonkeyPatch) -> None:
    _, kept, _ = make()
    reason = {
        "hook": "fc has hooks",
        "object": "a BytesIO, which is no tensor",
        "nothing": "no result requires a gradient",
    }[which]
    if which == "hook":
        kept.fc.register_forward_hook(lambda *_: None)
    elif which == "object":
        old = Small.forward
        monkeypatch.setattr(
            Small, "forward", lambda *a, **k: old(*a, **k)._replace(name=io.BytesIO())
        )
    else:
        kept.requires_grad_(False)
    with pytest.warns(RuntimeWarning, match=reason) as told:
        call_often(kept, device)
    assert len(told) == 1


def test_few_kinds_are_kept(make: Any, device: str) -> None:
    """The last used kinds; more than that run without graphs, in any order."""
    _, kept, _ = pair = make(kinds=2)
    for rows in (2, 3, 4) * 4:
        kept(**draw(0, device, rows)).loss.backward()
    assert pair.counted() == (0, 2)
    for rows in (5, 5, 5, 5, 6, 6, 6, 7):
        kept(**draw(0, device, rows)).loss.backward()
    assert pair.counted() == (1, 2)


def test_copies_capture_their_own(make: Any, device: str) -> None:
    plain, kept, _ = pair = make()
    train(kept, device)
    for copied in (copy.deepcopy(kept), pickle.loads(pickle.dumps(kept))):
        assert copied.forward.model is copied
        assert copied.forward.kinds == []
        with torch.no_grad():
            copied.fc.bias.add_(1.0)
            mine = copied(**draw(0, device)).loss
        assert not torch.equal(mine, kept(**draw(0, device)).loss)
    assert pair.counted() == (1, 1)
    assert inspect.signature(kept.forward) == inspect.signature(plain.forward)
    del kept.forward
    assert kept.forward.__func__ is Small.forward


def test_compiles(make: Any, device: str) -> None:
    """In a compiled model nothing is captured, in one graph."""
    plain, kept, _ = pair = make()
    compiled = torch.compile(kept, fullgraph=True, backend="aot_eager")
    for at in range(4):
        batch = draw(at, device)
        torch.testing.assert_close(compiled(**batch).loss, plain(**batch).loss)
    assert pair.counted() == (0, 0)


def test_arguments() -> None:
    with pytest.raises(ArgumentError, match="model is a function"):
        torchweld.keep_graphs(lambda x: x)  # type: ignore[type-var]
    with pytest.raises(ArgumentError, match="kinds is 0"):
        torchweld.keep_graphs(nn.Linear(2, 2), kinds=0)


def test_a_second_call_starts_again(make: Any, device: str) -> None:
    _, kept, _ = pair = make()
    train(kept, device)
    assert torchweld.keep_graphs(kept, kinds=1) is kept
    assert pair.counted() == (0, 0)
    assert kept.forward.before is None


def test_logits_stay_lazy(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A fused language model's logits equal the plain model's, and pass gradients on."""
    torch.manual_seed(0)
    kept = torchweld.keep_graphs(torchweld.fuse(LanguageModel().to(device)))
    if device == "cpu":
        monkeypatch.setattr(torch.cuda, "make_graphed_callables", FakeGraphs(kept).make)
    forward: Any = kept.forward
    for at in range(6):
        batch = {"input_ids": IDS[at].to(device), "labels": IDS[at + 1].to(device)}
        found, expected = kept(**batch), LanguageModel.forward(kept, **batch)
        grads = []
        for out in (found, expected):
            total = out.loss + 0.1 * out.logits.square().mean()
            grads.append(torch.autograd.grad(total, list(kept.parameters())))
        assert type(found.logits) is Logits
        torch.testing.assert_close(found.logits + 0, expected.logits)
        assert_same(*map(list, grads))
    assert forward.kinds[0].graph is not None


IDS = torch.randint(0, WORDS, (7, 2, 5), generator=torch.Generator().manual_seed(2))


def test_masks_of_transformers(monkeypatch: pytest.MonkeyPatch) -> None:
    """A capture makes the masks of other calls, unless numbers in the caller's tensors decide."""
    masks: Any = ModuleType("transformers.masking_utils")
    masks.is_tracing = lambda tensor=None: True
    masks.find_packed_sequence_indices = lambda ids: ids
    monkeypatch.setitem(sys.modules, masks.__name__, masks)

    def forward(input_ids: Any, attention_mask: Any = None, **kwargs: Any) -> None: ...

    ids, one = torch.arange(5)[None], torch.ones(2, 5)
    rows = ids.expand(2, -1)
    for args, kwargs, changes in (
        ((one,), {}, True),
        ((), {"input_ids": one, "labels": one}, True),
        ((one, None), {"position_ids": None}, True),
        ((one, one), {}, False),
        ((one,), {"position_ids": ids}, False),
    ):
        leaves, spec = tree_flatten((args, kwargs))
        with graphs._masks_as_before(forward, spec, leaves):
            assert masks.is_tracing() is not changes
            assert masks.is_tracing(one)
            assert (masks.find_packed_sequence_indices(rows) is None) is changes
            assert masks.find_packed_sequence_indices(ids) is ids  # may depend on the words
            assert masks.find_packed_sequence_indices(one) is one
        assert masks.is_tracing()
