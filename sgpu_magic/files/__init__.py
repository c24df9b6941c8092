"""Bytes on a disk that others ask for over a link: blobs by their digests, files below a folder."""
