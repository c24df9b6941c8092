"""`python -m sgpu_magic.cli`: the `sgpu` command where its script is not on the path."""

import sys

from sgpu_magic.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
