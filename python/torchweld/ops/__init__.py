"""One file per op: its declaration, reference, check and public function; families in folders.

Importing the package imports, and so registers, every op.
"""

import importlib
import pkgutil

for _module in pkgutil.walk_packages(__path__, f"{__name__}."):
    importlib.import_module(_module.name)
