"""One launch for all layers of a decoder, for steps of one row."""
