"""tp_plan of transformers' models after fuse(): losses and gradients on two processes."""

from __future__ import annotations

import copy

import pytest
import small_models
import torch
import transformers
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
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
    # Two in each block, and the embedding's unless it is the head's weight too.
    reduced = forward.calls["reduce-scatter" if sequence else "all-reduce"]
    assert reduced == 4 + (name == "llama" and not sequence)


@pytest.mark.parametrize("sequence", [False, True])
@pytest.mark.parametrize("name", ["gpt2", "llama", "bert"])
def test_equals_the_whole(name: str, sequence: bool) -> None:
    with processes(2) as two:
        two.run("cpu", _equals_the_whole, name, sequence)


@pytest.mark.parametrize("sequence", [False, True])
@pytest.mark.parametrize("name", ["gpt2", "bert"])
def test_drops_what_the_whole_drops(name: str, sequence: bool) -> None:
    """Welded dropouts draw by position; torch's own draw the whole tensor's mask."""
    with processes(2) as two:
        two.run("cpu", _equals_the_whole, name, sequence, 0.3)


# --- Norms of heads, norms of other classes, routers ----------------------------------------------

_EXPERTS = {"num_experts_per_tok": 2, "experts_implementation": "eager"}
OTHERS = {
    "Qwen3": {"head_dim": 16},
    "Gemma3": {"head_dim": 16, "sliding_window": 16},
    "Cohere": {},
    "Mixtral": {"num_local_experts": 4, **_EXPERTS},
    "Qwen3Moe": {"head_dim": 16, "num_experts": 4, "moe_intermediate_size": 32, **_EXPERTS},
}


def _another(name: str, **settings: object) -> torch.nn.Module:
    torch.manual_seed(0)
    kind = f"{name}TextConfig" if name == "Gemma3" else f"{name}Config"
    config = getattr(transformers, kind)(**small_models._GROUPED, **settings)
    model = getattr(transformers, f"{name}ForCausalLM")(config)
    return torchweld.fuse(model.double().train())


def _holds_what_it_does_not_know(rank: int, name: str, sequence: bool) -> None:
    whole = _another(name, **OTHERS[name])
    model = copy.deepcopy(whole)
    parallelize_module(model, init_device_mesh("cpu", (2,)), tp_plan(model, sequence))
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
