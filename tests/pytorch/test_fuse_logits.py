"""Logits of a fused training step: computed when they are read, with eager's gradients."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import distributed, nn
from torch.nn.functional import cross_entropy, kl_div
from torch.nn.parallel import DistributedDataParallel

import torchweld
from model_with_head import WORDS, LanguageModel, Output
from selection import combine
from torchweld import functional, numerics, optim
from torchweld.fusion import logits as logits_of


def _causal_loss(
    logits: Any,
    labels: Any,
    vocab_size: int,
    num_items_in_batch: Any = None,
    shift_labels: Any = None,
    **more: Any,
) -> Any:
    """As transformers computes it, or a next release, which may read more keywords."""
    if shift_labels is None:
        shift_labels = nn.functional.pad(labels, (0, 1), value=-100)[..., 1:]
    reduction = "mean" if num_items_in_batch is None else "sum"
    loss = nn.functional.cross_entropy(
        logits.view(-1, vocab_size), shift_labels.reshape(-1), reduction=reduction
    )
    loss = loss + more.get("z_loss", 0.0) * logits.logsumexp(-1).square().mean()
    return loss if num_items_in_batch is None else loss / num_items_in_batch


_causal_loss.__module__ = "transformers.loss.loss_utils"
_causal_loss.__name__ = "ForCausalLMLoss"


class WithLossFunction(LanguageModel):
    """With a loss function of the model's own."""

    loss_function = staticmethod(_causal_loss)

    def forward(
        self, input_ids: Any, labels: Any = None, return_dict: bool = True, **options: Any
    ) -> Any:
        hidden = self.body(input_ids)
        logits = self.lm_head(getattr(hidden, "last_hidden_state", hidden))
        loss = None
        if labels is not None:
            loss = self.loss_function(
                logits=logits, labels=labels, vocab_size=self.config.vocab_size, **options
            )
        return Output(loss=loss, logits=logits)


class Capped(LanguageModel):
    """With a soft cap, as Gemma 2 has it."""

    def forward(self, input_ids: Any, labels: Any = None, return_dict: bool = True) -> Any:
        hidden = self.body(input_ids)
        logits = self.lm_head(getattr(hidden, "last_hidden_state", hidden))
        logits = torch.tanh(logits / 3) * 3
        loss = None
        if labels is not None:
            loss_function = nn.CrossEntropyLoss()
            loss = loss_function(logits.view(-1, self.config.vocab_size), labels.view(-1))
        return Output(loss=loss, logits=logits)


class WithRow(LanguageModel):
    """With a row added to the logits, as BART has it."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("final_logits_bias", torch.linspace(-1, 1, WORDS)[None])

    def forward(self, input_ids: Any, labels: Any = None, return_dict: bool = True) -> Any:
        hidden = self.body(input_ids)
        logits = self.lm_head(getattr(hidden, "last_hidden_state", hidden))
        logits = logits + self.final_logits_bias.to(logits.device)
        loss = None
        if labels is not None:
            some = logits[..., :-1, :].contiguous()
            loss_function = nn.CrossEntropyLoss()
            loss = loss_function(some.view(-1, some.size(-1)), labels[..., 1:].reshape(-1))
        return Output(loss=loss, logits=logits)


class _Squares(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return x.square().sum()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return 2 * grad * ctx.saved_tensors[0]  # type: ignore[no-any-return]


def _ids() -> torch.Tensor:
    return torch.randint(WORDS, (3, 7), generator=torch.Generator().manual_seed(0))


def _pair(dtype: torch.dtype = torch.float64, kind: Any = LanguageModel) -> tuple[Any, Any]:
    torch.manual_seed(0)
    model = kind().to(dtype)
    return model, torchweld.fuse(copy.deepcopy(model))


def _step(model: Any) -> Any:
    return model(input_ids=_ids(), labels=_ids().roll(-1, 1))


def _write(z: Any) -> Any:
    before, copied, shared = z.clone(), z.float(), z.detach()
    z.mul_(2)
    return before.sum() + copied.sum() + shared.sum() + z.sum()


def _write_view(z: Any) -> Any:
    part = z[..., :3]
    part.mul_(3)
    return z.square().sum()


USES: dict[str, Callable[[Any], Any]] = {
    "float": lambda z: z.float().double().logsumexp(-1).sum(),
    "softmax": lambda z: torch.softmax(z, -1).square().sum(),
    "shift": lambda z: z[..., :-1, :].contiguous().view(-1, z.size(-1)).logsumexp(-1).sum(),
    "mask": lambda z: z[_ids() > 9].sum(),
    "added": lambda z: (1 + z).exp().sum(),
    "product": lambda z: (z @ z.mT).sum(),
    "gather": lambda z: torch.gather(z, -1, _ids()[..., None]).sum(),
    "distil": lambda z: kl_div(z.log_softmax(-1), (2 * z.detach()).softmax(-1), reduction="sum"),
    "cross_entropy": lambda z: cross_entropy(z.view(-1, WORDS), _ids().view(-1)),
    "ours": lambda z: functional.cross_entropy(z.view(-1, WORDS), _ids().view(-1)),
    "rows": lambda z: torch.stack([row.square().sum() for row in z]).sum(),
    "autograd.Function": _Squares.apply,
    "Function of a copy": lambda z: _Squares.apply(z.clone().view(z.shape)),
    "written": _write,
    "view written": _write_view,
    "compiled": lambda z: torch.compile(lambda z: z.square().sum(), backend="aot_eager")(z),
    "argmax": lambda z: (z.argmax(-1) == _ids()).double().mean(),
    "numpy": lambda z: torch.from_numpy(z.detach().cpu().numpy()),
    "tolist": lambda z: torch.tensor(z.tolist(), dtype=z.dtype),
    "item": lambda z: torch.tensor(z[0, 1, 2].item(), dtype=z.dtype),
    "deepcopy": lambda z: copy.deepcopy(z.detach()),
    "pickle": lambda z: pickle.loads(pickle.dumps(z.detach())),
    "data": lambda z: z.data.sum(),
    "facts": lambda z: torch.tensor([*z.shape, z.ndim, z.requires_grad, z.dtype.itemsize, len(z)]),
}


def _use(model: Any, use: Callable[[Any], Any]) -> list[torch.Tensor]:
    output = _step(model)
    value = use(output.logits)
    total = output.loss + value if value.requires_grad else output.loss
    grads = torch.autograd.grad(total, list(model.parameters()))
    return [value.detach(), *grads]


@pytest.mark.filterwarnings("ignore:The .grad attribute")  # dynamo's look at any subclass
@pytest.mark.parametrize(("name", "kind"), combine(USES, [LanguageModel, Capped, WithRow]))
@pytest.mark.usefixtures("own_graphs")
def test_any_use_gives_eagers_values_and_gradients(name: str, kind: Any) -> None:
    """Gradients through loss and logits together, in float64."""
    model, fused = _pair(kind=kind)
    for mine, theirs in zip(_use(fused, USES[name]), _use(model, USES[name]), strict=True):
        assert type(mine) is type(theirs)
        torch.testing.assert_close(mine, theirs, **numerics.CHAINED64)
    assert [row.becomes for row in torchweld.explain_fusion(fused)] == ["linear_cross_entropy"]


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.usefixtures("own_graphs")
def test_a_first_read_without_gradients_keeps_the_graph(mode: Callable[[], Any]) -> None:
    def use(z: Any) -> Any:
        with mode():
            z.argmax(-1)
        return z.logsumexp(-1).sum()

    model, fused = _pair()
    torch.testing.assert_close(_use(fused, use), _use(model, use), **numerics.CHAINED64)


@pytest.mark.usefixtures("own_graphs")
def test_the_dtype_is_that_of_the_step_under_autocast() -> None:
    """Also if the logits are read outside of it."""
    model, fused = _pair(torch.float32)
    found = []
    for each in (fused, model):
        with torch.autocast("cpu", torch.bfloat16):
            output = _step(each)
        assert output.logits.dtype == torch.bfloat16
        found.append(
            [output.logits, *torch.autograd.grad(output.logits.sum(), each.lm_head.weight)]
        )
    torch.testing.assert_close(*found, rtol=2**-7, atol=1e-6)


@pytest.mark.usefixtures("own_graphs")
def test_a_row_that_changes_is_refused() -> None:
    _, fused = _pair(kind=WithRow)
    logits = _step(fused).logits
    fused.final_logits_bias += 1
    with pytest.raises(RuntimeError, match="weights changed"):
        logits.sum()


_REFUSED: dict[str, Callable[[Any], Any]] = {
    "method": lambda z: z.argmax(-1),
    "function": lambda z: torch.softmax(z, -1),
    "index": lambda z: z[:, 0],
    "left": lambda z: z + 1,
    "right": lambda z: torch.ones(1) + z,
    "comparison": lambda z: z > 0,
    "rows": list,
}


@pytest.mark.parametrize("name", _REFUSED)
def test_logits_that_cannot_be_computed_say_what_to_do(name: str) -> None:
    """Of a layer that is sharded."""
    deferred = logits_of.Deferred(torch.randn(3, 7, 16), WORDS)
    with pytest.raises((RuntimeError, AttributeError), match=r"fuse\(\) left out the logits"):
        _REFUSED[name](deferred)


@pytest.mark.usefixtures("own_graphs")
def test_second_derivatives() -> None:
    model, fused = _pair(kind=Capped)
    found = []
    for each in (fused, model):
        weight = each.lm_head.weight
        (grad,) = torch.autograd.grad(
            _step(each).logits.logsumexp(-1).sum(), weight, create_graph=True
        )
        found.append(torch.autograd.grad(grad.square().sum(), weight)[0])
    torch.testing.assert_close(*found, **numerics.CHAINED64)


@pytest.mark.usefixtures("own_graphs")
def test_what_frameworks_do_with_outputs_computes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step computes the head's matrix product only if something reads the logits."""
    _, fused = _pair(torch.bfloat16)
    calls: list[Any] = []
    original = logits_of.linear_as_torch  # torch's, or ours in 16 bits without units
    monkeypatch.setattr(
        logits_of, "linear_as_torch", lambda *given: (calls.append(0), original(*given))[1]
    )
    logits = _step(fused).logits
    kept = [logits.float(), logits.detach(), logits.to(torch.float32), logits.view(logits.shape)]
    kept += [logits.clone(), logits.view_as(logits), logits.detach().float().data]
    assert [z.shape for z in kept] == [logits.shape] * len(kept)
    assert not calls
    kept[-1].sum()
    assert len(calls) == 1


@pytest.mark.usefixtures("own_graphs")
def test_a_loss_reads_a_keyword_that_it_does_not_declare() -> None:
    pair = _pair(kind=WithLossFunction)
    with_it, fused = (each(_ids(), _ids(), z_loss=0.5).loss for each in pair)
    torch.testing.assert_close(fused, with_it)
    unused, fused = (each(_ids(), _ids(), window=3).loss for each in pair)
    torch.testing.assert_close(fused, unused)
    assert (with_it - unused).abs() > 0.1


@pytest.mark.parametrize("kind", ["torch", "fused", "8 bits"])
@pytest.mark.usefixtures("own_graphs")
def test_weights_of_another_step_are_refused(kind: str) -> None:
    """They would give logits of no step: old hidden states, new weights."""
    _, fused = _pair(torch.float32)
    output = _step(fused)
    output.loss.backward()
    if kind == "8 bits":
        optim.AdamW8bit(fused.parameters(), lr=1e-4).step()
    else:
        torch.optim.AdamW(fused.parameters(), lr=1e-4, fused=kind == "fused").step()
    with pytest.raises(RuntimeError, match=r"weights changed since.*before optimizer.step\(\)"):
        output.logits.argmax(-1)


@pytest.fixture
def one_process() -> Iterator[None]:
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    yield
    distributed.destroy_process_group()


@pytest.mark.parametrize("settings", [{}, {"find_unused_parameters": True}, {"static_graph": True}])
@pytest.mark.usefixtures("own_graphs")
def test_replicas(settings: dict[str, bool], one_process: None) -> None:
    """DistributedDataParallel searches a step's outputs, and passes them through a function."""
    model, fused = _pair()
    replicas = DistributedDataParallel(fused, **settings)
    for _ in range(2):
        for each in (replicas, model):
            each.zero_grad()
            output = _step(each)
            (output.loss + output.logits.logsumexp(-1).square().mean()).backward()
        for mine, theirs in zip(fused.parameters(), model.parameters(), strict=True):
            torch.testing.assert_close(mine.grad, theirs.grad, **numerics.CHAINED64)


@pytest.mark.parametrize("kind", [LanguageModel, Capped, WithRow, WithLossFunction])
@pytest.mark.usefixtures("own_graphs")
def test_a_compiled_step_has_logits(kind: Any) -> None:
    """Where the compiler sees no loss that could take the head's input."""
    model, fused = _pair(kind=kind)
    output = torch.compile(fused, backend="aot_eager", fullgraph=True)(_ids(), _ids())
    expected = model(_ids(), _ids())
    torch.testing.assert_close(output.loss, expected.loss, **numerics.CHAINED64)
    torch.testing.assert_close(output.logits, expected.logits, **numerics.CHAINED64)
