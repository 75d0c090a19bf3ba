"""The swarm page, before a real swarm and with swarms that are made up of records."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import httpx
from browsers import PHONE, fits, opened
from gateways import KEYS, Gateway

from lilliput.cli.local_swarm import LocalSwarm
from lilliput.swarm.held_model import HeldModel
from lilliput.swarm.records import ServerRecord

Facts = dict[str, Any]


def made_up(servers: list[ServerRecord], blocks: int) -> Facts:
    """What the page would get of such a swarm."""
    ways = {server.peer_id: 0.001 * (number + 1) for number, server in enumerate(servers)}
    rest = {"path": None, "requests": {"running": 0, "waiting": 0}, "started_at": 1, "version": "0.1.0"}
    return {**HeldModel("made-up", blocks, servers, ways).facts(), **rest}


def server(number: int, start: int, end: int, **more: Any) -> ServerRecord:
    return ServerRecord(peer_id=f"12D3KooW{number:08d}", model="made-up", start=start, end=end, **more)


def hand_out(page: Any) -> Callable[[Facts | None], None]:
    """Have the page get made-up facts, or no answer; it looks again at once."""
    facts: list[Facts | None] = [None]

    def answer(route: Any) -> None:
        route.abort() if facts[0] is None else route.fulfill(json=facts[0])

    page.route("**/swarm.json", answer)

    def hand(new: Facts | None) -> None:
        facts[0] = new
        page.evaluate("look()")

    return hand


def test_the_facts(gateway: Gateway, swarm: LocalSwarm) -> None:
    answer = httpx.get(f"{gateway.url}/swarm.json", headers={"Accept-Encoding": "identity"})
    facts = answer.json()
    assert (facts["model"], facts["blocks"], facts["missing"]) == (gateway.model, 30, [])
    assert facts["coverage"] == [1] * 30
    assert [(s["start"], s["end"], s["state"], s["serves"]) for s in facts["servers"]] == [
        (0, 15, "serving", True),
        (15, 30, "serving", True),
    ]
    first, second = (s.peer_id for s in swarm.servers)
    assert [(leg["peer_id"], leg["start"], leg["end"]) for leg in facts["path"]["legs"]] == [
        (first, 0, 15),
        (second, 15, 30),
    ]
    assert facts["path"]["total_ms"] > 0
    assert "127.0.0.1" not in answer.text  # who may ask a model need not know where its servers live


def test_it_asks_for_the_key_as_the_chat_does(browser: Any, guarded: Gateway) -> None:
    assert httpx.get(f"{guarded.url}/swarm.json").json()["error"]["code"] == "invalid_api_key"
    with opened(browser, f"{guarded.url}/swarm", silent=False) as page:
        page.get_by_label("API key").fill(KEYS[1])
        page.keyboard.press("Enter")
        page.get_by_role("heading", name="All 30 blocks are served").wait_for()
        page.get_by_role("link", name="Chat").click()
        page.get_by_text("SmolLM2-135M-Instruct").wait_for()  # it has the key already


def test_a_real_swarm_on_a_phone(browser: Any, gateway: Gateway, swarm: LocalSwarm) -> None:
    with opened(browser, gateway.url, viewport=PHONE, color_scheme="dark") as page:
        page.get_by_role("link", name="Swarm").click()
        page.get_by_role("heading", name="All 30 blocks are served").wait_for()
        page.get_by_text("live", exact=True).wait_for()
        first, second = (s.peer_id[-8:] for s in swarm.servers)
        bar = page.get_by_role("button", name=f"{first}, blocks 0:15, serving")
        bar.focus()
        page.keyboard.press("ArrowRight")
        page.keyboard.press("Enter")
        details = page.get_by_role("region", name="The chosen server")
        details.get_by_text(swarm.servers[1].peer_id).wait_for()
        page.keyboard.press("Escape")
        details.wait_for(state="hidden")
        row = page.get_by_role("row", name=first)
        assert row.get_by_text("float32").is_visible()
        assert page.get_by_role("list").filter(has_text="this API").get_by_text(second).is_visible()
        assert fits(page)


def test_a_missing_block_and_what_changes_are_told(browser: Any, gateway: Gateway) -> None:
    with opened(browser, f"{gateway.url}/swarm", silent=False) as page:
        hand = hand_out(page)
        a, b, c = server(1, 0, 6, name="attic"), server(2, 6, 12), server(3, 0, 12, name="<b>cellar")
        hand(made_up([a, c, b], 12))
        page.get_by_text("Each by more than one server").wait_for()
        hand(made_up([a, b.model_copy(update={"state": "draining"})], 12))
        page.get_by_role("heading", name="Nobody serves blocks 6:12").wait_for()
        page.get_by_text("--blocks 6:12").wait_for()
        assert "6:12 missing" in page.title()
        lately = page.get_by_role("region", name="Lately")
        for text in ("<b>cellar went: it held blocks 0:12", "00000002 (blocks 6:12): leaving", "nobody serves blocks"):
            lately.get_by_text(text).wait_for()
        hand(made_up([a, server(2, 6, 7), server(4, 8, 12)], 12))
        page.get_by_role("heading", name="Nobody serves block 7").wait_for()
        hand(None)
        page.get_by_role("alert").get_by_text("This API does not answer").wait_for()
        page.get_by_text("s old").wait_for()
        hand(made_up([a, b], 12))  # it was started again
        page.get_by_role("heading", name="All 12 blocks are served").wait_for()
        page.get_by_text("live", exact=True).wait_for()
        assert page.get_by_role("alert").count() == 0
        hand(made_up([], 12))
        page.get_by_role("heading", name="No server of this model").wait_for()


def test_hundreds_of_servers(browser: Any, gateway: Gateway) -> None:
    starts = [number * 7 % 121 for number in range(400)]
    servers = [server(n, start, start + 6, cache_tokens=8192, cache_tokens_free=n) for n, start in enumerate(starts)]
    following = [s.peer_id for s in servers[:16]]
    servers = [s.model_copy(update={"followers": tuple((peer, 1.5) for peer in following)}) for s in servers]
    for viewport in (PHONE, {"width": 1280, "height": 900}):
        with opened(browser, f"{gateway.url}/swarm", viewport=viewport) as page:
            hand_out(page)(json.loads(json.dumps(made_up(servers, 126))))
            page.get_by_role("heading", name="All 126 blocks are served").wait_for()
            assert page.locator(".bar").count() == page.locator("#servers tbody").get_by_role("row").count() == 400
            page.get_by_label("Find a server").fill("00000399")
            page.get_by_text("1 of 400 servers").wait_for()
            assert fits(page)
