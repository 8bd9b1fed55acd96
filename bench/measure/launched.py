"""What an op launches on a GPU that need not be here: its evidence is current while that is equal.

An op runs on meta tensors as on a GPU with 132 processors, and what it would launch is compiled for
sm_90. Of the compiled code only instructions, layouts and types count: no places in a file, and no
names. Ops of several steps also have torch's products, by their sizes.
"""

from __future__ import annotations

import hashlib
import importlib
import pkgutil
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from torchweld.bench.cases import CASES, Case
from torchweld.bench.measure import evidence
from torchweld.bench.measure.evidence import Codes
from torchweld.dispatch import proof
from torchweld.dispatch.autograd import as_tuple
from torchweld.dispatch.call import call
from torchweld.dispatch.choice import use_backend
from torchweld.dispatch.library import IN_TRITON
from torchweld.registry import BACKENDS, OPS, Made, Op, TensorSpec

CAPABILITY, _PROCESSORS = 90, 132
_COMPILERS = ("num_warps", "num_stages", "maxnreg", "enable_fp_fusion")
# Places have parentheses inside of each other.
_PLACE = r" loc\((?:[^()]|\((?:[^()]|\([^()]*\))*\))*\)"
_DROPPED = re.compile(rf"^#loc.*$|^\s*//.*$|{_PLACE}", re.MULTILINE)
_NAME = re.compile(r"%[\w$.]+|@[\w$.]+|\^bb\d+")


# --- Evidence -------------------------------------------------------------------------------------


def renew(records: Mapping[str, dict[str, Any]], root: Path) -> Codes:
    """The codes of the present sources, of all rows that could be stale by their sources.

    Rows of the present sources get their codes. CUDA's kernels have the hash of their source, as
    nvcc gets it.
    """
    import triton

    codes: Codes = {}
    for record in records.values():
        for name, proofs in record["ops"].items():
            if "cuda" in proofs and name in evidence.PROVEN:
                _renew_cuda(name, proofs["cuda"], root, codes)
            op = OPS.get(name)
            if op is None or "triton" not in proofs:
                continue
            now = evidence.sources_hash(op, "triton", root)
            for row in proofs["triton"]["results"]:
                at = (name, now, evidence.name_row(row))
                known = dict(evidence.read_codes().get(at, {}))
                if triton.__version__ not in known and (case := _find_case(op, row)) is not None:
                    known[triton.__version__] = find_code(case, row["direction"])
                codes[at] = known
                if proofs["triton"]["sources"] == now:
                    row.setdefault("code", {}).update(known)
    return codes


def _renew_cuda(name: str, proof: dict[str, Any], root: Path, codes: Codes) -> None:
    op = evidence.PROVEN[name]
    if "cuda" not in evidence.files_of(op):
        return
    now = evidence.sources_hash(op, "cuda", root)
    known = {"source": evidence.find_device_code(op, root)}
    for row in proof["results"]:
        codes[(name, now, evidence.name_row(row))] = known
        if proof["sources"] == now:
            row.setdefault("code", {}).update(known)


def _find_case(op: Op, row: dict[str, Any]) -> Case | None:
    """The case of a row; None if the benchmark has it no more."""
    dtype = getattr(torch, row["dtype"])
    cases = [Case(op, given, dtype, "cuda") for given in CASES[op.name].benchmarks_on_gpu]
    like = (tuple(row["shape"]), row["variant"])
    return next((case for case in cases if (case.shape, case.variant) == like), None)


# --- Launches -------------------------------------------------------------------------------------


def list_launches(case: Case, direction: str) -> list[tuple[Any, dict[str, Any]]]:
    """The launches of a case in order, each with its options."""
    return [step for step in list_steps(case, direction) if isinstance(step, tuple)]


def list_steps(case: Case, direction: str) -> list[Any]:
    """The launches of a case, each with its options, and torch's products, as text, in order."""
    inputs = [_make_meta(value, case.dtype) for value in case.arguments]
    with _collecting() as steps:
        if direction == "fwd":
            with torch.no_grad():
                call(case.op, *inputs)
            return steps
        results = [y for y in as_tuple(call(case.op, *inputs)) if y.requires_grad]
        leaves = [t for t in inputs if isinstance(t, torch.Tensor) and t.requires_grad]
        grads = [torch.empty_like(y) for y in results]
        torch.autograd.grad(results, leaves, grads, allow_unused=True)
    return steps


def _make_meta(argument: Any, dtype: torch.dtype) -> Any:
    """The argument as `registry.materialize` makes it, without numbers."""
    if isinstance(argument, Made):
        return argument.make().to("meta")
    if not isinstance(argument, TensorSpec):
        return argument
    if argument.kind in _DTYPES:
        return torch.empty(argument.shape, dtype=_DTYPES[argument.kind], device="meta")
    needs = argument.kind not in ("constant", "variance")
    return torch.empty(argument.shape, dtype=dtype, device="meta", requires_grad=needs)


_DTYPES = {"seed": torch.int64, "boolean": torch.bool, "padding": torch.bool}


class _Steps(TorchDispatchMode):
    """Runs the function in Triton of each of our ops, and writes torch's products down."""

    def __init__(self, steps: list[Any]) -> None:
        super().__init__()
        self._steps = steps

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        if func in IN_TRITON:
            return IN_TRITON[func]()(*args, **kwargs or {})
        made = func(*args, **kwargs or {})
        if func.overloadpacket.__name__ in _PRODUCTS:
            given = [x for x in args if isinstance(x, torch.Tensor)]
            self._steps.append(f"{func} {[(*x.shape, x.stride(), x.dtype) for x in given]}")
        return made


_PRODUCTS = ("mm", "addmm", "bmm", "baddbmm", "_grouped_mm")


@contextmanager
def _collecting() -> Iterator[list[Any]]:
    """What ops do on meta tensors, as on a GPU whose kernels were found right."""
    from torchweld.triton_kernels import launch

    steps: list[Any] = []

    def start(launched: Any, options: dict[str, Any]) -> None:
        steps.append((launched, options))

    def pick(_: Any, make_question: Callable[[], Any]) -> tuple[str, None]:
        question = make_question()
        is_tile = "tiles" in question.kind  # the rule's serves until others are timed
        return question.fallback if is_tile else question.candidates[0], None

    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(launch, "start", start))
        for each in list_modules():
            for name, answer in (("processors", _PROCESSORS), ("runs_on", True)):
                if hasattr(each, name):
                    stack.enter_context(mock.patch.object(each, name, return_value=answer))
        stack.enter_context(mock.patch.object(BACKENDS["triton"], "devices", {"meta"}))
        stack.enter_context(mock.patch.object(proof, "pick", pick))
        # torch has no autocast for meta, and raises an error.
        stack.enter_context(mock.patch.object(torch, "is_autocast_enabled", return_value=False))
        stack.enter_context(use_backend("triton"))
        stack.enter_context(_Steps(steps))
        yield steps


def list_modules() -> list[Any]:
    """The modules of Triton's kernels, those in folders too."""
    from torchweld import triton_kernels

    found = pkgutil.walk_packages(triton_kernels.__path__, f"{triton_kernels.__name__}.")
    return [importlib.import_module(module.name) for module in found]


def compile_ahead(names: Iterable[str], known: Callable[[str, str], Sequence[str]]) -> int:
    """Compile what the benchmark of these ops launches on a GPU, into Triton's cache; count it.

    The cache serves the same versions of Triton and Python elsewhere. `known` are the rows of an op
    and a backend that are not measured.
    """
    from torchweld.triton_kernels import tiled
    from torchweld.triton_kernels.launch import run

    def try_all(on: torch.Tensor, asked: Any) -> Any:
        for tile in asked.tiles[1:]:
            run(on, *asked.launches_with(tile))
        return asked.tiles[0]

    found: dict[str, Any] = {}
    for op in [OPS[name] for name in names if name in OPS and "triton" in OPS[name].sources]:
        for given in CASES[op.name].benchmarks_on_gpu:
            case = Case(op, given, torch.bfloat16, "cuda")
            about = {"shape": case.shape, "variant": case.variant, "dtype": "bfloat16"}
            for direction in ("fwd", "full"):
                if evidence.name_row(about | {"direction": direction}) in known(op.name, "triton"):
                    continue
                with mock.patch.object(tiled, "choose", try_all):
                    for launched, options in list_launches(case, direction):
                        signature = sign(launched)
                        rest = {k: v for k, v in options.items() if k not in signature[0]}
                        at = f"{launched.kernel.fn} {signature} {rest}"
                        found.setdefault(at, (launched.kernel, signature, rest))
    for kernel, signature, rest in found.values():
        compile_launch(kernel, signature, rest)
    return len(found)


# --- What they compile to -------------------------------------------------------------------------


def find_code(case: Case, direction: str) -> str:
    """The hash of what a case launches, by the installed Triton."""
    digest = hashlib.sha256()
    for step in list_steps(case, direction):
        if isinstance(step, str):
            digest.update(f"{step}\n".encode())
            continue
        launched, options = step
        signature = sign(launched)
        rest = {name: value for name, value in options.items() if name not in signature[0]}
        code = _compile(launched.kernel, repr(signature), repr(rest), signature, rest)
        digest.update(f"{code} {sorted(rest.items())} {launched.grid}\n".encode())
    return digest.hexdigest()[:16]


_compiled: dict[tuple[Any, str, str], str] = {}


def _compile(kernel: Any, *how: Any) -> str:
    *texts, signature, options = how
    at = (kernel, *texts)
    if at not in _compiled:
        _compiled[at] = strip(compile_launch(kernel, signature, options).asm["ttgir"])
    return _compiled[at]


def strip(code: str) -> str:
    """Compiled code without places and comments, whose names are numbers in order."""
    names: dict[str, str] = {}
    lines = (line.rstrip() for line in _DROPPED.sub("", code).splitlines())
    text = "\n".join(line for line in lines if line)
    return _NAME.sub(lambda found: names.setdefault(found[0], f"{found[0][0]}{len(names)}"), text)


Signature = tuple[dict[str, str], dict[str, Any], dict[Any, Any]]


def sign(launched: Any, aligned: bool = True) -> Signature:
    """Types, constants and alignments of a launch, by the rules of Triton's JIT.

    `aligned=False`: of views, of whose addresses and strides Triton knows nothing. Widths stay what
    they are, since they choose the tile.
    """
    from triton.runtime.jit import mangle_type

    types, constants, attributes = {}, {}, {}
    given = dict(zip(launched.kernel.arg_names, launched.args, strict=False))
    given |= {name: x for name, x in launched.options.items() if name not in _COMPILERS}
    for parameter in launched.kernel.params:
        name, value = parameter.name, given[parameter.name]
        is_integer = isinstance(value, int) and not parameter.do_not_specialize
        if parameter.is_constexpr or value is None or (is_integer and value == 1):
            types[name], constants[name] = "constexpr", value
            continue
        types[name] = mangle_type(value)
        is_multiple = is_integer and not parameter.do_not_specialize_on_alignment and not value % 16
        of_a_view = isinstance(value, torch.Tensor) or name.endswith("_stride")
        if (isinstance(value, torch.Tensor) or is_multiple) and (aligned or not of_a_view):
            attributes[(parameter.num,)] = [["tt.divisibility", 16]]
    return types, constants, attributes


def compile_launch(
    kernel: Any, signature: Signature, options: dict[str, Any], capability: int = CAPABILITY
) -> Any:
    """Compile a kernel for a GPU that need not be here."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource
    from triton.experimental.gluon._runtime import GluonASTSource

    source = (GluonASTSource if kernel.is_gluon() else ASTSource)(kernel, *signature)
    return triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
