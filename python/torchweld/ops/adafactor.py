"""The step of Adafactor, by the rules of torch and of transformers.

Moments are averages: of a matrix its rows' and its columns', otherwise that of each element; and a
first moment where beta1 is not 0. csrc/core/adafactor.h has the formulas.
"""

from __future__ import annotations

import math

import torch

from torchweld.ops._optimizer import Rule, Tensors


def _mean_square(t: torch.Tensor) -> torch.Tensor:
    return t.double().square().sum() / max(t.numel(), 1)


def _update(
    p: torch.Tensor,
    g: torch.Tensor,
    moments: Tensors,
    t: torch.Tensor,
    lr: torch.Tensor,
    decay_rate: float,
    eps_square: float,
    eps_floor: float,
    eps_scale: float,
    clip: float,
    beta1: float,
    weight_decay: float,
    relative: bool,
    warmup: bool,
    scaled: bool,
    scaled_decay: bool,
) -> tuple[torch.Tensor, Tensors]:
    if p.numel() == 0:
        return p, moments
    taken = (t**decay_rate).to(p.dtype)
    square = g.double().square() + eps_square
    if g.ndim > 1:
        shapes = [average.shape for average in moments[:2]]
        rows = moments[0].view_as(p[..., :1])
        columns = moments[1].view_as(p[..., :1, :])
        rows = rows + taken * (square.mean(-1, keepdim=True).to(p.dtype) - rows)
        columns = columns + taken * (square.mean(-2, keepdim=True).to(p.dtype) - columns)
        mean = rows.double().mean(-2, keepdim=True).clamp(min=eps_floor)
        scales = (mean.sqrt() / rows.double().sqrt()) * (1 / columns.double().sqrt())
        u = g * scales.clamp(max=1 / eps_floor if eps_floor else math.inf).to(p.dtype)
        new = [rows.view(shapes[0]), columns.view(shapes[1])]
    else:
        variance = moments[0] + (square.to(p.dtype) - moments[0]) * taken
        u = g / variance.clamp(min=eps_floor**2).double().sqrt().to(p.dtype)
        new = [variance]
    rate = 1e-6 * t if warmup else lr
    if relative:
        rate = torch.minimum(rate, 1 / t.sqrt())
    scale = _mean_square(p).sqrt().clamp(min=eps_scale) if scaled else torch.ones_like(t)
    excess = (_mean_square(u).sqrt() / clip).clamp(min=1.0)
    decay = 1 - weight_decay * (rate * scale if scaled_decay else lr)
    step = u * (rate * scale / excess).to(p.dtype)
    if beta1 != 0:
        step = moments[-1] * beta1 + step * (1 - beta1)
        new.append(step)
    return p * decay.to(p.dtype) - step, new


ADAFACTOR = Rule(
    "adafactor",
    "float decay_rate, float eps_square, float eps_floor, float eps_scale, float clip,"
    " float beta1, float weight_decay, bool relative, bool warmup, bool scaled, bool scaled_decay",
    signed=(False, False, True),
    update=_update,
)
