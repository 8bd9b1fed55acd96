"""The torch.library that all ops of torchweld are defined in."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from pathlib import PurePosixPath
from typing import Any

import torch

from torchweld.dispatch.tile_proof import connect
from torchweld.dispatch.visible import show_launches
from torchweld.dispatch.warm import plans

LIBRARY = torch.library.Library("torchweld", "DEF")
LIBRARY.define("use_cpu_kernels(int selected, int baseline) -> ()")
# Draws from torch's generator of the device of `fresh`. `fresh` itself is not read: a new tensor at
# every call keeps compilers from taking two calls for one.
LIBRARY.define("seed(Tensor fresh) -> Tensor", tags=(torch.Tag.nondeterministic_seeded,))


def define_overload(
    name: str,
    backend: str,
    schema: str,
    fake: Callable[..., Any],
    triton: str | None = None,
    visible: bool = False,
) -> Any:
    """Define `torchweld::name.backend`; `triton` is the file with its Triton kernel.

    `visible`: Inductor's own code starts the kernel, see visible.py.
    """
    LIBRARY.define(f"{name}.{backend}{schema}")
    torch.library.register_fake(f"torchweld::{name}.{backend}", fake, lib=LIBRARY)
    if backend == "triton":
        assert triton is not None
        find = _implement_in_triton(name, triton)
        if visible:
            show_launches(LIBRARY, name, find)
    overload = getattr(getattr(torch.ops.torchweld, name), backend)
    if name.endswith("_backward"):
        for layout in ("SparseCPU", "SparseCUDA"):
            LIBRARY.impl(f"{name}.{backend}", functools.partial(_run_dense, overload), layout)
    return overload


def _run_dense(overload: Any, *inputs: Any) -> Any:
    """Run a backward pass on sparse gradients, which torch's own ops take."""
    dense = [t.to_dense() if isinstance(t, torch.Tensor) and t.is_sparse else t for t in inputs]
    return overload(*dense)


def define_differentiable(name: str, backend: str, schema: str, run: Callable[..., Any]) -> Any:
    """Define `torchweld::name.backend_differentiable`, which autograd follows into `run`.

    Graphs that torch.export makes hold it: an overload of a kernel has no derivative of its own.
    """
    overload = f"{backend}_differentiable"
    LIBRARY.define(f"{name}.{overload}{schema}")
    LIBRARY.impl(f"{name}.{overload}", run, "CompositeImplicitAutograd")
    return getattr(getattr(torch.ops.torchweld, name), overload)


def make_step(overload: Any) -> Callable[..., Any]:
    """The overload for calls that are alike: without its Python frame, or with a plan."""
    function = IN_TRITON.get(overload)
    return overload._op if function is None else plans.Planned(function, overload)  # type: ignore[no-any-return]


def import_kernels(source: str) -> Any:
    """The module of a file such as triton_kernels/norm.py."""
    return importlib.import_module(
        ".".join(["torchweld", *PurePosixPath(source).with_suffix("").parts])
    )


# What implements each overload that Triton serves.
IN_TRITON: dict[Any, Callable[[], Any]] = {}


def _implement_in_triton(name: str, source: str) -> Callable[[], Any]:
    """What finds the function of that name in `source`; the first call imports the module."""

    @functools.cache
    def find_module() -> Any:
        module = import_kernels(source)
        connect()
        return module

    def find() -> Any:
        return getattr(find_module(), name)

    def implementation(*inputs: Any) -> Any:
        try:
            return find()(*inputs)
        except Exception as error:
            if type(error).__name__ == "OutOfResources":
                raise OutOfResourcesError(f"{name}: {error}") from error
            raise

    LIBRARY.impl(f"{name}.triton", implementation, "CUDA")
    LIBRARY.impl(f"{name}.triton", implementation, "CPU")  # the interpreter
    IN_TRITON[getattr(torch.ops.torchweld, name).triton] = find
    return find


class OutOfResourcesError(RuntimeError):
    """A kernel takes more shared memory or registers than this GPU has.

    Triton's own error is no RuntimeError, so that callers would not catch it.
    """
