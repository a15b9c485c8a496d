"""How kernels are launched: dependent launches, compilation ahead, carve-outs, prefetches, copies, timing."""
