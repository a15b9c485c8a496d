"""The part that runs in the user's process: prompts in, text out; independent of scheduling."""
