"""What is done to logits before sampling, and what is reported of them."""
