"""Muon: its rule in float64, torch's class, orthogonality against the SVD, and its groups."""

from __future__ import annotations

import copy
import functools
from typing import Any

import pytest
import torch

import selection
import torchweld
from optimizers import U, draw, draw_grads, draw_steps, in_float64, run, run_bits, same
from torchweld import optim
from torchweld.ops.optimizer import orthogonal
from torchweld.ops.optimizer.orthogonal import QUINTIC, orthogonalize, polar_express
from torchweld.optim._matrices import Matrix, find_iteration, find_regions, orthogonalize_all

SHAPES = ((16, 16), (12, 40), (40, 12), (1, 9), (9, 1), (12, 40))
COEFFICIENTS = {"standard": [QUINTIC] * 5, "gram": [QUINTIC] * 5, "polar_express": polar_express(5)}


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

    own = settings | {"algorithm": algorithm}
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
    """Singular values, by a float64 SVD, are no worse than from torch's iteration.

    64 rows are multiplied in blocks.
    """
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
    """What makes every number of devices agree: a matrix's bits are its own.

    A GPU's batches are filled with zeros, here to four of the smaller matrices.
    """
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
    with pytest.raises(torchweld.ArgumentError, match=r"include.*vector"):
        optim.muon_groups(model, include=["norm.weight"], verbose=False)
    asked = optim.muon_groups(model, include=["lm_head.weight"], verbose=False)
    assert any(name == "lm_head.weight" for name, _ in asked[0]["params"])


def test_offloaded_steps_have_the_same_bits() -> None:
    results = []
    for offloads in (False, True):
        torch.manual_seed(0)
        model = _Model()
        optimizer: Any = optim.Muon(optim.muon_groups(model, verbose=False), lr=0.02)
        if offloads:
            optimizer = optim.Offload(optimizer, bucket_bytes=512)
        for _ in range(3):
            optimizer.zero_grad()
            model(torch.arange(11)).square().sum().backward()
            optimizer.step()
        results.append([p.detach() for p in model.parameters()])
    assert same(*results)


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
