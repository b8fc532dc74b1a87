/* libfabric's remote memory access between two processes of one host, by its provider shm, or with --wire by tcp. */
#include <rdma/fabric.h>
#include <rdma/fi_atomic.h>
#include <rdma/fi_cm.h>
#include <rdma/fi_domain.h>
#include <rdma/fi_endpoint.h>
#include <rdma/fi_errno.h>
#include <rdma/fi_rma.h>
#include <stdatomic.h>
#include <sys/mman.h>
#include <sys/wait.h>

#include "bench.h"

/* The target's part of an operation is done while it reads its completion queue. */
#define POLLS 1
#define HAS_ATOMIC_BATCH
#define HAS_COMPARE_SWAP true
#define LONGEST 256
#define INJECTED 64

static unsigned char *inbox, *outbox;
static int me;
static struct fid_ep *endpoint;
static struct fid_cq *completions;
static fi_addr_t other;
static void *descriptor;
static uint64_t base, key;
static size_t injectable;
static long started, completed;
static uint64_t (*operands)[3];

#include "suite.h"

static struct {
    unsigned char name[2][LONGEST];
    uint64_t base[2], key[2];
    atomic_long at_barrier, shared;
} *board;
static long barriers;

static void must(ssize_t code, const char *what)
{
    if (code < 0)
        die("%s: %s", what, fi_strerror((int)-code));
}

static inline void peer_progress(void)
{
    struct fi_cq_entry entries[16];
    ssize_t count = fi_cq_read(completions, entries, 16);
    if (count > 0) {
        completed += count;
    } else if (count == -FI_EAVAIL) {
        struct fi_cq_err_entry error = {0};
        fi_cq_readerr(completions, &error, 0);
        die("an operation failed: %s", fi_strerror(error.err));
    } else if (count != -FI_EAGAIN) {
        must(count, "completions");
    }
}

static inline void peer_flush(void)
{
    while (completed < started)
        peer_progress();
}

/* Starts an operation as soon as there is a place for it. */
#define START(call, what)                     \
    do {                                      \
        ssize_t code;                         \
        while ((code = (call)) == -FI_EAGAIN) \
            peer_progress();                  \
        must(code, what);                     \
        started++;                            \
    } while (0)

/* FI_DELIVERY_COMPLETE: a completion says that the bytes are in the target's memory, as the other peers' flush does. */
static inline void peer_put(size_t to, size_t from, size_t len)
{
    struct iovec local = {outbox + from, len};
    struct fi_rma_iov remote = {base + to, len, key};
    struct fi_msg_rma message = {
        .msg_iov = &local, .desc = &descriptor, .iov_count = 1, .addr = other, .rma_iov = &remote, .rma_iov_count = 1};
    uint64_t flags = FI_COMPLETION | FI_DELIVERY_COMPLETE | (len <= injectable ? FI_INJECT : 0);
    START(fi_writemsg(endpoint, &message, flags), "put");
}

static inline void peer_get(size_t from, size_t to, size_t len)
{
    START(fi_read(endpoint, outbox + to, len, descriptor, other, base + from, key, NULL), "get");
}

static inline void peer_order(void)
{
    peer_flush();
}

static inline void peer_fadd_start(size_t at, uint64_t add, size_t slot)
{
    uint64_t *o = operands[slot];
    o[0] = add;
    START(fi_fetch_atomic(endpoint, &o[0], 1, descriptor, &o[2], descriptor, other, base + at, key, FI_UINT64, FI_SUM,
                          NULL), "fetch-add");
}

static inline void peer_cswap_start(size_t at, uint64_t old, uint64_t new, size_t slot)
{
    uint64_t *o = operands[slot];
    o[0] = new;
    o[1] = old;
    START(fi_compare_atomic(endpoint, &o[0], 1, descriptor, &o[1], descriptor, &o[2], descriptor, other, base + at, key,
                            FI_UINT64, FI_CSWAP, NULL), "compare-swap");
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
    barriers += 2;
    atomic_fetch_add(&board->at_barrier, 1);
    while (atomic_load(&board->at_barrier) < barriers)
        peer_progress();
}

static long peer_share(long value)
{
    if (me == 0)
        atomic_store(&board->shared, value);
    peer_barrier();
    value = atomic_load(&board->shared);
    peer_barrier();
    return value;
}

/* What is wanted of the provider. */
static struct fi_info *find(void)
{
    struct fi_info *hints = fi_allocinfo(), *info;
    if (hints == NULL)
        die("no memory");
    hints->fabric_attr->prov_name = strdup(bench.is_wire ? "tcp" : "shm");
    hints->ep_attr->type = FI_EP_RDM;
    hints->caps = bench.is_wire ? FI_RMA | FI_MSG : FI_RMA | FI_MSG | FI_ATOMIC;
    hints->mode = ~0ULL;
    hints->domain_attr->mr_mode = FI_MR_LOCAL | FI_MR_VIRT_ADDR | FI_MR_ALLOCATED | FI_MR_PROV_KEY;
    hints->domain_attr->threading = FI_THREAD_DOMAIN;
    hints->domain_attr->data_progress = FI_PROGRESS_MANUAL;
    const char *node = bench.is_wire ? "127.0.0.1" : NULL;
    must(fi_getinfo(FI_VERSION(1, 14), node, NULL, bench.is_wire ? FI_SOURCE : 0, hints, &info), "no such provider");
    fi_freeinfo(hints);
    return info;
}

int main(int argc, char **argv)
{
    bench_start(argc, argv);
    board = mmap(NULL, sizeof *board, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    if (board == MAP_FAILED)
        die("no memory");
    pid_t child = bench_fork(&me);

    struct fi_info *info = find();
    struct fid_fabric *fabric;
    struct fid_domain *domain;
    struct fid_av *addresses;
    struct fid_mr *memory;
    struct fi_av_attr table = {.type = FI_AV_TABLE, .count = 2};
    struct fi_cq_attr queue = {.size = 1024, .format = FI_CQ_FORMAT_CONTEXT, .wait_obj = FI_WAIT_NONE};
    must(fi_fabric(info->fabric_attr, &fabric, NULL), "fabric");
    must(fi_domain(fabric, info, &domain, NULL), "domain");
    must(fi_av_open(domain, &table, &addresses, NULL), "addresses");
    must(fi_cq_open(domain, &queue, &completions, NULL), "completion queue");
    must(fi_endpoint(domain, info, &endpoint, NULL), "endpoint");
    must(fi_ep_bind(endpoint, &addresses->fid, 0), "endpoint");
    must(fi_ep_bind(endpoint, &completions->fid, FI_TRANSMIT | FI_RECV), "endpoint");
    must(fi_enable(endpoint), "endpoint");
    injectable = info->tx_attr->inject_size < INJECTED ? info->tx_attr->inject_size : INJECTED;

    size_t all = 2 * REGION + PAGE;
    inbox = mmap(NULL, all, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (inbox == MAP_FAILED)
        die("no memory");
    outbox = inbox + REGION;
    operands = (void *)(outbox + REGION);
    must(fi_mr_reg(domain, inbox, all, FI_READ | FI_WRITE | FI_REMOTE_READ | FI_REMOTE_WRITE, 0, (uint64_t)me + 1, 0,
                   &memory, NULL), "memory");
    descriptor = fi_mr_desc(memory);

    size_t len = LONGEST;
    must(fi_getname(&endpoint->fid, board->name[me], &len), "name");
    board->base[me] = info->domain_attr->mr_mode & FI_MR_VIRT_ADDR ? (uint64_t)inbox : 0;
    board->key[me] = fi_mr_key(memory);
    peer_barrier();
    if (fi_av_insert(addresses, board->name[!me], 1, &other, 0, NULL) != 1)
        die("the other end's address is not taken");
    base = board->base[!me];
    key = board->key[!me];
    peer_barrier();
    suite();

    fi_close(&endpoint->fid);
    fi_close(&memory->fid);
    fi_close(&completions->fid);
    fi_close(&addresses->fid);
    fi_close(&domain->fid);
    fi_close(&fabric->fid);
    fi_freeinfo(info);
    if (me == 0 && waitpid(child, NULL, 0) < 0)
        die("the second process is gone");
    return 0;
}
