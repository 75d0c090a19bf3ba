"""`python -m lilliput.cli` is `lilliput`."""

from lilliput.cli.main import main

main()
