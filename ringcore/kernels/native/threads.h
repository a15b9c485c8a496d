// The threads of torch's own operations, and programs: phases of work that they take together, one after another.
//
// A phase is some items, which threads take in turns. It is over when all its items are done, not when all threads have
// come to its end: for a thread that the host preempts while it holds no item, no other waits. Threads stay from phase
// to phase, so the next one begins a fraction of a microsecond after.

#pragma once

#include <sched.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#if defined(__linux__)
#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

typedef void (*Parallel)(void (*)(void *), void *, unsigned, unsigned);  // GOMP_parallel; NULL: one thread

typedef struct {
    void (*work)(void *call, int64_t first, int64_t end);
    int64_t (*count)(void *call);  // NULL: `total` items; else asked whenever the program begins; -1: no memory
    void *call;
    int64_t total, turn;  // items; those of a thread's turn, 0: an eighth of its share
    int64_t cost;         // multiplications of a product of one row that take as long: see WAKING
    int64_t span;         // this and the next two: of a run
    atomic_long next;
    atomic_int left __attribute__((aligned(64)));
} __attribute__((aligned(64))) Phase;

typedef struct {
    Phase *phases;
    void **calls;  // what the phases point to
    int64_t num_phases, num_calls;
    uint8_t *scratch;  // of one call at a time
    int64_t scratch_bytes;
    int32_t has_failed;  // for want of memory
    atomic_int num_asleep;
} Program;

// Memory for the program's next call, as long as it lives; NULL without memory.
static void *add_call(Program *program, int64_t bytes) {
    void **calls = program->calls;
    if (program->num_calls % 64 == 0) calls = realloc(calls, (program->num_calls + 64) * sizeof *calls);
    if (calls) program->calls = calls;
    void *call = calls ? aligned_alloc(64, (bytes + 63) / 64 * 64) : NULL;
    if (call) program->calls[program->num_calls++] = call;
    else program->has_failed = 1;
    return call;
}

// Memory that calls use in turn is in `program->scratch`.
static void reserve(Program *program, int64_t bytes) {
    if (bytes <= program->scratch_bytes) return;
    free(program->scratch);
    program->scratch = aligned_alloc(64, (bytes + 63) / 64 * 64);
    program->scratch_bytes = program->scratch ? bytes : 0;
    if (!program->scratch) program->has_failed = 1;
}

static void add_phase(Program *program, Phase phase) {
    int64_t n = program->num_phases;
    if ((n & (n - 1)) == 0) {  // room for twice as many
        Phase *phases = aligned_alloc(64, (n ? 2 * n : 2) * sizeof *phases);
        if (!phases) {
            program->has_failed = 1;
            return;
        }
        if (n) memcpy(phases, program->phases, n * sizeof *phases);
        free(program->phases);
        program->phases = phases;
    }
    program->phases[program->num_phases++] = phase;
}

static void clear_program(Program *program) {
    for (int64_t i = 0; i < program->num_calls; i++) free(program->calls[i]);
    free(program->calls);
    free(program->phases);
    free(program->scratch);
}

static void pause_thread(void) {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ __volatile__("yield");
#endif
}

enum { PAUSES = 2000 };  // about 30 us: more than a phase takes to end once there is nothing left to take

// Until the items that others hold are done: a little while awake, then asleep.
static void await_phase(Program *program, Phase *phase) {
    for (int i = 0; i < PAUSES; i++) {
        if (!atomic_load_explicit(&phase->left, memory_order_acquire)) return;
        pause_thread();
    }
    for (int left; (left = atomic_load(&phase->left));) {
#if defined(__linux__)
        atomic_fetch_add(&program->num_asleep, 1);
        syscall(SYS_futex, &phase->left, FUTEX_WAIT_PRIVATE, left, NULL, NULL, 0);
        atomic_fetch_sub(&program->num_asleep, 1);
#else
        sched_yield();
#endif
    }
}

static void take_phases(void *data) {
    Program *program = data;
    for (Phase *phase = program->phases, *end = phase + program->num_phases; phase < end; phase++) {
        int taken = 0;
        for (int64_t first; (first = atomic_fetch_add(&phase->next, phase->span)) < phase->total;) {
            int64_t last = first + phase->span < phase->total ? first + phase->span : phase->total;
            phase->work(phase->call, first, last);
            taken += (int)(last - first);
        }
        int left = taken ? atomic_fetch_sub(&phase->left, taken) - taken : 1;
        if (left) await_phase(program, phase);
#if defined(__linux__)
        else if (atomic_load(&program->num_asleep)) syscall(SYS_futex, &phase->left, FUTEX_WAKE_PRIVATE, INT32_MAX, NULL, NULL, 0);
#endif
    }
}

// Waking a thread that sleeps takes about as long as one thread needs for phases of this cost.
enum { WAKING = 8 << 20 };
enum { TURNS = 8 };  // of each thread, so that one without a core of its own delays the others by little

// Returns 0, or -1 without memory.
static int run_program(Program *program, Parallel parallel, int32_t num_threads) {
    if (program->has_failed) return -1;
    int64_t cost = 0;
    for (int64_t i = 0; i < program->num_phases; i++) cost += program->phases[i].cost;
    if (cost < WAKING || !parallel) num_threads = 1;
    for (int64_t i = 0; i < program->num_phases; i++) {
        Phase *phase = &program->phases[i];
        if (phase->count && (phase->total = phase->count(phase->call)) < 0) return -1;
        // Items in a row are taken at once: what a thread skips is lost that the processor reads ahead.
        phase->span = phase->turn ? phase->turn : phase->total / (TURNS * num_threads) + 1;
        if (num_threads == 1) phase->span = phase->total + 1;
        phase->next = 0;
        phase->left = (int)phase->total;
    }
    if (num_threads > 1) parallel(take_phases, program, (unsigned)num_threads, 0);
    else take_phases(program);
    return 0;
}

// The end of a function that adds a call to `program`, or where that is NULL to its own, which is run.
static int record_or_run(Program *program, Program *own, Parallel parallel, int32_t num_threads) {
    if (program) return program->has_failed ? -1 : 0;
    int status = run_program(own, parallel, num_threads);
    clear_program(own);
    return status;
}

static int run_phase(Phase phase, Parallel parallel, int32_t num_threads) {
    Program program = {&phase, NULL, 1};
    return run_program(&program, parallel, num_threads);
}
