"""The build backend: setuptools', which asks for torch only if the environment has none.

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
    """What building a wheel needs."""
    return [*build_meta.get_requires_for_build_wheel(config_settings), *_torch()]


def get_requires_for_build_editable(config_settings=None):
    """What an editable install needs."""
    return [*build_meta.get_requires_for_build_editable(config_settings), *_torch()]
