"""`python -m sgpu_magic.cli`: what `sgpu` does, where no script is on the path."""

import sys

from sgpu_magic.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
