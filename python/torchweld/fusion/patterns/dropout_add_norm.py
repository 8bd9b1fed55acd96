"""The end of a post-norm block, as in BERT: norm(dropout(linear(x)) + residual)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from torchweld import functional
from torchweld.fusion import probe
from torchweld.fusion.view import View
from torchweld.fusion.weld import Proposal, Tried, propose, read_parameters


class DropoutAddNorm(Tried):
    """norm(dropout(layer(x)) + residual), with the settings of a norm and a dropout."""

    weld_layer: str
    weld_dropout: str
    weld_norm: str
    weld_takes = 2

    def weld_run(self, x: torch.Tensor, residual: torch.Tensor) -> Any:
        x = getattr(self, self.weld_layer)(x)
        dropout, norm = getattr(self, self.weld_dropout), getattr(self, self.weld_norm)
        return add_and_normalize(x, residual, dropout, norm)


def add_and_normalize(
    x: torch.Tensor,
    residual: torch.Tensor,
    dropout: Any,
    norm: Any,
    return_residual: bool = False,
) -> Any:
    """norm(dropout(x) + residual) in one pass, with these modules' settings and parameters."""
    y, z = functional.dropout_add_layer_norm(
        x,
        residual,
        norm.weight,
        norm.bias,
        p=dropout.p,
        eps=norm.eps,
        training=dropout.training,
        return_residual=True,
        normalized_shape=norm.normalized_shape,
    )
    return (y, z) if return_residual else y


def is_layer_norm(module: Any) -> bool:
    """Whether add_and_normalize can replace a module."""
    cls = getattr(type(module), "welded_from", type(module))
    return getattr(cls, "forward", None) is torch.nn.LayerNorm.forward


def find_dropout_add_norm(module: torch.nn.Module, view: View) -> Iterator[Proposal]:
    """A module of a linear layer, a dropout and a LayerNorm that takes two inputs."""
    children = dict(module.named_children())
    if len(children) != 3:
        return
    norms = [name for name, child in children.items() if is_layer_norm(child)]
    dropouts = [name for name, child in children.items() if isinstance(child, torch.nn.Dropout)]
    layers = [name for name, child in children.items() if view.sizes(child)]
    if not len(norms) == len(dropouts) == len(layers) == 1:
        return
    arguments = probe.name_required(module)
    if arguments is None or len(arguments) != 2:
        return
    if read_parameters(module)[0][:2] != tuple(arguments):
        return  # another argument stands between the required ones
    inner = (*norms, *dropouts)
    sizes = view.sizes(children[layers[0]])
    assert sizes is not None
    yield propose(
        module,
        DropoutAddNorm,
        "dropout_add_layer_norm",
        {"layer": layers[0], "dropout": dropouts[0], "norm": norms[0], "inner": inner},
        inner=tuple(children[name] for name in inner),
        inputs=tuple(probe.values((2, 5, size), view.device(module)) for size in sizes),
        drops=True,
    )
