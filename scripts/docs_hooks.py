"""Pages of the site that are documents at the project's root, with their links as the site has them."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
PAGES = {
    "index.md": "README.md",
    "architecture.md": "ARCHITECTURE.md",
    "contributing.md": "CONTRIBUTING.md",
    "results.md": "benchmarks/RESULTS.md",
}


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    document = PAGES.get(page.file.src_uri)
    if document is None:
        return markdown
    text = (ROOT / document).read_text()
    for site, path in PAGES.items():
        text = text.replace(f"]({path})", f"]({site})")
    return re.sub(r"\]\(docs/", "](", text)
