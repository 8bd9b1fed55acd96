"""The forward of one GPU backend with the backward of another."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from conftest import GPU, KERNELS, PLACES, running_at
from oracle import assert_bounded, run, sample_inputs
from torchweld.dispatch.choice import use_backend
from torchweld.dispatch.engine.judge import Judge
from torchweld.dispatch.op_question import make_question
from torchweld.errors import ArgumentError
from torchweld.registry import OPS, Composite, Op, materialize
from torchweld.registry.backends import parts

MIXED = ("cuda/triton", "triton/cuda")
BOTH = [op for op in KERNELS if {"cuda", "triton"} <= set(op.sources)]
CUDA, TRITON = ("gpu-cuda", "gpu-triton") if GPU else ("emulator", "interpreter")
DEVICE = PLACES[TRITON][1]
MISSING = PLACES[CUDA][2] or PLACES[TRITON][2]


def test_which_ops_have_one() -> None:
    """Those with two kernels for a GPU; a composite's backwards are torch's."""
    found = {op.name: [n for n in op.kernels if len(parts(n)) > 1] for op in OPS.values()}
    both = {name: mixed for name, mixed in found.items() if mixed}
    assert set(both) == {"layer_norm", "rms_norm", "softmax_dropout"} == {op.name for op in BOTH}
    assert all(mixed == [*MIXED] for mixed in both.values())
    assert all(not op.kernels for op in OPS.values() if isinstance(op, Composite))


@pytest.mark.skipif(MISSING is not None, reason=str(MISSING))
@pytest.mark.parametrize("backend", MIXED)
@pytest.mark.targets("layer_norm", "rms_norm", "softmax_dropout")
def test_gradients_are_right(op: Op, backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The one saves what the other reads: in every sample, as exact as a whole backend is."""

    def mixed(*inputs: Any) -> Any:
        y = op.kernels[backend].run(inputs)
        assert backend.replace("/", "_") in y.grad_fn.name()
        return y

    with running_at(CUDA, monkeypatch), running_at(TRITON, monkeypatch):
        samples = sample_inputs(op, torch.float32, DEVICE, torch.float32)
        assert_bounded(op, samples, lambda inputs: run(op, inputs, mixed))


def test_by_name_a_backend_is_whole() -> None:
    with pytest.raises(ArgumentError, match="cuda/triton"):
        use_backend("cuda/triton")


@pytest.mark.skipif(MISSING is not None, reason=str(MISSING))
def test_a_trial_has_them_where_both_directions_run(monkeypatch: pytest.MonkeyPatch) -> None:
    norm = OPS["layer_norm"]
    arguments = norm.sized((8,), (64,))
    with running_at(CUDA, monkeypatch), running_at(TRITON, monkeypatch):
        for train, mixed in ((True, [*MIXED]), (False, [])):
            given = materialize(arguments, torch.float32, DEVICE, requires_grad=train)
            question = make_question(norm, given)
            assert {"cuda", "triton"} <= set(question.contenders)
            assert list(question.mixed) == mixed
            judge = Judge(question.exact(), question.trusted())
            for backend in ("cuda", "triton", *mixed):
                assert judge.find_fault(question.run(backend)) is None
