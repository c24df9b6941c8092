"""The process groups of a rank.

rendezvous   joins the group before the cell, and accepts a second `init_process_group` by user code
renewal      reconnects groups after a lost connection, and resets models that were in the middle of an iteration
lost_groups  groups that can't be reconnected: removed from torch's registry, and using one raises an error
local_names  names of groups that are made by their members alone
"""
