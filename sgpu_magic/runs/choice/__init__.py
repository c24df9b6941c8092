"""What a notebook asks for without words: kept in its metadata, signed, and the default of every cell and call.

schema          the records, as JSON: read, checked, in words
keeper          signed by the user who has chosen it, in the notebooks in which it was made
packages        the packages of a choice, as a file that `--env-version` takes
default_choice  what it adds to what was asked for
"""
