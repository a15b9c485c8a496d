"""One picture of an engine as plain text, for a script or a report."""

from __future__ import annotations

from rich.cells import cell_len, set_cell_size

from ringcore.cli.top.monitor import View
from ringcore.cli.top.panels import PANELS, REQUEST_COLUMNS, header, request_cells

__all__ = ["picture"]

_MAP_LINES = 6
_BETWEEN = "  "


def picture(view: View, silent_s: float, width: int) -> str:
    """Lines of at most `width` cells."""
    lines = [line.plain for line in header(view, silent_s, width)]
    if view.sample is not None:
        for panel in PANELS:
            height = 1 + _MAP_LINES if panel.name == "blocks" else 0
            shown = panel.lines(view, view.sample, width - 2, height)
            lines += ["", panel.title, *(f"  {line.plain}" for line in shown)]
        oldest = view.sample.engine.requests.oldest
        if oldest:
            rows = [[name for name, _ in REQUEST_COLUMNS], *([c.plain for c in request_cells(one)] for one in oldest)]
            lines += ["", "Slowest requests", *(f"  {line}" for line in _table(rows, width - 2))]
    return "".join(f"{_fit(line, width)}\n" for line in lines)


def _table(rows: list[list[str]], width: int) -> list[str]:
    """As many whole columns as fit."""
    columns = []
    for (_, is_number), texts in zip(REQUEST_COLUMNS, zip(*rows, strict=True), strict=True):
        cells = max(map(cell_len, texts))
        width -= cells
        if width < 0:
            break
        width -= len(_BETWEEN)
        paddings = [" " * (cells - cell_len(text)) for text in texts]
        columns.append([p + t if is_number else t + p for t, p in zip(texts, paddings, strict=True)])
    return [_BETWEEN.join(cells) for cells in zip(*columns, strict=True)]


def _fit(line: str, width: int) -> str:
    return (line if cell_len(line) <= width else set_cell_size(line, width)).rstrip()
