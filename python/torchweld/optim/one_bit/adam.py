"""1-bit Adam, and the base class of 1-bit optimizers: a warm-up, then momenta exchanged as bits.

In the warm-up, gradients are averaged over the group and the step is LAMB's op, with or without
ratios. After it, second moments are frozen. Every process mixes its own gradient into the common
momentum, and the mean of the momenta is exchanged and stored as signs. The step is LAMB's op again,
with betas of 1, so that it does not change the moments.
"""

from __future__ import annotations

import gc
import weakref
import zlib
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch.optim.optimizer import ParamsT
from typing_extensions import Unpack

from torchweld import checks
from torchweld.collectives.one_bit.all_reduce import check_error_dtype, check_rank
from torchweld.collectives.one_bit.exchange import (
    Errors,
    OneBitExchange,
    Packed,
    count_of,
    gather_errors,
    take_own_errors,
)
from torchweld.collectives.runs import divide_into_runs, flatten_all, list_sizes
from torchweld.collectives.wire import Status, Wire
from torchweld.dispatch.dtensor import is_dtensor
from torchweld.errors import ArgumentError
from torchweld.ops.optimizer.batch import Batch, Task
from torchweld.ops.optimizer.passes import Exchange, Part, Pass
from torchweld.ops.optimizer.sum_of_squares import sum_of_squares
from torchweld.ops.quantize_one_bit import bytes_of
from torchweld.optim._base import OwnOptimizer
from torchweld.optim._codecs import (
    SIGNED,
    UNSIGNED,
    Codec,
    Moments,
    State,
    check_entry,
    drop_missing,
)
from torchweld.optim._numbers import read_scaler_number
from torchweld.optim._options import OwnStorageOptions, takes
from torchweld.optim._params import Group
from torchweld.optim.lamb import RULE, LambSettings

AVG, SQUARE = "exp_avg", "exp_avg_sq"
BITS, SCALE, WORKER, SERVER = "exp_avg_bits", "exp_avg_scale", "worker_error", "server_error"
# Entries of a group: the number of steps taken, and the owner of the errors, [rank, ranks].
TAKEN, OWNER = "steps_taken", "errors_of"
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_BUCKET = 1 << 24  # elements of gradients that are averaged together


class _SkipStep(Exception):  # noqa: N818
    """A rank found an infinity in its scaled gradients, so every rank skips the step."""


class OneBitOptimizer(OwnOptimizer):
    """An optimizer that averages gradients over processes itself; see OneBitAdam."""

    _exchanges_gradients = True
    # The entries that every state has after the warm-up, and entries that at least one state has.
    _of_each: frozenset[str] = frozenset({BITS, SCALE, WORKER})
    _of_one: frozenset[str] = frozenset()
    # exp_avg is there until the first step after the warm-up.
    extra_entries = frozenset({AVG, BITS, SCALE, WORKER, SERVER})
    # Entries that are a number, or of the parameter's shape.
    _numbers: frozenset[str] = frozenset()
    _alike: frozenset[str] = frozenset()

    def __init__(
        self,
        params: Any,
        *,
        freeze_step: int,
        group: Any,
        error_dtype: torch.dtype,
        **others: Any,
    ) -> None:
        name = type(self).__name__
        fits = isinstance(freeze_step, int) and freeze_step >= 1
        checks.fits(name, "freeze_step", freeze_step, fits, "an int >= 1")
        check_error_dtype(name, error_dtype)
        for argument, only, why in (
            ("state_dtype", torch.float32, "the momentum is bits, and second moments are frozen"),
            ("max_grad_norm", None, "after the warm-up no process has the mean gradient"),
        ):
            value = others.get(argument, only)
            checks.fits(name, argument, value, value == only, f"{only}: {why}")
        self._wire, self._error_dtype = Wire(name, group), error_dtype
        # Results of the exchange; they are stored once no rank can fail.
        self._owed: list[tuple[torch.Tensor, Packed, Errors]] = []
        self._exchanged: list[torch.Tensor] = []  # the parameters of the current exchange
        self._attached: list[weakref.ref[Any]] = []
        self._is_checked = False
        super().__init__(params, freeze_step=freeze_step, **others)

    @property
    def bytes_sent(self) -> int:
        """Bytes that this rank has sent to others."""
        return self._wire.bytes_sent

    @property
    def is_frozen(self) -> bool:
        """Whether the warm-up is over for the next step."""
        first = self.param_groups[0]
        return first[TAKEN] >= first["freeze_step"]

    def add_param_group(self, param_group: Group) -> None:
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        group[TAKEN] = self.param_groups[0].get(TAKEN, 0)
        group[OWNER] = [self._wire.rank, self._wire.size]
        try:
            self._check_group(group)
        except ArgumentError:
            self.param_groups.pop()
            raise

    def _check_group(self, group: Group) -> None:
        name, first = type(self).__name__, self.param_groups[0]
        steps = first["freeze_step"]
        fits, accepted = group["freeze_step"] == steps, f"{steps}, as in the first group"
        checks.fits(name, "freeze_step", group["freeze_step"], fits, accepted)
        if self.is_frozen and any(p.requires_grad for p in group["params"]):
            self._refuse_new()
        devices = {p.device for p in self._params()}
        if len(devices) > 1:
            actual = f"on {', '.join(sorted(map(str, devices)))}"
            raise ArgumentError(name, "params", actual, "all on one device")
        for p in group["params"]:
            if is_dtensor(p):
                accepted = "a tensor that every process has whole; with FSDP2, a low-precision"
                accepted += " reduce-scatter: torchweld.distributed.LowPrecisionReduceScatter"
                raise ArgumentError(name, "params", "with a DTensor", accepted)
            if p.dtype not in _DTYPES:
                accepted = "float32, bfloat16 or float16"
                raise ArgumentError(name, "params", f"with one of {p.dtype}", accepted)

    def attach(self, ddp: torch.nn.Module) -> None:
        """Stop a DistributedDataParallel from averaging gradients: the optimizer averages them.

        Call it before the first backward pass.
        """
        leave_gradients(type(self).__name__, ddp)
        self._attached.append(weakref.ref(ddp))

    def __getstate__(self) -> State:
        raise ArgumentError(type(self).__name__, "self", "pickled", "its state_dict()")

    # --- The step -----------------------------------------------------------------------------

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Take a step, together with all processes of the group.

        Raises CollectiveError on every process, and changes no parameter and no state, if a
        gradient is not finite, shapes or steps differ, or a process is gone.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if not self._is_checked and self._wire.size > 1:
            check_attached(type(self).__name__, self._params(), self._attached)
            self._is_checked = True
        self._unscale()  # ranks may have different scales
        self.grad_scale = None
        try:
            super().step()
        except _SkipStep:
            return loss
        except ArgumentError:  # the other ranks are waiting
            self._wire.report_failure(self._params()[0].device)
            raise
        finally:
            self._owed = []
        for group in self.param_groups:
            group[TAKEN] += 1
        return loss

    def _complete(self, state: State, p: torch.Tensor, codec: Codec, moments: Moments) -> None:
        if self.is_frozen:
            self._refuse_new()
        super()._complete(state, p, codec, moments)

    def _refuse_new(self) -> None:
        steps = self.param_groups[0]["freeze_step"]
        accepted = f"parameters that had gradients in the first {steps} steps"
        raise ArgumentError(type(self).__name__, "params", "with a new one", accepted)

    def _params(self) -> list[torch.Tensor]:
        return [p for group in self.param_groups for p in group["params"]]

    _rule = RULE

    def _moments(self, group: Group, p: torch.Tensor) -> Moments:
        if group.get(TAKEN, 0) >= group["freeze_step"]:
            return {SQUARE: UNSIGNED}
        return {AVG: SIGNED, SQUARE: UNSIGNED}

    def _settings(self, group: Group, batch: Batch) -> LambSettings:
        return RULE.read_settings({**group, "grad_averaging": True})

    def _passes(self) -> Iterable[Pass]:
        if not self.is_frozen:
            return (Pass(self._list_gradients, Exchange.MEAN), *RULE.passes)
        return (
            Pass(self._mix_gradients, Exchange.ONE_BIT_MEAN),
            Pass(self._store_momentum),
            Pass(self._step_frozen),
        )

    def _list_gradients(self, task: Task) -> Iterable[Part]:
        batch = task.batch
        return [Part(g, p, ()) for g, p in zip(batch.grads, batch.wholes, strict=True)]

    def _mix_gradients(self, task: Task) -> Iterable[Part]:
        """Mix this process's own gradient into the common momentum."""
        batch, beta1 = task.batch, task.settings[0]
        sign = 1.0 if task.grad_factor is None else float(task.grad_factor)
        task.handed_on = []
        for p, g in zip(batch.wholes, batch.grads, strict=True):
            momentum = self._momentum_of(p).mul_(beta1).add_(g.float() * (sign * (1 - beta1)))
            task.handed_on.append(momentum)
        return [Part(m, p, ()) for m, p in zip(task.handed_on, batch.wholes, strict=True)]

    def _store_momentum(self, task: Task) -> Iterable[Part]:
        """Store the exchanged momenta in the state: no rank can fail any more."""
        for p, packed, errors in self._owed:
            state = self.state[p]
            end_warm_up(state)
            state[BITS], state[SCALE] = packed.bits, packed.scale
            state |= {WORKER: errors.worker, SERVER: errors.server}
            if errors.server is None:  # a single process; a flat checkpoint cannot have None
                del state[SERVER]
        self._owed = []
        return ()

    def _step_frozen(self, task: Task) -> Iterable[Part]:
        batch, (beta1, beta2, eps, decay, corrected, _) = task.batch, task.settings
        squares, scale = batch.moments, 1.0
        self._find_frozen_ratios(task)
        if corrected:
            group = self.param_groups[0]
            root_scale = (1 - beta2 ** group["freeze_step"]) ** -0.5
            scale, eps = 1 / (1 - beta1 ** (group[TAKEN] + 1)) / root_scale, eps / root_scale
            torch._foreach_mul_(task.handed_on, scale)
        batch.moments = [*task.handed_on, *squares]
        batch.grads = batch.params  # any numbers: they are multiplied by 0
        task.grad_factor, task.settings = None, LambSettings(1.0, 1.0, eps, decay, False, True)
        RULE.step(task)
        return ()

    def _find_frozen_ratios(self, task: Task) -> None:
        """Find the ratios of a rule that has some, from the momentum."""

    # --- Momentum and exchanges ---------------------------------------------------------------

    def _momentum_of(self, p: torch.Tensor) -> torch.Tensor:
        """Compute the common momentum, as a new float32 tensor."""
        state = self.state[p]
        if AVG in state:
            return state[AVG].clone()
        return Packed(state[BITS], state[SCALE], p.numel()).dequantize().view(p.shape)

    def _exchange(self, kind: Exchange, parts: Iterable[Part]) -> None:
        listed = list(parts)
        self._exchanged = [part.param for part in listed]
        if kind is Exchange.MEAN:
            self._average([part.here for part in listed])
        elif kind is Exchange.ONE_BIT_MEAN:
            self._compress(listed)
        else:
            super()._exchange(kind, listed)

    def _phase(self) -> list[object]:
        """List what ranks must agree on: the optimizer, its step and the exchanged parameters."""
        places = self._find_places()
        digest = zlib.crc32(repr([places[p][1] for p in self._exchanged]).encode())
        return [type(self).__name__, self.param_groups[0][TAKEN], f"parameters {digest:08x}"]

    def _status(self) -> Status:
        found_inf = read_scaler_number(self, "found_inf")
        return Status.READY if found_inf is None or not found_inf.item() else Status.SKIPS

    def _average(self, grads: Sequence[torch.Tensor]) -> None:
        """Average gradients in place."""
        status = self._status()
        if status is Status.READY and grads and not sum_of_squares(grads).isfinite():
            status = Status.NOT_FINITE
        if self._wire.agree(grads, status, "warm-up", *self._phase()) is not Status.READY:
            raise _SkipStep
        if self._wire.size == 1:
            return
        runs = divide_into_runs(grads, torch.Tensor.numel, _BUCKET)
        under_way = [self._wire.average(flatten_all(some)) for some in runs]
        means = [pending.wait() for pending in under_way]
        for some, flat in zip(runs, means, strict=True):
            for g, mean in zip(some, flat.split(list_sizes(some)), strict=True):
                g.copy_(mean.view(g.shape))

    def _compress(self, parts: Sequence[Part]) -> None:
        """Average momenta in place; the state is changed later."""
        self._owed = self._reduce([(part.param, part.here) for part in parts])
        for part, (_, packed, _) in zip(parts, self._owed, strict=True):
            part.here.copy_(packed.dequantize().view(part.here.shape))

    def _reduce(
        self, owned: Sequence[tuple[torch.Tensor, torch.Tensor]]
    ) -> list[tuple[torch.Tensor, Packed, Errors]]:
        """Average tensors; each is paired with the parameter whose state has its errors."""
        states = [self.state[p] for p, _ in owned]
        errors = [Errors(state.get(WORKER), state.get(SERVER)) for state in states]
        tensors, dtype = [t for _, t in owned], self._error_dtype
        status = self._status()
        exchange = OneBitExchange(self._wire, tensors, errors, self._phase(), dtype, status)
        if exchange.status is not Status.READY:
            raise _SkipStep
        results = zip(owned, *exchange.finish(), strict=True)
        return [(p, packed, new) for (p, _), packed, new in results]

    # --- State --------------------------------------------------------------------------------

    def whole_state_dict(self) -> State:
        """Return a state for any number of processes, equal on all of them. It is a collective.

        A state_dict() has only this process's errors, and needs the same rank and number of ranks.
        """
        saved = self.state_dict()
        states = [state for _, state in sorted(saved["state"].items()) if WORKER in state]
        errors = [Errors(state[WORKER], state.get(SERVER)) for state in states]
        owed = gather_errors(self._wire, errors, list_sizes(e.worker for e in errors))  # type: ignore[misc]
        whole = {id(state): each for state, each in zip(states, owed, strict=True)}
        for key, state in saved["state"].items():
            if id(state) in whole:
                worker, server = whole[id(state)]
                saved["state"][key] = state | {WORKER: worker, SERVER: server}
        for group in saved["param_groups"]:
            group[OWNER] = None
        return saved

    def _adopt(self, state_dict: State) -> State:
        name, wire = type(self).__name__, self._wire
        groups = [
            {TAKEN: 0} | group | {OWNER: [wire.rank, wire.size]}
            for group in state_dict["param_groups"]
        ]
        owner = state_dict["param_groups"][0].get(OWNER)
        states = dict(state_dict["state"])
        self._check_saved(groups, states)
        with_errors = [key for key, state in states.items() if WORKER in drop_missing(state)]
        if with_errors:
            rank, size = owner or (None, None)
            check_rank(name, wire, rank, size)
        self._check_own(groups, states, is_whole=owner is None)
        for key in with_errors:
            state = states[key]
            errors = Errors(state[WORKER], state.get(SERVER))
            if owner is None:
                errors = take_own_errors(wire, errors, self._error_dtype)
            worker, server = errors.to(self._error_dtype)
            states[key] = state | {WORKER: worker, SERVER: server}
        return super()._adopt(state_dict | {"state": states, "param_groups": groups})

    def _check_saved(self, groups: list[Group], states: dict[Any, State]) -> None:
        """Check that a state saved after the warm-up is complete.

        torch's flat form has only the entries that the loading optimizer's states have.
        """
        name = type(self).__name__
        phases = {(group[TAKEN], (self.defaults | group)["freeze_step"]) for group in groups}
        if len(phases) > 1:
            actual = f"with {', '.join(f'{a} of {b}' for a, b in sorted(phases))} steps of warm-up"
            raise ArgumentError(name, "state_dict", actual, "as many in all groups")
        taken, freeze_step = next(iter(phases))
        if taken < freeze_step:
            return
        saved = [drop_missing(states[key]) for g in groups for key in g["params"] if key in states]
        frozen = [state for state in saved if state and AVG not in state]
        lost = {entry for state in frozen for entry in self._of_each - state.keys()}
        if frozen:
            lost |= self._of_one - set().union(*frozen)
        if lost:
            actual = f"without {', '.join(sorted(lost))}, after {taken} steps"
            accepted = "with all entries: torch's flat form loses them, the nested form has them"
            raise ArgumentError(name, "state_dict", actual, accepted)

    def _check_own(self, groups: list[Group], states: dict[Any, State], is_whole: bool) -> None:
        """Check the shapes and dtypes of the entries that only 1-bit optimizers have."""
        saved = [drop_missing(states.get(key, {})) for g in groups for key in g["params"]]
        pairs = list(zip(self._params(), saved, strict=False))
        for (p, state), size in zip(pairs, self._count_packed(pairs), strict=True):
            scale: Any = state.get(SCALE)
            has_ranks = is_whole and isinstance(scale, torch.Tensor) and scale.ndim == 1
            shapes: dict[str, tuple[Sequence[int], torch.dtype | None]] = {
                BITS: ([bytes_of(size)], torch.uint8),
                SCALE: ([max(len(scale), 1) if has_ranks else self._wire.size], torch.float32),
                WORKER: ([size], None),
                SERVER: ([size if is_whole else count_of(size, self._wire)], None),
                **{entry: ([], None) for entry in self._numbers},
                **dict.fromkeys(self._alike, (p.shape, None)),
            }
            for entry, (shape, dtype) in shapes.items():
                if entry in state:
                    check_entry(type(self).__name__, entry, state[entry], p, shape, dtype)

    def _count_packed(self, pairs: Sequence[tuple[torch.Tensor, State]]) -> list[int]:
        """The number of elements whose bits each saved state has."""
        return [p.numel() for p, _ in pairs]

    def bytes_per_parameter(self) -> dict[str, float]:
        """Count the bytes of each entry of the state, per element of the parameters."""
        count = max(sum(p.numel() for p in self.state), 1)
        sizes: dict[str, float] = {}
        for state in self.state.values():
            for name, value in state.items():
                if isinstance(value, torch.Tensor):
                    sizes[name] = sizes.get(name, 0) + value.nbytes / count
        return sizes


def end_warm_up(state: State) -> None:
    """End the warm-up of a parameter.

    Elements that never had a gradient get an infinite second moment, so that their step is zero.
    Bits cannot store a momentum of zero, and the step would divide it by eps.
    """
    if state.pop(AVG, None) is not None:
        state[SQUARE].masked_fill_(state[SQUARE] == 0, torch.inf)


# --- DistributedDataParallel (DDP) ---


def leave_gradients(function: str, ddp: torch.nn.Module) -> None:
    """Stop DDP from averaging gradients."""
    if not isinstance(ddp, torch.nn.parallel.DistributedDataParallel):
        accepted = "a torch.nn.parallel.DistributedDataParallel"
        raise ArgumentError(function, "ddp", f"a {type(ddp).__name__}", accepted)

    def leave(state: object, bucket: Any) -> Any:
        done: torch.futures.Future[torch.Tensor] = torch.futures.Future()
        done.set_result(bucket.buffer())
        return done

    # DDP compares annotations with its own classes, which a torch without torch.distributed lacks.
    result = torch.futures.Future[torch.Tensor]
    leave.__annotations__ |= {"bucket": torch.distributed.GradBucket, "return": result}
    ddp.register_comm_hook(None, leave)


def check_attached(
    function: str, params: Sequence[torch.Tensor], attached: Sequence[weakref.ref[Any]]
) -> None:
    """Check that no other DDP averages the gradients of these parameters.

    A parameter has no reference to its DDP, so this searches all objects, once.
    """
    ours, known = set(map(id, params)), {id(ref()) for ref in attached}
    wrapper = torch.nn.parallel.DistributedDataParallel
    objects = gc.get_objects()
    kinds = {kind for kind in set(map(type, objects)) if wrapper in kind.__mro__}
    for candidate in objects:
        if type(candidate) not in kinds or id(candidate) in known:
            continue
        if any(id(p) in ours for p in candidate.parameters()):
            actual = "in a DistributedDataParallel, which averages gradients too"
            raise ArgumentError(function, "params", actual, "one that attach(ddp) was called with")


class OneBitAdam(OneBitOptimizer):
    """1-bit Adam (Tang et al. 2021): Adam whose momentum is exchanged and stored as bits.

    For `freeze_step` steps gradients are averaged in float32 and the step is Adam's. Then second
    moments are frozen, and processes average their momenta as signs with error feedback.
    A step is p - lr * (m / (sqrt(v) + eps) + weight_decay * p).

    The optimizer averages gradients itself. Under DistributedDataParallel call attach(ddp) before
    the first backward pass; the first step refuses a model whose gradients would be averaged twice.
    Without a process group it is the same algorithm in one process.

    Args:
        params, lr, betas, eps, weight_decay: as in torch.optim.AdamW.
        freeze_step: the number of warm-up steps. The paper has no default: take 15 to 25 % of all
            steps, and more than the warm-up of lr.
        bias_correction: whether moments are corrected for their start at zero; DeepSpeed has none.
        group: a process group; None: the default group, or only this process.
        error_dtype: dtype of the errors: torch.float32 or torch.bfloat16.
        maximize, foreach, capturable, differentiable, fused: as in torch.optim.
        master_weights, stochastic_rounding: as in AdamW. state_dtype must be torch.float32 and
            max_grad_norm None: the momentum is bits, and no process has the mean gradient.

    An element that never has a gradient in the warm-up does not change after it. With a GradScaler,
    all processes skip a step together. `bytes_sent` counts the bytes this process has sent.
    """

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
        group: torch.distributed.ProcessGroup | None = None,
        error_dtype: torch.dtype = torch.float32,
        **options: Unpack[OwnStorageOptions],
    ) -> None:
        """Every argument is a setting of groups, or an option."""
