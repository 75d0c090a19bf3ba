"""A server that somebody supervises ends with whoever that is."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from lilliput.cli.nursery import NO_KEY

#: a library may let no exception out, and with it a signal's: here all signals of the supervisor's end are lost
_DEAF = """
import os, signal, sys
kill = os.kill
os.kill = lambda pid, signum: None if pid == os.getpid() and signum == signal.SIGTERM else kill(pid, signum)
sys.argv = ["lilliput", *sys.argv[1:]]
from lilliput.cli.main import main
main()
"""


def test_a_server_leaves_when_its_supervisor_is_gone_even_if_the_signal_is_lost(tiny_llama: Path) -> None:
    arguments = ["serve", str(tiny_llama), "--blocks", "0:2", "--host", "127.0.0.1", "--dtype", "float32"]
    with subprocess.Popen(
        [sys.executable, "-c", _DEAF, *arguments, "--supervised"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**os.environ, **NO_KEY},
    ) as server:
        try:
            assert server.stdin is not None
            assert server.stdout is not None
            server.stdin.write(b"[]\n")
            server.stdin.flush()
            for line in server.stdout:
                if "addresses" in json.loads(line):
                    break
            server.stdin.close()
            assert server.wait(60) == 128 + 15
        finally:
            server.kill()
