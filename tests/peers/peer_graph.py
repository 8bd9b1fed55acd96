"""fuse(by="graph") with transformers, peft and accelerate: each cell next to the unfused model."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import accelerate
import models
import peft
import pytest
import torch
from accelerate.state import AcceleratorState

import torchweld
from torchweld import numerics
from torchweld.fusion.graph.regions import Region

pytestmark = pytest.mark.filterwarnings("ignore")  # of the models


@pytest.fixture(autouse=True)
def _kernels() -> Iterator[None]:
    """Let the kernels serve small inputs too, with captures of their own for each test."""
    torch.compiler.reset()
    with torchweld.use_backend("cpu", "eager"):
        yield


def _make(name: str = "Llama") -> tuple[Any, Any]:
    """A fused model and the model."""
    end = "LMHeadModel" if name == "GPT2" else "ForCausalLM"
    model = models.make(name, end).train()
    return torchweld.fuse(copy.deepcopy(model), by="graph"), model


def _step(model: Any, **more: Any) -> dict[str, torch.Tensor]:
    model.zero_grad()
    torch.manual_seed(1)
    loss = model(**models.tokens() | more).loss
    loss.backward()
    grads = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    return {"loss": loss.detach(), **grads}


def _compare(got: dict[str, torch.Tensor], want: dict[str, torch.Tensor]) -> None:
    assert got.keys() == want.keys()
    for name, b in want.items():
        assert (got[name] - b).norm() <= 2e-5 * b.norm() + 1e-7, name


def _count(model: Any) -> int:
    kinds = {type(part) for part in model.modules() if isinstance(part, Region)}
    return sum(s.welds for kind in kinds for s in kind.weld_captures.slots.values() if not s.off)


@pytest.mark.parametrize("is_late", [False, True])
def test_lora(is_late: bool) -> None:
    """Adapted before or after it is fused."""
    config = peft.LoraConfig(target_modules=["q_proj", "down_proj"], init_lora_weights=False)
    model = models.make("Llama").train()
    torch.manual_seed(2)
    want = peft.get_peft_model(copy.deepcopy(model), config)
    torch.manual_seed(2)
    if is_late:
        got = peft.get_peft_model(model, config)
        torchweld.fuse(got, by="graph")
    else:
        got = peft.get_peft_model(torchweld.fuse(model, by="graph"), config)
    _compare(_step(got), _step(want))
    assert _count(got)
    for model in (got, want):
        model.merge_adapter()
    with torch.no_grad():
        a, b = (model(**models.tokens()).logits for model in (got, want))
    torch.testing.assert_close(a, b, **numerics.CHAINED_SMALL)


@pytest.mark.parametrize("name", ["Llama", "Qwen3", "GPT2"])
def test_masks_and_packed_sequences(name: str) -> None:
    got, want = _make(name)
    for part in (got, want):
        part.eval()  # GPT-2's dropout
    ids = models.tokens()["input_ids"]
    padded = torch.ones_like(ids)
    padded[1:, -5:] = 0
    positions = (torch.arange(ids.shape[1]) % 10).expand(ids.shape)
    packed = {"position_ids": positions, "use_cache": False}
    for more in ({}, {"attention_mask": torch.ones_like(ids)}, {"attention_mask": padded}, packed):
        _compare(_step(got, **more), _step(want, **more))
    assert _count(got)


@pytest.mark.parametrize("cache", [None, "static"])
def test_generate(cache: str | None) -> None:
    got, want = _make()
    prompt = models.tokens()["input_ids"][:2, :5]
    how = {"max_new_tokens": 6, "do_sample": False, "cache_implementation": cache}
    how |= {"disable_compile": True, "output_logits": True, "return_dict_in_generate": True}
    a, b = (model.eval().generate(prompt, **how) for model in (got, want))
    assert torch.equal(a.sequences, b.sequences)
    for x, y in zip(a.logits, b.logits, strict=True):
        torch.testing.assert_close(x, y, **numerics.CHAINED_SMALL)


def test_accelerate() -> None:
    got, want = _make()
    prepared = accelerate.Accelerator(cpu=True).prepare(got)
    _compare(_step(prepared), _step(want))
    assert _count(got)
    AcceleratorState._reset_state(True)


def test_offload() -> None:
    """accelerate's hooks replace forwards on the instances."""
    got, want = _make()
    accelerate.cpu_offload(got, torch.device("cpu"))
    with torch.no_grad():
        a, b = (model.eval()(**models.tokens()) for model in (got, want))
    torch.testing.assert_close(a.logits, b.logits, **numerics.CHAINED_SMALL)


def test_checkpointing() -> None:
    got, want = _make()
    for how in (True, False):
        for model in (got, want):
            model.gradient_checkpointing_enable({"use_reentrant": how})
        _compare(_step(got), _step(want))


def test_keep_graphs_on_a_cpu() -> None:
    """Without a GPU its calls run as they are."""
    got, want = _make()
    torchweld.keep_graphs(got)
    for _ in range(4):
        _compare(_step(got), _step(want))
