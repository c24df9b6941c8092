"""Files on disk: content-addressed blobs, cached folders, run directories, paths from untrusted sources.

content_store      blobs by digest, one folder per user; reassembles objects from their blobs
file_state         whether a file is unchanged since it was read
folder_cache       folders that are filled once and kept while in use
node_cache         a node's cache of data for many runs, on fast local disk
run_directory      a run's events; its files by names from untrusted sources; whether the disk has room for a run
tracking_progress  how far a run's events have been written to MLflow
atomic_file        files that appear under their names once they are complete
disk_usage         sizes of files and folders; eviction and removal
preload_report     what a pool's zygotes have executed ahead
locks              locks on files and folders, which the system releases when their holder ends
"""
