"""`@ray_launch`: a run's own Ray cluster on its nodes, with the cell on rank 0 as its driver.

cluster        each rank's part: the cell or the devices that it holds, the coordination between nodes
driver         rank 0: complete log lines, Ray Serve refused, the user's error extracted from Ray's
node           a child process of each node's first rank that starts, watches and stops Ray's processes; imports ray
ray_processes  Ray's processes on a node: their environment variables, the lines they write, their metrics
"""
