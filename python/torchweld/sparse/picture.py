"""Pictures of a layout, as text and as a plot."""

from __future__ import annotations

from typing import Any

import torch

_WIDTH, _HEIGHT = 64, 32
# Shades by the share of a cell's possible blocks.
_SHADES = " ░▒▓█"


def draw_text(kinds: torch.Tensor) -> str:
    """Draw lines of characters: blank without blocks, darker with more.

    A partial block counts half.
    """
    weight = torch.tensor([0.0, 1.0, 0.5])[kinds.cpu().long()]
    if weight.numel() == 0:
        return ""
    size = (min(_HEIGHT, weight.shape[0]), min(_WIDTH, weight.shape[1]))
    cells = torch.nn.functional.adaptive_avg_pool2d(weight[None], size)[0]
    shades = (cells * (len(_SHADES) - 1)).ceil().int().tolist()
    return "\n".join("".join(_SHADES[shade] for shade in line) for line in shades)


def draw_plot(kinds: torch.Tensor, title: str, ax: Any = None) -> Any:
    """Draw a plot with matplotlib."""
    from matplotlib import pyplot

    ax = pyplot.subplots()[1] if ax is None else ax
    ax.imshow(kinds.cpu().numpy(), cmap="Greys", vmin=0, vmax=2, interpolation="nearest")
    ax.set_xlabel("blocks of keys")
    ax.set_ylabel("blocks of queries")
    ax.set_title(title, fontsize="small")
    return ax
