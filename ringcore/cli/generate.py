"""`ringcore generate`: prompts from the command line or a file, texts to stdout."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable, Iterator
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer

from ringcore.cli.options import Progress, engine_options, given, sampling_options, with_options
from ringcore.errors import InvalidRequestError, RingcoreError, error_to_wire
from ringcore.params.outputs import RequestOutput

__all__ = ["make_generate"]

_INTERRUPTED = 128 + signal.SIGINT


class Order(StrEnum):
    input = "input"
    completion = "completion"


def make_generate() -> Callable[..., None]:
    """The command, with a flag for every engine option and sampling parameter."""
    return with_options(generate, [*sampling_options(), *engine_options()])


def generate(
    prompt: Annotated[list[str] | None, typer.Option(help="a prompt; may be given several times")] = None,
    prompts_file: Annotated[
        Path | None,
        typer.Option(help="a prompt a line, - for stdin; of a .jsonl each line is a dict, a string, or token ids"),
    ] = None,
    chat: Annotated[bool, typer.Option("--chat", help="each prompt is a user message to a chat model")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="one JSON object per prompt on stdout")] = False,
    order: Annotated[
        Order, typer.Option(help="input: a result waits for those of the prompts before it; completion: none waits")
    ] = Order.input,
    progress: Progress = None,
    **options: Any,
) -> None:
    """Completes prompts, and prints results while others are computed.

    Ctrl-C prints what is finished by then, and exits with 130.

    Examples:

    \b
      ringcore generate --model ./smollm2-135m --prompt "The capital of France is" --temperature 0
      ringcore generate --model ./model --chat --prompt "Why is the sky blue?" --max-tokens 200
      ringcore generate --model ./model.gguf --prompts-file prompts.txt --json > answers.jsonl
      ringcore generate --model ./model --prompt "Once" --stop "." --stop "!" --tensor-parallel-size 2
      head -5 prompts.txt | ringcore generate --model ./model --prompts-file - --kv-cache-bytes 2GiB
    """
    prompts: list[Any] = [*(prompt or []), *(_read_prompts(prompts_file) if prompts_file else [])]
    if not prompts:
        raise InvalidRequestError("no prompts; give --prompt or --prompts-file", field="prompts", value=0)
    from ringcore.front_end.llm import LLM
    from ringcore.front_end.progress import progress_bar
    from ringcore.params.sampling_params import SamplingParams

    sampling = given(options, sampling_options())
    SamplingParams(**sampling)  # raises before a model is loaded
    named = [_named(i, _conversation(i, p) if chat else p) for i, p in enumerate(prompts)]
    printer = _Printer(named, _json_line if as_json else _text, order)
    is_shown = sys.stderr.isatty() and not sys.stdout.isatty() if progress is None else progress
    with LLM(**given(options, engine_options())) as llm:
        params = SamplingParams(**llm.config.model.sampling_defaults | sampling)
        try:
            with progress_bar(len(prompts), is_shown) as advance:
                for output in llm.stream(named, params):
                    printer.add(output)
                    advance(1, sum(len(one.token_ids) for one in output.outputs))
        except KeyboardInterrupt:
            printer.print_rest()
            print(f"ringcore: stopped; {printer.num_printed} of {len(prompts)} prompts are done", file=sys.stderr)
            sys.exit(_INTERRUPTED)
        finally:
            printer.print_rest()


class _Printer:
    """Prints outputs in the order of the prompts, or at once."""

    def __init__(self, prompts: list[Any], text_of: Callable[[RequestOutput], str], order: Order) -> None:
        self._order = order
        self._ids: list[str] = [prompt["request_id"] for prompt in prompts if isinstance(prompt, dict)]
        self._text_of = text_of
        self._waiting: dict[str, RequestOutput] = {}
        self._next = self.num_printed = 0

    def add(self, output: RequestOutput) -> None:
        if self._order is Order.completion:
            self._print(output)
            return
        self._waiting[output.request_id] = output
        while self._next < len(self._ids) and (first := self._ids[self._next]) in self._waiting:
            self._print(self._waiting.pop(first))
            self._next += 1

    def print_rest(self) -> None:
        """Those that wait for one that does not come."""
        for request_id in self._ids[self._next :]:
            if request_id in self._waiting:
                self._print(self._waiting.pop(request_id))

    def _print(self, output: RequestOutput) -> None:
        print(self._text_of(output), flush=True)
        self.num_printed += 1


def _named(index: int, prompt: Any) -> Any:
    """The prompt as a dict with a request id; what is no prompt stays, and is refused with the others."""
    match prompt:
        case str():
            prompt = {"prompt": prompt}
        case list():
            prompt = {"prompt_token_ids": prompt}
        case dict():
            pass
        case _:
            return prompt
    return {"request_id": f"request-{index}"} | prompt


def _read_prompts(file: Path) -> Iterator[Any]:
    """The prompts of a file, or of stdin, without blank lines."""
    try:
        text = sys.stdin.read() if str(file) == "-" else file.read_text(encoding="utf-8")
        lines = text.split("\n")  # a prompt may hold other line separators
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidRequestError(
            f"prompts_file={str(file)!r}: cannot be read: {error}", field="prompts_file", value=str(file)
        ) from error
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        if file.suffix != ".jsonl":
            yield line.removesuffix("\r")
            continue
        try:
            yield msgspec.json.decode(line)
        except msgspec.DecodeError as error:
            raise InvalidRequestError(
                f"prompts_file={str(file)!r}: line {number} is no JSON: {error}", field="prompts_file", value=number
            ) from error


def _conversation(index: int, prompt: Any) -> dict[str, Any]:
    fields = prompt if isinstance(prompt, dict) else {"prompt": prompt}
    text = fields.get("prompt")
    if not isinstance(text, str):
        raise InvalidRequestError(f"prompt {index}: --chat takes prompts of text", field="prompt", index=index)
    others = {name: value for name, value in fields.items() if name != "prompt"}
    return {"messages": [{"role": "user", "content": text}]} | others


def _text(output: RequestOutput) -> str:
    title = f"--- {output.request_id if output.prompt is None else output.prompt}"
    return "\n".join(f"{title}\n{completion.text}" for completion in output.outputs)


def _json_line(output: RequestOutput) -> str:
    def extra(value: Any) -> Any:
        if isinstance(value, RingcoreError):
            return error_to_wire(value)
        raise TypeError(f"cannot encode {type(value).__name__}")

    return msgspec.json.encode(output, enc_hook=extra).decode()
