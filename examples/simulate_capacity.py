"""How many replicas does a service need? Simulates a load on more and more of them, until one request in a hundred
waits no longer for its first token than it may. No model is loaded and no GPU is needed.

Usage: python examples/simulate_capacity.py [--rate REQUESTS_PER_S] [--ttft SECONDS] [--hardware NAME] [--model FOLDER]
"""

from __future__ import annotations

import argparse
import tempfile

from ringcore import EngineConfig
from ringcore.testing import HARDWARE, Simulator, poisson_trace, write_model_config

# The sizes of a Llama of 8 billion parameters: all that is needed of a model is its config.json.
LLAMA_8B = {
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": False,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rate", type=float, default=60.0, help="requests a second, on the mean")
    parser.add_argument("--ttft", type=float, default=0.15, help="seconds to the first token, for 99 of 100 requests")
    parser.add_argument("--requests", type=int, default=1500)
    parser.add_argument("--hardware", default="h200", choices=list(HARDWARE))
    parser.add_argument("--model", help="a folder with a config.json; by default one with the sizes of Llama 3.1 8B")
    args = parser.parse_args()

    trace = poisson_trace(
        args.requests, args.rate, prompt_tokens=600, output_tokens=150, num_prefixes=30, prefix_tokens=400
    )
    with tempfile.TemporaryDirectory() as folder:
        model = args.model or write_model_config(folder, **LLAMA_8B)
        config = EngineConfig.from_options(model=model, load_format="dummy")
        for num_replicas in range(1, 65):
            result = Simulator(config, num_replicas, routing="prefix-affinity", hardware=args.hardware).run(trace)
            print(
                f"{num_replicas:3} replicas: TTFT p50 {result.ttft.p50:6.3f} s, p99 {result.ttft.p99:6.3f} s, "
                f"ITL p99 {1e3 * result.itl.p99:5.1f} ms, cache hits {result.cache_hit_rate:.0%}, "
                f"busiest {max(result.utilisation):.0%}"
            )
            if result.ttft.p99 <= args.ttft:
                print(f"{num_replicas} replicas are enough for {args.rate:g} requests/s")
                return
    print("64 replicas are not enough")


if __name__ == "__main__":
    main()
