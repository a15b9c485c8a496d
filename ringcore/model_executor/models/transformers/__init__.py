"""Any causal LM of transformers, over our KV cache. The parts in the order of a start:

construction      the model on meta, and its buffers on the device
attention_calls   recorded passes on meta: every attention call, or the reason why the model cannot run here
tensor_parallel   its linears split over the ranks by the model's plan
checkpoint_layout its tensors in terms of the checkpoint's, by transformers' conversion mapping
model             the `CausalLM`
taps, mtp_layer   for heads that draft: hidden states of its layers; a layer of multi-token prediction
"""

from ringcore.model_executor.models.transformers.model import TransformersModel

__all__ = ["TransformersModel"]
