"""Logs for a person: one line an event, quiet unless asked."""

from __future__ import annotations

import logging
import os
import sys
from typing import Annotated

import typer

#: environment variable that turns tracebacks on, as `--debug` does
DEBUG = "LILLIPUT_DEBUG"
#: levels of our loggers, of the libraries', and of two that read theirs from the environment: hivemind and transformers
_LEVELS = (
    (logging.WARNING, logging.ERROR, "ERROR", "error"),
    (logging.INFO, logging.WARNING, "WARN", "error"),
    (logging.DEBUG, logging.INFO, "DEBUG", "info"),
)
_CHOSEN_BY_USER = frozenset(os.environ)
_verbosity = 0


class OneLine(logging.Formatter):
    """`12:34:56 I server.handler: text`; a traceback is shown only to those who debug, else its last line follows."""

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname).1s %(name)s: %(message)s", datefmt="%H:%M:%S")

    def format(self, record: logging.LogRecord) -> str:
        if debugging():
            return super().format(record)
        source = record.name.removeprefix("lilliput.")
        text = f"{self.formatTime(record, self.datefmt)} {record.levelname[0]} {source}: {_flat(record.getMessage())}"
        if record.exc_info and record.exc_info[1] is not None:
            error = record.exc_info[1]
            text += f" ({type(error).__name__}: {_flat(str(error))})"
        return text


def _flat(text: str) -> str:
    return " ".join(text.split())


def debugging() -> bool:
    """Whether tracebacks are wanted."""
    return os.environ.get(DEBUG, "").lower() not in ("", "0", "false", "no")


def set_up(verbosity: int = 0, *, debug: bool = False) -> None:
    """Send logs to standard error: 0 warnings, 1 events, 2 everything. Called again, it can only become more.

    Call it before torch, transformers or hivemind are imported: they read their levels from the environment.
    """
    global _verbosity
    if debug:
        os.environ[DEBUG] = "1"  # for the processes that a command starts, too
    _verbosity = min(max(_verbosity, verbosity), len(_LEVELS) - 1)
    ours, theirs, hivemind, transformers = _LEVELS[_verbosity]
    root = logging.getLogger()
    if not any(isinstance(handler.formatter, OneLine) for handler in root.handlers):
        handler = logging.StreamHandler(sys.stderr)
        handler.setFormatter(OneLine())
        root.addHandler(handler)
    root.setLevel(theirs)
    logging.getLogger("lilliput").setLevel(ours)
    quiet_bars = "HF_HUB_DISABLE_PROGRESS_BARS"  # transformers' too; ours are drawn instead
    wanted = {"HIVEMIND_LOGLEVEL": hivemind, "TRANSFORMERS_VERBOSITY": transformers, quiet_bars: "1"}
    os.environ.update({name: value for name, value in wanted.items() if name not in _CHOSEN_BY_USER})


def _louder(count: int) -> int:
    set_up(count)
    return count


#: the option of commands that log; giving it sets the logs up
Verbose = Annotated[
    int, typer.Option("--verbose", "-v", count=True, show_default=False, callback=_louder, help="Say more (-vv: all).")
]
