"""Which candidate is fast: predict, measure on the device, remember.

`model` drafts a time from `features`, `ranker` learns from measurements, `search` proposes programs
and `measure` times them in a process that may die; `record`, `database` and `knowledge` remember.
"""
