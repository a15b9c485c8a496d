"""The engine: requests in, tokens out; it does not know who calls it or how tokens become text."""
