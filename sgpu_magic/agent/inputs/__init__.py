"""What the notebook sent along with a launch, brought to this node.

launch_inputs  brings it together: the payload into memory, code and wheels into files; local code, unpacked
blobs          blobs of the pool's store on this node, and the folders and files that are put together of them
"""
