"""`@ray_launch`: a run's own Ray cluster on its nodes, whose driver is the cell in rank 0.

ray_run       the cell of such a run in each rank; the user's error out of Ray's
cluster       the node's part of the cluster: started by its first rank, stopped by it
node          the program beside that rank which starts Ray's processes, watches them and ends them; imports ray
node_process  that program as its rank holds it: what the two say to each other; Ray's numbers for the MLflow run
meeting       how the other ranks learn where the cluster's head is, and when the driver is done
driver        rank 0's own part: Ray's last lines, no Ray Serve; what it and Ray's processes find in their environment
"""
