"""A linear layer's logits in chunks of rows: torch's GEMMs around the row kernels.

The logits of a chunk, which their gradient overwrites, and copies of its rows of the input stay
within `memory` bytes. Ignored rows are dropped before the GEMM.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch

from torchweld import state
from torchweld.errors import ArgumentError
from torchweld.ops.gemm import product
from torchweld.ops.loss import rows
from torchweld.ops.loss.rows import LossTransform
from torchweld.registry.constant import assume_constant_result

# GEMMs of 64 rows are as fast per row as larger ones within a tenth.
_MULTIPLE = 64
# The rows of every GEMM with batch_invariant, so that results do not depend on the number of rows.
_INVARIANT = 64
# Alignment on a GPU: rows of logits start at multiples of this many bytes, and column blocks at
# multiples of this many elements. cuBLAS takes its fast kernels only for leading dimensions that
# are a multiple of 16 bytes. Triton loads 16 bytes at a time only if rows start at multiples of 16
# elements. At 128 bytes no two rows share a cache line.
_LINE = 128
_ACCESS = 16  # bytes
# Default chunk size: 256 MiB on CPUs and small GPUs, up to 4 GiB on large ones.
_LEAST_MEMORY, _MOST_MEMORY = 2**28, 2**32


Gradients = tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]
Results = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


class Layer(NamedTuple):
    """The linear layer, and how it is computed."""

    input: torch.Tensor  # [n, F]
    weight: torch.Tensor  # [V, F]
    bias: torch.Tensor | None  # [V]
    memory: int
    logits_dtype: torch.dtype
    float32_sums: bool
    batch_invariant: bool
    widest: int  # the most classes that any of the devices that share the vocabulary has

    def is_widened(self) -> bool:
        """Whether the factors are converted to the logits' dtype."""
        return self.logits_dtype != self.input.dtype


def as_layer(logits: torch.Tensor) -> Layer:
    """Given logits: a layer without a weight."""
    nothing: Any = None
    return Layer(logits, nothing, None, 0, logits.dtype, False, False, 0)


class Needs(NamedTuple):
    """The gradients that are wanted."""

    input: bool
    weight: bool
    bias: bool


NO_GRADIENT = Needs(False, False, False)


@assume_constant_result
def find_memory(device: torch.device) -> int:
    """Find how many bytes a chunk takes by default.

    On a GPU few rows leave processors idle in the GEMM of the input's gradient, and every chunk
    reads and writes the sum of the weight's gradient.
    """
    if device.type != "cuda" or not torch.cuda.is_available():  # a fake tensor's
        return _LEAST_MEMORY
    whole = torch.cuda.get_device_properties(device).total_memory
    return min(max(whole // 32, _LEAST_MEMORY), _MOST_MEMORY)


def _pads_rows(device: torch.device) -> bool:
    """Whether rows of logits are padded: kernels for the CPU take contiguous ones."""
    return device.type == "cuda"


def _pad(layer: Layer, width: int) -> int:
    """Count the elements from one row of logits to the next."""
    if not _pads_rows(layer.input.device):
        return width
    each = _LINE // layer.logits_dtype.itemsize
    return -(-width // each) * each


def _divide_classes(layer: Layer) -> list[slice]:
    """All classes, or first the tail past the last multiple of 16 bytes, then the others.

    A GPU's library needs more than padded rows: it also takes its kernels for unaligned matrices,
    which were 5 times slower, where the number of columns or of products is odd. The few classes
    come first, so that their sums are rounded to 16 bits while they are small.
    """
    width = layer.weight.shape[0]
    even = width - width % (_ACCESS // layer.logits_dtype.itemsize)
    if not _pads_rows(layer.input.device) or even in (0, width):
        return [slice(None)]
    return [slice(even, None), slice(0, even)]


def count_bytes_of_row(layer: Layer, drops: bool, needs: Needs) -> int:
    """Count the bytes that a row of a chunk takes."""
    width, features = _pad(layer, layer.widest), layer.weight.shape[1]
    size = layer.input.element_size()
    copies = int(drops) + int((drops or layer.is_widened()) and needs.input)
    in_blocks = layer.logits_dtype.itemsize if layer.is_widened() else 0
    return width * layer.logits_dtype.itemsize + features * (copies * size + 2 * in_blocks)


def _has_blocks(layer: Layer, needs: Needs) -> bool:
    """Whether blocks of the weight or of its gradient take a part of `memory`."""
    return layer.is_widened() or (needs.weight and layer.input.element_size() == 2)


def _block(layer: Layer) -> int:
    """Count the rows of the weight that are converted at a time, in an eighth of the memory."""
    row = max(1, layer.weight.shape[1] * 4)
    most = max(1, min(layer.widest, layer.memory // 8 // row))
    return most - most % _LINE if _LINE <= most < layer.widest else most


def check_memory(function: str, layer: Layer, needs: Needs) -> int:
    """Find how many rows fit into a chunk; raises ArgumentError if not even one does."""
    row = count_bytes_of_row(layer, True, needs)
    has_blocks = _has_blocks(layer, needs)
    most = (layer.memory - (layer.memory // 8 if has_blocks else 0)) // max(row, 1)
    if most < 1:
        least = row + -(-row // 7) if has_blocks else row
        raise ArgumentError(
            function, "memory", f"{layer.memory}", f"at least {least}, which holds one row"
        )
    return most


def find_rows(layer: Layer, needs: Needs) -> int:
    """Find the number of rows in a chunk, which depends on the number of all rows."""
    most = check_memory("linear_rows", layer, needs)
    if layer.batch_invariant:
        return _INVARIANT
    every = max(layer.input.shape[0], 1)
    even = -(-every // -(-every // most))  # the same number of chunks, of equal sizes
    multiple = -(-even // _MULTIPLE) * _MULTIPLE
    return int(min(multiple if multiple <= most else even, every))


def keeps_sums(layer: Layer, needs: Needs, rows_of_chunk: int) -> bool:
    """Whether the weight's gradient is accumulated in a separate float32 buffer."""
    several = layer.input.shape[0] > rows_of_chunk
    return needs.weight and several and layer.float32_sums and layer.weight.element_size() == 2


class Plan(NamedTuple):
    """How the chunks of a layer are computed: the same for all layers like it."""

    each: int  # the rows of a chunk
    stride: int  # the elements from one row of logits to the next
    parts: list[slice]  # the classes of each GEMM
    blocks: list[slice]  # the classes whose weights are converted at a time
    needs: Needs
    is_widened: bool
    sums: bool  # whether the weight's gradient has a float32 buffer
    kernel: Callable[..., Any]  # what runs on the logits of a chunk
    converts: bool  # whether 16-bit products are by float32 GEMMs


def make_plan(layer: Layer, needs: Needs, kernel: Callable[..., Any], adds: bool = False) -> Plan:
    """Make the plan of a layer; with `adds` the weight's gradient is added to an existing one."""
    each, block, classes = find_rows(layer, needs), _block(layer), layer.weight.shape[0]
    return Plan(
        each,
        _pad(layer, classes),
        _divide_classes(layer),
        [slice(begin, begin + block) for begin in range(0, classes, block)],
        needs,
        layer.is_widened(),
        not adds and keeps_sums(layer, needs, each),
        kernel,
        product.is_converted(layer.input, layer.input.dtype),
    )


def find_counted(target: torch.Tensor, ignored: int = -1) -> torch.Tensor | None:
    """Find the numbers of the rows with a target; None: take all.

    A CUDA graph cannot wait for the number of rows, so there the row kernels skip the others.
    """
    if target.shape[1] == 0 or (target.is_cuda and state.is_capturing()):
        return None
    counts = target != ignored
    counts = counts[:, 0] if target.shape[1] == 1 else counts.any(1)
    return None if bool(counts.all()) else counts.nonzero()[:, 0]


def _add_to_float32(
    total: torch.Tensor, left: torch.Tensor, right: torch.Tensor, has_begun: bool = True
) -> None:
    """Add a product of 16-bit matrices to a float32 one, or write it there, without rounding it."""
    if has_begun:
        torch.addmm(total, left, right, out_dtype=torch.float32, out=total)
    else:
        torch.mm(left, right, out_dtype=torch.float32, out=total)


@functools.cache
def _adds_to_float32(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether torch does so on this device: some versions have no such product, or refuse it."""
    if device.type != "cuda":
        return False
    try:
        total = torch.full((16, 16), 2.0**-12, device=device)
        # 1 + 2**-12 needs more bits than 16-bit numbers have.
        ones = torch.full((16, 16), 0.25, dtype=dtype, device=device)
        _add_to_float32(total, ones, ones)
        return bool((total == 1 + 2.0**-12).all())
    except (RuntimeError, TypeError):
        return False


class Gemms:
    """The GEMMs of one call, with buffers that its chunks share.

    `logits` is a buffer that exists already.
    """

    def __init__(
        self,
        layer: Layer,
        plan: Plan,
        total: torch.Tensor | None = None,
        logits: torch.Tensor | None = None,
    ) -> None:
        self.layer, self.plan = layer, plan
        x, weight = layer.input, layer.weight
        if logits is None:
            shape, strides = (plan.each, weight.shape[0]), (plan.stride, 1)
            logits = x.new_empty_strided(shape, strides, dtype=layer.logits_dtype)
        self._buffer = logits
        self._has_total = self._started = total is not None
        if total is None and plan.needs.weight:
            sums = torch.float32 if plan.sums else weight.dtype
            total = torch.empty_like(weight, dtype=sums)
        self.grad_weight = total
        self.grad_bias: torch.Tensor | None = None

    def compute_logits(self, x: torch.Tensor) -> torch.Tensor:
        """The logits of some rows, in the shared buffer."""
        layer, plan, count = self.layer, self.plan, x.shape[0]
        logits, bias, dtype = self._buffer[:count], layer.bias, layer.logits_dtype
        if layer.batch_invariant and count < plan.each:
            x = torch.cat([x, x.new_zeros(plan.each - count, x.shape[1])])
            logits = self._buffer
        for at in plan.blocks if plan.is_widened else plan.parts:
            left, right, part = x.to(dtype), layer.weight[at].to(dtype).t(), logits[:, at]
            added = None if bias is None else bias[at].to(dtype)
            if plan.converts:
                product.multiply_into(part, left, right, added)
            elif added is None:
                torch.mm(left, right, out=part)
            else:
                torch.addmm(added, left, right, out=part)
        return self._buffer[:count]

    def compute_grad_input(self, grad: torch.Tensor, out: torch.Tensor) -> None:
        """Write the input's gradient of some rows."""
        layer, plan = self.layer, self.plan
        if not plan.is_widened:
            first, *rest = plan.parts
            left, right = grad[:, first], layer.weight[first]
            if plan.converts:
                product.multiply_into(out, left, right)
            else:
                torch.mm(left, right, out=out)
            for at in rest:
                out.addmm_(grad[:, at], layer.weight[at])
            return
        total = grad.new_zeros(out.shape)
        for at in plan.blocks:
            total.addmm_(grad[:, at], layer.weight[at].to(layer.logits_dtype))
        out.copy_(total)

    def add_grad_weight(self, grad: torch.Tensor, x: torch.Tensor) -> None:
        """Add some rows' part of the gradients of weight and bias."""
        if self.plan.needs.bias:
            part = grad.sum(0, dtype=rows.accumulate_type(grad.dtype))
            self.grad_bias = part if self.grad_bias is None else self.grad_bias.add_(part)
        total = self.grad_weight
        if total is None:
            return
        layer, plan = self.layer, self.plan
        if plan.sums and grad.element_size() == 2 and _adds_to_float32(grad.device, grad.dtype):
            for at in plan.parts:
                _add_to_float32(total[at], grad[:, at].t(), x, self._started)
            self._started = True
            return
        # On CPUs without 16-bit products torch allocates the whole result in float32 as well.
        is_copied = layer.input.is_cpu and layer.input.element_size() == 2
        widens = plan.is_widened or plan.sums
        for at in plan.blocks if widens or is_copied else plan.parts:
            left, right, out = grad[:, at].t(), x.to(grad.dtype), total[at]
            if plan.converts and product.serves(left, right):
                product.multiply_into(out, left, right, out if self._started else None)
            elif self._started and widens:
                out += left @ right
            elif self._started:
                out.addmm_(left, right)
            elif widens:
                out.copy_(left @ right)
            else:
                torch.mm(left, right, out=out)
        self._started = True

    def finish(self) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """The gradients of weight and bias; None for one that was added to an existing one."""
        layer, weight, bias = self.layer, self.grad_weight, self.grad_bias
        if bias is None and self.plan.needs.bias and layer.bias is not None:  # there was no row
            bias = torch.zeros_like(layer.bias)
        if self._has_total:
            weight = None
        elif weight is not None:
            weight = (weight if self._started else weight.zero_()).to(layer.weight.dtype)
        return weight, None if bias is None or layer.bias is None else bias.to(layer.bias.dtype)


# The rows of a chunk, their input, and their logits.
_Chunk = tuple[slice | torch.Tensor, torch.Tensor, torch.Tensor]


class Begun(NamedTuple):
    """A pass whose first GEMM is queued."""

    gemms: Gemms
    chunks: Iterator[_Chunk]


def begin(
    plan: Plan,
    layer: Layer,
    target: torch.Tensor,
    ignored: int = -1,
    total: torch.Tensor | None = None,
) -> Begun:
    """Queue the first GEMM, of rows with a target that is not ignored.

    A GPU waits for the host until then, so this comes before all that the GEMM does not need.
    """
    gemms = Gemms(layer, plan, total)
    queued = _queue(gemms, find_counted(target, ignored))
    return Begun(gemms, itertools.chain(list(itertools.islice(queued, 1)), queued))


def _queue(gemms: Gemms, counted: torch.Tensor | None) -> Iterator[_Chunk]:
    """Chunks of the rows that count."""
    layer, each = gemms.layer, gemms.plan.each
    count = layer.input.shape[0] if counted is None else counted.shape[0]
    for first in range(0, count, each):
        at: slice | torch.Tensor = slice(first, first + each)
        at = at if counted is None else counted[at]
        x = layer.input[at].contiguous()
        yield at, x, gemms.compute_logits(x)


def run_forward(
    plan: Plan,
    layer: Layer,
    target: torch.Tensor,
    how: LossTransform,
    entropy: bool,
    smooth: bool,
    argmax: bool,
) -> Results:
    """Run the row kernel on all rows; the results of dropped rows are zeros, and a sum of 1."""
    begun = begin(plan, layer, target)
    made = _make_results(layer, target, how, argmax)
    is_same = how.probabilities is None and how.inverse_temperature is None
    for at, _, logits in begun.chunks:
        own = how if is_same else how.take(at)
        _keep(made, at, plan.kernel(logits, target[at], *own[1:6], entropy, smooth, argmax))
    return made


def _make_results(layer: Layer, target: torch.Tensor, how: LossTransform, argmax: bool) -> Results:
    count = target.shape[0]
    statistics = layer.input.new_zeros((count, rows.STATISTICS), dtype=how.kind)
    statistics[:, rows.SUM] = 1
    picked = layer.input.new_zeros(target.shape, dtype=how.kind)
    return picked, statistics, target.new_full((count if argmax else 0,), -1)


def _keep(made: Results, at: slice | torch.Tensor, parts: Results) -> None:
    for whole, part in zip(made, parts, strict=True):
        if whole.numel():
            whole[at] = part


def run_backward(
    plan: Plan,
    layer: Layer,
    target: torch.Tensor,
    how: LossTransform,
    statistics: torch.Tensor,
    coefficients: torch.Tensor,
    grad_picked: torch.Tensor,
    total: torch.Tensor | None = None,
) -> Gradients:
    """Compute the gradients from logits that are computed again.

    The weight's gradient is added to `total` if it is given.
    """
    gemms, queued = begin(plan, layer, target, total=total)
    grad_input = torch.zeros_like(layer.input) if plan.needs.input else None
    is_same = how.probabilities is None and how.inverse_temperature is None
    for at, x, logits in queued:
        own = how if is_same else how.take(at)
        parts = (statistics[at], coefficients[at], grad_picked[at])
        plan.kernel(logits, target[at], *parts, *own[1:6])
        _take_gradients(gemms, at, x, logits, grad_input)
    return (grad_input, *gemms.finish())


def run_both(
    plan: Plan,
    layer: Layer,
    target: torch.Tensor,
    how: LossTransform,
    make_coefficients: Callable[[], tuple[torch.Tensor, torch.Tensor]],
    smooth: bool,
    begun: Begun | None = None,
) -> tuple[Results, Gradients]:
    """Compute run_forward's results and the gradients, with one GEMM less than run_backward.

    `begun` if the first GEMM is queued already.
    """
    gemms, queued = begun or begin(plan, layer, target)
    coefficients, grad_picked = make_coefficients()
    made = _make_results(layer, target, how, False)
    grad_input = torch.zeros_like(layer.input) if plan.needs.input else None
    is_same = how.probabilities is None and how.inverse_temperature is None
    for at, x, logits in queued:
        own = how if is_same else how.take(at)
        parts = (coefficients[at], grad_picked[at], *own[1:6])
        _keep(made, at, plan.kernel(logits, target[at], *parts, smooth, False))
        _take_gradients(gemms, at, x, logits, grad_input)
    return made, (grad_input, *gemms.finish())


def _take_gradients(
    gemms: Gemms,
    at: slice | torch.Tensor,
    x: torch.Tensor,
    grad: torch.Tensor,
    grad_input: torch.Tensor | None,
) -> None:
    if grad_input is not None:
        if isinstance(at, slice):
            gemms.compute_grad_input(grad, grad_input[at])
        else:
            part = torch.empty_like(x)
            gemms.compute_grad_input(grad, part)
            grad_input[at] = part
    gemms.add_grad_weight(grad, x)
