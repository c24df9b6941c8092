"""Serialization of objects: pickle stream, out-of-band buffers, their storage and verification.

`pack` runs on the sending side (the notebook's kernel, or a rank for its results), `unpack` on the
receiving side. Importing `unpack`, `buffers` and `tensors` loads nothing heavy.

names           the global names that a cell reads and those that it may bind
namespace       selects the user's variables among them, and what is shipped of each
pack            objects to a pickle stream and its out-of-band buffers
pickler         a cloudpickle pickler that binds functions to the receiver's namespace
tensors         tensor storages, which are sent out of band
parts           what belongs to one rank: sharded tensors, its samplers, device meshes
typing_objects  NewType, ParamSpec, type aliases and others of the notebook, by value
compiled        functions that torch has compiled, sent as what they wrap
buffers         the memory of packed bytes, and the regions in which they are sent
unpack          packed bytes back to objects, after verification
call            a function call as it is sent; payloads refer to it by this module's name
digest          digests of values, to detect later changes
explain         the path to a value that can't be pickled, and the remedy

memory_digests  digests of buffers, hashed again only after a write
notebook_text   the cells of notebooks in text form, and magics as Databricks writes them
"""
