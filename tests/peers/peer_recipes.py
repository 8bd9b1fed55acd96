"""The recipes of docs/integrations.md: what they compute, where peer_docs.py only runs them."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lightning
import models
import peer_fuse
import pytest
import torch
from models import build, tokens
from transformers import DataCollatorWithFlattening, Trainer, TrainingArguments

import torchweld
from torchweld import huggingface, numerics, optim, sparse

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture(autouse=True)
def _kernels() -> Iterator[None]:
    """Let our kernels serve small inputs too."""
    huggingface.register()
    with torchweld.use_backend("cpu", "eager"):
        yield


def _set_sparse(model: Any) -> Any:
    model.set_attn_implementation("torchweld_sparse")
    huggingface.set_layout(model, sparse.BlockLayout.dense)
    return model


def test_packed_sequences_do_not_leak_where_sdpa_does() -> None:
    """Each sequence's logits and the loss's gradients are the sequence's own."""
    model, lengths = build("Llama"), (9, 5, 12)
    generator = torch.Generator().manual_seed(0)
    texts = [torch.randint(3, 128, (n,), generator=generator) for n in lengths]
    batch = DataCollatorWithFlattening()([{"input_ids": text.tolist()} for text in texts])
    alone = torch.cat([model(input_ids=text[None]).logits[0] for text in texts])
    leaks = model(**batch).logits[0]  # the model's own default has a cache
    assert (leaks - alone)[lengths[0] :].abs().max() > 0.1
    packed = _set_sparse(copy.deepcopy(model))(**batch, use_cache=False)
    torch.testing.assert_close(packed.logits[0], alone, **numerics.CHAINED_SMALL)
    rows = [
        torch.nn.functional.cross_entropy(a[:-1], t[1:], reduction="sum")
        for a, t in zip(alone.split(lengths), texts, strict=True)
    ]
    expected = torch.stack(rows).sum() / (sum(lengths) - len(lengths))
    torch.testing.assert_close(packed.loss, expected)


def test_muon_by_groups_in_the_trainer(tmp_path: Path) -> None:
    """The Trainer's five steps are a loop's."""
    rows = [{"input_ids": row, "labels": row} for row in tokens(20)["input_ids"]]

    def groups(model: Any) -> Any:
        return optim.muon_groups(model, lr=1e-3, verbose=False)

    model, plain = torchweld.fuse(build("Llama")), torchweld.fuse(build("Llama"))
    how: dict[str, Any] = {"max_grad_norm": 0.0, "lr_scheduler_type": "constant", "max_steps": 5}
    how |= {
        "report_to": "none",
        "use_cpu": True,
        "per_device_train_batch_size": 4,
        "save_steps": 99,
    }
    how["logging_steps"] = 1
    trainer = Trainer(
        model,
        TrainingArguments(output_dir=str(tmp_path), learning_rate=0.02, **how),
        train_dataset=rows,
        optimizer_cls_and_kwargs=(optim.Muon, {"params": groups(model), "lr": 0.02}),
    )
    seen: list[torch.Tensor] = []
    model.register_forward_pre_hook(
        lambda _, args, given: seen.append(given["input_ids"]), with_kwargs=True
    )
    trainer.train()
    optimizer = optim.Muon(groups(plain), lr=0.02)
    losses = []
    for ids in seen:
        loss = plain(input_ids=ids, labels=ids).loss
        losses.append(float(loss.detach()))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    assert len(seen) == 5
    trained: Any = trainer.optimizer
    assert type(trained.optimizer) is optim.Muon
    assert len(trained.param_groups) == len(groups(plain)) > 1
    found = [row["loss"] for row in trainer.state.log_history if "loss" in row]
    # Adam's first steps have the sign of gradients that are zero but for rounding.
    assert found == pytest.approx(losses, rel=1e-3)


def test_the_sinks_of_gpt_oss_are_trained() -> None:
    """Loss and all gradients, the sinks' among them, against eager attention in float64."""
    size = {"sliding_window": 64}  # more than the text: a layout replaces the window
    plain, given = models.make("GptOss", **size).train(), tokens()
    plain.set_experts_implementation("eager")
    plain.set_attn_implementation("eager")
    truth = peer_fuse._results(copy.deepcopy(plain).double(), given)
    expected = peer_fuse._results(plain, given)
    model = _set_sparse(models.make("GptOss", **size).train())
    found = peer_fuse._results(torchweld.fuse(model), {**given, "use_cache": False})
    names = [name for name, _ in model.named_parameters()]
    sinks = [at for at, name in enumerate(names) if name.endswith("sinks")]
    assert len(sinks) == 2
    assert all(bool(found[2 + at].abs().max() > 0) for at in sinks)
    peer_fuse._agree(found, expected, truth)
    before = model.model.layers[0].self_attn.sinks.detach().clone()
    losses = peer_fuse._losses(model, {**given, "use_cache": False})
    assert losses == pytest.approx(peer_fuse._losses(plain, given), rel=1e-3)
    assert not torch.equal(model.model.layers[0].self_attn.sinks, before)


class _Language(lightning.LightningModule):
    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model
        self.losses: list[float] = []

    def training_step(self, ids: torch.Tensor, _: int) -> torch.Tensor:
        loss: torch.Tensor = self.model(input_ids=ids, labels=ids).loss
        self.losses.append(float(loss.detach()))
        return loss

    def configure_optimizers(self) -> Any:
        return optim.AdamW(self.parameters(), lr=1e-3)


def test_lightning() -> None:
    """Five steps of a fused model lose what the unfused one does."""
    found = []
    for model in (build("Llama"), torchweld.fuse(build("Llama"))):
        loader: Any = torch.utils.data.DataLoader(tokens(20)["input_ids"], batch_size=4)
        quiet: dict[str, Any] = {"logger": False, "enable_checkpointing": False}
        quiet |= {"enable_progress_bar": False, "enable_model_summary": False}
        language = _Language(model)
        lightning.Trainer(max_steps=5, accelerator="cpu", **quiet).fit(language, loader)
        found.append(language.losses)
    assert len(found[0]) == 5
    assert found[1] == pytest.approx(found[0], rel=1e-4)
