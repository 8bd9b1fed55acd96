"""check_fit: whether a model and a batch divide among processes, before anything is sent."""

from __future__ import annotations

import torch

from torchweld import checks
from torchweld.distributed.layers import find_layers
from torchweld.distributed.tensor.plan import tp_plan
from torchweld.distributed.tensor.styles import Style, describe_nearest
from torchweld.distributed.train.parallel import STASHING, Parallel
from torchweld.errors import ArgumentError


def check_fit(
    model: torch.nn.Module,
    parallel: Parallel,
    *,
    length: int | None = None,
    microbatches: int | None = None,
) -> None:
    """Raise an error that says what does not divide, and the nearest sizes that do.

    It reads shapes, and runs the tensor-parallel plan of a model of transformers on fake tensors.
    The model may be on the meta device.

    Args:
        model: the whole model, before any process cuts it.
        parallel: how processes share the work.
        length: tokens in a sequence; None: not checked.
        microbatches: microbatches of a step over all processes; None: not checked.
    """
    if parallel.tensor > 1 and parallel.mode == "1d":
        check_matrices(model, parallel.tensor, parallel.sequence)
    if parallel.pipeline > 1:
        _check_stages(model, parallel)
    if length is not None:
        checks.count("parallelize", "length", length, 1)
        _check_multiple("length", length, parallel.ring, "processes of a ring")
        if parallel.sequence:
            # Each slice of the ring is divided again.
            count = parallel.ring * parallel.tensor
            _check_multiple("length", length, count, "processes that share the sequence")
    if microbatches is not None:
        check_microbatches(parallel, microbatches)


def check_microbatches(parallel: Parallel, microbatches: int) -> None:
    """Check that replicas divide a step's microbatches, and that a schedule has enough of them."""
    checks.count("parallelize", "microbatches", microbatches, 1)
    _check_multiple("microbatches", microbatches, parallel.replicas, "replicas")
    if parallel.stashes and parallel.schedule == "2bw":
        _check_batches(microbatches, parallel)
    each = microbatches // parallel.replicas
    one_by_one = parallel.pipeline > 1 and parallel.schedule in ("1f1b", *STASHING)
    if one_by_one and each < parallel.pipeline:
        actual = f"{microbatches}, which is {each} for each of {parallel.replicas} replicas"
        accepted = f"at least {parallel.pipeline} for each, as many as the pipeline's processes"
        raise ArgumentError("parallelize", "microbatches", actual, accepted)


def check_matrices(model: torch.nn.Module, count: int, sequence: bool = False) -> None:
    """Run the checks of the tensor-parallel plan: whether modules divide, and whether they run."""
    style = next(iter(tp_plan(model, sequence).values()))
    assert isinstance(style, Style)
    for check in style.checks:  # all styles of a plan have the same
        check(count)


def _check_stages(model: torch.nn.Module, parallel: Parallel) -> None:
    layers = len(find_layers(model))
    if layers < parallel.stages:
        accepted = f"at least one for each of {parallel.stages} stages"
        raise ArgumentError("parallelize", "layers", str(layers), accepted)
    names = [name for name, _ in model.named_parameters(remove_duplicate=False)]
    own = {name for name, _ in model.named_parameters()}
    tied = [name for name in names if name not in own]
    if tied:
        actual = f"one whose {tied[0]} is another parameter too"
        accepted = "untied parameters in a pipeline, or pipeline(), which sums their gradients"
        raise ArgumentError("parallelize", "model", actual, accepted)


def _check_batches(microbatches: int, parallel: Parallel) -> None:
    """Check that PipeDream-2BW needs no more than two versions, and that batches end with steps."""
    each = parallel.accumulate or microbatches
    if each < parallel.pipeline:
        accepted = f"at least one for each of {parallel.pipeline} stages"
        raise ArgumentError("parallelize", "accumulate", f"{each} microbatches", accepted)
    _check_multiple("microbatches", microbatches, each, "microbatches of an update")


def _check_multiple(name: str, size: int, count: int, of: str) -> None:
    if size % count:
        accepted = f"a multiple of {count} {of}; the nearest are {describe_nearest(size, count)}"
        raise ArgumentError("parallelize", name, str(size), accepted)
