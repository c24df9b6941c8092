"""`@ray_launch`: a run's own Ray cluster on its nodes, with the cell on rank 0 as its driver.

ray_run  the cell of such a run on each rank, and the user's error extracted from Ray's
cluster  each rank's part in the cluster, and the coordination between nodes
node     a child process of each node's first rank that starts, watches and stops Ray's processes; imports ray
metrics  a node's metrics for the MLflow run
driver   rank 0: complete log lines, Ray Serve refused, environment variables of the driver and of Ray's processes
"""
