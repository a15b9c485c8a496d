"""The configuration of the text model of several parts, with transformers' defaults for the fields that are left out.

A program of its own, since it imports torch: it reads a config.json and writes the text model's fields as JSON.
"""

from __future__ import annotations

import json
import sys

from transformers import CONFIG_MAPPING

__all__: list[str] = []


def main() -> None:
    config = json.load(sys.stdin)
    text = CONFIG_MAPPING[config["model_type"]].from_dict(config).get_text_config()
    sys.stdout.write(text.to_json_string(use_diff=False))


if __name__ == "__main__":
    main()
