"""The C ABI of include/vcattn/vcattn.h as ctypes: constants, structs and function signatures.

Field names, their order and every constant mirror the header; tests/test_abi.py reads the header and compares.
Nothing here loads the library: see _library.py.
"""

from __future__ import annotations

import ctypes
from ctypes import c_char, c_char_p, c_double, c_float, c_int32, c_int64, c_size_t, c_uint32, c_uint64, c_void_p

VERSION = "0.1.0"  # of the header that this file mirrors

WORKSPACE_ALIGNMENT = 256  # bytes
MAX_HEAD_DIM = 256
MAX_SOFTMAX_SCALE = 2.0**64

OK = 0

BF16, FP16, FP32 = 1, 2, 3

BACKEND_AUTO, BACKEND_CPU, BACKEND_SM90A = 0, 1, 2
BACKENDS = {"auto": BACKEND_AUTO, "cpu": BACKEND_CPU, "sm90a": BACKEND_SM90A}  # by the names of vcattn_backend_info

MEMORY_HOST, MEMORY_CUDA = 0, 1

ALLOW_NONFINITE = 1

ROPE_INTERLEAVED, ROPE_HALF_SPLIT = 1, 2
ROPE_PER_TOKEN, ROPE_PER_AXIS = 0, 1

ORDER_SEQUENCE, ORDER_CUBE, ORDER_KMEANS, ORDER_BALANCED, ORDER_CHAIN = range(5)

SCHEDULE_FIRST_QUARTER, SCHEDULE_UNIFORM_QUARTER, SCHEDULE_EVERY_STEP, SCHEDULE_NEVER = range(4)


class Message(ctypes.Structure):
    """vcattn_message"""

    _fields_ = [("text", c_char * 256)]


class Tensor(ctypes.Structure):
    """vcattn_tensor"""

    _fields_ = [
        ("data", c_void_p),
        ("dtype", c_int32),
        ("reserved", c_int32),
        ("shape", c_int64 * 4),
        ("stride", c_int64 * 4),
    ]


class Grouping(ctypes.Structure):
    """vcattn_grouping"""

    _fields_ = [
        ("clusters", c_int32),
        ("iterations", c_int32),
        ("warm_iterations", c_int32),
        ("seeding", c_int32),
        ("seed", c_uint64),
    ]


class Recipe(ctypes.Structure):
    """vcattn_recipe"""

    _fields_ = [
        ("name", c_char * 32),
        ("qk_format", c_int32),
        ("q_scale_span", c_int32),
        ("k_scale_span", c_int32),
        ("qk_scale_kind", c_int32),
        ("qk_hadamard", c_int32),
        ("k_centred", c_int32),
        ("q_centred", c_int32),
        ("qk_accumulate", c_int32),
        ("p_format", c_int32),
        ("p_phases", c_int32),
        ("row_max", c_int32),
        ("tile_keys", c_int32),
        ("row_sum", c_int32),
        ("p_log2_peak", c_float),
        ("v_format", c_int32),
        ("v_scale_span", c_int32),
        ("v_hadamard", c_int32),
        ("v_order", c_int32),
        ("mean_rows", c_int32),
        ("mean_centred", c_int32),
        ("mean_format", c_int32),
        ("pv_accumulate", c_int32),
        ("promote_keys", c_int32),
        ("grouping", Grouping),
    ]


class VideoGrid(ctypes.Structure):
    """vcattn_video_grid"""

    _fields_ = [("first_token", c_int64), ("frames", c_int64), ("height", c_int64), ("width", c_int64)]


class Rope(ctypes.Structure):
    """vcattn_rope"""

    _fields_ = [
        ("pairing", c_int32),
        ("tables", c_int32),
        ("cos", c_void_p * 3),
        ("sin", c_void_p * 3),
        ("stride", c_int64 * 4),
        ("pairs", c_int64 * 3),
    ]


class AttentionParams(ctypes.Structure):
    """vcattn_attention_params"""

    _fields_ = [
        ("struct_size", c_size_t),
        ("q", Tensor),
        ("k", Tensor),
        ("v", Tensor),
        ("out", Tensor),
        ("lse", c_void_p),
        ("lse_stride", c_int64 * 3),
        ("softmax_scale", c_double),
        ("key_mask", c_void_p),
        ("key_mask_stride", c_int64 * 2),
        ("cu_seqlens_q", c_void_p),
        ("cu_seqlens_kv", c_void_p),
        ("num_segments", c_int64),
        ("permutation", c_void_p),
        ("grid", VideoGrid),
        ("recipe", Recipe),
        ("backend", c_int32),
        ("memory", c_int32),
        ("stream", c_void_p),
        ("num_threads", c_int32),
        ("flags", c_uint32),
        ("rope_q", Rope),
        ("rope_k", Rope),
    ]


class Schedule(ctypes.Structure):
    """vcattn_schedule"""

    _fields_ = [("kind", c_int32), ("num_steps", c_int32), ("reuse", c_int32)]


class ScheduleStep(ctypes.Structure):
    """vcattn_schedule_step"""

    _fields_ = [("smooth", c_int32), ("regroup", c_int32), ("warm", c_int32)]


# Of each function: what it returns and what it takes. Structs are passed by address (ctypes.addressof), which costs a
# tenth of what ctypes.byref with a typed pointer does.
FUNCTIONS: dict[str, tuple[object, list[object]]] = {
    "vcattn_recipe_count": (c_int32, []),
    "vcattn_recipe_name": (c_char_p, [c_int32]),
    "vcattn_recipe_by_name": (c_int32, [c_char_p, c_void_p, c_void_p]),
    "vcattn_recipe_set": (c_int32, [c_void_p, c_char_p, c_char_p, c_void_p]),
    "vcattn_recipe_describe": (c_size_t, [c_void_p, c_char_p, c_size_t]),
    "vcattn_attention_params_init": (None, [c_void_p]),
    "vcattn_attention_workspace_size": (c_int32, [c_void_p, c_void_p, c_void_p]),
    "vcattn_attention": (c_int32, [c_void_p, c_void_p, c_size_t, c_void_p]),
    "vcattn_break_even_seqlen": (c_int32, [c_void_p, c_void_p, c_void_p]),
    "vcattn_group_workspace_size": (c_int32, [c_void_p, c_void_p, c_void_p]),
    "vcattn_group": (c_int32, [c_void_p, c_int32, c_void_p, c_void_p, c_void_p, c_size_t, c_void_p]),
    "vcattn_schedule_at": (c_int32, [c_void_p, c_int32, c_void_p, c_void_p]),
    "vcattn_version": (c_char_p, []),
    "vcattn_backend_info": (c_char_p, [c_int32, c_void_p, c_void_p]),
}
