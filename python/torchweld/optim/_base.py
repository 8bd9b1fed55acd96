"""The base class of all optimizers: it steps all parameters at once, and stores their states."""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any

import torch

from torchweld import checks, state
from torchweld.dispatch import choice
from torchweld.errors import ArgumentError
from torchweld.ops.optimizer import passes
from torchweld.ops.optimizer.batch import Batch, Task, make_rate
from torchweld.ops.optimizer.cautious import cautious_ratios
from torchweld.ops.optimizer.rule import Rule
from torchweld.ops.optimizer.sum_of_squares import find_sum, sum_of_squares
from torchweld.optim._codecs import (
    COMPANION,
    MASTER,
    STEP,
    Codec,
    Moment,
    Moments,
    State,
    find_remainder,
)
from torchweld.optim._gather import Gathering, to_dense_part
from torchweld.optim._kept import Kept
from torchweld.optim._numbers import check_numbers, checking_numbers, read_scaler_number
from torchweld.optim._options import StorageOptions, TorchOptions, with_defaults
from torchweld.optim._params import Group, check_apart, drop_duplicates
from torchweld.optim._shards import exchange, local_part, sharing_key

# Computes ratios from the norms of parameters and of their steps.
RatiosOf = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
Numbered = Iterable[tuple[int, torch.Tensor]]
Places = dict[torch.Tensor, tuple[int, int]]
_CODEC_KEYS = ("state_dtype", "master_weights", "min_quantized_size", "stochastic_rounding")
_NOT_IN_GROUPS = {*_CODEC_KEYS, "max_grad_norm"}
# Groups that differ only in these settings share a pass: the settings are per tensor, or have no
# effect.
_NO_SETTINGS = {"lr", "maximize", "foreach", "fused", "capturable", "differentiable"}
# Options that a group has only if they are in use, so that its keys are torch's.
CAUTIOUS = ("cautious", "cautious_decay")
_MOST_LOST = 20
EMA = "ema"


class _Hidden:
    """Hides a tensor from torch's load_state_dict, which would cast it to the parameter's dtype."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor


class FusedOptimizer(torch.optim.Optimizer):
    """An optimizer like torch.optim's whose step is a torchweld op.

    A subclass names its rule. In the list of bases it precedes the class of torch.optim that it
    replaces, if any.

    Groups have the same keys as torch's, so that checkpoints of either load into the other. Other
    options are stored outside the groups.
    """

    # GradScaler leaves unscaling and skipping of steps to the optimizer.
    _step_supports_amp_scaling = True
    # Whether a step exchanges the gradients of data parallelism itself.
    _exchanges_gradients = False
    # Whether gradients may be sparse; they are converted to dense.
    _takes_sparse = False
    _takes_complex = True
    # Settings that may differ within a batch on the CPU: numbers on which nothing else depends.
    _varying: frozenset[str] = frozenset()
    # Whether it takes the options of cautious steps and of cautious weight decay.
    _is_cautious_rule = False
    # The parameters of a part of a step; None: all.
    _chosen: Sequence[tuple[Group, Sequence[tuple[Codec, Numbered]]]] | None = None
    # The batches of the last step, and how often others had to be gathered.
    _kept: Kept | None = None
    _lost = 0
    # The norm of all gradients before clipping; set by a step with max_grad_norm.
    grad_norm: torch.Tensor | None = None
    # Entries of a saved state that `make_state` does not make.
    extra_entries: frozenset[str] = frozenset()

    def __init__(self, params: Any, **options: Any) -> None:
        storage = with_defaults(StorageOptions, options)
        self.max_grad_norm = storage.pop("max_grad_norm")
        self.ema_decay = options.pop("ema_decay", None)
        flags = {name: options.pop(name, False) for name in CAUTIOUS}
        name = type(self).__name__
        codec = Codec(**storage)
        codec.check(name)
        norm, decay = self.max_grad_norm, self.ema_decay
        if norm is not None:
            checks.number(name, "max_grad_norm", norm, lambda v: v > 0, "a number > 0 or None")
        fits = not options.get("differentiable")
        checks.fits(name, "differentiable", True, fits, "False; torch.optim has it")
        self._shown: dict[torch.Tensor, torch.Tensor] = {}  # parameters while averages are shown
        self._asked = {name: True for name, flag in flags.items() if flag}
        self._codec = codec
        self._codecs_of: dict[torch.Tensor, Codec] = {}  # for groups with a codec of their own
        self._is_made = False
        with checking_numbers(name, options | {"ema_decay": decay}):
            super().__init__(params, **options)
        check_apart(type(self).__name__, self.param_groups)
        self._is_made = True

    def add_param_group(self, param_group: Group) -> None:
        if not isinstance(param_group, dict):
            raise TypeError(f"param_group must be a dict, but got {type(param_group)}")
        if "max_grad_norm" in param_group:
            actual, accepted = "a group's", "the optimizer's: the norm is that of all gradients"
            raise ArgumentError(type(self).__name__, "max_grad_norm", actual, accepted)
        if "ema_decay" in param_group:
            accepted = "the optimizer's: all parameters have averages, or none"
            raise ArgumentError(type(self).__name__, "ema_decay", "a group's", accepted)
        check_numbers(type(self).__name__, param_group)
        self._check_settings(self.defaults | param_group)
        param_group = self._with_flags(param_group)
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

    def _check_settings(self, group: Group) -> None:
        """Check a new group's settings and defaults, before anything is changed."""

    def _with_flags(self, group: Group) -> Group:
        """A group with the cautious options that are in use."""
        for name in CAUTIOUS:
            value = group.get(name, False)
            checks.flag(type(self).__name__, name, value)
            fits, accepted = self._is_cautious_rule, "False; Adam, AdamW, Lion and Muon take it"
            checks.fits(type(self).__name__, name, value, fits or not value, accepted)
        return {k: v for k, v in (self._asked | group).items() if k not in CAUTIOUS or v}

    @contextlib.contextmanager
    def ema_weights(self) -> Iterator[None]:
        """Show the averages of parameters in their place, as for an evaluation.

        The parameters return bit for bit at the end. Their copies take memory until then, and steps
        are refused.
        """
        name = type(self).__name__
        if self.ema_decay is None:
            raise ArgumentError(name, "ema_decay", "None", "a number, for averages to exist")
        if self._shown:
            raise ArgumentError(f"{name}.ema_weights", "self", "entered twice", "entered once")
        averages = {p: state[EMA] for p, state in self.state.items() if EMA in state}
        with torch.no_grad():
            self._shown = {p: p.detach().clone() for p in averages}
            for p, average in averages.items():
                p.copy_(average)
        try:
            yield
        finally:
            with torch.no_grad():
                for p, before in self._shown.items():
                    p.copy_(before)
            self._shown = {}

    def refresh_masters(self) -> None:
        """Adopt the parameters' current values; call it after other code has set them.

        With master_weights a step rounds parameters from masters, and would overwrite new values.
        Averages that have seen no step restart at the new values.
        """
        with torch.no_grad():
            for p, state in self.state.items():
                if not isinstance(state, dict):
                    continue  # not a parameter's state; torch's optimizers keep others as well
                if MASTER in state:
                    state[MASTER].copy_(p)
                if remainder := find_remainder(state):
                    state[remainder].zero_()
                if EMA in state and state[STEP] == 0:
                    state[EMA].copy_(p)

    def __getstate__(self) -> State:
        own = ("max_grad_norm", "ema_decay", "_codec", "_codecs_of", "_is_made", "_shown", "_asked")
        return super().__getstate__() | {name: getattr(self, name) for name in own}

    # --- What a subclass defines --------------------------------------------------------------

    _rule: Rule

    def _moments(self, group: Group, p: torch.Tensor) -> Moments:
        return moments_of(self._rule)

    def _settings(self, group: Group, batch: Batch) -> tuple[Any, ...]:
        return self._rule.read_settings(group)

    def _learning_rate(self, group: Group) -> float | torch.Tensor:
        return group["lr"]

    def _companion(self) -> str | None:
        """State key of the per-element companion, initialized to the parameter."""
        return None if self.ema_decay is None else EMA

    def _ratios_of(self, group: Group, lr: torch.Tensor) -> RatiosOf | None:
        """The function that computes an adaptive rule's ratios, a float64 number per parameter.

        The function takes the norms of whole parameters, and of their steps as the rule defines
        them. `lr` is one number, or one per parameter. None: this group has no ratios.
        """
        return None

    def _all_moments(self, group: Group, p: torch.Tensor) -> Moments:
        """The moments and the companion."""
        companion, moments = self._companion(), self._moments(group, p)
        return {**moments, companion: COMPANION} if companion else moments

    def _begin_moments(self, state: State) -> None:
        """Adjust the state of a parameter that gets a moment after steps without it."""

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
        kept = self._kept
        mine = self.param_groups, self.state, self._learning_rate
        if kept and kept.ready and self._is_undisturbed() and kept.refresh(*mine):
            kept.repeat(self._find_numbers)
            if getattr(self, "grad_scale", None) is not None:
                self._unscale()
            return loss
        try:
            tasks = self._tasks()
            self._run(tasks)
            self._keep_calls(tasks)
        finally:
            if self._kept is not None:
                self._kept.drop_gradients()
        self._unscale()
        return loss

    def _keep_calls(self, tasks: list[Task]) -> None:
        """Keep the calls that a step with the same batches repeats."""
        kept, rule = self._kept, self._rule
        if kept is None or kept.ready is not None or not self._is_undisturbed():
            return
        is_plain = type(self)._run is FusedOptimizer._run and self._passes() is rule.passes
        ready: list[Any] = [None]
        if is_plain:
            work = zip(kept.work, tasks, strict=True)
            ready = [rule.keep_step(task, bool(of[0].get("maximize"))) for of, task in work]
        kept.ready = [] if None in ready else ready
        if kept.ready and self.max_grad_norm is not None:
            kept.sum_squares = find_sum(kept.list_gradients())

    def _is_undisturbed(self) -> bool:
        """Whether a step depends on nothing but its batches."""
        is_apart = self._chosen is not None or self._shown
        return not (is_apart or choice.forced is not None or state.is_compiling())

    def _run(self, tasks: list[Task]) -> None:
        """Run the passes of a step over these tasks."""
        passes.run(self._passes(), tasks, self._exchange)

    def _passes(self) -> Iterable[passes.Pass]:
        """The passes of a step, in order."""
        return self._rule.passes

    def _exchange(self, kind: passes.Exchange, parts: Iterable[passes.Part]) -> None:
        """Combine the parts of all tasks across devices."""
        exchange(kind, parts)

    def _tasks(self) -> list[Task]:
        """Gather the tasks that the passes of a step run over."""
        work = self._work_or_kept()
        factor = self._gradient_factor()
        return [self._task(group, batch, factor) for group, batch in work]

    def _task(self, group: Group, batch: Batch, factor: torch.Tensor | None) -> Task:
        """Make the task of a batch with the settings of this group."""
        lr = make_rate(batch.lr)
        if group.get("maximize"):
            one = torch.ones((), dtype=torch.float32, device="cpu")
            factor = -one if factor is None else -factor
        found_inf = read_scaler_number(self, "found_inf")
        ratios_of = self._ratios_of(group, lr)
        if group.get("cautious"):
            ratios_of = cautious_ratios(batch)
        rate = None
        if self.ema_decay is not None:
            rate = torch.tensor(1 - self.ema_decay, dtype=torch.float64, device="cpu")
        settings = self._settings(group, batch)
        each = self._settings_of_each(batch)
        return Task(batch, settings, lr, factor, found_inf, rate, each, ratios_of)

    def _work_or_kept(self) -> list[tuple[Group, Batch]]:
        """The work of the last step with new gradients, or of a step that gathers it."""
        if self._chosen is not None or self._shown or state.is_compiling():
            return self._work()
        kept = self._kept
        if kept and kept.refresh(self.param_groups, self.state, self._learning_rate):
            return kept.work
        work, self._kept = self._work(), None
        # A schedule may change settings at each step, and then nothing can be kept.
        if self._lost < _MOST_LOST:
            self._kept = Kept.make(self.param_groups, work, self.state)
            self._lost += 1
        return work

    def _work(self) -> list[tuple[Group, Batch]]:
        """Gather the batches of a step, each with a group that has parameters in it."""
        every = ((some, batch) for some in self._gatherings() for batch in self._batches(some))
        return [(batch.groups[0] if batch.groups else some.group, batch) for some, batch in every]

    def _gatherings(self) -> list[Gathering]:
        """Gather all parameters with a gradient and check them, without changing anything.

        Groups with the same settings share a batch, with their own learning rates.
        """
        gatherings: dict[Any, Gathering] = {}
        if self._shown:
            accepted = "outside ema_weights()"
            raise ArgumentError(f"{type(self).__name__}.step", "self", "showing averages", accepted)
        for group, members in self._members():
            lr = self._learning_rate(group)
            shared = lr if isinstance(lr, torch.Tensor) else None
            flags = [group.get(name) for name in CAUTIOUS]
            varies = self._may_vary(group)
            own = self._shared_settings(group, self._varying if varies else frozenset())
            settings = [group.get("maximize"), shared, *flags, *own]
            for codec, numbered in members:
                key: Any = (*settings, codec)
                try:
                    hash(key)
                except TypeError:  # a list, from JSON
                    key = (id(group), codec)
                if key not in gatherings:
                    moments = functools.partial(self._all_moments, group)
                    given = (type(self).__name__, group, codec, moments, self._takes_sparse)
                    gatherings[key] = Gathering(*given)
                gatherings[key].add(numbered, lr, group if varies else None)
        found = list(gatherings.values())
        if not self._takes_complex and any(kind.is_complex for g in found for kind in g.kinds()):
            raise ArgumentError(type(self).__name__, "a parameter", "complex", "a real tensor")
        return found

    def _members(self) -> Iterable[tuple[Group, Iterable[tuple[Codec, Numbered]]]]:
        """Each group with this step's numbered parameters, by codec."""
        if self._chosen is not None:
            yield from self._chosen
            return
        number = 0  # of a group's first parameter, the same in every process and run
        for group in self.param_groups:
            members = []
            for codec, params in self._by_codec(group["params"]):
                members.append((codec, enumerate(params, number)))
                number += len(params)
            yield group, members

    def _find_places(self) -> Places:
        """The place of each parameter's group, and the parameter's number in the optimizer."""
        every = [(at, p) for at, group in enumerate(self.param_groups) for p in group["params"]]
        return {p: (at, number) for number, (at, p) in enumerate(every)}

    @contextlib.contextmanager
    def _only(self, params: Iterable[torch.Tensor], places: Places) -> Iterator[None]:
        """Gather only these parameters, as a part of a step."""
        chosen: dict[tuple[int, Codec], list[tuple[int, torch.Tensor]]] = {}
        for p in params:
            at, number = places[p]
            chosen.setdefault((at, self._codec_of(p)), []).append((number, p))
        groups = self.param_groups
        self._chosen = [(groups[at], [(codec, some)]) for (at, codec), some in chosen.items()]
        try:
            yield
        finally:
            self._chosen = None

    def _may_vary(self, group: Group) -> bool:
        """Whether a batch with this group may have other settings for each parameter."""
        params = group["params"]
        several = bool(self._varying) and len(self.param_groups) > 1
        return several and bool(params) and params[0].device.type == "cpu"

    def _shared_settings(self, group: Group, except_for: Collection[str] = ()) -> list[Any]:
        """The settings in which groups that share a batch must be equal."""
        unshared = _NO_SETTINGS.union(except_for)
        return [group[name] for name in self.defaults if name not in unshared]

    def _settings_of_each(self, batch: Batch) -> torch.Tensor | None:
        """A row of settings for each parameter; None if all are equal."""
        if not batch.groups:
            return None
        groups = {id(group): group for group in batch.groups}
        rows = {key: tuple(self._settings(group, batch)) for key, group in groups.items()}
        if len(set(rows.values())) < 2:
            return None
        every = [rows[id(group)] for group in batch.groups]
        return torch.tensor(every, dtype=torch.float64, device="cpu")

    def _by_codec(self, params: list[torch.Tensor]) -> Iterable[tuple[Codec, list[torch.Tensor]]]:
        if not self._codecs_of:
            return [(self._codec, params)]
        runs = itertools.groupby(params, self._codec_of)
        return [(codec, list(some)) for codec, some in runs]

    def _codec_of(self, p: torch.Tensor) -> Codec:
        return self._codecs_of.get(p, self._codec)

    def _batches(self, gathering: Gathering) -> list[Batch]:
        """Build the gathered batches; missing states are created."""
        for kind in gathering.kinds():
            states = [self.state[p] for p in kind.params]
            lists = kind.read_entries(states)
            if lists is None:
                for p, state in zip(kind.params, states, strict=True):
                    if not kind.entries <= state.keys():
                        self._complete(state, p, gathering.codec, kind.moments)
                lists = kind.read_entries(states)
                assert lists is not None
            kind.gather(gathering.function, states, lists)
        return gathering.batches()

    def _complete(self, state: State, p: torch.Tensor, codec: Codec, moments: Moments) -> None:
        """Add missing state entries."""
        if state and not codec.has(state, p, moments):
            self._begin_moments(state)
        state.update(codec.new_state(p, moments) | state)

    def _find_numbers(self) -> Sequence[torch.Tensor | None]:
        """The numbers that the kernels of a kept step take: gradients' factor, and found_inf."""
        scale, found_inf = getattr(self, "grad_scale", None), getattr(self, "found_inf", None)
        if scale is not None or found_inf is not None:
            every = self._gradient_factor(), read_scaler_number(self, "found_inf")
            return [None if number is None else number.cpu() for number in every]
        kept = self._kept
        if self.max_grad_norm is None:
            return ()
        if kept is None or kept.sum_squares is None:
            return (self._gradient_factor(),)
        return (self._clip(kept.sum_squares(kept.list_gradients()).sqrt().float()),)

    def _gradient_factor(self) -> torch.Tensor | None:
        """Compute the factor of gradients that removes the loss scale and clips their norm."""
        scale = read_scaler_number(self, "grad_scale")
        factor = None if scale is None else 1 / scale
        if self.max_grad_norm is None:
            return factor
        grads = self._gradients()
        if not grads:
            return factor
        alike: dict[object, list[torch.Tensor]] = {}
        for g in grads:
            alike.setdefault(sharing_key(g), []).append(g)
        squares = [sum_of_squares([to_dense_part(g) for g in some]) for some in alike.values()]
        firsts = (some[0] for some in alike.values())
        exchange(passes.Exchange.SUM, map(passes.over_all, squares, firsts))
        norm = torch.stack([s.to(squares[0].device) for s in squares]).sum().sqrt().float()
        return self._clip(norm) if factor is None else self._clip(norm * factor) * factor

    def _clip(self, norm: torch.Tensor) -> torch.Tensor:
        """The factor that limits a norm."""
        self.grad_norm = norm
        # As in torch.nn.utils.clip_grad_norm_.
        return (self.max_grad_norm / (norm + 1e-6)).clamp(max=1.0)

    def _gradients(self) -> list[torch.Tensor]:
        params = (p for group in self.param_groups for p in group["params"])
        return [p.grad for p in params if p.grad is not None]

    def _unscale(self) -> None:
        """Unscale the gradients in place, as torch's fused steps do."""
        scale = read_scaler_number(self, "grad_scale")
        if scale is None:
            return
        factor = 1 / scale
        found_inf = read_scaler_number(self, "found_inf")
        if found_inf is not None:
            factor = torch.where(found_inf.to(factor.device) == 0, factor, 1)
        alike: dict[torch.device, list[torch.Tensor]] = {}
        for g in map(local_part, self._gradients()):
            alike.setdefault(g.device, []).append(g)
        for device, some in alike.items():
            torch._foreach_mul_(some, factor.to(device))

    # --- State --------------------------------------------------------------------------------

    def load_state_dict(self, state_dict: State) -> None:
        """Load a state of this optimizer, or of its counterpart in torch.optim, in any codec.

        States are converted to this optimizer's codec. Raises an error, and changes nothing, if the
        state does not fit.
        """
        # The hook runs after all other hooks.
        hook = self.register_load_state_dict_pre_hook(lambda _, state: self._adopt(state))
        try:
            super().load_state_dict(state_dict)
        finally:
            hook.remove()

    def state_dict(self) -> State:
        """Return a state like torch's; it counts steps where torch does or later steps need it."""
        saved = super().state_dict()
        states = saved["state"]
        for group, of_group in zip(self.param_groups, saved["param_groups"], strict=True):
            for p, key in zip(group["params"], of_group["params"], strict=True):
                if key in states and not self._saves_count(group, p, states[key]):
                    rest = {name: v for name, v in states.pop(key).items() if name != STEP}
                    states |= {key: rest} if rest else {}
        return saved

    def make_state(self, group: Group, p: torch.Tensor, twin: torch.Tensor | None = None) -> State:
        """Make a new state of p, as it is with these settings of its group; or of a copy of p."""
        moments = self._all_moments(self.defaults | self._asked | group, p)
        return self._codec_of(p).new_state(p if twin is None else twin, moments)

    def describe(self, p: torch.Tensor) -> str:
        """Name the optimizer and the options that the entries of p's state depend on."""
        averages = ["ema_decay"] if self.ema_decay is not None else []
        options, name = self._codec_of(p).describe(p) + averages, self._find_kind().__name__
        return f"{name} with {', '.join(options)}" if options else name

    @classmethod
    def _find_kind(cls) -> type:
        """The class of this package that a user's class is derived from."""
        package = __name__.rpartition(".")[0]
        return next(kind for kind in cls.__mro__ if kind.__module__.startswith(package))

    def _saves_count(self, group: Group, p: torch.Tensor, state: State) -> bool:
        """Whether a saved state counts the steps of p."""
        return True

    def _adopt(self, state_dict: State) -> State:
        saved_groups = state_dict["param_groups"]
        saved_state = state_dict["state"]
        groups, states = [], dict(saved_state)
        for group, saved_group in zip(self.param_groups, saved_groups, strict=False):
            both = self.defaults | self._asked | saved_group
            groups.append({key: v for key, v in both.items() if key not in _NOT_IN_GROUPS})
            for p, key in zip(group["params"], saved_group["params"], strict=False):
                if key in saved_state:
                    codec, moments = self._codec_of(p), self._all_moments(groups[-1], p)
                    adopted = codec.adopt(type(self).__name__, p, saved_state[key], moments)
                    states[key] = {name: _hide(name, value) for name, value in adopted.items()}
        groups += saved_groups[len(groups) :]  # torch raises the error if their number is wrong
        return state_dict | {"state": states, "param_groups": groups}

    def __setstate__(self, state: State) -> None:
        super().__setstate__(state)
        for entries in self.state.values():
            if isinstance(entries, dict):
                for name, value in entries.items():
                    if isinstance(value, _Hidden):
                        entries[name] = value.tensor


def moments_of(rule: Rule, count: int | None = None) -> Moments:
    """A rule's moments, or the first of them."""
    return {name: Moment(signed) for name, signed in [*rule.moments.items()][:count]}


class _NotOfTorch(torch.optim.Optimizer):
    """The base class in the place of torch's, with the arguments that torch's classes share."""

    _counts: Mapping[str, Any] = MappingProxyType({})  # entries of groups that are no settings

    def __init__(self, params: Any, **settings: Any) -> None:
        of_torch = with_defaults(TorchOptions, settings)
        # Groups have only the options in use: checkpoints of other implementations lack these keys.
        asked = {key: value for key, value in of_torch.items() if value}
        super().__init__(params, {**settings, **asked, **self._counts})


class OwnOptimizer(FusedOptimizer, _NotOfTorch):
    """An optimizer that torch.optim lacks."""


def _hide(name: str, value: Any) -> Any:
    # torch handles the step count itself.
    return _Hidden(value) if isinstance(value, torch.Tensor) and name != STEP else value
