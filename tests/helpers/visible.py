"""What Inductor makes of the launches of ops, for an H200 that need not be here.

Each op's Triton function is called as the benchmark calls it, traced on fake tensors, and compiled
by Inductor as far as its own code. The kernels in that code are compiled for sm_90, and compared
with those of torchweld. The compiler runs in a process of this file, since tests set
TRITON_INTERPRET=1, which disables it.
"""

from __future__ import annotations

import ast
import contextlib
import functools
import importlib.util
import json
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

CAPABILITY, PROCESSORS = (9, 0), 132


class _Driver:
    """Stands for Triton's driver of an H200."""

    def get_current_target(self) -> Any:
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cuda", 0)


@contextlib.contextmanager
def imitate_gpu() -> Iterator[None]:
    """Let Inductor and torchweld find an H200, as far as they ask before they run kernels."""
    import triton
    from torch._dynamo.device_interface import get_interface_for_device
    from torch._inductor.runtime.hints import DeviceProperties

    from torchweld.bench.measure import launched

    hinted = DeviceProperties("cuda", 0, PROCESSORS, 90, 9, 65536, 2048, 1024, 32)
    found = mock.Mock(
        major=9,
        minor=0,
        multi_processor_count=PROCESSORS,
        warp_size=32,
        regs_per_multiprocessor=65536,
        max_threads_per_multi_processor=2048,
        max_threads_per_block=1024,
        total_memory=140 << 30,
        gcnArchName="",
        shared_memory_per_block_optin=232448,
        L2_cache_size=50 << 20,
    )
    found.name = "NVIDIA H200"  # torch 2.10 writes it into a file
    device = get_interface_for_device("cuda")
    answers: list[tuple[Any, str, Any]] = [
        (DeviceProperties, "create", hinted),
        (device, "get_device_properties", found),
        (device, "get_compute_capability", 90),
        (device, "is_available", True),
        (device, "is_bf16_supported", True),
        (device, "current_device", 0),
        (device.Worker, "get_device_properties", found),
        (device.Worker, "current_device", 0),
        (torch.cuda, "get_device_properties", found),
        (torch.cuda, "get_device_capability", CAPABILITY),
        (torch.cuda, "current_device", 0),
        (torch.cuda, "device_count", 1),
        (torch.utils._triton, "has_triton", True),
    ]
    for module in launched.list_modules():
        if hasattr(module, "processors"):
            answers.append((module, "processors", PROCESSORS))
    with contextlib.ExitStack() as stack:
        for where, name, answer in answers:
            stack.enter_context(mock.patch.object(where, name, lambda *_, a=answer, **__: a))
        triton.runtime.driver.set_active(_Driver())
        yield


# --- Graphs and code ------------------------------------------------------------------------------


class _Written(Exception):  # noqa: N818 - not an error
    """Inductor has written its code."""


def trace(function: Callable[..., Any], inputs: Sequence[Any]) -> torch.fx.GraphModule:
    """The graph that AOTAutograd hands to Inductor."""
    from torch._functorch.aot_autograd import aot_function

    graphs: list[torch.fx.GraphModule] = []
    aot_function(function, lambda graph, _: graphs.append(graph) or graph)(*inputs)
    return graphs[0]


def write_code(
    graph: torch.fx.GraphModule, inputs: Sequence[Any], fakes: FakeTensorMode, **options: Any
) -> str:
    """The code that Inductor generates for a graph."""
    from torch._inductor import codecache, config
    from torch._inductor.compile_fx import compile_fx_inner
    from torch._inductor.virtualized import V

    found: list[str] = []

    def keep(_: str, path: str, *__: Any, **___: Any) -> Any:
        found.append(Path(path).read_text())
        raise _Written

    with contextlib.ExitStack() as stack:
        enter = stack.enter_context
        enter(mock.patch.object(codecache.PyCodeCache, "load_by_key_path", keep))
        enter(config.patch({"fx_graph_cache": False, "compile_threads": 1, **options}))
        enter(torch._guards.tracing(torch._guards.TracingContext(fakes)))
        enter(V.set_fake_mode(fakes))
        try:
            cudagraphs = torch._inductor.utils.BoxedBool(bool(options))
            compile_fx_inner(graph, inputs, cudagraphs=cudagraphs)
        except Exception:
            if not found:
                raise
    return found[-1]


def find_launches(graph: torch.fx.GraphModule) -> list[torch.fx.Node]:
    return [n for n in graph.graph.nodes if "triton_kernel_wrapper" in str(n.target)]


def load_kernels(code: str, folder: Path) -> list[Any]:
    """The kernels of a user's, in Inductor's words, that its code defines."""
    kernels = []
    for node in ast.walk(ast.parse(code)):
        if not (isinstance(node, ast.Call) and ast.unparse(node.func) == "async_compile.triton"):
            continue
        name, source = (ast.literal_eval(each) for each in node.args)
        if "user_autotune" not in source:
            continue
        path = folder / f"kernel_{len(list(folder.iterdir()))}.py"
        path.write_text(source)
        spec = importlib.util.spec_from_file_location(path.stem, path)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        kernels.append(getattr(module, name))
    return kernels


# --- Ops ------------------------------------------------------------------------------------------


class Call(NamedTuple):
    """A call of a Triton function on meta tensors, and what it launches in eager torch."""

    name: str
    inputs: Sequence[Any]
    launches: Sequence[tuple[Any, dict[str, Any]]]


def list_calls(case: Any) -> list[Call]:
    """The calls of an op's Triton functions in both directions."""
    from torchweld.bench.measure import launched
    from torchweld.dispatch.library import IN_TRITON
    from torchweld.triton_kernels import launch

    calls: list[Call] = []

    def keep(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*inputs: Any) -> Any:
            own: list[Any] = []
            start = launch.start

            def see(*launched: Any) -> None:
                own.append(launched)
                start(*launched)

            with mock.patch.object(launch, "start", see):
                made = function(*inputs)
            given = [x.detach() if isinstance(x, torch.Tensor) else x for x in inputs]
            calls.append(Call(name, given, own))
            return made

        return call

    kept = {}
    for name in (case.op.name, f"{case.op.name}_backward"):
        overload = getattr(torch.ops.torchweld, name).triton
        kept[overload] = functools.partial(keep, name, IN_TRITON[overload]())
    with mock.patch.dict(IN_TRITON, kept):
        launched.list_launches(case, "full")
    return calls


def _make_fake(value: Any) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="cuda")


def compare(call: Call, folder: Path) -> dict[str, Any]:
    """How a graph of one call differs from what torchweld launches, and Inductor's code."""
    fakes = FakeTensorMode(allow_non_fake_inputs=True)
    overload = getattr(torch.ops.torchweld, call.name).triton
    with fakes, torch.no_grad():
        given = [_make_fake(value) for value in call.inputs]
        tensors = [x for x in given if isinstance(x, torch.Tensor)]

        def run(*tensors: torch.Tensor) -> list[torch.Tensor]:
            rest = iter(tensors)
            made = overload(*[next(rest) if isinstance(x, torch.Tensor) else x for x in given])
            made = made if isinstance(made, tuple) else (made,)
            return [y + 1 if y.is_floating_point() and y.numel() else y for y in made]

        graph = trace(run, tensors)
    seen = list(map(Launched.read, find_launches(graph)))
    told: dict[str, Any] = {"kernels": [each.kernel.__name__ for each in seen]}
    told |= {"differ": [], "code": ""}
    if not seen:
        return told
    results: Any = graph.graph.find_nodes(op="output")[0].args[0]  # of the kernels', by + 1
    most = sum("empty" in str(node.target) for node in graph.graph.nodes) + len(results)
    told["code"] = write_code(graph, tensors, fakes)
    told["copies"] = told["code"].count("= empty_strided_cuda(") > most
    kernels = load_kernels(told["code"], folder)
    assert len(seen) == len(call.launches), (told["kernels"], call.launches)
    for each, (launch, options) in zip(seen, call.launches, strict=True):
        made = next(k for k in kernels if k.fn.__name__.startswith(each.kernel.__name__))
        told["differ"] += each.list_differences(launch, options, made)
    return told


class Launched(NamedTuple):
    """A launch in a graph."""

    kernel: Any
    num_warps: int
    grid: int
    arguments: dict[str, Any]
    written: list[str]

    @classmethod
    def read(cls, node: torch.fx.Node) -> Launched:
        from torch._higher_order_ops.triton_kernel_wrap import kernel_side_table as table

        given: dict[str, Any] = node.kwargs
        tuned: Any = table.get_kernel(given["kernel_idx"])
        constants = table.get_constant_args(given["constant_args_idx"])
        arguments = given["kwargs"] | constants
        grid, written = given["grid"][0][0], list(given["tensors_to_clone"])
        return cls(tuned.fn, tuned.configs[0].num_warps, grid, arguments, written)

    def list_differences(self, launch: Any, options: dict[str, Any], made: Any) -> list[str]:
        """What differs from a launch in eager torch, where Inductor's code has `made`."""
        from torchweld.bench.measure import launched

        warps = {self.num_warps, made.configs[0].num_warps, options["num_warps"]}
        given = dict(zip(launch.kernel.arg_names, launch.args, strict=False))
        given |= {name: x for name, x in options.items() if name not in launched._COMPILERS}
        types, constants, attributes = launched.sign(launch._replace(options=options))
        meta = made.triton_meta
        found = {n: "fp32" if kind == "fp64" else kind for n, kind in meta["signature"].items()}
        known = meta["constants"] | made.configs[0].kwargs
        narrow, wide = [
            launched.strip(compile_for(made.fn, (kinds, known, meta["configs"][0])).asm["ttgir"])
            for kinds in (found, meta["signature"])
        ]
        ours = compile_for(launch.kernel, (found, known, meta["configs"][0])).asm["ttgir"]
        body = wide.partition("{\n")[2].splitlines()[1:]
        checks = {
            "kernel": self.kernel is launch.kernel,
            "grid": self.grid == launch.grid,
            "warps": len(warps) == 1,
            "arguments": {n: _tell(x) for n, x in given.items()}
            == {n: _tell(x) for n, x in self.arguments.items()},
            "types": found == types,
            "constants": known == constants,
            "alignment": attributes.items() <= dict(meta["configs"][0]).items(),
            "code": narrow == launched.strip(ours),
            "floats": all("truncf" in line for line in body if "f64" in line),
        }
        return [f"{self.kernel.__name__}: {name}" for name, holds in checks.items() if not holds]


def compile_for(kernel: Any, signature: Any) -> Any:
    from torchweld.bench.measure import launched

    return launched.compile_launch(kernel, signature, {"num_warps": 8})


def _tell(value: Any) -> Any:
    value = value.meta["val"] if isinstance(value, torch.fx.Node) else value
    if not isinstance(value, torch.Tensor):
        return value
    return value.shape, value.stride(), value.storage_offset(), value.dtype


def write_block() -> str:
    """Inductor's code for CUDA graphs of a product, a residual with dropout and norm, a softmax."""
    fakes = FakeTensorMode(allow_non_fake_inputs=True)

    def run(x: Any, weight: Any, residual: Any, norm: Any, scores: Any) -> Any:
        ops: Any = torch.ops.torchweld
        first, second = (ops.seed(torch.empty(1, device="cuda")) for _ in range(2))
        x = torch.relu(x @ weight)
        z, y, _ = ops.dropout_add_rms_norm.triton(
            *(x, residual, norm.shape, norm, 0.1, 1e-6, first, [], [], False)
        )
        kept, _ = ops.softmax_dropout.triton(scores, None, 1.0, False, 0.1, second, [], [])
        return z + 1, y * 2, kept

    with fakes, torch.no_grad():
        sizes = ((512, 256), (256, 256), (512, 256), (256,), (4, 8, 64, 64))
        inputs = [torch.empty(size, device="cuda") for size in sizes]
        graph = trace(run, inputs)
    return write_code(graph, inputs, fakes, **{"triton.cudagraphs": True})


def main() -> None:
    from torchweld.bench.cases import CASES, Case
    from torchweld.registry import OPS

    told = {}
    with imitate_gpu(), tempfile.TemporaryDirectory() as folder:
        for name in sys.argv[1:]:
            op = OPS[name]
            case = Case(op, CASES[name].benchmarks_on_gpu[0], torch.bfloat16, "cuda")
            for call in list_calls(case):
                told[call.name] = compare(call, Path(folder))
        told["block"] = {"code": write_block()}
    print(json.dumps(told))


if __name__ == "__main__":
    main()
