"""A notebook's choice of devices and packages: stored in its metadata. It is the default of cells and calls.

schema           the JSON records: parsing, checks, description in words
keeper           the choice in a notebook's metadata: whether there is one, and whether it is in effect
known_notebooks  which choices this user has made in which notebooks
packages         the packages of a choice, as a file for `--env-version`
"""
