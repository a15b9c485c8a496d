// The ring of slots in shared memory of a program of persistent_layers.cu, through which goes what a step reads of memory.
//
// Macros: NUM_SLOTS, SLOT_BYTES, WINDOW and EARLY_WINDOW.

// One thread fills the ring, in the order in which consumers read. It does not wait for the row, so the next product's
// weights land while programs wait for each other. At most WINDOW slots are on their way, and EARLY_WINDOW while this
// program waits: more delay what programs tell each other.
struct Producer {
    u32 base, parity = 1, landing_parity = 0;
    u64 policy = read_once();
    int slot = 0, landing = 0, num_issued = 0, num_landed = 0;

    // The next slot, for so many bytes, which may be none. slots: that are on their way at most; 0: as said above.
    __device__ __forceinline__ void begin(int num_bytes, int slots = 0) {
        const u32 full = base + BARRIERS_AT, empty = full + 8 * NUM_SLOTS;
        if (num_issued >= NUM_SLOTS) wait_for(empty + 8 * slot, parity);
        const int window = slots ? slots : load_4(base + IS_WAITING_AT) ? EARLY_WINDOW : WINDOW;
        for (; num_issued - num_landed >= window; num_landed++) {
            if (window < NUM_SLOTS) wait_for(full + 8 * landing, landing_parity);  // else it has been emptied since
            if (++landing == NUM_SLOTS) { landing = 0; landing_parity ^= 1; }
        }
        arrive_and_expect(full + 8 * slot, num_bytes);
    }

    // Some of them, to this byte of the slot.
    __device__ __forceinline__ void copy(int to, const void* from, int num_bytes) const {
        copy_bytes(base + slot * SLOT_BYTES + to, from, num_bytes, base + BARRIERS_AT + 8 * slot, policy);
    }

    __device__ __forceinline__ void end() {
        num_issued++;
        if (++slot == NUM_SLOTS) { slot = 0; parity ^= 1; }
    }

    __device__ __forceinline__ void copy_slot(const void* from, int num_bytes) {
        begin(num_bytes);
        copy(0, from, num_bytes);
        end();
    }
};

// Where the consumers are in the ring.
struct Slots {
    int slot = 0;
    u32 parity = 0;

    __device__ __forceinline__ void advance(int count) {  // at most NUM_SLOTS
        slot += count;
        if (slot >= NUM_SLOTS) { slot -= NUM_SLOTS; parity ^= 1; }
    }

    __device__ __forceinline__ u32 full(const Program& program) const { return program.base + BARRIERS_AT + 8 * slot; }
    __device__ __forceinline__ u32 empty(const Program& program) const { return full(program) + 8 * NUM_SLOTS; }

    // Of the slot that comes so many after this one.
    __device__ __forceinline__ u32 bytes(const Program& program, int after = 0) const {
        Slots one = *this;
        one.advance(after);
        return program.base + one.slot * SLOT_BYTES;
    }
};

// The next `count` slots, at most COUNT, are full. Of several each is waited for by one warp: a wait takes some 70 cycles
// of a slot that is full.
template <int COUNT> __device__ __forceinline__ void wait_for_slots(const Program& program, const Slots& ring, int count = COUNT) {
    if (COUNT == 1) return wait_for(ring.full(program), ring.parity);
    Slots slots = ring;
    slots.advance(program.warp);
#pragma unroll
    for (int s = 0; s < COUNT; s += NUM_WARPS, slots.advance(NUM_WARPS))
        if (program.warp + s < count) wait_for(slots.full(program), slots.parity);
    program.sync();
}

// The producer may fill them again.
template <int COUNT> __device__ __forceinline__ void leave_slots(const Program& program, Slots& ring, int count = COUNT) {
    if (COUNT == 1) __syncwarp();
    else program.sync();
    Slots slots = ring;
    if (COUNT > 1) slots.advance(program.warp);
#pragma unroll
    for (int s = 0; s < COUNT; s += NUM_WARPS, slots.advance(NUM_WARPS))
        if (program.lane == 0 && (COUNT == 1 || program.warp + s < count)) arrive(slots.empty(program), COUNT == 1 ? 1 : NUM_WARPS);
    ring.advance(count);
}
