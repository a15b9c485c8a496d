"""The bodies of OpenAI's API: requests validated, answered by an `AsyncEngine`, and written; not how they travel."""
