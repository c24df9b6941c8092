"""What the notebook sent along with a launch, brought to this node.

launch_inputs  brings it together: the payload into memory, code and wheels into files
blob_cache     blobs of the pool's store on this node
kept_inputs    folders, files and local code that went along, each made once and kept while a run uses it
"""
