"""Faults planted in Triton's kernels, and what finds them: the check at first use, or samples.

python tests/helpers/first_use.py            runs all, and prints the table of the notebook
python tests/helpers/first_use.py NUMBER     runs one, and prints what found it

Each fault is planted in a copy of the kernels, which run in Triton's interpreter. `call` is a
call whose results it makes wrong; `earlier` is a call of the same class that it spares, and that
comes first, so that the check sees only its rows. The samples are the contract's, in small and in
large numbers: more than any first use could pay for.
"""

from __future__ import annotations

import functools
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch

ROOT = Path(__file__).resolve().parents[2]
KERNELS = ROOT / "triton_kernels"
HALF, SINGLE = torch.float16, torch.float32


class Call(NamedTuple):
    """A call's op, the specs of its arguments, and its dtypes."""

    op: str
    arguments: tuple[Any, ...]
    dtype: torch.dtype = SINGLE
    param_dtype: torch.dtype | None = None
    change: Callable[[list[Any]], object] = lambda inputs: None  # of the drawn arguments


class Found(NamedTuple):
    """What finds a fault: the check of the call itself, of an earlier call, and samples."""

    by_call: bool
    by_earlier: bool | None  # None: every call of the class is wrong
    by_samples: bool


class Fault(NamedTuple):
    """A fault in words, in a file of the kernels, and what is known to find it."""

    words: str
    file: str
    old: str
    new: str
    call: Callable[[], Call]
    found: Found
    earlier: Callable[[], Call] | None = None


def _rows(op: str, rows: int, width: int, **changes: Any) -> Callable[[], Call]:
    def make() -> Call:
        from torchweld.bench.cases.declare import vary

        given = {name: changes.pop(name) for name in Call._fields if name in changes}
        return Call(op, vary(op, (rows,), (width,), **changes), **given)

    return make


def _freeze(inputs: list[Any]) -> None:
    for at, value in enumerate(inputs):
        if at and isinstance(value, torch.Tensor):
            inputs[at] = value.detach()


def _pad(inputs: list[Any]) -> None:
    """The first argument's rows lie in a wider matrix."""
    x = inputs[0].detach()
    inputs[0] = torch.cat([x, x], -1)[..., : x.shape[-1]].requires_grad_()


def _scale_up(inputs: list[Any]) -> None:
    inputs[0] = (100 * inputs[0].detach()).requires_grad_()


def _softmax(rows: int, width: int, masked: bool = False, **given: Any) -> Callable[[], Call]:
    how = {"scale": given.pop("scale", 1.0), "change": given.pop("change", lambda _: None)}

    def make() -> Call:
        from torchweld.registry import boolean

        mask = boolean(rows, width) if masked else None
        return _rows("softmax_dropout", rows, width, mask=mask, p=0.0, causal=False, **how)()

    return make


def _hide_a_row(inputs: list[Any]) -> None:
    inputs[1][2] = False


def _modulated(per_token: bool) -> Callable[[], Call]:
    def make() -> Call:
        from torchweld.bench.cases.declare import vary
        from torchweld.registry import residual

        shape = (2, 5, 64) if per_token else (2, 1, 64)
        both = {"scale": residual(*shape), "shift": residual(*shape)}
        return Call("adaptive_layer_norm", vary("adaptive_layer_norm", (2, 5), (64,), **both))

    return make


def _experts(tokens: int) -> Callable[[], Call]:
    def make() -> Call:
        from torchweld.ops.experts import mlp

        return Call("experts_mlp", mlp.arguments((tokens,), 2, 3, (64, 160, 64)), HALF)

    return make


def _rotated() -> Call:
    from torchweld.bench.cases import rotary

    return Call("rotary_embedding", rotary.sample((2, 8, 9, 32), key_heads=2, eps=None))


def _attended(tokens: int) -> Callable[[], Call]:
    def make() -> Call:
        from torchweld.bench.cases import attention
        from torchweld.sparse import BlockLayout

        return Call(
            "block_sparse_attention",
            attention._sample(
                (1, 1, tokens, 16),
                layout=lambda: BlockLayout.longformer(
                    tokens, block=32, num_sliding_window_blocks=1
                ),
                block=32,
            ),
        )

    return make


FAULTS = (
    Fault(
        "a wrong tile for widths from 5121 to 6144",
        "norm_rows.py",
        '"BLOCK": block,',
        '"BLOCK": block // 2 if 5120 < width <= 6144 else block,',
        _rows("layer_norm", 5, 5632),
        Found(True, None, False),
    ),
    Fault(
        "the last column at width 33",
        "norm_rows.py",
        "(column < width)[None, :]\n    mean, rstd, centered",
        "(column < tl.where(width == 33, 32, width))[None, :]\n    mean, rstd, centered",
        _rows("rms_norm", 7, 33),
        Found(True, None, True),
    ),
    Fault(
        "the last column where a tile of columns has only one",
        "act.py",
        "(row < rows)[:, None] & (column < width)[None, :]",
        "(row < rows)[:, None] & (column < tl.where(width % 512 == 1, width - 1, width))[None, :]",
        _rows("bias_act", 7, 1025),
        Found(True, None, True),
    ),
    Fault(
        "a chunk of many rows lacks its last tile",
        "chunks.py",
        "+ (chunk < tiles % chunks).to(tl.int32)",
        "+ (chunk + 1 < tiles % chunks).to(tl.int32)",
        _rows("rms_norm", 4000, 64),
        Found(True, False, True),
        _rows("rms_norm", 64, 64),
    ),
    Fault(
        "the weight is left out where it needs no gradient",
        "norm_rows.py",
        "    rows, width = x.shape\n    if not width:",
        "    rows, width = x.shape\n    weight = None if grad_weight is None else weight\n"
        "    if not width:",
        _rows("layer_norm", 7, 64, change=_freeze),
        Found(True, None, False),
    ),
    Fault(
        "rows that lie in a wider matrix are read as if they did not",
        "tensors.py",
        "return matrix if matrix.stride(1) == 1 else matrix.contiguous()",
        "return matrix.as_strided((rows, width), (width, 1))",
        _rows("rms_norm", 7, 64, change=_pad),
        Found(True, None, False),
    ),
    Fault(
        "every second launch differs in a bit",
        "norm.py",
        "    run(x, _forward_launch(matrix, weight, bias, y, mean, rstd, eps))\n",
        "    run(x, _forward_launch(matrix, weight, bias, y, mean, rstd, eps))\n"
        "    y.mul_(1 + 2**-22 * (next(_count) % 2))\n",
        _rows("rms_norm", 7, 64),
        Found(True, None, True),
    ),
    Fault(
        "a float32 stream is rounded as its 16-bit branch",
        "dropout_add_norm.py",
        "        return residual + dropped(x, row, start, dropout)",
        "        z = residual + dropped(x, row, start, dropout)\n"
        "        return z.to(x_ptr.dtype.element_ty).to(tl.float32)",
        _rows("dropout_add_layer_norm", 7, 64, p=0.0, dtype=HALF, param_dtype=SINGLE),
        Found(True, None, True),
    ),
    Fault(
        "the product is off without a bias",
        "act.py",
        "return tl.zeros(column.shape, tl.float32)",
        "return tl.full(column.shape, 0.01, tl.float32)",
        _rows("bias_act", 7, 64, bias=None),
        Found(True, None, True),
    ),
    Fault(
        "scales are taken for 1 from 1/2 on",
        "softmax.py",
        "mask=loaded, other=0).to(tl.float32) * scale\n",
        "mask=loaded, other=0).to(tl.float32) * tl.where(scale < 0.5, scale, 1.0)\n",
        _softmax(7, 64, scale=0.75),
        Found(True, False, True),
        _softmax(7, 64, scale=0.125),
    ),
    Fault(
        "exponentials of scores above 88",
        "softmax.py",
        "highest = _finite(tl.max(z, 1))",
        "highest = tl.minimum(_finite(tl.max(z, 1)), 0)",
        _softmax(7, 64, change=_scale_up),
        Found(True, False, False),
        _softmax(7, 64),
    ),
    Fault(
        "rows of which nothing is seen",
        "softmax.py",
        '0.0 if MASKED else float("inf")',
        'float("inf")',
        _softmax(7, 64, masked=True, change=_hide_a_row),
        Found(True, False, True),
        _softmax(7, 64, masked=True),
    ),
    Fault(
        "the last columns of wide rows",
        "softmax.py",
        "        for start in tl.range(0, width, BLOCK):\n            column = start + lane",
        "        for start in tl.range(0, width - BLOCK, BLOCK):\n"
        "            column = start + lane",
        _softmax(3, 20000),
        Found(True, None, True),
    ),
    Fault(
        "fewer heads of keys than of queries",
        "rotary.py",
        "*(INTERLEAVED, FULL, K_HEADS, ROWS, PAIRS, REST)",
        "*(INTERLEAVED, FULL, HEADS, ROWS, PAIRS, REST)",
        _rotated,
        Found(True, None, True),
    ),
    Fault(
        "no mask at the ragged end of queries",
        "attention/block_sparse_attention.py",
        '"RAGGED": call.q.shape[2] % block != 0',
        '"RAGGED": False',
        _attended(150),
        Found(True, None, True),
    ),
    Fault(
        "a piece of a long line is left out",
        "attention/dkv.py",
        "for piece in range(0, pieces - 1):",
        "for piece in range(0, pieces - 2):",
        _attended(4200),
        Found(True, None, True),
    ),
    Fault(
        "the tile of experts with many rows",
        "experts/grouped.py",
        '"COLUMNS": tile.columns,',
        '"COLUMNS": min(tile.columns, 128),',
        _experts(100),
        Found(True, None, True),
    ),
    Fault(
        "a modulation for each token",
        "modulation_rows.py",
        "tl.arange(0, BLOCK)[None, :], (at // period)[:, None]",
        "tl.arange(0, BLOCK)[None, :], (at // tl.maximum(period, 2))[:, None]",
        _modulated(True),
        Found(True, False, True),
        _modulated(False),
    ),
    Fault(
        "rows from 8192 on",
        "act.py",
        "rows, width, ROWS, BLOCK)\n    z = load(",
        "rows, width, ROWS, BLOCK)\n    inside = inside & (row < 8192)\n    z = load(",
        _rows("bias_act", 8200, 8),
        Found(False, False, False),
        _rows("bias_act", 64, 8),
    ),
    Fault(
        "a gate that lies elsewhere than its factor",
        "act.py",
        "up = load(up_ptr, row, column, up_stride, inside)\n    store(y_ptr",
        "up = load(up_ptr, row, column, gate_stride, inside)\n    store(y_ptr",
        _rows("gated_act", 7, 64, change=_pad),
        Found(True, None, False),
    ),
)


def find(fault: Fault) -> Found:
    """Plant the fault in this process, which has not loaded the kernels, and look what finds it."""
    import torchweld.triton_kernels
    from torchweld.registry import BACKENDS

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name) / KERNELS.name
        shutil.copytree(KERNELS, folder)
        plant(fault, folder / fault.file)
        assert not any(name.startswith("torchweld.triton_kernels.") for name in sys.modules)
        torchweld.triton_kernels.__path__[:] = [str(folder)]
        import interpreting  # it imports kernels

        interpreting.make_faster()
        interpreting.refuse_division_by_zero()
        interpreting.find_maxima_as_a_gpu_does()
        BACKENDS["triton"].devices = {"cpu"}
        call = fault.call()
        inputs = _draw(call)
        assert _is_wrong(call.op, inputs), f"{fault.words}: the call is right"
        by_earlier = None
        if fault.earlier is not None:
            first = _draw(fault.earlier())
            _assert_of_one_class(call.op, first, inputs)
            assert not _is_wrong(call.op, first), f"{fault.words}: the earlier call is wrong"
            by_earlier = _check(call.op, first) is not None
        by_call = _check(call.op, inputs) is not None
        return Found(by_call, by_earlier, any(_check(call.op, s) for s in _samples(call)))


def plant(fault: Fault, file: Path) -> None:
    """Write the fault into a copy of its file."""
    sound = file.read_text()
    assert fault.old in sound, f"{fault.file} no longer has {fault.old!r}"
    counted = "import itertools\n\n_count = itertools.count()\n" if "_count" in fault.new else ""
    start = sound.index("\n@triton.jit") if counted else 0
    sound = sound[:start] + counted + sound[start:]
    file.write_text(sound.replace(fault.old, fault.new, 1))


def _draw(call: Call, arguments: Any = None, seed: int = 0) -> list[Any]:
    from torchweld.registry import materialize

    how: Any = {"param_dtype": call.param_dtype, "requires_grad": True, "seed": seed}
    inputs = materialize(arguments or call.arguments, call.dtype, **how)
    if arguments is None:
        call.change(inputs)
    return inputs


def _samples(call: Call) -> Iterator[list[Any]]:
    """The contract's samples, and some for the paths of the kernels that they do not reach."""
    from torchweld.bench.cases import CASES

    more = {
        "experts_mlp": [_experts(100)().arguments],
        "block_sparse_attention": [_attended(4200)().arguments],
    }
    for seed, arguments in enumerate([*more.get(call.op, ()), *CASES[call.op].samples]):
        inputs = _draw(call, arguments, seed)
        if 0 < inputs[0].numel() < 2**17 and inputs[0].shape[-3:-2] != (10000,):
            yield inputs


def _check(name: str, inputs: list[Any]) -> str | None:
    """What the check at first use says of Triton's kernel for a call with these inputs."""
    from torchweld.dispatch.op_proof import make_question
    from torchweld.dispatch.proof import Judge
    from torchweld.registry import OPS

    question = make_question(OPS[name], inputs)
    judge = Judge(question.exact(), question.trusted(), question.rounded)
    return judge.find_fault_of(functools.partial(question.run, "triton"))


def _is_wrong(name: str, inputs: list[Any]) -> bool:
    """Whether the call's own results, or those of its repetition, are wrong."""
    from torchweld.dispatch import op_proof
    from torchweld.dispatch.proof import Judge
    from torchweld.registry import EAGER, OPS

    find = functools.partial(op_proof._find_results, OPS[name])
    wide = [op_proof._widen(value) for value in inputs]
    judge = Judge(find(EAGER, wide, "full"), find(EAGER, inputs, "full"))
    return judge.find_fault_of(lambda: find("triton", inputs, "full")) is not None


def _assert_of_one_class(name: str, first: list[Any], second: list[Any]) -> None:
    from torchweld.dispatch.op_proof import class_of
    from torchweld.registry import OPS

    assert class_of(OPS[name], first) == class_of(OPS[name], second)


def main() -> None:
    if len(sys.argv) > 1:
        print(json.dumps(find(FAULTS[int(sys.argv[1])])))
        return
    print("| fault | in | the call | an earlier call | samples |\n|---|---|---|---|---|")
    for number, fault in enumerate(FAULTS):
        ran = subprocess.run(
            [sys.executable, __file__, str(number)],
            env=os.environ | {"TRITON_INTERPRET": "1"},
            capture_output=True,
            text=True,
            check=False,
        )
        if ran.returncode:
            print(f"| {fault.words} | {ran.stderr.strip().splitlines()[-1]}")
            continue
        found = Found(*json.loads(ran.stdout.splitlines()[-1]))
        marks = " | ".join({None: "", True: "found", False: "**missed**"}[by] for by in found)
        known = "" if found == fault.found else f" not as known: {fault.found}"
        print(f"| {fault.words} | `{fault.file}` | {marks} |{known}", flush=True)


if __name__ == "__main__":
    main()
