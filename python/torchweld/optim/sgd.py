"""SGD."""

from __future__ import annotations

import torch

from torchweld.ops.optimizer.batch import Batch
from torchweld.ops.optimizer.rule import Rule
from torchweld.ops.optimizer.sgd import SGD as RULE
from torchweld.ops.optimizer.sgd import SgdSettings
from torchweld.optim._base import FusedOptimizer, Group
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
        # The first gradient enters a momentum undampened: count the momentum's own steps.
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

    def state_dict(self) -> State:
        """A state like torch's, which does not count steps.

        The count is saved only if something depends on it: stochastic rounding, or a first gradient
        still to come, which is not dampened.
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
