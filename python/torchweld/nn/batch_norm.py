"""Linear layers followed by batch normalisation and an activation."""

from typing import Any

import torch

from torchweld import checks, functional
from torchweld.names import ActivationName, Approximation
from torchweld.ops import activation as activations
from torchweld.ops.batch_norm.statistics import is_first

_NORMS = (torch.nn.BatchNorm1d, torch.nn.SyncBatchNorm)


class LinearBatchNormAct(torch.nn.Module):
    """activation(norm(linear(input))): linear is a torch.nn.Linear, norm a torch.nn.BatchNorm1d.

    Both remain modules with their own parameters and buffers: optimizers can tell them apart, the
    norm can be put into evaluation by itself, and torch.nn.SyncBatchNorm.convert_sync_batchnorm
    converts it. The state_dict has `linear.weight`, `linear.bias`, `norm.weight`, `norm.bias`,
    `norm.running_mean`, `norm.running_var` and `norm.num_batches_tracked`. If a subclass replaces
    one of them (an adapter, a parametrisation, a shard of its own), both are called unfused. Hooks
    on the two are not called.

    The input is [*, in_features], and every leading dimension is part of the batch. By contrast,
    torch's BatchNorm1d takes the second of three dimensions for the channels.

    Args:
        in_features: last size of the input.
        out_features: last size of the output, and the number of channels.
        bias: whether the linear layer has one. In training, subtracting the mean cancels it.
        device, dtype: of the parameters and the statistics.
        eps: added to the variance.
        momentum: as in torch.nn.BatchNorm1d; None: the running statistics are plain averages.
        affine: whether the norm has a weight and a bias.
        track_running_stats: False: evaluation too normalises with the batch's own statistics.
        process_group: in training, statistics cover the rows of all its processes, as in
            torch.nn.SyncBatchNorm, but also on the CPU; torch.distributed.group.WORLD is all
            processes. None: only this process, or the norm's own group if it is a SyncBatchNorm.
        activation: "gelu", "relu", "silu" or another of bias_act's.
        approximate: of gelu, as in torch: "none" (by erf, the default) or "tanh".
        recompute: save only the input, and recompute the rest in the backward pass.
    """

    linear: torch.nn.Linear
    norm: torch.nn.BatchNorm1d | torch.nn.SyncBatchNorm

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        device: Any = None,
        dtype: torch.dtype | None = None,
        *,
        eps: float = 1e-5,
        momentum: float | None = 0.1,
        affine: bool = True,
        track_running_stats: bool = True,
        process_group: Any = None,
        activation: ActivationName = "gelu",
        approximate: Approximation = "none",
        recompute: bool = False,
    ) -> None:
        super().__init__()
        activations.check("LinearBatchNormAct", activation, approximate)
        checks.epsilon("LinearBatchNormAct", eps)
        for argument, size in (("in_features", in_features), ("out_features", out_features)):
            checks.count("LinearBatchNormAct", argument, size)
        if momentum is not None:
            checks.factor("LinearBatchNormAct", "momentum", momentum)
        kwargs: dict[str, Any] = {"device": device, "dtype": dtype}
        self.linear = torch.nn.Linear(in_features, out_features, bias, **kwargs)
        self.norm = torch.nn.BatchNorm1d(
            out_features, eps, momentum, affine, track_running_stats, **kwargs
        )
        self.process_group = process_group
        self.activation, self.approximate, self.recompute = activation, approximate, recompute

    @classmethod
    def from_modules(
        cls,
        linear: torch.nn.Linear,
        norm: torch.nn.BatchNorm1d | torch.nn.SyncBatchNorm,
        **options: Any,
    ) -> "LinearBatchNormAct":
        """Build one around these two modules; the options are the constructor's."""
        made = cls(1, 1, device="meta", **options)
        made.linear, made.norm, made.training = linear, norm, norm.training
        return made

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        linear, norm = self.linear, self.norm
        if type(linear) is not torch.nn.Linear or type(norm) not in _NORMS:
            z = linear(input)
            z = norm(z.reshape(-1, z.shape[-1])).view(z.shape)
            return functional.bias_act(z, activation=self.activation, approximate=self.approximate)
        return functional.linear_batch_norm_act(
            input,
            linear.weight,
            linear.bias,
            *read_norm(norm),
            process_group=self._group(),
            activation=self.activation,
            approximate=self.approximate,
            recompute=self.recompute,
        )

    def _group(self) -> Any:
        """The processes whose rows the statistics cover; None: only this one, as in evaluation."""
        norm = self.norm
        if not norm.training:
            return None
        if self.process_group is not None:
            return self.process_group
        if not isinstance(norm, torch.nn.SyncBatchNorm) or not torch.distributed.is_initialized():
            return None
        return norm.process_group or torch.distributed.group.WORLD

    def extra_repr(self) -> str:
        return f"activation={self.activation!r}, approximate={self.approximate!r}"


def read_norm(norm: Any) -> tuple[Any, ...]:
    """The arguments of batch_norm_act after its input, up to eps. In training it counts a batch.

    A momentum that changes from step to step is a tensor, so that it compiles only once.
    """
    tracked = norm.track_running_stats or not norm.training
    statistics = (norm.running_mean, norm.running_var) if tracked else (None, None)
    momentum = 0.0 if norm.momentum is None else norm.momentum
    if norm.training and norm.track_running_stats and norm.num_batches_tracked is not None:
        if is_first():
            norm.num_batches_tracked.add_(1)
        if norm.momentum is None:
            momentum = norm.num_batches_tracked.double().reciprocal()
    training = norm.training or norm.running_mean is None
    return *statistics, norm.weight, norm.bias, training, momentum, norm.eps
