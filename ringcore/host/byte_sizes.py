"""Human-readable byte sizes."""

from __future__ import annotations

__all__ = ["format_bytes"]


def format_bytes(num_bytes: int, *, exact: bool = False) -> str:
    """GiB with two decimals; smaller sizes in MiB or bytes. exact: adds the number of bytes, as options take it."""
    if num_bytes < 0:
        return f"-{format_bytes(-num_bytes, exact=exact)}"
    if num_bytes >= 2**30 // 10 or num_bytes == 0:
        text = f"{num_bytes / 2**30:.2f} GiB"
    elif num_bytes >= 2**20 // 10:
        text = f"{num_bytes / 2**20:.2f} MiB"
    else:
        return f"{num_bytes} bytes"
    return f"{text} ({num_bytes} bytes)" if exact and num_bytes else text
