// A stand-in for libnccl.so.2: it moves bytes of emulated GPUs between processes of one host.
//
// A communicator is a file that its processes map, with a channel for each ordered pair of ranks:
// one slot, and how often it was filled and emptied. Every call becomes sends and receives over
// channels, and reductions in rank order behind them. A group's part for one communicator is put
// into its stream as an operation, which whoever runs the stream carries on with.
#include <fcntl.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

#define SLOT 65536
typedef struct { char internal[128]; } ncclUniqueId;
typedef struct { uint64_t filled, emptied, length; char data[SLOT]; } Channel;
typedef struct { int joined; Channel channels[]; } Shared;
typedef struct Op Op;
typedef struct { int size, rank, aborted; Shared *shared; uint64_t stream; Op *op; } Comm;
typedef struct { int sends, peer; uint64_t address; char *own; uint64_t bytes, done; } Transfer;
typedef struct { uint64_t given, got, count; int type, op, slice; char *parts; } Reduction;
struct Op {
  Comm *comm;
  int transfers, reductions, room;
  Transfer *transfer;
  Reduction reduction[64];
};
enum { SUCCESS, UNHANDLED_CUDA, SYSTEM, INTERNAL, INVALID_ARGUMENT };
enum { WAITS, DONE, BAD_MEMORY, BAD_LENGTH };
enum { READ = 1, WRITTEN = 2 };

static int (*submit)(uint64_t stream, Op *op);
static uint64_t (*host_address)(uint64_t address, uint64_t bytes, int how);
static int depth, waiting;
static Comm *entered[64], *joining[64];
static int entered_count;

void standin_connect(void *put, void *find) { submit = put; host_address = find; }

// STANDIN_NCCL_FAIL=name:code:after makes a call fail, after so many that succeed.
static int fault(const char *name) {
  const char *text = getenv("STANDIN_NCCL_FAIL");
  static int calls;
  size_t length = strlen(name);
  if (!text || strncmp(text, name, length) || text[length] != ':') return SUCCESS;
  int code, after;
  if (sscanf(text + length, ":%d:%d", &code, &after) != 2) abort();
  return calls++ >= after ? code : SUCCESS;
}
#define FAULT(name) do { int code = fault(name); if (code) return code; } while (0)

static const int SIZES[] = {1, 1, 4, 4, 8, 8, 2, 4, 8, 2};

// ---- operations ----

static Op *op_of(Comm *comm, uint64_t stream) {
  if (!comm->op) {
    comm->op = calloc(1, sizeof(Op));
    comm->op->comm = comm;
    comm->stream = stream;
    entered[entered_count++] = comm;
  }
  return comm->op;
}

static void transfer(Op *op, int sends, int peer, uint64_t address, char *own, uint64_t bytes) {
  if (op->transfers == op->room) {
    op->room = op->room ? 2 * op->room : 16;
    op->transfer = realloc(op->transfer, op->room * sizeof(Transfer));
  }
  op->transfer[op->transfers++] = (Transfer){sends, peer, address, own, bytes, 0};
}

static Channel *channel(Comm *comm, int source, int target) {
  return &comm->shared->channels[source * comm->size + target];
}

// One step of one transfer: whether it got on.
static int step(Comm *comm, Transfer *t, int *failure) {
  uint64_t rest = t->bytes - t->done, length = rest < SLOT ? rest : SLOT;
  Channel *c = t->sends ? channel(comm, comm->rank, t->peer) : channel(comm, t->peer, comm->rank);
  uint64_t filled = __atomic_load_n(&c->filled, __ATOMIC_ACQUIRE);
  uint64_t emptied = __atomic_load_n(&c->emptied, __ATOMIC_ACQUIRE);
  if ((filled == emptied) != t->sends) return 0;
  char *memory = t->own;
  if (!memory) memory = (char *)host_address(t->address, t->bytes, t->sends ? READ : WRITTEN);
  if (!memory) { *failure = BAD_MEMORY; return 0; }
  if (t->sends) {
    memcpy(c->data, memory + t->done, c->length = length);
    __atomic_store_n(&c->filled, filled + 1, __ATOMIC_RELEASE);
  } else {
    if (c->length != length) { *failure = BAD_LENGTH; return 0; }
    memcpy(memory + t->done, c->data, length);
    __atomic_store_n(&c->emptied, emptied + 1, __ATOMIC_RELEASE);
  }
  t->done += length;
  return 1;
}

#define REDUCE(T) { T *into = target; const T *x = part; for (uint64_t i = 0; i < r->count; i++) \
  into[i] = r->op == 0 ? (T)(into[i] + x[i]) : r->op == 1 ? (T)(into[i] * x[i]) \
    : r->op == 2 ? (into[i] > x[i] ? into[i] : x[i]) : (into[i] < x[i] ? into[i] : x[i]); break; }

static int reduce(Comm *comm, Reduction *r) {
  uint64_t bytes = r->count * SIZES[r->type];
  char *given = (char *)host_address(r->given, bytes * (r->slice < 0 ? 1 : comm->size), READ);
  void *target = (void *)host_address(r->got, bytes, WRITTEN);
  if (!given || !target) return BAD_MEMORY;
  memcpy(r->parts + comm->rank * bytes, given + (r->slice < 0 ? 0 : r->slice * bytes), bytes);
  memcpy(target, r->parts, bytes);
  for (int rank = 1; rank < comm->size; rank++) {
    const void *part = r->parts + rank * bytes;
    switch (r->type) {
      case 0: REDUCE(int8_t)
      case 1: REDUCE(uint8_t)
      case 2: REDUCE(int32_t)
      case 3: REDUCE(uint32_t)
      case 4: REDUCE(int64_t)
      case 5: REDUCE(uint64_t)
      case 7: REDUCE(float)
      case 8: REDUCE(double)
      default: abort();
    }
  }
  return DONE;
}

// Carry on with an operation; frees it when it is done, well or not.
int standin_progress(Op *op) {
  Comm *comm = op->comm;
  int state = DONE, moved = 1;
  while (moved && !comm->aborted && state == DONE) {
    char blocked[2][64] = {{0}};
    moved = 0;
    for (int k = 0; k < op->transfers && state == DONE; k++) {
      Transfer *t = &op->transfer[k];
      if (t->done == t->bytes || blocked[t->sends][t->peer]) continue;
      moved |= step(comm, t, &state);
      blocked[t->sends][t->peer] = t->done < t->bytes;  // later ones come after it
    }
  }
  for (int k = 0; k < op->transfers && state == DONE && !comm->aborted; k++)
    if (op->transfer[k].done < op->transfer[k].bytes) return WAITS;
  for (int k = 0; k < op->reductions; k++) {
    if (state == DONE && !comm->aborted) state = reduce(comm, &op->reduction[k]);
    free(op->reduction[k].parts);
  }
  free(op->transfer);
  free(op);
  return state;
}

static void join(Comm *comm) {
  struct timespec pause = {0, 500000};
  while (__atomic_load_n(&comm->shared->joined, __ATOMIC_ACQUIRE) < comm->size)
    nanosleep(&pause, 0);
}

static int finish(void) {
  for (int k = 0; k < waiting; k++) join(joining[k]);
  waiting = 0;
  int count = entered_count;
  entered_count = 0;
  for (int k = 0; k < count; k++) {
    Op *op = entered[k]->op;
    entered[k]->op = 0;
    if (submit(entered[k]->stream, op)) return UNHANDLED_CUDA;
  }
  return SUCCESS;
}

// ---- NCCL's functions ----

int ncclGetVersion(int *version) {
  const char *text = getenv("STANDIN_NCCL_VERSION");
  *version = text ? atoi(text) : 22907;
  return SUCCESS;
}
const char *ncclGetErrorString(int code) { return code == SYSTEM ? "system error" : "an error"; }
const char *ncclGetLastError(Comm *comm) { return ""; }

int ncclGetUniqueId(ncclUniqueId *id) {
  static int made;
  FAULT("ncclGetUniqueId");
  // Beside the library, so that what a failed job leaves goes with the tests' folder.
  const char *beside = getenv("STANDIN_NCCL");
  if (!beside || strlen(beside) > 100) beside = "/dev/shm/standin-nccl";
  memset(id, 0, sizeof *id);
  snprintf(id->internal, sizeof *id, "%s-%d-%d", beside, getpid(), made++);
  return SUCCESS;
}

int ncclCommInitRankConfig(Comm **out, int size, ncclUniqueId id, int rank, void *config) {
  FAULT("ncclCommInitRank");
  if (size > 64 || rank < 0 || rank >= size) return INVALID_ARGUMENT;
  size_t bytes = sizeof(Shared) + (size_t)size * size * sizeof(Channel);
  int file = open(id.internal, O_RDWR | O_CREAT, 0600);
  if (file < 0 || ftruncate(file, bytes)) return SYSTEM;
  Comm *comm = calloc(1, sizeof(Comm));
  comm->size = size;
  comm->rank = rank;
  comm->shared = mmap(0, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
  close(file);
  if (__atomic_add_fetch(&comm->shared->joined, 1, __ATOMIC_ACQ_REL) == size) unlink(id.internal);
  *out = comm;
  joining[waiting++] = comm;
  return depth ? SUCCESS : finish();
}
int ncclCommInitRank(Comm **out, int size, ncclUniqueId id, int rank) {
  return ncclCommInitRankConfig(out, size, id, rank, 0);
}
int ncclCommInitAll(Comm **out, int count, const int *devices) { return INVALID_ARGUMENT; }
int ncclCommSplit(Comm *comm, int color, int key, Comm **out, void *config) {
  return INVALID_ARGUMENT;
}
int ncclCommDestroy(Comm *comm) { return SUCCESS; }
int ncclCommAbort(Comm *comm) { comm->aborted = 1; return SUCCESS; }
int ncclCommGetAsyncError(Comm *comm, int *code) {
  *code = fault("ncclCommGetAsyncError");
  return SUCCESS;
}
int ncclCommCuDevice(Comm *comm, int *device) { return INVALID_ARGUMENT; }
int ncclCommUserRank(Comm *comm, int *rank) { *rank = comm->rank; return SUCCESS; }
int ncclCommCount(Comm *comm, int *size) { *size = comm->size; return SUCCESS; }

int ncclGroupStart(void) { depth++; return SUCCESS; }
int ncclGroupEnd(void) {
  FAULT("ncclGroupEnd");
  return --depth ? SUCCESS : finish();
}

#define BEGIN(name) FAULT(name); if (!comm || comm->aborted) return INVALID_ARGUMENT; \
  Op *op = op_of(comm, stream); (void)op
#define END return depth ? SUCCESS : finish()

static void reduction(Op *op, Reduction r) {
  uint64_t bytes = r.count * SIZES[r.type];
  Comm *comm = op->comm;
  r.parts = malloc(bytes * comm->size);
  for (int peer = 0; peer < comm->size; peer++)
    if (peer != comm->rank) {
      uint64_t from = r.given + (r.slice < 0 ? 0 : peer * bytes);
      transfer(op, 1, peer, from, 0, bytes);
      transfer(op, 0, peer, 0, r.parts + peer * bytes, bytes);
    }
  if (op->reductions == 64) abort();
  op->reduction[op->reductions++] = r;
}

int ncclAllReduce(uint64_t given, uint64_t got, size_t count, int type, int kind, Comm *comm,
                  uint64_t stream) {
  BEGIN("ncclAllReduce");
  reduction(op, (Reduction){given, got, count, type, kind, -1, 0});
  END;
}
int ncclReduceScatter(uint64_t given, uint64_t got, size_t count, int type, int kind, Comm *comm,
                      uint64_t stream) {
  BEGIN("ncclReduceScatter");
  reduction(op, (Reduction){given, got, count, type, kind, comm->rank, 0});
  END;
}
int ncclSend(uint64_t given, size_t count, int type, int peer, Comm *comm, uint64_t stream) {
  BEGIN("ncclSend");
  transfer(op, 1, peer, given, 0, count * SIZES[type]);
  END;
}
int ncclRecv(uint64_t got, size_t count, int type, int peer, Comm *comm, uint64_t stream) {
  BEGIN("ncclRecv");
  transfer(op, 0, peer, got, 0, count * SIZES[type]);
  END;
}
int ncclAllGather(uint64_t given, uint64_t got, size_t count, int type, Comm *comm,
                  uint64_t stream) {
  BEGIN("ncclAllGather");
  for (int peer = 0; peer < comm->size; peer++) {
    uint64_t bytes = count * SIZES[type];
    transfer(op, 1, peer, given, 0, bytes);
    transfer(op, 0, peer, got + peer * bytes, 0, bytes);
  }
  END;
}
int ncclBroadcast(uint64_t given, uint64_t got, size_t count, int type, int root, Comm *comm,
                  uint64_t stream) {
  BEGIN("ncclBroadcast");
  for (int peer = 0; peer < comm->size && root == comm->rank; peer++)
    transfer(op, 1, peer, given, 0, count * SIZES[type]);
  transfer(op, 0, root, got, 0, count * SIZES[type]);
  END;
}
int ncclBcast(uint64_t both, size_t count, int type, int root, Comm *comm, uint64_t stream) {
  return INVALID_ARGUMENT;
}
int ncclReduce(uint64_t given, uint64_t got, size_t count, int type, int kind, int root, Comm *comm,
               uint64_t stream) {
  return INVALID_ARGUMENT;
}
