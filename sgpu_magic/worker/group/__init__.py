"""The process groups of a rank.

rendezvous  joins the group before the cell, and accepts a second `init_process_group` by user code
renewal     reconnects groups after a lost connection, and resets models that were in the middle of an iteration
"""
