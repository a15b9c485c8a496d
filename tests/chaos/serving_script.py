"""A user's script: an LLM over fake workers, that answers prompts until it has answered so many, or is ended."""

import sys

from chaos_worker import ChaosMultiproc
from fake_engine import expected

from ringcore import LLM, SamplingParams

PROMPT = "abc"
NUM_TOKENS = 20

folder, num_prompts = sys.argv[1], int(sys.argv[2])
print("starting", flush=True)
llm = LLM(folder, load_format="dummy", executor=ChaosMultiproc, max_model_len=128, tensor_parallel_size=2)
print("serving", flush=True)
while num_prompts > 0:
    for output in llm.generate([PROMPT] * 50, SamplingParams(max_tokens=NUM_TOKENS), use_tqdm=False):
        assert output.outputs[0].token_ids == expected(list(PROMPT.encode()), NUM_TOKENS)
        num_prompts -= 1
print("done", flush=True)
