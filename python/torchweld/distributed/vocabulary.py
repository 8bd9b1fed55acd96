"""The style of a head that computes the loss of a vocabulary that devices share."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from torchweld import nn
from torchweld.distributed.styles import Style, check_rank
from torchweld.errors import ArgumentError


class VocabularyParallel(Style):
    """Shard the classes of a torchweld.nn.LinearCrossEntropy, of any number.

    Devices exchange a few numbers a row, never logits. The input and the target are local: along a
    ring they are the device's slice of the sequence, and the loss covers the whole sequence.
    """

    def check(self, name: str, module: torch.nn.Module, count: int) -> None:
        if not isinstance(module, nn.LinearCrossEntropy):
            actual, accepted = f"a {type(module).__name__}, {name}", "a LinearCrossEntropy"
            raise ArgumentError("VocabularyParallel", "module", actual, accepted)

    def _change(self, module: torch.nn.Module, device_mesh: DeviceMesh) -> torch.nn.Module:
        self.distribute(module, device_mesh, lambda _: Shard(0))
        forward = partial(self._forward, module.forward, device_mesh)
        module.forward = forward  # type: ignore[method-assign]
        return module

    def _forward(self, forward: Any, mesh: DeviceMesh, input: Any, target: Any) -> Any:
        rows = self.place_rows(Replicate())
        check_rank("VocabularyParallel", input, rows)
        inputs = [
            x if isinstance(x, DTensor) else DTensor.from_local(x, mesh, rows, run_check=False)
            for x in (input, target)
        ]
        return forward(*inputs).to_local()
