"""Bytes on a disk that others ask for over a link: blobs by their digests, files below a folder.

content_store  blobs under their digests, a folder for each user; joined to what they were cut from
kept_folders   folders that are made once and kept while somebody uses them; locks, and what goes when there is no room
safe_paths     files below a folder, named by somebody else
run_directory  a run's events, and files that many runs share
node_cache     a folder of a node for data on fast local disk
disk_room      what a disk still takes, and the words for one that takes no run
whole_file     a file that appears under its name when it is whole
file_thread    one thread that reads and writes files while the loop goes on
"""
