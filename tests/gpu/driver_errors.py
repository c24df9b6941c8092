"""Cells that make the driver end a rank's CUDA context, or keep its GPU in one kernel for ever."""

# the index is out of range: a check in torch's kernel fails on the GPU
FAILED_ASSERT = """import torch
values = torch.zeros(4, device=device)
index = torch.tensor([9], device=device)
wrong = values[index]
later = values + 1
torch.cuda.synchronize()"""

# a kernel of one instruction, compiled by the driver, that writes to address 16; no code of torch does that
ILLEGAL_ADDRESS = '''import ctypes, torch
ready = torch.zeros(1, device=device)
text = b"""
.version 6.0
.target sm_70
.address_size 64
.visible .entry wild()
{
    .reg .b32 %r1;
    .reg .b64 %rd1;
    mov.u32 %r1, 1;
    mov.u64 %rd1, 16;
    st.global.u32 [%rd1], %r1;
    ret;
}
"""
driver = ctypes.CDLL("libcuda.so.1")
module, function = ctypes.c_void_p(), ctypes.c_void_p()
assert driver.cuModuleLoadData(ctypes.byref(module), ctypes.c_char_p(text)) == 0
assert driver.cuModuleGetFunction(ctypes.byref(function), module, b"wild") == 0
assert driver.cuLaunchKernel(function, 1, 1, 1, 1, 1, 1, 0, None, None, None) == 0
torch.cuda.synchronize()'''

# runs for hours on any GPU, after a tenth of a second in which the rank's sampler sees the cell
ENDLESS_KERNEL = """import os, torch
held = torch.ones(1 << 28, dtype=torch.uint8, device=device)
torch.cuda._sleep(1 << 28)
torch.cuda.synchronize()
torch.cuda._sleep(1 << 45)
print('pid', os.getpid(), flush=True)
torch.cuda.synchronize()"""

WORKS = "import torch\nprint('works', int((torch.ones(4, device=device) * 2).sum().item()))"
