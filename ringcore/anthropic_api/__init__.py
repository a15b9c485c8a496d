"""The bodies of Anthropic's Messages API: validated, answered as a chat of `openai_api`, and written."""
