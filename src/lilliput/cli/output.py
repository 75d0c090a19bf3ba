"""Standard output, for text that comes piece by piece, and remarks beside it."""

from __future__ import annotations

import os
import sys

import typer

from lilliput.errors import LilliputError

#: a model's output may tell a terminal to begin a new line and to go to the next tab stop, and nothing else
_CONTROLS = {code: None for code in (*range(32), *range(127, 160)) if chr(code) not in "\n\t"}


class Output:
    """Where answers go."""

    def __init__(self) -> None:
        self.is_terminal = sys.stdout.isatty()
        self._in_line = False

    def write(self, text: str) -> None:
        """Show the text at once. Raises `BrokenPipeError` if nobody reads any more."""
        if self.is_terminal:
            text = text.translate(_CONTROLS)
        if text:
            self._in_line = not text.endswith("\n")
            self._write(text)

    def end_line(self) -> None:
        """Begin a new line, unless there is one."""
        if self._in_line:
            self.write("\n")

    def remark(self, text: str) -> None:
        """Say something between the answers, quietly."""
        self.end_line()
        self._write((typer.style(text, dim=True) if self.is_terminal else text) + "\n")

    def _write(self, text: str) -> None:
        try:
            sys.stdout.buffer.write(text.encode(sys.stdout.encoding, "replace"))
            sys.stdout.buffer.flush()
        except BrokenPipeError:
            raise
        except OSError as e:
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # what is still held back would fail again
            raise LilliputError(f"The answer cannot be written to standard output: {e.strerror}.") from e


def remark(text: str) -> None:
    """Say something beside all output, quietly."""
    typer.secho(text, dim=True, err=True)


def complain(text: str) -> None:
    """Say what went wrong, where that is not the end."""
    typer.secho(" ".join(text.split()), fg="red", err=True)
