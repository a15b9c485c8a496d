// The threads of torch's own operations.

#pragma once

#include <stdatomic.h>

typedef void (*Parallel)(void (*)(void *), void *, unsigned, unsigned);  // GOMP_parallel; NULL: one thread

static void run_threads(void (*work)(void *), void *data, Parallel parallel, int32_t num_threads) {
    if (parallel && num_threads > 1) parallel(work, data, (unsigned)num_threads, 0);
    else work(data);
}
