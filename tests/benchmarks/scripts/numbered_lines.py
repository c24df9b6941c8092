"""For torchrun: every rank prints numbered lines; the argument is how many."""

import os
import sys

rank = os.environ["RANK"]
for number in range(int(sys.argv[1])):
    print(f"line {number:06d} of rank {rank}")
