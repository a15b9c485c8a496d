"""What a search for tiles tries, of linears and of mixtures."""
