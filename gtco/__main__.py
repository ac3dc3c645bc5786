"""`python -m gtco` is the command `gtco`."""

from gtco.cli import main

main()
