"""Which fused GEMM, if any, serves a class of shapes: candidates, and the sample to check them.

The candidates are the fused GEMM with each of its tiles. The fallback is the unfused form: torch's
GEMM and a pass of bias_act.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch

from torchweld import state
from torchweld.dispatch import proof
from torchweld.dispatch.proof import ROWS, Question, Results, some_rows
from torchweld.dispatch.store import Answer
from torchweld.registry.constant import assume_constant_result

# Everything that a timing depends on besides the number of rows, as names and values.
Kind = tuple[tuple[str, Any], ...]
UNFUSED = "unfused"
# Limit of float64 products. GPUs with 1/64 of the rate take a fraction of a second for them.
_PRODUCTS, _LEAST_ROWS = 2**34, 61


class Forms(NamedTuple):
    """The fused and the unfused forms, as functions of tensors with the same rows.

    `exact` computes the fused GEMMs' results in float64, and `trusted` with torch's own GEMMs. Both
    return results by name, as the fused GEMMs do.
    """

    tensors: Sequence[torch.Tensor]
    unfused: Callable[..., Any]
    fused: Mapping[int, Callable[..., Results]]
    exact: Callable[..., Results]
    trusted: Callable[..., Results]
    products_a_row: int


def choose_tile(
    x: torch.Tensor,
    kind: Kind,
    list_tiles: Callable[[], Sequence[int]],
    make_forms: Callable[[], Forms],
) -> int | None:
    """The tile for a class of shapes, stored or found now; None: the unfused form."""
    if state.is_compiling():
        return _choose_while_compiling(x.device, kind)
    kind, size = _with_precision(kind), _count_rows(x).bit_length()
    call_class = (x.device, kind, size)
    make = partial(_make_question, x.device, kind, size, list_tiles, make_forms)
    name, _ = proof.pick(call_class, make)
    return _read_tile(name)


def explain(unfused: str, x: torch.Tensor, kind: Kind, reason: str | None) -> str:
    """Which form serves a class of shapes, and why; `reason` is why no fused GEMM can."""
    if reason is not None:
        return f"{unfused}: {reason}"
    answer = _find_answer(x, kind)
    if answer is None:
        return f"{unfused}: its tiles are not timed yet; `torchweld tune` does that"
    if answer.faults and not answer.ms:
        return f"{unfused}: one kernel for all was wrong, or failed, on this GPU"
    times = {name: ms for name, ms in answer.ms.items() if name != UNFUSED}
    ratio = answer.ms[UNFUSED] / min(times.values()) if times and UNFUSED in answer.ms else None
    if not answer.ms:
        return "one kernel for all, which an H200's times advise"
    if answer.backend == UNFUSED:
        return f"{unfused}: one kernel for all was measured {_speed(ratio, 'its speed')}"
    return f"one kernel for all, measured {_speed(ratio, f'the speed of {unfused}')}"


def kernels() -> Any:
    """The Triton module, imported only when needed since that takes a while."""
    return importlib.import_module("torchweld.triton_kernels.linear_act")


def _speed(ratio: float | None, of: str) -> str:
    return "only at other sizes" if ratio is None else f"at {ratio:.2f}x {of}"


def _find_answer(x: torch.Tensor, kind: Kind) -> Answer | None:
    size = _count_rows(x).bit_length()
    return proof.checker_for(x.device).find(dict(_with_precision(kind)), size)


def _with_precision(kind: Kind) -> Kind:
    return (*kind, ("float32 as", kernels().precision()))


@assume_constant_result
def _choose_while_compiling(device: torch.device, kind: Kind) -> int | None:
    """The tile of all answers so far, if they agree, as a constant of the compiled graph."""
    fields = dict(_with_precision(kind))
    return _read_tile(proof.checker_for(device).agreed(UNFUSED, **fields))


def _make_question(
    device: torch.device,
    kind: Kind,
    size: int,
    list_tiles: Callable[[], Sequence[int]],
    make_forms: Callable[[], Forms],
) -> Question:
    forms = functools.cache(make_forms)

    @functools.cache
    def draw_sample() -> list[torch.Tensor]:
        rows = max(_LEAST_ROWS, min(ROWS, _PRODUCTS // max(forms().products_a_row, 1)))
        return [some_rows(t, rows) for t in forms().tensors]

    def prepare(name: str) -> Callable[[], Any]:
        tile = _read_tile(name)
        call = forms().unfused if tile is None else forms().fused[tile]
        return torch.no_grad()(partial(call, *forms().tensors))

    tiles = list_tiles()
    return Question(
        kind=dict(kind),
        size=size,
        device=device,
        fallback=UNFUSED,
        candidates=[str(tile) for tile in tiles],
        run=torch.no_grad()(lambda name: forms().fused[int(name)](*draw_sample())),
        trusted=torch.no_grad()(lambda: forms().trusted(*draw_sample())),
        exact=torch.no_grad()(lambda: forms().exact(*draw_sample())),
        prepare=None if list(tiles) == [kernels().BY_RULE] else prepare,
    )


def _read_tile(name: str) -> int | None:
    return None if name == UNFUSED else int(name)


def _count_rows(x: torch.Tensor) -> int:
    """The number of rows of a GEMM of x."""
    return x.shape[:-1].numel()
