"""Whether this processor gains from bfloat16: one convolution, forward and backward, in both types.

python benchmarks/bf16.py
"""

import time
from pathlib import Path

import torch
from torch import nn

FLAGS = ("avx2", "avx512f", "avx512_bf16", "amx_bf16")


def milliseconds(dtype: torch.dtype, inside: int, outside: int, side: int) -> float:
    conv = nn.Conv2d(inside, outside, 3, padding=1).to(dtype).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    x = (
        torch.randn(64, inside, side, side, dtype=dtype)
        .to(memory_format=torch.channels_last)
        .requires_grad_()
    )
    best = float("inf")
    for _ in range(10):
        began = time.perf_counter()
        conv(x).sum().backward()
        best = min(best, time.perf_counter() - began)
    return best * 1e3


def main() -> None:
    torch.set_num_threads(1)
    info = Path("/proc/cpuinfo")
    found = info.read_text().split() if info.exists() else []
    print("processor:", ", ".join(f"{flag} {'yes' if flag in found else 'no'}" for flag in FLAGS))
    for inside, outside, side in ((32, 64, 16), (64, 128, 16), (128, 256, 8)):
        fp32, bf16 = (milliseconds(dtype, inside, outside, side) for dtype in (torch.float32, torch.bfloat16))
        times = f"fp32 {fp32:6.1f} ms, bf16 {bf16:6.1f} ms: {fp32 / bf16:.2f} times as fast"
        print(f"conv {inside:3} -> {outside:3} on {side:2}x{side:2}: {times}")


if __name__ == "__main__":
    main()
