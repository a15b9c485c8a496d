"""The chat page, driven in a headless browser."""

from __future__ import annotations

import json
import re

import pytest
from browser import Browser, find_browser
from chat_answers import ARGUMENTS, CALL, WEATHER
from chat_browser import LAST, ROW_FAILS_TEXT, SLOW_TEXT, ChatPage, serve_page
from running_service import eventually

pytestmark = pytest.mark.skipif(find_browser() is None, reason="no browser: apt-get install chromium")
LONG = "**word** " + "word " * 120  # a token a letter, 50 ms each where the engine is slow: half a minute
KEY = "right-key"


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    made = Browser(find_browser(), tmp_path_factory.mktemp("browser"))
    yield made
    made.close()
    assert made.processes() == []


@pytest.fixture(scope="module")
def service(tmp_path_factory):
    with serve_page(tmp_path_factory.mktemp("model"), api_keys=(KEY,)) as running:
        yield running


@pytest.fixture
def page(browser, service, request):
    opened = ChatPage(browser, service, KEY).ready()
    yield opened
    opened.check(allows_failed_requests=request.node.get_closest_marker("usefixtures") is not None)


@pytest.fixture
def requests_fail():
    """Of a test in which some are meant to: the browser says so in its console."""


def test_a_conversation(page):
    browser = page.browser
    page.fill("#message", "first line")
    browser.press("Enter", shift=True)
    browser.type("second line")
    browser.press("Enter")
    assert page.end() == "first line\nsecond line"
    assert browser.text(f"{LAST} .question") == "first line\nsecond line"
    assert browser.run("document.querySelector('#message').value") == ""
    assert browser.run("document.activeElement.id") == "message"
    browser.wait_text("#announcer", "second line")
    page.set(system="Be brief.", temperature="0.5", max_tokens="7", seed="3", stop="zzz")
    page.send("and more")
    assert page.end("length") == "and mor"
    assert "limit of tokens" in page.figure("end")
    *_, body = page.sent_bodies()
    assert body["messages"] == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "first line\nsecond line"},
        {"role": "assistant", "content": "first line\nsecond line"},
        {"role": "user", "content": "and more"},
    ]
    told = {name: body[name] for name in ("model", "temperature", "max_tokens", "seed", "stop")}
    assert told == {
        "model": "team/echo-with-a-rather-long-name",
        "temperature": 0.5,
        "max_tokens": 7,
        "seed": 3,
        "stop": ["zzz"],
    }
    assert "top_p" not in body
    browser.click("#new-chat")
    assert browser.text("#messages") == ""
    assert "What would you like" in browser.text("#welcome")
    page.ask("again")
    assert page.sent_bodies()[-1]["messages"][1:] == [{"role": "user", "content": "again"}]


def test_settings_are_kept(page):
    page.set(system="Be kind.", top_k="5")
    page.reload()
    page.ready().ask("hello")
    assert page.sent_bodies()[-1]["top_k"] == 5
    page.browser.click("#open-settings")
    page.browser.click("#reset-settings")
    found = "[...document.querySelectorAll('#settings input')].map(one => [one.name, one.placeholder])"
    shown = dict(page.browser.run(found))
    assert (shown["temperature"], shown["top_k"], shown["max_tokens"]) == ("default 1", "default 0", "what fits")
    assert "takes 2048 tokens" in page.browser.text("#context-hint")
    page.done()
    page.ask("hello")
    assert "top_k" not in page.sent_bodies()[-1]


def test_conversations_are_kept_in_the_browser(page):
    browser = page.browser
    page.ask("**first** question")
    browser.click("#new-chat")
    page.ask("second question")
    assert browser.text("#chat-list .chat-title") == "second question\n**first** question"
    page.reload()
    page.ready()
    page.rendered()
    assert page.content() == "second question"  # the address names it
    assert page.figure("tokens").startswith("16 tokens in ")
    browser.click("#chat-list li:last-child .chat-title")
    page.rendered()
    assert page.content() == "first question"
    page.ask("more")
    assert [one["content"] for one in page.sent_bodies()[-1]["messages"]] == ["**first** question"] * 2 + ["more"]

    browser.click("[aria-label^=Rename]")  # of the first in the list, which was used last
    browser.type("other name")
    browser.press("Enter")
    assert browser.text("#chat-list .chat-title") == "other name\nsecond question"
    browser.click("[aria-label='Delete other name']")
    assert browser.text("#chat-list .chat-title") == "second question"
    assert browser.text("#messages") == ""
    browser.click("#chats-note button")  # undo
    assert browser.text("#chat-list .chat-title") == "other name\nsecond question"
    browser.click("#remove-all-chats")
    assert browser.run("Object.keys(localStorage)") == []
    assert "kept in this browser" in browser.text("#no-chats")


def test_an_answer_goes_on_beside_another_conversation(page):
    browser = page.browser
    page.set(system=SLOW_TEXT)
    page.send("a slow one")
    browser.until("document.querySelector('.content').innerText")
    page.set(system="fast")
    browser.click("#new-chat")
    assert browser.run("document.querySelector('#stop').hidden")
    assert page.ask("a fast one") == "a fast one"
    browser.until("!document.querySelector('#chat-list .answering')")
    browser.click("#chat-list li:has([title='a slow one']) .chat-title")
    assert page.end() == "a slow one"


def test_a_browser_that_keeps_nothing(page):
    page.browser.run("Storage.prototype.setItem = () => { throw new DOMException('full', 'QuotaExceededError'); }")
    assert page.ask("hello") == "hello"
    assert "keeps no more" in page.browser.text("#chats-note")
    assert page.ask("again") == "again"


def test_old_conversations_make_room(page):
    """Where the storage is full, and where what is in it is of another version."""
    page.browser.run(
        "for (let i = 0; i < 9; i++) localStorage['ringcore.chat.' + i] = JSON.stringify("
        "{id: String(i), title: 'old ' + i, updatedMs: i, turns: ['x'.repeat(5e5)]});"
        "localStorage['ringcore.chat.bad'] = '[';"
        "localStorage['ringcore.chat.odd'] = JSON.stringify({id: 'odd', title: 'odd', updatedMs: 99, turns: [{}, 1]});"
    )
    page.reload()
    page.ready()
    assert page.browser.text("#chat-list .chat-title").split("\n") == ["odd", *(f"old {i}" for i in range(8, -1, -1))]
    page.browser.run(
        "localStorage.filler = ''; for (let n = 1e6; n >= 1; n = Math.floor(n / 2))"
        " try { while (true) localStorage.filler += 'z'.repeat(n); } catch {}"
    )
    page.ask("hello")
    assert page.browser.text("#chat-list .chat-title").split("\n") == [
        "hello", "odd", *(f"old {i}" for i in range(8, 0, -1))
    ]  # fmt: skip
    page.browser.click("#chat-list li:nth-child(2) .chat-title")
    assert page.browser.text("#messages") == ""


def test_edit_and_regenerate(page):
    browser = page.browser
    page.ask("one")
    page.ask("two")
    page.ask("three")
    assert browser.text(".only-last") == "Regenerate"
    browser.click(f"{LAST} .only-last")
    page.end()
    assert browser.run("document.activeElement.id") == "message"
    assert [one["content"] for one in page.sent_bodies()[-1]["messages"]] == ["one", "one", "two", "two", "three"]
    browser.click(".turn:nth-child(2) .asked .redo")
    browser.press("Escape")
    browser.click(".turn:nth-child(2) .asked .redo")
    page.fill(".editor textarea", "other")
    browser.press("Enter")
    browser.until("document.querySelectorAll('.turn').length === 2")
    assert page.end() == "other"
    assert [one["content"] for one in page.sent_bodies()[-1]["messages"]] == ["one", "one", "other"]


def test_jump_to_the_latest(page):
    browser = page.browser
    page.ask("\n\n".join(["a line"] * 60))
    browser.until("document.querySelector('#jump').hidden")
    browser.run("document.querySelector('#scroll').scrollTop = 0")
    browser.click("#jump")
    browser.until("(one => one.scrollHeight - one.scrollTop - one.clientHeight < 2)(document.querySelector('#scroll'))")
    assert browser.run("document.querySelector('#jump').hidden")
    assert browser.run("document.documentElement.scrollHeight <= innerHeight")


@pytest.mark.parametrize("by", ["button", pytest.param("key", marks=pytest.mark.long_form)])
def test_an_answer_streams_until_it_is_stopped(page, by):
    browser = page.browser
    page.set(system=SLOW_TEXT)
    page.send(LONG)
    browser.until("document.querySelector('.content strong')?.innerText === 'word'")  # rendered while it streams
    assert page.browser.run(f"document.querySelector('{LAST}').dataset.end") == ""
    browser.until(
        f"document.querySelector('{LAST} [data-figure=rate]')?.innerText", lambda text: "tokens/s" in (text or "")
    )
    browser.wait_text("#engine [data-figure=running]", "1")
    browser.wait_text("#engine [data-figure=cache]", "%")
    assert not page.service.is_idle()
    if by == "button":
        browser.click("#stop")
    else:
        browser.press("Escape")
    part = page.end("stopped")
    assert LONG.replace("*", "").startswith(part)
    assert len(part) < len(LONG) / 2
    eventually(page.service.is_idle, "its blocks are free")
    browser.wait_text("#engine [data-figure=running]", "0")
    page.set(system="now fast")
    assert page.ask("go on") == "go on"
    roles = [message["role"] for message in page.sent_bodies()[-1]["messages"]]
    assert roles == ["system", "user", "assistant", "user"]


def test_the_figures_of_an_answer(page):
    page.ask("a prompt that is longer than a block")
    assert re.fullmatch(r"first after [\d.]+ m?s", page.figure("ttft"))
    assert re.fullmatch(r"37 tokens in [\d.]+ m?s", page.figure("tokens"))  # with the end of text
    page.ask("a prompt that is longer than a block")
    told = re.fullmatch(r"prompt (\d+) tokens, (\d+) cached", page.figure("prompt"))
    num_prompt, num_cached = map(int, told.groups())
    assert 16 <= num_cached < num_prompt
    page.browser.wait_text("#engine [data-figure=hits]", "%")
    page.browser.wait_text("#engine [data-figure=cache]", "0%")
    page.ask("no")
    assert page.figure("tokens").startswith("3 tokens in ")
    assert page.figure("rate") == ""  # three tokens have none
    rate = "import('/page/figures.js').then(({ rateText }) => "
    assert page.browser.run(f"{rate} [rateText(3, 1), rateText(32, 0.1), rateText(32, 2)])") == [
        "",
        "",
        "16.0 tokens/s",
    ]


@pytest.mark.usefixtures("requests_fail")
def test_an_error_names_the_field_and_leads_to_it(page):
    browser = page.browser
    page.set(top_p="9")
    page.send("too much")
    page.end("error")
    problem = browser.wait_text(f"{LAST} .problem", "top_p=9")
    assert "field: top_p · status 400" in problem
    browser.click(f"{LAST} .problem button:last-child")
    assert "top_p=9" in browser.wait_text("#settings-error", "top_p")
    assert browser.run("document.activeElement.name") == "top_p"
    assert browser.run("document.activeElement.matches('[aria-invalid=true]')")
    page.fill("#settings [name=top_p]", "1")
    page.done()
    browser.click(f"{LAST} .problem button")
    assert page.end() == "too much"
    assert browser.text(".problem") == ""


def test_settings_that_cannot_be_sent(page):
    page.set(tools="[{")
    page.send("a")
    page.end("error")
    assert "tools: this is no JSON" in page.browser.text(f"{LAST} .problem")
    assert page.sent_bodies() == []


@pytest.mark.usefixtures("requests_fail")
def test_a_request_that_fails_is_not_sent_along(page):
    page.send(ROW_FAILS_TEXT)
    page.end("error")
    assert "not finite" in page.browser.text(f"{LAST} .problem")
    assert page.ask("next") == "next"
    assert page.sent_bodies()[-1]["messages"] == [{"role": "user", "content": "next"}]


@pytest.mark.usefixtures("requests_fail")
def test_an_engine_that_sleeps_is_waited_for(page):
    service = page.service
    service.call(service.engine.sleep())
    try:
        page.send("are you there?")
        assert "sleep" in page.browser.wait_text(f"{LAST} .note", "sent again")
        page.browser.wait_text("#state-text", "asleep")
    finally:
        service.call(service.engine.wake_up())
    assert page.end() == "are you there?"
    assert page.browser.text(f"{LAST} .note") == ""
    page.browser.wait_text("#state-text", "ready")


@pytest.mark.usefixtures("requests_fail")
def test_a_service_that_is_gone_is_waited_for(page):
    with page.offline():
        page.send("hello?")
        assert "cannot be reached" in page.browser.wait_text(f"{LAST} .note", "sent again")
        page.browser.wait_text("#state-text", "not reachable")
        assert page.browser.text("#engine [data-figure=running]") == "\N{EN DASH}"
    assert page.end() == "hello?"
    with page.offline():
        page.send("never mind")
        page.browser.wait_text(f"{LAST} .note", "sent again")
        page.browser.click("#stop")
        page.end("stopped")


@pytest.mark.usefixtures("requests_fail")
def test_a_key_is_asked_for(page):
    browser = page.browser
    browser.run("sessionStorage.clear()")
    page.reload()
    browser.wait_text("#key", "asks for a key")
    browser.type("wrong-key")
    browser.press("Enter")
    browser.wait_text("#key", "does not know this key")
    browser.press("Escape")  # does not help
    browser.wait_text("#key", "does not know this key")
    page.fill("#key-value", KEY)
    browser.press("Enter")
    page.ready()
    assert page.ask("open, sesame") == "open, sesame"
    assert browser.run("Object.values(sessionStorage)") == [KEY]
    assert KEY not in browser.run("Object.values(localStorage).join()")


HOSTILE = """<img src=x onerror="window.hacked=1"><script>window.hacked=2</script>
<iframe src="https://evil.example/"></iframe> **<b onclick=hacked()>bold</b>** ![pixel](https://evil.example/pixel.png)
[click](javascript:window.hacked=3) [click](data:text/html,<script>window.hacked=4</script>) [ok](https://example.org/a?b="c)
# <svg onload="window.hacked=5">
- <a href="javascript:window.hacked=6">item</a>
| <style>*{display:none}</style> | b |
|---|---|
| `<object data=x>` | <link rel=stylesheet href=//evil.example/> |
```"><script>window.hacked=7</script>
<script>window.hacked=8</script>
"""


def test_hostile_text_is_text(page):
    page.send(HOSTILE)
    page.end()
    browser = page.browser
    found = browser.run("[...document.querySelectorAll('#messages *')].map(one => one.tagName.toLowerCase())")
    assert set(found) & {"img", "script", "iframe", "svg", "b", "object", "style", "link", "form", "base"} == set()
    assert browser.run("[...document.querySelectorAll('#messages a')].map(one => one.getAttribute('href'))") == [
        "https://evil.example/pixel.png",  # a link, of which nothing is loaded
        "https://example.org/a?b=%22c",
    ]
    names = browser.run("[...document.querySelectorAll('#messages *')].flatMap(one => one.getAttributeNames())")
    assert [name for name in names if name.startswith("on")] == []
    for part in ("<img src=x onerror=", "<b onclick=hacked()>bold</b>", "](javascript:", "<svg onload", "<style>*{"):
        assert part in page.content()
    assert browser.run("window.hacked === undefined")
    dialogs = [event for event in browser.events if event["method"] == "Page.javascriptDialogOpening"]
    assert dialogs == []


@pytest.mark.usefixtures("requests_fail")
def test_the_policy_refuses_what_the_page_would_never_do(page):
    """So that a mistake in the page is no hole."""
    refused = "(() => { try { document.body.innerHTML = '<i>x</i>'; return false; } catch (e) { return true; } })()"
    assert page.browser.run(refused)
    page.browser.events.clear()


MARKDOWN = """# A title
Some *soft*, **strong** and `literal_words` in snake_case_words, 2 * 3 * 4.

1. one
   - inner
2. two

> said

| a | b |
|---|:-:|
| 1 | **2** |

```python
def f(x):
    return x < 1 ** 2
```
The [end](https://example.org/)."""


def test_markdown(page):
    page.send(MARKDOWN)
    page.end()

    def texts(selector: str) -> list[str]:
        return page.browser.run(f"[...document.querySelectorAll('.content {selector}')].map(one => one.textContent)")

    assert texts("h3") == ["A title"]
    assert (texts("em"), texts("strong"), texts(":not(pre) > code")) == (["soft"], ["strong", "2"], ["literal_words"])
    assert texts("p")[0] == "Some soft, strong and literal_words in snake_case_words, 2 * 3 * 4."
    assert texts("ol > li > ul > li") == ["inner"]
    assert [text[:3] for text in texts("ol > li")] == ["one", "two"]
    assert (texts("blockquote"), texts("th"), texts("td")) == (["said"], ["a", "b"], ["1", "2"])
    assert texts("pre code") == ["def f(x):\n    return x < 1 ** 2"]
    assert texts("figcaption span") == ["python"]
    assert texts("code .keyword") == ["def ", "return "]
    colours = "[...document.querySelectorAll('.keyword, .number')].map(one => getComputedStyle(one).color)"
    assert len(set(page.browser.run(colours))) == 2
    assert texts("a") == ["end"]
    page.browser.run("navigator.clipboard.writeText = async (text) => (window.copied = text)")
    page.browser.click("figure.code button")
    page.browser.wait_text("figure.code button", "Copied")
    assert page.browser.run("copied") == texts("pre code")[0]
    page.browser.click(".turn-actions button")
    page.browser.wait_text(".turn-actions button", "Copied")
    assert page.browser.run("copied") == MARKDOWN


def test_reasoning_stands_apart(page):
    browser = page.browser
    assert page.ask("<think>\nlet me see\n</think>\n\nIt is so.") == "It is so."
    assert not browser.run("document.querySelector('.reasoning').open")
    browser.click(".reasoning summary")
    assert "let me see" in browser.wait_text(".reasoning", "let me see")
    page.ask("thanks")
    assert page.sent_bodies()[-1]["messages"][1] == {"role": "assistant", "content": "It is so."}


def test_calls_of_tools(page):
    page.set(tools=json.dumps([WEATHER]))
    page.send(f"Let me look. {CALL}")
    assert page.end("tool_calls") == "Let me look."
    assert page.browser.text(".call figcaption span") == "Calls get_weather"
    assert json.loads(page.browser.run("document.querySelector('.call code').textContent")) == ARGUMENTS
    page.send("thanks")
    page.end()
    (call,) = page.sent_bodies()[-1]["messages"][1]["tool_calls"]
    assert (call["function"]["name"], json.loads(call["function"]["arguments"])) == ("get_weather", ARGUMENTS)


def test_on_a_phone(page):
    browser = page.browser
    browser.look(width=360, height=640)
    page.ask("long" * 20 + "\n```\n" + "code " * 20 + "\n```\n|a|b|\n|-|-|\n|" + "x" * 70 + "|" + "y" * 70 + "|")
    for dark in (False, True):
        browser.look(width=360, height=640, dark=dark)
        assert browser.run("document.documentElement.scrollWidth") <= 360
        for selector in ("#toggle-chats", "#send", "#new-chat", "#open-settings", "#message", "#engine"):
            box = browser.run(f"document.querySelector('{selector}').getBoundingClientRect().toJSON()")
            assert box["left"] >= 0, selector
            assert box["right"] <= 360, selector
            assert box["bottom"] <= 640, selector
        colour = browser.run("getComputedStyle(document.body).backgroundColor")
        assert (max(map(int, re.findall(r"\d+", colour))) < 64) == dark
    assert browser.run("document.querySelector('#chats').hidden")
    browser.click("#toggle-chats")
    assert browser.run("document.activeElement.closest('#chat-list') !== null")
    browser.press("Escape")
    assert browser.run("document.querySelector('#chats').hidden")
    assert browser.run("document.activeElement.id") == "toggle-chats"


def test_names_for_a_screen_reader(page):
    browser = page.browser
    browser.click("#open-settings")
    nodes = browser.call("Accessibility.getFullAXTree")["nodes"]
    page.done()
    page.ask("hello")
    nodes += browser.call("Accessibility.getFullAXTree")["nodes"]
    named = [(n["role"]["value"], n["name"]["value"]) for n in nodes if not n["ignored"] and "name" in n]
    of = {role: {name for other, name in named if other == role} for role, _ in named}
    assert {"Settings", "New chat", "Send", "Done", "Conversations"} <= of["button"]
    assert {"Edit the question", "Copy the answer", "Regenerate", "Rename hello", "Delete hello"} <= of["button"]
    assert {"Message", "System prompt"} <= of["textbox"]
    assert {"Temperature", "Max tokens"} <= of["spinbutton"]
    assert of["log"] == {"Conversation"}
    for role in ("button", "textbox", "spinbutton", "dialog"):
        assert "" not in of[role], role
