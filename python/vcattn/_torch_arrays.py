"""torch tensors in host or CUDA memory, as _call.py describes them to the library. The twin of _numpy_arrays.py.

Imported only where torch is. Nothing here waits for a device or copies from one.
"""

from __future__ import annotations

from contextlib import nullcontext
from types import ModuleType
from typing import Any

import torch
from torch.autograd import forward_ad

from . import _abi, _call
from .errors import InvalidArgumentError, UnsupportedError

_DTYPE_CODES = {torch.bfloat16: _abi.BF16, torch.float16: _abi.FP16, torch.float32: _abi.FP32}
_DTYPE_NAMES = "bfloat16, float16 or float32"
NO_BACKWARD = "there is no backward pass: call under torch.no_grad() or torch.inference_mode()"
_NO_CHANGE = nullcontext()
PLAIN = (torch.Tensor, torch.nn.Parameter)

# What torch.cuda.current_stream(i).cuda_stream and torch.cuda.current_device() come to, without the objects they make:
# several microseconds a call. They are what torch's own compiled code calls.
_current_stream = getattr(torch._C, "_cuda_getCurrentRawStream", None) or (
    lambda index: torch.cuda.current_stream(index).cuda_stream
)
_current_device = getattr(torch._C, "_cuda_getDevice", None) or torch.cuda.current_device

# Who listens to torch's operators.
_transforms = torch._C._functorch.peek_interpreter_stack
_modes = torch._C._len_torch_dispatch_stack
_key_included = torch._C._dispatch_tls_is_dispatch_key_included
_PRE_DISPATCH = torch._C.DispatchKey.PreDispatch
_tracing = torch._C._get_tracing_state

_NOWHERE = _abi.WORKSPACE_ALIGNMENT  # an address for tensors without elements


def describe(name: str, x: torch.Tensor) -> tuple[int, int, tuple[int, ...], tuple[int, ...]]:
    """(address, vcattn_dtype, shape, strides in elements) of `x`; raises InvalidArgumentError for other dtypes."""
    code = _DTYPE_CODES.get(x.dtype)
    if code is None:
        raise InvalidArgumentError(f"{name}: dtype is {_DTYPE_NAMES}; found {str(x.dtype).removeprefix('torch.')}")
    try:
        return x.data_ptr() or _without_memory(name, x), code, x.shape, x.stride()
    except InvalidArgumentError:
        raise
    except RuntimeError as error:  # sparse tensors, and those that stand in for others
        if x.layout != torch.strided:
            raise InvalidArgumentError(f"{name}: a dense tensor; found {x.layout}") from error
        raise InvalidArgumentError(f"{name}: a tensor with memory of its own: {error}") from error


def _without_memory(name: str, x: torch.Tensor) -> int:
    """The address of a tensor that has none: any, for the library to refuse what is empty by its own line."""
    if x.numel() != 0 and not x.is_meta:
        raise InvalidArgumentError(f"{name}: a tensor with memory of its own; found none")
    return _NOWHERE


def describe_mask(mask: Any, like: torch.Tensor) -> tuple[int, tuple[int, ...], tuple[int, ...]]:
    """(address, shape, strides) of a key-padding mask of bool or uint8 on the device of `like`."""
    if not isinstance(mask, torch.Tensor) or mask.dtype not in (torch.bool, torch.uint8):
        raise InvalidArgumentError(
            f"key_padding_mask: a bool tensor, True admits the key; found {getattr(mask, 'dtype', type(mask))}"
        )
    check_same_place("key_padding_mask", mask, like)
    if mask.layout != torch.strided:
        raise InvalidArgumentError(f"key_padding_mask: a dense tensor; found {mask.layout}")
    return mask.data_ptr(), mask.shape, mask.stride()


def describe_table(name: str, table: Any, like: torch.Tensor) -> tuple[int, tuple[int, ...], tuple[int, ...]]:
    """(address, shape, strides) of a float32 table on the device of `like`."""
    if not isinstance(table, torch.Tensor) or table.dtype != torch.float32:
        raise InvalidArgumentError(f"{name}: a float32 tensor; found {getattr(table, 'dtype', type(table))}")
    check_same_place(name, table, like)
    if table.layout != torch.strided or table.is_neg():
        raise InvalidArgumentError(f"{name}: a dense tensor whose memory holds its values; see torch.resolve_neg")
    return table.data_ptr(), tuple(table.shape), table.stride()


def check_same_place(name: str, x: Any, like: torch.Tensor) -> None:
    """Raises InvalidArgumentError unless `x` is a tensor on the device of `like`."""
    if not isinstance(x, torch.Tensor):
        raise InvalidArgumentError(f"{name}: a torch tensor like q; found {type(x).__name__}")
    if x.device != like.device:
        raise InvalidArgumentError(f"{name}: on {like.device} like q; found {x.device}")


def check_differentiable(*tensors: torch.Tensor) -> None:
    """Raises UnsupportedError where a gradient would be lost."""
    if needs_gradient(*tensors):
        raise UnsupportedError(NO_BACKWARD)


def needs_gradient(*tensors: torch.Tensor) -> bool:
    """Whether torch would record the call for a backward pass, or carry tangents through it."""
    if torch.is_grad_enabled():
        for x in tensors:
            if x.requires_grad:
                return True
    return forward_ad._current_level >= 0 and any(forward_ad.unpack_dual(x).tangent is not None for x in tensors)


def in_transform() -> bool:
    """Whether the call is inside torch.vmap, torch.func.grad or the like, which see tensors that have no memory."""
    return _transforms() is not None


def check_not_batched(name: str, tensors: list[torch.Tensor]) -> None:
    """Raises UnsupportedError for tensors that torch.vmap batches: it cannot take a list of them apart."""
    for x in tensors:
        if torch._C._functorch.is_batchedtensor(x):
            raise UnsupportedError(f"{name}: batched {name} tables inside torch.vmap; give them a batch axis instead")


def empty(shape: tuple[int, ...], like: torch.Tensor) -> torch.Tensor:
    """Dense, of the dtype and device of `like`, contents undefined."""
    if shape == like.shape:  # half a microsecond less
        return torch.empty_like(like, memory_format=torch.contiguous_format)
    return like.new_empty(shape)


def empty_float32(shape: tuple[int, ...], like: torch.Tensor) -> tuple[torch.Tensor, int]:
    """Dense float32 on the device of `like`, and its address."""
    x = like.new_empty(shape, dtype=torch.float32)
    return x, x.data_ptr()


def empty_int32(shape: tuple[int, ...], like: torch.Tensor) -> tuple[torch.Tensor, int]:
    """Dense int32 on the device of `like`, and its address."""
    x = like.new_empty(shape, dtype=torch.int32)
    return x, x.data_ptr()


def copy(x: torch.Tensor) -> tuple[torch.Tensor, int]:
    """A dense copy on the same device, and its address."""
    x = x.clone(memory_format=torch.contiguous_format)
    return x, x.data_ptr()


def swap_heads(x: torch.Tensor) -> torch.Tensor:
    """[batch, seqlen, num_heads, head_dim] seen as [batch, num_heads, seqlen, head_dim]."""
    return x.transpose(1, 2)


def address(x: torch.Tensor) -> int:
    """Address of the first element."""
    return x.data_ptr()


def workspace(size: int, like: torch.Tensor) -> tuple[torch.Tensor, int]:
    """Memory of at least `size` bytes: its owner, and the first address aligned as the library asks.

    It may be freed as soon as the call returns: torch's allocator hands CUDA memory on in the order of the stream.
    """
    owner = like.new_empty(size + _abi.WORKSPACE_ALIGNMENT, dtype=torch.uint8)
    return owner, -(-owner.data_ptr() // _abi.WORKSPACE_ALIGNMENT) * _abi.WORKSPACE_ALIGNMENT


def place(like: torch.Tensor) -> tuple[int, int]:
    """(vcattn_memory, stream) of a call on tensors like this one: CUDA calls go to torch's current stream."""
    if like.is_cuda:
        return _abi.MEMORY_CUDA, _current_stream(like.get_device())
    if like.is_cpu:
        return _abi.MEMORY_HOST, 0
    raise UnsupportedError(f"tensors lie on cpu or cuda; found {like.device}")


def current_device(like: torch.Tensor) -> Any:
    """A context in which the device of `like` is current."""
    if not like.is_cuda or like.get_device() == _current_device():
        return _NO_CHANGE
    return torch.cuda.device(like.get_device())


def identity(x: torch.Tensor) -> tuple[Any, ...]:
    """What must agree for a state to be reused: where the tensor lies."""
    return (x.device.type, x.device.index)


def check_dense(name: str, x: torch.Tensor, dtype: torch.dtype, shape: tuple[int, ...], like: torch.Tensor) -> None:
    """Raises InvalidArgumentError unless `x` is of this dtype and shape on the device of `like`."""
    check_same_place(name, x, like)
    if x.dtype != dtype or tuple(x.shape) != shape:
        raise InvalidArgumentError(f"{name}: {dtype} {shape}; found {x.dtype} {tuple(x.shape)}")


def calls(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None) -> ModuleType:
    """The module whose functions make the calls: the library's own, or torch's dispatcher where somebody listens to it
    (tracing, modes, transforms of functions) or where tensors have no memory to point at or are not what it holds
    (fake and meta tensors, other subclasses, negated views). All lie on the device of q."""
    if torch.compiler.is_compiling():
        return _through_dispatcher()
    if _transforms() is not None or _modes() or _tracing() is not None or _key_included(_PRE_DISPATCH):
        return _through_dispatcher()
    # Spelled out: a loop takes half as long again.
    if type(q) not in PLAIN or type(k) not in PLAIN or type(v) not in PLAIN or not (q.is_cpu or q.is_cuda):
        return _through_dispatcher()
    if q.is_neg() or k.is_neg() or v.is_neg():
        return _through_dispatcher()
    if mask is not None and (type(mask) not in PLAIN or mask.is_neg()):
        return _through_dispatcher()
    return _call


def _through_dispatcher() -> ModuleType:
    from . import torch_op

    return torch_op
