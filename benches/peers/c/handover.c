/* How far apart the two cores are just now: half a round trip over two lines between two processes. A hypervisor moves
 * its processors about, and everything that goes from core to core goes with it. */
#include <stdatomic.h>
#include <sys/mman.h>
#include <sys/wait.h>

#include "bench.h"

#define BLOCKS 15
#define ROUNDS 2000L

struct line {
    _Alignas(256) atomic_long round;
};

int main(int argc, char **argv)
{
    bench_start(argc, argv);
    struct line *lines = mmap(NULL, 4096, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    if (lines == MAP_FAILED)
        die("no memory");
    int me;
    pid_t child = bench_fork(&me);
    double seconds[BLOCKS];
    long round = 0;
    for (int block = 0; block < BLOCKS; block++) {
        double start = bench_now();
        for (long i = 0; i < ROUNDS; i++) {
            round++;
            if (me == 0)
                atomic_store_explicit(&lines[0].round, round, memory_order_release);
            while (atomic_load_explicit(&lines[1 - me].round, memory_order_acquire) != round)
                ;
            if (me == 1)
                atomic_store_explicit(&lines[1].round, round, memory_order_release);
        }
        seconds[block] = (bench_now() - start) / ROUNDS / 2;
    }
    if (me == 1)
        return 0;
    bench_out("handover", 8, bench_median(seconds, BLOCKS) * 1e9, "ns");
    if (waitpid(child, NULL, 0) < 0)
        die("the second process is gone");
    return 0;
}
