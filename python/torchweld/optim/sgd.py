"""SGD."""

from __future__ import annotations

import torch
from torch.optim.optimizer import ParamsT

from torchweld.names import StateName
from torchweld.ops.optimizer.batch import Batch
from torchweld.ops.optimizer.rule import Rule
from torchweld.ops.optimizer.sgd import SGD as RULE
from torchweld.ops.optimizer.sgd import SgdSettings
from torchweld.optim._base import FusedOptimizer, Group, collect_arguments
from torchweld.optim._codecs import SIGNED, STEP, Moments, State


class SgdStep(FusedOptimizer):
    """The step of SGD and LARS."""

    def _rule(self) -> Rule:
        return RULE

    def _moments(self, group: Group, p: torch.Tensor) -> Moments:
        return {"momentum_buffer": SIGNED} if group["momentum"] != 0 else {}

    def _settings(self, group: Group, batch: Batch) -> SgdSettings:
        names = ("momentum", "dampening", "weight_decay")
        momentum, dampening, weight_decay = (float(group[name]) for name in names)
        return SgdSettings(momentum, dampening, weight_decay, group["nesterov"])

    def _begin_moments(self, state: State) -> None:
        # The first gradient of a momentum is not dampened, so the momentum's own steps are counted.
        state["step"].zero_()


class SGD(SgdStep, torch.optim.SGD):
    """torch.optim.SGD, in one pass over memory, with a momentum of 32 to 8 bits.

    Args:
        params, lr, momentum, dampening, weight_decay, nesterov, maximize: as in torch.optim.SGD;
            foreach and fused are accepted and have no effect, differentiable must be False. Sparse
            gradients are converted to dense.
        state_dtype, master_weights, stochastic_rounding, min_quantized_size, max_grad_norm: as in
            Adam.
    """

    _takes_sparse = True

    def __init__(
        self,
        params: ParamsT,
        lr: float | torch.Tensor = 1e-3,
        momentum: float = 0.0,
        dampening: float = 0.0,
        weight_decay: float | torch.Tensor = 0.0,
        nesterov: bool = False,
        *,
        maximize: bool = False,
        foreach: bool | None = None,
        differentiable: bool = False,
        fused: bool | None = None,
        state_dtype: torch.dtype | StateName = torch.float32,
        master_weights: bool | str = False,
        min_quantized_size: int = 4096,
        stochastic_rounding: bool = False,
        max_grad_norm: float | None = None,
        ema_decay: float | None = None,
    ) -> None:
        super().__init__(**collect_arguments(locals()))

    def state_dict(self) -> State:
        """Return a state like torch's, which does not count steps.

        The count is saved only if later steps depend on it: for stochastic rounding, or before the
        first gradient, which is not dampened.
        """
        saved = super().state_dict()
        states = saved["state"]
        for group, of_group in zip(self.param_groups, saved["param_groups"], strict=True):
            for p, key in zip(group["params"], of_group["params"], strict=True):
                state = states.get(key)
                if not state or STEP not in state or self._codec_of(p).rounds(p):
                    continue
                if group["dampening"] == 0 or state[STEP] != 0:
                    states[key] = {name: v for name, v in state.items() if name != STEP}
        return saved | {"state": {key: state for key, state in states.items() if state}}
