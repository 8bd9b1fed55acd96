"""The docs site: Sphinx reads the repository's Markdown files as they are; see `make docs`.

The source folder is the repository, so that links between files mean the same on the site and in a
checkout. What only Sphinx understands, tables of contents, is added here while it reads.
"""

from __future__ import annotations

import os
import re
import site

# API pages import torchweld, so torch must be real: importing torchweld defines ops and derives
# from torch's classes, and signatures show torch's values. This is the path of the tests' torch and
# torchweld; the packages of the docs come first.
site.addsitedir(os.environ["TORCHWELD_SITE_PACKAGES"])

from torchweld import __version__

project = "torchweld"
release = __version__
root_doc = "README"
include_patterns = ["*.md", "docs/**"]
# Sphinx would search them for documents.
exclude_patterns = [
    ".*",
    "AGENTS.md",
    "SECURITY.md",
    "build",
    "dist",
    "csrc",
    "python",
    "tests",
    "bench",
    "triton_kernels",
]

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
myst_heading_anchors = 3

default_role = "code"
smartquotes_action = "D"  # only dashes: curly quotes around "gelu" are not Python
autodoc_inherit_docstrings = False
autodoc_typehints_format = "short"
python_maximum_signature_line_length = 80
napoleon_use_param = False
napoleon_use_rtype = False

html_theme = "furo"
html_title = f"torchweld {release}"
html_copy_source = False
html_show_copyright = False
html_static_path = ["site.css"]
html_css_files = ["site.css"]
# docs/versions.py puts releases into folders beside each other, with versions.html.
templates_path = ["sidebar"]
html_sidebars = {
    "**": [
        *("sidebar/brand.html", "sidebar/search.html", "sidebar/scroll-start.html"),
        *("sidebar/navigation.html", "versions.html", "sidebar/scroll-end.html"),
    ]
}
html_context = {"versions": os.environ.get("TORCHWELD_VERSIONS")}

# Captions of the side bar, and their pages.
_GROUPS = {
    "Start": ("fuse", "modules", "optimizers", "migrating", "troubleshooting"),
    "Use": (
        *("huggingface", "integrations", "losses", "block-sparse-attention", "rotary"),
        *("experts", "ops"),
    ),
    "Scale": ("stack", "pipelines-and-memory", "offload", "fsdp2", "one-bit"),
    "Understand": (
        *("numerics", "performance", "gpu", "models", "models-wide", "welds", "support"),
        "stability",
    ),
    "API": (
        *("api/torchweld", "api/functional", "api/nn", "api/optim", "api/sparse"),
        *("api/distributed", "api/random", "api/errors"),
    ),
    "Contribute": (
        *("../CONTRIBUTING", "adding-an-op", "adding-an-optimizer", "releasing", "../CHANGELOG"),
        "notebook/index",
    ),
}


def _contents(caption, pages):
    names = [os.path.normpath(f"docs/{page}") for page in pages]
    head = ("", "```{toctree}", ":hidden:", f":caption: {caption}", "")
    return "\n".join([*head, *names, "```", ""])


_CONTENTS = {
    "README": "".join(_contents(caption, pages) for caption, pages in _GROUPS.items()),
    "docs/notebook/index": """
```{toctree}
:hidden:
:glob:

*
```
""",
}


def _with_contents(app, docname, source):
    source[0] += _CONTENTS.get(docname, "")


def _as_rst(app, what, name, obj, options, lines):
    """Docstrings mark code by backticks or by indentation; * and | stand for themselves."""
    converted, in_code = [], False
    for at, line in enumerate(lines):
        indented = line.startswith("    ")
        if line and not indented:
            in_code = False
        elif indented and at > 1 and not lines[at - 1] and not lines[at - 2].startswith(" "):
            in_code = True
            converted += ["::", ""]
        converted.append(line if in_code else _escaped(line))
    lines[:] = converted


def _escaped(line):
    parts = re.split(r"(`[^`]*`)", line)
    parts[::2] = [re.sub(r"[*|]|_(?!\w)", r"\\\g<0>", part) for part in parts[::2]]
    return "".join(parts)


def setup(app):
    app.connect("source-read", _with_contents)
    app.connect("autodoc-process-docstring", _as_rst, priority=400)  # before napoleon
