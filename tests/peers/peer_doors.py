"""Each door with a wrong version, device, mode or argument: one sentence that names it.

peer_kernels.py and peer_patch.py have the errors of a missing or older package.
"""

from __future__ import annotations

import importlib.metadata
import os
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from kernels import Mode, kernelize
from models import build
from torchtitan.components.optimizer import OptimizersContainer
from transformers import LlamaForCausalLM

import torchweld
from torchweld import huggingface, titan
from torchweld.compat import liger, trl, varlen, verl

pytestmark = pytest.mark.filterwarnings("ignore:transformers .* takes kernels:UserWarning")
X, WEIGHT, LABELS = torch.ones(2, 8), torch.ones(5, 8), torch.zeros(2, dtype=torch.int64)
Q = torch.ones(4, 2, 8)
ENDS = torch.tensor([0, 4], dtype=torch.int32)


def _kernelize(mode: Mode, device: str) -> Any:
    model = build("Llama").train()
    huggingface.name_layers(model)
    with huggingface.kernel_mapping():
        return kernelize(model, mode=mode, device=device)


def _of_titan(**settings: Any) -> Callable[[], Any]:
    return lambda: titan.optimizers(OptimizersContainer.Config(**settings))


CASES: dict[str, tuple[Callable[[], Any], str]] = {
    "kernelize, unknown device": (
        lambda: _kernelize(Mode.TRAINING, "abacus"),
        "Unsupported device type 'abacus'",
    ),
    "kernelize, mode": (
        lambda: _kernelize(Mode.TORCH_COMPILE, "cpu"),
        "mode must contain Mode.INFERENCE or Mode.TRAINING",
    ),
    "titan, optimizers' implementation": (
        _of_titan(implementation="fused_opt_states_bf16"),
        "optimizers: implementation is 'fused_opt_states_bf16'; accepted: ",
    ),
    "trl, temperature": (
        lambda: trl.selective_log_softmax(X, LABELS, temperature=0.0),
        "temperature is 0.0; accepted: a number above 0",
    ),
    "verl, group": (
        lambda: verl.linear_cross_entropy(X, WEIGHT, LABELS, dist_process_group=3),
        "linear_cross_entropy: dist_process_group is a int; accepted: None",
    ),
    "verl, reduction": (
        lambda: verl.linear_cross_entropy(X, WEIGHT, LABELS, reduction="max"),
        "linear_cross_entropy: reduction is 'max'; accepted: 'none', 'sum' or 'mean'",
    ),
    "varlen, shape": (
        lambda: varlen.varlen_attn(Q[0], Q, Q, ENDS, ENDS, 4, 4),
        r"varlen_attn: query is of shape \[2, 8\]; accepted: \[tokens, heads, head_dim\]",
    ),
    "varlen, heads": (
        lambda: varlen.varlen_attn(Q, Q[:, :1], Q[:, :1], ENDS, ENDS, 4, 4),
        "varlen_attn: key is of 1 heads; accepted: 2 heads, or fewer with enable_gqa=True",
    ),
    "liger, rotation": (
        lambda: liger.liger_rotary_pos_emb(X, X, X, X, unsqueeze_dim=2),
        "liger_rotary_pos_emb: unsqueeze_dim is 2; accepted: 1",
    ),
    "trl, mask": (
        lambda: trl.selective_log_softmax(X, LABELS, row_mask=torch.ones(3)),
        r"selective_log_softmax: row_mask is of shape \[3\]; accepted: the rows' shape, \[2\]",
    ),
    "trl, device": (
        lambda: trl.selective_log_softmax(X, LABELS.to("meta")),
        "target is on meta; accepted: the device of input, cpu",
    ),
    "verl, device": (
        lambda: verl.linear_cross_entropy(X, WEIGHT.to("meta"), LABELS),
        "linear_weight is on meta; accepted: the device of input, cpu",
    ),
    "liger, device": (
        lambda: liger.LigerRMSNorm(8).to("meta")(X),
        "rms_norm: weight is on meta; accepted: the device of input, cpu",
    ),
    "varlen, device": (
        lambda: varlen.varlen_attn(Q, Q.to("meta"), Q, ENDS, ENDS, 4, 4),
        "k is on meta; accepted: the device of q, cpu",
    ),
    "varlen, window": (
        lambda: varlen.varlen_attn(Q, Q, Q, ENDS, ENDS, 4, 4, window_size=3),  # type: ignore[arg-type]
        r"varlen_attn: window_size is 3; accepted: \(tokens before, tokens after\)",
    ),
    "patch, model": (
        lambda: huggingface.patch(3).__enter__(),
        "patch: model is a int; accepted: a config",
    ),
    "patch, kind": (
        lambda: huggingface.patch(build("Llama").config, torch.nn.Linear).__enter__(),
        "patch: kind is Linear; accepted: a model's class of transformers, such as Auto",
    ),
    "patch, kind of others": (
        lambda: huggingface.patch(build("Bert").config, LlamaForCausalLM).__enter__(),
        "patch: kind is LlamaForCausalLM; accepted: a class for a BertConfig",
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_one_sentence_names_what_is_wrong(case: str) -> None:
    call, said = CASES[case]
    with pytest.raises((ValueError, TypeError, ImportError), match=said):
        call()


@pytest.mark.parametrize("device", ["mps", "npu"])
def test_a_device_without_layers_of_ours_is_told(device: str) -> None:
    """kernelize keeps every forward there, without a word."""
    model = _kernelize(Mode.TRAINING, device)
    reasons = {row.reason for row in torchweld.explain_fusion(model)}
    told = "kernelize kept its own forward: the mapping then in force had no 'ForCausalLMLoss'"
    assert f"{told} for the device and the mode that it was given" in reasons


def test_another_torchtitan_is_named() -> None:
    """A release without one of the classes that ours replace."""
    code = (
        "import torchtitan.components.loss as loss; del loss.ChunkedLossWrapper;"
        "import torchweld.titan"
    )
    ran = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=os.environ, check=False
    )
    last = ran.stderr.strip().splitlines()[-1]
    assert last.startswith("ImportError: torchweld.titan: cannot import name 'ChunkedLossWrapper'")
    assert last.endswith("accepted: torchtitan 0.3 with what it requires")


def test_another_release_of_torchtitan_and_trl_is_warned_of(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One that has the same names, which may mean something else."""
    code = "import torchtitan; torchtitan.__version__ = '0.4.0'; import torchweld.titan"
    ran = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=os.environ, check=False
    )
    assert ran.returncode == 0, ran.stderr
    told = (
        "UserWarning: torchweld.titan: torchtitan is 0.4.0, and ours stand for the classes of 0.3"
    )
    assert told in ran.stderr
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "1.17.2")
    with (
        pytest.warns(UserWarning, match=r"patch: trl is 1.17.2, and ours stand for the"),
        trl.patch(),
    ):
        pass


def test_overrides_run_torch_on_a_device_without_kernels() -> None:
    """explain says so; torchtitan's log names the override alone."""
    found = torchweld.explain("rms_norm", torch.ones(2, 8, device="meta"), [8])
    assert found.chosen == "eager"
    assert "meta" in str(found)
