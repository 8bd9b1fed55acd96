"""Calls that torchweld refuses."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from torchweld.errors import ArgumentError


def refuses(says: str, call: Callable[..., Any], *given: Any, **named: Any) -> ArgumentError:
    """Check that a call raises an ArgumentError whose text has this pattern; return the error."""
    with pytest.raises(ArgumentError, match=says) as caught:
        call(*given, **named)
    return caught.value
