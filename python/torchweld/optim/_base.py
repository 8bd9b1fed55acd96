"""What all optimizers share: a step over all parameters at once, and the care of their state."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from typing import Any

import torch

from torchweld.errors import ArgumentError
from torchweld.ops.optimizer.rule import Batch, Rule, sum_of_squares
from torchweld.optim import _cut, _shards
from torchweld.optim._codecs import STEP, Codec, Moments, State
from torchweld.optim._gather import Gathering, cuts, real

Group = dict[str, Any]
_CODEC_KEYS = ("state_dtype", "master_weights", "min_quantized_size", "stochastic_rounding")


class _Kept:
    """Hides a tensor from torch's load_state_dict, which would cast it to the parameter's dtype."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor


class FusedOptimizer(torch.optim.Optimizer):
    """An optimizer of torch.optim's kind whose step is a torchweld op.

    A subclass names its rule, and says of a group what its moments are called and what the rule's
    settings are. It comes before the class of torch.optim that it replaces, if there is one.
    """

    # GradScaler leaves unscaling, and leaving out a step, to the optimizer.
    _step_supports_amp_scaling = True
    # The norm of all gradients before clipping, after a step with max_grad_norm.
    grad_norm: torch.Tensor | None = None

    def __init__(
        self,
        params: Any,
        *args: Any,
        state_dtype: torch.dtype | str = torch.float32,
        master_weights: bool | str = False,
        min_quantized_size: int = 4096,
        stochastic_rounding: bool = False,
        max_grad_norm: float | None = None,
        **kwargs: Any,
    ) -> None:
        codec = Codec(state_dtype, master_weights, min_quantized_size, stochastic_rounding)
        codec.check(type(self).__name__)
        if max_grad_norm is not None and not max_grad_norm > 0:
            raise ArgumentError(
                type(self).__name__, "max_grad_norm", repr(max_grad_norm), "a number > 0 or None"
            )
        if kwargs.get("differentiable"):
            raise ArgumentError(
                type(self).__name__, "differentiable", "True", "False; torch.optim has it"
            )
        self._codec = codec
        super().__init__(params, *args, **kwargs)
        # In defaults, since nothing else of an optimizer is pickled.
        self.defaults["max_grad_norm"] = max_grad_norm

    def add_param_group(self, param_group: Group) -> None:
        if "state_dtype" not in self.defaults:
            self.defaults.update(vars(self._codec))
        codec = {key: param_group.get(key, self.defaults[key]) for key in _CODEC_KEYS}
        Codec(**codec).check(type(self).__name__)
        super().add_param_group(param_group)

    # --- What a subclass says -----------------------------------------------------------------

    def _rule(self) -> Rule:
        raise NotImplementedError

    def _moments(self, group: Group, p: torch.Tensor) -> Moments:
        raise NotImplementedError

    def _settings(self, group: Group, batch: Batch) -> tuple[Any, ...]:
        raise NotImplementedError

    def _learning_rate(self, group: Group) -> float | torch.Tensor:
        return group["lr"]

    def _ratios(
        self, group: Group, batch: Batch, grad_factor: torch.Tensor | None
    ) -> torch.Tensor | None:
        """Of an adaptive rule: a float64 number for each parameter, from _norms."""
        return None

    def _begin_moments(self, state: State) -> None:
        """Called where a parameter has a moment for the first time, after steps without it."""

    # --- The step -----------------------------------------------------------------------------

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One step, in one pass over the parameters of each dtype and codec.

        `closure`, if there is one, computes the gradients and returns the loss.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        gathered = [(group, self._gathering(group)) for group in self.param_groups]
        work = [(group, batch) for group, some in gathered for batch in self._batches(some)]
        factor = self._gradient_factor()
        steps = [(batch, self._numbers(group, batch, factor)) for group, batch in work]
        joined = self._join_blocks(steps)
        for batch, numbers in steps:
            self._rule().step(batch, **numbers)
        for absmax, new in joined:
            absmax.copy_(new)
        return loss

    def _numbers(self, group: Group, batch: Batch, factor: torch.Tensor | None) -> dict[str, Any]:
        """What a batch's step takes besides."""
        lr = self._learning_rate(group)
        if not isinstance(lr, torch.Tensor):
            lr = torch.tensor(lr, dtype=torch.float64)
        if group.get("maximize"):
            factor = torch.tensor(-1.0) if factor is None else -factor
        ratios = self._ratios(group, batch, factor)
        found_inf = getattr(self, "found_inf", None)
        return {
            "lr": lr,
            "settings": self._settings(group, batch),
            "grad_factor": factor,
            "found_inf": found_inf,
            "ratios": ratios,
        }

    def _join_blocks(
        self, steps: list[tuple[Batch, dict[str, Any]]]
    ) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Has pieces of blocks go by the absmax of all pieces: those kept, and what they become."""
        kept: list[torch.Tensor] = []
        pieces: list[tuple[_cut.CutRows, torch.Tensor]] = []
        for batch, numbers in steps:
            if batch.edges:
                self._rule().step(batch, **numbers, only_absmaxes=True)
                pieces += zip(cuts(batch), batch.absmaxes, strict=True)
                kept += batch.whole_absmaxes
        joined = _cut.joined([(cut, absmax[1]) for cut, absmax in pieces])
        for (cut, absmax), new in zip(pieces, joined, strict=True):
            absmax[1] = cut.of_pieces(new)
        return list(zip(kept, joined, strict=True))

    def _norms(
        self, group: Group, batch: Batch, grad_factor: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Of each parameter, and of what the rule calls its step: those of whole DTensors."""
        squares = self._rule().squares(batch, self._settings(group, batch), grad_factor)
        norms = _shards.sum_of_each(squares, batch.wholes).sqrt()
        return norms[:, 0], norms[:, 1]

    def _first_number(self, group: Group) -> int:
        """That of the group's first parameter among all: the same in every process and run."""
        before = itertools.takewhile(lambda other: other is not group, self.param_groups)
        return sum(len(other["params"]) for other in before)

    def _gathering(self, group: Group) -> Gathering:
        """Parameters with a gradient, which is known to fit; nothing is changed yet."""
        codec = Codec(*[group[key] for key in _CODEC_KEYS])
        moments = functools.partial(self._moments, group)
        gathering = Gathering(type(self).__name__, codec, moments)
        gathering.add(group["params"], self._first_number(group))
        return gathering

    def _batches(self, gathering: Gathering) -> list[Batch]:
        """What is gathered, with states."""
        for kind in gathering.kinds():
            states = [self.state[p] for p in kind.params]
            try:
                kind.gather(gathering.function, states)
            except KeyError:  # the first step of a parameter, or of one of its moments
                for p, state in zip(kind.params, states, strict=True):
                    if not state.keys() >= kind.entries:
                        self._complete(state, p, gathering.codec, kind.moments)
                kind.gather(gathering.function, states)
        return gathering.batches()

    def _complete(self, state: State, p: torch.Tensor, codec: Codec, moments: Moments) -> None:
        """With what is new in it."""
        if state and not codec.has(state, p, moments):
            self._begin_moments(state)
        state.update(codec.new_state(p, moments) | state)

    def _gradient_factor(self) -> torch.Tensor | None:
        """What gradients are multiplied by: to undo a loss's scale, and to clip their norm."""
        scale: torch.Tensor | None = getattr(self, "grad_scale", None)
        factor = None if scale is None else 1 / scale
        limit = self.defaults["max_grad_norm"]
        if limit is None:
            return factor
        params = [p for group in self.param_groups for p in group["params"]]
        grads = [p.grad for p in params if p.grad is not None]
        if not grads:
            return factor
        alike: dict[object, list[torch.Tensor]] = {}
        for g in grads:
            alike.setdefault(_shards.layout(g), []).append(g)
        squares = [
            _shards.sum_over_shards(sum_of_squares([real(g) for g in some]), some[0])
            for some in alike.values()
        ]
        norm = torch.stack([s.to(squares[0].device) for s in squares]).sum().sqrt().float()
        if factor is not None:
            norm = norm * factor
        self.grad_norm = norm
        clip = (limit / (norm + 1e-6)).clamp(max=1.0)  # as torch.nn.utils.clip_grad_norm_
        return clip if factor is None else clip * factor

    # --- State --------------------------------------------------------------------------------

    def load_state_dict(self, state_dict: State) -> None:
        """Take over a saved state: this optimizer's, that of torch.optim's, in any codec.

        How states are stored stays as this optimizer was made; what is stored in another way is
        converted. Raises an error, and changes nothing, where the state does not fit.
        """
        # After all other hooks.
        hook = self.register_load_state_dict_pre_hook(lambda _, given: self._adopt(given))
        try:
            super().load_state_dict(state_dict)
        finally:
            hook.remove()

    def _adopt(self, state_dict: State) -> State:
        saved_groups = state_dict["param_groups"]
        saved_state = state_dict["state"]
        groups, states = [], dict(saved_state)
        for group, saved_group in zip(self.param_groups, saved_groups, strict=False):
            own = {key: group[key] for key in _CODEC_KEYS}
            groups.append({**self.defaults, **saved_group, **own})
            codec = Codec(**own)
            for p, key in zip(group["params"], saved_group["params"], strict=False):
                if key in saved_state:
                    moments = self._moments(groups[-1], p)
                    adopted = codec.adopt(type(self).__name__, p, saved_state[key], moments)
                    states[key] = {name: _kept(name, value) for name, value in adopted.items()}
        groups += saved_groups[len(groups) :]  # torch says what is wrong with their number
        return state_dict | {"state": states, "param_groups": groups}

    def __setstate__(self, state: State) -> None:
        super().__setstate__(state)
        for of_param in self.state.values():
            if isinstance(of_param, dict):
                for name, value in of_param.items():
                    if isinstance(value, _Kept):
                        of_param[name] = value.tensor


_NOT_NEGATIVE = ("a number >= 0", lambda value: value >= 0)
_BELOW_ONE = (
    "two numbers in [0, 1)",
    lambda value: isinstance(value, (tuple, list)) and all(0 <= beta < 1 for beta in value),
)
_ACCEPTED: dict[str, tuple[str, Callable[[Any], bool]]] = {
    **dict.fromkeys(("lr", "momentum", "weight_decay", "trust_coefficient"), _NOT_NEGATIVE),
    "betas": _BELOW_ONE,
}


class OwnOptimizer(FusedOptimizer):
    """An optimizer that torch.optim has no class for, with the arguments that its classes share."""

    def __init__(
        self,
        params: Any,
        defaults: dict[str, Any],
        *,
        maximize: bool = False,
        foreach: bool | None = None,
        fused: bool | None = None,
        capturable: bool = False,
        differentiable: bool = False,
        **storage: Any,
    ) -> None:
        for name, (accepted, fits) in _ACCEPTED.items():
            if defaults.get(name) is not None and not fits(defaults[name]):
                raise ArgumentError(type(self).__name__, name, repr(defaults[name]), accepted)
        if differentiable:
            raise ArgumentError(type(self).__name__, "differentiable", "True", "False")
        habits = {
            "maximize": maximize,
            "foreach": foreach,
            "fused": fused,
            "capturable": capturable,
        }
        super().__init__(params, defaults | habits, **storage)


def _kept(name: str, value: Any) -> Any:
    # torch knows where the step belongs.
    return _Kept(value) if isinstance(value, torch.Tensor) and name != STEP else value
