/* UCX by its API, ucp: between two processes of one host, on memory that UCX allocated, so that its shared-memory
 * transports map it. Which transports: UCX_TLS. */
#include <stdatomic.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <ucp/api/ucp.h>

#include "bench.h"

#define POLLS 64
#define HAS_ATOMIC_BATCH
#define HAS_COMPARE_SWAP true
#define LONGEST 4096

static unsigned char *inbox, *outbox;
static int me;
static ucp_worker_h worker;
static ucp_ep_h endpoint;
static ucp_rkey_h key;
static uint64_t base;
static uint64_t old_values[128];
static const ucp_request_param_t plain;

#include "suite.h"

/* What the two processes tell each other. */
static struct {
    unsigned char address[2][LONGEST], key[2][LONGEST];
    uint64_t base[2];
    atomic_long at_barrier, shared;
} *board;
static long barriers;

static void must(ucs_status_t status, const char *what)
{
    if (status != UCS_OK)
        die("%s: %s", what, ucs_status_string(status));
}

static inline void let_go(ucs_status_ptr_t request, const char *what)
{
    if (request == NULL)
        return;
    if (UCS_PTR_IS_ERR(request))
        must(UCS_PTR_STATUS(request), what);
    ucp_request_free(request);
}

static inline void finish(ucs_status_ptr_t request, const char *what)
{
    if (request == NULL)
        return;
    if (UCS_PTR_IS_ERR(request))
        must(UCS_PTR_STATUS(request), what);
    while (ucp_request_check_status(request) == UCS_INPROGRESS)
        ucp_worker_progress(worker);
    must(ucp_request_check_status(request), what);
    ucp_request_free(request);
}

static inline void peer_put(size_t to, size_t from, size_t len)
{
    let_go(ucp_put_nbx(endpoint, outbox + from, len, base + to, key, &plain), "put");
}

static inline void peer_get(size_t from, size_t to, size_t len)
{
    let_go(ucp_get_nbx(endpoint, outbox + to, len, base + from, key, &plain), "get");
}

static inline void peer_flush(void)
{
    finish(ucp_ep_flush_nbx(endpoint, &plain), "flush");
}

static inline void peer_order(void)
{
    must(ucp_worker_fence(worker), "fence");
}

static inline void peer_progress(void)
{
    ucp_worker_progress(worker);
}

static inline ucs_status_ptr_t atomic_start(ucp_atomic_op_t what, const uint64_t *operand, size_t at, uint64_t *old)
{
    ucp_request_param_t reply = {
        .op_attr_mask = UCP_OP_ATTR_FIELD_DATATYPE | UCP_OP_ATTR_FIELD_REPLY_BUFFER,
        .datatype = ucp_dt_make_contig(8),
        .reply_buffer = old,
    };
    return ucp_atomic_op_nbx(endpoint, what, operand, 1, base + at, key, &reply);
}

static inline uint64_t peer_fadd(size_t at, uint64_t add)
{
    uint64_t old;
    finish(atomic_start(UCP_ATOMIC_OP_ADD, &add, at, &old), "fetch-add");
    return old;
}

/* The reply buffer brings what is swapped in, and gets what was there. */
static inline uint64_t peer_cswap(size_t at, uint64_t old, uint64_t new)
{
    uint64_t reply = new;
    finish(atomic_start(UCP_ATOMIC_OP_CSWAP, &old, at, &reply), "compare-swap");
    return reply;
}

static inline void peer_fadd_start(size_t at, uint64_t add, size_t slot)
{
    let_go(atomic_start(UCP_ATOMIC_OP_ADD, &add, at, &old_values[slot]), "fetch-add");
}

static inline void peer_cswap_start(size_t at, uint64_t old, uint64_t new, size_t slot)
{
    old_values[slot] = new;
    let_go(atomic_start(UCP_ATOMIC_OP_CSWAP, &old, at, &old_values[slot]), "compare-swap");
}

static inline uint64_t peer_old(size_t slot)
{
    return old_values[slot];
}

static void peer_barrier(void)
{
    barriers += 2;
    atomic_fetch_add(&board->at_barrier, 1);
    while (atomic_load(&board->at_barrier) < barriers)
        ucp_worker_progress(worker);
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

static unsigned char *allocate(ucp_context_h context, ucp_mem_h *memory)
{
    ucp_mem_map_params_t wanted = {
        .field_mask = UCP_MEM_MAP_PARAM_FIELD_LENGTH | UCP_MEM_MAP_PARAM_FIELD_FLAGS,
        .length = REGION,
        .flags = UCP_MEM_MAP_ALLOCATE,
    };
    must(ucp_mem_map(context, &wanted, memory), "memory");
    ucp_mem_attr_t got = {.field_mask = UCP_MEM_ATTR_FIELD_ADDRESS};
    must(ucp_mem_query(*memory, &got), "memory");
    return got.address;
}

static void connect_ends(ucp_context_h context, ucp_mem_h memory)
{
    void *packed;
    ucp_address_t *address;
    size_t key_len, address_len;
    must(ucp_rkey_pack(context, memory, &packed, &key_len), "key");
    must(ucp_worker_get_address(worker, &address, &address_len), "address");
    if (key_len > LONGEST || address_len > LONGEST)
        die("a key of %zu and an address of %zu bytes", key_len, address_len);
    memcpy(board->key[me], packed, key_len);
    memcpy(board->address[me], address, address_len);
    board->base[me] = (uint64_t)inbox;
    peer_barrier();
    ucp_ep_params_t other = {
        .field_mask = UCP_EP_PARAM_FIELD_REMOTE_ADDRESS,
        .address = (const ucp_address_t *)board->address[!me],
    };
    must(ucp_ep_create(worker, &other, &endpoint), "endpoint");
    must(ucp_ep_rkey_unpack(endpoint, board->key[!me], &key), "key");
    base = board->base[!me];
    peer_barrier();
    peer_flush();
    ucp_rkey_buffer_release(packed);
    ucp_worker_release_address(worker, address);
}

int main(int argc, char **argv)
{
    bench_start(argc, argv);
    board = mmap(NULL, sizeof *board, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    if (board == MAP_FAILED)
        die("no memory");
    pid_t child = bench_fork(&me);

    ucp_params_t features = {
        .field_mask = UCP_PARAM_FIELD_FEATURES,
        .features = UCP_FEATURE_RMA | UCP_FEATURE_AMO64,
    };
    ucp_config_t *config;
    ucp_context_h context;
    must(ucp_config_read(NULL, NULL, &config), "configuration");
    must(ucp_init(&features, config, &context), "start");
    ucp_config_release(config);
    ucp_worker_params_t single = {
        .field_mask = UCP_WORKER_PARAM_FIELD_THREAD_MODE,
        .thread_mode = UCS_THREAD_MODE_SINGLE,
    };
    must(ucp_worker_create(context, &single, &worker), "worker");
    ucp_mem_h memory[2];
    inbox = allocate(context, &memory[0]);
    outbox = allocate(context, &memory[1]);
    connect_ends(context, memory[0]);
    suite();

    finish(ucp_ep_close_nbx(endpoint, &plain), "close");
    peer_barrier();
    ucp_rkey_destroy(key);
    ucp_mem_unmap(context, memory[0]);
    ucp_mem_unmap(context, memory[1]);
    ucp_worker_destroy(worker);
    ucp_cleanup(context);
    if (me == 0 && waitpid(child, NULL, 0) < 0)
        die("the second process is gone");
    return 0;
}
