"""Optimizer steps against torch's and other packages', as cases of the benchmark."""

from __future__ import annotations

import importlib
import importlib.util
import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch.optim.optimizer import ParamsT

import torchweld
from torchweld import optim
from torchweld.bench.measure.runner import OUT_OF_MEMORY, Plan, Result, compare
from torchweld.bench.measure.timing import Clock, Run, Sample
from torchweld.dispatch.proof import in_a_line, is_out_of_memory
from torchweld.ops.optimizer.rule import RULES, Rule
from torchweld.ops.quantize_8bit import scales_shape
from torchweld.registry import EAGER
from torchweld.registry.cost import Traffic

Params = list[torch.Tensor]
Make = Callable[[ParamsT], Any]


class _Clipped:
    """The two steps that max_grad_norm replaces: clipping, then the optimizer."""

    def __init__(self, params: ParamsT) -> None:
        self._optimizer = torch.optim.AdamW(params, fused=True)
        self._params = [p for group in self._optimizer.param_groups for p in group["params"]]

    def step(self) -> None:
        torch.nn.utils.clip_grad_norm_(self._params, 1.0)
        self._optimizer.step()


class _ReferenceStep:
    """A step in eager torch, for a rule that torch lacks."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer

    def step(self) -> None:
        with torchweld.use_backend(EAGER):
            self._optimizer.step()


@dataclass(frozen=True)
class StepPeer:
    """Another package's optimizer of this kind: how to make it from its module, and its devices."""

    module: str
    make: Callable[[Any], Make]
    devices: tuple[str, ...] = ("cpu", "cuda")
    rounding: float = 0.0  # of a step, by which it may differ from torchweld's own

    def is_installed(self) -> bool:
        return importlib.util.find_spec(self.module.partition(".")[0]) is not None

    def optimizer(self, params: ParamsT) -> Any:
        return self.make(importlib.import_module(self.module))(params)


@dataclass(frozen=True)
class StepKind:
    """A rule's step with one codec for its states, and the steps that it is compared with."""

    rule: str
    reads: int  # bytes read per parameter
    writes: int
    eager: Make  # torch's own step, in its fastest variant
    ours: Make
    variant: str = ""
    peers: Mapping[str, StepPeer] = field(default_factory=dict)
    of_block: tuple[int, int] = (0, 0)  # additional bytes read and written per block


class _Several:
    """Optimizers of parts of the parameters."""

    def __init__(self, *optimizers: torch.optim.Optimizer) -> None:
        self._optimizers = optimizers

    def step(self) -> None:
        for optimizer in self._optimizers:
            optimizer.step()


def _fused(params: ParamsT) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, fused=True)


_BITSANDBYTES = StepPeer("bitsandbytes", lambda m: m.optim.AdamW8bit)
_TORCHAO = StepPeer("torchao.optim", lambda m: m.AdamW8bit)
_DEEPSPEED = StepPeer(
    "deepspeed.ops.adam",
    lambda m: lambda params: m.DeepSpeedCPUAdam(params, weight_decay=1e-2, bias_correction=True),
    ("cpu",),
)


def _muon(params: ParamsT) -> torch.optim.Optimizer:
    """Muon for matrices, and AdamW for vectors."""
    every: Params = list(params)  # type: ignore[arg-type]
    rest = [p for p in every if p.ndim < 2]
    groups: list[dict[str, Any]] = [{"params": [p for p in every if p.ndim > 1]}]
    return optim.Muon([*groups, {"params": rest, "rule": "adamw"}] if rest else groups)


def _schedule_free(params: ParamsT) -> torch.optim.Optimizer:
    optimizer = optim.ScheduleFreeAdamW(params)
    optimizer.train()
    return optimizer


def _muon_of_torch(module: Any) -> Make:
    """torch's Muon for matrices, and its AdamW for vectors."""

    def make(params: ParamsT) -> _Several:
        every: Params = list(params)  # type: ignore[arg-type]
        matrices, rest = ([p for p in every if (p.ndim > 1) == two] for two in (True, False))
        optimizers = [module.Muon(matrices)] if matrices else []
        return _Several(*optimizers, *([_fused(rest)] if rest else []))

    return make


# A norm reads the gradients once more. A ratio adds a pass that reads as much as a step.
_LISTED = (
    StepKind("adam", 16, 12, _fused, optim.AdamW, peers={"deepspeed": _DEEPSPEED}),
    StepKind(
        "adam", 20, 12, _Clipped, lambda p: optim.AdamW(p, max_grad_norm=1.0), "max_grad_norm"
    ),
    StepKind(
        "adam",
        12,
        8,
        _fused,
        lambda p: optim.AdamW(p, state_dtype=torch.bfloat16),
        "bfloat16 states",
    ),
    StepKind(
        "adam",
        10,
        6,
        _fused,
        lambda p: optim.AdamW(p, state_dtype="8bit"),
        "8-bit states",
        {"bitsandbytes": _BITSANDBYTES, "torchao": _TORCHAO},
        of_block=(8, 8),
    ),
    StepKind(
        "sgd",
        12,
        8,
        lambda p: torch.optim.SGD(p, momentum=0.9, fused=True),
        lambda p: optim.SGD(p, momentum=0.9),
        "momentum",
    ),
    # A direction is written and read besides; the products move what a matrix's size decides.
    StepKind(
        "muon",
        16,
        12,
        lambda p: _ReferenceStep(_muon(p)),
        _muon,
        # Five iterations in bfloat16, of two products each, every one rounded.
        peers={"torch_muon": StepPeer("torch.optim", _muon_of_torch, rounding=10 * 2.0**-8)},
    ),
    # Lion is adaptive only if it is cautious.
    StepKind("lion", 12, 8, lambda p: _ReferenceStep(optim.Lion(p)), optim.Lion),
    StepKind("schedule_free", 16, 12, lambda p: _ReferenceStep(_schedule_free(p)), _schedule_free),
    StepKind("lamb", 32, 12, lambda p: _ReferenceStep(optim.LAMB(p)), optim.LAMB),
    StepKind(
        "lamb",
        20,
        6,
        lambda p: _ReferenceStep(optim.LAMB(p)),
        lambda p: optim.LAMB(p, state_dtype="8bit"),
        "8-bit states",
        of_block=(16, 8),
    ),
    StepKind(
        "adafactor",
        20,
        4,
        lambda p: torch.optim.Adafactor(p, foreach=False),
        optim.Adafactor,
    ),
)


def find_class(rule: Rule) -> Any:
    """The optimizer in optim/<rule>.py."""
    room = importlib.import_module(f"torchweld.optim.{rule.name}")
    return next(
        member
        for member in vars(room).values()
        if isinstance(member, type)
        and issubclass(member, torch.optim.Optimizer)
        and member.__module__ == room.__name__
    )


def _derive(rule: Rule) -> StepKind:
    """The step of the rule's class with float32 states, against eager torch."""
    make = find_class(rule)
    moments, passes = len(rule.signed), 2 if rule.is_adaptive else 1
    reads, writes = 4 * (2 + moments) * passes, 4 * (1 + moments)
    return StepKind(rule.name, reads, writes, lambda params: _ReferenceStep(make(params)), make)


_KNOWN = {kind.rule for kind in _LISTED}
KINDS = (*_LISTED, *(_derive(rule) for name, rule in RULES.items() if name not in _KNOWN))
PEERS = {name: peer for kind in KINDS for name, peer in kind.peers.items()}


def _draw_shapes(count: int, elements: int) -> list[tuple[int, ...]]:
    """The shapes of a model's parameters: half vectors, half matrices of all sizes."""
    choose = random.Random(0).choice
    vectors = [(choose((64, 256, 1024, 4096)),) for _ in range(count // 2)]
    matrices = [(choose((64, 256, 512)), choose((64, 128, 256))) for _ in range(count // 2 - 1)]
    left = elements - sum(torch.Size(shape).numel() for shape in [*vectors, *matrices])
    return [*vectors, *matrices, (left // 1024, 1024)]


def _adapters(rank: int, width: int, elements: int) -> list[tuple[int, ...]]:
    """The shapes of LoRA's parameters: pairs of matrices, with long and with very short rows."""
    pairs = elements // (2 * rank * width)
    return [(rank, width), (width, rank)] * pairs


class Grouped:
    """An optimizer with one group per parameter, each with its own learning rate.

    Layer-wise learning rate decay makes such groups. It shows the overhead of a step per group.
    """

    def __init__(self, make: Make) -> None:
        self._make = make

    def __call__(self, params: ParamsT) -> Any:
        return self._make(
            [{"params": [p], "lr": 1e-3 * (1 - 1e-4 * i)} for i, p in enumerate(params)]
        )


@dataclass(frozen=True)
class StepCase:
    """A kind of step on tensors of these shapes."""

    kind: StepKind
    device: str
    name: str  # of the shapes, if `shape` does not tell
    shape: tuple[int, ...]
    shapes: Sequence[tuple[int, ...]]

    def __str__(self) -> str:
        return " ".join(filter(None, [self.kind.rule, self.name, self.kind.variant]))

    @property
    def elements(self) -> int:
        return sum(torch.Size(shape).numel() for shape in self.shapes)

    def traffic(self) -> Traffic:
        """The bytes that have to move."""
        blocks = sum(scales_shape(torch.Size(shape)).numel() for shape in self.shapes)
        return Traffic(
            self.kind.reads * self.elements + self.kind.of_block[0] * blocks,
            self.kind.writes * self.elements + self.kind.of_block[1] * blocks,
            in_place=True,
        )

    def blank(self, contender: str) -> Result:
        """A contender's result without times."""
        return Result(
            op=self.kind.rule,
            shape=list(self.shape),
            dtype="float32",
            direction="step",
            contender=contender,
            elements=self.elements,
            bytes=self.traffic().total,
            variant=", ".join(filter(None, [self.name, self.kind.variant])),
        )


def cases(rules: Iterable[str], device: str, quick: bool) -> list[StepCase]:
    """The cases to measure; if `quick`, only a few large tensors."""
    cases = [few(kind, device, _shape_on(device)) for kind in KINDS if kind.rule in rules]
    for kind in [case.kind for case in cases if case.kind.rule == "muon"]:  # also 4n x n
        count, n, _ = _shape_on(device)
        cases.append(few(kind, device, (count, n, n // 4)))
    if not quick:
        mixed = _draw_shapes(600, 2**24)
        kinds = [case.kind for case in cases]
        cases += [StepCase(kind, device, "600 tensors", (), mixed) for kind in kinds]
        adapters = _adapters(8, 4096, 2**24)
        kinds = [kind for kind in kinds if kind.rule == "adam"]
        cases += [_of_groups(kind, device) for kind in kinds if kind.ours is optim.AdamW]
        cases += [StepCase(kind, device, "LoRA", (), adapters) for kind in kinds]
    return cases


def _of_groups(kind: StepKind, device: str) -> StepCase:
    grouped = replace(kind, eager=Grouped(kind.eager), ours=Grouped(kind.ours), peers={})
    return StepCase(grouped, device, "1000 groups", (), [(64,)] * 1000)


def few(kind: StepKind, device: str, shape: tuple[int, ...]) -> StepCase:
    """Tensors of one shape: the first dimension is their number."""
    return StepCase(kind, device, "", shape, [shape[1:]] * shape[0])


def _shape_on(device: str) -> tuple[int, ...]:
    """A billion elements, if the GPU can hold them with the states of all contenders."""
    if device == "cpu":
        return (16, 1024, 1024)
    memory = torch.cuda.get_device_properties().total_memory
    return (16 if memory > 120e9 else 2, 8192, 8192)


def measure(case: StepCase, plan: Plan, clock: Clock) -> Iterator[list[Result]]:
    """Time every contender, after its first step is checked against torch's."""
    problem = _StepProblem(case)
    runs: dict[str, Run] = {}
    not_timed: list[Result] = []

    def enter(name: str, make: Make, backend: str | None = None, rounding: float = 0.0) -> None:
        try:
            with torchweld.use_backend(backend):
                runs[name] = problem.enter(make, backend, rounding)
        except Exception as error:  # one contender's failure must not end the run of the others
            if name == EAGER:
                raise
            result = case.blank(name)
            result.status, result.reason = "refused", in_a_line(error)
            if is_out_of_memory(error):
                result.status, result.reason = "absent", OUT_OF_MEMORY
                torch.cuda.empty_cache()
            not_timed.append(result)

    enter(EAGER, case.kind.eager)
    rule, param = RULES[case.kind.rule], torch.empty(0, device=case.device)
    for backend in rule.backends(param):
        if backend in plan.backends:
            enter(backend, case.kind.ours, backend)
    for name, peer in case.kind.peers.items():
        if name in plan.rivals and case.device in peer.devices:
            if peer.is_installed():
                enter(name, peer.optimizer, rounding=peer.rounding)
            else:
                absent = case.blank(name)
                absent.status, absent.reason = "absent", f"not installed: pip install {name}"
                not_timed.append(absent)
    if case.device == "cuda":
        take_step(case)  # the automatic choice may not have been made yet
    with torchweld.use_backend(None):
        chosen = rule.choose_for(param)
    results = compare(runs, case.traffic(), case.device, plan, clock, case.blank)
    for result in results:
        result.automatic = result.contender == chosen
    yield [*results, *not_timed]


def take_step(case: StepCase) -> None:
    """Take one step on the automatic backend; the first step of a class makes a trial."""
    with torchweld.use_backend(None):
        _StepProblem(case).enter(case.kind.ours, None)


def peers() -> list[str]:
    """The installed peers."""
    return [name for name, peer in PEERS.items() if peer.is_installed()]


class _StepProblem:
    """Parameters that all contenders step, each with its own gradients and states."""

    def __init__(self, case: StepCase) -> None:
        generator = torch.Generator(case.device).manual_seed(0)
        draw = partial(torch.randn, generator=generator, device=case.device)
        self._start = [draw(shape) for shape in case.shapes]
        self._grads = [draw(shape) * 1e-2 for shape in case.shapes]
        self._params = [p.clone().requires_grad_() for p in self._start]
        self._expected: Params = []
        self._elements = case.elements

    def enter(self, make: Make, backend: str | None, rounding: float = 0.0) -> Run:
        """Add a contender, after checking its first step; `rounding` is a part of a step."""
        grads = [g.clone() for g in self._grads]
        with torch.no_grad():
            for p, start in zip(self._params, self._start, strict=True):
                p.copy_(start)
        optimizer = make(self._params)
        run = partial(self._run, optimizer.step, grads, backend)
        run(_untimed)
        self._expected = self._expected or [p.detach().clone() for p in self._params]
        off = sum(
            (p.detach() - e).abs().sum().item()
            for p, e in zip(self._params, self._expected, strict=True)
        )
        moved = sum(
            (e - start).abs().sum().item()
            for e, start in zip(self._expected, self._start, strict=True)
        )
        # A step moves at most lr = 1e-3; eps matters for tiny clipped gradients.
        if not off < 1e-6 * self._elements + rounding * moved:
            raise ValueError(f"wrong result: off by {off / self._elements:.1e} after a step")
        return run

    def _run(
        self, step: Callable[[], Any], grads: Params, backend: str | None, clock: Clock
    ) -> Sample:
        for p, g in zip(self._params, grads, strict=True):
            p.grad = g
        with torchweld.use_backend(backend):
            return clock(step)


def _untimed(call: Callable[[], Any]) -> Sample:
    call()
    return Sample(0.0)
