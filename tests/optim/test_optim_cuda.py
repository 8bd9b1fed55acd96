"""The CUDA kernels of optimizers: the reference's bits for any layout and placement.

They run in the emulator, on CPU tensors, and on a GPU if there is one.
"""

from __future__ import annotations

import copy
import ctypes
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch

import torchweld
from conftest import EMULATED
from optimizers import (
    CODECS,
    MATRICES,
    RULES,
    SHAPES,
    Room,
    U,
    assert_same_but_for_ties,
    draw,
    draw_grads,
    draw_grads_by_row,
    maker,
    rules_of,
    run,
    run_bits,
    same,
    snapshot,
)
from torchweld import optim
from torchweld.ops.optimizer.sum_of_squares import sum_of_squares

STATE_DTYPES: list[Any] = [torch.float32, torch.bfloat16, "8bit"]
PARAM_DTYPES = [torch.float32, torch.bfloat16, torch.float16]
STATES = pytest.mark.parametrize("state_dtype", STATE_DTYPES, ids=str)
DTYPES = pytest.mark.parametrize("dtype", PARAM_DTYPES, ids=str)
# More columns than a warp has, in part and as a whole; more rows than chunks have 16 of.
FACTORED = (*MATRICES, (40, 1100), (3, 7, 512), (1, 2052), (4500, 3))

# --- The reference's bits ---------------------------------------------------------------------


@pytest.mark.parametrize(("dtype", "state_dtype", "masters"), CODECS)
def test_the_kernel_is_the_reference_to_the_bit(
    dtype: torch.dtype, state_dtype: Any, masters: Any, cuda_device: str
) -> None:
    """Every codec with each of the rule's branches."""
    for kind, settings in rules_of(dtype, state_dtype, masters):
        given: Any = maker(kind, settings, state_dtype, masters), 2, dtype, SHAPES, cuda_device
        assert same(run_bits(*given), run_bits(*given, backend="eager")), (kind, settings)


ADAFACTORS: list[tuple[Any, dict[str, Any]]] = [
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
    [(d, m, *ADAFACTORS[0]) for d, s, m in CODECS if s == torch.float32 and m != "rounded"]
    + [(torch.float32, False, *kind) for kind in ADAFACTORS[1:]],
    ids=str,
)
def test_adafactor_is_the_reference(
    dtype: torch.dtype, masters: Any, kind: Any, settings: dict[str, Any], cuda_device: str
) -> None:
    """Except where sums over rows and columns, which have another order, meet a tie."""
    make = lambda p: kind(p, master_weights=masters, **settings)  # noqa: E731
    given: Any = make, 2, dtype, FACTORED, cuda_device
    found = run(*given)
    if not masters:  # they change no sum
        assert same(snapshot(*found), run_bits(*given))
    assert_same_but_for_ties(found, run(*given, backend="eager"), masters)


def _leave_out(params: list[torch.Tensor], seed: int) -> None:
    """Every third parameter has no gradient in the first step, so that numbers of steps differ."""
    draw_grads(params, seed)
    for p in params[::3] if seed == 0 else ():
        p.grad = None


def test_adafactor_rounds_at_random(cuda_device: str) -> None:
    """As in the reference, except where sums meet a tie; each tensor has its own step count."""
    drawn: Any = torch.bfloat16, FACTORED * 2, cuda_device
    make = lambda p: optim.Adafactor(p, stochastic_rounding=True)  # noqa: E731
    results = [run(make, 2, *drawn, grads=_leave_out, backend=name)[0] for name in (None, "eager")]
    for p, e, start in zip(*results, draw(*drawn), strict=True):
        assert (p != e).sum() <= max(1, 1e-2 * p.numel())
        assert p.numel() < 100 or (p != start).any()


@pytest.mark.parametrize(
    ("dtype", "rounding"),
    [(torch.float32, False), (torch.bfloat16, True)],
)
def test_narrow_rows_that_a_warp_takes_together(
    dtype: torch.dtype, rounding: bool, cuda_device: str
) -> None:
    """With each of the rule's branches; with widths that take this path and others."""
    widths = [2, 8, 12, 32, 100, 128]
    shapes = [(150, width) for width in widths] + [(1, 8), (1, 100)]
    for kind, settings in RULES:
        make = maker(kind, settings | {"stochastic_rounding": rounding}, "8bit")
        # If nothing is skipped, values that are not finite spread.
        grads = draw_grads if kind in (optim.SGD, optim.LARS) else draw_grads_by_row
        results = [
            run_bits(make, 2, dtype, shapes, cuda_device, grads=grads, backend=name)
            for name in (None, "eager")
        ]
        assert same(*results), (kind, settings)


# --- Memory -----------------------------------------------------------------------------------


ANYWHERE: list[tuple[Any, Any, torch.dtype]] = [
    *((optim.AdamW, of, dtype) for of in STATE_DTYPES for dtype in PARAM_DTYPES),
    *((optim.TransformersAdafactor, torch.float32, dtype) for dtype in PARAM_DTYPES[:2]),
]


@pytest.mark.parametrize(("kind", "state_dtype", "dtype"), ANYWHERE, ids=str)
def test_tensors_that_lie_anywhere(
    kind: Any, state_dtype: Any, dtype: torch.dtype, cuda_device: str
) -> None:
    """Offset by some elements, of odd sizes: the same bits; surrounding memory does not change."""
    shapes = [(1,), (3,), (255,), (256,), (257,), (5, 300), (3, 255), (7, 514), (2, 1024)]
    shapes += [(5000,), (4, 6, 8)]
    places = [("cuda", offset) for offset in (0, 1, 2, 4)]
    if kind is optim.AdamW:  # Adafactor's sums have another order than the reference's
        places.insert(0, ("eager", 0))
    results = []
    for backend, offset in places:
        room, others = Room(offset), Room(3 - offset % 4)
        params = [room.place(p).requires_grad_() for p in draw(dtype, shapes, cuda_device)]
        settings = {"beta1": 0.9, "lr": None} if kind is optim.TransformersAdafactor else {}
        optimizer = maker(kind, settings, state_dtype)(params)
        for seed in range(2):
            draw_grads(params, seed)
            for p in params:
                p.grad = others.place(p.grad)  # type: ignore[arg-type]
            with torchweld.use_backend(backend):
                optimizer.step()
            for p in params if seed == 0 else ():
                state = optimizer.state[p]
                state |= {name: room.place(v) for name, v in state.items() if v.dim() > 0}
        results.append(snapshot(params, optimizer))
        room.assert_untouched()
    assert all(same(found, results[0]) for found in results)


@pytest.mark.parametrize(
    ("kind", "count", "rounding"),
    [
        (optim.AdamW, 1100, False),
        (optim.AdamW, 400, True),
        (optim.LAMB, 1100, False),
    ],
)
def test_more_tensors_than_a_launch_takes(
    kind: Any, count: int, rounding: bool, cuda_device: str
) -> None:
    """They have all sizes, 0 among them, and each has its own number of steps."""
    shapes = [(i * 7 % 300,) for i in range(count)] + [(0, 3), (40, 450), (0,)]
    dtype = torch.bfloat16 if rounding else torch.float32
    make = lambda p: kind(p, lr=1e-2, stochastic_rounding=rounding)  # noqa: E731
    results = [
        run(make, 2, dtype, shapes, cuda_device, grads=_leave_out, backend=name)
        for name in (None, "eager")
    ]
    assert same(*(snapshot(*result) for result in results))
    assert {int(state["step"]) for state in results[0][1].state.values()} == {1, 2}


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
            _leave_out(params, seed)
            for optimizer in optimizers:
                optimizer.step()
        state = {p: optimizer.state[p] for optimizer in optimizers for p in optimizer.state}
        assert {int(s["step"]) for s in state.values()} == {1, 2}
        results.append([t.detach() for p in params for t in (p, *state[p].values())])
    assert same(*results)


@STATES
def test_600_small_tensors_are_three_launches(state_dtype: Any, cuda_device: str) -> None:
    """One launch makes their rules, and two step them."""
    params = draw(shapes=[(2, 16 + i % 3) for i in range(600)], device=cuda_device)
    optimizer = maker(optim.AdamW, {}, state_dtype)(params)
    draw_grads(params, 0)
    optimizer.step()
    assert _launches(optimizer.step, cuda_device) == 3


def _launches(call: Callable[[], Any], device: str) -> int:
    if device == "cpu":
        counted = ctypes.c_int64.in_dll(ctypes.CDLL(str(EMULATED)), "emulator_launches")
        before = counted.value
        call()
        return counted.value - before
    of_device = [torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=of_device, acc_events=True) as profile:
        call()
        torch.cuda.synchronize()
    on_device = torch.autograd.DeviceType.CUDA
    names = [e.name for e in profile.events() if e.device_type == on_device]
    # The step's annotation stands among the kernels too.
    return sum(not name.startswith(("Memcpy", "Memset", "Optimizer.step")) for name in names)


@pytest.mark.usefixtures("alone_on_the_gpu")
@pytest.mark.parametrize("state_dtype", [torch.bfloat16, "8bit"], ids=str)
def test_more_elements_than_31_bits_count(state_dtype: Any, cuda_device: str) -> None:
    """Repeated blocks of rows, each as by itself; without a GPU too few: the test is right."""
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
        # Above any norm: gradients do not change.
        optimizer = optim.AdamW([p], lr=0.1, state_dtype=state_dtype, max_grad_norm=1e9)
        optimizer.step()
        found.append([p.detach(), *optimizer.state[p].values(), optimizer.grad_norm])
    for one, many in zip(*found, strict=True):
        if one.ndim == 2:
            assert torch.equal(many.view(copies, *one.shape), one.expand(copies, *one.shape))
    assert float(found[1][-1]) == pytest.approx(float(found[0][-1]) * copies**0.5, rel=1e-6)


# --- Numbers ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "state_dtype"),
    [
        *((optim.AdamW, state_dtype) for state_dtype in (torch.float32, torch.bfloat16, "8bit")),
        (optim.Adafactor, torch.float32),
    ],
    ids=str,
)
def test_numbers_on_the_device(kind: Any, state_dtype: Any, cuda_device: str) -> None:
    """Learning rates, scales and what the scaler found, there or on the CPU, have the same bits."""
    rate, number, shapes = torch.tensor(0.1, dtype=torch.float64), torch.tensor(0.25), SHAPES
    there = {"device": cuda_device, "dtype": torch.float64}
    cases: list[Any] = [
        ("eager", 0.1, number),
        ("cuda", 0.1, number),
        ("cuda", rate, number.to(cuda_device)),
        ("cuda", rate.to(cuda_device), number.to(**there)),  # type: ignore[call-overload]
    ]
    if kind is optim.Adafactor:  # whose sums have another order than the reference's
        cases, shapes = cases[1:], FACTORED  # type: ignore[assignment]
    results = []
    for backend, lr, scale in cases:
        params = draw(shapes=shapes, device=cuda_device)
        capturable = isinstance(lr, torch.Tensor) and kind is optim.AdamW
        settings = {"capturable": True} if capturable else {}
        optimizer: Any = kind(params, lr, state_dtype=state_dtype, **settings)
        optimizer.grad_scale = scale
        with torchweld.use_backend(backend):
            for seed in range(4):
                draw_grads(params, seed)
                for p in params if seed == 2 else ():
                    p.grad.view(-1)[:1] = torch.inf  # type: ignore[union-attr]
                before = snapshot(params, optimizer)
                optimizer.found_inf = torch.tensor(float(seed == 2), device=scale.device)
                optimizer.step()
                assert same(snapshot(params, optimizer), before) == (seed == 2)
        results.append(snapshot(params, optimizer))
    assert all(same(found, results[0]) for found in results)
    assert optimizer.state[params[0]]["step"] == 3


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
    for task in optimizer._tasks():
        task.grad_factor = torch.tensor(0.5)

        def measured(task: Any = task) -> torch.Tensor:
            optimizer._rule.measure(task)
            return task.sums

        found, again = measured(), measured()
        with torchweld.use_backend("eager"):
            expected = measured()
        assert torch.equal(found, again)
        torch.testing.assert_close(found, expected, rtol=1e-13, atol=0)


@DTYPES
def test_the_norm_of_gradients(dtype: torch.dtype, cuda_device: str) -> None:
    shapes = [(999, 37), (1,), (0,), (33, 1000)] + [(i,) for i in range(250, 300)] * 7
    grads = [p.detach() for p in draw(dtype, shapes, cuda_device)]
    grads[3] = grads[3].flatten()[1:]  # not aligned
    found = sum_of_squares(grads)
    exact = sum(g.double().square().sum() for g in grads)
    torch.testing.assert_close(found, exact, rtol=1e-13, atol=0)
    assert torch.equal(found, sum_of_squares(grads))
    assert sum_of_squares(grads[2:3]) == 0


@DTYPES
def test_the_norm_of_gradients_of_any_size(dtype: torch.dtype, cuda_device: str) -> None:
    """Squares that float32 does not hold, many sizes in one run, and roundings all to one side."""
    generator = torch.Generator().manual_seed(0)
    limits = torch.finfo(dtype)
    runs = [torch.full((600,), value, dtype=dtype) for value in (1.1, 1 + limits.eps, limits.max)]
    for exponent in range(-149, 128, 4):
        drawn = torch.randn(257, generator=generator, dtype=torch.float64)
        spread = torch.randint(-30, 1, (257,), generator=generator)
        run = (drawn * 2.0**exponent * 2.0**spread).clamp(limits.min, limits.max)
        runs.append(run.to(dtype))
    for run in runs:
        exact = run.double().square().sum()
        found = sum_of_squares([run.to(cuda_device)])
        torch.testing.assert_close(found.cpu(), exact, rtol=1e-13, atol=0)
    for bad, expected in ((torch.inf, torch.inf), (torch.nan, torch.nan)):
        run = torch.ones(300, dtype=dtype, device=cuda_device)
        run[77] = bad
        assert sum_of_squares([run]).item() == pytest.approx(expected, nan_ok=True)


def test_steps_that_were_saved_on_the_cpu(cuda_device: str) -> None:
    """As torch saves them for optimizers that are neither fused nor capturable."""
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


GRAPHS: list[tuple[Any, Any, dict[str, Any]]] = [
    *(
        (kind, state_dtype, {} if kind is optim.SGD else {"capturable": True})
        for kind in (optim.AdamW, optim.SGD, optim.LAMB)
        for state_dtype in (torch.float32, torch.bfloat16, "8bit")
    ),
    *((optim.Adafactor, torch.float32, {"master_weights": masters}) for masters in (False, True)),
]


@pytest.mark.parametrize(("kind", "state_dtype", "settings"), GRAPHS, ids=str)
def test_graphs(kind: Any, state_dtype: Any, settings: dict[str, Any], cuda_device: str) -> None:
    """Captured and replayed, a step equals a step; none waits for the GPU."""
    if cuda_device == "cpu":
        pytest.skip("CUDA graphs need a GPU")
    results = []
    for captured in (False, True):
        params = draw(device=cuda_device)
        for p in params:
            p.grad = torch.zeros_like(p)
        lr = torch.tensor(1e-2, device=cuda_device)
        settings = settings | {"lr": lr, "max_grad_norm": 1.0}
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
            try:
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")  # torch says that the mode is a prototype
                    torch.cuda.set_sync_debug_mode("error")
                if captured:
                    graph.replay()
                else:
                    optimizer.step()
            finally:
                torch.cuda.set_sync_debug_mode("default")
        results.append(snapshot(params, optimizer))
    assert same(*results)


# --- Parts of Adafactor's tensors -------------------------------------------------------------

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
