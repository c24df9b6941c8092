"""`python -m tests.benchmarks`."""

import sys

from tests.benchmarks.run import main

sys.exit(main())
