"""The Triton kernels equal the oracle: in the interpreter on the CPU, compiled where there is a GPU."""

import subprocess
import sys

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from opentinker_kernels import group_rows, lora_delta_

triton = pytest.importorskip("triton")

# float32 accumulation throughout; only the final sum is rounded to the dtype. On a GPU the expand multiplies
# 16-bit factors in tf32.
TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}
DTYPES = [torch.float32, torch.float16, torch.bfloat16]

dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=str)
interpreted = pytest.mark.skipif(torch.cuda.is_available(), reason="the kernels are compiled here: the gpu tests run")


@pytest.fixture(scope="session")
def kernels():
    from opentinker_kernels import triton_kernels

    return triton_kernels


def check(kernels, case, **stack):
    out_NO = case.out_NO.clone()
    kernels.add_delta_(out_NO, case.x_NK, case.stack(**stack), case.groups)
    tolerance = TOLERANCE[case.x_NK.dtype]
    torch.testing.assert_close(out_NO.float(), case.expected_NO, rtol=tolerance, atol=tolerance)
    base_N = case.groups.slot_of_row_N == -1
    assert torch.equal(out_NO[base_N], case.out_NO[base_N])


@interpreted
@dtypes
def test_random_cases_equal_the_oracle(kernels, make_random, dtype):
    assert kernels.is_interpreted()
    for seed in range(80):
        check(kernels, make_random(seed, dtype=dtype))


@interpreted
@settings(max_examples=60, deadline=None)
@given(
    slot_of_row=st.lists(st.integers(-1, 3), min_size=1, max_size=40),
    ranks=st.lists(st.one_of(st.none(), st.integers(0, 40)), min_size=3, max_size=3),
    num_in=st.integers(1, 150),
    num_out=st.integers(1, 150),
    dtype=st.sampled_from(DTYPES),
    seed=st.integers(0, 2**31),
)
def test_any_rows_and_ranks_equal_the_oracle(kernels, make, slot_of_row, ranks, num_in, num_out, dtype, seed):
    check(
        kernels,
        make(slot_of_row=slot_of_row, ranks=[*ranks, 3], num_in=num_in, num_out=num_out, dtype=dtype, seed=seed),
    )


@interpreted
@dtypes
@pytest.mark.parametrize("num_rows", [1, 16, 17, 65, 150])
def test_every_tile_height_equals_the_oracle(kernels, make, dtype, num_rows):
    slot_of_row = [n % 2 if n % 11 else -1 for n in range(num_rows)]
    check(kernels, make(slot_of_row=slot_of_row, ranks=[5, 70], num_in=96, num_out=130, dtype=dtype), max_rank=70)


@interpreted
def test_wide_input_is_split_and_gives_the_same_bits_every_time(kernels, make):
    case = make(slot_of_row=[0, 1, 0, -1], ranks=[8, 16], num_in=900, num_out=40)
    assert kernels._split_k(2, 15) == 8
    check(kernels, case)
    outs = []
    for _ in range(2):
        outs.append(case.out_NO.clone())
        kernels.add_delta_(outs[-1], case.x_NK, case.stack(), case.groups)
    assert torch.equal(*outs)


@interpreted
@dtypes
def test_garbage_beyond_a_slots_rank_is_never_read(kernels, make, dtype):
    case = make(slot_of_row=[0, 1, 0, 2, -1], ranks=[3, 20, None], num_in=40, num_out=50, dtype=dtype)
    stack = case.stack(max_rank=24)
    for slot, rank in enumerate(stack.ranks):
        stack.A_SRK[slot, rank:] = float("nan")
        stack.B_SRO[slot, rank:] = float("nan")
    out_NO = case.out_NO.clone()
    kernels.add_delta_(out_NO, case.x_NK, stack, case.groups)
    tolerance = TOLERANCE[dtype]
    torch.testing.assert_close(out_NO.float(), case.expected_NO, rtol=tolerance, atol=tolerance)
    assert torch.equal(out_NO[3:], case.out_NO[3:])


@interpreted
def test_non_finite_slot_does_not_reach_other_rows(kernels, make):
    slot_of_row = [0, 1, -1, 2, 1, 0]
    case = make(slot_of_row=slot_of_row, ranks=[3, 3, 2], num_in=20, num_out=30)
    clean_NO, dirty_NO = case.out_NO.clone(), case.out_NO.clone()
    kernels.add_delta_(clean_NO, case.x_NK, case.stack(), case.groups)
    case.own[1].A_RK.fill_(float("nan"))
    kernels.add_delta_(dirty_NO, case.x_NK, case.stack(), case.groups)
    touched = torch.tensor([slot == 1 for slot in slot_of_row])
    assert dirty_NO[touched].isnan().all() and torch.equal(dirty_NO[~touched], clean_NO[~touched])


@interpreted
def test_rows_and_columns_of_wider_tensors(kernels, make):
    case = make(slot_of_row=[1, 0, -1, 1, 1], ranks=[4, 9], num_in=33, num_out=70)
    wide_x, wide_out = torch.full((5, 90), float("nan")), torch.zeros(5, 100)
    wide_x[:, 20:53], wide_out[:, 10:80] = case.x_NK, case.out_NO
    kernels.add_delta_(wide_out[:, 10:80], wide_x[:, 20:53], case.stack(), case.groups)
    torch.testing.assert_close(wide_out[:, 10:80], case.expected_NO, rtol=1e-5, atol=1e-5)
    assert wide_out[:, :10].eq(0).all() and wide_out[:, 80:].eq(0).all()


@interpreted
def test_no_grouped_row_launches_nothing(kernels, make, monkeypatch):
    case = make(slot_of_row=[-1, -1], ranks=[4], num_in=8, num_out=8)
    monkeypatch.setattr(kernels, "shrink_kernel", None)
    out_NO = case.out_NO.clone()
    kernels.add_delta_(out_NO, case.x_NK, case.stack(), case.groups)
    assert torch.equal(out_NO, case.out_NO)


@interpreted
def test_torch_path_and_kernels_agree(kernels, make_random):
    for seed in range(1000, 1020):
        case = make_random(seed, dtype=torch.float32)
        ours, theirs = case.out_NO.clone(), case.out_NO.clone()
        kernels.add_delta_(ours, case.x_NK, case.stack(), case.groups)
        lora_delta_(theirs, case.x_NK, case.stack(), case.groups)
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)


COMPILE = """
import warnings
warnings.simplefilter("ignore")
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
import triton.language as tl
from opentinker_kernels import triton_kernels as kernels

assert not kernels.is_interpreted()
POINTERS = {"row_order_ptr": "*i64", "tile_slot_ptr": "*i32", "tile_start_ptr": "*i32", "tile_rows_ptr": "*i32",
            "rank_ptr": "*i32", "scale_ptr": "*fp32", "h_ptr": "*fp32"}
DOT = {"fp32": tl.float32, "fp16": tl.float16, "bf16": tl.bfloat16}
for arch in (80, 90):
    for dtype, block_m in (("fp32", 64), ("fp16", 16), ("bf16", 16), ("bf16", 64)):
        tiling = dict(BLOCK_M=block_m, BLOCK_R=block_m, SPLIT_K=8 if block_m == 16 else 1)
        for kernel, constants in (
            (kernels.shrink_kernel, tiling | dict(BLOCK_K=64, DOT_DTYPE=DOT[dtype], DOT_PRECISION="ieee")),
            (kernels.expand_kernel,
             tiling | dict(BLOCK_O=128, DOT_PRECISION="ieee" if dtype == "fp32" else "tf32")),
        ):
            signature = {
                name: "constexpr" if name in constants else POINTERS.get(name, "*" + dtype)
                if name.endswith("_ptr") else "i32"
                for name in kernel.arg_names
            }
            source = ASTSource(fn=kernel, signature=signature, constexprs=constants)
            stages = {"num_stages": 2 if kernel is kernels.shrink_kernel else 1}
            built = triton.compile(source, target=GPUTarget("cuda", arch, 32), options=stages)
            # The smallest limit of any CUDA device that these binaries' generations have.
            assert built.asm["cubin"] and built.metadata.shared <= 99 * 1024, built.metadata.shared
            print(arch, dtype, block_m, kernel.__name__, built.metadata.shared)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="Triton compiles for CUDA on Linux only")
def test_kernels_compile_ahead_of_time_for_sm80_and_sm90(tmp_path, monkeypatch):
    # In a process of its own: in this one the kernels are interpreted.
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    done = subprocess.run([sys.executable, "-c", COMPILE], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    assert len(done.stdout.splitlines()) == 16


# --- on a GPU ----------------------------------------------------------------------------------------------


def gpu(test):
    reason = "needs a CUDA device"
    return pytest.mark.gpu(pytest.mark.skipif(not torch.cuda.is_available(), reason=reason)(test))


@gpu
@dtypes
def test_random_cases_equal_the_oracle_on_cuda(kernels, make_random, dtype):
    assert not kernels.is_interpreted()
    torch.backends.cuda.matmul.allow_tf32 = False
    for seed in range(300):
        check(kernels, make_random(seed, dtype=dtype, device="cuda", max_rows=300))


@gpu
@dtypes
def test_dispatch_takes_the_kernels_on_cuda_and_equals_the_oracle(kernels, make, monkeypatch, dtype):
    case = make(
        slot_of_row=[0, 1, -1, 1, 0, 2], ranks=[8, 16, None], num_in=576, num_out=1536, dtype=dtype, device="cuda"
    )
    launched = []
    real = kernels.add_delta_
    monkeypatch.setattr(kernels, "add_delta_", lambda *args: (launched.append(1), real(*args)))
    out_NO = lora_delta_(case.out_NO.clone(), case.x_NK, case.stack(), case.groups)
    assert launched
    torch.testing.assert_close(out_NO.float(), case.expected_NO, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


@gpu
def test_grouping_for_cuda_builds_from_a_host_list():
    groups = group_rows([0, -1, 1], 2, device="cuda")
    assert groups.device.type == "cuda" and groups.tiles(16).slot_T.device.type == "cuda"
