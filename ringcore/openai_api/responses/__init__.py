"""OpenAI's Responses API: bodies, the items of a conversation, and the bounded store of answers."""
