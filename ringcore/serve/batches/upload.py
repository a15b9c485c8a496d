"""Uploads: a multipart form whose file goes to the disk as it comes, in bounded memory."""

from __future__ import annotations

import asyncio
from http import HTTPStatus
from typing import IO

from python_multipart.exceptions import MultipartParseError
from python_multipart.multipart import MultipartParser, parse_options_header
from starlette.requests import Request

from ringcore.openai_api.errors import ApiError
from ringcore.serve.batches.store import BatchStore, StoredFile

__all__ = ["receive_upload"]

_MAX_FIELD_BYTES = 4096
_MAX_PARTS = 8
_PURPOSES = ("batch",)


async def receive_upload(request: Request, store: BatchStore, max_bytes: int) -> StoredFile:
    """The file that a request brings. Raises `ApiError`, and then leaves nothing."""
    kind, options = parse_options_header(request.headers.get("content-type"))
    boundary = options.get(b"boundary")
    if kind != b"multipart/form-data" or not boundary:
        raise _bad("send a form: multipart/form-data with the fields purpose and file")
    path = store.new_upload()
    try:
        with path.open("wb") as file:
            form = _Form(file, boundary, min(max_bytes, store.free_bytes()))
            async for chunk in request.stream():
                await asyncio.to_thread(form.feed, chunk)
            form.finish()
        if form.fields.get("purpose") not in _PURPOSES:
            raise _bad("give 'batch'", "purpose")
        if not form.has_file:
            raise _bad("it is missing; give the file's content", "file")
        return await asyncio.to_thread(store.add_file, path, form.filename or "upload.jsonl", "batch")
    finally:
        path.unlink(missing_ok=True)


class _Form:
    """The fields of a form, and what there is of its file."""

    def __init__(self, file: IO[bytes], boundary: bytes, max_bytes: int) -> None:
        self._file, self._left, self._max_bytes = file, max_bytes, max_bytes
        self.fields: dict[str, str] = {}
        self.filename, self.has_file = "", False
        self._num_parts = 0
        self._name, self._is_file, self._value = "", False, bytearray()
        self._header_name, self._header_value = bytearray(), bytearray()
        self._parser = MultipartParser(
            boundary,
            {
                "on_part_begin": self._begin_part,
                "on_header_field": self._add_header_name,
                "on_header_value": self._add_header_value,
                "on_header_end": self._end_header,
                "on_part_data": self._add_data,
                "on_part_end": self._end_part,
            },
        )

    def feed(self, chunk: bytes) -> None:
        try:
            self._parser.write(chunk)
        except MultipartParseError as error:
            raise _bad(f"it is no form: {error}") from error

    def finish(self) -> None:
        try:
            self._parser.finalize()
        except MultipartParseError as error:
            raise _bad(f"it is no form: {error}") from error

    def _begin_part(self) -> None:
        self._num_parts += 1
        if self._num_parts > _MAX_PARTS:
            raise _bad(f"a form has at most {_MAX_PARTS} fields")
        self._name, self._is_file, self._value = "", False, bytearray()

    def _add_header_name(self, data: bytes, start: int, end: int) -> None:
        self._append(self._header_name, data[start:end])

    def _add_header_value(self, data: bytes, start: int, end: int) -> None:
        self._append(self._header_value, data[start:end])

    def _end_header(self) -> None:
        name, value = bytes(self._header_name).lower(), bytes(self._header_value)
        self._header_name, self._header_value = bytearray(), bytearray()
        if name == b"content-disposition":
            _, options = parse_options_header(value)
            self._name = options.get(b"name", b"").decode(errors="replace")
            self._is_file = self._name == "file"
            if self._is_file:
                self.has_file, self.filename = True, options.get(b"filename", b"").decode(errors="replace")

    def _add_data(self, data: bytes, start: int, end: int) -> None:
        if not self._is_file:
            self._append(self._value, data[start:end])
            return
        self._left -= end - start
        if self._left < 0:
            raise ApiError(
                HTTPStatus.REQUEST_ENTITY_TOO_LARGE,
                f"file: there is room for {self._max_bytes} bytes; send less, delete files, or raise "
                "max_batch_file_bytes or max_batch_dir_bytes of the service",
                param="file",
            )
        self._file.write(data[start:end])

    def _end_part(self) -> None:
        if not self._is_file:
            self.fields[self._name] = self._value.decode(errors="replace")

    @staticmethod
    def _append(to: bytearray, data: bytes) -> None:
        if len(to) + len(data) > _MAX_FIELD_BYTES:
            raise _bad(f"a field or header of the form has more than {_MAX_FIELD_BYTES} bytes")
        to += data


def _bad(remedy: str, field: str | None = None) -> ApiError:
    return ApiError(HTTPStatus.BAD_REQUEST, f"{field or 'the body'}: {remedy}", param=field)
