"""The process groups of a rank.

rendezvous       the group is joined before the cell, and accepted when user code asks again
renewal          groups, and models in the middle of an iteration, go on after connections were lost
flight_recorder  the collective that the rank is in
"""
