#!/usr/bin/env bash
# The tests that need a GPU and then the benchmarks, in one command; results are written to a directory as they come.
#
#     scripts/bench_on_gpu.sh [DIRECTORY]        default: benchmarks/results
#
# Set in the environment, where wanted:
#     PEER       the interpreter of vLLM's environment; without it ringcore is measured alone
#     PEER_ENV   settings of that environment, "VARIABLE=VALUE VARIABLE=VALUE"
#     PARTS      some of "tests attention gpu tensor_parallel startup sleep service profile pipeline" (default: all but pipeline; it and tensor_parallel need two GPUs)
#     BESIDE     what else runs on the machine meanwhile, e.g. where each GPU has a benchmark of its own
#     COMMIT     the commit of the code, where it is a copy without git
#     GPU        options of the gpu part, e.g. "--models Qwen3-8B --rounds 2 --seconds 400"
#     TP         options of the tensor_parallel part, e.g. "--rounds 2"
#     PP         options of the pipeline part, e.g. "--rounds 2"
#     SLEEP      options of the sleep part, e.g. "--rounds 1"
#     SERVICE    options of the service part, e.g. "--requests 100"; both services need FastAPI and uvicorn
set -uo pipefail
cd "$(dirname "$0")/.."
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1
results=${1:-benchmarks/results}
parts=" ${PARTS:-tests attention gpu tensor_parallel startup sleep service profile} "
peer=()
if [ -n "${PEER:-}" ]; then
  peer=(--peer "vllm=$PEER")
  for setting in ${PEER_ENV:-}; do peer+=(--peer-env "vllm:$setting"); done
fi
failed=0

bench() { # NAME OPTIONS...: one benchmark, beside what its file holds already
  local name=$1
  shift
  python3 -m benchmarks "$name" ${COMMIT:+--commit "$COMMIT"} ${BESIDE:+--beside "$BESIDE"} --json "$results/$name.json" --merge "$@" || failed=1
}

has() { [[ "$parts" == *" $1 "* ]]; }

if has tests; then scripts/check_on_gpu.sh || failed=1; fi
if has attention; then bench gpu_attention; fi
if has gpu; then bench gpu "${peer[@]}" ${GPU:-}; fi
if has tensor_parallel && [ "$(python3 -c 'import torch; print(torch.cuda.device_count())')" -gt 1 ]; then
  bench gpu "${peer[@]}" --models Qwen3-8B --batches 1,32 --tensor-parallel-size 2 --what decode,offline ${TP:-}
fi
if has pipeline && [ "$(python3 -c 'import torch; print(torch.cuda.device_count())')" -gt 1 ]; then
  bench gpu "${peer[@]}" --models Qwen3-8B --batches 1,32 --pipeline-parallel-size 2 --what decode,offline ${PP:-}
fi
if has startup; then bench gpu_startup "${peer[@]}"; fi
if has sleep; then bench gpu_sleep "${peer[@]}" ${SLEEP:-}; fi
if has service; then bench gpu_service "${peer[@]}" --peer-mode compiled ${SERVICE:-}; fi
if has profile; then bench gpu_profile --models Qwen3-0.6B,Qwen3-8B; fi
exit "$failed"
