"""The model families: a record each, torch-free, beside its model class in `model_executor/models/`.

What is particular to a family is in these two files; no other module compares names of architectures.
"""

from ringcore.checkpoint.family import Families
from ringcore.families.gemma3 import GEMMA3
from ringcore.families.llama import LLAMA
from ringcore.families.mimo import MIMO
from ringcore.families.mistral import MISTRAL
from ringcore.families.qwen2 import QWEN2
from ringcore.families.qwen3 import QWEN3
from ringcore.families.qwen3_moe import QWEN3_MOE

__all__ = ["FAMILIES"]

FAMILIES = Families(LLAMA, QWEN2, QWEN3, QWEN3_MOE, MISTRAL, MIMO, GEMMA3)
