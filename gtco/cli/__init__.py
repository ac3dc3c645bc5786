"""The command line.

`main` has the commands, `flags` and `base` what they share and `show` what they print; `cache`,
`calibrate`, `db`, `demo`, `env`, `report` and `tune` hold what is of one command alone.
"""
