"""What a notebook asks for without words: kept in its metadata, signed, and the default of every cell and call.

``schema``: the records, as JSON
``keeper``: read from the metadata, checked, signed by the user who has chosen it
``packages``: the packages of a choice, as a file that `--env-version` takes
``default_choice``: what it adds to what was asked for
"""
