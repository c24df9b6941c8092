"""A run launched again from its directory: same code, data and packages, and what differs is said.

circumstances  in which Python a replay runs, and what differs from the run
recorded       what a run's directory has of it, and what is submitted again
"""
