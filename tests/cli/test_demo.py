"""`lilliput demo`: a swarm, a chat, and nothing left of them however they end."""

from __future__ import annotations

import contextlib
import re
import signal
import socket
import time

import httpx
import openai
import pytest
from terminal import Family, Terminal, invoke, run, start

from lilliput.cli import api
from lilliput.models.sources import ModelFiles


@pytest.fixture
def family(demo_model: ModelFiles) -> Family:
    return Family()


def test_without_a_terminal_it_answers_one_question(family: Family) -> None:
    shown = run("demo", family=family)
    assert shown.returncode == 0, shown.stderr
    question, answer, pace = shown.stdout.splitlines()
    assert question == "> What is the capital of France?"
    assert "Paris" in answer
    assert re.fullmatch(r"\(8 tokens, [\d.]+ tokens/s, the first after [\d.]+ s\)", pace)
    assert "status --initial-peers /ip4/127.0.0.1/tcp/" in shown.stderr
    family.assert_gone()


def test_a_chat(family: Family) -> None:
    with Terminal("demo", family=family) as terminal:
        for blocks in ("0:10", "10:20", "20:30"):
            terminal.see(f"server for blocks {blocks}", within=120)
        (address,) = terminal.see(r"status --initial-peers (\S+)", within=120).groups()
        (url,) = terminal.see(r"chat in a browser at (\S+)/;").groups()
        assert len(family.sockets()) >= 4
        terminal.see("\n> ")
        terminal.enter("What is the capital of France?")
        terminal.see("The capital of France is Paris.")
        terminal.see(r"\n\(8 tokens, [\d.]+ tokens/s, the first after [\d.]+ s\)\n> ")
        shown = invoke("status", "--initial-peers", address)
        assert "SmolLM2-135M-Instruct, 30 blocks: all are served" in shown.stdout
        terminal.enter("Tell me a very long story about a dragon.")
        terminal.see(r"\.\s+\w+ \w+")
        terminal.ctrl("c")
        terminal.see(r"\(stopped: \d+ tokens?, .*\)\n> ")
        client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
        story = client.completions.create(
            model="smollm2", prompt="Count: 1, 2, 3,", max_tokens=7000, stream=True, logit_bias={"2": -100}
        )
        next(iter(story))  # a program and the chat use the same model at the same time
        terminal.enter("What is the capital of Italy?")
        terminal.see(r"Rome[^(]*\n\(\d+ tokens, .*\)\n> ")
        terminal.ctrl("d")
        assert terminal.end() == 0
        with pytest.raises((openai.APIError, httpx.TransportError)):
            list(story)
        assert "Traceback" not in terminal.screen
        assert not re.search(r"uvicorn|lilliput\.|error", terminal.screen)
    family.assert_gone()


def test_a_terminal_that_closes_ends_the_api_too(family: Family) -> None:
    with contextlib.ExitStack() as stack:
        with contextlib.suppress(OSError):  # then somebody else has the usual port
            stack.enter_context(socket.create_server(("127.0.0.1", 8000)))
        terminal = stack.enter_context(Terminal("demo", "--servers", "1", family=family))
        (url,) = terminal.see(r"chat in a browser at (\S+)/;", within=120).groups()
        assert not url.endswith(":8000")
        terminal.see("\n> ")
        terminal.hang_up()  # perhaps before the API's libraries are loaded
        family.assert_gone()
    with pytest.raises(httpx.ConnectError):
        httpx.get(url)


def test_without_the_libraries_there_is_no_api(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(api, "find_spec", lambda name: None)
    with api.api_beside(None, "smollm2") as url:  # type: ignore[arg-type]
        assert url == ""


def test_killed_it_leaves_nothing(family: Family) -> None:
    process = start("demo", "--servers", "1", "--question", "Tell me a very long story.", family=family)
    assert process.stdout is not None
    assert process.stdout.read(40).startswith("> Tell me a very long story.\n")  # and the beginning of the answer
    assert len(family.sockets()) >= 2
    process.kill()
    process.communicate()
    family.assert_gone()


@pytest.mark.parametrize(("number", "delay"), [(signal.SIGKILL, 2.0), (signal.SIGTERM, 1.0), (signal.SIGHUP, 4.0)])
def test_a_signal_while_it_starts(family: Family, number: int, delay: float) -> None:
    process = start("demo", family=family)
    until = time.monotonic() + delay
    while time.monotonic() < until:
        family.sockets()
        time.sleep(0.05)
    process.send_signal(number)
    _, errors = process.communicate(timeout=20)
    assert process.returncode == (-number if number == signal.SIGKILL else 128 + number)
    assert "Traceback" not in errors
    family.assert_gone()


def test_ctrl_c_while_it_starts(family: Family) -> None:
    with Terminal("demo", family=family) as terminal:
        terminal.see("loading libraries")
        terminal.ctrl("c")
        assert terminal.end() == 130
        assert "Traceback" not in terminal.screen
    family.assert_gone()


def test_a_server_that_does_not_start(family: Family) -> None:
    shown = run("demo", "--dtype", "float8", family=family)
    assert (shown.returncode, shown.stdout) == (1, "")
    assert shown.stderr.splitlines()[-1] == (
        "the server for blocks 0:10 did not start: unknown dtype 'float8'; known are float32, bfloat16, float16"
    )
    family.assert_gone()


def test_more_servers_than_blocks(family: Family) -> None:
    shown = run("demo", "--servers", "31", family=family)
    assert (shown.returncode, shown.stdout) == (1, "")
    assert "SmolLM2-135M-Instruct has 30 blocks" in shown.stderr.splitlines()[-1]
    family.assert_gone()
