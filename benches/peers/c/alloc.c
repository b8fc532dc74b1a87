/* A block and back, its first byte touched, on one core. The allocator is chosen by LD_PRELOAD and its own settings.
 *   pair     one block, and back at once
 *   hold64   64 blocks, then back in the same order, as a window of requests does; per block */
#include "bench.h"

#define HELD 64

static size_t size;
/* Volatile, so that no pair of calls is left out. */
static unsigned char *volatile held[HELD];

static inline unsigned char *take(void)
{
    unsigned char *block = malloc(size);
    if (block == NULL)
        die("no memory");
    *(volatile unsigned char *)block = 1;
    return block;
}

TIMED(pair, held[0] = take(); free(held[0]);)
TIMED(hold64, for (int k = 0; k < HELD; k++) held[k] = take(); for (int k = 0; k < HELD; k++) free(held[k]);)

int main(int argc, char **argv)
{
    const size_t sizes[] = {4096, 65536};
    bench_start(argc, argv);
    bench_pin(bench.cores[0]);
    for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++) {
        size = sizes[i];
        bench_out("pair", size, bench_s(pair) * 1e9, "ns");
        bench_out("hold64", size, bench_s(hold64) * 1e9 / HELD, "ns");
    }
    return 0;
}
