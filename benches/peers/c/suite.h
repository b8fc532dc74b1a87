/* The rows that every peer with puts and gets has, written once. A peer's program defines what follows and then
 * includes this file; the compiler sees through all of it, so nothing stands between the loop and the peer's own call.
 *
 *   static unsigned char *inbox, *outbox;   REGION bytes each: what the other writes, and what is sent
 *   static int me;                          0 measures, 1 is the target
 *   peer_put(to, from, len), peer_get(from, to, len)   start one; offsets in the other's inbox and the own outbox
 *   peer_flush()                            ends when everything started is complete at the origin
 *   peer_order()                            what is put later is not seen before what was put earlier
 *   peer_progress()                         called while polling memory, every POLLS-th time
 *   peer_fadd(at, add), peer_cswap(at, old, new)       one fetching atomic; the old value. HAS_COMPARE_SWAP
 *   peer_fadd_start(at, add, slot), peer_cswap_start(..., slot)   if HAS_ATOMIC_BATCH; old values by peer_old(slot)
 *   PUT_NEEDS_FLUSH                         if a put may wait for a flush
 *   peer_barrier(), peer_share(value)       both ends; peer_share returns the value of end 0
 */
#ifndef SUITE_H
#define SUITE_H

#include "bench.h"

#define LARGEST ((size_t)100 << 20)
#define PAGE ((size_t)4096)
/* Behind the data: the word of atomics, the flag of a chunk, the acknowledgement, each in a page of its own. */
#define COUNTER (LARGEST + PAGE)
#define FLAG (LARGEST + 2 * PAGE)
#define ACKNOWLEDGED (LARGEST + 3 * PAGE)
#define REGION (LARGEST + 4 * PAGE)
#define HUNDRED 100
#define STRIDE 64
#define RATE_WINDOW 64
#define CHUNK ((size_t)1 << 20)

static void peer_put(size_t to, size_t from, size_t len);
static void peer_get(size_t from, size_t to, size_t len);
static void peer_flush(void);
static void peer_order(void);
static void peer_progress(void);
static void peer_barrier(void);
static long peer_share(long value);
static uint64_t peer_fadd(size_t at, uint64_t add);
static uint64_t peer_cswap(size_t at, uint64_t old, uint64_t new);

static inline uint64_t load(const unsigned char *at)
{
    return __atomic_load_n((const uint64_t *)(const void *)at, __ATOMIC_ACQUIRE);
}

static inline void store(unsigned char *at, uint64_t value)
{
    __atomic_store_n((uint64_t *)(void *)at, value, __ATOMIC_RELEASE);
}

static inline void wait_for(const unsigned char *at, uint64_t value)
{
    for (unsigned turn = 1; load(at) != value; turn++)
        if (turn % POLLS == 0)
            peer_progress();
}

static inline size_t slots(size_t size)
{
    return size <= 4096 ? 64 : size < LARGEST ? 16 : 1;
}

/* What byte `i` of the memory that end `end` sends is. */
static inline unsigned char pattern(size_t i, int end)
{
    return (unsigned char)(i * 131 + (i >> 8) * 29 + (size_t)end * 57 + 7);
}

static void fill(unsigned char *at, size_t len, int end)
{
    for (size_t i = 0; i < len; i++)
        at[i] = pattern(i, end);
}

static void check(const unsigned char *at, size_t len, int end, const char *what)
{
    for (size_t i = 0; i < len; i++)
        if (at[i] != pattern(i, end))
            die("%s of %zu bytes: byte %zu is wrong", what, len, i);
}

/* What one measurement is about: a function of no arguments but the repeats reads it. */
static struct {
    size_t size, stride, count;
    uint64_t round;
} now_at;

/* One put and one get of the size bring the right bytes. */
static void check_size(size_t size)
{
    if (me == 1)
        memset(inbox, 0, size);
    peer_barrier();
    if (me == 0) {
        peer_put(0, 0, size);
        peer_flush();
    }
    peer_barrier();
    if (me == 1) {
        check(inbox, size, 0, "a put");
        fill(inbox, size, 1);
    }
    peer_barrier();
    if (me == 0) {
        memset(outbox, 0, size);
        peer_get(0, 0, size);
        peer_flush();
        check(outbox, size, 1, "a get");
        fill(outbox, size, 0);
    }
    peer_barrier();
}

static double ping_pong(long rounds)
{
    size_t size = now_at.size, word = size - 8;
    peer_barrier();
    double start = bench_now();
    for (long i = 0; i < rounds; i++) {
        now_at.round++;
        if (me == 1)
            wait_for(inbox + word, now_at.round);
        store(outbox + word, now_at.round);
        peer_put(0, 0, size);
#ifdef PUT_NEEDS_FLUSH
        peer_flush();
#endif
        if (me == 0)
            wait_for(inbox + word, now_at.round);
    }
    double seconds = bench_now() - start;
    peer_flush();
    return seconds;
}

/* Repeats that both ends agree about: end 0 decides by its clock. */
static double both_s(double (*timed)(long))
{
    long repeats = 1;
    double block = timed(repeats);
    for (;;) {
        bool is_short = block < BLOCK_S && repeats < MOST_REPEATS;
        long next = block * 16 < BLOCK_S ? repeats * 8 : (long)((double)repeats * (1.25 * BLOCK_S / block)) + 1;
        next = peer_share(is_short ? next : 0);
        if (next == 0)
            break;
        repeats = next;
        block = timed(repeats);
    }
    double seconds[MOST_BLOCKS];
    int blocks = (int)peer_share(bench_blocks(block));
    for (int i = 0; i < blocks; i++)
        seconds[i] = timed(repeats) / (double)repeats;
    return bench_median(seconds, blocks);
}

static void put_lat(size_t size)
{
    now_at.size = size;
    now_at.round = 0;
    memset(inbox + size - 8, 0, 8);
    peer_barrier();
    double seconds = both_s(ping_pong);
    if (me == 0)
        bench_out("put_lat", size, seconds / 2 * 1e6, "us");
    fill(outbox, size, me);
    peer_barrier();
}

TIMED(put_flush, peer_put(0, 0, now_at.size); peer_flush();)
TIMED(get_flush, peer_get(0, 0, now_at.size); peer_flush();)
TIMED(put_b100, for (size_t k = 0; k < HUNDRED; k++) peer_put(k * STRIDE, k * STRIDE, 8); peer_flush();)
TIMED(get_b100, for (size_t k = 0; k < HUNDRED; k++) peer_get(k * STRIDE, k * STRIDE, 8); peer_flush();)
TIMED(put_rate, for (size_t k = 0; k < RATE_WINDOW; k++) peer_put(k * STRIDE, k * STRIDE, 8); peer_flush();)
TIMED(put_walk,
      for (size_t k = 0; k < now_at.count; k++) peer_put(k * now_at.stride, k * now_at.stride, now_at.size);
      peer_flush();)
TIMED(get_walk,
      for (size_t k = 0; k < now_at.count; k++) peer_get(k * now_at.stride, k * now_at.stride, now_at.size);
      peer_flush();)

static uint64_t counted;

static inline void must_be(uint64_t old, uint64_t expected)
{
    if (old != expected)
        die("an atomic gave %llu, not %llu", (unsigned long long)old, (unsigned long long)expected);
}

TIMED(fadd, must_be(peer_fadd(COUNTER, 1), counted); counted++;)
TIMED(cswap, must_be(peer_cswap(COUNTER, counted, counted + 1), counted); counted++;)

#ifdef HAS_ATOMIC_BATCH
static void peer_fadd_start(size_t at, uint64_t add, size_t slot);
static void peer_cswap_start(size_t at, uint64_t old, uint64_t new, size_t slot);
static uint64_t peer_old(size_t slot);

/* The order of a batch is the peer's affair, so what is checked is the sum. */
TIMED(fadd_b100,
      for (size_t k = 0; k < HUNDRED; k++) peer_fadd_start(COUNTER, 1, k);
      peer_flush();
      uint64_t sum = 0;
      for (size_t k = 0; k < HUNDRED; k++) sum += peer_old(k);
      must_be(sum, HUNDRED * counted + HUNDRED * (HUNDRED - 1) / 2);
      counted += HUNDRED;)
TIMED(cswap_b100,
      for (size_t k = 0; k < HUNDRED; k++) peer_cswap_start(COUNTER, counted + k, counted + k + 1, k);
      peer_flush();
      for (size_t k = 0; k < HUNDRED; k++) must_be(peer_old(k), counted + k);
      counted += HUNDRED;)
#endif

static uint64_t sum_words(const unsigned char *at, size_t len)
{
    const uint64_t *words = (const uint64_t *)(const void *)at;
    uint64_t sum = 0;
    for (size_t i = 0; i < len / 8; i++)
        sum += words[i];
    return sum;
}

static uint64_t arrived;

/* End 0 puts chunk after chunk, each with the flag behind it, and waits only for the acknowledgement of the walk; end 1
 * sums a chunk as soon as its flag is there. */
static double put_read(long walks)
{
    size_t size = now_at.size, count = now_at.count;
    double start = bench_now();
    for (long walk = 0; walk < walks; walk++) {
        for (size_t k = 0; k < count; k++) {
            uint64_t flag = now_at.round + k + 1;
            if (me == 0) {
                peer_put(k * size, k * size, size);
                peer_order();
                store(outbox + FLAG, flag);
                peer_put(FLAG, FLAG, 8);
#ifdef PUT_NEEDS_FLUSH
                peer_flush();
#endif
            } else {
                for (unsigned turn = 1; load(inbox + FLAG) < flag; turn++)
                    if (turn % POLLS == 0)
                        peer_progress();
                arrived += sum_words(inbox + k * size, size);
            }
        }
        now_at.round += count;
        if (me == 0) {
            wait_for(inbox + ACKNOWLEDGED, now_at.round);
            peer_flush();
        } else {
            store(outbox + ACKNOWLEDGED, now_at.round);
            peer_put(ACKNOWLEDGED, ACKNOWLEDGED, 8);
            peer_flush();
        }
    }
    return bench_now() - start;
}

static void put_read_bw(size_t size, size_t chunk, size_t count)
{
    now_at.size = chunk;
    now_at.count = count;
    now_at.round = 0;
    memset(inbox + FLAG, 0, 8);
    memset(inbox + ACKNOWLEDGED, 0, 8);
    arrived = 0;
    peer_barrier();
    put_read(1);
    uint64_t sent = (uint64_t)peer_share((long)sum_words(outbox, chunk * count));
    if (me == 1)
        must_be(arrived, sent);
    double seconds = both_s(put_read);
    if (me == 0)
        bench_out("put_read_bw", size, (double)(chunk * count) / seconds / 1e9, "GB/s");
    peer_barrier();
}

static void small_rows(void)
{
    now_at.size = 8;
    bench_out("put_b100", 8, bench_s(put_b100) * 1e6, "us");
    bench_out("get_b100", 8, bench_s(get_b100) * 1e6, "us");
    bench_out("put_rate", 8, RATE_WINDOW / bench_s(put_rate) / 1e6, "Mmsg/s");
}

static void atomic_rows(void)
{
    bench_out("fadd", 8, bench_s(fadd) * 1e6, "us");
    if (HAS_COMPARE_SWAP)
        bench_out("cswap", 8, bench_s(cswap) * 1e6, "us");
#ifdef HAS_ATOMIC_BATCH
    bench_out("fadd_b100", 8, bench_s(fadd_b100) * 1e6, "us");
    if (HAS_COMPARE_SWAP)
        bench_out("cswap_b100", 8, bench_s(cswap_b100) * 1e6, "us");
#endif
}

static void walk_rows(size_t size)
{
    now_at.size = size;
    now_at.count = slots(size);
    double bytes = (double)(size * now_at.count);
    now_at.stride = size;
    bench_out("put_bw", size, bytes / bench_s(put_walk) / 1e9, "GB/s");
    bench_out("get_bw", size, bytes / bench_s(get_walk) / 1e9, "GB/s");
    if (size == LARGEST || bench.is_wire)
        return;
    now_at.stride = 0;
    bench_out("put_bw_hot", size, bytes / bench_s(put_walk) / 1e9, "GB/s");
    bench_out("get_bw_hot", size, bytes / bench_s(get_walk) / 1e9, "GB/s");
}

/* One operation at a time; the bytes are checked first. */
static void single_rows(size_t size)
{
    now_at.size = size;
    check_size(size);
    put_lat(size);
    if (me == 0) {
        bench_out("put_flush", size, bench_s(put_flush) * 1e6, "us");
        bench_out("get_flush", size, bench_s(get_flush) * 1e6, "us");
        fill(outbox, size, 0);
    }
    peer_barrier();
}

/* What is asked of two hosts. */
static void wire_rows(void)
{
    const size_t sizes[] = {8, 65536, 1 << 20};
    for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++) {
        single_rows(sizes[i]);
        if (me == 0 && sizes[i] > PAGE)
            walk_rows(sizes[i]);
        peer_barrier();
    }
}

/* All rows; both ends call it, connected and pinned. */
static void suite(void)
{
    const size_t sizes[] = {8, 64, 512, 4096, 65536, 1 << 20}, large[] = {4096, 65536, 1 << 20, LARGEST};
    memset(inbox, 0, REGION);
    fill(outbox, REGION, me);
    peer_barrier();
    if (bench.is_wire) {
        wire_rows();
        return;
    }
    for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++)
        single_rows(sizes[i]);
    if (me == 0)
        small_rows();
    peer_barrier();
    for (size_t i = 0; i < sizeof large / sizeof *large; i++)
        if (me == 0)
            walk_rows(large[i]);
    peer_barrier();
    put_read_bw(65536, 65536, slots(65536));
    put_read_bw(1 << 20, 1 << 20, slots(1 << 20));
    put_read_bw(LARGEST, CHUNK, LARGEST / CHUNK);
    if (me == 0)
        atomic_rows();
    peer_barrier();
}

#endif
