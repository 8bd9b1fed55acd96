"""The CUDA kernels of Adafactor, which sum over rows and columns in another order.

They run in the emulator, on CPU tensors, and on a GPU if there is one.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

import torchweld
from optimizers import (
    CODECS,
    MATRICES,
    Optimizer,
    U,
    assert_same_but_for_ties,
    draw,
    draw_grads,
    run,
    same,
    snapshot,
)
from torchweld import optim

# More columns than a warp has, in part and as a whole; more rows than chunks have 16 of.
FACTORED = (*MATRICES, (40, 1100), (3, 7, 512), (1, 2052), (4500, 3))
KINDS: list[tuple[Any, dict[str, Any]]] = [
    (optim.TransformersAdafactor, {"beta1": 0.9, "warmup_init": True}),
    (optim.Adafactor, {"weight_decay": 0.1}),
    (optim.Adafactor, {"eps": (1e-3, 0.5), "d": 2.0, "maximize": True}),
    (
        optim.TransformersAdafactor,
        {"lr": 1e-3, "relative_step": False, "scale_parameter": False, "weight_decay": 0.1},
    ),
]


@pytest.mark.parametrize(
    ("dtype", "masters", "kind", "settings"),
    [(d, m, *KINDS[0]) for d, s, m in CODECS if s == torch.float32]
    + [(torch.float32, False, *kind) for kind in KINDS[1:]],
    ids=str,
)
def test_adafactor_is_the_reference(
    dtype: torch.dtype, masters: Any, kind: Any, settings: dict[str, Any], cuda_device: str
) -> None:
    def make(params: Any) -> Optimizer:
        return kind(params, master_weights=masters, **settings)

    found = run(make, 2, dtype, FACTORED, cuda_device)
    if not masters:  # they change no sum
        assert same(snapshot(*found), snapshot(*run(make, 2, dtype, FACTORED, cuda_device)))
    with torchweld.use_backend("eager"):
        expected = run(make, 2, dtype, FACTORED, cuda_device)
    assert_same_but_for_ties(found, expected, masters)


def test_adafactor_rounds_at_random(cuda_device: str) -> None:
    """As in the reference, except where sums meet a tie; each tensor has its own step count."""
    results = []
    for backend in ("cuda", "eager"):
        params = draw(torch.bfloat16, FACTORED * 2, cuda_device)
        optimizer = optim.Adafactor(params, stochastic_rounding=True)
        for seed in range(2):
            draw_grads(params, seed)
            for p in params[::3] if seed == 0 else ():
                p.grad = None
            with torchweld.use_backend(backend):
                optimizer.step()
        results.append(params)
    for p, e, start in zip(*results, draw(torch.bfloat16, FACTORED * 2, cuda_device), strict=True):
        assert (p != e).sum() <= max(1, 1e-2 * p.numel())
        assert p.numel() < 100 or (p != start).any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_adafactors_tensors_lie_anywhere(dtype: torch.dtype, cuda_device: str) -> None:
    """Offset by some elements: the same bits, and surrounding memory does not change."""
    shapes = [(1,), (255,), (5000,), (5, 300), (3, 255), (7, 514), (2, 1024), (4, 6, 8)]
    results = []
    for offset in (0, 1, 2, 4):
        buffers: list[torch.Tensor] = []
        params: list[torch.Tensor] = []

        def place(t: torch.Tensor, offset: int = offset, buffers: Any = buffers) -> torch.Tensor:
            buffer = t.new_full((t.numel() + offset + 5,), 7.0)
            buffers.append((buffer, t.numel()))
            return buffer[offset : offset + t.numel()].view(t.shape).copy_(t.detach())

        params = [place(p.detach()).requires_grad_() for p in draw(dtype, shapes, cuda_device)]
        optimizer = optim.TransformersAdafactor(params, beta1=0.9)
        for seed in range(2):
            draw_grads(params, seed)
            for p in params:
                assert p.grad is not None
                p.grad = place(p.grad)
            optimizer.step()
            for p in params if seed == 0 else ():
                state = optimizer.state[p]
                state |= {name: place(v) for name, v in state.items() if v.dim() > 0}
        for buffer, count in buffers:
            assert (buffer[:offset] == 7).all()
            assert (buffer[offset + count :] == 7).all()
        results.append(snapshot(params, optimizer))
    assert all(same(found, results[0]) for found in results)


def test_more_of_adafactors_tensors_than_a_launch_takes(cuda_device: str) -> None:
    """Each has the bits it has by itself, and its own number of steps."""
    shapes = [s for i in range(150) for s in ((i * 7 % 300,), (i % 5, 1 + i % 7))]
    shapes += [(0, 3), (40, 450), (0,)]
    results = []
    for together in (True, False):
        params = draw(shapes=shapes, device=cuda_device)
        groups = [params] if together else [[p] for p in params]
        optimizers = [optim.Adafactor(group) for group in groups]
        for seed in range(2):
            draw_grads(params, seed)
            for p in params[::3] if seed == 0 else ():
                p.grad = None
            for optimizer in optimizers:
                optimizer.step()
        state = {p: optimizer.state[p] for optimizer in optimizers for p in optimizer.state}
        assert {int(s["step"]) for s in state.values()} == {1, 2}
        results.append([t.detach() for p in params for t in (p, *state[p].values())])
    assert same(*results)


def test_adafactors_numbers_on_the_device(cuda_device: str) -> None:
    """Learning rates, scales and what the scaler found, there or on the CPU, have the same bits."""
    results = []
    for device in ("cpu", cuda_device):
        params = draw(shapes=FACTORED, device=cuda_device)
        optimizer: Any = optim.Adafactor(params, torch.tensor(0.05, device=device))
        optimizer.grad_scale = torch.tensor(0.25, device=device)
        for seed in range(3):
            draw_grads(params, seed)
            if seed == 1:
                for p in params:
                    p.grad.view(-1)[:1] = torch.inf  # type: ignore[union-attr]
            before = snapshot(params, optimizer)
            optimizer.found_inf = torch.tensor(float(seed == 1), device=device)
            optimizer.step()
            assert same(snapshot(params, optimizer), before) == (seed == 1)
        results.append(snapshot(params, optimizer))
    assert same(*results)
    assert optimizer.state[params[0]]["step"] == 2


PASSES = ("adafactor_squares", "adafactor_averages", "adafactor_directions", "adafactor")


class _Parts:
    """A matrix's parts on devices that split its rows or columns, through the op's passes."""

    def __init__(self, whole: torch.Tensor, grad: torch.Tensor, dim: int, cuts: list[int]) -> None:
        self.dim, self.whole = dim, whole
        self.params = [part.contiguous() for part in whole.split(cuts, dim)]
        self.grads = [part.contiguous() for part in grad.split(cuts, dim)]
        self.averages = [(p.new_zeros(p.shape[:-1]), p.new_zeros(_columns(p))) for p in self.params]
        self.steps = [torch.tensor(0.0, device=whole.device) for _ in self.params]
        doubles = {"dtype": torch.float64, "device": whole.device}
        counts = [2 + 1 + p.shape[0] + p.shape[1] for p in self.params]
        self.sums = [torch.zeros(count, **doubles) for count in counts]  # type: ignore[call-overload]

    def run(self, passed: int, found_inf: float = 0.0) -> None:
        settings = (-0.8, 0.0, 1e-7, 1e-3, 1.0, 0.0, 0.1, True, False, True, False)
        device = self.whole.device
        sizes = [*self.whole.shape, self.whole.numel()]
        op = getattr(torch.ops.torchweld, PASSES[passed]).cuda
        for i, p in enumerate(self.params):
            lists: tuple[Any, ...] = (
                [p],
                [self.grads[i]],
                [],
                [*self.averages[i]],
                [],
                [],
                [self.steps[i]],
                *([], [], []),  # edges, rounding offsets, companions
            )
            lr, skip = (torch.tensor(t, device=device) for t in (0.1, found_inf))
            op(*lists, lr, None, None, skip, None, self.sums[i], None, sizes, *settings)

    def add_up(self, passed: int) -> None:
        """What devices have of the same sums: of rows or of columns, of averages, of squares."""

        def place(i: int) -> list[slice]:
            height, width = self.params[i].shape
            of_rows, of_columns = slice(height), slice(height, height + width)
            of_averages = slice(height + width, height + width + 1)
            first = [of_columns] if self.dim == 0 else [of_rows]
            return [first, [of_averages] if self.dim == 0 else [], [slice(-2, None)]][passed]

        every = range(len(self.params))
        for places in zip(*map(place, every), strict=True):
            total = sum(self.sums[i][places[i]] for i in every)
            for i in every:
                self.sums[i][places[i]] = total


def _columns(p: torch.Tensor) -> tuple[int, ...]:
    return (*p.shape[:-2], p.shape[-1])


@pytest.mark.parametrize(("dim", "cuts"), [(0, [40, 0, 30]), (1, [600, 7, 93]), (1, [700, 0])])
def test_passes_of_adafactors_parts(dim: int, cuts: list[int], cuda_device: str) -> None:
    """Averages and steps equal the whole tensor's; a device may have an empty part."""
    (p, g) = (t.detach() for t in draw(shapes=[(70, 700)] * 2, device=cuda_device))
    whole = _Parts(p, g, 0, [70])
    parts = _Parts(p, g, dim, cuts)
    for passed in range(4):
        for some in (whole, parts):
            before = [t.clone() for t in (*some.params, *some.sums)]
            some.run(passed, found_inf=1.0)
            assert same([*some.params, *some.sums], before)
            some.run(passed)
            if passed < 3:
                some.add_up(passed)
            assert passed == 3 or same(some.params, before[: len(some.params)])
    assert [float(step) for step in parts.steps] == [1.0] * len(cuts)
    torch.testing.assert_close(torch.cat(parts.params, dim), whole.params[0], rtol=4 * U, atol=U)
    for k in range(2):
        averages = [of_part[k] for of_part in parts.averages]
        found = torch.cat(averages) if k == dim else averages[0]
        torch.testing.assert_close(found, whole.averages[0][k], rtol=4 * U, atol=0)
