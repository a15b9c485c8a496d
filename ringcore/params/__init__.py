"""The parameters and outputs of a request: plain values, validated on construction."""
