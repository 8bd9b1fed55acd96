"""What explain_fusion says of models of transformers: short lines, in our own words."""

from __future__ import annotations

import re

import named_models
import pytest
import small_models

import torchweld

# Texts of Python's and torch's exceptions, and of their types' arguments.
_RAW = re.compile(r"positional argument|sparse_coo|must match|object has no|Expected|\d+D|indices'")
# The tests of other files explain most of the named models.
NAMES = ("GPTJ", "Falcon", "Persimmon", "GptOss", "DeepseekV3", "Roberta", "Bart", "Swin", "ViT")


@pytest.mark.parametrize("name", [*NAMES, "mamba2", "bamba"])
def test_lines_are_short_and_reasons_are_ours(name: str) -> None:
    build = named_models.build if name in named_models.NAMES else small_models.build
    report = torchweld.explain_fusion(build(name))
    assert len(report) > 2
    assert max(map(len, str(report).splitlines())) <= 100
    for row in report:
        assert len(row.reason) <= 100, row
        assert not _RAW.search(row.reason), row
