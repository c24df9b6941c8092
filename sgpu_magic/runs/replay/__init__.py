"""Replays of recorded runs: the same code, data and packages, with a report of what differs.

circumstances  chooses the Python of a replay and compares it with the recorded run's
recorded       reads a run's directory and prepares its submission
"""
