/* FlashQLA C ABI: Gated Delta Net chunked prefill, forward and backward.
 *
 * C11-clean, no CUDA types but `void *stream`. Every function that can fail returns a qla_status; qla_last_error()
 * (thread-local) then names the argument, what was expected, what came and what to do. Nothing here exits, aborts,
 * prints (but what the environment variable QLA_LOG asks for), or throws. The caller owns all memory and the stream. Strides are
 * in elements, sizes are int64. Zero a struct before filling it: reserved fields must be 0. Outputs share memory with nothing
 * else.
 *
 * Shapes: B batch, T tokens (of one batch row), N sequences (N = B without cu_seqlens), H query/key heads, HV value
 * heads (HV % H == 0; value head h reads query/key head h / (HV / H)), K and V head sizes, C = 64 tokens a chunk.
 */
#ifndef QLA_QLA_H
#define QLA_QLA_H

#include <stddef.h>
#include <stdint.h>

#if defined(QLA_STATIC)
#define QLA_EXPORT
#elif defined(__GNUC__)
#define QLA_EXPORT __attribute__((visibility("default")))
#else
#define QLA_EXPORT
#endif

#ifdef __cplusplus
extern "C" {
#endif

#define QLA_VERSION_MAJOR 0
#define QLA_VERSION_MINOR 1
#define QLA_VERSION_PATCH 0

/* ---- status ------------------------------------------------------------------------------------------------- */

typedef int32_t qla_status;
enum {
  QLA_OK = 0,
  QLA_INVALID_ARGUMENT = 1, /* a wrong shape, dtype, layout, length or combination; nothing was computed */
  QLA_NOT_SUPPORTED = 2,    /* valid, but this backend or device has no kernel for it; the message lists what there is */
  QLA_CUDA_ERROR = 3,       /* a CUDA call failed; the message names the call */
  QLA_OUT_OF_MEMORY = 4,    /* host memory ran out, or workspace_bytes is less than the workspace query's answer */
  QLA_INTERNAL_ERROR = 5
};

/* ---- tensors ------------------------------------------------------------------------------------------------ */

enum { /* dtype */
       QLA_FLOAT64 = 0,
       QLA_FLOAT32 = 1,
       QLA_BFLOAT16 = 2,
       QLA_FLOAT16 = 3,
       QLA_INT32 = 4,
       QLA_INT64 = 5,
       QLA_BOOL8 = 6, /* one byte, 0 or not 0 */
       QLA_UINT8 = 7
};

/* A view. An absent optional has data == NULL (a zeroed struct). A present tensor without elements may have any data. */
typedef struct qla_tensor {
  void* data;
  int32_t dtype;
  int32_t ndim;
  int64_t shape[4];
  int64_t stride[4]; /* in elements; 0 (expanded) and negative are allowed on inputs. The last axis of q k v o, of states, a_inv,
                        a_gated, h and dq dk dv has stride 1; 1-D tensors are contiguous; all others (g beta d_o g_cumsum .. dg
                        dbeta) may have any strides */
} qla_tensor;

/* ---- enums -------------------------------------------------------------------------------------------------- */

enum {                       /* backend */
       QLA_BACKEND_AUTO = 0, /* where the tensors are: CUDA when device >= 0, the CPU when it is -1 */
       QLA_BACKEND_CPU = 1,
       QLA_BACKEND_CUDA = 2
};

enum {                                     /* flags, or'ed */
       QLA_FLAG_QK_L2NORM = 1u << 0,       /* q and k are divided by sqrt(sum x^2 + 1e-6) inside */
       QLA_FLAG_RAW_GATE = 1u << 1,        /* g is raw: g <- -exp(A_log) * softplus(g + dt_bias) in fp32 */
       QLA_FLAG_BETA_SIGMOID = 1u << 2,    /* beta holds logits */
       QLA_FLAG_NEG_EIGVAL = 1u << 3,      /* beta <- 2 * sigmoid(logits); needs QLA_FLAG_BETA_SIGMOID */
       QLA_FLAG_STATE_V_FIRST = 1u << 4,   /* every state is [.., HV, V, K] instead of [.., HV, K, V] */
       QLA_FLAG_BATCH_INVARIANT = 1u << 5, /* the plan of a sequence depends on its own length, heads and gates only */
       QLA_FLAG_VALIDATE = 1u << 6         /* also check values in device memory (boundaries, indices); synchronises */
};

enum {                   /* cp_mode: context parallelism inside one device */
       QLA_CP_AUTO = 0,  /* warm-up where the gate forgets (math.md C4, C5), exact merge (C1)-(C3) elsewhere, as it pays */
       QLA_CP_EXACT = 1, /* only the exact merge */
       QLA_CP_OFF = 2,   /* no cut */
       QLA_CP_FIXED = 3, /* segments of cp_segment_chunks chunks, warm-up rule as in auto */
       QLA_CP_PLAN = 4   /* as a qla_plan of an auto (exact: threshold -inf) call says: its segment_chunks and uncut_chunks */
};

enum { /* where a segment's start state comes from */
       QLA_START_ZERO = 0,
       QLA_START_INITIAL = 1, /* the caller's initial_state */
       QLA_START_WARMUP = 2,  /* zero, warmup_chunks before the segment's first chunk, output off */
       QLA_START_MERGED = 3   /* (C1) */
};

/* ---- forward ------------------------------------------------------------------------------------------------ */

typedef struct qla_gdn_forward_args {
  size_t struct_size; /* sizeof(qla_gdn_forward_args) */
  int32_t backend;
  int32_t device;         /* CUDA ordinal; -1 or the CPU backend: host memory */
  void* stream;           /* cudaStream_t; NULL is the default stream. The CPU backend ignores it. */
  void* workspace;        /* 256-byte aligned; device memory on CUDA */
  size_t workspace_bytes; /* qla_gdn_forward_workspace's answer, or any value from the query's least on; more is faster */
  int32_t num_threads;    /* CPU: 0 means OMP_NUM_THREADS, else all cores. Results do not depend on it. */
  uint32_t flags;
  double scale; /* NaN means K^-0.5; 0 means 0 */

  qla_tensor q, k;              /* [B, T, H, K] */
  qla_tensor v;                 /* [B, T, HV, V] */
  qla_tensor g;                 /* [B, T, HV] log decay (or raw gate); absent: no decay */
  qla_tensor beta;              /* [B, T, HV] */
  qla_tensor initial_state;     /* opt. [N, HV, K, V], or a pool [P, HV, K, V] with state_indices; any strides whose last is 1 */
  qla_tensor final_state;       /* opt. out, same shape; with state_indices it must be absent: the pool is updated in place */
  qla_tensor o;                 /* out [B, T, HV, V] */
  qla_tensor cu_seqlens;        /* opt. [N + 1] int32 or int64, in the memory of the backend; needs B == 1 */
  qla_tensor A_log, dt_bias;    /* [HV] with QLA_FLAG_RAW_GATE; dt_bias opt. */
  qla_tensor state_indices;     /* opt. [N] int32 or int64 into the pool; -1: skip the sequence, its o is 0 */
  qla_tensor has_initial_state; /* opt. [N] bool8: where 0, the sequence starts from zero */
  qla_tensor state_checkpoints; /* opt. out [sum floor(len / every), HV, K, V] */
  int64_t checkpoint_every_n_tokens; /* multiple of 64; 0: none */

  /* optional outputs for training and for flash_qla's low-level functions */
  qla_tensor a_inv;            /* [B, T, HV, 64] (F2), q's dtype, no gate in it */
  qla_tensor a_gated;          /* [B, T, HV, 64] (F3), q's dtype */
  qla_tensor g_cumsum;         /* [B, T, HV] fp32 (float64 for float64 tensors), chunk-local, natural log (F1) */
  qla_tensor q_rnorm, k_rnorm; /* [B, T, H] fp32 (float64 ..) inverse norms */
  qla_tensor h;                /* [sum of chunks, HV, K, V] state at each chunk's start, in sequence order, k's dtype */
  qla_tensor saved; /* 1-D uint8, qla_gdn_forward_saved bytes: opaque, what backward reuses; contiguous, 256-byte aligned */

  int32_t cp_mode;
  int32_t cp_uncut_chunks;    /* QLA_CP_PLAN: qla_plan's uncut_chunks; else 0 */
  int64_t cp_segment_chunks;  /* QLA_CP_FIXED, QLA_CP_PLAN: chunks a segment (0 with the latter: no cut); else 0 = the planner's
                                 choice */
  double cp_warmup_threshold; /* < 0; NaN: -10 for 16-bit tensors, -18 fp32, -37 float64; -inf: every cut is exact */
} qla_gdn_forward_args;

/* ---- backward ----------------------------------------------------------------------------------------------- */

typedef struct qla_gdn_backward_args {
  size_t struct_size;
  int32_t backend;
  int32_t device;
  void* stream;
  void* workspace;
  size_t workspace_bytes; /* any value between the query's least and best works; more is faster */
  int32_t num_threads;
  uint32_t flags;
  double scale;

  /* as given to forward */
  qla_tensor q, k, v, g, beta, initial_state, cu_seqlens, A_log, dt_bias, has_initial_state;
  qla_tensor a_inv, g_cumsum, q_rnorm, k_rnorm; /* opt., as forward returned them; may be ignored and recomputed */
  qla_tensor saved;                             /* opt., as forward filled it; absent: recomputed */

  qla_tensor d_o;           /* opt. [B, T, HV, V], any strides (0 allowed); absent: zero */
  qla_tensor d_final_state; /* opt. like final_state, any float dtype; absent: zero */

  /* outputs; an absent one is not computed. dtypes: any float, usually the input's own */
  qla_tensor dq, dk, dv;       /* shapes of q, k, v */
  qla_tensor dg, dbeta;        /* [B, T, HV]; of the raw gate / of the logits where the flags say so */
  qla_tensor d_initial_state;  /* like initial_state */
  qla_tensor dA_log, ddt_bias; /* [HV] */

  int32_t cp_mode;
  int32_t cp_uncut_chunks;
  int64_t cp_segment_chunks;
  double cp_warmup_threshold;
} qla_gdn_backward_args;

/* ---- plan --------------------------------------------------------------------------------------------------- */

typedef struct qla_segment {
  int64_t sequence;
  int64_t head;                    /* value head */
  int64_t first_chunk, num_chunks; /* of the sequence */
  int64_t warmup_chunks;           /* chunks walked before first_chunk with output off */
  int32_t start;                   /* QLA_START_* */
  int32_t reserved0;
} qla_segment;

typedef struct qla_plan {
  size_t struct_size;
  int64_t num_sequences, total_chunks, segment_chunks /* at most; 0: no cut */, num_segments /* a value head */, num_items,
      value_splits;
  int64_t workspace_bytes;
  double predicted_us;   /* by the cost model of the device; 0 where there is none */
  int32_t fused;         /* CUDA: the intra-chunk stage runs as a role inside the forward kernel */
  int32_t ranges;        /* CUDA: chunks are taken in so many ranges, one after the other, to stay under the workspace's limit; */
                         /* where a sequence goes on from one range to the next the segment starts as QLA_START_INITIAL */
  qla_segment* segments; /* caller's array or NULL; filled up to segments_capacity, num_items says how many there are */
  int64_t segments_capacity;
  char reason[256];     /* why this plan, in words */
  int64_t uncut_chunks; /* sequences of at most so many chunks stay whole, though longer than a segment: their cut would not pay.
                           In a packing of two: where the longest has at most so many */
} qla_plan;

/* ---- devices ------------------------------------------------------------------------------------------------ */

typedef struct qla_device_info_t {
  size_t struct_size;
  char name[128];
  int32_t multiprocessors, capability_major, capability_minor;
  int32_t served; /* 1: forward kernels serve this device */
  int32_t served_backward;
  char kernels[64]; /* "sm90 wgmma", "" */
  char reason[256]; /* why it is not served */
} qla_device_info_t;

/* ---- functions ---------------------------------------------------------------------------------------------- */

QLA_EXPORT const char* qla_version(void);    /* "0.1.0" */
QLA_EXPORT const char* qla_build_info(void); /* one line: compiler, CUDA targets or "no CUDA", CPU levels */
QLA_EXPORT const char* qla_last_error(void); /* of this thread's last failing call; "" if none */
QLA_EXPORT const char* qla_status_name(qla_status status);
QLA_EXPORT const char* qla_cpu_level(void); /* instruction set in use: "x86-64-v3" .. */

QLA_EXPORT qla_status qla_device_count(int32_t* count); /* 0 and QLA_OK without a driver */
QLA_EXPORT qla_status qla_device_info(int32_t device, qla_device_info_t* info);
QLA_EXPORT qla_status qla_prepare(int32_t device); /* loads modules and attributes: then a first call may be captured */

/* can_implement: the answer of the run functions without running. Reads no tensor data; of data pointers it asks only whether
 * they are NULL (alignment, overlap and boundary values are looked at by the run functions) */
QLA_EXPORT qla_status qla_gdn_forward_check(const qla_gdn_forward_args* args);
QLA_EXPORT qla_status qla_gdn_backward_check(const qla_gdn_backward_args* args);

/* from shapes and device alone; data pointers are only tested for NULL (absent). workspace and its size are ignored */
QLA_EXPORT qla_status qla_gdn_forward_workspace(const qla_gdn_forward_args* args, size_t* bytes); /* best, at most 512 MiB */
QLA_EXPORT qla_status qla_gdn_forward_workspace_range(const qla_gdn_forward_args* args, size_t* least, size_t* best);
QLA_EXPORT qla_status qla_gdn_forward_saved(const qla_gdn_forward_args* args, size_t* bytes); /* 0: nothing to save */
QLA_EXPORT qla_status qla_gdn_backward_workspace(const qla_gdn_backward_args* args, size_t* least, size_t* best);

/* enqueue on the stream (CPU: compute before returning). No allocation on the device, no host sync, no device query */
QLA_EXPORT qla_status qla_gdn_forward(const qla_gdn_forward_args* args);
QLA_EXPORT qla_status qla_gdn_backward(const qla_gdn_backward_args* args);

/* The plan for given sequence lengths, on the host. lens: num_lens values (NULL: from the shapes of q). chunk_log_decay: NULL, or
 * [sum of chunks, HV] fp32 sums of ghat (C4) over each chunk, in sequence order. No tensor data is read. */
QLA_EXPORT qla_status qla_gdn_plan(const qla_gdn_forward_args* args, const int64_t* lens, int64_t num_lens,
                                   const float* chunk_log_decay, qla_plan* plan);
/* writes the plan as text; *length receives the bytes needed without the final NUL; buffer may be NULL */
QLA_EXPORT qla_status qla_plan_print(const qla_plan* plan, char* buffer, size_t capacity, size_t* length);

#ifdef __cplusplus
}
#endif
#endif /* QLA_QLA_H */
