"""Whole models: gtco, tuned and not, beside every peer, one row a model.

`rows` says what there is, `child` runs one row in a process of its own, `table` makes what people
read, `__main__` is the command.
"""
