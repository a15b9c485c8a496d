// Products of the row with weights in persistent_layers.cu.
//
// Macros: those of persistent_weights.cuh, and GAIN_TYPE (0 bfloat16, 1 float16, 2 float32) and IS_BY_WARPS (see
// `multiply_by_warps`).

constexpr int MOST_PAIRS = IS_BY_WARPS ? 64 : 1;  // registers of weights that are loaded at once
static_assert(!IS_BY_WARPS || (4 * HIDDEN <= SCRATCH_BYTES && WEIGHT_BYTES == 2));

template <int PRODUCT> __device__ __forceinline__ int num_units() {
    return (OF[PRODUCT].units() - first_unit<PRODUCT>() + NUM_PROGRAMS - 1) / NUM_PROGRAMS;
}

// How many of COUNT are loaded before the first is multiplied, if each takes this many registers.
__host__ __device__ constexpr int at_once(int count, int registers) {
    while (count > 1 && count * registers > MOST_PAIRS) count /= 2;
    return count;
}

// Where a slot has the scales of the program's unit of this index.
template <int PRODUCT> __device__ __forceinline__ int scales_at(int index) {
    if constexpr (!IS_CODED<PRODUCT>) return 0;
    else {
        const int row = (first_unit<PRODUCT>() + index * NUM_PROGRAMS) * OF[PRODUCT].unit_rows;
        return SLOT_WEIGHTS<PRODUCT> + 4 * (first_scale<PRODUCT>(row) % 4);
    }
}

// The program's units of a product times x, a thread's inputs, to shared memory: every warp has a part of each row.
template <int PRODUCT> __device__ __forceinline__ void multiply(const Program& program, Slots& ring, const float* x) {
    using Row = typename RowOf<PRODUCT, IS_CODED<PRODUCT>>::Type;
    constexpr int PARTS = OF[PRODUCT].parts, ROWS = OF[PRODUCT].slot_rows, ROW_BYTES = SLOT_WEIGHTS<PRODUCT> / ROWS;
    constexpr int UNIT = OF[PRODUCT].unit_rows, SLOTS = UNIT / ROWS * PARTS, AT_ONCE = at_once(SLOTS, ROWS * Row::REGISTERS);
    static_assert(SLOTS % AT_ONCE == 0);
    const Row row(x);
    float* const sums = (float*)(program.shared + SCRATCH_AT);
#pragma unroll 1
    for (int count = 0; count < num_units<PRODUCT>(); count++) {
        float of_rows[UNIT] = {};
#pragma unroll
        for (int i = 0; i < SLOTS; i += AT_ONCE) {
            u32 weights[AT_ONCE][ROWS][Row::REGISTERS];
            typename Row::Factors factors[AT_ONCE];
            wait_for_slots<AT_ONCE>(program, ring);
#pragma unroll
            for (int s = 0; s < AT_ONCE; s++) {
                const u32 from = ring.bytes(program, s);
#pragma unroll
                for (int r = 0; r < ROWS; r++) Row::load(weights[s][r], from + r * ROW_BYTES);
                factors[s] = row.factors(from + scales_at<PRODUCT>(count), (i + s) % PARTS);
            }
#pragma unroll
            for (int s = 0; s < AT_ONCE; s++)
#pragma unroll
                for (int r = 0; r < ROWS; r++)
                    row.add(of_rows[(i + s) / PARTS * ROWS + r], weights[s][r], (i + s) % PARTS, factors[s]);
            leave_slots<AT_ONCE>(program, ring);
        }
        const float sum = sum_over_lanes<UNIT>(of_rows, program.lane);
        constexpr int SAME = 32 / UNIT;  // lanes that have the same sum
        if (program.lane % SAME == 0) sums[(count * UNIT + program.lane / SAME) * NUM_WARPS + program.warp] = sum;
    }
    program.sync();
}

// Of a row of words.
template <int PRODUCT> __device__ __forceinline__ void multiply_words(
    const Program& program, Slots& ring, const u32* row, u32 tag
) {
    constexpr int PARTS = OF[PRODUCT].parts, SIZE = OF[PRODUCT].inputs / PARTS, V = Share<SIZE>::V;
    u32 words[PARTS * V];
    program.load_until_written([&] {
        u32 differs = 0;
#pragma unroll
        for (int part = 0; part < PARTS; part++) differs |= Program::load_inputs<SIZE>(words + part * V, row + part * SIZE, tag);
        return differs;
    });
    program.has_row();
    float x[PARTS * V];
#pragma unroll
    for (int i = 0; i < PARTS * V; i++) x[i] = number_of(words[i]);
    multiply<PRODUCT>(program, ring, x);
}

__device__ __forceinline__ float sum_of_row(const Program& program, int row) {
    const float4* const sums = (const float4*)(program.shared + SCRATCH_AT) + 2 * row;
    const float4 a = sums[0], b = sums[1];
    return ((a.x + a.y) + (a.z + a.w)) + ((b.x + b.y) + (b.z + b.w));
}

// The output of a product that is row i of the program's units.
template <int PRODUCT> __device__ __forceinline__ int output_of(int i) {
    constexpr int UNIT = PRODUCT == GATE_UP ? OF[PRODUCT].unit_rows / 2 : OF[PRODUCT].unit_rows;
    return (first_unit<PRODUCT>() + i / UNIT * NUM_PROGRAMS) * UNIT + i % UNIT;
}

// The same where each warp has whole rows, a thread its lane's inputs of each: of few inputs, so that a row takes one wait
// and one sum over lanes. Units have a row of each warp, or two: of gate, and of up.
template <int PRODUCT, class Store> __device__ __forceinline__ void multiply_by_warps(
    const Program& program, Slots& ring, const float* x, Store store
) {
    constexpr int INPUTS = OF[PRODUCT].inputs, ROWS = OF[PRODUCT].slot_rows, V = INPUTS / 32;
    constexpr int OWN = OF[PRODUCT].unit_rows / NUM_WARPS, SLOTS = OF[PRODUCT].unit_rows / ROWS;
    constexpr int AT_ONCE = at_once(4 / OWN, OWN * V / 2);  // units
    static_assert(OF[PRODUCT].parts == 1 && NUM_WARPS % ROWS == 0 && V % 8 == 0 && SLOTS * AT_ONCE <= NUM_SLOTS);
    const int units = num_units<PRODUCT>();
#pragma unroll 1
    for (int first = 0; first < units; first += AT_ONCE) {
        const int count = min(AT_ONCE, units - first) * SLOTS;
        wait_for_slots<AT_ONCE * SLOTS>(program, ring, count);
        float of_rows[AT_ONCE * OWN] = {};
#pragma unroll
        for (int i = 0; i < AT_ONCE * OWN; i++) {
            if (i / OWN * SLOTS >= count) break;
            const u32 from = ring.bytes(program, (i * NUM_WARPS + program.warp) / ROWS);
            u32 pairs[V / 2];
            load_vectors<V / 8, 16>(pairs, from + 2 * (program.warp % ROWS) * INPUTS + 16 * program.lane, 16 * 32);
            add_product<V>(of_rows[i], pairs, x);
        }
        leave_slots<AT_ONCE * SLOTS>(program, ring, count);
        const float sum = sum_over_lanes<AT_ONCE * OWN>(of_rows, program.lane);
        constexpr int SAME = 32 / (AT_ONCE * OWN);  // lanes that have the same sum
        const float up = OWN > 1 ? __shfl_xor_sync(~0u, sum, SAME) : 0;
        const int unit = first + program.lane / (SAME * OWN);
        if (program.lane % (SAME * OWN) == 0 && unit < units) store(unit * NUM_WARPS + program.warp, sum, up);
    }
}

// The residual stream before a norm: a thread's inputs times their gains. The norm's factor is for the product's end.
struct Normed {
    static constexpr int V = Share<HIDDEN>::V;
    float x[IS_BY_WARPS ? HIDDEN / 32 : V];  // a warp's, or the program's
    u32 gains[V];  // pairs of 16 bits, or numbers of 32

    __device__ __forceinline__ void load_gains(const void* gain) {
#pragma unroll
        for (int j = 0; j < V / 2; j++) {
            const int at = input_of<V>(2 * j);
            const bool is_there = Share<HIDDEN>::IS_EVEN || at < HIDDEN;
            if (GAIN_TYPE == 2) {
                const uint2 found = is_there ? __ldcg((const uint2*)((const u32*)gain + at)) : make_uint2(0, 0);
                gains[2 * j] = found.x; gains[2 * j + 1] = found.y;
            } else gains[j] = is_there ? __ldcg((const u32*)((const u16*)gain + at)) : 0;
        }
    }

    // stream: words of this tag; or float32, before the first layer.
    __device__ __forceinline__ void load(const Program& program, const u32* stream, u32 tag, bool are_words) {
        u32 words[V];
        program.load_until_written([&] { return Program::load_inputs<HIDDEN>(words, stream, tag) & -(u32)are_words; });
        program.has_row();
        float square = 0, numbers[V];
#pragma unroll
        for (int j = 0; j < V; j++) {
            const float number = number_of(words[j]);
            square += number * number;
            numbers[j] = number * (GAIN_TYPE == 2 ? __uint_as_float(gains[j])
                                   : j & 1 ? high_half(gains[j / 2], GAIN_TYPE) : low_half(gains[j / 2], GAIN_TYPE));
        }
#pragma unroll
        for (int lanes = 16; lanes; lanes /= 2) square += __shfl_xor_sync(~0u, square, lanes);
        if (program.lane == 0) ((float*)(program.shared + SQUARES_AT))[program.warp] = square;
        if constexpr (IS_BY_WARPS) share(program, numbers);
        else
#pragma unroll
            for (int j = 0; j < V; j++) x[j] = numbers[j];
    }

    // A lane's inputs are vectors of eight, which two loads of shared memory read: a half of all vectors each.
    static __device__ __forceinline__ int place_of(int input) {
        return (input & 4) * (HIDDEN / 8) + input / 8 * 4 + input % 4;
    }

    // From the program's threads to each of its warps.
    __device__ __forceinline__ void share(const Program& program, const float* numbers) {
        float* const row = (float*)(program.shared + SCRATCH_AT);
        constexpr int W = VECTOR<V> < 4 ? 2 : 4;
#pragma unroll
        for (int j = 0; j < V; j += W) {
            float* const to = row + place_of(input_of<V>(j));
            if (W == 4) *(float4*)to = float4{numbers[j], numbers[j + 1], numbers[j + 2], numbers[j + 3]};
            else *(float2*)to = float2{numbers[j], numbers[j + 1]};
        }
        program.sync();
#pragma unroll
        for (int j = 0; j < HIDDEN / 32; j += 4) {
            const uint4 found = load_16(program.base + SCRATCH_AT + 4 * place_of((j / 8 * 32 + program.lane) * 8 + j % 8));
#pragma unroll
            for (int k = 0; k < 4; k++) x[j + k] = __uint_as_float((&found.x)[k]);
        }
    }

    __device__ __forceinline__ float factor(const Program& program, float eps) const {
        float square = 0;
#pragma unroll
        for (int i = 0; i < NUM_WARPS; i++) square += ((const float*)(program.shared + SQUARES_AT))[i];
        return rsqrtf(square / HIDDEN + eps);
    }
};

// A product of the normed stream: `store` gets each row of the program, its sum, and of gate and up the latter's too.
template <int PRODUCT, class Store> __device__ __forceinline__ void multiply_normed(
    const Program& program, Slots& ring, const Normed& normed, Store store
) {
    if constexpr (IS_BY_WARPS) return multiply_by_warps<PRODUCT>(program, ring, normed.x, store);
    multiply<PRODUCT>(program, ring, normed.x);
    constexpr int UNIT = OF[PRODUCT].unit_rows, OWN = PRODUCT == GATE_UP ? UNIT / 2 : UNIT;
    for (int j = threadIdx.x; j < num_units<PRODUCT>() * OWN; j += THREADS) {
        const int row = j / OWN * UNIT + j % OWN;
        store(j, sum_of_row(program, row), OWN < UNIT ? sum_of_row(program, row + OWN) : 0);
    }
}
