"""What each part of the view shows, as lines of styled text for a given width. No part knows where it is shown."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from rich.cells import cell_len
from rich.text import Text

from ringcore.cli.tables import age, count
from ringcore.cli.top.figures import UNKNOWN, bar, duration, plain, rate, share, sparkline
from ringcore.cli.top.monitor import View
from ringcore.cli.top.processes import processes
from ringcore.cli.top.sample import Pace, Sample
from ringcore.protocol.introspection import BlockMap, RequestReport, Spread

__all__ = ["PANELS", "REQUEST_COLUMNS", "Panel", "header", "request_cells"]

Lines = list[Text]

_STATE_STYLES = {
    "ready": "bold green",
    "sleeping": "bold blue",
    "starting": "bold yellow",
    "stalled": "bold red",
    "dead": "bold red",
}
_REQUEST_STYLES = {
    "running": "green",
    "waiting": "yellow",
    "preempted": "red",
    "held": "magenta",
    "compiling": "cyan",
    "loading": "blue",
}
# Of a block map's cell, in its order: glyph, style, name.
_BLOCKS = (
    ("·", "grey58", "free"),
    ("▒", "yellow", "cached"),
    ("█", "green", "in use"),
    ("▓", "magenta", "shared"),
)


# ---------------------------------------------------------------------------------------------------------------
# The header.


def header(view: View, silent_s: float, width: int) -> Lines:
    """Two lines: what the engine is, and how it does."""
    return [_cut(_what(view), width), _cut(_how(view, silent_s), width)]


def _what(view: View) -> Text:
    line = Text(plain(view.name, 60), style="bold")
    if view.sample is None:
        return line
    about = view.sample.engine.about
    model = plain(about.model.rstrip("/").rpartition("/")[2] or about.model, 60)
    device = view.sample.device or about.device
    workers = f"{about.world_size} worker{'s' * (about.world_size > 1)}"
    facts = [model] if model != view.name else []
    facts += [f"{device}, {workers}", f"pid {about.pids.get('engine', '?')}", f"up {age(about.age_s)}"]
    facts.append(f"{count(about.max_model_len)} tokens a request, {count(about.max_num_seqs)} at once")
    return line.append("  " + " · ".join(facts), style="not bold")


def _how(view: View, silent_s: float) -> Text:
    if view.contact == "connecting":
        return Text("connecting...", style="yellow")
    if view.contact == "ended":
        return Text(f"ended: {plain(view.trouble or '')}", style="bold")
    if view.contact == "silent":
        return Text(f"no answer for {age(silent_s)}: {plain(view.trouble or '')}", style="bold")
    assert view.sample is not None
    return _health(view.sample)


def _health(sample: Sample) -> Text:
    health = sample.engine.health
    line = Text(health.state, style=_STATE_STYLES[health.state])
    if health.paused is not None:
        line.append(f" · paused ({'new requests' if health.paused == 'new' else 'all'})", style="bold yellow")
    if any(state != "resident" for state in health.memory.values()):
        line.append(" · " + ", ".join(f"{tag.replace('_', ' ')} {state}" for tag, state in health.memory.items()))
    if health.oldest_step_s is not None:
        line.append(f" · step in flight for {duration(health.oldest_step_s)}")
    if health.num_restarts:
        line.append(f" · workers restarted {health.num_restarts}x: ", style="yellow")
        line.append(plain(health.restart_cause or "", 200), style="yellow")
    return line


# ---------------------------------------------------------------------------------------------------------------
# The panels.


def _requests(view: View, sample: Sample, width: int, height: int) -> Lines:
    numbers = sample.engine.requests.num_by_state
    total = max(1, sum(numbers.values()))
    room = max(0, width - 17)
    lines = []
    for state, number in numbers.items():
        style = _REQUEST_STYLES[state] if number else "grey58"
        line = Text(f"{state:<9} {count(number):>6} ", style="" if number else "grey58")
        lines.append(line.append(bar(number / total, room), style=style))
    oldest = sample.engine.health.oldest_waiting_s
    if oldest is not None:
        lines.append(Text(f"longest wait {age(oldest)}"))
    return lines


def _tokens(view: View, sample: Sample, width: int, height: int) -> Lines:
    """Rates since the sample before or, in the first one, as the engine remembers its last seconds."""
    engine, pace, steps = sample.engine, view.pace, sample.engine.steps
    generated = steps.generated_tokens_per_s if pace is None else pace.generated_tokens_per_s
    computed = steps.scheduled_tokens_per_s if pace is None else pace.scheduled_tokens_per_s
    queried = engine.num_prefix_query_tokens
    ever = engine.num_prefix_hit_tokens / queried if queried else None
    lines = [
        _pair("generated", f"{rate(generated)}/s", "cyan"),
        _pair("computed", f"{rate(computed)}/s"),
        _pair("prefix hits", f"{share(None if pace is None else pace.prefix_hit_rate)} ({share(ever)})"),
        _pair("preemptions", f"{count(engine.num_preemptions)}{_per_second(pace)}"),
    ]
    if engine.num_draft_tokens is not None:
        drafted, now = engine.num_draft_tokens, None if pace is None else pace.draft_acceptance
        right = (engine.num_accepted_tokens or 0) / drafted if drafted else None
        lines.append(_pair("drafts", f"{share(now)} right ({share(right)} of {count(drafted)})"))
    room = height - len(lines)
    if room > 0 and view.token_rates:
        lines += [Text(line, style="cyan") for line in sparkline(view.token_rates, width, room)]
    return lines


def _per_second(pace: Pace | None) -> str:
    return f", {rate(pace.preemptions_per_s)}/s" if pace is not None and pace.preemptions_per_s else ""


def _pair(name: str, value: str, style: str = "") -> Text:
    return Text(f"{name:<12}").append(value, style=style)


def _steps(view: View, sample: Sample, width: int, height: int) -> Lines:
    """Percentiles of the last steps, as many columns as fit."""
    steps = sample.engine.steps
    if not steps.num_steps:
        return [Text("no step yet", style="grey58")]
    fields: list[tuple[str, Callable[[Spread], float]]] = [
        ("median", lambda one: one.p50_s),
        ("90%", lambda one: one.p90_s),
        ("99%", lambda one: one.p99_s),
        ("max", lambda one: one.max_s),
    ]
    fields = fields[: max(1, (width - 8) // 9)]
    lines = [Text(" " * 8 + "".join(f"{name:>9}" for name, _ in fields), style="grey58")]
    for name, spread in steps.parts.items():
        text = f"{name:<8}" + "".join(f"{duration(value(spread)):>9}" for _, value in fields)
        lines.append(Text(text, style="bold" if name == "step" else ""))
    per_s = steps.steps_per_s if view.pace is None else view.pace.steps_per_s
    lines.append(Text(f"{rate(per_s)} steps/s, {count(sample.engine.num_steps)} ever"))
    return lines


def _blocks(view: View, sample: Sample, width: int, height: int) -> Lines:
    blocks = sample.engine.blocks
    totals = (blocks.num_free, blocks.num_cached, blocks.num_used, blocks.num_shared)
    legend = _legend(totals, blocks.num_blocks, with_names=True)
    if legend.cell_len > width:
        legend = _legend(totals, blocks.num_blocks, with_names=False)
    return [_cut(legend, width), *_block_map(blocks, width, max(1, height - 1))]


def _legend(totals: Sequence[int], num_blocks: int, with_names: bool) -> Text:
    legend = Text()
    for (glyph, style, name), number in reversed(list(zip(_BLOCKS, totals, strict=True))):
        legend.append(glyph, style=style).append(f" {f'{name} ' if with_names else ''}{count(number)}  ")
    return legend.append(f"of {count(num_blocks)}", style="grey58")


def _block_map(blocks: BlockMap, width: int, height: int) -> Lines:
    """A character stands for as many cells as needed; it shows what most of its blocks are."""
    per_glyph = -(-len(blocks.cells) // max(1, width * height))
    glyphs = []
    for first in range(0, len(blocks.cells), per_glyph):
        sums = [sum(column) for column in zip(*blocks.cells[first : first + per_glyph], strict=True)]
        glyphs.append(_BLOCKS[max(range(4), key=lambda state: (sums[state], state))])
    lines = []
    for first in range(0, len(glyphs), width):
        line = Text()
        for glyph, style, _ in glyphs[first : first + width]:
            line.append(glyph, style=style)
        lines.append(line)
    return lines


class Panel(NamedTuple):
    """lines: of the view and its sample, for a width and a height in cells; they may be more than the height."""

    name: str
    title: str
    lines: Callable[[View, Sample, int, int], Lines]


PANELS: Sequence[Panel] = (
    Panel("requests", "Requests", _requests),
    Panel("tokens", "Tokens", _tokens),
    Panel("steps", "Steps", _steps),
    Panel("blocks", "KV cache blocks", _blocks),
    Panel("workers", "Processes", processes),
)

# ---------------------------------------------------------------------------------------------------------------
# The table of the slowest requests: name and whether it is a number.

# The most important first: what does not fit is left out, or scrolled to.
REQUEST_COLUMNS = (
    ("age", True),
    ("state", False),
    ("request", False),
    ("generated", True),
    ("prompt", True),
    ("blocks", True),
    ("cached", True),
    ("preempted", True),
    ("wait", True),
    ("priority", True),
)
_ID_CELLS = 36


def request_cells(request: RequestReport) -> list[Text]:
    """In the order of `REQUEST_COLUMNS`."""
    waited = request.first_scheduled_s if request.waiting_s is None else request.waiting_s
    texts = [
        age(request.age_s),
        request.state,
        _short_id(request.request_id),
        f"{count(request.num_generated_tokens)}/{count(request.max_generated_tokens)}",
        count(request.num_prompt_tokens),
        count(request.num_blocks),
        count(request.num_cached_tokens),
        count(request.num_preemptions),
        UNKNOWN if waited is None else age(waited),
        str(request.priority),
    ]
    cells = [
        Text(text, justify="right" if is_number else "left", no_wrap=True)
        for text, (_, is_number) in zip(texts, REQUEST_COLUMNS, strict=True)
    ]
    cells[1].stylize(_REQUEST_STYLES[request.state])
    return cells


def _short_id(request_id: str) -> str:
    """Its end, too: ids differ in their ends."""
    shown = plain(request_id)
    if cell_len(shown) <= _ID_CELLS:
        return shown
    end = plain(shown[-10:], 10)
    return plain(shown[:-10], _ID_CELLS - cell_len(end)) + end


def _cut(line: Text, width: int) -> Text:
    line.truncate(max(0, width), overflow="ellipsis")
    return line
