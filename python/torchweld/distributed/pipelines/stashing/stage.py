"""PipeDream and PipeDream-2BW: a pipeline that updates weights while microbatches are in flight.

Both run under torch's 1F1B. A stage takes the update of a microbatch as soon as its backward pass
ends, and a microbatch's backward pass uses the version of the weights of its forward pass. With n
stages, v the learning rate and w(t) the weights of all stages after t updates:

    "pipedream"  w(t+1) = w(t) - v grad(w_1(t-n+1), w_2(t-n+2), ..., w_n(t))
    "vertical"   w(t+1) = w(t) - v grad(w(t-n+1)), the version of the first stage in all stages
    "2bw"        w(t+1) = w(t) - v grad(w(t-1)), for the mean gradient of a batch of microbatches

Versions before the first are the first. In "pipedream" and "vertical" each microbatch is an update,
and the pipeline runs empty at the end of a schedule's step: pass many microbatches in a step. "2bw"
keeps its versions between steps, and so does not depend on how batches are divided among steps.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.func import functional_call

from torchweld.distributed.pipelines.stages import ScaledStage
from torchweld.distributed.train.parallel import STASHING
from torchweld.errors import ArgumentError


class StashingStage(ScaledStage):
    """A stage whose microbatches each use one version of the weights, forward and backward.

    Set `optimizer` before the first step: the stage steps it.

    Attributes:
        version: the number of updates so far.
        used: for each microbatch so far, the version of its forward and backward pass.
        most: the largest number of versions that were kept at a time.
    """

    def __init__(self, *args: Any, rule: str, accumulate: int = 1, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if rule not in STASHING:
            accepted = f"one of {', '.join(STASHING)}"
            raise ArgumentError("StashingStage", "rule", repr(rule), accepted)
        if accumulate < 1:
            raise ArgumentError("StashingStage", "accumulate", str(accumulate), "at least 1")
        self.rule, self.accumulate = rule, accumulate
        self.optimizer: Any = None
        self.version, self.most = 0, 1
        self.used: list[int] = []
        self._versions = {0: self._copy_weights()}
        self._begun = 0  # microbatches before this step
        self._updates_before = 0
        self._in_flight: dict[int, int] = {}  # microbatches of this step to their versions

    def _copy_weights(self) -> dict[str, torch.Tensor]:
        """Copy the weights into leaves, which collect the gradients of their version."""
        return {
            name: p.detach().clone().requires_grad_(p.requires_grad)
            for name, p in self.submod.named_parameters()
        }

    def _choose_version(self, microbatch: int) -> int:
        """Choose the version of the weights for a microbatch whose forward pass begins."""
        if self.rule == "pipedream":
            return self.version
        if self.rule == "vertical":
            return self._updates_before + max(0, microbatch - self.num_stages + 1)
        batch = (self._begun + microbatch) // self.accumulate
        return max(batch - 1, min(self._versions))

    def forward_one_chunk(self, fwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        """Run a forward pass with the version of this microbatch."""
        if fwd_chunk_id == 0:
            self._begun, self._updates_before = len(self.used), self.version
        self._in_flight[fwd_chunk_id] = self._choose_version(fwd_chunk_id)
        self.used.append(self._in_flight[fwd_chunk_id])
        return super().forward_one_chunk(fwd_chunk_id, *args, **kwargs)

    def forward_maybe_with_nosync(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module on the leaves of a version instead of its own parameters."""
        return functional_call(self.submod, self._versions[self.used[-1]], args, kwargs)

    def backward_one_chunk(self, bwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        """Run a backward pass, and update the weights if it ends a batch."""
        super().backward_one_chunk(bwd_chunk_id, *args, **kwargs)
        leaves = self._versions[self._in_flight.pop(bwd_chunk_id)]
        for name, p in self.submod.named_parameters():
            grad, leaves[name].grad = leaves[name].grad, None
            if grad is not None:
                p.grad = grad if p.grad is None else p.grad + grad
        if (self._begun + bwd_chunk_id + 1) % self.accumulate == 0:
            self._update()

    def _update(self) -> None:
        for p in self.submod.parameters():
            if p.grad is not None and self.accumulate > 1:
                p.grad.div_(self.accumulate)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.version += 1
        oldest = min([self._find_oldest(), *self._in_flight.values()])
        for version in [v for v in self._versions if v < oldest]:
            del self._versions[version]
        self._versions[self.version] = self._copy_weights()
        self.most = max(self.most, len(self._versions))

    def restart(self) -> None:
        """Forget older versions, after other weights have been loaded."""
        self._versions = {self.version: self._copy_weights()}

    def _find_oldest(self) -> int:
        """Find the oldest version that a later microbatch may need."""
        if self.rule == "2bw":
            return self.version - 1
        if self.rule == "pipedream":
            return self.version
        return self._choose_version(len(self.used) - self._begun)  # of the next microbatch

    def scale_grads(self, grad_scale_factor: int) -> None:
        """Do nothing: updates have used the gradients."""


def count_versions(rule: str, stage: int, stages: int, microbatches: int) -> int:
    """Count the most versions that a stage stashes at a time, in addition to its parameters."""
    if rule == "2bw":
        return 2
    waiting = stages - stage if rule == "pipedream" else stages
    return min(waiting, microbatches + 1)
