"""The model class of the family that only the tests know."""

from __future__ import annotations

from pebble import PEBBLE

from ringcore.model_executor.models.decoder import DenseDecoder


class PebbleForCausalLM(DenseDecoder):
    family = PEBBLE
