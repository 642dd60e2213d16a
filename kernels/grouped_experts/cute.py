"""The two products of an expert layer for many rows, in the CuTe DSL of CUTLASS, for Hopper.

A persistent grid walks tiles of 128 rows by 256 columns. One warpgroup brings operands into a ring in shared memory,
two multiply (wgmma), each 64 rows of a tile. The gated product picks its rows by token as it loads them (cp.async; the
copy engine can't gather on this card) and multiplies 128 gate columns and their 128 up columns in one tile, so that a
thread holds both numbers of silu(gate) * up, and only half of the columns leave. The other one loads rows as they lie.
Two programs of a cluster take neighbouring rows and share the loads of weights, where those are of one expert. A tile
leaves while the next one multiplies: until then a thread keeps its sums as bf16, as torch's product gives them.
"""

from __future__ import annotations

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float32, Int16, Int32, Int64, const_expr, range_constexpr
from cutlass.cute.nvgpu import OperandMajorMode, cpasync, warp, warpgroup
from cutlass.cute.runtime import make_ptr
from cutlass.utils import SmemAllocator, hopper_helpers

ROWS, COLUMNS, INNER = 128, 256, 64  # of a tile; 64 bf16 are the 128 bytes that the widest swizzle spans
HALF = COLUMNS // 2
STAGES = 4  # of the ring, 192 KB
PART, PLACES = 64, 2  # columns of a result that leave together, and places for them per 64 rows: 32 KB
EARLY = 4  # steps of a tile in which the one before leaves, a share in each
LOADERS = 128  # threads of the warpgroup that loads
CLUSTER = 2
LOG2_E = 1.4426950408889634


class GroupedProduct:
    """out [R, N] = rows @ weights [E, N or 2 N, K] of the expert of each 128 rows; bf16, sums in float32.

    gated: weights [E, 2 N, K], rows x [T, K] by `tokens`, and out is silu(gate) * up. Else rows are [R, K].
    """

    def __init__(self, size_in: int, size_out: int, num_experts: int, gated: bool) -> None:
        self.size_in, self.size_out, self.num_experts, self.gated = size_in, size_out, num_experts, gated
        self.parts = (HALF if gated else COLUMNS) // PART  # that leave of a tile
        self.shares = EARLY // self.parts  # of a part, one in each step
        self.column_tiles = size_out // (PART * self.parts)
        self.steps = size_in // INNER

    @cute.jit
    def __call__(
        self, x: cute.Pointer, weights: cute.Pointer, out: cute.Pointer, tokens: cute.Pointer, owner: cute.Pointer,
        num_blocks: cute.Pointer, rows_in: Int32, rows_out: Int32, programs: Int32, stream: cuda.CUstream,
    ) -> None:  # fmt: skip
        """tokens int32 [R], owner int32 [R / 128] and num_blocks int32 [1] as lay_out makes them."""
        k, n = self.size_in, self.size_out
        columns = 2 * n if const_expr(self.gated) else n
        x_MK = cute.make_tensor(x, cute.make_layout((rows_in, k), stride=(k, 1)))
        w_NKE = cute.make_tensor(weights, cute.make_layout((columns, k, self.num_experts), stride=(k, 1, columns * k)))
        out_MN = cute.make_tensor(out, cute.make_layout((rows_out, n), stride=(n, 1)))
        lists = (
            cute.make_tensor(tokens, cute.make_layout((rows_out,))),
            cute.make_tensor(owner, cute.make_layout((rows_out // ROWS,))),
            cute.make_tensor(num_blocks, cute.make_layout((1,))),
        )
        swizzled = warpgroup.make_smem_layout_atom(warpgroup.SmemLayoutAtomKind.K_SW128, BFloat16)
        a_layout, b_layout, half_layout, c_layout = layouts = [
            cute.tile_to_shape(swizzled, shape, order=(0, 1, 2))
            for shape in (
                (ROWS, INNER, STAGES), (COLUMNS, INNER, STAGES), (HALF, INNER, 2 * STAGES),
                (ROWS // 2, PART, 2 * PLACES),
            )
        ]  # fmt: skip
        one, load = (None, None, 0), cpasync.CopyBulkTensorTileG2SOp()
        shared, store = cpasync.CopyBulkTensorTileG2SMulticastOp(), cpasync.CopyBulkTensorTileS2GOp()
        a_atom, a_tma = cpasync.make_tiled_tma_atom(load, x_MK, cute.slice_(a_layout, one), (ROWS, INNER))
        b_atom, b_tma = cpasync.make_tiled_tma_atom(shared, w_NKE, cute.slice_(half_layout, one), (HALF, INNER))
        c_atom, c_tma = cpasync.make_tiled_tma_atom(store, out_MN, cute.slice_(c_layout, one), (ROWS // 2, PART))
        zeroing, adding, narrow = [
            hopper_helpers.make_trivial_tiled_mma(
                BFloat16, BFloat16, OperandMajorMode.K, OperandMajorMode.K, Float32, (groups, 1, 1), (64, width)
            )
            for groups, width in ((2, COLUMNS), (2, COLUMNS), (1, PART))
        ]

        @cute.struct
        class Storage:
            full: cute.struct.MemRange[Int64, STAGES]
            empty: cute.struct.MemRange[Int64, STAGES]
            a: cute.struct.Align[cute.struct.MemRange[BFloat16, cute.cosize(a_layout)], 1024]
            b: cute.struct.Align[cute.struct.MemRange[BFloat16, cute.cosize(b_layout)], 1024]
            c: cute.struct.Align[cute.struct.MemRange[BFloat16, cute.cosize(c_layout)], 1024]

        self.storage = Storage
        self.kernel(
            x_MK, *lists, a_atom, a_tma, b_atom, b_tma, c_atom, c_tma, zeroing, adding, narrow, *layouts
        ).launch(
            grid=(programs, 1, 1), block=(LOADERS + 256, 1, 1), cluster=(CLUSTER, 1, 1), min_blocks_per_mp=1,
            stream=stream,
        )  # fmt: skip

    @cute.kernel
    def kernel(
        self, x_MK: cute.Tensor, tokens_M: cute.Tensor, owner_B: cute.Tensor, num_blocks: cute.Tensor,
        a_atom: cute.CopyAtom, a_tma: cute.Tensor, b_atom: cute.CopyAtom, b_tma: cute.Tensor, c_atom: cute.CopyAtom,
        c_tma: cute.Tensor, zeroing: cute.TiledMma, adding: cute.TiledMma, narrow: cute.TiledMma,
        a_layout: cute.ComposedLayout, b_layout: cute.ComposedLayout, half_layout: cute.ComposedLayout,
        c_layout: cute.ComposedLayout,
    ) -> None:  # fmt: skip
        thread, _, _ = cute.arch.thread_idx()
        program, _, _ = cute.arch.block_idx()
        programs, _, _ = cute.arch.grid_dim()
        warp_index = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        group = cute.arch.make_warp_uniform(thread // 128)
        rank = program % CLUSTER

        storage = SmemAllocator().allocate(self.storage)
        full, empty = storage.full.data_ptr(), storage.empty.data_ptr()
        sA = storage.a.get_tensor(a_layout.outer, swizzle=a_layout.inner)
        sB = storage.b.get_tensor(b_layout.outer, swizzle=b_layout.inner)
        sHalf = storage.b.get_tensor(half_layout.outer, swizzle=half_layout.inner)
        sC = storage.c.get_tensor(c_layout.outer, swizzle=c_layout.inner)
        if warp_index == 0:
            with cute.arch.elect_one():
                for stage in range_constexpr(STAGES):
                    cute.arch.mbarrier_init(full + stage, 1 + LOADERS if self.gated else 1)
                    cute.arch.mbarrier_init(empty + stage, 8 * CLUSTER)  # a warp that multiplies arrives once at each
            cute.arch.mbarrier_init_fence()
        cute.arch.sync_threads()
        cute.arch.cluster_arrive()
        cute.arch.cluster_wait()

        def partition(atom, tensor, tile, shared):
            """Tiles in shared memory and in the card's, as the copy engine takes them."""
            tiles = cute.local_tile(tensor, tile, (None,) * cute.rank(tensor))
            return cpasync.tma_partition(
                atom, 0, cute.make_layout(1), cute.group_modes(shared, 0, 2), cute.group_modes(tiles, 0, 2)
            )

        tAs, tAg = partition(a_atom, a_tma, (ROWS, INNER), sA)
        tBs, tBg = partition(b_atom, b_tma, (HALF, INNER), sHalf)
        tCs, tCg = partition(c_atom, c_tma, (ROWS // 2, PART), sC)
        num_tiles = (num_blocks[0] + CLUSTER - 1) // CLUSTER * self.column_tiles
        first, stride = program // CLUSTER, programs // CLUSTER

        if group == 0:
            cute.arch.setmaxregister_decrease(56)
            # 16 bytes are a piece, 8 of them a row; piece p of row r lies at piece p ^ (r % 8) of the row.
            piece, row = thread % 8, thread // 8
            to = storage.a.data_ptr().toint() + (row * INNER * 2 + (piece ^ (row % 8)) * 16)
            gather = cute.make_copy_atom(
                cpasync.CopyG2SOp(cache_mode=cpasync.LoadCacheMode.GLOBAL), BFloat16, num_bits_per_copy=128
            )
            stage, phase = Int32(0), Int32(1)
            for tile in cutlass.range(first, num_tiles, stride, unroll=1):
                block, column = tile // self.column_tiles * CLUSTER + rank, tile % self.column_tiles
                expert = owner_B[block]
                alike = expert == owner_B[block ^ 1]
                if const_expr(self.gated):
                    n_first, n_second = column, column + self.size_out // HALF
                else:
                    n_first, n_second = 2 * column, 2 * column + 1
                sources = []
                if const_expr(self.gated):
                    for i in range_constexpr(ROWS // 16):
                        token = Int64(tokens_M[block * ROWS + row + 16 * i])
                        sources.append(x_MK.iterator.toint() + token * (2 * self.size_in) + piece * 16)
                for k in cutlass.range(self.steps, unroll=1):
                    if const_expr(self.gated) or warp_index == 0:
                        cute.arch.mbarrier_wait(empty + stage, phase)
                    if warp_index == 0:
                        with cute.arch.elect_one():
                            num_rows = COLUMNS if const_expr(self.gated) else COLUMNS + ROWS
                            cute.arch.mbarrier_arrive_and_expect_tx(full + stage, num_rows * INNER * 2)
                        if alike:  # this program brings half for both
                            cute.copy(
                                b_atom, tBg[None, n_first + rank * (n_second - n_first), k, expert],
                                tBs[None, 2 * stage + rank], tma_bar_ptr=full + stage, mcast_mask=Int16(3),
                            )  # fmt: skip
                        else:
                            for side in range_constexpr(2):
                                cute.copy(
                                    b_atom, tBg[None, n_second if side else n_first, k, expert],
                                    tBs[None, 2 * stage + side], tma_bar_ptr=full + stage, mcast_mask=Int16(1 + rank),
                                )  # fmt: skip
                        if const_expr(not self.gated):
                            cute.copy(a_atom, tAg[None, block, k], tAs[None, stage], tma_bar_ptr=full + stage)
                    if const_expr(self.gated):
                        for i in range_constexpr(ROWS // 16):
                            cute.copy(
                                gather, _eight(sources[i] + k * (2 * INNER), cute.AddressSpace.gmem),
                                _eight(to + (stage * (2 * ROWS * INNER) + i * (32 * INNER)), cute.AddressSpace.smem),
                            )  # fmt: skip
                        cute.arch.cp_async_mbarrier_arrive_noinc(full + stage)
                    stage += 1
                    if stage == STAGES:
                        stage = Int32(0)
                        phase ^= 1
        else:
            cute.arch.setmaxregister_increase(224)
            half, lane = group - 1, thread % 32
            rows_of_group = adding.get_slice(half * 128)
            operands = (
                adding.make_fragment_A(rows_of_group.partition_A(sA)),
                adding.make_fragment_B(rows_of_group.partition_B(sB)),
            )
            sums = cute.make_rmem_tensor(adding.partition_shape_C((ROWS, COLUMNS)), Float32)
            kept = cute.make_rmem_tensor((COLUMNS // 4,), Int32)  # of the tile before, two bf16 a word
            kept.fill(0)
            stores = cute.make_tiled_copy_C(cute.make_copy_atom(warp.StMatrix8x8x16bOp(False, 4), BFloat16), narrow)
            result = cute.make_rmem_tensor(narrow.partition_shape_C((ROWS // 2, PART)), BFloat16)
            ways = stores, stores.retile(result), stores.get_slice(thread % 128).partition_D(sC)
            adding.set(warpgroup.Field.ACCUMULATE, True)
            zeroing.set(warpgroup.Field.ACCUMULATE, False)
            stage, phase, done = Int32(0), Int32(0), Int32(0)
            block_before, column_before = Int32(0), Int32(0)
            for tile in cutlass.range(first, num_tiles, stride, unroll=1):
                for k in range_constexpr(EARLY):
                    self.multiply(adding if k else zeroing, adding, sums, operands, full, stage, phase)
                    self.leave(k, kept, result, ways, half, warp_index)
                    self.store(
                        k, c_atom, tCs, tCg, half, block_before, column_before, warp_index % 4 == 0 and tile > first
                    )
                    if const_expr(k > 0):
                        warpgroup.wait_group(1)
                        self.release(empty, done, lane)
                    done = stage
                    stage += 1
                    if stage == STAGES:
                        stage = Int32(0)
                        phase ^= 1
                for _ in cutlass.range(EARLY, self.steps, unroll=1):
                    self.multiply(adding, adding, sums, operands, full, stage, phase)
                    warpgroup.wait_group(1)
                    self.release(empty, done, lane)
                    done = stage
                    stage += 1
                    if stage == STAGES:
                        stage = Int32(0)
                        phase ^= 1
                warpgroup.wait_group(0)
                self.release(empty, done, lane)
                flat = cute.make_tensor(sums.iterator, cute.make_layout((COLUMNS // 2,)))
                kept.store(flat.load().to(BFloat16).bitcast(Int32))
                block_before, column_before = tile // self.column_tiles * CLUSTER + rank, tile % self.column_tiles
            for k in range_constexpr(EARLY):
                self.leave(k, kept, result, ways, half, warp_index)
                self.store(
                    k, c_atom, tCs, tCg, half, block_before, column_before, warp_index % 4 == 0 and first < num_tiles
                )
            if warp_index % 4 == 0:
                cute.arch.cp_async_bulk_wait_group(0)
        cute.arch.cluster_arrive()  # the other program may still write here
        cute.arch.cluster_wait()

    @cute.jit
    def multiply(self, first, adding, sums, operands, full, stage, phase):
        """Starts the products of a step once its operands are there; `first` is the first of them."""
        cute.arch.mbarrier_wait(full + stage, phase)
        if const_expr(self.gated):  # rows were written by threads, and the tensor cores read them past those
            cute.arch.fence_view_async_shared()
        warpgroup.fence()
        for i in range_constexpr(INNER // 16):
            a, b = (operand[None, None, i, stage] for operand in operands)
            cute.gemm(adding if i else first, sums, a, b, sums)
        warpgroup.commit_group()

    @cute.jit
    def release(self, empty, stage, lane):
        """Says that this warp has read a stage, to both programs, as both write there."""
        if lane < CLUSTER:
            cute.arch.mbarrier_arrive(empty + stage, lane)

    @cute.jit
    def leave(self, k, kept, result, ways, half, warp_index):
        """What a thread does in step k for the tile before: its share of a part goes to shared memory."""
        part, share = k // self.shares, k % self.shares
        if const_expr(share == 0):
            if warp_index % 4 == 0:  # the copy that last read this place is through
                cute.arch.cp_async_bulk_wait_group(PLACES - 1, read=True)
            cute.arch.barrier(barrier_id=1 + half, number_of_threads=128)
        numbers = cute.make_tensor(result.iterator, cute.make_layout((PART // 2,)))
        words = cute.recast_tensor(numbers, Int32)
        num_words = PART // 4 // self.shares
        for i in range_constexpr(share * num_words, (share + 1) * num_words, 2):
            at = part * (PART // 4) + i
            if const_expr(self.gated):
                gates, ups = _two(kept[at]) + _two(kept[at + 1]), _two(kept[32 + at]) + _two(kept[33 + at])
                sigmoids = _sigmoids(gates)
                for j in range_constexpr(4):
                    numbers[2 * i + j] = (gates[j] * sigmoids[j] * ups[j]).to(BFloat16)
            else:
                words[i], words[i + 1] = kept[at], kept[at + 1]
        stores, source, to = ways
        for i in range_constexpr(share * num_words // 4, (share + 1) * num_words // 4):
            cute.copy(stores, source[(None, i), 0, 0], to[(None, i), 0, 0, half * PLACES + part % PLACES])

    @cute.jit
    def store(self, k, atom, places, tiles, half, block, column, mine):
        """Where step k completed a part of this half's rows, it goes to the card's memory; mine: by this warp."""
        if const_expr(k % self.shares == self.shares - 1):
            part = k // self.shares
            cute.arch.fence_view_async_shared()
            cute.arch.barrier(barrier_id=1 + half, number_of_threads=128)
            if mine:
                place = half * PLACES + part % PLACES
                cute.copy(atom, places[None, place], tiles[None, 2 * block + half, column * self.parts + part])
                cute.arch.cp_async_bulk_commit_group()


@cute.jit
def _eight(address, space):
    """The eight bf16 at an address, which move at once."""
    return cute.make_tensor(cute.make_ptr(BFloat16, address, space, assumed_align=16), cute.make_layout((8,)))


@cute.jit
def _two(word):
    """The float32 of a pair of bf16 in one word."""
    return [(word << 16).bitcast(Float32), (word & -65536).bitcast(Float32)]


@cute.jit
def _sigmoids(gates):
    """1 / (1 + exp(-g)) of four numbers by one reciprocal, as the unit for those and for exp is what the gate waits on.

    exp(-g) is cut off at 2^30: the product of four stays finite, and g / 2^30 is nothing in bf16.
    """
    a, b, c, d = [1.0 + cute.math.exp2(cute.arch.fmin(g * -LOG2_E, 30.0), fastmath=True) for g in gates]
    ab, cd = a * b, c * d
    inverse = cute.arch.rcp_approx(ab * cd)
    of_ab, of_cd = inverse * cd, inverse * ab
    return of_ab * b, of_ab * a, of_cd * d, of_cd * c


def compile_product(size_in: int, size_out: int, num_experts: int, gated: bool) -> object:
    """One of the two products for these sizes; needs no card."""
    product = GroupedProduct(size_in, size_out, num_experts, gated)
    return cute.compile(product, *_pointers((16,) * 6), Int32(1), Int32(1), Int32(1), cuda.CUstream(0))


def launcher(compiled):
    """The compiled product as a function of addresses, sizes and a stream."""

    def launch(addresses, sizes, stream):
        compiled(*_pointers(addresses), *sizes, cuda.CUstream(stream))

    return launch


def _pointers(addresses):
    kinds = (BFloat16, BFloat16, BFloat16, Int32, Int32, Int32)
    return [
        make_ptr(kind, address, cute.AddressSpace.gmem, assumed_align=16 if kind is BFloat16 else 4)
        for kind, address in zip(kinds, addresses, strict=True)
    ]
