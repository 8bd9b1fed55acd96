"""Builds the native libraries into the package; everything else is in pyproject.toml."""

import sys
from pathlib import Path

from setuptools import Extension, find_packages, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext

ROOT = Path(__file__).resolve().parent
sys.path.insert(0, str(ROOT / "csrc"))
import build as native  # noqa: E402


class BuildNative(build_ext):
    """Runs csrc/build.py; without a compiler the package installs without native libraries."""

    def run(self) -> None:
        package = ROOT / "python" if self.editable_mode or self.inplace else Path(self.build_lib)
        try:
            native.build(package / "torchweld" / "lib")
        except native.BuildError as error:
            if native.compiler_found():
                raise
            print(f"torchweld: {error}. Installing without native libraries: eager serves.")

    def get_outputs(self) -> list[str]:
        return []

    def get_output_mapping(self) -> dict[str, str]:
        return {}


class StableWheel(bdist_wheel):
    """py3-none: the libraries use torch's stable ABI and no CPython API."""

    def get_tag(self) -> tuple[str, str, str]:
        _, _, platform = super().get_tag()
        return "py3", "none", native.glibc_tag(platform, Path(self.bdist_dir or "."))


setup(
    # The last two have folders of their own at the top. Studies and tests are not installed.
    packages=[
        *find_packages("python"),
        *("torchweld." + found for found in find_packages(include=["bench*", "triton_kernels*"])),
    ],
    ext_modules=[Extension("torchweld.native", sources=[])],
    cmdclass={"build_ext": BuildNative, "bdist_wheel": StableWheel},
)
