import torch, sys
from torch.nn.attention import sdpa_kernel, SDPBackend
for n, h in ((75600, 8), (75600, 40), (32760, 40), (4608, 24)):
    q, k, v = (torch.randn(1, h, n, 128, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
        f = lambda: torch.nn.functional.scaled_dot_product_attention(q, k, v)
        f(); f(); torch.cuda.synchronize()
        ts = []
        for _ in range(7):
            a, b = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            a.record(); f(); b.record(); torch.cuda.synchronize(); ts.append(a.elapsed_time(b))
    ms = sorted(ts)[len(ts) // 2]
    print(f"cuDNN BF16 N={n} H={h}: {ms:.3f} ms {4 * h * n * n * 128 / ms / 1e9:.1f} TFLOP/s", flush=True)
