"""A server is killed in the middle of answers: they go on, and the page says what happened."""

from __future__ import annotations

from typing import Any

import httpx
import openai
from browsers import opened
from gateways import Gateway
from prometheus_client.parser import text_string_to_metric_families

from lilliput.cli.local_swarm import LocalServer, LocalSwarm

MODEL = "SmolLM2-135M-Instruct"
STORY = "Tell me a long story about a lighthouse."


def sessions(server: LocalServer) -> float:
    families = text_string_to_metric_families(httpx.get(server.metrics).text)
    return sum(s.value for family in families for s in family.samples if s.name == "lilliput_server_sessions")


def begin(client: openai.OpenAI) -> Any:
    return client.chat.completions.create(
        model=MODEL,
        messages=[{"role": "user", "content": STORY}],
        temperature=0,
        max_tokens=48,
        stream=True,
    )


def test_the_answer_goes_on(browser: Any, gateway: Gateway, client: openai.OpenAI, swarm: LocalSwarm) -> None:
    usual = [chunk.choices[0].delta.content or "" for chunk in begin(client)]
    spare = swarm.add((15, 30))
    with opened(browser, gateway.url) as page:
        page.get_by_role("button", name="Settings").click()
        page.get_by_label("Temperature").fill("0")
        page.get_by_role("button", name="Done").click()
        page.get_by_label("Message").fill(STORY)
        page.keyboard.press("Enter")
        page.locator(".assistant .body", has_text="lighthouse").wait_for()
        stream = iter(begin(client))
        chunks = [next(stream) for _ in range(4)]

        lost = next(server for server in (swarm.servers[1], spare) if sessions(server))
        lost.kill()
        swarm.servers.remove(lost)
        chunks += stream
        page.locator(".note", has_text="was lost; others took over, and the answer went on").first.wait_for()
        page.locator(".assistant .body", has_text=" ".join("".join(usual).split()[-6:-1])).wait_for()
        page.get_by_role("button", name="Stop").click()
        page.reload()
        page.get_by_text("The server of blocks 15:30 was lost").wait_for()

    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == "".join(usual)
    told = [chunk.model_extra["lilliput"] for chunk in chunks if "lilliput" in (chunk.model_extra or {})]
    (recovery,) = told[0]["recoveries"]
    assert len(told) == 1
    assert (recovery["blocks"], recovery["moved"]) == ([15, 30], False)
    assert recovery["seconds"] >= 0
