"""Which files a call goes through."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import torchweld
from torchweld import state

# So often the path of a cold call comes back to a file at most.
RETURNS = 8
_OURS = str(Path(torchweld.__file__).parent)
# Questions to torch with a name: a reader of `state.is_compiling()` stays where it stands.
_ASKED = state.__file__


def find_returns(function: Callable[[], Any]) -> dict[str, int]:
    """The files of the package that a call comes back to more often than that, and how often."""
    entered: Counter[str] = Counter()
    path = [""]

    def note(frame: FrameType, event: str, _: Any) -> None:
        file = frame.f_code.co_filename
        if not file.startswith(_OURS) or file == _ASKED:
            return
        if event == "call":
            entered[file] += file != path[-1]
            path.append(file)
        elif event == "return":
            path.pop()

    sys.setprofile(note)
    try:
        function()
    finally:
        sys.setprofile(None)
    assert entered
    return {file: count - 1 for file, count in entered.items() if count - 1 > RETURNS}
