"""Several machines that the user can log in to with ssh, as the nodes of one pool.

engine        the nodes, and the locks of their devices for each lease
node_login    the login to one node, made again when it breaks, until the node is given up
node_end      at the far end of such a login: the node's agent and its device locks
link          messages between the two, over the login's standard streams
"""
