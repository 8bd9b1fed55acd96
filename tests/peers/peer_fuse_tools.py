"""Fused models in the Trainer, under accelerate, with peft's adapters, saved and loaded."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator, cpu_offload
from accelerate.hooks import remove_hook_from_submodules
from accelerate.state import AcceleratorState
from peft import LoraConfig, get_peft_model
from small_models import MODELS, batch, build
from transformers import AutoModel, Trainer, TrainingArguments

import torchweld
from torchweld import optim
from torchweld.fusion import Weld

SETTINGS = {"lr": 3e-3, "weight_decay": 0.1}


@pytest.fixture(autouse=True)
def _kernels() -> Iterator[None]:
    """Let the kernels serve small inputs too."""
    with torchweld.use_backend("cpu", "eager"):
        yield


def _welds(model: torch.nn.Module) -> set[str]:
    return {name for name, module in model.named_modules() if isinstance(module, Weld)}


def _examples() -> list[dict[str, torch.Tensor]]:
    ids = torch.randint(3, 128, (32, 16), generator=torch.Generator().manual_seed(5))
    return [{"input_ids": row, "labels": row} for row in ids]


def _trained(model: Any, output: Path, optimizer: Any) -> list[float]:
    arguments = TrainingArguments(
        output_dir=str(output),
        per_device_train_batch_size=4,
        num_train_epochs=1,
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
    )
    trainer = Trainer(
        model,
        arguments,
        train_dataset=_examples(),
        optimizer_cls_and_kwargs=(optimizer, SETTINGS),
    )
    trainer.train()
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_the_trainer(name: str, tmp_path: Path) -> None:
    """A fused model with torchweld's optimizer has the losses of the plain model with torch's."""
    expected = _trained(build(name), tmp_path / "plain", torch.optim.AdamW)
    found = _trained(torchweld.fuse(build(name)), tmp_path / "fused", optim.AdamW)
    assert len(found) == 8
    assert found == pytest.approx(expected, rel=1e-3)


@pytest.mark.parametrize("fuse_first", [False, True])
def test_accelerate(fuse_first: bool) -> None:
    """fuse() before and after prepare(), whose autocast replaces the model's forward."""
    AcceleratorState._reset_state(reset_partial_state=True)  # another test's
    losses: list[list[float]] = []
    for fused in (False, True):
        accelerator = Accelerator(cpu=True, mixed_precision="bf16")
        model = build("gpt2")
        if fused and fuse_first:
            torchweld.fuse(model)
        optimizer = optim.AdamW(model.parameters(), 1e-3)
        model, optimizer = accelerator.prepare(model, optimizer)
        if fused and not fuse_first:
            torchweld.fuse(model)
        assert bool(_welds(model)) == fused
        losses.append([])
        for _ in range(8):
            optimizer.zero_grad()
            loss = model(**batch("gpt2")).loss
            accelerator.backward(loss)
            optimizer.step()
            losses[-1].append(float(loss.detach()))
    assert losses[1] == pytest.approx(losses[0], rel=1e-2)
    AcceleratorState._reset_state(reset_partial_state=True)


def test_offloaded_weights() -> None:
    """accelerate's hooks sit on the instances: fuse() follows them, and removing them leaves it."""
    model, given = build("llama").eval(), batch("llama")
    with torch.no_grad():
        expected = model(**given).logits
        cpu_offload(model, torch.device("cpu"))
        assert next(model.parameters()).is_meta
        torchweld.fuse(model)
        assert len(_welds(model)) == 11
        torch.testing.assert_close(model(**given).logits, expected, rtol=1e-4, atol=1e-4)
        remove_hook_from_submodules(model)
        assert len(_welds(torchweld.unfuse(model))) == 0


@pytest.mark.filterwarnings("ignore::FutureWarning")  # peft's, of transformers
@pytest.mark.parametrize("targets", [["gate_proj", "down_proj"], ["q_proj"]])
def test_adapters_before_fuse(targets: list[str]) -> None:
    """LoRA's layers stay as they are, and the block around them is welded."""
    torch.manual_seed(0)
    config = LoraConfig(target_modules=targets, init_lora_weights=False, lora_dropout=0.0)
    model, given = get_peft_model(build("llama"), config), batch("llama")
    plain = copy.deepcopy(model)
    torchweld.fuse(model)
    assert sum(name.endswith("mlp") for name in _welds(model)) == 2
    results = []
    for found in (plain, model):
        loss = found(**given).loss
        trained = [p for p in found.parameters() if p.requires_grad]
        results.append([loss, *torch.autograd.grad(loss, trained)])
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(b, a, rtol=1e-4, atol=1e-6)
    merged = [found.merge_and_unload().eval() for found in (plain, model)]
    assert _welds(merged[1])
    for a, b in zip(*(found(**given).logits for found in merged), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


@pytest.mark.filterwarnings("ignore::FutureWarning")  # peft's, of transformers
def test_adapters_of_a_fused_layer() -> None:
    """An adapted layer no longer computes its activation; once merged it does again."""
    config = LoraConfig(target_modules=["fc1"], init_lora_weights=False, lora_dropout=0.0)
    given, results, merged = batch("opt"), [], []
    for fused in (False, True):
        model = build("opt").eval()
        plain = model(**given).loss.detach()
        torch.manual_seed(0)
        if fused:
            assert any(name.endswith("fc1") for name in _welds(torchweld.fuse(model)))
        adapted: Any = get_peft_model(model, config)
        loss = adapted(**given).loss
        trained = [p for p in adapted.parameters() if p.requires_grad]
        results.append([loss, *torch.autograd.grad(loss, trained)])
        assert (loss - plain).abs() > 0.01
        with torch.no_grad():
            merged.append(adapted.merge_and_unload()(**given).logits)
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(b, a, rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(merged[1], merged[0], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", MODELS)
def test_saved_and_loaded(name: str, tmp_path: Path) -> None:
    """A plain model loads what a fused one saves, and the other way round."""
    model: Any = torchweld.fuse(build(name)).eval()
    model.save_pretrained(tmp_path / "fused")
    torchweld.unfuse(model)
    model.save_pretrained(tmp_path / "plain")
    given, results = batch(name), []
    for kind in ("fused", "plain"):
        loaded = type(model).from_pretrained(tmp_path / kind).eval()
        assert not _welds(loaded)
        results += [loaded(**given).logits, torchweld.fuse(loaded)(**given).logits]
    expected = model(**given).logits
    for found in results:
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    base = AutoModel.from_pretrained(tmp_path / "fused")
    assert base.state_dict().keys()


def test_generation() -> None:
    """With a cache, token by token."""
    model, given = build("llama").eval(), batch("llama")
    ids = given["input_ids"][:1, :5]
    how: dict[str, Any] = {"max_new_tokens": 12, "do_sample": False}
    expected = model.generate(ids, **how)
    assert torch.equal(torchweld.fuse(model).generate(ids, **how), expected)


@pytest.mark.parametrize("function", [torchweld.fuse, torchweld.unfuse])
def test_parameter_groups_of_the_trainer(function: Callable[..., Any], tmp_path: Path) -> None:
    """Which parameters decay is asked of classes and names: the same ones of a fused model."""
    found = []
    for model in (build("bert"), function(torchweld.fuse(build("bert")))):
        trainer = Trainer(model, TrainingArguments(output_dir=str(tmp_path), use_cpu=True))
        found.append(trainer.get_decay_parameter_names(model))
    assert found[0] == found[1]
