"""The launcher tells apart whatever Triton compiles a kernel for."""

from __future__ import annotations

import threading

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from blocksparse_moe import sdd
from blocksparse_moe_kernels import Topology
from blocksparse_moe_kernels.launch import on_device
from tests.support import DEVICE, HAS_CUDA

if HAS_CUDA:
    import triton
    import triton.language as tl

    @triton.jit
    def add_kernel(X, Out, amount, size, BLOCK: tl.constexpr):
        offs = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
        tl.store(Out + offs, tl.load(X + offs, mask=offs < size) + amount, mask=offs < size)


def specialisation(args: tuple) -> list:
    """Triton's own, of arguments of a kernel."""
    from triton._C.libtriton import native_specialize_impl
    from triton.backends.nvidia.compiler import CUDABackend

    return [native_specialize_impl(CUDABackend, arg, False, True, True) for arg in args]


def argument(kind: str, number: int):
    if kind == "integer":
        return number
    if kind == "none":
        return None
    tensor = torch.empty(4096, dtype=torch.float16 if number % 3 else torch.bfloat16, device=DEVICE)[number % 17 :]
    if kind == "tensor":
        return tensor
    from blocksparse_moe_kernels.triton.descriptors import describe

    described = describe(tensor[-2048:].view(64, 32), 16 << number % 2, 16)
    if kind == "descriptor":
        return described
    from blocksparse_moe_kernels.triton.gluon_rings import SwizzledDescriptor, gl

    layout = gl.NVMMASharedLayout(swizzle_byte_width=32 * (number % 5 > 1), element_bitwidth=16, rank=2)
    return SwizzledDescriptor(described.base, *described.form[:3], layout)


numbers = st.sampled_from([0, 1, 2, 3, 8, 16, 17, 48, 2**31 - 1, 2**31 + 1, 2**31 + 16, 2**33])
pairs = st.tuples(st.sampled_from(["integer", "tensor", "descriptor", "swizzled", "none"]), numbers, numbers)


@settings(max_examples=200)
@given(st.lists(pairs, max_size=3))
def test_what_triton_tells_apart_is_told_apart(drawn):
    pytest.importorskip("triton.backends.nvidia")
    from blocksparse_moe_kernels.triton.launcher import compiled_for

    some, others = (tuple(argument(pair[0], pair[place]) for pair in drawn) for place in (1, 2))
    if specialisation(some) != specialisation(others):
        assert compiled_for(some) != compiled_for(others)


@given(st.lists(pairs, max_size=3))
def test_the_same_again_is_found_again(drawn):
    """Sizes that change from call to call must not fill the cache: integers count by what Triton makes of them."""
    from blocksparse_moe_kernels.triton.launcher import compiled_for

    some, again = (tuple(argument(kind, number) for kind, number, _ in drawn) for _ in range(2))
    assert compiled_for(some) == compiled_for(again)
    assert compiled_for((5, 48, 2**31 + 3)) == compiled_for((7, 64, 2**40 + 1))


@pytest.mark.gpu
def test_launches_of_every_form():
    """First launches and later ones; addresses, ones, multiples of 16 and long integers in between."""
    from blocksparse_moe_kernels.triton.launcher import launch

    storage = torch.arange(2000, device=DEVICE)
    for _ in range(3):
        for start, amount, size in ((0, 1, 1000), (1, 16, 1), (0, 17, 16), (2, 2**31 + 5, 999), (3, 2**40, 1000), (0, 0, 640)):
            x, out = storage[start : start + 1000], torch.zeros(1000, dtype=torch.int64, device=DEVICE)
            launch(add_kernel, DEVICE, (8,), x, out, amount, size, BLOCK=128)
            assert torch.equal(out[:size], x[:size] + amount) and not out[size:].any()


def test_cuda_is_called_once_in_each_thread_before_it_launches(monkeypatch):
    calls = []

    class Stream:
        def record_event(self) -> None:
            calls.append(threading.get_ident())

    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: Stream())
    device = torch.device("cuda", 0)

    def launches() -> None:
        for _ in range(3):
            with on_device(device), on_device(torch.device("cpu")):
                pass

    threads = [threading.Thread(target=launches) for _ in range(2)]
    for thread in threads:
        thread.start()
        thread.join()
    assert len(calls) == 2


@pytest.mark.gpu
def test_the_first_call_of_a_thread_may_make_a_tensor_map():
    """Autograd's threads may not have called CUDA before; memory from torch's cache needs no call."""
    E, H, F = 4, 256, 512
    topology = Topology.from_counts(torch.full((E,), 300, device=DEVICE), 4 * 300)
    x, w = (torch.randn(shape, device=DEVICE, dtype=torch.bfloat16) for shape in ((4 * 300, H), (E, F, H)))
    expected, found = sdd(x, w, topology, order="rows", backend="triton").values, []
    spare = torch.empty_like(expected)
    del spare  # what the call will be given
    thread = threading.Thread(target=lambda: found.append(sdd(x, w, topology, order="rows", backend="triton").values))
    thread.start()
    thread.join()
    assert torch.equal(found[0], expected)
