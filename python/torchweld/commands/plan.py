"""`torchweld plan`: how to train a GPT of some sizes on devices that need not be here."""

from __future__ import annotations

import argparse

from torchweld.distributed.planner.costs import PROFILES, STATES, Links
from torchweld.distributed.planner.search import SEARCHERS, load_profile, plan_for
from torchweld.distributed.planner.work import describe_transformer
from torchweld.errors import ArgumentError


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the command's options."""
    for name, size, about in (
        ("layers", 24, "layers of the GPT"),
        ("width", 2048, "its width; hidden layers have four times as many features"),
        ("heads", 16, "its heads"),
        ("vocabulary", 51200, "tokens that it knows"),
        ("length", 2048, "tokens of a sequence"),
        ("batch", 512, "sequences of a step"),
        ("devices", 8, "number of devices"),
        ("node", 8, "devices of a node"),
    ):
        parser.add_argument(f"--{name}", type=int, default=size, help=about)
    about = f"{', '.join(PROFILES)}, or a JSON file with the fields of a Profile"
    parser.add_argument("--profile", default="h100", help=about)
    parser.add_argument("--memory", type=float, help="GB of a device that may be used")
    about = "nothing is sent while devices compute, as between processes of a CPU"
    parser.add_argument("--no-overlap", action="store_true", help=about)
    parser.add_argument("--optimizer", nargs="+", choices=STATES, default=["adamw"])
    parser.add_argument("--searcher", choices=SEARCHERS, default="enumerate")
    parser.add_argument("--plot", help="a file for the picture of a step's timeline")


def run(options: argparse.Namespace) -> int:
    """Print the plan."""
    o = options
    try:
        work = describe_transformer(o.layers, o.width, o.heads, o.vocabulary, o.length)
        plan = plan_for(
            work,
            o.batch,
            o.devices,
            load_profile(o.profile) if o.profile.endswith(".json") else o.profile,
            memory=o.memory and o.memory * 1e9,
            links=Links(node=o.node, overlaps=not o.no_overlap),
            searcher=o.searcher,
            optimizer=tuple(o.optimizer),
        )
    except (ArgumentError, OSError) as error:
        print(error)
        return 2
    print(f"{work.parameters / 1e9:.4g} G parameters on {o.devices} x {o.profile}")
    plan.show()
    if o.plot:
        try:
            plan.simulate().draw(o.plot)
        except (OSError, ValueError) as error:  # no such folder, or a format nobody draws
            print(error)
            return 2
    return 0
