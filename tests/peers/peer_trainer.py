"""Fused models, optimizers and Offload in the HF Trainer, under accelerate, and with peft."""

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
from models import MODELS, batch, build, list_welds
from peft import LoraConfig, get_peft_model
from transformers import Adafactor, AutoModel, Trainer, TrainingArguments

import torchweld
from torchweld import numerics, optim
from torchweld.fusion.graph.regions import Region
from torchweld.ops.gemm import product
from torchweld.registry import processor

SETTINGS = {"lr": 3e-3, "weight_decay": 0.1}
STEPS = 12


@pytest.fixture(autouse=True)
def _kernels() -> Iterator[None]:
    """Let the kernels serve small inputs too; no test has another's graphs or accelerator."""
    torch.compiler.reset()
    with torchweld.use_backend("cpu", "eager"):
        yield
    AcceleratorState._reset_state(reset_partial_state=True)


@pytest.fixture
def without_units(monkeypatch: pytest.MonkeyPatch) -> None:
    """Take every CPU for one without 16-bit units."""
    monkeypatch.setattr(processor, "_find", lambda dtype: False)
    monkeypatch.setattr(product, "_SMALLEST", 0)


def _is_fused(model: torch.nn.Module) -> bool:
    return any(isinstance(module, Region) for module in model.modules())


def _examples() -> list[dict[str, torch.Tensor]]:
    ids = torch.randint(3, 35, (STEPS * 4, 16), generator=torch.Generator().manual_seed(5))
    return [{"input_ids": row, "labels": row} for row in ids]


def _train(
    model: Any, output: Path, kind: Any, settings: Any, resume: bool = False, **given: Any
) -> tuple[list[float], list[torch.Tensor]]:
    """The losses of a run of the Trainer, and its parameters; one may resume from the middle."""
    arguments = TrainingArguments(
        **{"output_dir": str(output), "num_train_epochs": 1, "logging_steps": 1},
        **{"report_to": [], "use_cpu": True, "disable_tqdm": True, "save_steps": STEPS // 2},
        **{"per_device_train_batch_size": 4} | given,
    )
    trainer = Trainer(
        model, arguments, train_dataset=_examples(), optimizer_cls_and_kwargs=(kind, settings)
    )
    saved = str(output / f"checkpoint-{STEPS // 2}") if resume else None
    trainer.train(resume_from_checkpoint=saved)
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    return losses, [p.detach().clone() for p in model.parameters()]


@pytest.mark.parametrize("state_dtype", [torch.float32, "8bit"])
def test_the_trainer(state_dtype: Any, tmp_path: Path) -> None:
    """Losses are torch's, and resuming from a checkpoint changes no bit."""
    ours = SETTINGS | {"state_dtype": state_dtype, "min_quantized_size": 1024}
    expected, _ = _train(build("Llama"), tmp_path / "theirs", torch.optim.AdamW, SETTINGS)
    found, _ = _train(build("Llama"), tmp_path / "ours", optim.AdamW, ours)
    assert len(found) == STEPS
    assert found[-1] < found[0]
    assert found == pytest.approx(expected, rel=1e-5 if state_dtype == torch.float32 else 1e-2)
    again, _ = _train(build("Llama"), tmp_path / "ours", optim.AdamW, ours, resume=True)
    assert again == found


@pytest.mark.parametrize("name", ["Llama", "GPT2"])
def test_a_fused_model_in_the_trainer(name: str, tmp_path: Path) -> None:
    """With torchweld's optimizer it has the losses of the plain model with torch's."""
    expected, _ = _train(build(name), tmp_path / "plain", torch.optim.AdamW, SETTINGS)
    fused = torchweld.fuse(build(name))
    found, _ = _train(fused, tmp_path / "fused", optim.AdamW, SETTINGS)
    assert len(found) == STEPS
    assert found == pytest.approx(expected, rel=1e-3)


@pytest.mark.parametrize("trainer_clips", [False, True])
def test_offload_in_the_trainer(trainer_clips: bool, tmp_path: Path) -> None:
    """The Trainer or Offload may clip; if Offload does, steps begin during the backward."""
    settings = SETTINGS | {"master_weights": True}
    given: dict[str, Any] = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2}
    given["max_grad_norm"] = 1.0 if trainer_clips else 0.0
    clips = {} if trainer_clips else {"max_grad_norm": 1.0}
    expected = _train(build("Llama"), tmp_path / "1", optim.AdamW, settings | clips, **given)
    ours = settings | {"threads": 1, "bucket_bytes": 100_000}
    if not trainer_clips:
        ours["clip_norm"] = 1.0
    for resume in (False, True):
        found = _train(build("Llama"), tmp_path / "2", optim.Offload, ours, resume, **given)
        assert found[0] == expected[0]
        assert all(torch.equal(a, b) for a, b in zip(found[1], expected[1], strict=True))


def test_accelerate_goes_on(tmp_path: Path) -> None:
    """A run that accelerate prepares, clips, saves and loads goes on with the same bits."""

    def make() -> tuple[Accelerator, torch.nn.Module, Any]:
        accelerator = Accelerator(cpu=True)
        model = build("Llama")
        optimizer = optim.AdamW(model.parameters(), 1e-3, state_dtype="8bit")
        return accelerator, *accelerator.prepare(model, optimizer)

    def train(parts: tuple[Accelerator, torch.nn.Module, Any], steps: range) -> None:
        accelerator, model, optimizer = parts
        for step in steps:
            optimizer.zero_grad()
            row = {key: value[None] for key, value in _examples()[step].items()}
            accelerator.backward(model(**row).loss)
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()

    first, second = make(), make()
    train(first, range(4))
    first[0].save_state(str(tmp_path))
    second[0].load_state(str(tmp_path))
    for parts in (first, second):
        train(parts, range(4, 8))
    torch.testing.assert_close([*first[1].parameters()], [*second[1].parameters()], **numerics.SAME)


def test_the_state_of_transformers_adafactor() -> None:
    """Ours loads it."""
    settings = {"lr": 1e-3, "relative_step": False, "beta1": 0.9}
    ours, theirs = build("Llama"), build("Llama")
    optimizer = Adafactor(theirs.parameters(), **settings)
    for row in _examples()[:3]:
        theirs(**{key: value[None] for key, value in row.items()}).loss.backward()
        optimizer.step()
    fresh = optim.TransformersAdafactor(ours.parameters(), **settings)
    fresh.load_state_dict(optimizer.state_dict())
    for p, q in zip(ours.parameters(), theirs.parameters(), strict=True):
        state, given = fresh.state[p], optimizer.state[q]
        names = state.keys() & given.keys() - {"step", "RMS"}
        assert "exp_avg" in names
        assert all(torch.equal(state[name], given[name]) for name in names)
        assert state["step"] == given["step"]


@pytest.mark.parametrize("fuse_first", [False, True])
def test_accelerate(fuse_first: bool) -> None:
    """fuse() before and after prepare(), whose autocast replaces the model's forward."""
    losses: list[list[float]] = []
    for fused in (False, True):
        accelerator = Accelerator(cpu=True, mixed_precision="bf16")
        model = build("GPT2")
        if fused and fuse_first:
            torchweld.fuse(model)
        optimizer = optim.AdamW(model.parameters(), 1e-3)
        model, optimizer = accelerator.prepare(model, optimizer)
        if fused and not fuse_first:
            torchweld.fuse(model)
        assert _is_fused(model) == fused
        losses.append([])
        for _ in range(8):
            optimizer.zero_grad()
            loss = model(**batch("GPT2")).loss
            accelerator.backward(loss)
            optimizer.step()
            losses[-1].append(float(loss.detach()))
    assert list_welds(model)["linear_act"] == 2
    assert losses[1] == pytest.approx(losses[0], rel=1e-2)


def test_offloaded_weights() -> None:
    """accelerate's hooks sit on the instances: fuse() follows them, and removing them leaves it."""
    model, given = build("Llama").eval(), batch("Llama")
    with torch.no_grad():
        expected = model(**given).logits
        cpu_offload(model, torch.device("cpu"))
        assert next(model.parameters()).is_meta
        torchweld.fuse(model)
        torch.testing.assert_close(model(**given).logits, expected, **numerics.CHAINED)
        remove_hook_from_submodules(model)
        assert not _is_fused(torchweld.unfuse(model))


@pytest.mark.filterwarnings("ignore::FutureWarning")  # peft's, of transformers
@pytest.mark.parametrize("targets", [["gate_proj", "down_proj"], ["q_proj"]])
def test_adapters_before_fuse(targets: list[str]) -> None:
    """LoRA's layers stay as they are, and the block around them is welded."""
    torch.manual_seed(0)
    config = LoraConfig(target_modules=targets, init_lora_weights=False, lora_dropout=0.0)
    model, given = get_peft_model(build("Llama"), config), batch("Llama")
    plain = copy.deepcopy(model)
    torchweld.fuse(model)
    results = []
    for found in (plain, model):
        loss = found(**given).loss
        trained = [p for p in found.parameters() if p.requires_grad]
        results.append([loss, *torch.autograd.grad(loss, trained)])
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(b, a, rtol=1e-4, atol=1e-6)
    assert list_welds(model)["gated_act"] == 2
    merged = [found.merge_and_unload().eval() for found in (plain, model)]
    for a, b in zip(*(found(**given).logits for found in merged), strict=True):
        torch.testing.assert_close(a, b, **numerics.CHAINED_SMALL)
    assert list_welds(merged[1])["gated_act"] == 2


@pytest.mark.filterwarnings("ignore::FutureWarning")  # peft's, of transformers
def test_adapters_of_a_fused_layer() -> None:
    """An adapted layer no longer computes its activation; once merged it does again."""
    config = LoraConfig(target_modules=["fc1"], init_lora_weights=False, lora_dropout=0.0)
    given, results, merged = batch("OPT"), [], []
    for fused in (False, True):
        model = build("OPT").eval()
        plain = model(**given).loss.detach()
        torch.manual_seed(0)
        if fused:
            torchweld.fuse(model)(**given)
            assert list_welds(model)["linear_act"] == 2
        adapted: Any = get_peft_model(model, config)
        loss = adapted(**given).loss
        trained = [p for p in adapted.parameters() if p.requires_grad]
        results.append([loss, *torch.autograd.grad(loss, trained)])
        assert (loss - plain).abs() > 0.01
        with torch.no_grad():
            merged.append(adapted.merge_and_unload()(**given).logits)
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(b, a, rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(merged[1], merged[0], **numerics.CHAINED_SMALL)


@pytest.mark.filterwarnings("ignore::FutureWarning")  # peft's, of transformers
@pytest.mark.parametrize("first", ["adapted", "fused"])
@pytest.mark.usefixtures("without_units")
def test_adapters_in_16_bits(first: str) -> None:
    """Layers that fuse() takes without units only: adapted before or after, and merged."""
    config = LoraConfig(target_modules=["q_proj"], init_lora_weights=False, lora_dropout=0.0)
    given, plain = batch("Llama"), build("Llama")
    model = plain if first == "adapted" else torchweld.fuse(copy.deepcopy(plain))
    found: list[Any] = []
    for each in (plain, model):
        torch.manual_seed(0)
        found.append(get_peft_model(copy.deepcopy(each), config))
    if first == "adapted":
        torchweld.fuse(found[1])
    found.append(copy.deepcopy(found[0]))
    results = []
    for each, dtype in zip(found, (torch.bfloat16, torch.bfloat16, None), strict=True):
        with torch.autocast("cpu", torch.bfloat16, enabled=dtype is not None):
            loss = each(**given).loss
        trained = [p for p in each.parameters() if p.requires_grad]
        results.append(torch.cat([g.flatten() for g in torch.autograd.grad(loss, trained)]))
    assert list_welds(found[1])["linear"]
    torchs, ours, exact = results
    assert 0 < (ours - exact).norm() <= 1.1 * (torchs - exact).norm()
    merged = [each.merge_and_unload() for each in found[:2]]
    a, b = (each(**given).logits for each in merged)
    torch.testing.assert_close(a, b, **numerics.CHAINED_SMALL)


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
        assert not _is_fused(loaded)
        results += [loaded(**given).logits, torchweld.fuse(loaded)(**given).logits]
    expected = model(**given).logits
    for found in results:
        torch.testing.assert_close(found, expected, **numerics.CHAINED_SMALL)
    base = AutoModel.from_pretrained(tmp_path / "fused")
    assert base.state_dict().keys()


@pytest.mark.parametrize("function", [torchweld.fuse, torchweld.unfuse])
def test_parameter_groups_of_the_trainer(function: Callable[..., Any], tmp_path: Path) -> None:
    """Which parameters decay is asked of classes and names: the same ones of a fused model."""
    found = []
    for model in (build("Bert"), function(torchweld.fuse(build("Bert")))):
        trainer = Trainer(model, TrainingArguments(output_dir=str(tmp_path), use_cpu=True))
        found.append(trainer.get_decay_parameter_names(model))
    assert found[0] == found[1]


def _adapted(block: torch.nn.Module, target: str) -> torch.nn.Module:
    torch.manual_seed(0)
    config = LoraConfig(target_modules=[target], init_lora_weights=False)
    return get_peft_model(torch.nn.Sequential(block), config)


@pytest.mark.parametrize("layer", ["up_proj", "gate_proj", "down_proj"])
def test_the_layers_of_a_block_are_adapted(layer: str) -> None:
    """The block calls them as torch.nn.Linear, so it follows what peft makes of them."""
    block = torchweld.nn.GatedMLP(32, 64)
    x = torch.randn(2048, 32)
    with torchweld.use_backend("cpu"):
        before = block(x)
        after = _adapted(block, layer)(x)
    assert not torch.allclose(before, after)
    expected = block.down_proj(torch.nn.functional.silu(block.gate_proj(x)) * block.up_proj(x))
    torch.testing.assert_close(after, expected)


def test_a_linear_layer_with_its_activation_is_refused() -> None:
    """LoRA would add to the result of the activation."""
    with pytest.raises(ValueError, match="not supported"):
        _adapted(torchweld.nn.MLP(32, 64), "fc1")
    block = torchweld.nn.MLP(32, 64)
    x = torch.randn(2048, 32)
    adapted = _adapted(block, "fc2")
    torch.testing.assert_close(adapted(x), block.fc2(block.fc1(x)))
