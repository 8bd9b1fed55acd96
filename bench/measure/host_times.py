"""What a call costs, relative to torch's composition: every public op, around thresholds.

    python -m torchweld.bench.measure.host_times [OP ...]

A ratio is our time over torch's, of the main thread with one thread of work, medians of turns in
one process whose large blocks stay resident. "first" is the first call of a size, after other
sizes; "forward" and "both" are warm, without gradients and with a backward pass.
"""

from __future__ import annotations

import functools
import math
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import functional as F  # noqa: N812

from torchweld import functional as fused
from torchweld.bench.measure.machine import settle
from torchweld.ops import quantize_8bit as eight_bit
from torchweld.ops import quantize_one_bit as one_bit
from torchweld.sparse import BlockLayout

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
P = 0.1
# Above this a ratio is marked.
MOST = 1.5
Call = Callable[..., Any]


@dataclass(frozen=True)
class Timed:
    """Ours and torch's composition, on tensors that `draw` makes of some rows and a width."""

    ours: Call
    theirs: Call
    draw: Callable[[int, int], Sequence[torch.Tensor]]
    sizes: Sequence[tuple[int, int]] = ((1, 64), (8, 128), (64, 256), (256, 1024))
    leaves: int = 1  # the first tensors, which get gradients; 0: none has any
    step: int = 1  # from a size to the next new one
    casts: bool = True  # whether it is called in every dtype


def _x(*shape: int) -> torch.Tensor:
    return torch.randn(*shape)


def _w(width: int) -> torch.Tensor:
    return torch.rand(width) + 0.5


def _rows(rows: int, width: int) -> list[torch.Tensor]:
    return [_x(rows, width)]


def _logits(rows: int, classes: int) -> list[torch.Tensor]:
    return [_x(rows, classes), torch.arange(rows) % classes]


def _layer_logits(rows: int, classes: int) -> list[torch.Tensor]:
    return [_x(rows, 64), _x(classes, 64) / 8, torch.arange(rows) % classes]


def _linear(rows: int, width: int) -> list[torch.Tensor]:
    return [_x(rows, width), _x(width, width) / width**0.5, _x(width)]


def _columns(rows: int, width: int) -> list[torch.Tensor]:
    return [_x(rows, width), _w(width), _x(width), _x(width), _w(width)]


def _of_norm(rows: int, width: int) -> list[torch.Tensor]:
    return [*_linear(rows, width), _w(width), _x(width), _x(width), _w(width)]


def _turned(tokens: int, width: int) -> list[torch.Tensor]:
    angles = torch.rand(1, tokens, width // 2)
    return [_x(1, 2, tokens, width), angles.cos(), angles.sin()]


def _rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    a, b = x.chunk(2, -1)
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)


def _rotate_both(q: torch.Tensor, k: torch.Tensor, *angles: torch.Tensor) -> Any:
    return _rotate(q, *angles), _rotate(k, *angles)


def _attended(tokens: int, width: int) -> list[torch.Tensor]:
    _window(tokens)  # not a part of the call
    return [_x(1, 2, tokens, width) for _ in range(3)]


@functools.lru_cache(8)
def _window(tokens: int) -> tuple[BlockLayout, torch.Tensor]:
    layout = BlockLayout.sliding_window(tokens, 3, block=16)
    return layout, layout.to_mask()


def _routed(tokens: int, width: int) -> list[torch.Tensor]:
    return [
        *(
            _x(tokens, width),
            _x(4, 2 * width, width) / width**0.5,
            _x(4, width, width) / width**0.5,
        ),
        *(
            torch.rand(tokens, 2),
            torch.stack([torch.arange(tokens) % 4, (torch.arange(tokens) + 1) % 4], 1),
        ),
    ]


def _run_experts(x: torch.Tensor, up: Any, down: Any, weights: Any, indices: Any) -> torch.Tensor:
    y = torch.zeros_like(x)
    for at in range(4):
        rows, place = torch.where(indices == at)
        gate, value = F.linear(x[rows], up[at]).chunk(2, -1)
        made = F.linear(F.silu(gate) * value, down[at]) * weights[rows, place, None]
        y = y.index_add(0, rows, made.to(x.dtype))
    return y


def _route(logits: torch.Tensor) -> Any:
    weights, indices = logits.float().softmax(-1).topk(2)
    return indices, weights


def _normalize(x: torch.Tensor, w: Any, b: Any, mean: Any, var: Any) -> torch.Tensor:
    return F.gelu(F.batch_norm(x, mean, var, w, b))


def _norm_in_training(x: torch.Tensor, w: Any, b: Any, mean: Any, var: Any) -> torch.Tensor:
    return F.gelu(F.batch_norm(x, mean, var, w, b, True))


def _attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return F.scaled_dot_product_attention(q, k, v, _window(q.shape[2])[1])


def _logprobs(x: torch.Tensor, m: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return F.linear(x, m).log_softmax(-1).gather(-1, target[:, None]).squeeze(-1)


def _modulated(tokens: int, width: int) -> list[torch.Tensor]:
    """A stream of two samples, its branch, and each sample's scale, shift and gate."""
    parts = [_x(2, 1, width) / 4 for _ in range(3)]
    return [_x(2, tokens, width), _x(2, tokens, width), *parts]


def _modulate(y: torch.Tensor, scale: torch.Tensor, shift: torch.Tensor) -> torch.Tensor:
    return y * (1 + scale) + shift


def _norm(x: torch.Tensor) -> torch.Tensor:
    return F.layer_norm(x, x.shape[-1:])


def _rms(x: torch.Tensor) -> torch.Tensor:
    return F.rms_norm(x, x.shape[-1:])


def _projected(tokens: int, width: int) -> list[torch.Tensor]:
    angles = torch.rand(1, tokens, width // 2)
    return [_x(1, tokens, 6 * width), angles.cos(), angles.sin()]


def _rotate_packed(qkv: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """By a copy: the composition has no form in place."""
    parts = qkv.unflatten(-1, (3, 2, -1)).unbind(-3)
    q, k = (_rotate(part.transpose(1, 2), cos, sin).transpose(1, 2) for part in parts[:2])
    return torch.stack((q, k, parts[2]), -3).flatten(-3)


def _codes(rows: int, width: int) -> Sequence[torch.Tensor]:
    return fused.quantize_8bit(_x(rows, width))


def _bits(rows: int, width: int) -> Sequence[torch.Tensor]:
    return fused.quantize_one_bit(_x(rows, width))[:2]


def _of_workers(rows: int, width: int) -> list[torch.Tensor]:
    made = [fused.quantize_one_bit(_x(rows, width)) for _ in range(4)]
    return [torch.stack([each[at] for each in made]) for at in (0, 1)]


def _quantize_one_bit(x: torch.Tensor) -> Any:
    error = torch.empty(x.shape)
    return (*one_bit.quantize_reference(x, None, error, one_bit.whole(x.numel())), error)


def _dequantize_one_bit(bits: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    size = 8 * len(bits)
    return one_bit.dequantize_reference(bits, scale, [size], one_bit.whole(size), torch.float32)


def _average_one_bit(bits: torch.Tensor, scale: torch.Tensor) -> Any:
    size = 8 * bits.shape[1]
    error = torch.empty(size)
    return (*one_bit.mean_reference(bits, scale, None, error, size, one_bit.whole(size)), error)


_THRESHOLD = ((63, 256), (64, 256), (128, 256), (512, 2000))
_CLASSES = ((8, 128), (63, 256), (64, 256), (256, 1000))
_OF_LAYERS = ((8, 128), (128, 128), (255, 1024), (260, 1024))
_OF_STREAMS = ((1, 64), (8, 128), (64, 256), (256, 1024))
_OF_NORMS = ((2, 64), (64, 256), (130, 256), (512, 1024))

PAIRS: dict[str, Timed] = {
    "layer_norm": Timed(
        lambda x, w, b: fused.layer_norm(x, x.shape[-1:], w, b),
        lambda x, w, b: F.layer_norm(x, x.shape[-1:], w, b),
        lambda r, c: [_x(r, c), _w(c), _x(c)],
        ((1, 64), (127, 1024), (129, 1024), (512, 1024)),
        3,
    ),
    "rms_norm": Timed(
        lambda x, w: fused.rms_norm(x, x.shape[-1:], w),
        lambda x, w: F.rms_norm(x, x.shape[-1:], w),
        lambda r, c: [_x(r, c), _w(c)],
        leaves=2,
    ),
    "softmax_dropout": Timed(
        lambda x: fused.softmax_dropout(x, scale=0.125, p=P),
        lambda x: F.dropout(torch.softmax(x * 0.125, -1), P),
        _rows,
    ),
    "bias_act": Timed(
        lambda x, b: fused.bias_act(x, b, activation="silu"),
        lambda x, b: F.silu(x + b),
        lambda r, c: [_x(r, c), _x(c)],
        leaves=2,
    ),
    "gated_act": Timed(
        lambda x, u: fused.gated_act(x, u, activation="gelu"),
        lambda x, u: F.gelu(x) * u,
        lambda r, c: [_x(r, c), _x(r, c)],
        leaves=2,
    ),
    "bias_dropout_add": Timed(
        lambda x, b, r: fused.bias_dropout_add(x, b, r, p=P),
        lambda x, b, r: r + F.dropout(x + b, P),
        lambda r, c: [_x(r, c), _x(c), _x(r, c)],
        leaves=3,
    ),
    "bias_dropout_add, p 0": Timed(
        lambda x, b, r: fused.bias_dropout_add(x, b, r),
        lambda x, b, r: r + (x + b),
        lambda r, c: [_x(r, c), _x(c), _x(r, c)],
        leaves=3,
    ),
    "dropout_add_layer_norm": Timed(
        lambda x, r, w, b: fused.dropout_add_layer_norm(x, r, w, b, p=P),
        lambda x, r, w, b: F.layer_norm(F.dropout(x, P) + r, w.shape, w, b),
        lambda r, c: [_x(r, c), _x(r, c), _w(c), _x(c)],
        leaves=4,
    ),
    "dropout_add_rms_norm": Timed(
        lambda x, r, w: fused.dropout_add_rms_norm(x, r, w, p=P),
        lambda x, r, w: F.rms_norm(F.dropout(x, P) + r, w.shape, w),
        lambda r, c: [_x(r, c), _x(r, c), _w(c)],
        leaves=3,
    ),
    "rotary_embedding": Timed(
        fused.rotary_embedding, _rotate, _turned, ((1, 64), (16, 64), (128, 64), (512, 128))
    ),
    "rotary_embedding_qk": Timed(
        lambda x, cos, sin: fused.rotary_embedding_qk(x, x, cos, sin),
        lambda x, cos, sin: _rotate_both(x, x, cos, sin),
        _turned,
        ((1, 64), (16, 64), (128, 64), (512, 128)),
    ),
    "block_sparse_attention": Timed(
        lambda q, k, v: fused.block_sparse_attention(q, k, v, _window(q.shape[2])[0]),
        _attend,
        _attended,
        ((16, 64), (64, 64), (256, 64), (1024, 64)),
        3,
    ),
    "normalize_act": Timed(
        lambda x, w, b, mean, var: fused.normalize_act(x, mean, var, w, b),
        _normalize,
        _columns,
        _OF_NORMS,
        3,
    ),
    "batch_norm_act": Timed(
        lambda x, w, b, mean, var: fused.batch_norm_act(x, mean, var, w, b),
        _normalize,
        _columns,
        _OF_NORMS,
        3,
    ),
    "batch_norm_act, training": Timed(
        lambda x, w, b, mean, var: fused.batch_norm_act(x, mean, var, w, b, True),
        _norm_in_training,
        _columns,
        _OF_NORMS,
        3,
    ),
    "linear_batch_norm_act": Timed(
        lambda x, m, a, w, b, mean, var: fused.linear_batch_norm_act(x, m, a, mean, var, w, b),
        lambda x, m, a, *rest: _normalize(F.linear(x, m, a), *rest),
        _of_norm,
        ((8, 128), (255, 256), (260, 256), (512, 512)),
        5,
    ),
    "linear_batch_norm_act, training": Timed(
        lambda x, m, a, w, b, mean, var: fused.linear_batch_norm_act(
            x, m, a, mean, var, w, b, True
        ),
        lambda x, m, a, *rest: _norm_in_training(F.linear(x, m, a), *rest),
        _of_norm,
        ((8, 128), (255, 256), (260, 256), (512, 512)),
        5,
    ),
    "linear_act": Timed(
        lambda x, m, b: fused.linear_act(x, m, b, activation="silu"),
        lambda x, m, b: F.silu(F.linear(x, m, b)),
        _linear,
        leaves=3,
        sizes=((1, 64), (8, 128), (64, 256), (256, 512)),
    ),
    "linear_gelu": Timed(
        fused.linear_gelu,
        lambda x, m, b: F.gelu(F.linear(x, m, b)),
        _linear,
        leaves=3,
        sizes=((1, 64), (8, 128), (64, 256), (256, 512)),
    ),
    "mlp": Timed(
        lambda x, m, b: fused.mlp(x, m, b, m, b),
        lambda x, m, b: F.linear(F.gelu(F.linear(x, m, b)), m, b),
        _linear,
        leaves=3,
        sizes=((1, 64), (255, 256), (260, 256), (512, 512)),
    ),
    "gated_mlp": Timed(
        lambda x, m, _: fused.gated_mlp(x, m, m, m),
        lambda x, m, _: F.linear(F.silu(F.linear(x, m)) * F.linear(x, m), m),
        _linear,
        leaves=2,
        sizes=((1, 64), (255, 256), (260, 256), (512, 512)),
    ),
    "experts_mlp": Timed(
        lambda x, up, down, w, i: fused.experts_mlp(x, up, down, i, w),
        _run_experts,
        _routed,
        ((1, 64), (16, 64), (64, 128), (256, 256)),
        4,
    ),
    "route": Timed(
        lambda x: fused.route(x, 2)[:2],
        _route,
        _rows,
        ((1, 8), (16, 8), (64, 64), (1024, 64)),
    ),
    "cross_entropy": Timed(
        fused.cross_entropy, F.cross_entropy, _logits, (*_CLASSES[:3], _THRESHOLD[-1])
    ),
    "cross_entropy, z-loss": Timed(
        lambda x, t: fused.cross_entropy(x, t, z_loss=1e-4),
        lambda x, t: F.cross_entropy(x, t) + 1e-4 * x.logsumexp(-1).square().mean(),
        _logits,
        _CLASSES,
    ),
    "logprobs": Timed(
        fused.logprobs,
        lambda x, t: x.log_softmax(-1).gather(-1, t[:, None]).squeeze(-1),
        _logits,
        _CLASSES,
    ),
    "linear_cross_entropy": Timed(
        fused.linear_cross_entropy,
        lambda x, m, t: F.cross_entropy(F.linear(x, m), t),
        _layer_logits,
        _OF_LAYERS,
        2,
    ),
    "linear_logprobs": Timed(fused.linear_logprobs, _logprobs, _layer_logits, _OF_LAYERS, 2),
    "adaptive_layer_norm": Timed(
        lambda x, _, scale, shift, __: fused.adaptive_layer_norm(x, scale, shift),
        lambda x, _, scale, shift, __: _modulate(_norm(x), scale, shift),
        _modulated,
        _OF_STREAMS,
        4,
    ),
    "adaptive_rms_norm": Timed(
        lambda x, _, scale, shift, __: fused.adaptive_rms_norm(x, scale, shift),
        lambda x, _, scale, shift, __: _modulate(_rms(x), scale, shift),
        _modulated,
        _OF_STREAMS,
        4,
    ),
    "gated_residual": Timed(
        lambda x, y, _, __, gate: fused.gated_residual(x, gate, y),
        lambda x, y, _, __, gate: x + gate * y,
        _modulated,
        _OF_STREAMS,
        5,
    ),
    "gated_residual_layer_norm": Timed(
        lambda x, y, scale, shift, gate: fused.gated_residual_layer_norm(x, gate, y, scale, shift),
        lambda x, y, scale, shift, gate: _modulate(_norm(x + gate * y), scale, shift),
        _modulated,
        _OF_STREAMS,
        5,
    ),
    "gated_residual_rms_norm": Timed(
        lambda x, y, scale, shift, gate: fused.gated_residual_rms_norm(x, gate, y, scale, shift),
        lambda x, y, scale, shift, gate: _modulate(_rms(x + gate * y), scale, shift),
        _modulated,
        _OF_STREAMS,
        5,
    ),
    "rotary_embedding_packed_": Timed(
        lambda qkv, cos, sin: fused.rotary_embedding_packed_(qkv, cos, sin, heads=2),
        _rotate_packed,
        _projected,
        ((1, 64), (16, 64), (128, 64), (512, 128)),
        0,
    ),
    # Beside their references in plain torch.
    "quantize_8bit": Timed(
        fused.quantize_8bit, lambda x: eight_bit.quantize_reference(x, True), _rows, leaves=0
    ),
    "dequantize_8bit": Timed(
        fused.dequantize_8bit,
        lambda codes, absmax: eight_bit.dequantize_reference(codes, absmax, True, torch.float32),
        _codes,
        leaves=0,
        casts=False,
    ),
    "quantize_one_bit": Timed(fused.quantize_one_bit, _quantize_one_bit, _rows, leaves=0),
    "dequantize_one_bit": Timed(
        lambda bits, scale: fused.dequantize_one_bit(bits, scale, 8 * len(bits)),
        _dequantize_one_bit,
        _bits,
        leaves=0,
        casts=False,
    ),
    "average_one_bit": Timed(
        lambda bits, scale: fused.average_one_bit(bits, scale, size=8 * bits.shape[1]),
        _average_one_bit,
        _of_workers,
        leaves=0,
        casts=False,
    ),
}


def _cast(pair: Timed, dtype: torch.dtype, rows: int, width: int) -> list[torch.Tensor]:
    made = pair.draw(rows, width)
    made = [t.to(dtype) if t.is_floating_point() else t for t in made] if pair.casts else made
    return [t.requires_grad_() if at < pair.leaves else t for at, t in enumerate(made)]


def _both(call: Call, leaves: int) -> Call:
    def run(*given: torch.Tensor) -> None:
        results = call(*given)
        results = results if isinstance(results, tuple) else (results,)
        results = [y for y in results if y.requires_grad]
        grads = [torch.ones_like(y) for y in results]
        torch.autograd.grad(results, given[:leaves], grads, allow_unused=True)

    return run


def _time(call: Call, given: Sequence[Any], calls: int = 1) -> float:
    start = time.thread_time_ns()
    for _ in range(calls):
        call(*given)
    return (time.thread_time_ns() - start) / calls / 1e3


def _compare(ours: Call, theirs: Call, given: Sequence[Any], seconds: float) -> tuple[float, float]:
    """The medians of warm calls, in us."""
    for call in (ours, theirs):
        for _ in range(3):
            call(*given)
    calls = max(1, int(500 / max(_time(theirs, given, 3), 1)))
    taken: tuple[list[float], list[float]] = ([], [])
    end = time.perf_counter() + seconds
    while time.perf_counter() < end or len(taken[0]) < 5:
        for times, call in zip(taken, (ours, theirs), strict=True):
            times.append(_time(call, given, calls))
    return statistics.median(taken[0]), statistics.median(taken[1])


def _compare_first(pair: Timed, dtype: torch.dtype, rows: int, width: int) -> tuple[float, float]:
    """The medians of first calls of sizes from this one on, after three others."""
    taken: tuple[list[float], list[float]] = ([], [])
    for turn in range(13):
        given = _cast(pair, dtype, rows + 2 + turn * pair.step, width)
        calls = list(zip(taken, (pair.ours, pair.theirs), strict=True))
        for times, call in calls[:: -1 if turn % 2 else 1]:  # who is second finds warmer caches
            call_time = _time(call, given)
            if turn > 2:
                times.append(call_time)
    return statistics.median(taken[0]), statistics.median(taken[1])


def measure(names: Sequence[str], seconds: float) -> Iterator[tuple[str, str, str, list[str]]]:
    """The ratios of each op, size and dtype as text; some ops have no third one."""
    for name in names:
        pair = PAIRS[name]
        for rows, width in pair.sizes:
            for dtype in DTYPES if pair.casts else DTYPES[:1]:
                given = _cast(pair, dtype, rows, width)
                with torch.no_grad():
                    pairs = [_compare_first(pair, dtype, rows, width)]
                    pairs.append(_compare(pair.ours, pair.theirs, given, seconds))
                both = [_both(call, pair.leaves) for call in (pair.ours, pair.theirs)]
                pairs += [_compare(both[0], both[1], given, seconds)] if pair.leaves else []
                texts = [_show(*times) for times in pairs] + [""] * (not pair.leaves)
                yield name, f"{rows} x {width}", str(dtype).removeprefix("torch."), texts


def _show(ours: float, theirs: float) -> str:
    ratio = ours / theirs if theirs else math.nan
    text = f"{ratio:.2f}"
    return f"**{text}** ({ours:.0f} for {theirs:.0f} us)" if ratio > MOST else text


def main() -> None:
    """Print the table."""
    settle(default_allocator=False)  # in one call of three a step was mapping its memory again
    torch.set_num_threads(1)
    torch.manual_seed(0)
    names = [name for name in PAIRS if not sys.argv[1:] or name in sys.argv[1:]]
    print("| op | size | dtype | first | forward | both |\n|---|---|---|--:|--:|--:|")
    for name, size, dtype, texts in measure(names, 0.02):
        print(f"| `{name}` | {size} | {dtype} | {' | '.join(texts)} |", flush=True)


if __name__ == "__main__":
    main()
