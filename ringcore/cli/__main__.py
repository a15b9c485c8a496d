"""`python -m ringcore.cli`: the command, if its script is not on the path."""

from ringcore.cli import main

main()
