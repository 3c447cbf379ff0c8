# pyright: standard, reportArgumentType=false, reportAssignmentType=false
# pyright: reportCallIssue=false, reportGeneralTypeIssues=false
"""Rows of 16-bit numbers on their way to shared memory, and from a product's layout to global memory.

A program has 4 or 8 warps. Tiles that stay and products have 16 rows of each warp, tiles that stream any number.
"""

from __future__ import annotations

from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import warpgroup_mma

from flexnsa.attention.triton.kernels.gluon import async_load, gluon_constant, gluon_jit


@gluon_constant
def product_layout(columns, warps=4):
    """Return the layout of a product; each warp has 16 rows."""
    return gl.NVMMADistributedLayout([3, 0], [warps, 1], [16, columns, 16])


@gluon_constant
def copy_layout(columns, warps=4):
    """Return the layout in which a thread copies 16 bytes of a row."""
    lanes = columns // 8
    return gl.BlockedLayout([1, 8], [32 // lanes, lanes], [warps, 1], [1, 0])


@gluon_constant
def store_layout(columns, warps=4):
    """Return the layout of a product in which quads of lanes have exchanged columns: a thread has 16 bytes of a row."""
    registers = [[0, 1], [0, 2], [0, 4]]
    column = 32
    while column < columns:
        registers.append([0, column])
        column *= 2
    registers.append([8, 0])
    lanes = [[0, 8], [0, 16], [1, 0], [2, 0], [4, 0]]
    of_warps = [[16, 0], [32, 0], [64, 0]][: warps // 4 + 1]
    return gl.DistributedLinearLayout(registers, lanes, of_warps, [], [16 * warps, columns])


@gluon_jit
def product_with(a, b, layout: gl.constexpr):
    """Issue ``a b^T``."""
    M: gl.constexpr = a.shape[0]
    N: gl.constexpr = b.shape[0]
    zero = gl.zeros([M, N], gl.float32, layout)
    return warpgroup_mma(a, b.permute([1, 0]), zero, use_acc=False, is_async=True)


@gluon_jit
def copy_rows(to, ptr, first, end, stride, WIDTH: gl.constexpr, ANEW: gl.constexpr = False):
    """Begin to copy the rows from ``first`` on; those from ``end`` on are zeros.

    ``ANEW`` computes the offsets of rows each time, in a loop that has too few registers to keep them.
    """
    layout: gl.constexpr = copy_layout(WIDTH, gl.num_warps())
    row = gl.arange(0, to.shape[0], gl.SliceLayout(1, layout))
    column = gl.arange(0, WIDTH, gl.SliceLayout(0, layout))
    ptr += first.to(gl.int64) * stride
    vectors = stride >> 3
    if ANEW:
        vectors = gl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [vectors], gl.int32, False, 1)
    mask = (row < end - first)[:, None] & (column < WIDTH)[None, :]
    async_load(to, ptr + (row * vectors * 8)[:, None] + column[None, :], mask)


@gluon_jit
def copy_gathered(to, ptr, offsets, WIDTH: gl.constexpr):
    """Begin to copy rows, whose offsets are a table in units of 16 bytes; a negative one gives zeros."""
    layout: gl.constexpr = copy_layout(WIDTH)
    offset = offsets.load(gl.SliceLayout(1, layout))
    column = gl.arange(0, WIDTH, gl.SliceLayout(0, layout))
    mask = (offset >= 0)[:, None] & (column < WIDTH)[None, :]
    async_load(to, ptr + (offset * 8)[:, None] + column[None, :], mask)


@gluon_jit
def load_rows(ptr, first, end, stride, WIDTH: gl.constexpr, SWAPPED: gl.constexpr = False):
    """Load the rows from ``first`` on to shared memory, where they stay; those from ``end`` on are zeros."""
    ROWS: gl.constexpr = 16 * gl.num_warps()
    layout: gl.constexpr = copy_layout(WIDTH, gl.num_warps())
    row = first + gl.arange(0, ROWS, gl.SliceLayout(1, layout))
    column = gl.arange(0, WIDTH, gl.SliceLayout(0, layout))
    mask = (row < end)[:, None] & (column < WIDTH)[None, :]
    x = gl.load(ptr + row.to(gl.int64)[:, None] * stride + column[None, :], mask=mask, other=0.0)
    if SWAPPED:
        x = swap_columns(x, WIDTH)
    return gl.allocate_shared_memory(ptr.dtype.element_ty, [ROWS, WIDTH], gl.NVMMASharedLayout(128, 16, 2), x)


@gluon_jit
def store_rows(ptr, first, end, stride, x, WIDTH: gl.constexpr):
    """Store the rows of a product before ``end``."""
    layout: gl.constexpr = store_layout(WIDTH, gl.num_warps())
    x = gl.convert_layout(x.to(ptr.dtype.element_ty), layout)
    row = first + gl.arange(0, x.shape[0], gl.SliceLayout(1, layout))
    column = gl.arange(0, WIDTH, gl.SliceLayout(0, layout))
    mask = (row < end)[:, None] & (column < WIDTH)[None, :]
    gl.store(ptr + row.to(gl.int64)[:, None] * stride + column[None, :], x, mask=mask)


@gluon_jit
def swap_columns(x, WIDTH: gl.constexpr):
    """Move column ``8 a + 2 b + c`` of every 32 to ``8 b + 2 a + c``, and back: a and b are from 0 to 3, c is 0 or 1.

    A thread has the columns ``8 a + 2 b`` and ``8 a + 2 b + 1`` of a product for all a, and one b.
    """
    x = x.reshape([64, WIDTH // 32, 4, 4, 2])
    return x.permute([0, 1, 3, 2, 4]).reshape([64, WIDTH])
