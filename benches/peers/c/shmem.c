/* OpenSHMEM between two processing elements of one host. Run by oshrun with two. */
#include <shmem.h>

#include "bench.h"

#define POLLS 64
#define HAS_COMPARE_SWAP true

static unsigned char *inbox, *outbox;
static int me;
/* Symmetric, as every global is. */
static long shared;

#include "suite.h"

static inline void peer_put(size_t to, size_t from, size_t len)
{
    shmem_putmem_nbi(inbox + to, outbox + from, len, !me);
}

static inline void peer_get(size_t from, size_t to, size_t len)
{
    shmem_getmem_nbi(outbox + to, inbox + from, len, !me);
}

static inline void peer_flush(void)
{
    shmem_quiet();
}

static inline void peer_order(void)
{
    shmem_fence();
}

/* The standard has no call for it; one that waits for nothing does it. */
static inline void peer_progress(void)
{
    shmem_quiet();
}

static inline uint64_t peer_fadd(size_t at, uint64_t add)
{
    return shmem_ulong_atomic_fetch_add((unsigned long *)(void *)(inbox + at), add, !me);
}

static inline uint64_t peer_cswap(size_t at, uint64_t old, uint64_t new)
{
    return shmem_ulong_atomic_compare_swap((unsigned long *)(void *)(inbox + at), old, new, !me);
}

static void peer_barrier(void)
{
    shmem_barrier_all();
}

static long peer_share(long value)
{
    if (me == 0) {
        shared = value;
        shmem_long_p(&shared, value, 1);
    }
    peer_barrier();
    value = shared;
    peer_barrier();
    return value;
}

int main(int argc, char **argv)
{
    bench_start(argc, argv);
    shmem_init();
    me = shmem_my_pe();
    if (shmem_n_pes() != 2)
        die("%d processing elements, not 2", shmem_n_pes());
    bench_pin(bench.cores[me]);
    inbox = shmem_align(PAGE, REGION);
    outbox = aligned_alloc(PAGE, REGION);
    if (inbox == NULL || outbox == NULL)
        die("no memory: SHMEM_SYMMETRIC_SIZE must be more than %zu", (size_t)REGION);
    suite();
    /* Debian 12's shmem_finalize crashes. */
    shmem_global_exit(0);
}
