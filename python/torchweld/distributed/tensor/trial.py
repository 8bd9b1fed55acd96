"""try_plan: run a tensor-parallel plan on fake tensors, before a real model is changed."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import (
    FakeProcessGroup,
    _register_process_group,
    _unregister_process_group,
)
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import parallelize_module
from torch.utils._pytree import tree_leaves

from torchweld.distributed.tensor.sums import no_sync
from torchweld.errors import ArgumentError

# The dimension's name: DTensor's caches must not take the mesh of a trial for a real one.
_NAME: Any = "torchweld_trial"
_TOKENS = 8  # of each device


def try_plan(model: Any, make_plan: Callable[[Any], dict[str, Any]], count: int) -> None:
    """Raise an error if a model fails under a plan on this many devices, but not on one.

    Only models of transformers tell what their inputs are. A model whose code depends on the values
    of tensors, as routers of experts do, has no trial.

    Args:
        make_plan: makes the plan of a copy of the model.
    """
    inputs = _describe_inputs(model, count)
    if inputs is None:
        return
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    with torch.random.fork_rng(devices=()), _make_mesh(count) as mesh, mode:
        given = {key: torch.zeros(shape, dtype=dtype) for key, (shape, dtype) in inputs.items()}
        try:
            _run(_copy(model), given)
        except Exception:  # the trial can say nothing about the plan
            return
        part = _copy(model)
        names = {id(module): name for name, module in part.named_modules()}
        try:
            plan = make_plan(part)
            for style in plan.values():
                style.checks.clear()  # a trial in the trial, among others
            _run(parallelize_module(part, mesh, plan), given)
        except ArgumentError:
            raise
        except Exception as error:
            where = _find_module(error, names) or "forward"
            reason = str(error).strip().partition("\n")[0][:100]
            actual = f"a {type(model).__name__}, whose {where} fails on {count} devices ({reason})"
            accepted = "one whose modules work on a device's part of the heads and features"
            raise ArgumentError("tp_plan", "model", actual, accepted) from error


def _describe_inputs(model: Any, count: int) -> dict[str, tuple[list[int], torch.dtype]] | None:
    """Describe a model's inputs by shapes and dtypes; None: they are not known."""
    name, config = getattr(model, "main_input_name", None), getattr(model, "config", None)
    if name == "input_ids":
        shape = [2, _TOKENS * count]
        # Zeros in a mask of tokens would be padding, but fake tensors have no values.
        names = ["input_ids", "attention_mask"]
        if getattr(config, "is_encoder_decoder", False):
            names.append("decoder_input_ids")
        return dict.fromkeys(names, (shape, torch.int64))
    size, channels = getattr(config, "image_size", None), getattr(config, "num_channels", None)
    if name == "pixel_values" and isinstance(size, int) and isinstance(channels, int):
        return {name: ([2, channels, size, size], next(model.parameters()).dtype)}
    return None


def _copy(model: torch.nn.Module) -> Any:
    """Copy a model, with fake tensors on the CPU in place of its own."""
    memo: dict[int, Any] = {}
    for t in itertools.chain(model.parameters(), model.buffers()):
        fake = torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device="cpu")
        is_parameter = isinstance(t, torch.nn.Parameter)
        memo[id(t)] = torch.nn.Parameter(fake, t.requires_grad) if is_parameter else fake
    return copy.deepcopy(model, memo)


def _run(model: torch.nn.Module, inputs: dict[str, torch.Tensor]) -> None:
    """Run a forward and a backward pass without reducing gradients."""
    with torch.enable_grad(), no_sync(model):
        outputs = [t for t in tree_leaves(model(**inputs)) if isinstance(t, torch.Tensor)]
        sums = [t.sum() for t in outputs if t.requires_grad]
        torch.autograd.backward(sums)


@contextmanager
def _make_mesh(count: int) -> Iterator[DeviceMesh]:
    """Make the mesh of a process without others, which leaves torch.distributed as it is."""
    group = dist.ProcessGroup(dist.HashStore(), 0, count)
    custom = dist.ProcessGroup.BackendType.CUSTOM
    fake = FakeProcessGroup._create_internal(0, count)
    group._register_backend(torch.device("cpu"), custom, fake)
    group._set_group_name(_NAME)
    _register_process_group(_NAME, group)
    try:
        mesh = _Mesh("cpu", [*range(count)], mesh_dim_names=(_NAME,), _init_backend=False, _rank=0)
        mesh._dim_group_names = [_NAME]
        mesh.group = group
        yield mesh
    finally:
        _unregister_process_group(_NAME)


class _Mesh(DeviceMesh):
    """A mesh that torch.distributed does not know."""

    group: dist.ProcessGroup

    def get_group(self, mesh_dim: int | str | None = None) -> dist.ProcessGroup:
        return self.group

    def get_local_rank(self, mesh_dim: int | str | None = None) -> int:
        return 0

    def get_rank(self) -> int:
        return 0


def _find_module(error: BaseException, names: dict[int, str]) -> str:
    """Find the name of the innermost module in which an error was raised."""
    found, trace = "", error.__traceback__
    while trace is not None:
        found = names.get(id(trace.tb_frame.f_locals.get("self")), "") or found
        trace = trace.tb_next
    return found
