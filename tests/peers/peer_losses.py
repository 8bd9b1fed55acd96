"""The loss of transformers' language models after fuse(): training, options, and refusals."""

from __future__ import annotations

import copy
import functools
from typing import Any

import pytest
import torch
import transformers
from models import build, list_welds, make, tokens
from transformers.trainer_pt_utils import LabelSmoother

import torchweld
from torchweld.fusion.logits import Logits

WORDS = 32000
SIZES = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "head_dim": 8}


@pytest.fixture(autouse=True)
def _graphs(own_graphs: None) -> None:
    """Graphs of each test's own."""


def _batch() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(7)
    ids = torch.randint(3, WORDS, (2, 24), generator=generator)
    labels = ids.clone()
    labels[0, :9] = -100
    return {"input_ids": ids, "labels": labels}


def _train(model: Any, steps: int = 20) -> list[float]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses = []
    for _ in range(steps):
        loss = model(**_batch()).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("name", ["Llama", "Qwen3"])
def test_losses_of_20_steps_are_eagers(name: str) -> None:
    """With 32000 words, and labels that are ignored."""
    model = make(name, vocab_size=WORDS, **SIZES)
    fused: Any = torchweld.fuse(copy.deepcopy(model))
    assert isinstance(fused(**_batch()).logits, Logits)
    eager, ours = _train(model), _train(fused)
    assert eager[-1] < eager[0] - 0.5
    assert max(abs(a - b) for a, b in zip(eager, ours, strict=True)) <= 1e-4


def _differentiate(model: Any, reads_logits: bool = False, **given: Any) -> list[torch.Tensor]:
    output = model(**given)
    loss = output.loss
    if reads_logits:
        loss = loss + output.logits.float().logsumexp(-1).square().mean()
    return [loss, *torch.autograd.grad(loss, [*model.parameters()])]


@pytest.mark.parametrize("name", ["Llama", "Gemma3"])
@pytest.mark.parametrize(
    "more",
    [
        {"num_items_in_batch": 7},
        {"num_items_in_batch": torch.tensor(7)},
        {"shift_labels": tokens()["labels"].roll(-1, 1)},
        {"ignore_index": 5},
        {"logits_to_keep": 0, "use_cache": False},
    ],
    ids=str,
)
def test_options_are_eagers(name: str, more: dict[str, Any]) -> None:
    model = build(name)
    expected = _differentiate(model, **tokens(), **more)
    for mine, theirs in zip(
        _differentiate(torchweld.fuse(model), **tokens(), **more), expected, strict=True
    ):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("name", ["Llama", "Gemma3", "Bert", "T5", "GPT2"])
def test_a_loss_of_the_logits_beside_the_models(name: str) -> None:
    """A z-loss, in float64; these models compute parts of the loss in float32."""
    model = build(name).double()
    expected = _differentiate(model, True, **tokens())
    found = _differentiate(torchweld.fuse(model), True, **tokens())
    size = max(float(x.abs().max()) for x in expected[1:])
    for mine, theirs in zip(found, expected, strict=True):
        wide = mine.double()  # the loss has the model's own float32
        torch.testing.assert_close(wide, theirs.double(), rtol=1e-5, atol=1e-6 * size)


def test_a_soft_cap_is_taken_along() -> None:
    model = make("Gemma2", vocab_size=101, **SIZES)
    assert model.config.final_logit_softcapping
    given = {key: value % 101 for key, value in _batch().items()}
    expected = _differentiate(model, **given)
    fused = torchweld.fuse(model)
    assert isinstance(fused(**given).logits, Logits)
    torch.testing.assert_close([*_differentiate(fused, **given)], [*expected], rtol=1e-4, atol=1e-6)


def test_logits_where_they_are_wanted() -> None:
    """In evaluation, without labels and without gradients; the Trainer's smoothing needs them.

    The Trainer asks the model's name whether to shift labels: it was another one.
    """
    model = build("Llama")
    fused = torchweld.fuse(copy.deepcopy(model))
    labels = tokens()["labels"]
    ids = {"input_ids": tokens()["input_ids"]}
    assert fused._get_name() == type(fused).__name__ == "LlamaForCausalLM"
    smoother = LabelSmoother(0.1)
    expected = smoother(model(**ids), labels, shift_labels=True)
    torch.testing.assert_close(smoother(fused(**ids), labels, shift_labels=True), expected)
    with torch.no_grad():
        torch.testing.assert_close(fused(**tokens()).logits, model(**tokens()).logits)
    fused.eval()
    torch.testing.assert_close(fused(**tokens()).loss, model.eval()(**tokens()).loss)
    assert isinstance(fused(**tokens(), return_dict=False), tuple)


def test_bfloat16_has_a_float32_loss() -> None:
    model = build("Llama").bfloat16()
    fused = torchweld.fuse(copy.deepcopy(model))
    exact = build("Llama").double()(**tokens()).loss
    plain, ours = model(**tokens()).loss, fused(**tokens()).loss
    assert plain.dtype == ours.dtype == torch.float32
    assert abs(ours - exact) <= 2 * abs(plain - exact) + 1e-3


def test_it_compiles_whole() -> None:
    model = build("Llama")
    expected = _differentiate(model, **tokens())
    compiled = torch.compile(torchweld.fuse(model), fullgraph=True, backend="aot_eager")
    for mine, theirs in zip(_differentiate(compiled, **tokens()), expected, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-6)


def test_a_forward_wrapped_by_somebody(monkeypatch: pytest.MonkeyPatch) -> None:
    kind = transformers.LlamaForCausalLM

    def doubled(function: Any) -> Any:
        @functools.wraps(function)
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            result = function(*args, **kwargs)
            result.loss = 2 * result.loss
            return result

        return wrapped

    monkeypatch.setattr(kind, "forward", doubled(kind.forward))
    model = build("Llama")
    expected = model(**tokens()).loss
    torch.testing.assert_close(torchweld.fuse(model)(**tokens()).loss, expected)


# --- Losses by torch's CrossEntropyLoss: masked words, and encoders with decoders ----------------

# The parts of a model's name, and dropouts that its configuration has.
OTHERS = {
    **dict.fromkeys(("Bert", "Roberta", "Albert", "MPNet", "Deberta"), "ForMaskedLM"),
    **dict.fromkeys(("T5", "MT5"), "ForConditionalGeneration"),
}
WITHOUT_DROPOUT = dict.fromkeys(
    ("hidden_dropout_prob", "attention_probs_dropout_prob", "dropout_rate"), 0.0
)


def _make_other(name: str) -> Any:
    sizes = {"vocab_size": 101, "d_model": 32, "d_kv": 8, "d_ff": 64, "embedding_size": 16}
    return make(name, OTHERS[name], **sizes, **SIZES, num_layers=1, **WITHOUT_DROPOUT)


def _small_batch() -> dict[str, torch.Tensor]:
    return {key: torch.where(x < 0, x, x % 101) for key, x in _batch().items()}


@pytest.mark.parametrize("name", OTHERS)
def test_losses_of_torchs_module(name: str) -> None:
    """In float64, and logits where they are wanted; DeBERTa and T5 compute in float32 inside."""
    model = _make_other(name).double()
    fused: Any = torchweld.fuse(copy.deepcopy(model))
    given = _small_batch()
    assert isinstance(fused(**given).logits, Logits)
    mine, theirs = (
        [m(**given).loss, *torch.autograd.grad(m(**given).loss, [*m.parameters()])]
        for m in (fused, model)
    )
    with torch.no_grad():
        mine.append(fused(**given).logits)
        theirs.append(model(**given).logits)
    mine.append(fused.eval()(**given).logits)
    theirs.append(model.eval()(**given).logits)
    exact = name.startswith(("Bert", "Rob", "Alb", "MPN"))
    for a, b in zip(mine, theirs, strict=True):
        torch.testing.assert_close(
            a, b, rtol=1e-9 if exact else 1e-4, atol=1e-12 if exact else 1e-5
        )
    assert "weld_defers" not in vars(fused.get_output_embeddings())


@pytest.mark.parametrize("name", ["Bert", "T5"])
def test_the_loss_has_the_logits_dtype(name: str) -> None:
    """As CrossEntropyLoss gives it: float32 under autocast."""
    model = _make_other(name).bfloat16()
    fused = torchweld.fuse(copy.deepcopy(model))
    exact = _make_other(name).double()(**_small_batch()).loss
    plain, ours = model(**_small_batch()).loss, fused(**_small_batch()).loss
    assert plain.dtype == ours.dtype == torch.bfloat16
    assert abs(ours - exact) <= 2 * abs(plain - exact) + 2e-2
    model, fused = model.float(), fused.float()
    with torch.autocast("cpu", torch.bfloat16):
        assert model(**_small_batch()).loss.dtype == fused(**_small_batch()).loss.dtype


@pytest.mark.parametrize("name", ["Bert", "T5"])
def test_losses_of_torchs_module_compile(name: str) -> None:
    model = _make_other(name)
    expected = _differentiate(model, **_small_batch())
    compiled = torch.compile(torchweld.fuse(model), fullgraph=True, backend="aot_eager")
    for mine, theirs in zip(_differentiate(compiled, **_small_batch()), expected, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("inside", ["cls", "cls.predictions", "cls.predictions.decoder"])
def test_a_hook_in_a_head_sees_logits(inside: str) -> None:
    fused = torchweld.fuse(_make_other("Bert"))
    seen: list[Any] = []
    fused.get_submodule(inside).register_forward_hook(lambda *given: seen.append(given[2].shape))
    assert fused(**_small_batch()).logits is not None
    assert seen == [(2, 24, 101)]


def test_a_head_that_adds_a_row_to_its_logits() -> None:
    """Such a head was left; with its loss welded, the row is part of the loss and of the logits."""
    model = make("Bart", "ForConditionalGeneration")
    model.final_logits_bias.normal_()
    fused = torchweld.fuse(copy.deepcopy(model))
    for each in (model, fused):
        each.eval()
    mine, theirs = fused(**tokens()), model(**tokens())
    torch.testing.assert_close((mine.loss, mine.logits), (theirs.loss, theirs.logits))
    assert list_welds(fused)["linear_cross_entropy"] == 1


def _other_loss(logits: Any, labels: Any, vocab_size: int, **more: Any) -> Any:
    return logits.float().square().mean()


def test_another_loss() -> None:
    model = build("Llama")
    fused = torchweld.fuse(copy.deepcopy(model))
    for each in (model, fused):
        each.loss_function = _other_loss
    torch.testing.assert_close(fused(**tokens()).loss, model(**tokens()).loss)
    assert "linear_cross_entropy" not in list_welds(fused)


def test_a_hooked_head() -> None:
    """A hook sees logits."""
    model = build("Llama")
    fused = torchweld.fuse(copy.deepcopy(model))
    seen: list[Any] = []
    for each in (model, fused):
        each.lm_head.register_forward_hook(lambda *given: seen.append(given[2].shape))
        each(**tokens())
    assert seen[0] == seen[1]


def test_arguments_of_another_releases_loss(monkeypatch: pytest.MonkeyPatch) -> None:
    """An argument that only that release's function takes."""
    from transformers.loss import loss_utils

    own = loss_utils.fixed_cross_entropy

    def smoothed(source: Any, target: Any, *given: Any, smooth: float = 0.0, **more: Any) -> Any:
        return own(source, target, *given, **more) - smooth * source.log_softmax(-1).mean()

    monkeypatch.setattr(loss_utils, "fixed_cross_entropy", smoothed)
    model = make("Llama", vocab_size=WORDS, **SIZES)
    given = {**_batch(), "smooth": 0.3}
    expected = model(**given).loss
    torch.testing.assert_close(torchweld.fuse(model)(**given).loss, expected)
