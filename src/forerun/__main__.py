"""`python -m forerun` is the command `forerun`."""

from forerun.cli.main import main

main()
