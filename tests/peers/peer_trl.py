"""torchweld.compat.trl against TRL: its functions, and its trainers with ours in their place."""

from __future__ import annotations

import importlib.metadata
import inspect
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from models import build
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast
from trl import DPOConfig, DPOTrainer, GRPOConfig, GRPOTrainer, SFTConfig, SFTTrainer
from trl.kernels.chunked_logprob import ChunkedLogProbFunction
from trl.trainer import utils

import torchweld
from torchweld import numerics
from torchweld.compat import trl

pytestmark = pytest.mark.filterwarnings("ignore")
STEPS = 5


@pytest.fixture(autouse=True)
def _kernels() -> Iterator[None]:
    """Let our kernels serve small inputs too."""
    with torchweld.use_backend("cpu", "eager"):
        yield


def _draw(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).requires_grad_()


@pytest.mark.parametrize("picked", [None, 3])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("masked", [False, True])
def test_selective_log_softmax(picked: int | None, temperature: float, masked: bool) -> None:
    logits = 3 * _draw(2, 9, 40)
    shape = (2, 9) if picked is None else (2, 9, picked)
    index = torch.randint(0, 40, shape, generator=torch.Generator().manual_seed(1))
    mask = torch.arange(18).view(2, 9) % 3 if masked else None
    expected = utils.selective_log_softmax(logits, index, temperature)
    if mask is not None:
        rows = mask if picked is None else mask.unsqueeze(-1)
        expected = expected.masked_fill(rows == 0, 0.0)
    found = trl.selective_log_softmax(logits, index, temperature, mask)
    results = [[y, torch.autograd.grad(y.square().sum(), logits)[0]] for y in (found, expected)]
    torch.testing.assert_close(*results, **numerics.SUMMED)


def test_entropies_and_both_at_once() -> None:
    logits, index = 3 * _draw(2, 9, 40), torch.zeros(2, 9, dtype=torch.long)
    mask = torch.arange(18).view(2, 9) % 3
    results = []
    for package in (trl, utils):
        entropy = package.entropy_from_logits(logits)
        both = package.selective_log_softmax_and_entropy(logits, index, True, 0.7, mask)
        grads = torch.autograd.grad(entropy.sum() + both[0].sum() + both[1].sum(), logits)
        results.append([entropy, *both, *grads])
    torch.testing.assert_close(*results, **numerics.SUMMED)
    ruled_out = logits.detach().clone().index_fill_(-1, torch.tensor([4]), -torch.inf)
    ruled_out.requires_grad_()
    (grad,) = torch.autograd.grad(trl.entropy_from_logits(ruled_out).sum(), ruled_out)
    assert grad.isfinite().all()


FORMS: list[dict[str, Any]] = [{}, {"final_logit_softcapping": 5.0}, {"logit_scale": 0.3}]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("outputs", [(), ("entropy",), trl.OUTPUTS])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_what_the_chunked_function_returns(
    form: dict[str, Any], outputs: tuple[str, ...], temperature: float
) -> None:
    hidden, weight, bias = _draw(12, 32), _draw(90, 32, seed=1), _draw(90, seed=2)
    with torch.no_grad():  # some targets are the top class
        targets = (hidden @ weight.t() + bias).argmax(-1)
        targets[::2] = torch.arange(6)
    results = []
    for function in (trl.ChunkedLogProbFunction, ChunkedLogProbFunction):
        scale = form.get("logit_scale", 1.0)
        how = (temperature, 64, form.get("final_logit_softcapping"), scale, outputs)
        log_p, entropy, *others = function.apply(hidden, weight, bias, targets, *how)
        loss = log_p.square().sum() + (0 if entropy is None else 0.1 * entropy.sum())
        grads = torch.autograd.grad(loss, (hidden, weight, bias))
        results.append([log_p, entropy, *others, *grads])
    assert [each is None for each in results[0]] == [each is None for each in results[1]]
    present = ([each for each in result if each is not None] for result in results)
    torch.testing.assert_close(*present, **numerics.CHAINED_SMALL)


@pytest.mark.parametrize("name", trl._REPLACED)
def test_arguments_are_those_of_trl(name: str) -> None:
    """What a trainer calls takes as many arguments, of the same names and defaults."""
    mine, theirs = trl._REPLACED[name], getattr(utils, name)
    is_class = isinstance(theirs, type)
    both = (mine.apply, theirs.forward) if is_class else (mine, theirs)  # type: ignore[attr-defined]
    found, expected = ([*inspect.signature(f).parameters.values()] for f in both)
    expected = expected[1:] if is_class else expected  # without the context
    assert [p.name for p in found[: len(expected)]] == [p.name for p in expected]
    assert all(p.default is not p.empty for p in found[len(expected) :])


def test_a_patch_that_finds_nothing_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.delattr(utils, "entropy_from_logits")
        message = r"trl 1\.16.* has no entropy_from_logits; accepted: trl 1.16"
        with pytest.raises(ImportError, match=message), trl.patch():
            pass

    def find_none(name: str) -> str:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", find_none)
    with pytest.raises(ImportError, match="trl is not installed"), trl.patch():
        pass


# --- Trainers -------------------------------------------------------------------------------------

WORDS = [f"w{i}" for i in range(120)]


def _make_tokenizer() -> PreTrainedTokenizerFast:
    special = ["<pad>", "<s>", "</s>", "<unk>"]
    vocabulary = {word: at for at, word in enumerate([*special, *WORDS])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    names = dict(zip(("pad_token", "bos_token", "eos_token", "unk_token"), special, strict=True))
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **names)


def _write(seed: int, words: int) -> str:
    picks = torch.randint(0, 120, (words,), generator=torch.Generator().manual_seed(seed))
    return " ".join(WORDS[pick] for pick in picks)


def _reward(completions: list[str], **_: Any) -> list[float]:
    return [float(len(set(text.split())) % 5) for text in completions]


def _make(kind: str, folder: Path) -> Any:
    model, tokenizer = build("Llama"), _make_tokenizer()
    how: dict[str, Any] = {"output_dir": str(folder), "max_steps": STEPS, "logging_steps": 1}
    how |= {"report_to": "none", "per_device_train_batch_size": 4, "learning_rate": 1e-3, "seed": 3}
    how |= {"bf16": False, "use_cpu": True, "save_strategy": "no", "gradient_checkpointing": False}
    given: dict[str, Any] = {"model": model, "processing_class": tokenizer}
    if kind == "sft":
        rows = [{"text": _write(i, 20)} for i in range(24)]
        args = SFTConfig(**how, max_length=32, loss_type="chunked_nll")
        return SFTTrainer(**given, args=args, train_dataset=Dataset.from_list(rows))
    if kind == "dpo":
        rows = [
            {"prompt": _write(i, 6), "chosen": _write(i + 99, 9), "rejected": _write(i + 50, 9)}
            for i in range(24)
        ]
        args, given["ref_model"] = DPOConfig(**how, max_length=32), build("Llama")
        return DPOTrainer(**given, args=args, train_dataset=Dataset.from_list(rows))
    rows = [{"prompt": _write(i, 6)} for i in range(24)]
    args = GRPOConfig(**how, max_completion_length=8, num_generations=4)
    given["reward_funcs"] = _reward
    return GRPOTrainer(**given, args=args, train_dataset=Dataset.from_list(rows))


def _train(kind: str, patched: bool, folder: Path) -> tuple[list[float], list[torch.Tensor]]:
    with trl.patch() if patched else nullcontext():
        trainer = _make(kind, folder)
        torch.manual_seed(5)
        trainer.train()
    losses = [row["loss"] for row in trainer.state.log_history if "loss" in row]
    return losses, [p.detach() for p in trainer.model.parameters()]


@pytest.mark.parametrize("kind", ["sft", "dpo", "grpo"])
def test_trainers_lose_the_same(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Five steps with TRL's functions and with ours, and ours do run."""
    expected, weights = _train(kind, False, tmp_path)
    ran = []
    for name in ("linear_logprobs", "cross_entropy"):
        own = getattr(trl.functional, name)

        def count(*args: Any, _own: Any = own, **kwargs: Any) -> Any:
            ran.append(1)
            return _own(*args, **kwargs)

        monkeypatch.setattr(trl.functional, name, count)
    found, others = _train(kind, True, tmp_path)
    assert len(expected) == STEPS
    assert len(ran) >= STEPS
    assert found == pytest.approx(expected, rel=1e-4, abs=1e-5)
    torch.testing.assert_close(others, weights, rtol=1e-3, atol=1e-4)
