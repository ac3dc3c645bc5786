"""The command line.

`main` has the commands, `flags` and `base` what they share, `show` what they print and `ending` how
they end; `cache`, `calibrate`, `db`, `demo`, `env`, `report` and `tune` hold what is of one command
alone.
"""
