/* MPI's one-sided operations between two ranks of one host: a window that MPI allocated, passive target. Run by mpirun
 * with two ranks. PEERS_NO_CSWAP in the environment leaves compare-and-swap out. */
#include <mpi.h>

#include "bench.h"

/* A put may be held back until it is flushed. */
#define PUT_NEEDS_FLUSH
#define POLLS 64
#define HAS_ATOMIC_BATCH
#define HAS_COMPARE_SWAP (getenv("PEERS_NO_CSWAP") == NULL)

static unsigned char *inbox, *outbox;
static int me;
static MPI_Win window;
static uint64_t operands[128][3];

#include "suite.h"

static inline void peer_put(size_t to, size_t from, size_t len)
{
    MPI_Put(outbox + from, (int)len, MPI_BYTE, !me, (MPI_Aint)to, (int)len, MPI_BYTE, window);
}

static inline void peer_get(size_t from, size_t to, size_t len)
{
    MPI_Get(outbox + to, (int)len, MPI_BYTE, !me, (MPI_Aint)from, (int)len, MPI_BYTE, window);
}

static inline void peer_flush(void)
{
    MPI_Win_flush(!me, window);
}

/* Puts have no order of their own. */
static inline void peer_order(void)
{
    MPI_Win_flush(!me, window);
}

static inline void peer_progress(void)
{
    int is_there;
    MPI_Win_sync(window);
    MPI_Iprobe(MPI_ANY_SOURCE, MPI_ANY_TAG, MPI_COMM_WORLD, &is_there, MPI_STATUS_IGNORE);
}

static inline void peer_fadd_start(size_t at, uint64_t add, size_t slot)
{
    operands[slot][0] = add;
    MPI_Fetch_and_op(&operands[slot][0], &operands[slot][2], MPI_UINT64_T, !me, (MPI_Aint)at, MPI_SUM, window);
}

static inline void peer_cswap_start(size_t at, uint64_t old, uint64_t new, size_t slot)
{
    operands[slot][0] = new;
    operands[slot][1] = old;
    MPI_Compare_and_swap(&operands[slot][0], &operands[slot][1], &operands[slot][2], MPI_UINT64_T, !me, (MPI_Aint)at,
                         window);
}

static inline uint64_t peer_old(size_t slot)
{
    return operands[slot][2];
}

static inline uint64_t peer_fadd(size_t at, uint64_t add)
{
    peer_fadd_start(at, add, 0);
    peer_flush();
    return peer_old(0);
}

static inline uint64_t peer_cswap(size_t at, uint64_t old, uint64_t new)
{
    peer_cswap_start(at, old, new, 0);
    peer_flush();
    return peer_old(0);
}

static void peer_barrier(void)
{
    MPI_Barrier(MPI_COMM_WORLD);
}

static long peer_share(long value)
{
    MPI_Bcast(&value, 1, MPI_LONG, 0, MPI_COMM_WORLD);
    return value;
}

int main(int argc, char **argv)
{
    int ranks;
    bench_start(argc, argv);
    MPI_Init(&argc, &argv);
    MPI_Comm_rank(MPI_COMM_WORLD, &me);
    MPI_Comm_size(MPI_COMM_WORLD, &ranks);
    if (ranks != 2)
        die("%d ranks, not 2", ranks);
    bench_pin(bench.cores[me]);
    MPI_Win_allocate((MPI_Aint)REGION, 1, MPI_INFO_NULL, MPI_COMM_WORLD, &inbox, &window);
    MPI_Alloc_mem((MPI_Aint)REGION, MPI_INFO_NULL, &outbox);
    MPI_Win_lock_all(MPI_MODE_NOCHECK, window);
    suite();
    MPI_Win_unlock_all(window);
    MPI_Win_free(&window);
    MPI_Free_mem(outbox);
    MPI_Finalize();
    return 0;
}
