"""Each number of each public function and constructor: wrong ones are refused by name."""

from __future__ import annotations

import inspect
import math
import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from test_bad_input import ACCEPTED

import torchweld
import train
from processes import on
from torchweld import distributed, functional, nn, optim
from torchweld.distributed.planner.work import describe_transformer
from torchweld.optim import lr_scheduler
from torchweld.sparse import BlockLayout

pytestmark = [pytest.mark.filterwarnings("ignore:Initializing zero-element tensors")]
VALUES = (0, -1, math.nan, math.inf, 0.5, True, "1")
Make = Callable[[], dict[str, Any]]  # arguments that are accepted
Calls = dict[str, tuple[Callable[..., Any], Make]]

# --- Calls ----------------------------------------------------------------------------------------

X = torch.ones(2, 8)
LAYOUT = BlockLayout.dense(64, block=16)
_WORK = describe_transformer(4, 64, 4, 100, 32)


def _params() -> list[torch.nn.Parameter]:
    return [torch.nn.Parameter(torch.ones(4, 4))]


def _trained() -> dict[str, Any]:
    model = torch.nn.Linear(4, 4)
    return {"model": model, "optimizer": optim.AdamW(model.parameters())}


def _run(kind: Any, *given: Any) -> Callable[..., Any]:
    """A constructor and a call: a module may leave it to its function to refuse."""

    def make_and_call(**settings: Any) -> Any:
        module = kind(**settings)
        is_empty = any(settings.get(size) == 0 for size in _ALL_SIZES)
        return module if is_empty else module(*given)  # empty ones take other inputs

    make_and_call.__signature__ = inspect.signature(kind)  # type: ignore[attr-defined]
    return make_and_call


FUNCTIONS: dict[str, dict[str, Any]] = ACCEPTED | {
    "cross_entropy": {"input": X, "target": torch.zeros(2, dtype=torch.int64)},
    **{
        name: ACCEPTED[name] | {"p": 0.5}
        for name in functional.__all__
        if "p" in inspect.signature(getattr(functional, name)).parameters
    },
    "block_sparse_attention": ACCEPTED["block_sparse_attention"] | {"dropout_p": 0.5},
}
_SIZES = {"in_features": 8, "hidden_features": 8}
_IN_OUT = {"in_features": 8, "out_features": 8}
_ALL_SIZES = (*_SIZES, *_IN_OUT, "normalized_shape", "num_classes", "num_experts", "kdim", "vdim")
_CLASSES = torch.zeros(2, dtype=torch.int64)
_HEADS = torch.ones(1, 2, 64, 8)
# The constructors of modules, and what a module is called with.
MODULES: dict[str, tuple[dict[str, Any], tuple[Any, ...]]] = {
    "AdaptiveLayerNorm": ({}, (X, X, X)),
    "AdaptiveRMSNorm": ({}, (X, X, X)),
    "BiasDropoutAdd": ({}, (X, None, X)),
    "BlockSparseAttention": ({"layout": LAYOUT}, (_HEADS,) * 3),
    "BlockSparseMultiheadAttention": (
        {"embed_dim": 16, "num_heads": 2, "layout": LAYOUT},
        (torch.ones(64, 1, 16),) * 3,
    ),
    "CrossEntropyLoss": ({}, (X, _CLASSES)),
    "DropoutAddLayerNorm": ({"normalized_shape": 8}, (X, X)),
    "DropoutAddRMSNorm": ({"normalized_shape": 8}, (X, X)),
    "ExpertsMLP": (
        _SIZES | {"num_experts": 3},
        (X, torch.zeros(2, 1, dtype=torch.int64), torch.ones(2, 1)),
    ),
    "GatedMLP": (_SIZES, (X,)),
    "LayerNorm": ({"normalized_shape": 8}, (X,)),
    "LinearAct": (_IN_OUT, (X,)),
    "LinearBatchNormAct": (_IN_OUT, (X,)),
    "LinearCrossEntropy": ({"in_features": 8, "num_classes": 8}, (X, _CLASSES)),
    "LinearGELU": (_IN_OUT, (X,)),
    "MLP": (_SIZES, (X,)),
    "RMSNorm": ({"normalized_shape": 8}, (X,)),
    "RotaryEmbedding": ({"dim": 8}, (_HEADS, _HEADS)),
    "SoftmaxDropout": ({}, (X,)),
}


def _list_optimizers() -> Iterable[tuple[str, tuple[Any, Make]]]:
    for name in optim.__all__:
        kind = getattr(optim, name)
        if isinstance(kind, type) and issubclass(kind, torch.optim.Optimizer):
            first = "params_or_optimizer" if name == "Offload" else "params"
            more: dict[str, Any] = {"freeze_step": 2} if name.startswith("OneBit") else {}
            more |= {"relative_step": False, "lr": 1.0} if name.startswith("Transformers") else {}
            yield name, (kind, lambda f=first, m=more: {f: _params(), **m})


if _missing := {*functional.__all__} - {*FUNCTIONS}:
    raise KeyError(f"add {sorted(_missing)} to ACCEPTED of tests/contract/test_bad_input.py")
CALLS: Calls = {
    **{
        name: (getattr(functional, name), lambda given=FUNCTIONS[name]: dict(given))
        for name in functional.__all__
    },
    **{
        name: (_run(getattr(nn, name), *called), lambda given=given: dict(given))
        for name, (given, called) in MODULES.items()
    },
    **dict(_list_optimizers()),
    **{
        name: (
            getattr(lr_scheduler, name),
            lambda: {"optimizer": optim.SGD(_params()), "batch_size": 64, "base_batch_size": 32},
        )
        for name in ("LinearScaling", "SqrtScaling")
    },
    "release_gradients": (optim.release_gradients, _trained),
    "Links": (distributed.Links, dict),
    "Profile": (
        distributed.Profile,
        lambda: dict.fromkeys(("flops", "bandwidth", "memory"), 1e12) | {"name": "", "source": ""},
    ),
    "Parallel": (distributed.Parallel, lambda: {"pipeline": 1, "tensor": 1, "replicas": 1}),
    "LowPrecisionReduceScatter": (distributed.LowPrecisionReduceScatter, dict),
    "LayerSeeds": (distributed.LayerSeeds, lambda: {"layers": []}),
    "plan_for": (
        distributed.plan_for,
        lambda: {"model": _WORK, "batch": 8, "devices": 2, "profile": "h100"},
    ),
    "describe_transformer": (
        describe_transformer,
        lambda: {"layers": 4, "width": 64, "heads": 4, "vocabulary": 100, "length": 32},
    ),
    "memory_estimate": (
        distributed.memory_estimate,
        lambda: _trained() | {"strategy": "ddp", "world": 2},
    ),
    "check_fit": (
        distributed.check_fit,
        lambda: {"model": torch.nn.Linear(4, 4), "parallel": distributed.Parallel(1, 1, 1)},
    ),
    "layer_cuts": (
        distributed.layer_cuts,
        lambda: {
            **{"model": torch.nn.ModuleDict({"a": torch.nn.ModuleList([torch.nn.Linear(4, 4)])})},
            **{"layers": "a", "count": 1, "example": (), "costs": [1.0]},
        },
    ),
}


def _parallelize_given() -> dict[str, Any]:
    return {
        **{"model": torch.nn.Linear(4, 4), "config": "ddp", "device": "cpu", "quiet": True},
        **{"example": (torch.ones(2, 4),), "loss_fn": lambda y, t: (y - t).square().mean()},
    }


# Calls that need torch.distributed.
IN_PROCESS: Calls = {
    "parallelize": (distributed.parallelize, _parallelize_given),
    "pipeline": (
        distributed.pipeline,
        lambda: {
            **{"blocks": [torch.nn.Linear(4, 4)], "schedule": "gpipe", "microbatches": 1},
            **{"loss_fn": torch.nn.functional.mse_loss, "example": (torch.ones(2, 4),)},
            **{"costs": [1.0]},
        },
    ),
    "ring_slice": (distributed.ring_slice, lambda: {"x": X}),
    "ring_attention": (
        distributed.ring_attention,
        lambda: dict.fromkeys("qkv", _HEADS) | {"layout": LAYOUT, "dropout_p": 0.5},
    ),
}
# What is returned, or made only by a function above.
RESULTS = {"Memory", "Plan", "Timeline", "Training", "Pipeline", "GradientRelease"}

# --- What is accepted -----------------------------------------------------------------------------

# Which of VALUES are accepted: a dot, or an x for those that an error refuses, naming the argument.
# True is the number 1; infinity stands for "without a limit" or "in no time". torch counts a seed
# below zero from the end.
PATTERNS: dict[str, str] = {
    "..xx..x": """attention_factor dampening decay_rate momentum r scale up_offset weight_lr_power
        block_sparse_attention.softcap ring_attention.softcap BlockSparseAttention.softcap""",
    "..xx.xx": "z_loss",
    "..xxxxx": "beta2_decay ignore_index ring_slice.dim",
    "..xxx.x": "LayerSeeds.seed LowPrecisionReduceScatter.seed parallelize.seed",
    ".xx...x": """latency_between latency_inside max_norm norm_eps layer_norm.eps rms_norm.eps
        adaptive_layer_norm.eps adaptive_rms_norm.eps gated_residual_layer_norm.eps
        gated_residual_rms_norm.eps AdaptiveLayerNorm.eps AdaptiveRMSNorm.eps
        normalize_act.eps dropout_add_layer_norm.eps dropout_add_rms_norm.eps LayerNorm.eps
        RMSNorm.eps DropoutAddLayerNorm.eps DropoutAddRMSNorm.eps""",
    ".xxx..x": """alpha dropout dropout_p eps factor_clip factor_threshold lr p power trust_clip
        trust_coefficient warmup_start weight_decay LARS.momentum SGD.momentum Muon.momentum""",
    ".xxx.xx": "beta1 betas coeff_beta ema_decay label_smoothing",
    ".xxxx.x": """alpha_warmup beta3_warmup min_quantized_size ns_steps split_dim
        ScheduleFreeAdamW.warmup_steps""",
    ".xxxxxx": """accumulate capacity hidden_features in_features out_features in_flight kdim vdim
        min_8bit_size normalized_shape num_classes num_experts rank seed sharers versions
        warmup_steps""",
    "x.xx.xx": "logit_scale",
    "x.xxxxx": "last_epoch",
    "xxx...x": """bandwidth between clip_norm flops inside limit max_grad_norm node Profile.memory
        batch_norm_act.eps linear_batch_norm_act.eps LinearBatchNormAct.eps""",
    "xxx.xxx": "plan_for.memory",
    "xxxx..x": "base base_batch_size batch_size clip_threshold",
    "xxxx.xx": """softcap temperature Adam.betas Adam8bit.betas AdamW.betas AdamW8bit.betas
        ScheduleFreeAdamW.betas""",
    "xxxxx.x": """d freeze_step max_unorm LowPrecisionReduceScatter.block Muon.heads""",
    "xxxxxxx": """batch best_of_group block bucket_bytes count depth devices dim embed_dim groups
        heads itemsize k key_heads layers length max_positions memory microbatches num_heads
        optim_bits per_rank percentile_clipping pipeline replicas ring rotary_dim seq_dim shape
        size split_sizes tensor threads top_groups total_steps vocabulary width world
        OneBitAdam.max_grad_norm OneBitLAMB.max_grad_norm layer_norm.normalized_shape
        rms_norm.normalized_shape dropout_add_layer_norm.normalized_shape
        dropout_add_rms_norm.normalized_shape""",
}
ALLOWED = {name: pattern for pattern, names in PATTERNS.items() for name in names.split()}
# torch's own constructors refuse sizes in torch's words, and other sizes do not go with the inputs.
OF_TORCH = {"LayerNorm.normalized_shape", "RMSNorm.normalized_shape"}
OF_OTHERS = {"average_one_bit.size": "bits"}


def _list_numbers(call: Callable[..., Any]) -> list[inspect.Parameter]:
    """The parameters that may be a number."""
    return [
        parameter
        for parameter in inspect.signature(call).parameters.values()
        if not isinstance(parameter.default, bool)
        and re.search(r"\b(int|float)\b", str(parameter.annotation))
    ]


def _find_faults(name: str, call: Callable[..., Any], make: Make) -> list[str]:
    faults = []
    for parameter in _list_numbers(call):
        key = f"{name}.{parameter.name}"
        allowed = ALLOWED.get(key) or ALLOWED.get(parameter.name)
        assert allowed, f"add {parameter.name} or {key} to PATTERNS"
        for value, accepts in zip(VALUES, allowed, strict=True):
            given = make() | {parameter.name: _put(value, parameter)}
            try:
                call(**given)
            except Exception as error:
                names = {parameter.name, OF_OTHERS.get(key, parameter.name)}
                named = any(re.search(rf"\b{one}\b", str(error)) for one in names)
                if key in OF_TORCH and isinstance(error, (TypeError, RuntimeError)):
                    continue
                if accepts == "." or not named:
                    faults.append(f"{key}={value!r}: {type(error).__name__}: {error}")
            else:
                faults += [f"{key}={value!r} is accepted"] if accepts == "x" else []
    return faults


def _put(value: Any, parameter: inspect.Parameter) -> Any:
    """A value, as the first of several where the parameter is a tuple."""
    if "tuple[" not in str(parameter.annotation):
        return value
    default = parameter.default or (0.5, 1.0)
    return (value, *default[1:])


@pytest.mark.parametrize("name", CALLS)
def test_wrong_numbers_are_named(name: str) -> None:
    """Some trained with them in silence, as lr=nan; others raised torch's or Python's own error."""
    assert not _find_faults(name, *CALLS[name])


@on(1)
def test_wrong_numbers_are_named_in_processes(rank: int) -> None:
    """max_norm=-1 ascended, nan made weights NaN, and microbatches=0 trained nothing."""
    assert not [fault for name in IN_PROCESS for fault in _find_faults(name, *IN_PROCESS[name])]


def test_every_public_number_is_in_the_table() -> None:
    public = {
        name: getattr(room, name)
        for room in (functional, nn, optim, distributed)
        for name in room.__all__
        if callable(getattr(room, name))
    }
    takes = {name for name, call in public.items() if _list_numbers(call)}
    assert takes <= {*CALLS, *IN_PROCESS, *RESULTS}


@on(1)
def test_no_clipping(rank: int, tmp_path: Path) -> None:
    """0 froze the model in parallelize, and stood for no clipping in examples/train.py."""

    def run(max_norm: float | None) -> torch.Tensor:
        torch.manual_seed(0)
        training: Any = distributed.parallelize(**_parallelize_given(), max_norm=max_norm)
        for step in range(2):
            training.step([(torch.ones(2, 4), torch.zeros(2, 4))], step)
        return training.model.weight.detach().clone()

    assert torch.equal(run(0), run(None))
    assert torch.equal(run(0.0), run(math.inf))
    assert not torch.equal(run(0), run(1e-6))
    small = ["--width", "16", "--length", "16", "--layers", "1", "--steps", "2"]
    found = [
        train.train(train.options([*small, "--max-norm", norm]), torch.device("cpu"))["losses"]
        for norm in ("0", "inf")
    ]
    assert found[0] == found[1]
    with pytest.raises(SystemExit, match=r"max_norm is -1\.0"):
        train.train(train.options([*small, "--max-norm", "-1"]), torch.device("cpu"))


# What plan_for is asked, the argument that the error names, and what it says.
AXES: list[tuple[dict[str, Any], str]] = [
    *(({name: (0,)}, f"{name} is 0; accepted: an int >= 1") for name in ("rows", "tensor")),
    ({"pipeline": (1.5,)}, "pipeline is 1.5"),
    ({"tensor": (True,)}, "tensor is True"),
    ({"rows": ("1",)}, "rows is '1'"),
    ({"rows": 1}, "rows is 1; accepted: a tuple"),
    ({"rows": ()}, r"rows is \(\); accepted: a tuple"),
    ({"mode": ("2.5d",)}, "mode is '2.5d'; accepted: some of 1d, 2d, 3d"),
    ({"schedule": ("gpip",)}, "schedule is 'gpip'.*did you mean 'gpipe'"),
    ({"data": ("zero4",)}, "data is 'zero4'"),
    ({"checkpoint": ("some",)}, "checkpoint is 'some'"),
    ({"offload": ("auto",)}, "offload is 'auto'"),
    ({"sequence": (1,)}, "sequence is 1"),
    ({"optimizer": ("adamx",)}, "optimizer is 'adamx'"),
    ({"profile": None}, "profile is None; accepted: a Profile"),
    ({"profile": 3}, "profile is 3"),
    ({"profile": "h300"}, "profile is 'h300'"),
]


@pytest.mark.parametrize(("changed", "says"), AXES, ids=str)
def test_what_the_planner_is_asked(changed: dict[str, Any], says: str) -> None:
    """Errors of arithmetic were Python's own, and unknown values were blamed on `devices`."""
    given = {"model": _WORK, "batch": 8, "devices": 2, "profile": "h100"} | changed
    with pytest.raises(torchweld.ArgumentError, match=says):
        distributed.plan_for(**given)
