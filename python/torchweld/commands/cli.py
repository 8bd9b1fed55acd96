"""The command line: `torchweld`, and `python -m torchweld`."""

from __future__ import annotations

import argparse
import os
import re
import signal
import sys
from collections.abc import Sequence
from typing import NoReturn

import torchweld
from torchweld.bench import command as bench
from torchweld.bench.measure.machine import parse_positive
from torchweld.bench.models import demo
from torchweld.bench.show import compare
from torchweld.commands import doctor, tune
from torchweld.errors import suggest


class _Parser(argparse.ArgumentParser):
    """Prints an error without the usage before it, whose lines hid it, and with the name meant."""

    def error(self, message: str) -> NoReturn:
        wrong = re.search(r"'\w+'", message)
        hint = suggest(wrong[0], message[wrong.end() :]) if wrong else ""
        self.exit(2, f"{self.prog}: {message}{hint}; see {self.prog} --help\n")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a subcommand; return its exit status."""
    parser = _Parser(prog="torchweld", description=torchweld.__doc__)
    parser.add_argument("--version", action="version", version=f"torchweld {torchweld.__version__}")
    commands = parser.add_subparsers(required=True, metavar="command")

    about = "what this machine has, which backends serve, and why the others do not"
    command = commands.add_parser("doctor", help=about, description=f"Says {about}.")
    command.add_argument("--report", action="store_true", help="print it for an issue on GitHub")
    command.set_defaults(run=doctor.run)

    about = "measure the ops against eager torch, torch.compile and installed peers"
    also = "`torchweld bench compare A.json B.json` shows what became slower between two runs."
    described = f"{_sentence(about)} {also}"
    command = commands.add_parser("bench", help=about, description=described)
    bench.add_options(command)
    command.set_defaults(run=bench.run)

    about = "train a small GPT on the text of Python's library: eager, fused, with 8-bit states"
    command = commands.add_parser("demo", help=about, description=_sentence(about))
    demo.add_options(command)
    command.set_defaults(run=demo.run)

    about = "check the kernels on this GPU and time their tiles; the results drive the choice"
    command = commands.add_parser("tune", help=about, description=_sentence(about))
    tune.add_options(command)
    command.set_defaults(run=tune.run)

    about = "measure the link of a group that torchrun started, and say which compression pays"
    command = commands.add_parser("link", help=about, description=_sentence(about))
    about = "of the model, as 350e6"
    command.add_argument("--parameters", type=parse_positive, required=True, help=about)
    command.add_argument(
        "--step-ms",
        type=parse_positive,
        required=True,
        help="computation per step, without exchanges",
    )
    about = "samples per step on each rank"
    command.add_argument("--batch", type=parse_positive, default=1, help=about)
    command.set_defaults(run=_link)

    about = "choose how to train a model on devices that need not be here, by predicted costs"
    command = commands.add_parser("plan", help=about, description=_sentence(about))
    _add_plan(command, sys.argv[1:] if arguments is None else arguments)

    arguments = sys.argv[1:] if arguments is None else arguments
    try:
        if list(arguments[:2]) == ["bench", "compare"]:  # takes files; bench takes ops
            return compare.run(arguments[2:])
        options = parser.parse_args(arguments)
        status = options.run(options)
        print(end="", flush=True)  # nothing if standard output is closed
        return status
    except BrokenPipeError:  # the reader has closed the pipe, as `head` does
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for the flush at exit
        return 128 + signal.SIGPIPE


def _sentence(words: str) -> str:
    return f"{words[0].upper()}{words[1:]}."


def _add_plan(command: argparse.ArgumentParser, arguments: Sequence[str]) -> None:
    if list(arguments[:1]) == ["plan"]:
        from torchweld.commands import plan  # brings torch's distributed parts, only for this

        plan.add_options(command)
        command.set_defaults(run=plan.run)


def _link(options: argparse.Namespace) -> int:
    from torchweld.commands import link  # imports torch's pipelines, which takes a second

    return link.run(options)
