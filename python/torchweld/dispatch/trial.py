"""An op's kernels on trial on the GPU at hand, on the inputs of the call that asks for them."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch._subclasses.fake_tensor import unset_fake_temporarily

from torchweld.dispatch import cache, clock, evidence, proof
from torchweld.dispatch import verdicts as kept_verdicts
from torchweld.dispatch.autograd import as_tuple
from torchweld.dispatch.recent import ALIGNMENT, Recent
from torchweld.dispatch.verdicts import Trial, Verdict, Verdicts
from torchweld.registry import BACKENDS, EAGER, OPS, Composite, Op, materialize
from torchweld.registry.backends import parts
from torchweld.registry.constant import assume_constant_result
from torchweld.registry.op import in_the_way
from torchweld.version import __version__

# Milliseconds of the GPU's that a class of calls may take, and elements that are judged.
BUDGET = 30.0
_MOST_ELEMENTS, _ROWS_BEHIND_GEMMS = 2**25, 256


def proven(op: Op, inputs: Sequence[Any]) -> str:
    """The backend that serves on this GPU, tried now if it is the first call of its class."""
    if (backend := _recent.find(op, inputs)) is not None:
        return backend
    known = _served.get(of := class_of(op, inputs))
    if known is None:
        trial = OpTrial(op, inputs)
        if not trial.backends:
            return EAGER  # which is no verdict on the class: a torch.func transform is on, perhaps
        known = verdicts(inputs[0].device.index).decide(trial)
        if trial.may_run():
            _served[of] = known
    if in_the_way() is not None:
        return EAGER
    if op.refused(known, inputs) is not None:
        known = EAGER
    if of in _served:
        _recent.keep(op, inputs, known)
    return known


# By class; the text of a key takes longer to make. A look-up is part of every call: no device is
# read, and a call like a recent one does not even ask for its class.
_served: dict[tuple[Any, ...], str] = {}
_recent = Recent()


def known(op: Op, inputs: Sequence[Any]) -> Verdict | None:
    """What was found of such calls, if anything."""
    trial = OpTrial(op, inputs)
    return verdicts(inputs[0].device.index).all_kept().get(trial.key)


# Rows and columns that stand for those of a compiled graph, which may be symbolic.
_COMPILED_FOR = (4096,), (1024,)


@assume_constant_result
def while_compiling(name: str, index: int | None, dtype: torch.dtype, direction: str) -> str:
    """The backend for an op in a compiled graph, the same at every size.

    If earlier verdicts for such calls agree, it is their backend; if they differ, it is eager. If
    there are none, the op is tried now on made-up numbers. torch.compile takes the result for a
    constant.
    """
    kept = verdicts(index).all_kept()  # type: ignore[arg-type]
    alike = f" elements, {str(dtype).removeprefix('torch.')} "  # the first argument's
    found = {
        v.backend for k, v in kept.items() if k.startswith(f"{name} {direction}, ") and alike in k
    }
    if not found:
        op, device = OPS[name], f"cuda:{index}" if torch.cuda.is_available() else "cpu"
        with unset_fake_temporarily(), torch.random.fork_rng(devices=[]):
            given = materialize(
                op.sized(*_COMPILED_FOR), dtype, device, requires_grad=direction == "full"
            )
            with torch.set_grad_enabled(direction == "full"):
                found = {proven(op, given)}
    return found.pop() if len(found) == 1 else EAGER


def class_of(op: Op, inputs: Sequence[Any]) -> tuple[Any, ...]:
    """What a verdict holds for: equal for calls that are alike."""
    x, train = inputs[0], torch.is_grad_enabled()
    kind = "cuda" if x.is_cuda else x.device.type
    autocast = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None
    width = x.size(-1) if x.ndim else 1
    found = [op.name, x.get_device(), autocast, width, x.numel().bit_length(), train]
    for at in op.tensors_at:
        if (t := inputs[at]) is None:
            found.append(None)
        else:
            aligned = t.data_ptr() % ALIGNMENT == 0 and t.is_contiguous()
            found += t.dtype, aligned, train and t.requires_grad
    for at in op.weights_at:
        found.append(inputs[at].size(0))  # GEMMs of as many columns may differ in their results'
    for at in op.flags_at:
        found.append(inputs[at])
    return tuple(found)


@functools.cache
def verdicts(device_index: int) -> Verdicts:
    """What is kept of a GPU under what else decides over speed: kernels, torch and Triton."""
    of_gpu = torch.cuda.get_device_properties(device_index)
    gpu = f"{of_gpu.name}, {of_gpu.multi_processor_count} SMs, sm_{of_gpu.major}{of_gpu.minor}"
    absent = BACKENDS["triton"].missing()
    triton = "none" if absent else importlib.import_module("triton").__version__
    software = (
        f"torchweld {__version__} {cache.kernel_hash()}, torch {torch.__version__}, triton {triton}"
    )
    return Verdicts(cache.folder() / "verdicts.json", f"{gpu}, {software}")


class OnGpu:
    """What trials on a GPU share: evidence comes first, and nothing runs during a capture."""

    backends: Sequence[str]

    def static(self) -> str:
        """What evidence prefers; eager without any."""
        return self.preferred(self.backends) or EAGER

    def preferred(self, backends: Sequence[str]) -> str | None:
        """What evidence prefers among them."""
        return next((b for b in backends if self.against(b) is None), None)

    def against(self, backend: str) -> str | None:
        """Why evidence does not take this backend."""
        raise NotImplementedError

    def mixed(self, backends: Sequence[str]) -> Sequence[str]:
        """None: a direction is not chosen for itself."""
        return ()

    def may_run(self) -> bool:
        """Not while a graph is captured."""
        return not torch.cuda.is_current_stream_capturing()


def checked(trial: Trial, device_index: int) -> str:
    """The backend that a trial finds right; for calls whose kernels are never timed."""
    return verdicts(device_index).decide(
        trial, "check" if kept_verdicts.mode == "time" else kept_verdicts.mode
    )


class OpTrial(OnGpu):
    """The trial of an op on these inputs."""

    def __init__(self, op: Op, inputs: Sequence[Any]) -> None:
        self._op, self._inputs = op, inputs
        self.direction = evidence.direction(inputs)
        self.backends = [b for b in op.backends if op.why_not(b, inputs) is None]
        self._cast_to = self._autocast_dtype()
        self._judged: tuple[list[Any], proof.Judge] | None = None

    @property
    def key(self) -> str:
        """The class of calls in words."""
        name, _, autocast, width, bits, _, *rest = class_of(self._op, self._inputs)
        words = [str(word).replace("torch.", "") for word in rest]
        words += [f"autocast {str(autocast).removeprefix('torch.')}"] if autocast else []
        size = f"width {width}, below 2^{bits} elements"
        return f"{name} {self.direction}, {size}, {' '.join(words)}"

    def against(self, backend: str) -> str | None:
        """Why evidence does not take this backend."""
        return evidence.against(self._op, backend, self._inputs)

    def mixed(self, backends: Sequence[str]) -> Sequence[str]:
        """The forward of one of these with the backward of another, where both directions run."""
        if self.direction != "full":
            return ()
        of = {name: parts(name) for name in self._op.kernels}
        return [name for name, two in of.items() if len(two) > 1 and set(two) <= set(backends)]

    def fault(self, backend: str) -> str | None:
        """What is wrong on some of the rows, forward and, where a gradient is wanted, backward."""
        with self._apart():
            if self._judged is None:
                given = self._some()
                exact = self._results(EAGER, [_wide(value) for value in given])
                self._judged = (given, proof.Judge(exact, self._results(EAGER, given)))
            given, judge = self._judged
            return judge.fault_of(partial(self._results, backend, given))

    def times(self, backends: Sequence[str]) -> Mapping[str, float]:
        """Milliseconds on the inputs themselves."""
        with self._apart():
            names = [EAGER, *backends]
            given = [_fresh(value, self._cast_to) for value in self._inputs]
            calls = [partial(self._results, name, given) for name in names]
            return dict(zip(names, clock.medians(calls, clock.DeviceClock(), BUDGET), strict=True))

    @contextmanager
    def _apart(self) -> Iterator[None]:
        """On the inputs' GPU, without autocast: the inputs are cast before."""
        x = self._inputs[0]
        with torch.cuda.device_of(x), torch.autocast(x.device.type, enabled=False):
            yield

    def _autocast_dtype(self) -> torch.dtype | None:
        """The dtype that autocast computes in, where it has a rule."""
        kind = self._inputs[0].device.type
        if not torch.is_autocast_enabled(kind):
            return None
        behind_gemms = isinstance(self._op, Composite)
        return torch.get_autocast_dtype(kind) if behind_gemms else self._op.autocast.get(kind)

    def _some(self) -> list[Any]:
        """The inputs with the first of their rows, so few that float64 fits beside the model."""
        x = self._inputs[0]
        rows = _ROWS_BEHIND_GEMMS if isinstance(self._op, Composite) else proof.ROWS
        rows = max(1, min(rows, _MOST_ELEMENTS // max(x.shape[-1], 1)))
        sizes = list(x.shape)
        for at in range(x.ndim - 1):
            others = torch.Size(sizes[:-1]).numel() // max(sizes[at], 1)
            sizes[at] = min(sizes[at], max(1, rows // max(others, 1)))
        factors = self._op.weights_at
        return [
            _fresh(_part(v, x.shape, sizes) if at not in factors else v, self._cast_to)
            for at, v in enumerate(self._inputs)
        ]

    def _results(self, backend: str, inputs: Sequence[Any]) -> proof.Results:
        """Results and gradients by name, without a trace in any graph of the user's."""
        train = self.direction == "full"
        with torch.set_grad_enabled(train):
            results = as_tuple(_run(self._op, backend, inputs))
            found = {name: r.detach() for name, r in zip(self._op.public, results, strict=True)}
            if not train:
                return found
            names = self._op.forward_signature.arguments
            leaves = {
                name: value
                for name, value in zip(names, inputs, strict=True)
                if isinstance(value, torch.Tensor) and value.requires_grad
            }
            flowing = [_gradient(result) for result in results]
            gradients = torch.autograd.grad(results, list(leaves.values()), flowing)
        return found | {f"grad_{n}": g for n, g in zip(leaves, gradients, strict=True)}


def _run(op: Op, backend: str, inputs: Sequence[Any]) -> Any:
    if backend == EAGER:
        return op.reference(*inputs)
    if isinstance(op, Composite):
        return op.fused(backend, *inputs)
    return op.kernels[backend].run(inputs)


def _gradient(result: torch.Tensor) -> torch.Tensor:
    """Random numbers, the same at every call, which every dtype has."""
    generator = torch.Generator(result.device).manual_seed(1)
    values = torch.randn(result.shape, generator=generator, device=result.device)
    return values.bfloat16().half().to(result.dtype)


def _part(value: Any, shape: Sequence[int], sizes: Sequence[int]) -> Any:
    """The part of a tensor that has, or broadcasts to, `shape` beside one of `sizes`."""
    if not isinstance(value, torch.Tensor) or value.ndim > len(shape):
        return value
    for at in range(value.ndim - 1):
        beside = at - value.ndim
        if value.shape[at] == shape[beside]:
            value = value.narrow(at, 0, sizes[beside])
    return value


def _fresh(value: Any, dtype: torch.dtype | None) -> Any:
    """A leaf with the tensor's values, of this dtype if one is given and they are numbers."""
    if not isinstance(value, torch.Tensor):
        return value
    # Running statistics, which some ops write to, have one dimension.
    found = value.detach().clone() if value.ndim <= 1 else value.detach()
    if dtype is not None and value.is_floating_point():
        found = found.to(dtype)
    return found.requires_grad_(value.requires_grad)


def _wide(value: Any) -> Any:
    """The same in float64."""
    if not (isinstance(value, torch.Tensor) and value.is_floating_point()):
        return value
    return value.detach().double().requires_grad_(value.requires_grad)
