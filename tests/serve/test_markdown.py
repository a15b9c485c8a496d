"""Markdown as nodes, and the process that makes them."""

from __future__ import annotations

import asyncio
import json
import os
import signal

import pytest

from ringcore.errors import InvalidRequestError, QueueFullError
from ringcore.serve.markdown.nodes import blocks_of, highlighted
from ringcore.serve.markdown.renderer import MarkdownRenderer

TEXT = """# A title
Some *soft*, **strong**, ~~gone~~ `code` and [a link](https://example.org/a).
The next line.

1. one
   - inner

     a paragraph
2. two

> said
lazily

| a | b |
|---|:-:|
| 1 | **2** |

```python
def f(x):
    return "a" + 'b'  # c

```
    indented

last
===
end"""


def nodes(text: str) -> list:
    return [block.node for block in blocks_of(text)]


def text_of(node) -> str:
    return node if isinstance(node, str) else "".join(map(text_of, node[2:]))


def all_of(node) -> list[list]:
    return [] if isinstance(node, str) else [node, *(one for child in node[2:] for one in all_of(child))]


def test_inline():
    assert nodes("a *b* **c _d_**\n~~e~~ `f` [g](https://x.y/?a=1)") == [
        ["p", {}, "a ", ["em", {}, "b"], " ", ["strong", {}, "c ", ["em", {}, "d"]], "\n", ["del", {}, "e"], " ",
         ["code", {}, "f"], " ", ["a", {"href": "https://x.y/?a=1"}, "g"]]
    ]  # fmt: skip


def test_blocks():
    assert nodes("# a\n###### b\n***\n> c") == [
        ["h3", {}, "a"], ["h6", {}, "b"], ["hr", {}], ["blockquote", {}, ["p", {}, "c"]]
    ]  # fmt: skip
    assert nodes("3. a\n   - b\n4. c") == [
        ["ol", {"start": "3"}, ["li", {}, "a", ["ul", {}, ["li", {}, "b"]]], ["li", {}, "c"]]
    ]
    ((tag, _, head, body),) = nodes("|a|b|\n|-|-:|\n|1|2|")
    assert (tag, text_of(head), text_of(body)) == ("table", "ab", "12")
    assert head[2][3] == ["th", {"class": "right"}, "b"]
    assert nodes("") == nodes("\n\n") == []


def test_a_growing_text_changes_its_last_block_alone():
    """By which a page asks only for what follows the blocks that it has."""
    whole = blocks_of(TEXT)
    assert [block.node[0] for block in whole] == [
        "h3", "p", "ol", "blockquote", "table", "code", "code", "h3", "p"
    ]  # fmt: skip
    lines = TEXT.split("\n")
    for num in range(1, len(TEXT)):
        blocks = blocks_of(TEXT[:num])
        assert blocks[:-1] == whole[: len(blocks) - 1], TEXT[:num]
    for i, block in enumerate(whole):
        rest = blocks_of("\n".join(lines[block.line :]))
        assert [one.node for one in rest] == [one.node for one in whole[i:]]


@pytest.mark.parametrize("language", ["python", "Python", "cpp", "json", "diff", "bash", "html", "text", "no-such", ""])
def test_code_keeps_its_text(language):
    code = "\n\n  def f(x):\n\t# <b>\n+ 1\n-\u00e4\u4e2d x\n\n\n"
    assert "".join(map(text_of, highlighted(code, language))) == code[:-1]


def test_classes_of_code():
    found = {text.strip(): attributes["class"] for _, attributes, text in all_of(nodes(TEXT)[5])[1:]}
    assert found == {
        "def": "keyword",
        "f": "name",
        "return": "keyword",
        '"a"': "string",
        "'b'": "string",
        "# c": "comment",
    }
    assert nodes("```diff\n- a\n+ b\n```")[0][2:] == [
        ["span", {"class": "deleted"}, "- a\n"], ["span", {"class": "inserted"}, "+ b"]
    ]  # fmt: skip


@pytest.mark.parametrize(
    "text",
    [
        "<script>x</script>",
        "a <img src=x onerror=y> b",
        "<div>\n\n*a*\n\n</div>",
        "[a](javascript:x)",
        "[a](JaVaScRiPt:x) ![b](data:text/html,x)",
        "[a](&#106;avascript:x)",
        "[a](vbscript:x)\n[a]: file:///etc/passwd\n[a]",
        "<javascript:x>",
        "```<script>\nx\n```",
        "[a](/relative) [b](//host/)",
    ],
)
def test_what_is_hostile_stays_text(text):
    for node in (one for block in nodes(text) for one in all_of(block)):
        assert node[0] in {"p", "em", "code", "span", "ul", "li"}
        assert set(node[1]) <= {"language", "class"}


def test_nesting_is_bounded():
    deep = "*" * 5000 + "a" + "*" * 5000
    assert nodes(deep) == [["p", {}, deep]]
    for text in (">" * 5000 + "a", "- " * 5000 + "a", "[" * 5000, "`" * 5000):
        assert json.dumps(nodes(text))


async def gone(pid: int) -> bool:
    for _ in range(6000):
        if not os.path.exists(f"/proc/{pid}"):
            return True
        await asyncio.sleep(0.01)
    return False


def test_the_process():
    """Its death costs no text, a text that takes too long costs itself, and the process ends with the engine."""

    async def main() -> None:
        ended = asyncio.Event()
        renderer = MarkdownRenderer(ended.wait)
        assert renderer.pid is None
        answers = await asyncio.gather(*(renderer.render([f"*{i}*", "b"]) for i in range(32)))
        assert [json.loads(answer)[0] for answer in answers] == [
            [{"line": 0, "node": ["p", {}, ["em", {}, str(i)]]}] for i in range(32)
        ]
        os.kill(renderer.pid, signal.SIGSTOP)
        waiting = [asyncio.create_task(renderer.render(["a"])) for _ in range(32)]
        await asyncio.sleep(0)
        with pytest.raises(QueueFullError, match="32 calls wait"):
            await renderer.render(["a"])
        os.kill(renderer.pid, signal.SIGCONT)
        await asyncio.gather(*waiting)
        long = "\u00e4" * 3_000_000  # more than a socket takes at once
        ((block,),) = json.loads(await renderer.render([long]))
        assert block["node"] == ["p", {}, long]

        first = renderer.pid
        os.kill(first, signal.SIGKILL)
        assert json.loads(await renderer.render(["a"]))
        second = renderer.pid
        renderer._timeout_s = 0.05
        with pytest.raises(InvalidRequestError, match=r"took longer than 0\.05 s"):
            await renderer.render(["[a](" * 200_000])
        assert await gone(first)
        assert await gone(second)

    asyncio.run(main())


@pytest.mark.parametrize("by", ["engine", "idle", "loop"])
def test_the_end_of_the_process(by):
    async def main() -> int:
        ended = asyncio.Event()
        renderer = MarkdownRenderer(ended.wait, idle_s=0.05 if by == "idle" else 60.0)
        await renderer.render(["a"])
        pid = renderer.pid or 0
        if by != "loop":
            ended.set() if by == "engine" else None
            assert await gone(pid)
            assert renderer.pid is None
        return pid

    pid = asyncio.run(main())
    assert not os.path.exists(f"/proc/{pid}")
