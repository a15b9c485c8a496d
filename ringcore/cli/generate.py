"""`ringcore generate`: prompts from the command line or a file, texts to stdout."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer

from ringcore.cli.options import engine_options, given, sampling_options, with_options
from ringcore.errors import InvalidRequestError, RingcoreError, error_to_wire
from ringcore.params.outputs import RequestOutput

__all__ = ["make_generate"]


def make_generate() -> Callable[..., None]:
    """The command, with a flag for every engine option and sampling parameter."""
    return with_options(generate, [*sampling_options(), *engine_options()])


def generate(
    prompt: Annotated[list[str] | None, typer.Option(help="a prompt; may be given several times")] = None,
    prompts_file: Annotated[
        Path | None,
        typer.Option(help="one prompt per line; or .jsonl with one prompt (a dict, a string, token ids) per line"),
    ] = None,
    chat: Annotated[bool, typer.Option("--chat", help="each prompt is a user message to a chat model")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="one JSON object per prompt on stdout")] = False,
    progress: Annotated[bool, typer.Option(help="a progress bar on stderr")] = True,
    **options: Any,
) -> None:
    """Completes prompts.

    Examples:

    \b
      ringcore generate --model ./smollm2-135m --prompt "The capital of France is" --temperature 0
      ringcore generate --model ./model --chat --prompt "Why is the sky blue?" --max-tokens 200
      ringcore generate --model ./model.gguf --prompts-file prompts.txt --json > answers.jsonl
      ringcore generate --model ./model --prompt "Once" --stop "." --stop "!" --tensor-parallel-size 2
    """
    prompts: list[Any] = [*(prompt or []), *(_read_prompts(prompts_file) if prompts_file else [])]
    if not prompts:
        raise InvalidRequestError("no prompts; give --prompt or --prompts-file", field="prompts", value=0)
    from ringcore.front_end.llm import LLM
    from ringcore.params.sampling_params import SamplingParams

    sampling = given(options, sampling_options())
    SamplingParams(**sampling)  # raises before a model is loaded
    with LLM(**given(options, engine_options())) as llm:
        params = SamplingParams(**llm.config.model.sampling_defaults | sampling)
        if chat:
            outputs = llm.chat([_conversation(i, p) for i, p in enumerate(prompts)], params, use_tqdm=progress)
        else:
            outputs = llm.generate(prompts, params, use_tqdm=progress)
    for output in outputs:
        print(_json_line(output) if as_json else _text(output), flush=True)


def _read_prompts(file: Path) -> Iterator[Any]:
    """The prompts of a file, without blank lines."""
    try:
        lines = file.read_text(encoding="utf-8").split("\n")  # a prompt may hold other line separators
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


def _conversation(index: int, prompt: Any) -> list[dict[str, str]]:
    text = prompt.get("prompt") if isinstance(prompt, dict) else prompt
    if not isinstance(text, str):
        raise InvalidRequestError(f"prompt {index}: --chat takes prompts of text", field="prompt", index=index)
    return [{"role": "user", "content": text}]


def _text(output: RequestOutput) -> str:
    title = f"--- {output.request_id if output.prompt is None else output.prompt}"
    return "\n".join(f"{title}\n{completion.text}" for completion in output.outputs)


def _json_line(output: RequestOutput) -> str:
    def extra(value: Any) -> Any:
        if isinstance(value, RingcoreError):
            return error_to_wire(value)
        raise TypeError(f"cannot encode {type(value).__name__}")

    return msgspec.json.encode(output, enc_hook=extra).decode()
