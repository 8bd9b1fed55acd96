"""Predictions for the next step, so that buckets can step before it."""

from __future__ import annotations


class Expectations:
    """The factor of gradients, and whether they are written after the backward."""

    def __init__(self) -> None:
        self._before: float | None = None
        self._last: float | None = None
        self._wait, self._patience = 0, 1  # steps

    def factor(self, has_norm: bool) -> float | None:
        """The predicted factor; None if unknown.

        The loss scale is assumed to stay, and so is the factor of an unclipped norm. The factor of
        a clipped norm varies.
        """
        is_clear = not has_norm and self._last == 1.0
        return self._last if is_clear or self._before == self._last else None

    def of_edits(self) -> bool:
        """Whether gradients are written after the backward, as clip_grad_norm_ does."""
        return self._wait > 0

    def learn(self, factor: float, edited: bool) -> None:
        """If gradients are written after each backward, try to step early less and less often."""
        self._before, self._last = self._last, factor
        if edited:
            self._wait, self._patience = self._patience, min(2 * self._patience, 64)
        elif self._wait > 0:
            self._wait -= 1
        else:
            self._patience = 1
