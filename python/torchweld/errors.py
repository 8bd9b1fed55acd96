"""The exceptions that torchweld raises."""

import difflib
import re
import textwrap
from typing import Any

# Characters of a value in a message: a tensor in a list's place has thousands.
_LONGEST = 200


class ArgumentError(ValueError, RuntimeError):
    """An argument was not acceptable. The message names it, its value and what is accepted.

    It is also a RuntimeError, as torch raises in these cases: code that catches torch's error
    still works when a function is replaced.
    """

    def __init__(self, function: str, argument: str, got: object, accepted: str) -> None:
        given = textwrap.shorten(str(got), _LONGEST)
        super().__init__(
            f"{function}: {argument} is {given}; accepted: {accepted}{suggest(given, accepted)}"
        )
        self.function = function
        self.argument = argument
        self._given = function, argument, got, accepted

    def __reduce__(self) -> tuple[Any, ...]:
        # Processes send it to each other; by default only the message would arrive.
        function, argument, got, accepted = self._given
        return type(self), (function, argument, str(got), accepted)


class BackendError(RuntimeError):
    """No backend selected by name can serve. The message gives the reason for each."""

    def __init__(self, op: str, reasons: dict[str, str]) -> None:
        self.op = op
        self.reasons = reasons
        self.backend = ", ".join(reasons)
        if len(reasons) == 1:
            self.reason = reasons[self.backend]
            super().__init__(f"{op}: the {self.backend} backend cannot serve: {self.reason}")
        else:
            self.reason = "; ".join(f"{backend}: {reason}" for backend, reason in reasons.items())
            super().__init__(f"{op}: none of these backends can serve: {self.reason}")


class CollectiveError(RuntimeError):
    """An exchange between ranks failed. The message says on which rank and why."""

    def __init__(self, function: str, why: str) -> None:
        super().__init__(f"{function}: {why}")
        self.function = function


def suggest(got: str, accepted: str) -> str:
    """A question with the accepted name that is spelled most like the given string, if any."""
    given = re.fullmatch(r"'(\w+)'", got)
    names = re.findall(r"[\w.]*\w", accepted)
    close = difflib.get_close_matches(given[1].lower(), names) if given else []
    if not close:
        return ""
    return f"; did you mean {close[0] if '.' in close[0] else repr(close[0])}?"
