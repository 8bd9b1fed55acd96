"""What Triton's kernels take on GPUs that need not be here: registers, shared memory, spills.

It also has how often their matrix products are computed, and whether by slow instructions.

A module of torchweld.triton_kernels takes part by an `aot_cases()` that yields names and launches.
To compile them all takes minutes, so the results are kept in tests/kept, by version of Triton and
by a hash of all that a compile depends on. `rows` compiles what is not there and, where it is asked
to, a small case of each kernel again. `make resources` compiles everything and keeps it; with
ARGS=missing only what is not kept yet.

The compiler runs in a process of this file, since tests set TRITON_INTERPRET=1, which disables it.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import layouts

ROOT = Path(__file__).resolve().parents[2]
CAPABILITIES = (80, 90, 100, 120)
TAKEN = ("registers", "shared", "spilled", "repeats", "slow")

# Kernels whose tensors are aligned, whatever views the caller passes.
NEVER_UNALIGNED = {
    "modulation_rows._add_chunks": "reads and writes only tensors that were allocated for it",
    "chunks._add_chunks": "reads and writes only tensors that were allocated for it",
    "linear_act._linear_act": "reads copies of such views",
    "symmetric._symmetric": "reads descriptors: such views have none",
    **{
        f"experts.products.{name}": "reads copies of such views"
        for name in ("_first_product", "_product", "_hidden_gradient", "_weight_gradient")
    },
    "loss.fused._add_up": "reads and writes only tensors that were allocated for it",
    "experts.route._find_losses": "reads and writes only tensors that were allocated for it",
    **{
        f"experts.rows.{name}": "reads copies of such views, and tensors that were allocated for it"
        for name in ("_invert", "_map_tiles", "_combine", "_weights_gradient", "_bias_gradient")
    },
    "attention.forward.attention_forward": "reads copies of such views",
    "attention.dq.attention_deltas": "reads copies of such views",
    "attention.dq.attention_dq": "reads copies of such views",
    "attention.dkv.attention_dkv": "reads copies of such views",
    **dict.fromkeys(
        (
            "attention.specialised_forward.attention_forward_specialised",
            "attention.specialised_dq.attention_dq_specialised",
            "attention.specialised_dkv.attention_dkv_specialised",
            "linear_act_specialised.linear_act_specialised",
            "symmetric_specialised.symmetric_specialised",
            "rotary_specialised.rotate_specialised",
            "rotary_specialised.differentiate_specialised",
        ),
        "reads descriptors: such views have none",
    ),
    "attention.dkv.attention_dkv_sums": "reads and writes only tensors that were allocated for it",
}


def launches(capability: int) -> Iterator[tuple[str, Any]]:
    """The cases of every module that are meant for such a GPU."""
    from torchweld.bench.measure import launched

    for module in launched.list_modules():
        cases: Any = getattr(module, "aot_cases", tuple)
        takes_capability = bool(getattr(cases, "__annotations__", {}).keys() - {"return"})
        for case, launch in cases(capability) if takes_capability else cases():
            if capability >= launch.least_capability:
                yield case, launch


class Compile:
    """A launch, for tensors that Triton knows to be aligned or for any."""

    def __init__(self, case: str, launch: Any, aligned: bool) -> None:
        from torchweld.bench.measure import launched

        self.case, self.launch, self.aligned = case, launch, aligned
        self._file = Path(launch.kernel.fn.__code__.co_filename).resolve()
        below = self._file.relative_to(ROOT / "triton_kernels").with_suffix("").parts
        self.kernel = ".".join([*below, launch.kernel.fn.__name__])
        self.signature = launched.sign(launch, aligned)
        given = launch.options if aligned else launch.unaligned_options()
        self.options = {k: v for k, v in given.items() if k not in self.signature[0]}
        self.key = hashlib.sha256(self._text().encode()).hexdigest()[:16]

    def _text(self) -> str:
        """All that the machine code depends on, but for the versions of Triton and of the GPU."""
        from torchweld.bench.measure import evidence

        # launch.py starts kernels, and is no part of one.
        used = [p for p in evidence.find_used([self._file], ROOT) if p.name != "launch.py"]
        code = evidence.hash_of(used, ROOT)
        return f"{code} {self.kernel} {self.signature} {self.options}"

    def compile(self, capability: int) -> Any:
        from torchweld.bench.measure import launched

        return launched.compile_launch(self.launch.kernel, self.signature, self.options, capability)

    def run(self, capability: int) -> dict[str, int]:
        compiled = self.compile(capability)
        products = layouts.read(compiled.asm["ttgir"], capability)
        taken = _of_machine_code(compiled.asm["cubin"])
        return {**taken, "shared": compiled.metadata.shared, **products}


def dump(cubin: bytes, what: str) -> str:
    """What cuobjdump tells of machine code."""
    from triton import knobs

    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [knobs.nvidia.cuobjdump.path, what, file.name]
        return subprocess.check_output(command, stderr=subprocess.STDOUT, text=True)


def _of_machine_code(cubin: bytes) -> dict[str, int]:
    report = dump(cubin, "-res-usage")
    found = re.search(r"REG:(\d+) STACK:(\d+) .*LOCAL:(\d+)", report)
    assert found, report
    registers, stack, local = map(int, found.groups())
    return {"registers": registers, "spilled": stack + local}


Taken = dict[str, int]  # registers, shared and spilled bytes, and products as layouts.py has them
Known = dict[str, Taken]  # by the key of a compile


def compiles(capability: int, known: Known) -> Iterator[Compile]:
    """Every launch; then, for views that are not aligned, the fullest launch with each tile.

    The caller enters what a compile takes into `known` before it asks for the next one.
    """
    fullest: dict[str, Compile] = {}
    for case, launch in launches(capability):
        each = Compile(case, launch, True)
        yield each
        if each.kernel not in NEVER_UNALIGNED and not launch.aligned:
            tile = {k: v for k, v in launch.options.items() if k != "ACTIVATION"}
            _keep_fullest(fullest, f"{launch.kernel.fn} {tile}", each, known)
    for each in fullest.values():
        yield Compile(f"{each.case}, unaligned", each.launch, False)


def _keep_fullest(fullest: dict[str, Compile], at: str, each: Compile, known: Known) -> None:
    before = fullest.setdefault(at, each)
    if known[each.key]["registers"] > known[before.key]["registers"]:
        fullest[at] = each


def rows(capability: int, kept: Known, again: bool) -> list[dict[str, Any]]:
    """What each compile takes: as it was kept, or as of now, which `now` tells.

    `again`: one case of each kernel is compiled in any case: that with the fewest registers.
    """
    known, now, found = dict(kept), dict[str, Taken](), list[Compile]()
    smallest: dict[str, Compile] = {}
    for each in compiles(capability, known):
        if each.key not in known:
            known[each.key] = now[each.key] = each.run(capability)
        found.append(each)
        before = smallest.setdefault(each.kernel, each)
        if known[each.key]["registers"] < known[before.key]["registers"]:
            smallest[each.kernel] = each
    for each in smallest.values() if again else ():
        if each.key not in now:
            now[each.key] = each.run(capability)
    return [
        {
            "kernel": each.kernel,
            "case": each.case,
            "key": each.key,
            "aligned": each.aligned,
            "warps": each.options["num_warps"],
            "kept": kept.get(each.key),
            "now": now.get(each.key),
        }
        for each in found
    ]


def compile_largest(capability: int, like: int = 80) -> list[dict[str, Any]]:
    """For each kernel that takes much shared memory on another GPU, the launch that takes most.

    `like` is what the launch takes there.
    """
    kept, largest = read(like), dict[str, tuple[int, Compile]]()
    for case, launch in launches(capability):
        each = Compile(case, launch, True)
        taken = kept[each.key]["shared"] if each.key in kept else 0
        if taken >= 2**16 and taken > largest.get(each.kernel, (0,))[0]:
            largest[each.kernel] = taken, each
    return [
        {"kernel": each.kernel, "case": each.case, "like": taken, **each.run(capability)}
        for taken, each in largest.values()
    ]


# --- What is kept ---------------------------------------------------------------------------------


def file() -> Path:
    import triton

    return ROOT / "tests" / "kept" / f"triton-{triton.__version__}.tsv"


def read(capability: int) -> Known:
    """What was kept for this version of Triton."""
    if not file().exists():
        return {}
    names, *lines = (line.split("\t") for line in file().read_text().splitlines())
    if (column := f"sm_{capability}") not in names:  # an older table
        return {}
    at = names.index(column)
    return {
        line[names.index("key")]: dict(zip(TAKEN, map(int, line[at].split()), strict=True))
        for line in lines
        if line[at]
    }


def write(by_capability: dict[int, list[dict[str, Any]]]) -> None:
    """One line for each case, one column for each GPU: the numbers of TAKEN in their order."""
    cells: dict[tuple[str, ...], dict[int, str]] = {}
    for capability, found in by_capability.items():
        for row in found:
            at = (row["kernel"], row["case"], str(row["warps"]), row["key"])
            taken = row["now"] or row["kept"]
            cells.setdefault(at, {})[capability] = " ".join(str(taken[k]) for k in TAKEN)
    lines = [["kernel", "case", "warps", "key", *(f"sm_{each}" for each in by_capability)]]
    lines += [[*at, *(cells[at].get(each, "") for each in by_capability)] for at in cells]
    file().parent.mkdir(exist_ok=True)
    file().write_text("".join("\t".join(line) + "\n" for line in lines))


def in_a_process(capability: int, *arguments: str) -> list[dict[str, Any]]:
    """`rows`, where the compiler is not disabled."""
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    command = [sys.executable, __file__, str(capability), *arguments]
    return json.loads(subprocess.check_output(command, env=environment, text=True))


def main() -> None:
    anew = [] if "missing" in sys.argv else ["anew"]
    if len(sys.argv) > 1 and sys.argv[1].isdigit():
        capability, how = int(sys.argv[1]), sys.argv[2:]
        if "largest" in how:
            json.dump(compile_largest(capability), sys.stdout)
            return
        known = {} if "anew" in how else read(capability)
        json.dump(rows(capability, known, "again" in how), sys.stdout)
        return
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        found = pool.map(lambda each: in_a_process(each, *anew), CAPABILITIES)
        write(dict(zip(CAPABILITIES, found, strict=True)))
    print(file())


if __name__ == "__main__":
    main()
