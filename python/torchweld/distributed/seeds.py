"""LayerSeeds: each layer drops the same in each microbatch, wherever and whenever that runs."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

import torch


class LayerSeeds:
    """Seeds torch's generators before each of these layers while the model trains.

    A pipeline runs a layer in another process than the layer before it, and data parallelism a
    microbatch in another process than the one before that: what both draw from one generator in
    one process, they would draw from several. Here a draw depends on the seed, the step, the
    microbatch and the layer's name only. Call `begin` before each step. A PipelineStage has to be
    given `input_args` and `output_args`: it would find out their shapes by another forward.

    What compiles, or checkpoints and recomputes, belongs inside a layer: `torch.compile(block)` or
    `recompute(block)` is the layer to hand over.

    Args:
        layers: names and modules, such as `model.blocks.items()`; names are the same everywhere.
        seed: of the run.
    """

    def __init__(self, layers: Iterable[tuple[str, torch.nn.Module]], seed: int = 0) -> None:
        self.seed = seed
        self._step, self._first, self._seen = 0, 0, dict[str, int]()
        for name, layer in layers:
            layer.register_forward_pre_hook(self._hook(name), prepend=True)

    def begin(self, step: int, microbatch: int = 0) -> None:
        """The next forward of each layer is of this step and this microbatch, of all devices'."""
        self._step, self._first = step, microbatch
        self._seen.clear()

    def _hook(self, name: str):  # type: ignore[no-untyped-def]
        def before(layer: torch.nn.Module, _: object) -> None:
            if layer.training:
                microbatch = self._first + self._seen.get(name, 0)
                self._seen[name] = self._seen.get(name, 0) + 1
                torch.manual_seed(_mixed(self.seed, self._step, microbatch, name))

        return before


def _mixed(*parts: object) -> int:
    digest = hashlib.blake2b(repr(parts).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1
