"""lm-eval's command line, which knows the model "ringcore"."""

from __future__ import annotations

from lm_eval.__main__ import cli_evaluate

import ringcore.lm_eval.model

__all__ = ["ringcore"]  # the import registers the model

if __name__ == "__main__":
    cli_evaluate()
