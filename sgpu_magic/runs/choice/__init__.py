"""A notebook's choice of devices and packages: stored in its metadata, signed. It is the default of cells and calls.

schema           the JSON records: parsing, checks, description in words
keeper           signing and verification; the notebooks in which a choice was made
known_notebooks  notebooks in which this user has made a choice
packages         the packages of a choice, as a file for `--env-version`
"""
