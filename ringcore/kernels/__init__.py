"""The GPU kernels, each beside its torch reference; they do not know what a model is.

attention/    decodes, prompts, latents, the KV write and the rotation before it
linears/      linear layers for few rows, dense and quantized, and the choice of their tiles
search/       what a search for tiles tries, of linears and of mixtures
mixtures/     router, sort by expert, grouped products
logits/       adjustments, filters, the draw
steps/        the first and last kernels of a step
collectives/  all-reduce, all-gather and combine over peer memory
launch/       dependent launches, compilation ahead, carve-outs, copies
native/       kernels in C for a CPU
"""
