"""`torchweld doctor`: what this machine has, which backends serve, and why the others do not."""

from __future__ import annotations

import argparse
import importlib.metadata
import os
import platform
import shutil
import subprocess
import textwrap

import torch

from torchweld import pages
from torchweld.bench.measure.machine import ON_GPUS, cpu_name, find_tools, versions, why_not
from torchweld.commands import sdpa
from torchweld.dispatch import choice, native, proof, store
from torchweld.dispatch.store import describe
from torchweld.dispatch.warm import leaf
from torchweld.registry import BACKENDS, EAGER, OPS, Op
from torchweld.registry.processor import has_units
from torchweld.table import Table

WIDTH = 100
LARGE_BLOCKS = (
    "mapped and faulted in again at each call, which is glibc's default: torchweld.keep_pages() at"
    " the top of a script keeps them resident"
)
Facts = list[tuple[str, str]]
# Packages whose doors torchweld uses, or that change models.
OTHERS = (
    *("accelerate", "deepspeed", "kernels", "liger-kernel", "lightning", "peft"),
    *("torchao", "torchtitan", "transformers", "trl", "verl"),
)
# docs/stability.md says what each means.
VARIABLES = (
    choice.BACKEND_VARIABLE,
    "TORCHWELD_CHECK_TARGETS",
    store.FOLDER_VARIABLE,
    native.ISA_VARIABLE,
    leaf.VARIABLE,
    "TORCHWELD_LIB",
    "TORCHWELD_POISON",
    proof.VARIABLE,
    store.SHIPPED_VARIABLE,
)


def run(options: argparse.Namespace) -> int:
    """Print the findings. A missing backend is a finding, not a failure."""
    if options.report:
        print("<details><summary>torchweld doctor</summary>\n\n```")
    sections = {
        "Versions": _versions(),
        "CPU": _cpu(),
        "GPU": _gpus(),
        f"Native libraries, in {native.DIRECTORY}": _libraries(),
        "For kernels on a GPU": _needed_on_gpu(),
        "Found on this GPU": _answers_here(),
        "Attention of torch": sdpa.list_choices(),
        "Environment": _variables(),
        "Backends": [("in force", _in_force())],
    }
    for title, facts in sections.items():
        print(title)
        for name, value in facts:
            first, *more = textwrap.wrap(value, WIDTH - 18, break_long_words=False) or [""]
            print(f"  {name:15} {first}")
            for line in more:
                print(f"  {'':15} {line}")
        print()
    _print_backends()
    if options.report:
        print("```\n\n</details>")
    return 0


def _read_version(package: str) -> str:
    try:
        return f"{package} {importlib.metadata.version(package)}"
    except importlib.metadata.PackageNotFoundError:
        return ""


def _versions() -> Facts:
    numbers = versions()
    cuda = f"built for CUDA {numbers['cuda']}" if numbers["cuda"] else "built without CUDA"
    return [
        ("torchweld", str(numbers["torchweld"])),
        ("torch", f"{numbers['torch']}, {cuda}"),
        ("triton", numbers["triton"] or "not installed; CUDA builds of torch bring it"),
        ("with it", ", ".join(filter(None, map(_read_version, OTHERS))) or "none of them"),
        ("python", str(numbers["python"])),
        ("platform", f"{platform.platform(terse=True)}, {platform.machine()}"),
        ("libc", " ".join(platform.libc_ver()) or "unknown"),
    ]


def _cpu() -> Facts:
    how = os.environ.get(native.ISA_VARIABLE)
    how = f"{native.ISA_VARIABLE}={how}" if how else "the best; TORCHWELD_CPU_ISA forces another"
    return [
        ("name", f"{cpu_name()}, {os.cpu_count()} CPUs, {torch.get_num_threads()} threads in use"),
        ("instruction set", f"{native.cpu_isa or 'none'} ({how})"),
        ("AMX", "multiplies for attention in bfloat16" if native.has_tiles else "not used"),
        ("16 bits", _say_units()),
        ("supported", ", ".join(map(_describe_isa, native.list_supported_isas()))),
        ("large blocks", pages.why_not() or LARGE_BLOCKS),
    ]


def _describe_isa(isa: str) -> str:
    """Its name; if it was not compiled, with what to do."""
    if isa in native.list_compiled_isas():
        return isa
    return f"{isa} (not compiled; {native.how_to_compile(isa)})"


def _say_units() -> str:
    """Which 16-bit dtypes this processor multiplies, and what happens to the others."""
    kinds = (torch.bfloat16, torch.float16)
    fast, slow = (
        " and ".join(str(d).removeprefix("torch.") for d in kinds if has_units(d) is has)
        for has in (True, False)
    )
    served = f"torch multiplies {fast} with units of the processor"
    converted = (
        f"no units for {slow}, which torch multiplies in plain loops; torchweld's ops and"
        " fused models do by float32 GEMMs, at about a float32 model's speed"
    )
    return "; ".join([*([served] if fast else []), *([converted] if slow else [])])


def _gpus() -> Facts:
    """The driver's own report, for GPUs that torch cannot use."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return [("none", "there is no nvidia-smi, and so no NVIDIA driver"), *_count_torchs_gpus()]
    query = [tool, "--query-gpu=name,driver_version,compute_cap", "--format=csv,noheader"]
    answer = subprocess.run(query, capture_output=True, text=True, check=False)
    if answer.returncode:
        return [("none", f"nvidia-smi: {answer.stdout.strip() or answer.stderr.strip()}")]
    gpus: Facts = []
    for at, line in enumerate(answer.stdout.strip().splitlines()):
        name, driver, capability = (part.strip() for part in line.split(","))
        gpus.append((f"GPU {at}", f"{name}, sm_{capability.replace('.', '')}, driver {driver}"))
    return gpus + _count_torchs_gpus()


def _count_torchs_gpus() -> Facts:
    if torch.cuda.is_available():
        return [("torch sees", f"{torch.cuda.device_count()}")]
    why = "it is built without CUDA" if torch.version.cuda is None else "CUDA does not start"
    return [("torch sees", f"none: {why}")]


def _libraries() -> Facts:
    facts = []
    for library in ("torchweld_cpu", "torchweld_cuda"):
        state = "loaded"
        if library in native.missing:
            state = f"not loaded: {native.missing[library]}"
        elif library == "torchweld_cuda" and native.cuda_built_with:
            major, minor = divmod(native.cuda_built_with // 10, 100)
            oldest = native.OLDEST_DRIVER.get(major, "unknown")
            state += f"; built with CUDA {major}.{minor}, which needs driver >= {oldest}"
        facts.append((library, state))
    return facts


def _needed_on_gpu() -> Facts:
    """What `torchweld bench --record` asks for: Triton's tools, and a kernel of each backend."""
    facts = [(tool, at or "not found") for tool, at in find_tools().items()]
    if torch.cuda.is_available():
        reasons = {name: why_not(name) for name in ON_GPUS}
        facts += [(name, f"a kernel runs: {why or 'yes'}") for name, why in reasons.items()]
    return facts


def _answers_here() -> Facts:
    """The answers found on this GPU: the backend for each class of calls."""
    if not torch.cuda.is_available():
        return [("none", "there is no GPU; on the CPU nothing is tried")]
    checker = proof.checker_for(torch.device("cuda"))
    facts = []
    for entry in checker.entries():
        how = "timed" if entry.answer.ms else "checked"
        calls = describe(entry.kind, entry.size)
        facts.append((entry.answer.backend, f"{calls}, {how} {entry.answer.date}"))
    nothing = (
        f"kernels are checked at their first use ({proof.VARIABLE}={proof.mode});"
        " `torchweld tune` does it beforehand"
    )
    return facts or [("none", nothing)]


def _variables() -> Facts:
    """The environment variables of torchweld that are set."""
    settings = [(name, os.environ[name]) for name in VARIABLES if name in os.environ]
    return settings or [("none set", f"of {', '.join(VARIABLES)}")]


def _in_force() -> str:
    if choice.forced is None:
        return f"the automatic choice; {choice.BACKEND_VARIABLE} or use_backend() forces one"
    try:
        choice.check_names(choice.BACKEND_VARIABLE, "the environment variable", choice.forced)
    except ValueError as error:
        return str(error)
    return f"{', '.join(choice.forced)} for every op, by {choice.BACKEND_VARIABLE}"


# --- Op x backend -----------------------------------------------------------------------------


def _print_backends() -> None:
    """A table of op x backend, with each reason once below it."""
    reasons: list[str] = []
    table = Table(["op", EAGER, *BACKENDS], numbers_from=len(BACKENDS) + 2)
    for op in OPS.values():
        cells = [_cell(op, backend, reasons) for backend in BACKENDS]
        table.add(op.name, "yes", *cells)
    print(textwrap.indent(table.plain(), "  "))
    for at, reason in enumerate(reasons, 1):
        print(
            textwrap.fill(
                f"({at}) {reason}", WIDTH, initial_indent="  ", subsequent_indent="      "
            )
        )


def _cell(op: Op, backend: str, reasons: list[str]) -> str:
    word, reason = _serves(op, backend)
    if reason is None:
        return word
    if reason not in reasons:
        reasons.append(reason)
    return f"{word} ({reasons.index(reason) + 1})"


def _serves(op: Op, backend: str) -> tuple[str, str | None]:
    """yes; "by name" or no with the reason."""
    if backend not in op.sources:
        return "no", f"it has no {backend} kernel"
    if reason := BACKENDS[backend].why_missing():
        return "no", reason
    on_cpu = "cpu" in BACKENDS[backend].devices
    if not on_cpu and not torch.cuda.is_available():
        return "no", "torch sees no GPU"
    # Large, since small inputs fall back to eager, but only one element in memory.
    x = torch.zeros(1, dtype=torch.bfloat16, device="cpu" if on_cpu else "cuda").expand(8192, 1024)
    if reason := op.why_not(backend, [x]):
        return "no", reason
    if not on_cpu and (reason := _why_not_found(op, backend)):
        return "by name", reason
    return "yes", None


def _why_not_found(op: Op, backend: str) -> str | None:
    """Why no answer that was found on this GPU takes this backend; None if one does."""
    entries = proof.checker_for(torch.device("cuda")).entries()
    answers = [entry.answer for entry in entries if entry.kind.get("op") == op.name]
    reasons = [a.why_not(backend) for a in answers]
    return None if None in reasons else (reasons or [choice.UNTRIED])[-1]
