"""A run launched again from its directory: same code, data and packages, and what differs is said.

recorded       what a run's directory has of it
circumstances  in which Python a replay runs, and what differs from the run
launching      a recorded run becomes what is submitted again
"""
