"""Experts of transformers' mixtures: by fuse(), and by experts_implementation="torchweld".

Every language model with stacked experts is made small: loss and gradients are compared with
float64, and what is generated with the eager model's.
"""

from __future__ import annotations

import copy
import importlib
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import models
import peft
import pytest
import torch
import transformers
from models import IS_TESTED_RELEASE, list_welds, tokens
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

import torchweld
from processes import processes
from torchweld import huggingface, optim
from torchweld.fusion.experts import find_form

HOW = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
pytestmark = pytest.mark.filterwarnings("ignore")
NEAR: dict[str, float] = {"rtol": 1e-8, "atol": 1e-10}  # of float64, whose sums have another order


def _build(name: str) -> Any:
    """A model in which routing and gates matter, with transformers' eager experts."""
    return _make_gates_matter(models.make(name))


def _make_gates_matter(model: Any) -> Any:
    for parameter in model.parameters():
        if parameter.ndim == 3:
            torch.nn.init.normal_(parameter, std=0.1)
    model.set_experts_implementation("eager")
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


def _assert_near(ours: Any, model: Any, generates: bool = True) -> None:
    """Errors against float64 at most twice eager's plus roundings; generated tokens are equal."""
    exact = copy.deepcopy(model).double()
    found, eager, truth = map(_find_results, (ours, model, exact))
    assert found.keys() == eager.keys() == truth.keys()
    scale = max(_rms(grad) for name, grad in truth.items() if name != "loss")
    for name, value in truth.items():
        allowed = 2 * _rms(eager[name] - value) + 4 * 2**-24 * max(scale, _rms(value))
        assert _rms(found[name] - value) <= allowed, name
    if generates and model.can_generate():
        prompt = torch.randint(3, 128, (2, 9), generator=torch.Generator().manual_seed(8))
        assert torch.equal(ours.generate(prompt, **HOW), model.generate(prompt, **HOW))


def _rms(t: torch.Tensor) -> float:
    return float(t.double().square().mean().sqrt())


@pytest.mark.parametrize("name", ["Mixtral", "Qwen3Moe", "Olmoe"])
def test_registered(name: str) -> None:
    model = _build(name)
    ours = copy.deepcopy(model)
    huggingface.register()
    ours.set_experts_implementation("torchweld")
    _assert_near(ours, model)


def _trains_under_fsdp(rank: int, way: str) -> None:
    """Two steps, each process with half of the batch; experts have a mesh of their own."""
    alone = _build("Mixtral").double().train()
    if way == "fuse":
        alone.set_experts_implementation("batched_mm")
        torchweld.fuse(alone)
    else:
        huggingface.register()
        alone.set_experts_implementation("torchweld")
    model = copy.deepcopy(alone)
    apart = init_device_mesh("cpu", (2, 1), mesh_dim_names=("copies", "experts"))
    for layer in model.model.layers:
        fully_shard(layer.mlp.experts, mesh=apart)
        fully_shard(layer)
    fully_shard(model)
    optimizers = [optim.AdamW(each.parameters(), lr=0.01) for each in (alone, model)]
    for _ in range(2):
        for own in (0, 1):
            rows = {name: t[2 * own : 2 * own + 2] for name, t in tokens().items()}
            (alone(**rows).loss / 2).backward()
            if own == rank:
                model(**rows).loss.backward()
        wanted = dict(alone.named_parameters())
        for name, p in model.named_parameters():
            torch.testing.assert_close(p.grad.full_tensor(), wanted[name].grad, **NEAR)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()


@pytest.mark.parametrize("way", ["fuse", "register"])
def test_fsdp(way: str) -> None:
    with processes(2) as two:
        two.run(None, _trains_under_fsdp, way)


@pytest.mark.parametrize(
    ("family", "cls", "form"),
    [
        ("gpt_oss", "GptOss", ("quick_gelu", "none", True, True, True, False, 7.0, 1.0)),
        ("deepseek_v4", "DeepseekV4", ("silu", "none", True, False, False, False, 10.0, 0.0)),
        ("nemotron_h", "NemotronH", ("relu2", "none", False, False, False, False, None, 0.0)),
        ("aria", "Aria", ("silu", "none", True, False, True, False, None, 0.0)),
    ],
)
def test_forms(family: str, cls: str, form: tuple[Any, ...]) -> None:
    """The forms of experts as large as in the default configuration, on fake memory."""
    module = getattr(transformers.models, family)
    experts = getattr(getattr(module, f"modeling_{family}"), f"{cls}Experts")
    wanted = [name for name in (f"{cls}Config", f"{cls}TextConfig") if hasattr(module, name)]
    config = getattr(module, wanted[-1])()
    with torch.device("meta"):
        assert find_form(experts(config)) == form


# Experts with stacked weights, and why no form of experts_mlp computes the same.
LEFT = {
    "DbrxExperts": "it has no down_proj and up_proj",
    "Inkling2Experts": "computes something else",
    "Inkling2LoopExperts": "computes something else",
    "InklingSharedExperts": "does not take its gate_proj",
    "Llama4TextExperts": "leaves no choice",
    "LongcatFlashExperts": "different numbers of experts",
    "MuseSparkExperts": "pass a norm",
    "Step3p7Experts": "leaves no choice",
}
# Its constructor takes more than a configuration; its experts are no blocks of their own.
NOT_BUILT = {"JetMoeParallelExperts"}
# Sizes without a default.
SIZES = {"num_experts": 4, "n_routed_experts": 4, "moe_intermediate_size": 32}


def _list_classes() -> Iterator[tuple[type[torch.nn.Module], list[Any]]]:
    """Every class of stacked experts, and the configurations of its family."""
    for path in sorted(Path(transformers.models.__file__).parent.glob("*/modeling_*.py")):
        names = re.findall(r"^class (\w*Experts)\(nn\.Module\)", path.read_text(), re.MULTILINE)
        if not names:
            continue
        family = f"transformers.models.{path.parent.name}"
        module = importlib.import_module(f"{family}.{path.stem}")
        settings = importlib.import_module(f"{family}.configuration_{path.parent.name}")
        own = [c for c in vars(settings).values() if isinstance(c, type)]
        configs = [c for c in own if c.__module__ == settings.__name__]
        for name in names:
            yield getattr(module, name), configs


def _build_experts(cls: Any, configs: list[Any]) -> Any:
    for make in configs:
        try:
            config = make()
            for name in SIZES:
                if getattr(config, name, None) is None:
                    setattr(config, name, SIZES[name])
            with torch.device("meta"):
                return cls(config)
        except Exception:
            continue
    return None


def test_every_class() -> None:
    """Each is served by a form that is proven, or left with a known reason."""
    served, not_built, left = [], set(), {}
    for cls, configs in _list_classes():
        experts = _build_experts(cls, configs)
        if experts is None:
            not_built.add(cls.__name__)
        elif isinstance(found := find_form(experts), str):
            left[cls.__name__] = found
        else:
            served.append(cls.__name__)
    print(f"served: {len(served)}, left: {left}, not built: {not_built}")
    assert not_built <= NOT_BUILT
    assert left.keys() == LEFT.keys()
    assert all(LEFT[name] in reason for name, reason in left.items())
    assert len(served) >= 60


def test_a_class_without_a_form_is_refused_by_name() -> None:
    config = transformers.MuseSparkTextConfig()
    config._experts_implementation = "torchweld"
    huggingface.register()
    with torch.device("meta"):
        experts = transformers.models.muse_spark.modeling_muse_spark.MuseSparkExperts(config)
    with pytest.raises(torchweld.ArgumentError, match="MuseSparkExperts: its experts' results"):
        experts(torch.randn(2, config.moe_hidden_size), torch.tensor([[0], [1]]), torch.ones(2, 1))


def test_lora_on_experts() -> None:
    """peft's adapters of stacked weights learn the same with the weld as without."""
    config = peft.LoraConfig(
        r=2, target_modules=[], target_parameters=["experts.gate_up_proj", "experts.down_proj"]
    )
    found = []
    for ours in (False, True):
        model = _build("Mixtral")
        if ours:
            model.set_experts_implementation("grouped_mm")
            torchweld.fuse(model)
        torch.manual_seed(3)
        adapted: Any = peft.get_peft_model(model, config)
        for name, parameter in adapted.named_parameters():
            if "lora_B" in name:
                torch.nn.init.normal_(parameter, std=0.1)
        adapted(**tokens()).loss.backward()
        found.append([p.grad for n, p in adapted.named_parameters() if "lora_" in n])
    assert found[0]
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-5)


@pytest.fixture(autouse=True)
def _graphs(own_graphs: None) -> None:
    """Graphs of each test's own."""


# --- Every model with stacked experts -------------------------------------------------------------

TESTED = pytest.mark.skipif(not IS_TESTED_RELEASE, reason="another release has other mixtures")
# Sizes in addition to models.py: every layer has experts.
MORE = {"first_k_dense_replace": 0, "num_dense_layers": 0, "num_key_value_heads": 4}
# Text models of families that have no class for language only.
PARTS = {
    "mistral4": "Mistral4ForCausalLM",
    "mistral_large4": "MistralLarge4TextModel",
    "qwen3_omni_moe": "Qwen3OmniMoeThinkerTextModel",
    "qwen3_vl_moe": "Qwen3VLMoeTextModel",
    "unlimited_ocr": "UnlimitedOcrTextModel",
}
# One of each kind of attention; each length of a text that grows is captured.
GENERATING = {"deepseek_v3", "gpt_oss", "mixtral", "qwen3_next"}
# Experts that no form computes: LEFT has the reasons. Their models are right anyway.
LEFT_MODELS = {"llama4_text", "longcat_flash"}
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
    names = models.list_names().items()
    return [kind for kind, name in names if _find_family(name) in families]


def _find_family(name: str) -> str:
    return str(getattr(transformers, name).__module__.split(".")[2])


KINDS = [*_list_kinds(), *PARTS] if IS_TESTED_RELEASE else []


def _build_kind(kind: str) -> Any:
    torch.manual_seed(0)
    if kind in PARTS:
        file = importlib.import_module(f"transformers.models.{kind}.modeling_{kind}")
        cls = getattr(file, PARTS[kind])
        config_class = cls.config_class
    else:
        cls, config_class = getattr(transformers, models.list_names()[kind]), CONFIG_MAPPING[kind]
    return _make_gates_matter(models.make_class(cls, config_class, MORE | models.OWN.get(kind, {})))


@TESTED
@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind not in NOT_SMALL])
def test_a_mixture(kind: str) -> None:
    model = _build_kind(kind)
    ours = copy.deepcopy(model)
    if kind not in LEFT_MODELS | NONE:
        ours.set_experts_implementation("grouped_mm")  # whose products a graph can hold
    _assert_near(torchweld.fuse(ours), model, kind in GENERATING)
    assert ("experts_mlp" in list_welds(ours)) == (kind not in LEFT_MODELS | NONE)


@TESTED
def test_what_is_left_is_known() -> None:
    """Every architecture with experts is in a test above or named with its reason."""
    tested = {*KINDS} - NOT_SMALL - LEFT_MODELS - NONE
    assert {*KINDS} >= LEFT_MODELS | NONE | NOT_SMALL
    assert len(tested) >= 50


@TESTED
def test_a_model_that_runs_small_now_is_tested() -> None:
    """Each model that is left out still does not run."""
    for kind in NOT_SMALL:
        with pytest.raises(Exception):  # noqa: B017, PT011 - of any package
            _find_results(_build_kind(kind).double())
