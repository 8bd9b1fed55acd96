"""Programs in interpreters that have imported torch and nothing else.

Each is forked from a process that only imported torch, which takes seconds. It imports torchweld
itself, with environment variables of its own; torch has read its variables already.
"""

from __future__ import annotations

import functools
import gc
import json
import os
import subprocess
import sys
import tempfile
import warnings
from pathlib import Path
from typing import NoReturn


def run(program: str, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """The program's status and what it printed."""
    server = _start()
    assert server.stdin is not None
    assert server.stdout is not None
    with tempfile.TemporaryDirectory() as folder:
        printed = [str(Path(folder) / name) for name in ("stdout", "stderr")]
        asked = [program, arguments, os.environ | environment, os.getcwd(), printed]
        server.stdin.write(json.dumps(asked) + "\n")
        server.stdin.flush()
        status = json.loads(server.stdout.readline())
        texts = [Path(path).read_text() for path in printed]
    return subprocess.CompletedProcess(arguments, status, *texts)


def run_file(path: str, *arguments: str, **environment: str) -> str:
    """What a test's file prints as a script, among the files of its folder and the helpers."""
    program = f"""
import runpy, sys
sys.path[:0] = [{str(Path(path).parent)!r}, {str(Path(__file__).parent)!r}]
runpy.run_path({path!r}, run_name="__main__")
"""
    ran = run(program, *arguments, **environment)
    assert ran.returncode == 0, ran.stderr
    return ran.stdout


@functools.cache
def _start() -> subprocess.Popen[str]:
    """The process to fork from. It ends with this one, which holds its standard input."""
    return subprocess.Popen(
        [sys.executable, __file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )


def _serve() -> None:
    import lean  # noqa: F401  # with torch

    sys.path.pop(0)  # the helpers' folder
    gc.freeze()  # no program searches torch's modules for garbage, nor copies their pages
    for line in sys.stdin:
        program, arguments, environment, folder, printed = json.loads(line)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # of numpy's threads, which wait
            child = os.fork()
        if child == 0:
            _be(program, arguments, environment, folder, printed)
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)


def _be(
    program: str, arguments: list[str], environment: dict[str, str], folder: str, printed: list[str]
) -> NoReturn:
    """Run the program in this process, and end it as an interpreter ends."""
    nothing = os.open(os.devnull, os.O_RDONLY)
    files = [os.open(path, os.O_WRONLY | os.O_CREAT) for path in printed]
    for number, file in enumerate((nothing, *files)):
        os.dup2(file, number)
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    sys.argv = ["", *arguments]
    exec(compile(program, "<program>", "exec"), {"__name__": "__main__"})
    sys.exit()


if __name__ == "__main__":
    _serve()
