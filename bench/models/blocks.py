"""Transformer blocks and a whole GPT of torch's own layers, before and after fuse(); functions."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial

import torch
from torch import nn
from torch.nn.functional import cross_entropy, scaled_dot_product_attention
from torch.utils.flop_counter import FlopCounterMode

import torchweld
from torchweld import optim
from torchweld.bench.cases import name_dtype
from torchweld.bench.measure.contenders import COMPILE
from torchweld.bench.measure.runner import Plan, Result, compare
from torchweld.bench.measure.timing import Clock, Run, Sample
from torchweld.bench.models import functions
from torchweld.bench.models.demo import GPT, LENGTH
from torchweld.bench.models.training import Learner, compiled
from torchweld.dispatch.proof import Judge, Results
from torchweld.registry import EAGER
from torchweld.registry.cost import Traffic

FUSED_WAYS = FUSED, EIGHT_BIT = "fused", "fused, 8-bit"
HEADS, DROPOUT = 8, 0.1
LEARNING_RATE = 1e-4
# Batch, length and width.
SHAPES = {"cpu": (8, 256, 512), "cuda": (16, 1024, 2048)}


class GatedBlock(nn.Module):
    """RMSNorm, causal attention, RMSNorm and a gated MLP, as in Llama but without rotary angles."""

    def __init__(self, width: int) -> None:
        super().__init__()
        hidden = 8 * width // 3 // 64 * 64
        self.norm_in, self.norm = nn.RMSNorm(width, eps=1e-6), nn.RMSNorm(width, eps=1e-6)
        self.qkv, self.out = (nn.Linear(width, n * width, bias=False) for n in (3, 1))
        self.mlp = GatedMLP(width, hidden)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        split = (*x.shape[:2], 3, HEADS, x.shape[-1] // HEADS)
        q, k, v = self.qkv(self.norm_in(x)).view(split).permute(2, 0, 3, 1, 4)
        attended = scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).reshape(x.shape))
        return x + self.mlp(self.norm(x))


class GatedMLP(nn.Module):
    """down(silu(gate(x)) * up(x))."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.gate_proj, self.up_proj = (nn.Linear(width, hidden, bias=False) for _ in range(2))
        self.down_proj, self.act = nn.Linear(hidden, width, bias=False), nn.SiLU()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(self.act(self.gate_proj(x)) * self.up_proj(x))


class Loss(nn.Module):
    """A language model's loss on its own input tokens."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        logits = self.model(tokens)[:, :-1]
        return cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())


def _encoder(width: int, *, norm_first: bool) -> nn.Module:
    return nn.TransformerEncoderLayer(
        *(width, HEADS, 4 * width, DROPOUT),
        activation="gelu",
        batch_first=True,
        norm_first=norm_first,
    )


@dataclass(frozen=True)
class Block:
    """A block by name, how to build one of a width, and whether it is a model with a loss."""

    name: str
    build: Callable[[int], nn.Module]
    whole: bool = False
    fuse: Callable[[nn.Module], nn.Module] = lambda model: torchweld.fuse(model)
    widths: int = 1  # of the others


BLOCKS = {
    block.name: block
    for block in (
        Block("post_norm_block", partial(_encoder, norm_first=False)),
        Block("pre_norm_block", partial(_encoder, norm_first=True)),
        Block("gated_block", GatedBlock),
        Block("gpt", lambda width: Loss(GPT(width, DROPOUT)), whole=True),
        Block("cross_entropy", functions.make_loss_of_logits, fuse=functions.switch, widths=16),
        Block("linear_cross_entropy", functions.make_loss, fuse=functions.switch),
        Block("linear_logprobs", functions.make_logprobs, fuse=functions.switch),
        Block("logprobs", functions.make_logprobs_of_logits, fuse=functions.switch, widths=16),
        Block("rotary_embedding_qk", functions.Rotary, fuse=functions.switch),
    )
}


@dataclass(frozen=True)
class BlockCase:
    """A block on inputs of a shape. In 16 bits its parameters are float32, under autocast."""

    block: Block
    shape: tuple[int, int, int]
    dtype: torch.dtype
    device: str

    def __str__(self) -> str:
        words = [
            self.block.name,
            "x".join(map(str, self.shape)),
            self.variant,
            name_dtype(self.dtype),
        ]
        return " ".join(filter(None, words))

    @property
    def variant(self) -> str:
        """A label that distinguishes the case from others of its shape."""
        return "" if self.dtype == torch.float32 else "autocast"

    def precision(self) -> AbstractContextManager[object]:
        """The context of its forward pass."""
        if self.dtype == torch.float32:
            return nullcontext()
        return torch.autocast(self.device, self.dtype)

    def inputs(self) -> torch.Tensor:
        """Tokens for a model, and hidden states that require a gradient for a block."""
        generator = torch.Generator(self.device).manual_seed(0)
        if self.block.whole:
            size = self.shape[:2]
            return torch.randint(256, size, generator=generator, device=self.device)
        x = torch.randn(self.shape, generator=generator, device=self.device)
        return x.requires_grad_()

    def blank(self, contender: str, direction: str) -> Result:
        """A result without figures."""
        return Result(
            op=self.block.name,
            shape=list(self.shape),
            dtype=name_dtype(self.dtype),
            direction=direction,
            contender=contender,
            elements=torch.Size(self.shape).numel(),
            bytes=0,
            variant=self.variant,
        )


def cases(
    names: Sequence[str], device: str, dtypes: Sequence[torch.dtype], *, quick: bool
) -> list[BlockCase]:
    """The cases to measure; if `quick`, only one block."""
    named = [BLOCKS[name] for name in names if name in BLOCKS]
    blocks = named[:1] if quick and len(named) == len(BLOCKS) else named
    batch, length, width = SHAPES[device]
    return [
        BlockCase(
            block, (batch, LENGTH if block.whole else length, width * block.widths), dtype, device
        )
        for block in blocks
        for dtype in dtypes
    ]


def measure(case: BlockCase, plan: Plan, clock: Clock) -> Iterator[list[Result]]:
    """Every contender's results, direction by direction; a whole model's steps at the end."""
    torch.manual_seed(0)
    model = case.block.build(case.shape[-1]).to(case.device)
    models: dict[str, nn.Module] = {EAGER: model, FUSED: case.block.fuse(copy.deepcopy(model))}
    if COMPILE in plan.rivals:
        torch.compiler.reset()
        models[COMPILE] = compiled(copy.deepcopy(model))
    problem = _Problem(case, model)
    faults = {contender: problem.fault(m) for contender, m in models.items()}
    sound = {contender: m.train() for contender, m in models.items() if faults[contender] is None}
    for direction in plan.directions:
        runs: dict[str, Run] = {
            contender: partial(problem.run, m, direction) for contender, m in sound.items()
        }
        yield _compare(case, direction, runs, faults, problem.flops[direction], plan, clock)
    if case.block.whole and len(plan.directions) > 1:
        if FUSED in sound:
            sound[EIGHT_BIT] = torchweld.fuse(copy.deepcopy(model))
        learners = {c: _learner(case, c, m, problem.inputs) for c, m in sound.items()}
        runs = {c: partial(_learn, learner) for c, learner in learners.items()}
        yield _compare(case, "step", runs, faults, problem.flops["full"], plan, clock)


def _compare(
    case: BlockCase,
    direction: str,
    runs: Mapping[str, Run],
    faults: Mapping[str, str | None],
    flops: int,
    plan: Plan,
    clock: Clock,
) -> list[Result]:
    """The times of the sound contenders, and why the others have none."""
    blank = partial(case.blank, direction=direction)
    results = compare(runs, Traffic(0, 0), case.device, plan, clock, blank)
    for result in results:
        result.flops, result.automatic = flops, result.contender == FUSED
    for contender, reason in faults.items():
        if reason is not None:
            refused = blank(contender)
            refused.status, refused.reason = "refused", reason
            results.append(refused)
    return results


def _learner(case: BlockCase, contender: str, model: nn.Module, tokens: torch.Tensor) -> Learner:
    makes: dict[str, Callable[..., torch.optim.Optimizer]] = {
        FUSED: optim.AdamW,
        EIGHT_BIT: optim.AdamW8bit,
    }
    make = makes.get(contender, partial(torch.optim.AdamW, fused=True))
    optimizer = make(model.parameters(), lr=LEARNING_RATE)
    precision = None if case.dtype == torch.float32 else case.dtype
    learner = Learner(contender, model, optimizer, lambda m, _: m(tokens), precision)
    learner.learn()  # creates the optimizer states, so that later steps do not
    return learner


def _learn(learner: Learner, clock: Clock) -> Sample:
    return clock(learner.learn)


class _Problem:
    """Inputs, a gradient of the output, and the exact results of a model without its dropout."""

    def __init__(self, case: BlockCase, model: nn.Module) -> None:
        self._case, self._model = case, model
        self.inputs = case.inputs()
        with torch.no_grad(), case.precision():
            like = model.eval()(self.inputs)
        generator = torch.Generator(case.device).manual_seed(1)
        self._grad = torch.randn(like.shape, generator=generator, device=case.device).to(like.dtype)
        wide = copy.deepcopy(model).double()
        x = self.inputs.detach().double().requires_grad_() if self._learns else self.inputs
        exact = self._results(wide, x, self._grad.double(), nullcontext())
        trusted = self._results(model, self.inputs, self._grad, case.precision())
        self._judge = Judge(exact, trusted)

    @property
    def _learns(self) -> bool:
        return self.inputs.is_floating_point()

    def fault(self, model: nn.Module) -> str | None:
        """The fault in the model's output and gradients; None if there is none."""
        model.eval()
        return self._judge.find_fault_of(
            lambda: self._results(model, self.inputs, self._grad, self._case.precision())
        )

    def run(self, model: nn.Module, direction: str, clock: Clock) -> Sample:
        """Time one direction in training mode, with the block's dropout."""
        if direction == "fwd":
            with torch.no_grad():
                return clock(lambda: self._forward(model))
        if direction == "bwd":
            y = self._forward(model)
            return clock(lambda: self._backward(model, y))
        return clock(lambda: self._backward(model, self._forward(model)))

    @functools.cached_property
    def flops(self) -> dict[str, int]:
        """Operations of the eager model's GEMMs and attention, by direction."""
        with FlopCounterMode(display=False) as counter:
            y = self._forward(self._model)
            forward = counter.get_total_flops()
            y.backward(self._grad)  # the counter's hooks do not know autograd.grad
            self._model.zero_grad()
            self.inputs.grad = None
        full = counter.get_total_flops()
        return {"fwd": forward, "bwd": full - forward, "full": full}

    def _forward(self, model: nn.Module) -> torch.Tensor:
        with self._case.precision():
            return model(self.inputs)

    def _backward(self, model: nn.Module, y: torch.Tensor) -> tuple[torch.Tensor, ...]:
        leaves = [*model.parameters(), *([self.inputs] if self._learns else [])]
        return torch.autograd.grad(y, leaves, self._grad)

    def _results(
        self,
        model: nn.Module,
        x: torch.Tensor,
        grad: torch.Tensor,
        precision: AbstractContextManager[object],
    ) -> Results:
        with precision:
            y = model(x)
        leaves: dict[str, torch.Tensor] = {
            f"gradient of {n.removeprefix('_orig_mod.')}": p for n, p in model.named_parameters()
        }
        leaves |= {"gradient of the input": x} if self._learns else {}
        gradients = torch.autograd.grad(y, list(leaves.values()), grad)
        return {"output": y.detach()} | dict(zip(leaves, gradients, strict=True))
