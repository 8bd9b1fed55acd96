"""Offload in the HF Trainer and accelerate changes no loss and no bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from language_model import STEPS, batches, llama
from transformers import Trainer, TrainingArguments

from torchweld import optim


def _train(
    output: Path, kind: Any, settings: dict[str, Any], clip: float, resume: bool = False
) -> tuple[list[float], list[torch.Tensor]]:
    arguments = TrainingArguments(
        output_dir=str(output),
        per_device_train_batch_size=2,
        gradient_accumulation_steps=2,
        num_train_epochs=1,
        logging_steps=1,
        save_steps=STEPS // 2,
        max_grad_norm=clip,
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
    )
    model = llama()
    trainer = Trainer(
        model, arguments, train_dataset=batches(), optimizer_cls_and_kwargs=(kind, settings)
    )
    saved = str(output / f"checkpoint-{STEPS // 2}") if resume else None
    trainer.train(resume_from_checkpoint=saved)
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    return losses, [p.detach().clone() for p in model.parameters()]


@pytest.mark.parametrize("trainer_clips", [False, True])
def test_the_trainer(trainer_clips: bool, tmp_path: Path) -> None:
    """The Trainer or Offload may clip; if Offload does, steps begin during the backward."""
    settings = {"lr": 3e-3, "weight_decay": 0.1, "master_weights": True}
    clips = {} if trainer_clips else {"max_grad_norm": 1.0}
    clip = 1.0 if trainer_clips else 0.0
    expected = _train(tmp_path / "given", optim.AdamW, settings | clips, clip)
    ours = settings | {"threads": 1, "bucket_bytes": 100_000}
    if not trainer_clips:
        ours["clip_norm"] = 1.0
    found = _train(tmp_path / "ours", optim.Offload, ours, clip)
    assert found[0] == expected[0]
    assert all(torch.equal(a, b) for a, b in zip(found[1], expected[1], strict=True))
    resumed = _train(tmp_path / "ours", optim.Offload, ours, clip, resume=True)
    assert resumed[0] == found[0]
    assert all(torch.equal(a, b) for a, b in zip(resumed[1], found[1], strict=True))
