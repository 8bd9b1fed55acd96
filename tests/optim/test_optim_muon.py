"""Muon, stacked experts, and 1-bit optimizers in one process."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

import one_bit
import selection
import torchweld
from optimizers import U, draw, draw_grads, draw_steps, in_float64, run, run_bits, same
from refusing import refuses
from torchweld import numerics, optim
from torchweld.ops.optimizer import orthogonal
from torchweld.ops.optimizer.orthogonal import QUINTIC, orthogonalize, polar_express
from torchweld.optim._matrices import Matrix, find_iteration, find_regions, orthogonalize_all

SHAPES = ((16, 16), (12, 40), (40, 12), (1, 9), (9, 1), (12, 40))
COEFFICIENTS = {"standard": [QUINTIC] * 5, "gram": [QUINTIC] * 5, "polar_express": polar_express(5)}

NEAR: Any = numerics.SUMMED


def _polar_of(x: torch.Tensor, coefficients: Any) -> torch.Tensor:
    """The iteration's polynomial of the singular values, in float64."""
    u, s, vt = torch.linalg.svd(x.double(), full_matrices=False)
    s = s / s.norm().clamp(min=1e-7)
    for a, b, c in coefficients:
        s = a * s + b * s**3 + c * s**5
    return u * s @ vt


@functools.cache
def _fifty_steps_in_float64(algorithm: str, nesterov: bool, moonlight: bool) -> list[torch.Tensor]:
    """The algorithm of the paper, with torch's average of gradients."""

    def step(p: Any, g: Any, t: int, kept: dict[str, Any], s: dict[str, Any]) -> torch.Tensor:
        m = kept["m"] = 0.95 * kept.get("m", 0) + 0.05 * g
        u = 0.05 * g + 0.95 * m if nesterov else m
        rows, columns = p.shape
        ratio = 0.2 * max(rows, columns) ** 0.5 if moonlight else max(1, rows / columns) ** 0.5
        return p * (1 - 0.02 * 0.1) - 0.02 * ratio * _polar_of(u, COEFFICIENTS[algorithm])

    return in_float64(step, draw(shapes=SHAPES), draw_steps(50, SHAPES), {})[0]


@pytest.mark.parametrize("algorithm", COEFFICIENTS)
@pytest.mark.parametrize(("nesterov", "moonlight"), [(True, False), (False, True)])
def test_fifty_steps_beside_float64_and_torch(
    algorithm: str, nesterov: bool, moonlight: bool
) -> None:
    """In float32 the rule's numbers; in bfloat16 no farther from them than torch's class."""
    settings: dict[str, Any] = {"nesterov": nesterov}
    settings["adjust_lr_fn"] = "match_rms_adamw" if moonlight else None
    exact = _fifty_steps_in_float64(algorithm, nesterov, moonlight)

    def off(params: Any) -> float:
        errors = [(p.double() - e).flatten() for p, e in zip(params, exact, strict=True)]
        return torch.cat(errors).square().mean().sqrt().item()

    own = settings | {"algorithm": algorithm, "ns_dtype": torch.bfloat16}
    narrow, _ = run(lambda p: optim.Muon(p, 0.02, **own), 50, shapes=SHAPES)
    if algorithm != "polar_express" and nesterov:  # else torch's overwrites its momentum in bf16
        theirs, _ = run(lambda p: torch.optim.Muon(p, 0.02, **settings), 50, shapes=SHAPES)
        # Errors of Gram matrices are multiplied by the squares of the later steps' factors.
        assert off(narrow) <= (1.1 if algorithm == "standard" else 3) * off(theirs)
    own["ns_dtype"] = torch.float32
    wide, _ = run(lambda p: optim.Muon(p, 0.02, **own), 50, shapes=SHAPES)
    # Fifty steps of at most 0.02 * 2 a matrix of unit rows. A product's roundings grow by the slope
    # at zero, 485 for five steps of Jordan's, on the smallest singular values only.
    assert off(wide) <= 50**0.5 * 0.02 * 2 * 485 * 4 * U
    assert off(wide) < off(narrow)


_SMALL = ((48, 48), (32, 128), (128, 32))
_NARROW = (torch.bfloat16, torch.float16)


@pytest.mark.parametrize(
    ("algorithm", "dtype", "condition", "shape"),
    selection.combine(COEFFICIENTS, (*_NARROW, torch.float32), (10.0, 1e7), _SMALL)
    + selection.combine(COEFFICIENTS, (torch.bfloat16, torch.float32), (10.0,), ((64, 68),)),
    ids=str,
)
def test_orthogonality(
    algorithm: str,
    dtype: torch.dtype,
    condition: float,
    shape: tuple[int, int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Singular values are no worse than from torch's iteration; 64 rows go in blocks."""
    monkeypatch.setattr(orthogonal, "_ON_CPU", orthogonal._ON_CPU._replace(blocks_from=64))
    generator = torch.Generator().manual_seed(3)
    n = min(shape)
    u, _ = torch.linalg.qr(torch.randn(shape[0], n, generator=generator, dtype=torch.float64))
    v, _ = torch.linalg.qr(torch.randn(shape[1], n, generator=generator, dtype=torch.float64))
    s = torch.logspace(0, -torch.tensor(condition).log10().item(), n, dtype=torch.float64)
    x = (u * s @ v.T).float()
    ours = x.clone()
    orthogonalize(
        *([ours], COEFFICIENTS[algorithm]), gram=algorithm == "gram", dtype=dtype, eps=1e-7, scale=1
    )
    peer = torch.optim._muon._zeropower_via_newtonschulz(x, QUINTIC, 5, 1e-7)  # type: ignore[attr-defined]
    assert ours.isfinite().all()

    def worst(t: torch.Tensor) -> tuple[float, float]:
        s = torch.linalg.svdvals(t.double())
        t = t.double() if shape[0] >= shape[1] else t.double().T
        gram = t.T @ t - torch.eye(n, dtype=torch.float64)
        return s.max().item(), gram.norm().item()

    # Runs of the same polynomial differ by roundings of bfloat16 in five steps, on Gram matrices
    # twice. Rounding raises small singular values: the polynomial's own are nearer to zero.
    own = worst(_polar_of(x, COEFFICIENTS[algorithm]))
    room = 1 + (2 if algorithm == "gram" else 1) * 5 * 2.0**-8
    for found, of_peer, exact in zip(worst(ours), worst(peer), own, strict=True):
        assert found <= max(of_peer, exact) * room


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("gram", [False, True])
@pytest.mark.parametrize("is_filled", [False, True])
def test_bits_do_not_depend_on_the_batch(
    dtype: torch.dtype, gram: bool, is_filled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A matrix's bits are its own on any number of devices, also where zeros fill a GPU's batch."""
    limits = orthogonal._ON_CPU
    if is_filled:
        limits = orthogonal._ON_GPU._replace(batch=4 * 24 * 40)
    limits = limits._replace(blocks_from=50)
    monkeypatch.setattr(orthogonal, "_limits", lambda x: limits)
    for rows, columns, count in ((24, 40, 9), (50, 70, 2)):
        drawn = draw(shapes=[(rows, columns)] * count)
        together = [d.detach().clone() for d in drawn]
        settings: Any = {"gram": gram, "dtype": dtype, "eps": 1e-7, "scale": 1.5}
        orthogonalize(together, [QUINTIC] * 3, **settings)
        for d, found in zip(drawn, together, strict=True):
            single = d.detach().clone()
            orthogonalize([single], [QUINTIC] * 3, **settings)
            assert torch.equal(single, found)


@pytest.mark.parametrize("state_dtype", [torch.float32, torch.bfloat16, "8bit"], ids=str)
@pytest.mark.parametrize("masters", [False, True, "remainder"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_codecs_have_the_references_bits(
    state_dtype: Any, masters: Any, dtype: Any, backend: str
) -> None:
    """The kernel and the eager reference, with both halves of the step."""
    stored = {"state_dtype": state_dtype, "master_weights": masters, "min_quantized_size": 0}
    given: Any = lambda p: optim.Muon(p, 0.02, **stored), 4, dtype, (*SHAPES, (3, 8, 10))
    assert backend == "eager" or same(run_bits(*given), run_bits(*given, backend="eager"))


def test_packed_projections_are_matrices_of_their_own() -> None:
    """Heads, sizes and stacks: the bits of separate parameters."""
    p, q, stack = draw(shapes=[(32, 12), (12, 30), (3, 8, 10)])
    apart = [*p.detach().split([8, 8, 8, 4, 4]), *q.detach().split(10, 1), *stack.detach()]
    apart = [one.clone().requires_grad_() for one in apart]
    settings: Any = {"lr": 0.02, "ns_dtype": torch.float32}
    packed = optim.Muon(
        [
            {"params": [p], "heads": (2, 1, 2), "split_sizes": (16, 8, 8)},
            {"params": [q], "heads": 3, "split_dim": 1},
            {"params": [stack]},
        ],
        **settings,
    )
    single = optim.Muon(apart, **settings)
    for seed in range(3):
        draw_grads([p, q, stack], seed)
        grads = [g for t in (p, q, stack) if (g := t.grad) is not None]
        pieces = [*grads[0].split([8, 8, 8, 4, 4]), *grads[1].split(10, 1), *grads[2]]
        for one, piece in zip(apart, pieces, strict=True):
            one.grad = piece.clone()
        packed.step()
        single.step()
    assert torch.equal(p, torch.cat(apart[:5]))
    assert torch.equal(q, torch.cat(apart[5:8], 1))
    assert torch.equal(stack, torch.stack(apart[8:]))


class _Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(11, 8)
        self.block = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Linear(16, 8))
        self.conv = torch.nn.Conv1d(8, 8, 3)
        self.norm = torch.nn.LayerNorm(8)
        self.lm_head = torch.nn.Linear(8, 11)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.norm(self.block(self.embed(x)))
        return self.lm_head(x + self.conv(x.mT.unsqueeze(0))[0].mean(1))


@pytest.mark.parametrize("rest", ["adamw", "lion"])
def test_groups_of_a_model(rest: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Hidden matrices go to Muon and the others to a step with their own optimizer's bits."""
    torch.manual_seed(0)
    model = _Model()
    twin = copy.deepcopy(model)
    groups = optim.muon_groups(model, rest=rest, lr=1e-3, weight_decay=0.1)
    printed = capsys.readouterr().out
    assert "muon: 256 elements in 2 parameters: block.0.weight, block.1.weight" in printed
    assert f"{rest}: " in printed
    optimizer = optim.Muon(groups, lr=0.02, max_grad_norm=1.0)
    named = dict(twin.named_parameters())
    hidden = ["block.0.weight", "block.1.weight"]
    others = [p for name, p in named.items() if name not in hidden]
    kind = {"adamw": optim.AdamW, "lion": optim.Lion}[rest]
    pair = optim.Muon([named[n] for n in hidden], lr=0.02), kind(others, lr=1e-3, weight_decay=0.1)
    for _ in range(3):
        for of in (model, twin):
            of.zero_grad()
            of(torch.arange(11)).square().sum().backward()
        torch.nn.utils.clip_grad_norm_(twin.parameters(), 1.0)
        optimizer.step()
        for each in pair:
            each.step()
    for p, q in zip(model.parameters(), twin.parameters(), strict=True):
        # Clipping rounds a gradient once; Lion's signs and small singular values may turn on it.
        torch.testing.assert_close(p, q, rtol=0, atol=3 * 0.02 * 2.0**-6)
    refuses(r"include.*vector", optim.muon_groups, model, include=["norm.weight"], verbose=False)
    asked = optim.muon_groups(model, include=["lm_head.weight"], verbose=False)
    assert any(name == "lm_head.weight" for name, _ in asked[0]["params"])


def test_regions_and_iterations_of_empty_matrices() -> None:
    group = optim.Muon(draw(shapes=[(4, 4)])).param_groups[0]
    iteration = find_iteration("Muon", group)
    empty = torch.empty(0, 3)
    (region,) = find_regions("Muon", empty.shape, group)
    orthogonalize_all([Matrix(region.of(empty), iteration)])
    assert find_regions("Muon", (2, 0, 3), group)[1].place == (1,)
    zeros = torch.zeros(3, 5)
    orthogonalize_all([Matrix(zeros, iteration)])
    assert not zeros.any()


# --- Stacked experts ------------------------------------------------------------------------------


E, H, F, STEPS = 4, 24, 40, 6


def _experts() -> torchweld.nn.ExpertsMLP:
    torch.manual_seed(0)
    return torchweld.nn.ExpertsMLP(E, H, F)


def _train(
    stacked: torchweld.nn.ExpertsMLP,
    others: list[torch.Tensor],
    read: Callable[[torch.Tensor], list[torch.Tensor]],
    optimizers: list[Any],
) -> None:
    """Step both with the gradients of the stacked experts, whose last one gets no rows."""
    for step in range(STEPS):
        generator = torch.Generator().manual_seed(step)
        x = torch.randn(30, H, generator=generator)
        indices = torch.randint(0, E - 1, (30, 2), generator=generator)
        optimizers[0].zero_grad()
        stacked(x, indices, torch.rand(30, 2, generator=generator)).square().sum().backward()
        grads = [part for p in stacked.parameters() for part in read(p.grad)]  # type: ignore[arg-type]
        for other, grad in zip(others, grads, strict=True):
            other.grad = grad.clone()
        for optimizer in optimizers:
            optimizer.step()


def _make_rows(p: torch.Tensor) -> list[torch.Tensor]:
    return [p.detach().flatten(1)]


RULES: dict[str, Callable[[Any], Any]] = {
    "8 bits": lambda params: optim.AdamW(params, 0.01, state_dtype="8bit", min_quantized_size=0),
    "AdamW8bit": lambda params: optim.AdamW8bit(params, 0.01),
    "Lion, 8 bits": lambda params: optim.Lion(
        params, 1e-3, state_dtype="8bit", min_quantized_size=0
    ),
    "1 bit": lambda params: optim.OneBitAdam(params, 1e-4, freeze_step=2),
    "1 bit, LAMB": lambda params: optim.OneBitLAMB(params, 0.01, freeze_step=2),
}


@pytest.mark.parametrize("rule", RULES)
def test_a_stack_steps_as_a_matrix_with_a_row_an_expert(rule: str) -> None:
    """So blocks of 8-bit states end with an expert, and shards of experts have the same bits."""
    stacked = _experts()
    before = [p.detach().clone() for p in stacked.parameters()]
    others = [rows.clone().requires_grad_() for p in before for rows in _make_rows(p)]
    optimizers = [RULES[rule](params) for params in ([*stacked.parameters()], others)]
    _train(stacked, others, _make_rows, optimizers)
    for p, q, old in zip(stacked.parameters(), others, before, strict=True):
        assert not torch.equal(p[:-1], old[:-1])
        if "1 bit" in rule:  # bits have no zero
            assert torch.equal(p[-1], old[-1])
        assert torch.equal(p.flatten(1), q)
        state, other = (o.state[t] for o, t in zip(optimizers, (p, q), strict=True))
        assert state.keys() == other.keys()
        for name, entry in state.items():
            if isinstance(entry, torch.Tensor):
                assert torch.equal(entry.flatten(), other[name].flatten()), name


def test_muon_takes_each_expert_as_a_matrix() -> None:
    """An expert without rows has a gradient of zeros, and does not move."""
    stacked, how = _experts(), {"lr": 0.02, "weight_decay": 0.0, "ns_dtype": torch.float32}
    before = [p.detach().clone() for p in stacked.parameters()]
    others = [matrix.clone().requires_grad_() for p in before for matrix in p]
    groups = optim.muon_groups(stacked, verbose=False)
    assert [name for name, _ in groups[0]["params"]] == ["gate_up", "down"]
    optimizers: list[Any] = [optim.Muon(groups, **how), optim.Muon(others, **how)]
    _train(stacked, others, lambda grad: [*grad.detach()], optimizers)
    assert torch.equal(
        torch.cat([p.flatten() for p in stacked.parameters()]),
        torch.cat([p.flatten() for p in others]),
    )
    for p, old in zip(stacked.parameters(), before, strict=True):
        assert torch.equal(p[-1], old[-1])
        moved = (p[:-1] - old[:-1]).flatten(1).norm(dim=1)
        # STEPS updates whose singular values are about one, times 0.02 and torch's factor.
        least = 0.02 * min(p.shape[1:]) ** 0.5
        assert bool((moved > least).all())


# --- 1-bit optimizers in one process --------------------------------------------------------------


KINDS = {"OneBitAdam": one_bit.Adam, "OneBitLAMB": one_bit.Lamb}
BOTH = pytest.mark.parametrize("kind", KINDS)
FREEZE = 4
USED, EMPTY, UNUSED, FROZEN = "used", "empty", "unused", "frozen"


def _drawn(seed: int, shape: tuple[int, ...]) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def _params(sorts: list[str]) -> list[torch.Tensor]:
    """Parameters of some sorts; used ones are of different shapes."""
    found = []
    for i, sort in enumerate(sorts):
        shape = (0, 5) if sort == EMPTY else (3 + i, 5)
        found.append(_drawn(i, shape).requires_grad_(sort != FROZEN))
    return found


def _step_used(params: list[torch.Tensor], sorts: list[str], optimizer: Any, step: int) -> None:
    for i, (p, sort) in enumerate(zip(params, sorts, strict=True)):
        if sort in (USED, EMPTY):
            p.grad = _drawn(100 * step + i, tuple(p.shape))
    optimizer.step()


@settings(max_examples=25, deadline=None)
@given(
    kind=st.sampled_from(list(KINDS)),
    sorts=st.lists(st.sampled_from([USED, EMPTY, UNUSED, FROZEN]), min_size=1, max_size=5),
)
@example(kind="OneBitLAMB", sorts=[UNUSED])
def test_parameters_without_elements_or_gradients(kind: str, sorts: list[str]) -> None:
    """Those with gradients step as the published algorithm does without the others."""
    params = _params(sorts)
    optimizer = getattr(optim, kind)(params, lr=1e-2, freeze_step=FREEZE, weight_decay=0.01)
    used = [i for i, sort in enumerate(sorts) if sort == USED]
    arrays = [params[i].detach().numpy().copy() for i in used]
    expected = KINDS[kind](arrays, 1, lr=1e-2, freeze_step=FREEZE, weight_decay=0.01)
    before = [p.detach().clone() for p in params]
    for step in range(FREEZE + 5):
        _step_used(params, sorts, optimizer, step)
        if used:
            expected.step([[_drawn(100 * step + i, tuple(params[i].shape)).numpy() for i in used]])
    for i, array in zip(used, arrays, strict=True):
        np.testing.assert_allclose(params[i].detach().numpy(), array, **NEAR)
    others = [i for i in range(len(params)) if i not in used]
    assert all(torch.equal(params[i].detach(), before[i]) for i in others)


OPTIONS: list[dict[str, Any]] = [
    {"lr": 1e-2, "weight_decay": 0.1, "coeff_beta": 0.9},
    {"lr": 3e-2, "betas": (0.8, 0.99), "coeff_beta": 0.5, "factor_clip": (0.9, 1.1)},
    {"lr": 1e-2, "eps": 1e-3, "factor_threshold": 0.01, "trust_clip": (0.1, 0.7)},
    {"lr": 2e-2, "factor_clip": (0.3, 0.6), "factor_threshold": 0.5},
]


def test_every_group_has_its_own_options() -> None:
    """Every option differs in some group; also where a later group comes first."""
    for options in (OPTIONS, OPTIONS[::-1]):
        params = _params([USED] * len(options))
        groups = [{"params": [p]} | each for p, each in zip(params, options, strict=True)]
        optimizer = optim.OneBitLAMB(groups, freeze_step=FREEZE)
        arrays = [p.detach().numpy().copy() for p in params]
        expected = one_bit.Lamb(arrays, 1, options, freeze_step=FREEZE)
        for step in range(FREEZE + 12):
            _step_used(params, [USED] * len(params), optimizer, step)
            expected.step([[p.grad.numpy() for p in params]])  # type: ignore[union-attr]
            for p, array in zip(params, arrays, strict=True):
                np.testing.assert_allclose(p.detach().numpy(), array, **NEAR)


@BOTH
def test_new_parameters_after_the_warm_up(kind: str) -> None:
    """They are refused where they come, and nothing changes; without a gradient they may stay."""
    sorts = [USED, UNUSED]
    params = _params(sorts)
    optimizer = getattr(optim, kind)(params, freeze_step=FREEZE)
    for step in range(FREEZE + 1):
        _step_used(params, sorts, optimizer, step)
    with pytest.raises(torchweld.ArgumentError, match="a new one"):
        optimizer.add_param_group({"params": [torch.zeros(3, requires_grad=True)]})
    assert len(optimizer.param_groups) == 1
    optimizer.add_param_group({"params": [torch.zeros(3)]})
    params[1].grad = torch.ones_like(params[1])
    refuses("a new one", optimizer.step)
    assert params[1] not in optimizer.state or not optimizer.state[params[1]]
    params[1].grad = None
    _step_used(params, sorts, optimizer, FREEZE + 1)


@BOTH
def test_one_device(kind: str) -> None:
    """Momenta of several devices could not be joined after the warm-up: said at once."""
    params = [torch.zeros(3, requires_grad=True), torch.zeros(3, device="meta", requires_grad=True)]
    refuses("on cpu, meta", getattr(optim, kind), params, freeze_step=FREEZE)


@BOTH
def test_a_group_without_parameters(kind: str) -> None:
    params = _params([USED])
    optimizer = getattr(optim, kind)([{"params": []}, {"params": params}], freeze_step=FREEZE)
    for step in range(FREEZE + 2):
        _step_used(params, [USED], optimizer, step)
    params[0].grad = torch.ones(3, 5).to_sparse()
    refuses("a sparse", optimizer.step)
    assert params[0].isfinite().all()


def test_phases_of_groups_agree() -> None:
    params = _params([USED, USED])
    optimizer = optim.OneBitAdam([{"params": [p]} for p in params], freeze_step=FREEZE)
    _step_used(params, [USED, USED], optimizer, 0)
    state = optimizer.state_dict()
    state["param_groups"][1]["steps_taken"] = FREEZE
    refuses("as many in all groups", optimizer.load_state_dict, state)
