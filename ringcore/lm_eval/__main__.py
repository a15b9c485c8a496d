"""lm-eval's command line, which knows the model "ringcore"."""

from __future__ import annotations

import importlib
import sys

__all__ = ["main"]


def main() -> None:
    try:
        from lm_eval.__main__ import cli_evaluate
    except ModuleNotFoundError as error:
        sys.exit(f"ringcore: there is no module {error.name!r}; run pip install 'ringcore[lm-eval]'")
    importlib.import_module("ringcore.lm_eval.model")  # registers it
    cli_evaluate()


if __name__ == "__main__":
    main()
