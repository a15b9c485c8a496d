// Weights of the products of persistent_layers.cu: how they get to the ring, how they become numbers, and what of a row they
// are multiplied by.
//
// Macros: those of persistent_program.cuh and persistent_heads.cuh, and MAX_LAYERS and PRODUCTS. Where WEIGHT_BYTES is 1
// weights are codes of float8_e4m3fn, but for those of a router: a block of BLOCK outputs and BLOCK inputs has a float32 scale.

// A product of a layer. A slot of the ring has rows of the weight, or one of equal parts of a row; a program sums up a
// unit of rows at once, and has the same rows of both products that add to the residual stream.
struct Product {
    int inputs, outputs, parts, slot_rows, unit_rows;

    __host__ __device__ constexpr int units() const { return outputs / unit_rows; }
    __host__ __device__ constexpr int part_inputs() const { return inputs / parts; }
};

constexpr Product OF[] = {PRODUCTS};
constexpr int QKV = 0, OUT = 1, GATE_UP = 2, DOWN = 3, ROUTER = 4;  // but for the last one, in their order
constexpr int HIDDEN = OF[QKV].inputs, GATED = OF[DOWN].inputs, SCALES = 5, BLOCK = 128;
static_assert(OF[QKV].outputs == QKV_SIZE && OF[OUT].inputs == OUT_SIZE && OF[OUT].unit_rows == OF[DOWN].unit_rows);

template <int PRODUCT> constexpr bool IS_CODED = WEIGHT_BYTES == 1 && PRODUCT != ROUTER;
template <int PRODUCT> constexpr int BYTES = IS_CODED<PRODUCT> ? 1 : 2;  // of a weight
template <int PRODUCT> constexpr int SLOT_WEIGHTS = OF[PRODUCT].slot_rows * OF[PRODUCT].part_inputs() * BYTES<PRODUCT>;  // bytes

struct Layer {
    // Of the products, [outputs, inputs]; of a mixture, gate and up, and down, are those of its experts. From SCALES on those
    // of codes, [outputs / BLOCK, inputs / BLOCK] float32.
    const u16* weights[SCALES + (WEIGHT_BYTES == 1 ? ROUTER : 0)];
    const u16* bias;        // of QKV
    const void* gains[2];   // of the norms before QKV and before gate and up
    const void* head_gains; // [2, HEAD_SIZE]: of q's heads and of k's
    u16* kv_cache;
};

struct Layers { Layer at[MAX_LAYERS]; };

// The first unit of a program; the others are NUM_PROGRAMS apart. Programs with one more of the products that add to the
// residual stream begin later with the others, so that all have about as many bytes of a layer.
template <int PRODUCT> __device__ __forceinline__ int first_unit() {
    constexpr int START = PRODUCT == OUT || PRODUCT == DOWN ? 0 : OF[OUT].units() % NUM_PROGRAMS;
    return (blockIdx.x + NUM_PROGRAMS - START) % NUM_PROGRAMS;
}

// The index of the first scale of a row of codes.
template <int PRODUCT, class Row> __device__ __forceinline__ Row first_scale(Row row) {
    constexpr int BLOCKS = OF[PRODUCT].part_inputs() / BLOCK;
    static_assert(OF[PRODUCT].part_inputs() % BLOCK == 0 && BLOCK % OF[PRODUCT].unit_rows == 0);
    static_assert(BLOCKS % 4 == 0 || PRODUCT == DOWN);
    return row / BLOCK * BLOCKS;
}

// A slot: rows of a product's weight from `row` on, of which `first` is the first number. Behind codes are their scales: a
// copy begins at 16 bytes, so up to three others may come before them.
template <int PRODUCT> __device__ __forceinline__ void copy_rows(Producer& producer, const Layer& layer, size_t row, size_t first) {
    constexpr int NUM_BYTES = SLOT_WEIGHTS<PRODUCT>;
    if constexpr (IS_CODED<PRODUCT>) {
        constexpr int BLOCKS = OF[PRODUCT].part_inputs() / BLOCK;
        const size_t scale = first_scale<PRODUCT>(row);
        const int scale_bytes = ((int)(scale % 4) + BLOCKS + 3) / 4 * 16;
        producer.begin(NUM_BYTES + scale_bytes);
        producer.copy(0, (const char*)layer.weights[PRODUCT] + first, NUM_BYTES);
        producer.copy(NUM_BYTES, (const float*)layer.weights[SCALES + PRODUCT] + scale / 4 * 4, scale_bytes);
        producer.end();
    } else producer.copy_slot(layer.weights[PRODUCT] + first, NUM_BYTES);
}

template <int PRODUCT> __device__ __forceinline__ void copy_product(Producer& producer, const Layer& layer) {
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
                copy_rows<PRODUCT>(producer, layer, row, (size_t)row * INPUTS + part * (INPUTS / PARTS));
        }
}

// From shared memory to registers: so many bytes of each of COUNT vectors, `stride` bytes apart.
template <int COUNT, int NUM_BYTES> __device__ __forceinline__ void load_vectors(u32* to, u32 from, int stride) {
    static_assert(NUM_BYTES <= 8 || NUM_BYTES % 16 == 0);
#pragma unroll
    for (int i = 0; i < COUNT; i++, from += stride, to += NUM_BYTES / 4) {
        if (NUM_BYTES == 4) to[0] = load_4(from);
        else if (NUM_BYTES == 8) { const uint2 found = load_8(from); to[0] = found.x; to[1] = found.y; }
#pragma unroll
        for (int j = 0; j < NUM_BYTES / 16 * 4; j += 4) {
            const uint4 found = load_16(from + 4 * j);
            to[j] = found.x; to[j + 1] = found.y; to[j + 2] = found.z; to[j + 3] = found.w;
        }
    }
}

// A thread's weights of SIZE numbers of a row, of so many bytes each; of a vector that it does not have they are 0.
template <int SIZE, int OF_ONE> __device__ __forceinline__ void load_weights(u32* to, u32 from) {
    constexpr int NUM_BYTES = Share<SIZE>::WIDTH * OF_ONE, COUNT = Share<SIZE>::FULL;
    from += threadIdx.x * NUM_BYTES;
    load_vectors<COUNT, NUM_BYTES>(to, from, THREADS * NUM_BYTES);
    if (Share<SIZE>::IS_EVEN) return;
#pragma unroll
    for (int i = 0; i < NUM_BYTES / 4; i++) to[COUNT * NUM_BYTES / 4 + i] = 0;
    if (Share<SIZE>::has_last_vector()) load_vectors<1, NUM_BYTES>(to + COUNT * NUM_BYTES / 4, from + COUNT * THREADS * NUM_BYTES, 0);
}

// sum += pairs of weights times COUNT inputs.
template <int COUNT> __device__ __forceinline__ void add_product(float& sum, const u32* pairs, const float* x) {
#pragma unroll
    for (int j = 0; j < COUNT / 2; j++) {
        sum = fmaf(low_half(pairs[j], TYPE), x[2 * j], sum);
        sum = fmaf(high_half(pairs[j], TYPE), x[2 * j + 1], sum);
    }
}

// The largest of LANES lanes that follow one another, which all of them get, of each of N numbers that are not negative. Step
// by step for all: a shuffle would wait for the one before it.
template <int N, int LANES> __device__ __forceinline__ void find_largest(float* numbers) {
    if (LANES == 32) {
#pragma unroll
        for (int i = 0; i < N; i++) numbers[i] = __uint_as_float(__reduce_max_sync(~0u, __float_as_uint(numbers[i])));
        return;
    }
#pragma unroll
    for (int lanes = LANES / 2; lanes; lanes /= 2) {
        float others[N];
#pragma unroll
        for (int i = 0; i < N; i++) others[i] = __shfl_xor_sync(~0u, numbers[i], lanes);
#pragma unroll
        for (int i = 0; i < N; i++) numbers[i] = fmaxf(numbers[i], others[i]);
    }
}

// A thread's inputs of a row of PARTS parts, for weights of 16 bits.
template <int SIZE, int PARTS> struct PlainRow {
    static constexpr int V = Share<SIZE>::V, REGISTERS = V / 2;  // the latter: of a thread's weights of a part
    struct Factors {};
    const float* const x;

    __device__ __forceinline__ explicit PlainRow(const float* x) : x(x) {}
    __device__ __forceinline__ Factors factors(u32, int) const { return {}; }
    static __device__ __forceinline__ void load(u32* weights, u32 from) { load_weights<SIZE, 2>(weights, from); }

    __device__ __forceinline__ void add(float& sum, const u32* weights, int part, const Factors&) const {
        add_product<V>(sum, weights, x + part * V);
    }
};

// The same for codes: rounded to e4m3, with a scale for BLOCK inputs, which is their largest absolute value over that of
// e4m3. A common factor of the row, as a norm's, is in the scales alone. Products of codes are exact as float16s, those of
// a vector, at most eight in each of two sums, are added as such.
template <int SIZE, int PARTS> struct RoundedRow {
    static constexpr int V = Share<SIZE>::V, W = Share<SIZE>::WIDTH, VECTORS = V / W, REGISTERS = V / 4;
    static constexpr float LARGEST = 448, LEAST_SCALE = 1e-12f;  // as in round_rows.py
    static_assert(SIZE % BLOCK == 0 && W == Share<SIZE>::OF_CODES);
    struct Factors { float of[VECTORS]; };  // of the products of a vector
    u32 pairs[PARTS * V / 2];
    float scales[PARTS * VECTORS];

    __device__ __forceinline__ explicit RoundedRow(const float* x) {
        float largest[PARTS * VECTORS];
#pragma unroll
        for (int i = 0; i < PARTS * VECTORS; i++) {
            largest[i] = fabsf(x[i * W]);
#pragma unroll
            for (int j = 1; j < W; j++) largest[i] = fmaxf(largest[i], fabsf(x[i * W + j]));
        }
        find_largest<PARTS * VECTORS, BLOCK / W>(largest);
#pragma unroll
        for (int i = 0; i < PARTS * VECTORS; i++) {
            const float scale = fmaxf(largest[i] * (1 / LARGEST), LEAST_SCALE), inverse = __fdividef(1.f, scale);
#pragma unroll
            for (int j = 0; j < W; j += 2)
                pairs[(i * W + j) / 2] = rounded_to_e4m3(x[i * W + j] * inverse, x[i * W + j + 1] * inverse);
            scales[i] = scale * (1 / E4M3_UNIT);
        }
    }

    static __device__ __forceinline__ void load(u32* weights, u32 from) { load_weights<SIZE, 1>(weights, from); }

    // from: the address of the weights' scales of a part.
    __device__ __forceinline__ Factors factors(u32 from, int part) const {
        Factors found;
#pragma unroll
        for (int i = 0; i < VECTORS; i++) {
            const bool is_there = i < Share<SIZE>::FULL || Share<SIZE>::has_last_vector();
            const u32 scale = is_there ? load_4(from + (i * THREADS + threadIdx.x) * W / BLOCK * 4) : 0;
            found.of[i] = scales[part * VECTORS + i] * __uint_as_float(scale);
        }
        return found;
    }

    __device__ __forceinline__ void add(float& sum, const u32* weights, int part, const Factors& factors) const {
#pragma unroll
        for (int i = 0; i < VECTORS; i++) {
            u32 products = 0;
#pragma unroll
            for (int j = 0; j < W / 4; j++) {
                const u32* const row = pairs + part * V / 2 + i * W / 2 + 2 * j;
                const uint2 numbers = numbers_of_e4m3(weights[i * W / 4 + j]);
                products = j ? add_products(numbers.x, row[0], products) : multiply_pairs(numbers.x, row[0]);
                products = add_products(numbers.y, row[1], products);
            }
            sum = fmaf(low_float16(products) + high_float16(products), factors.of[i], sum);
        }
    }
};

template <int PRODUCT, bool IS_CODED> struct RowOf { using Type = PlainRow<OF[PRODUCT].part_inputs(), OF[PRODUCT].parts>; };
template <int PRODUCT> struct RowOf<PRODUCT, true> { using Type = RoundedRow<OF[PRODUCT].part_inputs(), OF[PRODUCT].parts>; };
