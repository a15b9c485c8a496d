"""What runs in the user's process: prompts in, text out; it does not know how an engine schedules."""
