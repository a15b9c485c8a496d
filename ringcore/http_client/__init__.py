"""A client of services with OpenAI's interface. Needs aiohttp: `pip install 'ringcore[bench]'`."""

from ringcore.http_client.client import Chunk, HttpFailure, OpenAIClient, Usage

__all__ = ["Chunk", "HttpFailure", "OpenAIClient", "Usage"]
