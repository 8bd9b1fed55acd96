"""Experts of transformers' mixtures: by fuse(), and by experts_implementation="torchweld"."""

from __future__ import annotations

import copy
import importlib
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import transformers
from small_models import mixture, tokens
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import torchweld
from processes import processes
from torchweld import huggingface, optim
from torchweld.fusion.patterns.experts import find_form

HOW = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
NAMES = ["Mixtral", "Qwen3Moe", "Olmoe"]
NEAR: dict[str, float] = {"rtol": 1e-8, "atol": 1e-10}  # of float64, whose sums have another order


def _build(name: str) -> Any:
    model = mixture(name).eval()
    for parameter in model.parameters():
        if parameter.ndim == 3:
            torch.nn.init.normal_(parameter, std=0.1)
    model.set_experts_implementation("eager")
    return model


def _results(model: Any) -> list[torch.Tensor]:
    model.zero_grad()
    loss = model(**tokens()).loss
    loss.backward()
    return [loss.detach(), *(p.grad for p in model.parameters() if p.grad is not None)]


def _assert_near(ours: Any, model: Any) -> None:
    """Errors against float64 at most twice eager's, and roundings of the largest gradient."""
    truth, plain = _results(copy.deepcopy(model).double()), _results(model)
    scale = max(_rms(t) for t in truth[1:])
    for found, eager, exact in zip(_results(ours), plain, truth, strict=True):
        allowed = 2 * _rms(eager - exact) + 4 * 2**-24 * max(scale, _rms(exact))
        assert _rms(found - exact) <= allowed


def _rms(t: torch.Tensor) -> float:
    return float(t.double().square().mean().sqrt())


@pytest.mark.parametrize("way", ["fuse", "register"])
@pytest.mark.parametrize("name", NAMES)
def test_models(name: str, way: str) -> None:
    """The loss, every gradient, and what is generated."""
    model = _build(name)
    ours = copy.deepcopy(model)
    if way == "fuse":
        torchweld.fuse(ours)
        rows = [row for row in torchweld.explain_fusion(ours) if row.what == f"{name}Experts"]
        assert len(rows) == 2
        assert all(row.becomes == "experts_mlp (silu)" and row.welded for row in rows)
    else:
        huggingface.register()
        ours.set_experts_implementation("torchweld")
    _assert_near(ours, model)
    prompt = tokens()["input_ids"][:2, :9]
    assert torch.equal(ours.generate(prompt, **HOW), model.generate(prompt, **HOW))


def _trains_under_fsdp(rank: int, way: str) -> None:
    """Two steps, each process with half of the batch; experts have a mesh of their own."""
    alone = _build("Mixtral").double().train()
    if way == "fuse":
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
        ("muse_spark", "MuseSpark", "pass a norm"),
        ("inkling2", "Inkling2", "computes something else"),
        ("longcat_flash", "LongcatFlash", "different numbers of experts"),
        ("llama4", "Llama4Text", "does not take rows, indices and weights"),
        ("dbrx", "Dbrx", "it has no down_proj"),
    ],
)
def test_forms(family: str, cls: str, form: Any) -> None:
    """The forms of experts as large as in the default configuration, on fake memory."""
    module = getattr(transformers.models, family)
    experts = getattr(getattr(module, f"modeling_{family}"), f"{cls}Experts")
    wanted = [name for name in (f"{cls}Config", f"{cls}TextConfig") if hasattr(module, name)]
    config = getattr(module, wanted[-1])()
    with torch.device("meta"):
        found = find_form(experts(config.ffn_config if family == "dbrx" else config))
    assert form in found if isinstance(form, str) else found == form


# Experts with stacked weights, and why no form of experts_mlp computes the same.
LEFT = {
    "DbrxExperts": "it has no down_proj",
    "Inkling2Experts": "computes something else",
    "Inkling2LoopExperts": "computes something else",
    "InklingSharedExperts": "does not take its gate_proj",
    "Llama4TextExperts": "does not take rows, indices and weights",
    "LongcatFlashExperts": "different numbers of experts",
    "MuseSparkExperts": "pass a norm",
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


@pytest.mark.filterwarnings("ignore")
def test_every_class() -> None:
    """Each is served, after a trial in float64 with gradients, or left with a known reason."""
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


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")
def test_lora_on_experts() -> None:
    """peft's adapters of stacked weights learn the same with the weld as without."""
    config = peft.LoraConfig(
        r=2, target_modules=[], target_parameters=["experts.gate_up_proj", "experts.down_proj"]
    )
    found = []
    for ours in (False, True):
        model = _build("Mixtral")
        if ours:
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
