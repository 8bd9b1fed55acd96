"""Contract 7: one random stream, the same in every backend, shard, recomputation and graph."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch.utils.checkpoint import checkpoint

import selection
import torchweld
from conftest import Target
from oracle import assert_right, run, saved_bytes
from torchweld import functional, numerics, random
from torchweld.random import Shard
from torchweld.registry import Op, materialize

drawing = pytest.mark.targets(drawing=True)


# --- The numbers ------------------------------------------------------------------------------

# Counter, key and result, from the paper's reference implementation.
KNOWN = [
    ([0] * 4, [0] * 2, [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]),
    ([0xFFFFFFFF] * 4, [0xFFFFFFFF] * 2, [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]),
    (
        [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344],
        [0xA4093822, 0x299F31D0],
        [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1],
    ),
]


@pytest.mark.parametrize(("counter", "key", "expected"), KNOWN)
def test_known_answers(counter: list[int], key: list[int], expected: list[int]) -> None:
    words = random.philox([torch.tensor(c) for c in counter], [torch.tensor(k) for k in key])
    assert [word.item() for word in words] == expected


@pytest.mark.parametrize("shift", [0, 8, 16, 24])
@pytest.mark.parametrize("row", [0, 2**31 - 1, 2**32, 2**40 + 12345])
def test_words_are_uniform(row: int, shift: int) -> None:
    """Chi-square of each byte of a row's 2^20 words: 255 degrees of freedom, five sigma."""
    group, rest = torch.arange(2**18), torch.tensor(row)
    counter = (group, rest & 0xFFFFFFFF, rest >> 32, torch.tensor(0))
    words = torch.stack(random.philox(counter, (torch.tensor(42), torch.tensor(7))))
    counts = ((words.flatten() >> shift) & 255).bincount(minlength=256).double()
    expected = words.numel() / 256
    chi_square = ((counts - expected) ** 2 / expected).sum()
    assert abs(chi_square - 255) < 5 * (2 * 255) ** 0.5


def test_the_numbers_of_a_call_are_independent() -> None:
    """Decisions for eight columns from one call: any two fall together as often as by chance."""
    dropped = ~random.make_mask([2**15, 8], 0.25, 11)
    both = (dropped.double().T @ dropped.double())[~torch.eye(8, dtype=torch.bool)]
    n, p = 2**15, 1 / 16
    assert ((both - n * p).abs() < 4 * (n * p * (1 - p)) ** 0.5).all()


@pytest.mark.parametrize("p", [0.01, 0.1, 0.5, 0.9])
def test_rate(p: float) -> None:
    """Within four sigma of a binomial over ten million elements, and the mean is kept exactly."""
    rounded = random.find_threshold(p) / 2**16
    assert abs(rounded - p) <= 2**-17
    assert random.find_scale(p) * (1 - rounded) == 1
    p = rounded
    with torchweld.use_backend("cpu"):
        y = functional.softmax_dropout(torch.zeros(10_000, 1000), p=p, seed=1)
    n = y.numel()
    dropped = (y == 0).sum().item()
    assert abs(dropped - n * p) < 4 * (n * p * (1 - p)) ** 0.5
    torch.testing.assert_close(y.max().item(), 1e-3 / (1 - p))


def test_all_and_almost_nothing() -> None:
    with torchweld.use_backend("cpu"):
        x = torch.zeros(300, 1000)
        assert not functional.softmax_dropout(x, p=1.0, seed=1).any()
        assert functional.softmax_dropout(x, p=1e-12, seed=1).all()
        most = functional.softmax_dropout(x, p=1 - 1e-12, seed=1)
    assert random.find_threshold(1 - 1e-12) == 2**16 - 1
    assert torch.equal(most != 0, random.make_mask(x.shape, 1 - 1e-12, 1))


# --- One mask everywhere ------------------------------------------------------------------------


@drawing
@given(
    sizes=st.tuples(st.integers(1, 4), st.integers(1, 6), st.integers(1, 700)),
    before=st.tuples(st.integers(0, 2**20), st.integers(0, 2**16), st.integers(0, 9)),
    after=st.tuples(st.integers(0, 9), st.integers(0, 9), st.integers(0, 9)),
    p=st.floats(0.01, 0.99),
    seed=st.integers(0, 2**63 - 1),
)
# Row numbers on both sides of 2^32.
@example(sizes=(2, 3, 9), before=(65535, 65532, 2), after=(1, 1, 5), p=0.5, seed=3)
def test_a_part_drops_what_the_whole_would(
    target: Target,
    sizes: tuple[int, ...],
    before: tuple[int, ...],
    after: tuple[int, ...],
    p: float,
    seed: int,
) -> None:
    """Any shard of any tensor drops the elements that the reference drops in the whole tensor."""
    op = target.op
    inputs = materialize(target.sized(sizes[:-1], sizes[-1:]), torch.float32, target.device)
    sizes = (*sizes[:-1], inputs[0].shape[-1])
    named = dict(zip(op.forward_signature.arguments, inputs, strict=True))
    whole_columns = op.sharding.columns(*inputs)
    named["p"], named["seed"] = p, torch.tensor([seed], device=target.device)
    named["offset"] = [b if d < 3 - whole_columns else 0 for d, b in enumerate(before)]
    named["whole"] = [
        o + n + (a if d < 3 - whole_columns else 0)
        for d, (o, n, a) in enumerate(zip(named["offset"], sizes, after, strict=True))
    ]
    assert_right(op, list(named.values()))


@drawing
def test_the_limit_itself_is_kept(target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    """An element is dropped where its number is below round(p * 2**16): in each of eight lanes."""
    op = target.op
    inputs = materialize(target.sized((2, 3), (64,)), torch.float32, target.device)
    named = dict(zip(op.forward_signature.arguments, inputs, strict=True))
    named["seed"] = torch.tensor([7], device=target.device)
    drawn: list[torch.Tensor] = []
    numbers_of = random._numbers
    with monkeypatch.context() as patch:
        patch.setattr(random, "_numbers", lambda *a: drawn.append(numbers_of(*a)) or drawn[-1])
        op.reference(*(named | {"p": 0.5}).values())
    for lane in range(8):
        numbers = drawn[0].flatten()[lane::8]
        number = int(numbers[(numbers - 2**15).abs().argmin()])
        assert_right(op, list((named | {"p": number / 2**16}).values()))


@pytest.mark.targets("bias_dropout_add")
def test_a_word_that_is_the_limit_is_kept(target: Target) -> None:
    """Kernels compare an upper half by its whole word, which is the limit if the lower half is 0.

    One number in 2^32 would be dropped: no sample had one, and a planted `>` passed all tests.
    """
    op, rows = target.op, torch.arange(2**18)
    counter = (torch.tensor(0), rows, torch.zeros_like(rows), torch.zeros_like(rows))
    words = torch.stack(random.philox(counter, (torch.tensor(7), torch.tensor(0))))
    inputs = materialize(target.sized((1,), (8,)), torch.float32, target.device)
    named = dict(zip(op.forward_signature.arguments, inputs, strict=True))
    named |= {"seed": torch.tensor([7], device=target.device), "whole": [len(rows), 8]}
    for of_lane in words:
        row = int((of_lane & 0xFFFF == 0).nonzero()[0])
        named |= {"p": int(of_lane[row] >> 16) / 2**16, "offset": [row, 0]}
        assert_right(op, list(named.values()))


def test_the_reference_of_a_part_is_a_part_of_the_reference() -> None:
    """Covers rows beyond 2^32 and columns that begin within a group of eight."""
    whole = random.make_mask([6, 5, 40], 0.4, 7)
    part = random.make_mask([2, 3, 21], 0.4, 7, shard=Shard([6, 5, 40], [3, 1, 13]))
    assert torch.equal(part, whole[3:5, 1:4, 13:34])
    far = random.make_mask([2, 8], 0.5, 7, shard=Shard([2**33, 8], [2**32, 0]))
    assert not torch.equal(far, random.make_mask([2, 8], 0.5, 7))
    several = random.make_mask([4, 2, 12], 0.3, 7, trailing=2)
    assert torch.equal(several.view(4, 24), random.make_mask([4, 24], 0.3, 7))


# --- Seeds --------------------------------------------------------------------------------------


def _call(op: Op) -> Callable[[torch.Tensor], torch.Tensor]:
    """The op as a user calls it, with a seed drawn at every call."""
    inputs = materialize(op.sized((4, 8), (64,)), torch.float32)

    def function(x: torch.Tensor) -> torch.Tensor:
        given = [x, *inputs[1:]]
        given[op.seed_at] = random.seed()  # type: ignore[index]
        result = torchweld.dispatch.call.call(op, *given)
        return result[0] if isinstance(result, tuple) else result

    return function


def _x() -> torch.Tensor:
    return torch.randn(4, 8, 64, generator=torch.Generator().manual_seed(3), requires_grad=True)


def _results(function: Callable[[torch.Tensor], torch.Tensor]) -> tuple[torch.Tensor, ...]:
    """The result and the gradient after torch.manual_seed."""
    x = _x()
    torch.manual_seed(5)
    y = function(x)
    y.square().sum().backward()
    return y.detach(), torch.as_tensor(x.grad)


@drawing
def test_manual_seed_governs(op: Op) -> None:
    function = _call(op)
    with torchweld.use_backend("cpu"):
        first, again = _results(function), _results(function)
        other = function(_x())
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    assert not torch.equal(first[0], other)


def test_a_given_seed_repeats_and_draws_nothing() -> None:
    x = _x()
    state = torch.get_rng_state()
    calls = [functional.softmax_dropout(x, p=0.5, seed=seed) for seed in (9, 9, 10)]
    assert torch.equal(state, torch.get_rng_state())
    assert torch.equal(calls[0], calls[1])
    assert not torch.equal(calls[0], calls[2])
    as_tensor = functional.softmax_dropout(x, p=0.5, seed=torch.tensor(9))
    assert torch.equal(as_tensor, calls[0])
    assert torch.equal(calls[0] != 0, random.make_mask(x.shape, 0.5, 9))


@pytest.mark.parametrize("backend", ["cpu", "eager", None])
def test_calls_without_dropout_draw_nothing(backend: str | None) -> None:
    module = torchweld.nn.SoftmaxDropout(p=0.5).eval()
    with torchweld.use_backend(backend):
        state = torch.get_rng_state()
        assert torch.equal(module(_x()), functional.softmax_dropout(_x()))
        assert torch.equal(state, torch.get_rng_state())
        module.train()(_x())
        assert not torch.equal(state, torch.get_rng_state())


# --- Recomputation and graphs -------------------------------------------------------------------


@drawing
@pytest.mark.parametrize("use_reentrant", [False, True])
def test_checkpoint_drops_the_same(op: Op, use_reentrant: bool) -> None:
    function = _call(op)
    with torchweld.use_backend("cpu"):
        expected = _results(function)
        found = _results(lambda x: checkpoint(function, x, use_reentrant=use_reentrant))
    assert all(torch.equal(a, b) for a, b in zip(expected, found, strict=True))


def _compilers_of(op: Op) -> list[str]:
    """What compiles it. Inductor gets the seeds of all ops alike, so not every op takes it."""
    if selection.WHOLE:
        return ["aot_eager", "inductor"]
    takes_it = op.name in ("bias_dropout_add", "block_sparse_attention")
    return ["inductor" if takes_it else "aot_eager"]


@drawing
def test_compiled_calls_drop_as_eager_ones(op: Op) -> None:
    """Two calls in one graph draw two seeds in order, with the bits of calls outside a graph."""
    function = _call(op)

    def twice(x: torch.Tensor) -> torch.Tensor:
        return torch.stack([function(x), function(x)])

    with torchweld.use_backend("cpu"):
        for compiler in _compilers_of(op):
            torch._dynamo.reset()
            compiled = torch.compile(twice, fullgraph=True, backend=compiler)
            expected, found = _results(twice), _results(compiled)
            assert not torch.equal(found[0][0], found[0][1])
            assert torch.equal(found[0], expected[0])
            torch.testing.assert_close(found[1], expected[1], **numerics.ROUNDED)
            assert not torch.equal(compiled(_x()), compiled(_x()))


@drawing
def test_compiled_checkpoints_drop_the_same_twice(op: Op) -> None:
    """Forward and backward use the same mask, as the gradient shows."""
    function = _call(op)

    def block(x: torch.Tensor) -> torch.Tensor:
        return checkpoint(lambda v: function(function(v.sin()).cos()), x, use_reentrant=False)

    with torchweld.use_backend("cpu"):
        expected = _results(block)
        for compiler in _compilers_of(op):
            torch._dynamo.reset()
            found = _results(torch.compile(block, fullgraph=True, backend=compiler))
            torch.testing.assert_close(found, expected, **numerics.SUMMED_SMALL)


def test_transforms_draw_the_same_seeds() -> None:
    """Inside vmap and torch.func too one manual_seed governs one stream; half have the top bit."""

    def draws(function: Any) -> list[int]:
        torch.manual_seed(7)
        return [int(function(torch.zeros(1, dtype=torch.int64))) for _ in range(64)]

    def draw(x: torch.Tensor) -> torch.Tensor:
        return x + random.seed()

    expected = draws(draw)
    assert draws(torch.func.vmap(draw, randomness="same")) == expected
    assert draws(lambda x: torch.func.functionalize(draw)(x)) == expected
    assert draws(torch.compile(draw, backend="aot_eager")) == expected


def test_a_transform_drops_what_a_plain_call_does() -> None:
    x, residual = torch.randn(4, 33), torch.randn(4, 33)

    def function(x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        return functional.bias_dropout_add(x, None, residual, p=0.5)

    def seeded(manual: int, function: Any) -> Any:
        torch.manual_seed(manual)
        return function()

    mapped = torch.func.vmap(function, randomness="same")
    for manual in range(8):
        plain = seeded(manual, lambda: function(x, residual))
        primal = seeded(manual, lambda: torch.func.jvp(function, (x, residual), (x, x))[0])
        assert torch.equal(primal, plain)
        rows = [
            seeded(manual, lambda row=row: function(*row)) for row in zip(x, residual, strict=True)
        ]
        assert torch.equal(seeded(manual, lambda: mapped(x, residual)), torch.stack(rows))


def test_the_seed_op_passes_opcheck() -> None:
    checks = ("test_schema", "test_faketensor", "test_autograd_registration")
    torch.library.opcheck(torch.ops.torchweld.seed.default, (torch.empty(1),), test_utils=checks)


# --- softmax_dropout's masks ----------------------------------------------------------------------


@pytest.mark.targets("softmax_dropout")
@pytest.mark.parametrize("p", [0.0, 0.5])
def test_rows_that_are_masked_away_are_zero(target: Target, p: float) -> None:
    """With any kind of mask, and next to rows that see some key."""
    x = torch.randn(3, 7, device=target.device)
    excluded = torch.zeros(3, 7, device=target.device)
    excluded[1] = -torch.inf
    ops = [target.op.reference, None]
    for mask in (excluded, excluded == 0, excluded[:, :1], excluded[:, :1] == 0):
        seed = torch.tensor([3], device=target.device) if p else None
        for function in ops:
            found = run(target.op, [x, mask, 1.0, False, p, seed, [], []], function)
            assert not found["y"][1].any()
            assert not found["grad_input"][1].any()
            assert found["y"][0].any()
            assert found["grad_input"].isfinite().all()


@pytest.mark.targets("softmax_dropout")
@pytest.mark.parametrize("p", [0.0, 0.5])
def test_a_nan_fills_its_row(target: Target, p: float) -> None:
    """Also in its masked elements, as in torch."""
    x = torch.randn(20, 40, device=target.device)
    x[3, 2] = torch.nan
    seed = torch.tensor([3], device=target.device) if p else None
    for function in (target.op.reference, None):
        y = run(target.op, [x, None, 1.0, True, p, seed, [], []], function)["y"]
        assert torch.equal(y.isnan().any(1), y.isnan().all(1))
        assert y.isnan().any(1).tolist() == [row == 3 for row in range(20)]


@pytest.mark.targets("softmax_dropout")
@pytest.mark.parametrize("p", [0.0, 0.5])
def test_rows_of_only_minus_infinity_are_nan(target: Target, p: float) -> None:
    """As in torch, since no mask excludes them."""
    x = torch.randn(3, 7, device=target.device)
    x[1] = -torch.inf
    seed = torch.tensor([3], device=target.device) if p else None
    for function in (target.op.reference, None):
        found = run(target.op, [x, None, 1.0, False, p, seed, [], []], function)
        for value in found.values():
            assert value[1].isnan().all()
            assert value[[0, 2]].isfinite().all()


def test_masks_work_as_in_scaled_dot_product_attention() -> None:
    q, k, v = (torch.randn(2, 4, n, 16) for n in (5, 9, 9))
    mask = torch.rand(2, 1, 5, 9) > 0.3
    mask[..., 0] = True
    with torchweld.use_backend("cpu"):
        attention = functional.softmax_dropout(q @ k.mT, mask, scale=0.25)
    expected = torch.nn.functional.scaled_dot_product_attention(q, k, v, mask, scale=0.25)
    torch.testing.assert_close(attention @ v, expected)


def test_float32_masks_keep_16_bit_scores() -> None:
    x, mask = torch.randn(4, 33).bfloat16(), torch.randn(33)
    with torchweld.use_backend("cpu"):
        y = functional.softmax_dropout(x, mask)
    assert y.dtype == torch.bfloat16
    expected = torch.softmax(x.double() + mask, -1)
    assert torch.all((y - expected).abs() <= (2**-8 + 2**-20) * expected)


def test_saved_bytes() -> None:
    """Saves no mask: only the scores and two numbers a row, or only y without dropout."""
    x = torch.randn(64, 512).bfloat16().requires_grad_()
    with torchweld.use_backend("cpu"):
        seed, rows = 8, 64 * 2 * 4
        assert (
            saved_bytes(lambda: functional.softmax_dropout(x, p=0.1)) == 2 * x.numel() + rows + seed
        )
        assert saved_bytes(lambda: functional.softmax_dropout(x)) == 2 * x.numel()
        assert saved_bytes(lambda: functional.softmax_dropout(x, x > 0)) == 2 * x.numel()
