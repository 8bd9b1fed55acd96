"""Contract 4, below Python: bindings refuse what would let a kernel read or write elsewhere."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

X, W, SEED = torch.ones(4, 8), torch.ones(8), torch.tensor([7])
CODES, ABSMAX = torch.zeros(2, 300, dtype=torch.uint8), torch.ones(2, 2)
FLAT, BITS, SCALE = torch.ones(20), torch.zeros(3, dtype=torch.uint8), torch.ones(1)
F32, F64 = torch.float32, torch.float64
ROWS, OUTSIDE = torch.ones(4), {4: 0.5, 6: SEED, 7: [4, 9], 8: [0, 0]}
# Arguments that the bindings accept.
BINDINGS: dict[str, tuple[Any, ...]] = {
    "layer_norm": (X, [8], None, None, 1e-5),
    "layer_norm_backward": (X, X, [8], W, W, 1e-5, ROWS, ROWS, True, True),
    "rms_norm": (X, [8], None, 1e-5),
    "rms_norm_backward": (X, X, [8], W, 1e-5, ROWS, True),
    "bias_act": (X, W, "gelu", "none"),
    "bias_act_backward": (X, X, W, "gelu", "none", True),
    "gated_act": (X, X, "silu", "none"),
    "gated_act_backward": (X, X, X, "silu", "none"),
    "normalize_act": (X, W, W, None, None, 1e-5, "gelu", "none"),
    "normalize_act_backward": (X, X, W, W, W, W, 1e-5, "gelu", "none", True, True, True),
    "batch_norm_act_grad_x": (X, X, W, W, W, W, W, W, 1e-5, "gelu", "none"),
    "column_statistics": (X,),
    "softmax_dropout": (X, None, 1.0, False, 0.0, None, [], []),
    "softmax_dropout_backward": (X, X, None, None, None, 1.0, False, 0.0, None, [], []),
    "bias_dropout_add": (X, W, X, 0.0, None, [], []),
    "bias_dropout_add_backward": (X, W, 0.0, None, [], [], F32, True, True),
    "dropout_add_rms_norm": (X, X, [8], W, 0.0, 1e-5, None, [], [], False),
    "dropout_add_rms_norm_backward": (
        *(X, None, X, [8], W, 0.0, 1e-5, None, [], [], ROWS, F32),
        *(True, True, True),
    ),
    "adaptive_layer_norm": (X, X, X, 1e-5),
    "adaptive_layer_norm_backward": (X, X, X, X, 1e-5, ROWS, ROWS, True, True),
    "gated_residual": (X, X, X),
    "gated_residual_backward": (X, X, X, True, True),
    "gated_residual_rms_norm": (X, X, X, X, X, 1e-5),
    "gated_residual_rms_norm_backward": (
        *(X, X, X, X, X, X, X, 1e-5, ROWS),
        *(True, True, True, True, True),
    ),
    "quantize_8bit": (ABSMAX, True),
    "dequantize_8bit": (CODES, ABSMAX, True, F32),
    "quantize_one_bit": (FLAT, None, FLAT.clone(), 24),
    "average_one_bit": (BITS.view(1, 3), SCALE.view(1, 1), None, FLAT.clone(), 20, 24),
    "dequantize_one_bit": (BITS, SCALE, [20], 24, F32),
}
# What the cases of some backends change, by place.
UNBOUND: dict[str, list[dict[int, Any]]] = {
    "layer_norm.cpu": [
        *({1: [7]}, {1: []}, {2: W[:7]}, {2: W.double()}, {4: -1.0}, {0: X.int()}),
    ],
    "layer_norm.triton": [{1: [7]}, {2: W[:7]}, {0: X.half(), 2: W, 3: W.half()}, {4: -1.0}],
    "layer_norm_backward.cpu": [{6: torch.ones(5)}],
    "rms_norm.cpu": [{1: [4, 8, 1]}],
    "rms_norm_backward.cpu": [{5: ROWS[:3]}, {0: X.double()}, {0: X[:, :7]}],
    "rms_norm_backward.triton": [{5: ROWS[:3]}, {0: X[:3]}],
    "bias_act.cpu": [{1: W[:7]}, {3: "sinh"}, {2: "relu", 3: "tanh"}, {0: X[0, 0], 1: None}],
    "bias_act.triton": [{1: W[:7]}],
    "bias_act_backward.cpu,triton": [{0: X[:3]}],
    "gated_act.cpu,triton": [{1: X[:, :7]}],
    "gated_act_backward.cpu,triton": [{2: X.half()}],
    "normalize_act.cpu": [{1: W[:7]}, {3: W[:7]}, {2: W.half()}, {5: -1.0}],
    "normalize_act.triton": [{1: W[:7]}],
    "normalize_act_backward.cpu": [{0: X[:3]}],
    "batch_norm_act_grad_x.cpu,triton": [{6: W[:7]}],
    "column_statistics.cpu": [{0: X[0, 0]}, {0: X.int()}],
    "softmax_dropout.cpu": [
        *({1: W[:7]}, {1: W.half()}, {4: 0.5}, {4: 1.5, 5: SEED}, {4: 0.5, 5: SEED.int()}),
        *({4: 0.5, 5: SEED, 6: [4, 8]}, {4: 0.5, 5: SEED, 6: [4, 9], 7: [0, 0]}),
        {3: True, 6: [3, 8], 7: [0, 0]},
    ],
    "softmax_dropout.triton": [{4: 0.5, 5: SEED.int()}],
    "softmax_dropout_backward.cpu": [
        *({1: None}, {1: X[:3]}, {1: None, 2: X, 7: 0.5, 8: SEED}),
        {1: None, 2: X, 3: W, 7: 0.5, 8: SEED},
    ],
    "bias_dropout_add.cpu": [
        *({1: W[:1]}, {2: X[:1]}, {2: X.half()}, {0: X[0, 0], 1: None, 2: X[0, 0]}, {3: 0.5}),
    ],
    "bias_dropout_add.triton": [
        *({2: X.half()}, {3: 0.5}, {3: 0.5, 4: SEED.int()}),
        {3: 0.5, 4: SEED, 5: [4, 9], 6: [0, 2]},
    ],
    "bias_dropout_add_backward.cpu": [{1: W[:7]}, {0: X.half()}, {6: torch.int32}],
    "dropout_add_rms_norm.cpu": [{1: X[0]}, {1: X.half()}, OUTSIDE, {2: [7]}, {5: -1.0}],
    "dropout_add_rms_norm.triton": [{1: X[0]}, OUTSIDE, {2: [], 3: None}],
    "dropout_add_rms_norm_backward.cpu,triton": [
        *({0: X[:3]}, {10: ROWS[:3]}, {0: X.half(), 2: X.half()}),
    ],
    "adaptive_layer_norm.cpu,triton": [
        *({1: X[:3]}, {1: X[:, :7]}, {2: X[:1]}, {2: X.half()}, {3: -1.0}, {1: W, 2: W}),
        {0: X.half(), 1: X.bfloat16(), 2: X.bfloat16()},
    ],
    "adaptive_layer_norm_backward.cpu,triton": [{0: X[:3]}, {5: ROWS[:3]}, {6: ROWS.double()}],
    "gated_residual.cpu,triton": [{1: X[:3]}, {2: X[:3]}, {2: X.double()}, {0: X.half()}],
    "gated_residual_backward.cpu,triton": [{0: X[:3]}, {1: X[:3]}, {2: X[:3]}],
    "gated_residual_rms_norm.cpu,triton": [{2: X[:3]}, {3: X[:1]}, {1: X.half()}, {5: -1.0}],
    "gated_residual_rms_norm_backward.cpu,triton": [{0: X[:3]}, {1: X[:3]}, {8: ROWS[:3]}],
    "quantize_8bit.cpu": [{0: CODES}, {0: ABSMAX.double()}],
    "dequantize_8bit.cpu": [{1: ABSMAX[:1]}, {0: ABSMAX}, {3: torch.int32}, {3: F64}],
    "quantize_one_bit.cpu": [{2: FLAT[1:].clone()}, {3: 12}, {0: FLAT.double()}],
    "average_one_bit.cpu": [{0: BITS, 1: SCALE}],
    "dequantize_one_bit.cpu": [{2: [30], 3: 32}],
}


@pytest.mark.parametrize("name", UNBOUND)
def test_kernels_refuse_by_themselves(name: str) -> None:
    """The bindings raise without Python's checks, so bad input never reaches a kernel."""
    op, _, backends = name.partition(".")
    accepted = BINDINGS[op]
    getattr(torch.ops.torchweld, op).cpu(*accepted)
    for backend, changed in itertools.product(backends.split(","), UNBOUND[name]):
        overload = getattr(getattr(torch.ops.torchweld, op), backend)
        with pytest.raises((RuntimeError, ValueError)):
            overload(*[changed.get(at, value) for at, value in enumerate(accepted)])
