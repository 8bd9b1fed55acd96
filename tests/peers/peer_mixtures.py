"""Every language model of transformers with stacked experts, made small, after fuse().

Loss and gradients are compared with float64, and what is generated with the eager model's.
"""

from __future__ import annotations

import copy
import importlib
import re
from pathlib import Path
from typing import Any

import architectures
import pytest
import torch
import transformers
from small_models import IS_TESTED_RELEASE
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

import torchweld
from torchweld.fusion.patterns.experts import Experts

pytestmark = [
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.skipif(not IS_TESTED_RELEASE, reason="another release has other mixtures"),
]
HOW = {"max_new_tokens": 4, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
# Sizes in addition to architectures.py: every layer has experts.
MORE = {"first_k_dense_replace": 0, "num_dense_layers": 0, "num_key_value_heads": 4}
_LATENT = {"head_dim": 8, "n_group": 2, "topk_group": 1}
_LAYERS = {"layer_types": ["linear_attention", "full_attention"]}
OWN: dict[str, dict[str, Any]] = {
    **dict.fromkeys(("axk1", "deepseek_v3", "deepseek_v32"), _LATENT),
    **dict.fromkeys(("kimi_linear", "qwen3_5_moe_text", "qwen3_next"), _LAYERS),
    "bailing_hybrid": _LAYERS | {"n_group": 2, "topk_group": 1},
    "dots1": {"n_shared_experts": 1},
    "granitemoehybrid": {"layer_types": ["mamba", "attention"]},
    "jamba": {
        **{"attn_layer_period": 2, "attn_layer_offset": 1},
        **{"expert_layer_period": 1, "expert_layer_offset": 0},
    },
    "longcat_flash": {"head_dim": 8},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"]},
    "zaya": {"num_experts_per_tok": 1},
}
# Text models of families that have no class for language only.
PARTS = {
    "mistral4": "Mistral4ForCausalLM",
    "mistral_large4": "MistralLarge4TextModel",
    "qwen3_omni_moe": "Qwen3OmniMoeThinkerTextModel",
    "qwen3_vl_moe": "Qwen3VLMoeTextModel",
    "unlimited_ocr": "UnlimitedOcrTextModel",
}
# Experts that no form computes: peer_experts.py has the reasons. Their models are right anyway.
LEFT = {"llama4_text", "longcat_flash"}
# Models without stacked experts, in files that have a class of them.
NONE = {"beam", "flint", "jetmoe"}
# What does not run small in transformers itself: configurations that need many sizes that belong
# together, or no float64 or no head.
NOT_SMALL = {
    *("dbrx", "dots3_note", "dots3_note_text", "gemma4", "gemma4_text", "inkling2_loop_text"),
    *("inkling2_text", "llama4", "mimo_v2_flash", "qwen3_5_moe", "qwen4_exp"),
    "qwen4_exp_text",
}


def _list_kinds() -> list[str]:
    """The architectures whose source has a class of experts."""
    folder = Path(transformers.models.__file__).parent
    written = re.compile(r"^class \w*Experts\(nn\.Module\)", re.MULTILINE)
    paths = folder.glob("*/modeling_*.py")
    families = {path.parent.name for path in paths if written.search(path.read_text())}
    names = architectures.list_names().items()
    return [kind for kind, name in names if _find_family(name) in families]


def _find_family(name: str) -> str:
    return str(getattr(transformers, name).__module__.split(".")[2])


KINDS = [*_list_kinds(), *PARTS] if IS_TESTED_RELEASE else []


def _build(kind: str) -> Any:
    """A model in which routing and gates matter, with transformers' eager experts."""
    torch.manual_seed(0)
    sizes = MORE | OWN.get(kind, {})
    if kind in PARTS:
        file = importlib.import_module(f"transformers.models.{kind}.modeling_{kind}")
        part = getattr(file, PARTS[kind])
        model: Any = architectures.make_class(part, part.config_class, sizes)
    else:
        names = architectures.list_names()
        config_class = CONFIG_MAPPING[kind]
        model = architectures.make_class(getattr(transformers, names[kind]), config_class, sizes)
    model.set_experts_implementation("eager")
    for parameter in model.parameters():
        if parameter.ndim == 3:
            torch.nn.init.normal_(parameter, std=0.1)
    return model.eval()


def _find_results(model: Any) -> dict[str, torch.Tensor]:
    """The loss and every gradient; without a head, the loss is made up."""
    ids = torch.randint(3, 128, (2, 24), generator=torch.Generator().manual_seed(7))
    if model.can_generate():
        loss = model(input_ids=ids, labels=ids).loss
    else:
        hidden = model(input_ids=ids).last_hidden_state
        heads = torch.randn(hidden.shape, generator=torch.Generator().manual_seed(9))
        loss = (hidden - heads.to(hidden.dtype)).square().mean()  # a sum that does not cancel
    loss.backward()
    grads = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    return {"loss": loss.detach(), **grads}


def _rms(t: torch.Tensor) -> float:
    return float(t.double().square().mean().sqrt())


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind not in NOT_SMALL])
def test_a_mixture(kind: str) -> None:
    """Errors against float64 at most twice eager's, and roundings of the largest gradient."""
    model = _build(kind)
    ours, exact = torchweld.fuse(copy.deepcopy(model)), copy.deepcopy(model).double()
    welded = sum(isinstance(module, Experts) for module in ours.modules())
    assert (welded > 0) == (kind not in LEFT | NONE)
    found, eager, truth = map(_find_results, (ours, model, exact))
    assert found.keys() == eager.keys() == truth.keys()
    scale = max(_rms(grad) for name, grad in truth.items() if name != "loss")
    for name, value in truth.items():
        allowed = 2 * _rms(eager[name] - value) + 4 * 2**-24 * max(scale, _rms(value))
        assert _rms(found[name] - value) <= allowed, name
    if model.can_generate():
        prompt = torch.randint(3, 128, (2, 9), generator=torch.Generator().manual_seed(8))
        assert torch.equal(ours.generate(prompt, **HOW), model.generate(prompt, **HOW))


def test_what_is_left_is_known() -> None:
    """Every architecture with experts is in a test above or named with its reason."""
    tested = {*KINDS} - NOT_SMALL - LEFT - NONE
    print(f"{len(tested)} mixtures are fused, {sorted(LEFT)} are left, {sorted(NOT_SMALL)} not run")
    assert {*KINDS} >= LEFT | NONE | NOT_SMALL
    assert len(tested) >= 50


def test_a_model_that_runs_small_now_is_tested() -> None:
    """Each model that is left out still does not run."""
    for kind in NOT_SMALL:
        with pytest.raises(Exception):  # noqa: B017, PT011 - of any package
            _find_results(_build(kind).double())
