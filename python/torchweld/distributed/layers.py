"""The layers of a model, and LayerSeeds: dropout that does not depend on the process and time."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

import torch

from torchweld import checks


def find_blocks(model: torch.nn.Module) -> list[torch.nn.Module]:
    """Find the layers of a model: the items of its outermost lists and dicts of modules."""
    return [*find_named_blocks(model).values()]


def find_named_blocks(
    model: torch.nn.Module, prefix: str = "", is_list: bool = False
) -> dict[str, torch.nn.Module]:
    """Find the layers of a model with their names in it; a list may hold lists of layers."""
    blocks: dict[str, torch.nn.Module] = {}
    for name, child in model.named_children():
        holds = isinstance(child, (torch.nn.ModuleList, torch.nn.ModuleDict))
        if is_list and not holds:
            blocks[f"{prefix}{name}"] = child
        else:
            blocks |= find_named_blocks(child, f"{prefix}{name}.", holds)
    return blocks


def find_layers(model: torch.nn.Module) -> dict[str, torch.nn.Module]:
    """Find the parts that a pipeline divides: a model's layers, or the modules of a sequence."""
    if isinstance(model, (torch.nn.Sequential, torch.nn.ModuleDict)):
        return dict(model.named_children())
    return find_named_blocks(model)


def add_path(root: torch.nn.Module, path: Iterable[str]) -> torch.nn.Module:
    """Return the module at a path below the root; missing modules are added, empty."""
    for key in path:
        if key not in root._modules:
            root.add_module(key, torch.nn.Module())
        root = root.get_submodule(key)
    return root


class LayerSeeds:
    """Seeds torch's generators before each of these layers while the model trains.

    A single process draws from one generator for all layers and microbatches. Pipelines divide
    layers, and data parallelism divides microbatches, among processes with their own generators.
    With LayerSeeds a draw depends only on the seed, the step, the microbatch and the layer's name.
    Call `begin` before each step. Give a PipelineStage `input_args` and `output_args`: otherwise it
    runs an extra forward pass to find out their shapes.

    Compilation and checkpointing belong inside a layer: pass `torch.compile(block)` or
    `recompute(block)` as the layer.

    Args:
        layers: names and modules, such as `model.blocks.items()`. A layer has the same name in
            every process.
        seed: the seed of the run.
    """

    def __init__(self, layers: Iterable[tuple[str, torch.nn.Module]], seed: int = 0) -> None:
        checks.fits("LayerSeeds", "seed", seed, isinstance(seed, checks.INTEGER), "an int")
        self.seed = seed
        self._step, self._first, self._seen = 0, 0, dict[str, int]()
        for name, layer in layers:
            layer.register_forward_pre_hook(self._make_hook(name), prepend=True)

    def begin(self, step: int, microbatch: int = 0) -> None:
        """Set the step and the first microbatch's global number for the next forward passes."""
        self._step, self._first = step, microbatch
        self._seen.clear()

    def _make_hook(self, name: str):  # type: ignore[no-untyped-def]
        def seed_layer(layer: torch.nn.Module, _: object) -> None:
            if layer.training:
                microbatch = self._first + self._seen.get(name, 0)
                self._seen[name] = self._seen.get(name, 0) + 1
                _seed_generators(_hash_to_seed(self.seed, self._step, microbatch, name))

        return seed_layer


def _seed_generators(seed: int) -> None:
    """As torch.manual_seed, which formats the stack for each kind of device that is not in use."""
    if torch.accelerator.is_available() and not torch.cuda.is_initialized():
        torch.manual_seed(seed)
        return
    torch.default_generator.manual_seed(seed)
    if torch.cuda.is_initialized():
        torch.cuda.manual_seed_all(seed)


def _hash_to_seed(*parts: object) -> int:
    digest = hashlib.blake2b(repr(parts).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1
