"""Logs, one line an event, quiet unless asked: for a person, or as JSON for a program that collects them."""

from __future__ import annotations

import json
import logging
import os
import sys
import textwrap
from datetime import UTC, datetime
from typing import Annotated, Any

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
#: by number, since libraries rename them
_NAMES = {10: "debug", 20: "info", 30: "warning", 40: "error", 50: "critical"}
#: what every record has; anything else was given as `extra`
_USUAL = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}
_verbosity = 0


class _StandardError(logging.StreamHandler[Any]):
    """Writes to what standard error is at the time: who had replaced it may have closed it since."""

    def __init__(self) -> None:
        logging.Handler.__init__(self)

    @property
    def stream(self) -> Any:
        return sys.stderr

    @stream.setter
    def stream(self, stream: Any) -> None:
        raise AttributeError("it follows sys.stderr")


class OneLine(logging.Formatter):
    """`12:34:56 I server.handler: text [request id]`.

    A traceback is shown, indented, only to those who debug; others see its last line. No text of a stranger's can begin
    a line or move the cursor.
    """

    def __init__(self) -> None:
        super().__init__(datefmt="%H:%M:%S")

    def format(self, record: logging.LogRecord) -> str:
        time, text = self.formatTime(record, self.datefmt), _flat(record.getMessage())
        line = f"{time} {record.levelname[0]} {_source(record)}: {text}"
        if record.exc_info and record.exc_info[1] is not None and not debugging():
            line += f" ({_name(record.exc_info[1])})"
        if request_id := _flat(getattr(record, "request_id", "")):
            line += f" [{request_id}]"
        if record.exc_info and debugging():
            line += "\n" + textwrap.indent(self.formatException(record.exc_info), "    ")
        return line


class JsonLines(logging.Formatter):
    """One JSON object a line: time, level, source, message, error, and whatever else is known, such as request_id."""

    def format(self, record: logging.LogRecord) -> str:
        known: dict[str, Any] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": _NAMES.get(record.levelno, record.levelname),
            "source": _source(record),
            "message": record.getMessage(),
        }
        known |= {name: value for name, value in vars(record).items() if name not in _USUAL and value not in ("", None)}
        if record.exc_info and record.exc_info[1] is not None:
            known["error"] = _name(record.exc_info[1])
            if debugging():
                known["traceback"] = self.formatException(record.exc_info)
        return json.dumps(known, default=str)


def _source(record: logging.LogRecord) -> str:
    return record.name.removeprefix("lilliput.")


def _name(error: BaseException) -> str:
    return f"{type(error).__name__}: {_flat(str(error))}"


def _flat(text: str) -> str:
    return "".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in " ".join(text.split()))


def debugging() -> bool:
    """Whether tracebacks are wanted."""
    return os.environ.get(DEBUG, "").lower() not in ("", "0", "false", "no")


def set_up(verbosity: int = 0, *, debug: bool = False, as_json: bool = False) -> None:
    """Send logs to standard error: 0 warnings, 1 events, 2 everything. Called again, it can only become more.

    Call it before torch, transformers or hivemind are imported: they read their levels from the environment.
    """
    global _verbosity
    if debug:
        os.environ[DEBUG] = "1"  # for the processes that a command starts, too
    _verbosity = min(max(_verbosity, verbosity), len(_LEVELS) - 1)
    ours, theirs, hivemind, transformers = _LEVELS[_verbosity]
    root = logging.getLogger()
    handler = next((h for h in root.handlers if isinstance(h.formatter, OneLine | JsonLines)), None)
    if handler is None:
        handler = _StandardError()
        handler.setFormatter(OneLine())
        root.addHandler(handler)
    if as_json:
        handler.setFormatter(JsonLines())
        logging.captureWarnings(True)
    root.setLevel(theirs)
    logging.getLogger("lilliput").setLevel(ours)
    quiet_bars = "HF_HUB_DISABLE_PROGRESS_BARS"  # transformers' too; ours are drawn instead
    wanted = {"HIVEMIND_LOGLEVEL": hivemind, "TRANSFORMERS_VERBOSITY": transformers, quiet_bars: "1"}
    os.environ.update({name: value for name, value in wanted.items() if name not in _CHOSEN_BY_USER})


def are_json() -> bool:
    return any(isinstance(handler.formatter, JsonLines) for handler in logging.getLogger().handlers)


def take_over() -> None:
    """Where logs are JSON: let the libraries write none of their own. Call it when they are imported."""
    if not are_json():
        return
    from hivemind.utils.logging import use_hivemind_log_handler

    level = logging.getLogger("hivemind").level
    use_hivemind_log_handler("nowhere")
    logging.getLogger("hivemind").setLevel(level)
    for name in ("transformers", "huggingface_hub"):
        logger = logging.getLogger(name)
        logger.handlers.clear()
        logger.propagate = True


def _louder(count: int) -> int:
    set_up(count)
    return count


def _structured(wanted: bool) -> bool:
    if wanted:
        set_up(1, as_json=True)
    return wanted


#: the option of commands that log; giving it sets the logs up
Verbose = Annotated[
    int, typer.Option("--verbose", "-v", count=True, show_default=False, callback=_louder, help="Say more (-vv: all).")
]
#: the option of those that serve others
LogJson = Annotated[
    bool,
    typer.Option(
        "--log-json",
        envvar="LILLIPUT_LOG_JSON",
        callback=_structured,
        show_default=False,
        help="Log events, as -v does, in JSON, one object a line.",
    ),
]
