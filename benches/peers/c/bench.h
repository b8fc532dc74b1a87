/* What the peers' programs share: arguments, the clock, blocks of repeats, the median, the output.
 *
 * A program is called as `program LABEL --cores A,B [--quick]` and prints lines `peer test size value unit`; what
 * begins with `#` is for people. A fault ends the program with a sentence on stderr. With --wire the two processes talk
 * as two hosts would, through sockets, and the names of the tests begin with wire_. */
#ifndef BENCH_H
#define BENCH_H

#include <sched.h>
#include <signal.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <time.h>
#include <unistd.h>

/* A block takes at least that long, so that reading the clock is nothing beside it. */
#define BLOCK_S 0.0005
/* All blocks of a row, and how many there are at least and at most. */
#define ROW_S 0.06
#define ROW_QUICK_S 0.02
#define LEAST_BLOCKS 7
#define LEAST_BLOCKS_QUICK 3
#define MOST_BLOCKS 256
#define MOST_REPEATS (1L << 30)
/* A program that takes longer than this has lost its other half. */
#define PATIENCE_S 60

static struct {
    const char *label;
    int cores[2];
    bool is_quick, is_wire;
} bench = {.cores = {0, 1}};

static inline _Noreturn void die(const char *format, ...) __attribute__((format(printf, 1, 2)));
static inline _Noreturn void die(const char *format, ...)
{
    va_list args;
    va_start(args, format);
    fprintf(stderr, "%s: ", bench.label ? bench.label : "peer");
    vfprintf(stderr, format, args);
    fputc('\n', stderr);
    va_end(args);
    _exit(1);
}

/* Reads the arguments; the program ends with its parent, and after PATIENCE_S. */
static inline void bench_start(int argc, char **argv)
{
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    alarm(PATIENCE_S);
    if (argc < 2)
        die("usage: %s LABEL --cores A,B [--quick] [--wire]", argv[0]);
    bench.label = argv[1];
    for (int i = 2; i < argc; i++) {
        if (strcmp(argv[i], "--quick") == 0)
            bench.is_quick = true;
        else if (strcmp(argv[i], "--wire") == 0)
            bench.is_wire = true;
        else if (strcmp(argv[i], "--cores") == 0 && i + 1 < argc &&
                 sscanf(argv[i + 1], "%d,%d", &bench.cores[0], &bench.cores[1]) == 2)
            i++;
        else
            die("%s is no argument; there are --cores A,B, --quick and --wire", argv[i]);
    }
}

static inline void bench_pin(int core)
{
    cpu_set_t set;
    CPU_ZERO(&set);
    CPU_SET(core, &set);
    if (sched_setaffinity(0, sizeof set, &set) != 0)
        die("there is no core %d", core);
}

/* A second process, which ends with this one; each is pinned to its core. `me` is 0 in this one and 1 in the other. */
static inline pid_t bench_fork(int *me)
{
    pid_t child = fork();
    if (child < 0)
        die("no second process");
    *me = child == 0;
    if (*me == 1) {
        prctl(PR_SET_PDEATHSIG, SIGKILL);
        alarm(PATIENCE_S);
    }
    bench_pin(bench.cores[*me]);
    return child;
}

static inline double bench_now(void)
{
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return (double)time.tv_sec + (double)time.tv_nsec * 1e-9;
}

static inline int bench_order(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

static inline double bench_median(double *values, int count)
{
    qsort(values, (size_t)count, sizeof *values, bench_order);
    return count % 2 ? values[count / 2] : (values[count / 2 - 1] + values[count / 2]) / 2;
}

static inline void bench_out(const char *test, size_t size, double value, const char *unit)
{
    printf("%s %s%s %zu %.5g %s\n", bench.label, bench.is_wire ? "wire_" : "", test, size, value, unit);
    fflush(stdout);
}

/* How many blocks a row has if one takes `block_s`. */
static inline int bench_blocks(double block_s)
{
    double blocks = (bench.is_quick ? ROW_QUICK_S : ROW_S) / block_s;
    int least = bench.is_quick ? LEAST_BLOCKS_QUICK : LEAST_BLOCKS;
    return blocks < least ? least : blocks > MOST_BLOCKS ? MOST_BLOCKS : (int)blocks;
}

/* Seconds of a repeat: `timed(repeats)` does so many and returns the seconds. */
static inline double bench_s(double (*timed)(long repeats))
{
    long repeats = 1;
    double block = timed(repeats);
    while (block < BLOCK_S && repeats < MOST_REPEATS) {
        repeats = block * 16 < BLOCK_S ? repeats * 8 : (long)((double)repeats * (1.25 * BLOCK_S / block)) + 1;
        block = timed(repeats);
    }
    double seconds[MOST_BLOCKS];
    int blocks = bench_blocks(block);
    for (int i = 0; i < blocks; i++)
        seconds[i] = timed(repeats) / (double)repeats;
    return bench_median(seconds, blocks);
}

/* Defines `double name(long repeats)`, which times a loop around the body. */
#define TIMED(name, ...)                        \
    static double name(long repeats)            \
    {                                           \
        double start = bench_now();             \
        for (long i = 0; i < repeats; i++) {    \
            __VA_ARGS__                         \
        }                                       \
        return bench_now() - start;             \
    }

#endif
