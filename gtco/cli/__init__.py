"""The command line.

`main` has the commands, `base` what they share and `show` what they print; `cache`, `db`, `tune`,
`env` and `demo` are the commands that need more than a screen.
"""
