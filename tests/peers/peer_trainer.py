"""Our optimizers inside accelerate and the HF Trainer, and beside transformers' own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from transformers import Adafactor, LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

from torchweld import optim

U = 2.0**-24
STEPS = 12


def _llama() -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=64,
    )
    return LlamaForCausalLM(config)


def _batches() -> list[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(64, (STEPS * 4, 16), generator=generator)
    return [{"input_ids": row, "labels": row} for row in tokens]


def _train(output: Path, kind: Any, settings: dict[str, Any], resume: bool = False) -> list[float]:
    """The losses of a run of the Trainer; a resumed one goes on from its half."""
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
        _llama(), arguments, train_dataset=_batches(), optimizer_cls_and_kwargs=(kind, settings)
    )
    trainer.train(
        resume_from_checkpoint=str(output / f"checkpoint-{STEPS // 2}") if resume else None
    )
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


@pytest.mark.parametrize("state_dtype", [torch.float32, "8bit"])
def test_the_trainer(state_dtype: Any, tmp_path: Path) -> None:
    """torch's losses, and from a checkpoint the same bits as without."""
    settings = {"lr": 3e-3, "weight_decay": 0.1}
    ours = settings | {"state_dtype": state_dtype, "min_quantized_size": 1024}
    expected = _train(tmp_path / "theirs", torch.optim.AdamW, settings)
    found = _train(tmp_path / "ours", optim.AdamW, ours)
    assert len(found) == STEPS
    assert found[-1] < found[0]
    assert found == pytest.approx(expected, rel=1e-5 if state_dtype == torch.float32 else 1e-2)
    assert _train(tmp_path / "ours", optim.AdamW, ours, resume=True) == found


def test_accelerate(tmp_path: Path) -> None:
    """Prepared, clipped by accelerate, saved and loaded: the run goes on with the same bits."""

    def make() -> tuple[Accelerator, torch.nn.Module, Any]:
        accelerator = Accelerator(cpu=True)
        model = _llama()
        optimizer = optim.AdamW(model.parameters(), 1e-3, state_dtype="8bit")
        return accelerator, *accelerator.prepare(model, optimizer)

    def train(parts: tuple[Accelerator, torch.nn.Module, Any], steps: range) -> None:
        accelerator, model, optimizer = parts
        for step in steps:
            optimizer.zero_grad()
            batch = {key: value[None] for key, value in _batches()[step].items()}
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


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"warmup_init": True},
        {"lr": 1e-3, "relative_step": False, "scale_parameter": False, "beta1": 0.9},
        {"lr": 1e-3, "relative_step": False, "weight_decay": 0.1},
    ],
    ids=str,
)
def test_transformers_adafactor(settings: dict[str, Any]) -> None:
    """50 steps of a model, and its state: ours loads it and goes on."""
    ours, theirs = _llama(), _llama()
    optimizers = [
        optim.TransformersAdafactor(ours.parameters(), **settings),
        Adafactor(theirs.parameters(), **settings),
    ]

    def step(model: torch.nn.Module, at: int) -> None:
        batch = {key: value[None] for key, value in _batches()[at % STEPS].items()}
        model(**batch).loss.backward()

    for at in range(50):
        step(theirs, at)
        for p, q in zip(ours.parameters(), theirs.parameters(), strict=True):
            p.grad = q.grad
        for optimizer in optimizers:
            optimizer.step()
        theirs.zero_grad()
    start = _llama()
    for p, q, before in zip(
        ours.parameters(), theirs.parameters(), start.parameters(), strict=True
    ):
        # A step rounds the parameter twice, and what it moves it by some ten times.
        assert (p - q).norm() <= 50 * 2 * U * q.norm() + 1e-5 * (q - before).norm()
    fresh = optim.TransformersAdafactor(ours.parameters(), **settings)
    fresh.load_state_dict(optimizers[1].state_dict())
    for p, q in zip(ours.parameters(), theirs.parameters(), strict=True):
        state, given = fresh.state[p], optimizers[1].state[q]
        for name in state.keys() & given.keys() - {"step", "RMS"}:
            assert torch.equal(state[name], given[name])
        assert state["step"] == given["step"]
