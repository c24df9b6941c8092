"""Files on disk: content-addressed blobs, cached folders, run directories, paths from untrusted sources.

content_store  blobs by digest, one folder per user; reassembles objects from their blobs
kept_folders   folders that are built once and kept while in use; locks and eviction
safe_paths     opens files below a folder by names from untrusted sources
run_directory  a run's events, and files that many runs share
node_cache     a node's cache folder on fast local disk
disk_room      free disk space, and the message for a disk too full for a run
whole_file     atomic writes: a file appears under its name once it is complete
file_thread    one thread for file I/O beside the event loop
"""
