"""The command line as a person meets it: help at once, errors in one line, exit codes."""

from __future__ import annotations

import errno
import io
import json
import logging
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from datetime import datetime
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from lilliput.cli import logs
from lilliput.cli.main import app, guarded
from lilliput.errors import ModelError
from lilliput.models.sources import ModelFiles

needs_a_full_disk = pytest.mark.skipif(
    not Path("/dev/full").exists(), reason="this system has no device to which every write fails, as a full disk's do"
)

COMMANDS = ["demo", "serve", "chat", "api", "generate", "status", "trace", "fetch", "plan", "bench"]


def lilliput(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run the command in a process of its own."""
    command = [sys.executable, "-m", "lilliput.cli", *arguments]
    return subprocess.run(command, capture_output=True, text=True, env={**os.environ, **environment}, timeout=60)


def guarded_app(command: Callable[[], None]) -> typer.Typer:
    """An app of the one command, whose errors end as those of our commands do."""
    result = typer.Typer(pretty_exceptions_enable=False)
    result.command()(guarded(command))
    return result


def test_help_lists_every_command() -> None:
    shown = lilliput("--help")
    assert shown.returncode == 0
    assert [name for name in COMMANDS if f" {name} " not in shown.stdout] == []


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_explains_itself(command: str) -> None:
    shown = CliRunner().invoke(app, [command, "--help"])
    assert shown.exit_code == 0
    assert "<bool>" not in shown.output  # flags take no value


def test_help_comes_without_heavy_libraries() -> None:
    code = (
        "import sys\nfrom lilliput.cli.main import app\n"
        "try: app(['--help'])\n"
        "except SystemExit: print({'torch', 'transformers', 'hivemind', 'numpy'} & set(sys.modules))"
    )
    shown = subprocess.check_output([sys.executable, "-c", code], text=True)
    assert shown.splitlines()[-1] == "set()"


def test_fetch_prints_the_folder_and_nothing_else_on_standard_output(demo_model: ModelFiles) -> None:
    shown = lilliput("fetch")
    assert (shown.returncode, shown.stdout) == (0, f"{demo_model.path}\n")


def test_an_error_is_one_line_and_exit_code_1() -> None:
    shown = lilliput("fetch", "./nowhere")
    assert (shown.returncode, shown.stdout) == (1, "")
    assert shown.stderr.startswith("There is no folder ./nowhere.")
    assert shown.stderr.count("\n") == 1


@pytest.mark.parametrize(("arguments", "environment"), [(["--debug"], {}), ([], {"LILLIPUT_DEBUG": "1"})])
def test_who_debugs_gets_the_traceback_too(arguments: list[str], environment: dict[str, str]) -> None:
    shown = lilliput(*arguments, "fetch", "./nowhere", **environment)
    assert shown.returncode == 1
    assert "Traceback" in shown.stderr
    assert shown.stderr.splitlines()[-1].startswith("There is no folder")


def test_a_wrong_option_is_exit_code_2() -> None:
    assert lilliput("fetch", "--nonsense").returncode == 2


_PEER = "/ip4/127.0.0.1/tcp/1/p2p/12D3KooWJMpHSTaqq6g2As7rzbyqD5o2h6RuiPh8or9CU5KqYavd"


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (["status", "--initial-peers", "nonsense"], "'nonsense' is not an address such as /ip4/"),
        (["chat", "--initial-peers", _PEER, "--initial-peers", "/ip4/127.0.0.1/tcp/1"], "lacks the peer's id"),
        (["api", "x", "--initial-peers", "/ip4/127.0.0.1/tcp/1/p2p/12D3KooW..."], "the peer's id is not whole"),
        (["serve", "x", "--initial-peers", _PEER.replace("/tcp/1", "")], "names no port"),
        (["serve", "x", "--announce", "192.0.2.1:31337"], "is not an address such as /ip4/192.0.2.1/tcp/31337"),
        (["generate", "x", "--swarm-key", "/nowhere/key"], "cannot read the swarm's key /nowhere/key: No such file"),
        (["route", "x", "--swarm-key", __file__], "is not a swarm's key"),
        (["bootstrap", "--identity", "/nowhere/id"], "there is no folder /nowhere"),
        (["bootstrap", "--identity", "/"], "cannot read /: Is a directory"),
    ],
)
def test_addresses_and_files_that_are_none_are_found_out_at_once(
    arguments: list[str], error: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lilliput.cli.process.prepare", lambda: pytest.fail("it went on"))
    shown = CliRunner().invoke(app, arguments, env={"COLUMNS": "400", "LILLIPUT_PEERS": "", "LILLIPUT_SWARM_KEY": ""})
    assert shown.exit_code == 2
    assert error in shown.stderr


def test_the_error_is_red_on_a_terminal() -> None:
    def fail() -> None:
        raise ModelError("two\n  lines")

    shown = CliRunner().invoke(guarded_app(fail), color=True)
    assert shown.exit_code == 1
    assert shown.output == "\x1b[31mtwo lines\x1b[0m\n"


def test_a_fault_of_ours_says_so_without_a_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        raise ZeroDivisionError("division by zero")

    monkeypatch.delenv(logs.DEBUG, raising=False)
    shown = CliRunner().invoke(guarded_app(fail))
    assert shown.exit_code == 1
    assert "wrong in Lilliput itself: ZeroDivisionError: division by zero" in shown.output
    assert "Traceback" not in shown.output


def test_an_interruption_is_quiet_and_exit_code_130() -> None:
    def interrupted() -> None:
        raise KeyboardInterrupt

    shown = CliRunner().invoke(guarded_app(interrupted))
    assert (shown.exit_code, shown.output) == (130, "")


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_ends_a_download_and_clears_away_what_it_began(number: int, code: int, tmp_path: Path) -> None:
    # pip asks an index that never answers
    with socket.create_server(("127.0.0.1", 0)) as silent:
        environment = {
            **os.environ,
            "LILLIPUT_CACHE": str(tmp_path),
            "PIP_CONFIG_FILE": os.devnull,
            "PIP_INDEX_URL": f"http://127.0.0.1:{silent.getsockname()[1]}/simple",
        }
        for name in ("PIP_FIND_LINKS", "PIP_EXTRA_INDEX_URL", "PIP_NO_INDEX"):
            environment.pop(name, None)
        command = [sys.executable, "-m", "lilliput.cli", "fetch"]
        process = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        silent.settimeout(30)
        connection, _ = silent.accept()
        process.send_signal(number)
        output, errors = process.communicate(timeout=10)
        connection.close()
    assert (process.returncode, output) == (code, "")
    assert "Traceback" not in errors
    assert [file.name for file in (tmp_path / "demo-1").iterdir()] == ["lock"]


def test_a_log_line_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(logs.DEBUG, raising=False)
    try:
        raise ValueError("of\nno\nuse")
    except ValueError:
        record = logging.LogRecord("lilliput.server.node", logging.WARNING, "", 0, "a\n%s", ("b",), sys.exc_info())
    assert logs.OneLine().format(record)[8:] == " W server.node: a b (ValueError: of no use)"
    monkeypatch.setenv(logs.DEBUG, "1")
    first, *traceback = logs.OneLine().format(record).splitlines()
    assert first[8:] == " W server.node: a b"
    assert all(line.startswith("    ") for line in traceback)


def test_a_stranger_can_write_no_line_of_the_log_nor_move_the_cursor(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(logs.DEBUG, raising=False)
    evil = "a\r\n12:00:00 I b\x1b[2Jc\u2028d\x85e\x00"
    record = logging.makeLogRecord({"name": "lilliput.x", "levelno": 20, "levelname": "INFO", "msg": evil})
    record.request_id = evil
    line = logs.OneLine().format(record)
    assert line.isprintable()
    assert line[8:].startswith(" I x: a 12:00:00 I b\N{REPLACEMENT CHARACTER}[2Jc d e")
    written = logs.JsonLines().format(record)
    assert written.isascii()
    assert written.isprintable()
    assert json.loads(written)["message"] == json.loads(written)["request_id"] == evil


def test_logs_go_where_standard_error_is_now(monkeypatch: pytest.MonkeyPatch) -> None:
    logs.set_up()
    handler = next(h for h in logging.getLogger().handlers if isinstance(h.formatter, logs.OneLine))
    for _ in range(2):
        here = io.StringIO()
        monkeypatch.setattr(sys, "stderr", here)
        handler.handle(logging.makeLogRecord({"name": "lilliput.x", "levelno": 30, "levelname": "WARNING", "msg": "y"}))
        assert here.getvalue().endswith(" W x: y\n")
        here.close()  # as typer's CliRunner does


def test_a_bootstrap_peer_logs_as_json() -> None:
    assert "--log-json" in CliRunner().invoke(app, ["bootstrap", "--help"], env={"COLUMNS": "200"}).output


def test_logs_as_json() -> None:
    code = (
        "import logging, warnings\nfrom lilliput.cli import logs\nlogs.set_up(1, as_json=True)\n"
        "import hivemind.utils.logging as other\nlogs.take_over()\n"
        "logging.getLogger('lilliput.a').info('x', extra={'request_id': 'r1', 'tokens': 3})\n"
        "try: 1 / 0\nexcept ZeroDivisionError: logging.getLogger('lilliput.b').exception('y')\n"
        "other.get_logger('hivemind.c').critical('z')\nwarnings.warn('w')"
    )
    command = [sys.executable, "-c", code]
    lines = subprocess.run(command, capture_output=True, text=True, check=True).stderr.splitlines()
    first, second, third, fourth = (json.loads(line) for line in lines)
    assert datetime.fromisoformat(first.pop("time")).tzinfo is not None
    assert first == {"level": "info", "source": "a", "message": "x", "request_id": "r1", "tokens": 3}
    assert (second["level"], second["error"]) == ("error", "ZeroDivisionError: division by zero")
    assert (third["level"], third["source"], third["message"]) == ("critical", "hivemind.c", "z")
    assert fourth["level"] == "warning"


def test_it_is_quiet_until_asked() -> None:
    code = (
        "import logging, sys\nfrom lilliput.cli import logs\nlogs.set_up(int(sys.argv[1]))\n"
        "for name in 'lilliput.a', 'elsewhere':\n"
        "    logging.getLogger(name).warning('warning'); logging.getLogger(name).info('info')"
    )

    def said(verbosity: int) -> list[str]:
        command = [sys.executable, "-c", code, str(verbosity)]
        lines = subprocess.run(command, capture_output=True, text=True, check=True).stderr.splitlines()
        return [line[9:] for line in lines]

    assert said(0) == ["W a: warning"]
    assert said(1) == ["W a: warning", "I a: info", "W elsewhere: warning"]
    assert said(2) == [*said(1), "I elsewhere: info"]


def test_an_interruption_while_modules_are_read_shows_no_traceback() -> None:
    program = (
        "import builtins, os, signal\nread = builtins.__import__\n"
        "def interrupted(name, *rest, **more):\n"
        "    if name == 'typer': os.kill(os.getpid(), signal.SIGINT)\n"
        "    return read(name, *rest, **more)\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "import lilliput.cli\nbuiltins.__import__ = interrupted\nlilliput.cli.run()"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (-signal.SIGINT, "", "")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_while_the_interpreter_winds_up_shows_no_traceback(number: int) -> None:
    program = (
        "import atexit, os, signal, sys\nimport lilliput.cli\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        f"atexit.register(os.kill, os.getpid(), {number:d})\n"
        "sys.argv = ['lilliput', 'key', '--help']\nlilliput.cli.run()"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("closed", ["0", "1", "2", "0 1 2"])
def test_closed_standard_streams_are_as_good_as_the_null_device(closed: str) -> None:
    shut = " ".join(f"{number}>&-" for number in closed.split())
    code = (
        "import os, sys; from lilliput.cli import process; process.open_standard_streams(); "
        "print('text', file=sys.stdout, flush=True); print('text', file=sys.stderr, flush=True); "
        "sys.exit(3 if os.open(os.devnull, os.O_RDONLY) <= 2 else 7)"
    )
    command = ["sh", "-c", f'"$0" -c "$1" {shut}', sys.executable, code]
    assert subprocess.run(command, capture_output=True, timeout=60).returncode == 7


@needs_a_full_disk
def test_output_that_cannot_be_written_is_one_line(demo_model: ModelFiles) -> None:
    with open("/dev/full", "w") as full:
        command = [sys.executable, "-m", "lilliput.cli", "fetch"]
        shown = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, timeout=60)
    assert shown.returncode == 1
    assert shown.stderr == "No space left on device: free some space there, and try again.\n"


def test_a_full_disk_is_no_fault_of_ours() -> None:
    def fill() -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "/models/part")

    shown = CliRunner().invoke(guarded_app(fill))
    assert shown.exit_code == 1
    assert shown.output.startswith("No space left on device (/models/part): free some space")


@pytest.mark.parametrize(
    "arguments",
    [
        ["key", ""],
        ["bootstrap", "--swarm-key", ""],
        ["bootstrap", "--identity", " "],
        ["bootstrap", "--host", ""],
        ["api", "smollm2", "--api-keys", ""],
        ["api", "smollm2", "--host", ""],
    ],
)
def test_an_empty_text_opens_nothing_to_everybody(arguments: list[str]) -> None:
    shown = CliRunner().invoke(app, arguments, env={"COLUMNS": "200"})
    assert shown.exit_code == 2
    assert "it is empty; is a variable of your shell not set?" in shown.output


def test_an_empty_variable_of_the_environment_is_none() -> None:
    environment = {"LILLIPUT_SWARM_KEY": "", "LILLIPUT_API_KEYS_FILE": "", "LILLIPUT_PEERS": ""}
    shown = CliRunner().invoke(app, ["api", "smollm2"], env=environment)
    assert "Name a member of the swarm" in shown.output


@pytest.mark.parametrize("seed", ["99999999999999999999", "-9999999999999999999"])
def test_a_seed_that_torch_does_not_take_is_a_wrong_option(seed: str) -> None:
    assert CliRunner().invoke(app, ["generate", "smollm2", "--seed", seed]).exit_code == 2


@needs_a_full_disk
@pytest.mark.parametrize("arguments", [["--version"], ["--help"], ["serve", "--help"]], ids=" ".join)
def test_help_that_cannot_be_written_says_so(arguments: list[str]) -> None:
    with open("/dev/full", "w") as full:
        command = [sys.executable, "-m", "lilliput.cli", *arguments]
        shown = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, timeout=60)
    assert shown.returncode == 1
    assert shown.stderr == "The answer cannot be written to standard output: No space left on device.\n"


def test_doctor_needs_no_home() -> None:
    command = [sys.executable, "-m", "lilliput.cli", "doctor"]
    shown = subprocess.run(command, capture_output=True, env={**os.environ, "HOME": "/nonexistent/x"}, timeout=120)
    assert b"Something is wrong" not in shown.stderr
    assert b"disk: " in shown.stdout
