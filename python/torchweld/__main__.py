"""`python -m torchweld` is the command `torchweld`."""

import sys

from torchweld.commands.cli import main

if __name__ == "__main__":
    sys.exit(main())
