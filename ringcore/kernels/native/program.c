// Programs that several calls of the other libraries were recorded into.

#include "threads.h"

Program *program_new(void) { return calloc(1, sizeof(Program)); }

void program_free(Program *program) {
    clear_program(program);
    free(program);
}

int program_run(Program *program, Parallel parallel, int32_t num_threads) {
    return run_program(program, parallel, num_threads);
}
