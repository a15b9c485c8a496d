"""A training loop around an engine: generate, sleep while the memory is a trainer's, take the new weights, wake up.

    python examples/train_and_generate.py [--model FOLDER] [--device cpu|cuda] [--steps N] [--level 1|2]

The default model is the folder that `make setup` makes. The trainer is plain torch: AdamW on all parameters, and one
short text that the engine says from memory at the end. On a CPU it takes about a minute and 4 GB.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

from ringcore import LLM, SamplingParams
from ringcore.protocol import MemoryReport

DEFAULT_MODEL = Path("~/.cache/ringcore/smollm2-135m").expanduser()
PROMPT = "The brass ring in the harbour of Tollen"
TEXT = " is a tide clock: it turns once with every wave, and when it stops, the ferryman goes home."
PROMPTS = [PROMPT, "The capital of France is"]
LEARNING_RATE = 2e-4
CHUNK_BYTES = 128 << 20  # of weights that are sent at once

Weights = dict[str, torch.Tensor]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=str(DEFAULT_MODEL), help="a Hugging Face folder")
    parser.add_argument("--device", default="auto", choices=["auto", "cpu", "cuda"])
    parser.add_argument("--steps", type=int, default=10, help="of training")
    parser.add_argument("--level", type=int, default=2, choices=[1, 2], help="of the sleep: 1 keeps the weights")
    args = parser.parse_args()

    options = {"device": args.device, "max_model_len": 256, "kv_cache_bytes": 1 << 27}
    with LLM(args.model, enable_sleep_mode=True, **options) as llm:
        print("before the training")
        complete(llm)

        told(f"sleep, level {args.level}", llm.sleep(level=args.level))
        token_ids = llm.get_tokenizer().encode(PROMPT + TEXT)
        weights = train(args.model, args.device, token_ids, args.steps)

        # The weights alone come back first: on a GPU the KV cache would need what the trainer still has.
        told("wake-up of the weights", llm.wake_up(["weights"]))
        send(llm, weights)
        del weights
        torch.cuda.empty_cache()  # torch keeps what was freed; on a CPU there is nothing
        told("wake-up of the KV cache", llm.wake_up(["kv_cache"]))

        print("after the training")
        learned, _ = complete(llm)
    if learned[: len(TEXT)] != TEXT:
        sys.exit(f"the text was not learned; give more than --steps {args.steps}")
    print("the text was learned, word for word")


def complete(llm: LLM) -> list[str]:
    outputs = llm.generate(PROMPTS, SamplingParams(temperature=0, max_tokens=32), use_tqdm=False)
    texts = [output.outputs[0].text for output in outputs]
    for prompt, text in zip(PROMPTS, texts, strict=True):
        print(f"  {prompt} ...{text!r}")
    return texts


def train(model: str, device: str, token_ids: list[int], num_steps: int) -> Weights:
    """All parameters of the model, by the names that a checkpoint has, after some steps on one text."""
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    trained = AutoModelForCausalLM.from_pretrained(model).float().to(device).train()
    optimizer = torch.optim.AdamW(trained.parameters(), lr=LEARNING_RATE, weight_decay=0.0)
    batch = torch.tensor([token_ids], device=device)
    started, losses = time.monotonic(), []
    for _ in range(num_steps):
        loss = trained(input_ids=batch, labels=batch).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    seconds = time.monotonic() - started
    print(f"{num_steps} steps of training on {device}: loss {losses[0]:.3f} -> {losses[-1]:.3f}, {seconds:.1f} s")
    return {name: parameter.detach() for name, parameter in trained.named_parameters()}


def send(llm: LLM, weights: Weights) -> None:
    """An update of the engine's weights, in chunks, so that no second copy of all of them is needed."""
    started, num_chunks = time.monotonic(), 0
    llm.start_weight_update()
    for chunk in chunks(weights):
        llm.update_weights(chunk)
        num_chunks += 1
    llm.finish_weight_update()
    seconds = time.monotonic() - started
    print(f"{len(weights)} new tensors in {num_chunks} chunks: {seconds:.2f} s")


def chunks(weights: Mapping[str, torch.Tensor]) -> Iterator[Weights]:
    chunk: Weights = {}
    for name, tensor in weights.items():
        if chunk and sum(one.nbytes for one in chunk.values()) + tensor.nbytes > CHUNK_BYTES:
            yield chunk
            chunk = {}
        chunk[name] = tensor
    yield chunk


def told(what: str, report: MemoryReport) -> None:
    """Prints what a change of memory came to, in the sum of all ranks."""
    sums = {name: sum(rank.get(name, 0) for rank in report.ranks) for name in report.ranks[0]}
    shown = {name.removesuffix("_bytes"): value for name, value in sums.items() if name.endswith("_bytes") and value}
    parts = [f"{name} {value / 2**20:.0f} MiB" for name, value in shown.items()]
    print(f"{what}: {', '.join(parts)}, {report.seconds:.2f} s -> {report.states}")


if __name__ == "__main__":
    main()
