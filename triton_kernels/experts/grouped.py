"""experts_mlp in Triton: the launches of both passes.

With T tokens, K experts a token, R = T K rows, H inputs and outputs, and I hidden features of gated
experts, a forward pass has 6 R H I operations and both passes 18 R H I. At 16 bits the least bytes
of the forward pass are the weights, 6 E H I, of the input, gathered once, 2 R H, of z,
4 R I written, of the hidden layer, 2 R I written and read, and of the experts' results, 2 R H
written and read. The layer of Qwen3-30B (E 128, K 8, H 2048, I 768) on an H200, at 4.2 TB/s and
600 TFLOP/s, which products of such sizes reach in libraries:

    tokens    forward: products   bytes   both: products   bytes
      8192         1.03 ms        0.60       3.1 ms         1.9
     32768         4.1 ms         1.5       12.4 ms         4.6

Bytes overlap with products within a kernel but for sums over a token's experts and the order of the
rows: 0.07 ms a pass at 8192 tokens. The order takes about ten small launches.

The backward pass has u = grad_y[token] down first, not scaled, so that the gradient of a router
weight is the sum of u * hidden, and no result of an expert is kept. The end of that product reads z
and writes its gradient and the hidden layer times the weight, which the weights' gradients read:
one program a tile and expert, its rows in their order.

On an H200 a first run took 1.25 ms forward and 4.6 ms both at 8192 tokens, 4.2 and 15.7 ms at 32768
(472 TFLOP/s), where torch's grouped_mm and what is between its calls take 8.0 and 28.5 ms. Of the
4.6 ms the weights' gradients were 1.85: 334 TFLOP/s, where other products reach 480 to 600. They
waited for the places of rows, which are loaded a step ahead since.

The host never waits: it launches the most tiles there can be, one per expert more than the rows
need.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
import triton
from torch.nn.functional import grouped_mm

from ..act import _kind
from ..launch import Launch, _is_captured, launch, run
from ..linear_act import precision
from ..memory import find_shared_memory, memory_of
from ..tensors import aligned, contiguous, empty_like, or_empty, rows_of
from ..tile import Tile
from .products import _first_product, _hidden_gradient, _product, _weight_gradient
from .rows import (
    Order,
    bias_gradient_launch,
    combine_launch,
    map_tiles,
    sort,
    split_order,
    weights_gradient_launch,
)


class Form(NamedTuple):
    """The op's arguments from `activation` on."""

    activation: str
    approximate: str
    gated: bool
    interleaved: bool
    transposed: bool
    weights_first: bool
    limit: float | None
    up_offset: float

    @property
    def order(self) -> str:
        """How the columns of z lie."""
        return ("turns" if self.interleaved else "halves") if self.gated else "plain"


class Tiles(NamedTuple):
    """The tiles of each product; all but the last have the same rows."""

    first: Tile
    product: Tile
    hidden: Tile
    weight: Tile


_MEMORY_OF_MANY = 192 * 1024  # bytes of shared memory
_LAST = Tile(64, 64, 32, 4, 3)
_OF_MANY = Tile(128, 128, 64, 4, 3)  # two programs to a processor, where torch does not serve
# For many rows an expert, also on GPUs with less shared memory; for few rows; and for elements that
# are loaded one by one, or float32 without tensor cores.
TILES = {
    "many": Tiles(
        Tile(128, 256, 64, 8, 4),
        Tile(128, 256, 64, 8, 4),
        Tile(128, 256, 64, 8, 3),
        _OF_MANY,
    ),
    "many in less memory": Tiles(*[Tile(128, 128, 64, 8, 3)] * 4),
    "few": Tiles(*[Tile(64, 128, 64, 4, 3)] * 4),
    "last": Tiles(_LAST, _LAST, _LAST, _LAST._replace(stages=2)),
}


def has_many_rows(rows: int, experts: int) -> bool:
    """Whether an expert has so many rows that other tiles serve."""
    return rows > 64 * experts


def choose_tiles(x: torch.Tensor, form: Form, rows: int, experts: int, *widths: int) -> Tiles:
    """The tiles for this many rows of these widths."""
    if x.dtype.itemsize > 2 or any(width % 8 for width in widths):
        return TILES["last"]
    if not has_many_rows(rows, experts):
        return TILES["few"]
    return _for_form(_tiles_of_many(find_shared_memory(x.device)), form)


def _tiles_of_many(memory: int) -> Tiles:
    return TILES["many" if memory >= _MEMORY_OF_MANY else "many in less memory"]


def _for_form(tiles: Tiles, form: Form) -> Tiles:
    """The tiles, narrower where the end of a product separates columns that take turns."""
    if form.order == "turns" and tiles.hidden.columns > 128:
        return tiles._replace(hidden=Tile(128, 128, 64, 8, 4))
    return tiles


def _factor(matrices: torch.Tensor, transposed: bool) -> torch.Tensor:
    """[experts, out, in], copied if it is not aligned."""
    if matrices[0].numel() >= 2**31:
        raise ValueError("an expert's matrix has 2**31 elements or more")
    copied = aligned(matrices)
    return copied.mT if transposed else copied


class _Call(NamedTuple):
    """What all products of a call have in common."""

    x: torch.Tensor
    gate_up: torch.Tensor  # [experts, out, in], like `down`
    down: torch.Tensor
    gate_up_bias: torch.Tensor | None
    down_bias: torch.Tensor | None
    weights: torch.Tensor
    form: Form
    top: int
    tiles: Tiles
    order: Order
    map: torch.Tensor

    @property
    def kind(self) -> dict[str, str]:
        form = self.form
        return {"ACTIVATION": _kind(form.activation, form.approximate), "FORM": form.order}

    @property
    def scales(self) -> torch.Tensor | None:
        """The weights, if they are factors of the experts' results."""
        return None if self.form.weights_first else self.weights

    @property
    def hidden(self) -> int:
        return self.down.shape[2]


def _options(tile: Tile, inner: int | None = None) -> dict[str, Any]:
    options = {"BAND": 8, "PRECISION": precision()}
    options |= {"ROWS": tile.rows, "COLUMNS": tile.columns, "INNER": tile.inner}
    if inner is not None:
        options["INNER_FITS"] = inner % tile.inner == 0
        if tile is _LAST:  # by itself ptxas keeps to half of the registers, and spills
            options["maxnreg"] = 255
    return options | {"num_warps": tile.warps, "num_stages": tile.stages}


def _first_launch(call: _Call, z: torch.Tensor | None, hidden: torch.Tensor | None) -> Launch:
    tile, weight, form = call.tiles.first, call.gate_up, call.form
    columns, inner, row_tiles = call.hidden, weight.shape[2], call.map.shape[1]
    wide = tile.columns // 2 if form.gated else tile.columns
    return launch(
        _first_product,
        row_tiles * triton.cdiv(columns, wide),
        *(call.x, weight, call.gate_up_bias, call.weights if form.weights_first else None),
        *(call.order.places, call.map, z, hidden, row_tiles, columns, inner, call.x.stride(0)),
        *(*weight.stride(), form.limit, float(form.up_offset)),
        TOP=call.top,
        COLUMNS_ALIGN=columns % 16 == 0,
        **call.kind,
        **_options(tile, inner),
    )


def _product_launch(
    call: _Call,
    left: torch.Tensor,
    factor: torch.Tensor,
    bias: torch.Tensor | None,
    result: torch.Tensor | None,
    weights: torch.Tensor | None = None,
    partials: torch.Tensor | None = None,
) -> Launch:
    """left factor^T; with weights, they are its factors, and partials sum its products with x."""
    tile, row_tiles = call.tiles.product, call.map.shape[1]
    _, columns, inner = factor.shape
    return launch(
        _product,
        row_tiles * triton.cdiv(columns, tile.columns),
        *(left, factor, bias, weights, call.x, call.order.places, call.map, result, partials),
        *(row_tiles, len(left), columns, inner, call.x.stride(0), *factor.stride()),
        TOP=call.top,
        **_options(tile, inner),
    )


def _hidden_gradient_launch(
    call: _Call,
    grad: torch.Tensor,
    z: torch.Tensor,
    grad_z: torch.Tensor | None,
    hidden: torch.Tensor | None,
    partials: torch.Tensor | None,
) -> Launch:
    tile, row_tiles, factor = call.tiles.hidden, call.map.shape[1], call.down.mT
    _, columns, inner = factor.shape
    return launch(
        _hidden_gradient,
        row_tiles * triton.cdiv(columns, tile.columns),
        *(grad, factor, call.scales, z, call.order.places, call.map, grad_z, hidden, partials),
        *(row_tiles, len(z), columns, inner, grad.stride(0), *factor.stride()),
        *(call.form.limit, float(call.form.up_offset)),
        TOP=call.top,
        **call.kind,
        **_options(tile, inner),
    )


def _weight_gradient_launch(
    call: _Call,
    out: torch.Tensor,
    given: torch.Tensor,
    grad: torch.Tensor,
    gathers_out: bool,
    weights: torch.Tensor | None,
) -> Launch:
    """out^T given over each expert's rows. One of them is gathered, times the weights if given."""
    if call.form.transposed:
        out, given = given, out
    tile, (experts, rows, columns) = call.tiles.weight, grad.shape
    tiles = triton.cdiv(rows, tile.rows) * triton.cdiv(columns, tile.columns)
    return launch(
        _weight_gradient,
        experts * tiles,
        *(out, given, weights, call.order.places, call.order.bounds, grad, rows, columns),
        *(out.stride(0), given.stride(0)),
        TOP=call.top,
        GATHERS_LEFT=gathers_out != call.form.transposed,
        **_options(tile),
    )


# --- Weights' gradients by torch ------------------------------------------------------------------


def _multiplies_sorted(call: _Call) -> bool:
    """Whether torch computes the weights' gradients, from rows that lie in the order of experts.

    Its product reads rows by descriptors, as a gather cannot. On an H200 a gradient of Mixtral's
    first weights takes 3.00 ms, and 0.06 ms for the copy of its rows; the kernel here takes 4.52
    (with Qwen3's 0.77 and 0.12 for 1.15). Elsewhere torch loops over experts, and waits for the
    GPU.
    """
    x = call.x
    if not x.is_cuda or x.dtype != torch.bfloat16 or call.tiles.weight is not _OF_MANY:
        return False
    if torch.cuda.get_device_capability(x.device) != (9, 0) or len(call.gate_up) > _MOST_GROUPS:
        return False
    return _is_right(x.device)


_MOST_GROUPS = 1023  # torch's product refuses more
_known: dict[torch.device, bool] = {}


def _is_right(device: torch.device) -> bool:
    """Whether torch's product is known to be right here.

    To find out waits for the GPU, so a captured call goes by what an earlier one found. A lack of
    memory says nothing of later calls.
    """
    if device not in _known:
        if _is_captured():
            return False
        try:
            _known[device] = _find_out(device)
        except torch.OutOfMemoryError:
            return False
    return _known[device]


def _find_out(device: torch.device) -> bool:
    """Whether torch's product is right here, twice, also for experts without rows.

    On sm_100 some versions of torch leave numbers in the gradients of such experts. Rows of no
    expert, which nobody writes, are NaN.
    """
    bounds = torch.tensor([0, 9, 9, 80, 81], dtype=torch.int32, device=device)
    numbers = torch.arange(90 * 64, device=device).view(90, 64)
    left, right = (numbers % n - n // 2 for n in (7, 5))  # whose products are exact
    nobodys = torch.arange(81, 90, device=device)
    factors = [of.bfloat16().index_fill(0, nobodys, torch.nan) for of in (left, right)]
    spans = itertools.pairwise(bounds.tolist())
    wanted = torch.stack([left[a:b].float().t() @ right[a:b].float() for a, b in spans])
    try:
        for _ in range(2):
            dirty = torch.full_like(wanted, torch.nan, dtype=torch.bfloat16)
            del dirty  # an element that is not written is NaN then
            found = grouped_mm(factors[0].t(), factors[1], offs=bounds[1:])
            if not torch.equal(found.float(), wanted.bfloat16().float()):
                return False
    except torch.OutOfMemoryError:
        raise
    except (RuntimeError, TypeError, ValueError):
        return False
    return True


# --- Called by the registry, with the signatures of the ops' schemas ---


def _make_call(
    x: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    indices: torch.Tensor,
    weights: torch.Tensor,
    gate_up_bias: torch.Tensor | None,
    down_bias: torch.Tensor | None,
    form: Form,
    saved: torch.Tensor | None = None,
) -> tuple[_Call, torch.Tensor]:
    """The call, and the tensor with the order of its rows; sorts them unless it is given."""
    for factor in (gate_up, down):
        if factor.dtype != x.dtype or factor.device != x.device or factor.ndim != 3:
            raise ValueError("the experts' weights do not fit x")
    flat, rows, experts = aligned(rows_of(x)), indices.numel(), gate_up.shape[0]
    steps: list[Launch] = []
    if saved is None:
        saved, steps = sort(indices, experts)
    order = split_order(saved, rows, experts)
    gate_up, down = (_factor(each, form.transposed) for each in (gate_up, down))
    widths = (*gate_up.shape[1:], *down.shape[1:])
    tiles = choose_tiles(x, form, rows, experts, *widths)
    places, step = map_tiles(order, tiles.first.rows)
    run(x, *steps, step)
    first_bias, last_bias = contiguous(gate_up_bias), contiguous(down_bias)
    rest = weights.contiguous(), form, indices.shape[-1], tiles, order, places
    return _Call(flat, gate_up, down, first_bias, last_bias, *rest), saved


def experts_mlp(
    x: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    indices: torch.Tensor,
    weights: torch.Tensor,
    gate_up_bias: torch.Tensor | None,
    down_bias: torch.Tensor | None,
    *how: Any,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The result, the order of the rows, and z if it is saved."""
    *form, save = how
    tensors = (x, gate_up, down, indices, weights, gate_up_bias, down_bias)
    call, saved = _make_call(*tensors, Form(*form))
    rows, width = indices.numel(), call.down.shape[1]
    z = x.new_empty((rows if save else 0, call.gate_up.shape[1]))
    hidden = x.new_empty(rows, call.hidden)
    run(x, _first_launch(call, z if save else None, hidden))
    y = x.new_empty(rows, width)
    run(x, _product_launch(call, hidden, call.down, call.down_bias, y))
    del hidden
    out = x.new_empty((*x.shape[:-1], width))
    run(x, combine_launch(y, call.scales, call.order, out.view(len(call.x), width), call.top))
    return out, saved, z


def experts_mlp_backward(
    grad_y: torch.Tensor,
    saved: torch.Tensor,
    z: torch.Tensor,
    x: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    indices: torch.Tensor,
    weights: torch.Tensor,
    gate_up_bias: torch.Tensor | None,
    down_bias: torch.Tensor | None,
    *how: Any,
) -> tuple[torch.Tensor, ...]:
    """The gradients that are needed, in the order of the tensors; empty ones for the others."""
    form, needs = Form(*how[:8]), how[8:]
    tensors = (x, gate_up, down, indices, weights, gate_up_bias, down_bias)
    call, _ = _make_call(*tensors, form, saved)
    sources = (x, gate_up, down, weights, gate_up_bias, down_bias)
    wanted = [t if need else None for need, t in zip(needs, sources, strict=True)]
    grads = [t if t is None or at in _FACTORS else empty_like(t) for at, t in enumerate(wanted)]
    backward = _Backward(call, aligned(rows_of(grad_y)), indices.contiguous(), *grads)
    for at, grad in zip(_FACTORS, backward.run(z), strict=True):
        grads[at] = grad
    return tuple([or_empty(grad, x) for grad in grads])


_FACTORS = 1, 2  # gate_up and down among the gradients


class _Backward(NamedTuple):
    """The backward pass of a call, and the gradients that it writes.

    `gate_up` and `down` are the factors themselves; `run` returns their gradients.
    """

    call: _Call
    grad: torch.Tensor
    indices: torch.Tensor
    x: torch.Tensor | None
    gate_up: torch.Tensor | None
    down: torch.Tensor | None
    weights: torch.Tensor | None
    gate_up_bias: torch.Tensor | None
    down_bias: torch.Tensor | None

    def run(self, z: torch.Tensor) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        call, rows = self.call, self.indices.numel()
        if self.down_bias is not None:
            self._run(
                bias_gradient_launch(self.grad, call.scales, call.top, call.order, self.down_bias)
            )
        if all(t is None for t in self[3:-1]):
            return None, None
        if len(z) < rows:
            z = call.x.new_empty(rows, call.gate_up.shape[1])
            self._run(_first_launch(call, z, None))
        grad_z, of_down = self._find_hidden_gradient(z)
        if grad_z is None:
            return None, of_down
        if self.gate_up_bias is not None:
            self._run(bias_gradient_launch(grad_z, None, 0, call.order, self.gate_up_bias))
        first = call.weights if call.form.weights_first else None
        of_gate_up = None
        if self.gate_up is not None:
            of_gate_up = self._multiply(grad_z, call.x, self.gate_up, False, first)
        if self.x is not None or (first is not None and self.weights is not None):
            self._find_input_gradient(grad_z, first)
        return of_gate_up, of_down

    def _multiply(
        self,
        out: torch.Tensor,
        given: torch.Tensor,
        factor: torch.Tensor,
        gathers_out: bool,
        weights: torch.Tensor | None,
    ) -> torch.Tensor:
        """A factor's gradient, as _weight_gradient_launch says."""
        call = self.call
        if weights is not None or not _multiplies_sorted(call):
            grad = empty_like(factor)
            self._run(_weight_gradient_launch(call, out, given, grad, gathers_out, weights))
            return grad
        tokens = call.order.places // call.top
        if gathers_out:
            out = out.index_select(0, tokens)
        else:
            given = given.index_select(0, tokens)
        left, right = (given, out) if call.form.transposed else (out, given)
        return grouped_mm(left.t(), right, offs=call.order.bounds[1:])

    def _run(self, *launches: Launch) -> None:
        run(self.grad, *launches)

    def _make_partials(self, columns: int, tile: Tile, needed: bool) -> torch.Tensor | None:
        """Sums for the weights' gradient, one for each row and tile of columns."""
        if self.weights is None or not needed:
            return None
        sizes = triton.cdiv(columns, tile.columns), self.indices.numel()
        return self.grad.new_empty(sizes, dtype=torch.float32)

    def _add_partials(self, partials: torch.Tensor | None, bias: torch.Tensor | None) -> None:
        if partials is not None and self.weights is not None:
            given = (partials, self.call.order, self.indices, self.grad, bias, self.weights)
            self._run(weights_gradient_launch(*given))

    def _find_hidden_gradient(
        self, z: torch.Tensor
    ) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """The gradients of z and of the second factor, if needed; of the weights too."""
        call, is_last = self.call, not self.call.form.weights_first
        wanted = [self.x, self.gate_up, self.gate_up_bias, None if is_last else self.weights]
        grad_z = None if all(t is None for t in wanted) else torch.empty_like(z)
        hidden = None if self.down is None else z.new_empty(len(z), call.hidden)
        partials = self._make_partials(call.hidden, call.tiles.hidden, is_last)
        self._run(_hidden_gradient_launch(call, self.grad, z, grad_z, hidden, partials))
        self._add_partials(partials, call.down_bias)
        of_down = None
        if self.down is not None and hidden is not None:
            of_down = self._multiply(self.grad, hidden, self.down, True, None)
        return grad_z, of_down

    def _find_input_gradient(self, grad_z: torch.Tensor, first: torch.Tensor | None) -> None:
        """The gradients of the input, and of weights that are its factors."""
        call, factor = self.call, self.call.gate_up.mT
        partials = self._make_partials(factor.shape[1], call.tiles.product, first is not None)
        rows = None if self.x is None else self.grad.new_empty(len(grad_z), factor.shape[1])
        self._run(_product_launch(call, grad_z, factor, None, rows, first, partials))
        self._add_partials(partials, None)
        if self.x is not None and rows is not None:
            self._run(combine_launch(rows, None, call.order, rows_of(self.x), call.top))


# The forms of models, and one without a model: halves, turns, plain, and weights of the inputs.
_FORMS = {
    "halves": Form("silu", "none", True, False, False, False, None, 0.0),
    "turns": Form("quick_gelu", "none", True, True, True, False, 7.0, 1.0),
    "plain": Form("relu2", "none", False, False, False, False, None, 0.0),
    "weights first": Form("gelu", "none", True, False, False, True, None, 0.0),
}


def aot_cases(capability: int) -> Iterator[tuple[str, Launch]]:
    """Named launches, whose kernels the ahead-of-time tests compile."""
    many = _tiles_of_many(memory_of(capability))
    for name, form in _FORMS.items():
        tiles = _for_form(many, form)
        yield from _cases(f"{name} bfloat16", form, torch.bfloat16, tiles)
    for name in ("halves", "turns"):
        yield from _cases(f"{name} bfloat16, few", _FORMS[name], torch.bfloat16, TILES["few"])
    for dtype, width in ((torch.bfloat16, 1023), (torch.float32, 1024)):
        name = f"halves {dtype} {width}".replace("torch.", "")
        yield from _cases(name, _FORMS["halves"], dtype, TILES["last"], width)


def _cases(
    name: str, form: Form, dtype: torch.dtype, tiles: Tiles, width: int = 1024
) -> Iterator[tuple[str, Launch]]:
    """The launches of both passes, with biases where columns take turns."""
    rows, experts, hidden, top = 4096, 16, 768, 4
    doubled = 2 * hidden if form.gated else hidden

    def make(*shape: int, dtype: torch.dtype = dtype) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    factors = [make(experts, doubled, width), make(experts, width, hidden)]
    if form.transposed:
        factors = [make(*factor.mT.shape) for factor in factors]
    has_biases = form.order == "turns"
    biases = [make(experts, doubled), make(experts, width)] if has_biases else [None, None]
    weights = make(rows // top, top, dtype=torch.float32)
    indices = make(rows // top, top, dtype=torch.int64)
    order = split_order(make(2 * rows + experts + 1, dtype=torch.int32), rows, experts)
    places, step = map_tiles(order, tiles.first.rows)
    x, z = make(rows // top, width), make(rows, doubled)
    hidden_rows, y = make(rows, hidden), make(rows, width)
    first_factor, last_factor = (_factor(each, form.transposed) for each in factors)
    rest = weights, form, top, tiles, order, places
    call = _Call(x, first_factor, last_factor, biases[0], biases[1], *rest)
    sums = make(4, rows, dtype=torch.float32)
    first = weights if form.weights_first else None
    of_input, of_hidden = (sums, None) if form.weights_first else (None, sums)
    launches = [
        step,
        _first_launch(call, z, hidden_rows),
        _first_launch(call, z, None),
        _first_launch(call, None, hidden_rows),
        _product_launch(call, hidden_rows, call.down, call.down_bias, y),
        combine_launch(y, call.scales, order, x, top),
        _hidden_gradient_launch(call, x, z, z, hidden_rows, of_hidden),
        weights_gradient_launch(sums, order, indices, x, call.down_bias, weights),
        _weight_gradient_launch(call, x, hidden_rows, factors[1], True, None),
        _weight_gradient_launch(call, z, x, factors[0], False, first),
        _product_launch(call, z, call.gate_up.mT, None, y, first, of_input),
        combine_launch(y, None, order, x, top),
    ]
    for rows_, scales, of_top, n in ((x, call.scales, top, width), (z, None, 0, doubled)):
        launches.append(bias_gradient_launch(rows_, scales, of_top, order, make(experts, n)))
    yield from zip(itertools.repeat(name), launches)
