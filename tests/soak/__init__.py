"""Many random runs with random faults, from several notebooks at once on one pool: `make soak`."""
