"""Gradient release: parameters step in the backward pass, and their gradients are freed."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterator
from typing import Any

import torch

from torchweld import checks, state
from torchweld.errors import ArgumentError
from torchweld.optim._base import FusedOptimizer, Group
from torchweld.optim._sharded_blocks import split_rows
from torchweld.optim._shards import is_sharded, local_part
from torchweld.optim.adafactor import Adafactor, TransformersAdafactor
from torchweld.optim.muon import Muon

_NAME = "release_gradients"


class GradientRelease:
    """What `release_gradients` returns: parameters of a model that step in the backward pass."""

    def __init__(
        self, model: torch.nn.Module, optimizer: FusedOptimizer, bucket_bytes: int
    ) -> None:
        self._optimizer, self._bucket_bytes = optimizer, bucket_bytes
        self._places = optimizer._find_places()
        self._pending: list[torch.Tensor] = []
        self._pending_bytes = 0
        self._seen: set[torch.Tensor] = set()  # since the last step
        self._pass = -1  # the backward pass, as autograd numbers them
        self._accumulates = False
        hooked = [p for p in model.parameters() if p in self._places and p.requires_grad]
        self._hooks: list[Any] = [p.register_post_accumulate_grad_hook(self._take) for p in hooked]
        self._hooks.append(optimizer.register_step_pre_hook(self._check))
        self._hooks.append(optimizer.register_step_post_hook(self._end))

    @contextlib.contextmanager
    def accumulate(self) -> Iterator[None]:
        """Backward passes in this context only accumulate gradients, which then stay."""
        before, self._accumulates = self._accumulates, True
        try:
            yield
        finally:
            self._accumulates = before

    def remove(self) -> None:
        """Remove all hooks; gradients that have arrived stay for the next step."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = []

    def _take(self, p: torch.Tensor) -> None:
        """Take a gradient that is complete, and step if a bucket is full."""
        if self._accumulates or p.grad is None:
            return
        if p in self._seen:
            accepted = "step() after each backward pass, or accumulate() around all but the last"
            raise ArgumentError(_NAME, "a gradient", "of a second backward pass", accepted)
        _check_optimizer(self._optimizer)
        self._watch_pass()
        grad = local_part(p.grad)
        nbytes = grad.nbytes if grad.layout is torch.strided else p.nbytes
        self._seen.add(p)
        self._pending.append(p)
        self._pending_bytes += nbytes
        if self._pending_bytes >= self._bucket_bytes:
            self._step_pending()

    def _watch_pass(self) -> None:
        """Have the current backward pass forgotten if it fails."""
        current = state.find_backward_pass()
        if current == self._pass:
            return
        self._pass = current

        def end() -> None:
            forget.detach()

        # Autograd calls `end` after a pass that succeeds, and only drops it after one that fails.
        forget = weakref.finalize(end, self._forget)
        forget.atexit = False
        torch.autograd.Variable._execution_engine.queue_callback(end)

    def _forget(self) -> None:
        """Forget which gradients have arrived; the next pass brings them again."""
        self._pending, self._pending_bytes = [], 0
        self._seen.clear()

    def _step_pending(self) -> None:
        """Step the parameters whose gradients have arrived, and free the gradients."""
        with torch.no_grad(), self._optimizer._only(self._pending, self._places):
            self._optimizer._run(self._optimizer._tasks())
        for p in self._pending:
            p.grad = None
        self._pending, self._pending_bytes = [], 0

    def _check(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        if any(getattr(optimizer, name, None) is not None for name in ("grad_scale", "found_inf")):
            accepted = "none: gradients would be used before it knows whether they are finite"
            raise ArgumentError(_NAME, "GradScaler", "a scaler's step", accepted)

    def _end(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        """The step has taken the rest."""
        for p in self._pending:
            p.grad = None
        self._forget()


def release_gradients(
    model: torch.nn.Module, optimizer: torch.optim.Optimizer, *, bucket_bytes: int = 2**25
) -> GradientRelease:
    """Step parameters in the backward pass, as their gradients arrive, and free the gradients.

    Gradients wait until they fill a bucket of `bucket_bytes`, and their parameters step together;
    so at most one bucket and one more gradient exist at a time. The trajectory is bitwise the same
    as without. `optimizer.step()` is still called after the backward pass: it steps the rest. Steps
    use the learning rates set during the backward pass, so schedulers work as usual.

    With several backward passes a step, put all but the last in `with release.accumulate():`;
    their gradients stay, as a sum. A second pass outside of it is an error, unless the first one
    failed: after `zero_grad()` it may run again, but buckets that had stepped have taken a step.

    Args:
        model: the model; under FSDP2 its parameters are DTensors, whose gradients arrive reduced.
        optimizer: of torchweld.optim, of the same parameters. Parameters that the model lacks step
            as usual.
        bucket_bytes: the gradients that step together, on each device.

    Refused: max_grad_norm, which needs all gradients, and a GradScaler, which decides after the
    backward pass; DistributedDataParallel, which reduces gradients after the hooks; on
    sharded parameters, rules that exchange numbers among devices: LAMB, LARS, Muon, Adafactor,
    8-bit states of rows that are split, and cautious steps.
    """
    if not isinstance(optimizer, FusedOptimizer) or optimizer._exchanges_gradients:
        accepted = "an optimizer of torchweld.optim that does not communicate; Offload has its own"
        raise ArgumentError(_NAME, "optimizer", f"a {type(optimizer).__name__}", accepted)
    fits = type(bucket_bytes) is int and bucket_bytes > 0
    checks.fits(_NAME, "bucket_bytes", bucket_bytes, fits, "an int > 0")
    wrapper = torch.nn.parallel.DistributedDataParallel
    if any(isinstance(module, wrapper) for module in model.modules()):
        accepted = "a model without DistributedDataParallel; FSDP2's works"
        raise ArgumentError(_NAME, "model", "in a DistributedDataParallel", accepted)
    _check_optimizer(optimizer)
    for group in optimizer.param_groups:
        for p in group["params"]:
            _check_param(optimizer, group, p)
    return GradientRelease(model, optimizer, bucket_bytes)


def _check_optimizer(optimizer: FusedOptimizer) -> None:
    accepted = "None: the norm of all gradients is not known in the backward pass"
    limit = optimizer.max_grad_norm
    checks.fits(_NAME, "max_grad_norm", limit, limit is None, accepted)


def _check_param(optimizer: FusedOptimizer, group: Group, p: torch.Tensor) -> None:
    """Refuse an exchange in the backward pass, which devices would have to enter together."""
    if not is_sharded(p):
        return
    rules = (Muon, Adafactor, TransformersAdafactor)
    what = type(optimizer).__name__ if isinstance(optimizer, rules) else None
    if group.get("cautious"):
        what = "cautious=True"
    if what is None and optimizer._ratios_of(group, torch.zeros(())) is not None:
        what = type(optimizer).__name__
    entries = optimizer._codec_of(p).entries(p, optimizer._all_moments(group, p))
    if what is None and entries.absmaxes and split_rows(p) is not None:
        what = "8-bit states of rows that are split"
    if what is not None:
        accepted = "a rule that steps a shard by itself"
        raise ArgumentError(_NAME, "optimizer", f"{what} on sharded parameters", accepted)
