"""Plants faults one at a time and reports the tests that notice.

python tests/helpers/mutate.py [--native] [words]

A fault that no test notices is a gap in the suite. Faults in Python and Triton need no build.
Faults in C++ (--native) are built for one instruction set into build/mutants. Files are always
restored, also after an interruption.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
MUTANTS = ROOT / "build" / "mutants"

ORACLE = "tests/contract/test_oracle.py"
SHAPES = "tests/contract/test_shapes.py"
RANDOM = "tests/contract/test_random.py"
GRADIENTS = "tests/contract/test_gradients.py"
OPTIM = "tests/optim"
SHARDS = "tests/distributed"


@dataclass(frozen=True)
class Fault:
    """Replaces one occurrence of `old` by `new`. `tests` are pytest's arguments."""

    file: str
    old: str
    new: str
    tests: str

    @property
    def native(self) -> bool:
        return self.file.startswith("csrc")

    def __str__(self) -> str:
        old, new = (" ".join(text.split()) for text in (self.old, self.new))
        return f"{self.file}: `{old}` -> `{new}`"


CPU = f"{ORACLE} {SHAPES} -k 'cpu and not emulator and"
TRITON = f"{ORACLE} {SHAPES} -k 'interpreter and"

FAULTS = [
    # --- CPU kernels ---
    Fault("csrc/cpu/norm.h", "(A)width + eps)", "(A)width + 2 * eps)", f"{CPU} layer_norm'"),
    Fault(
        "csrc/cpu/norm.h",
        "present(value - of[n].mean, at, (A)0)",
        "present(value - of[n].mean, at, (A)1)",
        f"{CPU} layer_norm'",
    ),
    Fault(
        "csrc/cpu/norm.h",
        "if (bias) v += load(bias + i, at);",
        "if (bias) v += load(bias, at);",
        f"{CPU} layer_norm'",
    ),
    Fault(
        "csrc/cpu/norm.h",
        "if constexpr (Centered) acc[0] += g;",
        "acc[0] += g;",
        f"{CPU} rms_norm'",
    ),
    Fault(
        "csrc/cpu/norm.h",
        "accumulate(weight_partial, i, gradient * x_hat, at);",
        "accumulate(weight_partial, i, g * x_hat, at);",
        f"{CPU} layer_norm'",
    ),
    Fault(
        "csrc/cpu/chunks.h",
        "chunk < chunks; ++chunk",
        "chunk + 1 < chunks; ++chunk",
        f"{CPU} norm'",
    ),
    Fault("csrc/cpu/chunks.h", "std::memset(partial, 0, width * sizeof(A));", "", f"{CPU} norm'"),
    Fault(
        "csrc/cpu/act.cpp",
        "a.gate_pitch;\n      const T* up",
        "a.up_pitch;\n      const T* up",
        "tests/ops tests/contract -k 'gated_act and cpu'",
    ),
    Fault(
        "csrc/cpu/act.cpp",
        "grad * act.value(z), at, streamed",
        "act.value(z), at, streamed",
        f"{CPU} gated_act'",
    ),
    Fault(
        "csrc/cpu/softmax.cpp",
        "if (!stride) return Bits<A>{} - (*mask != 0);",
        "if (!stride) return Bits<A>{};",
        "tests/contract -k 'softmax_dropout and cpu'",
    ),
    Fault(
        "csrc/cpu/softmax.cpp",
        "return z + load(mask, Part{1})[0];",
        "return z;",
        "tests/contract tests/ops -k 'softmax_dropout and cpu'",
    ),
    # --- Rules ---
    Fault(
        "csrc/core/rules/adam.h",
        "decay((float)(s.decoupled_weight_decay ? 1 - now.lr",
        "decay((float)(s.decoupled_weight_decay ? 1 + now.lr",
        f"{OPTIM}/test_optim.py",
    ),
    Fault(
        "csrc/core/rules/adam.h",
        "m[1] <= m[2] ? m[2] : m[1]",
        "m[1] <= m[2] ? m[1] : m[2]",
        f"{OPTIM}/test_optim.py",
    ),
    Fault(
        "csrc/core/rules/adam.h",
        "pow(s.beta2, now.number)",
        "pow(s.beta2, now.number + 1)",
        f"{OPTIM}/test_optim.py",
    ),
    Fault(
        "csrc/core/rules/lion.h",
        "(ahead < 0 ? step : zero)",
        "(ahead <= 0 ? step : zero)",
        f"{OPTIM}/test_optim_published.py tests/contract/test_absent_lanes.py",
    ),
    Fault(
        "csrc/core/rules/lion.h",
        "m[0] = m[0] * beta2 + g * rate2",
        "m[0] = m[0] * beta1 + g * rate1",
        f"{OPTIM}/test_optim_published.py",
    ),
    Fault(
        "csrc/core/rules/lamb.h",
        "(s.grad_averaging ? 1 - s.beta1 : 1)",
        "(1 - s.beta1)",
        f"{OPTIM}/test_optim_published.py",
    ),
    Fault(
        "csrc/core/rules/lamb.h",
        "(s.bias_correction ? 1 / (1",
        "(true ? 1 / (1",
        f"{OPTIM}/test_optim_published.py",
    ),
    # --- Triton kernels ---
    Fault(
        "triton_kernels/norm_rows.py",
        "x = tl.where(inside, x - mean[:, None], 0)",
        "x = x - mean[:, None]",
        f"{TRITON} layer_norm'",
    ),
    Fault(
        "triton_kernels/norm_rows.py",
        "tl.store(rstd_ptr + row, rstd, mask=row < rows)",
        "tl.store(rstd_ptr + row, rstd)",
        f"{TRITON} layer_norm'",
    ),
    Fault(
        "triton_kernels/chunks.py",
        "tl.minimum(tiles % chunks, chunk)",
        "tl.minimum(tiles % chunks, 0)",
        f"{TRITON} norm'",
    ),
    Fault(
        "triton_kernels/chunks.py",
        "mask=(chunk < chunks) & (column < width)[None, :],",
        "mask=(column < width)[None, :] & (chunk >= 0),",
        f"{TRITON} norm'",
    ),
    Fault(
        "triton_kernels/dropout.py",
        "tl.join(even, tl.join(word1 >= limit, word3 >= limit))",
        "tl.join(even, tl.join(word3 >= limit, word1 >= limit))",
        f"{RANDOM} {ORACLE} -k 'interpreter and dropout'",
    ),
    Fault(
        "triton_kernels/dropout.py",
        "high = (number >> 32)",
        "high = (number >> 31)",
        f"{RANDOM} {ORACLE} -k 'interpreter and dropout'",
    ),
    Fault(
        "triton_kernels/dropout.py",
        "word0 >= limit, word2 >= limit",
        "word0 > limit, word2 >= limit",
        f"{RANDOM} {ORACLE} -k 'interpreter and dropout'",
    ),
    # --- Dispatch ---
    Fault(
        "triton_kernels/block_lists.py",
        "partner = tl.load(walk[0] + 2 * at, mask=inside, other=0)\n    return partner",
        "partner = tl.load(walk[0] + 2 * tl.maximum(at - 1, 0), mask=inside, other=0)\n"
        "    return partner",
        "tests/ops/test_block_sparse_triton.py",
    ),
    Fault(
        "triton_kernels/block_sparse_attention.py",
        '"RAGGED": call.q.shape[2] % block != 0',
        '"RAGGED": False',
        "tests/ops/test_block_sparse_triton.py",
    ),
    Fault(
        "triton_kernels/symmetric.py",
        "value = tl.where(row[:, None] >= column[None, :], value, mirrored)",
        "",
        "tests/ops/test_symmetric_triton.py",
    ),
    Fault(
        "triton_kernels/symmetric.py",
        "tl.where(row * (row + 1) // 2 > number, row - 1, row)",
        "row",
        "tests/ops/test_symmetric_triton.py",
    ),
    Fault(
        "triton_kernels/loss_rows.py",
        "targets, logits_stride, logits_stride)",
        "targets, width, logits_stride)",
        "tests/ops/test_losses_of_torch.py",
    ),
    # --- Repeated calls ---
    Fault(
        "python/torchweld/dispatch/replay.py",
        "not self.fits or len(begins) < len(given) + len(self.made)",
        "not self.fits",
        "tests/tools/test_replay.py",
    ),
    Fault(
        "python/torchweld/dispatch/replay.py",
        "            self.fits = False\n",
        "",
        "tests/tools/test_replay.py",
    ),
    Fault(
        "python/torchweld/dispatch/replay.py",
        "_count_bytes(x) != _count_bytes(made[at])",
        "False",
        "tests/tools/test_replay.py",
    ),
    Fault(
        "python/torchweld/dispatch/alike.py",
        'conditions.append(f"({addresses}) % ALIGNMENT == 0")',
        "pass",
        "tests/tools/test_replay.py",
    ),
    # --- Losses ---
    Fault(
        "python/torchweld/ops/loss/chunks.py",
        "out.addmm_(grad[:, at], layer.weight[at])",
        "pass",
        "tests/ops/test_losses_of_torch.py -k padded",
    ),
    Fault(
        "python/torchweld/dispatch/call.py",
        "op.check(*inputs)  # raises an error that names",
        "pass  # raises an error that names",
        "tests/contract/test_bad_input.py",
    ),
    Fault(
        "python/torchweld/dispatch/call.py",
        "return lambda *inputs: kernel(*[_cast(value, dtype) for value in inputs])",
        "return kernel",
        "tests/pytorch/test_autocast.py tests/pytorch/test_torch.py -k autocast",
    ),
    Fault(
        "python/torchweld/dispatch/autograd.py",
        '"if _is_eager and torch.is_grad_enabled():"',
        '"if False:"',
        f"{GRADIENTS}",
    ),
    Fault(
        "python/torchweld/dispatch/autograd.py",
        "_ctx.save_for_backward({', '.join(to_save)})",
        "_ctx.save_for_backward(*[v if v is None else v.clone() for v in ({', '.join(to_save)},)])",
        f"{GRADIENTS}",
    ),
    Fault(
        "python/torchweld/dispatch/autograd.py",
        'f"({same[name]} if _{name}_same else {own}) if',
        'f"{own} if',
        f"{GRADIENTS} {ORACLE}",
    ),
    Fault(
        "python/torchweld/dispatch/dtensor.py",
        "grads.append(Partial())",
        "grads.append(Replicate())",
        f"{SHARDS}/test_shards.py",
    ),
    Fault(
        "python/torchweld/dispatch/dtensor.py",
        "offsets[dim] = int(here[0])",
        "offsets[dim] = 0",
        f"{SHARDS}/test_shards.py {RANDOM}",
    ),
    Fault(
        "python/torchweld/dispatch/dtensor.py",
        'elif not torch.equal(here, torch.arange(len(here), device="cpu") + here[0]):',
        "elif False:",
        f"{SHARDS}/test_shards.py",
    ),
    # --- fuse() ---
    Fault(
        "python/torchweld/fusion/trial.py",
        "(p / n for n in itertools.count(1))",
        "itertools.repeat(p)",
        "tests/pytorch/test_fuse_calls.py -k most_copied",
    ),
    # --- Optimizers ---
    Fault(
        "python/torchweld/ops/optimizer/rule.py",
        "torch.autograd.graph.increment_version(batch.list_written())",
        "pass",
        f"{OPTIM}/test_optim_gradients.py",
    ),
    Fault(
        "python/torchweld/optim/_base.py",
        "factor = -one if factor is None else -factor",
        "factor = -one",
        f"{OPTIM}/test_optim_gradients.py",
    ),
    Fault(
        "python/torchweld/optim/_base.py",
        "return clip if factor is None else clip * factor",
        "return clip",
        f"{OPTIM}/test_optim_gradients.py",
    ),
    Fault(
        "python/torchweld/optim/_base.py",
        "factor = torch.where(found_inf.to(factor.device) == 0, factor, 1)",
        "pass",
        f"{OPTIM}/test_optim_gradients.py",
    ),
    Fault(
        "python/torchweld/optim/_base.py",
        "(norm + 1e-6)",
        "(norm + 1e-2)",
        f"{OPTIM}/test_optim_gradients.py",
    ),
    Fault(
        "python/torchweld/optim/_base.py",
        "number += len(params)",
        "pass",
        f"{OPTIM}/test_optim_rounding.py",
    ),
    Fault(
        "python/torchweld/optim/_shards.py",
        "if dim in dims and mesh.size(at) > 1",
        "if dim is not None and mesh.size(at) > 1",
        f"{SHARDS}/test_optim_distributed.py {SHARDS}/test_stack.py",
    ),
    Fault(
        "python/torchweld/optim/_rounding_offsets.py",
        "first += int(here[0]) * strides[dim]",
        "first += int(here[0])",
        f"{SHARDS}/test_optim_distributed.py",
    ),
    Fault(
        "python/torchweld/optim/_sharded_blocks.py",
        "columns // BLOCK",
        "columns // (2 * BLOCK)",
        f"{SHARDS}/test_optim_distributed.py",
    ),
    Fault(
        "python/torchweld/optim/_sharded_blocks.py",
        "exchange(Exchange.LARGEST, [across_rows(blocks, p)])",
        "pass",
        f"{SHARDS}/test_optim_distributed.py",
    ),
    Fault(
        "python/torchweld/optim/_base.py",
        "states[key] = {name: _hide(name, value)",
        "states[key] = {name: value",
        f"{OPTIM}/test_optim_checkpoints.py",
    ),
]


@contextmanager
def planted(fault: Fault) -> Iterator[None]:
    """Plant the fault, and restore the file at the end."""
    path = ROOT / fault.file
    sound = path.read_text()
    if sound.count(fault.old) < 1:
        raise SystemExit(f"{fault.file} no longer has {fault.old!r}")
    path.write_text(sound.replace(fault.old, fault.new, 1))
    try:
        yield
    finally:
        path.write_text(sound)


def run(command: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command,
        shell=True,
        cwd=ROOT,
        env=os.environ | environment,
        capture_output=True,
        text=True,
        check=False,
    )


def build() -> None:
    """Build the CPU library for the best instruction set, with the planted fault."""
    ask = "from torchweld.dispatch import native; print(native.list_supported_isas()[0])"
    isa = run(f'{sys.executable} -c "{ask}"').stdout.strip()
    done = run(f"{sys.executable} csrc/build.py --no-cuda --out {MUTANTS} --isa {isa}")
    if done.returncode:
        raise SystemExit(done.stdout + done.stderr)


def caught_by(fault: Fault) -> str:
    """The first test that fails, or an empty string. A fault may also kill the process."""
    if fault.native:
        build()
    library = {"TORCHWELD_LIB": str(MUTANTS)} if fault.native else {}
    done = run(f"{sys.executable} -m pytest -x -q -p no:xdist {fault.tests}", **library)
    if done.returncode > 128:  # as shells report signals
        return f"the end of the process, by signal {done.returncode - 128}"
    if done.returncode not in (0, 1):
        raise SystemExit(f"{fault}\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
    failed = re.search(r"^(?:FAILED|ERROR) (\S+)", done.stdout, re.MULTILINE)
    return failed[1] if failed else ""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--native", action="store_true", help="plant the faults in C++")
    parser.add_argument(
        "words", nargs="*", help="only faults whose file name contains one of these"
    )
    options = parser.parse_args()
    wanted = [
        fault
        for fault in FAULTS
        if fault.native == options.native
        and (not options.words or any(word in fault.file for word in options.words))
    ]
    missed = 0
    print("| fault | caught by | s |\n|---|---|--:|")
    for fault in wanted:
        start = time.monotonic()
        with planted(fault):
            by = caught_by(fault)
        missed += not by
        print(f"| {fault} | {by or '**nothing**'} | {time.monotonic() - start:.0f} |", flush=True)
    if options.native and wanted:
        build()  # leaves no mutant behind
    print(f"\n{len(wanted) - missed} of {len(wanted)} caught")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
