"""Adafactor, in torch's and in transformers' version."""

from __future__ import annotations

from typing import Any

import torch
from torch.optim.optimizer import ParamsT

from torchweld.errors import ArgumentError
from torchweld.names import StateName
from torchweld.ops.optimizer.adafactor import ADAFACTOR, AdafactorSettings
from torchweld.ops.optimizer.batch import Batch
from torchweld.ops.optimizer.rule import Rule
from torchweld.optim._base import (
    FusedOptimizer,
    Group,
    OwnOptimizer,
    collect_arguments,
    split_defaults,
)
from torchweld.optim._codecs import SIGNED, STEP, Moment, Moments, State
from torchweld.optim._gather import Gathering
from torchweld.optim._shards import is_dtensor


def _make_average(p: torch.Tensor, *dims: int | None) -> Moment:
    """Make a moment of averages with these dimensions of p.

    None is a dimension that is averaged over and has size 1.
    """
    shape = [1 if dim is None else p.shape[dim] for dim in dims]
    return Moment(False, torch.Size(shape), dims)


class _AdafactorStep(FusedOptimizer):
    def __init__(self, params: Any, *args: Any, **kwargs: Any) -> None:
        if kwargs.get("state_dtype", torch.float32) != torch.float32:
            accepted = "torch.float32: averages of rows and columns are small already"
            actual = repr(kwargs["state_dtype"])
            raise ArgumentError(type(self).__name__, "state_dtype", actual, accepted)
        super().__init__(params, *args, **kwargs)

    def _rule(self) -> Rule:
        return ADAFACTOR

    def _gatherings(self) -> list[Gathering]:
        gatherings = super()._gatherings()
        if any(kind.is_complex for gathering in gatherings for kind in gathering.kinds()):
            raise ArgumentError(type(self).__name__, "a parameter", "complex", "a real tensor")
        return gatherings


class Adafactor(_AdafactorStep, torch.optim.Adafactor):
    """torch.optim.Adafactor: second moments of matrices from averages of rows and columns.

    Args:
        params, lr, beta2_decay, eps, d, weight_decay, maximize: as in torch.optim.Adafactor;
            foreach is accepted and has no effect.
        master_weights, stochastic_rounding, max_grad_norm: as in Adam.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float | torch.Tensor = 1e-2,
        beta2_decay: float = -0.8,
        eps: tuple[float | None, float] = (None, 1e-3),
        d: float = 1.0,
        weight_decay: float = 0.0,
        *,
        foreach: bool | None = None,
        maximize: bool = False,
        state_dtype: torch.dtype | StateName = torch.float32,
        master_weights: bool | str = False,
        min_quantized_size: int = 4096,
        stochastic_rounding: bool = False,
        max_grad_norm: float | None = None,
    ) -> None:
        super().__init__(**collect_arguments(locals()))

    def _moments(self, group: Group, p: torch.Tensor) -> Moments:
        if p.ndim < 2:
            return {"variance": _make_average(p, *range(p.ndim))}
        *others, row, column = range(p.ndim)
        columns = _make_average(p, *others, None, column)
        return {"row_var": _make_average(p, *others, row, None), "col_var": columns}

    def _settings(self, group: Group, batch: Batch) -> AdafactorSettings:
        floor, scale = group["eps"]
        if floor is None:
            floor = torch.finfo(torch.float32 if batch.masters else batch.params[0].dtype).eps
        return AdafactorSettings(
            decay_rate=float(group["beta2_decay"]),
            eps_square=0.0,
            eps_floor=float(floor),
            eps_scale=float(scale),
            clip=float(group["d"]),
            beta1=0.0,
            weight_decay=float(group["weight_decay"]),
            relative=True,
            warmup=False,
            scaled=True,
            scaled_decay=False,
        )


_TRANSFORMERS_DEFAULTS = (
    *("lr", "eps", "clip_threshold", "decay_rate", "beta1", "weight_decay"),
    *("scale_parameter", "relative_step", "warmup_init"),
)


class TransformersAdafactor(_AdafactorStep, OwnOptimizer):
    """transformers.Adafactor: its arguments, its rule, its state.

    Args:
        params, lr, eps, clip_threshold, decay_rate, beta1, weight_decay, scale_parameter,
            relative_step, warmup_init: as in transformers.Adafactor.
        maximize, foreach, capturable, differentiable, fused: as in torch.optim.
        master_weights, stochastic_rounding, max_grad_norm: as in Adam.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float | torch.Tensor | None = None,
        eps: tuple[float, float] = (1e-30, 1e-3),
        clip_threshold: float = 1.0,
        decay_rate: float = -0.8,
        beta1: float | None = None,
        weight_decay: float = 0.0,
        scale_parameter: bool = True,
        relative_step: bool = True,
        warmup_init: bool = False,
        *,
        maximize: bool = False,
        foreach: bool | None = None,
        capturable: bool = False,
        differentiable: bool = False,
        fused: bool | None = None,
        state_dtype: torch.dtype | StateName = torch.float32,
        master_weights: bool | str = False,
        min_quantized_size: int = 4096,
        stochastic_rounding: bool = False,
        max_grad_norm: float | None = None,
    ) -> None:
        arguments = split_defaults(locals(), *_TRANSFORMERS_DEFAULTS)
        name = type(self).__name__
        if (lr is None) != relative_step:
            accepted = "None with relative_step, a number without"
            raise ArgumentError(name, "lr", repr(lr), accepted)
        if warmup_init and not relative_step:
            raise ArgumentError(name, "warmup_init", "True", "False without relative_step")
        super().__init__(**arguments)

    def _get_lr(self, group: Group, state: State) -> float:
        """Return the learning rate of a parameter's last step, for transformers' AdafactorSchedule.

        `state` belongs to the group's first parameter. Its root mean square, which scales the rate,
        is the current one; transformers keeps the one before the step.
        """
        step = max(float(state.get(STEP, 1)), 1.0)
        rate = float(group["lr"] or 0.0)
        if group["relative_step"]:
            rate = min(1e-6 * step if group["warmup_init"] else 1e-2, step**-0.5)
        if not group["scale_parameter"]:
            return rate
        p = group["params"][0]
        mean = p.detach().double().square().mean().nan_to_num()
        mean = mean.full_tensor() if is_dtensor(p) else mean
        return max(float(group["eps"][1]), float(mean.sqrt())) * rate

    def _learning_rate(self, group: Group) -> float | torch.Tensor:
        return 1e-2 if group["relative_step"] else group["lr"]

    def _moments(self, group: Group, p: torch.Tensor) -> Moments:
        moments = {"exp_avg_sq": _make_average(p, *range(p.ndim))}
        if p.ndim > 1:
            *others, row, column = range(p.ndim)
            columns = _make_average(p, *others, column)
            moments = {"exp_avg_sq_row": _make_average(p, *others, row), "exp_avg_sq_col": columns}
        return moments | {"exp_avg": SIGNED} if group["beta1"] else moments

    def _settings(self, group: Group, batch: Batch) -> AdafactorSettings:
        square, scale = group["eps"]
        return AdafactorSettings(
            decay_rate=float(group["decay_rate"]),
            eps_square=float(square),
            eps_floor=0.0,
            eps_scale=float(scale),
            clip=float(group["clip_threshold"]),
            beta1=float(group["beta1"] or 0.0),
            weight_decay=float(group["weight_decay"]),
            relative=group["relative_step"],
            warmup=group["warmup_init"],
            scaled=group["scale_parameter"],
            scaled_decay=True,
        )
