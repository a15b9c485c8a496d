// Up to eight rows through all layers of a decoder in one launch, a persistent kernel: see persistent_rows.py.
//
// Macros: those of its headers, and HAS_BIAS, IS_GELU, GAIN_TYPE (0 bfloat16, 1 float16, 2 float32) and SHARED_BYTES.

static_assert(NUM_BARRIERS == 4 && END_AT == SHARED_BYTES);

// A thread's numbers of the residual stream: an output of a row of each group of tiles of the product before it.
struct Stream {
    static constexpr int GROUPS = (Outputs<DOWN>::MOST_TILES + GROUP_TILES - 1) / GROUP_TILES;
    static constexpr int TILE_GROUP = GROUP_TILES * TILE_ROWS;  // outputs
    const Outputs<DOWN> share;
    const OwnOutput<DOWN> own;
    const bool has_row;
    float x[GROUPS], gains[GROUPS], guess = 1;

    __device__ __forceinline__ Stream(const Program& program, int num_rows) : own(program), has_row(own.row < num_rows) {}

    __device__ __forceinline__ bool has(int group) const { return has_row && group * TILE_GROUP + own.index < share.count; }
    __device__ __forceinline__ int output(int group) const { return share.first + group * TILE_GROUP + own.index; }

    // Of the norm that comes next.
    __device__ __forceinline__ void load_gains(const void* of) {
#pragma unroll
        for (int i = 0; i < GROUPS; i++) {
            if (!has(i)) gains[i] = 0;
            else if (GAIN_TYPE == 2) gains[i] = __ldcg((const float*)of + output(i));
            else gains[i] = low_half(__ldcg((const u16*)of + output(i)), GAIN_TYPE);
        }
    }

    // Sums of the product that is added, of a group of tiles.
    __device__ __forceinline__ void add(const Program& program, int first_tile) {
        const float sum = OwnOutput<DOWN>::sum(program, first_tile);
        if (first_tile == 0) x[0] += sum;
        else if (GROUPS > 1) x[GROUPS - 1] += sum;
    }

    // Tells it the other programs, times gains. float16 has no room for any number: there by the norm's factor before, too.
    __device__ __forceinline__ void tell(const Program& program, u32* words) const {
        float square = 0;
#pragma unroll
        for (int i = 0; i < GROUPS; i++) {
            const float number = has(i) ? x[i] : 0, scaled = number * gains[i] * guess;
            const float other = __shfl_xor_sync(~0u, scaled, ROWS);
            if (has(i) && program.lane / ROWS % 2 == 0)
                Exchange::store_pair(program, words + place_of_pair(output(i), own.row), scaled, other);
            square += number * number;
        }
        square += __shfl_xor_sync(~0u, square, ROWS);
        square += __shfl_xor_sync(~0u, square, 2 * ROWS);
        if (program.lane < ROWS) ((float*)(program.shared + SQUARES_SCRATCH_AT))[program.warp * ROWS + program.lane] = square;
    }

    // After a barrier of the program.
    static __device__ __forceinline__ void tell_squares(const Program& program, u32* words) {
        if (program.warp == NUM_WARPS - 1 && program.lane < ROWS) {
            float square = 0;
#pragma unroll
            for (int i = 0; i < NUM_WARPS; i++) square += ((const float*)(program.shared + SQUARES_SCRATCH_AT))[i * ROWS + program.lane];
            Exchange::store(program, words + words_of(HIDDEN) + blockIdx.x * ROWS + program.lane, square);
        }
    }

    __device__ __forceinline__ void tell_all(Program& program, u32* words) const {
        tell(program, words);
        program.arrive_at_grid();
        tell_squares(program, words);
    }
};

// Of the norm of rows that a product reads.
struct Norm {
    static constexpr int VECTORS = NUM_PROGRAMS * ROWS / 4, COUNT = (VECTORS + THREADS - 1) / THREADS;  // of a thread
    float square[4], factor;  // of rows 0 to 3, or of even threads' and 4 to 7; of row lane % 8

    // Returns the largest word.
    __device__ __forceinline__ u32 load(const u32* words) {
        u32 found[COUNT][4], largest = 0;
#pragma unroll
        for (int i = 0; i < COUNT; i++)
            if (i * THREADS + threadIdx.x < VECTORS) load_past_l1<4>(found[i], words + words_of(HIDDEN) + 4 * (i * THREADS + threadIdx.x));
            else found[i][0] = found[i][1] = found[i][2] = found[i][3] = 0;
#pragma unroll
        for (int j = 0; j < 4; j++) {
            square[j] = 0;
#pragma unroll
            for (int i = 0; i < COUNT; i++) {
                largest = max(largest, found[i][j]);
                square[j] += __uint_as_float(found[i][j]);
            }
        }
        return largest;
    }

    // The factor, from the squares of all threads; of what was told with the factor before, `guess`, which becomes this one.
    __device__ __forceinline__ void begin(const Program& program, float eps, float& guess) {
        float* const all = (float*)(program.shared + SQUARES_SCRATCH_AT);
#pragma unroll
        for (int lanes = 16; lanes > 1; lanes /= 2)
#pragma unroll
            for (int j = 0; j < 4; j++) square[j] += __shfl_xor_sync(~0u, square[j], lanes);
        if (program.lane < 2)
#pragma unroll
            for (int j = 0; j < 4; j++) all[program.warp * ROWS + 4 * program.lane + j] = square[j];
        program.sync();
        float sum = 0;
#pragma unroll
        for (int i = 0; i < NUM_WARPS; i++) sum += all[i * ROWS + program.lane % ROWS];
        const float found = rsqrtf(sum / HIDDEN + eps);
        factor = TYPE == 1 ? __fdividef(found, guess) : found;
        if (TYPE == 1) guess = found;
    }
};

extern "C" __global__ void __launch_bounds__(THREADS + 128, 1) persistent_rows(
    const __grid_constant__ Layers layers, float* hidden, const float* cos_sin, const int* seq_lens, const int* block_table,
    u64* counter, u32* exchanged, int num_rows, int table_stride, int num_layers, float scale, float eps, float head_eps
) {
    extern __shared__ __align__(1024) char shared[];
    Program program(shared, counter);
    if (threadIdx.x == THREADS) {
        store_4(program.base + IS_WAITING_AT, 0);
        store_4(program.base + IS_LATE_AT, 0);
        for (int i = 0; i < 2 * NUM_SLOTS; i++) init_barrier(program.base + BARRIERS_AT + 8 * i, i < NUM_SLOTS ? 1 : NUM_WARPS);
        fence_barriers();
    }
    sync_threads<THREADS + 128>(1);
    if (program.warp >= NUM_WARPS) {  // a group of four warps, since registers are shared out by groups
        give_registers<40>();
        if (threadIdx.x != THREADS) return;
        Producer producer{program.base};
        copy_product<QKV>(producer, layers.at[0]);
        wait_for_dependencies();
        Plan plan(shared + PLANS_SCRATCH_AT + PLAN_BYTES, num_rows);
        plan.load(seq_lens);
        plan.begin();
        const RowsCopies keys_and_values{plan, block_table, table_stride};
#pragma unroll 1
        for (int i = 0; i < num_layers; i++) {
            const Layer& layer = layers.at[i];
            if (i) copy_product<QKV>(producer, layer);
            keys_and_values.copy(producer, layer.kv_cache);
            copy_product<OUT>(producer, layer);
            copy_product<GATE_UP>(producer, layer);
            copy_product<DOWN>(producer, layer);
        }
        return;
    }
    take_registers<232>();
    Slots ring;
    Stream stream(program, num_rows);
    stream.load_gains(layers.at[0].gains[0]);
    wait_for_dependencies();
    program.begin();
    Exchange exchange{exchanged, (int)(program.layer_tag() & 1)};
    Plan plan(shared + PLANS_SCRATCH_AT, num_rows);
    if (threadIdx.x == 0) plan.load(seq_lens);
    for (int i = threadIdx.x; i < num_rows * HEAD_SIZE; i += THREADS)
        ((float*)(shared + ANGLES_SCRATCH_AT))[i] = __ldcg(cos_sin + i);
#pragma unroll
    for (int i = 0; i < Stream::GROUPS; i++)
        stream.x[i] = stream.has(i) ? __ldcg(hidden + stream.own.row * HIDDEN + stream.output(i)) : 0;
    program.sync();
    plan.begin();
    const RowsAttention attention(plan, block_table, table_stride, scale, head_eps);
    stream.tell_all(program, exchange.of_layer() + STREAM_AT);
    program.wait_for_grid();
#pragma unroll 1
    for (int i = 0; i < num_layers; i++, exchange.parity ^= 1) {
        const Layer& layer = layers.at[i];
        u32* const words = exchange.of_layer();
        Norm norm;
        const auto nothing = [] { return 0u; };
        const auto go_on = [] {};
        const auto squares = [&](int at) { return [&norm, words, at] { return norm.load(words + at); }; };
        const auto begin = [&] { norm.begin(program, eps, stream.guess); };
        multiply<QKV>(program, ring, words + STREAM_AT, num_rows, squares(STREAM_AT), begin, [&](int first_tile) {
            const Outputs<QKV> share;
            const OwnOutput<QKV> own(program);
            const int index = first_tile * TILE_ROWS + own.index, output = share.first + index;
            float value = OwnOutput<QKV>::sum(program, first_tile) * norm.factor;
            if (index >= share.count || own.row >= num_rows) return;
            if (HAS_BIAS) value += low_half(layer.bias[output], TYPE);
            Exchange::store(program, words + QKV_AT + own.row * QKV_SIZE + output, value);
        });
        program.waits_for_row();  // without a barrier: few programs read q, k and v, until all are written
        stream.load_gains(layer.gains[1]);
        attention.attend(program, ring, words, layer.kv_cache, layer.head_gains);
        program.arrive_at_grid();
        program.wait_for_grid();
        const auto add = [&](int first_tile) { stream.add(program, first_tile); };
        multiply<OUT>(program, ring, words + ATTENDED_AT, num_rows, nothing, go_on, add);
        stream.tell_all(program, words + MIDDLE_AT);
        exchange.clear_others();
        program.wait_for_grid();
        multiply<GATE_UP>(program, ring, words + MIDDLE_AT, num_rows, squares(MIDDLE_AT), begin, [&](int first_tile) {
            const Outputs<GATE_UP> share;
            const OwnOutput<GATE_UP> own(program);
            const int index = first_tile * (TILE_ROWS / 2) + own.index;
            const float value = OwnOutput<GATE_UP>::sum(program, first_tile) * norm.factor;
            const float up = __shfl_xor_sync(~0u, value, 2 * ROWS), gated = activated<IS_GELU>(value) * up;
            const float other = __shfl_xor_sync(~0u, gated, ROWS);
            if (program.lane >= ROWS || index >= share.count || own.row >= num_rows) return;
            Exchange::store_pair(program, words + GATED_AT + place_of_pair(share.first + index, own.row), gated, other);
        });
        program.arrive_at_grid();
        if (i + 1 < num_layers) stream.load_gains(layers.at[i + 1].gains[0]);
        else launch_dependents();
        program.wait_for_grid();
        multiply<DOWN>(program, ring, words + GATED_AT, num_rows, nothing, go_on, add);
        if (i + 1 == num_layers) break;
        stream.tell_all(program, exchange.of_next_layer() + STREAM_AT);
        program.wait_for_grid();
    }
#pragma unroll
    for (int i = 0; i < Stream::GROUPS; i++)
        if (stream.has(i)) hidden[stream.own.row * HIDDEN + stream.output(i)] = program.is_late() ? __uint_as_float(NOT_A_NUMBER) : stream.x[i];
}
