"""`lilliput chat`, with and without a terminal."""

from __future__ import annotations

import time

from terminal import Terminal, invoke


def test_lines_in_answers_out(peers: list[str]) -> None:
    question = "What is the capital of France?"
    shown = invoke(
        "chat", "smollm2", *peers, "--max-new-tokens", "16", stdin=f"{question}\n\n/reset\n{question}\n/quit\nx"
    )
    answer = "The capital of France is Paris.\n"
    assert (shown.exit_code, shown.stdout) == (0, answer + answer)
    assert "tokens/s" not in shown.stderr


def test_an_error_ends_it(peers: list[str]) -> None:
    shown = invoke("chat", "smollm2", *peers, stdin="Hello!\n" + "la " * 9000 + "\nHello!\n")
    assert shown.exit_code == 1
    assert shown.stdout.count("\n") >= 1
    assert "and its servers take 8192" in shown.stderr.splitlines()[-1]


def test_at_a_terminal(peers: list[str]) -> None:
    with Terminal("chat", "smollm2", *peers, "--system", "You are a pirate.", "--max-new-tokens", "150") as terminal:
        terminal.see("SmolLM2-135M-Instruct on 3 servers")
        terminal.see("\n> ")
        terminal.enter("/what")
        terminal.see("/reset forgets the conversation, /quit leaves")
        terminal.type("half a line")
        terminal.see("half a line")
        time.sleep(0.5)
        terminal.ctrl("c")
        terminal.see("\n> ")
        terminal.enter("Tell me a very long story.")
        terminal.see(r"story\.\s+\w+")
        terminal.ctrl("c")
        terminal.see(r"\(stopped: \d+ tokens?, [\d.]+ tokens/s, the first after [\d.]+ s\)\n> ")
        terminal.enter("/reset")
        terminal.see("\n> ")
        terminal.enter("What is the capital of France?")
        terminal.see(r"\n\(\d+ tokens?, [\d.]+ tokens/s, the first after [\d.]+ s\)\n> ")
        time.sleep(0.5)
        terminal.ctrl("c")
        assert terminal.end() == 0
        assert "Traceback" not in terminal.screen
        terminal.family.assert_gone()


def test_the_terminal_may_close_in_the_middle_of_an_answer(peers: list[str]) -> None:
    with Terminal("chat", "smollm2", *peers) as terminal:
        terminal.see("\n> ")
        terminal.enter("Tell me a very long story.")
        terminal.see(r"story\.\s+\w+")
        terminal.hang_up()
        terminal.family.assert_gone()
