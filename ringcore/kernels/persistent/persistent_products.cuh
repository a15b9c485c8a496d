// Products of the row with weights in persistent_layers.cu.
//
// Macros: those of persistent_program.cuh and persistent_attention.cuh, and MAX_LAYERS, PRODUCTS, WINDOW, EARLY_WINDOW and
// GAIN_TYPE. GAIN_TYPE: 0 bfloat16, 1 float16, 2 float32.

// A product of a layer. A slot of the ring has rows of the weight, or one of equal parts of a row; a program sums up a
// unit of rows at once, and has the same rows of both products that add to the residual stream.
struct Product {
    int inputs, outputs, parts, slot_rows, unit_rows;

    __host__ __device__ constexpr int units() const { return outputs / unit_rows; }
};

constexpr Product OF[] = {PRODUCTS};
constexpr int QKV = 0, OUT = 1, GATE_UP = 2, DOWN = 3, ROUTER = 4;  // but for the last one, in their order
constexpr int HIDDEN = OF[QKV].inputs, GATED = OF[DOWN].inputs;
static_assert(OF[QKV].outputs == QKV_SIZE && OF[OUT].inputs == OUT_SIZE && OF[OUT].unit_rows == OF[DOWN].unit_rows);

// The first unit of a program; the others are NUM_PROGRAMS apart. Programs with one more of the products that add to the
// residual stream begin later with the others, so that all have about as many bytes of a layer.
template <int PRODUCT> __device__ __forceinline__ int first_unit() {
    constexpr int START = PRODUCT == OUT || PRODUCT == DOWN ? 0 : OF[OUT].units() % NUM_PROGRAMS;
    return (blockIdx.x + NUM_PROGRAMS - START) % NUM_PROGRAMS;
}

struct Layer {
    const u16* weights[5];  // of the products, [outputs, inputs]; of a mixture, gate and up, and down, are those of its experts
    const u16* bias;        // of QKV
    const void* gains[2];   // of the norms before QKV and before gate and up
    const void* head_gains; // [2, HEAD_SIZE]: of q's heads and of k's
    u16* kv_cache;
};

struct Layers { Layer at[MAX_LAYERS]; };

// The producer: one thread, which fills the ring of slots with the weights of all products of all layers in their order.
// It does not wait for the row, so the next product's weights land while programs wait for each other. At most WINDOW
// slots are on their way, and EARLY_WINDOW while this program waits: more delay what programs tell each other.
struct Producer {
    u32 base, parity = 1, landing_parity = 0;
    u64 policy = read_once();
    int slot = 0, landing = 0, num_issued = 0, num_landed = 0;

    __device__ __forceinline__ void copy(const u16* from, int num_bytes) {
        const u32 full = base + BARRIERS_AT, empty = full + 8 * NUM_SLOTS;
        if (num_issued >= NUM_SLOTS) wait_for(empty + 8 * slot, parity);
        const int window = load_4(base + IS_WAITING_AT) ? EARLY_WINDOW : WINDOW;
        for (; num_issued - num_landed >= window; num_landed++) {
            wait_for(full + 8 * landing, landing_parity);
            if (++landing == NUM_SLOTS) { landing = 0; landing_parity ^= 1; }
        }
        arrive_and_expect(full + 8 * slot, num_bytes);
        copy_bytes(base + slot * SLOT_BYTES, from, num_bytes, full + 8 * slot, policy);
        num_issued++;
        if (++slot == NUM_SLOTS) { slot = 0; parity ^= 1; }
    }

    template <int PRODUCT> __device__ __forceinline__ void copy_weights(const u16* weights) {
        constexpr int INPUTS = OF[PRODUCT].inputs, PARTS = OF[PRODUCT].parts, ROWS = OF[PRODUCT].slot_rows;
        constexpr int UNIT = OF[PRODUCT].unit_rows, HALF = UNIT / 2;
#pragma unroll 1
        for (int unit = first_unit<PRODUCT>(); unit < OF[PRODUCT].units(); unit += NUM_PROGRAMS)
#pragma unroll 1
            for (int i = 0; i < UNIT; i += ROWS) {
                int row = unit * UNIT + i;
                if (PRODUCT == GATE_UP) row = unit * HALF + (i < HALF ? i : GATED + i - HALF);
#pragma unroll 1
                for (int part = 0; part < PARTS; part++)
                    copy(weights + (size_t)row * INPUTS + part * (INPUTS / PARTS), 2 * ROWS * (INPUTS / PARTS));
            }
    }
};

template <int V> __device__ __forceinline__ void load_weights(u32* pairs, u32 at) {
#pragma unroll
    for (int i = 0; i < V / VECTOR<V>; i++) {
        const u32 from = at + (i * THREADS + threadIdx.x) * 2 * VECTOR<V>;
        u32* const to = pairs + i * VECTOR<V> / 2;
        if (VECTOR<V> == 8) { const uint4 found = load_16(from); to[0] = found.x; to[1] = found.y; to[2] = found.z; to[3] = found.w; }
        else if (VECTOR<V> == 4) { const uint2 found = load_8(from); to[0] = found.x; to[1] = found.y; }
        else to[0] = load_4(from);
    }
}

struct Slots { int slot = 0; u32 parity = 0; };  // where the consumers are in the ring

// The program's units of a product times x, a thread's inputs, to shared memory. Returns how many they are.
template <int PRODUCT> __device__ __forceinline__ int multiply(const Program& program, Slots& ring, const float* x) {
    constexpr int INPUTS = OF[PRODUCT].inputs, PARTS = OF[PRODUCT].parts, ROWS = OF[PRODUCT].slot_rows;
    constexpr int UNIT = OF[PRODUCT].unit_rows, V = INPUTS / PARTS / THREADS;
    float* const sums = (float*)(program.shared + SUMS_AT);
    int count = 0;
#pragma unroll 1
    for (int unit = first_unit<PRODUCT>(); unit < OF[PRODUCT].units(); unit += NUM_PROGRAMS, count++) {
        float of_rows[UNIT];
#pragma unroll
        for (int i = 0; i < UNIT; i++) of_rows[i] = 0;
#pragma unroll
        for (int i = 0; i < UNIT; i += ROWS)
#pragma unroll
            for (int part = 0; part < PARTS; part++) {
                const u32 full = program.base + BARRIERS_AT + 8 * ring.slot;
                wait_for(full, ring.parity);
                u32 pairs[ROWS][V / 2];
#pragma unroll
                for (int r = 0; r < ROWS; r++) load_weights<V>(pairs[r], program.base + ring.slot * SLOT_BYTES + 2 * r * INPUTS);
#pragma unroll
                for (int r = 0; r < ROWS; r++)
#pragma unroll
                    for (int j = 0; j < V / 2; j++) {
                        of_rows[i + r] = fmaf(low_half(pairs[r][j], TYPE), x[part * V + 2 * j], of_rows[i + r]);
                        of_rows[i + r] = fmaf(high_half(pairs[r][j], TYPE), x[part * V + 2 * j + 1], of_rows[i + r]);
                    }
                __syncwarp();
                if (program.lane == 0) arrive(full + 8 * NUM_SLOTS);
                if (++ring.slot == NUM_SLOTS) { ring.slot = 0; ring.parity ^= 1; }
            }
        const float sum = sum_over_lanes<UNIT>(of_rows, program.lane);
        constexpr int SAME = 32 / UNIT;  // lanes that have the same sum
        if (program.lane % SAME == 0) sums[(count * UNIT + program.lane / SAME) * NUM_WARPS + program.warp] = sum;
    }
    program.sync();
    return count;
}

// Of a row of words.
template <int PRODUCT> __device__ __forceinline__ void multiply_words(
    const Program& program, Slots& ring, const u32* row, u32 tag
) {
    constexpr int PARTS = OF[PRODUCT].parts, SIZE = OF[PRODUCT].inputs / PARTS, V = SIZE / THREADS;
    u32 words[PARTS * V];
    program.load_until_written([&] {
        u32 differs = 0;
#pragma unroll
        for (int part = 0; part < PARTS; part++) differs |= Program::load_inputs<V>(words + part * V, row + part * SIZE, tag);
        return differs;
    });
    program.has_row();
    float x[PARTS * V];
#pragma unroll
    for (int i = 0; i < PARTS * V; i++) x[i] = number_of(words[i]);
    multiply<PRODUCT>(program, ring, x);
}

__device__ __forceinline__ float sum_of_row(const Program& program, int row) {
    const float4* const sums = (const float4*)(program.shared + SUMS_AT) + 2 * row;
    const float4 a = sums[0], b = sums[1];
    return ((a.x + a.y) + (a.z + a.w)) + ((b.x + b.y) + (b.z + b.w));
}

// The output of a product that is row i of the program's units.
template <int PRODUCT> __device__ __forceinline__ int output_of(int i) {
    constexpr int UNIT = PRODUCT == GATE_UP ? OF[PRODUCT].unit_rows / 2 : OF[PRODUCT].unit_rows;
    return (first_unit<PRODUCT>() + i / UNIT * NUM_PROGRAMS) * UNIT + i % UNIT;
}

// The residual stream before a norm: a thread's inputs times their gains. The norm's factor is for the product's end.
struct Normed {
    static constexpr int V = HIDDEN / THREADS;
    float x[V];
    u32 gains[V];  // pairs of 16 bits, or numbers of 32

    __device__ __forceinline__ void load_gains(const void* gain) {
#pragma unroll
        for (int j = 0; j < V / 2; j++) {
            const int at = input_of<V>(2 * j);
            if (GAIN_TYPE == 2) {
                const uint2 found = __ldcg((const uint2*)((const u32*)gain + at));
                gains[2 * j] = found.x; gains[2 * j + 1] = found.y;
            } else gains[j] = __ldcg((const u32*)((const u16*)gain + at));
        }
    }

    // stream: words of this tag; or float32, before the first layer.
    __device__ __forceinline__ void load(Program& program, const u32* stream, u32 tag, bool are_words) {
        u32 words[V];
        program.load_until_written([&] { return Program::load_inputs<V>(words, stream, tag) & -(u32)are_words; });
        float square = 0;
#pragma unroll
        for (int j = 0; j < V; j++) {
            x[j] = number_of(words[j]);
            square += x[j] * x[j];
            x[j] *= GAIN_TYPE == 2 ? __uint_as_float(gains[j])
                                   : j & 1 ? high_half(gains[j / 2], GAIN_TYPE) : low_half(gains[j / 2], GAIN_TYPE);
        }
#pragma unroll
        for (int lanes = 16; lanes; lanes /= 2) square += __shfl_xor_sync(~0u, square, lanes);
        if (program.lane == 0) ((float*)(program.shared + SQUARES_AT))[program.warp] = square;
    }

    __device__ __forceinline__ float factor(const Program& program, float eps) const {
        float square = 0;
#pragma unroll
        for (int i = 0; i < NUM_WARPS; i++) square += ((const float*)(program.shared + SQUARES_AT))[i];
        return rsqrtf(square / HIDDEN + eps);
    }
};
