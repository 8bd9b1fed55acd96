"""Schedule-free AdamW."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch.optim.optimizer import ParamsT
from typing_extensions import Unpack

from torchweld import checks
from torchweld.errors import ArgumentError
from torchweld.ops.optimizer.batch import Batch, Stepped, Task, Tensor, Tensors
from torchweld.ops.optimizer.reference import read_param, split_param
from torchweld.ops.optimizer.rule import Rule
from torchweld.optim._base import Group, OwnOptimizer
from torchweld.optim._codecs import MASTER, STEP, State, find_remainder
from torchweld.optim._options import OwnStorageOptions, takes
from torchweld.optim._shards import local_part


class ScheduleFreeSettings(NamedTuple):
    """The fields of the struct in csrc/core/rules/schedule_free.h."""

    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    weight: float  # of z in the average
    number: float  # of the step of all parameters, from 1


def _update(
    p: Tensor, g: Tensor, moments: Tensors, t: Tensor, lr: Tensor, s: ScheduleFreeSettings
) -> Stepped:
    exp_avg_sq, z = moments
    exp_avg_sq = exp_avg_sq * s.beta2 + g * g * (1 - s.beta2)
    root_scale = (1 / torch.full_like(t, 1 - s.beta2**s.number).sqrt()).to(p.dtype)
    # In float64: the last bit of torch's float32 root depends on a library.
    root = exp_avg_sq.double().sqrt().to(p.dtype)
    d = g / (root * root_scale + s.eps) + p * s.weight_decay
    of_y = (lr * (1 - s.beta1 * (1 - s.weight))).to(p.dtype)
    y = p + (z - p) * s.weight - d * of_y
    return y, [exp_avg_sq, z - d * lr.to(p.dtype)]


SCHEDULE_FREE = Rule(
    "schedule_free",
    ScheduleFreeSettings,
    moments={"exp_avg_sq": False},
    update=_update,
    has_companion=True,
)


# What a group counts, under the names of the authors' package.
_COUNTS: dict[str, Any] = {
    "k": 0,
    "train_mode": False,
    "weight_sum": 0.0,
    "lr_max": -1.0,
    "scheduled_lr": 0.0,
}


class _Now(NamedTuple):
    """The numbers of a group's next step."""

    scheduled_lr: float
    lr_max: float
    weight_sum: float
    weight: float  # of z in the average


class ScheduleFreeAdamW(OwnOptimizer):
    """Schedule-free AdamW (Defazio et al. 2024): an average of iterates in place of a schedule.

    Call `train()` before the first step, and again after an `eval()`, which sets the parameters to
    the averages that are evaluated and saved. Steps out of train mode are refused. A scheduler of
    lr is of no use; `warmup_steps` is.

    Args:
        params, lr, betas, eps: as in torch.optim.AdamW; betas[0] interpolates between the iterates
            and their average, and is greater than 0.
        weight_decay: decoupled, at the point at which gradients are taken.
        warmup_steps: the number of steps over which lr grows from 0.
        r: the power of the step's number in the weights of the average.
        weight_lr_power: the power of the largest lr in these weights.
        maximize, foreach, differentiable, fused: as in torch.optim; capturable must be False, since
            the weights of the average are numbers of the host.
        state_dtype: of the second moment; the iterates are float32 for 16-bit parameters.
        master_weights, min_quantized_size, stochastic_rounding, max_grad_norm: as in Adam.

    States and groups have the names of the authors' package, and load from it. A GradScaler skips
    the steps of infinite gradients itself, as it does for the package. With masters `train()`
    restores the parameters that `eval()` found bit for bit; else it does so as long as nothing has
    written to them in between, for which eval mode keeps a copy.
    """

    # The host counts steps, and so has to know which are skipped.
    _step_supports_amp_scaling = False

    @takes(OwnStorageOptions)
    def __init__(
        self,
        params: ParamsT,
        lr: float = 2.5e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        warmup_steps: int = 0,
        r: float = 0.0,
        weight_lr_power: float = 2.0,
        **options: Unpack[OwnStorageOptions],
    ) -> None:
        self._found: dict[torch.Tensor, tuple[list[torch.Tensor], int]] = {}

    def __getstate__(self) -> State:
        return super().__getstate__() | {"_found": {}}

    def add_param_group(self, param_group: Group) -> None:
        super().add_param_group(param_group)
        # Parameters that have taken no step are the same in both modes.
        self.param_groups[-1]["train_mode"] = self.param_groups[0]["train_mode"]

    def _check_settings(self, group: Group) -> None:
        name = type(self).__name__
        fits = not group.get("capturable")
        checks.fits(name, "capturable", True, fits, "False: the host counts steps")
        accepted = "two numbers in [0, 1), the first one not 0"
        checks.fits(name, "betas", group["betas"], 0 < group["betas"][0] < 1, accepted)
        steps = group["warmup_steps"]
        fits = isinstance(steps, int) and steps >= 0
        checks.fits(name, "warmup_steps", steps, fits, "an int >= 0")

    # --- Modes --------------------------------------------------------------------------------

    @torch.no_grad()
    def eval(self) -> None:
        """Set parameters to the averages, for an evaluation or a checkpoint of the model."""
        for group in self.param_groups:
            if not group["train_mode"]:
                continue
            for p in group["params"]:
                state = self.state.get(p, {})
                if "z" not in state:
                    continue
                kept = _copy(p, state)
                _move(p, state, 1 - 1 / float(group["betas"][0]))
                if MASTER not in state:
                    self._found[p] = kept, p._version
            group["train_mode"] = False

    @torch.no_grad()
    def train(self) -> None:
        """Set parameters to the points at which gradients are taken."""
        for group in self.param_groups:
            if group["train_mode"]:
                continue
            for p in group["params"]:
                state = self.state.get(p, {})
                kept, version = self._found.pop(p, ([], -1))
                if "z" not in state:
                    continue
                if MASTER in state:
                    _write(p, [local_part(state[MASTER])])
                elif p._version == version:
                    _write(p, kept, state)
                else:
                    _move(p, state, 1 - float(group["betas"][0]))
            group["train_mode"] = True

    # --- The step -----------------------------------------------------------------------------

    _rule = SCHEDULE_FREE
    _counts = _COUNTS

    def _companion(self) -> str | None:
        return "z"

    def _settings(self, group: Group, batch: Batch) -> ScheduleFreeSettings:
        counted = {"weight": _advance(group).weight, "number": group["k"] + 1}
        return SCHEDULE_FREE.read_settings(group | counted)

    def _learning_rate(self, group: Group) -> float:
        return _advance(group).scheduled_lr

    def _tasks(self) -> list[Task]:
        if not all(group["train_mode"] for group in self.param_groups):
            name = type(self).__name__
            raise ArgumentError(
                f"{name}.step", "self", "in eval mode", "in train mode: call train()"
            )
        return super()._tasks()

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Take a step; groups count it."""
        loss = super().step(closure)
        for group in self.param_groups:
            now = _advance(group)
            group["scheduled_lr"], group["lr_max"] = now.scheduled_lr, now.lr_max
            group["weight_sum"] = now.weight_sum
            group["k"] += 1
        return loss

    def _adopt(self, state_dict: State) -> State:
        # The package does not count the steps of a parameter.
        states = dict(state_dict["state"])
        for group in state_dict["param_groups"]:
            for key in group["params"]:
                if states.get(key):
                    states[key] = {STEP: float(group.get("k", 0)), **states[key]}
        self._found.clear()
        return super()._adopt(state_dict | {"state": states})


def _advance(group: Group) -> _Now:
    """The numbers of the step that a group is about to take, as the package computes them."""
    k, warmup = group["k"], group["warmup_steps"]
    lr = float(group["lr"]) * ((k + 1) / warmup if k < warmup else 1.0)
    lr_max = max(lr, group["lr_max"])
    weight = (k + 1) ** group["r"] * lr_max ** group["weight_lr_power"]
    weight_sum = group["weight_sum"] + weight
    return _Now(lr, lr_max, weight_sum, weight / weight_sum if weight_sum else 0.0)


def _copy(p: torch.Tensor, state: State) -> list[torch.Tensor]:
    """Copies of the parameter and its remainder, if it has one."""
    name = find_remainder(state)
    values = [p, state[name]] if name else [p]
    return [local_part(t.detach()).clone() for t in values]


def _move(p: torch.Tensor, state: State, weight: float) -> None:
    """Move the parameter by this weight towards z; a master stays."""
    z, local = local_part(state["z"]), local_part(p.detach())
    name = MASTER if MASTER in state else find_remainder(state)
    completion = local_part(state[name]) if name else None
    now = read_param(local, completion).to(z.dtype)
    moved = now + (z - now) * weight
    rounded, rest = split_param(moved, p.dtype, completion)
    _write(p, [rounded] if rest is None or MASTER in state else [rounded, rest], state)


def _write(p: torch.Tensor, values: list[torch.Tensor], state: State | None = None) -> None:
    """Write the parameter, and its remainder if the state has one."""
    local_part(p.detach()).copy_(values[0])
    if state is not None and (name := find_remainder(state)):
        local_part(state[name]).copy_(values[1])
    torch.autograd.graph.increment_version([p])
