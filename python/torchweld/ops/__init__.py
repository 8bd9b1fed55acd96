"""One file per op: its declaration, reference, check and public function.

Importing the package imports, and so registers, every op that has a file here.
"""

import importlib
import pkgutil

for _module in pkgutil.iter_modules(__path__):
    if not _module.name.startswith("_"):
        importlib.import_module(f"{__name__}.{_module.name}")
