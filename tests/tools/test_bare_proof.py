"""The check at first use of bare ops: CPU kernels stand for a GPU's."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from torchweld.dispatch import bare
from torchweld.dispatch.autograd import as_tuple
from torchweld.dispatch.bare import BareOp
from torchweld.ops import quantize_8bit, quantize_one_bit
from torchweld.ops.loss import rows as loss_rows
from torchweld.ops.optimizer import batch, sum_of_squares
from trying import Trials


def _bare_calls() -> dict[str, tuple[BareOp, tuple[Any, ...]]]:
    """A call of each bare op that is tried at its first use, on rows with odd ends."""
    x = torch.randn(3, 700)
    codes, absmax = quantize_8bit.quantize_reference(x, True)
    error, size, block = torch.randn_like(x), x.numel(), 64
    new_error = torch.empty_like(x)
    bits, scale = quantize_one_bit.quantize_reference(x, error, new_error, block)
    both = torch.stack([bits, bits]), torch.stack([scale, 2 * scale])
    target = torch.tensor([[7], [-1], [699]])
    how = (None, None, None, 1.0, 0.0)
    statistics = loss_rows.FORWARD.reference(x, target, *how, True, True, False)[1]  # type: ignore[misc]
    grads = torch.randn(3, 5), torch.randn(3, 1)
    return {
        "loss_rows": (loss_rows.FORWARD, (x, target, *how, False, False, False)),
        "loss_rows_backward": (loss_rows.BACKWARD, (x, target, statistics, *grads, *how)),
        "loss_rows_backward_": (loss_rows.BACKWARD_IN_PLACE, (x, target, statistics, *grads, *how)),
        "loss_rows_both_": (loss_rows.BOTH_IN_PLACE, (x, target, *grads, *how, False, False)),
        "quantize_8bit": (quantize_8bit._QUANTIZE, (x, True)),
        "dequantize_8bit": (quantize_8bit._DEQUANTIZE, (codes, absmax, True, torch.bfloat16)),
        "quantize_one_bit": (quantize_one_bit._QUANTIZE, (x, error, error, block)),  # in place
        "average_one_bit": (quantize_one_bit._MEAN, (*both, None, torch.empty(size), size, block)),
        "dequantize_one_bit": (
            quantize_one_bit._DEQUANTIZE,
            (bits, scale, [3, 700], block, torch.float32),
        ),
        "sum_of_squares": (sum_of_squares._OP, ([x.bfloat16(), error.bfloat16()],)),
    }


def _copies(inputs: Sequence[Any]) -> list[Any]:
    """Copies of the arguments; arguments that are one tensor stay one."""
    return copy.deepcopy(list(inputs))


@pytest.mark.parametrize("name", _bare_calls())
@pytest.mark.parametrize("wrong", ["nothing", "results", "writes", "all"])
def test_bare_ops_are_tried_once(
    name: str, wrong: str, trials: Trials, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A wrong kernel is refused with one warning. Arguments are written to once, by who serves."""
    op, inputs = _bare_calls()[name]
    kernel, written = op.overload("cpu"), "(a!)" in str(op.overload("cpu")._schema)
    if wrong == "writes" and not written:
        pytest.skip("it writes to no argument")
    runs = []

    def planted(*given: Any) -> Any:
        runs.append(given)
        found = as_tuple(kernel(*given))
        if wrong == "writes":
            names = [argument.name for argument in kernel._schema.arguments]
            given[names.index("new_error")].add_(0.01)
        if wrong == "results":
            found = (found[0] ^ 1 if found[0].dtype == torch.uint8 else found[0] * 1.01, *found[1:])
        if wrong == "all":
            raise RuntimeError("no kernel image")
        return found if len(found) > 1 else found[0]

    monkeypatch.setitem(op._steps, "cpu", planted)
    expected_inputs, mine = _copies(inputs), _copies(inputs)
    expected = as_tuple(op.reference(*expected_inputs))
    expects = pytest.warns(RuntimeWarning, match=f"cpu for {name},")
    with expects if wrong != "nothing" else contextlib.nullcontext():
        found = as_tuple(op.run(*mine))
    assert len(runs) == (3 if wrong == "nothing" else 1)  # the trial runs it twice
    numbers = [*found, *mine], [*expected, *expected_inputs]
    for one, other in zip(*numbers, strict=True):
        if not isinstance(one, torch.dtype):
            torch.testing.assert_close(one, other)
    again = _copies(inputs)
    op.run(*again)  # a second warning would be an error
    assert len(runs) == (4 if wrong == "nothing" else 1)


def _large_calls() -> dict[str, tuple[BareOp, tuple[Any, ...]]]:
    """Calls whose copies would not fit next to a model, on the scale of this test."""
    x = torch.randn(700, 801)
    flat = x.flatten()
    error = torch.randn_like(x)
    codes, absmax = quantize_8bit.quantize_reference(x, True)
    coded = quantize_8bit.quantize_reference(flat, True)
    block = 4096
    bits, scale = quantize_one_bit.quantize_reference(x, None, torch.empty_like(x), block)
    many = [torch.randn(n) for n in (100_000, 3, 60_000, 200_000)]
    ranks = torch.stack([bits, bits]), torch.stack([scale, scale])
    return {
        "rows": (quantize_8bit._QUANTIZE, (x, True)),
        "a vector": (quantize_8bit._QUANTIZE, (flat, True)),
        "codes": (quantize_8bit._DEQUANTIZE, (codes, absmax, True, torch.bfloat16)),
        "a vector's codes": (quantize_8bit._DEQUANTIZE, (*coded, True, torch.float32)),
        "one bit": (quantize_one_bit._QUANTIZE, (x, error, error, block)),
        "one scale": (
            quantize_one_bit._QUANTIZE,
            (x, None, error, quantize_one_bit.whole(x.numel())),
        ),
        "a mean": (
            quantize_one_bit._MEAN,
            (*ranks, None, torch.empty(x.numel()), x.numel(), block),
        ),
        "bits": (
            quantize_one_bit._DEQUANTIZE,
            (bits, scale, list(x.shape), block, torch.float32),
        ),
        "a list": (sum_of_squares._OP, (many,)),
        "one tensor": (sum_of_squares._OP, ([torch.randn(10**6)],)),
    }


@pytest.mark.parametrize("name", _large_calls())
def test_bare_ops_are_checked_on_a_part(
    name: str, trials: Trials, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (quantize_8bit, quantize_one_bit):
        monkeypatch.setattr(module, "_SAMPLED", 2**16 - 24)
    for module in (batch, sum_of_squares):
        monkeypatch.setattr(module, "MOST_SAMPLED", 2**16)
    op, inputs = _large_calls()[name]
    sample = op._sample(*inputs)
    sizes = [sum(t.numel() for t in bare._tensors(given)) for given in (sample, inputs)]
    assert 2**12 < sizes[0] < sizes[1] / 2
    if name == "one bit":
        assert sample[1] is sample[2], "what was one tensor still is"
    op.run(*_copies(inputs))
    (answer,) = trials.answers()
    assert (answer.backend, answer.faults, answer.ms) == ("cpu", {}, {})
