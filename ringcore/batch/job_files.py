"""The files of a job, and what they must agree on: input, output, journal, model."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from ringcore.batch.job import VERSION, InputFacts, Job, LineFormat, check_same, model_facts
from ringcore.batch.journal import Journal
from ringcore.batch.options import BatchOptions
from ringcore.batch.results import Results, compression_of
from ringcore.batch.scan import identify, scan
from ringcore.batch.sources import check_absent, is_remote, upload
from ringcore.config import EngineConfig
from ringcore.errors import ConfigError

__all__ = ["JobFiles"]


class JobFiles:
    """Where a job lies, before anything is read. Raises `ConfigError`.

    config: of one of its engines. defaults: sampling parameters of plain lines. resumes: whether a job that was begun
    is continued; one that was not is begun. url: the only one that OpenAI's lines may have; None for any.
    """

    def __init__(
        self,
        input: str | os.PathLike[str],
        output: str | os.PathLike[str],
        config: EngineConfig,
        *,
        defaults: Mapping[str, Any] | None = None,
        options: BatchOptions | None = None,
        resumes: bool = False,
        url: str | None = None,
    ) -> None:
        self.input, self.output, self.config, self.url = os.fspath(input), os.fspath(output), config, url
        self.options, self.defaults, self._resumes = options or BatchOptions(), dict(defaults or {}), resumes
        self.journal = self.options.journal or f"{self.output}.journal"
        self._compression = compression_of(self.output)
        self.results = self.output  # a local path
        if is_remote(self.output):
            if self.options.journal is None:
                raise ConfigError(
                    f"output={self.output!r}: results are appended to a local file, and copied when all "
                    "are done; say where by journal, a local path",
                    option="journal",
                    value=None,
                )
            self.results = f"{self.journal}.results"

    def recovered(self) -> Results | None:
        """The results of a job that was begun; None for a new one. Raises `ConfigError` if files are in the way."""
        if not self._resumes or not os.path.exists(self.journal):
            if self._resumes and os.path.exists(self.results):
                raise ConfigError(
                    f"output={self.results!r}: it exists, and its journal {self.journal!r} does not; give the journal, "
                    "or another output",
                    option="output",
                    value=self.results,
                )
            return None
        return Results.resume(self.results, Journal.open(self.journal))

    def checked(self, results: Results | None, is_stopped: Callable[[], bool]) -> Results:
        """The results, after the input was read: new ones for None. Raises `ConfigError` if the job has changed, and
        `ScanStopped`."""
        if results is not None:
            begun = results.job
            form: LineFormat = begun.format
            if self.options.format in ("openai", "plain"):
                form = "openai" if self.options.format == "openai" else "plain"
            facts = identify(self.input, is_stopped)
            check_same(begun, self._job(facts, begun.num_lines, begun.num_requests, form), self.input)
            return results
        for path in (self.results, self.journal):
            if os.path.exists(path):
                raise ConfigError(
                    f"{path}: it exists; continue its job with --resume, or give another output",
                    option="output",
                    value=path,
                )
        if is_remote(self.output):
            check_absent(self.output)
        folder = os.path.dirname(os.path.abspath(self.journal))
        found = scan(self.input, self.options.format, self.options.max_line_bytes, folder, is_stopped)
        job = self._job(found.input, found.num_lines, found.num_requests, found.format)
        return Results.create(self.results, self.journal, job)

    def _job(self, facts: InputFacts, num_lines: int, num_requests: int, form: LineFormat) -> Job:
        if form == "openai" and self.defaults:
            name = next(iter(self.defaults))
            raise ConfigError(
                f"{name}: only of use with plain lines; the bodies of OpenAI's lines say all themselves",
                option=name,
                value=self.defaults[name],
            )
        job = Job(
            version=VERSION,
            input=facts,
            num_lines=num_lines,
            num_requests=num_requests,
            format=form,
            order=self.options.order,
            compression=self._compression,
            model=model_facts(self.config),
            defaults=msgspec.to_builtins(self.defaults, str_keys=True),
            answers={
                "served_model_names": list(self.options.served_model_names),
                "tool_call_parser": self.options.tool_call_parser,
                "reasoning_parser": self.options.reasoning_parser,
                "max_line_bytes": self.options.max_line_bytes,
                "url": self.url,
            },
        )
        return msgspec.json.decode(msgspec.json.encode(job), type=Job)  # as it is read again

    def upload(self) -> None:
        """Copies complete results to a URL; does nothing for a local output."""
        if is_remote(self.output):
            upload(self.results, self.output)
