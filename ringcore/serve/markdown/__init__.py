"""Markdown as plain data for the chat page, made in a process of its own."""
