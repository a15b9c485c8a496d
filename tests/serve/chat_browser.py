"""The chat page as a person uses it: in a browser, on the echo model."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager

from browser import Browser
from echo_model import HERMES_MARKS, serve_echo
from echo_worker import SAID_ID
from fake_engine import KILLS_ONCE, ROW_FAILS, SLOW

# Ids are given in order: so many fillers that these two, and none of the plain ones, make the worker misbehave.
ROW_FAILS_TEXT, SLOW_TEXT = "<|row_fails|>", "<|slow|>"
_SPECIAL = (*(f"<|pad{i}|>" for i in range(ROW_FAILS - SAID_ID - 1)), ROW_FAILS_TEXT, SLOW_TEXT, "<|once|>")
_PLAIN = ("<tool_call>", "</tool_call>", "<think>", "</think>")
assert SAID_ID + len(_SPECIAL) == KILLS_ONCE == SLOW + 1

LAST = ".turn:last-child"


def serve_page(folder, **options):
    return serve_echo(
        folder, HERMES_MARKS, _SPECIAL, _PLAIN, served_model_names=("team/echo-with-a-rather-long-name",), **options
    )


class ChatPage:
    """A page that was just opened. `check` it at the end: then the browser knows nothing more of it."""

    def __init__(self, browser: Browser, service, key: str) -> None:
        """key: of the service, as if it had been given to the page before."""
        self.browser, self.service = browser, service
        browser.look()
        browser.open("about:blank")
        browser.events.clear()
        source = f"location.protocol === 'about:' || sessionStorage.setItem('ringcore.key', {json.dumps(key)})"
        script = browser.call("Page.addScriptToEvaluateOnNewDocument", source=source)
        browser.open(f"{service.url}/")
        browser.call("Page.removeScriptToEvaluateOnNewDocument", **script)

    def reload(self) -> None:
        address = self.browser.run("location.href")
        self.browser.open("about:blank")
        self.browser.open(address)

    def ready(self) -> ChatPage:
        self.browser.wait_text("#state-text", "ready")
        self.browser.wait_text("#model", "echo")
        return self

    def fill(self, selector: str, text: str) -> None:
        self.browser.click(selector)
        self.browser.run(f"document.querySelector({json.dumps(selector)}).select()")
        self.browser.type(text)

    def set(self, **settings: str) -> None:
        self.browser.click("#open-settings")
        for name, value in settings.items():
            self.fill(f"#settings [name={name}]", value)
        self.done()

    def done(self) -> None:
        self.browser.click("#settings .drawer-head button")
        self.browser.until("!document.querySelector('#settings').open")

    def send(self, text: str) -> None:
        self.fill("#message", text)
        self.browser.press("Enter")

    def end(self, end: str = "stop") -> str:
        """The last answer's text, once the answer has ended so and is rendered."""
        ended = self.browser.until(f"document.querySelector('{LAST}').dataset.end")
        assert ended == end, self.browser.text(LAST)
        self.rendered()
        return self.content()

    def rendered(self) -> None:
        self.browser.until("!document.querySelector('.content[aria-busy=true]')")

    def content(self) -> str:
        return self.browser.text(f"{LAST} .content")

    def ask(self, text: str) -> str:
        self.send(text)
        return self.end()

    def figure(self, name: str) -> str:
        return self.browser.text(f"{LAST} .figures [data-figure={name}]")

    def sent_bodies(self) -> list[dict]:
        """What was posted, as the service got it."""
        self.browser.run("0")
        requests = [e["params"]["request"] for e in self.browser.events if e["method"] == "Network.requestWillBeSent"]
        return [json.loads(one["postData"]) for one in requests if one["url"].endswith("/v1/chat/completions")]

    def check(self, *, allows_failed_requests: bool) -> None:
        """Nothing was asked of others, and the console is empty, but for requests that were to fail."""
        assert {
            url for url in self.browser.requested_urls() if not url.startswith((self.service.url, "about:"))
        } == set()
        complaints = self.browser.complaints()
        self.browser.run("localStorage.clear(), sessionStorage.clear()")
        if allows_failed_requests:
            complaints = [text for text in complaints if "Failed to load resource" not in text]
        assert complaints == []

    @contextmanager
    def offline(self) -> Iterator[None]:
        conditions = {"latency": 0, "downloadThroughput": -1, "uploadThroughput": -1}
        self.browser.call("Network.emulateNetworkConditions", offline=True, **conditions)
        try:
            yield
        finally:
            self.browser.call("Network.emulateNetworkConditions", offline=False, **conditions)
