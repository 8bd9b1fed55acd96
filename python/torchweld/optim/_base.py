"""The base of all optimizers: a step over all parameters at once, and their state."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import torch

from torchweld.errors import ArgumentError
from torchweld.ops.optimizer import passes
from torchweld.ops.optimizer.batch import Batch, Task
from torchweld.ops.optimizer.rule import Rule
from torchweld.ops.optimizer.sum_of_squares import sum_of_squares
from torchweld.optim._codecs import MASTER, REMAINDER, STEP, Codec, Moments, State
from torchweld.optim._exchanges import exchange
from torchweld.optim._gather import Gathering, gradient
from torchweld.optim._params import Group, check_apart, drop_duplicates
from torchweld.optim._shards import layout, local

# Computes ratios from the norms of parameters and of their steps.
RatiosOf = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
_CODEC_KEYS = ("state_dtype", "master_weights", "min_quantized_size", "stochastic_rounding")
_NOT_IN_GROUPS = {*_CODEC_KEYS, "max_grad_norm"}
# Groups that differ only in these step together: they are per tensor, or have no effect.
_NO_SETTINGS = {"lr", "maximize", "foreach", "fused", "capturable", "differentiable"}


class _Kept:
    """Hide a tensor from torch's load_state_dict, which would cast it to the parameter's dtype."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor


class FusedOptimizer(torch.optim.Optimizer):
    """An optimizer of torch.optim's kind whose step is a torchweld op.

    A subclass names its rule, and says for each group the names of its moments and the rule's
    settings. In the list of bases it precedes the class of torch.optim that it replaces, if any.

    Groups have the same keys as torch's, so that checkpoints of either load into the other. Other
    options are stored outside the groups.
    """

    # GradScaler leaves unscaling and skipping of steps to the optimizer.
    _step_supports_amp_scaling = True
    # Whether gradients may be sparse; they are converted to dense.
    _takes_sparse = False
    # The number of the first parameter; not 0 if another optimizer steps earlier ones.
    _first_number = 0
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
        self.max_grad_norm = max_grad_norm
        self._codec = codec
        self._codecs_of: dict[torch.Tensor, Codec] = {}  # for groups with a codec of their own
        self._is_made = False
        super().__init__(params, *args, **kwargs)
        check_apart(type(self).__name__, self.param_groups)
        self._is_made = True

    def add_param_group(self, param_group: Group) -> None:
        if not isinstance(param_group, dict):
            raise TypeError(f"param_group must be a dict, but got {type(param_group)}")
        if "max_grad_norm" in param_group:
            came, accepted = "a group's", "the optimizer's: the norm is that of all gradients"
            raise ArgumentError(type(self).__name__, "max_grad_norm", came, accepted)
        asked = {key: param_group[key] for key in _CODEC_KEYS if key in param_group}
        codec = replace(self._codec, **asked)
        codec.check(type(self).__name__)
        if asked:
            param_group = {key: v for key, v in param_group.items() if key not in asked}
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        drop_duplicates(group)
        if asked:
            self._codecs_of |= dict.fromkeys(group["params"], codec)
        if self._is_made:
            check_apart(type(self).__name__, self.param_groups)

    def refresh_masters(self) -> None:
        """Adopt the parameters' current values; call it after something else has set them.

        With master_weights a step rounds parameters from masters, and would overwrite new values.
        """
        with torch.no_grad():
            for p, state in self.state.items():
                if not isinstance(state, dict):
                    continue  # a note of something else, as torch's optimizers keep
                if MASTER in state:
                    state[MASTER].copy_(p)
                if REMAINDER in state:
                    state[REMAINDER].zero_()

    def __getstate__(self) -> State:
        own = ("max_grad_norm", "_codec", "_codecs_of", "_is_made")
        return super().__getstate__() | {name: getattr(self, name) for name in own}

    # --- What a subclass says -----------------------------------------------------------------

    def _rule(self) -> Rule:
        raise NotImplementedError

    def _moments(self, group: Group, p: torch.Tensor) -> Moments:
        raise NotImplementedError

    def _settings(self, group: Group, batch: Batch) -> tuple[Any, ...]:
        raise NotImplementedError

    def _learning_rate(self, group: Group) -> float | torch.Tensor:
        return group["lr"]

    def _ratios_of(self, group: Group, lr: torch.Tensor) -> RatiosOf | None:
        """The function that computes an adaptive rule's ratios, a float64 number per parameter.

        It takes the norms of whole parameters, and of their steps as the rule defines them. `lr` is
        one number, or one per parameter. None: the group's steps have no ratios.
        """
        return None

    def _begin_moments(self, state: State) -> None:
        """Called when a parameter gets a moment after steps without it."""

    # --- The step -----------------------------------------------------------------------------

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Take a step, in one pass over the parameters of each dtype and codec.

        `closure`, if given, computes the gradients and returns the loss.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        passes.run(self._passes(), self._tasks(), self._exchange)
        self._unscale()
        return loss

    def _passes(self) -> Iterable[passes.Pass]:
        """Run the passes of a step."""
        return self._rule().passes

    def _exchange(self, kind: passes.Exchange, parts: Iterable[passes.Part]) -> None:
        """Combine the parts of all tasks across devices."""
        exchange(kind, parts)

    def _tasks(self) -> list[Task]:
        """The tasks that a step's passes run over."""
        work = self._work()
        factor = self._gradient_factor()
        return [self._task(group, batch, factor) for group, batch in work]

    def _task(self, group: Group, batch: Batch, factor: torch.Tensor | None) -> Task:
        """A batch's task with this group's settings."""
        lr = batch.lr
        if not isinstance(lr, torch.Tensor):
            lr = torch.tensor(lr, dtype=torch.float64, device="cpu")
        elif lr.dtype not in (torch.float32, torch.float64):
            lr = lr.double()
        if group.get("maximize"):
            one = torch.ones((), dtype=torch.float32, device="cpu")
            factor = -one if factor is None else -factor
        found_inf = scaler_number(self, "found_inf")
        ratios_of = self._ratios_of(group, lr)
        return Task(batch, self._settings(group, batch), lr, factor, found_inf, ratios_of)

    def _work(self) -> list[tuple[Group, Batch]]:
        """The batches that step together, each with a group that has its settings."""
        return [(some.group, batch) for some in self._gatherings() for batch in self._batches(some)]

    def _gatherings(self) -> list[Gathering]:
        """Gather all parameters with a gradient and check them, without changing anything.

        Groups with the same settings step together, at their own learning rates.
        """
        names = [name for name in self.defaults if name not in _NO_SETTINGS]
        found: dict[Any, Gathering] = {}
        # The number of a group's first parameter, the same in every process and run.
        number = self._first_number
        for group in self.param_groups:
            lr = self._learning_rate(group)
            shared = lr if isinstance(lr, torch.Tensor) else None
            settings = [group.get("maximize"), shared, *(group[name] for name in names)]
            for codec, params in self._by_codec(group["params"]):
                key: Any = (*settings, codec)
                try:
                    hash(key)
                except TypeError:  # a list, from JSON
                    key = (id(group), codec)
                if key not in found:
                    found[key] = self._new_gathering(group, codec)
                found[key].add(params, number, lr)
                number += len(params)
        return list(found.values())

    def _by_codec(self, params: list[torch.Tensor]) -> Iterable[tuple[Codec, list[torch.Tensor]]]:
        if not self._codecs_of:
            return [(self._codec, params)]
        runs = itertools.groupby(params, self._codec_of)
        return [(codec, list(some)) for codec, some in runs]

    def _codec_of(self, p: torch.Tensor) -> Codec:
        return self._codecs_of.get(p, self._codec)

    def _new_gathering(self, group: Group, codec: Codec) -> Gathering:
        moments = functools.partial(self._moments, group)
        return Gathering(type(self).__name__, group, codec, moments, self._takes_sparse)

    def _batches(self, gathering: Gathering) -> list[Batch]:
        """The gathered batches, with states; missing ones are created."""
        for kind in gathering.kinds():
            states = [self.state[p] for p in kind.params]
            columns = kind.columns_of(states)
            if columns is None:
                for p, state in zip(kind.params, states, strict=True):
                    if kind.lacks_entries(state):
                        self._complete(state, p, gathering.codec, kind.moments)
                columns = kind.columns_of(states)
                assert columns is not None
            kind.gather(gathering.function, states, columns)
        return gathering.batches()

    def _complete(self, state: State, p: torch.Tensor, codec: Codec, moments: Moments) -> None:
        """Add missing state entries."""
        if state and not codec.has(state, p, moments):
            self._begin_moments(state)
        state.update(codec.new_state(p, moments) | state)

    def _gradient_factor(self) -> torch.Tensor | None:
        """The factor of gradients that undoes the loss's scale and clips their norm."""
        scale = scaler_number(self, "grad_scale")
        factor = None if scale is None else 1 / scale
        if self.max_grad_norm is None:
            return factor
        grads = self._gradients()
        if not grads:
            return factor
        alike: dict[object, list[torch.Tensor]] = {}
        for g in grads:
            alike.setdefault(layout(g), []).append(g)
        squares = [sum_of_squares([gradient(g) for g in some]) for some in alike.values()]
        firsts = (some[0] for some in alike.values())
        exchange(passes.Exchange.SUM, map(passes.over_all, squares, firsts))
        norm = torch.stack([s.to(squares[0].device) for s in squares]).sum().sqrt().float()
        if factor is not None:
            norm = norm * factor
        self.grad_norm = norm
        # As in torch.nn.utils.clip_grad_norm_.
        clip = (self.max_grad_norm / (norm + 1e-6)).clamp(max=1.0)
        return clip if factor is None else clip * factor

    def _gradients(self) -> list[torch.Tensor]:
        params = (p for group in self.param_groups for p in group["params"])
        return [p.grad for p in params if p.grad is not None]

    def _unscale(self) -> None:
        """Unscale the gradients in place, as torch's fused steps do."""
        scale = scaler_number(self, "grad_scale")
        if scale is None:
            return
        factor = 1 / scale
        found_inf = scaler_number(self, "found_inf")
        if found_inf is not None:
            factor = torch.where(found_inf.to(factor.device) == 0, factor, 1)
        alike: dict[torch.device, list[torch.Tensor]] = {}
        for g in map(local, self._gradients()):
            alike.setdefault(g.device, []).append(g)
        for device, some in alike.items():
            torch._foreach_mul_(some, factor.to(device))

    # --- State --------------------------------------------------------------------------------

    def load_state_dict(self, state_dict: State) -> None:
        """Load a state of this optimizer, or of its counterpart in torch.optim, in any codec.

        States are converted to this optimizer's codec. Raises an error, and changes nothing, if the
        state does not fit.
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
            both = self.defaults | saved_group
            groups.append({key: v for key, v in both.items() if key not in _NOT_IN_GROUPS})
            for p, key in zip(group["params"], saved_group["params"], strict=False):
                if key in saved_state:
                    codec, moments = self._codec_of(p), self._moments(groups[-1], p)
                    adopted = codec.adopt(type(self).__name__, p, saved_state[key], moments)
                    states[key] = {name: _kept(name, value) for name, value in adopted.items()}
        groups += saved_groups[len(groups) :]  # torch reports the wrong number
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
    "eps": (
        "numbers >= 0",
        lambda value: min(value if isinstance(value, (tuple, list)) else [value]) >= 0,
    ),
}


def scaler_number(optimizer: torch.optim.Optimizer, name: str) -> torch.Tensor | None:
    """A number that GradScaler has set on an optimizer: grad_scale or found_inf.

    Without any gradient GradScaler sets 0, no tensor.
    """
    value = getattr(optimizer, name, None)
    if value is None or (isinstance(value, torch.Tensor) and value.ndim == 0):
        return value
    if not isinstance(value, torch.Tensor):
        return torch.tensor(float(value), dtype=torch.float32, device="cpu")
    if value.numel() != 1:
        raise ArgumentError(type(optimizer).__name__, name, f"of {list(value.shape)}", "one number")
    return value.reshape(())


class OwnOptimizer(FusedOptimizer):
    """An optimizer without a class in torch.optim, with the arguments its classes share."""

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
        name = type(self).__name__
        for argument, (accepted, fits) in _ACCEPTED.items():
            value = defaults.get(argument)
            if isinstance(value, torch.Tensor) and value.numel() != 1:
                raise ArgumentError(name, argument, f"of {list(value.shape)}", "one number")
            if value is not None and not fits(value):
                raise ArgumentError(name, argument, repr(value), accepted)
        if differentiable:
            raise ArgumentError(name, "differentiable", "True", "False")
        # Only options in use are in the groups: checkpoints of others lack these keys.
        habits = {
            "maximize": maximize,
            "foreach": foreach,
            "fused": fused,
            "capturable": capturable,
        }
        asked = {key: value for key, value in habits.items() if value}
        super().__init__(params, defaults | asked, **storage)


def _kept(name: str, value: Any) -> Any:
    # torch knows where the step belongs.
    return _Kept(value) if isinstance(value, torch.Tensor) and name != STEP else value
