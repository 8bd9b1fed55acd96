"""Errors of what is tried, told from those that are none of its business, and not logged."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import traceback
from collections.abc import Iterator

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


# They tell of each refusal, in lines that look like errors of the program.
_LOGS = [logging.getLogger(f"torch.{name}") for name in ("_subclasses.fake_tensor", "_guards")]


@contextlib.contextmanager
def unlogged() -> Iterator[None]:
    """Let torch log nothing of what is tried and refused, unless TORCH_LOGS asks for it."""
    before = [log.disabled for log in _LOGS]
    for log in _LOGS:
        log.disabled = log.disabled or "TORCH_LOGS" not in os.environ
    try:
        yield
    finally:
        for log, was_disabled in zip(_LOGS, before, strict=True):
            log.disabled = was_disabled
