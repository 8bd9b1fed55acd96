"""Calls of CPU kernels without torch's dispatcher: its bits, and it serves where it is needed."""

from __future__ import annotations

import platform
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import fresh
import torchweld
from oracle import run
from torchweld import numerics
from torchweld.bench.cases import CASES
from torchweld.dispatch import native
from torchweld.dispatch.autograd import Ready, complete_steps
from torchweld.dispatch.warm import direct, guards, objects
from torchweld.dispatch.warm.direct import make_direct
from torchweld.registry import OPS, Op, materialize

OURS = [op for op in OPS.values() if "cpu" in getattr(op, "kernels", {})]
pytestmark = pytest.mark.skipif(direct._load() is None, reason=f"{native.missing}")


def _refuse(*_: Any) -> Any:
    raise AssertionError("it took the dispatcher")


@pytest.mark.parametrize("default", ["float64", "bfloat16", "meta"])
def test_defaults_change_nothing(default: str) -> None:
    """The first call may come under any default device and dtype."""
    torch.set_default_dtype(getattr(torch, default, torch.float32))
    try:
        with torch.device("meta" if default == "meta" else "cpu"):
            assert direct._load.__wrapped__() is not None
    finally:
        torch.set_default_dtype(torch.float32)


def _make_both(op: Op, twin: Callable[..., Any] | None = None) -> Ready:
    kernel = op.kernels["cpu"]
    both = kernel.forward, kernel.backward
    return Ready(*[make_direct(overload, twin or overload._op) for overload in both])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("name", [op.name for op in OURS])
def test_bits_of_the_dispatcher(name: str, dtype: torch.dtype) -> None:
    """Every sample, and none of them takes the dispatcher."""
    op = OPS[name]
    kernel = op.kernels["cpu"]
    for sample in CASES[op.name].samples:
        inputs = materialize(sample, dtype)
        if op.why_not("cpu", inputs) is not None:
            continue
        # A number that is an integer in a sample is one that the dispatcher turns into a float.
        kinds = zip(inputs, op.forward_signature.types, strict=True)
        inputs = [float(v) if "float" in kind and type(v) is int else v for v, kind in kinds]
        ready = complete_steps(op, _make_both(op, _refuse), inputs)
        found = run(
            op,
            list(inputs),
            lambda *i, ready=ready: kernel.ready_function.apply(
                ready, *[i[at] for at in op.tensors_at]
            ),
        )
        wanted = run(op, list(inputs), lambda *i: kernel.function.apply(*i))
        for name, value in wanted.items():
            torch.testing.assert_close(found[name], value, **numerics.SAME, equal_nan=True)


LAYER_NORM = OPS["layer_norm"]
X, ROW = torch.randn(4, 8), torch.ones(8)
MEAN, RSTD = torch.zeros(4), torch.ones(4)
BACKWARD = (torch.randn(4, 8), X, [8], ROW, ROW, 1e-5, MEAN, RSTD, True, True)


class _Sub(torch.Tensor):
    pass


@pytest.mark.parametrize(
    ("at", "value"),
    [
        (0, X.as_subclass(_Sub)),
        (0, None),
        (1, 8),
        (1, [8.0]),
        (1, [torch.tensor(8)]),
        (2, [1.0]),
        (4, 1),
        (4, torch.tensor(1e-5)),
        (4, "1e-5"),
    ],
)
def test_other_arguments_take_the_dispatcher(at: int, value: Any) -> None:
    inputs = [X, [8], ROW, ROW, 1e-5]
    forward = make_direct(LAYER_NORM.kernels["cpu"].forward, lambda *given: given)
    assert len(forward(*inputs)) == 3
    inputs[at] = value
    assert forward(*inputs)[at] is value
    assert len(forward(*inputs, 1)) == 6


def test_a_gradient_that_needs_the_dispatcher_takes_it() -> None:
    """A negative view, zeros without memory, one batched by vmap, and one that a mode is to see."""
    kernel = LAYER_NORM.kernels["cpu"]
    backward = make_direct(kernel.backward, _refuse)
    wanted = kernel.backward(*BACKWARD)
    torch.testing.assert_close(backward(*BACKWARD), wanted, **numerics.SAME)
    grad, *rest = BACKWARD
    for given in (torch._neg_view(grad), torch._efficientzerotensor(grad.shape), None):
        with pytest.raises(AssertionError, match="dispatcher"):
            backward(given, *rest)
    with TorchDispatchMode(), pytest.raises(AssertionError, match="dispatcher"):
        backward(grad, *rest)
    with pytest.raises(AssertionError, match="dispatcher"):
        torch.func.vmap(lambda g: backward(g, *rest)[0])(grad[None])


def test_gradients_that_autograd_batches_are_served() -> None:
    """As the same gradients one by one; after some calls, without the dispatcher."""
    x, row = X.clone().requires_grad_(), ROW.clone().requires_grad_()
    with torchweld.use_backend("cpu"):
        for _ in range(3):
            y = torchweld.functional.layer_norm(x, [8], row, row)
    grads = torch.randn(5, 4, 8)
    found = torch.autograd.grad(y, [x, row], grads, is_grads_batched=True, retain_graph=True)
    each = [torch.autograd.grad(y, [x, row], grad, retain_graph=True) for grad in grads]
    for mine, wanted in zip(found, zip(*each, strict=True), strict=True):
        assert torch.equal(mine, torch.stack(wanted))


def test_an_error_of_a_kernel_is_raised() -> None:
    forward = _make_both(LAYER_NORM, _refuse).forward
    with pytest.raises(RuntimeError, match="eps is negative"):
        forward(X, [8], ROW, ROW, -1.0)
    with pytest.raises(RuntimeError, match="dtype is not one of"):
        forward(X.int(), [8], None, None, 1e-5)


def test_other_threads_run_meanwhile() -> None:
    """A kernel does not hold Python's lock: this thread counts while another one is in a kernel."""
    forward = _make_both(LAYER_NORM, _refuse).forward
    x, row = torch.randn(20_000, 1024), torch.ones(1024)

    def work() -> None:
        for _ in range(5):
            forward(x, [1024], row, row, 1e-5)

    thread, turns = threading.Thread(target=work), 0
    thread.start()
    while thread.is_alive():
        turns += 1
        time.sleep(0.0005)
    assert turns > 20, "it had a turn between kernels only"


def test_without_the_library_the_dispatcher_serves(tmp_path: Path) -> None:
    """The reason is kept, and results are the same."""
    program = """
import torch, torchweld
from torchweld.dispatch import native
from torchweld.dispatch.warm import direct, guards, objects
with torchweld.use_backend("cpu"):
    x = torch.ones(4, 8, requires_grad=True)
    for _ in range(3):
        torchweld.functional.rms_norm(x, [8]).sum().backward()
print(direct._load() is None, native.missing.get("torchweld_python"), x.grad.norm().item())
"""
    for path in native.DIRECTORY.iterdir():
        if "python" not in path.name:
            (tmp_path / path.name).symlink_to(path)
    without = fresh.run(program, TORCHWELD_LIB=str(tmp_path))
    assert without.stdout.startswith("True"), without
    assert "does not exist" in without.stdout
    (tmp_path / "libtorchweld_python.so").symlink_to(native.DIRECTORY / "libtorchweld_cpu.so")
    other = fresh.run(program, TORCHWELD_LIB=str(tmp_path))
    assert other.stdout.startswith("True"), other
    assert "torchweld_prepare" in other.stdout
    here = fresh.run(program)
    assert here.stdout.startswith("False None"), here
    assert here.stdout.split()[-1] == without.stdout.split()[-1] == other.stdout.split()[-1]


@pytest.mark.skipif(platform.system() != "Linux", reason="nm of ELF")
def test_it_needs_only_the_limited_api() -> None:
    """Of Python 3.10, so that it loads in all later ones: the names are in its documented list."""
    library = native.DIRECTORY / "libtorchweld_python.so"
    command = ["nm", "-D", "--undefined-only", str(library)]
    listed = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()
    used = {name for name in listed if name.startswith(("Py", "_Py"))}
    assert used <= LIMITED, used - LIMITED


LIMITED = set(
    re.findall(
        r"\w+",
        """
    PyArg_ParseTuple PyBool_Type PyBytes_AsString PyBytes_Size PyCFunction_GetFlags
    PyCFunction_GetFunction PyCFunction_GetSelf PyCFunction_Type PyCMethod_New PyCapsule_GetPointer
    PyCapsule_New PyDict_GetItem PyErr_Clear PyErr_Occurred PyErr_SetString PyEval_RestoreThread
    PyEval_SaveThread PyExc_RuntimeError PyFloat_AsDouble PyFloat_Type PyList_AsTuple
    PyList_GetItem PyList_New PyList_SetItem PyList_Size PyLong_AsLong PyLong_AsLongLong
    PyLong_AsUnsignedLongLongMask PyLong_AsVoidPtr PyLong_FromSsize_t PyObject_Call
    PyObject_CallFunctionObjArgs PyObject_CallMethodObjArgs PyObject_CallNoArgs PyObject_IsTrue
    PyTuple_GetItem PyTuple_New PyTuple_SetItem PyTuple_Size PyType_GetFlags PyType_IsSubtype
    PyUnicode_AsUTF8AndSize _Py_Dealloc _Py_NoneStruct _Py_TrueStruct _Py_FalseStruct""",
    )
)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested")
@pytest.mark.parametrize("is_native", [True, False])
def test_a_guard_is_safe(is_native: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch's comparison throws at a nested tensor, through C, which ended the process."""
    if not is_native:
        monkeypatch.setattr(objects, "_load_checks", lambda: None)
    x = torch.ones(3)
    matches = guards.compare_exactly([x, ROW])
    before = sys.getrefcount(x)
    nested = torch.nested.nested_tensor([x, x])
    for _ in range(9):
        assert matches(x.clone(), ROW)
        assert not matches(x, nested)
        assert not matches(nested, ROW)
        assert not matches(x.double(), ROW)
    assert sys.getrefcount(x) == before


@pytest.mark.filterwarnings("error")
def test_compiled_autograd_traces_a_warm_node() -> None:
    """It met the function in C, broke its graph and warned: only first calls were tried."""
    x, row = torch.randn(600, 8, requires_grad=True), ROW.clone().requires_grad_()
    compiler = torch.compile(backend="aot_eager")
    with torchweld.use_backend("cpu"):
        for _ in range(3):
            y = torchweld.functional.rms_norm(x, [8], row)
            wanted = torch.autograd.grad(y.sum(), [x, row], retain_graph=True)
            x.grad = row.grad = None
            with torch._dynamo.compiled_autograd._enable(compiler):
                y.sum().backward()
            torch.testing.assert_close([x.grad, row.grad], list(wanted))


def test_sparse_gradients_are_served() -> None:
    """As the dense ones, cold and warm; torch's own ops take them, and our kernels refused."""
    for call in (
        lambda x, row: torchweld.functional.bias_dropout_add(x, row, x.detach()),
        lambda x, row: torchweld.functional.rms_norm(x, [8], row),
    ):
        for _ in range(3):
            x, row = X.clone().requires_grad_(), ROW.clone().requires_grad_()
            with torchweld.use_backend("cpu"):
                y = call(x, row)
            grad = torch.eye(4, 8)
            wanted = torch.autograd.grad(y, [x, row], grad, retain_graph=True)
            found = torch.autograd.grad(y, [x, row], grad.to_sparse())
            torch.testing.assert_close([g.to_dense() for g in found], list(wanted))
