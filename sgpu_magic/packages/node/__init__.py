"""The node's side: the environments that it has built, and the process that builds a missing one.

store       the built environments and their locks; the messages between the agent and the build process
__main__    the build process; a module of its own, as it must tie itself to the agent before other imports
builder     the steps of a build
base_layer  the packages linked from the node's own Python instead of being installed
refusals    why an environment can't be built, with cause and remedy; its estimated download size
"""
