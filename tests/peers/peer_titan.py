"""torchweld.titan on torchtitan's debug models: equal losses with and without each override.

Its attentions need a GPU for their backward pass, so that torch's SDPA stands in for them.
"""

from __future__ import annotations

import copy
import dataclasses
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torchtitan.components.loss import ChunkedLossWrapper, CrossEntropyLoss
from torchtitan.components.optimizer import OptimizersContainer, default_adamw
from torchtitan.config import ConfigManager, Configurable, OverrideConfig, apply_overrides
from torchtitan.models import llama3, qwen3
from torchtitan.models.common.attention import FlexAttention
from torchtitan.models.common.rope import ComplexRoPE, CosSinRoPE

import torchweld
from pages import ROOT
from torchweld import optim, titan
from torchweld.errors import ArgumentError

pytestmark = pytest.mark.filterwarnings("ignore")
STEPS = 5


@dataclasses.dataclass(kw_only=True)
class _Tree(Configurable.Config):
    """The parts of a Trainer's config that overrides may claim."""

    model: Any
    loss: Any
    optimizer: Any


def _attend(self: Any, q: Any, k: Any, v: Any, **how: Any) -> torch.Tensor:
    q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    y = torch.nn.functional.scaled_dot_product_attention(
        q, k, v, is_causal=True, scale=how.get("scale"), enable_gqa=q.shape[1] != k.shape[1]
    )
    return y.transpose(1, 2)


@pytest.fixture(autouse=True)
def _kernels(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Let our kernels serve small inputs too."""
    monkeypatch.setattr(FlexAttention, "forward", _attend)
    with torchweld.use_backend("cpu", "eager"):
        yield


def _make(kind: str) -> _Tree:
    spec = llama3.model_registry("debugmodel")
    if kind == "moe":
        spec = qwen3.model_registry("debugmodel_moe")
    loss = CrossEntropyLoss.Config()
    wrapped = ChunkedLossWrapper.Config(loss_fn=loss, num_chunks=4)
    model = copy.deepcopy(spec.model)
    model.layers = model.layers[: 1 if kind == "moe" else 2]
    return _Tree(
        model=model,
        loss=wrapped if kind == "chunked" else loss,
        optimizer=default_adamw(lr=1e-3),
    )


def _train(kind: str, *overrides: Any) -> tuple[list[float], list[str]]:
    tree, said = _make(kind), []
    if overrides:
        said = apply_overrides(OverrideConfig(imports=[*overrides]), tree)
    torch.manual_seed(0)
    model = tree.model.build()
    model.init_weights(buffer_device=torch.device("cpu"))
    loss_fn = tree.loss.build(compile_config=None)
    if kind == "chunked":
        model._skip_lm_head = True
        loss_fn.set_lm_head(model.lm_head)
    optimizers = tree.optimizer.build(model_parts=[model])
    generator, losses = torch.Generator().manual_seed(1), []
    for _ in range(STEPS):
        tokens = torch.randint(0, 2000, (2, 25), generator=generator)
        positions = torch.arange(24).expand(2, -1)
        optimizers.zero_grad()
        output = model(tokens[:, :-1], positions, None)
        loss, _ = loss_fn(output, tokens[:, 1:].contiguous(), torch.tensor(48.0))
        loss.backward()
        optimizers.step()
        losses.append(float(loss.detach()))
    return losses, said


PLAIN = {
    "dense": ("rms_norm", "feed_forward", "rope", "loss", "optimizers"),
    "chunked": ("linear_loss",),
    "moe": ("grouped_experts",),
}
_EXPECTED: dict[str, list[float]] = {}


@pytest.mark.parametrize(("kind", "name"), [(k, n) for k, names in PLAIN.items() for n in names])
def test_five_steps_lose_the_same(kind: str, name: str) -> None:
    if kind not in _EXPECTED:
        _EXPECTED[kind] = _train(kind)[0]
    found, said = _train(kind, f"torchweld.titan.{name}")
    assert any(f"torchweld.titan.{name}" in line and "Welded" in line for line in said)
    # The experts of torchtitan multiply in bfloat16.
    assert found == pytest.approx(_EXPECTED[kind], rel=2e-3 if kind == "moe" else 1e-4)


def test_all_at_once() -> None:
    names = [f"torchweld.titan.{name}" for name in PLAIN["dense"]]
    assert _train("dense", *names)[0] == pytest.approx(_train("dense")[0], rel=1e-4)


def test_optimizers_of_ours_with_arguments() -> None:
    """8-bit states by a keyword of the override, and other optimizers by name."""
    tree = _make("dense")
    state = ("torchweld.titan.optimizers", {"state_dtype": "8bit"})
    apply_overrides(OverrideConfig(imports=[state]), tree)
    model = tree.model.build()
    model.init_weights(buffer_device=torch.device("cpu"))
    (optimizer,) = tree.optimizer.build(model_parts=[model])
    assert type(optimizer) is optim.AdamW
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    assert optimizer.state[model.lm_head.weight]["exp_avg_codes"].dtype == torch.uint8
    found = titan.WeldedOptimizersContainer._resolve_optimizer_factory("Lion")
    assert found is optim.Lion
    with pytest.raises(NotImplementedError, match="Optimizer Adamw not added"):
        titan.WeldedOptimizersContainer._resolve_optimizer_factory("Adamw")
    config = OptimizersContainer.Config(implementation="fused_opt_states_bf16")
    with pytest.raises(ArgumentError, match="implementation is 'fused_opt_states_bf16'; accepted"):
        titan.optimizers(config)


@pytest.mark.parametrize("kind", [ComplexRoPE, CosSinRoPE])
@pytest.mark.parametrize("positioned", [False, True])
def test_rotations_with_gradients(kind: Any, positioned: bool) -> None:
    config = kind.Config(dim=16, max_seq_len=32)
    generator = torch.Generator().manual_seed(0)
    q, k = (torch.randn(2, 9, n, 16, generator=generator).requires_grad_() for n in (4, 2))
    positions = torch.arange(9).flip(0).expand(2, -1).clone() if positioned else None
    if positions is not None:
        positions[1] += 3
    results = []
    for module in (config.build(), titan.rope(config).build()):
        y = module(q, k, positions)
        grads = torch.autograd.grad(y[0].square().sum() + y[1].pow(3).sum(), (q, k))
        results.append([*y, *grads])
    torch.testing.assert_close(*results)


def test_a_subclass_keeps_its_own_rotation() -> None:
    @dataclasses.dataclass(kw_only=True, slots=True)
    class Other(CosSinRoPE.Config):
        pass

    config = Other(dim=16, max_seq_len=32)
    assert titan.rope(config) is config


def test_losses_that_ours_does_not_serve_take_the_path_of_torchtitan() -> None:
    """A head with a bias, and inputs for another loss."""
    config = ChunkedLossWrapper.Config(loss_fn=CrossEntropyLoss.Config(), num_chunks=2)
    head, labels = torch.nn.Linear(8, 20), torch.arange(8).view(2, 4)
    results = []
    for each in (config, titan.linear_loss(config)):
        x = torch.linspace(-1, 1, 64).view(2, 4, 8).requires_grad_()
        loss_fn = each.build(compile_config=None)
        loss_fn.set_lm_head(head)
        loss, _ = loss_fn(1 * x, labels, torch.tensor(8.0))
        loss.backward()
        results.append([loss.detach(), x.grad])
    torch.testing.assert_close(*results)


def test_the_command_of_the_docs() -> None:
    """torchtitan parses it, and each override finds something to replace.

    The docs named a program that torchtitan does not have: nothing read that line.
    """
    page = (ROOT / "docs/integrations.md").read_text()
    (command,) = re.findall(r"```bash\n(torchrun .*?)```", page, re.DOTALL)
    program, *arguments = shlex.split(command.replace("\\\n", " "))
    assert program == "torchrun"
    at = arguments.index("-m")
    assert arguments[at + 1] == "torchtitan.train"
    config: Any = ConfigManager().parse_args(arguments[at + 2 :])
    said = apply_overrides(config.override, config)
    assert len(config.override.imports) == 5
    for each in config.override.imports:
        name = each if isinstance(each, str) else each[0]
        assert any(name in line and "Welded" in line for line in said), name


def test_without_torchtitan_one_sentence_says_so() -> None:
    code = "import sys; sys.modules['torchtitan'] = None; import torchweld.titan"
    ran = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=os.environ, check=False
    )
    assert "accepted: torchtitan 0.3 with what it requires" in ran.stderr
