"""Triton kernels of the grouped low-rank delta: shrink (x A^T) and expand (out += scale * h B).

Import this module only to launch: it needs Triton. Under TRITON_INTERPRET=1 at first import the kernels run
on CPU tensors in Triton's interpreter. They use Triton's built-in operations only, none of its library
written in Triton itself, so this holds even if Triton was first imported without that setting.

Rows are gathered and scattered through `row_order`; a tile is up to BLOCK_M rows of one slot
(`RowGroups.tiles`), so slots without rows and rows without a slot have no program at all. Every output
element and every partial sum belongs to exactly one program: no atomics, the same bits on every run.

Shape legend: N token rows, P rows that have a slot, T tiles, S slots, R largest rank of the stack, K input
features, O output features, Z split of K.
"""

import torch
import triton
import triton.language as tl

from opentinker_kernels.grouping import RowGroups
from opentinker_kernels.weights import StackedSlots

SUPPORTED_DTYPES = (torch.float32, torch.float16, torch.bfloat16)

# Programs worth having in flight: about two for each multiprocessor of a large GPU.
_TARGET_PROGRAMS = 256
_MAX_SPLIT_K = 8


@triton.jit
def shrink_kernel(
    x_ptr,
    a_ptr,
    h_ptr,
    row_order_ptr,
    tile_slot_ptr,
    tile_start_ptr,
    tile_rows_ptr,
    rank_ptr,
    num_in,
    num_sorted_rows,
    max_rank,
    x_row_stride,
    a_slot_stride,
    a_rank_stride,
    BLOCK_M: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SPLIT_K: tl.constexpr,
    DOT_DTYPE: tl.constexpr,
    DOT_PRECISION: tl.constexpr,
):
    """h[z, p, r] = sum over the z-th share of k of x[row_order[p], k] * A[slot, r, k], float32.

    Grid (T, cdiv(R, BLOCK_R), SPLIT_K). A program owns BLOCK_M sorted rows x BLOCK_R ranks of one partial
    sum and walks every SPLIT_K-th block of BLOCK_K input features. Ranks at or above the slot's own are
    neither read nor written.
    """
    tile = tl.program_id(0)
    split = tl.program_id(2)
    slot = tl.load(tile_slot_ptr + tile).to(tl.int64)
    start = tl.load(tile_start_ptr + tile)
    num_rows = tl.load(tile_rows_ptr + tile)
    rank = tl.load(rank_ptr + slot)
    if tl.program_id(1) * BLOCK_R >= rank:
        return

    m = tl.arange(0, BLOCK_M)
    r = tl.program_id(1) * BLOCK_R + tl.arange(0, BLOCK_R)
    k = tl.arange(0, BLOCK_K)
    row = tl.load(row_order_ptr + start + m, mask=m < num_rows, other=0)
    x_ptrs = x_ptr + row[:, None] * x_row_stride
    a_ptrs = a_ptr + slot * a_slot_stride + r[None, :] * a_rank_stride

    acc = tl.full((BLOCK_M, BLOCK_R), 0.0, tl.float32)
    for k_start in range(split * BLOCK_K, num_in, BLOCK_K * SPLIT_K):
        in_k = k_start + k < num_in
        x = tl.load(x_ptrs + (k_start + k)[None, :], mask=(m < num_rows)[:, None] & in_k[None, :], other=0.0)
        a = tl.load(a_ptrs + (k_start + k)[:, None], mask=(r < rank)[None, :] & in_k[:, None], other=0.0)
        acc += tl.dot(x.to(DOT_DTYPE), a.to(DOT_DTYPE), input_precision=DOT_PRECISION)

    h_row = split.to(tl.int64) * num_sorted_rows + start + m
    tl.store(h_ptr + h_row[:, None] * max_rank + r[None, :], acc, mask=(m < num_rows)[:, None] & (r < rank)[None, :])


@triton.jit
def expand_kernel(
    h_ptr,
    b_ptr,
    out_ptr,
    row_order_ptr,
    tile_slot_ptr,
    tile_start_ptr,
    tile_rows_ptr,
    rank_ptr,
    scale_ptr,
    num_out,
    num_sorted_rows,
    max_rank,
    out_row_stride,
    b_slot_stride,
    b_rank_stride,
    BLOCK_M: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_O: tl.constexpr,
    SPLIT_K: tl.constexpr,
    DOT_PRECISION: tl.constexpr,
):
    """out[row_order[p], o] += scale[slot] * sum over r < rank of (sum over z of h[z, p, r]) * B[slot, r, o].

    Grid (T, cdiv(O, BLOCK_O)). A program owns BLOCK_M rows x BLOCK_O columns of the output: it sums the
    SPLIT_K partials, walks the slot's ranks in blocks of BLOCK_R, and reads and writes its outputs once. The
    product stays in float32: h is not rounded to the dtype of B.
    """
    tile = tl.program_id(0)
    slot = tl.load(tile_slot_ptr + tile).to(tl.int64)
    start = tl.load(tile_start_ptr + tile)
    num_rows = tl.load(tile_rows_ptr + tile)
    rank = tl.load(rank_ptr + slot)
    if rank == 0:
        return

    m = tl.arange(0, BLOCK_M)
    o = tl.program_id(1) * BLOCK_O + tl.arange(0, BLOCK_O)
    in_m = m < num_rows
    in_o = o < num_out
    acc = tl.full((BLOCK_M, BLOCK_O), 0.0, tl.float32)
    for r_start in range(0, rank, BLOCK_R):
        r = r_start + tl.arange(0, BLOCK_R)
        in_r = r < rank
        h = tl.full((BLOCK_M, BLOCK_R), 0.0, tl.float32)
        for split in tl.static_range(SPLIT_K):
            h_row = (start + m).to(tl.int64) + split * num_sorted_rows
            h += tl.load(h_ptr + h_row[:, None] * max_rank + r[None, :], mask=in_m[:, None] & in_r[None, :], other=0.0)
        b = tl.load(
            b_ptr + slot * b_slot_stride + r[:, None] * b_rank_stride + o[None, :],
            mask=in_r[:, None] & in_o[None, :],
            other=0.0,
        )
        acc += tl.dot(h, b.to(tl.float32), input_precision=DOT_PRECISION)

    row = tl.load(row_order_ptr + start + m, mask=in_m, other=0)
    out_ptrs = out_ptr + row[:, None] * out_row_stride + o[None, :]
    mask = in_m[:, None] & in_o[None, :]
    out = tl.load(out_ptrs, mask=mask, other=0.0).to(tl.float32)
    acc = out + tl.load(scale_ptr + slot) * acc
    tl.store(out_ptrs, acc.to(out_ptr.dtype.element_ty), mask=mask)


def is_interpreted() -> bool:
    """Whether the kernels run in Triton's interpreter, on tensors of any device."""
    return not isinstance(shrink_kernel, triton.JITFunction)


def add_delta_(out_NO: torch.Tensor, x_NK: torch.Tensor, stack: StackedSlots, groups: RowGroups) -> None:
    """Add every row's delta to `out_NO` in place. Features of each row are adjacent (last stride 1).

    The slots' ranks and scales are read on the device, so a launch never waits for the host.
    """
    num_sorted_rows = groups.row_order_P.shape[0]
    num_in, num_out, max_rank = x_NK.shape[1], out_NO.shape[1], stack.max_rank
    assert x_NK.stride(1) == 1 and out_NO.stride(1) == 1
    if groups.is_empty:
        return
    block_m = 16 if max(groups.counts) <= 16 else 32 if max(groups.counts) <= 64 else 64
    block_r = min(max(16, triton.next_power_of_2(max_rank)), 64)
    block_k = 64
    block_o = 128
    tiles = groups.tiles(block_m)
    num_rank_blocks = triton.cdiv(max_rank, block_r)
    split_k = _split_k(tiles.num_tiles * num_rank_blocks, triton.cdiv(num_in, block_k))
    h_ZPR = torch.empty(split_k, num_sorted_rows, max_rank, dtype=torch.float32, device=x_NK.device)

    # Equal 16-bit dtypes multiply on the tensor cores as they are; the interpreter's dot is wrong on bfloat16.
    half = x_NK.dtype == stack.A_SRK.dtype and x_NK.dtype != torch.float32 and not is_interpreted()
    dot_dtype = {torch.float16: tl.float16, torch.bfloat16: tl.bfloat16}[x_NK.dtype] if half else tl.float32
    shrink_kernel[(tiles.num_tiles, num_rank_blocks, split_k)](
        x_NK,
        stack.A_SRK,
        h_ZPR,
        groups.row_order_P,
        tiles.slot_T,
        tiles.start_T,
        tiles.rows_T,
        stack.rank_S,
        num_in,
        num_sorted_rows,
        max_rank,
        x_NK.stride(0),
        stack.A_SRK.stride(0),
        stack.A_SRK.stride(1),
        BLOCK_M=block_m,
        BLOCK_R=block_r,
        BLOCK_K=block_k,
        SPLIT_K=split_k,
        DOT_DTYPE=dot_dtype,
        DOT_PRECISION="ieee",
        num_stages=2,
    )
    expand_kernel[(tiles.num_tiles, triton.cdiv(num_out, block_o))](
        h_ZPR,
        stack.B_SRO,
        out_NO,
        groups.row_order_P,
        tiles.slot_T,
        tiles.start_T,
        tiles.rows_T,
        stack.rank_S,
        stack.scale_S,
        num_out,
        num_sorted_rows,
        max_rank,
        out_NO.stride(0),
        stack.B_SRO.stride(0),
        stack.B_SRO.stride(1),
        BLOCK_M=block_m,
        BLOCK_R=block_r,
        BLOCK_O=block_o,
        SPLIT_K=split_k,
        # One walk over the ranks as a rule: nothing to overlap, so shared memory stays small.
        num_stages=1,
        # A 16-bit B is exact in tf32, and h keeps more bits there than in bfloat16.
        DOT_PRECISION="ieee" if stack.B_SRO.dtype == torch.float32 else "tf32",
    )


def _split_k(num_programs: int, num_k_blocks: int) -> int:
    """Shares of the input features: more where few rows leave the device idle, a power of two."""
    split_k = 1
    while split_k < _MAX_SPLIT_K and num_programs * split_k < _TARGET_PROGRAMS and 2 * split_k <= num_k_blocks:
        split_k *= 2
    return split_k
