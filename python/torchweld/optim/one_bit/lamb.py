"""1-bit LAMB."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch.optim.optimizer import ParamsT
from typing_extensions import Unpack

from torchweld.collectives.one_bit.exchange import Packed
from torchweld.collectives.runs import flatten_all, list_sizes
from torchweld.errors import ArgumentError
from torchweld.ops.optimizer.batch import Task
from torchweld.ops.optimizer.passes import Part, Pass
from torchweld.ops.optimizer.reference import read_param
from torchweld.optim._base import RatiosOf
from torchweld.optim._codecs import State
from torchweld.optim._options import OwnStorageOptions, takes
from torchweld.optim._params import Group
from torchweld.optim.lamb import find_trust_ratios
from torchweld.optim.one_bit.adam import AVG, BITS, SCALE, WORKER, OneBitOptimizer, end_warm_up

# Entries of a state: the average of the ratios of the warm-up, the factor of the last step, the
# normalisation of momenta before they share a scale, and second moments that are still updated.
COEFF, FACTOR, SCALING, FRESH = "ratio_average", "last_factor", "scaling", "exp_avg_sq_fresh"
# A parameter that had a gradient in the warm-up has one of them.
_HAD = frozenset({AVG, SCALING})


class OneBitLAMB(OneBitOptimizer):
    """1-bit LAMB (Li et al. 2021): LAMB whose momentum is exchanged and stored as bits.

    For `freeze_step` steps gradients are averaged in float32 and the step is LAMB's; its ratios are
    averaged over the steps. Then second moments are frozen, and processes average all momenta as
    one tensor of signs with error feedback. A tensor's ratio is the average times a factor. The
    factor compares the frozen second moments with fresh ones, updated with gradients reconstructed
    from the momenta.

    Args:
        params, lr, betas, eps, weight_decay, freeze_step, bias_correction, group, error_dtype: as
            in OneBitAdam.
        maximize, foreach, capturable, differentiable, fused: as in torch.optim.
        state_dtype, master_weights, stochastic_rounding, max_grad_norm: as in OneBitAdam.
        trust_clip: the least and the largest ratio of the warm-up.
        coeff_beta: decay rate of the average of ratios.
        factor_clip: the least and the largest factor.
        factor_threshold: the largest relative change of a factor from one step to the next.
    """

    _of_each = frozenset({COEFF, FACTOR, SCALING, FRESH})
    _of_one = frozenset({BITS, SCALE, WORKER})
    _numbers, _alike = frozenset({COEFF, FACTOR, SCALING}), frozenset({FRESH})
    extra_entries = OneBitOptimizer.extra_entries | _numbers | _alike

    @takes(OwnStorageOptions)
    def __init__(
        self,
        params: ParamsT,
        lr: float | torch.Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        *,
        freeze_step: int,
        bias_correction: bool = False,
        trust_clip: tuple[float, float] = (0.01, 10.0),
        coeff_beta: float = 0.9,
        factor_clip: tuple[float, float] = (0.5, 4.0),
        factor_threshold: float = 0.1,
        group: torch.distributed.ProcessGroup | None = None,
        error_dtype: torch.dtype = torch.float32,
        **options: Unpack[OwnStorageOptions],
    ) -> None:
        self._forget_step()

    def _forget_step(self) -> None:
        """Reset the values that the passes of a step share."""
        self._momenta: dict[torch.Tensor, torch.Tensor] = {}
        self._previous: dict[torch.Tensor, torch.Tensor] = {}

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Take a step as OneBitAdam does."""
        try:
            return super().step(closure)
        finally:
            self._forget_step()

    def _ratios_of(self, group: Group, lr: torch.Tensor) -> RatiosOf | None:
        return find_trust_ratios(group["trust_clip"])

    def _passes(self) -> Iterable[Pass]:
        passes = super()._passes()
        return passes if self.is_frozen else (*passes, Pass(self._average_ratios))

    def _average_ratios(self, task: Task) -> Iterable[Part]:
        assert task.ratios is not None
        places = self._find_places()
        for p, ratio in zip(task.batch.wholes, task.ratios, strict=True):
            beta = self.param_groups[places[p][0]]["coeff_beta"]
            before = self.state[p].get(COEFF, torch.zeros_like(ratio))
            # A ratio of 1 may stand for an undefined ratio.
            average = beta * before + (1 - beta) * ratio
            self.state[p][COEFF] = torch.where(ratio == 1, before, average)
        return ()

    def _find_frozen_ratios(self, task: Task) -> None:
        batch, places, ratios = task.batch, self._find_places(), []
        masters: Sequence[Any] = batch.masters or [None] * len(batch.params)
        lists = batch.wholes, batch.params, masters, task.handed_on, batch.moments
        for p, value, master, momentum, square in zip(*lists, strict=True):
            group, value = self.param_groups[places[p][0]], read_param(value, master).float()
            given = p, group, value, momentum, square, task.settings
            ratios.append(self._compute_ratio(*given))
        task.ratios = torch.stack(ratios)

    def _compute_ratio(
        self,
        p: torch.Tensor,
        group: Group,
        value: torch.Tensor,
        momentum: torch.Tensor,
        square: torch.Tensor,
        settings: Sequence[Any],
    ) -> torch.Tensor:
        """Compute the average ratio times the factor of this step."""
        state = self.state[p]
        beta1, beta2, eps, decay, *_ = settings
        gradient = (momentum - self._previous.pop(p) * beta1) / (1 - beta1)
        fresh = state.setdefault(FRESH, square.clone())
        fresh.mul_(beta2).add_(gradient * gradient * (1 - beta2))
        root = square.sqrt() + eps
        # A frozen second moment may be infinite; then the fresh one is, too.
        quotients = (root / (fresh.sqrt() + eps)).nan_to_num(1.0, 1.0)
        factor = quotients.max().double() if p.numel() > 0 else torch.ones_like(state[COEFF])
        if decay > 0:
            step = momentum / root
            whole = (step + value * decay).double().square().sum().sqrt()
            share = (step.double().square().sum().sqrt() / whole).nan_to_num(1.0).clamp(max=1.0)
            factor = factor * share + (1 - share)
        last = state.get(FACTOR, torch.ones_like(factor))
        threshold = group["factor_threshold"]
        factor = factor.clamp(*group["factor_clip"])
        factor = factor.clamp(last * (1 - threshold), last * (1 + threshold))
        state[FACTOR] = factor
        return state[COEFF] * factor

    # --- One tensor for all momenta -----------------------------------------------------------

    def _compress(self, parts: Sequence[Part]) -> None:
        name, params = type(self).__name__, self._list_sharing()
        if len(parts) != len(params):
            actual = "with one that has no gradient now, but had one in the warm-up"
            accepted = "with a gradient for each that had one: their momenta share a scale"
            raise ArgumentError(name, "params", actual, accepted)
        if not parts:
            self._owed = self._reduce([])
            return
        number = {p: i for i, p in enumerate(params)}
        parts = sorted(parts, key=lambda part: number[part.param])
        scaling = self._find_scaling(params)
        flat = flatten_all([part.here * s for part, s in zip(parts, scaling, strict=True)])
        self._owed = self._reduce([(params[0], flat)])
        momenta = self._owed[0][1].dequantize().split(list_sizes(params))
        for part, momentum, s in zip(parts, momenta, scaling, strict=True):
            part.here.copy_(momentum.view(part.here.shape) / s)

    def _find_scaling(self, params: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Find the factors that equalise momenta, from their size at the end of the warm-up."""
        states = [self.state[p] for p in params]
        if SCALING in states[0]:
            return [state[SCALING] for state in states]
        momenta = [state[AVG].double() for state in states]
        sizes = torch.stack([m.square().sum().div(max(m.numel(), 1)).sqrt() for m in momenta])
        count = max(sum(m.numel() > 0 for m in momenta), 1)
        return list(torch.where(sizes > 0, sizes.sum() / count / sizes, 1.0).float())

    def _store_momentum(self, task: Task) -> Iterable[Part]:
        if self._owed:
            params = self._list_sharing()
            for p, scaling in zip(params, self._find_scaling(params), strict=True):
                self.state[p][SCALING] = scaling.clone()
            for state in self.state.values():
                end_warm_up(state)
        return super()._store_momentum(task)

    def _momentum_of(self, p: torch.Tensor) -> torch.Tensor:
        state = self.state[p]
        if SCALING in state:
            if not self._momenta:
                self._momenta = self._read_momenta()
            momentum = self._momenta.pop(p).view(p.shape) / state[SCALING]
        else:
            momentum = super()._momentum_of(p)
        self._previous[p] = momentum.clone()
        return momentum

    def _read_momenta(self) -> dict[torch.Tensor, torch.Tensor]:
        """Read all momenta, each times its scaling, from the state of the first parameter."""
        params = self._list_sharing()
        first, sizes = self.state[params[0]], list_sizes(params)
        packed = Packed(first[BITS], first[SCALE], sum(sizes))
        return dict(zip(params, packed.dequantize().split(sizes), strict=True))

    def _count_packed(self, pairs: Sequence[tuple[torch.Tensor, State]]) -> list[int]:
        share = sum(p.numel() for p, state in pairs if not _HAD.isdisjoint(state))
        return [share for _ in pairs]

    def _list_sharing(self) -> list[torch.Tensor]:
        """List the parameters that share a scale: all that had a gradient in the warm-up."""
        return [p for p in self._params() if not _HAD.isdisjoint(self.state.get(p, ()))]
