"""`@ray_launch`: a run's own Ray cluster on its nodes, whose driver is the cell in rank 0.

ray_run  the cell of such a run in each rank; the user's error out of Ray's
cluster  the node's part of the cluster, and what the nodes tell each other
node     the program beside a node's first rank which starts Ray's processes, watches them and ends them; imports ray
metrics  a node's numbers for the MLflow run
driver   rank 0's own part: Ray's last lines, no Ray Serve; what it and Ray's processes find in their environment
"""
