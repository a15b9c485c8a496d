#!/usr/bin/env bash
# Everything that only a GPU can show, in one command: the kernels, the attention backends, the models, the engine.
#
#     scripts/check_on_gpu.sh [pytest options]
#
# Needs torch with CUDA, triton, transformers and the packages of `pip install ringcore[dev]`; and for the real model
# the GGUF file that `make setup` leaves in the cache directory.
set -uo pipefail
cd "$(dirname "$0")/.."
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}"
python3 -c 'import torch; assert torch.cuda.is_available(), "no GPU"' || exit 1
python3 -m pytest tests/kernels tests/attention tests/gpu -p no:cacheprovider --durations=10 "$@"
