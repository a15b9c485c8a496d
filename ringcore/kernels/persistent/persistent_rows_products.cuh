// Products of a step's rows with weights in persistent_rows.cu.
//
// Macros: PRODUCTS, MAX_LAYERS.

// A product of a layer. A tile is eight rows of the weight, of gate and up four of each; a slot of the ring has `slot_rows` of
// them, and `chunk` inputs, of which the last chunk may have fewer.
struct Product {
    int inputs, outputs, chunk, slot_rows;

    __host__ __device__ constexpr int chunks() const { return (inputs + chunk - 1) / chunk; }
    __host__ __device__ constexpr int tile_slots() const { return TILE_ROWS / slot_rows; }
    __host__ __device__ constexpr int last_chunk() const { return inputs - (chunks() - 1) * chunk; }
};

constexpr Product OF[] = {PRODUCTS};
constexpr int QKV = 0, OUT = 1, GATE_UP = 2, DOWN = 3;
constexpr int COLUMN = 64;  // inputs that a warp multiplies at once
static_assert(OF[QKV].inputs == HIDDEN && OF[QKV].outputs == QKV_SIZE && OF[OUT].inputs == OUT_SIZE && OF[DOWN].inputs == GATED);

struct Layer {
    const u16* weights[4];   // of the products, [outputs, inputs]
    const u16* bias;         // of QKV
    const void* gains[2];    // of the norms before QKV and before gate and up
    const void* head_gains;  // [2, HEAD_SIZE]: of q's heads and of k's
    u16* kv_cache;
};

struct Layers { Layer at[MAX_LAYERS]; };

// The outputs of a program: pairs that follow one another, of gate and up of both. Programs with one more pair of a product
// begin with those that have none more of the product before, so that all have about as many bytes of a layer.
template <int PRODUCT> struct Outputs {
    static constexpr int PAIRS = OF[PRODUCT].outputs / (PRODUCT == GATE_UP ? 4 : 2), EACH = PAIRS / NUM_PROGRAMS;
    static constexpr int MORE = PAIRS % NUM_PROGRAMS;
    static constexpr int TILE_OUTPUTS = PRODUCT == GATE_UP ? TILE_ROWS / 2 : TILE_ROWS;
    static constexpr int MOST_TILES = (2 * (EACH + (MORE > 0)) + TILE_OUTPUTS - 1) / TILE_OUTPUTS;
    static_assert(OF[PRODUCT].outputs % 4 == 0);
    int first, count;  // outputs

    __device__ __forceinline__ Outputs() {
        constexpr int START = PRODUCT == GATE_UP ? Outputs<OUT>::MORE : PRODUCT == QKV ? Outputs<OUT>::MORE + Outputs<GATE_UP>::MORE : 0;
        const int at = (blockIdx.x + 2 * NUM_PROGRAMS - START) % NUM_PROGRAMS;
        first = 2 * (at * EACH + (at < MORE ? at : MORE));
        count = 2 * (EACH + (at < MORE));
    }

    __device__ __forceinline__ int tiles() const { return (count + TILE_OUTPUTS - 1) / TILE_OUTPUTS; }

    // The weight's rows of a tile's rows from `in_tile` on, at most `most`, and how many of them there are.
    __device__ __forceinline__ int row(int tile, int in_tile) const {
        if (PRODUCT == GATE_UP) return in_tile / 4 * GATED + first + tile * 4 + in_tile % 4;
        return first + tile * TILE_ROWS + in_tile;
    }

    __device__ __forceinline__ int rows_from(int tile, int in_tile, int most) const {
        return max(0, min(most, count - tile * TILE_OUTPUTS - in_tile % TILE_OUTPUTS));
    }
};

// Chunk by chunk, and of each tile by tile.
template <int PRODUCT> __device__ __forceinline__ void copy_product(Producer& producer, const Layer& layer) {
    constexpr Product P = OF[PRODUCT];
    constexpr int MOST = P.slot_rows < Outputs<PRODUCT>::TILE_OUTPUTS ? P.slot_rows : Outputs<PRODUCT>::TILE_OUTPUTS;  // rows that follow one another
    const Outputs<PRODUCT> share;
#pragma unroll 1
    for (int chunk = 0; chunk < P.chunks(); chunk++) {
        const int num_bytes = 2 * (chunk < P.chunks() - 1 ? P.chunk : P.last_chunk());
        const u16* const weights = layer.weights[PRODUCT] + chunk * P.chunk;
#pragma unroll 1
        for (int tile = 0; tile < share.tiles(); tile++)
#pragma unroll 1
            for (int slot = 0; slot < TILE_ROWS; slot += P.slot_rows) {
                int rows = 0;
#pragma unroll
                for (int i = 0; i < P.slot_rows; i += MOST) rows += share.rows_from(tile, slot + i, MOST);
                producer.begin(rows * num_bytes);
#pragma unroll
                for (int i = 0; i < P.slot_rows; i += MOST) {
                    const u16* const from = weights + (size_t)share.row(tile, slot + i) * P.inputs;
                    const int count = share.rows_from(tile, slot + i, MOST);
                    if (P.chunks() == 1) {
                        if (count) producer.copy(i * num_bytes, from, count * num_bytes);
                    } else
#pragma unroll 1
                        for (int j = 0; j < count; j++) producer.copy((i + j) * num_bytes, from + (size_t)j * P.inputs, num_bytes);
                }
                producer.end();
            }
    }
}

// A warp's inputs of a chunk of COLUMNS columns of 64: every eighth column. A lane has of row lane / 4 the inputs lane % 4 of
// eight and those 32 behind them, as tensor cores take them: the second matrix, whose columns are rows of the step.
template <int COLUMNS> struct Inputs {
    static constexpr int STEPS = (COLUMNS + NUM_WARPS - 1) / NUM_WARPS;
    u32 words[STEPS][8];

    static __device__ __forceinline__ bool has(const Program& program, int step) {
        return (step + 1) * NUM_WARPS <= COLUMNS || step * NUM_WARPS + program.warp < COLUMNS;
    }

    // Returns the largest word.
    __device__ __forceinline__ u32 load(const Program& program, const u32* from, bool has_row) {
        from += program.warp * (8 * BLOCK_WORDS) + program.lane % 4 * BLOCK_WORDS + program.lane / 4 * 4;
        u32 largest = 0;
#pragma unroll
        for (int s = 0; s < STEPS; s++)
#pragma unroll
            for (int half = 0; half < 2; half++) {
                u32* const to = words[s] + 4 * half;
                if (has_row && has(program, s)) load_past_l1<4>(to, from + s * (NUM_WARPS * 8 * BLOCK_WORDS) + half * (4 * BLOCK_WORDS));
                else to[0] = to[1] = to[2] = to[3] = 0;
            }
#pragma unroll
        for (int s = 0; s < STEPS; s++)
#pragma unroll
            for (int i = 0; i < 8; i++) largest = max(largest, words[s][i]);
        return largest;
    }
};

// Sums over warps are in the scratch, [2, GROUP_TILES, NUM_WARPS, TILE_ROWS, ROWS] float32: a group of tiles is summed up
// while the next one is multiplied; or of a product of several chunks all tiles.
static_assert(Outputs<DOWN>::MOST_TILES <= 2 * GROUP_TILES && Outputs<OUT>::MOST_TILES <= 2 * GROUP_TILES);

__device__ __forceinline__ float* sums_of(const Program& program, int tile) {
    return (float*)(program.shared + SUMS_SCRATCH_AT) + (tile % (2 * GROUP_TILES) * NUM_WARPS) * TILE_SUMS;
}

// How many tiles are multiplied at once: of few inputs, whose products would wait for each other.
template <int PRODUCT, int COLUMNS> constexpr int AT_ONCE =
    Inputs<COLUMNS>::STEPS <= 2 && OF[PRODUCT].tile_slots() == 1 ? 4 : Inputs<COLUMNS>::STEPS <= 4 && OF[PRODUCT].tile_slots() <= 2 ? 2 : 1;

// The weights of the next COUNT tiles times a warp's inputs: the first matrix of tensor cores, whose rows are rows of the
// weight. What a lane loads at once are four registers of it, as if pairs 1 and 3 were of another row; so two products have an
// output's inputs, and of each a half is used. Rows of the weight lie a multiple of 128 bytes apart: lanes of odd rows load in
// another order, by which the banks differ. The sums: of row lane / 4 of a tile, of the step's rows lane % 4 * 2 and the next
// one.
template <int PRODUCT, int COLUMNS, int COUNT> __device__ __forceinline__ void multiply_tiles(
    const Program& program, Slots& ring, const Inputs<COLUMNS>& inputs, float2* sums
) {
    constexpr int ROWS_OF_SLOT = OF[PRODUCT].slot_rows, SLOTS = OF[PRODUCT].tile_slots(), PITCH = 2 * COLUMN * COLUMNS;
    static_assert(COUNT * SLOTS <= NUM_SLOTS && COUNT * SLOTS <= 32);
    const int lane = program.lane, row = lane / 4;
    const bool is_odd = row & 1;
    Slots waited = ring;
    waited.advance(lane % (COUNT * SLOTS));
    if (COUNT * SLOTS == 1) wait_for(ring.full(program), ring.parity);
    else {
        if (lane < COUNT * SLOTS) wait_for(waited.full(program), waited.parity);
        __syncwarp();
    }
    u32 at[COUNT];
#pragma unroll
    for (int i = 0; i < COUNT; i++) {
        Slots own = ring;
        own.advance(i * SLOTS + row / ROWS_OF_SLOT);
        at[i] = own.bytes(program) + row % ROWS_OF_SLOT * PITCH + program.warp * (2 * COLUMN) + lane % 4 * 16 + is_odd * 64;
    }
    float even_pairs[COUNT][4] = {}, odd_pairs[COUNT][4] = {};
#pragma unroll
    for (int s = 0; s < Inputs<COLUMNS>::STEPS; s++) {
        if (!Inputs<COLUMNS>::has(program, s)) break;
        uint4 low[COUNT], high[COUNT];
#pragma unroll
        for (int i = 0; i < COUNT; i++) {
            const int step = s * (NUM_WARPS * 2 * COLUMN);
            const uint4 found = load_16(at[i] + step), other = load_16((at[i] ^ 64) + step);
#pragma unroll
            for (int j = 0; j < 4; j++) {
                (&low[i].x)[j] = is_odd ? (&other.x)[j] : (&found.x)[j];
                (&high[i].x)[j] = is_odd ? (&found.x)[j] : (&other.x)[j];
            }
        }
        const u32* const x = inputs.words[s];
#pragma unroll
        for (int i = 0; i < COUNT; i++) {
            multiply_16_bits(even_pairs[i], low[i].x, low[i].y, low[i].z, low[i].w, x[0], x[1], TYPE);
            multiply_16_bits(odd_pairs[i], low[i].x, low[i].y, low[i].z, low[i].w, x[2], x[3], TYPE);
        }
#pragma unroll
        for (int i = 0; i < COUNT; i++) {
            multiply_16_bits(even_pairs[i], high[i].x, high[i].y, high[i].z, high[i].w, x[4], x[5], TYPE);
            multiply_16_bits(odd_pairs[i], high[i].x, high[i].y, high[i].z, high[i].w, x[6], x[7], TYPE);
        }
    }
    __syncwarp();
    if (lane < COUNT * SLOTS) arrive(waited.empty(program));
    ring.advance(COUNT * SLOTS);
#pragma unroll
    for (int i = 0; i < COUNT; i++)
        sums[i] = float2{even_pairs[i][0] + odd_pairs[i][2], even_pairs[i][1] + odd_pairs[i][3]};
}

// What a thread has of a group of tiles: an output of row lane % 8. Of gate and up lanes 16 to 31 have the latter.
template <int PRODUCT> struct OwnOutput {
    int row, index;  // the latter of the program's outputs, in the first group

    __device__ __forceinline__ explicit OwnOutput(const Program& program) : row(program.lane % ROWS) {
        constexpr int TILE_OUTPUTS = Outputs<PRODUCT>::TILE_OUTPUTS;
        const int quarter = program.lane / ROWS, half = program.warp % 2;
        index = program.warp / 2 * TILE_OUTPUTS + (PRODUCT == GATE_UP ? 2 * half + quarter % 2 : 4 * half + quarter);
    }

    // The sum over warps, of the group that begins with this tile; of a tile that is not there anything.
    static __device__ __forceinline__ float sum(const Program& program, int first_tile) {
        const int quarter = program.lane / ROWS, half = program.warp % 2;
        const int in_tile = PRODUCT == GATE_UP ? quarter / 2 * 4 + 2 * half + quarter % 2 : 4 * half + quarter;
        const float* const sums = sums_of(program, first_tile + program.warp / 2) + in_tile * ROWS + program.lane % ROWS;
        float sum = sums[0];
#pragma unroll
        for (int i = 1; i < NUM_WARPS; i++) sum += sums[i * TILE_SUMS];
        return sum;
    }
};

// A chunk of a product of several: sums of all tiles are left in the scratch.
template <int PRODUCT, int COLUMNS> __device__ __forceinline__ void multiply_chunk(
    const Program& program, Slots& ring, const u32* from, bool has_row, bool is_first, int tiles
) {
    Inputs<COLUMNS> inputs;
    Exchange::load_until_written(program, [&] { return inputs.load(program, from, has_row); });
    __syncwarp();
    program.has_row();
#pragma unroll 1
    for (int tile = 0; tile < tiles; tile++) {
        float2* const sums = (float2*)(sums_of(program, tile) + program.warp * TILE_SUMS) + program.lane;
        const float2 before = is_first ? float2{0, 0} : *sums;
        float2 found;
        multiply_tiles<PRODUCT, COLUMNS, 1>(program, ring, inputs, &found);
        *sums = float2{before.x + found.x, before.y + found.y};
    }
}

// The program's outputs of a product of rows at `from`: `finish` gets the index of the first tile of each group, by all threads
// when their sums are there. begin: called when the inputs are there, by a product of one chunk; load: until then with them.
template <int PRODUCT, class Load, class Begin, class Finish> __device__ __forceinline__ void multiply(
    const Program& program, Slots& ring, const u32* from, int num_rows, Load load, Begin begin, Finish finish
) {
    constexpr Product P = OF[PRODUCT];
    constexpr int COLUMNS = P.chunk / COLUMN, LAST = P.last_chunk() / COLUMN;
    static_assert(P.chunk % COLUMN == 0 && P.inputs % COLUMN == 0);
    const int tiles = Outputs<PRODUCT>().tiles();
    const bool has_row = program.lane / 4 < num_rows;
    if constexpr (P.chunks() == 1) {
        Inputs<COLUMNS> inputs;
        Exchange::load_until_written(program, [&] { return max(inputs.load(program, from, has_row), load()); });
        __syncwarp();
        program.has_row();
        begin();
        constexpr int MOST = AT_ONCE<PRODUCT, COLUMNS>;
#pragma unroll 1
        for (int group = 0; group < tiles; group += GROUP_TILES) {
            const int end = min(group + GROUP_TILES, tiles);
            float2* sums = (float2*)(sums_of(program, group) + program.warp * TILE_SUMS) + program.lane;
            int tile = group;
            float2 found[MOST];
            if (MOST > 1)
#pragma unroll 1
                for (; tile + MOST <= end; tile += MOST) {
                    multiply_tiles<PRODUCT, COLUMNS, MOST>(program, ring, inputs, found);
#pragma unroll
                    for (int i = 0; i < MOST; i++, sums += NUM_WARPS * TILE_SUMS / 2) *sums = found[i];
                }
#pragma unroll 1
            for (; tile < end; tile++, sums += NUM_WARPS * TILE_SUMS / 2)
                multiply_tiles<PRODUCT, COLUMNS, 1>(program, ring, inputs, sums);
            program.sync();
            finish(group);
        }
    } else {
#pragma unroll 1
        for (int chunk = 0; chunk < P.chunks() - 1; chunk++)
            multiply_chunk<PRODUCT, COLUMNS>(program, ring, from + chunk * words_of(P.chunk), has_row, chunk == 0, tiles);
        multiply_chunk<PRODUCT, LAST>(program, ring, from + (P.chunks() - 1) * words_of(P.chunk), has_row, false, tiles);
        program.sync();
#pragma unroll 1
        for (int tile = 0; tile < tiles; tile += GROUP_TILES) finish(tile);
    }
}
