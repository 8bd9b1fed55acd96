"""What torchweld raises."""


class ArgumentError(ValueError, RuntimeError):
    """An argument was not acceptable: names it, what came and what is accepted.

    Also a RuntimeError, which is what torch raises in these places: code that catches torch's
    error goes on working when a function is replaced.
    """

    def __init__(self, function: str, argument: str, got: object, accepted: str) -> None:
        super().__init__(f"{function}: {argument} is {got}; accepted: {accepted}")
        self.function = function
        self.argument = argument


class BackendError(RuntimeError):
    """A backend that was asked for by name cannot serve: says why."""

    def __init__(self, op: str, backend: str, reason: str) -> None:
        super().__init__(f"{op}: the {backend} backend cannot serve: {reason}")
        self.op = op
        self.backend = backend
        self.reason = reason
