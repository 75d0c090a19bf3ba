"""The `lilliput` command.

A command's module declares its parameters, and imports what it needs inside its function, so that `--help` answers at
once.
Whatever a command raises ends here, as one line for a person.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import logging
import os
import signal
import sys
import traceback
from collections.abc import Callable
from types import FrameType
from typing import Annotated, Any, NoReturn, ParamSpec

import typer
from typer.core import TyperCommand, TyperGroup

from lilliput.cli import (
    api,
    bench,
    bootstrap,
    chat,
    demo,
    doctor,
    drain,
    fetch,
    generate,
    key,
    logs,
    plan,
    process,
    route,
    serve,
    simulate,
    status,
    trace,
)
from lilliput.errors import LilliputError

P = ParamSpec("P")

#: what the machine lacks, and what a person can do about it
_LACKS = {
    errno.ENOSPC: "free some space there",
    errno.EDQUOT: "free some space there",
    errno.EFBIG: "let files become larger (ulimit -f), or write to another disk",
    errno.EROFS: "write to another disk (HF_HOME and XDG_CACHE_HOME say where models are kept)",
    errno.EMFILE: "let processes open more files (ulimit -n)",
    errno.ENFILE: "end some programs",
    errno.EIO: "check the disk",
}


class _PlainFlags:
    """In the help, options that take no value show none. Newer typers would say `<bool>`."""

    def get_params(self, ctx: Any) -> list[Any]:
        params: list[Any] = super().get_params(ctx)  # type: ignore[misc]
        for param in params:
            if getattr(param, "is_flag", False) or getattr(param, "count", False):
                param.metavar = ""
        return params


class _Command(_PlainFlags, TyperCommand):
    pass


class _Group(_PlainFlags, TyperGroup):
    pass


app = typer.Typer(
    name="lilliput",
    cls=_Group,
    help="Many small machines hold one giant language model.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def guarded(command: Callable[P, None]) -> Callable[P, None]:
    """`command`, whose errors become one red line and an exit code: 1 for errors, 130 for an interruption."""

    @functools.wraps(command)
    def run(*args: P.args, **kwargs: P.kwargs) -> None:
        try:
            command(*args, **kwargs)
            if sys.stdout:
                sys.stdout.flush()  # what fails later ends as several lines of Python's
        except LilliputError as error:
            _fail(str(error))
        except KeyboardInterrupt:
            raise typer.Exit(130) from None
        except (typer.Exit, typer.Abort, typer.BadParameter, BrokenPipeError):
            raise
        except Exception as error:
            if isinstance(error, OSError) and error.errno in _LACKS:
                where = f" ({error.filename})" if error.filename else ""
                _fail(f"{error.strerror}{where}: {_LACKS[error.errno]}, and try again.")
            _fail(f"Something is wrong in Lilliput itself: {type(error).__name__}: {error}  (--debug shows where)")

    return run


def _fail(message: str) -> NoReturn:
    if logs.debugging():
        traceback.print_exc()
    if logs.are_json():
        logging.getLogger("lilliput").critical(message)
    else:
        typer.secho(" ".join(message.split()), fg="red", err=True)
    try:
        sys.stdout.flush()
    except (OSError, ValueError):  # what it holds back would fail again as the interpreter ends
        with contextlib.suppress(OSError, ValueError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    raise typer.Exit(1)


def _print_version(wanted: bool) -> None:
    if wanted:
        from importlib.metadata import PackageNotFoundError, version

        try:
            typer.echo(f"lilliput {version('lilliput')}")
        except PackageNotFoundError:
            typer.echo("lilliput, from a source tree that is not installed")
        raise typer.Exit


@app.callback()
def options(
    verbose: logs.Verbose = 0,
    debug: Annotated[
        bool, typer.Option("--debug", help=f"Show tracebacks, as {logs.DEBUG}=1 does.", show_default=False)
    ] = False,
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and leave.")
    ] = False,
) -> None:
    logs.set_up(verbose, debug=debug)


for _command in (
    demo.demo,
    serve.serve,
    chat.chat,
    api.api,
    generate.generate,
    status.status,
    route.route,
    trace.trace,
    drain.drain,
    bootstrap.bootstrap,
    key.key,
    doctor.doctor,
    fetch.fetch,
    plan.plan,
    bench.bench,
    simulate.simulate,
):
    app.command(cls=_Command)(guarded(_command))


def _terminate(signum: int, frame: FrameType | None) -> NoReturn:
    raise SystemExit(128 + signum)


def main() -> None:
    """Run the command line. SIGTERM ends a command as an exception does, so that what it started is cleared away."""
    process.open_standard_streams()
    signal.signal(signal.SIGTERM, _terminate)
    try:
        app()
    except KeyboardInterrupt:
        sys.exit(130)
    except OSError as error:  # of help and version; commands tell themselves
        with contextlib.suppress(typer.Exit):
            _fail(f"The answer cannot be written to standard output: {error.strerror or error}.")
        sys.exit(1)
    finally:
        process.wind_up()


if __name__ == "__main__":
    main()
