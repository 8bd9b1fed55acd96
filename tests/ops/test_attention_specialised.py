"""Attention's warp-specialised kernels, in an imitation of their GPU."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

import imitated_gluon
from conftest import PLACES, running_at
from oracle import Results, exact, run
from selection import WHOLE, combine
from torchweld import numerics
from torchweld.dispatch import tile_proof
from torchweld.dispatch.autograd import as_tuple
from torchweld.dispatch.call import call
from torchweld.ops.attention.block_sparse import OP
from torchweld.sparse import BlockLayout

pytestmark = pytest.mark.skipif(
    PLACES["interpreter"][2] is not None, reason=str(PLACES["interpreter"][2])
)
EVERY = ["attention_forward_specialised", "attention_dq_specialised", "attention_dkv_specialised"]


def _choose(tiles: Sequence[Any], persistent: bool) -> Any:
    """The first warp-specialised tile; some tiles have persistent programs."""
    specialised = [tile for tile in tiles if tile.specialised]
    return next((t for t in specialised if t.persistent == persistent), [*specialised, tiles[0]][0])


@pytest.fixture(params=[True])
def started(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Iterator[list[str]]:
    """The warp-specialised kernels that ran: where there is one, it serves."""
    from torchweld.triton_kernels import launch, tiled
    from torchweld.triton_kernels.attention import specialised

    found: list[str] = []
    plain = launch.start

    def start(launched: Any, options: dict[str, Any]) -> Any:
        if "gl" not in launched.kernel.fn.__globals__:
            return plain(launched, options)
        found.append(launched.kernel.fn.__name__)
        return imitated_gluon.start(launched, options)

    tile_proof.connect()
    monkeypatch.setattr(launch, "start", start)
    monkeypatch.setattr(specialised, "runs_on", lambda device: True)
    monkeypatch.setattr(specialised, "processors", lambda device: 1)
    monkeypatch.setattr(tiled, "choose", lambda on, tiled: _choose(tiled.tiles, request.param))
    with running_at("interpreter", monkeypatch):
        yield found


def _random(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(len(shape))).half()


def _run_forward(inputs: Sequence[Any]) -> Results:
    return dict(zip(OP.public, as_tuple(call(OP, *inputs)), strict=True))


def _worst(q: torch.Tensor, k: torch.Tensor, layout: BlockLayout, **options: Any) -> float:
    """The largest error of a result, in roundings of its largest number; NaN counts as infinite.

    Wide heads have no warp-specialised backward pass: test_block_sparse_triton.py has the other.
    """
    from torchweld.triton_kernels.attention import specialised

    inputs: Any = OP.inputs(q, k, k.flip(-2), layout, **options)  # type: ignore[misc]
    oracle = exact(OP, inputs)
    is_wide = q.shape[-1] > 128 and specialised.runs_on(q.device)
    found = _run_forward(inputs) if is_wide else run(OP, inputs)
    worst = 0.0
    for name in found:
        wanted = oracle[name]
        assert torch.equal(found[name].isinf(), wanted.isinf()), name
        finite = wanted.masked_fill(wanted.isinf(), 0)
        error = (found[name].masked_fill(wanted.isinf(), 0) - finite).abs().nan_to_num(torch.inf)
        worst = max(worst, (error.max() / finite.abs().max()).item())
    return worst * 2**11


def _layout(block: int, queries: int, keys: int) -> BlockLayout:
    """Five rows by six columns of blocks for two heads, one with an empty row and column."""
    blocks = torch.rand(1, 2, 5, 6, generator=torch.Generator().manual_seed(0)) < 0.6
    blocks[:, 1, 2] = blocks[:, 1, :, 3] = False
    return BlockLayout.from_blocks(blocks, block=block, seq_len=(queries, keys))


SIZES = [(64, 64), (64, 128), (128, 64), (128, 128), (256, 64), (256, 128)]
# Wide heads take half of the time: each size is causal, or is not.
CASES = [
    (width, block, causal)
    for width, block in SIZES
    for causal in (False, True)
    if WHOLE or width < 256 or causal == (block == 128)
]


@pytest.mark.parametrize(("width", "block", "causal"), CASES)
def test_results(width: int, block: int, causal: bool, started: list[str]) -> None:
    """Ragged lengths, empty lines, layouts of heads, sequences, more lines than programs."""
    queries, keys = 5 * block - 24, 6 * block - 40
    q = _random(2, queries, 2, width).transpose(1, 2)
    layout = _layout(block, queries, keys)
    assert _worst(q, _random(2, 2, keys, width), layout, causal=causal) <= 8
    assert started == (EVERY if width < 256 else EVERY[:1])


def _documents(block: int) -> BlockLayout:
    """Two sequences of packed documents, of which one query sees none."""
    ends = torch.tensor([[0, 70, 71, 200, 289], [0, 33, 250, 270, 280]])
    return BlockLayout.documents(ends, block=block, causal=True, seq_len=296)


def _scattered(block: int) -> BlockLayout:
    """Each head's own bits in half of the blocks, and full and empty blocks."""
    bits = torch.rand(2, 296, 296, generator=torch.Generator().manual_seed(0)) < 0.5
    kinds = torch.randint(3, (2, 5, 5), generator=torch.Generator().manual_seed(1))
    kinds = kinds.repeat_interleave(64, 1).repeat_interleave(64, 2)

    def sees(batch: Any, head: Any, query: Any, key: Any) -> Any:
        kind = kinds[head, query, key]
        return (kind == 2) | (kind == 1) & bits[head, query, key]

    return BlockLayout.from_mask_fn(sees, 296, block=block, num_heads=2)


PARTIAL = {
    "a window": lambda block: BlockLayout.sliding_window(296, window_size=(63, 0), block=block),
    "a window on both sides": lambda block: BlockLayout.sliding_window(
        (296, 344), window_size=(31, 40), block=block
    ),
    "documents": _documents,
    "scattered bits": _scattered,
}


FEW_SIZES = [(64, 64), (64, 128), (128, 64), (256, 128)]


@pytest.mark.parametrize(
    ("sinks", "causal", "size", "kind"), combine([False, True], [False, True], FEW_SIZES, PARTIAL)
)
def test_partial_blocks(
    kind: str, size: tuple[int, int], causal: bool, sinks: bool, started: list[str]
) -> None:
    width, block = size
    layout = PARTIAL[kind](block)
    q, k = _random(2, 2, 296, width), _random(2, 2, layout.keys, width)
    options = {"sinks": torch.tensor([0.5, -torch.inf]).half()} if sinks else {}
    assert layout.lists is not None
    assert layout.lists.masks.shape[0]
    assert _worst(q, k, layout, causal=causal, **options) <= 8
    assert started == (EVERY if width < 256 else EVERY[:1])


@pytest.mark.parametrize(("block", "kind"), [(64, "a window"), (128, "scattered bits")])
def test_partial_blocks_of_wide_heads_without_specialised_warps(
    block: int, kind: str, started: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tiles of 16 keys on sm_90 have half of a mask's word.

    Their kernels did not compile. The ahead-of-time cases had masks with heads of 64 only.
    """
    from torchweld.triton_kernels.attention import specialised

    monkeypatch.setattr(specialised, "runs_on", lambda device: False)
    q = _random(1, 2, 296, 256)
    assert _worst(q, q.flip(2), PARTIAL[kind](block)) <= 8
    assert not started


@pytest.mark.parametrize("started", [False, True], indirect=True)
def test_two_partial_blocks_at_a_time(started: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Long lines take two blocks of 64 keys, each with its own mask or none, and an odd one."""
    from torchweld.triton_kernels.attention import specialised

    monkeypatch.setattr(specialised, "_LONG", 0)
    q = _random(1, 2, 296, 64)
    for kind in ("a window", "scattered bits"):
        for causal in (False, True):
            assert _worst(q, q.flip(2), PARTIAL[kind](64), causal=causal) <= 8
    assert started == 4 * EVERY


def test_sinks_that_exceed_all_scores(started: list[str]) -> None:
    """Also of lines without an entry, which give zeros and the sink as their log-sum-exp."""
    from torchweld.functional import block_sparse_attention

    q, k = _random(1, 2, 296, 64), _random(1, 2, 344, 64)
    layout, sinks = _layout(64, 296, 344), torch.tensor([40.0, 3.0]).half()
    assert _worst(q, k, layout, sinks=sinks) <= 8
    assert started == EVERY
    v = torch.full_like(k, torch.inf)
    y, lse = block_sparse_attention(q, k, v, layout, sinks=sinks, return_lse=True)
    assert torch.equal(y[:, 1, 128:192], torch.zeros(1, 64, 64, dtype=torch.float16))
    torch.testing.assert_close(lse[:, 1, 128:192], torch.full((1, 64), 3.0), rtol=1e-6, atol=0)


@pytest.mark.parametrize("started", [False, True], indirect=True)
@pytest.mark.parametrize("causal", [False, True])
def test_heads_that_share_keys(causal: bool, started: list[str]) -> None:
    layout = BlockLayout.sliding_window(320, 3, block=64)
    q, k = _random(1, 6, 320, 64), _random(1, 2, 320, 64)
    assert _worst(q, k, layout, causal=causal) <= 8
    assert started == EVERY


def test_a_wide_range(started: list[str]) -> None:
    """Queries a hundred times larger, and keys that are alike."""
    q, k = _random(2, 2, 296, 64), _random(2, 2, 344, 64)
    q[:, :, 5::64] *= 100
    k[:, :, 1::2] = k[:, :, ::2]
    assert _worst(q, k, _layout(64, 296, 344)) <= 8
    assert started == EVERY


def test_huge_scores(started: list[str]) -> None:
    """Products beyond 2^29 give each query the value of its best key.

    The scale was fused into the subtraction of a rounded maximum, as a GPU does and the imitation
    did not: rows were zero or NaN.
    """
    q, k = torch.zeros(1, 1, 128, 64), torch.zeros(1, 1, 128, 64)
    generator = torch.Generator().manual_seed(0)
    for x in (q, k):
        x[..., 0] = 4e4 * torch.rand(128, generator=generator) + 2e4
        x[..., 1] = torch.randn(128, generator=generator)
    v = torch.arange(128.0)[None, None, :, None].expand(1, 1, 128, 64)
    layout = BlockLayout.sliding_window(128, 2, block=64)
    given = (x.half().contiguous() for x in (q, k, v))
    inputs: Any = OP.inputs(*given, layout, scale=1.0)  # type: ignore[misc]
    steps: Any = OP.kernels["triton"].steps
    y, lse = steps.forward(*inputs)
    assert started == EVERY[:1]
    wide = [x.double() if torch.is_tensor(x) and x.is_floating_point() else x for x in inputs]
    exact_y, exact_lse = OP.reference(*wide)
    torch.testing.assert_close(lse.double(), exact_lse, **numerics.ROUNDED)
    best = (wide[0] @ wide[1].mT).sort(-1, descending=True).values
    is_clear = best[..., 0] - best[..., 1] > 1e3
    assert is_clear.sum() > 100
    assert torch.equal(y.double()[is_clear], exact_y[is_clear])


@pytest.mark.parametrize("width", [32, 64])
def test_huge_scores_keep_gradients_bounded(width: int, started: list[str]) -> None:
    """Warp-specialised or not: a base near 1e9 is rounded, but a weight is never above 1."""
    steps: Any = OP.kernels["triton"].steps
    q = 1e4 * _random(1, 1, 128, width)
    layout = BlockLayout.sliding_window(128, 2, block=64)
    inputs: Any = OP.inputs(q, q.flip(2), q, layout, scale=0.1)  # type: ignore[misc]
    y, lse = steps.forward(*inputs)
    grad = torch.ones_like(y)
    *_, of_values, _, _ = steps.backward(grad, None, *inputs, y, lse, *[True] * 3, False, False)
    assert started == (EVERY if width == 64 else [])
    assert of_values.max() <= 128


def test_lines_that_other_kernels_divide(
    started: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing adds up pieces of lines that were not divided."""
    from torchweld.triton_kernels.attention import tiles

    monkeypatch.setattr(tiles, "LEAST_TOKENS", 64)
    layout = BlockLayout.longformer(640, block=64)
    q = _random(1, 1, 640, 64)
    assert _worst(q, q, layout) <= 8
    assert started == EVERY


def test_what_other_kernels_serve(started: list[str]) -> None:
    """Heads that share keys and have layouts; strides that TMA does not have; conditions."""
    q, k, layout = _random(1, 2, 296, 64), _random(1, 1, 344, 64), _layout(64, 296, 344)
    assert _worst(q, k, layout) <= 8
    assert started == EVERY[:2]
    started.clear()
    q = _random(1, 1, 128, 68)[..., :64]
    layout = BlockLayout.dense(128, block=64)
    assert _worst(q, q, layout) <= 8
    q = _random(1, 1, 128, 64)
    assert _worst(q, q, layout, dropout_p=0.5, seed=1) <= 8
    assert _worst(q, q, layout, scale=-0.1) <= 8
    assert not started


def test_values_of_hidden_keys_do_not_matter(started: list[str]) -> None:
    """A line without an entry takes a block whose keys are hidden."""
    from torchweld.functional import block_sparse_attention

    q, k = _random(1, 2, 296, 64), _random(1, 2, 344, 64)
    v = torch.full_like(k, torch.inf)
    y: Any = block_sparse_attention(q, k, v, _layout(64, 296, 344))
    assert started == EVERY[:1]
    assert torch.equal(y[:, 1, 128:192], torch.zeros(1, 64, 64, dtype=torch.float16))


@pytest.mark.parametrize("width", [32, 64])
def test_alike_calls_repeat_a_plan(
    width: int, started: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Views of one tensor, warp-specialised or not; descriptors are of each call's own tensors."""
    layout = BlockLayout.sliding_window(128, 1, block=64)
    steps: Any = OP.kernels["triton"].steps
    monkeypatch.setattr(steps.forward, "_plans", {})
    monkeypatch.setattr(steps.backward, "_plans", {})
    for seed in range(3):
        generator = torch.Generator().manual_seed(seed)
        qkv = torch.randn(1, 128, 3, 2, width, generator=generator).half()
        inputs: Any = OP.inputs(*qkv.transpose(1, 3).unbind(2), layout)  # type: ignore[misc]
        y, lse = steps.forward(*inputs)
        oracle = exact(OP, inputs)
        torch.testing.assert_close(y, oracle["y"].half(), rtol=0, atol=4e-3)
        grad = torch.ones_like(y)
        found = steps.backward(grad, None, *inputs, y, lse, *[True] * 3, False, False)
        assert started == (EVERY if width == 64 else [])
        whole = torch.ops.torchweld.block_sparse_attention_backward.triton
        expected = whole(grad, None, *inputs, y, lse, *[True] * 3, False, False)
        torch.testing.assert_close(found, expected, **numerics.SAME)
        started.clear()
    for step in (steps.forward, steps.backward):
        ((_, plan),) = step._plans[2 * 128 * width]
        assert plan is not None
        assert any(each.described for each in plan.steps) == (width == 64)


# --- Planted faults of the protocol ---------------------------------------------------------------

KEYS = "    mbarrier.wait(k_ready.index(slot), phase)\n    s = "
PRODUCT = "    sums = warpgroup_mma_wait(0, deps=(sums,))\n"
FREE = "    mbarrier.arrive(v_free.index(last), count=1)\n"
FAULTS: dict[str, tuple[Any, ...]] = {
    "forward: no wait for keys": (KEYS, "    s = "),
    "forward: no wait for values": ("    mbarrier.wait(v_ready.index(last), last_phase)\n", "", 2),
    "forward: no wait for the last values": (
        "        mbarrier.wait(v_ready.index(slot), ((i - 1) // STAGES) & 1)\n",
        "",
    ),
    "forward: no wait for queries": (
        "        mbarrier.wait(q_ready.index(q_slot), (done // Q_STAGES) & 1)\n",
        "",
    ),
    "forward: values are freed before their product": (PRODUCT + FREE, FREE + PRODUCT),
    "forward: no wait for free keys": ("mbarrier.wait(k_free.index(slot), phase)", "pass"),
    "forward: queries are freed before the result is stored": (
        "        wait_for_stores(0)\n        mbarrier.arrive(q_free.index(q_slot), count=1)\n",
        "        mbarrier.arrive(q_free.index(q_slot), count=1)\n        wait_for_stores(0)\n",
    ),
    "forward: no fence": ("        fence_async_shared()\n", ""),
    "forward: too few bytes": (
        "mbarrier.expect(k_ready.index(slot), N * D * 2)",
        "mbarrier.expect(k_ready.index(slot), N * D)",
    ),
    "forward: bits are told only of later tiles": (
        "            if n >= whole:",
        "            if n > whole:",
    ),
    "forward: no arrival of bits": (
        "            mbarrier.arrive(k_ready.index(slot), count=1)\n",
        "",
    ),
    "forward: bits are not waited for": (
        "mbarrier.init(k_ready.index(at), count=2)",
        "mbarrier.init(k_ready.index(at), count=1)",
    ),
    "forward: bits of the other step": (
        "words = seen.index(slot)",
        "words = seen.index((slot + 1) % STAGES)",
        2,
    ),
    "forward: the sink is not in the sum": (
        'total = gl.where(highest == -float("inf"), 0.0, 1.0)',
        "total = gl.zeros([64], gl.float32, rows)",
    ),
    "walks: partial blocks without masks": ("is_partial = (n >= full)", "is_partial = (n > full)"),
    "walks: a mask of the wrong rows": ("query % BLOCK * WORDS", "query % 32 * WORDS"),
    "walks: the gap of partial blocks": ("partial - begin - full, total", "0, total"),
    "dq: the first tile is not checked": (
        "            if n >= whole or n == 0:",
        "            if n >= whole:",
    ),
    "dq: bits of the other step": (
        "words = seen.index(slot)",
        "words = seen.index((slot + 1) % STAGES)",
    ),
    "dq: keys are freed with their values": (
        "mbarrier.arrive(k_free.index((i - 1) % STAGES), count=1)",
        "mbarrier.arrive(k_free.index(i % STAGES), count=1)",
    ),
    "dq: no wait for scores": (
        "s = warpgroup_mma_wait(2, deps=(s,))",
        "s = warpgroup_mma_wait(3, deps=(s,))",
    ),
    "dq: no wait for keys": (KEYS, "    s = "),
    "dq: no wait for free queries": ("        mbarrier.wait(q_free, (done & 1) ^ 1)\n", ""),
    "dkv: no wait for queries": (
        "    mbarrier.wait(q_ready.index(slot), phase)\n    s = ",
        "    s = ",
    ),
    "dkv: no arrival of bases": (
        "                    mbarrier.arrive(q_ready.index(slot), count=1)\n",
        "",
    ),
    "dkv: bases are not waited for": (
        "mbarrier.init(q_ready.index(at), count=2)",
        "mbarrier.init(q_ready.index(at), count=1)",
    ),
    "dkv: queries are freed before their product": (
        "    of_keys, of_values = warpgroup_mma_wait(0, deps=(of_keys, of_values))\n"
        "    mbarrier.arrive(q_free.index(slot), count=1)\n",
        "    mbarrier.arrive(q_free.index(slot), count=1)\n"
        "    of_keys, of_values = warpgroup_mma_wait(0, deps=(of_keys, of_values))\n",
    ),
    "dkv: bits of the other step": (
        "words = seen.index(slot)",
        "words = seen.index((slot + 1) % STAGES)",
    ),
    "dkv: full blocks are told for partial ones": ("if n >= whole:", "if n > whole:"),
    "dkv: no wait for gradients of weights": (
        "grads = warpgroup_mma_wait(1, deps=(grads,))",
        "grads = warpgroup_mma_wait(2, deps=(grads,))",
    ),
    "dkv: no wait for keys": ("        mbarrier.wait(k_ready, done & 1)\n", ""),
    "dkv: no wait for free keys": ("        mbarrier.wait(k_free, (done & 1) ^ 1)\n", ""),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_found(
    fault: str, started: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    name = f"torchweld.triton_kernels.attention.specialised_{fault.partition(':')[0]}"
    text = Path(str(sys.modules[name].__file__)).read_text()
    module = imitated_gluon.plant(text, FAULTS[fault], tmp_path, name)
    monkeypatch.setitem(sys.modules, name, module)
    if fault.startswith("walks"):  # other modules have its functions by name
        for kernel in ("forward", "dq", "dkv"):
            other = vars(sys.modules[name.replace("walks", kernel)])
            for each in other.keys() & vars(module).keys():
                if getattr(other[each], "__module__", None) == name:
                    monkeypatch.setitem(other, each, vars(module)[each])
    q, layout = _random(1, 2, 320, 64), _long_and_short(64)

    def measure() -> float:
        sinks = torch.tensor([1.0, 3.0]).half()
        return max(_worst(q, q, layout), _worst(q, q, layout, causal=True, sinks=sinks))

    assert imitated_gluon.is_found(measure, 8)


def _long_and_short(block: int) -> BlockLayout:
    """Many short lines, and a long one of full and partial blocks."""
    kinds = 2 * torch.eye(5, dtype=torch.int)
    kinds[3] = torch.tensor([1, 2, 1, 2, 1])
    kinds[:, 3] = torch.tensor([1, 2, 2, 2, 1])
    kinds[1, 4] = kinds[4, 1] = kinds[2, 0] = 1
    bits = torch.rand(320, 320, generator=torch.Generator().manual_seed(2)) < 0.5

    def sees(batch: Any, head: Any, query: Any, key: Any) -> Any:
        kind = kinds[query // 64, key // 64]
        return (kind == 2) | (kind == 1) & bits[query, key]

    return BlockLayout.from_mask_fn(sees, 320, block=block)


def test_no_fault_is_found_where_none_is(started: list[str]) -> None:
    q, layout = _random(1, 2, 320, 64), _long_and_short(64)
    sinks = torch.tensor([1.0, 3.0]).half()
    assert _worst(q, q, layout) <= 8
    assert _worst(q, q, layout, causal=True, sinks=sinks) <= 8
    assert started == 2 * EVERY
