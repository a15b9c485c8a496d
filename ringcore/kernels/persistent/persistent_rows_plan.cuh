// Which tokens of which rows a program of persistent_rows.cu attends to, and how they get to the ring.
//
// Macros: those of persistent_context.cuh, and GROUP (query heads of a program) and NUM_SLOTS.

constexpr int NUM_GROUPS = NUM_HEADS / GROUP, GROUPS_OF_KV = NUM_GROUPS / NUM_KV_HEADS;
constexpr int WHOLE = 192 / SLOT_TOKENS;       // slots of a context that is never cut: a merge takes longer than some more
constexpr int LEAST_SHARE = 128 / SLOT_TOKENS; // slots of a program
constexpr int EDGE = 1;                        // what a context costs at each end, in slots

// A part of a context: slots of tokens of a row's KV head, for GROUP query heads.
struct Part {
    int row, group, length, first, end, slots;  // the latter: of the whole context

    __device__ __forceinline__ int kv_head() const { return group / GROUPS_OF_KV; }
    __device__ __forceinline__ bool has_end() const { return end == slots; }
    __device__ __forceinline__ bool is_whole() const { return first == 0 && has_end(); }
};

// The contexts of a step, one after the other, and their edges: programs have equal ranges, but that they end where a context
// does that ends close by.
struct Plan {
    int* const lengths;  // [ROWS], in shared memory
    int* const starts;   // [ROWS + 1]: of rows
    const int num_rows;
    int used, first, end;  // programs; this program's range
    Part first_part;
    int after_first, others;  // where it ends; the first program of its context, if that began in another's and ends here

    __device__ __forceinline__ Plan(char* shared, int num_rows)
        : lengths((int*)shared), starts((int*)shared + ROWS), num_rows(num_rows) {}

    // By one thread.
    __device__ __forceinline__ void load(const int* seq_lens) const {
        int start = 0;
#pragma unroll
        for (int i = 0; i < ROWS; i++) {
            const int length = i < num_rows ? __ldcg(seq_lens + i) : 0;
            lengths[i] = length;
            starts[i] = start;
            if (i < num_rows) start += NUM_GROUPS * size_of(length);
        }
        starts[ROWS] = start;
    }

    static __device__ __forceinline__ int slots_of(int length) { return max(1, (length + SLOT_TOKENS - 1) / SLOT_TOKENS); }
    static __device__ __forceinline__ int size_of(int length) { return slots_of(length) + 2 * EDGE; }

    // When the lengths are there.
    __device__ __forceinline__ void begin() {
        const int contexts = num_rows * NUM_GROUPS, even = NUM_PROGRAMS / contexts * contexts, total = starts[ROWS];
        used = even * 10 >= NUM_PROGRAMS * 9 ? even : NUM_PROGRAMS;  // the same parts of all contexts, if these are alike
        used = min(used, max(1, total / LEAST_SHARE));
        first = start_of(blockIdx.x);
        end = start_of(blockIdx.x + 1);
        others = blockIdx.x;
        after_first = first;
        if (first == end) return;
        first_part = next(after_first);
        if (first_part.first == 0 || !first_part.has_end()) return;
        const int start = first - EDGE - first_part.first;
        while (start_of(others) > start) others--;
    }

    __device__ __forceinline__ int row_of(int at) const {
        int row = 0;
        while (row + 1 < num_rows && starts[row + 1] <= at) row++;
        return row;
    }

    // Of a program's range.
    __device__ __forceinline__ int start_of(int program) const {
        const int total = starts[ROWS];
        if (program >= used) return total;
        const int at = (u32)program * (u32)total / (u32)used, row = row_of(at), size = size_of(lengths[row]);
        const int before = (at - starts[row]) % size, after = size - before;
        const bool is_short = size - 2 * EDGE <= WHOLE;
        const int near = EDGE + total / used / 8;
        if (before <= after) return is_short || before <= near ? at - before : at;
        return is_short || after <= near ? at + after : at;
    }

    // The part that begins at `at`, which becomes the next one's begin.
    __device__ __forceinline__ Part next(int& at) const {
        Part part;
        part.row = row_of(at);
        part.length = lengths[part.row];
        part.slots = slots_of(part.length);
        const int size = part.slots + 2 * EDGE, in_row = at - starts[part.row];
        part.group = in_row / size;
        const int start = at - in_row % size;
        part.first = max(0, at - start - EDGE);
        at = min(end, start + size);
        part.end = min(part.slots, at - start - EDGE);
        return part;
    }
};

// How the thread that copies puts keys and values to the ring.
struct RowsCopies {
    const Plan& plan;
    const int* const block_table;
    const int stride;  // from a row of it to the next one

    static __device__ __forceinline__ void load_pages(int* pages, const Context& context, int start) {
#pragma unroll
        for (int i = 0; i < PIECES; i++) {
            const int token = start + i * PIECE;
            pages[i] = token + 1 < context.length ? context.page_of(token) : 0;
        }
    }

    // Not the last token of a context, which this step writes. A slot's pages are loaded before the slot ahead of it is
    // copied.
    __device__ __forceinline__ void copy(Producer& producer, const u16* kv_cache) const {
        constexpr int BYTES = 2 * PIECE * HEAD_SIZE;
#pragma unroll 1
        for (int at = plan.first; at < plan.end;) {
            const Part part = plan.next(at);
            const Context context(part.length, block_table + part.row * stride);
            int pages[PIECES], next[PIECES];
            load_pages(pages, context, part.first * SLOT_TOKENS);
#pragma unroll 1
            for (int slot = part.first; slot < part.end; slot++) {
                const int start = slot * SLOT_TOKENS;
                load_pages(next, context, start + SLOT_TOKENS);
                producer.begin(min(PIECES, max(0, (part.length - 2 - start + PIECE) / PIECE)) * 2 * BYTES, KV_WINDOW);
#pragma unroll
                for (int i = 0; i < PIECES; i++) {
                    const int token = start + i * PIECE;
                    if (token + 1 >= part.length) break;
                    const u16* const key = kv_cache + Context::place_of_key(part.kv_head(), pages[i], token);
                    producer.copy(i * BYTES, key, BYTES);
                    producer.copy(SLOT_VALUES_AT + i * BYTES, key + VALUES, BYTES);
                }
                producer.end();
#pragma unroll
                for (int i = 0; i < PIECES; i++) pages[i] = next[i];
            }
        }
    }
};
