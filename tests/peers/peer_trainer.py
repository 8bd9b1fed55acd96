"""Our optimizers in accelerate and the HF Trainer, and against transformers' own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from language_model import STEPS, batches, llama
from transformers import Adafactor, Trainer, TrainingArguments

from torchweld import optim


def _train(output: Path, kind: Any, settings: dict[str, Any], resume: bool = False) -> list[float]:
    """The losses of a run of the Trainer; a resumed run starts from the middle."""
    arguments = TrainingArguments(
        output_dir=str(output),
        per_device_train_batch_size=4,
        num_train_epochs=1,
        logging_steps=1,
        save_steps=STEPS // 2,
        max_grad_norm=1.0,
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
    )
    trainer = Trainer(
        llama(), arguments, train_dataset=batches(), optimizer_cls_and_kwargs=(kind, settings)
    )
    trainer.train(
        resume_from_checkpoint=str(output / f"checkpoint-{STEPS // 2}") if resume else None
    )
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


@pytest.mark.parametrize("state_dtype", [torch.float32, "8bit"])
def test_the_trainer(state_dtype: Any, tmp_path: Path) -> None:
    """Losses are torch's, and resuming from a checkpoint changes no bit."""
    settings = {"lr": 3e-3, "weight_decay": 0.1}
    ours = settings | {"state_dtype": state_dtype, "min_quantized_size": 1024}
    expected = _train(tmp_path / "theirs", torch.optim.AdamW, settings)
    found = _train(tmp_path / "ours", optim.AdamW, ours)
    assert len(found) == STEPS
    assert found[-1] < found[0]
    assert found == pytest.approx(expected, rel=1e-5 if state_dtype == torch.float32 else 1e-2)
    assert _train(tmp_path / "ours", optim.AdamW, ours, resume=True) == found


def test_accelerate(tmp_path: Path) -> None:
    """A run that accelerate prepares, clips, saves and loads goes on with the same bits."""

    def make() -> tuple[Accelerator, torch.nn.Module, Any]:
        accelerator = Accelerator(cpu=True)
        model = llama()
        optimizer = optim.AdamW(model.parameters(), 1e-3, state_dtype="8bit")
        return accelerator, *accelerator.prepare(model, optimizer)

    def train(parts: tuple[Accelerator, torch.nn.Module, Any], steps: range) -> None:
        accelerator, model, optimizer = parts
        for step in steps:
            optimizer.zero_grad()
            batch = {key: value[None] for key, value in batches()[step].items()}
            accelerator.backward(model(**batch).loss)
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()

    first, second = make(), make()
    train(first, range(4))
    first[0].save_state(str(tmp_path))
    second[0].load_state(str(tmp_path))
    for parts in (first, second):
        train(parts, range(4, 8))
    for p, q in zip(first[1].parameters(), second[1].parameters(), strict=True):
        assert torch.equal(p, q)


def test_the_state_of_transformers_adafactor() -> None:
    """Ours loads it."""
    settings = {"lr": 1e-3, "relative_step": False, "beta1": 0.9}
    ours, theirs = llama(), llama()
    optimizer = Adafactor(theirs.parameters(), **settings)
    for batch in batches()[:3]:
        theirs(**{key: value[None] for key, value in batch.items()}).loss.backward()
        optimizer.step()
    fresh = optim.TransformersAdafactor(ours.parameters(), **settings)
    fresh.load_state_dict(optimizer.state_dict())
    for p, q in zip(ours.parameters(), theirs.parameters(), strict=True):
        state, given = fresh.state[p], optimizer.state[q]
        names = state.keys() & given.keys() - {"step", "RMS"}
        assert "exp_avg" in names
        assert all(torch.equal(state[name], given[name]) for name in names)
        assert state["step"] == given["step"]
