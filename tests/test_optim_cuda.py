"""The CUDA kernels of optimizers: the reference's bits, wherever tensors lie and numbers are.

In the emulator, on CPU tensors, and on a GPU where there is one.
"""

from __future__ import annotations

import copy
import itertools
from typing import Any

import pytest
import torch

import torchweld
from optimizers import CODECS, RULES, SHAPES, draw, draw_grads, maker, run, same, snapshot
from torchweld import optim
from torchweld.ops._optimizer import sum_of_squares

STATES = pytest.mark.parametrize("state_dtype", [torch.float32, torch.bfloat16, "8bit"], ids=str)


@pytest.mark.parametrize(("dtype", "state_dtype", "masters"), CODECS)
def test_the_kernel_is_the_reference_to_the_bit(
    dtype: torch.dtype, state_dtype: Any, masters: Any, cuda_device: str
) -> None:
    """Every codec with each of the rule's branches."""
    for kind, settings in RULES:
        make = maker(kind, settings, state_dtype, masters)
        with torchweld.use_backend("eager"):
            expected = snapshot(*run(make, 2, dtype, device=cuda_device))
        assert same(snapshot(*run(make, 2, dtype, device=cuda_device)), expected), (kind, settings)


@STATES
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("offset", [0, 1, 2, 4])
def test_tensors_that_lie_anywhere(
    dtype: torch.dtype, state_dtype: Any, offset: int, cuda_device: str
) -> None:
    """Off by so many elements, of odd sizes; what lies around them stays as it is."""
    shapes = [(1,), (3,), (255,), (256,), (257,), (5, 300), (3, 255), (7, 514), (2, 1024)]
    results = []
    for backend in ("cuda", "eager"):
        buffers, params = [], []
        for p in draw(dtype, shapes, cuda_device):
            buffer = torch.full((p.numel() + offset + 5,), 7.0, device=cuda_device, dtype=dtype)
            part = buffer[offset : offset + p.numel()].view(p.shape)
            buffers.append(buffer)
            params.append(part.copy_(p.detach()).requires_grad_())
        optimizer = maker(optim.AdamW, {}, state_dtype)(params)
        for seed in range(2):
            draw_grads(params, seed)
            for p in params:
                room = torch.full((p.numel() + 3,), torch.nan, device=cuda_device, dtype=dtype)
                p.grad = room[3 - offset % 4 :][: p.numel()].view(p.shape).copy_(p.grad)
            with torchweld.use_backend(backend):
                optimizer.step()
        results.append(snapshot(params, optimizer))
        for buffer, p in zip(buffers, params, strict=True):
            assert (buffer[:offset] == 7).all()
            assert (buffer[offset + p.numel() :] == 7).all()
    assert same(*results)


@pytest.mark.parametrize("kind", [optim.AdamW, optim.LAMB, optim.LARS])
def test_more_tensors_than_a_launch_takes(kind: Any, cuda_device: str) -> None:
    """Of all sizes, none among them; each has its own number of steps."""
    shapes = [(i * 7 % 300,) for i in range(170)] + [(0, 3), (40, 450), (0,)]
    results = []
    for backend in ("cuda", "eager"):
        params = draw(shapes=shapes, device=cuda_device)
        optimizer = kind(params, lr=1e-2)
        for seed in range(3):
            draw_grads(params, seed)
            if seed == 0:
                for p in params[::3]:
                    p.grad = None
            with torchweld.use_backend(backend):
                optimizer.step()
        results.append(snapshot(params, optimizer))
    assert same(*results)
    assert {int(optimizer.state[p]["step"]) for p in params} == {2, 3}


@pytest.mark.parametrize("state_dtype", [torch.bfloat16, "8bit"], ids=str)
def test_more_elements_than_31_bits_count(state_dtype: Any, cuda_device: str) -> None:
    """A block of rows again and again: each goes as one does alone.

    Elsewhere than on a GPU with too few of them, which shows the test alone to be right.
    """
    (rows, width), copies = ((4096, 1024), 513) if cuda_device == "cuda" else ((8, 600), 5)
    generator = torch.Generator(cuda_device).manual_seed(0)
    values = [
        torch.randn(rows, width, generator=generator, device=cuda_device).bfloat16()
        for _ in range(2)
    ]
    found = []
    for times in (1, copies):
        p, grad = (v.repeat(times, 1) for v in values)
        assert times == 1 or cuda_device != "cuda" or p.numel() > 2**31
        p.requires_grad_().grad = grad
        # Above any norm: gradients stay as they are.
        optimizer = optim.AdamW([p], lr=0.1, state_dtype=state_dtype, max_grad_norm=1e9)
        optimizer.step()
        found.append([p.detach(), *optimizer.state[p].values(), optimizer.grad_norm])
    for one, many in zip(*found, strict=True):
        if one.ndim == 2:
            assert torch.equal(many.view(copies, *one.shape), one.expand(copies, *one.shape))
    assert float(found[1][-1]) == pytest.approx(float(found[0][-1]) * copies**0.5, rel=1e-6)


@STATES
def test_numbers_on_the_device(state_dtype: Any, cuda_device: str) -> None:
    """Learning rates, scales and what the scaler found, there or on the CPU, have the same bits."""
    results = []
    for backend, lr, number in (
        ("eager", 0.1, torch.tensor(0.25)),
        ("cuda", 0.1, torch.tensor(0.25)),
        ("cuda", torch.tensor(0.1, dtype=torch.float64), torch.tensor(0.25, device=cuda_device)),
        (
            "cuda",
            torch.tensor(0.1, dtype=torch.float64, device=cuda_device),
            torch.tensor(0.25, device=cuda_device, dtype=torch.float64),
        ),
    ):
        params = draw(device=cuda_device)
        capturable = {"capturable": True} if isinstance(lr, torch.Tensor) else {}
        optimizer: Any = optim.AdamW(params, lr, state_dtype=state_dtype, **capturable)
        optimizer.grad_scale = number
        with torchweld.use_backend(backend):
            for seed in range(4):
                draw_grads(params, seed)
                before = snapshot(params, optimizer)
                optimizer.found_inf = torch.tensor(float(seed == 2), device=cuda_device)
                optimizer.step()
                assert seed != 2 or same(snapshot(params, optimizer), before)
        results.append(snapshot(params, optimizer))
    assert all(same(found, results[0]) for found in results)
    assert optimizer.state[params[0]]["step"] == 3


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, 1e30])
@pytest.mark.parametrize("kind", [optim.AdamW, optim.Lion, optim.LAMB])
def test_what_is_not_finite_is_skipped_alone(kind: Any, bad: float, cuda_device: str) -> None:
    results = []
    for backend in ("cuda", "eager"):
        with torchweld.use_backend(backend):
            (p,), optimizer = run(
                maker(kind, {}, "8bit"), 2, shapes=[(16, 300)], device=cuda_device
            )
            draw_grads([p], 7)
            p.grad[3, 7] = p.grad[15, 299] = bad
            optimizer.step()
        results.append(snapshot([p], optimizer))
        assert all(t.isfinite().all() for t in results[-1])
    assert same(*results)


# Parts of tensors whose rows other devices have parts of too, and where pieces of blocks begin and
# end in them: of one element, of any number, not aligned, whole blocks, and none.
CUT = [
    ((3, 40), (0, 10, 40)),
    ((70, 7), (0, 1, 2, 7)),
    ((4, 515), (0, 3, 259, 515)),
    ((1, 1), (0, 1)),
    ((0, 5), (0, 5)),
    ((4, 1024), (0, 256, 512, 768, 1024)),
    ((3, 0), (0,)),
    ((6, 4, 150), (0, 44, 300, 556, 600)),
    *(((2, 3 * i), (0, i, 3 * i)) for i in range(1, 31)),
]


def _cut(
    make: Any, dtype: torch.dtype, device: str, offset: int = 0, bad: float = 0.0
) -> tuple[Any, Any, list[torch.Tensor]]:
    """An optimizer after a step, its batch as if rows were cut, and the memory that this is in.

    Off by so many elements; one gradient in 7 is bad. What the absmax become nobody knows yet.
    """
    with torchweld.use_backend("eager"):
        params, optimizer = run(make, 1, dtype, [shape for shape, _ in CUT], device)
    draw_grads(params, 1)
    (batch,) = optimizer._batches(optimizer.param_groups[0])  # type: ignore[attr-defined]
    generator = torch.Generator().manual_seed(2)
    absmaxes = []
    for shape, edges in CUT * (len(batch.moments) // len(params)):
        known = torch.rand(shape[0], len(edges) - 1, generator=generator) + 0.1
        absmaxes.append(torch.stack((known, torch.full_like(known, torch.nan))).to(device))
    buffers = []

    def place(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
        placed = []
        for t in tensors:
            buffer = t.new_full((t.numel() + offset + 5,), 7, requires_grad=False)
            placed.append(buffer[offset : offset + t.numel()].view(t.shape).copy_(t.detach()))
            buffers.append(buffer)
        return placed

    for g in batch.grads if bad else ():
        g.view(-1)[::7] = bad
    batch.params, batch.grads = place(batch.params), place(batch.grads)
    batch.completions, batch.moments = place(batch.completions), place(batch.moments)
    batch.absmaxes = place(absmaxes)
    batch.edges = [torch.tensor(edges, device=device) for _, edges in CUT]
    return optimizer, batch, [*buffers, *batch.steps]


def _step_cut(made: tuple[Any, Any, list[torch.Tensor]]) -> list[torch.Tensor]:
    """What is found of the pieces here, and what a step leaves, where other devices have larger."""
    optimizer, batch, memory = made
    settings = optimizer._settings(optimizer.param_groups[0], batch)
    numbers = {"lr": torch.tensor(0.1), "grad_factor": torch.tensor(0.5)}
    before = [t.clone() for t in memory]
    optimizer._rule().step(batch, settings=settings, **numbers, only_absmaxes=True)
    found = [absmax[1].clone() for absmax in batch.absmaxes]
    for absmax, new in zip(batch.absmaxes, found, strict=True):
        absmax[1] = torch.nan
        assert new.isfinite().all()
    torch.testing.assert_close(memory, before, rtol=0, atol=0, equal_nan=True)
    generator = torch.Generator().manual_seed(3)
    for absmax, new in zip(batch.absmaxes, found, strict=True):
        larger = 1 + torch.rand(new.shape, generator=generator).to(new.device).round() / 4
        absmax[1] = new * larger
    optimizer._rule().step(batch, settings=settings, **numbers)
    assert all(p.isfinite().all() for p in batch.params)
    return [*found, *memory]


@pytest.mark.parametrize(("dtype", "masters"), [(d, m) for d, s, m in CODECS if s == "8bit"])
def test_rows_that_shards_cut(dtype: torch.dtype, masters: Any, cuda_device: str) -> None:
    """By every rule, the reference's bits; nothing is written but what is here."""
    roundings = (False, True) if dtype == torch.bfloat16 and not masters else (False,)
    for (kind, settings), rounding in itertools.product(RULES, roundings):
        make = maker(kind, settings | {"stochastic_rounding": rounding}, "8bit", masters)
        if kind is optim.SGD and "momentum" not in settings:
            continue
        found = _step_cut(_cut(make, dtype, cuda_device))
        with torchweld.use_backend("eager"):
            expected = _step_cut(_cut(make, dtype, cuda_device))
        assert same(found, expected), (kind, settings)


@pytest.mark.parametrize("bad", [0.0, torch.nan, torch.inf, 1e30])
@pytest.mark.parametrize("offset", [1, 2, 4])
def test_cut_rows_that_lie_anywhere(offset: int, bad: float, cuda_device: str) -> None:
    """What is not finite is skipped alone there too."""
    for kind in (optim.AdamW, optim.Lion):
        given = (maker(kind, {}, "8bit"), torch.float32, cuda_device, offset, bad)
        found = _step_cut(_cut(*given))
        with torchweld.use_backend("eager"):
            expected = _step_cut(_cut(*given))
        torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("masters", [False, True, "remainder"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_measures_of_cut_rows(dtype: torch.dtype, masters: Any, cuda_device: str) -> None:
    """Within float64's roundings of the reference; nothing is written."""
    make = maker(optim.LAMB, {"weight_decay": 0.1}, "8bit", masters)
    optimizer, batch, memory = _cut(make, dtype, cuda_device, bad=torch.inf)
    given = (batch, optimizer._settings(optimizer.param_groups[0], batch), torch.tensor(0.5))
    before = [t.clone() for t in memory]
    found = optimizer._rule().squares(*given)
    torch.testing.assert_close(memory, before, rtol=0, atol=0, equal_nan=True)
    with torchweld.use_backend("eager"):
        expected = optimizer._rule().squares(*given)
    torch.testing.assert_close(found, expected, rtol=1e-13, atol=0)


def test_cut_rows_under_a_scaler(cuda_device: str) -> None:
    """Of a step that is left out nothing is found, and nothing counts."""
    optimizer, batch, memory = _cut(maker(optim.AdamW, {}, "8bit"), torch.float32, cuda_device)
    settings = optimizer._settings(optimizer.param_groups[0], batch)
    before = [t.clone() for t in memory]
    for only_absmaxes in (True, False):
        numbers = {"lr": torch.tensor(0.1), "found_inf": torch.tensor(1.0, device=cuda_device)}
        optimizer._rule().step(batch, settings=settings, **numbers, only_absmaxes=only_absmaxes)
    torch.testing.assert_close(memory, before, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("settings", [{}, {"eps": 0.0}], ids=str)
@pytest.mark.parametrize("state_dtype", [torch.float32, "8bit"], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_measures(
    dtype: torch.dtype, state_dtype: Any, settings: dict[str, Any], cuda_device: str
) -> None:
    """Within float64's roundings of the reference, and the same bits every time."""
    params = draw(dtype, [(300, 313), *SHAPES, (5000,)], cuda_device)
    optimizer: Any = maker(optim.LAMB, settings, state_dtype)(params)
    draw_grads(params, 0)
    optimizer.step()
    draw_grads(params, 1)
    (group,) = optimizer.param_groups
    for batch in optimizer._batches(group):
        given = (batch, optimizer._settings(group, batch), torch.tensor(0.5))
        found, again = (optimizer._rule().squares(*given) for _ in range(2))
        with torchweld.use_backend("eager"):
            expected = optimizer._rule().squares(*given)
        assert torch.equal(found, again)
        torch.testing.assert_close(found, expected, rtol=1e-13, atol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_the_norm_of_gradients(dtype: torch.dtype, cuda_device: str) -> None:
    shapes = [(999, 37), (1,), (0,), (33, 1000)] + [(i,) for i in range(250, 300)]
    grads = [p.detach() for p in draw(dtype, shapes, cuda_device)]
    grads[3] = grads[3].flatten()[1:]  # not aligned
    found = sum_of_squares(grads)
    exact = sum(g.double().square().sum() for g in grads)
    torch.testing.assert_close(found, exact, rtol=1e-13, atol=0)
    assert torch.equal(found, sum_of_squares(grads))
    assert sum_of_squares(grads[2:3]) == 0


def test_steps_that_were_saved_on_the_cpu(cuda_device: str) -> None:
    """As torch saves those of optimizers that are neither fused nor capturable."""
    params, theirs = run(lambda p: torch.optim.AdamW(p), 2, device=cuda_device)
    mine = [p.detach().clone().requires_grad_() for p in params]
    ours = optim.AdamW(mine)
    ours.load_state_dict(copy.deepcopy(theirs.state_dict()))
    for some, optimizer in ((params, theirs), (mine, ours)):
        draw_grads(some, 5)
        optimizer.step()
    for p, q in zip(mine, params, strict=True):
        assert (ours.state[p]["step"].device, ours.state[p]["step"]) == (p.device, 3)
        torch.testing.assert_close(p, q, rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("kind", [optim.AdamW, optim.SGD, optim.LAMB])
@STATES
def test_graphs(kind: Any, state_dtype: Any, cuda_device: str) -> None:
    """Captured and replayed, a step equals a step; none waits for the GPU."""
    if cuda_device == "cpu":
        pytest.skip("CUDA graphs need a GPU")
    results = []
    for captured in (False, True):
        params = draw(device=cuda_device)
        for p in params:
            p.grad = torch.zeros_like(p)
        lr = torch.tensor(1e-2, device=cuda_device)
        settings: dict[str, Any] = {"lr": lr, "max_grad_norm": 1.0}
        if kind is not optim.SGD:
            settings["capturable"] = True
        optimizer = maker(kind, settings, state_dtype)(params)
        optimizer.step()
        graph = torch.cuda.CUDAGraph()
        if captured:
            with torch.cuda.graph(graph):
                optimizer.step()
        for seed in range(4):
            generator = torch.Generator().manual_seed(seed)
            for p in params:
                assert p.grad is not None
                p.grad.copy_(torch.randn(p.shape, generator=generator))
            lr.fill_(1e-2 / (seed + 1))
            torch.cuda.set_sync_debug_mode("error")
            try:
                if captured:
                    graph.replay()
                else:
                    optimizer.step()
            finally:
                torch.cuda.set_sync_debug_mode("default")
        results.append(snapshot(params, optimizer))
    assert same(*results)
