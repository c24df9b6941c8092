"""From objects to bytes and back: pickle stream, out-of-band buffers, where they lie, how they are checked.

`pack` runs where objects leave (the notebook's kernel, or a rank for its results), `unpack` where they
arrive. Importing `unpack`, `buffers` and `tensors` loads nothing heavy.

names      the global names that a cell reads and those that it could bind
namespace  which of them are the user's, and what is shipped of them
pack       from objects to a pickle stream and its out-of-band buffers
pickler    cloudpickle's, with functions on the other side's namespace
tensors    storages of tensors, which leave out of band
buffers    where packed bytes lie, and the regions in which they are sent
unpack     from packed bytes back to objects, once they are checked
call       a function's call as it travels; payloads name it by this module
digest     what a value looks like now, so that a change is seen later
explain    what can't be pickled, named by its path, with the remedy
"""
