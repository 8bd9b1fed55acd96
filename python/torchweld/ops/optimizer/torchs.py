"""torch's own fused and foreach steps, for GPUs on which no kernel of ours is proven correct."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from torchweld.ops.optimizer.batch import Task, Tensors, is_foreign_to_kernels

# Steps the parameters given as lists: params, grads, each moment, the step counts. They share one
# learning rate, and if `found_inf` is 1 the step is skipped.
Fused = Callable[[Sequence[Tensors], float, torch.Tensor | None], None]


def take_torchs_step(task: Task, fused: Fused) -> bool:
    """Step the batch with torch's kernel, one call per rate; False if torch's cannot serve it.

    Gradients are unscaled and clipped beforehand, since torch's kernel would write them back.
    """
    batch, count = task.batch, len(task.batch.params)
    lists = [batch.params, batch.grads]
    lists += [batch.moments[at : at + count] for at in range(0, len(batch.moments), count)]
    if not _serves(task, lists):
        return False
    device = batch.params[0].device
    if task.grad_factor is not None:
        factor = task.grad_factor.to(device, batch.params[0].dtype).reshape(())
        lists[1] = list(torch._foreach_mul(lists[1], factor))
    found_inf = task.found_inf
    taken: torch.Tensor | float = 1.0
    if found_inf is not None:
        found_inf = (found_inf != 0).to(device, torch.float32)
        taken = 1 - found_inf.reshape(())
    lists.append(list(torch._foreach_add(batch.steps, 1.0)))
    for rate, chosen in _by_rate(task.lr, count).items():
        fused([[some[i] for i in chosen] for some in lists], rate, found_inf)
    torch._foreach_add_(batch.steps, taken)
    return True


def _serves(task: Task, lists: Sequence[Tensors]) -> bool:
    """Whether torch stores such states, and keeps each in its parameter's own layout."""
    batch = task.batch
    first = batch.params[0]
    coded = batch.masters or batch.absmaxes or batch.rounding_offsets
    if first.is_meta or task.settings_of_each is not None:
        return False  # not all of them have a meta kernel, and they take one set of settings
    if coded or task.ratios is not None or task.lr.device.type != "cpu":
        return False
    if is_foreign_to_kernels(first) or {t.dtype for some in lists for t in some} != {first.dtype}:
        return False
    return all(
        len({t.stride() for t in of_one if t.shape == of_one[0].shape}) == 1
        for of_one in zip(*lists, strict=True)
    )


def _by_rate(lr: torch.Tensor, count: int) -> dict[float, Sequence[int]]:
    """The indices of the parameters with each learning rate."""
    if lr.numel() == 1:
        return {lr.item(): range(count)}
    indices: dict[float, list[int]] = {}
    for i, rate in enumerate(lr.tolist()):
        indices.setdefault(rate, []).append(i)
    return dict(indices)
