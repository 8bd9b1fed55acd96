"""tp_plan of transformers' models after fuse(): losses and gradients on two processes."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import small_models
import torch
import transformers
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import parallelize_module

import torchweld
from processes import processes
from torchweld.distributed import CountCollectives, tp_plan
from torchweld.errors import ArgumentError

pytestmark = pytest.mark.filterwarnings("ignore")


# The modules that apply dropout to attention's weights.
ATTENTIONS = {"gpt2": ("GPT2Attention", "attn_dropout"), "bert": ("BertSelfAttention", "dropout")}


def _equals_the_whole(rank: int, name: str, sequence: bool, p: float = 0.0) -> None:
    whole = torchweld.fuse(small_models.build(name, p).double().train())
    for module in whole.modules():
        if type(module).__name__ == "T5Attention":
            module.dropout = 0.0
        if name in ATTENTIONS and type(module).__name__ == ATTENTIONS[name][0]:
            getattr(
                module, ATTENTIONS[name][1]
            ).p = 0.0  # torch's attention draws for its own heads
    batch = small_models.batch(name)
    torch.manual_seed(2)
    another = whole(**batch).loss.item()
    torch.manual_seed(1)
    expected = whole(**batch).loss
    assert (another != expected.item()) == (p > 0)
    expected.backward()
    model = copy.deepcopy(whole)
    model.zero_grad()
    mesh = init_device_mesh("cpu", (2,))
    parallelize_module(model, mesh, tp_plan(model, sequence))
    torch.manual_seed(1)
    with CountCollectives() as forward:
        loss = model(**batch).loss
    loss.backward()
    torch.testing.assert_close(loss, expected)
    wanted = dict(whole.named_parameters())
    for key, parameter in model.named_parameters():
        grad = parameter.grad
        grad = grad.full_tensor() if isinstance(grad, DTensor) else grad
        torch.testing.assert_close(grad, wanted[key].grad)
    # Two in each block. Unless the embedding's weight is the head's, the embedding sends one, and
    # the loss two, of a few numbers a row.
    reduced = forward.calls["reduce-scatter" if sequence else "all-reduce"]
    assert reduced == SUMS.get(name, 4) + (3 if name == "llama" and not sequence else 0)


@pytest.mark.parametrize("sequence", [False, True])
@pytest.mark.parametrize("name", ["gpt2", "llama", "bert"])
def test_equals_the_whole(name: str, sequence: bool) -> None:
    with processes(2) as two:
        two.run("cpu", _equals_the_whole, name, sequence)


@pytest.mark.parametrize(
    ("name", "sequence"),
    [("gpt2", False), ("gpt2", True), ("bert", False), ("bert", True), ("t5", False)],
)
def test_drops_what_the_whole_drops(name: str, sequence: bool) -> None:
    """Welded dropouts draw by position; torch's own draw the whole tensor's mask."""
    with processes(2) as two:
        two.run("cpu", _equals_the_whole, name, sequence, 0.3)


def _compiles(rank: int, sequence: bool) -> None:
    """Each layer in one graph: gradients of one process."""
    whole = torchweld.fuse(small_models.build("llama").double().train())
    model = copy.deepcopy(whole)
    parallelize_module(model, init_device_mesh("cpu", (2,)), tp_plan(model, sequence))
    for layer in model.model.layers:
        layer.compile(fullgraph=True)
    _same_gradients(whole, model)


@pytest.mark.parametrize("sequence", [False, True])
def test_planned_layers_compile(sequence: bool) -> None:
    with processes(2) as two:
        two.run("cpu", _compiles, sequence)


# --- Norms of heads, norms of other classes, routers ----------------------------------------------

_EXPERTS = {"num_experts_per_tok": 2, "experts_implementation": "eager"}
OTHERS: dict[str, dict[str, Any]] = {
    "Qwen3": {"head_dim": 16},
    "Gemma3": {"head_dim": 16, "sliding_window": 16},
    "Cohere": {},
    "Mixtral": {"num_local_experts": 4, **_EXPERTS},
    "Qwen3Moe": {"head_dim": 16, "num_experts": 4, "moe_intermediate_size": 32, **_EXPERTS},
    # With a shared expert; its layers are whole on each device.
    "Qwen2Moe": {"num_experts": 4, "moe_intermediate_size": 32, **_EXPERTS},
    "Glm4Moe": {"n_routed_experts": 4, "first_k_dense_replace": 0, "head_dim": 16, **_EXPERTS},
}


def _another(name: str, **settings: Any) -> torch.nn.Module:
    torch.manual_seed(0)
    kind = f"{name}TextConfig" if name == "Gemma3" else f"{name}Config"
    config = getattr(transformers, kind)(**small_models._GROUPED, **settings)
    model = getattr(transformers, f"{name}ForCausalLM")(config)
    return torchweld.fuse(model.double().train())


def _holds_what_it_does_not_know(rank: int, name: str, sequence: bool) -> None:
    whole = _another(name, **OTHERS[name])
    model = copy.deepcopy(whole)
    parallelize_module(model, init_device_mesh("cpu", (2,)), tp_plan(model, sequence))
    stacked: list[Any] = [p for p in model.parameters() if p.ndim == 3]
    assert len(stacked) == (4 if "experts_implementation" in OTHERS[name] else 0)
    assert all(p.placements == (Shard(0),) for p in stacked)
    _same_gradients(whole, model)


def _same_gradients(whole: torch.nn.Module, model: torch.nn.Module) -> None:
    batch, losses = small_models.tokens(), []
    for each in (whole, model):
        losses.append(each(**batch).loss)
        losses[-1].backward()
    torch.testing.assert_close(*losses)
    wanted = dict(whole.named_parameters())
    for key, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad.full_tensor(), wanted[key].grad)


@pytest.mark.parametrize("sequence", [False, True])
@pytest.mark.parametrize("name", OTHERS)
def test_holds_what_it_does_not_know(name: str, sequence: bool) -> None:
    with processes(2) as two:
        two.run("cpu", _holds_what_it_does_not_know, name, sequence)


@pytest.mark.parametrize("name", ["Olmo2", "Phi"])
def test_known_by_half(name: str) -> None:
    """A norm across heads; an output layer of another name."""
    with pytest.raises(ArgumentError, match=r"in attention|without an output layer"):
        tp_plan(_another(name))


# --- Other names, numbers of heads that code reads, packed layers, encoders with decoders ---------


def _phi3(key_heads: int) -> torch.nn.Module:
    config = transformers.Phi3Config(**{**small_models._GROUPED, "num_key_value_heads": key_heads})
    return transformers.Phi3ForCausalLM(config)


def _vit() -> torch.nn.Module:
    """A sequence has ten tokens."""
    sizes = {key: value for key, value in small_models._SIZES.items() if "vocab" not in key}
    config = transformers.ViTConfig(
        **sizes, **small_models._dropout(0.0), image_size=24, patch_size=8, num_labels=4
    )
    return transformers.ViTForImageClassification(config)


def _images() -> dict[str, torch.Tensor]:
    pixels = torch.randn(4, 3, 24, 24, generator=small_models._generator()).double()
    return {"pixel_values": pixels, "labels": torch.tensor([0, 1, 2, 3])}


MORE = {
    "opt": (lambda: small_models._opt(0.0), small_models.tokens),
    "t5": (lambda: small_models._t5(0.0), small_models.tokens),
    "t5 without gates": (lambda: small_models._t5(0.0, "relu"), small_models.tokens),
    "phi3": (lambda: _phi3(4), small_models.tokens),
    "phi3 with fewer key heads": (lambda: _phi3(2), small_models.tokens),
    "vit": (_vit, _images),
    "stablelm": (lambda: small_models._decoder("StableLm")(0.0), small_models.tokens),
}
# A block's halves send two sums each way in the forward; a T5 decoder block's send three.
SUMS = {"t5": 2 * 2 + 2 * 3, "t5 without gates": 2 * 2 + 2 * 3}


def _more(rank: int, name: str, sequence: bool) -> None:
    """Losses and gradients of one process, and no half of a block that each device computes."""
    build, batch = MORE[name]
    torch.manual_seed(0)
    whole = torchweld.fuse(build().double().train())
    model = copy.deepcopy(whole)
    parallelize_module(model, init_device_mesh("cpu", (2,)), tp_plan(model, sequence))
    expected = whole(**batch()).loss
    expected.backward()
    with CountCollectives() as forward:
        loss = model(**batch()).loss
    loss.backward()
    torch.testing.assert_close(loss, expected, rtol=1e-11, atol=1e-12)
    wanted = dict(whole.named_parameters())
    for key, parameter in model.named_parameters():
        found = parameter.grad.full_tensor()
        torch.testing.assert_close(found, wanted[key].grad, rtol=1e-10, atol=1e-12)
        torch.testing.assert_close(parameter.full_tensor(), wanted[key])
    sums = forward.calls["reduce-scatter" if sequence else "all-reduce"]
    of_vocabulary = 3 if not sequence and name.startswith(("phi3", "stablelm")) else 0
    assert sums == SUMS.get(name, 4) + of_vocabulary


@pytest.mark.parametrize("sequence", [False, True])
@pytest.mark.parametrize("name", MORE)
def test_more_models(name: str, sequence: bool) -> None:
    if sequence and name.startswith("t5"):
        with pytest.raises(ArgumentError, match="one list of blocks for sequence_parallel"):
            tp_plan(torchweld.fuse(MORE[name][0]()), True)
        return
    with processes(2) as two:
        two.run("cpu", _more, name, sequence)


def _undivided(rank: int) -> None:
    model = _phi3(1)
    with pytest.raises(ArgumentError, match=r"4 heads and 1 key heads in model.layers.0.self_attn"):
        parallelize_module(model, init_device_mesh("cpu", (2,)), tp_plan(model))
    assert not any(isinstance(p, DTensor) for p in model.parameters())


def test_packed_heads_that_do_not_divide() -> None:
    with processes(2) as two:
        two.run("cpu", _undivided)
