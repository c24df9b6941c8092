"""A node's half: whether it has a run's environment, and a process of its own that builds what it lacks.

store       what has been built, and who uses it; what the agent and the building process tell each other
__main__    that process; apart, as it has to be tied to its agent before anything else is imported
builder     what it does, step by step
base_layer  what is taken from the node's own Python instead
refusals    why nothing is built: cause and remedy; how large an environment will be, before anything is downloaded
"""
