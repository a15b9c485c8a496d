"""The progress bar of a call."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

__all__ = ["progress_bar"]

_REFRESH_S = 0.5


@contextmanager
def progress_bar(num_prompts: int, use_tqdm: bool) -> Iterator[Callable[[int, int], None]]:
    """Yields a function to call for each message, with the number of finished prompts and of new tokens."""
    if not use_tqdm:
        yield lambda num_finished, num_new_tokens: None
        return
    from tqdm import tqdm

    class Bar(tqdm):  # type: ignore[misc]
        """Without tqdm's monitor thread. tqdm's default lock creates a named semaphore, which a killed process may
        leave in /dev/shm; a thread lock replaces it, unless this process has used a bar of tqdm before."""

        monitor_interval = 0

    if not hasattr(tqdm, "_lock"):
        Bar.set_lock(threading.RLock())
    with Bar(total=num_prompts, desc="prompts", unit="prompt", dynamic_ncols=True, smoothing=0) as bar:
        started = shown = time.monotonic()
        num_tokens = 0

        def advance(num_finished: int, num_new_tokens: int) -> None:
            nonlocal num_tokens, shown
            num_tokens += num_new_tokens
            now = time.monotonic()
            if num_finished or now - shown > _REFRESH_S:  # show new tokens also while no prompt finishes
                bar.set_postfix_str(f"{num_tokens / max(now - started, 1e-9):.0f} output tokens/s")
                bar.update(num_finished)
                shown = now

        yield advance
