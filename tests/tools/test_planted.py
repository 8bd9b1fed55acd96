"""Planted faults are in today's sources, and the check at first use finds the known ones."""

from __future__ import annotations

import json

import pytest

import first_use
import fresh
import mutate
from conftest import PLACES


@pytest.mark.parametrize("fault", mutate.FAULTS, ids=str)
def test_a_fault_of_the_suite_can_be_planted(fault: mutate.Fault) -> None:
    """Two of 57 named code that was gone, and the script that runs them ended there."""
    assert fault.old in (mutate.ROOT / fault.file).read_text()
    named = [word.strip("'") for word in fault.tests.split() if word.startswith("tests/")]
    assert named
    assert all((mutate.ROOT / path).exists() for path in named)


@pytest.mark.parametrize("fault", first_use.FAULTS, ids=lambda fault: fault.words)
def test_a_fault_of_a_kernel_can_be_planted(fault: first_use.Fault) -> None:
    assert fault.old in (first_use.KERNELS / fault.file).read_text()


@pytest.mark.skipif(PLACES["interpreter"][2] is not None, reason=str(PLACES["interpreter"][2]))
@pytest.mark.parametrize("number", range(len(first_use.FAULTS)))
def test_what_finds_a_fault_of_a_kernel(number: int) -> None:
    """The check of the call, or of an earlier one of its class; and samples would, or would not."""
    printed = fresh.run_file(first_use.__file__, str(number), TRITON_INTERPRET="1")
    assert first_use.Found(*json.loads(printed.splitlines()[-1])) == first_use.FAULTS[number].found
