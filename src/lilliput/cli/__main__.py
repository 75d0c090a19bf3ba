"""`python -m lilliput.cli` is `lilliput`."""

from lilliput.cli import run

run()
