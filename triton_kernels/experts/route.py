"""route in Triton: a router's choice of experts, its weights and its side losses, and the gradient.

A forward pass reads T E logits and writes T K indices of 8 bytes and weights of 4: at 8192 tokens,
256 experts in float32 and K = 8, 8.4 and 0.8 MB, 2.2 us at an H200's 4.2 TB/s; three launches take
longer. The choice is K maxima over a row in registers. A program walks a chunk of rows and keeps
the sums for the losses, which are added in a fixed order.
"""

# ruff: noqa: N803 - constexprs are written in capitals, as everywhere in Triton.

from __future__ import annotations

import itertools
from collections.abc import Iterator

import torch
import triton
import triton.language as tl

from ..chunks import add_chunks_launches, chunk_range
from ..launch import Launch, launch, processors, replayed, run
from ..tensors import contiguous, empty_like

# Keeps a sum of zeros from dividing by zero; too small to change another sum's bits.
_TINY = tl.constexpr(1e-20)
_LOWEST = tl.constexpr(torch.finfo(torch.float32).min)


@triton.jit
def _load_logits(logits_ptr, row, column, experts, inside):
    at = logits_ptr + row.to(tl.int64)[:, None] * experts + column[None, :]
    return tl.load(at, mask=inside, other=float("-inf")).to(tl.float32)


@triton.jit
def _find_scores(logits, column, experts, SOFTMAX: tl.constexpr):
    """The scores of the experts, their softmax, and the logits' log-sum-exp."""
    most = tl.max(logits, 1)
    # A row past the last one has no finite number.
    parts = tl.exp(logits - tl.where(most == float("-inf"), 0.0, most)[:, None])
    total = tl.sum(parts, 1)
    softmax = parts / total[:, None]
    own = softmax
    if not SOFTMAX:
        own = tl.where((column < experts)[None, :], 1 / (1 + tl.exp(-logits)), 0.0)
    return own, softmax, most + tl.log(total)


@triton.jit
def _order(choice):
    """Numbers of which none is NaN or -inf, in the same order, and NaN as infinite.

    A maximum's place would be any column at NaN, past the last too. -inf is left to what was taken.
    """
    return tl.where(choice == choice, tl.maximum(choice, _LOWEST), float("inf"))


@triton.jit
def _mask_groups(
    choice, GROUPS: tl.constexpr, TOP_GROUPS: tl.constexpr, BEST_OF_GROUP: tl.constexpr
):
    """Make all experts outside the best groups the last choice."""
    rows: tl.constexpr = choice.shape[0]
    size: tl.constexpr = choice.shape[1] // GROUPS
    each = choice.reshape(rows, GROUPS, size)
    member = tl.arange(0, size)[None, None, :]
    rest = each
    counts = tl.zeros([rows, GROUPS], tl.float32)
    for _ in tl.static_range(BEST_OF_GROUP):
        best = tl.argmax(rest, 2)
        counts += tl.max(rest, 2)
        rest = tl.where(member == best[:, :, None], float("-inf"), rest)
    counts = _order(counts)  # of a sum of both infinities
    group = tl.arange(0, GROUPS)[None, :]
    is_best = tl.zeros([rows, GROUPS], tl.int32)
    for _ in tl.static_range(TOP_GROUPS):
        best = group == tl.argmax(counts, 1)[:, None]
        is_best = tl.where(best, 1, is_best)
        counts = tl.where(best, float("-inf"), counts)
    each = tl.where(is_best[:, :, None] != 0, each, _LOWEST)
    return each.reshape(rows, GROUPS * size)


@triton.jit(do_not_specialize=["rows", "chunks"])
def _route(
    logits_ptr,
    bias_ptr,
    mask_ptr,
    indices_ptr,
    weights_ptr,
    partials_ptr,
    rows,
    chunks,
    scale,
    experts,
    SOFTMAX: tl.constexpr,
    RENORMALIZE: tl.constexpr,
    TOP: tl.constexpr,
    GROUPS: tl.constexpr,
    TOP_GROUPS: tl.constexpr,
    BEST_OF_GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    EXPERTS: tl.constexpr,
    TOPS: tl.constexpr,
):
    column, k = tl.arange(0, EXPERTS), tl.arange(0, TOPS)[None, :]
    known = (column < experts)[None, :]
    shares = tl.zeros([ROWS, EXPERTS], tl.float32)
    chosen = tl.zeros([ROWS, EXPERTS], tl.float32)
    squares = tl.zeros([ROWS], tl.float32)
    tokens = tl.zeros([ROWS], tl.float32)
    first, last = chunk_range(tl.program_id(0), rows, chunks, ROWS)
    for tile in range(first, last):
        row = tile * ROWS + tl.arange(0, ROWS)
        inside = row < rows
        logits = _load_logits(logits_ptr, row, column, experts, inside[:, None] & known)
        own, _, lse = _find_scores(logits, column, experts, SOFTMAX)
        choice = own
        if bias_ptr is not None:
            choice += tl.load(bias_ptr + column, mask=column < experts, other=0).to(tl.float32)
        choice = tl.where(known, _order(choice), float("-inf"))
        if GROUPS > 1:
            choice = _mask_groups(choice, GROUPS, TOP_GROUPS, BEST_OF_GROUP)
        counted = inside.to(tl.float32)
        if mask_ptr is not None:
            counted = tl.load(mask_ptr + row, mask=inside, other=0).to(tl.float32)
        indices = tl.zeros([ROWS, TOPS], tl.int64)
        weights = tl.zeros([ROWS, TOPS], tl.float32)
        for at in tl.range(0, TOP, loop_unroll_factor=1):  # unrolled it takes registers
            best = tl.argmax(choice, 1)
            is_best = column[None, :] == best[:, None]
            weight = tl.sum(tl.where(is_best, own, 0.0), 1)
            indices = tl.where(k == at, best.to(tl.int64)[:, None], indices)
            weights = tl.where(k == at, weight[:, None], weights)
            choice = tl.where(is_best, float("-inf"), choice)
            chosen += tl.where(is_best, counted[:, None], 0.0)
        if RENORMALIZE:
            weights /= (tl.sum(weights, 1) + _TINY)[:, None]
        place = row.to(tl.int64)[:, None] * TOP + k
        stored = inside[:, None] & (k < TOP)
        tl.store(indices_ptr + place, indices, mask=stored)
        tl.store(weights_ptr + place, weights * scale, mask=stored)
        if not SOFTMAX:
            own /= (tl.sum(own, 1) + _TINY)[:, None]
        counts = (counted > 0) & inside
        shares += tl.where(counts[:, None], own, 0.0)
        squares += tl.where(counts, lse * lse, 0.0)
        tokens += tl.where(counts, 1.0, 0.0)
    # A chunk's sums: of shares and of choices, an expert each; of squares; and the tokens.
    partials_ptr += tl.program_id(0) * (2 * experts + 2)
    tl.store(partials_ptr + column, tl.sum(shares, 0), mask=column < experts)
    tl.store(partials_ptr + experts + column, tl.sum(chosen, 0), mask=column < experts)
    tl.store(partials_ptr + 2 * experts, tl.sum(squares, 0))
    tl.store(partials_ptr + 2 * experts + 1, tl.sum(tokens, 0))


@triton.jit
def _find_losses(
    sums_ptr, balance_ptr, z_ptr, counts_ptr, experts, TOP: tl.constexpr, EXPERTS: tl.constexpr
):
    """Both losses; and each expert's share of the choices, and after them the number of tokens."""
    column = tl.arange(0, EXPERTS)
    known = column < experts
    means = tl.load(sums_ptr + column, mask=known, other=0)
    chosen = tl.load(sums_ptr + experts + column, mask=known, other=0)
    count = tl.maximum(tl.load(sums_ptr + 2 * experts + 1), 1.0)
    shares = chosen / (count * TOP)
    tl.store(counts_ptr + column, shares, mask=known)
    tl.store(counts_ptr + experts, count)
    tl.store(balance_ptr, experts * tl.sum(shares * means / count, 0))
    tl.store(z_ptr, tl.load(sums_ptr + 2 * experts) / count)


@triton.jit(do_not_specialize=["rows"])
def _route_gradient(
    logits_ptr,
    mask_ptr,
    indices_ptr,
    counts_ptr,
    grad_weights_ptr,
    grad_balance_ptr,
    grad_z_ptr,
    grad_ptr,
    rows,
    scale,
    experts,
    SOFTMAX: tl.constexpr,
    RENORMALIZE: tl.constexpr,
    TOP: tl.constexpr,
    ROWS: tl.constexpr,
    EXPERTS: tl.constexpr,
):
    column = tl.arange(0, EXPERTS)
    known = (column < experts)[None, :]
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    inside = row < rows
    logits = _load_logits(logits_ptr, row, column, experts, inside[:, None] & known)
    own, softmax, lse = _find_scores(logits, column, experts, SOFTMAX)
    is_chosen = tl.zeros([ROWS, EXPERTS], tl.int32)
    grads = tl.zeros([ROWS, EXPERTS], tl.float32)
    place = row.to(tl.int64) * TOP
    for at in tl.range(0, TOP, loop_unroll_factor=1):
        index = tl.load(indices_ptr + place + at, mask=inside, other=0).to(tl.int32)
        grad = tl.load(grad_weights_ptr + place + at, mask=inside, other=0) * scale
        is_it = column[None, :] == index[:, None]
        is_chosen = tl.where(is_it, 1, is_chosen)
        grads = tl.where(is_it, grad[:, None], grads)
    if RENORMALIZE:
        inverse = 1 / (tl.sum(tl.where(is_chosen != 0, own, 0.0), 1) + _TINY)
        mean = tl.sum(grads * own, 1) * inverse
        grads = tl.where(is_chosen != 0, (grads - mean[:, None]) * inverse[:, None], 0.0)
    counted = inside.to(tl.float32)
    if mask_ptr is not None:
        counted = tl.load(mask_ptr + row, mask=inside, other=0).to(tl.float32)
    counted /= tl.load(counts_ptr + experts)
    share = tl.load(counts_ptr + column, mask=column < experts, other=0) * experts
    balance = counted[:, None] * (share * tl.load(grad_balance_ptr))[None, :]
    if SOFTMAX:
        grads += balance
        grads = own * (grads - tl.sum(grads * own, 1)[:, None])
    else:
        inverse = 1 / (tl.sum(own, 1) + _TINY)
        mean = tl.sum(balance * own, 1) * inverse
        grads += (balance - mean[:, None]) * inverse[:, None]
        grads *= own * (1 - own)
    grads += softmax * (2 * lse * counted * tl.load(grad_z_ptr))[:, None]
    at = grad_ptr + row.to(tl.int64)[:, None] * experts + column[None, :]
    tl.store(at, grads.to(grad_ptr.dtype.element_ty), mask=inside[:, None] & known)


def _tile(experts: int) -> dict[str, int]:
    """Rows of about 512 scores, so that no program needs more than 128 registers a thread."""
    columns = triton.next_power_of_2(experts)
    return {"ROWS": max(1, 512 // columns), "EXPERTS": columns}


def _forward_launches(
    logits: torch.Tensor,
    bias: torch.Tensor | None,
    mask: torch.Tensor | None,
    results: tuple[torch.Tensor, ...],
    how: tuple[str, int, int, int, bool, float],
) -> Iterator[Launch]:
    indices, weights, *sums = results
    scores, groups, top_groups, best_of_group, renormalize, scale = how
    (rows, experts), top, tile = logits.shape, indices.shape[1], _tile(logits.shape[1])
    chunks = max(1, min(8 * processors(logits.device), triton.cdiv(rows, tile["ROWS"])))
    partials = weights.new_empty(chunks, 2 * experts + 2)
    # Without a limit ptxas spills at 96 registers, or takes more; five programs fit a processor.
    limit = {} if experts % 16 == 0 else {"maxnreg": 96}
    yield launch(
        _route,
        chunks,
        *(logits, bias, mask, indices, weights, partials, rows, chunks, float(scale), experts),
        SOFTMAX=scores == "softmax",
        RENORMALIZE=renormalize,
        TOP=top,
        GROUPS=groups,
        TOP_GROUPS=top_groups,
        BEST_OF_GROUP=min(best_of_group, experts // groups),
        TOPS=triton.next_power_of_2(top),
        num_warps=4,
        **tile,
        **limit,
    )
    total = weights.new_empty(2 * experts + 2)
    yield from add_chunks_launches((total, None), (partials, None), chunks, len(total))
    yield launch(
        _find_losses,
        1,
        *(total, *sums, experts),
        TOP=top,
        EXPERTS=tile["EXPERTS"],
        num_warps=4,
    )


def _gradient_launch(
    logits: torch.Tensor,
    mask: torch.Tensor | None,
    saved: tuple[torch.Tensor, ...],
    grads: tuple[torch.Tensor, ...],
    grad: torch.Tensor,
    how: tuple[str, bool, float],
) -> Launch:
    scores, renormalize, scale = how
    (rows, experts), tile = logits.shape, _tile(logits.shape[1])
    return launch(
        _route_gradient,
        triton.cdiv(rows, tile["ROWS"]),
        *(logits, mask, *saved, *grads, grad, rows, float(scale), experts),
        SOFTMAX=scores == "softmax",
        RENORMALIZE=renormalize,
        TOP=saved[0].shape[1],
        num_warps=4,
        **tile,
    )


# --- Called by dispatch, with the signatures of the ops' schemas ---


@replayed
def route(
    logits: torch.Tensor,
    bias: torch.Tensor | None,
    mask: torch.Tensor | None,
    k: int,
    scores: str,
    groups: int,
    top_groups: int,
    best_of_group: int,
    renormalize: bool,
    scale: float,
) -> tuple[torch.Tensor, ...]:
    """Indices, weights, both losses; the experts' shares of choices and the number of tokens."""
    rows, experts = logits.shape
    weights = logits.new_empty((rows, k), dtype=torch.float32)
    indices = weights.new_empty((rows, k), dtype=torch.int64)
    results = (indices, weights, *[weights.new_empty(n) for n in ((), (), (experts + 1,))])
    how = (scores, groups, top_groups, best_of_group, renormalize, scale)
    run(
        logits,
        *_forward_launches(logits.contiguous(), contiguous(bias), contiguous(mask), results, how),
    )
    return results


@replayed
def route_backward(
    grad_weights: torch.Tensor,
    grad_balance: torch.Tensor,
    grad_z: torch.Tensor,
    logits: torch.Tensor,
    bias: torch.Tensor | None,
    mask: torch.Tensor | None,
    indices: torch.Tensor,
    counts: torch.Tensor,
    k: int,
    scores: str,
    groups: int,
    top_groups: int,
    best_of_group: int,
    renormalize: bool,
    scale: float,
) -> torch.Tensor:
    """The gradient of the logits; the choice itself is given."""
    grad = empty_like(logits)
    grads, how = (grad_weights.contiguous(), grad_balance, grad_z), (scores, renormalize, scale)
    saved = (indices.contiguous(), counts)
    run(logits, _gradient_launch(logits.contiguous(), contiguous(mask), saved, grads, grad, how))
    return grad


def aot_cases() -> Iterator[tuple[str, Launch]]:
    """Named launches, whose kernels the ahead-of-time tests compile."""
    dtypes = (torch.float32, torch.bfloat16)
    for dtype, experts, scores in itertools.product(dtypes, (256, 60), ("softmax", "sigmoid")):
        groups = 8 if experts == 256 and scores == "sigmoid" else 1
        logits = torch.empty(8192, experts, dtype=dtype, device="meta")
        wide = torch.empty(8192, experts, dtype=torch.float32, device="meta")
        mask = logits[:, 0].bool()
        indices, weights = wide[:, :8].long(), wide[:, :8].contiguous()
        name = f"{scores} {experts} {dtype}".replace("torch.", "")
        results = (indices, weights, wide[0, 0], wide[0, 0], wide[0])
        how = (scores, groups, 4, 2, True, 1.0)
        for step in _forward_launches(logits, wide[0], mask, results, how):
            yield name, step
        saved, grads = (indices, wide[0]), (weights, wide[0, 0], wide[0, 0])
        yield name, _gradient_launch(logits, mask, saved, grads, logits, (scores, True, 1.0))
