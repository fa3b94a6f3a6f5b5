/* vcattn: low-bit, non-causal attention for video diffusion transformers. C ABI (C99).
 *
 * The contract of every call in this header:
 *  - Inputs are never modified; nothing is printed; no call aborts; there is no global state. Calls may run
 *    concurrently as long as they write to different memory.
 *  - All memory is the caller's: ask for the workspace size first, then pass at least that many bytes, aligned to
 *    VCATTN_WORKSPACE_ALIGNMENT. Its contents need not be kept between calls.
 *  - A call that fails returns a code other than VCATTN_OK and, where `message` is not NULL, one line that names the
 *    condition that was not met. Outputs are untouched unless the code is VCATTN_OVERFLOW or VCATTN_INTERNAL.
 *  - Shapes are [batch, seqlen, num_heads, head_dim] with free strides in elements, so [B, H, S, D] storage, slices of
 *    a fused QKV buffer and broadcast (stride 0) inputs are all described without a copy. Extents, strides and
 *    offsets are 64-bit.
 */
#ifndef VCATTN_VCATTN_H_
#define VCATTN_VCATTN_H_

#include <stddef.h>
#include <stdint.h>

#if defined(VCATTN_BUILDING_SHARED)
#define VCATTN_API __attribute__((visibility("default")))
#else
#define VCATTN_API
#endif

#ifdef __cplusplus
extern "C" {
#endif

#define VCATTN_VERSION_MAJOR 0
#define VCATTN_VERSION_MINOR 1
#define VCATTN_VERSION_PATCH 0

#define VCATTN_WORKSPACE_ALIGNMENT 256
#define VCATTN_MAX_HEAD_DIM 256

/* ---- status ------------------------------------------------------------------------------------------------- */

typedef enum vcattn_code {
  VCATTN_OK = 0,
  VCATTN_INVALID_ARGUMENT = 1,    /* the arguments contradict each other or the contract */
  VCATTN_UNSUPPORTED = 2,         /* a valid request that this build or back end cannot serve */
  VCATTN_WORKSPACE_TOO_SMALL = 3, /* workspace NULL, misaligned or smaller than asked for */
  VCATTN_NONFINITE_INPUT = 4,     /* NaN or infinity in q, k or v; message says where */
  VCATTN_INTERNAL = 5,            /* a failure inside the library (out of memory in the task scheduler) */
  VCATTN_OVERFLOW = 6             /* scores left the range of FP32; out and lse hold nothing of use */
} vcattn_code;

typedef struct vcattn_message {
  char text[256]; /* NUL-terminated, one line */
} vcattn_message;

/* ---- tensors ------------------------------------------------------------------------------------------------ */

typedef enum vcattn_dtype { VCATTN_BF16 = 1, VCATTN_FP16 = 2, VCATTN_FP32 = 3 } vcattn_dtype;

typedef struct vcattn_tensor {
  void* data;        /* element [0, 0, 0, 0]; aligned to its element size */
  int32_t dtype;     /* vcattn_dtype */
  int32_t reserved;  /* 0 */
  int64_t shape[4];  /* batch, seqlen, num_heads, head_dim */
  int64_t stride[4]; /* in elements; 0 broadcasts an input. Of an output each stride steps over all that the smaller
                        ones reach, and its address range meets no input's: interleaved slices are refused */
} vcattn_tensor;

/* ---- recipes: every choice of the numerics, by name ---------------------------------------------------------- */

/* How an operand of a matrix product is stored. docs/algorithm.md gives each encoding. */
typedef enum vcattn_format {
  VCATTN_FORMAT_FP32 = 0, /* not quantised */
  VCATTN_FORMAT_BF16 = 1,
  VCATTN_FORMAT_INT8 = 2, /* symmetric, codes -127..127 */
  VCATTN_FORMAT_E4M3 = 3, /* E4M3FN, largest finite value 448 */
  VCATTN_FORMAT_NVFP4 = 4 /* E2M1 with a UE4M3 scale for each 16 elements along the contraction axis */
} vcattn_format;

/* How far one scale of Q, K or V reaches. */
typedef enum vcattn_scale_span {
  VCATTN_SPAN_TOKEN = 0,  /* one scale per token */
  VCATTN_SPAN_BLOCK = 1,  /* one scale per 128 tokens */
  VCATTN_SPAN_HEAD = 2,   /* one scale per (batch, head) */
  VCATTN_SPAN_CHANNEL = 3 /* one scale per (batch, head, channel); V only */
} vcattn_scale_span;

typedef enum vcattn_scale_kind {
  VCATTN_SCALE_ABSMAX = 0,  /* largest magnitude / largest code */
  VCATTN_SCALE_POW2_F16 = 1 /* a power of two that keeps every QK dot product inside FP16: Q carries
                               8 log2(e) softmax_scale, so that scores arrive in units of E4M3 codes */
} vcattn_scale_kind;

/* How softmax probabilities become the operand of the second product. */
typedef enum vcattn_p_format {
  VCATTN_P_FP32 = 0,
  VCATTN_P_BF16 = 1,
  VCATTN_P_E4M3 = 2,              /* exp2, then E4M3 with round to nearest even */
  VCATTN_P_EXPCAST = 3,           /* the byte from one multiply-add */
  VCATTN_P_EXPCAST_TWO_LINES = 4, /* the same with a second, flatter line under code 4 */
  VCATTN_P_NVFP4 = 5              /* exp2, per (row, tile) scale, then NVFP4 along the keys */
} vcattn_p_format;

/* What a row's probabilities are measured against. */
typedef enum vcattn_row_max {
  VCATTN_MAX_RUNNING = 0,        /* exact running maximum */
  VCATTN_MAX_RUNNING_OCTAVE = 1, /* whole octaves. EXPCAST raises them only when a code would exceed 126 (122 with two
                                    phases), the other formats as soon as the maximum passes them */
  VCATTN_MAX_TILE_OCTAVE = 2     /* each `tile_keys` keys of a row by their own whole octaves */
} vcattn_row_max;

typedef enum vcattn_row_sum {
  VCATTN_SUM_DECODED = 0,  /* sum of the probabilities as the second product sees them */
  VCATTN_SUM_UNROUNDED = 1 /* sum before they are rounded */
} vcattn_row_sum;

typedef enum vcattn_v_order {
  VCATTN_ORDER_SEQUENCE = 0,
  VCATTN_ORDER_CUBE = 1,     /* static 2 x 8 x 8 cubes of the video grid */
  VCATTN_ORDER_KMEANS = 2,   /* stable sort by k-means label */
  VCATTN_ORDER_BALANCED = 3, /* clusters of equal size */
  VCATTN_ORDER_CHAIN = 4     /* k-means clusters along a path, tokens along the path's direction, then exchanges between
                                neighbouring blocks, halves and quarters */
} vcattn_v_order;

typedef enum vcattn_mean_format { VCATTN_MEAN_BF16 = 0, VCATTN_MEAN_TF32 = 1, VCATTN_MEAN_FP32 = 2 } vcattn_mean_format;

/* How a matrix product accumulates on the CPU. A GPU accumulates as its tensor cores do, whatever the recipe says: see
 * HOPPER, HOPPER_F16 for E4M3 QK, promoted to FP32 each `tile_keys` keys, or each 128 where mean_rows is 0 or the
 * maximum runs. */
typedef enum vcattn_accumulate {
  VCATTN_ACC_FP32 = 0,
  VCATTN_ACC_FP64 = 1,      /* as good as exact */
  VCATTN_ACC_HOPPER = 2,    /* Hopper's FP8 tensor cores, FP32 accumulator (numerics/dot_model.h) */
  VCATTN_ACC_HOPPER_F16 = 3 /* the same with an FP16 accumulator; QK only */
} vcattn_accumulate;

typedef enum vcattn_seeding {
  VCATTN_SEED_SPACED = 0,  /* tokens evenly spaced over the sequence; the seed is not used */
  VCATTN_SEED_RANDOM = 1,  /* distinct random tokens */
  VCATTN_SEED_PLUSPLUS = 2 /* k-means++ */
} vcattn_seeding;

typedef struct vcattn_grouping {
  int32_t clusters;        /* k >= 1; more than the tokens is reduced to the tokens */
  int32_t iterations;      /* Lloyd iterations from a cold start, >= 0 */
  int32_t warm_iterations; /* Lloyd iterations from given centroids, >= 0 */
  int32_t seeding;         /* vcattn_seeding */
  uint64_t seed;
} vcattn_grouping;

/* A complete numeric recipe. vcattn_recipe_by_name fills one; every field may then be changed. */
typedef struct vcattn_recipe {
  char name[32];
  /* first product */
  int32_t qk_format;     /* vcattn_format */
  int32_t q_scale_span;  /* vcattn_scale_span: TOKEN or BLOCK; ignored by FP32, BF16 and NVFP4 */
  int32_t k_scale_span;  /* BLOCK or HEAD, in the order of the tiles; ignored by the same */
  int32_t qk_scale_kind; /* vcattn_scale_kind; POW2_F16 needs E4M3 */
  int32_t qk_hadamard;   /* 1: rotate Q and K by the normalised Hadamard matrix */
  int32_t k_centred;     /* 1: subtract the mean over tokens from K */
  int32_t q_centred;     /* 1: subtract the mean of each 128 queries from Q and add its exact scores back */
  int32_t qk_accumulate; /* vcattn_accumulate */
  /* softmax */
  int32_t p_format;  /* vcattn_p_format */
  int32_t p_phases;  /* EXPCAST: 1, or 2: every other key writes its byte half an octave higher, its value row carries
                        2^-1/2, and the octave-periodic error of the byte cancels between neighbours; others ignore it */
  int32_t row_max;   /* vcattn_row_max */
  int32_t tile_keys; /* TILE_OCTAVE: keys under one maximum, 128 or 256 (two neighbouring tiles; promotion to FP32 then
                        happens once per `tile_keys`); others ignore it */
  int32_t row_sum;   /* vcattn_row_sum */
  float p_log2_peak; /* E4M3 by exp2: the reference maximum is written as 2^p_log2_peak (8: 256; 8.807: 448) */
  /* second product */
  int32_t v_format;      /* vcattn_format except INT8 */
  int32_t v_scale_span;  /* HEAD or CHANNEL; ignored by FP32, BF16 and NVFP4 */
  int32_t v_hadamard;    /* 1: rotate V before quantisation and the output back */
  int32_t v_order;       /* vcattn_v_order */
  int32_t mean_rows;     /* 0: no means; else rows per mean: 32, 64 or 128 */
  int32_t mean_centred;  /* 1: each mean also takes up the mean rounding error of its rows */
  int32_t mean_format;   /* vcattn_mean_format */
  int32_t pv_accumulate; /* vcattn_accumulate */
  int32_t promote_keys;  /* HOPPER: keys between promotions to FP32, a multiple of 32; 0: never. TILE_OCTAVE promotes
                            what each maximum covers by itself: 0 or `tile_keys` */
  vcattn_grouping grouping;
} vcattn_recipe;

VCATTN_API int32_t vcattn_recipe_count(void);
/* Name of recipe `index`, or NULL when out of range. */
VCATTN_API const char* vcattn_recipe_name(int32_t index);
VCATTN_API vcattn_code vcattn_recipe_by_name(const char* name, vcattn_recipe* recipe, vcattn_message* message);
/* Sets one field from text, by the names that vcattn_recipe_describe prints: ("mean_rows", "32"), ("p_format", "e4m3").
 */
VCATTN_API vcattn_code vcattn_recipe_set(vcattn_recipe* recipe, const char* field, const char* value,
                                         vcattn_message* message);
/* Writes one line of `field=value` pairs, NUL-terminated and cut to `size`; returns the length of the whole line. */
VCATTN_API size_t vcattn_recipe_describe(const vcattn_recipe* recipe, char* text, size_t size);

/* ---- attention ---------------------------------------------------------------------------------------------- */

typedef enum vcattn_backend {
  VCATTN_BACKEND_AUTO = 0, /* CPU for host memory, the current device's for CUDA memory */
  VCATTN_BACKEND_CPU = 1,
  VCATTN_BACKEND_SM90A = 2 /* NVIDIA Hopper (H100, H200) */
} vcattn_backend;

/* Where the tensors, lse, key_mask, permutation, centroids, the tables of rope and the workspace lie. cu_seqlens and
 * the structs are in host memory always. */
typedef enum vcattn_memory {
  VCATTN_MEMORY_HOST = 0,
  /* Of the calling thread's current device. Calls only launch on `stream`: they neither allocate nor wait, and may be
     captured in a CUDA graph. So what a wait would find is not refused but shows: non-finite inputs act as under
     VCATTN_ALLOW_NONFINITE; a permutation's entries outside its sequence make the head NaN (repeated ones give the
     attention over the repeated keys). Rows whose largest |softmax_scale q . k| passes 690 are NaN where scores
     accumulate in FP16 (recipe `fast`). Elsewhere rows with softmax_scale |q| |k| past 2.9 million are attended as if
     q were shorter, down to there: they have one key or a few that are all but equal, and lse NaN. */
  VCATTN_MEMORY_CUDA = 1
} vcattn_memory;

enum {
  /* Let NaN and infinities in q, k (rotated by their rope) and v through: a row of the output is NaN where its query
     row, any of its keys or the channel of any of its values is not finite. Without the flag such inputs are refused.
   */
  VCATTN_ALLOW_NONFINITE = 1
};

/* Where the video is: `first_token` others first (text), then a frames x height x width grid in row-major order, then
   any number of others. Needed by VCATTN_ORDER_CUBE and VCATTN_ROPE_PER_AXIS. The orders that cluster, given one, group
   its tokens alone, by their number alone (1 x 1 x n will do): the others stand behind them as they come, and touch
   neither their order nor the centroids. All zero: every token is grouped. Not together with cu_seqlens. Calls that use
   it for none of these (an order is given, or that of the sequence; no rope per axis) do not look at it. */
typedef struct vcattn_video_grid {
  int64_t first_token;
  int64_t frames, height, width;
} vcattn_video_grid;

/* Which channels of a row rotate together. */
typedef enum vcattn_rope_pairing {
  VCATTN_ROPE_NONE = 0,
  VCATTN_ROPE_INTERLEAVED = 1, /* pair i: channels 2 i and 2 i + 1 */
  VCATTN_ROPE_HALF_SPLIT = 2   /* pair i: channels i and i + head_dim / 2 */
} vcattn_rope_pairing;

typedef enum vcattn_rope_tables {
  VCATTN_ROPE_PER_TOKEN = 0, /* one table of cosines and one of sines over the tokens */
  VCATTN_ROPE_PER_AXIS = 1   /* one of each for the frames, the height and the width of the video grid */
} vcattn_rope_tables;

/* Rotary position embedding: the channels (x0, x1) of a pair become (x0 cos - x1 sin, x0 sin + x1 cos) in FP32, each
 * product and each sum rounded, and stay FP32: what a recipe does next (mean, Hadamard, codes) starts from these
 * values, which are never rounded to the tensor's dtype. Every pair of a row rotates; a table may hold cosine 1 and
 * sine 0.
 *
 * PER_TOKEN: cos[0] and sin[0], [batch, seqlen, heads, head_dim / 2] of the tensor, with strides in elements, 0 to
 * broadcast. Packed sequences are numbered as in the whole tensor.
 *
 * PER_AXIS: one table each for frames, height and width, dense [extent of the axis in params->grid, pairs[axis]]. The
 * first pairs[0] pairs of a row take the token's frame, the next pairs[1] its row and the last pairs[2] its column;
 * together they are head_dim / 2, any may be 0. Tokens outside the grid rotate by no angle. Not with cu_seqlens.
 *
 * The tables lie where q and k lie; out and lse meet none of them. */
typedef struct vcattn_rope {
  int32_t pairing; /* vcattn_rope_pairing; with NONE the rest is not looked at */
  int32_t tables;  /* vcattn_rope_tables */
  const float* cos[3];
  const float* sin[3];
  int64_t stride[4]; /* PER_TOKEN: batch, token, head, pair; of both tables */
  int64_t pairs[3];  /* PER_AXIS: frames, height, width */
} vcattn_rope;

/* Fill with vcattn_attention_params_init, then set what differs. Scores are FP32, as in any kernel: |softmax_scale q .
 * k| up to 2^100 is right, and what leaves the range of FP32 is VCATTN_OVERFLOW. Recipes that quantise may store
 * magnitudes below 2^-76 as zero.
 *
 * out[b, i, h, :] = sum_j softmax_j(softmax_scale * q[b, i, h, :] . k[b, j, g, :]) v[b, j, g, :],
 * g = h / (num_heads / num_heads_kv), over the keys j that the mask or the segment admits, with q and k as rope_q and
 * rope_k rotate them. A row that no key is admitted for is 0 with lse -inf. */
typedef struct vcattn_attention_params {
  size_t struct_size;      /* sizeof(vcattn_attention_params), set by init */
  vcattn_tensor q;         /* [batch, seqlen_q, num_heads, head_dim] */
  vcattn_tensor k;         /* [batch, seqlen_kv, num_heads_kv, head_dim]; num_heads_kv divides num_heads */
  vcattn_tensor v;         /* [batch, seqlen_kv, num_heads_kv, head_dim] */
  vcattn_tensor out;       /* [batch, seqlen_q, num_heads, head_dim] */
  float* lse;              /* optional [batch, seqlen_q, num_heads], natural logarithm, of the keys as given, or as
                              rope_k rotates them */
  int64_t lse_stride[3];   /* in elements */
  double softmax_scale;    /* > 0 and at most 2^64; 0 means 1 / sqrt(head_dim) */
  const uint8_t* key_mask; /* optional [batch, seqlen_kv], non-zero admits the key; other keys are never read */
  int64_t key_mask_stride[2];
  /* Packed sequences (batch 1): segment s attends from rows cu_seqlens_q[s] .. cu_seqlens_q[s+1] to the same range of
     cu_seqlens_kv. Both start at 0, never decrease and end at the sequence length. Not together with key_mask. */
  const int64_t* cu_seqlens_q;  /* optional [num_segments + 1] */
  const int64_t* cu_seqlens_kv; /* [num_segments + 1] */
  int64_t num_segments;
  /* Order of the keys within each (batch or segment, head), as vcattn_group writes it; NULL: made in the call. */
  const int32_t* permutation; /* optional [batch, num_heads_kv, seqlen_kv], packed */
  vcattn_video_grid grid;
  vcattn_recipe recipe;
  int32_t backend;     /* vcattn_backend */
  int32_t memory;      /* vcattn_memory */
  void* stream;        /* CUDA: a cudaStream_t; NULL is the default stream */
  int32_t num_threads; /* CPU: at most; 0: as many as the process may use */
  uint32_t flags;
  vcattn_rope rope_q, rope_k; /* optional; zero: q, or k, is taken as it is */
} vcattn_attention_params;

/* Zeroes `params`, sets struct_size and the recipe `accurate`. */
VCATTN_API void vcattn_attention_params_init(vcattn_attention_params* params);

VCATTN_API vcattn_code vcattn_attention_workspace_size(const vcattn_attention_params* params, size_t* bytes,
                                                       vcattn_message* message);

VCATTN_API vcattn_code vcattn_attention(const vcattn_attention_params* params, void* workspace, size_t workspace_bytes,
                                        vcattn_message* message);

/* Up to how many queries or keys BF16 attention is the faster choice: measured on the back end's card, this call and
 * BF16 attention as whole calls on the same shape. Calls that small are served all the same: who calls chooses.
 * Follows the recipe, head_dim, and whether a permutation is given (else the call groups), not the lengths in `params`,
 * which must be those of a whole call all the same. INT64_MAX: at no length that was tried (32,768). 0 where nothing
 * was measured: the CPU's back end is a reference. */
VCATTN_API vcattn_code vcattn_break_even_seqlen(const vcattn_attention_params* params, int64_t* seqlen,
                                                vcattn_message* message);

/* ---- grouping ----------------------------------------------------------------------------------------------- */

/* Computes the order that params->recipe.v_order asks for, from params->v alone (q, k and out are not read).
 * permutation: [batch, num_heads_kv, seqlen_kv]; entry i is the token at position i, numbered within its segment; with
 *   a key mask the admitted tokens come first and the rest of the row is -1.
 * centroids: optional [segments or batch, num_heads_kv, clusters, head_dim]; read first when `warm`, then written: 0
 * beyond the clusters that the tokens fill. */
VCATTN_API vcattn_code vcattn_group_workspace_size(const vcattn_attention_params* params, size_t* bytes,
                                                   vcattn_message* message);
VCATTN_API vcattn_code vcattn_group(const vcattn_attention_params* params, int32_t warm, float* centroids,
                                    int32_t* permutation, void* workspace, size_t workspace_bytes,
                                    vcattn_message* message);

/* ---- schedule: which denoising steps smooth and regroup -------------------------------------------------------- */

typedef enum vcattn_schedule_kind {
  VCATTN_SCHEDULE_FIRST_QUARTER = 0,   /* the paper's: the first ceil(n / 4) steps */
  VCATTN_SCHEDULE_UNIFORM_QUARTER = 1, /* ceil(n / 4) steps spread evenly */
  VCATTN_SCHEDULE_EVERY_STEP = 2,
  VCATTN_SCHEDULE_NEVER = 3
} vcattn_schedule_kind;

typedef struct vcattn_schedule {
  int32_t kind;      /* vcattn_schedule_kind */
  int32_t num_steps; /* n >= 1 */
  int32_t reuse;     /* adjacent smoothed steps that share one permutation; 0: 4, or 2 where n <= 8 */
} vcattn_schedule;

typedef struct vcattn_schedule_step {
  int32_t smooth;  /* subtract block means in this step */
  int32_t regroup; /* compute a permutation in this step */
  int32_t warm;    /* start it from the previous centroids */
} vcattn_schedule_step;

VCATTN_API vcattn_code vcattn_schedule_at(const vcattn_schedule* schedule, int32_t step, vcattn_schedule_step* result,
                                          vcattn_message* message);

/* ---- build and machine --------------------------------------------------------------------------------------- */

VCATTN_API const char* vcattn_version(void);
/* Back ends in order of preference, by index from 0; returns NULL past the last. `reason` says what it runs on, or why
   it cannot run here. */
VCATTN_API const char* vcattn_backend_info(int32_t index, int32_t* available, vcattn_message* reason);

#ifdef __cplusplus
}
#endif
#endif /* VCATTN_VCATTN_H_ */
