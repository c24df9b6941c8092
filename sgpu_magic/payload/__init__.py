"""From objects to bytes and back: pickle stream, out-of-band buffers, where they lie, how they are checked.

`pack` runs where objects leave (the notebook's kernel, or a rank for its results), `unpack` where they
arrive. Importing `unpack`, `buffers` and `tensors` loads nothing heavy.
"""
