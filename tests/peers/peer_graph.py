"""fuse() with transformers, peft and accelerate: each cell next to the unfused model."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterator
from typing import Any

import accelerate
import bitsandbytes
import models
import peft
import pytest
import torch
import torchao
from accelerate.state import AcceleratorState

import torchweld
from torchweld import numerics

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
    return torchweld.fuse(copy.deepcopy(model)), model


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


_LORA = {"init_lora_weights": False, "lora_dropout": 0.0}
# Adapters of peft, and what moves their weights from where they begin, which changes nothing.
ADAPTERS: dict[str, Callable[..., Any]] = {
    "LoRA": functools.partial(peft.LoraConfig, **_LORA),
    "DoRA": functools.partial(peft.LoraConfig, **_LORA, use_dora=True),
    "rsLoRA": functools.partial(peft.LoraConfig, **_LORA, use_rslora=True),
    "LoHa": functools.partial(peft.LoHaConfig, init_weights=False),
    "LoKr": functools.partial(peft.LoKrConfig, init_weights=False),
    "OFT": functools.partial(peft.OFTConfig, oft_block_size=8, init_weights=False),
    "HRA": functools.partial(peft.HRAConfig, init_weights=False),
    "VeRA": functools.partial(peft.VeraConfig, init_weights=False),
    "IA3": functools.partial(peft.IA3Config, feedforward_modules=[], init_ia3_weights=False),
    "AdaLoRA": functools.partial(peft.AdaLoraConfig, total_step=9, init_lora_weights=False),
}


@pytest.mark.parametrize("is_late", [False, True])
@pytest.mark.parametrize("adapter", ADAPTERS)
def test_adapters(adapter: str, is_late: bool) -> None:
    """Adapted before or after the model is fused; then merged."""
    config = ADAPTERS[adapter](target_modules=["q_proj", "o_proj"])
    model = models.make("Llama").train()
    torch.manual_seed(2)
    want = peft.get_peft_model(copy.deepcopy(model), config)
    torch.manual_seed(2)
    if is_late:
        got = peft.get_peft_model(model, config)
        torchweld.fuse(got)
    else:
        got = peft.get_peft_model(torchweld.fuse(model), config)
    _compare(_step(got), _step(want))
    assert models.list_welds(got)
    for model in (got, want):
        model.merge_adapter()
    with torch.no_grad():
        a, b = (model(**models.tokens()).logits for model in (got, want))
    torch.testing.assert_close(a, b, **numerics.CHAINED_SMALL)


def _to_8_bits(model: Any) -> None:
    torchao.quantization.quantize_(model, torchao.quantization.Int8WeightOnlyConfig())


def _to_bitsandbytes(model: Any) -> None:
    """Its layers of 8 and of 4 bits, which compute on the CPU too."""
    for layer in model.model.layers:
        for name, kind in (("gate_proj", "8"), ("up_proj", "4")):
            plain = getattr(layer.mlp, name)
            made: Any = {"8": bitsandbytes.nn.Linear8bitLt, "4": bitsandbytes.nn.LinearNF4}[kind](
                plain.in_features, plain.out_features, bias=False
            )
            made.load_state_dict(plain.state_dict())
            setattr(layer.mlp, name, made.to("cpu"))


_QUANTIZE: dict[str, Callable[[Any], None]] = {
    "torchao": _to_8_bits,
    "bitsandbytes": _to_bitsandbytes,
}


@pytest.mark.parametrize("is_late", [False, True])
@pytest.mark.parametrize("quantize", _QUANTIZE)
def test_quantised_layers(quantize: str, is_late: bool) -> None:
    """Quantised before or after the model is fused: in training of the rest and in evaluation."""
    want = models.make("Llama").train()
    got = copy.deepcopy(want)
    if not is_late:
        torchweld.fuse(got)
        _step(got)
    for model in (got, want):
        _QUANTIZE[quantize](model)
        for name, p in model.named_parameters():
            p.requires_grad_("norm" in name)
    if is_late:
        torchweld.fuse(got)
    _compare(_step(got), _step(want))
    assert models.list_welds(got)
    with torch.no_grad():
        a, b = (model.eval()(**models.tokens()).logits for model in (got, want))
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
    assert models.list_welds(got)


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
    assert models.list_welds(got)
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
