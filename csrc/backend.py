"""The build backend: that of setuptools, plus torch as a requirement if there is none.

The build needs torch's headers. Under build isolation pip would download a whole torch to get them,
although the target environment nearly always has one already.
"""

from setuptools import build_meta
from setuptools.build_meta import *  # noqa: F403

import build as native


def _torch() -> list[str]:
    try:
        native.torch_include()
    except native.BuildError:
        return ["torch>=2.10"]
    return []


def get_requires_for_build_wheel(config_settings=None):
    """The requirements for building a wheel."""
    return [*build_meta.get_requires_for_build_wheel(config_settings), *_torch()]


def get_requires_for_build_editable(config_settings=None):
    """The requirements for an editable install."""
    return [*build_meta.get_requires_for_build_editable(config_settings), *_torch()]
