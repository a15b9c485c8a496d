// One row through all layers of a decoder in one launch, a persistent kernel: see persistent_layers.py.
//
// Macros: those of its headers, and HAS_BIAS. Mlp: of persistent_mlp.cuh, or of persistent_experts.cuh.

extern "C" __global__ void __launch_bounds__(THREADS + 128, 1) persistent_layers(
    const __grid_constant__ Layers layers, float* hidden, const float* cos_sin, const int* seq_len, const int* block_table,
    u64* counter, u32* exchanged, int num_layers, float scale, float eps, float head_eps
) {
    extern __shared__ __align__(1024) char shared[];
    Program program(shared, counter);
    if (threadIdx.x == THREADS) {
        store_4(program.base + IS_WAITING_AT, 0);
        store_4(program.base + IS_LATE_AT, 0);
        for (int i = 0; i < 2 * NUM_SLOTS; i++) init_barrier(program.base + BARRIERS_AT + 8 * i, i < NUM_SLOTS ? 1 : NUM_WARPS);
        Mlp::init_barriers(program);
        fence_barriers();
    }
    sync_threads<THREADS + 128>(1);
    if (program.warp >= NUM_WARPS) {  // a group of four warps, since registers are shared out by groups
        give_registers<40>();
        if (threadIdx.x != THREADS) return;
        Producer producer{program.base};
        copy_product<QKV>(producer, layers.at[0]);
        wait_for_dependencies();
        SplitCopies keys_and_values{Split(Context(seq_len, block_table))};
#pragma unroll 1
        for (int i = 0; i < num_layers; i++) {
            const Layer& layer = layers.at[i];
            if (i) copy_product<QKV>(producer, layer);
            keys_and_values.copy(producer, layer.kv_cache);
            copy_product<OUT>(producer, layer);
            Mlp::copy_weights(producer, layer, i);
        }
        return;
    }
    take_registers<232>();
    u32* const stream = exchanged;
    u32* const gated = stream + HIDDEN;
    u32* const attended = gated + Mlp::NUM_WORDS;
    Slots ring;
    Normed normed;
    normed.load_gains(layers.at[0].gains[0]);
    wait_for_dependencies();
    program.begin();
    const Attention attention(program, attended, Split(Context(seq_len, block_table)), cos_sin, scale, head_eps);
    const Split& split = attention.split;
    const int thread = threadIdx.x, own = output_of<DOWN>(thread);  // its number of the residual stream
    const bool has_own = thread < num_units<DOWN>() * OF[DOWN].unit_rows;
    float residual = has_own ? __ldcg(hidden + own) : 0;
#pragma unroll 1
    for (int i = 0; i < num_layers; i++) {
        const Layer& layer = layers.at[i];
        const u32 tag = program.layer_tag();
        normed.load(program, i ? stream : (const u32*)hidden, 2 * tag - 1, i > 0);
        multiply_normed<QKV>(program, ring, normed, [&](int row, float value, float) {
            value *= normed.factor(program, eps);
            if (HAS_BIAS) value += low_half(layer.bias[output_of<QKV>(row)], TYPE);
            program.store(attention.qkv() + output_of<QKV>(row), value, tag);
        });
        program.waits_for_row();  // without a barrier: few programs read q, k and v, until all tags are right
        normed.load_gains(layer.gains[1]);
        if (split.is_live) {
            if (is_long(split.context)) LongAttention(attention).attend(program, ring, layer.kv_cache, layer.head_gains, tag);
            else ShortAttention(attention).attend(program, ring, layer.kv_cache, layer.head_gains, tag);
        }
        if (split.num_splits > 1) {
            program.arrive_at_grid();
            program.wait_for_grid();
            attention.combine(program, tag);
        } else program.pass_barrier();
        program.arrive_at_grid();
        program.wait_for_grid();
        multiply_words<OUT>(program, ring, attended, tag);
        if (has_own) {
            residual += sum_of_row(program, thread);
            program.store(stream + own, residual, 2 * tag);
        }
        program.arrive_at_grid();
        program.wait_for_grid();
        normed.load(program, stream, 2 * tag, true);
        Mlp::gate(program, ring, normed, gated, tag, eps);
        program.arrive_at_grid();
        if (i + 1 < num_layers) normed.load_gains(layers.at[i + 1].gains[0]);
        else launch_dependents();
        program.wait_for_grid();
        Mlp::multiply_gated(program, ring, gated, tag);
        if (has_own) {
            residual += sum_of_row(program, thread);
            if (i + 1 < num_layers) program.store(stream + own, residual, 2 * tag + 1);
        }
        program.arrive_at_grid();
        if (i + 1 < num_layers) program.wait_for_grid();
    }
    if (has_own) hidden[own] = program.is_late() ? __uint_as_float(NOT_A_NUMBER) : residual;
}
