// One row times a 4-bit weight by int8 tensor cores (a GEMV), warp-specialized: see int8_gemv.py.
//
// Macros: NUM_INPUTS, NUM_STAGES, EARLY_WINDOW, WINDOW, MAX_TILES, SHARED_BYTES, HAS_NORM, HAS_BIAS, IS_GATED, IS_GELU,
// ADDS, HAS_ZERO_BITS, ZERO, ARE_BY_GROUP (scales: [groups, outputs]; else [outputs, groups]), and ROW_TYPE, GAIN_TYPE,
// BIAS_TYPE, OUT_TYPE: 0 bfloat16, 1 float16, 2 float32.

constexpr int NUM_WARPS = 8;                                   // consumers; one more warp loads
constexpr int THREADS = 32 * NUM_WARPS;
constexpr int STAGE_INPUTS = 1024, ITEM_INPUTS = 512;          // of a stage, and of what a warp multiplies of it
constexpr int NUM_STAGES_OF_TILE = (NUM_INPUTS + STAGE_INPUTS - 1) / STAGE_INPUTS;
constexpr int ITEMS_OF_TILE = NUM_STAGES_OF_TILE * (STAGE_INPUTS / ITEM_INPUTS);
constexpr int CHUNKS = NUM_STAGES_OF_TILE * STAGE_INPUTS / 32; // a chunk: the inputs of 16 bytes of codes
constexpr int NUM_GROUPS = CHUNKS / 4;                         // of 128 inputs
constexpr int TILE_OUTPUTS = IS_GATED ? 8 : 16;                // a tile is 16 rows of the weight
constexpr int CODE_BYTES = 16 * STAGE_INPUTS / 2, SCALE_BYTES = 16 * STAGE_INPUTS / 128 * 4;
constexpr int PLANE_BYTES = 32 * CHUNKS + 64;                  // a digit of the row; 64 more, so that banks differ
constexpr int HALVES = (2 * CHUNKS + THREADS - 1) / THREADS;   // half chunks that a thread prepares
constexpr bool IS_WHOLE = 2 * CHUNKS % THREADS == 0 && NUM_INPUTS % STAGE_INPUTS == 0;

constexpr int SCALES_AT = NUM_STAGES * CODE_BYTES;
constexpr int ROW_AT = SCALES_AT + NUM_STAGES * SCALE_BYTES;
constexpr int FACTORS_AT = ROW_AT + 3 * PLANE_BYTES + 64;  // a multiple of 128
constexpr int SUMS_AT = FACTORS_AT + 16 * NUM_GROUPS;
constexpr int SQUARES_AT = SUMS_AT + MAX_TILES * NUM_WARPS * 16 * 4;
constexpr int HAS_ROW_AT = SQUARES_AT + 4 * NUM_WARPS;
constexpr int BARRIERS_AT = HAS_ROW_AT + 8;
// A slot of the ring is then always for the same two warps. Else a warp could wait for a stage whose slot is still one
// round behind, where the parity of the barrier says that it has landed.
static_assert(NUM_STAGES % (NUM_WARPS / 2) == 0 && EARLY_WINDOW <= WINDOW && WINDOW <= NUM_STAGES);
static_assert(BARRIERS_AT + 16 * NUM_STAGES == SHARED_BYTES);

// Eight consecutive numbers as they lie in memory; past the L1 cache.
template <int TYPE> struct Eight {
    uint4 words[TYPE == 2 ? 2 : 1];

    __device__ __forceinline__ void load(const void* tensor, int at) {
        const uint4* from = (const uint4*)((const char*)tensor + (size_t)at * (TYPE == 2 ? 4 : 2));
#pragma unroll
        for (int i = 0; i < (TYPE == 2 ? 2 : 1); i++) words[i] = __ldcg(from + i);
    }

    __device__ __forceinline__ void clear() {
#pragma unroll
        for (int i = 0; i < (TYPE == 2 ? 2 : 1); i++) words[i] = make_uint4(0, 0, 0, 0);
    }

    __device__ __forceinline__ float number(int i) const {
        const u32* all = (const u32*)words;
        if (TYPE == 2) return __uint_as_float(all[i]);
        return i & 1 ? high_half(all[i / 2], TYPE) : low_half(all[i / 2], TYPE);
    }
};

template <int TYPE> __device__ __forceinline__ float load_number(const void* tensor, int at) {
    if (TYPE == 2) return __ldcg((const float*)tensor + at);
    return low_half(__ldcg((const u16*)tensor + at), TYPE);
}

template <int TYPE> __device__ __forceinline__ void store_number(void* tensor, int at, float value) {
    if (TYPE == 2) { ((float*)tensor)[at] = value; return; }
    ((u16*)tensor)[at] = to_16_bits(value, TYPE);
}

// The producer: one thread fills the ring. At most WINDOW stages are on their way, and EARLY_WINDOW before this kernel
// has its row: more queue in the L2 cache, where what the kernel before reads, and then this row, waits behind them.
__device__ __forceinline__ void produce(const TensorMap& codes, const TensorMap& scales, u32 base, int num_tiles) {
    const u32 full = base + BARRIERS_AT, empty = full + 8 * NUM_STAGES;
    const u64 policy = read_once();
    int slot = 0, stage = 0, row = blockIdx.x * TILE_OUTPUTS, landing = 0, num_landed = 0, window = EARLY_WINDOW;
    u32 parity = 1, landing_parity = 0;
    for (int k = 0; k < num_tiles * NUM_STAGES_OF_TILE; k++) {
        if (k >= NUM_STAGES) wait_for(empty + 8 * slot, parity);
        if (window == EARLY_WINDOW && load_4(base + HAS_ROW_AT)) window = WINDOW;
        for (; k - num_landed >= window; num_landed++) {
            wait_for(full + 8 * landing, landing_parity);
            if (++landing == NUM_STAGES) { landing = 0; landing_parity ^= 1; }
        }
        const u32 barrier = full + 8 * slot;
        arrive_and_expect(barrier, CODE_BYTES + SCALE_BYTES);
        copy_box(base + slot * CODE_BYTES, codes, 0, row, 0, 4 * stage, barrier, policy);
        const u32 to = base + SCALES_AT + slot * SCALE_BYTES;
        if (ARE_BY_GROUP) copy_box(to, scales, row, 0, 8 * stage, barrier);
        else copy_box(to, scales, 8 * stage, row, 0, barrier);
        if (++stage == NUM_STAGES_OF_TILE) { stage = 0; row += gridDim.x * TILE_OUTPUTS; }
        if (++slot == NUM_STAGES) { slot = 0; parity ^= 1; }
    }
}

// Half a chunk of the row, 16 inputs, as digits: of each group a number is digits of 8 bits times 256^2, 256 and 1,
// whose sum is at most 2^22. Digits, and their sums of a group, go to shared memory.
__device__ __forceinline__ void store_digits(const float* numbers, int half, u32 base) {
    float largest = 0;
#pragma unroll
    for (int i = 0; i < 16; i++) largest = max_or_nan(largest, fabsf(numbers[i]));
#pragma unroll
    for (int lanes = 1; lanes < 8; lanes *= 2) largest = max_or_nan(largest, __shfl_xor_sync(~0u, largest, lanes));
    const int exponent = max((int)(__float_as_uint(largest) >> 23 & 255), 30);  // largest < 2^(exponent - 126)
    const bool is_finite = exponent < 255;
    const float by = __uint_as_float((u32)(275 - exponent) << 23);
    u32 moved[16];  // the lowest three bytes are the digits, plus 128
#pragma unroll
    for (int i = 0; i < 16; i++) moved[i] = __float_as_uint(fmaf(numbers[i], by, 12582912.f)) + 0x00408080u;
    const int chunk = half >> 1;
    const u32 to = base + ROW_AT + chunk * 16 + (half & 1) * 4;
    int sums[3] = {0, 0, 0};
#pragma unroll
    for (int word = 0; word < 4; word++) {
        const u32 a = moved[2 * word], b = moved[8 + 2 * word], c = moved[2 * word + 1], d = moved[9 + 2 * word];
        const u32 low = __byte_perm(a, b, 0x5140), other_low = __byte_perm(c, d, 0x5140);
        const u32 high = __byte_perm(a, b, 0x0062), other_high = __byte_perm(c, d, 0x0062);
        const u32 digits[3] = {__byte_perm(high, other_high, 0x5410) ^ 0x80808080u,
                               __byte_perm(low, other_low, 0x7632) ^ 0x80808080u,
                               __byte_perm(low, other_low, 0x5410) ^ 0x80808080u};
#pragma unroll
        for (int digit = 0; digit < 3; digit++) {
            sums[digit] = __dp4a((int)digits[digit], 0x01010101, sums[digit]);
            if (IS_WHOLE || half < 2 * CHUNKS)
                store_4(to + digit * PLANE_BYTES + (word >> 1) * CHUNKS * 16 + (word & 1) * 8, digits[digit]);
        }
    }
    int first = 256 * sums[0] + sums[1], last = sums[2];
#pragma unroll
    for (int lanes = 1; lanes < 8; lanes *= 2) {
        first += __shfl_xor_sync(~0u, first, lanes);
        last += __shfl_xor_sync(~0u, last, lanes);
    }
    if (!(half & 7) && (IS_WHOLE || half < 2 * CHUNKS))
        store_16(base + FACTORS_AT + (chunk >> 2) * 16, is_finite ? (u32)(exponent - 13) << 23 : NOT_A_NUMBER, first,
                 is_finite ? (u32)(exponent - 21) << 23 : NOT_A_NUMBER, last);
}

// Of a group of a row of the weight: its sum times its scale. columns: two sums of a lane, of its two digits.
__device__ __forceinline__ float scaled(int column, int other, u32 scale, float factor, int digit_sum, bool is_last) {
    const int zero = HAS_ZERO_BITS ? (int)(scale & 31) : ZERO;
    const int total = is_last ? column : 256 * column + other;
    return __uint_as_float(scale) * factor * (float)(total - zero * digit_sum);
}

extern "C" __global__ void __launch_bounds__(THREADS + 32, 2) int8_gemv(
    const __grid_constant__ TensorMap codes, const __grid_constant__ TensorMap scales, const void* x, const void* gain,
    const void* bias, void* out, int num_outputs, float eps
) {
    extern __shared__ __align__(1024) char shared[];
    const int thread = threadIdx.x, lane = thread & 31, warp = thread >> 5, group_lane = lane >> 2, part = lane & 3;
    const u32 base = shared_address(shared), full = base + BARRIERS_AT, empty = full + 8 * NUM_STAGES;
    float* const sums = (float*)(shared + SUMS_AT);
    float* const squares = (float*)(shared + SQUARES_AT);
    launch_dependents();
    const int tiles = (num_outputs + TILE_OUTPUTS - 1) / TILE_OUTPUTS;
    const int num_tiles = (tiles - 1 - (int)blockIdx.x) / (int)gridDim.x + 1;  // no more programs than tiles
    if (warp == NUM_WARPS) {
        if (lane == 0) {
            store_4(base + HAS_ROW_AT, 0);
            for (int i = 0; i < 2 * NUM_STAGES; i++) init_barrier(full + 8 * i, i < NUM_STAGES ? 1 : 2);
            fence_barriers();
        }
        __syncwarp();
        arrive_threads<THREADS + 32>(1);
        if (lane == 0) produce(codes, scales, base, num_tiles);
        return;
    }
    for (int i = thread; i < num_tiles * NUM_WARPS * 16; i += THREADS) sums[i] = 0;
    int at[HALVES];  // a half chunk: eight inputs from here, and eight 64 further
    Eight<GAIN_TYPE> gains[HALVES][2];
    Eight<ROW_TYPE> row[HALVES][2];
#pragma unroll
    for (int i = 0; i < HALVES; i++) {
        const int half = thread + i * THREADS, chunk = half >> 1;
        at[i] = (chunk >> 2) * 128 + (chunk & 3) * 8 + (half & 1) * 32;
        if (HAS_NORM && (IS_WHOLE || at[i] < NUM_INPUTS)) {
            gains[i][0].load(gain, at[i]);
            gains[i][1].load(gain, at[i] + 64);
        }
    }
    wait_for_dependencies();
    float added = 0;  // to the thread's first output
    if (ADDS && thread < num_tiles * TILE_OUTPUTS) {
        const int output = (blockIdx.x + thread / TILE_OUTPUTS * gridDim.x) * TILE_OUTPUTS + thread % TILE_OUTPUTS;
        if (output < num_outputs) added = load_number<OUT_TYPE>(out, output);
    }
#pragma unroll
    for (int i = 0; i < HALVES; i++) {
        if (IS_WHOLE || at[i] < NUM_INPUTS) {
            row[i][0].load(x, at[i]);
            row[i][1].load(x, at[i] + 64);
        } else {
            row[i][0].clear();
            row[i][1].clear();
        }
    }
    float square = 0;
#pragma unroll
    for (int i = 0; i < HALVES; i++) {
        float numbers[16];
#pragma unroll
        for (int j = 0; j < 16; j++) {
            numbers[j] = row[i][j / 8].number(j % 8);
            if (HAS_NORM) {
                square += numbers[j] * numbers[j];
                if (IS_WHOLE || at[i] < NUM_INPUTS) numbers[j] *= gains[i][j / 8].number(j % 8);
            }
        }
        store_digits(numbers, thread + i * THREADS, base);
    }
    if (HAS_NORM) {
#pragma unroll
        for (int lanes = 16; lanes; lanes /= 2) square += __shfl_xor_sync(~0u, square, lanes);
        if (lane == 0) squares[warp] = square;
    }
    sync_threads<THREADS + 32>(1);
    if (thread == 0) store_4(base + HAS_ROW_AT, 1);

    // Rows of the fragments in an order by which quarters of a warp read other banks of the swizzled tile.
    const int tile_row = (group_lane & 1) << 2 | group_lane >> 1;
    const int digit = (group_lane & 3) == 3 ? 1 : group_lane & 3;  // of the lane's column; the fourth is not used
    const bool is_last = part & 1;                                 // its sums are those of the last digit
    const int num_items = num_tiles * ITEMS_OF_TILE, half = warp & 1;
    int tile = warp / ITEMS_OF_TILE, item = warp - tile * ITEMS_OF_TILE, slot = (warp >> 1) % NUM_STAGES;
    u32 parity = (warp >> 1) / NUM_STAGES & 1;
    float total[2] = {0, 0};  // of the tile's rows tile_row and tile_row + 8
    for (int i = warp; i < num_items; i += NUM_WARPS) {
        wait_for(full + 8 * slot, parity);
        const u32 codes_at = base + slot * CODE_BYTES + half * (CODE_BYTES / 2) + tile_row * 128;
        const u32 stage_scales = base + SCALES_AT + slot * SCALE_BYTES;
        const u32 scales_at = stage_scales + (ARE_BY_GROUP ? half * 256 + tile_row * 4 : tile_row * 32 + half * 16);
        const u32 digits_at = base + ROW_AT + digit * PLANE_BYTES + (item * 16 + part) * 16;
        const u32 factors_at = base + FACTORS_AT + item * 64 + is_last * 8;
#pragma unroll
        for (int pair = 0; pair < 2; pair++) {  // two groups
            uint4 words[2][2], columns[2][2];
#pragma unroll
            for (int g = 0; g < 2; g++) {
                const u32 from = codes_at + pair * 2048 + ((g * 4 + part) ^ tile_row) * 16;
                words[0][g] = load_16(from);
                words[1][g] = load_16(from + 1024);
                columns[0][g] = load_16(digits_at + (pair * 8 + g * 4) * 16);
                columns[1][g] = load_16(digits_at + (CHUNKS + pair * 8 + g * 4) * 16);
            }
            uint2 first_scales, other_scales;  // of two groups of tile_row, and of tile_row + 8
            if (ARE_BY_GROUP) {
                first_scales = make_uint2(load_4(scales_at + pair * 128), load_4(scales_at + pair * 128 + 64));
                other_scales = make_uint2(load_4(scales_at + pair * 128 + 32), load_4(scales_at + pair * 128 + 96));
            } else {
                first_scales = load_8(scales_at + pair * 8);
                other_scales = load_8(scales_at + pair * 8 + 256);
            }
            int products[2][2][4] = {};
#pragma unroll
            for (int word = 0; word < 2; word++)
#pragma unroll
                for (int h = 0; h < 2; h++)
#pragma unroll
                    for (int g = 0; g < 2; g++) {
                        const u32 p = (&words[0][g].x)[2 * h + word], q = (&words[1][g].x)[2 * h + word];
                        const uint4 column = columns[h][g];
                        multiply_bytes(products[h][g], p & 0x0f0f0f0fu, q & 0x0f0f0f0fu, p >> 4 & 0x0f0f0f0fu,
                                 q >> 4 & 0x0f0f0f0fu, word ? column.z : column.x, word ? column.w : column.y);
                    }
#pragma unroll
            for (int g = 0; g < 2; g++) {
                const uint2 factor = load_8(factors_at + (pair * 2 + g) * 16);
                const float of_digits = __uint_as_float(factor.x);
                int all[4];
#pragma unroll
                for (int j = 0; j < 4; j++) all[j] = products[0][g][j] + products[1][g][j];
                total[0] += scaled(all[0], all[1], g ? first_scales.y : first_scales.x, of_digits, factor.y, is_last);
                total[1] += scaled(all[2], all[3], g ? other_scales.y : other_scales.x, of_digits, factor.y, is_last);
            }
        }
        __syncwarp();
        if (lane == 0) arrive(empty + 8 * slot);
        item += NUM_WARPS;
        if (item >= ITEMS_OF_TILE || i + NUM_WARPS >= num_items) {
            const float first = total[0] + __shfl_xor_sync(~0u, total[0], 1);
            const float second = total[1] + __shfl_xor_sync(~0u, total[1], 1);
            if (part == 0) {
                sums[(tile * NUM_WARPS + warp) * 16 + tile_row] = first;
                sums[(tile * NUM_WARPS + warp) * 16 + tile_row + 8] = second;
            }
            total[0] = total[1] = 0;
            while (item >= ITEMS_OF_TILE) { item -= ITEMS_OF_TILE; tile++; }
        }
        slot += NUM_WARPS / 2;
        while (slot >= NUM_STAGES) { slot -= NUM_STAGES; parity ^= 1; }
    }
    sync_threads<THREADS>(2);

    float norm = 1;
    if (HAS_NORM) {
        float of_all = 0;
#pragma unroll
        for (int i = 0; i < NUM_WARPS; i++) of_all += squares[i];
        norm = rsqrtf(of_all / NUM_INPUTS + eps);
    }
#pragma unroll 1
    for (int i = thread; i < num_tiles * TILE_OUTPUTS; i += THREADS) {
        const int of_tile = i / TILE_OUTPUTS, index = i % TILE_OUTPUTS;
        const int output = (blockIdx.x + of_tile * gridDim.x) * TILE_OUTPUTS + index;
        if (output >= num_outputs) continue;
        float value = 0, up = 0;
#pragma unroll
        for (int j = 0; j < NUM_WARPS; j++) {
            value += sums[(of_tile * NUM_WARPS + j) * 16 + index];
            if (IS_GATED) up += sums[(of_tile * NUM_WARPS + j) * 16 + index + 8];
        }
        value *= norm;
        if (HAS_BIAS) value += load_number<BIAS_TYPE>(bias, output);
        if (IS_GATED) {
            up *= norm;
            if (HAS_BIAS) up += load_number<BIAS_TYPE>(bias, num_outputs + output);
            value = activated<IS_GELU>(value) * up;
        }
        if (ADDS) value += i == thread ? added : load_number<OUT_TYPE>(out, output);
        store_number<OUT_TYPE>(out, output, value);
    }
}
