"""Whole models of published sizes on a GPU: python -m torchweld.bench.models.whole [names].

Training steps of each contender, in turns in one process; medians. `gpt_layer` is the layer that
another library's page times (2048 x 8 tokens, width 4096, on an H100: torch 48.3 ms, theirs 35.7).
"""

from __future__ import annotations

import argparse
import copy
import importlib
from collections.abc import Callable, Sequence
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn.functional import scaled_dot_product_attention

import torchweld
from torchweld import functional
from torchweld.bench.models import training
from torchweld.bench.models.training import Learner
from torchweld.files import write_json
from torchweld.optim import AdamW

EAGER, COMPILED, LIGER, FUSED, BOTH = "eager", "compiled", "liger", "fused", "fused, compiled"
BACKEND = "compiled by torchweld"
OPS, GRAPHS, NORMS = "fused, residuals by hand", "fused, graphs", "fused norms"
Build = Callable[[bool], nn.Module]  # on the current device; of a few numbers if `tiny`


class Whole(NamedTuple):
    """A model with a loss; its batch and length, and the contenders."""

    build: Build
    batch: int
    length: int
    ways: tuple[str, ...]
    autocast: bool = False
    learns: bool = True  # takes optimizer steps, which are timed too


class GPTLayer(nn.Module):
    """A layer with attention and two residuals, norms first, as in GPT-3."""

    def __init__(self, width: int, hidden: int, heads: int, p: float) -> None:
        super().__init__()
        self.heads, self.p = heads, p
        self.norm_in, self.norm = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, hidden), nn.Linear(hidden, width)
        self.drop_in, self.drop = nn.Dropout(p), nn.Dropout(p)
        self.act = nn.GELU(approximate="tanh")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.drop_in(self.attend(x))
        return x + self.drop(self.down(self.act(self.up(self.norm(x)))))

    def attend(self, x: torch.Tensor) -> torch.Tensor:
        split = (*x.shape[:2], 3, self.heads, x.shape[-1] // self.heads)
        q, k, v = self.qkv(self.norm_in(x)).view(split).permute(2, 0, 3, 1, 4)
        p = self.p if self.training else 0.0
        attended = scaled_dot_product_attention(q, k, v, dropout_p=p, is_causal=True)
        return self.out(attended.transpose(1, 2).reshape(x.shape))


class ByHand(GPTLayer):
    """The same layer written with our ops, whose residuals `fuse` does not see."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        p, norm = self.p if self.training else 0.0, self.norm
        h, x = functional.dropout_add_layer_norm(
            *(self.attend(x), x, norm.weight, norm.bias), eps=norm.eps, return_residual=True, p=p
        )
        up, down = self.up, self.down
        h = functional.mlp(
            *(h, up.weight, up.bias, down.weight, down.bias), activation="gelu", approximate="tanh"
        )
        return functional.bias_dropout_add(h, None, x, p=p)


class OnStates(nn.Module):
    """A layer on given hidden states, whose gradient is asked for too."""

    def __init__(self, layer: nn.Module, batch: int, length: int, width: int) -> None:
        super().__init__()
        self.layer = layer
        x = torch.randn(batch, length, width, dtype=next(layer.parameters()).dtype)
        self.x, self.grad = nn.Parameter(x), nn.Buffer(torch.randn_like(x))

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        del input_ids, labels
        return (self.layer(self.x) * self.grad).sum()


def _gpt_layer(tiny: bool) -> nn.Module:
    width, batch, length = (64, 2, 16) if tiny else (4096, 8, 2048)
    layer = GPTLayer(width, 4 * width, width // (16 if tiny else 128), 0.1)
    return OnStates(layer.to(torch.bfloat16), batch, length, width)


def _gpt2(tiny: bool) -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    sizes = {"n_embd": 64, "n_layer": 1, "n_head": 2} if tiny else {}
    large = {"n_embd": 1024, "n_layer": 24, "n_head": 16}
    return _WithLoss(GPT2LMHeadModel(GPT2Config(**(sizes or large), use_cache=False)))


def _llama(tiny: bool, *, layers: int, words: int, tied: bool, sizes: dict[str, int]) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    if tiny:
        layers, words = 1, 512
        sizes = {"hidden_size": 128, "intermediate_size": 256}
        sizes |= {"num_attention_heads": 4, "num_key_value_heads": 2}
    config = LlamaConfig(
        num_hidden_layers=layers,
        vocab_size=words,
        tie_word_embeddings=tied,
        max_position_embeddings=8192,
        use_cache=False,
        **sizes,
    )
    return _WithLoss(LlamaForCausalLM(config).to(torch.bfloat16))


def _qwen3_5(tiny: bool) -> nn.Module:
    """Qwen3.5's layers of both kinds, of a small model's width."""
    from transformers import Qwen3_5ForCausalLM, Qwen3_5TextConfig

    sizes = {"hidden_size": 64, "intermediate_size": 128, "vocab_size": 512, "head_dim": 32}
    sizes |= {"linear_key_head_dim": 16, "linear_value_head_dim": 16}
    sizes |= {"linear_num_key_heads": 2, "linear_num_value_heads": 4}
    large = {"hidden_size": 1024, "intermediate_size": 3584, "vocab_size": 32768}
    heads = {"num_attention_heads": 8, "num_key_value_heads": 2, "num_hidden_layers": 4}
    config = Qwen3_5TextConfig(**heads, **(sizes if tiny else large), use_cache=False)
    return _WithLoss(Qwen3_5ForCausalLM(config).to(torch.bfloat16))


class _WithLoss(nn.Module):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = self.model(input_ids=input_ids, labels=labels).loss
        return loss


_ALL = (EAGER, COMPILED, FUSED, BOTH, BACKEND)
_1B = {"hidden_size": 2048, "intermediate_size": 8192}
_1B |= {"num_attention_heads": 32, "num_key_value_heads": 8}
_8B = {"hidden_size": 4096, "intermediate_size": 14336}
_8B |= {"num_attention_heads": 32, "num_key_value_heads": 8}
MODELS = {
    "gpt_layer": Whole(_gpt_layer, 8, 2048, (*_ALL, OPS), learns=False),
    "gpt2_355m": Whole(_gpt2, 8, 1024, (*_ALL, GRAPHS), autocast=True),
    "llama_1b": Whole(
        partial(_llama, layers=16, words=128256, tied=True, sizes=_1B),
        *(4, 2048, (*_ALL, LIGER)),
    ),
    # NVIDIA's published script: 6 x 2048 tokens a step.
    "llama_1b_script": Whole(
        partial(_llama, layers=16, words=128256, tied=True, sizes=_1B),
        *(6, 2048, (EAGER, FUSED)),
    ),
    "qwen3_5_norms": Whole(_qwen3_5, 8, 1024, (EAGER, NORMS)),
    "llama_8b_blocks": Whole(
        partial(_llama, layers=4, words=32768, tied=False, sizes=_8B),
        *(4, 2048, (EAGER, COMPILED, LIGER, FUSED)),
    ),
}


class _NoStep:
    """In place of an optimizer, where only the model is timed."""

    def __init__(self, model: nn.Module) -> None:
        self._model, self.state = model, dict[Any, Any]()

    def zero_grad(self, set_to_none: bool = True) -> None:
        self._model.zero_grad(set_to_none)

    def step(self) -> None:
        pass


def _by_hand(model: nn.Module) -> nn.Module:
    model.layer.__class__ = ByHand  # type: ignore[assignment]
    return torchweld.fuse(model)


def _norms(model: nn.Module) -> nn.Module:
    return torchweld.fuse(model, lambda module, name: "Norm" in type(module).__name__)


def _liger(model: nn.Module) -> nn.Module:
    patches = importlib.import_module("liger_kernel.transformers.monkey_patch")
    patches._apply_liger_kernel_to_instance(model=model.model)
    return model


# In the order in which they change a copy of the model: Liger's patches change a module's class.
_MAKE: dict[str, Callable[[nn.Module], nn.Module]] = {
    EAGER: lambda model: model,
    COMPILED: training.compiled,
    FUSED: torchweld.fuse,
    GRAPHS: lambda model: torchweld.keep_graphs(torchweld.fuse(model)),
    BOTH: lambda model: training.compiled(torchweld.fuse(model)),
    BACKEND: lambda model: training.compiled(model, backend="torchweld"),
    OPS: _by_hand,
    NORMS: _norms,
    LIGER: _liger,
}


def learners(name: str, device: str, *, tiny: bool = False) -> list[Learner]:
    """The contenders, each with a copy of the model that has begun to learn."""
    whole = MODELS[name]
    torch.manual_seed(0)
    with torch.device(device):
        model = whole.build(tiny).train()
        vocabulary = 512 if tiny else 30000
        size = (2, 16) if tiny else (whole.batch, whole.length)
        ids = torch.randint(0, vocabulary, size)
    made = list[Learner]()
    slow = (COMPILED, BOTH, BACKEND)  # to begin with
    ways = [way for way in whole.ways if not tiny or way not in slow]
    for way in sorted(ways, key=[*_MAKE].index):
        try:
            contender = _MAKE[way](copy.deepcopy(model))
            # The norms learn by the same optimizer.
            ours = way in (FUSED, GRAPHS, BOTH, BACKEND, OPS)
            learner = Learner(
                *(_LIGERS if way == LIGER else way, contender, _optimizer(whole, contender, ours)),
                lambda m, _: m(input_ids=ids, labels=ids),
                torch.bfloat16 if whole.autocast else None,
            )
            for _ in range(3):  # the third step is captured
                learner.learn()
        except Exception as error:  # a rival that is not here, or does not fit this model
            print(f"{name}: {way} is left out: {type(error).__name__}: {error}"[:300], flush=True)
        else:
            made.append(learner)
    return made


# Liger takes the CuTe forms of its kernels by itself where that package is.
_LIGERS = f"{LIGER}, {'Triton' if find_spec('cutlass') is None else 'CuTe'}"


def _optimizer(whole: Whole, model: nn.Module, ours: bool) -> Any:
    if not whole.learns:
        return _NoStep(model)
    if not ours:
        return torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    # Torch's states have the parameters' dtype.
    states = next(model.parameters()).dtype
    return AdamW(model.parameters(), lr=1e-4, state_dtype=states)


def main(arguments: Sequence[str] | None = None) -> None:
    """Print a table for each model."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", choices=[[], *MODELS], help="default: all")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tiny", action="store_true", help="small sizes, to try this script")
    parser.add_argument("--seconds", type=float, default=5.0)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(arguments)
    found: dict[str, Any] = {}
    for name in options.names or MODELS:
        every = learners(name, options.device, tiny=options.tiny)
        found[name] = training.measure(every, seconds=options.seconds / len(every), at_most=40)
        print(f"{name}\n{training.table(found[name]).plain()}", flush=True)
        if options.json:
            write_json(options.json, found)


if __name__ == "__main__":
    main()
