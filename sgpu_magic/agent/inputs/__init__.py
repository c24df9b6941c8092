"""What the notebook sent along with a launch, brought to this node.

launch_inputs  brings it together: the payload into memory, code and wheels into files
blob_cache     blobs of the pool's store on this node
uploaded       folders and files that went along with runs
code_bundles   local code of notebooks
"""
