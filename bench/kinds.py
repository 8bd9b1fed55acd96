"""All that the benchmark measures: ops, optimizer steps, blocks and models."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from torchweld.bench import blocks, runner, steps
from torchweld.bench.blocks import BlockCase
from torchweld.bench.cases import Case
from torchweld.bench.cases import cases as op_cases
from torchweld.bench.runner import Plan, Result
from torchweld.bench.steps import StepCase
from torchweld.bench.timing import Clock
from torchweld.registry import OPS

AnyCase = Case | StepCase | BlockCase


def cases(
    names: Sequence[str],
    device: str,
    dtypes: Sequence[torch.dtype],
    sizes: Sequence[float] | None = None,
    *,
    quick: bool = False,
) -> list[AnyCase]:
    """What to measure of ops, of optimizer rules, and of blocks by these names."""
    ops = [op for op in OPS.values() if op.name in names]
    return [
        *op_cases(ops, device, dtypes, sizes),
        *steps.cases([name for name in names if name not in OPS], device, quick),
        *blocks.cases(names, device, dtypes, quick=quick),
    ]


def measure(case: AnyCase, plan: Plan, clock: Clock) -> Iterator[list[Result]]:
    """Every contender's results, direction by direction."""
    if isinstance(case, StepCase):
        return steps.measure(case, plan, clock)
    if isinstance(case, BlockCase):
        return blocks.measure(case, plan, clock)
    return runner.measure(case, plan, clock)
