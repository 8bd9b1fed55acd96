"""Errors of a model's code, told from those that are none of its business."""

from __future__ import annotations

import signal
import traceback

from torchweld.dispatch.proof import is_out_of_memory

# Errors of code on what it does not take.
_REFUSALS = (
    *(ArithmeticError, AssertionError, AttributeError, ImportError, LookupError, NameError),
    *(RuntimeError, TypeError, ValueError),
)


def raise_others(error: Exception) -> None:
    """Raise an error again that is no refusal, such as a handler's or a lack of memory."""
    refuses = isinstance(error, _REFUSALS) or type(error) is Exception
    if not refuses or is_out_of_memory(error) or was_raised_by_handler(error):
        raise error


def was_raised_by_handler(error: Exception) -> bool:
    """Whether the handler of a signal raised it, as for a timeout."""
    handlers = [signal.getsignal(number) for number in signal.valid_signals()]
    codes = {getattr(handler, "__code__", None) for handler in handlers if callable(handler)}
    return any(frame.f_code in codes for frame, _ in traceback.walk_tb(error.__traceback__))
