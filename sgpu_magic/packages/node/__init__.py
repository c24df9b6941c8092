"""A node's half: whether it has a run's environment, and a process of its own that builds what it lacks.

need        whether there is something to build
build       the process;  progress  what it and the agent tell each other
builder     what it does, step by step
base_layer  what is taken from the node's own Python instead
estimate    how large it will be, before anything is downloaded
store       what has been built, and who uses it
refusals    why nothing is built: cause and remedy
"""
