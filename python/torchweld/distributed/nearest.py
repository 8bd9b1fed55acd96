"""The sizes nearest to one that does not divide."""

from __future__ import annotations


def describe_nearest(size: int, count: int, least: int = 1) -> str:
    """Name the multiples of a count on both sides of a size, such as "4 or 8"."""
    below, above = size // count * count, -(-size // count) * count
    multiples = [n for n in dict.fromkeys((below, above)) if n >= max(least, 1)]
    return " or ".join(map(str, multiples or [-(-least // count) * count]))


def accept_multiples(what: str, size: int, count: int) -> str:
    """Say which sizes are accepted instead of one that does not divide among devices."""
    return f"{what} that {count} devices divide; the nearest are {describe_nearest(size, count)}"
