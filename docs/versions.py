"""Adds a release's docs to the site of all releases: docs/versions.py BUILT SITE.

SITE gets a folder named after the version, versions.html, which lists all of them, and index.html,
which leads to the newest. Every page's side bar names its version and links to that list.
"""

from __future__ import annotations

import re
import shutil
import sys
from pathlib import Path

PAGE = "<!doctype html><meta charset=utf-8><title>torchweld</title>{}\n"


def add_version(built: Path, site: Path, version: str) -> None:
    """Copy the docs into `site`, and write its two pages again."""
    shutil.rmtree(site / version, ignore_errors=True)
    shutil.copytree(built, site / version)
    (site / ".nojekyll").touch()  # GitHub Pages would leave out folders such as _static
    versions = sorted(
        (path.name for path in site.iterdir() if re.fullmatch(r"\d+(\.\d+)*", path.name)),
        key=lambda name: [int(part) for part in name.split(".")],
        reverse=True,
    )
    items = "".join(f'<li><a href="{name}/">{name}</a>' for name in versions)
    (site / "versions.html").write_text(PAGE.format(f"<h1>torchweld</h1><ul>{items}</ul>"))
    refresh = f'<meta http-equiv="refresh" content="0; url={versions[0]}/">'
    (site / "index.html").write_text(PAGE.format(refresh))


if __name__ == "__main__":
    from torchweld import __version__

    add_version(Path(sys.argv[1]), Path(sys.argv[2]), __version__)
