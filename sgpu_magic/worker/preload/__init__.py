"""Imports that cost ranks nothing: a zygote executes modules ahead, and ranks show them when their code imports them.

heavy_imports    in a rank: finds the imports of a cell that take long
import_recorder  records what each module's execution imports, reads and changes
process_state    what an import must leave as it was, so that it can be executed ahead
preloading       in a zygote: tries each import in a process of its own, then executes what is safe
hidden_modules   hides the executed modules until a rank imports them
"""
