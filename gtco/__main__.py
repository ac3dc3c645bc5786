"""`python -m gtco` is the command `gtco`."""

from gtco.cli.main import main

main()
