"""The chat page in a real browser, where there is one."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from browsers import PHONE, fits, opened
from gateways import KEYS, Gateway


@pytest.fixture
def page(browser: Any, gateway: Gateway) -> Iterator[Any]:
    """On a phone."""
    with opened(browser, gateway.url, viewport=PHONE) as page:
        yield page


def ask(page: Any, text: str) -> None:
    page.get_by_label("Message").fill(text)
    page.keyboard.press("Enter")


def test_before_there_is_a_talk(page: Any) -> None:
    page.get_by_role("button", name="Conversations").click()
    page.get_by_text("No conversations yet").wait_for()
    page.get_by_role("button", name="Conversations").click()
    page.route("**/v1/chat/completions", lambda route: None)  # an answer that does not come
    ask(page, "Hello")
    page.get_by_label("The answer is awaited").wait_for()
    page.get_by_role("button", name="Stop").click()
    page.get_by_label("The answer is awaited").wait_for(state="detached")


def test_what_has_come_of_an_answer_outlives_the_page(page: Any) -> None:
    ask(page, "Tell me a very long story about a cat.")
    page.locator(".assistant .body", has_text=" ").wait_for()
    page.reload()
    page.locator(".assistant .body", has_text=" ").wait_for()
    page.get_by_role("button", name="Retry").wait_for()


def test_a_talk(page: Any) -> None:
    page.get_by_text("SmolLM2-135M-Instruct").wait_for()
    page.get_by_role("button", name="Settings").click()
    page.get_by_label("Temperature").fill("0")
    page.get_by_role("button", name="Done").click()
    ask(page, "What is the capital of France?")
    page.get_by_text("The capital of France is Paris.").wait_for()
    page.get_by_text("tokens/s").wait_for()
    page.reload()  # it remembers
    page.get_by_text("The capital of France is Paris.").wait_for()
    page.get_by_role("button", name="Retry").click()
    page.get_by_text("tokens/s").wait_for()

    page.get_by_role("button", name="Edit").click()
    assert page.get_by_label("Message").input_value() == "What is the capital of France?"
    ask(page, "Tell me a very long story about <img src=x onerror=alert(1)> a cat.")
    page.locator(".assistant .body", has_text=" ").wait_for()
    page.get_by_role("button", name="Stop").click()
    page.get_by_role("button", name="Send").wait_for()
    assert page.locator("img").count() == 0
    assert fits(page)


def test_two_pages_keep_what_was_said_in_each(browser: Any, gateway: Gateway) -> None:
    context = browser.new_context(viewport=PHONE)
    page, other = context.new_page(), context.new_page()
    for tab in (page, other):
        tab.goto(gateway.url)
    for tab, text in ((page, "Say one."), (other, "Say two.")):
        tab.evaluate("settings.max_tokens = 8")
        ask(tab, text)
    for tab in (page, other):
        tab.get_by_text("tokens/s").wait_for()
    for _ in range(2):
        for tab, text in ((page, "Say one."), (other, "Say two.")):
            tab.locator(".user .body", has_text=text).wait_for()
            assert tab.locator("#list li").count() == 2
            assert tab.locator(".user").count() == 1
        for tab in (page, other):
            tab.reload()

    # a talk that both show
    other.get_by_role("button", name="Conversations").click()
    other.get_by_role("button", name="Say one.", exact=True).click()
    page.evaluate("settings.max_tokens = 8")
    ask(page, "And three.")
    page.get_by_text("tokens/s").nth(1).wait_for()
    other.get_by_text("tokens/s").nth(1).wait_for()

    page.get_by_role("button", name="Conversations").click()
    page.get_by_role("button", name="Delete Say one.").click()
    other.locator("#list li").nth(1).wait_for(state="detached")
    other.get_by_text("Say something to a model").wait_for()
    assert other.locator("#list li").count() == 1
    context.close()


def test_talks_of_older_pages_are_kept(page: Any) -> None:
    older = '[{"title": "Old", "messages": [{"role": "user", "content": "Long ago"}]}]'
    page.evaluate("(older) => localStorage.setItem('lilliput.talks', older)", older)
    page.reload()
    page.get_by_text("Long ago").wait_for()
    page.reload()
    assert page.evaluate("talks.length === 1 && talks[0].id === load(TALKS)[0].id")


def test_markdown_lets_no_html_in(page: Any) -> None:
    text = "# A <b>title</b>\n\nSome **bold** `a<b` [x](javascript:alert(1)) [y](https://e.org/)\n"
    text += "- 1\n- 2\n\n```js\n<i>\n```"
    html = page.evaluate("(text) => make('div', {}, ...markdown(text)).innerHTML", text)
    assert "<h2>A &lt;b&gt;title&lt;/b&gt;</h2>" in html
    assert "<strong>bold</strong>" in html
    assert "<code>a&lt;b</code>" in html
    assert "[x](javascript:alert(1))" in html
    assert 'href="https://e.org/"' in html
    assert "<ul><li>1</li><li>2</li></ul>" in html
    assert "<pre><code>&lt;i&gt;</code>" in html


def test_a_key_is_asked_for(browser: Any, guarded: Gateway) -> None:
    page = browser.new_page(color_scheme="dark")
    page.goto(guarded.url)
    page.get_by_text("Give an API key").wait_for()
    page.get_by_role("button", name="Settings").click()
    page.get_by_label("API key").fill(KEYS[1])
    page.keyboard.press("Escape")
    page.get_by_text("SmolLM2-135M-Instruct").wait_for()
    page.close()
