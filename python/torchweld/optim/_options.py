"""The options that optimizers share: each with its type and its default, declared once.

An optimizer takes them as `**options: Unpack[...]`. `takes` makes its `__init__` of the signature.
"""

from __future__ import annotations

import difflib
import functools
import inspect
from collections.abc import Callable
from typing import Annotated, Any, TypedDict, TypeVar, get_type_hints

import torch

from torchweld.names import StateName

Init = TypeVar("Init", bound=Callable[..., None])


class TorchOptions(TypedDict, total=False):
    """The options of most of torch's optimizers."""

    maximize: Annotated[bool, False]
    foreach: Annotated[bool | None, None]
    capturable: Annotated[bool, False]
    differentiable: Annotated[bool, False]
    fused: Annotated[bool | None, None]


class StorageOptions(TypedDict, total=False):
    """How parameters and their states are stored, and how gradients are clipped."""

    state_dtype: Annotated[torch.dtype | StateName, torch.float32]
    master_weights: Annotated[bool | str, False]
    min_quantized_size: Annotated[int, 4096]
    stochastic_rounding: Annotated[bool, False]
    max_grad_norm: Annotated[float | None, None]


class StateOptions(StorageOptions, total=False):
    """How states are stored, and whether parameters have averages."""

    ema_decay: Annotated[float | None, None]


class OwnStorageOptions(TorchOptions, StorageOptions, total=False):
    """The options of an optimizer that torch lacks and whose parameters have no averages."""


class OwnOptions(TorchOptions, StateOptions, total=False):
    """The options of an optimizer that torch lacks."""


class CautiousOptions(OwnOptions, total=False):
    """The options of an optimizer whose step and weight decay can be cautious."""

    cautious: Annotated[bool, False]
    cautious_decay: Annotated[bool, False]


def list_options(options: type) -> dict[str, inspect.Parameter]:
    """The options of a TypedDict as parameters."""
    hints = get_type_hints(options, include_extras=True)
    of_one = {name: (hint.__origin__, hint.__metadata__[0]) for name, hint in hints.items()}
    return {
        name: inspect.Parameter(
            name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=kind
        )
        for name, (kind, default) in of_one.items()
    }


def with_defaults(options: type, given: dict[str, Any]) -> dict[str, Any]:
    """Take these options out of keyword arguments; an option that is not there has its default."""
    return {name: given.pop(name, p.default) for name, p in list_options(options).items()}


class takes:  # noqa: N801
    """Make an optimizer's `__init__` of its signature.

    The signature shows these options, and other keywords are refused. The body only checks and
    prepares. Then the `__init__` of the next class gets all arguments by name.
    """

    def __init__(self, options: type, *, without: str = "") -> None:
        shown = list_options(options).items()
        self._options = [p for name, p in shown if name != without]

    def __call__(self, init: Init) -> Init:
        self._body = init
        return self  # type: ignore[return-value]

    def __set_name__(self, owner: type[Any], name: str) -> None:
        body, signature = self._body, inspect.signature(self._body)
        *own, rest = signature.parameters.values()
        names = {p.name for p in (*own, *self._options)}

        @functools.wraps(body)
        def init(self: Any, *args: Any, **given: Any) -> None:
            for name in given.keys() - names:
                near = difflib.get_close_matches(name, names, 1)
                hint = f"; did you mean {near[0]!r}?" if near else ""
                raise TypeError(
                    f"{type(self).__name__}.__init__() got an unexpected keyword argument"
                    f" {name!r}{hint}"
                )
            body(self, *args, **given)
            bound = signature.bind(self, *args, **given)
            bound.apply_defaults()
            _, *arguments = bound.arguments.items()
            options = bound.arguments[rest.name]
            named = {key: value for key, value in arguments if key != rest.name}
            super(owner, self).__init__(**named, **options)

        shown = inspect.Signature([*own, *self._options])
        init.__signature__ = shown  # type: ignore[attr-defined]
        setattr(owner, name, init)
