"""Declarations of ops, from which everything else is derived.

An op is declared once, in its file under `ops/`, as an `Op`: two schemas, an eager reference, a
check, a fake. Each backend has its own overload of the schemas (`torchweld::layer_norm.cpu`,
`.cuda`, `.triton`), so that choosing a backend means choosing an op, visible in graphs and to
checkpointing policies. The argument names of the two schemas relate forward and backward, and the
autograd function is built from them:

* `grad_y` in the backward's arguments is the gradient of the forward's output `y`, and makes `y`
  one of the public results; the forward's other outputs are only saved for the backward pass;
* an argument named like a forward's input or output is that value, saved; if an input is not among
  them, the declaration has a `backward_reference`;
* `input_dtype` is the dtype of the argument `input`, and `need_weight` whether the gradient of the
  argument `weight` is wanted;
* `grad_input` in the backward's results is the gradient of the argument `input`, and is like it.

Functions of many arguments read them by name: `op.Args(*inputs).weight`.
"""

from torchweld.registry.backends import BACKENDS, EAGER, Backend
from torchweld.registry.composite import Composite
from torchweld.registry.op import OPS, Differentiable, Op, why_not_now
from torchweld.registry.samples import (
    SEED,
    Made,
    TensorSpec,
    activation,
    boolean,
    constant,
    materialize,
    padding,
    parameter,
    residual,
    take_rows,
    variance,
    weight,
)
from torchweld.registry.schema import Signature
from torchweld.registry.sharding import ELEMENTS, ROWS, WHOLE, Rows

__all__ = [
    "BACKENDS",
    "EAGER",
    "ELEMENTS",
    "OPS",
    "ROWS",
    "SEED",
    "WHOLE",
    "Backend",
    "Composite",
    "Differentiable",
    "Made",
    "Op",
    "Rows",
    "Signature",
    "TensorSpec",
    "activation",
    "boolean",
    "constant",
    "materialize",
    "padding",
    "parameter",
    "residual",
    "take_rows",
    "variance",
    "weight",
    "why_not_now",
]
