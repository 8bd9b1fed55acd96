"""Models that transformers builds fused by its patch mapping, and models after other swaps."""

from __future__ import annotations

import copy
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import peer_fuse
import pytest
import torch
import transformers
from models import build, tokens
from transformers import AutoModelForCausalLM, LlamaForCausalLM
from transformers.models.llama import modeling_llama

import torchweld
from conftest import running_at
from selection import TRITON, TRITON_DEVICE
from torchweld import huggingface, numerics
from torchweld.errors import ArgumentError
from torchweld.fusion.weld import Weld

pytestmark = pytest.mark.skipif(
    not hasattr(transformers, "monkey_patching")
    and not Path(transformers.__file__).with_name("monkey_patching.py").exists(),
    reason="an older transformers has no patch mapping",
)
NAMES = ("Llama", "Qwen3", "Gemma3", "Olmo2", "GptOss")


@pytest.fixture(autouse=True)
def _kernels() -> Iterator[None]:
    """Let our kernels serve small inputs too."""
    with torchweld.use_backend("cpu", "eager"):
        yield


def _is_fused(model: torch.nn.Module) -> bool:
    return any(isinstance(module, Weld) for module in model.modules())


def _list_welds(model: torch.nn.Module) -> Counter[str]:
    """What the calls became that were captured."""
    rows = torchweld.explain_fusion(model)
    return Counter(row.becomes for row in rows if row.welded)


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("name", NAMES)
def test_built_fused(name: str, compiled: bool, tmp_path: Path) -> None:
    """Loss and gradients in training against float64; saved, loaded without us, fused again."""
    plain, given = build(name).train(), tokens()
    plain.save_pretrained(tmp_path)
    with huggingface.patch(str(tmp_path)) as mapping:
        model = AutoModelForCausalLM.from_pretrained(tmp_path).train()
    assert mapping
    assert _is_fused(model)
    for each in (plain, model):
        if hasattr(each.config, "num_local_experts"):
            each.set_experts_implementation("batched_mm" if compiled else "eager")
    found = peer_fuse._results(plain, given)
    truth = peer_fuse._results(copy.deepcopy(plain).double(), given)
    ran: Any = torch.compile(model, backend="aot_eager") if compiled else model
    peer_fuse._agree(peer_fuse._results(ran, given), found, truth)
    if compiled:
        return
    welds = _list_welds(model)
    assert welds["rms_norm"] + welds["dropout_add_rms_norm"] >= 4
    model.save_pretrained(tmp_path / "fused")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "fused")
    assert not _is_fused(loaded)
    assert loaded.state_dict().keys() == plain.state_dict().keys()
    assert all(map(torch.equal, loaded.parameters(), plain.parameters()))
    # What is outside of layers is left for fuse.
    peer_fuse._agree(peer_fuse._results(torchweld.fuse(model), given), found, truth)
    assert "linear_cross_entropy" in _list_welds(model)


@pytest.mark.parametrize("name", NAMES)
def test_built_fused_for_cuda(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Loss and gradients by the kernels of Triton: on a GPU, or in the interpreter."""
    plain, given = build(name).train(), tokens(1)
    with huggingface.patch(plain.config):
        model: Any = AutoModelForCausalLM.from_config(plain.config).train()
    model.load_state_dict(plain.state_dict())
    if hasattr(model.config, "num_local_experts"):
        model.set_experts_implementation("eager")
    found = peer_fuse._results(plain, given)
    truth = peer_fuse._results(copy.deepcopy(plain).double(), given)
    with running_at(TRITON, monkeypatch):
        moved = {key: value.to(TRITON_DEVICE) for key, value in given.items()}
        mine = peer_fuse._results(model.to(TRITON_DEVICE), moved)
    peer_fuse._agree([each.to("cpu") for each in mine], found, truth)


def test_on_meta_and_after_the_context() -> None:
    """Classes, and what transformers records of models, are as before."""
    config, recorded = build("Llama").config, transformers.LlamaModel._can_record_outputs
    before = dict(recorded)
    with torch.device("meta"), huggingface.patch(config, LlamaForCausalLM):
        assert AutoModelForCausalLM.from_config(config).device.type == "meta"
        assert dict(recorded) != before
    assert dict(recorded) == before
    assert not _is_fused(AutoModelForCausalLM.from_config(config))


def test_a_constructor_that_fails_leaves_no_class_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers restores its files only after a constructor that returns."""
    config = build("Llama").config

    def fail(*args: Any) -> None:
        raise ValueError("full")

    with huggingface.patch(config):
        monkeypatch.setattr(modeling_llama.LlamaMLP, "__init__", fail)
        with pytest.raises(ValueError, match="full"):
            AutoModelForCausalLM.from_config(config)
        assert issubclass(modeling_llama.LlamaDecoderLayer, Weld)
    monkeypatch.undo()
    assert not issubclass(modeling_llama.LlamaDecoderLayer, Weld)
    plain = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    assert len(plain(**tokens(), output_attentions=True).attentions) == 2


def test_unfuse_restores_a_model_that_was_built_fused() -> None:
    config = build("Llama").config
    with huggingface.patch(config):
        model = AutoModelForCausalLM.from_config(config)
    torchweld.unfuse(model)
    assert {type(m) for m in model.modules()} == {type(m) for m in build("Llama").modules()}


def test_errors(monkeypatch: pytest.MonkeyPatch) -> None:
    with (
        pytest.raises(ArgumentError, match="patch: model is a int; accepted: a config"),
        huggingface.patch(3),
    ):
        pass
    monkeypatch.setitem(sys.modules, "transformers.monkey_patching", None)
    with (
        pytest.raises(ImportError, match=r"patch: transformers is .*; accepted: a release with"),
        huggingface.patch(build("Llama").config),
    ):
        pass


# --- Other swaps ----------------------------------------------------------------------------------


def test_the_fused_classes_of_transformers() -> None:
    """A fusion of several modules by transformers: one child does it all, others are identities.

    fuse leaves that child alone and welds the rest.
    """
    from transformers.integrations.hub_kernels import make_parent_class_for_kernel_fusion

    class NormThenMLP(torch.nn.Module):
        def __init__(self, norm: Any, mlp: Any) -> None:
            super().__init__()
            self.norm, self.mlp = norm, mlp

        def forward(self, x: torch.Tensor) -> Any:
            return self.mlp(self.norm(x))

    layer = modeling_llama.LlamaDecoderLayer
    children = ["post_attention_layernorm", "mlp"]
    fused_layer = make_parent_class_for_kernel_fusion(layer, children, NormThenMLP)
    config, given = build("Llama").config, tokens()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(modeling_llama, "LlamaDecoderLayer", fused_layer)
        torch.manual_seed(0)
        model = LlamaForCausalLM(config).train()
    assert type(model.model.layers[0]).__name__ == "FusedLlamaDecoderLayer"
    plain = peer_fuse._results(model, given)
    truth = peer_fuse._results(copy.deepcopy(model).double(), given)
    torchweld.fuse(model)
    peer_fuse._agree(peer_fuse._results(model, given), plain, truth)
    found = _list_welds(model)
    assert found["rms_norm"] + found["dropout_add_rms_norm"] == 5
    assert found["gated_act"] == found["rotary_embedding_qk"] == 2


def test_forwards_that_others_put_on_instances() -> None:
    """Such as Liger's: they run, and what they compute counts."""

    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        return 2 * torch.nn.functional.rms_norm(x, x.shape[-1:], self.weight, self.variance_epsilon)

    model = build("Llama").train()
    model.model.norm.forward = forward.__get__(model.model.norm)
    expected = peer_fuse._results(copy.deepcopy(model), tokens())
    torch.testing.assert_close(
        peer_fuse._results(torchweld.fuse(model), tokens()),
        expected,
        **numerics.CHAINED_SMALL,
    )
    assert _list_welds(model)["rms_norm"]
