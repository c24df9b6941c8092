"""Inputs of launches: the notebook's payload, code, wheels and uploads, fetched to this node.

launch_inputs  assembles a launch's inputs: the payload in memory, code and wheels in files; unpacks local code
blobs          fetches blobs from the pool's store, and assembles uploaded folders and files from them
"""
